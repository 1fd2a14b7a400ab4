"""attend() for DTensors: the arguments are checked for the whole matrix, and each rank makes its part of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from attlas.distributed.agree import agreed
from attlas.distributed.layout import Layout, Role, check_dtensor, like, roles_of
from attlas.distributed.matrix import DistributedMatrix
from attlas.engine.plan import Plan
from attlas.engine.problem import Problem, version_of
from attlas.errors import BackendError, DtypeError, GradientError, ShapeError, kind, public
from attlas.foundation.compat import tracing
from attlas.masks.base import Mask
from attlas.matrix import AttentionMatrix, softmax_matrix
from attlas.matrix.attend import attend as local_attend
from attlas.scores import ScaledDot, Score


@public("attend()")
def attend(
    q: DTensor,
    k: DTensor,
    score: Score | Callable[..., Any] | None = None,
    mask: Mask | Tensor | Callable[..., Any] | None = None,
    scale: float | Tensor | None = None,
    sink: Tensor | None = None,
    plan: Plan | None = None,
    *,
    order: Tensor | None = None,
) -> DistributedMatrix:
    """Return the attention matrix of DTensors; `attlas.attend` calls this when it is given DTensors.

    Parameters
    ----------
    q : DTensor, shape (..., m, d)
        Queries, sharded along batch, heads or queries, or replicated.
    k : DTensor, shape (..., n, d)
        Keys, sharded along batch, heads or keys, or replicated, on the same mesh.
    score, mask, scale, sink, plan
        As in `attlas.attend`, the same on every rank. They refer to positions in the whole matrix. Tensors are
        ordinary ones that every rank has; their gradient is the sum over all ranks.
    order : Tensor, optional, shape (n,)
        Position in the text of each token, where queries and keys are sharded in another order than that of the
        text, such as `head_tail_order`.

    Returns
    -------
    DistributedMatrix, shape (..., m, n)

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        If the arguments do not fit together, or placements are not supported. Where queries or keys are sharded, all
        ranks raise the error of the first rank that has one.
    BackendError
        Inside torch.compile and the transforms of torch.func.
    GradientError
        If a score function reads a tensor that requires a gradient.

    See Also
    --------
    DistributedMatrix : placements of the results, and what is sent.

    Notes
    -----
    A dimension of the mesh that shards the batch or the heads of q or k: each rank computes its part, nothing is sent.
    One that shards q along its queries: keys and values are all-gathered, and their gradients reduce-scattered, one
    group of heads at a time where all take more than `Plan.gathered_bytes`. One that shards the keys only: outputs,
    log-sum-exps and statistics of the shards are merged.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import distributed
    >>> from torch.distributed import HashStore, destroy_process_group, init_process_group
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.tensor import Shard, distribute_tensor
    >>> init_process_group(
    ...     "gloo", store=HashStore(), rank=0, world_size=1
    ... )  # torchrun does this with many ranks
    >>> mesh = init_device_mesh("cpu", (1,))
    >>> q, k, v = (distribute_tensor(torch.randn(2, 4, 64, 8), mesh, [Shard(-2)]) for _ in range(3))
    >>> A = distributed.attend(q, k, mask=attlas.Causal())
    >>> (A @ v).placements, A.shape
    ((Shard(dim=2),), torch.Size([2, 4, 64, 64]))
    >>> destroy_process_group()
    """
    if tracing():
        found = "torch.compile, or a transform of torch.func"
        raise BackendError("DTensors are attended to eagerly.", found, "call attend() outside of it.")
    if not isinstance(q, DTensor) or not isinstance(k, DTensor):
        name, t = ("k", k) if isinstance(q, DTensor) else ("q", q)
        rule, fix = "q and k must both be DTensors, or neither.", f"distribute_tensor({name}, mesh, placements)"
        raise DtypeError(rule, f"{name} is {kind(t)}", fix, arguments={name: kind(t)})

    sink = sink.full_tensor() if isinstance(sink, DTensor) else sink
    scale = scale.full_tensor() if isinstance(scale, DTensor) else scale

    # A factor that is a tensor is multiplied with this rank's queries later.
    factor = scale if score is None and isinstance(scale, Tensor) else None

    def prepare() -> tuple[Layout, AttentionMatrix]:
        """Check all arguments; return what this rank has, and the whole matrix of tokens without memory."""
        for name, t in (("q", q), ("k", k)):
            check_dtensor(name, t, q.device_mesh)
        # Tensors of the same shapes without memory: the checks of `attlas.attend` need no numbers.
        some_q, some_k = like(q), like(k)
        if factor is None:
            whole = local_attend(some_q, some_k, score, mask, scale, sink, plan)
        else:
            # Checks that the factor fits; the result is not needed.
            local_attend(some_q[..., :1, :], some_k[..., :1, :], scale=like(factor))
            whole = local_attend(some_q, some_k, ScaledDot(1.0), mask, None, sink, plan)
        if q.device_mesh.size() > 1:
            _check_gradients(whole.problem)
        with torch.no_grad():
            # Versions tell later whether a tensor was changed in place since.
            own = [version_of("q", q.to_local()), version_of("k", k.to_local())]
        own += [] if factor is None else [version_of("scale", factor)]
        problem = replace(whole.problem, versions=(*whole.problem.versions, *own))
        whole = softmax_matrix(problem, whole.plan, whole.axes)
        *leading, m, n = whole.shape
        roles = roles_of(q, k, leading)
        if order is not None:
            _check_order(order, roles, m, n)
        return Layout(q.device_mesh, roles, tuple(leading), m, n, order), whole

    divided = any(isinstance(p, Shard) and p.dim % t.ndim == t.ndim - 2 for t in (q, k) for p in t.placements)
    # Where ranks exchange tokens, all raise the error of one; else each is on its own.
    layout, whole = agreed(q.device_mesh, prepare) if divided else prepare()
    return DistributedMatrix(layout, whole, (q, k, factor))


def _check_order(order: Tensor, roles: tuple[Role, ...], m: int, n: int) -> None:
    """Raise a ShapeError unless `order` has each of the n positions of the text once, for m = n queries and keys.

    `roles` is what each dimension of the mesh divides: "keys" means that it shards k alone, where no order is allowed.
    """
    rule, found = "order must be a permutation of the tokens, of as many queries as keys.", f"m = {m}, n = {n}"
    fits = isinstance(order, Tensor) and order.shape == (n,) == (m,) and not order.is_floating_point()
    if fits and "keys" in roles:
        fits, rule, found = False, "with an order, queries must be sharded too.", "q whole, k sharded along its keys"
    elif fits and not torch.equal(order.sort().values.cpu(), torch.arange(n, device="cpu")):
        fits, found = False, "positions that are missing or come twice"
    if not fits:
        raise ShapeError(rule, found, "order=head_tail_order(n, mesh.size())", order=order)


def _check_gradients(problem: Problem) -> None:
    """Raise a GradientError where a user's function reads a tensor that needs a gradient.

    That gradient would have to be summed over the ranks.
    """
    if any(t.requires_grad for t in problem.read):
        rule = "a gradient cannot be summed over the ranks for a tensor that a function reads."
        fix = "score + attlas.TensorBias(t), or a Score of your own that holds the tensor."
        raise GradientError(rule, "a score_mod with a tensor that requires a gradient", fix)
