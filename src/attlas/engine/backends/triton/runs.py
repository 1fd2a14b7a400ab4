"""The runs of keys of each query: those of a mask with one run, and of masks that are made of such."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from attlas.engine.held import holds_all
from attlas.engine.problem import Problem
from attlas.foundation.compat import tracing
from attlas.foundation.tiles import Tile
from attlas.masks.base import And, Mask, Or
from attlas.masks.runs import Runs

#: The first key of each query and the one after its last, (batch or 1, heads or 1, m).
Run = tuple[Tensor, Tensor]

MOST = 4  # runs of a query, each of which is one more launch


def runs_of(problem: Problem) -> list[Run] | None:
    """Return the runs of keys of each query, of which no two share a key; None for more than `MOST`, or unknown ones.

    Each has the shape (batch or 1, heads or 1, m). An empty list says that every query sees every key. They are found
    on the CPU, and kept with the problem.
    """
    kept = vars(problem)
    if "triton runs" not in kept:
        kept["triton runs"] = _runs_of_mask(problem)
    found: list[Run] | None = kept["triton runs"]
    return found


def _runs_of_mask(problem: Problem) -> list[Run] | None:
    """Return the runs of keys that each query may see, at most `MOST`.

    An empty list is for no mask, where it sees all; None where the mask does not say its runs, or has more of them.
    """
    mask = problem.mask
    if mask is None:
        return []
    if problem.allowed_runs is not None:
        return [problem.allowed_runs]
    if tracing() or not holds_all(mask):
        return None
    at = replace(problem.tile(*map(range, problem.shape)), device=torch.device("cpu"))
    found = _disjoint_runs_of_mask(mask, at)
    if found is None or len(found) > MOST:
        return None
    clipped = [tuple(t.clamp(0, at.n) for t in torch.broadcast_tensors(*run)) for run in found]
    return [(_run_of_rows(first, at), _run_of_rows(torch.maximum(first, stop), at)) for first, stop in clipped]


def _run_of_rows(t: Tensor, at: Tile) -> Tensor:
    """Return a table of runs with the axes (batch, heads, rows)."""
    return t.expand((1,) * (3 - t.ndim) + t.shape[:-1] + (at.m,))


def _disjoint_runs_of_mask(mask: Mask, at: Tile) -> list[Run] | None:
    """Return runs of a mask, of which no two share a key."""
    if (one := mask.allowed_runs(at)) is not None:
        return [one]
    if type(mask) is Runs:
        return _runs_in_table(mask, at)
    if not isinstance(mask, And | Or) or type(mask) not in (And, Or):
        return None
    left, right = _disjoint_runs_of_mask(mask.left, at), _disjoint_runs_of_mask(mask.right, at)
    if left is None or right is None:
        return None
    if type(mask) is And:
        return [(torch.maximum(a, c), torch.minimum(b, d)) for a, b in left for c, d in right]
    return _disjoint_runs([*left, *right])


def _disjoint_runs(runs: list[Run]) -> list[Run]:
    """Return runs that share no key, and have the keys of the given ones; some may be empty."""
    first, stop = (torch.stack(torch.broadcast_tensors(*ts)) for ts in zip(*runs, strict=True))
    order = first.argsort(0)
    first, stop = first.gather(0, order), stop.gather(0, order)
    covered = stop.cummax(0).values
    first[1:] = torch.maximum(first[1:], covered[:-1])
    return list(zip(first, torch.maximum(first, stop), strict=True))


def _runs_in_table(mask: Runs, at: Tile) -> list[Run] | None:
    """Return the runs that a mask has in a table."""
    batch, heads, ends = mask.first.shape
    counts = mask.first.diff(dim=-1)
    most = int(counts.max())
    if most > MOST or (batch > 1 and batch != len(at.batches)) or (heads > 1 and heads != len(at.heads)):
        return None
    if ends - 1 != at.m or not bool((at.batch_ids == torch.arange(len(at.batches), device="cpu")).all()):
        return None
    if not bool((at.head_ids == torch.arange(len(at.heads), device="cpu")).all()):
        return None
    found = []
    for number in range(most):
        place, has = mask.first[..., :-1] + number, counts > number
        place = place.clamp(max=len(mask.starts) - 1)
        found.append(tuple(torch.where(has, t[place].long(), 0) for t in (mask.starts, mask.stops)))
    return [(first, stop) for first, stop in found] or [(mask.first[..., :-1] * 0,) * 2]
