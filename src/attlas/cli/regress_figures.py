"""The pictures of ``attlas regress``: the fit of one feature with its bands, or what each of several does."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attlas import pictures
from attlas.cli.regress_words import Feature, Fit, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from attlas.estimators import AttentionRegressor

__all__ = ["figure"]

_DEEP, _BAND = "#174268", "#8fcbc8"
_POINTS = 4_000  # points that are drawn
_GRID = 256  # places at which the curve of one feature is computed
_STEPS = 40  # and those of several
_PANELS = 12
_PAIRS = 2e9  # pairs of a row and a place that a picture may cost: some seconds


def figure(model: AttentionRegressor, fit: Fit, x: NDArray[np.float64], y: NDArray[np.float64]) -> Figure:
    """Draw a fit: the curve over one feature, or the partial dependence on each of several.

    Parameters
    ----------
    model : AttentionRegressor
        The fit.
    fit : Fit
        What is told about it.
    x : ndarray, shape (rows, features)
        Features.
    y : ndarray, shape (rows,)
        Target.

    Returns
    -------
    matplotlib.figure.Figure
        A figure of its own: pyplot is not used.
    """
    with warnings.catch_warnings():
        # Places that no row reaches are gaps in the picture, which says it better than a warning.
        warnings.simplefilter("ignore")
        return _curve(model, fit, x, y) if x.shape[1] == 1 else _dependence(model, fit, x, y)


def _curve(model: AttentionRegressor, fit: Fit, x: NDArray[np.float64], y: NDArray[np.float64]) -> Figure:
    figure = pictures.sheet(8.4, 5.0)
    ax = figure.subplots()
    low, high = float(x.min()), float(x.max())
    grid = np.linspace(low, high, _GRID)[:, None]
    mean, std = (np.asarray(part) for part in model.predict(grid, return_std=True))
    bands = np.asarray(model.predict_quantile(grid, [0.05, 0.95]))
    error = 2.0 * std / np.sqrt(np.asarray(model.effective_neighbours(grid)))
    drawn = np.random.default_rng(0).permutation(len(y))[:_POINTS]
    alpha = float(np.clip(300 / len(drawn), 0.12, 0.8))
    place = grid[:, 0]
    ax.fill_between(place, bands[:, 0], bands[:, 1], color=_BAND, alpha=0.28, linewidth=0, zorder=1)
    ax.scatter(x[drawn, 0], y[drawn], s=9, color=pictures.SOFT, alpha=alpha, linewidths=0, zorder=2, rasterized=True)
    ax.fill_between(place, mean - error, mean + error, color=_DEEP, alpha=0.25, linewidth=0, zorder=3)
    ax.plot(place, mean, color=pictures.ACCENT, linewidth=2.0, zorder=4)
    ax.set_xlabel(fit.features[0].name, fontsize=9, color=pictures.SOFT, parse_math=False)
    ax.set_ylabel(fit.target, fontsize=9, color=pictures.SOFT, parse_math=False)
    _frame(ax)
    ax.margins(x=0.01)
    _titles(figure, f"{fit.target} over {fit.features[0].name}", fit)
    shown = "" if len(drawn) == len(y) else f" · {len(drawn):,} of {len(y):,} rows are drawn"
    _below(figure, f"line: the estimate, ± 2 standard errors · pale band: 90 % of the values around{shown}")
    return figure


def _dependence(model: AttentionRegressor, fit: Fit, x: NDArray[np.float64], y: NDArray[np.float64]) -> Figure:
    order = sorted(range(x.shape[1]), key=lambda place: fit.features[place].reach)
    telling = [place for place in order if not fit.features[place].flat]
    order = (telling or order)[:_PANELS]
    across = 1 if len(order) == 1 else 4 if len(order) > 6 else 2 if len(order) in (2, 4) else 3
    down = math.ceil(len(order) / across)
    figure = pictures.sheet(max(2.9 * across + 0.6, 7.2), 2.5 * down + 1.2)
    layout = figure.get_layout_engine()
    if layout is not None:
        layout.set(hspace=0.08, wspace=0.04)  # type: ignore[call-arg]  # of this engine
    axes = figure.subplots(down, across, sharey=True, squeeze=False)
    rows = int(np.clip(_PAIRS / (_STEPS * len(order) * len(y)), 20, 200))
    some = x[np.random.default_rng(0).permutation(len(x))[:rows]]
    for ax, place in zip(axes.ravel(), order, strict=False):
        _panel(ax, model, fit.features[place], some, x[:, place], place)
        if ax in axes[:, 0]:
            ax.set_ylabel(fit.target, fontsize=8.5, color=pictures.SOFT, parse_math=False)
    for ax in axes.ravel()[len(order) :]:
        ax.set_visible(False)
    left = x.shape[1] - len(order)
    _titles(figure, f"What {fit.target} does with each feature", fit)
    _below(
        figure,
        f"line: mean prediction with the feature set to this value in {len(some):,} rows · pale: single rows · "
        f"ticks: deciles{f' · {left} features of wider bandwidth are not drawn' if left else ''}",
    )
    return figure


def _panel(
    ax: Axes,
    model: AttentionRegressor,
    feature: Feature,
    some: NDArray[np.float64],
    column: NDArray[np.float64],
    place: int,
) -> None:
    known = np.unique(column)
    # A feature of few values is asked at these; another between its outermost hundredths, where there are data.
    grid = known if len(known) <= _STEPS else _between(column)
    asked = np.repeat(some, len(grid), axis=0)
    asked[:, place] = np.tile(grid, len(some))
    lines = np.asarray(model.predict(asked)).reshape(len(some), len(grid))
    ax.plot(grid, lines[:24].T, color=_BAND, linewidth=0.6, alpha=0.7, zorder=2)
    mark = "o" if len(known) <= 8 else ""
    ax.plot(grid, np.nanmean(lines, axis=0), color=pictures.ACCENT, linewidth=2.0, marker=mark, markersize=4, zorder=3)
    deciles = np.unique(np.quantile(column, np.linspace(0.1, 0.9, 9)))
    ax.plot(
        deciles, np.zeros_like(deciles), "|", color=_DEEP, markersize=6, transform=ax.get_xaxis_transform(), zorder=4
    )
    ax.set_title(feature.name, fontsize=9.5, loc="left", color=pictures.INK, parse_math=False)
    ax.set_title(f"h = {number(feature.bandwidth, 3)}", fontsize=8, loc="right", color=pictures.SOFT)
    _frame(ax)


def _between(column: NDArray[np.float64]) -> NDArray[np.float64]:
    low, high = np.quantile(column, [0.01, 0.99]).tolist()
    return np.linspace(low, high, _STEPS)


def _titles(figure: Figure, title: str, fit: Fit) -> None:
    judged = fit.kernel_regression
    h = f", h = {number(fit.features[0].bandwidth, 3)}" if len(fit.features) == 1 else ""
    tall = figure.get_figheight()
    figure.text(
        0.01, 1.0 - 0.12 / tall, title,
        ha="left", va="top", fontsize=12.5, fontweight="bold", color=pictures.INK, parse_math=False,
    )  # fmt: skip
    figure.text(
        0.01, 1.0 - 0.40 / tall,
        f"{fit.rows:,} rows of {fit.source}; {fit.kernel} kernel{h}; rows left out: "
        f"error {number(judged.error)} (mean {number(fit.mean.error)}, linear {number(fit.linear.error)})",
        ha="left", va="top", fontsize=8.5, color=pictures.SOFT, parse_math=False,
    )  # fmt: skip
    layout = figure.get_layout_engine()
    if layout is not None:
        layout.set(rect=(0.0, 0.0, 1.0, 1.0 - 0.62 / tall))  # type: ignore[call-arg]  # of this engine


def _below(figure: Figure, text: str) -> None:
    figure.supxlabel(text, x=0.01, ha="left", fontsize=8, color=pictures.SOFT)


def _frame(ax: Axes) -> None:
    ax.tick_params(labelsize=8, colors=pictures.SOFT, length=2.5)
    ax.grid(color="#e6ebec", linewidth=0.7, zorder=0)
    for side, spine in ax.spines.items():
        spine.set(color=pictures.SOFT, linewidth=0.6, visible=side in ("left", "bottom"))
