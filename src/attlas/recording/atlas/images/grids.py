"""Where the tokens of an image stand: grids of patches, tiles and thumbnails, as plain data that JSON can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

IMAGES = "images"  # of the details of an atlas: the grids of its images
Box: TypeAlias = tuple[float, float, float, float]
WHOLE: Box = (0.0, 0.0, 1.0, 1.0)
_LARGEST_SIZE = 1 << 40


@dataclass(frozen=True)
class Tile:
    """A grid of patches that stands in one sequence: a whole image, one tile of it, or a thumbnail.

    Parameters
    ----------
    rows, columns : int
        Size of the grid.
    sequence : int
        The sequence of the batch.
    start : int
        Position of its first token.
    step : int
        Tokens from a row to the next: as many as columns, or more where another token ends each row.
    merge : int
        Side of the blocks in which the patches stand one after the other; 1 where they stand row by row.
    call : int
        Which pass of the module.
    box : tuple of float
        Top, left, bottom and right on the picture, as shares of its height and width; a padded tile may exceed it.
    at : tuple of int
        Row and column among the tiles of the picture.
    thumbnail : bool
        Whether it is a small copy of a picture that is also there in tiles.
    """

    rows: int
    columns: int
    sequence: int = 0
    start: int = 0
    step: int = 0
    merge: int = 1
    call: int = 0
    box: Box = WHOLE
    at: tuple[int, int] = (0, 0)
    thumbnail: bool = False

    def positions(self) -> Tensor:
        """Return the position of each patch, shape (rows, columns)."""
        rows, columns, side = torch.arange(self.rows), torch.arange(self.columns), self.merge
        if side == 1:
            return self.start + rows[:, None] * (self.step or self.columns) + columns
        block = (rows // side)[:, None] * (self.columns // side) + columns // side
        return self.start + block * side**2 + (rows % side)[:, None] * side + columns % side


@dataclass(frozen=True)
class ImageGrid:
    """The grids of one image: its tokens in the text, and its patches in the vision encoder.

    Parameters
    ----------
    text, tower : tuple of Tile
        Empty where the image has no such tokens.
    why : str
        Why the tiles are not known; "" where they are.
    """

    text: tuple[Tile, ...] = ()
    tower: tuple[Tile, ...] = ()
    why: str = ""


@dataclass(frozen=True)
class ImageGrids:
    """What a recording knows of its images.

    Parameters
    ----------
    images : tuple of ImageGrid
        In the order of the texts.
    tower : str, optional
        Path of the vision encoder; "" where the whole model is one, None where there is none.
    prefix : int
        Tokens of the vision encoder before the patches: class token, registers.
    window : int
        Side of the windows of some of its layers, in merged patches; 0 where it has none.
    chunks : bool
        Whether the vision encoder reads its images one after the other, each as a pass of its own.
    why : str
        Why nothing is known of the images; "" where it is.
    """

    images: tuple[ImageGrid, ...] = ()
    tower: str | None = None
    prefix: int = 0
    window: int = 0
    chunks: bool = False
    why: str = ""

    def in_tower(self, name: str) -> bool:
        """Return whether the module of a path is part of the vision encoder."""
        return self.tower is not None and (not self.tower or name == self.tower or name.startswith(f"{self.tower}."))

    def passes(self, lengths: Sequence[int]) -> Windows | None:
        """Return the passes in which an encoder with `chunks` reads the images, whole or in windows.

        None where it made passes of other lengths.
        """
        tiles = [tile for image in self.images for tile in image.tower]
        found = (passes_of(tiles, window) for window in dict.fromkeys((0, self.window)))
        return next((passes for passes in found if passes.lengths == list(lengths)), None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, as JSON can hold."""
        return asdict(self)


def grids_of(details: Mapping[str, Any]) -> ImageGrids:
    """Return what the details of an atlas say of its images; nothing where they say nothing that can be read."""
    data = details.get(IMAGES)
    try:
        return ImageGrids() if data is None else _grids_from(data)
    except (TypeError, ValueError, KeyError, AttributeError):
        return ImageGrids(why="the details of the recording say nothing of its images that attlas can read")


def _grids_from(data: Any) -> ImageGrids:
    """Return the grids of images that plain data describes; raise where a number is not valid."""
    images = tuple(
        ImageGrid(tuple(map(_tile_from, each["text"])), tuple(map(_tile_from, each["tower"])), str(each["why"]))
        for each in data["images"]
    )
    tower = None if data["tower"] is None else str(data["tower"])
    prefix, window = _checked_size(data["prefix"]), _checked_size(data["window"])
    return ImageGrids(images, tower, prefix, window, bool(data["chunks"]), str(data["why"]))


def _tile_from(data: Any) -> Tile:
    """Return the tile that plain data describes; raise where a number is not valid."""
    sizes = {
        name: _checked_size(data[name]) for name in ("rows", "columns", "sequence", "start", "step", "merge", "call")
    }
    if not sizes["rows"] * sizes["columns"] or sizes["rows"] * sizes["columns"] > _LARGEST_SIZE or not sizes["merge"]:
        raise ValueError("an empty grid")
    top, left, bottom, right = map(float, data["box"])
    i, j = map(_checked_size, data["at"])
    return Tile(**sizes, box=(top, left, bottom, right), at=(i, j), thumbnail=bool(data["thumbnail"]))


def _checked_size(value: Any) -> int:
    """Return a size or a place; raise a ValueError unless it is a whole number from 0 on."""
    if type(value) is not int or not 0 <= value < _LARGEST_SIZE:
        raise ValueError(f"{value!r:.60} is no size")
    return value


@dataclass
class Windows:
    """The passes of an encoder that cuts its tokens into windows: of each, the places of its tokens in the sequence."""

    lengths: list[int] = field(default_factory=list)
    of_token: list[int] = field(default_factory=list)  # pass of each token of the whole sequence,
    place: list[int] = field(default_factory=list)  # and its place there
    window: int = 0  # side of a window, in blocks of merged patches; 0 where each pass is a whole image

    def keys(self, positions: Tensor, number: int) -> Tensor:
        """Return the place of each position in a pass; -1 for one that is in another pass."""
        inside = torch.tensor(self.of_token)[positions] == number
        return torch.where(inside, torch.tensor(self.place)[positions], -1)


def passes_of(images: Sequence[Tile], window: int) -> Windows:
    """Return the passes in which an encoder reads images of merged patches, one after the other.

    Parameters
    ----------
    images : sequence of Tile
        All of them, in order.
    window : int
        Side of a window in blocks of merged patches; 0 where each image is one pass.
    """
    found = Windows(window=window)
    for tile in images:
        merge, size = tile.merge, tile.rows * tile.columns
        if not window:
            found.of_token += [len(found.lengths)] * size
            found.place += range(size)
            found.lengths.append(size)
            continue
        blocks = torch.arange(size // merge**2).view(tile.rows // merge, tile.columns // merge)
        number, place = torch.zeros(size, dtype=torch.int64), torch.zeros(size, dtype=torch.int64)
        for rows in blocks.split(window):
            for part in rows.split(window, dim=1):
                tokens = (part.flatten()[:, None] * merge**2 + torch.arange(merge**2)).flatten()
                number[tokens], place[tokens] = len(found.lengths), torch.arange(len(tokens))
                found.lengths.append(len(tokens))
        found.of_token += number.tolist()
        found.place += place.tolist()
    return found
