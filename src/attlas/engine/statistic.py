"""A statistic over the matrix: the protocol, and what each step of it is handed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from attlas.engine.gradient import CellGradient
from attlas.engine.online import CACHED, exp, finite_shift, split_lse
from attlas.engine.problem import Problem
from attlas.engine.tiling import ColumnBlock, allowed_cells
from attlas.engine.workspace import Workspace
from attlas.masks.base import BlockState
from attlas.tiles import Tile

__all__ = ["GROUP", "Blocks", "Part", "Statistic", "keep_larger", "lowest", "merge_sums"]

# Columns of a group, whose maxima tell where the largest of a row are. With c columns there are c // GROUP groups,
# and a group is every (c // GROUP)-th column: a maximum over the group then runs along memory.
GROUP = 16

# Edges of blocks along rows and along columns, ascending: the first place of each, and the end of the last.
Blocks: TypeAlias = tuple[Tensor, Tensor]


def lowest(dtype: torch.dtype) -> float:
    """Return the finite number that stands for -inf inside the engine, so that 0 times it is 0, not NaN."""
    return torch.finfo(dtype).min / 4


def _group_maxima(x: Tensor) -> Tensor:
    """Return the maxima of groups of columns, then the columns that are left over, one by one."""
    c = x.shape[-1]
    groups = c // GROUP
    if groups < 2:
        return x.clone()  # what x holds may be overwritten
    maxima = x[..., : groups * GROUP].unflatten(-1, (GROUP, groups)).amax(dim=-2)
    return maxima if groups * GROUP == c else torch.cat([maxima, x[..., groups * GROUP :]], dim=-1)


@dataclass(eq=False)
class Part:
    """Some rows of the matrix and some of their columns, with their numbers.

    Everything is computed when it is first asked for, and shared by all statistics of one pass. A step must
    not write into these tensors, nor keep them: their memory is used again for the next part. Shapes:
    B batches, H heads, r rows, c columns of the tile.

    Parameters
    ----------
    problem : Problem
        The matrix.
    at : Tile
        The place of the part.
    block : ColumnBlock
        Its columns and what the mask says of them.
    score : callable
        Computes the logits of the part, `lowest` where masked, in memory that the part may write to.
    row_lse : callable, optional
        Gives the log-sum-exp of the whole rows; None where this part holds them whole and can tell itself.
    space : Workspace
        Buffers that all parts of one pass share.
    first, last : bool
        Whether this is the first, the last part of its rows.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import stats
    >>> class Sizes(stats.RowMass):
    ...     def step(self, carry, part, at):
    ...         print(tuple(part.weights.shape), part.first, part.last)
    ...         return super().step(carry, part, at)
    >>> plan = attlas.Plan("tiled", rows=4, columns=5)
    >>> A = attlas.attend(torch.zeros(4, 2), torch.zeros(8, 2), plan=plan)
    >>> A.lse.shape, A.collect(Sizes())[0].sum()
    (1, 1, 4, 5) True False
    (1, 1, 4, 3) False True
    (torch.Size([4]), tensor(4.))
    """

    problem: Problem
    at: Tile
    block: ColumnBlock
    score: Callable[[], Tensor]
    row_lse: Callable[[], Tensor] | None
    space: Workspace
    first: bool = True
    last: bool = True

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes of the part: B, H, r, c."""
        return self.at.shape

    @property
    def knows_lse(self) -> bool:
        """Whether someone has asked for numbers that made the log-sum-exp known."""
        return "exact_lse" in self.__dict__

    @cached_property
    def shifted(self) -> Tensor:
        """Logits less `shift`, finite: a very low number where a key may not be seen; shape (B, H, r, c)."""
        if self.row_lse is None:
            return self._logits if self.problem.has_small_logits else self._logits.sub_(self.shift.unsqueeze(-1))
        shift = self.shift  # first: what it takes may pass through the buffer of the logits
        return self._logits.sub_(shift.unsqueeze(-1))

    @cached_property
    def shift(self) -> Tensor:
        """What was subtracted from each row, shape (B, H, r)."""
        if self.row_lse is not None:
            return finite_shift(self.exact_lse).to(self.problem.dtype)
        if self.problem.has_small_logits:
            return torch.zeros(self.shape[:3], dtype=self.problem.dtype, device=self.at.device)
        # Weights do not depend on it, and so neither do gradients.
        top = self._top.detach().masked_fill(self._top <= lowest(self._top.dtype) / 2, -math.inf)
        return finite_shift(top if self._sink is None else torch.maximum(top, self._sink.detach()))

    @property
    def lse(self) -> Tensor:
        """Log-sum-exp of the whole rows, shape (B, H, r)."""
        return self.exact_lse.to(self.problem.dtype)

    @cached_property
    def exact_lse(self) -> Tensor:
        """The log-sum-exp in float64."""
        if self.row_lse is not None:
            return self.row_lse()
        none, total = self._total == 0, self._total.double()
        return torch.where(none, -math.inf, self.shift + torch.log(torch.where(none, 1.0, total)))

    @cached_property
    def weights(self) -> Tensor:
        """Weights, 0 where masked, shape (B, H, r, c)."""
        return self._raw if self._inverse is None else self._raw.mul_(self._inverse.unsqueeze(-1))

    @cached_property
    def log_weights(self) -> Tensor:
        """Logarithms of the weights, where those are 0 a low number whose product with them is 0."""
        rest = (finite_shift(self.exact_lse) - self.shift).to(self.shifted.dtype).unsqueeze(-1)
        return torch.sub(self.shifted, rest, out=self.scratch("log weights")).clamp_(min=-1e4)

    @property
    def hidden(self) -> Tensor:
        """True where a logit is -inf, shape (B, H, r, c)."""
        return self.shifted <= lowest(self.shifted.dtype) / 2

    @cached_property
    def mass(self) -> Tensor:
        """Sum of each row's weights in this part, shape (B, H, r)."""
        return self._sums if self._inverse is None else self._sums * self._inverse

    @cached_property
    def _logits(self) -> Tensor:
        return self.score()

    @cached_property
    def _logit_peaks(self) -> Tensor:
        return _group_maxima(self._logits)

    @cached_property
    def _top(self) -> Tensor:
        return self._logit_peaks.amax(dim=-1)

    @cached_property
    def _sink(self) -> Tensor | None:
        sink = self.problem.sink
        if sink is None:
            return None
        return sink[self.at.heads.start : self.at.heads.stop].to(self.problem.dtype).view(1, -1, 1)

    @cached_property
    def _raw(self) -> Tensor:
        x, raw = self.shifted, self.scratch("raw")
        if not self.problem.has_small_logits:
            return exp(x, out=raw)
        for columns, state in self.block.segments:
            local = self.block.local(columns)
            compute = torch.exp if state is BlockState.FULL else exp  # where all is allowed, exp is never slow
            compute(x[..., local], out=raw[..., local])
        return raw

    @cached_property
    def _sums(self) -> Tensor:
        return self._raw.sum(dim=-1)

    @cached_property
    def _total(self) -> Tensor:
        """Sum of a whole row, with its sink, of what exp gave."""
        return self._sums if self._sink is None else self._sums + torch.exp(self._sink - self.shift)

    @cached_property
    def _inverse(self) -> Tensor | None:
        """The factor of each row that makes weights of what exp gave; None where that is 1."""
        if self.row_lse is not None:
            low = split_lse(self.exact_lse, self.problem.dtype)[1]
            return None if low is None else torch.exp(-low)
        # Who has the weights has paid for the log-sum-exp: it is kept.
        none = self.exact_lse == -math.inf
        return torch.where(none, 0.0, 1 / torch.where(none, 1.0, self._total))

    def scratch(self, name: str = "scratch") -> Tensor:
        """Return a buffer of the part's shape to compute in; it is overwritten by the next who asks for it."""
        return self.space.take(name, self.shape)

    @cached_property
    def allowed(self) -> Tensor | None:
        """True where the mask lets the query see the key; None where it does everywhere."""
        cells = allowed_cells(self.at, self.problem.mask, self.block)
        return None if cells is None else cells.expand(self.shape)

    @cached_property
    def seen(self) -> tuple[tuple[range, Tensor | None], ...]:
        """Columns in which something may attend, counted from the part's first, and the cells that may.

        The cells are None where all may, else bool and broadcastable to (B, H, r, columns): a mask that
        is the same for all heads is asked and counted once.
        """
        start, r = self.block.columns.start, self.shape[2]
        out: list[tuple[range, Tensor | None]] = []
        for columns, state in self.block.segments:
            if state is BlockState.EMPTY:
                continue
            cells = None
            if state is BlockState.PARTIAL and self.problem.mask is not None:
                cells = self.problem.mask.allows(self.at.narrow(columns))
                cells = cells.expand(torch.broadcast_shapes(cells.shape, (r, len(columns))))
            out.append((range(columns.start - start, columns.stop - start), cells))
        return tuple(out)

    @cached_property
    def keys(self) -> Tensor:
        """How many keys of this part each query may see, shape (B, H, r), in the dtype of the scores."""
        total = torch.zeros(self.shape[:3], dtype=self.problem.dtype, device=self.at.device)
        for columns, cells in self.seen:
            total += float(len(columns)) if cells is None else cells.sum(dim=-1)
        return total

    @cached_property
    def row_groups(self) -> Tensor | None:
        """Sums over `GROUP` rows at a time, shape (B, H, r / GROUP, c); None where that does not divide the rows."""
        r = self.shape[2]
        return None if r == 0 or r % GROUP else self.weights.unflatten(-2, (r // GROUP, GROUP)).sum(dim=-2)

    @cached_property
    def column_sums(self) -> Tensor:
        """Sum of each column's weights in this part, shape (B, H, c)."""
        return (self.weights if self.row_groups is None else self.row_groups).sum(dim=-2)

    @cached_property
    def logits(self) -> Tensor:
        """Log-weights before softmax, -inf where masked, shape (B, H, r, c). Costs a tile of memory."""
        logits = self.shifted + self.shift.unsqueeze(-1)
        return logits.masked_fill_(self.hidden, -math.inf)

    @cached_property
    def peaks(self) -> Tensor:
        """Largest shifted logit of each group of columns, shape (B, H, r, groups), see `GROUP`."""
        if self.row_lse is not None or self.problem.has_small_logits:
            return _group_maxima(self.shifted)
        return self._logit_peaks - self.shift.unsqueeze(-1)  # the logits may be overwritten by now

    @cached_property
    def largest(self) -> Tensor:
        """Largest shifted logit of each row in this part, shape (B, H, r)."""
        return self.peaks.amax(dim=-1)

    def row_products(self, x: Tensor, y: Tensor) -> Tensor:
        """Return ``Σ_j x_ij y_ij`` of each row for two tensors of the part's shape, shape (B, H, r)."""
        if self.at.device.type != "cpu":
            return torch.mul(x, y, out=self.scratch()).sum(dim=-1)
        # Few rows at a time: then products are still in a core's cache when they are summed, twice as fast.
        c = self.shape[3]
        some = max(torch.get_num_threads() * CACHED // max(c, 1), 1)
        products = self.space.take("products", (some, c))
        pairs = zip(x.reshape(-1, c).split(some), y.reshape(-1, c).split(some), strict=True)
        sums = [torch.mul(a, b, out=products[: len(a)]).sum(dim=-1) for a, b in pairs]
        return torch.cat(sums).view(self.shape[:3])

    def as_weights(self, shifted: Tensor) -> Tensor:
        """Return the weights of some shifted logits of each row, shape (B, H, r, any number)."""
        raw = torch.exp(shifted)
        return raw if self._inverse is None else raw * self._inverse.unsqueeze(-1)


class Statistic(ABC):
    """A number, a row or a small table drawn from the matrix in one pass over its tiles.

    Parts come in blocks of rows of some heads, and within a block of rows from left to right. Cells that
    nothing may see are left out and never visited: `start` sets what they mean.

    Attributes
    ----------
    whole_rows : bool
        Whether `step` needs all columns of a row in one part. Costs speed beyond some 100,000 keys.
    differentiable : bool
        Whether the result has a gradient; positions and counts have none.
    of_logits : bool
        Whether it needs log-weights, which a dense tensor of weights does not tell.
    axis : {"rows", "columns", "diagonals"}, optional
        What the axis after (batch, heads) of the result counts in the whole matrix, where results of matrices that are
        stacked on each other tell that of the whole: those of rows stand one after the other, others are merged.
    v : Tensor, optional, shape (..., n, e)
        Values that the result is a product with, and in which it has a gradient too.
    k : int
        Keys of each row that the result names, which a matrix must have; the default is 0.

    See Also
    --------
    attlas.testing.check_statistic : the contract that every statistic keeps.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import stats
    >>> class SumOfSquares(stats.Statistic):
    ...     def start(self, problem):
    ...         return torch.zeros(problem.shape[:3], dtype=problem.dtype, device=problem.device)
    ...
    ...     def step(self, carry, part, at):
    ...         carry[at.place] += part.weights.square().sum(-1)
    ...         return carry
    >>> attlas.testing.check_statistic(SumOfSquares(), dense=lambda weights: weights.square().sum(-1))
    >>> attlas.attend(torch.zeros(3, 2), torch.zeros(4, 2)).collect(SumOfSquares())
    (tensor([0.2500, 0.2500, 0.2500]),)
    """

    whole_rows: bool = False
    differentiable: bool = True
    of_logits: bool = False
    axis: str | None = None
    v: Tensor | None = None
    k: int = 0

    @abstractmethod
    def start(self, problem: Problem) -> Any:
        """Return the carry before any part was seen; also checks the settings against the sizes of the matrix."""

    @abstractmethod
    def step(self, carry: Any, part: Part, at: Tile) -> Any:
        """Return the carry after one part."""

    def gradient(self, problem: Problem, grad: Any, result: Any) -> CellGradient | None:
        """Return the gradient of a loss in each cell, from its gradient in the result.

        None, the default, where no formula is known: then `step` runs again with a graph, on one tile at a time.

        Parameters
        ----------
        problem : Problem
            The matrix.
        grad, result : Any
            What `finish` returned, and the gradient of a loss in it; None for positions and counts.
        """
        return None

    def finish(self, carry: Any) -> Any:
        """Return the result: tensors whose first two axes are (batch, heads), or a named tuple of them.

        The default is the carry as it is.
        """
        return carry

    def merge(self, a: Any, b: Any) -> Any:
        """Return the carry of two parts of one matrix that have no cell in common.

        Parameters
        ----------
        a, b : Any
            Carries that `start` made for the whole matrix and `step` fed with some of its rows, or of its columns, on
            two threads or machines. They may be written into.

        Raises
        ------
        TypeError
            If the class does not define it; the default knows nothing of the carry.
        """
        raise TypeError(f"{type(self).__name__} must define merge(self, a, b).")

    def __call__(self, A: Any) -> Any:
        """Return this statistic of a matrix, of a dense tensor of weights, or a tuple of those of several.

        Parameters
        ----------
        A : AttentionMatrix, Tensor of shape (..., m, n), or list or tuple of these
            What `attend` made, what a model returned as attentions, or those of all its layers.

        Returns
        -------
        Any
            What ``A.collect(statistic)`` gives; of several matrices a tuple.

        Raises
        ------
        DtypeError
            If `A` is none of these, or if weights alone do not tell the statistic.
        ShapeError
            If a tensor does not hold weights: numbers that are not negative, with a sum of at most 1 per row.
        """
        from attlas.engine.apply import statistic_of

        return statistic_of(A, self)

    def outputs(self, problem: Problem) -> Mapping[str, Any] | None:
        """Return the numbers of the whole matrix that this statistic can be made from, for a fused kernel.

        Names are those of `attlas.engine.native.request.compute`. None, the default, for a statistic that must see
        the tiles. It may also check the settings against the sizes of the matrix.
        """
        return None

    def carry_from(self, found: Mapping[str, Any], problem: Problem) -> Any:
        """Return the carry of all tiles from the numbers that `outputs` asked for; the default is the one number."""
        return found[next(iter(self.outputs(problem) or found))]

    def from_outputs(self, found: Mapping[str, Any], problem: Problem) -> Any:
        """Return the result from the numbers that `outputs` asked for, where `carry_from` does not tell it."""
        return self.finish(self.carry_from(found, problem))


def merge_sums(self: Statistic, a: Any, b: Any) -> Any:
    """Merge carries that are sums, or tuples of them; be the `merge` of a statistic."""
    if isinstance(a, tuple):
        return tuple(merge_sums(self, *pair) for pair in zip(a, b, strict=True))
    return None if a is None else a + b


def keep_larger(self: Statistic, a: Tensor, b: Tensor) -> Tensor:
    """Merge carries that are maxima; be the `merge` of a statistic. A NaN in `b` is left out."""
    return torch.where(b > a, b, a)
