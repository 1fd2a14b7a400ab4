"""Heat maps of one head or of many."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attlas import stats
from attlas.errors import ShapeError, import_extra, kind, public
from attlas.foundation.checks import one_of, whole_number
from attlas.foundation.files import whole_file
from attlas.foundation.installation import install_command
from attlas.pictures.fonts import fonts_for_text, texts_in_fonts, visible_labels
from attlas.pictures.themes import ACCENT, DEPTH, INK, LAND, SOFT, theme_named
from attlas.stats.pooled import Pool, block_edges, count_blocks
from attlas.stats.spans import Bands, Span, place_span, pool_tile

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure

    from attlas.matrix import AttentionMatrix

__all__ = [
    "ACCENT", "DEPTH", "FLOOR", "INK", "LAND", "SOFT", "blocks", "both_sides", "color_norm", "depth", "draw", "grid",
    "label", "palette", "plot", "save", "scale", "sheet", "weight_words",
]  # fmt: skip

FLOOR = 1e-4  # weights below it have the palest colour
_MAX_HEADS = 1024
_MOST_LENGTH_RATIO = 1.4  # times the usual length that the longer side of a map may have
_MOST_LABELLED = 64  # cells a side up to which a map has the text of each token


@public("plot()")
def plot(
    A: AttentionMatrix | Tensor,
    *,
    rows: Span | None = None,
    columns: Span | None = None,
    size: int | None = None,
    pool: Pool = "max",
    labels: Sequence[str] | tuple[Sequence[str], Sequence[str]] | None = None,
    log: bool = True,
    cmap: str | Colormap | None = None,
    ax: Axes | None = None,
    title: str | None = None,
    theme: str = "light",
) -> Figure:
    """Draw the weights of one head, or a grid of heads, as heat maps with one scale of colour.

    Parameters
    ----------
    A : AttentionMatrix or Tensor, shape (..., m, n)
        The matrix, or a part of it that is already a tensor: ``A[0, 3, 40:90, 40:90]``. At most two leading
        axes longer than 1; the first becomes the rows of the grid, the second its columns.
    rows, columns : slice, range or (start, stop), optional
        Queries and keys to draw; the default is all of them. The axes count as the matrix does.
    size : int, optional
        Blocks along each side of a map, at most; the default is 512 for one map and 256 for several. A side that
        is no longer is drawn cell by cell.
    pool : {"max", "mean"}
        What stands for a block: its largest weight, or the mean over its allowed cells.
    labels : sequence of str, or pair of sequences, optional
        Text of each token, for one map of at most 64 × 64 cells; a pair has the texts of the queries and of the
        keys, one sequence serves both. With `rows` and `columns`, the texts of these.
    log : bool
        Logarithmic colours from `FLOOR` to 1; otherwise in proportion, from 0 to the largest weight drawn.
    cmap : str or matplotlib.colors.Colormap, optional
        Another colour map than that of `depth`.
    ax : matplotlib.axes.Axes, optional
        Axes of yours to draw a single map into.
    title : str, optional
        Title of the figure, or of `ax`.
    theme : {"light", "dark"}
        Colours for a light or a dark page.

    Returns
    -------
    matplotlib.figure.Figure
        A figure of its own, which a notebook shows as the value of a cell: pyplot is not used. With `ax`, its figure.

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    ShapeError
        If there are too many axes or heads, `rows` or `columns` do not lie within the matrix, `labels` do not fit, or
        there is no such theme.

    See Also
    --------
    save : writes a figure to a file.
    attlas.stats.picture : the numbers behind the picture.

    Notes
    -----
    Blocks of a map have one size, and the last cell may be missing in a few of them where the side is not a
    multiple: everything is drawn within one cell of where it is. Cells that no query may see are drawn in a colour
    outside the scale. Memory: size² numbers per head, and one tile. Time: one pass over the matrix.

    Examples
    --------
    >>> import torch, attlas
    >>> q, k = torch.randn(2, 4, 300, 16), torch.randn(2, 4, 300, 16)
    >>> A = attlas.attend(q, k, mask=attlas.Causal())
    >>> len(A.plot(size=64).axes)  # eight maps and the scale
    9
    >>> words = ["the", " cat", " sat"]
    >>> figure = A[0, 3].plot(rows=(0, 3), columns=(0, 3), labels=words, log=False, cmap="magma")
    """
    _check_options(pool, size)
    theme_named(theme)
    if not hasattr(A, "detach") or len(A.shape) < 2:
        rule = "A must be an attention matrix, or a tensor of weights of shape (..., m, n)."
        found = f"shape {tuple(A.shape)}" if hasattr(A, "detach") else kind(A)
        raise ShapeError(rule, found, "A.plot(), or pictures.plot(torch.as_tensor(weights)).")
    A = A.detach()  # a picture records no graph, at any length
    lead = tuple(int(s) for s in A.shape[:-2])
    axes = [s for s in lead if s != 1]
    if len(axes) > 2 or math.prod(lead) > _MAX_HEADS or 0 in A.shape:
        rule = f"at most two leading axes can be drawn, with {_MAX_HEADS} heads in all and no empty axis."
        fix = "pick some first: A[0].plot() or A[0, 3].plot()."
        raise ShapeError(rule, f"{math.prod(lead)} heads in axes {lead}", fix, A=f"shape {tuple(A.shape)}")
    if ax is not None and axes:
        fix = "A[0, 3].plot(ax=ax), or leave ax out for a grid."
        raise ShapeError("ax takes one map.", f"{math.prod(lead)} heads", fix, A=f"shape {tuple(A.shape)}")
    window = _drawn_range("rows", rows, int(A.shape[-2])), _drawn_range("columns", columns, int(A.shape[-1]))
    texts = None if labels is None else _label_pair(labels, window, A.shape, bool(axes))
    size = size or (256 if axes else 512)
    maps = blocks(A, size, pool, *window)
    down, across = (axes[0], axes[1]) if len(axes) == 2 else (1, math.prod(axes))
    maps = maps.reshape(down, across, *maps.shape[-2:])
    words = weight_words(window, maps.shape[-2:], pool)
    if not axes:
        norm = color_norm(maps, log)
        return _draw_map(maps[0, 0], window, texts, title=title, words=words, ax=ax, norm=norm, cmap=cmap, theme=theme)
    names = [[f"{r}, {c}" if down > 1 else str(c) for c in range(across)] for r in range(down)]
    return grid(maps, names, title=title, words=words, log=log, cmap=cmap, window=window, theme=theme)


def _check_options(pool: str, size: int | None) -> None:
    """Raise an error where a pooling or a size is not one that maps have."""
    one_of("pool", pool, ("max", "mean"), "leave pool out for max.")
    if size is not None:
        whole_number("size", size, "size=256")


def _drawn_range(name: str, span: Span | None, size: int) -> range:
    """Return which queries or keys are drawn, at least one."""
    window = place_span(name, span, size, "queries" if name == "rows" else "keys")
    if not window:
        raise ShapeError(f"{name} must not be empty.", f"{name} = {span!r}", f"{name}=slice(0, {size})")
    return window


def _label_pair(
    labels: Sequence[str] | tuple[Sequence[str], Sequence[str]],
    window: tuple[range, range],
    shape: Sequence[int],
    several: bool,
) -> tuple[list[str], list[str]]:
    """Return the labels of the rows and of the columns."""
    pair = len(labels) == 2 and not any(isinstance(part, str) for part in labels)
    of_rows, of_columns = ([str(text) for text in part] for part in (labels if pair else (labels, labels)))
    sizes = [len(part) for part in window]
    if several or max(sizes) > _MOST_LABELLED or [len(of_rows), len(of_columns)] != sizes:
        few = [min(size, 40) for size in sizes]
        texts = f"tokens[:{few[0]}]" if sizes[0] == sizes[1] else f"(queries[:{few[0]}], keys[:{few[1]}])"
        head = f"A[{', '.join('0' * (len(shape) - 2))}]" if several else "A"
        rule = f"labels need one head and at most {_MOST_LABELLED} × {_MOST_LABELLED} cells, one label for each token."
        given = {"A": f"shape {tuple(shape)}", "labels": f"{len(of_rows)} for rows, {len(of_columns)} for columns"}
        found = f"{sizes[0]} queries × {sizes[1]} keys of {'several heads' if several else 'one head'}"
        fix = f"{head}.plot(rows=(0, {few[0]}), columns=(0, {few[1]}), labels={texts})"
        fix += ", or attlas.pictures.plot(t, labels=...) for a tensor t of weights."
        raise ShapeError(rule, found, fix, arguments=given)
    return of_rows, of_columns


def blocks(
    A: AttentionMatrix | Tensor, size: int, pool: Pool = "max", rows: range | None = None, columns: range | None = None
) -> Tensor:
    """Return the blocks of a picture, at most `size` a side; NaN where nothing may attend.

    Parameters
    ----------
    A : AttentionMatrix or Tensor, shape (..., m, n)
        The matrix, or a part of it as a tensor.
    size : int
        Blocks along each side, at most.
    pool : {"max", "mean"}
        What stands for a block.
    rows, columns : range, optional
        Queries and keys to draw; the default is all of them.

    Returns
    -------
    Tensor, shape (..., height, width)

    Notes
    -----
    Blocks have one size along a side, ``⌈m / size⌉`` rows; where m is not a multiple, a few have one row less.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import pictures
    >>> A = attlas.attend(torch.randn(3, 900, 8), torch.randn(3, 80, 8))
    >>> pictures.blocks(A, 100).shape
    torch.Size([3, 100, 80])
    """
    rows = range(int(A.shape[-2])) if rows is None else rows
    columns = range(int(A.shape[-1])) if columns is None else columns
    height, width = count_blocks(len(rows), size), count_blocks(len(columns), size)
    if isinstance(A, Tensor):
        part = A[..., rows.start : rows.stop, columns.start : columns.stop].detach().float().cpu()
        return part if part.shape[-2:] == (height, width) else _pooled_weights(part, height, width, pool)
    return stats.picture(A, height, width, pool, rows, columns).detach().float().cpu()


def _pooled_weights(weights: Tensor, height: int, width: int, pool: Pool) -> Tensor:
    """Pool a tensor into blocks as `attlas.stats.Picture` pools a matrix; cells that are NaN do not count."""
    rows, columns = (range(size) for size in weights.shape[-2:])
    bands = Bands(block_edges(rows, height)), Bands(block_edges(columns, width))
    cells = pool_tile((~weights.isnan()).float(), rows, columns, bands, torch.sum)
    if pool == "max":
        found = pool_tile(weights.nan_to_num(-torch.inf), rows, columns, bands, torch.amax)
        if bool((weights < 0).any()):  # the largest by size
            low = pool_tile(weights.nan_to_num(torch.inf), rows, columns, bands, torch.amin)
            found = torch.where(-low > found, low, found)
    else:
        found = pool_tile(weights.nan_to_num(0.0), rows, columns, bands, torch.sum) / cells
    return found.masked_fill(cells == 0, torch.nan)


def weight_words(window: tuple[range, range], shape: Sequence[int], pool: Pool = "max") -> str:
    """Return the label of the colour scale beside a map.

    Parameters
    ----------
    window : tuple of range
        Queries and keys that the map covers.
    shape : sequence of int
        Height and width of the map, in blocks.
    pool : {"max", "mean"}
        What stands for a block.

    Returns
    -------
    str

    Examples
    --------
    >>> from attlas import pictures
    >>> pictures.weight_words((range(2048), range(2048)), (128, 128))
    'largest weight in a block of 16 × 16'
    """
    high, wide = (-(-len(part) // blocks) for part, blocks in zip(window, shape, strict=True))
    if high == wide == 1:
        return "weight"
    return f"{'largest' if pool == 'max' else 'mean'} weight in a block of {high} × {wide}"


def grid(
    maps: Tensor,
    names: Sequence[Sequence[str]] | None = None,
    *,
    title: str | None = None,
    row_names: Sequence[str] | None = None,
    words: str = "weight",
    log: bool = True,
    cmap: str | Colormap | None = None,
    window: tuple[range, range] | None = None,
    theme: str = "light",
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
    row_names : sequence of str, optional
        Name of each row of maps.
    words : str
        What the colours say.
    log : bool
        Logarithmic colours, or in proportion.
    cmap : str or matplotlib.colors.Colormap, optional
        Another colour map than that of `depth`.
    window : tuple of range, optional
        Queries and keys that the maps cover, for their proportions and for the axes of a single map.
    theme : {"light", "dark"}
        Colours for a light or a dark page.

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
    colours = theme_named(theme)
    norm = color_norm(maps, log)
    window = (range(height), range(width)) if window is None else window
    if rows == columns == 1 and names is None and row_names is None:
        return _draw_map(maps[0, 0], window, None, title=title, words=words, ax=None, norm=norm, cmap=cmap, theme=theme)
    across, down = _width_and_height(window, min(1.55, 30 / max(rows, columns)))
    figure = sheet(across * columns + 1.1, down * rows + 1.15)
    figure.set_facecolor(colours.paper)
    axes = figure.subplots(rows, columns, squeeze=False)
    for r in range(rows):
        for c in range(columns):
            ax = axes[r, c]
            draw(ax, maps[r, c], extent=_axes_extent(window), norm=norm, cmap=cmap, theme=theme)
            ax.set_box_aspect(_height_ratio(window))
            if names is not None:
                ax.set_title(names[r][c], fontsize=7.5, color=colours.ink, loc="left", pad=3, parse_math=False)
            ax.set_xticks([])
            ax.set_yticks([])
        if row_names is not None:
            axes[r, 0].set_ylabel(row_names[r], fontsize=8, color=colours.soft, rotation=0, ha="right", va="center")
    scale(figure, axes.ravel().tolist(), words, theme=theme)
    if title is not None:
        figure.suptitle(title, x=0.02, ha="left", fontsize=12, color=colours.ink, parse_math=False)
    return figure


def _draw_map(
    weights: Tensor,
    window: tuple[range, range],
    labels: tuple[list[str], list[str]] | None,
    *,
    title: str | None,
    words: str,
    ax: Axes | None,
    norm: Normalize,
    cmap: str | Colormap | None,
    theme: str,
) -> Figure:
    """Draw one map with its axes and its scale, into a figure of its own or into axes."""
    given, colours = ax, theme_named(theme)
    if ax is None:
        across, down = _width_and_height(window, 5.2)
        figure = sheet(max(across, 2.4) + (2.2 if labels else 1.3), max(down, 1.6) + (1.4 if labels else 0.9))
        figure.set_facecolor(colours.paper)
        ax = figure.subplots()
    else:
        figure = cast("Figure", ax.figure)  # or a part of one, which has what is used here too
    draw(ax, weights, extent=None if labels else _axes_extent(window), norm=norm, cmap=cmap, theme=theme)
    ax.set_box_aspect(_height_ratio(window))
    ax.set_xlabel("key", fontsize=8.5, color=colours.soft)
    ax.set_ylabel("query", fontsize=8.5, color=colours.soft)
    if labels:
        label(ax, *labels)
    scale(figure, [ax], words, theme=theme)
    if title is not None and given is not None:
        ax.set_title(title, loc="left", color=colours.ink, parse_math=False)
    elif title is not None:
        figure.suptitle(title, x=0.02, ha="left", fontsize=12, color=colours.ink, parse_math=False)
    return figure


def _axes_extent(window: tuple[range, range]) -> tuple[float, float, float, float]:
    """Return left, right, bottom and top of the axes of a map; the first query is at the top."""
    rows, columns = window
    return columns.start, columns.stop, rows.stop, rows.start


def _width_and_height(window: tuple[range, range], side: float) -> tuple[float, float]:
    """Return width and height of a map, in inches: the longer side is `side`, or more if the map is far from square."""
    ratio = _height_ratio(window)
    longer = side * min(max(ratio, 1 / ratio), _MOST_LENGTH_RATIO)
    return (longer, longer * ratio) if ratio < 1 else (longer / ratio, longer)


def _height_ratio(window: tuple[range, range]) -> float:
    """Return the height of a map by its width: that of the matrix, within bounds that can be looked at."""
    return min(max(len(window[0]) / len(window[1]), 0.3), 3.3)


def label(ax: Axes, labels: Sequence[str], columns: Sequence[str] | None = None) -> None:
    """Write the text of each token at both axes of a map.

    Parameters
    ----------
    ax : matplotlib.axes.Axes
        Axes with one map of as many cells as there are labels.
    labels : sequence of str
        Text of each token, or of each query. Blanks at the ends are drawn as ``␣``; what no font that is installed
        can draw becomes a white square.
    columns : sequence of str, optional
        Text of each key, where it is not that of the queries.

    Examples
    --------
    >>> import torch
    >>> from attlas import pictures
    >>> ax = pictures.sheet(3, 3).subplots()
    >>> pictures.draw(ax, torch.rand(2, 2))
    >>> pictures.label(ax, ["a", "b"])
    """
    down, across = visible_labels(labels), visible_labels(labels if columns is None else columns)
    families = fonts_for_text("".join([*down, *across]))
    down, across = (texts_in_fonts(texts, families) for texts in (down, across))
    size = max(4.0, min(8.0, 260 / max(len(down), len(across), 1)))
    ax.set_xticks(range(len(across)), across, rotation=90, family=families, fontsize=size, parse_math=False)
    ax.set_yticks(range(len(down)), down, family=families, fontsize=size, parse_math=False)
    ax.tick_params(length=0, pad=2, top=True, labeltop=True, bottom=False, labelbottom=False)
    ax.xaxis.set_label_position("bottom")


def draw(
    ax: Axes,
    weights: Tensor,
    extent: tuple[float, float, float, float] | None = None,
    *,
    norm: Normalize | None = None,
    cmap: str | Colormap | None = None,
    theme: str = "light",
) -> None:
    """Draw one map into axes: logarithmic colours from `FLOOR` to 1, and another colour for NaN.

    Parameters
    ----------
    ax : matplotlib.axes.Axes
        Axes to draw into.
    weights : Tensor, shape (height, width)
        The weights; NaN where nothing may attend.
    extent : tuple of float, optional
        Left, right, bottom and top of the axes, where blocks stand for several queries and keys.
    norm : matplotlib.colors.Normalize, optional
        Another scale of the colours, as `color_norm` makes it.
    cmap : str or matplotlib.colors.Colormap, optional
        Another colour map than that of `depth`.
    theme : {"light", "dark"}
        Colours for a light or a dark page.

    Notes
    -----
    All blocks have one width and one height. `attlas.stats.Picture` cuts so that each then stands within one cell
    of where it is.

    Examples
    --------
    >>> import torch
    >>> from attlas import pictures
    >>> pictures.draw(pictures.sheet(3, 3).subplots(), torch.rand(64, 64), extent=(0, 4096, 4096, 0))
    """
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm

    colours = theme_named(theme)
    norm = color_norm(weights) if norm is None else norm
    values = np.ma.masked_invalid(weights.numpy())
    if isinstance(norm, LogNorm):
        values = np.ma.masked_invalid(weights.clamp(norm.vmin, norm.vmax).numpy())  # 0 has no logarithm
    usual = depth(theme) if norm.vmin is None or norm.vmin >= 0 else both_sides(theme)
    shades = usual if cmap is None else colormaps[cmap] if isinstance(cmap, str) else cmap
    ax.set_facecolor(colours.land)
    ax.imshow(
        values,
        cmap=shades.with_extremes(bad="none"),
        norm=norm,
        interpolation="nearest" if max(weights.shape) < 200 else "antialiased",
        aspect="auto",
        extent=extent,
    )
    ax.set_box_aspect(min(max(weights.shape[0] / weights.shape[1], 0.2), 5.0))
    ax.tick_params(labelsize=7.5, colors=colours.soft, length=2.5)
    for spine in ax.spines.values():
        spine.set(color=colours.ink, linewidth=0.4)


def color_norm(maps: Tensor, log: bool = True) -> Normalize:
    """Return the scale of the colours for some maps.

    Parameters
    ----------
    maps : Tensor, shape (..., height, width)
        Weights of all maps that share the scale.
    log : bool
        Logarithmic from `FLOOR` to 1; otherwise in proportion, from 0 to the largest weight.

    Returns
    -------
    matplotlib.colors.Normalize
        Where a weight is negative, both sides of 0 up to the largest size, in proportion below `FLOOR`.

    Examples
    --------
    >>> import torch
    >>> from attlas import pictures
    >>> pictures.color_norm(torch.tensor([[0.25, 0.5]]), log=False).vmax
    0.5
    """
    from matplotlib.colors import LogNorm, Normalize, SymLogNorm

    numbers = maps.nan_to_num(0.0)
    if bool((numbers < 0).any()):
        size = max(float(numbers.abs().max()), 10 * FLOOR)
        return SymLogNorm(FLOOR, vmin=-size, vmax=size) if log else Normalize(-size, size)
    if log:
        return LogNorm(FLOOR, 1.0)
    largest = float(numbers.max())
    return Normalize(0.0, largest if largest > 0 else 1.0)


@public("save()")
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


def depth(theme: str = "light") -> Colormap:
    """Return the palette as a colour map of matplotlib, with the colour of what may not attend.

    Parameters
    ----------
    theme : {"light", "dark"}
        The page that the smallest weights are near to.

    Returns
    -------
    matplotlib.colors.Colormap
        From paper to deep sea in 256 steps that look equal, on a dark page the other way. Lightness changes to one
        side all the way, so that the order is seen in grey and without colour vision too.

    Examples
    --------
    >>> from attlas import pictures
    >>> pictures.depth().N
    256
    """
    from matplotlib.colors import ListedColormap

    colours = theme_named(theme)
    return ListedColormap(palette(colours.depth).tolist(), name="attlas.depth").with_extremes(bad=colours.land)


def both_sides(theme: str = "light") -> Colormap:
    """Return a colour map for weights that may be negative: red below 0, as the palette of `depth` above."""
    from matplotlib.colors import ListedColormap

    colours = theme_named(theme)
    shades = [*palette(colours.negative)[::-1].tolist(), *palette(colours.positive).tolist()]
    return ListedColormap(shades, name="attlas.signed").with_extremes(bad=colours.land)


@public("attlas.pictures")
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
    rule = "matplotlib must be installed to draw."
    import_extra("matplotlib.figure", rule, install_command("plot"))
    from attlas.pictures.figure import NotebookFigure

    # A figure of its own, not one of pyplot: nothing global changes, and no window opens.
    return NotebookFigure(figsize=(width, height), layout="constrained", facecolor="white")


def scale(figure: Figure, axes: list[Axes], words: str = "weight", *, theme: str = "light") -> None:
    """Draw the one scale of colour beside several maps.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        Where the maps are.
    axes : list of matplotlib.axes.Axes
        Axes of the maps.
    words : str
        What the colours say.
    theme : {"light", "dark"}
        Colours for a light or a dark page.

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
    colours = theme_named(theme)
    bar.set_label(words, fontsize=8, color=colours.soft)
    bar.ax.yaxis.set_major_formatter("{x:g}")
    bar.ax.tick_params(labelsize=7.5, colors=colours.soft)
    bar.outline.set(linewidth=0.4, color=colours.ink)


def palette(stops: Sequence[str] = DEPTH) -> NDArray[np.float64]:
    """Return the colours of pictures and notebooks: 256 between the stops of `DEPTH`, evenly spaced in OKLab.

    Parameters
    ----------
    stops : sequence of str
        Other stops, each as ``#rrggbb``.

    Returns
    -------
    ndarray, shape (256, 3)
        Red, green and blue from 0 to 1.

    Examples
    --------
    >>> from attlas import pictures
    >>> (255 * pictures.palette()[0]).round()
    array([244., 248., 246.])
    """
    rgb = np.array([[int(stop[i : i + 2], 16) / 255 for i in (1, 3, 5)] for stop in stops])
    # From sRGB to linear light, and from there to OKLab; then back again.
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    lab = np.cbrt(linear @ _TO_LMS.T) @ _TO_LAB.T
    place = np.linspace(0, len(stops) - 1, 256)
    between = np.stack([np.interp(place, np.arange(len(stops)), lab[:, i]) for i in range(3)], axis=1)
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
