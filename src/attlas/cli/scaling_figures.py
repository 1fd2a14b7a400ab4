"""The two pictures of ``attlas scaling``: random vectors over d, and the heads of a model against independence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from attlas import pictures
from attlas.cli.figures import DEEP, draw_frame, set_layout
from attlas.scaling import Heads, HeadScaling, Measured, Study, expected

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Vermilion and deep blue differ in lightness too, and each has a mark of its own.
_PLAIN_COLOUR, _SCALED_COLOUR = pictures.ACCENT, DEEP
_PANEL_MEASURES = (
    ("variance", "Variance of the logits"),
    ("entropy", "Entropy of the weights, nats"),
    ("largest", "Largest weight"),
    ("trace", "Slope of softmax: trace of its Jacobian"),
)


def study_figure(study: Study) -> Figure:
    """Draw the four measures over d, without and with the scale; lines are theory, marks are measured."""
    figure = _figure_with_margins(10.4, 7.4)
    plain = study.rows[::2]
    scaled = study.rows[1::2]
    sizes = np.array([row.d for row in plain], dtype=float)
    fine = np.geomspace(sizes.min() / 1.25, sizes.max() * 1.25, 40)
    for ax, (name, title) in zip(figure.subplots(2, 2).ravel(), _PANEL_MEASURES, strict=True):
        theory = [getattr(expected(study.keys, float(d)), name) for d in fine]
        flat = getattr(expected(study.keys, 1.0), name)
        ax.plot(fine, theory, color=_PLAIN_COLOUR, linewidth=1.4, zorder=2)
        ax.plot(fine, np.full_like(fine, flat), color=_SCALED_COLOUR, linewidth=1.4, zorder=2)
        _draw_measures(ax, plain, name, _PLAIN_COLOUR, "o", "q·k")
        _draw_measures(ax, scaled, name, _SCALED_COLOUR, "s", "q·k / √d")
        ax.set_xscale("log", base=2)
        if len(sizes) <= 12:
            ax.set_xticks(sizes, [f"{int(d)}" for d in sizes])
            ax.minorticks_off()
        ax.set_xlim(fine[0], fine[-1])
        ax.set_title(title, fontsize=10, loc="left", color=pictures.INK)
        draw_frame(ax)
        if name == "variance":
            ax.set_yscale("log")
            _plain_numbers(ax.yaxis)
        elif name == "entropy":
            most = math.log(study.keys)
            ax.axhline(most, color=pictures.SOFT, linewidth=0.8, linestyle=(0, (2, 3)), zorder=1)
            ax.annotate(
                f"ln {study.keys}: all keys alike", (fine[0], most), xytext=(4, 3), textcoords="offset points",
                fontsize=7.5, color=pictures.SOFT,
            )  # fmt: skip
            ax.set_ylim(0, most * 1.12)
        else:
            ax.set_ylim(0, 1.06)
    for ax in figure.axes[2:]:
        ax.set_xlabel("size d of queries and keys", fontsize=9, color=pictures.SOFT)
    figure.axes[0].legend(fontsize=9, frameon=False)
    figure.suptitle(
        "Why attention divides by √d", x=0.01, ha="left", fontsize=13.5, fontweight="bold", color=pictures.INK
    )
    figure.supxlabel(
        f"marks: {study.queries:,} random queries with {study.keys:,} keys each, {study.distribution} coordinates, "
        "± one standard error · lines: theory",
        x=0.01, ha="left", fontsize=8, color=pictures.SOFT,
    )  # fmt: skip
    return figure


def _figure_with_margins(width: float, height: float) -> Figure:
    """Return a figure of the usual style with the margins of these two figures."""
    figure = pictures.sheet(width, height)
    set_layout(figure, h_pad=0.1, w_pad=0.1, hspace=0.03, wspace=0.03)
    return figure


def _draw_measures(ax: Axes, rows: Sequence[Measured], name: str, colour: str, mark: str, label: str) -> None:
    """Draw the measured values of one measure over d, with their standard errors."""
    estimates = [getattr(row, name) for row in rows]
    ax.errorbar(
        [row.d for row in rows],
        [estimate.value for estimate in estimates],
        yerr=[estimate.error for estimate in estimates],
        fmt=mark,
        color=colour,
        markersize=5.5,
        markerfacecolor="white",
        markeredgewidth=1.5,
        elinewidth=1.2,
        label=label,
        zorder=3,
    )


def heads_figure(result: Heads, title: str) -> Figure:
    """Draw each head as a mark: measured against what independent queries and keys would give."""
    heads = [head for head in result.heads if head.expected is not None]
    figure = _figure_with_margins(9.6, 9.4)
    layers = max((head.layer for head in result.heads), default=0) + 1
    # The palest and the darkest end of the palette are left out: they would vanish, or look alike.
    colours = pictures.depth()(np.linspace(0.30, 0.97, layers))
    marks = "osD^vPX*"
    for ax, (name, heading) in zip(figure.subplots(2, 2).ravel(), _PANEL_MEASURES, strict=True):
        for layer in range(layers):
            own = [head for head in heads if head.layer == layer]
            ax.plot(
                [getattr(head.expected, name) for head in own],
                [getattr(head, name) for head in own],
                marks[layer % len(marks)],
                color=colours[layer],
                markersize=6.5,
                markeredgecolor="white",
                markeredgewidth=0.6,
                label=f"layer {layer}",
                zorder=3,
            )
        values = [getattr(part, name) for head in heads for part in (head, head.expected)]
        low, high = _axis_limits(values, name)
        if name == "variance":
            ax.set(xscale="log", yscale="log")
            _plain_numbers(ax.xaxis)
            _plain_numbers(ax.yaxis)
        ax.plot([low, high], [low, high], color=pictures.SOFT, linewidth=0.9, linestyle=(0, (4, 3)), zorder=1)
        ax.set_xlim(low, high)
        ax.set_ylim(low, high)
        ax.set_box_aspect(1)
        ax.set_title(heading, fontsize=10, loc="left", color=pictures.INK)
        ax.set_xlabel("had queries and keys been independent", fontsize=8.5, color=pictures.SOFT)
        ax.set_ylabel("measured", fontsize=8.5, color=pictures.SOFT)
        draw_frame(ax)
        _name_farthest(ax, heads, name)
    if layers <= 12:
        figure.legend(
            *figure.axes[0].get_legend_handles_labels(), loc="outside lower left", ncols=min(layers, 6), fontsize=8.5,
            frameon=False, handletextpad=0.2, columnspacing=1.2,
        )  # fmt: skip
    figure.suptitle(title, x=0.01, ha="left", fontsize=12.5, fontweight="bold", color=pictures.INK, parse_math=False)
    return figure


def _name_farthest(ax: Axes, heads: Sequence[HeadScaling], name: str) -> None:
    """Write the number of the three heads farthest from the diagonal, where one does not cover another."""
    taken: list[tuple[float, float]] = []
    for head in sorted(heads, key=lambda head: -_distance_from_theory(head, name))[:3]:
        point = (getattr(head.expected, name), getattr(head, name))
        x, y = ax.transAxes.inverted().transform(ax.transData.transform(point))
        if any(abs(x - left) < 0.12 and abs(y - low) < 0.05 for left, low in taken):
            continue
        taken.append((x, y))
        ax.annotate(
            f"{head.layer}·{head.head}", point, xytext=(7, 3), textcoords="offset points", fontsize=8,
            color=pictures.ACCENT, zorder=4,
        )  # fmt: skip


def _plain_numbers(axis: Axis) -> None:
    """Write 1, 10, 100 at a logarithmic axis, and not 10 to some power."""
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}")
    axis.set_minor_formatter(lambda value, _: "")


def _distance_from_theory(head: HeadScaling, name: str) -> float:
    """Return how far a measure lies from that of independent queries and keys, of variances by their ratio."""
    measured, independent = getattr(head, name), getattr(head.expected, name)
    if name == "variance":
        return abs(math.log(max(measured, 1e-12) / max(independent, 1e-12)))
    return abs(float(measured) - float(independent))


def _axis_limits(values: Sequence[float], name: str) -> tuple[float, float]:
    """Return the ends of both axes of a panel that shows these values of a measure."""
    if name in ("largest", "trace"):
        return 0.0, 1.03
    if name == "variance":
        positive = [value for value in values if value > 0.0] or [1.0]
        return min(positive) / 1.5, max(positive) * 1.5
    return 0.0, max(values, default=1.0) * 1.08
