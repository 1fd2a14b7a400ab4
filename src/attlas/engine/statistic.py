"""The base class of statistics of the matrix, and the part of the matrix that each of their steps gets."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, singledispatch
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attlas.engine.gradient import CellGradient
from attlas.engine.online import CACHED, above, exp, finite_shift, high_part, lse_of, rounded, sees_keys, split_lse
from attlas.engine.problem import Problem
from attlas.engine.tiling import ColumnBlock, allowed_cells
from attlas.errors import DtypeError, kind
from attlas.foundation.compat import cached_property
from attlas.foundation.tiles import Tile
from attlas.masks.base import BlockState


class Workspace:
    """Buffers by name, for one pass over a matrix.

    Parameters
    ----------
    dtype : torch.dtype
        Dtype of the buffers.
    device : torch.device
        Where they live.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._flat: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Return the buffer of this name with this shape; what it held before is lost."""
        size = math.prod(shape)
        flat = self._flat.get(name)
        if flat is None or flat.numel() < size:
            # Twice what there was: the tiles of a causal mask grow, and each new buffer would be faulted in again.
            roomy = size if flat is None else max(size, 2 * flat.numel())
            flat = self._flat[name] = torch.empty(roomy, dtype=self._dtype, device=self._device)
        return flat[:size].view(shape)


# Columns of a group; the maxima of groups show where the largest numbers of a row are. With c columns there are
# c // GROUP groups, and a group is every (c // GROUP)-th column, so that maxima over a group read memory in order.
GROUP = 16


class TensorForm(NamedTuple):
    """Shape and dtype of a tensor that is not computed yet."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def lowest(dtype: torch.dtype) -> float:
    """Return the finite number that the engine uses in place of -inf, so that 0 times it is 0, not NaN."""
    return torch.finfo(dtype).min / 4


def _group_maxima(x: Tensor) -> Tensor:
    """Return the maximum of each group of columns, followed by the columns beyond the last group as they are."""
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
        Gives the log-sum-exp of the whole rows; None where this part holds whole rows and computes it itself.
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
        """Whether the log-sum-exp was computed already, for some number that a step used."""
        return "exact_lse" in self.__dict__

    @cached_property
    def shifted(self) -> Tensor:
        """Logits minus `shift`, a very low finite number where a key is masked, shape (B, H, r, c)."""
        if self.row_lse is None:  # the part has whole rows
            return self._logits if self.problem.has_small_logits else self._logits.sub_(self.shift.unsqueeze(-1))
        shift = self.shift  # computed first, since that may use the buffer of the logits
        return self._logits.sub_(shift.unsqueeze(-1))

    @cached_property
    def shift(self) -> Tensor:
        """The number of each row that `shifted` subtracts from its logits, shape (B, H, r)."""
        if self.row_lse is not None:
            return high_part(self.exact_lse).to(self.problem.dtype)
        if self.problem.has_small_logits:
            return torch.zeros(self.shape[:3], dtype=self.problem.dtype, device=self.at.device)
        # Weights do not depend on it, and so neither do gradients.
        top = self._row_max.detach().masked_fill(self._row_max <= lowest(self._row_max.dtype) / 2, -math.inf)
        return finite_shift(top if self._sink is None else torch.maximum(top, self._sink.detach()))

    @property
    def lse(self) -> Tensor:
        """Log-sum-exp of the whole rows, shape (B, H, r)."""
        return rounded(self.exact_lse).to(self.problem.dtype)

    @cached_property
    def exact_lse(self) -> Tensor:
        """The log-sum-exp in its exact form, see `attlas.engine.online`: float64 where the device has it."""
        return lse_of(self.shift, self._exp_totals) if self.row_lse is None else self.row_lse()

    @property
    def lse_minus_shift(self) -> Tensor:
        """Log-sum-exp of the whole rows minus `shift`, shape (B, H, r)."""
        return above(self.exact_lse, self.shift).to(self.problem.dtype)

    @cached_property
    def weights(self) -> Tensor:
        """Weights, 0 where masked, shape (B, H, r, c)."""
        return self._exp_shifted if self._row_factor is None else self._exp_shifted.mul_(self._row_factor.unsqueeze(-1))

    @cached_property
    def log_weights(self) -> Tensor:
        """Logarithms of the weights, at least -1e4, so that a weight of 0 times its logarithm is 0."""
        lse_minus_shift = self.lse_minus_shift.unsqueeze(-1)
        return torch.sub(self.shifted, lse_minus_shift, out=self.scratch("log weights")).clamp_(min=-1e4)

    @property
    def hidden(self) -> Tensor:
        """True where a logit is -inf, shape (B, H, r, c)."""
        return self.shifted <= lowest(self.shifted.dtype) / 2

    @cached_property
    def mass(self) -> Tensor:
        """Sum of each row's weights in this part, shape (B, H, r)."""
        if self._row_factor is None:
            return self._exp_sums
        if "weights" in self.__dict__ and "_exp_sums" not in self.__dict__:
            return self.weights.sum(dim=-1)  # they have taken the place of what `_exp_sums` would sum
        return self._exp_sums * self._row_factor

    @cached_property
    def _logits(self) -> Tensor:
        """The masked logits of the part, shape (B, H, r, c); `shifted` overwrites them."""
        return self.score()

    @cached_property
    def _logit_group_maxima(self) -> Tensor:
        """Largest logit of each group of columns, taken before `shifted` overwrites the logits; see `GROUP`."""
        return _group_maxima(self._logits)

    @cached_property
    def _row_max(self) -> Tensor:
        """Largest logit of each row of the part, shape (B, H, r)."""
        return self._logit_group_maxima.amax(dim=-1)

    @cached_property
    def _sink(self) -> Tensor | None:
        """The sink of each head in the dtype of the sums, shape (1, H, 1); None without a sink."""
        sink = self.problem.sink
        if sink is None:
            return None
        return sink[self.at.heads.start : self.at.heads.stop].to(self.problem.dtype).view(1, -1, 1)

    @cached_property
    def _exp_shifted(self) -> Tensor:
        """exp(`shifted`), 0 where masked, shape (B, H, r, c); `weights` overwrites it."""
        x, out = self.shifted, self.scratch("exp")
        if not self.problem.has_small_logits:
            return exp(x, out=out)
        for columns, state in self.block.segments:
            local = self.block.local(columns)
            compute = torch.exp if state is BlockState.FULL else exp  # torch.exp is slow on masked cells alone
            compute(x[..., local], out=out[..., local])
        return out

    @cached_property
    def _exp_sums(self) -> Tensor:
        """Sum of `_exp_shifted` over the columns of the part, shape (B, H, r)."""
        return self._exp_shifted.sum(dim=-1)

    @cached_property
    def _exp_totals(self) -> Tensor:
        """Sum of `_exp_shifted` over a whole row, and the sink's exp, shape (B, H, r)."""
        return self._exp_sums if self._sink is None else self._exp_sums + torch.exp(self._sink - self.shift)

    @cached_property
    def _row_factor(self) -> Tensor | None:
        """The factor of each row that turns `_exp_shifted` into weights; None where it is 1.

        Weights are ``exp(logit - shift) * factor``, with ``factor = exp(shift - lse)``.
        """
        if self.row_lse is not None:
            low = split_lse(self.exact_lse, self.problem.dtype)[1]
            return None if low is None else torch.exp(-low)
        # Asking for the log-sum-exp makes it known, at little cost: it is made of the same sums.
        seen = sees_keys(self.exact_lse)
        return torch.where(seen, 1 / torch.where(seen, self._exp_totals, 1.0), 0.0)

    def scratch(self, name: str = "scratch") -> Tensor:
        """Return a buffer of the part's shape; a later call with the same name returns the same memory."""
        return self.space.take(name, self.shape)

    @cached_property
    def allowed(self) -> Tensor | None:
        """True where the mask lets the query see the key; None where it does everywhere."""
        cells = allowed_cells(self.at, self.problem.mask, self.block)
        return None if cells is None else cells.expand(self.shape)

    @cached_property
    def visible_columns(self) -> tuple[tuple[range, Tensor | None], ...]:
        """Runs of columns with allowed cells, counted from the part's first column, and which cells are allowed.

        The cells are None where all are, else bool and broadcastable to (B, H, r, columns), so that a mask that
        is the same for all heads is computed once.
        """
        start, r = self.block.columns.start, self.shape[2]
        runs: list[tuple[range, Tensor | None]] = []
        for columns, state in self.block.segments:
            if state is BlockState.EMPTY:
                continue
            cells = None
            if state is BlockState.PARTIAL and self.problem.mask is not None:
                cells = self.problem.mask.allows(self.at.narrow(columns))
                cells = cells.expand(torch.broadcast_shapes(cells.shape, (r, len(columns))))
            runs.append((range(columns.start - start, columns.stop - start), cells))
        return tuple(runs)

    @cached_property
    def keys(self) -> Tensor:
        """Number of keys of this part that each query may see, shape (B, H, r), in the dtype of the scores."""
        total = torch.zeros(self.shape[:3], dtype=self.problem.dtype, device=self.at.device)
        for columns, cells in self.visible_columns:
            total += float(len(columns)) if cells is None else cells.sum(dim=-1)
        return total

    @cached_property
    def row_groups(self) -> Tensor | None:
        """Weights summed over `GROUP` rows at a time, shape (B, H, r / GROUP, c); None if GROUP does not divide r."""
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
        return self._logit_group_maxima - self.shift.unsqueeze(-1)  # the logits may be overwritten by now

    @cached_property
    def largest(self) -> Tensor:
        """Largest shifted logit of each row in this part, shape (B, H, r)."""
        return self.peaks.amax(dim=-1)

    def row_products(self, x: Tensor, y: Tensor) -> Tensor:
        """Return ``Σ_j x_ij y_ij`` of each row for two tensors of the part's shape, shape (B, H, r)."""
        if self.at.device.type != "cpu":
            return torch.mul(x, y, out=self.scratch()).sum(dim=-1)
        # A few rows at a time: products are then summed while they are in a core's cache, which is twice as fast.
        c = self.shape[3]
        rows = max(torch.get_num_threads() * CACHED // max(c, 1), 1)
        products = self.space.take("products", (rows, c))
        pairs = zip(x.reshape(-1, c).split(rows), y.reshape(-1, c).split(rows), strict=True)
        sums = [torch.mul(a, b, out=products[: len(a)]).sum(dim=-1) for a, b in pairs]
        return torch.cat(sums).view(self.shape[:3])

    def as_weights(self, shifted: Tensor) -> Tensor:
        """Return the weights of some shifted logits of each row, shape (B, H, r, any number)."""
        exponentials = torch.exp(shifted)
        return exponentials if self._row_factor is None else exponentials * self._row_factor.unsqueeze(-1)


class Statistic(ABC):
    """A number, a row or a small table drawn from the matrix in one pass over its tiles.

    Parts come in blocks of rows of some heads, and within a block of rows from left to right. A tile whose cells
    are all masked gets no `step`: the carry that `start` returns must be right for it.

    Attributes
    ----------
    whole_rows : bool
        Whether `step` needs all columns of a row in one part. Costs speed beyond some 100,000 keys.
    differentiable : bool
        Whether the result has a gradient; positions and counts have none.
    of_logits : bool
        Whether it needs log-weights, which cannot be computed from a dense tensor of weights.
    of_shares : bool
        Whether it means something only of weights that are shares of their row, as those of a softmax are.
    of_unsigned : bool
        Whether it means something only of weights that are not negative.
    is_sum : bool
        Whether it adds up weights, so that its result for a sum of matrices is the sum of theirs.
    is_mean : bool
        Whether it is a sum over weights divided by a number of allowed cells.
    joins_heads : bool
        Whether a number of the result belongs to several batches or heads.
    axis : {"rows", "columns", "diagonals"}, optional
        What the axis after (batch, heads) of the result counts. It tells how the results of matrices that are stacked
        on each other give that of the whole: those of rows are concatenated, others are merged.
    v : Tensor, optional, shape (..., n, e)
        Values that the result is a product with, and in which it has a gradient too.
    k : int
        Keys of each row that the result names, which a matrix must have; the default is 0.

    See Also
    --------
    attlas.testing.check_statistic : tests the contract of every statistic.

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
    of_shares: bool = False
    of_unsigned: bool = False
    is_sum: bool = False
    is_mean: bool = False
    joins_heads: bool = False
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
        """Return the gradient of a loss with respect to each cell, from that with respect to the result.

        None, the default, where there is no formula: then `step` runs again with a graph, on one tile at a time.

        Parameters
        ----------
        problem : Problem
            The matrix.
        grad, result : Any
            What `finish` returned, and the gradient of a loss with respect to it; None for positions and counts.
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
            Carries that `start` made for the whole matrix, each after the steps of some of its rows or columns, on two
            threads or machines. They may be written into.

        Raises
        ------
        TypeError
            If the class does not define it: the default cannot know what the carry means.
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
            If `A` is none of these, or if the statistic cannot be computed from weights alone.
        ShapeError
            If a tensor does not hold weights: numbers that are not negative, with a sum of at most 1 per row.
        """
        if isinstance(A, list | tuple):
            return tuple(map(self, A))
        return A.collect(self)[0] if hasattr(A, "collect") else statistic_of_tensor(A, self)

    def may_skip_tiles(self, problem: Problem) -> bool:
        """Return whether a pass may leave out tiles in which the mask hides every cell; by default it may."""
        return True

    def forms(self, problem: Problem) -> Any:
        """Return a `TensorForm` for each tensor of the result, in named tuples where the result has them.

        Statistics of attlas say it, so that torch.compile knows a result before it is computed. The default is None.
        """
        return None

    def outputs(self, problem: Problem) -> Mapping[str, Any] | None:
        """Return which numbers a fused kernel must compute so that this statistic can be made from them.

        Names, and the values that go with them, are those of `attlas.engine.outputs`. None, the default, for a
        statistic that must see the tiles. It may also check the settings against the sizes of the matrix.
        """
        return None

    def carry_from(self, results: Mapping[str, Any], problem: Problem) -> Any:
        """Return the carry after all tiles from the numbers that `outputs` named; by default the first of them.

        None where they do not tell it, for a statistic whose `from_outputs` does without it.
        """
        return results[next(iter(self.outputs(problem) or results))]

    def from_outputs(self, results: Mapping[str, Any], problem: Problem) -> Any:
        """Return the result from the numbers that `outputs` named; by default by `carry_from` and `finish`."""
        return self.finish(self.carry_from(results, problem))

    def describes(self, name: str, steps: Sequence[str] = ("start", "step", "finish", "of", "merge")) -> bool:
        """Return whether an inherited attribute still holds: no subclass has overridden a step of what it describes.

        A subclass may compute something else, and inherit a formula for the gradient, numbers of the kernels, or an
        axis: then these are not used. A base class without a `step` describes all of its subclasses.

        Parameters
        ----------
        name : str
            The attribute.
        steps : sequence of str
            The methods that it is about.
        """
        return _shares_steps(type(self), name, tuple(steps))


@cache
def _shares_steps(own: type[Statistic], name: str, steps: tuple[str, ...]) -> bool:
    """Do `Statistic.describes` for a class: compare its steps with those of the class that defines `name`."""
    # What a class of attlas inherits is about that class, too.
    owner = next(kind for kind in own.__mro__ if name in vars(kind) or kind.__module__.startswith("attlas.stats."))
    step = getattr(owner, "step", None)
    if step is None or getattr(step, "__isabstractmethod__", False):
        return True
    return all(getattr(own, one, None) is getattr(owner, one, None) for one in steps)


def merge_sums(self: Statistic, a: Any, b: Any) -> Any:
    """Merge carries that are sums, or nested tuples of sums, by adding them; a statistic may set it as its `merge`."""
    if isinstance(a, tuple):
        return tuple(merge_sums(self, *pair) for pair in zip(a, b, strict=True))
    return None if a is None else a + b


def keep_larger(self: Statistic, a: Tensor, b: Tensor) -> Tensor:
    """Merge carries that are maxima, where a NaN in `b` is ignored; a statistic may set it as its `merge`."""
    return torch.where(b > a, b, a)


@singledispatch
def statistic_of_tensor(A: Any, statistic: Statistic) -> Any:
    """Return a statistic of what is no lazy matrix: `attlas.engine.dense` registers tensors of weights."""
    rule = "it is a statistic of an attention matrix, of a tensor of weights, or of a tuple of them."
    fix = "stats.entropy(outputs.attentions), or stats.entropy(attlas.attend(q, k))."
    raise DtypeError(rule, kind(A), fix, A=kind(A), where=f"stats.{type(statistic).__name__}")
