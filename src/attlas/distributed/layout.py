"""Which batches, heads, queries and keys of a matrix this rank has, and what that makes of tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from attlas.errors import DeviceError, DtypeError, ShapeError, kind, public
from attlas.foundation.checks import as_plain, whole_number
from attlas.foundation.compat import local_part
from attlas.foundation.devices import check_float64
from attlas.foundation.indexing import Axes

# What a dimension of the mesh divides: a leading axis (by its number), the queries, the keys, or nothing.
Role: TypeAlias = int | Literal["queries", "keys", "nothing"]


@public("head_tail_order()")
def head_tail_order(n: int, ranks: int) -> Tensor:
    """Return an order of tokens that gives each rank the same share of a causal mask.

    The text is cut into ``2 * ranks`` pieces; rank r gets piece r and piece ``2 * ranks - 1 - r``.

    Parameters
    ----------
    n : int
        Number of tokens.
    ranks : int
        Number of ranks that share them.

    Returns
    -------
    Tensor, shape (n,), int64
        The position in the text of each token, in the order in which they are sharded.

    Raises
    ------
    ShapeError
        If `n` is not a multiple of ``2 * ranks``, so that ranks would not get whole pieces.

    Examples
    --------
    >>> from attlas.distributed import head_tail_order
    >>> head_tail_order(8, 2)
    tensor([0, 1, 6, 7, 2, 3, 4, 5])
    """
    for name, value in (("n", n), ("ranks", ranks)):
        whole_number(name, value)
    if n % (2 * ranks):
        fix = f"pad the text to {-(-n // (2 * ranks)) * 2 * ranks} tokens, with mask=attlas.Padding(lengths)."
        raise ShapeError("n must be a multiple of 2 * ranks.", f"n = {n}, ranks = {ranks}", fix)
    pieces = torch.arange(n, device="cpu").chunk(2 * ranks)
    return torch.cat([pieces[i] for rank in range(ranks) for i in (rank, 2 * ranks - 1 - rank)])


def check_dtensor(name: str, t: object, mesh: DeviceMesh | None = None) -> DTensor:
    """Return `t`; raise an error where it is no DTensor, on another mesh, or sharded in a way that is not supported."""
    if not isinstance(t, DTensor):
        rule, fix = f"{name} must be a DTensor, as q and k are.", f"distribute_tensor({name}, mesh, placements)"
        raise DtypeError(rule, kind(t), fix, arguments={name: t if isinstance(t, Tensor) else kind(t)})
    if mesh is not None and t.device_mesh != mesh:
        rule = f"{name} must be on the mesh of q."
        raise DeviceError(rule, f"{t.device_mesh} and {mesh}", f"{name}.full_tensor(), distributed on the mesh of q.")
    check_float64("the shares of ranks are", torch.device(t.device_mesh.device_type), f"{name}.full_tensor().cpu()")
    for placement in t.placements:
        fix = f"{name}.redistribute(placements=[Shard(-2)]), or heads, batch or Replicate()."
        if not isinstance(placement, Shard | Replicate):
            raise ShapeError(f"{name} must be sharded or replicated.", f"{placement} in {t.placements}", fix)
        if isinstance(placement, Shard) and placement.dim % t.ndim == t.ndim - 1:
            raise ShapeError(f"each token of {name} must be whole.", f"{placement} of {t.ndim} axes", fix)
    return t


def like(t: Tensor) -> Tensor:
    """Return zeros of the global shape that take no memory (all strides are 0), to check arguments with."""
    local = t.to_local() if isinstance(t, DTensor) else t
    return torch.zeros(1, dtype=t.dtype, device=local.device).expand(t.shape)


def _matrix_axis(t: DTensor, dim: int, rank: int) -> int | None:
    """Return which leading axis of the matrix an axis of a tensor is; None where it is its tokens.

    Leading axes are aligned from the right: `rank` is their number in the matrix, the tensor may have fewer.
    """
    axis = dim % t.ndim + rank - (t.ndim - 2)
    return axis if axis < rank else None


def roles_of(q: DTensor, k: DTensor, leading: Sequence[int]) -> tuple[Role, ...]:
    """Return the axis that each dimension of the mesh divides. Leading axes go before queries, queries before keys."""
    roles: list[Role] = []
    for pair in zip(q.placements, k.placements, strict=True):
        sharded = [(t, p.dim % t.ndim) for t, p in zip((q, k), pair, strict=True) if isinstance(p, Shard)]
        axes = [(_matrix_axis(t, dim, len(leading)), t.shape[dim]) for t, dim in sharded]
        lead = [axis for axis, size in axes if axis is not None and (size > 1 or leading[axis] == 1)]
        tokens = [t for t, dim in sharded if dim == t.ndim - 2]
        roles.append(lead[0] if lead else "nothing" if not tokens else "queries" if tokens[0] is q else "keys")
    return tuple(roles)


@dataclass(frozen=True, eq=False)
class Layout:
    """The part of a matrix that this rank has.

    Parameters
    ----------
    mesh : DeviceMesh
        The ranks.
    roles : tuple of Role
        What each dimension of the mesh divides.
    leading : tuple of int
        Leading axes of the matrix as the user sees them.
    m, n : int
        Number of queries and of keys of the whole matrix.
    order : Tensor, optional, shape (n,)
        Position in the text of each token, where they are sharded in another order.
    """

    mesh: DeviceMesh
    roles: tuple[Role, ...]
    leading: tuple[int, ...]
    m: int
    n: int
    order: Tensor | None = None

    @property
    def rank(self) -> int:
        """Number of leading axes."""
        return len(self.leading)

    def dims(self, role: Role) -> list[int]:
        """Return the dimensions of the mesh that have a role."""
        return [dim for dim, own in enumerate(self.roles) if own == role]

    def placements(self, query_axis: int | None = None, key_axis: int | None = None) -> list[Placement]:
        """Return how a result lies on the mesh, which has the leading axes of the matrix.

        Its axis of queries and its axis of keys, if it has them, are counted behind the leading axes.
        """
        by_role = {"queries": query_axis, "keys": key_axis}
        axes = {role: axis + self.rank for role, axis in by_role.items() if axis is not None}
        return _placements_of_axes(axes.get(role) if isinstance(role, str) else role for role in self.roles)

    def _ranges_of_rank(self) -> list[range]:
        """Return this rank's ranges of: each leading axis, the queries, the keys."""
        shape = (*self.leading, self.m, self.n)
        placements = self.placements(query_axis=0, key_axis=1)
        sizes, starts = local_part(shape, self.mesh, placements)
        return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]

    @property
    def rows(self) -> list[range]:
        """Runs of queries that this rank has, by their positions in the text."""
        span = self._ranges_of_rank()[self.rank]
        if self.order is None or not len(span):
            return [span]
        positions = self.order[span.start : span.stop]
        ends = [0, *((positions.diff() != 1).nonzero().flatten() + 1).tolist(), len(positions)]
        return [range(int(positions[a]), int(positions[b - 1]) + 1) for a, b in pairwise(ends)]

    @property
    def columns(self) -> range:
        """Keys that this rank has."""
        return self._ranges_of_rank()[self.rank + 1]

    @property
    def local(self) -> tuple[range, ...]:
        """What this rank has of each leading axis."""
        return tuple(self._ranges_of_rank()[: self.rank])

    @property
    def axes(self) -> Axes:
        """Leading axes of this rank's part."""
        sizes = tuple(map(len, self.local))
        return Axes(sizes, (True,) * len(sizes))

    @property
    def heads(self) -> range:
        """Heads that this rank has."""
        return self.local[-1] if self.rank >= 2 else range(1)

    @property
    def batches(self) -> Tensor:
        """Places of the batches that this rank has, with several batch axes flattened to one."""
        spans = self.local[:-1] if self.rank >= 2 else self.local
        sizes = self.leading[: len(spans)]
        ids = torch.arange(math.prod(sizes), device="cpu").reshape(sizes)
        for axis, span in enumerate(spans):
            ids = ids.narrow(axis, min(span.start, sizes[axis]), len(span))
        return ids.flatten()

    # -------------------------------------------------------------------------------------------------------- tensors

    def part_of(self, t: DTensor, tokens: Role) -> Tensor:
        """Return this rank's part of queries, keys or values, shape (batch, heads, tokens, size), with its gradient.

        Parameters
        ----------
        t : DTensor, shape (..., tokens, size)
            The tensor. Keys and values of queries that are sharded are gathered.
        tokens : {"queries", "keys"}
            Which tokens it has.
        """
        axis = t.ndim - 2
        targets = _placements_of_axes(axis if role == tokens else self._axis_of_tensor(t, role) for role in self.roles)
        # Who has tokens whole uses them for its own rows, keys or heads only: its gradient is one of several summands.
        grads = [
            target if isinstance(target, Shard) else Replicate() if role == "nothing" else Partial()
            for role, target in zip(self.roles, targets, strict=True)
        ]
        if Shard(axis) in t.placements and Shard(axis) not in targets:
            # Gathered along the first axis, the parts need no second copy to lie side by side.
            moved: Any = t.movedim(axis, 0)
            moved = moved.redistribute(self.mesh, _axis_first(targets, axis))
            local = _with_gradient(moved.to_local(grad_placements=_axis_first(grads, axis))).movedim(0, axis)
        else:
            local = _with_gradient(t.redistribute(self.mesh, targets).to_local(grad_placements=grads))
        if self.order is not None and tokens == "keys":
            local = local.index_select(-2, self.order.argsort().to(local.device))
        return self._four_axes(local, t)

    def size(self, t: DTensor, axis: int) -> int:
        """Return the size of a tensor along a leading axis of the matrix; 1 where it has no such axis."""
        own_axis = axis - (self.rank - (t.ndim - 2))
        return t.shape[own_axis] if own_axis >= 0 else 1

    def gathers(self, t: DTensor) -> bool:
        """Return whether a rank has to fetch keys or values from other ranks for its own queries."""
        roles = zip(self.roles, t.placements, strict=True)
        return (
            any(role in ("queries", "nothing") and isinstance(p, Shard) for role, p in roles) and self.mesh.size() > 1
        )

    def own_placements(self, t: DTensor) -> list[Placement]:
        """Return the placements of a tensor whose leading axes are divided as those of the matrix.

        Along a dimension of the mesh that divides no leading axis, its tokens stay divided where they are.
        """
        tokens = (t.ndim - 2 if isinstance(p, Shard) else None for p in t.placements)
        roles = zip(self.roles, tokens, strict=True)
        return _placements_of_axes(
            self._axis_of_tensor(t, role) if isinstance(role, int) else own for role, own in roles
        )

    def _axis_of_tensor(self, t: DTensor, axis: Role) -> int | None:
        """Return the axis of `t` that is sharded as a leading axis of the matrix is.

        None where `t` stays whole along it.
        """
        if not isinstance(axis, int):
            return None
        size, own_axis = self.size(t, axis), axis - (self.rank - (t.ndim - 2))
        if own_axis < 0 or (axis == self.rank - 1 and self.rank >= 2 and not self._are_heads_in_step(size)):
            return None
        return own_axis if size > 1 or self.leading[axis] == 1 else None

    def _are_heads_in_step(self, heads: int) -> bool:
        """Return whether key heads can be sharded as query heads are.

        Each shard has just the ones that its queries need.
        """
        dims, all_heads = self.dims(self.rank - 1), self.leading[-1]
        ranks = math.prod(self.mesh.size(dim) for dim in dims)
        # Chunks of both have the same share of their heads, also where the last chunk is shorter.
        equal_chunks = len(dims) == 1 and -(-all_heads // ranks) * heads == -(-heads // ranks) * all_heads
        return heads == all_heads or heads % ranks == 0 or equal_chunks

    def _four_axes(self, local: Tensor, whole: DTensor) -> Tensor:
        """Return a local tensor as (batch, heads, tokens, size), with the key heads that this rank's queries need.

        `whole` is the tensor of all ranks. A key head that all queries of this rank share is given once.
        """
        own_heads = whole.shape[-3] if self.rank >= 2 and whole.ndim >= 3 else 1
        local = local.unsqueeze(-3) if self.rank <= 1 else local
        local = local[(None,) * (max(self.rank, 2) + 2 - local.ndim)]
        heads = local.shape[-3]
        if self.rank >= 2 and heads == own_heads and len(self.heads) < self.leading[-1] and own_heads > 1:
            # It is not sharded along heads, and the queries are: take the heads of the groups that they belong to.
            group = self.leading[-1] // own_heads
            needed = torch.tensor(self.heads, dtype=torch.int64, device=local.device) // group
            local, heads = local.index_select(-3, needed), len(needed)
            if heads and bool((needed == needed[0]).all()):
                local, heads = local[..., :1, :, :], 1
        batch = tuple(map(len, self.local[:-1] if self.rank >= 2 else self.local)) or (1,)
        return local.expand(*batch, heads, *local.shape[-2:]).flatten(0, len(batch) - 1)

    def wrap(self, t: Tensor, *, query_axis: int | None = None, key_axis: int | None = None) -> DTensor:
        """Return a result of shape (batch, heads, ...) as a DTensor with the leading axes that the user sees.

        Parameters
        ----------
        t : Tensor, shape (batch, heads, ...)
            This rank's part of it; what is divided and has no axis in it is the same on all ranks already.
        query_axis, key_axis : int, optional
            Number of its axis of queries, of keys, counted behind the leading axes: 0 for both of a number per query
            and a number per key. None where it has no such axis.
        """
        t = self.axes.restore(t).contiguous()
        sizes = list(t.shape[self.rank :])
        for axis, size in ((query_axis, self.m), (key_axis, self.n)):
            if axis is not None:
                sizes[axis] = size
        return of_shape(t, self.mesh, self.placements(query_axis, key_axis), (*self.leading, *sizes))

    def reduced(self, t: Tensor, roles: Sequence[Role], how: str = "sum", *, shared: bool = True) -> Tensor:
        """Return the sum, or the maximum, of what the ranks have along some roles; differentiable for a sum.

        `shared` says that all ranks go on to compute the same from it, so that each has the whole gradient of it. Else
        the gradients of the ranks are summed.
        """
        dims = [dim for role in roles for dim in self.dims(role)]
        if not dims:
            return t
        placements = [Partial(how) if dim in dims else Replicate() for dim in range(self.mesh.ndim)]
        whole = DTensor.from_local(t.contiguous(), self.mesh, placements, run_check=False)
        replicate = [Replicate()] * self.mesh.ndim
        local = whole.redistribute(self.mesh, replicate).to_local()
        if shared:
            return local
        # torch 2.8 leaves the gradient of what was partial itself partial: nothing sums it.
        return DTensor.from_local(local, self.mesh, replicate, run_check=False).to_local(grad_placements=placements)

    def replicated(self, t: Tensor) -> Tensor:
        """Return a tensor that all ranks have, whose gradient is summed over the ranks."""
        if not t.requires_grad:
            return t
        whole = DTensor.from_local(t, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        # Ranks along "nothing" compute the same, so their gradient counts once.
        grads = [Replicate() if role == "nothing" else Partial() for role in self.roles]
        return _with_gradient(whole.to_local(grad_placements=grads))


def _placements_of_axes(axes: Iterable[int | None]) -> list[Placement]:
    """Return a Shard or Replicate for each dimension of a mesh, from the axis that it divides (None: Replicate)."""
    return [Replicate() if axis is None else Shard(axis) for axis in axes]


def of_shape(t: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """Return a DTensor of a global shape, of which this rank's part is `t`."""
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(t, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def _axis_first(placements: Sequence[Placement], axis: int) -> list[Placement]:
    """Return the placements of a tensor after ``movedim(axis, 0)``."""
    return [Shard((p.dim + 1) % (axis + 1)) if isinstance(p, Shard) else p for p in placements]


def _with_gradient(t: Tensor) -> Tensor:
    """Return a tensor whose gradient is zeros, and not missing, on a rank that does not use it."""
    return _GradientOrZeros.apply(t)  # type: ignore[no-untyped-call]  # torch's own


class _GradientOrZeros(torch.autograd.Function):
    """Gives zeros for a missing gradient: all ranks must take part in the collective of its backward."""

    @staticmethod
    @public("attend()")
    def forward(ctx: Any, t: Tensor) -> Tensor:
        return as_plain("this rank's part", t).view_as(t)  # the result of a collective is waited for

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # autograd gives zeros where there is none
        return gradient
