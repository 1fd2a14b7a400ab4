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
from attlas.cli.figures import DEEP, draw_frame, set_layout
from attlas.cli.regress_report import FLAT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from attlas.estimators import AttentionRegressor

Floats = NDArray[np.float64]

_BAND_COLOUR = "#8fcbc8"
_MOST_POINTS = 4_000  # points that are drawn
_GRID_POSITIONS = 256  # positions at which the curve of one feature is computed
_GRID_POSITIONS_OF_SEVERAL = 100  # and those of several
_MOST_PANELS = 12
_FEW_VALUES = 12  # values of a feature that are its only positions
_MOST_PAIRS = 2e9  # pairs of a row and a place that a picture may cost: some seconds


def figure(
    model: AttentionRegressor, x: Floats, y: Floats, features: Sequence[dict[str, Any]], target: str, subtitle: str
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
            return _curve_figure(model, x, y, features[0], (target, subtitle))
        return _dependence_figure(model, x, y, features, (target, subtitle))


def _curve_figure(
    model: AttentionRegressor, x: Floats, y: Floats, feature: dict[str, Any], texts: tuple[str, str]
) -> Figure:
    """Draw the estimate over one feature with its two bands; `texts` are the target's name and the subtitle."""
    figure = pictures.sheet(8.4, 5.0)
    ax = figure.subplots()
    grid = np.linspace(float(x.min()), float(x.max()), _GRID_POSITIONS)[:, None]
    mean, std = (np.asarray(part) for part in model.predict(grid, return_std=True))
    bands = np.asarray(model.predict_quantile(grid, [0.05, 0.95]))
    error = 2.0 * std / np.sqrt(np.asarray(model.effective_neighbours(grid)))
    drawn = np.random.default_rng(0).permutation(len(y))[:_MOST_POINTS]
    alpha = float(np.clip(300 / len(drawn), 0.12, 0.8))
    at = grid[:, 0]
    ax.fill_between(at, bands[:, 0], bands[:, 1], color=_BAND_COLOUR, alpha=0.28, linewidth=0, zorder=1)
    ax.scatter(x[drawn, 0], y[drawn], s=9, color=pictures.SOFT, alpha=alpha, linewidths=0, zorder=2, rasterized=True)
    ax.fill_between(at, mean - error, mean + error, color=DEEP, alpha=0.25, linewidth=0, zorder=3)
    ax.plot(at, mean, color=pictures.ACCENT, linewidth=2.0, zorder=4)
    ax.set_xlabel(feature["name"], fontsize=9, color=pictures.SOFT, parse_math=False)
    ax.set_ylabel(texts[0], fontsize=9, color=pictures.SOFT, parse_math=False)
    _set_ticks(ax, 8, dates=feature["kind"].endswith("date"))
    ax.margins(x=0.01)
    shown = "" if len(drawn) == len(y) else f" · {len(drawn):,} of {len(y):,} rows are drawn"
    foot = f"line: the estimate, ± 2 standard errors · pale band: 90% of the values around it{shown}"
    _write_titles(figure, f"{texts[0]} over {feature['name']}", texts[1], foot)
    return figure


def _dependence_figure(
    model: AttentionRegressor, x: Floats, y: Floats, features: Sequence[dict[str, Any]], texts: tuple[str, str]
) -> Figure:
    """Draw the partial dependence on the features of least reach; `texts` are the target's name and the subtitle."""
    groups: dict[str, list[int]] = {}  # the features of a category share a panel
    for index in sorted(range(x.shape[1]), key=lambda index: float(features[index]["reach"])):
        groups.setdefault(features[index]["column"], []).append(index)
    most_telling = [group for group in groups.values() if features[group[0]]["reach"] < FLAT]
    order = (most_telling or [*groups.values()])[:_MOST_PANELS]
    across = 1 if len(order) == 1 else 4 if len(order) > 6 else 2 if len(order) in (2, 4) else 3
    down = math.ceil(len(order) / across)
    figure = pictures.sheet(max(2.9 * across + 0.6, 7.2), 2.5 * down + 1.2)
    set_layout(figure, hspace=0.08, wspace=0.04)
    axes = figure.subplots(down, across, sharey=True, squeeze=False)
    rows = int(np.clip(_MOST_PAIRS / (_GRID_POSITIONS_OF_SEVERAL * len(order) * len(y)), 20, 200))
    some = x[np.random.default_rng(0).permutation(len(x))[:rows]]
    for ax, group in zip(axes.ravel(), order, strict=False):
        own = [features[index] for index in sorted(group)]
        if own[0]["kind"] == "category":
            _draw_levels(ax, own, _partial_dependence(model, some, sorted(group), np.eye(len(group))))
        else:
            known = np.unique(x[:, group[0]])
            # A feature of few values is asked at these; another between its outermost hundredths, where there are data.
            low, high = np.quantile(x[:, group[0]], [0.01, 0.99])
            grid = known if len(known) <= _FEW_VALUES else np.linspace(low, high, _GRID_POSITIONS_OF_SEVERAL)
            _draw_curves(ax, own[0], grid, _partial_dependence(model, some, group, grid[:, None]), x[:, group[0]])
        if ax in axes[:, 0]:
            ax.set_ylabel(texts[0], fontsize=8.5, color=pictures.SOFT, parse_math=False)
    for ax in axes.ravel()[len(order) :]:
        ax.set_visible(False)
    left = len(groups) - len(order)
    hidden = f" · not drawn: {left} {'feature' if left == 1 else 'features'} of wider bandwidth" if left else ""
    foot = f"thick line: mean prediction with the feature set to this value in {len(some):,} rows · "
    foot += f"thin lines: {min(24, len(some))} single rows · ticks: deciles{hidden}"
    _write_titles(figure, f"{texts[0]} by feature", texts[1], foot)
    return figure


def _partial_dependence(model: AttentionRegressor, rows: Floats, columns: list[int], settings: Floats) -> Floats:
    """Return the prediction for each row with its columns set to each of the settings, shape (rows, settings)."""
    asked = np.repeat(rows, len(settings), axis=0)
    asked[:, columns] = np.tile(settings, (len(rows), 1))
    return np.asarray(model.predict(asked)).reshape(len(rows), len(settings))


def _draw_curves(ax: Axes, feature: dict[str, Any], grid: Floats, lines: Floats, column: Floats) -> None:
    """Draw the predictions over a feature: the mean, some single rows, and the deciles of the feature."""
    _draw_lines(ax, grid, lines, marker="o" if len(grid) <= 8 else "", linewidth=2.0, markersize=4)
    deciles = np.unique(np.quantile(column, np.linspace(0.1, 0.9, 9)))
    ax.plot(
        deciles, np.zeros_like(deciles), "|", color=DEEP, markersize=6, transform=ax.get_xaxis_transform(), zorder=4
    )
    ax.set_title(feature["name"], fontsize=9.5, loc="left", color=pictures.INK, parse_math=False)
    ax.set_title(f"h = {float(format(feature['bandwidth'], '.3g')):,g}", fontsize=8, loc="right", color=pictures.SOFT)
    _set_ticks(ax, 4, dates=feature["kind"].endswith("date"))


def _draw_levels(ax: Axes, features: Sequence[dict[str, Any]], lines: Floats) -> None:
    """Draw the predictions over the levels of a category."""
    at = np.arange(len(features))
    _draw_lines(ax, at, lines, linestyle="", marker="o", markersize=5)
    ax.set_title(features[0]["column"], fontsize=9.5, loc="left", color=pictures.INK, parse_math=False)
    _set_ticks(ax, len(features))
    texts = [feature["name"].removeprefix(f"{feature['column']}=") for feature in features]
    short = [text if len(text) <= 10 else text[:9] + "…" for text in texts]
    ax.set_xticks(at, short, fontsize=8, parse_math=False, rotation=90 if sum(map(len, short)) > 24 else 0)
    ax.margins(x=0.1)


def _draw_lines(ax: Axes, at: NDArray[Any], lines: Floats, **style: Any) -> None:
    """Draw some rows as thin lines, and the mean of all in a style."""
    ax.plot(at, lines[:24].T, color=_BAND_COLOUR, linewidth=0.9, zorder=2)
    ax.plot(at, np.nanmean(lines, axis=0), color=pictures.ACCENT, zorder=3, **style)


def _write_titles(figure: Figure, title: str, subtitle: str, foot: str) -> None:
    """Write the lines above and below the axes, broken where the figure ends."""
    width, height = figure.get_size_inches()
    # A space that does not break before each dot: a dot ends the line before it, and begins none.
    lines = [textwrap.fill(text.replace(" ·", "\u00a0·"), int(width * 14.5)) for text in (subtitle, foot)]
    top = 0.62 + 0.14 * lines[0].count("\n")
    style: dict[str, Any] = {"ha": "left", "fontsize": 8, "color": pictures.SOFT, "parse_math": False}
    bold = {**style, "fontsize": 12.5, "fontweight": "bold", "color": pictures.INK}
    figure.text(0.01, 1.0 - 0.12 / height, title, va="top", **bold)
    figure.text(0.01, 1.0 - 0.40 / height, lines[0], va="top", **style)
    figure.text(0.01, 0.06 / height, lines[1], va="bottom", **style)
    bottom = (0.26 + 0.14 * lines[1].count("\n")) / height
    set_layout(figure, rect=(0.0, bottom, 1.0, 1.0 - top / height - bottom))


def _set_ticks(ax: Axes, ticks: int, *, dates: bool = False) -> None:
    """Set the ticks of a horizontal axis of numbers or of dates, at most `ticks` of them, and draw the frame."""
    from matplotlib.dates import AutoDateLocator, ConciseDateFormatter
    from matplotlib.ticker import MaxNLocator

    ax.xaxis.set_major_locator(AutoDateLocator(maxticks=ticks) if dates else MaxNLocator(ticks))
    if dates:  # matplotlib counts days since 1970-01-01, too
        ax.xaxis.set_major_formatter(ConciseDateFormatter(ax.xaxis.get_major_locator()))
    draw_frame(ax)
