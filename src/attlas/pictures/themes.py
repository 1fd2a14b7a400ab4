"""Colours of pictures, on light and on dark pages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from attlas.foundation.checks import one_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

# Depth of the sea, from paper to the deep: one family of hues whose lightness falls all the way, so that the
# order of colours is seen in grey and without colour vision too.
DEPTH = ("#f4f8f6", "#cfe7e1", "#8fcbc8", "#4f9fb2", "#27708f", "#174268", "#0d1b38")

# The other side of a scale for weights that may be negative: from the same paper to dark red.
_NEGATIVE_COLOURS = ("#f4f8f6", "#f3d6c6", "#e8a386", "#d66c47", "#ae3d1f", "#782614", "#3d130a")

LAND = "#e7e4dc"  # where nothing may attend
INK = "#12212e"
SOFT = "#52646f"
ACCENT = "#c8421a"


@dataclass(frozen=True)
class Theme:
    """Colours of a picture.

    Parameters
    ----------
    paper, ink, soft : str
        The page, its text, and text that matters less.
    accent, accent_wash : str
        What a picture is about, and a pale ground for it.
    sea, sea_wash : str
        The second colour, and a pale ground for it.
    bar : str
        Bars that are not what the picture is about.
    sides : tuple of str
        A scale of numbers of both signs: from the lowest over 0 to the highest.
    land : str
        Where nothing may attend.
    depth : tuple of str
        The scale of weights: from the smallest, which is near the page, to the largest.
    positive, negative : tuple of str
        Weights that may be negative: from 0 upwards, and from 0 downwards.
    """

    paper: str
    ink: str
    soft: str
    accent: str
    accent_wash: str
    sea: str
    sea_wash: str
    bar: str
    sides: tuple[str, ...]
    land: str
    depth: tuple[str, ...]
    positive: tuple[str, ...]
    negative: tuple[str, ...]

    def colormap(self) -> Colormap:
        """Return the scale of numbers of both signs as a colour map of matplotlib."""
        from matplotlib.colors import LinearSegmentedColormap

        return LinearSegmentedColormap.from_list("parts", self.sides)

    def apply(self, figure: Figure) -> None:
        """Give the page, the axes and their labels the colours of the theme."""
        figure.set_facecolor(self.paper)
        for ax in figure.axes:
            self._apply_to(ax)

    def _apply_to(self, ax: Axes) -> None:
        """Give axes the colours of the theme."""
        ax.set_facecolor(self.paper)
        ax.tick_params(colors=self.ink)
        ax.spines[:].set_color(self.ink)
        for label in (ax.xaxis.label, ax.yaxis.label):
            label.set_color(self.ink)


def ink_on(ground: tuple[float, ...]) -> str:
    """Return black or white: what stands out more on a ground of red, green and blue from 0 to 1.

    By the contrast of WCAG 2, which is at least 4.5 so.
    """
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in ground[:3]]
    luminance = sum(share * x for share, x in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "black" if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "white"


# The colours of the page of the viewer in its two themes; the accent stands on a paler ground, for small letters.
_THEMES = {
    "light": Theme(
        "#ffffff", INK, SOFT, ACCENT, "#fdf3ee", "#18436a", "#d9e6ee", "#b3cddf",
        ("#782614", "#e8a386", DEPTH[0], DEPTH[2], "#18436a"), LAND, DEPTH, DEPTH, _NEGATIVE_COLOURS,
    ),
    "dark": Theme(
        "#111b24", "#e6eef0", "#a9b9c2", "#ff8f63", "#33201a", "#8ccbc9", "#1c3040", "#2b5364",
        ("#ff8f63", "#8c3c22", "#18242e", "#1f5f80", "#8ccbc9"), "#18212a", DEPTH[::-1],
        ("#141c26", "#16304a", "#1c4f70", "#2f7f9c", "#5db0bd", "#9fd8d2", "#def5ee"),
        ("#141c26", "#3e2220", "#79321f", "#b9502f", "#ec7d55", "#ffb08c", "#ffd9c4"),
    ),
}  # fmt: skip
THEMES = tuple(_THEMES)


def theme_named(name: str) -> Theme:
    """Return the theme of a name.

    Raises
    ------
    ShapeError
        If there is none of this name.
    """
    one_of("theme", name, THEMES, 'theme="dark"')
    return _THEMES[name]
