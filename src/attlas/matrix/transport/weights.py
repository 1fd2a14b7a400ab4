"""Weights that a linear attention layer gives to earlier tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from attlas.engine import given
from attlas.engine.dropout import Dropout
from attlas.engine.plan import Plan
from attlas.engine.problem import Version, full_precision, version_of
from attlas.engine.statistic import Statistic
from attlas.engine.tiling import ColumnBlock
from attlas.errors import BackendError, ModifiedError, public
from attlas.foundation.checks import has_float64
from attlas.foundation.compat import cached_property, tracing
from attlas.foundation.devices import to_device
from attlas.foundation.tiles import Tile
from attlas.masks.base import Mask
from attlas.masks.local import Causal
from attlas.masks.placed import translated_mask
from attlas.matrix.gradient import WeightGradient
from attlas.matrix.sweep import SweptWeights
from attlas.matrix.transport import tiles, walk
from attlas.matrix.transport.products import product
from attlas.matrix.transport.tokens import NAMES, GatedTokens
from attlas.matrix.weights import check_kind

_FEW_ROWS = 16  # so many are carried chunk by chunk without the transitions of many chunks, which take longer to make
# Rows that a kernel carries token by token in the time in which the factors of as many tokens are made, with a rank one
# part and without; and rows times tokens that it passes in the time of a few steps over many chunks. Measured on a CPU.
_TURNING_ROWS, _PLAIN_ROWS, _CARRIED_STEPS = 100, 4, 1 << 17


class TransportWeights(SweptWeights):
    """``β_j q_iᵀ M_i ... M_{j+1} k_j`` for j ≤ i, where M are the transitions of a linear attention layer.

    Parameters
    ----------
    tokens : GatedTokens
        Queries, keys and gates of all tokens.
    rows, columns : range, optional
        The queries and keys that the matrix has; the default is all.
    ids : tuple of Tensor, shapes (batch,) and (heads,), optional
        Batches and heads as the user counts them, int64 on the CPU; by default all from 0 on.
    versions : tuple of Version, optional
        The tensors as they were when the matrix was made, by default as they are.
    whole : WeightGradient, optional
        The gradient of the weights that these are a part or a copy of.
    """

    are_shares = False
    # One block of columns, of few enough rows for a tile to be in the cache when it is added up.
    tile_plan = Plan(rows=512, columns=512, cells=1 << 22)

    def __init__(
        self,
        tokens: GatedTokens,
        rows: range | None = None,
        columns: range | None = None,
        ids: tuple[Tensor, Tensor] | None = None,
        versions: tuple[Version, ...] | None = None,
        whole: WeightGradient | None = None,
    ) -> None:
        self.tokens = tokens
        self.rows, self.columns = (range(tokens.n) if span is None else span for span in (rows, columns))
        self.shape = tokens.batch, tokens.heads, len(self.rows), len(self.columns)
        self.dtype, self.device, self.key_heads = tokens.dtype, tokens.device, tokens.k.shape[1]
        self.queries = tokens.q[:, :, self.rows.start : self.rows.stop]
        self.keys = tokens.k[:, :, self.columns.start : self.columns.stop]
        self._ids = ids
        self._whole = whole
        if versions is None:
            known = not tracing() and tokens.has_numbers
            versions = tuple(version_of(name, t) for name, t in tokens.tensors.items()) if known else ()
        self._versions = versions
        self._transitions: walk.Transitions | None = None
        # Of some batches and heads, while statistics are computed.
        self._blocks: tuple[tuple[range, range], GatedTokens, tiles.Blocks] | None = None

    @public("a copy of A")
    def __getstate__(self) -> dict[str, Any]:
        self.check_unchanged()
        # A copy has tensors of its own, and does not collect the gradients of products of the original.
        state = {name: value for name, value in vars(self).items() if name not in ("gradient", "mask", "outline")}
        return state | {"_whole": None, "_versions": (), "_transitions": None, "_blocks": None}

    def to_dict(self) -> dict[str, Any]:
        # The settings from which `from_dict` makes these weights again, for files.
        tokens = self.tokens
        rows, columns = ([span.start, span.stop] for span in (self.rows, self.columns))
        settings = {"heads": tokens.heads, "scale": tokens.scale, "rows": rows, "columns": columns}
        ids = {"batch_ids": self.batch_ids.tolist(), "head_ids": self.head_ids.tolist()}
        return {"tokens": tokens.tensors, **settings, **ids}

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> TransportWeights:
        # The weights of settings that a file has; a ValueError where they do not fit together.
        tensors = settings["tokens"]
        check_kind("tokens", tensors, dict)
        if not {"q", "k"} <= tensors.keys() <= {*NAMES}:
            raise ValueError(f"tensors named {sorted(tensors)}")
        for name, t in tensors.items():
            check_kind(name, t, Tensor)
        check_kind("scale", settings["scale"], float)
        tokens = GatedTokens(heads=settings["heads"], scale=settings["scale"], **tensors)
        tokens.check_sizes()
        ids = tuple(torch.tensor(settings[name], dtype=torch.int64) for name in ("batch_ids", "head_ids"))
        rows, columns = (range(*settings[name]) for name in ("rows", "columns"))
        if not all(0 <= span.start <= span.stop <= tokens.n for span in (rows, columns)):
            raise ValueError(f"rows {rows} and columns {columns} of {tokens.n} tokens")
        if [len(index) for index in ids] != [tokens.batch, tokens.heads]:
            raise ValueError(f"{len(ids[0])} batch_ids and {len(ids[1])} head_ids")
        return cls(tokens, rows, columns, (ids[0], ids[1]))

    # ---------------------------------------------------------------------------------------------------------- facts

    @cached_property
    def mask(self) -> Mask:  # type: ignore[override]  # computed here
        n = self.tokens.n
        return translated_mask(Causal(), self.rows, self.columns, n, n)

    @property
    def batch_ids(self) -> Tensor:  # type: ignore[override]  # computed here
        return torch.arange(self.shape[0], device="cpu") if self._ids is None else self._ids[0]

    @property
    def head_ids(self) -> Tensor:  # type: ignore[override]  # computed here
        return torch.arange(self.shape[1], device="cpu") if self._ids is None else self._ids[1]

    @property
    def inputs(self) -> list[Tensor]:
        return list(self.tokens.tensors.values())

    def check_unchanged(self) -> None:
        # Raise a ModifiedError where a tensor was changed in place since the matrix was made.
        if tracing():
            return
        for version in self._versions:
            if version.is_outdated:
                rule = "the tensors of a matrix must not change after transport()."
                found = f"{version.name} was changed in place"
                fix = "call transport() again, or transport(q.clone(), k.clone()) before they change."
                raise ModifiedError(rule, found, fix, arguments={version.name: version.tensor})

    @property
    def description(self) -> str:
        # Which gates the matrix has, as text.
        tokens = self.tokens
        words = ["transport"]
        if tokens.decay is not None:
            of = "channel" if tokens.decay.shape[-1] > 1 else "head" if tokens.is_constant(tokens.decay) else "token"
            words.append(f"decay of each {of}")
        words += [name for name in ("write", "erase", "diagonal") if getattr(tokens, name) is not None]
        return ", ".join([*words, *(["erase=(p, r)"] if tokens.p is not None else [])])

    # ------------------------------------------------------------------------------------------------------- products

    def product(self, v: Tensor, dropout: Dropout | None = None) -> Tensor:
        # ``A @ v`` in time linear in the tokens; no weight is computed.
        if dropout is not None:
            rule = "weights of a linear attention layer are not dropped: it has no matrix to drop them from."
            raise BackendError(rule, "a dropout", "leave dropout out, or drop from A.to_dense().")
        self.check_unchanged()
        out = self._product_in_vector_dtype(v, transposed=False)
        return self.with_product(out, v)

    @public("A.mT @ x")
    def transposed_product(self, x: Tensor) -> Tensor:
        self.check_unchanged()
        out = self._product_in_vector_dtype(x, transposed=True)
        return self.with_product(out, x, transposed=True)

    @full_precision
    def _product_in_vector_dtype(self, v: Tensor, *, transposed: bool) -> Tensor:
        """Return a product in the dtype of the vectors; only tokens from the first column to the last row count."""
        given, wanted = (self.rows, self.columns) if transposed else (self.columns, self.rows)
        start, stop = self.columns.start, self.rows.stop
        shape = *self.shape[:2], len(wanted), v.shape[-1]
        low, high = max(wanted.start, start), min(wanted.stop, stop)
        if 0 in shape or 0 in self.shape or low >= high:
            return v.new_zeros(shape)
        # The vectors at the places of their tokens, zeros elsewhere; those of tokens that do not count are left out.
        first, last = max(given.start, start), min(given.stop, stop)
        at = v[:, :, first - given.start : last - given.start]
        at = functional.pad(at, (0, 0, first - start, stop - last))
        tokens = self.tokens.narrow(start, stop)
        out = product(tokens, at, transposed=transposed)
        if tokens.diagonal is not None:
            out = out + spread_values(at, tokens) * tokens.diagonal.to(out.dtype)
        out = out[:, :, low - start : high - start]
        out = functional.pad(out, (0, 0, low - wanted.start, wanted.stop - high))
        return out.to(v.dtype)

    @public("A.sum()")
    def sums(self, *, over_keys: bool) -> Tensor:
        ones = torch.ones(1, 1, self.shape[3 if over_keys else 2], 1, dtype=self.dtype, device=self.device)
        return self.product(ones) if over_keys else self.transposed_product(ones)

    # ---------------------------------------------------------------------------------------------------------- cells

    @public("A[...]")
    def cells(self, rows: range | Tensor, columns: range | Tensor, *, logits: bool = False) -> Tensor:
        # Weights of some rows and columns, as in `Weights`.
        self.check_no_logits(logits)
        self.check_unchanged()
        found = self._cells_in_any_order(rows, columns)
        return self.with_cells(rows, columns, found)

    @full_precision
    def _cells_in_any_order(self, rows: range | Tensor, columns: range | Tensor) -> Tensor:
        """Return cells in any order: places are sorted first, and those that have no weight are filled with 0."""
        i, i_order = _sorted_places(rows, self.rows.start)
        j, j_order = _sorted_places(columns, self.columns.start)
        # Rows before the first column and columns after the last row have no weights.
        above = _count_below(i, j[0]) if j else len(i)
        own = _count_below(j, i[-1] + 1) if i else 0
        if 0 in self.shape or not own or above == len(i):
            found = torch.zeros(*self.shape[:2], len(i), len(j), dtype=self.dtype, device=self.device)
        else:
            found = self._sorted_cells(i[above:], j[:own])
            if found.shape[2:] != (len(i), len(j)):
                found = functional.pad(found, (0, len(j) - own, above, 0))
        for order, axis in ((i_order, 2), (j_order, 3)):
            found = found if order is None else found.index_select(axis, to_device(order, self.device))
        return found

    def _sorted_cells(self, rows: Sequence[int], columns: Sequence[int]) -> Tensor:
        """Return the cells of rows and columns in ascending order, counted from the first token."""
        tokens = self.tokens
        # Tokens in chunks that have a row or a column.
        busy = sum(_count_chunks(places, tokens.chunk) for places in (rows, columns)) * tokens.chunk
        found = self._few_rows(rows, columns, busy)
        if found is None:
            found = self._chunked_cells(rows, columns, busy)
        if tokens.diagonal is None:
            return found
        i, j = (torch.tensor(places, device=self.device) for places in (rows, columns))
        own = tokens.diagonal if tokens.is_constant(tokens.diagonal) else tokens.diagonal.index_select(2, i)
        return torch.where(i.unsqueeze(-1) == j, found + spread_values(own.to(self.dtype), tokens), found)

    def _few_rows(self, rows: Sequence[int], columns: Sequence[int], busy: int) -> Tensor | None:
        """Return `_sorted_cells`, without the diagonal, of so few rows that a kernel is the faster way; else None.

        The kernel carries each row token by token to the first column; `most` is how many such steps take as long as
        the chunks that have a row or a column. Both were measured, see the constants above.
        """
        tokens, hull = self.tokens, range(columns[0], columns[-1] + 1)
        most = (_TURNING_ROWS if tokens.turns else _PLAIN_ROWS) * busy + _CARRIED_STEPS
        steps = len(rows) < _FEW_ROWS and tokens.turns and self._transitions is None  # chunk by chunk, if not here
        if self.needs_graph or not (steps or len(rows) * (rows[-1] + 1 - hull.start) <= most):
            return None
        found = given.transport_rows(tokens.tensors, tokens.heads, tokens.dtype, tokens.scale, rows, hull)
        if found is None or len(hull) == len(columns):
            return found
        return found[..., torch.tensor(columns) - hull.start]

    def _chunked_cells(self, rows: Sequence[int], columns: Sequence[int], busy: int) -> Tensor:
        """Return the same from chunks of tokens, of which `busy` have a row or a column."""
        tokens, span = self.tokens, rows[-1] + 1 - columns[0]
        if (len(columns) + tokens.size) * span < len(rows) * busy:  # a few columns are products with unit vectors
            some = tokens.narrow(columns[0], rows[-1] + 1)
            picks = torch.zeros(1, 1, span, len(columns), dtype=self.dtype, device=self.device)
            at = torch.tensor(columns, device=self.device) - columns[0]
            picks[:, :, at, torch.arange(len(columns), device=self.device)] = 1.0
            return product(some, picks).index_select(2, torch.tensor(rows, device=self.device) - columns[0])
        many = self._transitions is not None or len(rows) >= _FEW_ROWS
        return walk.cells(tokens, rows, columns, self.transitions if many else None)[0]

    def transitions(self) -> walk.Transitions:
        """Return what many chunks of tokens do to the state; kept where no graph is recorded."""
        if self.needs_graph:
            return walk.transitions_of(self.tokens)
        if self._transitions is None:
            self._transitions = walk.transitions_of(self.tokens)
        return self._transitions

    def row_tiles(self, at: Tile, blocks: Sequence[ColumnBlock]) -> Iterator[Tensor]:
        for found in self._row_tiles(at, blocks, factored=False):
            yield found if isinstance(found, Tensor) else found[0] @ found[1].mT

    def tile_factors(self, at: Tile, blocks: Sequence[ColumnBlock]) -> Iterator[Tensor | tuple[Tensor, Tensor]]:
        yield from self._row_tiles(at, blocks, factored=True)

    def _row_tiles(
        self, at: Tile, blocks: Sequence[ColumnBlock], *, factored: bool
    ) -> Iterator[Tensor | tuple[Tensor, Tensor]]:
        """Yield tiles; what they need of the columns is kept for all rows of the same batches and heads."""
        key = at.batches, at.heads
        if self._blocks is None or self._blocks[0] != key:
            self._blocks = None  # two at once would take twice the memory
            batches, heads = (slice(span.start, span.stop) for span in key)
            some = self.tokens.mapped(Tensor.detach).select(batches, heads)
            self._blocks = key, some, tiles.blocks_of(some)
        _, tokens, of_columns = self._blocks
        rows = _range_within(self.rows, at.rows)
        spans = [_range_within(self.columns, block.columns) for block in blocks]
        found = tiles.row_tiles(tokens, of_columns, rows, spans, factored=factored)
        for span, tile in zip(spans, found, strict=True):  # factors are those of tiles before the diagonal
            yield self._cells_with_diagonal(tile, tokens, rows, span) if isinstance(tile, Tensor) else tile

    @staticmethod
    def _cells_with_diagonal(found: Tensor, tokens: GatedTokens, rows: range, columns: range) -> Tensor:
        """Return the cells of some rows and columns with what is added to the diagonal."""
        if tokens.diagonal is None or rows.stop <= columns.start or columns.stop <= rows.start:
            return found
        own = tokens.diagonal if tokens.is_constant(tokens.diagonal) else tokens.diagonal[:, :, rows.start : rows.stop]
        i = torch.arange(rows.start, rows.stop, device=found.device).unsqueeze(-1)
        j = torch.arange(columns.start, columns.stop, device=found.device)
        return torch.where(i == j, found + spread_values(own, tokens), found)

    def defined_cells(self, rows: Tensor) -> Tensor:
        place = self.device if has_float64(self.device) else torch.device("cpu")
        found = defined(self.tokens.mapped(lambda t: t.detach().to(place, torch.float64)), rows + self.rows.start)
        return found[..., self.columns.start : self.columns.stop]

    # ----------------------------------------------------------------------------------------------------- statistics

    def collect(self, statistics: Sequence[Statistic]) -> list[Any]:
        # Blocks that are kept while statistics are computed are released after that.
        try:
            return super().collect(statistics)
        finally:
            self._blocks = None

    # ---------------------------------------------------------------------------------------------- parts and copies

    def _with_tokens(
        self,
        tokens: GatedTokens,
        rows: range | None = None,
        columns: range | None = None,
        ids: tuple[Tensor, Tensor] | None = None,
        versions: tuple[Version, ...] | None = None,
    ) -> TransportWeights:
        """Return the weights of other tokens, rows, columns, batches and heads."""
        rows, columns = self.rows if rows is None else rows, self.columns if columns is None else columns
        whole = self.gradient if self.requires_grad else None
        ids, versions = self._ids if ids is None else ids, self._versions if versions is None else versions
        return TransportWeights(tokens, rows, columns, ids, versions, whole)

    def part(
        self,
        batches: Tensor | slice | None = None,
        heads: Tensor | slice | None = None,
        rows: range | None = None,
        columns: range | None = None,
    ) -> TransportWeights:
        # The weights of some batches, heads, queries and keys; None stands for all of an axis.
        some = self
        if batches is not None or heads is not None:
            batches, heads = (slice(None) if index is None else index for index in (batches, heads))
            ids = self.batch_ids[batches], self.head_ids[heads]
            there = batches if isinstance(batches, slice) else to_device(batches, self.device)
            some = self._with_tokens(self.tokens.select(there, heads), ids=ids)
        m, n = self.shape[2:]
        if (rows is None or len(rows) == m) and (columns is None or len(columns) == n):
            return some
        window = some._with_tokens(some.tokens, _range_within(self.rows, rows), _range_within(self.columns, columns))
        window._transitions = some._transitions  # of the same tokens
        return window

    def detach(self) -> TransportWeights:
        # The same weights without a graph.
        if not self.requires_grad:
            return self
        found = TransportWeights(self.tokens.mapped(Tensor.detach), self.rows, self.columns, self._ids, self._versions)
        found._transitions = self._transitions
        return found

    def full_precision(self) -> TransportWeights:
        # The same matrix with queries and keys in the dtype of the computation.
        tokens = self.tokens
        if tokens.q.dtype is self.dtype:
            return self
        return self._with_tokens(replace(tokens, q=tokens.q.to(self.dtype), k=tokens.k.to(self.dtype)))

    @public("A.to()")
    def moved(self, device: torch.device, dtype: torch.dtype | None) -> TransportWeights | None:
        # None for dtypes in which the matrix cannot be computed.
        if dtype not in (None, torch.float32, torch.float64):
            return None
        self.check_unchanged()
        tokens = self.tokens.mapped(lambda t: t.to(device))
        if dtype is not None:
            tokens = tokens.mapped(lambda t: t.to(dtype))
        return self._with_tokens(tokens, versions=())


def spread_values(v: Tensor, tokens: GatedTokens) -> Tensor:
    """Return vectors with the heads of the matrix, in the dtype of cells; one head broadcasts."""
    own = v.shape[1]
    return v.to(tokens.dtype) if own == 1 else v.to(tokens.dtype).repeat_interleave(tokens.heads // own, dim=1)


def _range_within(whole: range, part: range | None) -> range:
    """Return the places of a part, which is counted from the start of the whole."""
    return whole if part is None else range(whole.start + part.start, whole.start + part.stop)


def _count_below(places: Sequence[int], limit: int) -> int:
    """Return how many of some places in ascending order are below a limit."""
    if isinstance(places, range):
        return min(max(limit - places.start, 0), len(places))
    return sum(place < limit for place in places)


def _count_chunks(places: Sequence[int], size: int) -> int:
    """Return in how many chunks of a size some places in ascending order lie."""
    if isinstance(places, range):
        return -(-places.stop // size) - places.start // size
    return len({place // size for place in places})


def _sorted_places(places: range | Tensor, start: int) -> tuple[Sequence[int], Tensor | None]:
    """Return places in ascending order, each once, counted from `start` places before; and how to put them back."""
    if isinstance(places, range):
        return range(start + places.start, start + places.stop), None
    unique, order = torch.unique(places.to("cpu"), return_inverse=True)
    same = len(unique) == len(order) and bool((order[1:] > order[:-1]).all())
    return [start + place for place in unique.tolist()], None if same else order


def defined(tokens: GatedTokens, rows: Tensor) -> Tensor:
    """Return some rows by the definition, token by token from the last, shape (batch, heads, len(rows), n).

    Going back, ``x_i = q_iᵀ M_i ... M_{j+1}``, so that the cell of column j is ``write_j x_i · k_j``.

    Parameters
    ----------
    tokens : GatedTokens
        Queries, keys and gates, in float64.
    rows : Tensor of int64, shape (count,)
        Which rows.
    """
    heads = tokens.heads
    tokens = tokens.mapped(lambda t: t.repeat_interleave(heads // t.shape[1], dim=1))

    def of(t: Tensor, j: int) -> Tensor:
        """Return the vectors of a token, shape (batch or 1, heads, 1, size)."""
        return t if tokens.is_constant(t) else t[:, :, j : j + 1]

    q = tokens.q * tokens.scale
    rows = rows.to(q.device)
    x = torch.zeros(tokens.batch, heads, len(rows), tokens.size, dtype=q.dtype, device=q.device)
    found = torch.zeros(tokens.batch, heads, len(rows), tokens.n, dtype=q.dtype, device=q.device)
    for j in reversed(range(tokens.n)):
        own = (rows == j).unsqueeze(-1)
        x = torch.where(own, q[:, :, j : j + 1], x)
        k = of(tokens.k, j)
        cells = (x * k).sum(-1)
        cells = cells if tokens.write is None else cells * of(tokens.write, j).squeeze(-1)
        if tokens.diagonal is not None:
            cells = cells + of(tokens.diagonal, j).squeeze(-1) * own.squeeze(-1)
        found[..., j] = cells
        if tokens.erase is not None:
            x = x - (x * k).sum(-1, keepdim=True) * of(tokens.erase, j) * k
        elif tokens.p is not None and tokens.r is not None:
            x = x + (x * of(tokens.p, j)).sum(-1, keepdim=True) * of(tokens.r, j)
        if tokens.decay is not None:
            x = x * of(tokens.decay, j).exp()
    return found
