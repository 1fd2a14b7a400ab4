"""The compiled kernels of attlas as backends: dot products, and scores of pairs that are none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attlas.engine.backend import Backend, Gradients, Request
from attlas.engine.backends.native import bias, decode, dot, library
from attlas.engine.backends.native.additive import AdditiveKernels
from attlas.engine.backends.native.distance import KERNELS, DistanceKernels
from attlas.engine.backends.native.pairwise import PairwiseFamily
from attlas.engine.costs import Operation, is_faster
from attlas.engine.gradient import CellGradient
from attlas.engine.held import tensors_of
from attlas.engine.online import LARGEST, exact, exceeds, is_exact
from attlas.engine.outputs import NEEDS_LSE
from attlas.engine.problem import Problem
from attlas.foundation.checks import all_finite
from attlas.foundation.compat import tracing
from attlas.scores.additive import Additive
from attlas.scores.base import Score
from attlas.scores.kernel import Gaussian

# What a gradient may have beside its product, of each row.
_ROW_TERMS = ("log", "square", "mean", "linear", "centre")
# The family of kernels of each score that is no dot product.
_FAMILY_OF_SCORE: dict[type, type[PairwiseFamily]] = {
    Additive: AdditiveKernels,
    **dict.fromkeys(KERNELS, DistanceKernels),
}


def _family_of_kernels(score: Score) -> type[PairwiseFamily] | None:
    """Return the family of kernels of a score, or of a number times it where that is a score of the same kind."""
    inner, factor = bias.unscaled(score)
    return _FAMILY_OF_SCORE.get(type(inner)) if factor == 1.0 or type(inner) is Additive else None


class FusedKernels(Backend):
    """Kernels of dot products: outputs, gradients and statistics, with any mask, a soft cap and a sink."""

    name = "native"
    row = "dot products"
    computes = frozenset({"output", "backward", "statistics"})
    takes_fused = True
    kernels = staticmethod(library.current)

    def unsupported(self, request: Request, operation: Operation) -> str | None:
        # The reason why the kernels of dot products do not compute this request; None where they do.
        problem, product, kernels = request.problem, request.dot, library.current()
        if kernels.why_not is not None:
            return kernels.why_not
        if product is None:
            return "the score is not a dot product"
        if 0 in (*problem.shape, product.q.shape[-1]):
            return "there is nothing to compute"
        if product.q.dtype not in decode.TYPES or (product.cap and product.q.dtype is torch.float64):
            return f"there is no kernel for {str(product.q.dtype).removeprefix('torch.')} with this score"
        if problem.sink is not None and product.row is not None:
            return "the sink needs the constant of each row"
        if product.bias is not None and (reason := bias.unsupported(problem)) is not None:
            return reason
        return _why_unsupported(request, operation, fused=True)

    def prepare(self, request: Request) -> Request:
        return request.as_fused()

    def has_fast_path(self, problem: Problem) -> bool:
        return is_faster(problem, library.current().instruction_set)

    def fast_path(self, problem: Problem, v: Tensor) -> tuple[Tensor, Tensor] | None:
        return decode.fast_path(problem, v)

    def forward(self, request: Request, v: Tensor) -> tuple[Tensor, Tensor] | None:
        # None where no kernel has the result, or a log-sum-exp is too large for it to be precise.
        product = request.product
        rounded = v.dtype is product.q.dtype
        found = dot.compute(request.problem, product, {"lse": True}, v=v, rounded=rounded)
        if found is None or exceeds(found["lse"], decode.LARGEST_LSE[product.q.dtype]):
            return None
        return found["out"].to(v.dtype), found["lse"]

    def backward(
        self, request: Request, lse: Tensor, gradient: CellGradient, out: Tensor | None = None
    ) -> Gradients | None:
        # None leaves it to the next backend: a log-sum-exp that is rounded or too large, or functions of tiles.
        problem, known = request.problem, exact(lse)
        if known is None or exceeds(known, LARGEST) or not gradient.is_closed:
            return None
        parameters, score = request.parameters(), request.product.bias
        places = bias.PlaceGradients(problem, score) if parameters and score is not None else None
        if gradient.is_product:
            left, right, delta = gradient.product
            found = dot.backward(problem, request.product, right, known, left, delta, places=places)
            result = None if found is None else Gradients([found[0]], [found[1]], [], found[2], delta)
        else:
            result = self._gradients_with_terms(request, known, gradient, places)
        if result is None or places is None:
            return result
        of_score = places.of(parameters)
        return None if of_score is None else result._replace(parameters=of_score)

    def _gradients_with_terms(
        self, request: Request, lse: Tensor, gradient: CellGradient, places: bias.PlaceGradients | None
    ) -> Gradients | None:
        """Return the gradients of a loss of statistics, and of the output if it is in the loss too.

        The equation of all terms is in `CellGradient`; its row term, the same for each weight of a row, enters only
        through the sink.
        """
        problem, product, dtype = request.problem, request.product, request.problem.dtype
        delta = torch.zeros(problem.shape[:3], dtype=dtype) if gradient.delta is None else gradient.delta.to(dtype)
        if gradient.lse is not None:
            delta = delta - gradient.lse.to(dtype)
        row = None  # what is the same in each weight of a row counts only beside the weight of the sink
        if gradient.row is not None and problem.sink is not None:
            row, share = gradient.row, torch.exp(problem.sink.detach().to(lse.dtype).view(1, -1, 1) - lse)
            delta = delta - row * torch.where(lse == -torch.inf, 0.0, share).to(dtype)
        rows = {name: t for name in _ROW_TERMS if (t := getattr(gradient, name)) is not None}
        if rows.keys() & {"log", "square"}:  # the kernel reads both or none
            rows = {"log": torch.zeros_like(delta), "square": torch.zeros_like(delta)} | rows
        # Where there is no product: one 0 for each row and key, expanded from a single number.
        left = delta.new_zeros(1, 1, 1, 1).expand(*delta.shape, 1) if gradient.left is None else gradient.left
        right = product.k.new_zeros(1).expand(*product.k.shape[:3], 1) if gradient.right is None else gradient.right
        found = dot.backward(problem, product, right, lse, left, delta, gradient.column, rows, places)
        if found is None:
            return None
        return Gradients([found[0]], [found[1]], [], found[2], found[3] if row is None else found[3] + row)

    def read(
        self, request: Request, wanted: Mapping[str, Any], v: Tensor | None, lse: Tensor | None
    ) -> dict[str, Tensor] | None:
        product, problem = request.dot, request.problem
        if lse is not None:  # numbers of rows are found without that of torch's kernel in little more time
            leaves = v is None and not (problem.partial or wanted.keys() & NEEDS_LSE)
            leaves = leaves and (not is_exact(lse) or _is_lse_rounded(lse))
            lse = None if leaves else lse if lse.dtype is torch.float64 else exact(lse)
        return None if product is None else dot.read(problem, product, wanted, v, lse)


class PairwiseKernels(Backend):
    """Kernels of scores that are no dot product: distances of few coordinates, and additive scores; with places."""

    name = "native"
    row = "pairs"
    computes = frozenset({"output", "backward", "transposed", "statistics"})
    kernels = staticmethod(library.current)

    def unsupported(self, request: Request, operation: Operation) -> str | None:
        # The reason why no kernel of single pairs computes this request; None where one does.
        problem = bias.without_places(request.problem)
        family = _family_of_kernels(problem.score)
        if family is None:
            return "the score is no kernel of a distance"
        if problem is not request.problem:
            if (reason := bias.unsupported(problem)) is not None:
                return reason
            of_pairs = {id(t) for t in tensors_of(problem.score)}
            if operation == "backward" and any(id(t) not in of_pairs for t in request.parameters()):
                return "it has no gradient of a score of places beside one of pairs"
        return family.unsupported(problem) or _why_unsupported(request, operation, fused=False)

    def prepare(self, request: Request) -> Request:
        # Differences are taken of the tokens themselves.
        problem = request.problem
        return replace(request, tokens=(problem.q, problem.k)) if type(problem.score) is Gaussian else request

    def family(self, request: Request) -> PairwiseFamily | None:
        """Return the calls of the kernels of the score; None where a parameter is NaN or infinite."""
        q, k = (bias.tokens_of(request.problem.score, tokens) for tokens in request.tokens)
        if not isinstance(q, Tensor) or not isinstance(k, Tensor):
            return None
        problem = bias.without_places(request.problem)
        kind = _family_of_kernels(problem.score)
        family = None if kind is None else kind(problem, q, k)
        return family if family is not None and all_finite(family.parameters()) else None

    def forward(self, request: Request, v: Tensor) -> tuple[Tensor, Tensor] | None:
        family = self.family(self.prepare(request))
        found = None if family is None else family.forward(v, {})
        return None if found is None else (found["out"].to(v.dtype), found["lse"])

    def backward(
        self, request: Request, lse: Tensor, gradient: CellGradient, out: Tensor | None = None
    ) -> Gradients | None:
        # None where the kernels are not precise enough, or the gradient is not that of a product.
        family = self.family(request)
        if family is None or exact(lse) is None or exceeds(lse, LARGEST) or not gradient.is_product:
            return None
        return family.backward(request.parameters(), lse, *gradient.product)

    def transposed(self, request: Request, lse: Tensor, x: Tensor) -> Tensor | None:
        family = self.family(request)
        return None if family is None else family.transposed(lse, x)

    def read(
        self, request: Request, wanted: Mapping[str, Any], v: Tensor | None, lse: Tensor | None
    ) -> dict[str, Tensor] | None:
        # One pass for the output and the log-sum-exp where that is not known, one for all else.
        problem, family = request.problem, self.family(self.prepare(request))
        if family is None:
            return None
        lse = lse if lse is None or lse.dtype is torch.float64 else exact(lse)
        found: dict[str, Tensor] = {}
        rest = {name: value for name, value in wanted.items() if name != "lse"}
        # The weights of a row then sum to 1, or to 0 where it sees no key: no pass is needed to know it.
        complete = "mass" in wanted and problem.sink is None and not problem.partial
        if complete:
            del rest["mass"]
        if v is not None or lse is None:
            together = v is None and rest.keys() <= {"entropy", "max_logit"}  # the first pass computes these too
            first = family.forward(v, rest if together else {})
            if first is None:
                return None
            lse = first["lse"] if lse is None else lse
            found, rest = first, {} if together else rest
        if rest:
            others = family.statistics(rest, lse)
            if others is None:
                return None
            found |= others
        if complete:
            found["mass"] = (lse != -torch.inf).to(problem.dtype)
        return found | {"lse": lse}


def _is_lse_rounded(lse: Tensor) -> bool:
    """Return whether a log-sum-exp has no more digits than a float32, as that of torch's kernel."""
    return torch.equal(lse, lse.float().to(lse.dtype))


def _why_unsupported(request: Request, operation: Operation, *, fused: bool) -> str | None:
    """Return why the kernels do not compute an operation, whatever the score; None where they do."""
    if request.dropout is not None:
        return "dropout has to be the same when it is recomputed"
    if operation == "statistics" and tracing():
        return "a program of torch is being traced"
    if fused and operation == "backward" and request.fused is None:
        return "its gradients are those of a dot product and of what places add to it"
    return None
