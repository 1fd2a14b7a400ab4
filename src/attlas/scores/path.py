"""The score of PaTH attention: between a key and a query, each token turns what is compared by a rank one part."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from attlas.errors import DeviceError, ShapeError, public
from attlas.foundation.checks import as_plain, check_floating, finite_number, heads_of_three_axes, is_one_or
from attlas.foundation.compat import tracing
from attlas.foundation.devices import changes_of, to_device
from attlas.foundation.tiles import Tile
from attlas.scores.base import Score, check_same_size
from attlas.scores.position import heads_of

__all__ = ["PaTH"]


class PaTH(Score):
    """Householder-like turns between key and query, ``s_ij = scale q_iᵀ H_i H_{i-1} ... H_{j+1} k_j``.

    Each token t turns by ``H_t = I - beta_t w_t w_tᵀ``. A key after the query has no weight, ``s_ij = -inf``.

    Parameters
    ----------
    w : Tensor, shape (heads, n, d) or (batch, heads, n, d)
        The vector of each token, of norm 1 in the paper. Sizes of 1 stand for every batch and every head.
    beta : Tensor or float, default 1.0
        How far each token turns, a number, or a tensor of the shape of `w` without its last axis; between 0, not at
        all, and 2, a reflection.
    scale : float, optional
        Factor of the product; the default is ``1 / sqrt(d)``.

    Raises
    ------
    ShapeError
        If `w` or `beta` has another number of axes, or `scale` is not finite; at `attend`, if the sizes are not those
        of the matrix.
    DtypeError
        If one of them is of another type.
    DeviceError
        If `beta` is on another device than `w`.

    See Also
    --------
    Forget : PaTH-FoX is the sum ``PaTH(w, beta) + Forget(log_gate)``.
    attlas.transport : the same turns without a softmax, DeltaNet.

    Notes
    -----
    Query i stands at token ``i' = i + n - m``, the last query at the last key. Give ``mask=Causal()`` too: tiles above
    the diagonal are then skipped. Gradients reach w and beta.

    A tile is computed in chunks of 64 tokens: queries are carried to the start of their chunk, keys to the end of
    theirs, and over the chunks between by products of the turns of 1, 2, 4, ... chunks. Cost: to carry queries takes
    as many operations as the dot products for d = 64, and a product of 4,096 tokens takes 3.4 times one of dot products
    in tiles on a CPU, no kernel being there for it. The turns take ``O(n d (d + 64))`` once, and ``2 d² / 64 + 64``
    numbers are kept for each token and head. Where w or beta gets a gradient, the backward computes the turns again
    for each block of rows, 1.6 times the backward without.

    References
    ----------
    .. [1] Yang et al., "PaTH attention: position encoding via accumulating Householder transformations", 2025.

    Examples
    --------
    >>> import torch, attlas
    >>> q, k, v, w = torch.randn(4, 1, 2, 100, 8)
    >>> w, beta = torch.nn.functional.normalize(w, dim=-1), 2 * torch.rand(1, 2, 100)
    >>> A = attlas.attend(q, k, attlas.PaTH(w, beta), mask=attlas.Causal())
    >>> (A @ v).shape
    torch.Size([1, 2, 100, 8])
    """

    stored = ("w", "beta", "scale")
    rounds_tokens = True
    scratch = 3  # the tile, and its parts before they are put together
    chunk_size = 64

    @public("PaTH()")
    def __init__(self, w: Tensor, beta: Tensor | float = 1.0, scale: float | None = None) -> None:
        super().__init__()
        check_floating("w must be a floating-point tensor.", "w", w, "w.float()")
        if w.ndim not in (3, 4):
            rule, fix = "w must have the axes heads, n and d, or batch, heads, n and d.", "w.unsqueeze(0)"
            raise ShapeError(rule, f"{w.ndim} axes", fix, w=w)
        if not isinstance(beta, Tensor):
            beta = torch.full(w.shape[:-1], finite_number("beta", beta, "beta=1.0"), dtype=w.dtype, device=w.device)
        check_floating("beta must be a number or a floating-point tensor.", "beta", beta, "beta.float()")
        if beta.shape != w.shape[:-1]:
            rule = "beta must have the shape of w without its last axis."
            found = f"{tuple(beta.shape)} in beta, {tuple(w.shape)} in w"
            raise ShapeError(rule, found, f"give beta of shape {tuple(w.shape[:-1])}.", beta=beta, w=w)
        if beta.device != w.device:
            rule, fix = "beta must be on the device of w.", f"beta.to({str(w.device)!r})"
            raise DeviceError(rule, f"{beta.device} and {w.device}", fix, beta=beta, w=w)
        self.w, self.beta = as_plain("w", w), as_plain("beta", beta)
        self.scale = None if scale is None else finite_number("scale", scale, "scale=1.0")
        self._kept = _KeptTurns()

    def check(self, q: Tensor, k: Tensor, heads: int) -> None:
        check_same_size("PaTH()", q, k, "give tokens of one size.")
        batch_stop = -2 if max(q.ndim, k.ndim) < 4 else -3
        batch = torch.broadcast_shapes(q.shape[:batch_stop], k.shape[:batch_stop]).numel()
        sizes, whole = tuple(self.w.shape), (batch, heads, *k.shape[-2:])
        leading = all(is_one_or(size, full) for size, full in zip(sizes[-3::-1], whole[-3::-1], strict=False))
        if leading and sizes[-2:] == whole[-2:]:
            return
        rule = "w of PaTH() must have one vector for each batch, head and key."
        found = f"{sizes} in w, (batch, heads, n, d) = {whole}"
        fix = heads_of_three_axes(sizes[-3], tuple(q.shape[:-2]))
        if not fix and heads % sizes[-3] == 0:
            fix = f"w.repeat_interleave({heads // sizes[-3]}, dim=-3), if its heads are those of grouped keys."
        given = {"w": self.w, "q (..., m, d)": q, "k (..., n, d)": k}
        fix = fix or f"give a tensor of shape {whole[1:]} or {whole}."
        raise ShapeError(rule, found, fix, arguments=given, where="attend()")

    def forward(self, q: Tensor, k: Tensor, at: Tile) -> Tensor:
        n = self.w.shape[-2]
        q = q * (q.shape[-1] ** -0.5 if self.scale is None else self.scale)
        (rows, row_order), (columns, column_order) = (
            _in_ascending_order(at.rows, at.row_index, at.n - at.m),
            _in_ascending_order(at.columns, at.column_index, 0),
        )
        q = q if row_order is None else q.index_select(-2, to_device(row_order, q.device))
        k = k if column_order is None else k.index_select(-2, to_device(column_order, k.device))
        size = min(self.chunk_size, 1 << max(n - 1, 0).bit_length())
        i, j = _pieces_by_chunk(rows, size, n), _pieces_by_chunk(columns, size, n)
        if i and j and max(i) >= min(j):
            found = _products_of_tile(self._turns_of_chunks(at, min(j), max(i), size), q, k, i, j)
        else:
            found = q.new_full((*q.shape[:-1], k.shape[-2]), -math.inf)
        for order, axis in ((row_order, -2), (column_order, -1)):
            found = found if order is None else found.index_select(axis, to_device(order.argsort(), found.device))
        return found

    def _turns_of_chunks(self, at: Tile, first: int, last: int, size: int) -> _ChunkTurns:
        """Return the turns of some chunks of the batches and heads of a tile; kept where no graph is recorded."""
        of_graph = torch.is_grad_enabled() and (self.w.requires_grad or self.beta.requires_grad)
        if of_graph or tracing() or torch.compiler.is_compiling():
            return self._computed_turns(at, range(first, last + 1), size)
        versions = (changes_of(self.w), changes_of(self.beta), self.w.data_ptr(), self.beta.data_ptr())
        key = (at.batch_ids.tolist(), at.head_ids.tolist(), at.dtype, at.device, size, versions)
        if self._kept.key != key or None in versions:
            with torch.no_grad():
                self._kept.turns = self._computed_turns(at, range(-(-self.w.shape[-2] // size)), size)
            self._kept.key = key
        return self._kept.turns  # type: ignore[return-value]  # it was made

    def _computed_turns(self, at: Tile, chunks: range, size: int) -> _ChunkTurns:
        """Return the turns of some chunks, computed from the keys and rates."""
        w, beta = (t[(None,) * (4 - t.ndim)] for t in (self.w, self.beta.unsqueeze(-1)))
        w, beta = (to_device(heads_of(t, at), at.device, at.dtype) for t in (w, beta))
        start, stop = chunks.start * size, chunks.stop * size
        w, beta = (_tokens_in_chunks(t[..., start:stop, :], size, stop - start) for t in (w, beta))
        return _ChunkTurns.of(w, -beta * w, chunks.start)

    def extra_repr(self) -> str:
        return f"w={tuple(self.w.shape)}" + ("" if self.scale is None else f", scale={self.scale}")


class _KeptTurns:
    """The turns of the batches and heads that were asked for last; a copy of the score does not take them with it."""

    key: tuple[object, ...] | None = None
    turns: _ChunkTurns | None = None

    def __deepcopy__(self, memo: object) -> _KeptTurns:
        return _KeptTurns()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return _KeptTurns, ()


def _tokens_in_chunks(t: Tensor, size: int, length: int) -> Tensor:
    """Return the tokens of an axis in chunks, with zeros after the last, shape (..., chunks, size, d)."""
    chunks: Tensor = functional.pad(t, (0, 0, 0, length - t.shape[-2])).unflatten(-2, (-1, size))
    return chunks


class _ChunkTurns(NamedTuple):
    """What the tokens of some chunks do, where ``I + p_t w_tᵀ`` is the turn of token t.

    Parameters
    ----------
    w, p : Tensor, shape (batches, heads, chunks, C, d)
        The vectors of each token.
    solved : Tensor, shape (batches, heads, chunks, C, C)
        How much each token adds up of those before it in its chunk.
    levels : list of Tensor, shape (batches, heads, chunks // 2 ** level, d, d)
        The turns of 1, 2, 4, ... chunks together.
    first : int
        Number of the first chunk.
    """

    w: Tensor
    p: Tensor
    solved: Tensor
    levels: list[Tensor]
    first: int

    @classmethod
    def of(cls, w: Tensor, p: Tensor, first: int) -> _ChunkTurns:
        """Return the turns of chunks with these vectors."""
        d, one = w.shape[-1], torch.eye(w.shape[-2], dtype=w.dtype, device=w.device)
        system = -(w @ p.mT)  # its diagonal counts as 1, and what lies above it is not read
        solved = torch.linalg.solve_triangular(system, one.expand_as(system), upper=False, unitriangular=True)
        levels = [torch.eye(d, dtype=w.dtype, device=w.device) + (solved.mT @ p).mT @ w]
        while levels[-1].shape[-3] > 1:
            before = levels[-1]
            whole = before.shape[-3] // 2 * 2
            levels.append(before[..., 1:whole:2, :, :] @ before[..., 0:whole:2, :, :])
        return cls(w, p, solved, levels, first)

    def over(self, x: Tensor, last: int, first: int) -> Tensor:
        """Return rows carried back over the chunks from the last to the first, both included."""
        last, first = last - self.first, first - self.first
        while last >= first:
            level = 0  # the largest run of chunks that ends here
            while (last + 1) % (2 << level) == 0 and last + 1 - (2 << level) >= first:
                level += 1
            x = x @ self.levels[level][..., (last + 1 >> level) - 1, :, :]
            last -= 1 << level
        return x


class _PieceOfChunk(NamedTuple):
    """The rows, or columns, of a tile in one chunk: their places in the tile, and in the chunk."""

    in_tile: slice
    in_chunk: Sequence[int]

    def places(self, device: torch.device) -> Tensor:
        """Return the places in the chunk as a tensor."""
        if isinstance(self.in_chunk, range):
            return torch.arange(self.in_chunk.start, self.in_chunk.stop, device=device)
        return to_device(torch.tensor(self.in_chunk), device)


def _in_ascending_order(span: range, index: Tensor | None, shift: int) -> tuple[Sequence[int], Tensor | None]:
    """Return the tokens of some rows or columns in ascending order, and the order in which they were given."""
    if index is None:
        return range(span.start + shift, span.stop + shift), None
    tokens, order = (index.cpu() + shift).sort()
    return tokens.tolist(), order


def _pieces_by_chunk(tokens: Sequence[int], size: int, n: int) -> dict[int, _PieceOfChunk]:
    """Return tokens in ascending order by their chunks; those that are not among the n tokens are in none."""
    found = {}
    if isinstance(tokens, range):
        first, last = max(tokens.start, 0), min(tokens.stop, n)
        for chunk in range(first // size, -(-last // size)) if first < last else ():
            own = range(max(first, chunk * size), min(last, (chunk + 1) * size))
            span = slice(own.start - tokens.start, own.stop - tokens.start)
            found[chunk] = _PieceOfChunk(span, range(own.start - chunk * size, own.stop - chunk * size))
        return found
    known = [(place, token) for place, token in enumerate(tokens) if 0 <= token < n]
    for chunk, group in groupby(known, lambda pair: pair[1] // size):
        pairs = list(group)
        span = slice(pairs[0][0], pairs[-1][0] + 1)
        found[chunk] = _PieceOfChunk(span, [token - chunk * size for _, token in pairs])
    return found


def _products_of_tile(
    turns: _ChunkTurns, q: Tensor, k: Tensor, rows: dict[int, _PieceOfChunk], columns: dict[int, _PieceOfChunk]
) -> Tensor:
    """Return the products of rows and columns in ascending order, -inf for keys after the query.

    From the last chunk to the first, the rows of later chunks are carried back to the end of each chunk.
    """
    last, chunk_places = max(rows), torch.arange(turns.w.shape[-2], device=q.device)
    stop, lead = rows[last].in_tile.stop, q.shape[:-2]
    x, frontier = q[..., stop:stop, :], last + 1  # the rows so far, at the start of a chunk
    columns = {chunk: piece for chunk, piece in columns.items() if chunk <= last}
    parts = []
    for chunk, later, carried in _carried_chunks(turns, k, rows, columns, chunk_places):
        row, column = rows.get(chunk), columns.get(chunk)
        x, frontier = turns.over(x, frontier - 1, chunk + 1), chunk
        cells = [] if column is None else [x @ carried.mT]
        if row is not None:
            w, p, solved = (t[..., chunk - turns.first, :, :] for t in (turns.w, turns.p, turns.solved))
            own, i = q[..., row.in_tile, :], row.places(q.device).unsqueeze(-1)
            added = (own @ p.mT).masked_fill(chunk_places > i, 0.0) @ solved
            if column is not None:
                of_chunk = own @ k[..., column.in_tile, :].mT + added @ later
                cells.insert(0, of_chunk.masked_fill(i < column.places(q.device), -math.inf))
            x = torch.cat([own + added @ w, turns.over(x, chunk, chunk)], -2)
        else:
            x = turns.over(x, chunk, chunk)
        if column is not None:
            width = column.in_tile.stop - column.in_tile.start
            first = stop - sum(part.shape[-2] for part in cells)
            if first:
                cells.insert(0, q.new_full((*lead, first, width), -math.inf))
            if stop < q.shape[-2]:
                cells.append(q.new_full((*lead, q.shape[-2] - stop, width), -math.inf))
            parts.append((column.in_tile, cells[0] if len(cells) == 1 else torch.cat(cells, -2)))
    done, found = 0, []
    for span, own in [*reversed(parts), (slice(k.shape[-2], 0), None)]:
        if span.start > done:
            found.append(q.new_full((*q.shape[:-1], span.start - done), -math.inf))
        if own is not None:
            found.append(own)
            done = span.stop
    return torch.cat(found, -1)


def _carried_chunks(
    turns: _ChunkTurns,
    k: Tensor,
    rows: dict[int, _PieceOfChunk],
    columns: dict[int, _PieceOfChunk],
    chunk_places: Tensor,
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield the chunks of rows and columns, the last first, with what their tokens do to the columns in them.

    These are, for each column j, the numbers ``w_t · k_j`` of the tokens t after it, 0 for the others, shape
    (..., C, columns), and the key carried to the end of the chunk, shape (..., columns, d). `chunk_places` are the
    places of a chunk, 0 to C - 1.

    The turn of token t is ``T_t = I + p_t w_tᵀ``, and the logit is ``q_i T_i ⋯ T_{j+1} k_j``. The carried key is
    ``T_C ⋯ T_{j+1} k_j = k_j + Σ_t c_t p_t`` over the tokens t > j of the chunk, with
    ``c_t = w_t · k_j + Σ_{j < s < t} (w_t · p_s) c_s``: what the turns before have added counts too. So c is the
    triangular system of `_ChunkTurns.of` solved for the numbers ``w_t · k_j``, in rows ``c = later.mT @ solved.mT``.
    """
    first = min(columns)
    chunks = sorted({*columns, *(chunk for chunk in rows if chunk >= first)}, reverse=True)
    if all(isinstance(piece.in_chunk, range) for piece in columns.values()):
        carried = _carried_neighbours(turns, k, columns, len(chunk_places))
    else:
        carried = _carried_selection(turns, k, columns, chunk_places)
    for chunk in chunks:
        yield chunk, *(carried(chunk) if chunk in columns else (k[..., :0], k[..., :0, :]))


def _carried_neighbours(
    turns: _ChunkTurns, k: Tensor, columns: dict[int, _PieceOfChunk], size: int
) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return the function from a chunk to its part of `_carried_chunks`, where the columns are neighbours.

    All chunks are computed at once.
    """
    first, stop = min(columns), max(columns) + 1
    in_tile = slice(columns[first].in_tile.start, columns[stop - 1].in_tile.stop)
    before = columns[first].in_chunk[0]  # tokens of the first chunk before the first column
    after = (stop - first) * size - before - (in_tile.stop - in_tile.start)
    keys = functional.pad(k[..., in_tile, :], (0, 0, before, after)).unflatten(-2, (-1, size))
    w, p, solved = (t[..., first - turns.first : stop - turns.first, :, :] for t in (turns.w, turns.p, turns.solved))
    later = (w @ keys.mT).tril(-1)
    carried = keys + later.mT @ (solved.mT @ p)

    def of_chunk(chunk: int) -> tuple[Tensor, Tensor]:
        """Return the columns of one chunk: the others of its places are zeros."""
        places = columns[chunk].in_chunk
        own = slice(places[0], places[-1] + 1)
        return later[..., chunk - first, :, own], carried[..., chunk - first, own, :]

    return of_chunk


def _carried_selection(
    turns: _ChunkTurns, k: Tensor, columns: dict[int, _PieceOfChunk], chunk_places: Tensor
) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return the function from a chunk to its part of `_carried_chunks`, for any columns; each chunk by itself."""

    def of_chunk(chunk: int) -> tuple[Tensor, Tensor]:
        """Return the columns of one chunk."""
        w, p, solved = (t[..., chunk - turns.first, :, :] for t in (turns.w, turns.p, turns.solved))
        keys, j = k[..., columns[chunk].in_tile, :], columns[chunk].places(k.device)
        later = (w @ keys.mT).masked_fill(chunk_places.unsqueeze(-1) <= j, 0.0)
        return later, keys + later.mT @ (solved.mT @ p)

    return of_chunk
