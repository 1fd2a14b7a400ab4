"""One atlas of what several ranks recorded: which part of each tensor a rank has, and what mask they have together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from attlas.distributed.batched_masks import joined_mask, joined_score
from attlas.engine.plan import Plan
from attlas.engine.problem import Problem
from attlas.errors import RecordingError, public
from attlas.foundation.compat import tree_map
from attlas.foundation.trees import rebuilt, tensors_in
from attlas.masks import Mask, runs_of
from attlas.matrix import AttentionMatrix, softmax_matrix
from attlas.recording.atlas import Atlas, Entry
from attlas.recording.atlas.entry import KINDS
from attlas.recording.atlas.serialization import mask_from, mask_spec, score_from, score_spec

Grid: TypeAlias = "list[list[tuple[int, Any]]]"  # by parts of the batch, then of the heads: a rank and what it has


class Part(NamedTuple):
    """What one rank tells the others about one entry: everything but the numbers of its tensors.

    Parameters
    ----------
    entry : Entry
        Its place and sizes, without a matrix.
    tensors : dict of Tensor
        Tensors by name, of the same shape and dtype, that take no memory.
    score, mask : dict, optional
        Score and mask as plain data.
    partial : bool, default False
        Whether its log-sum-exp counts keys that it does not have.
    """

    entry: Entry
    tensors: dict[str, Tensor]
    score: Any
    mask: Any
    partial: bool = False


@dataclass(frozen=True, eq=False)
class Divided:
    """A tensor whose parts are on several ranks.

    Parameters
    ----------
    whole : Tensor
        A tensor of its shape and dtype that takes no memory.
    places : dict
        Where the part of each rank lies in it.
    """

    whole: Tensor
    places: dict[int, tuple[slice, ...]]


def _zeros_without_memory(t: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Return zeros of the dtype and shape of a tensor, or of `shape`, that take no memory."""
    return torch.zeros(1, dtype=t.dtype, device="cpu").expand(t.shape if shape is None else shape)


def tensors_of(entry: Entry) -> dict[str, Tensor]:
    """Return the tensors of an entry that are divided over the ranks, by name."""
    found: dict[str, Tensor] = {}
    if entry.matrix is not None:
        problem = entry.matrix.problem
        found |= {"q": problem.q, "k": problem.k, "lse": entry.matrix.softmax_weights.lse()}
        found |= {} if problem.sink is None else {"sink": problem.sink}
    found |= {} if entry.query_mask is None else {"query_mask": entry.query_mask}
    for name, result in entry.statistics.items():
        found |= {f"{name}.{i}": t for i, t in enumerate(tensors_in(result))}
    return found


@public("save()")
def described(atlas: Atlas) -> dict[tuple[int, int, int], Part]:
    """Return the description of a rank's entries, by kind, layer and call.

    Raises
    ------
    RecordingError
        If a result does not have the axes of batch and heads first.
    DtypeError
        If a mask cannot be stored.
    """
    found = {}
    for entry in atlas.entries:
        if entry.values_and_norms:
            rule = "values are not joined from several processes."
            raise RecordingError(rule, "values", "attlas.record(model) without values.", entry=entry.path)
        # `_zeros_without_memory` keeps shape and dtype of a tensor, and no numbers: these stay on their rank.
        tensors = {name: _zeros_without_memory(t) for name, t in tensors_of(entry).items()}
        for name, t in tensors.items():
            if "." in name and t.shape[:2] != entry.shape[:2]:
                rule = "results of statistics must begin with the axes of batch and heads to be joined."
                text = f"{name.split('.')[0]} of shape {tuple(t.shape)}"
                raise RecordingError(rule, text, "leave that statistic out.", entry=entry.path)
        results = {name: tree_map(_zeros_without_memory, result) for name, result in entry.statistics.items()}
        mask = None if entry.query_mask is None else _zeros_without_memory(entry.query_mask)
        bare = replace(entry, matrix=None, statistics=results, query_mask=mask)
        found[KINDS.index(entry.kind), entry.layer, entry.call] = Part(
            bare, tensors, *_score_and_mask(entry), entry.matrix is not None and entry.matrix.problem.partial
        )
    return found


def _score_and_mask(entry: Entry) -> tuple[Any, Any]:
    """Return the score and the mask of an entry as plain data; a mask that is a function as the runs that it allows."""
    if entry.matrix is None:
        return None, None
    problem = entry.matrix.problem

    def put(name: str, t: Tensor) -> dict[str, Any]:
        """Return the stored form of a tensor: itself, on the CPU."""
        return {"t": t.detach().cpu().contiguous()}

    # Heads are asked by their number among those of this rank; the others will not be.
    batch, heads = (int(t.max()) + 1 if t.numel() else 0 for t in (problem.batch_ids, problem.head_ids))

    def runs(mask: Mask) -> Mask:
        """Return what a mask that cannot be stored allows."""
        return runs_of(mask, batch, heads, *problem.shape[2:], device=problem.device)

    mask = None if problem.mask is None else mask_spec(problem.mask, put, runs)
    return _cut_to_heads(score_spec(problem.score, put), problem.head_ids), _cut_to_heads(mask, problem.head_ids)


def _cut_to_heads(spec: Any, heads: Tensor, owner: str = "") -> Any:
    """Cut a stored mask or score to the recorded heads, which are renumbered from 0.

    `owner` is the class of the mask or the score whose settings these are.
    """
    if not isinstance(spec, dict):
        return spec
    t = spec.get("t")
    if isinstance(t, Tensor):
        return {"t": _table_of_heads(t, heads, owner)}
    owner = spec.get("class", owner)
    if owner == "Heads":
        named = {str(place): spec[str(head)] for place, head in enumerate(heads.tolist()) if str(head) in spec}
        spec = {"class": owner} | (named or {"0": spec["default"]}) | {"default": spec["default"]}
    elif owner == "Runs":
        return _runs_of_heads(spec, heads)
    elif owner == "Selected" and spec["indices"]["t"].ndim == 4 and spec["indices"]["t"].shape[1] > 1:
        return spec | {"indices": {"t": spec["indices"]["t"][:, heads // spec["group"]]}, "group": 1}
    return {name: _cut_to_heads(value, heads, owner) for name, value in spec.items()}


def _table_of_heads(t: Tensor, heads: Tensor, owner: str) -> Tensor:
    """Cut a tensor of a stored mask or score to the recorded heads, where it counts heads."""
    if owner == "TensorBias" and t.ndim == 3 and t.shape[0] > 1:
        return t[None, heads]
    # Three axes are (batch, m, n) in any other class.
    return t[:, heads].contiguous() if t.ndim == 4 and t.shape[1] > 1 else t


def _runs_of_heads(spec: dict[str, Any], heads: Tensor) -> dict[str, Any]:
    """Cut the tables of a stored `Runs` to the recorded heads."""
    # `first`, (batch, heads, m + 1): where the runs of each row begin in the tables `starts` and `stops`, and the end.
    first = spec["first"]["t"]
    if first.shape[1] == 1:  # one table for all heads
        return spec
    rows = first[:, heads].flatten(0, 1)
    counts = rows[:, -1] - rows[:, 0]
    places = torch.cat([torch.arange(0), *(torch.arange(int(row[0]), int(row[-1])) for row in rows)])
    rows = rows - rows[:, :1] + (counts.cumsum(0) - counts)[:, None]
    runs = {name: {"t": spec[name]["t"][places]} for name in ("starts", "stops")}
    return spec | runs | {"first": {"t": rows.unflatten(0, (len(first), len(heads)))}}


# ------------------------------------------------------------------------------------------------------------- joining


def joined(
    atlas: Atlas, told: dict[int, dict[tuple[int, int, int], Part]], grid: list[list[int]]
) -> tuple[Atlas, dict[str, dict[str, Divided]]]:
    """Return the atlas of all ranks, of tensors that take no memory, and where the parts of these are.

    Parameters
    ----------
    atlas : Atlas
        What this rank recorded.
    told : dict
        What each rank told about its entries.
    grid : list of list of int
        Ranks by parts of the batch, then of the heads.

    Returns
    -------
    Atlas
        Its entries, in the order of the model.
    dict
        For each entry by path and call, its divided tensors by name.

    Raises
    ------
    RecordingError
        If the parts do not fit together.
    """
    own = {type(part).__name__: part for e in atlas.entries if e.matrix is not None
           for part in e.matrix.problem.score.modules()}  # fmt: skip
    entries, divided = [], {}
    for key in sorted({key for row in grid for rank in row for key in told[rank]}):
        parts = _parts_by_heads([[(rank, told[rank][key]) for rank in row if key in told[rank]] for row in grid])
        entry, found = _joined_entry(parts, own)
        entries.append(entry)
        divided[f"{entry.path}, call {entry.call}"] = found
    return Atlas(entries), divided


def _parts_by_heads(grid: Grid) -> Grid:
    """Return the parts of one entry in the order of their heads, each head once; raise where the parts do not fit."""
    first = grid[0][0][1].entry if grid[0] else next(part.entry for row in grid for _, part in row)
    ordered = []
    for row in grid:
        heads = {part.entry.heads for _, part in row}
        # The same heads on all: a layer that is not divided.
        ordered.append(sorted(row, key=lambda one: one[1].entry.heads)[: 1 if len(heads) == 1 else len(row)])
    numbers = [[part.entry.heads for _, part in row] for row in ordered]
    flat = [head for some in numbers[0] for head in some]
    if any(row != numbers[0] for row in numbers) or flat != sorted(set(flat)):
        rule = "along Shard(0) ranks must have the same heads, along Shard(1) different ones, one run each."
        raise _cannot_join_error(
            first, rule, f"heads {numbers}", "placements=[Shard(0)] for parts of the batch, Shard(1) of heads"
        )
    for _, part in (one for row in ordered for one in row):
        entry = part.entry
        if entry.shape[2:] != first.shape[2:] or entry.statistics.keys() != first.statistics.keys():
            found = f"{entry.shape[2:]} and {first.shape[2:]}, statistics {[*entry.statistics]}"
            fix = "pad the texts of all ranks to one length, with an attention_mask."
            raise _cannot_join_error(first, "ranks must have texts of one length, and the same statistics.", found, fix)
        for name in ("name", "queries", "first_key"):
            if getattr(entry, name) != getattr(first, name):
                found = f"{name} = {getattr(entry, name)} and {getattr(first, name)}"
                raise _cannot_join_error(first, "ranks must have recorded the same passes of the same layers.", found)
    return ordered


def _cannot_join_error(
    entry: Entry, rule: str, found: str, fix: str = "save each rank's atlas by itself."
) -> RecordingError:
    """Return the error of entries that cannot be joined."""
    return RecordingError(rule, found, fix, entry=f"{entry.path}, call {entry.call}", where="save()")


def _joined_entry(grid: Grid, own: dict[str, Any]) -> tuple[Entry, dict[str, Divided]]:
    """Join the parts of one entry: return the entry of all, and where each rank's tensors lie in it, by name.

    `own` has this rank's scores by the name of their class. Results of statistics are tensors ``name.0``, ``name.1``...
    """
    first = grid[0][0][1].entry
    batches = [row[0][1].entry.shape[0] for row in grid]
    if any(part.entry.shape[0] != size for row, size in zip(grid, batches, strict=True) for _, part in row):
        raise _cannot_join_error(first, "along Shard(1) all ranks must have the same batch.", f"batches of {batches}")
    heads = tuple(head for _, part in grid[0] for head in part.entry.heads)
    grid = [[(rank, _with_query_mask(part, grid)) for rank, part in row] for row in _with_equal_groups(grid)]
    found: dict[str, Divided] = {}
    for name in grid[0][0][1].tensors:
        axes = {"sink": (None, 0), "query_mask": (0, None)}.get(name, (0, 1))
        if any(name not in part.tensors for row in grid for _, part in row):
            raise _cannot_join_error(first, "all ranks must have kept the same.", f"{name} on some ranks only")
        found[name] = _shape_and_parts(name, [[(r, p.tensors[name]) for r, p in row] for row in grid], axes, first)
    shape = (sum(batches), len(heads), *first.shape[2:])
    wholes = {name: [one.whole for key, one in found.items() if key.rpartition(".")[0] == name]
              for name in first.statistics}  # fmt: skip
    # Results as they were, with the tensors of all ranks in place of this rank's.
    results = {name: rebuilt(result, wholes[name]) for name, result in first.statistics.items()}
    matrix = _joined_matrix(grid, found, batches, heads, own) if "q" in found else None
    query_mask = found["query_mask"].whole if "query_mask" in found else None
    entry = replace(first, heads=heads, shape=shape, matrix=matrix, statistics=results, query_mask=query_mask)
    return entry, found


def _with_query_mask(part: Part, grid: Grid) -> Part:
    """Add a mask that calls no query padding to a part without one, where another part has one."""
    if "query_mask" in part.tensors or not any("query_mask" in one.tensors for row in grid for _, one in row):
        return part
    batch, _, m, _ = part.entry.shape
    return part._replace(tensors=part.tensors | {"query_mask": torch.ones(1, dtype=torch.bool).expand(batch, m)})


def _with_equal_groups(grid: Grid) -> Grid:
    """Repeat keys for each query head where ranks have different numbers of query heads per key head."""
    parts = [part for row in grid for _, part in row if "k" in part.tensors]
    if len({part.entry.shape[1] / max(part.tensors["k"].shape[1], 1) for part in parts}) <= 1:
        return grid

    def spread(part: Part) -> Part:
        """Return a part whose keys have one head for each query head, in shape only."""
        k = part.tensors["k"]
        whole = _zeros_without_memory(k[:, :1]).expand(-1, part.entry.shape[1], -1, -1)
        return part._replace(tensors=part.tensors | {"k": whole})

    return [[(rank, spread(part)) for rank, part in row] for row in grid]


def _shape_and_parts(name: str, grid: Grid, axes: tuple[int | None, int | None], entry: Entry) -> Divided:
    """Return the shape of a tensor of all ranks, and where each rank's part lies in it.

    `axes` are those of the batch and of the heads, None where the tensor has none.
    """
    batch, head = axes
    grid = [row if head is not None else row[:1] for row in (grid if batch is not None else grid[:1])]
    first = grid[0][0][1]
    free = [axis for axis in range(first.ndim) if axis not in axes]
    for _, t in (one for row in grid for one in row):
        if t.dtype is not first.dtype or t.ndim != first.ndim or any(t.shape[a] != first.shape[a] for a in free):
            found = f"{name}: {tuple(t.shape)} {t.dtype} and {tuple(first.shape)} {first.dtype}"
            raise _cannot_join_error(entry, "tensors of all ranks must have one dtype, and the same sizes.", found)
    # `at`: where the next part begins along the batch and along the heads.
    places, shape, at = {}, list(first.shape), [0, 0]
    for row in grid:
        at[1] = 0
        for rank, t in row:
            place = [slice(None)] * t.ndim
            for which, axis in enumerate(axes):
                if axis is not None:
                    place[axis] = slice(at[which], at[which] + t.shape[axis])
            places[rank] = tuple(place)
            at[1] += 0 if head is None else t.shape[head]
        at[0] += 0 if batch is None else row[0][1].shape[batch]
    for which, axis in enumerate(axes):
        if axis is not None:
            shape[axis] = at[which]
    return Divided(_zeros_without_memory(first, shape), places)


def _joined_matrix(
    grid: Grid, found: dict[str, Divided], batches: Sequence[int], heads: tuple[int, ...], own: dict[str, Any]
) -> AttentionMatrix:
    """Return the whole matrix of one entry, with tokens of no memory.

    `found` has the divided tensors by name, `batches` the sizes of the rows of the grid, `heads` the numbers of the
    heads, and `own` this rank's scores by the name of their class.
    """
    first = grid[0][0][1]
    rows, scores, tokens = [], [], first.entry.shape[2:]
    # Join the masks and scores of a row of the grid along the heads (axis 1), then the rows along the batch (axis 0).
    for row, size in zip(grid, batches, strict=True):
        sizes = [part.entry.shape[1] for _, part in row]
        rows.append(joined_mask([part.mask for _, part in row], sizes, 1, (size, len(heads), *tokens)))
        scores.append(joined_score([part.score for _, part in row], sizes, 1))
    score = None if None in scores else joined_score(scores, batches, 0)
    if score is None:
        rule = "a score must be the same on all ranks, without a tensor of batches or heads."
        fix = 'record with keep="statistics", or on one process.'
        raise _cannot_join_error(first.entry, rule, first.score.get("name", first.score["class"]), fix)
    mask = joined_mask(rows, batches, 0, (sum(batches), len(heads), *tokens))
    whole = {name: one.whole for name, one in found.items()}
    problem = Problem(
        whole["q"], whole["k"], score_from(score, _tensor_of_setting, own),
        None if mask is None else mask_from(mask, _tensor_of_setting),
        whole.get("sink"), (torch.arange(sum(batches)), torch.tensor(heads, dtype=torch.int64)),
        partial=any(part.partial for row in grid for _, part in row),
    )  # fmt: skip
    if _has_heads(mask) or _has_heads(score):
        problem = replace(problem, ids=None, versions=())
    return softmax_matrix(problem, Plan(), lse=whole["lse"])


def _tensor_of_setting(ref: Any) -> Tensor:
    """Return the tensor of a setting in stored form, ``{"t": tensor}``."""
    return ref["t"]


def _has_heads(spec: Any) -> bool:
    """Return whether a stored mask or score differs between heads."""
    if not isinstance(spec, dict):
        return False
    tables = [value["t"] for value in spec.values() if isinstance(value, dict) and "t" in value]
    return any(isinstance(t, Tensor) and t.ndim >= 3 and t.shape[1] > 1 for t in tables) or any(
        map(_has_heads, spec.values())
    )
