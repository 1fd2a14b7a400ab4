"""Places of a head that a page without a server has cell by cell where the rest of the head is blocks."""

from __future__ import annotations

from collections.abc import Iterable
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
    for bookmark in bookmarks:
        fields = {name: values[0] for name, values in parse_qs(bookmark.at.lstrip("#")).items()}
        if (fields.get("e", "0"), fields.get("h", "0")) != tuple(map(str, place)):
            continue
        pinned = fields.get("pin", "").split(".")
        try:
            i, j = map(float, pinned if len(pinned) == 2 else (fields["r"], fields["c"]))
        except (KeyError, ValueError):  # it shows the whole matrix, or is no address of the page
            continue
        if i >= 0 and j >= 0:
            cells.append((int(i), int(j)))
    return cells
