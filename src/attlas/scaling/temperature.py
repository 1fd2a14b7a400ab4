"""The factor of the logits at which a head's softmax meets a target."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attlas import stats
from attlas.errors import ShapeError, public
from attlas.foundation.checks import instance_of
from attlas.foundation.tiles import Tile
from attlas.matrix import AttentionMatrix, softmax_matrix
from attlas.scaling.jacobian import where_float64_is
from attlas.scores import Score
from attlas.scores.base import Derived
from attlas.stats import Part, Statistic
from attlas.stats.rows import AllowedKeys

_WIDEST_LOG_FACTOR = 16.0  # the factor lies between e^-16 and e^16
_CLOSE_IN_NATS = 1e-5  # nats of the mean entropy that count as met
_MOST_STEPS = 60


@dataclass(frozen=True, eq=False)
class Temperature:
    """The factor of each matrix, and what it reaches.

    Parameters
    ----------
    target : str
        What was asked for: "variance" or "entropy".
    wanted : float
        Its value.
    factor : Tensor, shape (...)
        What to multiply the logits with, one for each matrix.
    reached : Tensor, shape (...)
        The mean over queries at that factor.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import scaling
    >>> A = attlas.attend(torch.randn(50, 64), torch.randn(50, 64), scale=1.0)
    >>> found = scaling.temperature(A, variance=1.0)
    >>> bool(0.1 < found.factor < 0.15)  # about 1 / sqrt(64)
    True
    """

    target: str
    wanted: float
    factor: Tensor
    reached: Tensor

    @property
    def temperature(self) -> Tensor:
        """The number to *divide* logits by, ``1 / factor``."""
        return 1.0 / self.factor


@torch.no_grad()
@public("temperature()")
def temperature(A: AttentionMatrix, *, variance: float | None = None, entropy: float | None = None) -> Temperature:
    """Return the factor of the logits at which their mean variance, or the mean entropy, meets a target.

    Parameters
    ----------
    A : AttentionMatrix, shape (..., m, n)
        The matrix; each one of its leading axes gets a factor of its own.
    variance : float, optional
        Target of the logits' variance, mean over queries; 1 if neither target is given.
    entropy : float, optional
        Target of the entropy, nats, mean over queries.

    Returns
    -------
    Temperature

    Raises
    ------
    DtypeError
        If `A` is no AttentionMatrix.
    ShapeError
        If both targets are given, a target is out of reach, or entropy is asked for with a sink.

    See Also
    --------
    heads : measures all heads, and the factor for variance 1.

    Notes
    -----
    The variance grows with the square of the factor f, so ``f = sqrt(variance / measured)``, in closed form.
    The entropy of ``softmax(f s)`` falls with f, ``dH / d ln f = -Var_p(f s)`` under the weights p, so there
    is one root. It is found by bisection in ln f with Newton's step wherever that stays in the bracket, to
    1e-5 nats, each step on the lazy matrix of all heads together. Entropy can reach anything between 0
    (ties aside) and the mean of ``ln(allowed keys)``. Queries without an allowed key do not count.

    Cost: one pass for the variance; for the entropy two passes a step, some six steps. Memory: a few tiles. A matrix
    on a device without float64 (``"mps"``) is measured on the CPU.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import scaling, stats
    >>> q, k = torch.randn(3, 40, 16), torch.randn(3, 60, 16)
    >>> found = scaling.temperature(attlas.attend(q, k), entropy=2.0)
    >>> sharper = attlas.attend(q * found.factor[:, None, None], k)
    >>> stats.entropy(sharper).mean(-1).round(decimals=3)
    tensor([2., 2., 2.])
    """
    instance_of("A", A, AttentionMatrix, "an AttentionMatrix", "A = attlas.attend(q, k)")
    if variance is not None and entropy is not None:
        found = f"variance = {variance!r} and entropy = {entropy!r}"
        raise _shape_error("one target can be met, not two.", found, f"temperature(A, entropy={entropy!r})")
    lead, device, A = A.shape[:-2], A.device, where_float64_is(A)
    batch, heads, m, _ = A.weights.shape
    keys = A.collect(AllowedKeys())[0].reshape(batch, heads, m).double()
    if entropy is not None:
        factor, reached = _factor_of_entropy(A, entropy, keys)
        name, wanted = "entropy", entropy
    else:
        name, wanted = "variance", 1.0 if variance is None else variance
        factor, reached = _factor_of_variance(A, wanted, keys)
    factor, reached = (t.reshape(lead).to(device, A.dtype) for t in (factor, reached))
    return Temperature(name, float(wanted), factor, reached)


def _factor_of_variance(A: AttentionMatrix, wanted: float, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factor of each matrix that gives its logits the wanted variance, and the variance reached."""
    if not 0.0 < wanted < float("inf"):
        raise _shape_error("the variance must be a finite number above 0.", f"variance = {wanted!r}", "variance=1.0")
    found = _mean_over_rows(stats.logit_moments(A).variance.reshape(keys.shape), keys)
    if not bool((found > 0.0).all()):
        least = f"variance {float(found.min()):g} of the logits of one"
        raise _shape_error("the logits of every matrix must vary.", least, "leave that head out: A[:, heads]")
    # The variance of factor * logits is factor² times theirs.
    factor = (wanted / found).sqrt()
    return factor, found * factor.square()


def _factor_of_entropy(A: AttentionMatrix, wanted: float, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the factor of each matrix that gives its rows the wanted mean entropy, and the entropy reached.

    Newton's method on the logarithm of the factor, with bisection where a step leaves the known interval.
    """
    if A.sink is not None:
        rule = "the entropy of weights beside a sink need not fall with the factor."
        raise _shape_error(rule, "a matrix with a sink", "temperature(A, variance=1.0)")
    most = _mean_over_rows(keys.clamp(min=1.0).log(), keys)
    if not 0.0 < wanted < float(most.min()):
        rule = "the entropy must lie between 0 and the mean of ln(allowed keys)."
        fix = f"entropy={float(most.min()) / 2:.2f}"
        raise _shape_error(
            rule, f"entropy = {wanted!r}, and the mean of ln(allowed keys) is {float(most.min()):.4g}", fix
        )
    low, high = torch.full_like(most, -_WIDEST_LOG_FACTOR), torch.full_like(most, _WIDEST_LOG_FACTOR)
    x = torch.zeros_like(most)
    for _ in range(_MOST_STEPS):
        reached, slope = _entropy_at_factor(A, x.exp(), keys)
        excess = reached - wanted
        if bool((excess.abs() < _CLOSE_IN_NATS).all()) or bool((high - low < 1e-9).all()):
            break
        low, high = torch.where(excess > 0, x, low), torch.where(excess > 0, high, x)
        newton = x + excess / slope.clamp(min=1e-30)
        x = torch.where((newton > low) & (newton < high), newton, (low + high) / 2)
    if not bool((excess.abs() < 1e-3).all()):
        found = f"{float(reached.max()):.4g} at the best; logits that are equal keep their weights equal"
        fix = f"a target above {float(reached.max()):.4g}, or leave that head out: A[:, heads]"
        raise _shape_error("no factor reaches this entropy.", found, fix)
    return x.exp(), reached


def _entropy_at_factor(A: AttentionMatrix, factor: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean entropy of each head with its own factor, and how fast it falls with ln(factor)."""
    problem = replace(A.problem, score=_ScaledPerHead(A.problem.score, factor))
    matrix = softmax_matrix(problem, A.plan)
    entropy, spread = matrix.collect(_SurprisalMoments())[0]
    return _mean_over_rows(entropy, keys), _mean_over_rows(spread, keys)


def _mean_over_rows(t: Tensor, keys: Tensor) -> Tensor:
    """Return the mean of each matrix over the rows that may see a key, in float64."""
    counted = (keys > 0).double()
    return (t.double() * counted).sum(-1) / counted.sum(-1).clamp(min=1.0)


class _ScaledPerHead(Derived):
    """A score times a number of each batch and head."""

    def __init__(self, inner: Score, factor: Tensor) -> None:
        super().__init__(inner)
        self.factor = factor

    def forward(self, q: Tensor, k: Tensor, at: Tile) -> Tensor:
        # Implements `Score.forward`: the inner logits times the factor of their batch and head.
        factor = self.factor[at.place[:2]].to(at.dtype)
        logits: Tensor = self.inner(q, k, at)
        return logits * factor[..., None, None]


class _SurprisalMoments(Statistic):
    """Mean and variance of ``-ln p`` under p, for each row: its entropy, and how fast that falls with ln(factor)."""

    def start(self, problem: Any) -> Tensor:
        return torch.zeros(*problem.shape[:3], 2, dtype=torch.float64, device=problem.device)

    def step(self, carry: Tensor, part: Part, at: Tile) -> Tensor:
        # Where p is 0, ln p is anything: a bound keeps 0 times its square at 0.
        shift = torch.nan_to_num(part.shift - part.lse, posinf=0.0, neginf=0.0)
        log_p = (part.shifted + shift.unsqueeze(-1)).clamp(min=-1e4)
        weighted = part.weights * log_p
        carry[at.place] += torch.stack([weighted.sum(-1), (weighted * log_p).sum(-1)], dim=-1).double()
        return carry

    def finish(self, carry: Tensor) -> tuple[Tensor, Tensor]:
        first, second = carry.unbind(-1)
        return -first, (second - first.square()).clamp(min=0.0)


def _shape_error(rule: str, found: str, fix: str) -> ShapeError:
    """Return a ShapeError of `tempered`."""
    return ShapeError(rule, found, fix)
