"""The heads of a model: what their softmax does, against what independent queries and keys would do."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attlas import stats
from attlas.errors import DtypeError, kind
from attlas.foundation.tiles import Tile
from attlas.matrix import AttentionMatrix
from attlas.scaling.gaussian import Expected, expected
from attlas.scaling.jacobian import Jacobian, where_float64_is
from attlas.scaling.vectors import MEASURES
from attlas.stats import Part, Statistic
from attlas.stats.rows import AllowedKeys

_NODES_PER_OCTAVE = 2  # nodes an octave of the table in the variance; one an octave in the number of keys
_LEAST_POWER, _MOST_POWER = -8, 20  # powers of 2 between which the variance is looked up


@dataclass(frozen=True)
class HeadScaling:
    """What softmax does in one head; means over the queries that may see a key.

    Parameters
    ----------
    layer, head : int
        Which head.
    variance, entropy, largest, trace, frobenius : float
        Variance of a row's logits, entropy (nats) and largest of its weights, trace and Frobenius norm of
        the softmax Jacobian.
    expected : Expected or None
        The same, had queries and keys been independent; None where the score is no dot product.
    factor : float
        Factor of the logits that makes their variance 1; infinite where they do not vary.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import scaling
    >>> head = scaling.heads(attlas.attend(torch.zeros(9, 4), torch.randn(9, 4))).heads[0]
    >>> head.layer, head.head, head.variance
    (0, 0, 0.0)
    """

    layer: int
    head: int
    variance: float
    entropy: float
    largest: float
    trace: float
    frobenius: float
    expected: Expected | None
    factor: float


@dataclass(frozen=True)
class Heads:
    """Every head of a model.

    Parameters
    ----------
    heads : tuple of HeadScaling
        Layer by layer.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import scaling
    >>> q, k = torch.randn(1, 2, 50, 16), torch.randn(1, 2, 50, 16)
    >>> [row["head"] for row in scaling.heads(attlas.attend(q, k)).table()]
    [0, 1]
    """

    heads: tuple[HeadScaling, ...]

    def table(self) -> list[dict[str, float | int | None]]:
        """Return one dict a head: layer, head, each measure with its prediction, and the factor."""
        table = []
        for head in self.heads:
            numbers: dict[str, float | int | None] = {"layer": head.layer, "head": head.head}
            for name in MEASURES:
                numbers[name] = getattr(head, name)
                numbers[f"{name}_predicted"] = getattr(head.expected, name, None)
            numbers["factor"] = head.factor
            table.append(numbers)
        return table


def heads(attentions: AttentionMatrix | Sequence[AttentionMatrix]) -> Heads:
    """Measure what softmax does in every head, and what it would do with independent queries and keys.

    Parameters
    ----------
    attentions : AttentionMatrix or sequence of AttentionMatrix, shape (..., heads, m, n)
        One matrix for each layer: ``model(..., output_attentions=True).attentions`` of a model with
        ``attn_implementation="attlas"``, or any of your own. Batches are averaged over.

    Returns
    -------
    Heads

    Raises
    ------
    DtypeError
        If something else is given.

    See Also
    --------
    study : the same for random vectors.
    temperature : the factor for another target.

    Notes
    -----
    Independence predicts a logit variance of ``scale² qᵀ Cov(k) q`` for the query q, times ``(n - 1) / n``
    for n allowed keys, with the covariance taken over every key that some query may see: no pass over the
    matrix. Without a mask this is the measured variance itself. With one, the difference says that near keys
    are not like far ones. Entropy, largest weight and trace are then those of independent Gaussian logits
    (see `expected`), row by row, looked up in a table (within 0.02 nats). A head far below the predicted
    entropy at its variance has a few logits far out: it picks. The prediction is left out for scores that
    are no dot product, or add a bias.

    The scale ``1 / sqrt(d)`` makes the variance 1 for tokens of independent coordinates of variance 1. A
    trained head need not have that, and the factor says how far it has moved.

    Cost: two passes over each matrix, memory of a few tiles and ``m + n`` numbers a head. A matrix on a device without
    float64 (``"mps"``) is measured on the CPU.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import scaling
    >>> q, k = torch.randn(1, 2, 500, 64), torch.randn(1, 2, 500, 64)
    >>> head = scaling.heads(attlas.attend(q, k)).heads[1]
    >>> abs(head.variance - head.expected.variance) < 1e-3
    True
    >>> 0.9 < head.factor < 1.1
    True
    """
    layers = [attentions] if isinstance(attentions, AttentionMatrix) else list(attentions)
    found: list[HeadScaling] = []
    for layer, A in enumerate(layers):
        if not isinstance(A, AttentionMatrix):
            rule = "every layer must be an AttentionMatrix."
            fix = 'load the model with attn_implementation="attlas" and pass output_attentions=True.'
            raise DtypeError(rule, kind(A), fix, arguments={f"attentions[{layer}]": type(A).__name__}, where="heads()")
        found += _numbers_of_layer(where_float64_is(A), layer)
    return Heads(tuple(found))


@torch.no_grad()
def _numbers_of_layer(A: AttentionMatrix, layer: int) -> list[HeadScaling]:
    """Return the numbers of each head of a layer, over all its batches, and those predicted for them."""
    batch, count, m, n = A.weights.shape
    shape = (batch, count, m)
    moments, entropy, largest, jacobian, keys, seen = A.collect(
        stats.LogitMoments(), stats.Entropy(), stats.MaxWeight(), Jacobian(), AllowedKeys(), _SeenKeys()
    )
    keys, seen = keys.reshape(shape).double(), seen.reshape(batch, count, n)
    counted = (keys > 0).double()

    def mean(t: Tensor) -> list[float]:
        """Return the mean of each head over the queries that may see a key."""
        total = (t.reshape(shape).double() * counted).sum((0, 2)) / counted.sum((0, 2)).clamp(min=1.0)
        return [float(value) for value in total]

    variances, entropies, largests, traces, norms = (
        mean(t) for t in (moments.variance, entropy, largest, jacobian.trace, jacobian.frobenius)
    )
    predicted: list[Expected | None] = [None] * count
    variance = _independent_logit_variance(A, seen)
    if variance is not None:
        spread = variance * (keys - 1.0).clamp(min=0.0) / keys.clamp(min=1.0)
        columns = [mean(t) for t in (spread, *look_up(keys, variance))]
        predicted = [Expected(*of_head) for of_head in zip(*columns, strict=True)]
    factors = [1.0 / math.sqrt(value) if value > 0.0 else math.inf for value in variances]
    numbers = zip(range(count), variances, entropies, largests, traces, norms, predicted, factors, strict=True)
    return [HeadScaling(layer, *of_head) for of_head in numbers]


def _independent_logit_variance(A: AttentionMatrix, seen: Tensor) -> Tensor | None:
    """Return each query's logit variance over independent keys, scale² qᵀ Cov(k) q, shape (batch, heads, m)."""
    problem = A.problem
    dot = problem.score.as_dot(*problem.tokens)  # type: ignore[arg-type]  # a sum has a tuple of tokens
    if dot is None or dot.bias is not None or dot.cap:
        return None
    q, k = dot.q.double(), dot.k.double()
    batch, count = q.shape[:2]
    own = k.shape[1]
    weight = seen.reshape(batch, own, -1, k.shape[2]).any(2).double().unsqueeze(-1)
    total = weight.sum(-2, keepdim=True)
    centred = (k - (weight * k).sum(-2, keepdim=True) / total.clamp(min=1.0)) * weight
    covariance = torch.matmul(centred.mT, centred) / (total - 1.0).clamp(min=1.0)
    covariance = covariance.repeat_interleave(count // max(own, 1), dim=1)
    return (torch.matmul(q, covariance) * q).sum(-1).clamp(min=0.0) * dot.scale**2


def look_up(keys: Tensor, variance: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return `expected` of each row, between the nodes of a table: entropy, largest weight, trace."""
    x = torch.log2(keys.clamp(min=1.0))
    y = (torch.log2(variance.clamp(min=2.0**_LEAST_POWER, max=2.0**_MOST_POWER)) - _LEAST_POWER) * _NODES_PER_OCTAVE
    left, low = x.floor().long(), y.floor().long()
    out = torch.zeros(3, *keys.shape, dtype=torch.float64, device=keys.device)
    # Each cell of the table as one number; `a` and `b` below go to its corners.
    places, inverse = torch.unique(left * 1000 + low, return_inverse=True)
    corners = torch.zeros(len(places), 2, 2, 3, dtype=torch.float64)
    for i, place in enumerate(places.tolist()):
        for a in (0, 1):
            for b in (0, 1):
                node = expected(
                    2 ** (place // 1000 + a), 2.0 ** (_LEAST_POWER + (place % 1000 + b) / _NODES_PER_OCTAVE)
                )
                corners[i, a, b] = torch.tensor([node.entropy, node.largest, node.trace])
    corner = corners.to(keys.device)[inverse]
    for a in (0, 1):
        for b in (0, 1):
            # Bilinear: each corner of the cell weighs by the distance from the opposite one.
            share = (x - left if a else 1 - x + left) * (y - low if b else 1 - y + low)
            out += share * corner[..., a, b, :].movedim(-1, 0)
    return out[0], out[1], out[2]


class _SeenKeys(Statistic):
    """Which keys some query may see, shape (..., n)."""

    def start(self, problem: Any) -> Tensor:
        batch, count, _, n = problem.shape
        return torch.zeros(batch, count, n, dtype=torch.bool, device=problem.device)

    def step(self, carry: Tensor, part: Part, at: Tile) -> Tensor:
        # Implements `Statistic.step`: marks the keys of a tile that some row sees.
        batches, of_heads, _ = at.place
        for columns, cells in part.visible_columns:
            span = slice(at.columns.start + columns.start, at.columns.start + columns.stop)
            carry[batches, of_heads, span] |= cells.any(-2) if cells is not None else True
        return carry
