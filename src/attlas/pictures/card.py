"""A picture to share: what a head does, in words, beside the cells that show it."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from attlas.pictures.maps import ACCENT, INK, SOFT, draw, label, sheet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["card"]

_SIZE = 6.0, 3.15  # inches: 1200 × 630 pixels at 200 points an inch
_EDGE = 0.045  # of the width, before the words
_MAP = 0.60, 0.03, 0.385, 0.735  # left, bottom, width and height of the map, in shares of the card
_HEADLINE, _SENTENCE = 13.5, 7.8  # points
_LINES = 24, 47  # characters of a line of each
_STEP = 0.094, 0.056  # of the height from one line to the next


def card(
    weights: Tensor,
    labels: tuple[Sequence[str], Sequence[str]],
    pin: tuple[int, int],
    *,
    title: str,
    headline: str,
    sentences: Sequence[str],
) -> Figure:
    """Draw a card of 1200 × 630 pixels at 200 points an inch: words at the left, cells at the right.

    Parameters
    ----------
    weights : Tensor, shape (height, width)
        The weights of the cells; NaN where nothing may attend.
    labels : pair of sequences of str
        The texts of the queries and of the keys.
    pin : (int, int)
        Row and column of the cell with the ring.
    title : str
        What was read, by what.
    headline : str
        What the head does.
    sentences : sequence of str
        How that shows; each begins a line.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.

    Examples
    --------
    >>> import torch
    >>> from attlas.pictures.card import card
    >>> words = [f"w{i}" for i in range(9)]
    >>> figure = card(
    ...     torch.rand(9, 9),
    ...     (words, words),
    ...     (5, 2),
    ...     title="a text",
    ...     headline="Head 0",
    ...     sentences=["Rests."],
    ... )
    >>> [round(200 * side) for side in figure.get_size_inches().tolist()]
    [1200, 630]
    """
    figure = sheet(*_SIZE)
    figure.set_layout_engine("none")

    def write(lines: Sequence[str], y: float, size: float, step: float, colour: str, weight: str = "normal") -> float:
        """Write lines below each other from a height on; return the height below them."""
        for line in lines:
            figure.text(_EDGE, y, line, fontsize=size, color=colour, weight=weight, va="top", parse_math=False)
            y -= step
        return y

    y = write([textwrap.shorten(title, 60, placeholder=" …")], 0.93, 7, 0.11, SOFT)
    y = write(textwrap.wrap(headline, _LINES[0]), y, _HEADLINE, _STEP[0], INK, "bold") - 0.04
    for sentence in sentences:
        y = write(textwrap.wrap(sentence, _LINES[1]), y, _SENTENCE, _STEP[1], SOFT) - 0.03
    write(["attlas"], 0.10, 8, 0, INK, "bold")
    ax = figure.add_axes(_MAP)
    draw(ax, weights)
    label(ax, *labels)
    ax.tick_params(labelcolor=SOFT)
    from matplotlib.patches import Rectangle

    place = pin[1] - 0.5, pin[0] - 0.5
    ax.add_patch(Rectangle(place, 1, 1, fill=False, edgecolor=ACCENT, linewidth=1.6, clip_on=False))
    for row, tick in enumerate(ax.get_yticklabels()):
        tick.set_color(ACCENT if row == pin[0] else SOFT)
    for column, tick in enumerate(ax.get_xticklabels()):
        tick.set_color(ACCENT if column == pin[1] else SOFT)
    return figure
