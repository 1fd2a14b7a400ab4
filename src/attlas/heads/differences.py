"""Which heads attend differently in two recordings: of two texts, of two checkpoints, of a model that was changed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attlas.errors import DtypeError, OutOfRangeError, RecordingError, ShapeError, kind, public
from attlas.foundation.checks import whole_number
from attlas.matrix import AttentionMatrix
from attlas.recording.atlas import Atlas, Entry
from attlas.recording.atlas.table import frame
from attlas.recording.stacking import same_settings

_CELLS = 1 << 20  # cells of a layer that are computed at a time: what fits into the cache of a core
_KINDS = ("self", "linear")  # queries and keys are tokens of the one text that is aligned


class ChangedCell(NamedTuple):
    """A pair of query and key whose weight has changed; a list of them is made by `Changes.cells`.

    Parameters
    ----------
    query : (int, int)
        Position of the query in the first text, and in the second.
    key : (int or None, int or None)
        Position of the key in both; None in a text that lacks it, where its weight is 0.
    first, second : float
        The weight in the first recording, and in the second.

    Examples
    --------
    >>> from attlas.heads import ChangedCell
    >>> ChangedCell((4, 5), (2, 2), 0.5, 0.25).query
    (4, 5)
    """

    query: tuple[int, int]
    key: tuple[int | None, int | None]
    first: float
    second: float


class _Places(NamedTuple):
    """The aligned queries and keys of one attention, and the keys of each side that the other one lacks.

    All are indices of the two matrices, ascending: `rows` and `columns` of shape (count, 2), the others (count,).
    """

    rows: Tensor
    columns: Tensor
    only_first: Tensor
    only_second: Tensor


@dataclass(frozen=True, eq=False)
class _Pair:
    """One attention in both recordings; what `Changes` knows of it."""

    first: Entry
    second: Entry
    places: _Places
    moved: Tensor  # (heads,)
    largest: Tensor  # (heads, aligned queries): the largest change of a weight in the row of each


@dataclass(frozen=True, eq=False)
class Changes:
    """How far each head attends differently in two recordings; made by `changes`.

    Attributes
    ----------
    tokens : Tensor of int, shape (count, 2)
        Positions of the tokens that stand at the same place of both texts: in the first text, and in the second.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import heads
    >>> from attlas.recording.atlas import Atlas, Entry
    >>> def recording(scale):
    ...     A = attlas.attend(scale * torch.eye(4)[None, None], torch.eye(4)[None, None])
    ...     return Atlas([Entry("attn", 0, "self", 0, (0,), (0, 4), 0, (1, 1, 4, 4), A)])
    >>> found = heads.changes(recording(2.0), recording(9.0))
    >>> [(record["head"], round(record["moved"], 2)) for record in found.records()]
    [(0, 0.49)]
    >>> cell = found.cells(0, 0, count=1)[0]
    >>> cell.query == cell.key, round(cell.first, 2), round(cell.second, 2)
    (True, 0.48, 0.97)
    """

    tokens: Tensor
    _pairs: tuple[_Pair, ...]

    def __len__(self) -> int:
        return sum(len(pair.first.heads) for pair in self._pairs)

    @public("Changes.records()")
    def records(self, data: str = "records") -> Any:
        """Return one record for each head, those that changed most first.

        Parameters
        ----------
        data : {"records", "pandas", "polars"}, default "records"
            A list of dicts, or a data frame of a library that is installed.

        Returns
        -------
        list of dict, or data frame
            ``layer``, ``head``, ``kind``, ``name`` and ``call`` of the head, and ``moved``, the share of its weights
            that went elsewhere, from 0 to 1.

        Raises
        ------
        ShapeError
            If `data` is unknown.
        """
        table = [
            {"layer": e.layer, "head": e.heads[head], "kind": e.kind, "name": e.name, "call": e.call, "moved": moved}
            for e, pair in ((pair.first, pair) for pair in self._pairs)
            for head, moved in enumerate(pair.moved.tolist())
        ]
        return frame(sorted(table, key=lambda record: -record["moved"]), data)

    @public("Changes.cells()")
    def cells(self, layer: int | str, head: int, count: int = 8) -> list[ChangedCell]:
        """Return the pairs of query and key of a head whose weights changed most, the largest change first.

        Parameters
        ----------
        layer : int or str
            Number of the layer among those of self-attention, or the path of its module.
        head : int
            Number of the head, as the model counts it.
        count : int, default 8
            How many.

        Returns
        -------
        list of ChangedCell
            Those that changed at all.

        Raises
        ------
        OutOfRangeError
            If no such head was compared.
        ShapeError
            If `count` is no whole number above 0.
        """
        count = whole_number("count", count, "count=8")
        pair = next((pair for pair in self._pairs if layer in (pair.first.layer, pair.first.name)), None)
        if pair is None or head not in pair.first.heads:
            first = self._pairs[0].first
            rule, fix = "the head must be one of those that were compared.", f"cells({first.layer}, {first.heads[0]})"
            raise OutOfRangeError(rule, f"layer {layer!r}, head {head!r}", fix)
        return _largest_cells(pair, pair.first.heads.index(head), count)


@torch.no_grad()
@public("heads.changes()")
def changes(
    first: Atlas, second: Atlas, *, every: int = 1, progress: Callable[[float], object] | None = None
) -> Changes:
    """Return which heads attend differently in two recordings, and where.

    Parameters
    ----------
    first, second : Atlas
        Two recordings of one text each, with the same attentions: of two texts, of two checkpoints, or of a model as it
        is and inside of `attlas.intervene`.
    every : int, default 1
        Only every so many-th query is compared: a sample, of which the numbers are exact.
    progress : callable, optional
        Is told the share that is done, from 0 to 1. What it raises ends the comparison.

    Returns
    -------
    Changes
        `records` are the heads, those that changed most first; `cells` the pairs of tokens of one head.

    Raises
    ------
    DtypeError
        If one is no Atlas.
    ShapeError
        If one has several texts, if both are of different lengths and without ids, or if `every` is no whole number
        above 0.
    RecordingError
        If no matrix of self-attention is in both.

    See Also
    --------
    attlas.divergence : the divergence of each row of two matrices, with gradients.
    effect : what leaving out a head does to the loss.

    Notes
    -----
    The number of a head is ``Σ |P_ij - Q_ij| / Σ (P_ij + Q_ij)`` over all queries that both texts have: the share of
    its weights that went to other keys. Where rows sum to 1 it is the mean total variation distance of the rows. Of
    signed weights the absolute values stand in the denominator.

    Tokens are aligned by their ids: what both texts have in the same order is at the same place, and so are words that
    were replaced by as many tokens. An inserted word shifts nothing. The weight of a key that one text lacks counts as
    moved, and queries that one text lacks are left out. Recordings without ids are compared place by place. Of
    attention with equal queries, keys and settings nothing is computed, as in layers before the first that changed.
    Cross-attention, and layers whose weights were not kept, are left out.

    Cost: all cells of both recordings once, in blocks of a million; linear memory. 0.7 s of one core for 24 heads at
    1,024 tokens.

    Examples
    --------
    >>> import torch, attlas, attlas.models
    >>> from attlas import heads
    >>> from attlas.interventions import Ablate
    >>> from transformers import AutoModelForCausalLM
    >>> model = AutoModelForCausalLM.from_pretrained(attlas.models.path())
    >>> ids = heads.repeated_block(4096, period=32, blocks=1)
    >>> with attlas.record(model) as before, torch.no_grad():
    ...     _ = model(ids)
    >>> with (
    ...     attlas.intervene(model, Ablate(heads={0: [0]})),
    ...     attlas.record(model) as after,
    ...     torch.no_grad(),
    ... ):
    ...     _ = model(ids)
    >>> found = heads.changes(before, after).records()
    >>> found[0]["layer"] > 0, found[0]["moved"] > 0.1, found[-1]["moved"]
    (True, True, 0.0)
    """
    for name, atlas in (("first", first), ("second", second)):
        if not isinstance(atlas, Atlas):
            fix = "with attlas.record(model) as atlas: model(ids)"
            raise DtypeError(f"{name} must be a recording.", kind(atlas), fix)
    every = whole_number("every", every, "every=4")
    both = _entries_in_both(first, second)
    tokens = _aligned_tokens(first, second, both)
    pairs: list[_Pair] = []
    for done, (one, other) in enumerate(both):
        places = _places(one, other, tokens)
        places = places._replace(rows=places.rows[::every])

        def tell(share: float, done: int = done) -> None:
            if progress is not None:
                progress((done + share) / len(both))

        pairs.append(_compared(one, other, places, tell))
    return Changes(tokens, tuple(pairs))


def aligned(first: Sequence[int], second: Sequence[int]) -> list[tuple[int, int]]:
    """Return the places that stand for each other in two texts, given their token ids, ascending in both.

    Parameters
    ----------
    first, second : sequence of int
        Token ids.

    Examples
    --------
    >>> aligned([1, 2, 3, 4], [1, 9, 9, 3, 4]), aligned([1, 2, 3], [1, 7, 3])
    ([(0, 0), (2, 3), (3, 4)], [(0, 0), (1, 1), (2, 2)])
    """
    most = min(len(first), len(second))
    start = next((i for i in range(most) if first[i] != second[i]), most)
    most -= start
    stop = next((i for i in range(most) if first[-1 - i] != second[-1 - i]), most)
    inner = list(first[start : len(first) - stop]), list(second[start : len(second) - stop])
    found = [(i, i) for i in range(start)]
    # Only what lies between the first and the last difference is matched: that takes more than linear time.
    for tag, i, i_stop, j, j_stop in SequenceMatcher(None, *inner, autojunk=False).get_opcodes():
        if tag == "equal" or i_stop - i == j_stop - j:
            found += [(start + i + step, start + j + step) for step in range(i_stop - i)]
    return found + [(len(first) - i, len(second) - i) for i in range(stop, 0, -1)]


def _entries_in_both(first: Atlas, second: Atlas) -> list[tuple[Entry, Entry]]:
    """Return the attentions of one text with itself whose weights both recordings have, with as many heads."""
    others = {(entry.name, entry.call, entry.heads): entry for entry in second.entries if entry.matrix is not None}
    found = []
    for entry in first.entries:
        other = others.get((entry.name, entry.call, entry.heads))
        if entry.matrix is not None and other is not None and entry.kind in _KINDS and first.has_text(entry):
            found.append((entry, other))
    if not found:
        rule = "both recordings must have the weights of an attention of the same name and heads."
        have = [sorted({entry.name for entry in atlas.entries})[:2] for atlas in (first, second)]
        raise RecordingError(rule, f"{have[0]} and {have[1]}", "record both with the same model and layers.")
    several = [entry.shape[0] for pair in found for entry in pair if entry.shape[0] != 1]
    if several:
        rule = "each recording must have one text."
        raise ShapeError(rule, f"{several[0]} texts", "record a text alone: model(ids[:1])")
    return found


def _aligned_tokens(first: Atlas, second: Atlas, both: list[tuple[Entry, Entry]]) -> Tensor:
    """Return the positions of the tokens that both texts have, shape (count, 2), by their ids where these are known."""
    ids = [None if atlas.ids is None else atlas.ids.flatten().tolist() for atlas in (first, second)]
    sizes = [max(max(e.queries[1], e.first_key + e.shape[3]) for e in side) for side in zip(*both, strict=True)]
    if ids[0] is None or ids[1] is None:
        if sizes[0] != sizes[1]:
            rule = "recordings without ids of their tokens must have the same length."
            found = f"{sizes[0]} and {sizes[1]} tokens"
            raise ShapeError(rule, found, "attlas.record(model, tokens=tokenizer) of both, which keeps the ids.")
        return torch.arange(sizes[0]).unsqueeze(1).expand(-1, 2)
    return torch.tensor(aligned(ids[0], ids[1]), dtype=torch.int64).reshape(-1, 2)


def _places(first: Entry, second: Entry, tokens: Tensor) -> _Places:
    """Return which queries and keys of two matrices belong together."""
    firsts = torch.tensor([first.queries[0], second.queries[0]]), torch.tensor([first.first_key, second.first_key])
    (m, n), (rows, columns) = first.shape[2:], second.shape[2:]
    sizes = torch.tensor([m, rows]), torch.tensor([n, columns])
    found = []
    for offset, size in zip(firsts, sizes, strict=True):
        places = tokens - offset
        found.append(places[((places >= 0) & (places < size)).all(dim=1)])
    lacking = [torch.ones(count, dtype=torch.bool) for count in (n, columns)]
    for side, here in enumerate(lacking):
        here[found[1][:, side]] = False
    return _Places(found[0], found[1], lacking[0].nonzero()[:, 0], lacking[1].nonzero()[:, 0])


def _compared(first: Entry, second: Entry, places: _Places, tell: Callable[[float], object]) -> _Pair:
    """Return how far the heads of an attention attend differently, from blocks of rows."""
    count, heads = len(places.rows), first.shape[1]
    if _is_same(first.need_matrix(), second.need_matrix()):
        return _Pair(first, second, places, torch.zeros(heads, dtype=torch.float64), torch.zeros(heads, count))
    changed, total = torch.zeros(2, heads, dtype=torch.float64)
    largest = torch.zeros(heads, count)
    start = 0
    while start < count:
        # The first block of a causal matrix has few keys, and the last one all of them.
        step = max(_CELLS // max(heads * len(_columns_before(first, second, places, min(start + 64, count))[0]), 1), 1)
        stop = min(start + step, count)
        for part, weight in _differences(first, second, places, range(start, stop)):
            changed += part.sum(dim=(1, 2)).double().cpu()
            total += weight.double().cpu()
            if part.shape[2]:
                largest[:, start:stop] = largest[:, start:stop].maximum(part.amax(dim=2).float().cpu())
        tell(stop / count)
        start = stop
    moved = torch.where(total > 0, changed / total, 0.0).clamp(max=1.0)
    return _Pair(first, second, places, moved, largest)


def _differences(first: Entry, second: Entry, places: _Places, rows: range) -> list[tuple[Tensor, Tensor]]:
    """Return |P - Q| of some aligned rows, shape (heads, rows, keys), and the sum of both sizes by head.

    The first part has the aligned keys, the two others the keys that the other text lacks.
    """
    P, Q = (entry.need_matrix().weights for entry in (first, second))
    columns, only_first, only_second = _columns_before(first, second, places, rows.stop)
    there = places.rows[rows.start : rows.stop]
    p = P.cells(_run_of(there[:, 0]), _run_of(columns[:, 0]))[0]
    q = Q.cells(_run_of(there[:, 1]), _run_of(columns[:, 1]))[0]
    weight = p.abs().sum(dim=(1, 2)) + q.abs().sum(dim=(1, 2))
    found = [(p.sub_(q).abs_(), weight)]
    for weights, side, keys in ((P, 0, only_first), (Q, 1, only_second)):
        if len(keys):
            alone = weights.cells(there[:, side], keys)[0].abs()
            found.append((alone, alone.sum(dim=(1, 2))))
    return found


def _run_of(places: Tensor) -> range | Tensor:
    """Return ascending places as a range where they follow each other: cells of a range need no gathering."""
    first, last = (int(places[0]), int(places[-1])) if len(places) else (0, -1)
    return range(first, last + 1) if last - first + 1 == len(places) else places


def _columns_before(first: Entry, second: Entry, places: _Places, stop: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the keys that the aligned rows up to `stop` may see: all, or of causal matrices those before the last."""
    _, columns, only_first, only_second = places
    masks = [entry.need_matrix().mask for entry in (first, second)]
    if not all(mask is not None and mask.is_causal for mask in masks):
        return columns, only_first, only_second
    row = places.rows[stop - 1]
    ends = [e.queries[0] + int(row[side]) - e.first_key + 1 for side, e in enumerate((first, second))]
    return (
        columns[(columns < torch.tensor(ends)).any(dim=1)],
        only_first[only_first < ends[0]],
        only_second[only_second < ends[1]],
    )


def _is_same(A: AttentionMatrix, B: AttentionMatrix) -> bool:
    """Return whether two matrices are computed from equal numbers in the same way."""
    one, other = A.weights.softmax, B.weights.softmax
    if one is None or other is None:
        return False
    p, q = one.problem, other.problem
    pairs = [(p.score, q.score), (p.mask, q.mask), (p.sink, q.sink), (p.q, q.q), (p.k, q.k)]
    return p.partial == q.partial and all(same_settings(a, b) for a, b in pairs)


def _largest_cells(pair: _Pair, head: int, count: int) -> list[ChangedCell]:
    """Return the cells of one head that changed most: they stand in the rows whose largest change is among them."""
    most, rows = pair.largest[head].topk(min(count, pair.largest.shape[1]))
    first, second, places = pair.first, pair.second, pair.places
    P, Q = (entry.need_matrix()[:, head : head + 1].weights for entry in (first, second))
    found: list[ChangedCell] = []
    for row in rows[most > 0].tolist():
        i, j = places.rows[row, :1], places.rows[row, 1:]
        p, q = P.cells(i, range(first.shape[3]))[0, 0, 0].cpu(), Q.cells(j, range(second.shape[3]))[0, 0, 0].cpu()
        query = first.queries[0] + int(i), second.queries[0] + int(j)
        a, b = first.first_key, second.first_key
        cells: list[tuple[tuple[int | None, int | None], Any, Any]] = []
        cells += [((a + x, b + y), p[x], q[y]) for x, y in _largest_of(p, q, places.columns, count)]
        cells += [((a + x, None), p[x], 0.0) for x in _largest_alone(p, places.only_first, count)]
        cells += [((None, b + y), 0.0, q[y]) for y in _largest_alone(q, places.only_second, count)]
        found += [ChangedCell(query, key, float(before), float(after)) for key, before, after in cells]
    changed = [cell for cell in found if cell.first != cell.second]
    return sorted(changed, key=lambda cell: -abs(cell.first - cell.second))[:count]


def _largest_of(p: Tensor, q: Tensor, columns: Tensor, count: int) -> list[list[int]]:
    """Return the aligned keys of a row with the largest changes."""
    change = (p[columns[:, 0]] - q[columns[:, 1]]).abs()
    chosen: list[list[int]] = columns[change.topk(min(count, len(change))).indices].tolist()
    return chosen


def _largest_alone(weights: Tensor, keys: Tensor, count: int) -> list[int]:
    """Return those of some keys with the largest weights."""
    chosen: list[int] = keys[weights[keys].abs().topk(min(count, len(keys))).indices].tolist()
    return chosen
