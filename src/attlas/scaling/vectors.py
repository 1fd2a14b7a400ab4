"""Random queries and keys: what the dot product does as their size grows, with and without the scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeAlias

import torch
from torch import Tensor

from attlas.errors import DtypeError, ShapeError, kind, public
from attlas.scaling.gaussian import Expected, expected

Sampler: TypeAlias = Callable[[tuple[int, ...], torch.Generator], Tensor]

SIZES = (8, 16, 32, 64, 128, 256, 512)
MEASURES = ("variance", "entropy", "largest", "trace", "frobenius")
_AT_ONCE = 2**22  # random numbers that are held together
_CHECKED_NUMBERS = 2**16  # numbers from which mean and variance of a user's sampler are checked
_MOST_STANDARD_ERRORS = 6.0  # standard errors beyond which they are called wrong


def _draw_normal(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return numbers of the standard normal distribution."""
    return torch.randn(shape, generator=generator)


def _draw_uniform(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return uniform numbers of mean 0 and variance 1."""
    return torch.empty(shape).uniform_(-math.sqrt(3.0), math.sqrt(3.0), generator=generator)


def _draw_rademacher(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return numbers that are 1 or -1, each with probability 1/2."""
    return torch.empty(shape).bernoulli_(0.5, generator=generator).mul_(2.0).sub_(1.0)


def _draw_laplace(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Draw from the Laplace distribution of variance 1."""
    size = torch.empty(shape).exponential_(math.sqrt(2.0), generator=generator)
    return size.mul_(_draw_rademacher(shape, generator))


# All of mean 0 and variance 1.
DISTRIBUTIONS: Mapping[str, Sampler] = MappingProxyType(
    {"normal": _draw_normal, "uniform": _draw_uniform, "rademacher": _draw_rademacher, "laplace": _draw_laplace}
)


@dataclass(frozen=True)
class Estimate:
    """A measured mean and its standard error.

    Parameters
    ----------
    value : float
        The mean over the queries.
    error : float
        Standard deviation over the queries, divided by the root of their number.

    Examples
    --------
    >>> from attlas.scaling import Estimate
    >>> Estimate(value=63.0, error=0.7).deviations(64.0)
    -1.43
    """

    value: float
    error: float

    def deviations(self, predicted: float) -> float:
        """Return how many standard errors the value lies above a prediction, two digits after the point."""
        return round((self.value - predicted) / max(self.error, 1e-300), 2)


@dataclass(frozen=True)
class Measured:
    """One size of tokens, with one scale.

    Parameters
    ----------
    d : int
        Size of queries and keys.
    scale : float
        Factor of the dot product: 1, or ``1 / sqrt(d)``.
    variance, entropy, largest, trace, frobenius : Estimate
        Variance of a row's logits, entropy (nats) and largest of its weights, trace and Frobenius norm of
        the softmax Jacobian; means over the queries.
    expected : Expected
        The prediction: variance ``d scale²``, and the rest from Gaussian logits of that variance.

    Examples
    --------
    >>> from attlas import scaling
    >>> row = scaling.study(sizes=[64], keys=32, queries=8).rows[1]
    >>> row.d, row.scale, row.expected.variance
    (64, 0.125, 1.0)
    """

    d: int
    scale: float
    variance: Estimate
    entropy: Estimate
    largest: Estimate
    trace: Estimate
    frobenius: Estimate
    expected: Expected

    @property
    def scaled(self) -> bool:
        """Whether the dot product was divided by ``sqrt(d)``."""
        return self.scale != 1.0 or self.d == 1


@dataclass(frozen=True)
class Study:
    """Softmax over dot products of random vectors, for several sizes, without and with the scale.

    Parameters
    ----------
    distribution : str
        Name of the distribution.
    keys, queries, seed : int
        How many keys a query has, how many queries were drawn, and the seed.
    rows : tuple of Measured
        For each size first without, then with the scale.

    Examples
    --------
    >>> from attlas import scaling
    >>> table = scaling.study(sizes=[16, 64], keys=32, queries=8).table()
    >>> [(row["d"], row["variance_predicted"]) for row in table]
    [(16, 16.0), (16, 1.0), (64, 64.0), (64, 1.0)]
    """

    distribution: str
    keys: int
    queries: int
    seed: int
    rows: tuple[Measured, ...]

    def table(self) -> list[dict[str, float | int | None]]:
        """Return one dict a row: d, scale, and each measure with its standard error and its prediction."""
        table = []
        for row in self.rows:
            numbers: dict[str, float | int | None] = {"d": row.d, "scale": row.scale}
            for name in MEASURES:
                estimate: Estimate = getattr(row, name)
                numbers[name] = estimate.value
                numbers[f"{name}_error"] = estimate.error
                numbers[f"{name}_predicted"] = getattr(row.expected, name, None)
            table.append(numbers)
        return table


@public("study()")
def study(
    sizes: Sequence[int] = SIZES,
    *,
    keys: int = 512,
    queries: int = 256,
    distribution: str | Sampler = "normal",
    seed: int = 0,
) -> Study:
    """Measure why the dot product is divided by ``sqrt(d)``, and compare with the prediction.

    Parameters
    ----------
    sizes : sequence of int
        Sizes d of the tokens.
    keys : int
        Keys n of each query, at least 2.
    queries : int
        How many queries are drawn, at least 2, each with keys of its own.
    distribution : str or callable
        Distribution of the coordinates, of mean 0 and variance 1: "normal", "uniform", "rademacher" (±1),
        "laplace", or a function ``sampler(shape, generator)`` of your own that returns a tensor.
    seed : int
        Seed of the draw.

    Returns
    -------
    Study

    Raises
    ------
    ShapeError
        If a number is too small, the distribution is unknown, or your sampler's mean or variance is wrong.
    DtypeError
        If your sampler returns no floating-point tensor.

    See Also
    --------
    heads : the same for the heads of a model.
    expected : the prediction.

    Notes
    -----
    For independent coordinates of mean 0 and variance 1, ``q·k`` is a sum of d products of mean 0 and
    variance 1, so ``Var(q·k) = d`` for *every* such distribution, and ``Var(q·k / sqrt(d)) = 1`` [1]_.
    Entropy, largest weight and trace are predicted as if the logits were independent and Gaussian. Given
    the query they are independent, with variance ``‖q‖²``, which is d up to a relative error of order
    ``1 / sqrt(d)``; so the prediction, exact for Gaussian logits, is off by order ``1 / d`` here.

    Measured is the unbiased variance of each row, and the mean over rows with its standard error; rows are
    independent, and the same draw serves both scales. Sums are in float64.

    Cost: ``queries * keys * d`` random numbers a size, 4 million of them in memory.

    References
    ----------
    .. [1] Vaswani et al., "Attention is all you need", 2017, section 3.2.1, footnote 4.

    Examples
    --------
    >>> from attlas import scaling
    >>> found = scaling.study(sizes=[64], keys=256, queries=64, distribution="laplace")
    >>> plain, scaled = found.rows
    >>> abs(plain.variance.deviations(64.0)) < 4, abs(scaled.variance.deviations(1.0)) < 4
    (True, True)
    >>> plain.largest.value > 5 * scaled.largest.value
    True
    """
    sizes = tuple(sizes)
    if not sizes:
        raise _shape_error("sizes must name at least one size.", "no size", "sizes=[8, 64, 512]")
    for d in sizes:
        if isinstance(d, bool) or not isinstance(d, int) or d < 1:
            raise _shape_error("sizes must be whole numbers of at least 1.", f"sizes has {d!r}", "sizes=[8, 64, 512]")
    _check_at_least("keys", keys, 2, "keys=512")
    _check_at_least("queries", queries, 2, "queries=256")
    name, sampler = _named_sampler(distribution)
    rows: list[Measured] = []
    for d in sizes:
        # A generator for each size: a size gives the same numbers whatever other sizes are asked for.
        generator = torch.Generator().manual_seed(seed * 1_000_003 + d)
        rows += _measure_size(d, keys, queries, sampler, generator)
    return Study(name, keys, queries, seed, tuple(rows))


def _measure_size(d: int, keys: int, queries: int, sampler: Sampler, generator: torch.Generator) -> list[Measured]:
    """Measure one size, without and with the scale, on the same draw."""
    scales = (1.0, 1.0 / math.sqrt(d))
    parts: list[list[Tensor]] = [[], []]
    at_once = max(1, _AT_ONCE // (keys * d))
    for start in range(0, queries, at_once):
        count = min(at_once, queries - start)
        q = sampler((count, 1, d), generator)
        k = sampler((count, keys, d), generator)
        logits = torch.matmul(q, k.mT).squeeze(1).double()
        for part, scale in zip(parts, scales, strict=True):
            part.append(_measures_of_rows(logits * scale))
    rows = []
    for part, scale in zip(parts, scales, strict=True):
        values = torch.cat(part, dim=1)
        errors = values.std(1) / math.sqrt(queries)
        estimates = map(Estimate, values.mean(1).tolist(), errors.tolist())
        measures = dict(zip(MEASURES, estimates, strict=True))
        rows.append(Measured(d, scale, **measures, expected=expected(keys, d * scale * scale)))
    return rows


def _measures_of_rows(logits: Tensor) -> Tensor:
    """Return the five measures of each row, in the order of `MEASURES`, shape (5, rows)."""
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    squares = p.square()
    # The Jacobian of softmax is diag(p) - p pᵀ.
    diagonal = p - squares
    off_diagonal_squares = squares.sum(-1).square() - squares.square().sum(-1)  # Σ_{i≠j} (p_i p_j)²
    return torch.stack(
        [
            logits.var(-1),  # variance of the logits
            -(p * log_p).sum(-1),  # entropy
            p.amax(-1),  # largest weight
            diagonal.sum(-1),  # trace of the Jacobian
            (diagonal.square().sum(-1) + off_diagonal_squares.clamp(min=0.0)).sqrt(),  # its Frobenius norm
        ]
    )


def _named_sampler(distribution: str | Sampler) -> tuple[str, Sampler]:
    """Return name and sampler, or say what is wrong with it."""
    if isinstance(distribution, str):
        if distribution not in DISTRIBUTIONS:
            rule = f"distribution must be one of {', '.join(DISTRIBUTIONS)}, or a function of your own."
            raise _shape_error(rule, f"distribution = {distribution!r}", 'distribution="normal"')
        return distribution, DISTRIBUTIONS[distribution]
    name = getattr(distribution, "__name__", type(distribution).__name__)
    sample = (
        distribution((_CHECKED_NUMBERS,), torch.Generator().manual_seed(0)) if callable(distribution) else distribution
    )
    if not isinstance(sample, Tensor) or not sample.is_floating_point():
        rule = "distribution must be a name, or a function that returns a floating-point tensor."
        found = f"a tensor of {sample.dtype}" if isinstance(sample, Tensor) else kind(sample)
        fix = "distribution=lambda shape, generator: torch.randn(shape, generator=generator)"
        raise DtypeError(rule, found, fix, distribution=name)
    if sample.shape != (_CHECKED_NUMBERS,):
        found = f"shape {tuple(sample.shape)} for ({_CHECKED_NUMBERS},)"
        raise _shape_error("a sampler must return the shape that it is asked for.", found, "torch.randn(shape)", name)
    x = sample.double()
    mean, variance = float(x.mean()), float(x.var(correction=0))
    fourth = float((x - mean).pow(4).mean())
    root = math.sqrt(_CHECKED_NUMBERS)
    wrong_mean = abs(mean) > _MOST_STANDARD_ERRORS * math.sqrt(variance) / root
    wrong_variance = (
        abs(variance - 1.0) > _MOST_STANDARD_ERRORS * math.sqrt(max(fourth - variance**2, 0.0)) / root + 1e-6
    )
    if not math.isfinite(variance) or wrong_mean or wrong_variance:
        rule = "a sampler must have mean 0 and variance 1."
        fix = f"return (x - {mean:.3g}) / {math.sqrt(variance):.3g} from it."
        raise _shape_error(rule, f"mean {mean:.3g}, variance {variance:.3g} of {_CHECKED_NUMBERS:,} numbers", fix, name)
    return name, distribution


def _check_at_least(name: str, value: int, least: int, fix: str) -> None:
    """Raise unless a setting is a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise _shape_error(f"{name} must be a whole number of at least {least}.", f"{name} = {value!r}", fix)


def _shape_error(rule: str, found: str, fix: str, name: str | None = None) -> ShapeError:
    """Return a ShapeError about an argument of `scaling`."""
    return ShapeError(rule, found, fix, arguments=None if name is None else {"distribution": name})
