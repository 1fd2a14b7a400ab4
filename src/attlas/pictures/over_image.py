"""The weights on the patches of an image, drawn over the picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from attlas.errors import ShapeError, public
from attlas.pictures.maps import INK, SOFT, both_sides, depth, sheet
from attlas.recording.atlas.images.pictures import picture_of

if TYPE_CHECKING:
    from matplotlib.colors import Colormap, Normalize
    from matplotlib.figure import Figure

_SIDE_INCHES = 4.2  # inches of the longer side of a picture
_FADE_TO_WHITE = 0.62  # how far a picture is faded to white where nothing looks
_MOST_OPACITY = 0.85  # opacity of the largest weight
_LEFT_OUT = "#8a8f94"
_MOST_PIXELS = 768  # a side of the picture that is drawn


@public("over_image()")
def over_image(
    weights: Tensor,
    picture: Any = None,
    *,
    box: tuple[float, float, float, float] = (0.0, 0.0, 1.0, 1.0),
    left_out: Tensor | None = None,
    words: str = "weight",
    title: str | None = None,
    ratio: bool = False,
) -> Figure:
    """Draw the weights on a grid of patches over a picture: the picture at the left, faded and coloured at the right.

    Parameters
    ----------
    weights : Tensor, shape (rows, columns)
        A number for each patch.
    picture : PIL image, array or Tensor, optional
        The picture, of any size; without one, the grid alone is drawn.
    box : tuple of float
        Top, left, bottom and right of the grid on the picture, as shares of its height and width.
    left_out : Tensor of bool, optional, shape (rows, columns)
        Patches that are drawn in grey.
    words : str
        What the colours say.
    title : str, optional
        Title of the figure.
    ratio : bool
        Whether the numbers are ratios, whose scale is logarithmic about 1.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    MissingExtraError
        If matplotlib is not installed.
    ShapeError
        If `weights` is no grid, or `picture` no picture.

    See Also
    --------
    attlas.Atlas.image_map : finds the weights.

    Notes
    -----
    Each patch has one colour, so that nothing is drawn that is not in the numbers. Colour and opacity grow with the
    weight, from 0 to the largest one of the picture: two pictures have different scales, which the bar says.

    Examples
    --------
    >>> import torch
    >>> from attlas import pictures
    >>> figure = pictures.over_image(torch.rand(4, 6), torch.rand(40, 60, 3))
    >>> len(figure.axes)  # the picture, the map and the scale
    3
    """
    if not isinstance(weights, Tensor) or weights.ndim != 2 or 0 in weights.shape:
        found = f"shape {tuple(weights.shape)}" if isinstance(weights, Tensor) else type(weights).__name__
        raise ShapeError("weights must be a tensor of shape (rows, columns).", found, "atlas.image_map(...).weights")
    figure = sheet(1, 1)  # which says where matplotlib is not installed
    from matplotlib.cm import ScalarMappable

    numbers = weights.detach().cpu().double()
    norm, colours = _colour_scale(numbers, ratio)
    pixels = None if picture is None else _fitted_picture(picture_of(picture))
    height, width = (pixels.shape[0], pixels.shape[1]) if pixels is not None else weights.shape
    across = _SIDE_INCHES * min(1.0, width / height)
    down = across * height / width
    figure.set_size_inches(across * (1 if pixels is None else 2) + 1.2, down + (0.75 if title else 0.35))
    axes = figure.subplots(1, 1 if pixels is None else 2, squeeze=False)[0]
    extent = (box[1] * width, box[3] * width, box[2] * height, box[0] * height)
    layer = colours(norm(np.ma.masked_invalid(numbers.numpy())))
    if pixels is not None:
        axes[0].imshow(pixels.numpy())
        axes[1].imshow((pixels.double() / 255 * (1 - _FADE_TO_WHITE) + _FADE_TO_WHITE).numpy())
        layer[..., 3] = _patch_opacity(norm, numbers, ratio)
    if left_out is not None:
        layer[left_out.cpu().numpy()] = _as_rgba(_LEFT_OUT)
    axes[-1].imshow(layer, extent=extent, interpolation="nearest")
    for ax in axes:
        ax.set(xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[], aspect="equal")
        for spine in ax.spines.values():
            spine.set(color=INK, linewidth=0.4)
    bar = figure.colorbar(ScalarMappable(norm, colours), ax=axes[-1], shrink=0.9, aspect=24, pad=0.02)
    bar.set_label(words, fontsize=8, color=SOFT)
    bar.ax.tick_params(labelsize=7.5, colors=SOFT)
    bar.outline.set(linewidth=0.4, color=INK)
    if title is not None:
        figure.suptitle(title, x=0.02, ha="left", fontsize=11, color=INK, parse_math=False)
    return figure


def _fitted_picture(picture: Tensor) -> Tensor:
    """Return a picture of at most `_MOST_PIXELS` a side."""
    step = -(-max(picture.shape[:2]) // _MOST_PIXELS)
    return picture[::step, ::step]


def _colour_scale(numbers: Tensor, ratio: bool) -> tuple[Normalize, Colormap]:
    """Return the scale of the colours and their map."""
    from matplotlib.colors import LogNorm, Normalize

    finite = numbers[numbers.isfinite()]
    if ratio:
        sizes = finite[finite > 0].log().abs()
        widest = max(float(sizes.max()) if len(sizes) else 0.0, 0.1)
        low, high = float(np.exp(-widest)), float(np.exp(widest))
        return LogNorm(low, high, clip=True), both_sides()
    if len(finite) and float(finite.min()) < 0:
        size = float(finite.abs().max())
        return Normalize(-size, size), both_sides()
    largest = float(finite.max()) if len(finite) else 0.0
    return Normalize(0.0, largest if largest > 0 else 1.0), depth()


def _patch_opacity(norm: Normalize, numbers: Tensor, ratio: bool) -> NDArray[np.float64]:
    """Return the opacity of each patch: none where the number says nothing, most where it is largest."""
    place = np.ma.filled(norm(np.ma.masked_invalid(numbers.numpy())), 0.5).astype(float)
    signed = ratio or (norm.vmin is not None and norm.vmin < 0)
    strength = np.abs(place - 0.5) * 2 if signed else place
    return np.asarray(_MOST_OPACITY * np.sqrt(strength.clip(0, 1)))


def _as_rgba(colour: str) -> tuple[float, float, float, float]:
    """Return a colour in hexadecimal as red, green, blue and opacity, from 0 to 1."""
    red, green, blue = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red, green, blue, _MOST_OPACITY
