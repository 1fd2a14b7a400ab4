"""How an attention makes its queries and keys of what it reads: found among the modules within it, by numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor, nn

from attlas.recording.parts.calls import Call, is_norm, same_tensor
from attlas.recording.parts.fits import (
    channels,
    linear_weight,
    rotation_between,
    same,
    scale_between,
    scaling_of,
)
from attlas.recording.parts.stream import Projection, Rotation


class Made(NamedTuple):
    """One way in which queries or keys may be made.

    `given` is what the projection was given, `x` what it makes of all rows, (batch, n, heads, d); `norm` follows it.
    """

    projection: Projection
    given: Tensor
    x: Tensor
    norm: nn.Module | None


class Reading(NamedTuple):
    """How queries and keys are made and turned; `given` is what their projections were given.

    `q_norm` and `k_norm` are the modules that normalize them.
    """

    q: Projection
    k: Projection
    rotation: Rotation | None
    given: Tensor
    q_norm: nn.Module | None
    k_norm: nn.Module | None


def reading_of(calls: Sequence[Call], q: Tensor, k: Tensor, at: Tensor, known: Sequence[Rotation]) -> Reading | None:
    """Return how an attention makes queries and keys; None where the modules within it do not show it.

    Parameters
    ----------
    calls : sequence of Call
        The calls within the attention so far.
    q, k : Tensor, shape (batch, heads, n, d) and (batch, key heads, n, d)
        Queries, and the keys of the same tokens.
    at : Tensor of int
        Rows by which tensors are compared.
    known : sequence of Rotation
        Rotations of other attentions of this pass.
    """
    q, k = q.detach().transpose(1, 2), k.detach().transpose(1, 2)
    sizes = (q.shape[2], k.shape[2])
    queries = [*_ways(calls, q, at, sizes, keys=False)]
    keys = [*_ways(calls, k, at, sizes, keys=True)] if queries else []
    for own in queries:
        for other in keys:
            if not same_tensor(own.given, other.given) and not same(own.given[:, at], other.given[:, at]):
                continue
            found = rotation_between([(own.x, q), (other.x, k)], at, known)
            if found is not None:
                return Reading(own.projection, other.projection, found[0], own.given, own.norm, other.norm)
    return None


def _ways(calls: Sequence[Call], recorded: Tensor, at: Tensor, sizes: tuple[int, int], *, keys: bool) -> Iterator[Made]:
    """Yield the ways in which tokens (batch, n, heads, d) may be made but for a rotation: their lengths agree."""
    batch, count, heads, d = recorded.shape
    for call in calls:
        linear = linear_weight(call.module)
        if linear is None or call.output is None or not call.inputs:
            continue
        given, out = (_rows(t, batch, count) for t in (call.inputs[0], call.output))
        weight, bias = linear
        if (
            given is None
            or out is None
            or out.shape[-1] < heads * d
            or weight.shape != (out.shape[-1], given.shape[-1])
        ):
            continue
        plain = given[:, at].to(weight.dtype) @ weight.mT
        if not same((plain if bias is None else plain + bias).to(out.dtype), out[:, at]):
            continue  # something is added to the map, as by an adapter
        for place in channels(out.shape[-1], *sizes, d, keys=keys, device=out.device):
            projection = Projection(weight, place, bias)
            made = out[..., place]
            for found, x, norm in ((projection, made, None), *_normed(calls, projection, made, at)):
                scale = scale_between(x[:, at], recorded[:, at])
                if scale is not None:
                    yield Made(replace(found, scale=scale), given, x if scale == 1.0 else x * scale, norm)


def _normed(
    calls: Sequence[Call], projection: Projection, made: Tensor, at: Tensor
) -> Iterator[tuple[Projection, Tensor, nn.Module]]:
    """Yield a projection with each norm that was given what it makes, what that norm gives of it, and its module."""
    batch, count, heads, d = made.shape
    for call in calls:
        if not is_norm(call.module) or call.output is None or not call.inputs:
            continue
        x, y = call.inputs[0], call.output
        if x.numel() != made.numel() or x.shape != y.shape:
            continue
        whole = x.shape[-1] == heads * d and heads > 1
        if (x.ndim == 4 and x.shape[1] != count and x.shape[2] == count) or (
            x.ndim == 4 and x.shape[1] == heads != count
        ):
            x, y = x.transpose(1, 2), y.transpose(1, 2)
        shape = (batch, count, heads * d) if whole else (batch, count, heads, d)
        x, y = x.reshape(shape), y.reshape(shape)
        if not same(x[:, at].reshape(made[:, at].shape), made[:, at]):
            continue
        norm = scaling_of(call.module, x, y, at)
        if norm is not None:
            if whole:
                norm = replace(norm, factors=norm.factors.unsqueeze(-1))
            yield replace(projection, norm=norm), y.reshape(made.shape), call.module


def _rows(t: Tensor, batch: int, count: int) -> Tensor | None:
    """Return a tensor of rows as (batch, n, size); None where it is none."""
    if t.shape[:2] == (batch, count) and t.ndim == 3:
        return t
    return t.view(batch, count, -1) if t.ndim == 2 and t.shape[0] == batch * count else None
