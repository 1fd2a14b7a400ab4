"""Products of weights from which a span is hidden, at the speed of a mask with one run of keys per row."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import reduce
from itertools import pairwise
from operator import and_
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from attlas.masks import And, Heads, Mask
from attlas.masks.placed import OutsideRectangle, translated_mask
from attlas.masks.runs import RunPerRow
from attlas.matrix import AttentionMatrix, softmax_matrix
from attlas.matrix.softmax import cut_out
from attlas.recording.hooks import Pool

if TYPE_CHECKING:
    from attlas.engine.problem import Problem

Runs: TypeAlias = "list[list[int]]"  # the first key of each run and the one after its last

_FEW_ROWS = 64  # a mask of so few rows is written out at once
_MANY_RUNS = 8  # so many runs of rows are computed apart


class Memory:
    """What the calls of one block of interventions share.

    Attributes
    ----------
    buffers : dict of Tensor
        Memory for keys and values where no gradient is recorded: fresh memory costs several times what the copy does.
    key, found
        Of which mask and which hidden keys the mask without these keys was made last, and what it is.
    """

    def __init__(self) -> None:
        self.buffers: dict[str, Tensor] = {}
        self.key: Any = None
        self.found: tuple[Mask | None, Runs] | None = None


def without_hidden_keys(pool: Pool, memory: Memory) -> Pool:
    """Return the same function of weights and values, which leaves out the keys that an `OutsideRectangle` hides.

    Heads and queries from which the same keys are hidden are computed together, with the other keys. A mask with one
    run of keys per row then has one again, and the kernels take that faster than any mask of cells.

    Parameters
    ----------
    pool : callable
        Pools values with weights.
    memory : Memory
        What the calls of one block share.
    """

    def pooled(A: AttentionMatrix, values: Tensor) -> Tensor:
        """Return the output: if rows hide different keys, for each run of rows that hide the same ones."""
        problem = A.problem
        parts = list(_conjuncts_of_mask(problem.mask))
        hides = any(isinstance(part, OutsideRectangle) or _hides_in_some_heads(part) for part in parts)
        if not hides or problem.shape[2] < _FEW_ROWS or problem.partial or not problem.score.position_free:
            return pool(A, values)

        def pool_part(part: Problem, own: Tensor) -> Tensor:
            """Pool a part of the matrix in the same way: its mask may hide keys again."""
            return pooled(softmax_matrix(part, A.plan), own)

        of_heads = next(filter(_hides_in_some_heads, parts), None)
        if isinstance(of_heads, Heads):
            return _pool_by_heads(
                problem, values, of_heads, [part for part in parts if part is not of_heads], pool_part
            )
        m = problem.shape[2]
        outside = [part for part in parts if isinstance(part, OutsideRectangle)]
        # Rows between two cuts hide the same keys.
        cuts = sorted({0, m, *(cut for part in outside for cut in part.cuts(m))})
        if len(cuts) > _MANY_RUNS:
            return pool(A, values)
        if len(cuts) > 2:
            spans = [range(first, stop) for first, stop in pairwise(cuts)]
            return torch.cat([pool_part(_problem_of_rows(problem, parts, rows), values) for rows in spans], dim=2)
        mask = _all_of([part for part in parts if not isinstance(part, OutsideRectangle)])
        base = replace(problem, mask=mask, versions=problem.versions)
        # One run of rows is left, from row 0 on: the keys that are hidden from row 0 are hidden from all.
        found = _compact_problem(base, [part for part in outside if part.hides_from(0)], memory)
        if found is None:
            return pool(A, values)
        compact, runs = found
        return pool(softmax_matrix(compact, A.plan, A.axes), _select_runs(values, runs, memory, "values"))

    return pooled


def per_head(t: Tensor, heads: int) -> Tensor:
    """Repeat keys or values that several query heads share, so that each of the `heads` query heads has its own."""
    return t.repeat_interleave(heads // t.shape[1], dim=1) if t.shape[1] != heads else t


def _conjuncts_of_mask(mask: Mask | None) -> Iterator[Mask]:
    """Yield the masks that a mask is made of by ``&``, from left to right."""
    if isinstance(mask, And):
        yield from (*_conjuncts_of_mask(mask.left), *_conjuncts_of_mask(mask.right))
    elif mask is not None:
        yield mask


def _all_of(parts: list[Mask]) -> Mask | None:
    """Return one mask of several, combined with ``&``; None where there are none."""
    return reduce(and_, parts) if parts else None


def _hides_in_some_heads(mask: Mask) -> bool:
    """Return whether a mask is a `Heads` that hides a span of keys in at least one head."""
    return isinstance(mask, Heads) and any(isinstance(part, OutsideRectangle) for part in mask.parts)


def _pool_by_heads(
    problem: Problem, values: Tensor, mask: Heads, others: list[Mask], pool_part: Callable[[Problem, Tensor], Tensor]
) -> Tensor:
    """Pool each group of heads that share a mask by `pool_part`, and return the outputs in the order of the heads.

    `mask` says which mask each head has; `others` are masks that hold for all heads.
    """
    heads = problem.shape[1]
    outputs, order = [], []
    for places, own, _ in mask.split(problem.tile(range(1), range(heads), range(0), range(0))):
        part = problem.select(slice(None), torch.tensor(places, device="cpu"))
        part = replace(part, mask=_all_of([*others, own]), versions=())
        outputs.append(pool_part(part, per_head(values, heads)[:, places]))
        order += places
    return torch.cat(outputs, dim=1)[:, torch.tensor(order).argsort().to(values.device)]


def _problem_of_rows(problem: Problem, parts: list[Mask], rows: range) -> Problem:
    """Return the part of a problem with some of its queries; `parts` are the masks that it has, combined with ``&``."""
    m, n = problem.shape[2:]
    moved = [translated_mask(part, rows, range(n), m, n) for part in parts]
    return replace(cut_out(replace(problem, mask=None), rows, range(n)), mask=_all_of(moved), versions=())


def _select_runs(t: Tensor, runs: Runs, memory: Memory, name: str) -> Tensor:
    """Return the keys or values of some runs, joined; a single run is a view.

    `name` is that of the buffer in `memory` that several runs are copied to.
    """
    parts = [t[:, :, start:stop] for start, stop in runs]
    if len(parts) < 2:
        return parts[0] if parts else t[:, :, :0]
    if torch.is_grad_enabled():
        return torch.cat(parts, dim=2)
    shape = *t.shape[:2], sum(stop - start for start, stop in runs), t.shape[3]
    name = f"{name} {torch.is_inference_mode_enabled()}"
    buffer = memory.buffers.get(name)
    if buffer is None or (buffer.shape, buffer.dtype, buffer.device) != (shape, t.dtype, t.device):
        buffer = memory.buffers[name] = t.new_empty(shape)
    return torch.cat(parts, dim=2, out=buffer)


def _compact_problem(base: Problem, outside: list[OutsideRectangle], memory: Memory) -> tuple[Problem, Runs] | None:
    """Return the problem of the keys that are left, and the runs of keys that these are.

    None where the mask of a row would not be one run of the keys that are left.
    """
    n = base.shape[3]
    of_mask = [(version.changes, version.address) for version in base.versions if version.name == "mask"]
    of_runs = base.shape, base.device, base.batch_ids.tolist(), base.head_ids.tolist()
    key = list(_conjuncts_of_mask(base.mask)), of_runs, of_mask, [(part.keys, part.column) for part in outside]
    if memory.key != key:  # the layers of a model share their masks
        memory.key, memory.found = key, _mask_of_rest(base, outside)
    if memory.found is None:
        return None
    mask, runs = memory.found
    if runs == [[0, n]]:
        return base, runs
    k = _select_runs(base.k, runs, memory, "keys")
    return replace(base, k=k, mask=mask, ids=None, versions=base.versions), runs


def _mask_of_rest(base: Problem, outside: list[OutsideRectangle]) -> tuple[Mask | None, Runs] | None:
    """Return a mask over the keys that are left, and their runs.

    None where `base` has no single run of keys per row.
    """
    n = base.shape[3]
    seen = torch.ones(n, dtype=torch.bool, device=base.device)
    for part in outside:
        seen &= part.visible_keys(n).to(base.device)
    runs: Runs = functional.pad(seen.int(), (1, 1)).diff().nonzero().view(-1, 2).tolist()
    if base.mask is None or runs == [[0, n]]:
        return base.mask, runs
    if base.allowed_runs is None:
        return None
    # Number of keys left before each key: it turns the ends of old runs into ends among the keys that are left.
    count = functional.pad(seen.cumsum(0), (1, 0))
    return RunPerRow(*(count[end] for end in base.allowed_runs)), runs
