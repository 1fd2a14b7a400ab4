"""Groups of heads whose keys and values are gathered together, where those of all heads take too much memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from attlas.distributed.layout import Layout, of_shape
from attlas.engine.held import tensors_of
from attlas.foundation.compat import tree_leaves, tree_map
from attlas.foundation.indexing import Axes
from attlas.matrix import softmax_matrix

_GATHERED_BYTES = 8 << 30

Matrix: TypeAlias = Any  # a DistributedMatrix, whose module imports this one

# For each leading axis, which of its pieces a group has. Each rank has the same pieces of its own part.
Group: TypeAlias = tuple[range, ...]


def is_divided(A: Matrix) -> bool:
    """Return whether heads are computed in groups: the keys of all, and as many values, need too much memory."""
    return len(_HeadGroups(A, (), ()).every) > 1


def by_group(
    A: Matrix,
    method: Callable[..., Any],
    *tensors: DTensor,
    values: bool = False,
    wanted: tuple[Tensor, Tensor] | None = None,
) -> Any:
    """Return the result of a method of the matrix, computed for one group of heads after the other.

    Parameters
    ----------
    A : DistributedMatrix
        The matrix.
    method : callable
        It takes a matrix and `tensors`, and returns DTensors with the leading axes of the matrix, or cells: a tensor
        with 0 for what is in other groups.
    *tensors : DTensor
        What the matrix is multiplied with.
    values : bool
        Whether they are gathered as the keys are.
    wanted : tuple of Tensor, optional
        Numbers of the batches and of the heads that are needed.

    Notes
    -----
    Gathers no more than ``Plan.gathered_bytes`` at a time, or one head. Only the shards are kept for a backward: it
    gathers each group again, computes it again, and reduce-scatters its gradients before the next.
    """
    groups = _HeadGroups(A, tensors, tensors if values else ())
    if len(groups.every) == 1:
        return method(A, *tensors)
    layout, groups.method = groups.layout, method
    groups.sizes = layout.axes.shape if wanted is None else ()  # cells have no leading axes that groups divide
    if wanted is not None:
        groups.every = [group for group in groups.every if groups.has(group, wanted)] or groups.every[:1]
    groups.tokens = [t.redistribute(layout.mesh, layout.own_placements(t)) for t in (*A.tokens[:2], *tensors)]
    groups.leaves = [t for t in (*groups.tokens, *A.leaves[2:]) if t.requires_grad and torch.is_grad_enabled()]
    # Sets `groups.form`: the results of one group, which tell shapes and placements.
    results = _RecomputedGroups.apply(groups, *groups.leaves) if groups.leaves else groups.joined(())  # type: ignore[no-untyped-call]
    found, form, groups.form = iter(results), groups.form, None

    def whole(t: Tensor) -> Tensor:
        """Return a tensor of the form of one group's results with the numbers of all groups."""
        local: Tensor = next(found)
        shape = (*layout.leading, *t.shape[layout.rank :])
        return of_shape(local, layout.mesh, t.placements, shape) if isinstance(t, DTensor) else local

    return tree_map(whole, form)


class _HeadGroups:
    """The groups of heads and batches that are computed one after the other; the same on all ranks."""

    method: Callable[..., Any]
    sizes: tuple[int, ...]  # leading axes of this rank's part of a result
    tokens: list[DTensor]  # queries, keys, and what the matrix is multiplied with
    leaves: list[Tensor]  # what gets a gradient
    form: Any = None  # results of a group
    recorded: list[bool]  # which of them carry a gradient

    def __init__(self, A: Matrix, tensors: Sequence[DTensor], values: Sequence[DTensor]) -> None:
        self.A, self.layout = A, cast(Layout, A.layout)
        layout, k = self.layout, A.tokens[1]
        self.ranks = [math.prod(layout.mesh.size(dim) for dim in layout.dims(axis)) for axis in range(layout.rank)]
        gathered = [t for t in (k, *values) if layout.gathers(t)]
        # How many pieces this rank's part of each leading axis can be cut into, the same for all tensors and ranks.
        self.pieces = []
        for axis, ranks in enumerate(self.ranks):
            sizes = [layout.leading[axis], *(layout.size(t, axis) for t in gathered)]
            sizes += [size for t in (k, *tensors) if (size := layout.size(t, axis)) > 1]
            self.pieces.append(math.gcd(*(size // ranks if size % ranks == 0 else 1 for size in sizes)) or 1)
        # Keys are counted twice where there are no values yet: who reads the keys of all heads keeps them.
        needed = [self._bytes_of_all_tokens(t) for t in gathered] or [0]
        allowed = A.whole.plan.gathered_bytes or _GATHERED_BYTES
        count = allowed * math.prod(self.pieces) // max(sum(needed), 2 * needed[0], 1)
        cuts: list[list[range]] = []
        for pieces in reversed(self.pieces):
            step = max(min(pieces, count), 1)
            cuts.insert(0, [range(pieces)[at : at + step] for at in range(0, pieces, step)])
            count //= pieces
        self.every: list[Group] = list(product(*cuts))

    def _bytes_of_all_tokens(self, t: DTensor) -> int:
        """Return the memory of a tensor of which a rank has all tokens."""
        shared = math.prod(ranks for axis, ranks in enumerate(self.ranks) if self.layout.size(t, axis) > 1)
        return t.numel() * t.element_size() // shared

    def _ids_of_group(self, group: Group) -> tuple[Tensor, Tensor]:
        """Return the batch ids and head ids of a group, those of all ranks together."""
        layout, problem = self.layout, self.A.whole.problem
        places = []
        for size, ranks, pieces, own in zip(layout.leading, self.ranks, self.pieces, group, strict=True):
            # Each rank has a run of the numbers, and a group has the same pieces of every run.
            by_rank = torch.arange(size, device="cpu").reshape(ranks if pieces > 1 else 1, pieces, -1)
            places.append(by_rank[:, own.start : own.stop].flatten())
        heads = problem.head_ids[places.pop()] if layout.rank >= 2 else problem.head_ids
        batches = problem.batch_ids.reshape(layout.leading[: len(places)])
        for axis, place in enumerate(places):
            batches = batches.index_select(axis, place)
        return batches.flatten(), heads

    def has(self, group: Group, wanted: tuple[Tensor, Tensor]) -> bool:
        """Return whether a group has at least one of the wanted batches and one of the wanted heads."""
        numbers = zip(self._ids_of_group(group), wanted, strict=True)
        return all(bool(torch.isin(own, asked).any()) for own, asked in numbers)

    def _slices_of_group(self, group: Group, sizes: Sequence[int]) -> tuple[slice, ...]:
        """Return the slices of a group in a tensor whose last leading axes have these sizes.

        A group counts pieces of each axis. An axis of size 1 serves all groups, and is taken whole.
        """
        first = len(group) - len(sizes)
        steps = [size // pieces for size, pieces in zip(sizes, self.pieces[first:], strict=True)]
        return tuple(
            slice(own.start * step, own.stop * step) if step else slice(None)
            for own, step in zip(group[first:], steps, strict=True)
        )

    def _leading_sizes(self, group: Group, leading: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes of a group's leading axes, given those of the whole."""
        return tuple(
            len(range(size)[own]) for size, own in zip(leading, self._slices_of_group(group, leading), strict=True)
        )

    def _part_of_group(self, t: DTensor, group: Group) -> DTensor:
        """Return the part of a DTensor that belongs to a group; its tokens stay on their ranks."""
        local = t.to_local()
        shape = (*self._leading_sizes(group, t.shape[:-2]), *t.shape[-2:])
        return of_shape(local[self._slices_of_group(group, local.shape[:-2])], self.layout.mesh, t.placements, shape)

    def of(self, group: Group, own: Sequence[Tensor]) -> Any:
        """Call the method for the matrix of one group, and return its results.

        `own` are tensors that stand for `leaves`, so that gradients can be taken with respect to them.
        """
        A, layout, problem = self.A, self.layout, self.A.whole.problem
        mine: dict[int, Any] = dict(zip(map(id, self.leaves), own, strict=True))  # what stands for each leaf
        q, k, *others = (self._part_of_group(mine.get(id(t), t), group) for t in self.tokens)
        batches, heads = self._ids_of_group(group)
        key_heads = k.shape[-3] if layout.rank >= 2 and k.ndim >= 3 else 1
        scale, sink = (None if t is None else mine.get(id(t), t) for t in (A.tokens[2], problem.sink))
        held = {id(t): mine.get(id(t), t) for t in tensors_of(problem.score)}
        # The problem holds tokens without memory: sizes and settings of the group alone.
        problem = replace(
            problem,
            q=problem.q[:1, :1].expand(len(batches), len(heads), -1, -1),
            k=problem.k[:1, :1].expand(len(batches), key_heads, -1, -1),
            score=copy.deepcopy(problem.score, held) if held.keys() & mine.keys() else problem.score,
            sink=None if sink is None else sink[heads],
            ids=(batches, heads),
        )
        leading = self._leading_sizes(group, layout.leading)
        whole = softmax_matrix(problem, A.whole.plan, Axes(leading, (True,) * len(leading)))
        scale = scale if scale is None or scale.numel() == 1 else scale.reshape(-1)[heads]
        return self.method(type(A)(replace(layout, leading=leading), whole, (q, k, scale)), *others)

    def joined(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's results of all groups, each at its place in the whole."""
        totals: list[Tensor] = []
        for group in self.every:
            self._add_results(group, own, totals)
        return totals

    def _add_results(self, group: Group, own: Sequence[Tensor], totals: list[Tensor]) -> None:
        """Add the results of one group to `totals`, at its place; the first call fills the empty list.

        Also remember the form of the results.
        """
        # What a group has gathered is released where this returns.
        found = self.of(group, own)
        self.recorded = [t.requires_grad for t in tree_leaves(found)]
        self.form = tree_map(Tensor.detach, found)
        results = [_local_part(t) for t in tree_leaves(self.form)]
        if not totals:
            totals += [t.new_zeros(*self.sizes, *t.shape[len(self.sizes) :]) for t in results]
        for total, t in zip(totals, results, strict=True):
            total[self._slices_of_group(group, self.sizes)] += t

    def slopes(self, group: Group, own: Sequence[Tensor], given: Sequence[Tensor]) -> Sequence[Tensor]:
        """Return a group's contribution to the gradients with respect to `own`; `given` are those of the results.

        The group is computed again, with a graph.
        """
        graph, place = torch.is_grad_enabled(), self._slices_of_group(group, self.sizes)
        with torch.enable_grad():
            found = zip(map(_local_part, tree_leaves(self.of(group, own))), given, strict=True)
            results, slopes = zip(*((t, slope[place]) for t, slope in found if t.requires_grad), strict=True)
        return torch.autograd.grad(results, own, slopes, create_graph=graph, materialize_grads=True)


class _RecomputedGroups(torch.autograd.Function):
    """Computes all groups and keeps no keys or values of them; the backward computes each group again."""

    @staticmethod
    def forward(ctx: Any, groups: _HeadGroups, *leaves: Tensor) -> tuple[Tensor, ...]:
        # Detached leaves with a graph tell which results carry a gradient.
        ctx.groups = groups
        ctx.save_for_backward(*leaves)
        with torch.enable_grad():
            found = groups.joined([t.detach().requires_grad_() for t in leaves])
        ctx.mark_non_differentiable(*(t for t, known in zip(found, groups.recorded, strict=True) if not known))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *given: Tensor) -> tuple[Tensor | None, ...]:
        # The gradients of a group at a time are computed, and added up.
        groups, leaves = ctx.groups, ctx.saved_tensors
        own = leaves if torch.is_grad_enabled() else [t.detach().requires_grad_() for t in leaves]
        first, *others = groups.every
        totals = groups.slopes(first, own, given)
        for group in others:
            totals = [a + b for a, b in zip(totals, groups.slopes(group, own, given), strict=True)]
        return None, *totals


def _local_part(t: Tensor) -> Tensor:
    """Return this rank's part of a DTensor; another tensor as it is."""
    return t.to_local() if isinstance(t, DTensor) else t
