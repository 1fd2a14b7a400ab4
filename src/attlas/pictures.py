"""Pictures of attention: heat maps of one head or of many, as matplotlib figures and as files."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from attlas import stats
from attlas.errors import MissingExtraError, ShapeError
from attlas.files import whole_file
from attlas.matrix import AttentionMatrix

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap
    from matplotlib.figure import Figure

__all__ = ["DEPTH", "FLOOR", "blocks", "depth", "draw", "grid", "label", "labelled", "plot", "save", "scale", "sheet"]

# Depth of the sea, from paper to the deep: one family of hues whose lightness falls all the way, so that the
# order of colours is seen in grey and without colour vision too.
DEPTH = ("#f4f8f6", "#cfe7e1", "#8fcbc8", "#4f9fb2", "#27708f", "#174268", "#0d1b38")
Pool: TypeAlias = Literal["mean", "max"]

LAND = "#e7e4dc"  # where nothing may attend
INK = "#12212e"
SOFT = "#52646f"
ACCENT = "#c8421a"
FLOOR = 1e-4  # weights below it have the palest colour
_MAX_HEADS = 1024


def plot(
    A: AttentionMatrix | Tensor,
    *,
    size: int = 256,
    pool: Pool = "max",
    labels: Sequence[str] | None = None,
    title: str | None = None,
) -> Figure:
    """Draw the weights of one head, or a grid of heads, as heat maps with a logarithmic scale of colour.

    Parameters
    ----------
    A : AttentionMatrix or Tensor, shape (..., m, n)
        The matrix, or a part of it that is already a tensor: ``A[0, 3, 40:90, 40:90]``. At most two leading
        axes longer than 1; the first becomes the rows of the grid, the second its columns.
    size : int
        Blocks along the longer side of each map. A matrix with fewer rows and columns is drawn cell by cell.
    pool : {"max", "mean"}
        What stands for a block: its largest weight, or the mean over its allowed cells.
    labels : sequence of str, optional
        Text of each token, for a map of at most 64 × 64 cells of self-attention.
    title : str, optional
        Title of the figure.

    Returns
    -------
    matplotlib.figure.Figure
        A figure of its own: nothing is shown, and pyplot is not used.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    ShapeError
        If there are too many axes or heads, or `labels` do not fit.

    See Also
    --------
    save : writes a figure to a file.
    attlas.stats.picture : the numbers behind the picture.

    Notes
    -----
    Cells that no query may see are drawn in a colour outside the scale, weights below 1e-4 in the palest.
    Memory: size² numbers a head, and one tile. Time: one pass over the matrix.

    Examples
    --------
    >>> import torch, attlas
    >>> q, k = torch.randn(2, 4, 300, 16), torch.randn(2, 4, 300, 16)
    >>> figure = attlas.attend(q, k, mask=attlas.Causal()).plot(size=64)
    >>> len(figure.axes)  # eight maps and the scale
    9
    """
    if pool not in ("max", "mean"):
        raise ShapeError(
            "plot()", 'pool must be "max" or "mean".', found=f"pool = {pool!r}", fix="leave pool out for max."
        )
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ShapeError("plot()", "size must be a whole number above 0.", found=f"size = {size!r}", fix="size=256")
    lead = tuple(int(s) for s in A.shape[:-2])
    axes = [s for s in lead if s != 1]
    if len(axes) > 2 or math.prod(lead) > _MAX_HEADS or 0 in A.shape:
        raise ShapeError(
            "plot()",
            f"at most two leading axes can be drawn, with {_MAX_HEADS} heads in all and no empty axis.",
            {"A": f"shape {tuple(A.shape)}"},
            found=f"{math.prod(lead)} heads in axes {lead}",
            fix="pick some first: A[0].plot() or A[0, 3].plot().",
        )
    m, n = int(A.shape[-2]), int(A.shape[-1])
    if labels is not None and (len(labels) != m or m != n or m > 64 or axes):
        raise ShapeError(
            "plot()",
            "labels need one head of at most 64 × 64 cells, and one label for each token.",
            {"A": f"shape {tuple(A.shape)}", "labels": f"{len(labels)} labels"},
            found=f"{len(labels)} labels, {m} queries, {n} keys, {math.prod(lead)} heads",
            fix="A[0, 3, :40, :40] is a tensor that can be drawn with labels=tokens[:40].",
        )
    rows, columns = (axes[0], axes[1]) if len(axes) == 2 else (1, math.prod(axes))
    maps = blocks(A, size, pool).reshape(rows, columns, *_shape(m, n, size))
    if labels is not None:
        return labelled(maps[0, 0], labels, title=title)
    names = (
        None
        if rows == columns == 1
        else [[f"{r}, {c}" if rows > 1 else str(c) for c in range(columns)] for r in range(rows)]
    )
    return grid(maps, names, title=title, shape=(m, n))


def blocks(A: AttentionMatrix | Tensor, size: int, pool: Pool = "max") -> Tensor:
    """Return the blocks of a picture, at most `size` a side; NaN where nothing may attend.

    Parameters
    ----------
    A : AttentionMatrix or Tensor, shape (..., m, n)
        The matrix, or a part of it as a tensor, which is not pooled.
    size : int
        Blocks along the longer side.
    pool : {"max", "mean"}
        What stands for a block.

    Returns
    -------
    Tensor, shape (..., height, width)

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import pictures
    >>> A = attlas.attend(torch.randn(3, 900, 8), torch.randn(3, 900, 8))
    >>> pictures.blocks(A, 100).shape
    torch.Size([3, 100, 100])
    """
    if isinstance(A, Tensor):
        return A.detach().float().cpu()
    height, width = _shape(int(A.shape[-2]), int(A.shape[-1]), size)
    return stats.picture(A, height, width, pool=pool).detach().float().cpu()


def _shape(m: int, n: int, size: int) -> tuple[int, int]:
    longest = max(m, n)
    if longest <= size:
        return m, n
    return max(1, round(m * size / longest)), max(1, round(n * size / longest))


def grid(
    maps: Tensor,
    names: Sequence[Sequence[str]] | None = None,
    *,
    title: str | None = None,
    shape: tuple[int, int] | None = None,
    row_names: Sequence[str] | None = None,
) -> Figure:
    """Draw maps in rows and columns with one scale of colour for all.

    Parameters
    ----------
    maps : Tensor, shape (rows, columns, height, width)
        Weights of each map; NaN where nothing may attend.
    names : sequence of sequence of str, optional
        Title of each map.
    title : str, optional
        Title of the figure.
    shape : tuple of int, optional
        Queries and keys that the maps cover, for the axes of a single map.
    row_names : sequence of str, optional
        Name of each row of maps.

    Returns
    -------
    matplotlib.figure.Figure

    Examples
    --------
    >>> import torch
    >>> from attlas import pictures
    >>> figure = pictures.grid(torch.rand(2, 3, 16, 16), row_names=["layer 0", "layer 1"])
    >>> len(figure.axes)
    7
    """
    rows, columns, height, width = maps.shape
    single = rows == columns == 1
    side = 5.2 if single else min(1.55, 30 / max(rows, columns))
    across, down = side * columns, side * rows * min(max(height / width, 0.2), 5.0)
    figure = sheet(across + (1.3 if single else 1.1), down + (0.9 if single else 1.15))
    axes = figure.subplots(rows, columns, squeeze=False)
    for r in range(rows):
        for c in range(columns):
            ax = axes[r, c]
            draw(ax, maps[r, c], extent=(0, shape[1], shape[0], 0) if single and shape is not None else None)
            if names is not None:
                ax.set_title(names[r][c], fontsize=7.5, color=INK, loc="left", pad=3, parse_math=False)
            if not single:
                ax.set_xticks([])
                ax.set_yticks([])
        if row_names is not None:
            axes[r, 0].set_ylabel(row_names[r], fontsize=8, color=SOFT, rotation=0, ha="right", va="center")
    if single:
        axes[0, 0].set_xlabel("key")
        axes[0, 0].set_ylabel("query")
    scale(figure, axes.ravel().tolist())
    if title is not None:
        figure.suptitle(title, x=0.02, ha="left", fontsize=12, color=INK, parse_math=False)
    return figure


def labelled(weights: Tensor, labels: Sequence[str], *, title: str | None = None) -> Figure:
    """Draw one map cell by cell, with the text of each token at both axes.

    Parameters
    ----------
    weights : Tensor, shape (n, n)
        The weights; NaN where nothing may attend.
    labels : sequence of str
        Text of each token.
    title : str, optional
        Title of the figure.

    Returns
    -------
    matplotlib.figure.Figure

    Examples
    --------
    >>> import torch
    >>> from attlas import pictures
    >>> figure = pictures.labelled(torch.rand(3, 3), ["import", " os", ";"])
    >>> [text.get_text() for text in figure.axes[0].get_yticklabels()][:2]
    ['import', ' os']
    """
    figure = sheet(7.4, 6.6)
    ax = figure.subplots()
    draw(ax, weights)
    label(ax, labels)
    scale(figure, [ax])
    if title is not None:
        figure.suptitle(title, x=0.02, ha="left", fontsize=12, color=INK, parse_math=False)
    return figure


def label(ax: Axes, labels: Sequence[str]) -> None:
    """Write the text of each token at both axes of a map.

    Parameters
    ----------
    ax : matplotlib.axes.Axes
        Axes with one map of as many cells as there are labels.
    labels : sequence of str
        Text of each token. What the font cannot draw becomes a white square.

    Examples
    --------
    >>> import torch
    >>> from attlas import pictures
    >>> ax = pictures.sheet(3, 3).subplots()
    >>> pictures.draw(ax, torch.rand(2, 2))
    >>> pictures.label(ax, ["a", "b"])
    """
    shown = _in_font(labels)
    size = max(4.0, min(8.0, 260 / max(len(labels), 1)))
    ax.set_xticks(range(len(labels)), shown, rotation=90, family="monospace", fontsize=size, parse_math=False)
    ax.set_yticks(range(len(labels)), shown, family="monospace", fontsize=size, parse_math=False)
    ax.tick_params(length=0, pad=2, top=True, labeltop=True, bottom=False, labelbottom=False)


def draw(ax: Axes, weights: Tensor, extent: tuple[float, float, float, float] | None = None) -> None:
    """Draw one map into axes: logarithmic colours from `FLOOR` to 1, and another colour for NaN.

    Parameters
    ----------
    ax : matplotlib.axes.Axes
        Axes to draw into.
    weights : Tensor, shape (height, width)
        The weights; NaN where nothing may attend.
    extent : tuple of float, optional
        Left, right, bottom and top of the axes, where blocks stand for several queries and keys.

    Examples
    --------
    >>> import torch
    >>> from attlas import pictures
    >>> pictures.draw(pictures.sheet(3, 3).subplots(), torch.rand(64, 64), extent=(0, 4096, 4096, 0))
    """
    from matplotlib.colors import LogNorm

    values = np.ma.masked_invalid(weights.detach().numpy()).clip(FLOOR, 1.0)
    ax.set_facecolor(LAND)
    ax.imshow(
        values,
        cmap=depth(),
        norm=LogNorm(FLOOR, 1.0),
        interpolation="nearest" if min(weights.shape) < 200 else "antialiased",
        aspect="auto",
        extent=extent,
    )
    ax.set_box_aspect(min(max(weights.shape[0] / weights.shape[1], 0.2), 5.0))
    ax.tick_params(labelsize=7.5, colors=SOFT, length=2.5)
    for spine in ax.spines.values():
        spine.set(color=INK, linewidth=0.4)


def save(figure: Figure, path: str | os.PathLike[str], dpi: int = 200) -> Path:
    """Write a figure to a file, whole or not at all.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        What to write.
    path : str or PathLike
        The file; its suffix chooses the format: png, svg, pdf.
    dpi : int
        Points an inch of a png.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    FileError
        If the folder does not exist, nothing can be written there or the disk is full; the file is then as it was.

    Notes
    -----
    The figure is written beside the file under a temporary name and renamed, so that nobody reads half of it.
    A file that is replaced keeps its mode.

    Examples
    --------
    >>> import tempfile, torch, attlas
    >>> from attlas import pictures
    >>> figure = attlas.attend(torch.randn(50, 8), torch.randn(50, 8)).plot()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     pictures.save(figure, f"{folder}/head.png").name
    'head.png'
    """
    path = Path(path)
    with whole_file(path) as unfinished:
        figure.savefig(unfinished, dpi=dpi)
    return path


def depth() -> Colormap:
    """Return the palette as a colour map of matplotlib, with the colour of what may not attend.

    Returns
    -------
    matplotlib.colors.Colormap
        From paper to deep sea in 256 steps that look equal. Lightness falls all the way, so that the order
        is seen in grey and without colour vision too.

    Examples
    --------
    >>> from attlas import pictures
    >>> pictures.depth().N
    256
    """
    from matplotlib.colors import ListedColormap

    return ListedColormap(_palette().tolist(), name="attlas.depth").with_extremes(bad=LAND)


def sheet(width: float, height: float) -> Figure:
    """Return an empty figure.

    Parameters
    ----------
    width, height : float
        Size in inches.

    Returns
    -------
    matplotlib.figure.Figure
        A figure of its own: pyplot does not know it.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.

    Examples
    --------
    >>> from attlas import pictures
    >>> pictures.sheet(3, 2).get_size_inches().tolist()
    [3.0, 2.0]
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(
            "attlas.pictures",
            "matplotlib must be installed to draw.",
            found="no module named matplotlib",
            fix="pip install 'attlas[plot]'",
        ) from error
    # A Figure of its own, not one of pyplot: nothing global changes, and no window opens.
    return Figure(figsize=(width, height), layout="constrained", facecolor="white")


def scale(figure: Figure, axes: list[Axes]) -> None:
    """Draw the one scale of colour beside several maps.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        Where the maps are.
    axes : list of matplotlib.axes.Axes
        Axes of the maps.

    Examples
    --------
    >>> import torch
    >>> from attlas import pictures
    >>> figure = pictures.sheet(4, 3)
    >>> ax = figure.subplots()
    >>> pictures.draw(ax, torch.rand(8, 8))
    >>> pictures.scale(figure, [ax])
    """
    bar = figure.colorbar(axes[0].images[0], ax=axes, shrink=0.5 if len(axes) > 8 else 0.8, aspect=28, pad=0.015)
    bar.set_label("weight", fontsize=8, color=SOFT)
    bar.ax.tick_params(labelsize=7.5, colors=SOFT)
    bar.outline.set(linewidth=0.4, color=INK)


def _palette() -> NDArray[np.float64]:
    """Return 256 colours between the stops of `DEPTH`, evenly spaced to the eye (in OKLab)."""
    rgb = np.array([[int(stop[i : i + 2], 16) / 255 for i in (1, 3, 5)] for stop in DEPTH])
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    lab = np.cbrt(linear @ _TO_LMS.T) @ _TO_LAB.T
    place = np.linspace(0, len(DEPTH) - 1, 256)
    between = np.stack([np.interp(place, np.arange(len(DEPTH)), lab[:, i]) for i in range(3)], axis=1)
    linear = (between @ np.linalg.inv(_TO_LAB).T) ** 3 @ np.linalg.inv(_TO_LMS).T
    linear = linear.clip(0, 1)
    return np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)


# Björn Ottosson, "A perceptual color space for image processing", 2020.
_TO_LMS = np.array(
    [
        [0.4122214708, 0.5363325363, 0.0514459929],
        [0.2119034982, 0.6806995451, 0.1073969566],
        [0.0883024619, 0.2817188376, 0.6299787005],
    ]
)
_TO_LAB = np.array(
    [
        [0.2104542553, 0.7936177850, -0.0040720468],
        [1.9779984951, -2.4285922050, 0.4505937099],
        [0.0259040371, 0.7827717662, -0.8086757660],
    ]
)


_ONE_LINE = {ord("\n"): "↵", ord("\r"): "↵", ord("\t"): "⇥"}


def _in_font(labels: Sequence[str]) -> list[str]:
    """Return labels without characters that the font cannot draw: matplotlib would warn and draw boxes."""
    from matplotlib.font_manager import FontProperties, findfont, get_font

    known = get_font(findfont(FontProperties(family="monospace"))).get_charmap()
    shown = [label.translate(_ONE_LINE) for label in labels]
    return ["".join(c if ord(c) in known else "\N{WHITE SQUARE}" for c in label) for label in shown]
