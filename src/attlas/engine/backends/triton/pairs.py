"""What the kernels read of scores that are no dot product: additive scores, and kernels of a distance.

Differences are taken of the tokens as given. Hidden units come with their exponentials, of which the kernels make tanh.
Numbers lie unit by unit, so that a tile reads neighbours, with room for a tile beyond the last token.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from attlas.engine.backend import Request
from attlas.engine.costs import MOST_COORDINATES
from attlas.foundation.devices import to_device
from attlas.scores.additive import Additive
from attlas.scores.base import Scaled, Score
from attlas.scores.kernel import Boxcar, Epanechnikov, Gaussian, Laplace, Triangular

#: What a product is made of: the numbers that the kernels know, 0 for dot products.
KINDS: dict[type, int] = {Additive: 1, Gaussian: 2, Laplace: 3, Boxcar: 4, Epanechnikov: 5, Triangular: 6}
ADDITIVE, GAUSSIAN, LAPLACE, BOXCAR, EPANECHNIKOV, TRIANGULAR = KINDS.values()

ROOM = 128  # tokens beyond the last one that a tile may read
_UNITS_PER_RECIPROCAL = 4  # of Additive that share a reciprocal
_LOG2_OF_E = 1.4426950408889634


class Pairs(NamedTuple):
    """The numbers of tokens, unit by unit, and the weights or scales of units.

    Parameters
    ----------
    kind : int
        One of `KINDS`.
    units : int
        How many there are.
    q, k : Tensor, shape (batch, heads, numbers, m + room) and (batch, key heads, numbers, n + room)
        The numbers of each token, float32; those of `Additive` twice, and the largest.
    weights : Tensor, shape (units,), or (units + 1,) of `Additive`
        float32.
    """

    kind: int
    units: int
    q: Tensor
    k: Tensor
    weights: Tensor


def unscaled(score: Score) -> tuple[Score, float]:
    """Return a score without the numbers that it is multiplied by, and their product."""
    factor = 1.0
    while type(score) is Scaled:
        factor *= score.factor
        score = score.inner
    return score, factor


def unsupported(request: Request) -> str | None:
    """Return why the kernels do not read a score that is no dot product, in a part of a sentence, or None."""
    problem = request.problem
    score, factor = unscaled(problem.score)
    if type(score) not in KINDS or (factor != 1.0 and type(score) is not Additive):
        return "the score is not a dot product, an additive score or a kernel of a distance"
    q, k = request.tokens
    if not isinstance(q, Tensor) or not isinstance(k, Tensor):
        return "this Gaussian is computed in float64"
    if type(score) is not Additive and q.shape[-1] > MOST_COORDINATES:
        return f"its kernels take distances of up to {MOST_COORDINATES} coordinates"
    if problem.dtype is not torch.float32:
        return "its kernels are for float32 and 16 bits"
    if (2 * q.shape[-1] + 9) * (max(problem.shape[2:]) + 2 * ROOM) >= 1 << 31:
        return "its kernels count numbers of tokens in 32 bits"
    return None


@torch.no_grad()
def pairs_of(score: Score, q: Tensor, k: Tensor) -> Pairs:
    """Return what the kernels read of projected tokens, shape (batch, heads, m, d) and (batch, key heads, n, d)."""
    inner, factor = unscaled(score)
    own: Any = inner
    if type(inner) is Additive:
        return additive(q, k, own.w_v.detach().to(q.device, torch.float32) * factor)
    return distance(KINDS[type(inner)], q, k, scale_of(own, q))


def additive(q: Tensor, k: Tensor, weights: Tensor) -> Pairs:
    """Return what the kernels read of an additive score with weights of the hidden units, shape (hidden,)."""
    weights = functional.pad(weights, (0, -len(weights) % _UNITS_PER_RECIPROCAL))
    numbers = torch.cat([-2.0 * weights, weights.sum().view(1)])
    return Pairs(ADDITIVE, len(weights), _scaled_hidden_units(q), _scaled_hidden_units(k), numbers)


def distance(kind: int, q: Tensor, k: Tensor, scale: Tensor) -> Pairs:
    """Return what the kernels read of a kernel of a distance with a scale of each coordinate, shape (d,)."""
    by_unit = [_units_first(t.detach().float()) for t in (q, k)]
    return Pairs(kind, len(scale), by_unit[0], by_unit[1], scale.detach().contiguous())


def scale_of(score: Any, q: Tensor) -> Tensor:
    """Return one over the bandwidth of each coordinate, shape (d,), as the score itself makes it."""
    ones, h = torch.ones(q.shape[-1], dtype=torch.float32, device=q.device), score.bandwidth
    scale: Tensor = ones / (to_device(h, q.device).to(ones) if h.ndim else h)
    return scale


def _scaled_hidden_units(t: Tensor) -> Tensor:
    """Return hidden units in units of ``log(2) / 2``, their exponentials, and the largest of each token."""
    t = t.detach().float()
    t = functional.pad(t, (0, -t.shape[-1] % _UNITS_PER_RECIPROCAL))
    return _units_first(torch.cat([t * (2.0 * _LOG2_OF_E), torch.exp(2.0 * t), t.abs().amax(-1, keepdim=True)], dim=-1))


def _units_first(t: Tensor) -> Tensor:
    """Return numbers of tokens unit by unit, with zeros for some more tokens."""
    room = ROOM + -(t.shape[-2] + ROOM) % 16
    return functional.pad(t.mT, (0, room)).contiguous()


def inputs_of(pairs: Pairs, m: int, n: int) -> list[Tensor]:
    """Return queries, keys, and weights or scales in float64, from what the kernels read."""
    q, k = (t[..., : pairs.units, :size].double().mT for t, size in ((pairs.q, m), (pairs.k, n)))
    if pairs.kind != ADDITIVE:
        return [q, k, pairs.weights.double()]
    return [q / (2.0 * _LOG2_OF_E), k / (2.0 * _LOG2_OF_E), -0.5 * pairs.weights[: pairs.units].double()]


def definition(kind: int, q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """Return the scores of all pairs in torch's own operations."""
    q, k = q.unsqueeze(-2), k.repeat_interleave(q.shape[1] // k.shape[1], 1).unsqueeze(-3)
    if kind == ADDITIVE:
        scores: Tensor = torch.tanh(q + k) @ weights
        return scores
    gap = (q - k) * weights
    if kind == LAPLACE:
        return -gap.abs().sum(-1)
    far = gap.square().sum(-1)
    if kind == GAUSSIAN:
        return -0.5 * far
    outside = far >= 1.0
    inside = far.masked_fill(outside, 0.0)
    if kind == BOXCAR:
        inside = inside * 0.0
    else:
        inside = torch.log1p(-(inside if kind == EPANECHNIKOV else inside.sqrt()))
    return inside.masked_fill(outside, -torch.inf)
