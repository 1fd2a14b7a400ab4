"""The pictures of ``attlas regress``: the fit of one feature with its bands, or what each of several does."""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attlas import pictures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from attlas.estimators import AttentionRegressor

__all__ = ["figure"]

_DEEP, _BAND = "#174268", "#8fcbc8"
_POINTS = 4_000  # points that are drawn
_GRID = 256  # positions at which the curve of one feature is computed
_STEPS = 100  # and those of several
_FLAT = 8.0  # bandwidths of so many standard deviations leave a feature without influence
_PANELS = 12
_FEW = 12  # values of a feature that are its only positions
_PAIRS = 2e9  # pairs of a row and a place that a picture may cost: some seconds


def figure(
    model: AttentionRegressor,
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    features: Sequence[dict[str, Any]],
    target: str,
    subtitle: str,
) -> Figure:
    """Draw a fit: the curve over one feature, or the partial dependence on each of several.

    Parameters
    ----------
    model : AttentionRegressor
        The fit.
    x : ndarray, shape (rows, features)
        Features.
    y : ndarray, shape (rows,)
        Target.
    features : sequence of dict
        Name, bandwidth and reach (bandwidth in standard deviations) of each feature.
    target : str
        Its name.
    subtitle : str
        What stands below the title.

    Returns
    -------
    matplotlib.figure.Figure
        A figure of its own: pyplot is not used.
    """
    with warnings.catch_warnings():
        # Positions that no row reaches are gaps in the picture, which says it better than a warning.
        warnings.simplefilter("ignore")
        if x.shape[1] == 1:
            return _curve(model, x, y, features[0], (target, subtitle))
        return _dependence(model, x, y, features, (target, subtitle))


def _curve(
    model: AttentionRegressor,
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    feature: dict[str, Any],
    texts: tuple[str, str],
) -> Figure:
    figure = pictures.sheet(8.4, 5.0)
    ax = figure.subplots()
    grid = np.linspace(float(x.min()), float(x.max()), _GRID)[:, None]
    mean, std = (np.asarray(part) for part in model.predict(grid, return_std=True))
    bands = np.asarray(model.predict_quantile(grid, [0.05, 0.95]))
    error = 2.0 * std / np.sqrt(np.asarray(model.effective_neighbours(grid)))
    drawn = np.random.default_rng(0).permutation(len(y))[:_POINTS]
    alpha = float(np.clip(300 / len(drawn), 0.12, 0.8))
    at = grid[:, 0]
    ax.fill_between(at, bands[:, 0], bands[:, 1], color=_BAND, alpha=0.28, linewidth=0, zorder=1)
    ax.scatter(x[drawn, 0], y[drawn], s=9, color=pictures.SOFT, alpha=alpha, linewidths=0, zorder=2, rasterized=True)
    ax.fill_between(at, mean - error, mean + error, color=_DEEP, alpha=0.25, linewidth=0, zorder=3)
    ax.plot(at, mean, color=pictures.ACCENT, linewidth=2.0, zorder=4)
    ax.set_xlabel(feature["name"], fontsize=9, color=pictures.SOFT, parse_math=False)
    ax.set_ylabel(texts[0], fontsize=9, color=pictures.SOFT, parse_math=False)
    _frame(ax, 8, dates=feature["kind"].endswith("date"))
    ax.margins(x=0.01)
    shown = "" if len(drawn) == len(y) else f" · {len(drawn):,} of {len(y):,} rows are drawn"
    foot = f"line: the estimate, ± 2 standard errors · pale band: 90% of the values around it{shown}"
    _titles(figure, f"{texts[0]} over {feature['name']}", texts[1], foot)
    return figure


def _dependence(
    model: AttentionRegressor,
    x: NDArray[np.float64],
    y: NDArray[np.float64],
    features: Sequence[dict[str, Any]],
    texts: tuple[str, str],
) -> Figure:
    groups: dict[str, list[int]] = {}  # the features of a category share a panel
    for index in sorted(range(x.shape[1]), key=lambda index: float(features[index]["reach"])):
        groups.setdefault(features[index]["column"], []).append(index)
    most_telling = [group for group in groups.values() if features[group[0]]["reach"] < _FLAT]
    order = (most_telling or [*groups.values()])[:_PANELS]
    across = 1 if len(order) == 1 else 4 if len(order) > 6 else 2 if len(order) in (2, 4) else 3
    down = math.ceil(len(order) / across)
    figure = pictures.sheet(max(2.9 * across + 0.6, 7.2), 2.5 * down + 1.2)
    layout = figure.get_layout_engine()
    if layout is not None:
        layout.set(hspace=0.08, wspace=0.04)  # type: ignore[call-arg]  # of this engine
    axes = figure.subplots(down, across, sharey=True, squeeze=False)
    rows = int(np.clip(_PAIRS / (_STEPS * len(order) * len(y)), 20, 200))
    some = x[np.random.default_rng(0).permutation(len(x))[:rows]]
    for ax, group in zip(axes.ravel(), order, strict=False):
        if features[group[0]]["kind"] == "category":
            _levels(ax, model, [features[index] for index in sorted(group)], some, sorted(group))
        else:
            _panel(ax, model, features[group[0]], some, x[:, group[0]], group[0])
        if ax in axes[:, 0]:
            ax.set_ylabel(texts[0], fontsize=8.5, color=pictures.SOFT, parse_math=False)
    for ax in axes.ravel()[len(order) :]:
        ax.set_visible(False)
    left = len(groups) - len(order)
    hidden = f" · not drawn: {left} {'feature' if left == 1 else 'features'} of wider bandwidth" if left else ""
    foot = f"thick line: mean prediction with the feature set to this value in {len(some):,} rows · "
    foot += f"thin lines: {min(24, len(some))} single rows · ticks: deciles{hidden}"
    _titles(figure, f"{texts[0]} by feature", texts[1], foot)
    return figure


def _panel(
    ax: Axes,
    model: AttentionRegressor,
    feature: dict[str, Any],
    some: NDArray[np.float64],
    column: NDArray[np.float64],
    index: int,
) -> None:
    known = np.unique(column)
    # A feature of few values is asked at these; another between its outermost hundredths, where there are data.
    grid = known if len(known) <= _FEW else _between(column)
    asked = np.repeat(some, len(grid), axis=0)
    asked[:, index] = np.tile(grid, len(some))
    lines = np.asarray(model.predict(asked)).reshape(len(some), len(grid))
    ax.plot(grid, lines[:24].T, color=_BAND, linewidth=0.9, zorder=2)
    mark = "o" if len(known) <= 8 else ""
    ax.plot(grid, np.nanmean(lines, axis=0), color=pictures.ACCENT, linewidth=2.0, marker=mark, markersize=4, zorder=3)
    deciles = np.unique(np.quantile(column, np.linspace(0.1, 0.9, 9)))
    ax.plot(
        deciles, np.zeros_like(deciles), "|", color=_DEEP, markersize=6, transform=ax.get_xaxis_transform(), zorder=4
    )
    ax.set_title(feature["name"], fontsize=9.5, loc="left", color=pictures.INK, parse_math=False)
    ax.set_title(f"h = {float(format(feature['bandwidth'], '.3g')):,g}", fontsize=8, loc="right", color=pictures.SOFT)
    _frame(ax, 4, dates=feature["kind"].endswith("date"))


def _levels(
    ax: Axes,
    model: AttentionRegressor,
    features: Sequence[dict[str, Any]],
    some: NDArray[np.float64],
    group: list[int],
) -> None:
    """Draw the partial dependence on a category: each row is asked at every level."""
    asked = np.repeat(some, len(group), axis=0)
    asked[:, group] = np.tile(np.eye(len(group)), (len(some), 1))
    lines = np.asarray(model.predict(asked)).reshape(len(some), len(group))
    at = np.arange(len(group))
    ax.plot(at, lines[:24].T, color=_BAND, linewidth=0.9, zorder=2)
    ax.plot(at, np.nanmean(lines, axis=0), "o", color=pictures.ACCENT, markersize=5, zorder=3)
    ax.set_title(features[0]["column"], fontsize=9.5, loc="left", color=pictures.INK, parse_math=False)
    _frame(ax, len(group))
    texts = [feature["name"].removeprefix(f"{feature['column']}=") for feature in features]
    short = [text if len(text) <= 10 else text[:9] + "…" for text in texts]
    ax.set_xticks(at, short, fontsize=8, parse_math=False, rotation=90 if sum(map(len, short)) > 24 else 0)
    ax.margins(x=0.1)


def _between(column: NDArray[np.float64]) -> NDArray[np.float64]:
    low, high = np.quantile(column, [0.01, 0.99]).tolist()
    return np.linspace(low, high, _STEPS)


def _titles(figure: Figure, title: str, subtitle: str, foot: str) -> None:
    """Write the lines above and below the axes, broken where the figure ends."""
    width, height = figure.get_size_inches()
    lines = [textwrap.fill(text, int(width * 14.5)) for text in (subtitle, foot)]
    top = 0.62 + 0.14 * lines[0].count("\n")
    style: dict[str, Any] = {"ha": "left", "fontsize": 8, "color": pictures.SOFT, "parse_math": False}
    bold = {**style, "fontsize": 12.5, "fontweight": "bold", "color": pictures.INK}
    figure.text(0.01, 1.0 - 0.12 / height, title, va="top", **bold)
    figure.text(0.01, 1.0 - 0.40 / height, lines[0], va="top", **style)
    figure.text(0.01, 0.06 / height, lines[1], va="bottom", **style)
    bottom = (0.26 + 0.14 * lines[1].count("\n")) / height
    layout = figure.get_layout_engine()
    if layout is not None:
        layout.set(rect=(0.0, bottom, 1.0, 1.0 - top / height - bottom))  # type: ignore[call-arg]  # of this engine


def _frame(ax: Axes, ticks: int, *, dates: bool = False) -> None:
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(AutoDateLocator(maxticks=ticks) if dates else MaxNLocator(ticks))
    if dates:  # matplotlib counts days since 1970-01-01, too
        ax.xaxis.set_major_formatter(ConciseDateFormatter(ax.xaxis.get_major_locator()))
    ax.tick_params(labelsize=8, colors=pictures.SOFT, length=2.5)
    ax.grid(color="#e6ebec", linewidth=0.7, zorder=0)
    for side, spine in ax.spines.items():
        spine.set(color=pictures.SOFT, linewidth=0.6, visible=side in ("left", "bottom"))
