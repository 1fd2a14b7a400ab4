"""The largest weights of each row: the k largest, what they leave, and how many keys hold a share of the mass."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from attlas.engine.gradient import CellGradient
from attlas.engine.problem import Problem
from attlas.engine.statistic import GROUP, Part, Statistic, TensorForm
from attlas.errors import ShapeError, public
from attlas.foundation.checks import whole_number
from attlas.foundation.compat import tracing
from attlas.foundation.devices import DeviceCopies
from attlas.foundation.tiles import Tile
from attlas.stats.functions import function_of
from attlas.stats.rows import form_of_rows, zeros_for_rows

_MOST_IN_ORDER = 128  # how many of the largest are worth keeping in order while a row is read
_BLOCK_WEIGHTS = 64  # sorted weights that are summed together before any is looked at alone


class Largest(NamedTuple):
    """The k largest weights of each row, in descending order, and their keys.

    Parameters
    ----------
    values : Tensor, shape (..., m, k)
        Weights.
    indices : Tensor of int64, shape (..., m, k)
        Keys, all different. Keys of weight 0 come last.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import stats
    >>> values, indices = stats.topk(attlas.attend(torch.randn(5, 8), torch.randn(7, 8)), 3)
    >>> indices.shape
    torch.Size([5, 3])
    """

    values: Tensor
    indices: Tensor


class TopK(Statistic):
    """The k largest weights of each row and their keys, exact, in descending order.

    Parameters
    ----------
    k : int
        How many, from 1 to the number of keys.

    Raises
    ------
    ShapeError
        If `k` is no whole number above 0, or larger than the number of keys.

    See Also
    --------
    TailMass : what the k largest leave to all others.

    Notes
    -----
    No row is sorted: the k largest lie in the k groups of columns with the largest maxima, so that one
    pass of maxima and 16 k candidates a row are enough. Which of several equal weights is
    taken is open. A row with fewer allowed keys than k ends in weights 0, on keys that it may not see.
    Cost: one maximum over the tile, and the candidates. Memory: 2 k numbers per row.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import stats
    >>> q, k = torch.ones(1, 1), torch.tensor([[0.0], [2.0], [1.0]]).log()
    >>> A = attlas.attend(q, k)
    >>> A.collect(stats.TopK(2))[0].indices
    tensor([[1, 2]])
    >>> values, indices = stats.topk(A, 2)
    >>> indices
    tensor([[1, 2]])
    """

    axis = "rows"

    @public()
    def __init__(self, k: int) -> None:
        whole_number("k", k, "k=8")
        self.k = k

    def forms(self, problem: Problem) -> Any:
        # Shapes and dtypes of values and indices.
        forms: list[Any] = [form_of_rows(problem, self.k), form_of_rows(problem, self.k, dtype=torch.int64)]
        return Largest(*forms)

    def start(self, problem: Problem) -> Any:
        # Index -1 stands for a place that no key has taken yet.
        self._check_fits(problem)
        shape = (*problem.shape[:3], self.k)
        values = torch.zeros(shape, dtype=problem.dtype, device=problem.device)
        return Largest(values, torch.full(shape, -1, dtype=torch.int64, device=problem.device))

    def step(self, carry: Any, part: Part, at: Tile) -> Any:
        # Keep the k largest of each row so far: shifted logits until the row's last part, which makes weights of them.
        found = _largest_logits(part, min(self.k, part.shape[-1]))
        found = Largest(found.values, found.indices + at.columns.start)
        if not part.first:
            # Parts of one row share one shift, so that their logits may be compared.
            found = _join_largest(Largest(carry.values[at.place], carry.indices[at.place]), found, self.k)
        elif found.values.shape[-1] < self.k:  # filled up to k places
            found = _join_largest(Largest(*(t[..., :0] for t in found)), found, self.k)
        carry.values[at.place] = part.as_weights(found.values) if part.last else found.values
        carry.indices[at.place] = found.indices
        return carry

    def merge(self, a: Any, b: Any) -> Any:
        """Return the k largest weights of two parts of a row."""
        return _join_largest(a, b, self.k)

    def finish(self, carry: Any) -> Any:
        # The k largest of each row; places that no key has taken keep index -1.
        name_unseen(carry.indices)
        return carry

    def gradient(self, problem: Problem, grad: Any, result: Any) -> CellGradient:
        # The gradient of a value belongs to the cell of its key; indices have none.
        def of_tile(part: Part) -> Tensor:
            """Return the gradient in the weights of a part, 0 in all cells but the largest of each row."""
            c = part.shape[3]
            columns = result.indices[part.at.place] - part.at.columns.start
            inside = (columns >= 0) & (columns < c)
            out = part.scratch("largest").zero_()
            return out.scatter_add_(-1, columns.clamp(0, max(c - 1, 0)), grad.values[part.at.place] * inside)

        return CellGradient(weights=(of_tile,))

    def outputs(self, problem: Problem) -> Mapping[str, Any] | None:
        # The kernels keep up to `_MOST_IN_ORDER` weights of a row in order.
        self._check_fits(problem)
        return {"largest": self.k} if self.k <= _MOST_IN_ORDER else None

    def carry_from(self, results: Mapping[str, Any], problem: Problem) -> Any:
        # The carry: the kernels give the k largest of each row as they are.
        return Largest(results["top_values"], results["top_keys"])

    def _check_fits(self, problem: Problem) -> None:
        """Raise a ShapeError for a `k` that is too large."""
        name, n = type(self).__name__, problem.shape[3]
        if self.k > n:
            rule, found = "k cannot be larger than the number of keys.", f"k = {self.k}, n = {n}"
            fix = f"{name}({n})" if n else "give attend() a key."
            raise ShapeError(rule, found, fix, A=f"{problem.shape[2]} queries × {n} keys", where=f"{name}()")


def _largest_logits(part: Part, k: int) -> Largest:
    """Return the k largest shifted logits of each row of a part, exact, and their columns within the part.

    They lie in the k groups of columns with the largest maxima (`part.peaks`), so only these groups are looked at.
    """
    x = part.shifted
    c = x.shape[-1]
    groups = c // GROUP
    if groups <= 2 * k:
        return Largest(*x.topk(k, dim=-1))
    best = part.peaks[..., :groups].topk(k, dim=-1, sorted=False).indices
    # Group g holds the columns g, g + groups, g + 2 groups, ...
    columns = (best.unsqueeze(-2) + torch.arange(0, groups * GROUP, groups, device=x.device).unsqueeze(-1)).flatten(-2)
    if groups * GROUP < c:
        rest = torch.arange(groups * GROUP, c, device=x.device)
        columns = torch.cat([columns, rest.expand(*columns.shape[:-1], -1)], dim=-1)
    values, order = x.gather(-1, columns).topk(k, dim=-1)
    return Largest(values, columns.gather(-1, order))


def _join_largest(left: Largest, right: Largest, k: int) -> Largest:
    """Return the k largest of two sets of largest numbers; index -1 where there are fewer."""
    values, indices = (torch.cat(pair, dim=-1) for pair in zip(left, right, strict=True))
    missing = k - values.shape[-1]
    if missing > 0:  # fewer keys than k were seen so far
        values = torch.nn.functional.pad(values, (0, missing), value=-math.inf)
        indices = torch.nn.functional.pad(indices, (0, missing), value=-1)
    values, order = values.topk(k, dim=-1)
    return Largest(values, indices.gather(-1, order))


def name_unseen(indices: Tensor) -> None:
    """Give places that no visited key has taken (-1) the first keys that are still free in their row."""
    k = indices.shape[-1]
    # Then all rows are looked at: which have such a place is not asked.
    on_device = indices.device.type != "cpu" or tracing()
    if not on_device and not bool((indices < 0).any()):
        return
    some = (indices < 0).any(dim=-1)
    rows = indices.flatten(0, -2) if on_device else indices[some]
    # Of the keys 0 to k - 1, those already taken are marked; all others fall into one last place.
    taken = torch.zeros(len(rows), k + 1, dtype=torch.int8, device=rows.device)
    taken.scatter_(-1, torch.where((rows < 0) | (rows > k), k, rows), 1)
    free = taken[:, :k].sort(dim=-1, stable=True).indices
    open_places = rows < 0
    rank = (open_places.cumsum(dim=-1) - 1).clamp(min=0)
    named = torch.where(open_places, free.gather(-1, rank), rows)
    if on_device:
        indices.copy_(named.view(indices.shape))
    else:
        indices[some] = named


class ArgMax(TopK):
    """The key of each row's largest weight; 0 for a row with no allowed key.

    Raises
    ------
    ShapeError
        If the matrix has no key.

    See Also
    --------
    MaxWeight : the weight itself.

    Notes
    -----
    Which of several equal weights is taken is open. Cost: one maximum over the tile.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import stats
    >>> A = attlas.attend(torch.ones(1, 1), torch.tensor([[0.0], [2.0], [1.0]]))
    >>> A.collect(stats.ArgMax())[0]
    tensor([1])
    """

    differentiable = False

    def __init__(self) -> None:
        super().__init__(1)

    def forms(self, problem: Problem) -> TensorForm:
        # One int64 for each row.
        return form_of_rows(problem, dtype=torch.int64)

    def step(self, carry: Any, part: Part, at: Tile) -> Any:
        # As `TopK` with k = 1: the largest weight of each row so far, and its key.
        carry = super().step(carry, part, at)
        if part.problem.signed and part.last:  # there 0 may be the largest weight
            # `finish` asks the values only whether a row saw no key, which 0 stands for.
            carry.values[at.place] = 1.0
        return carry

    def finish(self, carry: Largest) -> Tensor:
        # The key of the largest weight of each row; 0 for a row that sees no key.
        values, indices = carry
        return torch.where(values == 0, 0, indices).squeeze(-1)

    def outputs(self, problem: Problem) -> Mapping[str, Any] | None:
        # Stated again, because an inherited `outputs` is not used in a class that overrides `finish` (`describes`).
        return super().outputs(problem)

    def carry_from(self, results: Mapping[str, Any], problem: Problem) -> Any:
        # The carry of `TopK`, from the largest weight of each row.
        found = super().carry_from(results, problem)
        return found._replace(values=torch.ones_like(found.values)) if problem.signed else found  # as in `step`


class TailMass(TopK):
    """Mass of each row outside its k largest weights.

    Parameters
    ----------
    k : int
        How many are left out, from 1 to the number of keys.

    Raises
    ------
    ShapeError
        If `k` is no whole number above 0, or larger than the number of keys.

    See Also
    --------
    TopK : the k largest themselves.
    Coverage : how many keys it takes to leave a given tail.

    Notes
    -----
    What an output loses at most, in units of the largest value, if only the k largest weights are kept.
    The difference of two sums: exact to some 1e-7 in float32. Cost: that of TopK.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import stats
    >>> A = attlas.attend(torch.zeros(2, 8), torch.zeros(4, 8))
    >>> A.collect(stats.TailMass(3))[0]
    tensor([0.2500, 0.2500])
    >>> stats.tail_mass(A, 3)
    tensor([0.2500, 0.2500])
    """

    of_unsigned = True

    def forms(self, problem: Problem) -> TensorForm:
        # One number for each row.
        return form_of_rows(problem)

    def start(self, problem: Problem) -> tuple[Largest, Tensor]:
        # The k largest of each row, and the mass of each row.
        return super().start(problem), zeros_for_rows(problem)

    def step(self, carry: tuple[Largest, Tensor], part: Part, at: Tile) -> tuple[Largest, Tensor]:
        """Add the mass of a part, and let `TopK` keep the largest weights."""
        top, mass = carry
        mass[at.place] += part.mass
        super().step(top, part, at)
        return carry

    def merge(self, a: tuple[Largest, Tensor], b: tuple[Largest, Tensor]) -> tuple[Largest, Tensor]:
        # Join the k largest, and add the masses.
        return super().merge(a[0], b[0]), a[1] + b[1]

    def finish(self, carry: tuple[Largest, Tensor]) -> Tensor:
        """Subtract the k largest weights from the mass of each row."""
        top, mass = carry
        return (mass - top.values.sum(dim=-1)).clamp_(min=0.0)

    def gradient(self, problem: Problem, grad: Tensor, result: Tensor) -> CellGradient:
        # 1 for each weight outside of the k largest, 0 for these.
        def of_tile(part: Part) -> Tensor:
            out = part.scratch("largest").copy_(grad[part.at.place].unsqueeze(-1).expand(part.shape))
            return out.scatter_(-1, _largest_logits(part, min(self.k, part.shape[3])).indices, 0.0)

        return CellGradient(weights=(of_tile,))

    def outputs(self, problem: Problem) -> Mapping[str, Any] | None:
        # What TopK needs, and the mass of each row.
        wanted = super().outputs(problem)
        return None if wanted is None else {**wanted, "mass": True}

    def carry_from(self, results: Mapping[str, Any], problem: Problem) -> tuple[Largest, Tensor]:
        # The k largest of each row, and the mass of each row.
        return super().carry_from(results, problem), results["mass"]


class Coverage(Statistic):
    """Smallest number of keys that hold a given share of each row's mass.

    Parameters
    ----------
    levels : sequence of float, default (0.9, 0.95, 0.99)
        Shares, above 0 and at most 1.

    Raises
    ------
    ShapeError
        If there is no level, or one lies outside (0, 1].

    See Also
    --------
    EffectiveKeys : a count without a level, much cheaper.
    TailMass : the reverse question.

    Notes
    -----
    ``min |S|`` over the sets S of keys with ``Σ_{j ∈ S} A_ij >= level Σ_j A_ij``. Exact up to rounding: a
    share that is met but for the rounding of its sum counts as met. A row with no allowed key needs 0 keys.
    The level 1 counts the keys whose weight is not 0. Cost: the kernels of attlas look for
    a threshold in each row, a few passes over it in the cache; elsewhere each row is sorted, about as
    long as the rest of the pass, with memory of a second tile.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import stats
    >>> A = attlas.attend(torch.zeros(2, 8), torch.zeros(10, 8))
    >>> A.collect(stats.Coverage((0.5, 0.9, 0.91)))[0]
    tensor([[ 5,  9, 10],
            [ 5,  9, 10]])
    >>> stats.coverage(A, [0.5, 0.9])
    tensor([[5, 9],
            [5, 9]])
    """

    whole_rows = True
    differentiable = False
    of_unsigned = True
    axis = "rows"

    def __init__(self, levels: Iterable[float] = (0.9, 0.95, 0.99)) -> None:
        self.levels = tuple(levels) if isinstance(levels, Iterable) else (levels,)
        self._copies = DeviceCopies()
        if self.levels and all(_is_valid_share(level) for level in self.levels):
            self._left_out = torch.tensor([1.0 - level for level in self.levels], dtype=torch.float64, device="cpu")
            return
        rule = "levels must be numbers above 0 and at most 1."
        raise ShapeError(rule, f"levels = {self.levels!r}", "Coverage((0.9, 0.95, 0.99))", where="Coverage()")

    def forms(self, problem: Problem) -> TensorForm:
        # One int64 for each row and level.
        return form_of_rows(problem, len(self.levels), dtype=torch.int64)

    def start(self, problem: Problem) -> Tensor:
        # Counts of 0: each row is counted when its part comes.
        shape = (*problem.shape[:3], len(self.levels))
        return torch.zeros(shape, dtype=torch.int64, device=problem.device)

    def step(self, carry: Tensor, part: Part, at: Tile) -> Tensor:
        # Count how many of the largest weights of each row hold each share of its mass.
        ordered = _ascending_weights(part)
        # The number of smallest weights that may be left out: first in blocks, then within one block.
        blocks = ordered.unflatten(-1, (-1, _BLOCK_WEIGHTS))
        mass = blocks.sum(dim=-1).cumsum(dim=-1)
        spare = mass[..., -1:] * self._copies.of(self._left_out, mass.device, mass.dtype)
        # A tolerance of 64 roundings: a share that is met but for the rounding of its sum counts as met.
        spare = spare * (1.0 + 64.0 * torch.finfo(mass.dtype).eps)
        whole = torch.searchsorted(mass, spare, right=True).clamp_(max=mass.shape[-1] - 1)
        before = torch.nn.functional.pad(mass, (1, 0)).gather(-1, whole)
        inner = blocks.gather(-2, whole.unsqueeze(-1).expand(*whole.shape, _BLOCK_WEIGHTS)).cumsum(dim=-1)
        within = (inner + before.unsqueeze(-1) <= spare.unsqueeze(-1)).sum(dim=-1)
        carry[at.place] = ordered.shape[-1] - whole * _BLOCK_WEIGHTS - within
        return carry

    def merge(self, a: Tensor, b: Tensor) -> Tensor:
        # A count of 0 is that of a row that one of the two has not seen.
        if bool(((a > 0) & (b > 0)).any()):
            rule, found = "parts must hold whole rows to be merged.", "two parts of one row"
            raise ShapeError(rule, found, "give each part some rows with all their keys.", where="Coverage()")
        return a + b

    def outputs(self, problem: Problem) -> Mapping[str, Any] | None:
        # The kernels count for all levels at once.
        return {"coverage": self.levels}


def _is_valid_share(level: object) -> bool:
    """Return whether a level is a number above 0 and at most 1."""
    return isinstance(level, int | float) and not isinstance(level, bool) and 0.0 < level <= 1.0


def _ascending_weights(part: Part) -> Tensor:
    """Return the sorted weights of each row, with zeros in front up to a whole number of blocks."""
    c = part.shape[3]
    zeros = -c % _BLOCK_WEIGHTS
    ordered = part.space.take("ordered", (*part.shape[:3], zeros + c))
    ordered[..., :zeros] = 0.0
    ordered[..., zeros:] = part.weights
    if ordered.device.type != "cpu":
        return ordered.sort(dim=-1).values
    # numpy sorts with vector instructions, ten times as fast as torch, in place, and without the GIL.
    rows = ordered.view(-1, zeros + c).numpy()
    threads = min(torch.get_num_threads(), len(rows))
    if threads < 2:
        rows.sort(axis=-1)
        return ordered
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(np.ndarray.sort, np.array_split(rows, threads)))
    return ordered


topk = function_of(TopK, Largest, "values and indices of shape (..., m, k)")
tail_mass = function_of(TailMass, Tensor, "shape (..., m)")
coverage = function_of(Coverage, Tensor, "int64 of shape (..., m, len(levels))")
