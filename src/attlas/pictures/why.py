"""Why a weight is where it is, as pictures: arrows over the text and a bar for each part; a table for a whole map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any
from unicodedata import east_asian_width

from attlas.errors import ShapeError, public
from attlas.pictures.fonts import fonts_for_text, texts_in_fonts, wrapped
from attlas.pictures.maps import sheet
from attlas.pictures.themes import Theme, ink_on, theme_named

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_BARS = 6  # parts with a bar of their own
_LEAST_WRITTEN = 0.05  # number of a table that is written into its cell
_NEAR = 3  # tokens around each of the three that are shown
_LETTER = 0.105  # inches of a letter of 11 points, in a font where all have one width, or two
_TITLE = 12.0  # points of the letters of a title
_EDGE = 0.1  # inches before it, and behind it
_LEAST_WIDTH = 5.2  # inches of a table, whose words below it have room then


@public("pictures.why()")
def why(
    summary: Mapping[str, Any], tokens: Sequence[str], *, query: int, key: int, title: str = "", theme: str = "light"
) -> Figure:
    """Draw why a weight is where it is: arrows over the text, and a bar for each part of the key.

    Parameters
    ----------
    summary : mapping
        What `attlas.heads.explanation.summary` gives.
    tokens : sequence of str
        Texts of the tokens.
    query, key : int
        Places of the query and of the key among them.
    title : str
        Title of the picture.
    theme : {"light", "dark"}
        Colours for a light or a dark page.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    ShapeError
        If a place lies outside of the tokens, or there is no such theme.

    Examples
    --------
    >>> from attlas import pictures
    >>> part = {"name": "head 0·0", "role": "previous token", "logit": 8.3}
    >>> told = {"weight": 0.98, "logit": 17.9, "above": 15.3, "relative": True, "keys": [part]}
    >>> told["writer"] = {**part, "sources": [{"at": 0, "logit": 8.5}], "without": {"weight": 0.09}}
    >>> figure = pictures.why(told, ["temp", "late", "=", "temp"], query=3, key=1)
    >>> len(figure.axes)
    2
    """
    colours = theme_named(theme)
    for name, place in (("query", query), ("key", key)):
        if not 0 <= place < len(tokens):
            found = f"{name} = {place}, {len(tokens)} tokens"
            raise ShapeError("query and key must be places of tokens.", found, f"{name}={len(tokens) - 1}")
    writer = summary["writer"]
    sources = writer["sources"] if writer else []
    source = sources[0]["at"] if sources and 0 <= sources[0]["at"] < len(tokens) else None
    shown = _shown([query, key, *([] if source is None else [source])], len(tokens))
    words = [_visible(tokens[place]) for place in shown]
    families = fonts_for_text("".join(words))
    words = texts_in_fonts(words, families)
    wide = sum(map(_width, words)) + 0.3 * _gaps(shown)
    figure = sheet(max(wide + 0.4, 8.5), 4.6)
    text, bars = figure.subplots(2, 1, height_ratios=(1.0, 1.35))
    colours.apply(figure)
    _draw_text(text, shown, words, (query, key, source), summary, max(wide, 8.1), colours, families)
    _draw_bars(bars, summary, colours)
    _draw_title(figure, title, colours)
    return figure


@public("pictures.why_map()")
def why_map(summary: Mapping[str, Any], *, title: str = "", theme: str = "light") -> Figure:
    """Draw what pairs of parts add where a head looks, as a heat map.

    Parameters
    ----------
    summary : mapping
        What `attlas.heads.explanation.map_summary` gives.
    title : str
        Title of the picture.
    theme : {"light", "dark"}
        Colours for a light or a dark page.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    ShapeError
        If there is no such theme.

    Examples
    --------
    >>> from attlas import pictures
    >>> query = {"name": "MLP 0", "role": "", "logit": 2.0}
    >>> key = {"name": "head 0·0", "role": "previous token", "logit": 2.0}
    >>> told = {"queries": [query], "keys": [key], "others": [0, 3], "table": [[1.5, 0.5]], "total": 2.0}
    >>> len(pictures.why_map(told).axes[0].texts)
    2
    """
    colours = theme_named(theme)
    table, (more_queries, more_keys) = summary["table"], summary["others"]
    rows, columns = _names(summary["queries"], more_queries), _names(summary["keys"], more_keys)
    largest = max((abs(value) for line in table for value in line), default=0.0) or 1.0
    figure = sheet(max(3.2 + 0.62 * len(columns), _LEAST_WIDTH), 2.4 + 0.4 * len(rows))
    ax = figure.subplots()
    colours.apply(figure)
    shades = colours.colormap()
    ax.pcolormesh(table, cmap=shades, vmin=-largest, vmax=largest, edgecolors=colours.paper, linewidth=1)
    ax.invert_yaxis()
    for row, line in enumerate(table):
        for column, value in enumerate(line):
            if abs(value) < _LEAST_WRITTEN:
                continue
            color = ink_on(shades(0.5 + 0.5 * value / largest))
            ax.text(column + 0.5, row + 0.5, f"{value:+.1f}", ha="center", va="center", fontsize=8, color=color)
    ax.set_xticks([at + 0.5 for at in range(len(columns))], columns, rotation=40, ha="left", parse_math=False)
    ax.set_yticks([at + 0.5 for at in range(len(rows))], rows, parse_math=False)
    ax.xaxis.tick_top()
    ax.tick_params(length=0, labelsize=9)
    ax.spines[:].set_visible(False)
    ax.set_ylabel("part of the query")
    ax.set_xlabel(f"part of the key; all sum to {summary['total']:+.1f}, in nats above equal weights")
    _draw_title(figure, title, colours)
    return figure


def _draw_title(figure: Figure, title: str, colours: Theme) -> None:
    """Draw a title at the left edge of a figure, in as many lines as it needs."""
    if not title:
        return
    families = fonts_for_text(title, "sans-serif")
    (whole,) = texts_in_fonts([title], families)
    width = figure.get_size_inches()[0]
    lines = wrapped(whole, 72 * (width - 2 * _EDGE), _TITLE, families)
    place: dict[str, Any] = {"x": _EDGE / width, "ha": "left", "family": families}
    figure.suptitle("\n".join(lines), fontsize=_TITLE, color=colours.ink, parse_math=False, **place)


def _names(parts: Sequence[Mapping[str, Any]], others: int) -> list[str]:
    """Return parts as a person reads them, and how many others there are."""
    return [*map(part_label, parts), *([f"{others} other parts"] if others else [])]


def _shown(places: Sequence[int], length: int) -> list[int]:
    """Return the places of the tokens near some others, ascending."""
    near = {at for place in places for at in range(place - _NEAR, place + _NEAR + 1)}
    return sorted(at for at in near if 0 <= at < length)


def _width(word: str) -> float:
    """Return how wide a token is drawn, in inches: some characters, as those of Chinese, are as wide as two."""
    return _LETTER * sum(1 + (east_asian_width(character) in "WF") for character in word) + 0.18


def _gaps(shown: Sequence[int]) -> int:
    """Return how often tokens between two that are shown are left out."""
    return sum(b - a > 1 for a, b in pairwise(shown))


def _visible(token: str) -> str:
    """Return a token with its whitespace as signs, at most 24 letters of it."""
    text = token.replace("\n", "↵").replace("\t", "⇥").replace(" ", "·") or "∅"
    return text if len(text) <= 24 else f"{text[:23]}…"


def _draw_text(
    ax: Axes,
    shown: Sequence[int],
    words: Sequence[str],
    places: tuple[int, int, int | None],
    summary: Mapping[str, Any],
    width: float,
    colours: Theme,
    families: Sequence[str],
) -> None:
    """Draw the tokens with an arrow from the query to its key, and one from the key to the token its writer read."""
    query, key, source = places
    styles: dict[int | None, tuple[str, str]] = {source: (colours.accent_wash, colours.accent)}
    styles[key] = styles[query] = (colours.sea_wash, colours.sea)
    ax.set_axis_off()
    x, middles, before = 0.1, {}, None
    for place, word in zip(shown, words, strict=True):
        if before is not None and place - before > 1:
            ax.text(x + 0.15, 0, "…", ha="center", va="center", color=colours.soft)
            x += 0.3
        back, ink = styles.get(place, ("none", colours.ink))
        size = _width(word)
        box = {"boxstyle": "round,pad=0.2", "facecolor": back, "edgecolor": "none"}
        ax.text(x + size / 2, 0, word, ha="center", va="center", family=families, fontsize=11, color=ink, bbox=box,
                parse_math=False)  # fmt: skip
        middles[place] = x + size / 2
        x, before = x + size, place
    ax.set(xlim=(0, width), ylim=(-1.7, 1.9))
    _arrow(ax, middles[query], middles[key], 0.32, colours.sea)
    centre = (middles[query] + middles[key]) / 2
    ax.text(centre, 1.3, f"weight {summary['weight']:.2f}", color=colours.sea, ha="center", fontsize=10)
    writer = summary["writer"]
    if source is None or writer is None:
        return
    if source != key:
        _arrow(ax, middles[key], middles[source], -0.32, colours.accent)
    label = f"{part_label(writer)} read this and wrote it into the key"
    at = min(max(middles[key], 2.2), max(width - 2.2, 2.2))
    ax.text(at, -1.3, label, color=colours.accent, ha="center", fontsize=10, parse_math=False)


def _arrow(ax: Axes, start: float, end: float, y: float, color: str) -> None:
    """Draw an arrow in an arc over the line of tokens, or below it where y is negative."""
    lift = min(1.15 / max(abs(end - start), 0.4), 0.9)
    bend = lift if (start > end) == (y > 0) else -lift
    style = {"arrowstyle": "-|>", "color": color, "lw": 1.8, "connectionstyle": f"arc3,rad={bend / 2}"}
    ax.annotate("", (end, y), (start, y), arrowprops=style)


def _draw_bars(ax: Axes, summary: Mapping[str, Any], colours: Theme) -> None:
    """Draw what each part of the key adds, the largest first, and all others together."""
    writer, keys = summary["writer"], summary["keys"]
    labels, numbers = [part_label(part) for part in keys[:_BARS]], [part["logit"] for part in keys[:_BARS]]
    colors = [colours.accent if writer and part["name"] == writer["name"] else colours.bar for part in keys[:_BARS]]
    if len(keys) > _BARS:
        labels.append(f"{len(keys) - _BARS} other parts")
        numbers.append(sum(part["logit"] for part in keys[_BARS:]))
        colors.append(colours.bar)
    ax.barh(range(len(labels)), numbers, color=colors)
    ax.set_yticks(range(len(labels)), labels, parse_math=False)
    ax.invert_yaxis()
    ax.margins(x=0.1)
    for place, number in enumerate(numbers):
        side = "left" if number >= 0 else "right"
        ax.annotate(f"{number:+.1f}", (number, place), (4 if number >= 0 else -4, 0), textcoords="offset points",
                    va="center", ha=side, fontsize=9, color=colours.ink)  # fmt: skip
    above = "above the mean of its row" if summary["relative"] else "of this cell"
    total = summary["above"] if summary["relative"] else summary["logit"]
    ax.set_xlabel(f"logit {above}: {total:+.1f}, the sum of what each part of the key adds")
    ax.axvline(0, color=colours.ink, lw=0.8)
    ax.spines[["top", "right"]].set_visible(False)
    if writer and writer["without"]:
        told = (
            f"without {writer['name']}:\nweight {summary['weight']:.2f} → {writer['without']['weight']:.2f} predicted"
        )
        ax.text(0.98, 0.06, told, transform=ax.transAxes, ha="right", va="bottom", color=colours.accent, fontsize=10)


def part_label(part: Mapping[str, Any]) -> str:
    """Return a part as a person reads it."""
    return f"{part['name']} ({part['role']})" if part["role"] else str(part["name"])
