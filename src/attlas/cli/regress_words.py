"""What ``attlas regress`` prints: bandwidths, errors beside those of plainer models, and what to make of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from attlas.cli.regress_baselines import Judged
from attlas.cli.terminal import Terminal
from attlas.cli.words import count, percent

__all__ = ["Feature", "Fit", "as_json", "many", "number", "say"]

_SHOWN = 24  # features that are listed; the others matter less
_BAR = 16
_FLAT = 8.0  # bandwidths of so many standard deviations leave a feature without influence: weights differ by 1 %
_NEAR = 0.03  # and of so few, that it has the longest bar
_RULES = {
    "loo": "bandwidths of least leave-one-out error",
    "scott": "bandwidths by Scott's rule",
    "silverman": "bandwidths by Silverman's rule",
    "given": "bandwidths as given",
}
_DEGREES = ("local mean", "local line")


@dataclass(frozen=True)
class Feature:
    """A feature, its bandwidth, the standard deviation of its values, and the least distance between two of them."""

    name: str
    bandwidth: float
    spread: float
    gap: float

    @property
    def reach(self) -> float:
        """Bandwidth in standard deviations."""
        return self.bandwidth / self.spread if self.spread > 0 else math.inf

    @property
    def flat(self) -> bool:
        """Whether the bandwidth is so wide that the feature says next to nothing."""
        return self.reach >= _FLAT

    @property
    def exact(self) -> bool:
        """Whether only rows of the same value have weight for each other."""
        return self.bandwidth < self.gap / 6.0


@dataclass(frozen=True)
class Fit:
    """Everything that is told about a fit.

    Parameters
    ----------
    source, target : str
        File and column.
    rows, dropped : int
        Rows that were used, and rows that were left out for a missing value.
    kernel : str
        Name of the kernel.
    degree : int
        0 for a local mean, 1 for a local line.
    rule : str
        How bandwidths were chosen: "loo", "scott", "silverman", "given".
    features : sequence of Feature
        In the order of the file.
    mean, linear, kernel_regression : Judged
        Errors with each row left out.
    neighbours : tuple of float
        Effective neighbours of a row: 5th percentile and median.
    alone : float
        Share of rows that no other row reaches.
    seconds : float
        How long the fit took.
    weights : str, optional
        Column of the weights.
    """

    source: str
    target: str
    rows: int
    dropped: int
    kernel: str
    degree: int
    rule: str
    features: Sequence[Feature]
    mean: Judged
    linear: Judged
    kernel_regression: Judged
    neighbours: tuple[float, float]
    alone: float
    seconds: float
    weights: str | None = None


def as_json(fit: Fit) -> dict[str, Any]:
    """Return a fit as plain values for JSON; what is not finite is None."""
    plain = asdict(fit)
    low, median = plain.pop("neighbours")
    plain["features"] = [asdict(feature) | {"reach": feature.reach} for feature in fit.features]
    errors = {name: plain.pop(name) for name in ("mean", "linear", "kernel_regression")}
    plain["leave_one_out"] = errors
    plain["effective_neighbours"] = {"percentile_5": low, "median": median}
    found: dict[str, Any] = _finite(plain)
    return found


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def say(fit: Fit, terminal: Terminal) -> None:
    """Print a fit."""
    title = f"{fit.target} from {many(len(fit.features), 'feature')}, {many(fit.rows, 'row')} of {fit.source}"
    terminal.say(terminal.style(title, "bold"))
    how = f"{fit.kernel.capitalize()} kernel, {_DEGREES[fit.degree]}, {_RULES[fit.rule]}"
    how += f", rows weighted by {fit.weights}" if fit.weights is not None else ""
    terminal.say(f"  {how}; fitted in {_seconds(fit.seconds)}")
    if fit.dropped:
        verb = "is" if fit.dropped == 1 else "are"
        terminal.say(f"  {many(fit.dropped, 'row')} with a missing value {verb} left out")
    terminal.say()
    _features(fit, terminal)
    terminal.say()
    _errors(fit, terminal)
    terminal.say()
    for line in _verdict(fit):
        terminal.say(f"  {line}")


def _features(fit: Fit, terminal: Terminal) -> None:
    ordered = sorted(fit.features, key=lambda feature: feature.reach)
    shown = ordered[:_SHOWN]
    width = min(max(len("feature"), *(len(feature.name) for feature in shown)), max(12, terminal.width - 62))
    terminal.say(
        terminal.style(f"  {'feature'.ljust(width)}  bandwidth     spread  bandwidth / spread  tells rows apart", "dim")
    )
    for feature in shown:
        name = feature.name if len(feature.name) <= width else feature.name[: width - 1] + "…"
        reach = "–" if math.isinf(feature.reach) else number(feature.reach, 3)
        line = f"  {name.ljust(width)}  {number(feature.bandwidth).rjust(9)}  {number(feature.spread).rjust(9)}"
        told = terminal.style(_told(feature), *(("dim",) if feature.flat else ("cyan",)))
        terminal.say(f"{line}  {reach.rjust(18)}  {told}".rstrip())
    if len(ordered) > len(shown):
        more = len(ordered) - len(shown)
        terminal.say(terminal.style(f"  and {count(more)} of wider bandwidth; --json has all", "dim"))


def _told(feature: Feature) -> str:
    """Return a bar that is longer the more a feature tells rows apart, on a logarithmic scale, or words."""
    if feature.spread == 0:
        return "constant"
    if feature.flat:
        return "hardly matters"
    share = math.log(_FLAT / max(feature.reach, _NEAR)) / math.log(_FLAT / _NEAR)
    return "━" * max(1, round(_BAR * share)) + (" the same value only" if feature.exact else "")


def _errors(fit: Fit, terminal: Terminal) -> None:
    rows = (("mean", fit.mean), ("linear model", fit.linear), ("kernel regression", fit.kernel_regression))
    texts = [(name, number(judged.error, 4), _share(judged.r2)) for name, judged in rows]
    width = max(len(text[1]) for text in [*texts, ("", "error", "")])
    terminal.say(terminal.style(f"  each row from all others  {'error'.rjust(width)}      R²", "dim"))
    best = min((judged.error for _, judged in rows if not math.isnan(judged.error)), default=math.nan)
    for (name, error, r2), (_, judged) in zip(texts, rows, strict=True):
        line = f"  {name.ljust(24)}  {error.rjust(width)}  {r2.rjust(6)}"
        terminal.say(terminal.style(line, "bold") if judged.error == best else line)
    terminal.say(terminal.style("  error: root of the mean square, in units of the target", "dim"))


def _verdict(fit: Fit) -> list[str]:
    """Say in words how the kernel compares, and over how many rows it takes its means."""
    lines = []
    own, line, flat = fit.kernel_regression.error, fit.linear.error, fit.mean.error
    if own > 0.995 * flat:
        lines.append("The features say nothing about the target that a kernel of these bandwidths could find.")
    elif math.isnan(line):
        lines.append("There are too few rows for a linear model.")
    elif own < 0.98 * line:
        lines.append(
            f"Its error is {percent(1.0 - own / line)} below the linear model's: there is more than a line here."
        )
    elif own < 1.02 * line:
        lines.append("A straight line predicts as well, and is easier to explain.")
    else:
        hint = "; --degree 1 fits lines locally" if fit.degree == 0 else ""
        lines.append(f"A linear model predicts better here{hint}.")
    low, median = fit.neighbours
    few = f"5 % of them on {number(low, 3)} or fewer"
    lines.append(f"Predictions rest on {number(median, 3)} rows (effective number, median; {few}).")
    if fit.alone:
        lines.append(f"{percent(fit.alone)} of the rows reach no other: the mean stands in for them in these errors.")
    return lines


def many(number: int, word: str) -> str:
    """Return how many there are.

    Examples
    --------
    >>> many(1, "row"), many(2000, "row")
    ('1 row', '2,000 rows')
    """
    return f"{count(number)} {word}" + ("s" if number != 1 else "")


def number(value: float, digits: int = 4) -> str:
    """Return a number with so many digits that count, without an exponent where it reads well without.

    Examples
    --------
    >>> number(0.031234), number(1234567.0), number(1.5e-9), number(float("nan"))
    ('0.03123', '1,234,567', '1.5e-09', '–')
    """
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞"
    if value == 0:
        return "0"
    size = math.floor(math.log10(abs(value)))
    if -5 < size < 9:
        return f"{value:,.{max(0, digits - 1 - size)}f}"
    return f"{value:.{digits - 1}g}"


def _share(r2: float) -> str:
    if math.isnan(r2):
        return "–"
    text = f"{r2:.3f}"
    return "0.000" if text == "-0.000" else text


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 0.1 else f"{max(1, round(1000 * seconds))} ms"
