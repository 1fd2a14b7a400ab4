"""A scatter of heads, as the page of a corpus opens with: each a point, with a colour for its kind."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

from attlas.pictures.fonts import fonts_for_text, text_width, texts_in_fonts, wrapped
from attlas.pictures.maps import ACCENT, INK, SOFT, sheet

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["KIND_COLOURS", "LINE", "Axis", "Box", "Points", "scatter", "scatter_in"]

#: Hues for kinds of heads in the order of the kinds, chosen for colour-blind readers too; the last is for no kind.
KIND_COLOURS = (
    "#c8421a", "#e0a100", "#2f6fb2", "#58a9c9", "#14866d", "#7b8790", "#8bb53c", "#a4508f", "#c99a6b", "#c3cbcf",
)  # fmt: skip
LINE = "#d8e0e2"  # of the grid
_MOST_NAMED = 80  # heads up to which each has its name
_MANY = 400  # heads from which on points are smaller
_RADII = 1.5, 4.8  # points, where a measure gives the size
_RADIUS = 2.8  # where none does
_SMALLER = 0.7  # factor of both where there are many heads
_PADDING = 0.06  # of an axis, on both sides of what it shows
_FIGURE = 8.0, 6.0  # inches
_MARGIN = 14.0  # points about the figure
_TITLE = 10.0  # letters of its title
_LETTER = 0.62  # width of a letter of a name as a share of its height


class Axis(NamedTuple):
    """A measure of all heads: what it is called, its values with None where one is not known, and the scale wanted."""

    title: str
    values: Sequence[float | None]
    log: bool = False


@dataclass(frozen=True)
class Points:
    """The heads of a scatter.

    Parameters
    ----------
    x, y : Axis
        The axes. A head without one of both numbers is not drawn.
    names : sequence of str
        What each head is called, as "2·4".
    kinds : sequence of str
        The kind of each.
    colours : dict of str to str
        The kinds in the order of the legend, with their colours.
    size : Axis, optional
        What gives the size; all points are alike without it.
    ringed : int, optional
        The head with a ring about its point.
    """

    x: Axis
    y: Axis
    names: Sequence[str]
    kinds: Sequence[str]
    colours: dict[str, str]
    size: Axis | None = None
    ringed: int | None = None


class Box(NamedTuple):
    """A part of a figure, in points from its lower left corner."""

    left: float
    bottom: float
    width: float
    height: float


class _Scale:
    """Places of the numbers of an axis: shares of its length, on a scale that is logarithmic where it can be.

    Parameters
    ----------
    axis : Axis
        The measure.
    """

    def __init__(self, axis: Axis) -> None:
        self.low, self.high = _domain(axis)
        self._log = axis.log and self.low > 0
        low, high = self._transformed(self.low), self._transformed(self.high)
        padding = _PADDING * (high - low)
        self._start, self._stop = low - padding, high + padding

    def _transformed(self, value: float) -> float:
        return math.log10(value) if self._log else value

    def at(self, value: float) -> float:
        """Return the place of a number."""
        return (self._transformed(value) - self._start) / (self._stop - self._start)

    def ticks(self, most: int) -> list[float]:
        """Return round numbers along the axis, about as many as `most`."""
        if not self._log:
            return _even_ticks(self._start, self._stop, most)
        low, high = 10**self._start, 10**self._stop
        powers = [10.0**power for power in range(math.floor(self._start), math.ceil(self._stop) + 1)]
        for factors in ((1, 2, 5), (1, 3), (1,)):
            found = [value for power in powers for factor in factors if low <= (value := factor * power) <= high]
            if len(found) <= most + 1:
                break
        return found if len(found) > 1 else _even_ticks(low, high, most)


def _domain(axis: Axis) -> tuple[float, float]:
    """Return the least and the largest known number, wider than a point."""
    known = [value for value in axis.values if value is not None]
    if not known:
        return 0.0, 1.0
    low, high = min(known), max(known)
    return (low - 0.5, high + 0.5) if low == high else (low, high)


def _even_ticks(low: float, high: float, most: int) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten."""
    least = (high - low) / max(1, most)
    power = 10.0 ** math.floor(math.log10(least))
    step = next((factor * power for factor in (1, 2, 5) if factor * power >= 0.999 * least), 10 * power)
    return [round(k * step, 12) for k in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


def _numbers(values: Sequence[float]) -> list[str]:
    """Return the numbers of an axis in digits: as many as tell them apart, and name the places where they stand."""
    step = min((b - a for a, b in pairwise(values)), default=1.0)
    texts: list[str] = []
    for digits in range(4, 16):
        texts = [f"{value:,.0f}" if value == round(value) else f"{value:,.{digits}g}" for value in values]
        read = [float(text.replace(",", "")) for text in texts]
        if all(abs(a - b) < 0.01 * step for a, b in zip(read, values, strict=True)):
            break
    return [text.replace("-", "−") for text in texts]


def scatter(points: Points, *, title: str = "") -> Figure:
    """Draw heads as points in a figure of their own.

    Parameters
    ----------
    points : Points
        The heads.
    title : str
        What they are of.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.

    Examples
    --------
    >>> from attlas.pictures.scatter import Axis, Points, scatter
    >>> points = Points(
    ...     Axis("keys", [1, 9]), Axis("distance", [2, 3]), ["0·0", "0·1"], ["local"] * 2, {"local": "red"}
    ... )
    >>> scatter(points, title="two heads").get_size_inches().tolist()
    [8.0, 6.0]
    """
    figure = sheet(*_FIGURE)
    figure.set_layout_engine("none")
    width, height = (72 * side for side in _FIGURE)
    families = fonts_for_text(title, "sans-serif")
    (whole,) = texts_in_fonts([title], families)
    lines = wrapped(whole, width - 2 * _MARGIN, _TITLE, families) if title else []
    for number, line in enumerate(lines):
        x, y = _MARGIN / width, 1 - (_MARGIN + 1.5 * number * _TITLE) / height
        figure.text(x, y, line, fontsize=_TITLE, family=families, color=INK, va="top", parse_math=False)
    above = 1.5 * _TITLE * len(lines) + 6
    inner = Box(_MARGIN, _MARGIN, width - 2 * _MARGIN, height - 2 * _MARGIN - above)
    scatter_in(figure, inner, points, font=8.0, radius=1.4)
    return figure


def scatter_in(figure: Figure, box: Box, points: Points, *, font: float, radius: float = 1.0) -> None:
    """Draw heads as points into a part of a figure: a legend, and below it the axes.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        The figure.
    box : Box
        The part.
    points : Points
        The heads.
    font : float
        Points of the letters.
    radius : float
        Factor of the sizes of points.

    Notes
    -----
    Small points lie over large ones, and the one with the ring over all. Names stand where they overlap nothing; a head
    whose name has no room has none, and with more than 80 heads only the one with the ring has one.

    Examples
    --------
    >>> from attlas import pictures
    >>> from attlas.pictures.scatter import Axis, Box, Points, scatter_in
    >>> points = Points(
    ...     Axis("keys", [1, 9]), Axis("distance", [2, 3]), ["0·0", "0·1"], ["local"] * 2, {"local": "red"}
    ... )
    >>> figure = pictures.sheet(3, 3)
    >>> scatter_in(figure, Box(0, 0, 216, 216), points, font=6)
    >>> len(figure.axes)
    1
    """
    from matplotlib.patheffects import withStroke

    radius *= _SMALLER if len(points.names) > _MANY else 1.0
    legend = _draw_legend(figure, box, points, font, radius)
    x, y = _Scale(points.x), _Scale(points.y)
    below = 3.3 * font
    height = box.height - legend - below
    up = y.ticks(max(2, round(height / (4.2 * font))))
    left = 1.7 * font + max((text_width(text, font, ["sans-serif"]) for text in _numbers(up)), default=0.0) + 4
    width = box.width - left
    across = x.ticks(max(2, round(width / (6.5 * font))))
    inch = 72 * figure.get_size_inches()
    corner = (box.left + left) / inch[0], (box.bottom + below) / inch[1]
    ax = figure.add_axes((*corner, width / inch[0], height / inch[1]))
    ax.set(xlim=(0, width), ylim=(0, height))  # the axes count in points
    ax.set_xticks([width * x.at(value) for value in across], _numbers(across))
    ax.set_yticks([height * y.at(value) for value in up], _numbers(up))
    ax.tick_params(labelsize=font, labelcolor=SOFT, length=0, pad=3)
    ax.grid(color=LINE, linewidth=0.5)
    ax.set_axisbelow(True)
    ax.spines[:].set_visible(False)
    middle = (box.left + left + width / 2) / inch[0], (box.bottom + below + height / 2) / inch[1]
    words: dict[str, Any] = {"fontsize": font, "color": INK, "parse_math": False}
    figure.text(middle[0], box.bottom / inch[1], f"{points.x.title} →", ha="center", va="bottom", **words)
    figure.text(box.left / inch[0], middle[1], f"{points.y.title} →", ha="left", va="center", rotation=90, **words)
    placed = [
        _Placed(row, width * x.at(across), height * y.at(up), radius * size)
        for row, (across, up, size) in enumerate(zip(points.x.values, points.y.values, _radii(points), strict=True))
        if across is not None and up is not None
    ]
    placed.sort(key=lambda each: (each.row == points.ringed, -each.radius))
    if placed:
        ax.scatter(
            [each.x for each in placed],
            [each.y for each in placed],
            s=[(2 * each.radius) ** 2 for each in placed],
            c=[points.colours[points.kinds[each.row]] for each in placed],
            edgecolors="white",
            linewidths=0.4,
            alpha=0.88,
            clip_on=False,
            zorder=3,
        )
    ringed = next((each for each in placed if each.row == points.ringed), None)
    if ringed is not None:
        ring = ringed.radius + 2.2
        ax.scatter([ringed.x], [ringed.y], s=[(2 * ring) ** 2], c="none", edgecolors=ACCENT, clip_on=False, zorder=5)
        placed[placed.index(ringed)] = ringed = ringed._replace(radius=ring)
    for name in _placed_names(points, placed, ringed, (width, height), 0.86 * font):
        weight, colour = ("bold", ACCENT) if name.is_ringed else ("normal", SOFT)
        place: dict[str, Any] = {"ha": "center", "va": "center", "zorder": 6, "clip_on": False, "weight": weight}
        text = ax.text(name.x, name.y, name.text, fontsize=0.86 * font, color=colour, parse_math=False, **place)
        if name.is_ringed:  # in a crowd it stands on points
            text.set_path_effects([withStroke(linewidth=2.0, foreground="white")])


class _Placed(NamedTuple):
    """A point: which head, where, and how large; in points from the lower left corner of the axes."""

    row: int
    x: float
    y: float
    radius: float


class _Name(NamedTuple):
    """The name of a head, and where its middle is."""

    text: str
    x: float
    y: float
    is_ringed: bool


def _radii(points: Points) -> list[float]:
    """Return the radius of each head: the area is in proportion to its number."""
    if points.size is None:
        return [_RADIUS] * len(points.names)
    low, high = _domain(points.size)
    least, most = _RADII
    shares = [0.0 if value is None else (value - low) / (high - low) for value in points.size.values]
    return [math.sqrt(least**2 + share * (most**2 - least**2)) for share in shares]


def _placed_names(
    points: Points, placed: Sequence[_Placed], ringed: _Placed | None, size: tuple[float, float], font: float
) -> list[_Name]:
    """Return names at the right of points, else at the left, above or below, where they overlap nothing.

    The head with the ring comes first, and has its name in any case.
    """
    others = [] if len(points.names) > _MOST_NAMED else [each for each in placed if each is not ringed]
    taken = [(each.x - each.radius, each.y - each.radius, 2 * each.radius, 2 * each.radius) for each in placed]
    found = []
    for each in [*([] if ringed is None else [ringed]), *others]:
        text, gap = points.names[each.row], each.radius + 1.5
        width, height = (1.1 if each is ringed else 1.0) * _LETTER * font * len(text), 1.05 * font
        corners = [
            (each.x + gap, each.y - height / 2),
            (each.x - gap - width, each.y - height / 2),
            (each.x - width / 2, each.y + gap),
            (each.x - width / 2, each.y - gap - height),
        ]
        inside = [(x, y) for x, y in corners if x >= 0 and x + width <= size[0] and y >= 0 and y + height <= size[1]]
        free = [(x, y) for x, y in inside if not any(_overlap((x, y, width, height), box) for box in taken)]
        if not free and each is not ringed:
            continue
        x, y = (free or inside or corners)[0]
        taken.append((x, y, width, height))
        found.append(_Name(text, x + width / 2, y + height / 2, each is ringed))
    return found


def _overlap(a: tuple[float, float, float, float], b: tuple[float, float, float, float]) -> bool:
    """Return whether two rectangles, each as left, bottom, width and height, overlap."""
    return a[0] < b[0] + b[2] and b[0] < a[0] + a[2] and a[1] < b[1] + b[3] and b[1] < a[1] + a[3]


def _draw_legend(figure: Figure, box: Box, points: Points, font: float, radius: float) -> float:
    """Draw the kinds with their colours and the meaning of the sizes along the top; return how high that is."""
    from matplotlib.lines import Line2D

    counts = Counter(points.kinds)
    # Each entry is of circles, (radius, colour or None for an outline), and of words between them.
    entries: list[list[str | tuple[float, str | None]]] = [
        [(0.36 * font, colour), f"{counts[kind]:,} {kind}"] for kind, colour in points.colours.items() if counts[kind]
    ]
    low, high = _domain(points.size) if points.size is not None else (0.0, 0.0)
    if points.size is not None and len({value for value in points.size.values if value is not None}) > 1:
        form = ",.0f" if high - low >= 10 else ".2f" if high - low >= 0.02 else ".3g"
        ends = [format(value, form) for value in (low, high)]
        ringless = [(radius * each, None) for each in _RADII]
        entries.append([points.size.title, ringless[0], ends[0], ringless[1], ends[1]])
    inch = 72 * figure.get_size_inches()
    line, x, row = 1.75 * font, box.left, 0
    for entry in entries:
        widths = [
            text_width(part, font, ["sans-serif"]) + 0.5 * font if isinstance(part, str) else 2 * part[0] + 0.5 * font
            for part in entry
        ]
        if x + sum(widths) > box.left + box.width and x > box.left:
            x, row = box.left, row + 1
        y = (box.bottom + box.height - (row + 0.5) * line) / inch[1]
        for part, width in zip(entry, widths, strict=True):
            if isinstance(part, str):
                words: dict[str, Any] = {"fontsize": font, "color": INK, "va": "center_baseline", "parse_math": False}
                figure.text(x / inch[0], y, part, **words)
            else:
                size, colour = part
                circle = Line2D([(x + size) / inch[0]], [y], marker="o", markersize=2 * size, color=colour or SOFT)
                circle.set(markeredgewidth=0.6, fillstyle="full" if colour else "none")
                figure.add_artist(circle)
            x += width
        x += 0.8 * font
    return (row + 1) * line + 0.6 * font if entries else 0.0
