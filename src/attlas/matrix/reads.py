"""Reads of a matrix as statistics, so that one backward serves them too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attlas.engine.gradient import CellGradient
from attlas.engine.online import rounded
from attlas.engine.problem import Problem
from attlas.engine.statistic import Part, Statistic, TensorForm
from attlas.foundation.checks import sum_dtype, waits_for
from attlas.foundation.devices import to_device
from attlas.foundation.tiles import Tile, cut


def place_of(problem: Problem, rows: range | Tensor, columns: range | Tensor) -> Tile:
    """Return the tile of some rows and columns of all batches and heads; a list of them may be in any order."""
    batch, heads = problem.shape[:2]
    high, wide = (range(len(some)) if isinstance(some, Tensor) else some for some in (rows, columns))
    i, j = (some if isinstance(some, Tensor) else None for some in (rows, columns))
    return problem.tile(range(batch), range(heads), high, wide, row_index=i, column_index=j)


class LogSumExp(Statistic):
    """The log-sum-exp of each row of logits, in float64 where the device has it."""

    def forms(self, problem: Problem) -> TensorForm:
        return TensorForm(problem.shape[:3], sum_dtype(problem.device))

    def start(self, problem: Problem) -> Tensor:
        return torch.full(problem.shape[:3], -torch.inf, dtype=sum_dtype(problem.device), device=problem.device)

    def step(self, carry: Tensor, part: Part, at: Tile) -> Tensor:
        carry[at.place] = rounded(part.exact_lse)
        return carry

    def gradient(self, problem: Problem, grad: Tensor, result: Tensor) -> CellGradient:
        # The derivative in a logit is its weight, which a gradient `lse` of 1 stands for.
        return CellGradient(lse=grad, delta=torch.zeros_like(grad))


class _SortedPlaces(NamedTuple):
    """Places in ascending order: on the CPU, where they are compared, and on the device, where they are used.

    Parameters
    ----------
    places : Tensor of int64, shape (count,)
        The places, on the CPU; they may repeat.
    there : Tensor of int64, shape (2, count)
        The same and where each stood, on the device.
    """

    places: Tensor
    there: Tensor

    def within(self, span: range) -> tuple[Tensor, Tensor]:
        """Return where the places of a span stood, and the places counted from its start; both on the device."""
        first, stop = torch.searchsorted(self.places, torch.tensor([span.start, span.stop], device="cpu")).tolist()
        places, order = self.there[:, first:stop]
        return order, places - span.start


def _sort_places(places: Sequence[Tensor], device: torch.device) -> list[_SortedPlaces]:
    """Put several lists of places in order, with one copy to the device."""
    pairs = [torch.stack(t.sort(stable=True)) for t in places]
    there = to_device(torch.cat(pairs, dim=1), device).split([len(t) for t in places], dim=1)
    return [_SortedPlaces(own[0].contiguous(), copy) for own, copy in zip(pairs, there, strict=True)]


class Cells(Statistic):
    """Weights or log-weights of some rows and some columns.

    Parameters
    ----------
    rows, columns : range or Tensor
        Which; they may repeat.
    of_logits : bool
        Whether they are log-weights.
    """

    def __init__(self, rows: range | Tensor, columns: range | Tensor, of_logits: bool) -> None:
        self.rows, self.columns = (torch.as_tensor(t, dtype=torch.int64, device="cpu") for t in (rows, columns))
        self.of_logits = of_logits

    def start(self, problem: Problem) -> Tensor:
        shape = (*problem.shape[:2], len(self.rows), len(self.columns))
        return torch.zeros(shape, dtype=problem.dtype, device=problem.device)

    def step(self, carry: Tensor, part: Part, at: Tile) -> Tensor:
        cells = part.logits if self.of_logits else part.weights
        rows, columns = to_device(self.rows, cells.device), to_device(self.columns, cells.device)
        return cells[:, :, rows][..., columns]  # runs for second derivatives alone, where the whole matrix is one part

    def gradient(self, problem: Problem, grad: Tensor, result: Tensor) -> CellGradient:
        # In order of place, so that those of a tile are a slice, which is found without a question to the device.
        rows, columns = _sort_places((self.rows, self.columns), problem.device)

        def of_tile(part: Part) -> Any:
            """Return the gradient in the cells of a part: the sum over all reads of a cell, 0 for no read."""
            at = part.at
            (i, own_rows), (j, own_columns) = rows.within(at.rows), columns.within(at.columns)
            out = part.scratch("cells").zero_()
            own = grad[at.place[:2]][:, :, i][..., j].to(out.dtype).permute(2, 3, 0, 1)
            out.permute(2, 3, 0, 1).index_put_((own_rows.unsqueeze(-1), own_columns), own, accumulate=True)
            return out.masked_fill_(part.hidden, 0.0) if self.of_logits else out

        taken = torch.zeros(problem.shape[2], dtype=torch.bool, device="cpu").index_fill_(0, self.rows, True)
        if self.of_logits:
            return CellGradient(rows=taken, logits=(of_tile,))
        return CellGradient(rows=taken, weights=(of_tile,))


class _CellFunction(Statistic):
    """A statistic of ``f(P_ij, *tensors)``, a function of each weight; without `f`, of the weights.

    Parameters
    ----------
    f : callable, optional
        The function of a tensor of weights.
    tensors : tuple of Tensor, shape (batch, heads, m or 1, n or 1) or ()
        What else it takes.
    dtype : torch.dtype, optional
        Dtype of its numbers, by default that of the weights.
    differentiable : bool
        Whether it has a gradient.
    """

    def __init__(
        self,
        f: Callable[..., Tensor] | None = None,
        tensors: tuple[Tensor, ...] = (),
        dtype: torch.dtype | None = None,
        differentiable: bool = True,
    ) -> None:
        self.f, self.tensors, self.differentiable = f, tensors, differentiable
        self.dtype = dtype if dtype is None or dtype.is_floating_point else torch.int64

    def cells(self, weights: Tensor, at: Tile) -> Tensor:
        """Return the function of each weight of a tile, with its tensors cut to the tile."""
        b, h, rows = at.place
        columns = slice(at.columns.start, at.columns.stop)
        whole = slice(None)
        some = (
            t[b, h, rows if t.shape[2] > 1 else whole, columns if t.shape[3] > 1 else whole] if t.ndim else t
            for t in self.tensors
        )
        return weights if self.f is None else self.f(weights, *some)

    def may_skip_tiles(self, problem: Problem) -> bool:
        """Return whether the sums are right where tiles that nothing may see are skipped."""
        batch, heads, m, n = problem.shape
        zero = torch.zeros(1, 1, 1, 1, dtype=problem.dtype, device=problem.device)
        tiles = (problem.tile(range(batch), range(heads), rows, range(n)) for rows in cut(m, 64))
        answers = ((self.cells(zero, at) == 0).all() for at in tiles)
        return bool(torch.stack(list(answers)).all()) if waits_for(problem.device) else all(map(bool, answers))

    def weight_gradient(self, part: Part, grad: Tensor) -> Tensor:
        """Return the gradient in the weights of a part, from that in its numbers."""
        if self.f is None:
            return grad
        weights = part.weights.detach()
        with torch.enable_grad():
            cells = self.cells(weights.requires_grad_(), part.at)
        (found,) = torch.autograd.grad(cells, weights, grad.to(cells.dtype).expand_as(cells))
        return found.masked_fill(part.hidden, 0.0)


class CellSums(_CellFunction):
    """Sum of a function of each weight over the keys of each row, or over the queries of each column.

    Parameters
    ----------
    *args
        As of `_CellFunction`.
    over_keys : bool
        Whether keys are summed, or queries.
    """

    def __init__(self, *args: Any, over_keys: bool) -> None:
        super().__init__(*args)
        self.over_keys = over_keys

    def start(self, problem: Problem) -> tuple[Tensor, Tensor, int]:
        # The sums, how many cells of each were visited, and how many there are.
        batch, heads, m, n = problem.shape
        total = torch.zeros(batch, heads, m if self.over_keys else n, dtype=self.dtype, device=problem.device)
        return total, torch.zeros_like(total, dtype=torch.int64), n if self.over_keys else m

    def step(self, carry: tuple[Tensor, Tensor, int], part: Part, at: Tile) -> tuple[Tensor, Tensor, int]:
        """Add the cells of a part to the sums, and count how many were added."""
        total, visited, _ = carry
        into = self._place_of_sums(at)
        total[into] += self.cells(part.weights, at).sum(dim=self._summed_axis)
        visited[into] += len(at.columns) if self.over_keys else len(at.rows)
        return carry

    @property
    def _summed_axis(self) -> int:
        """Axis of a tile that is summed."""
        return -1 if self.over_keys else -2

    @property
    def _varies_along_axis(self) -> bool:
        """Whether a tensor of the function has more than one number along the axis that is summed."""
        return any(t.ndim and t.shape[self._summed_axis] > 1 for t in self.tensors)

    def may_skip_tiles(self, problem: Problem) -> bool:
        # `finish` adds the cells of skipped tiles, unless they differ along the axis that is summed.
        return not self._varies_along_axis or super().may_skip_tiles(problem)

    def _place_of_sums(self, at: Tile) -> tuple[slice, slice, slice]:
        """Return where the sums of a tile stand in the result."""
        b, h, rows = at.place
        return b, h, rows if self.over_keys else slice(at.columns.start, at.columns.stop)

    def finish(self, carry: tuple[Tensor, Tensor, int]) -> Tensor:
        """Add the cells that the mask hides, whose weight is 0: `f(0)` each, as many as no step visited."""
        total, visited, size = carry
        if self.f is None or self._varies_along_axis:
            return total
        # Cells that nothing may see are not visited, and have weight 0.
        dtype = total.dtype if total.is_floating_point() else sum_dtype(total.device)
        zero = torch.zeros(1, 1, 1, dtype=dtype, device=total.device)
        each, hidden = self.f(zero, *(t.flatten(2) if t.ndim else t for t in self.tensors)), size - visited
        return total + torch.where(hidden > 0, hidden * each, 0).to(total.dtype)

    def gradient(self, problem: Problem, grad: Tensor, result: Tensor) -> CellGradient:
        # Each weight has the gradient of the sum that it is in.
        def of_tile(part: Part) -> Tensor:
            return self.weight_gradient(part, grad[self._place_of_sums(part.at)].unsqueeze(self._summed_axis))

        return CellGradient(weights=(of_tile,))


class LeadingSums(_CellFunction):
    """Sums, or maxima and the heads that have them, over groups of heads: a whole matrix for each group.

    Parameters
    ----------
    group : Tensor of int64, shape (batch, heads)
        The group of each head.
    groups : int
        How many there are.
    take_max : bool
        Whether maxima are taken.
    *args
        As of `_CellFunction`.
    """

    joins_heads = True

    def __init__(self, group: Tensor, groups: int, take_max: bool, *args: Any) -> None:
        super().__init__(*args)
        self.group, self.groups = group.tolist(), groups
        self.take_max = take_max

    def start(self, problem: Problem) -> Any:
        # Sums, or maxima and the numbers of the heads that have them.
        shape = self.groups, *problem.shape[2:]
        dtypes = (self.dtype or problem.dtype, torch.int32)[: 2 if self.take_max else 1]
        found = tuple(torch.zeros(shape, dtype=dtype, device=problem.device) for dtype in dtypes)
        if self.take_max and problem.signed:
            found[0].fill_(-torch.inf)
        return found

    def step(self, carry: Any, part: Part, at: Tile) -> Any:
        """Add the heads of a part to the sums of their groups; for maxima, keep the larger cells and their heads."""
        cells, place = self.cells(part.weights, at), self._slices_of_tile(at)
        for b, h, group in self._groups_of_heads(at):
            into, own = carry[0][group][place], cells[b, h]
            if not self.take_max:
                into += own
                continue
            larger = own > into
            into.copy_(torch.where(larger, own, into))
            # The number of the head, counted over all batches.
            carry[1][group][place].masked_fill_(larger, at.batches[b] * len(self.group[0]) + at.heads[h])
        return carry

    def _groups_of_heads(self, at: Tile) -> list[tuple[int, int, int]]:
        """Return the batches and heads of a tile, counted within it, and their groups."""
        return [(b, h, self.group[i][j]) for b, i in enumerate(at.batches) for h, j in enumerate(at.heads)]

    @staticmethod
    def _slices_of_tile(at: Tile) -> tuple[slice, slice]:
        """Return the rows and columns of a tile as slices of a result (groups, m, n) without its first axis."""
        return slice(at.rows.start, at.rows.stop), slice(at.columns.start, at.columns.stop)

    def gradient(self, problem: Problem, grad: Any, result: Any) -> CellGradient:
        # Each weight has the gradient of its group's sum; that of a maximum goes to the head that has it.
        def of_tile(part: Part) -> Tensor:
            """Return the gradient in the weights of a part; that of a maximum goes to the head that has it."""
            at, place = part.at, self._slices_of_tile(part.at)
            out = part.scratch("heads")
            for b, h, group in self._groups_of_heads(at):
                own = grad[0][group][place]
                if self.take_max:
                    own = own * (result[1][group][place] == at.batches[b] * problem.shape[1] + at.heads[h])
                out[b, h] = own
            return self.weight_gradient(part, out)

        return CellGradient(weights=(of_tile,))
