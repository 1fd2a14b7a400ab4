"""The pictures of a recording, and which keys of each entry are their patches, as the page draws them."""

from __future__ import annotations

import base64
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attlas.foundation.png import encoded
from attlas.recording.atlas import Atlas, Entry
from attlas.recording.atlas.images.grids import Tile, Windows, grids_of

_LONGEST_SIDE = 384  # pixels of a side of a picture on the page
_MOST_PATCHES = 1 << 20  # of all grids of a page


class _ImagePass(NamedTuple):
    """A pass of an encoder that reads images, or their windows, one after the other."""

    call: int
    passes: Windows | None  # all of them; None where they are not those of the images

    @property
    def key(self) -> tuple[int, int | None]:
        """What tells it from other passes."""
        return self.call, None if self.passes is None else self.passes.window

    def keys(self, positions: Tensor) -> Tensor:
        """Return the key of each patch; -1 for one that is no key of the pass."""
        return torch.full_like(positions, -1) if self.passes is None else self.passes.keys(positions, self.call)


def _keys_of_patches(tile: Tile, part: _ImagePass | None) -> Tensor:
    """Return the key of each patch; -1 for one that is no key of the pass."""
    return tile.positions() if part is None else part.keys(tile.positions())


class ShownImages:
    """The grids of a recording, each once, and the pictures that they lie on.

    Parameters
    ----------
    atlas : Atlas
        The recording.
    """

    def __init__(self, atlas: Atlas) -> None:
        self._atlas = atlas
        self._grids = grids_of(atlas.details)
        self._numbers: dict[tuple[Any, ...], int] = {}
        self._patches = 0
        self.listed: list[dict[str, Any]] = []

    @property
    def pictures(self) -> list[str | None]:
        """The pictures as addresses that hold them; None for one that the recording does not have."""
        count = max(len(self._grids.images), len(self._atlas.images))
        given = [*self._atlas.images, *[None] * count][:count]
        return [None if picture is None else _data_address(picture) for picture in given]

    def of(self, entry: Entry) -> list[int]:
        """Return the numbers of the grids that an entry has among its keys."""
        grids, found, part = self._grids, [], self._pass_of(entry)
        for number, image in enumerate(grids.images):
            if not grids.in_tower(entry.name):
                tiles = image.text if self._atlas.has_text(entry) else ()
            elif grids.chunks:
                tiles = image.tower
            else:
                whole = [tile for tile in image.tower if entry.shape[3] == grids.prefix + tile.rows * tile.columns]
                tiles = tuple(tile for tile in whole if tile.call == entry.call)
            for sequence in sorted({tile.sequence for tile in tiles}):
                own = tuple(tile for tile in tiles if tile.sequence == sequence)
                found.append(self._number_of_grid(number, sequence, own, part))
        return [number for number in found if number is not None]

    def _pass_of(self, entry: Entry) -> _ImagePass | None:
        """Return which pass of an encoder an entry is; None where the encoder reads all images in one."""
        if not self._grids.in_tower(entry.name) or not self._grids.chunks:
            return None
        passes = self._grids.passes([own.shape[3] for own in self._atlas.entries if own.name == entry.name])
        return _ImagePass(-1 if passes is None else entry.call, passes)

    def _number_of_grid(
        self, image: int, sequence: int, tiles: tuple[Tile, ...], part: _ImagePass | None
    ) -> int | None:
        """Return the number of a grid, which is listed when it is first asked for; None where it has no key."""
        key = (image, sequence, tiles, None if part is None else part.key)
        if key not in self._numbers:
            drawn = [_drawn_tile(tile, _keys_of_patches(tile, part)) for tile in tiles]
            self._patches += sum(tile.rows * tile.columns for tile in tiles)
            kept = any(max(tile["keys"]) >= 0 for tile in drawn) and self._patches <= _MOST_PATCHES
            self._numbers[key] = len(self.listed) if kept else -1
            if kept:
                self.listed.append({"image": image, "sequence": sequence, "tiles": drawn})
        return None if self._numbers[key] < 0 else self._numbers[key]


def _drawn_tile(tile: Tile, keys: Tensor) -> dict[str, Any]:
    size = {"rows": tile.rows, "columns": tile.columns, "box": list(tile.box)}
    return {**size, "thumbnail": tile.thumbnail, "keys": keys.flatten().tolist()}


def _data_address(picture: Tensor) -> str:
    """Return a picture as an address of a page that holds it."""
    step = -(-max(picture.shape[:2]) // _LONGEST_SIDE)
    data = base64.b64encode(encoded(picture[::step, ::step].contiguous())).decode("ascii")
    return f"data:image/png;base64,{data}"
