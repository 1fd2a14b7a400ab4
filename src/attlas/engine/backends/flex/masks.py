"""Masks as FlexAttention takes them: a function of batch, head, query and key.

Each class of attlas has its line in a table, by its exact type: a subclass may mean something else. The functions hold
no mask, so that what is kept for a mask does not keep the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attlas.engine.backends.flex.places import (
    Kind,
    OfPair,
    Untranslatable,
    binary_steps,
    code_of,
    is_counted,
    of_ids,
    reader,
)
from attlas.foundation.devices import to_device
from attlas.foundation.placed import original_tile
from attlas.foundation.tiles import Tile
from attlas.masks import custom, documents, heads, local, placed, runs, selected
from attlas.masks.base import And, Mask, Not, Or

_MOST_EDGES = 32  # positions that are compared one by one


class Pairs(NamedTuple):
    """A mask as a function of one pair.

    Parameters
    ----------
    allows : callable
        Returns whether the query may see the key, as a bool tensor.
    kind : tuple
        What it is made of.
    """

    allows: OfPair
    kind: Kind


#: Makes the function of a mask, for the matrix whose whole tile is given, with its tensors on a device.
Make = Callable[[Any, Tile, torch.device], Pairs]


def pairs_of(mask: Mask, at: Tile, device: torch.device) -> Pairs:
    """Return a mask as a function of one pair.

    Parameters
    ----------
    mask : Mask
        The mask.
    at : Tile
        The whole matrix, on the CPU.
    device : torch.device
        Where the function is computed; the tensors that it reads are copied there without waiting.

    Raises
    ------
    Untranslatable
        If a part of the mask has no such form.
    """
    make = _TRANSLATORS.get(type(mask))
    if make is None:
        raise Untranslatable(f"a mask of the class {type(mask).__name__} is no function of one pair")
    return make(mask, at, device)


def _translate_and(mask: And, at: Tile, device: torch.device) -> Pairs:
    """Translate the conjunction of two masks."""
    left, right = pairs_of(mask.left, at, device), pairs_of(mask.right, at, device)
    f, g = left.allows, right.allows
    return Pairs(lambda b, h, i, j: f(b, h, i, j) & g(b, h, i, j), ("and", left.kind, right.kind))


def _translate_or(mask: Or, at: Tile, device: torch.device) -> Pairs:
    """Translate the disjunction of two masks."""
    left, right = pairs_of(mask.left, at, device), pairs_of(mask.right, at, device)
    f, g = left.allows, right.allows
    return Pairs(lambda b, h, i, j: f(b, h, i, j) | g(b, h, i, j), ("or", left.kind, right.kind))


def _translate_not(mask: Not, at: Tile, device: torch.device) -> Pairs:
    """Translate the complement of a mask."""
    inner = pairs_of(mask.inner, at, device)
    f = inner.allows
    return Pairs(lambda b, h, i, j: ~f(b, h, i, j), ("not", inner.kind))


def _translate_heads(mask: heads.Heads, at: Tile, device: torch.device) -> Pairs:
    """Translate a mask that differs between heads: a table holds which mask each head has."""
    if torch.compiler.is_compiling():  # no number of a head can be read
        return _heads_by_number(mask, at, device)
    parts = mask.split(at)
    found = [pairs_of(part, at, device) for _, part, _ in parts]
    if len(found) == 1:
        return found[0]
    owners = torch.zeros(len(at.head_ids), dtype=torch.int32, device="cpu")
    for number, (places, _, _) in enumerate(parts):
        owners[places] = number
    owner, functions = to_device(owners, device), [part.allows for part in found]

    def allows(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Ask all masks about a pair, and keep the answer of the one that its head has."""
        own = owner[h]
        allowed = functions[0](b, h, i, j) & (own == 0)
        for number in range(1, len(functions)):
            allowed = allowed | (functions[number](b, h, i, j) & (own == number))
        return allowed

    return Pairs(allows, ("heads", *(part.kind for part in found)))


def _heads_by_number(mask: heads.Heads, at: Tile, device: torch.device) -> Pairs:
    """Translate a mask that differs between heads inside torch.compile: the head is compared with each number."""
    others = pairs_of(mask.default, at, device).allows
    own = [(head, pairs_of(part, at, device).allows) for head, part in zip(mask.heads, mask.masks, strict=True)]

    def allows(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        """Ask the mask of all other heads, then that of each head that has its own."""
        allowed = others(b, h, i, j)
        for head, f in own:
            allowed = torch.where(h == head, f(b, h, i, j), allowed)
        return allowed

    return Pairs(allows, ("heads by number",))


def _translate_band(mask: Any, at: Tile, device: torch.device) -> Pairs:
    """Translate a band along the diagonal: causal, window, or dilated."""
    shift, left, right, step = mask.first_query(at.m, at.n), mask.left, mask.right, getattr(mask, "step", 1)

    def allows(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        distance = j - i - shift
        allowed: Tensor = distance == distance  # true everywhere
        if left is not None:
            allowed = allowed & (distance >= -left)
        if right is not None:
            allowed = allowed & (distance <= right)
        if step > 1:  # remainders of positions, which are not negative
            allowed = allowed & (j % step == (i + shift % step) % step)
        return allowed

    return Pairs(allows, ("local", left is None, right is None, step > 1))


def _translate_padding_or_prefix(mask: Any, at: Tile, device: torch.device) -> Pairs:
    """Translate padding or a prefix: the first or the last keys of each sequence."""
    read, kind = reader(to_device(mask.of(at), device))
    if mask.side == "right":
        return Pairs(lambda b, h, i, j: j < read(b), ("first keys", kind))
    n = at.n
    return Pairs(lambda b, h, i, j: j >= n - read(b), ("last keys", kind))


def _translate_documents(mask: documents.Documents, at: Tile, device: torch.device) -> Pairs:
    """Translate a mask of documents: a query sees the keys that have its document id."""
    rows, columns = (
        reader(to_device(of_ids(ids.given.reshape(-1, ids.count), 0, at.batch_ids), device))
        for ids in (mask.queries, mask.keys)
    )
    # `first` is the position of the matrix's first query in the sequence.
    (query, kind), (key, of_key), first = rows, columns, mask.first(at)
    return Pairs(lambda b, h, i, j: query(b, i + first) == key(b, j), ("documents", kind, of_key))


def _translate_cells(mask: Any, at: Tile, device: torch.device) -> Pairs:
    """Translate a stored tensor of cells."""
    read, kind = reader(to_device(_select_batch_and_heads(mask.rule(mask.cells), at), device))
    return Pairs(read, ("cells", kind))


def _translate_mask_mod(mask: custom.FunctionMask, at: Tile, device: torch.device) -> Pairs:
    """Translate a ``mask_mod`` of the user."""
    f, numbers = mask.mask_mod, numbers_of(at, device)

    def allows(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        allowed: Any = f(*numbers(b, h), i, j)
        if isinstance(allowed, bool):
            return (j >= 0) & allowed
        if allowed.is_floating_point():  # tiles then say what is wrong
            raise TypeError("mask_mod must return True or False")
        return allowed.bool()  # type: ignore[no-any-return]

    return Pairs(allows, ("function", code_of(f)))


def _translate_selected_blocks(mask: selected.Selected, at: Tile, device: torch.device) -> Pairs:
    """Translate a mask that lists blocks of keys for each query: a binary search in its ascending list."""
    entries, block = of_ids(mask.entries, 0, at.batch_ids), mask.block
    count = entries.shape[-1]
    if not count:
        return Pairs(lambda b, h, i, j: j < 0, ("nothing",))
    read, kind = reader(to_device(entries, device))
    groups = to_device(at.head_ids // mask.group, device)

    def allows(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        group, asked = groups[h], j // block
        below = 0 * j  # entries of the row that are less; they ascend
        for step in binary_steps(count):
            ahead = below + step
            less = read(b, group, i, ahead.clamp(max=count) - 1) < asked
            below = torch.where((ahead <= count) & less, ahead, below)
        return (below < count) & (read(b, group, i, below.clamp(max=count - 1)) == asked)

    return Pairs(allows, ("selected", count.bit_length(), kind))


def _translate_runs(mask: runs.Runs, at: Tile, device: torch.device) -> Pairs:
    """Translate several runs of keys per query: a binary search for the last run that begins at the key or before."""
    total, most = len(mask.starts), int(mask.first.diff(dim=-1).max()) if mask.first.shape[-1] > 1 else 0
    if not total:
        return Pairs(lambda b, h, i, j: j < 0, ("nothing",))
    read, kind = reader(to_device(_select_batch_and_heads(mask.first, at), device))
    starts, stops = to_device(mask.starts, device), to_device(mask.stops, device)

    def allows(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        begin = read(b, h, i)
        count, begun = read(b, h, i + 1) - begin, 0 * begin  # runs of the row that begin at the key or before it
        for step in binary_steps(most):
            ahead = begun + step
            run = (begin + ahead - 1).clamp(max=total - 1)
            begun = torch.where((ahead <= count) & (starts[run] <= j), ahead, begun)
        return (begun > 0) & (stops[(begin + begun - 1).clamp(min=0)] > j)

    return Pairs(allows, ("runs", most.bit_length(), kind))


def _translate_run(mask: runs.RunPerRow, at: Tile, device: torch.device) -> Pairs:
    """Translate one run of keys per query, from `first` up to `stop`."""
    (first, kind), (stop, of_stop) = (
        reader(to_device(_select_batch_and_heads(t, at), device)) for t in (mask.first, mask.stop)
    )
    return Pairs(lambda b, h, i, j: (j >= first(b, h, i)) & (j < stop(b, h, i)), ("run", kind, of_stop))


def _translate_bits(mask: runs.Bits, at: Tile, device: torch.device) -> Pairs:
    """Translate a mask that is stored as bits, eight keys in a byte."""
    read, kind = reader(to_device(_select_batch_and_heads(mask.packed, at), device))
    return Pairs(lambda b, h, i, j: ((read(b, h, i, j // 8).int() >> (j % 8)) & 1) > 0, ("bits", kind))


def _translate_placed(mask: placed.Placed, at: Tile, device: torch.device) -> Pairs:
    """Translate a mask at the positions of another matrix: its rows and columns are shifted."""
    if mask.device is not None:
        raise Untranslatable("a mask is bound to another device")
    inner = pairs_of(mask.inner, original_tile(at, mask.rows, mask.columns), device)
    f, row, column = inner.allows, mask.rows.start, mask.columns.start
    return Pairs(lambda b, h, i, j: f(b, h, i - row, j - column), ("placed", inner.kind))


def _translate_outside(mask: placed.OutsideRectangle, at: Tile, device: torch.device) -> Pairs:
    """Translate the complement of a rectangle of queries and keys, both given as runs of positions."""
    # Edges alternate: a run begins at each even one, and ends before the next. They are counted from this matrix's
    # first row and column; a last run without an end has no second edge.
    queries, keys = (
        None if part is None else tuple(edge - first for edge in part.edges if edge < placed.OPEN_END)
        for part, first in ((mask.queries, mask.row), (mask.keys, mask.column))
    )
    if max(len(queries or ()), len(keys or ())) > _MOST_EDGES:
        raise Untranslatable("the positions of an intervention are too many")

    def inside(edges: tuple[int, ...] | None, place: Tensor) -> Tensor:
        """Return whether a place lies in a run: whether the number of edges up to it is odd."""
        found = place == place  # true everywhere
        if edges is None:
            return found
        found = ~found
        for edge in edges:
            found = found ^ (place >= edge)
        return found

    kind = ("outside", *(None if edges is None else len(edges) for edges in (queries, keys)))
    return Pairs(lambda b, h, i, j: ~(inside(queries, i) & inside(keys, j)), kind)


_TRANSLATORS: Mapping[type[Mask], Make] = {
    And: _translate_and,
    Or: _translate_or,
    Not: _translate_not,
    heads.Heads: _translate_heads,
    local.Causal: _translate_band,
    local.Window: _translate_band,
    local.Dilated: _translate_band,
    documents.Padding: _translate_padding_or_prefix,
    documents.Prefix: _translate_padding_or_prefix,
    documents.Documents: _translate_documents,
    custom.TensorMask: _translate_cells,
    custom.AdditiveMask: _translate_cells,
    custom.FunctionMask: _translate_mask_mod,
    selected.Selected: _translate_selected_blocks,
    runs.Runs: _translate_runs,
    runs.RunPerRow: _translate_run,
    runs.Bits: _translate_bits,
    placed.Placed: _translate_placed,
    placed.OutsideRectangle: _translate_outside,
}


def _select_batch_and_heads(t: Tensor, at: Tile) -> Tensor:
    """Select the batches and heads of a matrix along the first two axes of a tensor; size 1 stands for all."""
    return of_ids(of_ids(t, 0, at.batch_ids), 1, at.head_ids)


def numbers_of(at: Tile, device: torch.device) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return a function that gives batch and head as the user counts them, from places in the matrix."""
    b_ids, h_ids = (None if is_counted(ids) else to_device(ids, device) for ids in (at.batch_ids, at.head_ids))

    def numbers(b: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        return b if b_ids is None else b_ids[b], h if h_ids is None else h_ids[h]

    return numbers


def on_cpu(at: Tile) -> Tile:
    """Return a tile whose positions are made on the CPU."""
    return replace(at, device=torch.device("cpu"), id_copies=None)
