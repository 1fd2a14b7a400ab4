"""Fonts of what is written in a picture: which ones a text needs, how wide it is, and where its lines end."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.backends.backend_agg import RendererAgg

# Fonts for what the usual ones cannot draw, mostly Chinese, Japanese and Korean: of these, the installed ones.
_FALLBACK_FONTS = (
    "Noto Sans Mono CJK SC", "Noto Sans CJK SC", "Noto Sans CJK TC", "Noto Sans CJK JP", "Source Han Sans SC",
    "Source Han Sans CN", "PingFang SC", "Hiragino Sans GB", "Heiti SC", "Heiti TC", "Songti SC", "STHeiti",
    "Microsoft YaHei", "SimHei", "SimSun", "WenQuanYi Micro Hei", "WenQuanYi Zen Hei", "Droid Sans Fallback",
    "AR PL UMing CN", "Noto Sans SC", "Malgun Gothic", "Apple SD Gothic Neo", "Yu Gothic", "MS Gothic",
    "Arial Unicode MS", "Unifont", "Noto Sans", "Segoe UI Symbol", "Noto Sans Symbols2", "DejaVu Sans",
)  # fmt: skip
_ONE_LINE = {ord("\n"): "↵", ord("\r"): "↵", ord("\t"): "⇥"}
_POINTS_PER_INCH = 72.0
# What a line may end behind: a run of letters up to a blank, or one wide character with the signs that belong to it.
_WIDE = "\u1100-\u115f\u2e80-\u303e\u3041-\ua4cf\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff00-\uff60"
_WIDE += "\uffe0-\uffe6\U0001f300-\U0001faff\U00020000-\U0003fffd"
_OPENING, _CLOSING = "\"'(\\[{“‘「『（《〈【", "\"'.,;:!?…)\\]}”’、。，；：！？」』）》〉】"
_UNBROKEN = re.compile(
    f"[ \n\t]*(?:[{_OPENING}]*[{_WIDE}][{_CLOSING}]*|(?:[^ \n\t{_WIDE}]|(?<=\\d) (?=%))+[{_CLOSING}]*)"
)


def visible_labels(labels: Sequence[str]) -> list[str]:
    """Return labels on one line, with blanks at their ends that can be seen."""
    lines = [text.translate(_ONE_LINE) for text in labels]
    return [
        "␣" * (len(text) - len(text.lstrip(" "))) + text.strip(" ") + "␣" * (len(text) - len(text.rstrip(" ")))
        if text.strip(" ")
        else "␣" * len(text)
        for text in lines
    ]


def fonts_for_text(text: str, usual: str = "monospace") -> list[str]:
    """Return the fonts that a text needs, the usual one first: matplotlib asks them in turn for each character."""
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    families, missing = [usual], set(text) - _characters_of_font(usual)
    for name in _FALLBACK_FONTS:
        if missing and name in installed and missing & _characters_of_font(name):
            families.append(name)
            missing -= _characters_of_font(name)
    return families


def texts_in_fonts(texts: Sequence[str], families: Sequence[str]) -> list[str]:
    """Return texts with squares for what no font can draw, line feeds aside: matplotlib would warn and draw boxes."""
    known = frozenset("\n").union(*map(_characters_of_font, families))
    return ["".join(c if c in known else "\N{WHITE SQUARE}" for c in text) for text in texts]


@cache
def _characters_of_font(family: str) -> frozenset[str]:
    """Return the characters that a font has."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    return frozenset(map(chr, get_font(findfont(FontProperties(family=[family]))).get_charmap()))


@cache
def _renderer() -> RendererAgg:
    """Return what measures texts: at 1000 pixels an inch, so that hinting changes no width."""
    from matplotlib.backends.backend_agg import RendererAgg

    return RendererAgg(1, 1, 1000)


def text_width(text: str, size: float, families: Sequence[str], weight: str = "normal") -> float:
    """Return how wide a line of text is, in points.

    Parameters
    ----------
    text : str
        The line; `families` have all its characters.
    size : float
        Points of the font.
    families : sequence of str
        Fonts, as `fonts_for_text` gives them.
    weight : str
        "normal" or "bold".
    """
    from matplotlib.font_manager import FontProperties

    font = FontProperties(family=list(families), size=size, weight=weight)
    width: float = _renderer().get_text_width_height_descent(text, font, ismath=False)[0]
    return width * _POINTS_PER_INCH / 1000


def wrapped(text: str, room: float, size: float, families: Sequence[str], weight: str = "normal") -> list[str]:
    """Return the lines of a text, none wider than the room; a line feed ends a line.

    Parameters
    ----------
    text : str
        The text. A line ends at a blank, or beside a character of Chinese, Japanese or Korean; in a word only where
        the word alone is wider than a line.
    room : float
        Width of a line in points.
    size, families, weight
        As of `text_width`.
    """
    lines: list[str] = []
    for paragraph in text.split("\n"):
        lines.append("")
        for part in _UNBROKEN.findall(paragraph):
            longer = lines[-1] + part if lines[-1] else part.lstrip()
            if text_width(longer, size, families, weight) <= room:
                lines[-1] = longer
                continue
            rest = part.lstrip()
            if lines[-1]:
                lines.append("")
            while text_width(rest, size, families, weight) > room and len(rest) > 1:
                ends = range(2, len(rest) + 1)
                fits = next(end for end in ends if text_width(rest[:end], size, families, weight) > room) - 1
                lines[-1:] = [rest[:fits], ""]
                rest = rest[fits:]
            lines[-1] = rest
    return lines


def shortened(text: str, room: float, size: float, families: Sequence[str], weight: str = "normal") -> str:
    """Return a line of text that fits into the room, with an ellipsis in the place of its middle where it is wider.

    Parameters
    ----------
    text : str
        The line.
    room : float
        Points that it may take.
    size, families, weight
        As of `text_width`.
    """
    kept = len(text)
    short = text
    while kept > 1 and text_width(short, size, families, weight) > room:
        kept -= 1
        short = f"{text[: (kept + 1) // 2]}…{text[len(text) - kept // 2 :]}"
    return short
