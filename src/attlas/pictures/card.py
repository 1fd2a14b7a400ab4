"""A picture to share: what was found, in words, beside the picture that shows it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING, Any

from torch import Tensor

from attlas.pictures.fonts import fonts_for_text, shortened, text_width, texts_in_fonts, visible_labels, wrapped
from attlas.pictures.maps import ACCENT, INK, SOFT, draw, label, sheet
from attlas.pictures.scatter import Box, Points, scatter_in

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["BETWEEN", "card", "scatter_card"]

BETWEEN = " · "  # parts of a title, as a text and the model that read it

_SIZE = 6.0, 3.15  # inches: 1200 × 630 pixels at 200 points an inch
_WIDTH, _HEIGHT = 72 * _SIZE[0], 72 * _SIZE[1]  # points, as everything below
_EDGE = 19.5  # before the words
_TOP, _FOOT = 16.0, 30.0  # above the words, and below them, where the name of the project stands
_TITLE, _HEADLINE, _SENTENCE = 7.0, 13.5, 7.8  # letters
_ROOM = 220.0  # for a line of words, at most
_SENTENCE_ROOM = 0.94  # share of it for the lines of sentences
_GAPS = 14.0, 9.0, 7.0  # below the title, below the headline, and between sentences
_LEADING = 1.55  # from one line to the next, as a share of the letters
_SCALES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.76)  # of headline and sentences, the first with which they fit
_MAP = 0.60, 0.03, 0.385, 0.735  # left, bottom, width and height of the map, in shares of the card
_LABEL = 8.0  # letters of the labels of the map
_LABEL_ROOM = 34.0, 44.0  # for labels at the left of the map, and above it
_SCATTER = Box(256.0, 8.0, 164.0, 208.0)


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
        The texts of the queries and of the keys; the middle of a long one is left out.
    pin : (int, int)
        Row and column of the cell with the ring.
    title : str
        What was read, by what, with `BETWEEN` between parts that may be lines of their own.
    headline : str
        What the head does; a line feed ends a line.
    sentences : sequence of str
        How that shows; each begins a line.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.

    See Also
    --------
    scatter_card : a card with a scatter of heads.

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
    down, across = (_shortened_labels(texts, room) for texts, room in zip(labels, _LABEL_ROOM, strict=True))
    families = fonts_for_text("".join(down))
    before = max(
        (text_width(text, _LABEL, families) for text in texts_in_fonts(visible_labels(down), families)), default=0.0
    )
    figure = _sheet_with_words([title], headline, sentences, _MAP[0] * _WIDTH - before - 10)
    ax = figure.add_axes(_MAP)
    draw(ax, weights)
    label(ax, down, across)
    ax.tick_params(labelcolor=SOFT)
    from matplotlib.patches import Rectangle

    place = pin[1] - 0.5, pin[0] - 0.5
    ax.add_patch(Rectangle(place, 1, 1, fill=False, edgecolor=ACCENT, linewidth=1.6, clip_on=False))
    for row, tick in enumerate(ax.get_yticklabels()):
        tick.set_color(ACCENT if row == pin[0] else SOFT)
    for column, tick in enumerate(ax.get_xticklabels()):
        tick.set_color(ACCENT if column == pin[1] else SOFT)
    return figure


def scatter_card(points: Points, *, title: Sequence[str], headline: str, sentences: Sequence[str]) -> Figure:
    """Draw a card of 1200 × 630 pixels at 200 points an inch: words at the left, a scatter of heads at the right.

    Parameters
    ----------
    points : Points
        The heads.
    title : sequence of str
        What was read, by what; each begins a line, and may have parts as that of `card`.
    headline : str
        What was found; a line feed ends a line.
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
    >>> from attlas.pictures.card import scatter_card
    >>> from attlas.pictures.scatter import Axis, Points
    >>> points = Points(
    ...     Axis("keys", [1, 9]), Axis("distance", [2, 3]), ["0·0", "0·1"], ["local"] * 2, {"local": "red"}
    ... )
    >>> figure = scatter_card(points, title=["texts"], headline="Both heads read", sentences=["They rest."])
    >>> [round(200 * side) for side in figure.get_size_inches().tolist()]
    [1200, 630]
    """
    figure = _sheet_with_words(title, headline, sentences, _SCATTER.left - 12)
    scatter_in(figure, _SCATTER, points, font=6.4, radius=0.85)
    return figure


def _shortened_labels(texts: Sequence[str], room: float) -> list[str]:
    """Return the texts of tokens with the middle left out of those that are too long for a label of the map."""
    shown = visible_labels(texts)
    families = fonts_for_text("".join(shown))
    return [shortened(text, room, _LABEL, families) for text in texts_in_fonts(shown, families)]


def _sheet_with_words(title: Sequence[str], headline: str, sentences: Sequence[str], right: float) -> Figure:
    """Return a card with its words at the left, up to `right` points from its left edge.

    Letters become smaller until everything fits; if that is not enough, the last sentences are left out.
    """
    figure = sheet(*_SIZE)
    figure.set_layout_engine("none")
    title = [" ".join(text.split()) for text in title]
    families = fonts_for_text("".join((*title, headline, *sentences)), "sans-serif")
    bold = fonts_for_text(headline, "sans-serif")  # a font that the headline does without may have no bold letters
    *title, headline = texts_in_fonts([*title, headline], families)
    sentences = texts_in_fonts(sentences, families)
    room = min(_ROOM, right - _EDGE)

    def write(lines: Sequence[str], y: float, size: float, colour: str, weight: str = "normal") -> float:
        """Write lines below each other from a height on; return the height below them."""
        for line in lines:
            font: dict[str, Any] = {"size": size, "weight": weight, "family": bold if weight == "bold" else families}
            figure.text(_EDGE / _WIDTH, y / _HEIGHT, line, color=colour, va="top", parse_math=False, **font)
            y -= _LEADING * size
        return y

    lines = [line for text in title for line in _title_lines(text, room, families)]
    y = write(lines, _HEIGHT - _TOP, _TITLE, SOFT) - _GAPS[0]
    size, big, small = _fitting_lines(headline, sentences, (room, y - _FOOT), (bold, families))
    y = write(big, y, size * _HEADLINE, INK, "bold") - _GAPS[1]
    for each in small:
        y = write(each, y, size * _SENTENCE, SOFT) - size * _GAPS[2]
    write(["attlas"], 22.5, 8, INK, "bold")
    return figure


def _title_lines(text: str, room: float, families: Sequence[str]) -> list[str]:
    """Return a title in one line, or its parts in one line each; the middle is left out of one that is longer."""
    fits = text_width(text, _TITLE, families) <= room
    return [shortened(part, room, _TITLE, families) for part in ([text] if fits else text.split(BETWEEN))]


def _fitting_lines(
    headline: str, sentences: Sequence[str], room: tuple[float, float], families: tuple[Sequence[str], Sequence[str]]
) -> tuple[float, list[str], list[list[str]]]:
    """Return the scale of the letters, the lines of the headline, and those of each sentence that has room.

    The room is a width and a height; the fonts are those of the headline and of the sentences. Smaller letters are
    preferred to a headline of more lines than were given.
    """
    width, height = room
    for count in range(len(sentences), -1, -1):
        for most, scale in product((headline.count("\n") + 1, len(headline)), _SCALES):
            big = wrapped(headline, width, scale * _HEADLINE, families[0], "bold")
            small = [
                wrapped(text, _SENTENCE_ROOM * width, scale * _SENTENCE, families[1]) for text in sentences[:count]
            ]
            needed = _LEADING * scale * (_HEADLINE * len(big) + _SENTENCE * sum(map(len, small)))
            if len(big) <= most and needed + _GAPS[1] + _GAPS[2] * scale * (count - 1) <= height:
                return scale, big, small
    return scale, big, small
