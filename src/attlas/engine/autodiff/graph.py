"""What autograd itself records: the definition, statistics of it, and steps of a statistic on one tile at a time."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from attlas.engine import online
from attlas.engine.backends import reference, tiled
from attlas.engine.plan import Plan
from attlas.engine.problem import Problem
from attlas.engine.statistic import Part, Statistic, Workspace, lowest
from attlas.engine.tiling import ColumnBlock, row_blocks
from attlas.errors import BackendError, TooLargeError
from attlas.foundation.compat import cached_property, transforming
from attlas.foundation.tiles import Tile
from attlas.foundation.trees import tensors_in
from attlas.masks.base import BlockState
from attlas.scores.base import Score, Tokens
from attlas.scores.position import TensorBias

DENSE_LIMIT = 2**30  # bytes that are written out without being asked twice


def dense(
    problem: Problem, rows: Tensor | range | None = None, tokens: tuple[Tokens, Tokens] | None = None
) -> reference.Dense:
    """Return some rows, or all, with their graph.

    Raises
    ------
    TooLargeError
        If they take more than 1 GiB.
    """
    batch, heads, m, n = problem.shape
    size = batch * heads * (m if rows is None else len(rows)) * n * problem.dtype.itemsize
    if size > DENSE_LIMIT:
        rule = "with a gradient it is computed from whole rows, and they would be larger than the limit."
        given = {"A (batch, heads, m, n)": f"{tuple(problem.shape)} {str(problem.dtype).removeprefix('torch.')}"}
        found = f"{size:,} bytes, the limit is {DENSE_LIMIT:,}"
        fix = "read A.detach(), or under torch.no_grad(), for numbers without a gradient"
        raise TooLargeError(rule, found, f"{fix}; A @ v carries one at any length.", arguments=given)
    return reference.dense(problem, rows, tokens)


def collect(
    problem: Problem, statistics: Sequence[Statistic], tokens: tuple[Tokens, Tokens] | None = None
) -> list[Any]:
    """Return statistics of the whole matrix with their graph; refused as in `dense`."""
    logits = dense(problem, tokens=tokens).logits
    return _statistics_of_part(_part_of_rows(problem, logits, range(problem.shape[2])), statistics)


def collect_of(problem: Problem, weights: Tensor, statistics: Sequence[Statistic]) -> list[Any]:
    """Return statistics of a dense tensor of weights, shape (batch, heads, m, n), with their graph."""
    weights = weights.to(problem.dtype)
    logits = torch.where(weights > 0, torch.where(weights > 0, weights, 1.0).log(), -math.inf)
    zeros = online.empty_lse(problem.shape[:3], problem.device).zero_()
    part = _part_of_rows(problem, logits, range(problem.shape[2]), lambda: zeros)
    vars(part)["_exp_shifted"] = weights  # they have a gradient also where they are 0, and their logarithm has none
    return _statistics_of_part(part, statistics)


def _part_of_rows(problem: Problem, logits: Tensor, rows: range, row_lse: Callable[[], Tensor] | None = None) -> Part:
    """Return the part that is some whole rows with these logits; `row_lse` gives their log-sum-exp if it is known.

    A `Part` is a tile with its logits, mask and log-sum-exp, as a step of a statistic gets it.
    """
    batch, heads, _, n = problem.shape
    given = problem if row_lse is not None else replace(problem, score=TensorBias(logits))
    at = given.tile(range(batch), range(heads), rows, range(n))
    state = BlockState.FULL if given.mask is None else BlockState.PARTIAL
    columns = ColumnBlock(at.columns, ((at.columns, state),))
    return _RecordedPart(given, at, columns, lambda: logits, row_lse, Workspace(given.dtype, given.device))


def _statistics_of_part(part: Part, statistics: Sequence[Statistic]) -> list[Any]:
    """Return the statistics of a matrix that is one part: start, one step, finish.

    A carry is the running state of a statistic, from `start` to `finish`.
    """
    with _transform_errors_explained():
        carries = [statistic.start(part.problem) for statistic in statistics]
        if 0 not in part.problem.shape:
            carries = [s.step(carry, part, part.at) for s, carry in zip(statistics, carries, strict=True)]
        return [s.finish(carry) for s, carry in zip(statistics, carries, strict=True)]


def traced_product(problem: Problem, v: Tensor, plan: Plan) -> Tensor | None:
    """Return ``A @ v`` in a program that torch compiles, by FlexAttention; None where that cannot.

    The matrix is not stored.
    """
    from attlas.engine.backends.flex import traced

    return traced.product(problem, v, plan)


def traced_log_sum_exp(problem: Problem, plan: Plan) -> Tensor | None:
    """Return the log-sum-exp of each row with its graph, as `traced_product` computes it; None without."""
    from attlas.engine.backends.flex import traced

    return traced.log_sum_exp(problem, plan)


class Replay:
    """The gradient of a statistic that has no formula for it: autograd's, of one part after the other.

    A part is fed into what was carried before it, with a graph, and the gradient of what is carried after it flows back
    into both. What was carried before each part is computed again from a few copies, √parts of them.

    Parameters
    ----------
    statistic : Statistic
        The statistic.
    problem : Problem
        The matrix.
    plan : Plan
        How it is cut into parts, in the backward as well.
    grad : Any
        Gradient of the result.
    """

    def __init__(self, statistic: Statistic, problem: Problem, plan: Plan, grad: Any) -> None:
        """Run the statistic once without a graph, keep its carry every `_some` blocks, and differentiate `finish`.

        `grad` is the gradient of a loss in the result. The backward runs the blocks between two kept carries again.
        """
        self.statistic, self.problem = statistic, problem
        self.row_blocks = list(row_blocks(problem, plan, whole_rows=True, wide=False))
        self.index = len(self.row_blocks)
        self.sink: Tensor | None = None
        self._space = Workspace(problem.dtype, problem.device)
        self._some = max(math.isqrt(self.index), 1)
        self._copies: list[Any] = []
        # No closed form of the tokens may stand in for the logits, through which the gradient flows.
        carry = statistic.start(replace(problem, score=_OpaqueScore()))
        for start in range(0, self.index, self._some):
            self._copies.append(_carry_and_leaves(carry)[0])
            carry = self._carries_between_parts(carry, range(start, min(start + self._some, self.index)))[-1]
        self._carries: list[Any] = []
        with torch.enable_grad():
            live, leaves = _carry_and_leaves(carry)
            results = [t for t in tensors_in(statistic.finish(live)) if t.is_floating_point()]
        # The gradient in the state after the last part; `__call__` takes it back, part by part.
        self._grads = _vector_jacobian_product(results, tensors_in(grad), leaves)

    def _carries_between_parts(self, carry: Any, parts: range) -> list[Any]:
        """Return copies of the state of the statistic before each part, and the state after the last.

        A step writes into the state, so that only copies stay what they were.
        """
        carries = []
        for index in parts:
            carries.append(_carry_and_leaves(carry)[0])
            for part in tiled.parts(self.problem, self.row_blocks[index], None, self._space):
                carry = self.statistic.step(carry, part, part.at)
        return [*carries, carry]

    def __call__(self, part: Part) -> Tensor:
        """Return the gradient in the logits of a part; parts are asked for from the last to the first."""
        self.index -= 1
        # States between two kept copies are computed again, those before each part of the group.
        if not self._carries:
            start = self.index // self._some * self._some
            self._carries = self._carries_between_parts(self._copies.pop(), range(start, self.index + 1))[:-1]
        with torch.enable_grad():
            live, leaves = _carry_and_leaves(self._carries.pop())
            logits = part.logits.requires_grad_()
            sink = None if part.problem.sink is None else part.problem.sink.detach().requires_grad_()
            problem = replace(part.problem, score=TensorBias(logits), sink=sink)
            own = _RecordedPart(problem, part.at, part.block, lambda: logits, None, self._space)
            after = tensors_in(self.statistic.step(live, own, part.at))
        *self._grads, found, of_sink = _vector_jacobian_product(after, self._grads, [*leaves, logits, sink])
        if of_sink is not None:
            self.sink = of_sink if self.sink is None else self.sink + of_sink
        return torch.zeros_like(logits) if found is None else found.masked_fill_(part.hidden, 0.0)


def _carry_and_leaves(carry: Any) -> tuple[Any, list[Tensor]]:
    """Return a copy of a carry that a step may write into, and the leaves of which it is made, for their gradients."""
    leaves = [t.detach().requires_grad_(torch.is_grad_enabled() and t.is_floating_point()) for t in tensors_in(carry)]
    copies = {id(t): leaf.clone() for t, leaf in zip(tensors_in(carry), leaves, strict=True)}
    # The second argument is deepcopy's memo: where it meets one of these tensors, it takes the clone of its leaf.
    return copy.deepcopy(carry, copies), leaves


def _vector_jacobian_product(
    results: list[Tensor], grads: Sequence[Tensor | None], wanted: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Return the gradients in the tensors of `wanted`, given those in `results`; None for a tensor without one."""
    pairs = [(t, g) for t, g in zip(results, grads, strict=True) if g is not None and t.requires_grad]
    leaves = [t for t in wanted if t is not None and t.requires_grad]
    if not (pairs and leaves):
        return [None] * len(wanted)
    outputs, slopes = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outputs, leaves, slopes, allow_unused=True))
    return [next(found) if t is not None and t.requires_grad else None for t in wanted]


class _OpaqueScore(Score):
    """A score of which nothing is known but the logits of each part."""

    def forward(self, q: Tensor, k: Tensor, at: Tile) -> Tensor:
        raise TypeError("the logits of each part are known")


@contextmanager
def _transform_errors_explained() -> Iterator[None]:
    """Turn the error of a torch transform (vmap, grad) that cannot follow writes in place into a BackendError."""
    try:
        yield
    except RuntimeError as error:
        if not transforming():
            raise
        found, fix = str(error).partition("\n")[0], "A.to_dense() inside of the transform, or a loop in place of it."
        raise BackendError("no transform of torch may cut it.", found, fix, where="A.collect()") from error


class _RecordedPart(Part):
    """A part that writes into no tensor that the graph needs again."""

    @cached_property
    def _logits(self) -> Tensor:
        """The masked logits, -inf replaced by a finite number, in new memory."""
        return self.score().clamp(min=lowest(self.problem.dtype))

    @cached_property
    def shifted(self) -> Tensor:
        """Logits minus `shift`, in new memory."""
        return self._logits - self.shift.unsqueeze(-1)

    @cached_property
    def _exp_shifted(self) -> Tensor:
        """exp(`shifted`), in new memory."""
        return self.shifted.exp()

    @cached_property
    def weights(self) -> Tensor:
        """Weights, 0 where masked, in new memory."""
        return self._exp_shifted if self._row_factor is None else self._exp_shifted * self._row_factor.unsqueeze(-1)

    @cached_property
    def logits(self) -> Tensor:
        """The logits as they were given, -inf where masked."""
        return self.score()

    def row_products(self, x: Tensor, y: Tensor) -> Tensor:
        # Σ_j x_ij y_ij of each row, as in `Part`.
        # Out of place: autograd needs x and y again.
        # A weight of 0 may stand beside the lowest number, whose product with a gradient would overflow.
        return (x * torch.where(x == 0, 0.0, y)).sum(dim=-1)
