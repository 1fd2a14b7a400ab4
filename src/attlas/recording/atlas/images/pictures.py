"""The pictures that a model was shown, as a recording keeps them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attlas.errors import DtypeError, ShapeError, kind

LONGEST = 1024  # pixels of a side of a picture that is kept
_CHANNEL_COUNTS = (1, 3, 4)


def picture_of(image: Any) -> Tensor:
    """Return a picture as red, green and blue.

    Parameters
    ----------
    image : PIL image, array or Tensor
        Of shape (height, width), (height, width, channels) or (channels, height, width); whole numbers from 0 to 255,
        or fractions of 1. A fourth channel is left out.

    Returns
    -------
    Tensor of uint8, shape (height, width, 3)

    Raises
    ------
    DtypeError, ShapeError
        If it is no picture.
    """
    if hasattr(image, "convert"):  # of Pillow
        image = np.asarray(image.convert("RGB"))
    if isinstance(image, np.ndarray):
        image = torch.from_numpy(np.ascontiguousarray(image))
    fix = "images=[picture], a PIL image, or an array of shape (height, width, 3)."
    if not isinstance(image, Tensor):
        raise DtypeError("a picture must be a PIL image, an array or a tensor.", kind(image), fix)
    t = image.detach().cpu()
    if t.ndim == 2:
        t = t.unsqueeze(-1)
    if t.ndim == 3 and t.shape[0] in _CHANNEL_COUNTS and t.shape[-1] not in _CHANNEL_COUNTS:
        t = t.permute(1, 2, 0)
    if t.ndim != 3 or t.shape[-1] not in _CHANNEL_COUNTS or not t.numel():
        rule = "a picture must have a height, a width and 1, 3 or 4 channels."
        raise ShapeError(rule, f"shape {tuple(image.shape)}", fix)
    low, high = float(t.min()), float(t.max())
    if not 0 <= low <= high <= (1 if t.is_floating_point() else 255):
        rule = "the numbers of a picture must be from 0 to 255, or fractions of 1."
        raise ShapeError(rule, f"{low:g} to {high:g}", "picture / 255, or the picture before it was normalized.")
    t = (t * 255).round() if t.is_floating_point() else t
    t = t[..., :3].to(torch.uint8)
    return t.expand(*t.shape[:2], 3).contiguous()


def pictures_of(images: Any) -> list[Tensor | None]:
    """Return some pictures as `picture_of` does; None stays. A single picture is the first."""
    if images is None:
        return []
    single = hasattr(images, "convert") or (isinstance(images, Tensor | np.ndarray) and images.ndim < 4)
    if not single and not isinstance(images, Iterable):
        raise DtypeError("images must be pictures, in their order in the text.", kind(images), "images=[picture]")
    return [None if image is None else picture_of(image) for image in ([images] if single else images)]


def shrunk(picture: Tensor) -> Tensor:
    """Return a picture whose longer side has at most `LONGEST` pixels, each the mean of those that it stands for."""
    height, width, _ = picture.shape
    if max(height, width) <= LONGEST:
        return picture
    scale = LONGEST / max(height, width)
    size = max(round(height * scale), 1), max(round(width * scale), 1)
    small = torch.nn.functional.interpolate(picture.permute(2, 0, 1).unsqueeze(0).float(), size, mode="area")
    return small[0].permute(1, 2, 0).round().to(torch.uint8)
