"""Which blocks of a matrix a mask forbids or allows whole: what `Mask.coverage` says of them, asked on the host.

A mask that is made of others is not asked itself: the states of its parts are combined. Each part is asked about
rectangles of blocks, the whole matrix first, which are halved where they are partial. What is found is kept as long as
the mask is, for each size, device and choice of batches and heads.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from attlas.engine.backends.flex.masks import Pairs, on_cpu, pairs_of
from attlas.engine.held import parts_and_tensors
from attlas.engine.problem import Problem
from attlas.foundation.devices import changes_of, to_device
from attlas.foundation.tiles import Tile
from attlas.masks import custom, documents, runs, selected
from attlas.masks.base import And, BlockState, Combined, Mask, Not, Or
from attlas.masks.heads import Heads
from attlas.masks.placed import Placed

BLOCK = 128  # rows and columns of a block, the size that FlexAttention has by default
EMPTY, PARTIAL, FULL = (state.value for state in (BlockState.EMPTY, BlockState.PARTIAL, BlockState.FULL))

#: For each mask, the tensors that it was made of and how often they had changed, its function, and its blocks.
_blocks_of_masks: WeakKeyDictionary[Mask, dict[Any, tuple[list[tuple[Tensor, int | None]], Pairs, Any]]] = (
    WeakKeyDictionary()
)


def block_mask_of(problem: Problem) -> tuple[Pairs, Any]:
    """Return the mask of a problem as a function of one pair, and as a BlockMask of torch.

    Raises
    ------
    Untranslatable
        If the mask has no such form.
    """
    mask = problem.mask
    if mask is None:
        raise TypeError("there is no mask")
    at = on_cpu(problem.tile(*map(range, problem.shape)))
    # The batches and heads that the matrix has, as the user counts them: of others, the mask has other blocks.
    chosen = None if problem.ids is None else tuple(tuple(ids.tolist()) for ids in problem.ids)
    key, tensors = (problem.shape, problem.device, chosen), _tensors_of_mask(mask)
    # What was made for this mask before holds as long as its tensors are the same, unchanged.
    changes = [(t, changes_of(t)) for t in tensors]
    found = _blocks_of_masks.get(mask, {}).get(key)
    if found is not None and _are_unchanged(found[0], changes):
        return found[1:]
    pairs = pairs_of(mask, at, problem.device)
    made = _block_mask(states_of(mask, at), at, pairs, problem.device)
    _blocks_of_masks.setdefault(mask, {})[key] = changes, pairs, made
    return pairs, made


def _tensors_of_mask(mask: Mask) -> list[Tensor]:
    """Return the tensors that a mask and its parts are made of, by whose changes the kept blocks become outdated."""
    parts, tensors = parts_and_tensors(mask)
    of_documents = [part for part in parts if isinstance(part, documents.Documents)]
    return tensors + [ids.given for part in of_documents for ids in (part.keys, part.queries)]


def _are_unchanged(known: list[tuple[Tensor, int | None]], now: list[tuple[Tensor, int | None]]) -> bool:
    """Return whether tensors are the same ones, unchanged; torch does not count the changes of all."""
    return len(known) == len(now) and all(
        a is b and before is not None and before == after
        for (a, before), (b, after) in zip(known, now, strict=True)
    )  # fmt: skip


def states_of(mask: Mask, at: Tile) -> Tensor:
    """Return the state of each block, int8 of shape (batches or 1, heads or 1, rows of blocks, columns of blocks).

    Parameters
    ----------
    mask : Mask
        The mask.
    at : Tile
        The whole matrix, on the CPU.
    """
    kind = type(mask)
    if isinstance(mask, (And, Or)) and kind in (And, Or):
        # EMPTY < PARTIAL < FULL as numbers, and FULL is 2: "and" is the smaller state, "or" the larger, "not" is 2 -
        # state.
        left, right = states_of(mask.left, at), states_of(mask.right, at)
        return torch.minimum(left, right) if kind is And else torch.maximum(left, right)
    if isinstance(mask, Not) and kind is Not:
        inner = states_of(mask.inner, at)
        return inner.neg().add(FULL)
    if isinstance(mask, Heads) and kind is Heads:
        return _block_states_of_heads(mask, at)
    batches, heads = varies(mask)
    sizes = len(at.batches) if batches else 1, len(at.heads) if heads else 1
    rows, columns = (-(-size // BLOCK) for size in (at.m, at.n))
    states = torch.full((*sizes, rows, columns), PARTIAL, dtype=torch.int8, device="cpu")
    # A mask without a `coverage` of its own knows nothing of blocks: all stay PARTIAL, and are asked cell by cell.
    if kind.coverage is not Mask.coverage:
        for b in range(sizes[0]):
            for h in range(sizes[1]):
                _fill_block_states(mask, at, b, h, states[b, h])
    return states


def _block_states_of_heads(mask: Heads, at: Tile) -> Tensor:
    """Return the states of a mask that differs between heads: each part is asked once.

    `places` are the heads of the matrix that a part is for.
    """
    parts = [(places, states_of(part, at)) for places, part, _ in mask.split(at)]
    batches = max(states.shape[0] for _, states in parts)
    found = torch.zeros(batches, len(at.heads), *parts[0][1].shape[2:], dtype=torch.int8, device="cpu")
    for places, states in parts:
        found[:, places] = states if states.shape[1] == 1 else states[:, places]
    return found


def _fill_block_states(mask: Mask, at: Tile, b: int, h: int, states: Tensor) -> None:
    """Fill in the block states of one batch and head.

    Ask the mask about rectangles, and halve those that are partial.
    """
    waiting = [(range(states.shape[0]), range(states.shape[1]))]
    while waiting:
        rows, columns = waiting.pop()
        found = mask.coverage(_tile_of_blocks(at, b, h, rows, columns))
        if found is not BlockState.PARTIAL:
            states[rows.start : rows.stop, columns.start : columns.stop] = found.value
        elif len(rows) > 1 or len(columns) > 1:
            waiting += _halved_rectangle(rows, columns)


def _halved_rectangle(rows: range, columns: range) -> list[tuple[range, range]]:
    """Divide a rectangle of blocks along its longer side."""
    if len(rows) >= len(columns):
        middle = (rows.start + rows.stop) // 2
        return [(range(rows.start, middle), columns), (range(middle, rows.stop), columns)]
    middle = (columns.start + columns.stop) // 2
    return [(rows, range(columns.start, middle)), (rows, range(middle, columns.stop))]


def _tile_of_blocks(at: Tile, b: int, h: int, rows: range, columns: range) -> Tile:
    """Return the tile of one batch and head that some blocks cover."""
    i, j = (range(span.start * BLOCK, min(span.stop * BLOCK, size)) for span, size in ((rows, at.m), (columns, at.n)))
    ids = at.batch_ids[b : b + 1], at.head_ids[h : h + 1]
    return type(at)(range(b, b + 1), range(h, h + 1), i, j, at.m, at.n, *ids, at.device, at.dtype)


def varies(mask: Mask) -> tuple[bool, bool]:
    """Return whether a mask may differ between batches, and between heads."""
    if isinstance(mask, Placed):
        return varies(mask.inner)
    if isinstance(mask, Combined):
        parts = [varies(part) for part in mask.parts]
        return any(b for b, _ in parts), isinstance(mask, Heads) or any(h for _, h in parts)
    shape = _MASK_SIZES.get(type(mask), lambda _: (1, 1))(mask)
    return shape[0] != 1, shape[1] != 1


_MASK_SIZES: Mapping[type[Mask], Callable[[Any], tuple[int, ...]]] = {
    documents.Padding: lambda mask: (mask.lengths.numel(), 1),
    documents.Prefix: lambda mask: (mask.lengths.numel(), 1),
    documents.Documents: lambda mask: (max(len(t.given.reshape(-1, t.count)) for t in (mask.keys, mask.queries)), 1),
    custom.TensorMask: lambda mask: mask.cells.shape,
    custom.AdditiveMask: lambda mask: mask.cells.shape,
    selected.Selected: lambda mask: mask.entries.shape,
    runs.Runs: lambda mask: mask.first.shape,
    runs.RunPerRow: lambda mask: torch.broadcast_shapes(mask.first.shape, mask.stop.shape),
}


def _block_mask(states: Tensor, at: Tile, pairs: Pairs, device: torch.device) -> Any:
    """Return the BlockMask of torch with these states; the blocks of each column are found on the CPU as well."""
    from torch.nn.attention.flex_attention import BlockMask

    # A whole block at an edge has places beyond it: torch itself counts such a block as a partial one.
    for axis, size in ((2, at.m), (3, at.n)):
        if size % BLOCK:
            edge = states.select(axis, states.shape[axis] - 1)
            edge[edge == FULL] = PARTIAL
    (some, order), (full, of_full) = (_true_columns_first(states == state) for state in (PARTIAL, FULL))
    made = BlockMask.from_kv_blocks(
        some, order, full, of_full, BLOCK_SIZE=BLOCK, mask_mod=pairs.allows, seq_lengths=(at.m, at.n)
    )
    for name, value in vars(made).items():
        if isinstance(value, Tensor):
            setattr(made, name, to_device(value, device))
    return made


def _true_columns_first(own: Tensor) -> tuple[Tensor, Tensor]:
    """Return, per row of blocks, how many are True, and all column numbers with those of the True ones first."""
    order = torch.argsort(own.to(torch.int8), dim=-1, descending=True, stable=True)
    return own.sum(-1, dtype=torch.int32), order.to(torch.int32)
