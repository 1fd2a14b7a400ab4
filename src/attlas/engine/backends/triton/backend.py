"""Triton kernels as a backend: statistics, outputs and cells of dot products on a GPU.

Values that are NaN or infinite are summed as torch's kernels do it in an output: they may reach a row of the same block
whose mask hides them. Statistics of numbers that are not finite are left to tiles.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from attlas.engine import outputs
from attlas.engine.backend import Backend, Form, Gradients, Request
from attlas.engine.backends.triton import backward, launch, pairs, slopes, trusted
from attlas.engine.backends.triton.launch import MOST_LARGEST
from attlas.engine.backends.triton.operands import operands_of, unsupported
from attlas.engine.backends.triton.reading import found_by, with_row
from attlas.engine.costs import Operation
from attlas.engine.gradient import CellGradient
from attlas.engine.online import exact, finite_shift
from attlas.engine.statistic import Statistic
from attlas.foundation.checks import all_finite
from attlas.foundation.compat import tracing
from attlas.foundation.tiles import Tile


class Triton(Backend):
    """Kernels of attlas for GPUs: whatever statistics are made from, and outputs and cells, of dot products."""

    name = row = "triton"
    computes = frozenset({"output", "backward", "statistics", "cells"})
    reads = frozenset(outputs.OUTPUTS) - {"coverage"}
    measured = False

    def unsupported(self, request: Request, operation: Operation) -> str | None:
        if operation == "backward" and request.dot is not None:
            return "its gradients are those of scores that are no dot product"
        return _why_unsupported(request) or trusted.known_fault(request)

    def forward(self, request: Request, v: Tensor) -> tuple[Tensor, Tensor] | None:
        if not operands_of(request).takes(v):
            return None
        if not trusted.is_right(request, {}, v):
            return None
        found = launch.online(operands_of(request), (), v, 0)
        return found.results["out"].to(v.dtype), with_row(operands_of(request), found.lse)

    def backward(
        self, request: Request, lse: Tensor, gradient: CellGradient, out: Tensor | None = None
    ) -> Gradients | None:
        known = exact(lse, math.inf)
        if known is None or not gradient.is_closed or not trusted.is_right(request, {"gradient": True}):
            return None
        operands, parameters = operands_of(request), request.parameters()
        score: Any = pairs.unscaled(request.problem.score)[0]
        q, k = request.tokens
        if operands.pairs is None or not isinstance(q, Tensor) or not isinstance(k, Tensor):
            return None
        found = slopes.gradients(operands, known, gradient, request.plan.budget(request.device.type))
        size = q.shape[-1]
        d_parameters: list[Tensor | None]
        if operands.kind == pairs.ADDITIVE:
            # All parameters but the weights of the hidden units act through the projected tokens.
            factor = pairs.unscaled(request.problem.score)[1]
            d_parameters = [found.weights[:size] * factor if p is score.w_v else None for p in parameters]
        else:
            with torch.enable_grad():  # the bandwidth, or what it is made from
                d_parameters = slopes.of_scale(pairs.scale_of(score, q), found.weights, parameters)
        return Gradients([found.q[..., :size]], [found.k[..., :size]], d_parameters, found.pooled, found.delta)

    def statistics(
        self, request: Request, statistics: Sequence[Statistic], lse: Tensor | None
    ) -> tuple[list[Any], Tensor | None] | None:
        # `s.k` is the number of largest weights of each row that a statistic wants.
        few = [s for s in statistics if s.k <= MOST_LARGEST]
        found = super().statistics(request, few, lse) if few else None
        return None if found is None else (_results_in_order(found[0], statistics), found[1])

    def output_and_statistics(
        self, request: Request, v: Tensor, statistics: Sequence[Statistic]
    ) -> tuple[Tensor, Tensor, list[Any]] | None:
        # As in `statistics`: those of too many largest weights are MISSING.
        few = [s for s in statistics if s.k <= MOST_LARGEST]
        found = super().output_and_statistics(request, v, few) if few else None
        return None if found is None else (*found[:2], _results_in_order(found[2], statistics))

    def read(
        self, request: Request, wanted: Mapping[str, Any], v: Tensor | None, lse: Tensor | None
    ) -> dict[str, Tensor] | None:
        # Numbers of the matrix from as few passes as they need; None where the kernels cannot take them.
        problem = request.problem
        operands = operands_of(request)
        if v is not None and not operands.takes(v):
            return None
        if operands.kind >= pairs.BOXCAR and wanted.keys() & {"mean", "variance"}:
            return None  # of logits that are -inf
        if lse is not None and not problem.partial and (lse := exact(lse, math.inf)) is None:
            return None
        if not trusted.is_right(request, wanted, v, lse_known=lse is not None):
            return None
        # The weights of a row then sum to 1, or to 0 where it sees no key: nothing has to be summed.
        complete = problem.sink is None and not problem.partial
        found = found_by(operands, wanted, v, lse, request.plan.budget(problem.device.type), complete=complete)
        if found is None:
            return None
        numbers = [t for name, t in found.items() if name not in ("lse", "max_logit", "top_keys")]
        return found if all_finite(operands.q, operands.k, finite_shift(found["lse"]), *numbers) else None

    def log_sum_exp(self, request: Request) -> Tensor | None:
        # None where the kernels were found to be wrong on this device, or some number is not finite.
        if not trusted.is_right(request, {"lse": True}):
            return None
        operands = operands_of(request)
        lse = with_row(operands, launch.online(operands, (), None, 0).lse)
        return lse if all_finite(operands.q, operands.k, finite_shift(lse)) else None

    def cells(self, request: Request, at: Tile, lse: Tensor | None, form: Form) -> Tensor | None:
        """Compute some cells of all batches and heads; None for a choice of these."""
        problem = request.problem
        if len(at.batches) != problem.shape[0] or len(at.heads) != problem.shape[1]:
            return None
        if not trusted.is_right(request, {form: True}):
            return None
        operands = operands_of(request)
        rows = at.rows if at.row_index is None else at.row_index
        columns = at.columns if at.column_index is None else at.column_index
        if form == "logits":
            return launch.cells(operands, rows, columns, None)
        if lse is None and (lse := self.log_sum_exp(request)) is None:
            return None
        return launch.cells(operands, rows, columns, launch.without_row(operands, lse), log=form == "log weights")


class DotGradients(Backend):
    """Gradients of dot products: of statistics, and of products beside them."""

    name = row = "triton"
    computes = frozenset({"backward"})
    takes_fused = True
    measured = False

    def unsupported(self, request: Request, operation: Operation) -> str | None:
        if (reason := _why_unsupported(request)) is not None:
            return reason
        if operation != "backward" or request.fused is None:
            return "its gradients are those of the tokens of a dot product"
        if request.parameters():
            return "it has no gradient of what places add"
        return "a part of a matrix has no rows of its own" if request.problem.partial else None

    def prepare(self, request: Request) -> Request:
        return request.as_fused()

    def backward(
        self, request: Request, lse: Tensor, gradient: CellGradient, out: Tensor | None = None
    ) -> Gradients | None:
        operands, known = operands_of(request), exact(lse, math.inf)
        if (
            known is None
            or not backward.takes(operands, gradient)
            or not trusted.has_right_gradients(request, gradient)
        ):
            return None
        found = backward.gradients(operands, launch.without_row(operands, known), gradient)
        return Gradients([found.q], [found.k], [], found.pooled, found.delta)


def _why_unsupported(request: Request) -> str | None:
    """Return why no kernel reads a request, as a part of a sentence; None where one does."""
    if (reason := not_available()) is not None:
        return reason
    if request.dropout is not None:
        return "dropout has to be the same when it is recomputed"
    if tracing():
        return "a program of torch is being traced"
    return unsupported(request)


def _results_in_order(results: Sequence[Any], statistics: Sequence[Statistic]) -> list[Any]:
    """Return the results in the order of `statistics`, MISSING for those of too many largest weights."""
    given = iter(results)
    return [next(given) if s.k <= MOST_LARGEST else outputs.MISSING for s in statistics]


@cache
def _is_installed() -> bool:
    """Return whether triton is installed, without importing it."""
    return find_spec("triton") is not None


def not_available() -> str | None:
    """Return why no kernel can run here, as a part of a sentence; None where one can."""
    if not _is_installed():
        return "not available: triton is not installed"
    return None if torch.cuda.is_available() else "not available: torch sees no GPU"
