"""Groups of heads whose keys and values are gathered together, where those of all heads take too much memory."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from attlas._compat import tree_leaves, tree_map
from attlas.distributed.layout import of_shape
from attlas.engine.problem import tensors_of
from attlas.indexing import Axes
from attlas.matrix import AttentionMatrix

if TYPE_CHECKING:
    from attlas.distributed.matrix import DistributedMatrix

__all__ = ["by_group", "is_divided"]

_GATHERED_BYTES = 8 << 30

# For each leading axis, which of its pieces a group has. Each rank has the same pieces of its own part.
Group: TypeAlias = tuple[range, ...]


def is_divided(A: DistributedMatrix) -> bool:
    """Return whether the keys of all heads, and as many values, are more than a rank may gather at a time."""
    return len(_Groups(A, (), ()).every) > 1


def by_group(
    A: DistributedMatrix,
    method: Callable[..., Any],
    *tensors: DTensor,
    values: bool = False,
    wanted: tuple[Tensor, Tensor] | None = None,
) -> Any:
    """Return what a method of the matrix gives, computed for one group of heads after the other.

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
    groups = _Groups(A, tensors, tensors if values else ())
    if len(groups.every) == 1:
        return method(A, *tensors)
    groups.method = method
    if wanted is not None:
        groups.every = [group for group in groups.every if groups.has(group, wanted)] or groups.every[:1]
    groups.leaves = [t for t in (*A.leaves, *tensors) if t.requires_grad and torch.is_grad_enabled()]
    found = iter(_Recomputed.apply(groups, *groups.leaves) if groups.leaves else groups.joined(()))  # type: ignore[no-untyped-call]
    return tree_map(lambda t: groups.whole(next(found), t), groups.form)


class _Groups:
    """The groups of a matrix; sizes of the whole alone decide, so that all ranks have the same."""

    method: Callable[..., Any]
    leaves: list[Tensor]
    form: Any = None  # the results of a group

    def __init__(self, A: DistributedMatrix, tensors: Sequence[DTensor], values: Sequence[DTensor]) -> None:
        self.A, self.tensors, self.layout = A, tensors, A._layout
        layout, k = self.layout, A._tokens[1]
        self.ranks = [math.prod(layout.mesh.size(dim) for dim in layout.dims(axis)) for axis in range(layout.rank)]
        gathered = [t for t in (k, *values) if layout.gathers(t)]
        self.pieces = []
        for axis, ranks in enumerate(self.ranks):
            sizes = [layout.leading[axis], *(layout.size(t, axis) for t in gathered)]
            sizes += [size for t in (k, *tensors) if (size := layout.size(t, axis)) > 1]
            self.pieces.append(math.gcd(*(size // ranks if size % ranks == 0 else 1 for size in sizes)) or 1)
        # Keys are counted twice where there are no values yet: who reads the keys of all heads keeps them.
        sizes = [self._bytes(t) for t in gathered] or [0]
        allowed = A._whole.plan.gathered_bytes or _GATHERED_BYTES
        count = allowed * math.prod(self.pieces) // max(sum(sizes), 2 * sizes[0], 1)
        cuts: list[list[range]] = []
        for pieces in reversed(self.pieces):
            step = max(min(pieces, count), 1)
            cuts.insert(0, [range(pieces)[at : at + step] for at in range(0, pieces, step)])
            count //= pieces
        self.every: list[Group] = list(product(*cuts))

    def _bytes(self, t: DTensor) -> int:
        """Return the memory of a tensor of which a rank has all tokens."""
        shared = math.prod(ranks for axis, ranks in enumerate(self.ranks) if self.layout.size(t, axis) > 1)
        return t.numel() * t.element_size() // shared

    def _numbers(self, group: Group) -> tuple[Tensor, Tensor]:
        """Return the numbers of the batches and of the heads of a group, those of all ranks together."""
        layout, problem = self.layout, self.A._whole.problem
        places = []
        for size, ranks, pieces, own in zip(layout.leading, self.ranks, self.pieces, group, strict=True):
            by_rank = torch.arange(size, device="cpu").reshape(ranks if pieces > 1 else 1, pieces, -1)
            places.append(by_rank[:, own.start : own.stop].flatten())
        heads = problem.head_ids[places.pop()] if layout.rank >= 2 else problem.head_ids
        batches = problem.batch_ids.reshape(layout.leading[: len(places)])
        for axis, own in enumerate(places):
            batches = batches.index_select(axis, own)
        return batches.flatten(), heads

    def has(self, group: Group, wanted: tuple[Tensor, Tensor]) -> bool:
        """Return whether a group has one of some batches and one of some heads."""
        numbers = zip(self._numbers(group), wanted, strict=True)
        return all(bool(torch.isin(own, asked).any()) for own, asked in numbers)

    def _place(self, group: Group, sizes: Sequence[int]) -> tuple[slice, ...]:
        """Return where the pieces of a group are in this rank's part, whose leading axes have some sizes."""
        first = len(group) - len(sizes)
        steps = [size // pieces for size, pieces in zip(sizes, self.pieces[first:], strict=True)]
        return tuple(
            slice(own.start * step, own.stop * step) if step else slice(None)  # an axis of size 1 goes with all
            for own, step in zip(group[first:], steps, strict=True)
        )

    def _narrowed(self, t: DTensor, group: Group) -> DTensor:
        """Return the pieces of a group as a DTensor; the tokens stay where they are."""
        t = t.redistribute(self.layout.mesh, self.layout.own_placements(t))
        local, lead = t.to_local(), t.shape[:-2]
        local = local[self._place(group, local.shape[:-2])]
        sizes = [len(range(size)[own]) for size, own in zip(lead, self._place(group, lead), strict=True)]
        return of_shape(local, self.layout.mesh, t.placements, (*sizes, *t.shape[-2:]))

    def of(self, group: Group, own: Sequence[Tensor]) -> Any:
        """Return the results of a group, with some tensors in the place of `leaves`."""
        A, problem, mine = self.A, self.A._whole.problem, dict(zip(map(id, self.leaves), own, strict=True))
        q, k, *others = (self._narrowed(mine.get(id(t), t), group) for t in (*A._tokens[:2], *self.tensors))
        batches, heads = self._numbers(group)
        scale, sink = (None if t is None else mine.get(id(t), t) for t in (A._tokens[2], problem.sink))
        score, held = problem.score, {id(t): mine.get(id(t), t) for t in tensors_of(problem.score)}
        problem = replace(
            problem,
            q=problem.q[:1, :1].expand(len(batches), len(heads), -1, -1),
            k=problem.k[:1, :1].expand(len(batches), k.shape[-3] if self.layout.rank > 1 and k.ndim > 2 else 1, -1, -1),
            score=copy.deepcopy(score, held) if held.keys() & mine.keys() else score,
            sink=None if sink is None else sink[heads],
            batch_ids=batches,
            head_ids=heads,
        )
        scale = scale if scale is None or scale.numel() == 1 else scale.reshape(-1)[heads]
        leading = tuple(q.shape[:-2])
        whole = AttentionMatrix(problem, A._whole.plan, Axes(leading, (True,) * len(leading)))
        part = type(A)(replace(self.layout, leading=leading), whole, (q, k, scale))
        return self.method(part, *others)

    def _index(self, t: Tensor, group: Group) -> tuple[slice, ...]:
        """Return where a result of a group is in that of the whole; cells are sums over the groups."""
        return self._place(group, self.layout.axes.shape) if isinstance(t, DTensor) else ()

    def joined(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's part of the results of all groups."""
        totals: list[Tensor] = []
        for group in self.every:
            self._add(group, own, totals)
        return totals

    def _add(self, group: Group, own: Sequence[Tensor], totals: list[Tensor]) -> None:
        # What a group has gathered is released where this returns.
        form = self.of(group, own)
        found = tree_leaves(form)
        self.recorded = [t.requires_grad for t in found]
        self.form = tree_map(Tensor.detach, form)
        for number, t in enumerate(map(_local, tree_leaves(self.form))):
            if len(totals) <= number:
                lead = self.layout.axes.shape if isinstance(found[number], DTensor) else ()
                totals.append(t.new_zeros(*lead, *t.shape[len(lead) :]))
            totals[number][self._index(found[number], group)] += t

    def whole(self, local: Tensor, form: Tensor) -> Tensor:
        """Return a result from this rank's part of it."""
        if not isinstance(form, DTensor):
            return local
        shape = (*self.layout.leading, *form.shape[self.layout.rank :])
        return of_shape(local, self.layout.mesh, form.placements, shape)

    def slopes(self, group: Group, own: Sequence[Tensor], slopes: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Return what a group adds to the gradients of `own`, from those of the results."""
        graph = torch.is_grad_enabled()
        with torch.enable_grad():
            found = [
                (t, slope) for t, slope in zip(tree_leaves(self.of(group, own)), slopes, strict=True) if t.requires_grad
            ]
            results = [_local(t) for t, _ in found]
        given = [slope[self._index(t, group)] for t, slope in found]
        return torch.autograd.grad(results, own, given, create_graph=graph, allow_unused=True)


class _Recomputed(torch.autograd.Function):
    """Results of all groups, of which no group's keys and values are kept: the backward computes each again."""

    @staticmethod
    def forward(ctx: Any, groups: _Groups, *leaves: Tensor) -> tuple[Tensor, ...]:
        ctx.groups = groups
        ctx.save_for_backward(*leaves)
        with torch.enable_grad():
            found = groups.joined([t.detach().requires_grad_() for t in leaves])
        ctx.mark_non_differentiable(*(t for t, known in zip(found, groups.recorded, strict=True) if not known))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        groups, leaves = ctx.groups, ctx.saved_tensors
        own = leaves if torch.is_grad_enabled() else [t.detach().requires_grad_() for t in leaves]
        totals: list[Tensor | None] = [None] * len(own)
        for group in groups.every:
            for number, slope in enumerate(groups.slopes(group, own, slopes)):
                known = totals[number]
                totals[number] = slope if known is None else known if slope is None else known + slope
        return None, *totals


def _local(t: Tensor) -> Tensor:
    return t.to_local() if isinstance(t, DTensor) else t
