"""What the figures of ``attlas scaling`` and ``attlas regress`` share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from attlas import pictures

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DEEP = "#174268"  # a blue that differs from the accent in lightness too


def set_layout(figure: Figure, **options: Any) -> None:
    """Set options of the layout engine of `pictures.sheet`, such as ``hspace`` and ``rect``."""
    layout = figure.get_layout_engine()
    if layout is not None:
        layout.set(**options)


def draw_frame(ax: Axes) -> None:
    """Draw a grid, and axes on the left and below only."""
    ax.tick_params(labelsize=8, colors=pictures.SOFT, length=2.5)
    ax.grid(color="#e6ebec", linewidth=0.7, zorder=0)
    for side, spine in ax.spines.items():
        spine.set(color=pictures.SOFT, linewidth=0.6, visible=side in ("left", "bottom"))
