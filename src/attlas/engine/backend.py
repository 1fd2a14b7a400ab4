"""What a backend is: one way to compute a matrix, with what it cannot compute and what it costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from attlas.engine import outputs
from attlas.engine.costs import Operation
from attlas.engine.dropout import Dropout
from attlas.engine.gradient import CellGradient
from attlas.engine.online import LARGEST, exceeds
from attlas.engine.plan import Plan
from attlas.engine.problem import Problem, tree_flatten, tree_map
from attlas.engine.statistic import Statistic
from attlas.foundation.compat import cached_property
from attlas.foundation.tiles import Tile
from attlas.foundation.trees import rebuilt
from attlas.scores.base import Dot, Score, Tokens
from attlas.scores.dot import ScaledDot, SoftCap

#: What a cell is read as: its weight, its logit, -inf where masked, or the logarithm of its weight.
Form: TypeAlias = Literal["weights", "logits", "log weights"]


class Gradients(NamedTuple):
    """Gradients of a loss.

    Parameters
    ----------
    q, k : list of Tensor
        One gradient per projected tensor.
    parameters : list of Tensor or None
        One per parameter of the score, None where the loss does not use it.
    pooled : Tensor or None
        Gradient of the right factor, ``A.mT @ left``.
    delta : Tensor
        Minus the gradient of the log-sum-exp, per row.
    """

    q: list[Tensor]
    k: list[Tensor]
    parameters: list[Tensor | None]
    pooled: Tensor | None
    delta: Tensor


@dataclass(frozen=True, eq=False)
class Request:
    """What a backend computes: the matrix, with projected tokens, and how.

    Parameters
    ----------
    problem : Problem
        The matrix.
    tokens : tuple of Tokens
        Projected queries and keys, with their graph where autograd records one.
    plan : Plan
        How to compute.
    dropout : Dropout, optional
        Factors of the weights.
    fused : Dot, optional
        The dot product that the score is, where the tokens are its own: see `as_fused`.
    learned : bool
        Whether the score has parameters that get a gradient, in its forward or in the tokens.
    """

    problem: Problem
    tokens: tuple[Tokens, Tokens]
    plan: Plan
    dropout: Dropout | None = None
    fused: Dot | None = None
    learned: bool = False

    @property
    def device(self) -> torch.device:
        """Device of the tokens."""
        return self.problem.device

    @cached_property
    def dot(self) -> Dot | None:
        """The score as a dot product; None where it is none."""
        problem = self.problem
        if self.fused is not None:
            return self.fused
        if self.tokens is vars(problem).get("tokens"):  # those without a graph, of which it is kept for all reads
            return problem.dot
        with problem.recording():
            return problem.score.as_dot(*self.tokens)  # type: ignore[arg-type]  # tokens in the score's own form

    @property
    def product(self) -> Dot:
        """The dot product without the constant of each row, which softmax does not see."""
        dot = self.dot
        if dot is None:
            raise TypeError("the score is no dot product")
        return dot if dot.row is None else replace(dot, row=None)

    def as_fused(self) -> Request:
        """Return the request whose score and tokens are those of the dot product.

        A fused kernel gives gradients in the tokens of the dot product, autograd the rest. The constant of each row is
        left out: softmax does not see it.
        """
        dot = self.dot
        if dot is None or self.fused is not None:
            return self
        score: Score = ScaledDot(dot.scale)
        tokens: tuple[Tokens, Tokens] = dot.q, dot.k
        if dot.cap:
            score = SoftCap(score, dot.cap)
        if dot.bias is not None:
            score, tokens = score + dot.bias, ((dot.q, ()), (dot.k, ()))
        # What the score reads has its part in the tokens, but for a bias, which is evaluated in tiles.
        problem = replace(self.problem, score=score, read=() if dot.bias is None else self.problem.read)
        vars(problem)["tokens"] = tree_map(Tensor.detach, tokens)
        return replace(self, problem=problem, tokens=tokens, fused=replace(dot, row=None))

    def inputs(self) -> list[Tensor]:
        """Return the tensors that want a gradient besides values and sink: tokens, then parameters."""
        return [*tree_flatten(self.tokens), *self.parameters()]

    def parameters(self) -> list[Tensor]:
        """Return the parameters of the score that its forward may use."""
        return self.problem.parameters

    def with_inputs(self, tensors: Sequence[Tensor]) -> Request:
        """Return the same request for other tensors in the place of `inputs`."""
        tokens = rebuilt(self.tokens, list(tensors))
        fused = self.fused and replace(self.fused, q=tree_flatten(tokens[0])[0], k=tree_flatten(tokens[1])[0])
        return replace(self, tokens=tokens, fused=fused)


class Backend(ABC):
    """One way to compute a matrix.

    A computation returns None where the numbers do not allow it, such as NaN in a kernel that cannot sum it: the next
    backend takes it then. The tiled backend takes everything.

    Attributes
    ----------
    name : str
        Its name in `Plan`.
    row : str
        Its row in the table of costs, `attlas.engine.costs.ROWS`.
    computes : frozenset of str
        The operations that it computes of some requests: `unsupported` is asked about no other.
    takes_fused : bool
        Whether it computes requests that `Request.as_fused` has made.
    reads : frozenset of str
        The names of `attlas.engine.outputs` that `read` gives, by default all; ``lse`` is among them.
    kernels : callable, optional
        Returns the compiled kernels on whose `instruction_set` its costs depend.
    measured : bool
        Whether its cost is that of a measurement, by default True.
    """

    name: ClassVar[str]
    row: ClassVar[str]
    computes: ClassVar[frozenset[Operation]]
    takes_fused: ClassVar[bool] = False
    reads: ClassVar[frozenset[str]] = frozenset(outputs.OUTPUTS)
    kernels: ClassVar[Callable[[], Any] | None] = None
    measured: ClassVar[bool] = True

    @abstractmethod
    def unsupported(self, request: Request, operation: Operation) -> str | None:
        """Return in one sentence why an operation of this request is not computed; None where it is."""

    def prepare(self, request: Request) -> Request:
        """Return the request with the tokens that this backend takes, and that its gradients speak of."""
        return request

    def recorded(self, request: Request, v: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """Compute the output with differentiable operations of torch, so that autograd needs no `backward` of ours.

        Returns the output and, if known, the log-sum-exp; None if this backend has no such path.
        """
        return None

    def has_fast_path(self, problem: Problem) -> bool:
        """Tell whether `fast_path` is to be tried, and no other backend's."""
        return False

    def fast_path(self, problem: Problem, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the output and log-sum-exp of a plain scaled dot product; None for all else.

        No request is made for it: at a step that reads one token each microsecond of preparation counts.
        """
        return None

    def forward(self, request: Request, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return ``A @ v``, shape (batch, heads, m, e), and the log-sum-exp, shape (batch, heads, m).

        Where there is no graph, the request need not be one that `prepare` has made.
        """
        raise NotImplementedError

    def backward(
        self, request: Request, lse: Tensor, gradient: CellGradient, out: Tensor | None = None
    ) -> Gradients | None:
        """Return the gradients of a loss by recomputation, from its gradient in each cell.

        Parameters
        ----------
        request : Request
            The matrix.
        lse : Tensor, shape (batch, heads, m)
            Log-sum-exp of each row.
        gradient : CellGradient
            For ``A @ v`` left is the gradient of the output and right is v; for ``A.mT @ x`` left is x and right is the
            gradient of the output. Statistics add to it.
        out : Tensor, optional, shape (batch, heads, m, e)
            The output, where there is nothing but the product ``A @ v``.
        """
        raise NotImplementedError

    def transposed(self, request: Request, lse: Tensor, x: Tensor) -> Tensor | None:
        """Return ``A.mT @ x``, shape (batch, heads, n, e), in the dtype of the sums."""
        raise NotImplementedError

    def statistics(
        self, request: Request, statistics: Sequence[Statistic], lse: Tensor | None
    ) -> tuple[list[Any], Tensor | None] | None:
        """Return a result for each statistic, `MISSING` for one that is not computed, and the log-sum-exp if known.

        By default statistics are made from what `read` gives; one that needs a name that is not in `reads` is missing.
        """
        problem = request.problem
        found = outputs.collect(problem, partial(self.read, request), statistics, lse, self.reads)
        return None if found is None or (not problem.partial and exceeds(found.lse, LARGEST)) else found[:2]

    def output_and_statistics(
        self, request: Request, v: Tensor, statistics: Sequence[Statistic]
    ) -> tuple[Tensor, Tensor, list[Any]] | None:
        """Return ``A @ v``, log-sum-exp and `statistics` from one pass; None where that gives no statistic."""
        if "out" not in self.reads:
            return None
        found = outputs.collect(request.problem, partial(self.read, request), statistics, None, self.reads, v)
        if found is None or found.out is None or exceeds(found.lse, LARGEST):
            return None
        return found.out.to(v.dtype), found.lse, found.results

    def cells(self, request: Request, at: Tile, lse: Tensor | None, form: Form) -> Tensor | None:
        """Return some cells of the matrix, shape ``at.shape``, in the dtype of the sums.

        Parameters
        ----------
        request : Request
            The matrix.
        at : Tile
            Which cells: of any batches and heads, of rows and columns in a range or in a list.
        lse : Tensor, optional, shape (batch, heads, m)
            Log-sum-exp of each row, if it is known; logits need none.
        form : {"weights", "logits", "log weights"}
            What they are read as.
        """
        raise NotImplementedError

    def log_sum_exp(self, request: Request) -> Tensor | None:
        """Return the log-sum-exp of each row, shape (batch, heads, m); by default from `read`."""
        found = self.read(request, {"lse": True}, None, None)
        return None if found is None else found["lse"]

    def read(
        self, request: Request, wanted: Mapping[str, Any], v: Tensor | None, lse: Tensor | None
    ) -> dict[str, Tensor] | None:
        """Return numbers of the matrix from one pass, from which statistics are made; None where one is not finite.

        Parameters
        ----------
        request : Request
            The matrix.
        wanted : mapping
            Names in `reads` and what goes with them, as `attlas.engine.outputs` lists them, but for ``out``.
        v : Tensor, optional, shape (batch, value heads, n, e)
            Values; then ``out`` is found too.
        lse : Tensor, optional, shape (batch, heads, m)
            Log-sum-exp of each row, if it is known.
        """
        raise NotImplementedError
