"""What each query gives to some keys: where a picture looks at a word, as one map for each word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attlas.engine.gradient import CellGradient
from attlas.engine.problem import Problem
from attlas.engine.statistic import Part, Statistic, TensorForm
from attlas.errors import OutOfRangeError, ShapeError, public
from attlas.foundation.checks import is_integer
from attlas.foundation.devices import to_device
from attlas.foundation.tiles import Tile
from attlas.stats.functions import function_of
from attlas.stats.spans import Bands, Span, check_span, place_span, pool_tile, spread_blocks, tile_window


class KeyMaps(Statistic):
    """Weights of the queries on some keys: columns of the matrix.

    Parameters
    ----------
    keys : sequence of int
        The keys, as many and as often as they are wanted; negative ones count from the end.
    queries : slice, range or (start, stop), optional
        The queries, in this order; the default is all.

    Raises
    ------
    ShapeError
        If `keys` is empty or holds something else than whole numbers, or `queries` has a step or lies outside.
    OutOfRangeError
        If a key lies outside of the matrix.

    See Also
    --------
    attlas.record : ``sum_passes=1`` adds such maps up over the steps of a diffusion model.
    Spans : sums over spans of queries and keys.

    Notes
    -----
    In attention of a picture to a text, each column is the map of a word: which places look at it. Memory:
    ``len(queries) * len(keys)`` numbers a head. Gradients reach queries, keys and the parameters of the score.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import stats
    >>> A = attlas.attend(torch.zeros(4, 8), torch.zeros(5, 8))
    >>> A.collect(stats.KeyMaps([0, -1], queries=slice(0, 2)))[0]
    tensor([[0.2000, 0.2000],
            [0.2000, 0.2000]])
    >>> stats.key_maps(A, [3]).shape
    torch.Size([4, 1])
    """

    is_sum = True

    @public("KeyMaps()")
    def __init__(self, keys: Sequence[int], queries: Span | None = None) -> None:
        given = keys.tolist() if isinstance(keys, Tensor) else list(keys)
        if not given or not all(map(is_integer, given)):
            raise ShapeError("keys must be whole numbers, one at least.", f"keys = {given!r}"[:80], "keys=[0, 3]")
        check_span("queries", queries)
        self.keys, self.queries = tuple(given), queries

    @public("KeyMaps()")
    def _query_and_key_bands(self, problem: Problem) -> tuple[Bands, Bands, list[int]]:
        """Return a band for each query and for each key, and the band of each of `keys`."""
        m, n = problem.shape[2:]
        rows = place_span("queries", self.queries, m, "queries")
        places = [key + n if key < 0 else key for key in self.keys]
        if not all(0 <= place < n for place in places):
            rule = f"keys must lie within the {n} keys of the matrix."
            raise OutOfRangeError(rule, f"keys = {list(self.keys)}"[:80], f"keys=[0, {n - 1}]")
        edges = sorted({end for place in places for end in (place, place + 1)})
        number = {place: band for band, place in enumerate(edges)}
        return Bands(range(rows.start, rows.stop + 1)), Bands(edges), [number[place] for place in places]

    def forms(self, problem: Problem) -> TensorForm:
        # A number for each query that is shown and each of `keys`.
        rows = place_span("queries", self.queries, problem.shape[2], "queries")
        return TensorForm((*problem.shape[:2], len(rows), len(self.keys)), problem.dtype)

    def start(self, problem: Problem) -> _MapSums:
        # Sums of 0 for each query on each of `keys`, and on the keys that lie between them.
        return _MapSums(*self._query_and_key_bands(problem), problem)

    def step(self, carry: _MapSums, part: Part, at: Tile) -> _MapSums:
        # Add the weights of the part.
        carry.add(part, at)
        return carry

    def merge(self, a: _MapSums, b: _MapSums) -> _MapSums:
        # Add the sums of both.
        a.mass += b.mass
        return a

    def finish(self, carry: _MapSums) -> Tensor:
        # The columns of `keys`, in the order in which they were given.
        return carry.mass.index_select(-1, carry.chosen)

    def gradient(self, problem: Problem, grad: Tensor, result: Tensor) -> CellGradient:
        # A cell has the sum of the gradients of all places of `keys` that name its key.
        carry = self.start(problem)
        table = carry.mass.index_add(-1, carry.chosen, grad.to(carry.mass.dtype))
        return CellGradient(weights=(partial(spread_blocks, table, carry.bands),))

    def outputs(self, problem: Problem) -> Mapping[str, Any] | None:
        # A picture whose blocks are single queries and keys, and what lies between the keys.
        rows, columns, _ = self._query_and_key_bands(problem)
        return {"picture_sum": (rows.edges, columns.edges)} if len(rows) else None

    def carry_from(self, results: Mapping[str, Any], problem: Problem) -> _MapSums:
        # The kernels give the sums of the carry.
        carry = self.start(problem)
        carry.mass = results["picture_sum"]
        return carry


class _MapSums:
    """The mass of each query on each key that is wanted, and on what lies between them."""

    def __init__(self, rows: Bands, columns: Bands, chosen: list[int], problem: Problem) -> None:
        self.bands = rows, columns
        self.chosen = to_device(torch.tensor(chosen, device="cpu"), problem.device)
        self.mass = torch.zeros(*problem.shape[:2], len(rows), len(columns), dtype=problem.dtype, device=problem.device)

    def add(self, part: Part, at: Tile) -> None:
        """Add the weights of a tile."""
        rows, columns = self.bands[0].inside(at.rows), self.bands[1].inside(at.columns)
        if not (len(rows) and len(columns)):
            return
        b, h, _ = at.place
        into = self.mass[b, h, self.bands[0].touched(rows), self.bands[1].touched(columns)]
        into += pool_tile(tile_window(part.weights, at, rows, columns), rows, columns, self.bands, torch.sum)


key_maps = function_of(KeyMaps, Tensor, "shape (..., len(queries), len(keys))")
