"""Places of a head that a page without a server has cell by cell where the rest of the head is blocks."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import parse_qs

from attlas.recording.atlas.bookmarks import Bookmark

SIDE = 64  # cells along a side of a patch
_PATCH_STEP = 32  # patches begin at multiples of it, as the blocks of numbers that the page asks for do


def patch_about(i: int, j: int, m: int, n: int) -> tuple[range, range]:
    """Return the rows and columns of the patch about a cell of a matrix of m × n."""
    return _patch_range(i, m), _patch_range(j, n)


def _patch_range(place: int, size: int) -> range:
    """Return the run of places of one axis that the patch about a place has."""
    start = max(0, (place + _PATCH_STEP // 2) // _PATCH_STEP * _PATCH_STEP - SIDE // 2)
    return range(start, min(size, start + SIDE))


def marked_cells(bookmarks: Iterable[Bookmark], place: tuple[int, int | str]) -> list[tuple[int, int]]:
    """Return the cells that bookmarks of a head show: the pinned one, else the one in the middle of the map.

    Parameters
    ----------
    bookmarks : iterable of Bookmark
        Those of a recording.
    place : (int, int or str)
        Entry and head, as the addresses of bookmarks name them.
    """
    cells = []
    for fields in _addresses_of_head(bookmarks, place):
        cell = _pinned_cell(fields)
        if cell is None:
            with contextlib.suppress(KeyError, ValueError, OverflowError):  # it may show the whole matrix
                cell = int(float(fields["r"])), int(float(fields["c"]))
        cells += [] if cell is None or min(cell) < 0 else [cell]
    return cells


def pinned_cells(bookmarks: Iterable[Bookmark], place: tuple[int, int | str], batch: int) -> list[tuple[int, int]]:
    """Return the cells that bookmarks of a head pin, of one sequence; the places are as those of `marked_cells`."""
    addresses = _addresses_of_head(bookmarks, place)
    cells = [_pinned_cell(fields) for fields in addresses if fields.get("b", "0") == str(batch)]
    return [cell for cell in cells if cell is not None]


def _addresses_of_head(bookmarks: Iterable[Bookmark], place: tuple[int, int | str]) -> Iterator[dict[str, str]]:
    """Yield the fields of the addresses of those bookmarks that show a head."""
    for bookmark in bookmarks:
        fields = {name: values[0] for name, values in parse_qs(bookmark.at.lstrip("#")).items()}
        if (fields.get("e", "0"), fields.get("h", "0")) == tuple(map(str, place)):
            yield fields


def _pinned_cell(fields: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the pinned cell of an address; None where there is none."""
    found = re.fullmatch(r"(\d{1,12})\.(\d{1,12})", fields.get("pin", ""), re.ASCII)
    return None if found is None else (int(found[1]), int(found[2]))
