"""Which request goes first: what a person waits for, then the tiles nearest the centre of what they look at."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["Focus", "Urgency", "distance", "is_quick"]

_TILE = 256  # cells of a tile along each side
_REMEMBERED = 16  # pictures whose focus is kept: more tabs than anybody looks at
_QUICK = frozenset({"info", "tokens", "search", "cell", "status", "focus"})  # a millisecond or so each
_PICTURES = frozenset({"tile", "thumbnail"})


@dataclass(frozen=True)
class Focus:
    """What a page looks at.

    Parameters
    ----------
    level : int
        Level of the tiles that it shows.
    row, column : float
        Cell at the centre.
    height, width : float
        Cells that are seen, down and across.
    """

    level: int
    row: float
    column: float
    height: float
    width: float


def is_quick(name: str) -> bool:
    """Tell whether a request takes so little that it need not wait for others."""
    return name in _QUICK


def distance(tile: Mapping[str, str], focus: Focus) -> float:
    """Return how far a tile is from a focus, in views; one more for each level that it is off.

    Parameters
    ----------
    tile : mapping
        Parameters of the request: level, y, x.
    focus : Focus
        What the page looks at.

    Returns
    -------
    float
        0 where the tile covers the centre; infinite where the parameters are none of a tile.
    """
    try:
        level, y, x = (int(tile[name]) for name in ("level", "y", "x"))
    except (KeyError, ValueError):
        return math.inf
    if not (0 <= level < 64 and abs(y) < 1 << 40 and abs(x) < 1 << 40):
        return math.inf
    side = _TILE << level
    down = max(y * side - focus.row, focus.row - (y + 1) * side, 0.0) / focus.height
    across = max(x * side - focus.column, focus.column - (x + 1) * side, 0.0) / focus.width
    return math.hypot(down, across) + abs(level - focus.level)


class Urgency:
    """Know what the pages look at, and rank requests by it; any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._focus: dict[tuple[str, ...], Focus] = {}

    def look(self, parameters: Mapping[str, str]) -> None:
        """Take a focus that a page has told; one that is none is left aside."""
        try:
            r0, r1, c0, c1 = (float(parameters[name]) for name in ("r0", "r1", "c0", "c1"))
            level = int(parameters["level"])
        except (KeyError, ValueError):
            return
        if not (all(map(math.isfinite, (r0, r1, c0, c1))) and r0 <= r1 and c0 <= c1):
            return
        focus = Focus(level, (r0 + r1) / 2, (c0 + c1) / 2, max(r1 - r0, 1.0), max(c1 - c0, 1.0))
        with self._lock:
            picture = _picture(parameters)
            self._focus.pop(picture, None)
            self._focus[picture] = focus
            while len(self._focus) > _REMEMBERED:
                del self._focus[next(iter(self._focus))]

    def rank(self, name: str, parameters: Mapping[str, str]) -> tuple[int, float]:
        """Return where a request stands; the smallest goes first, and of equal ones the oldest."""
        if name not in _PICTURES:
            return (0 if name in _QUICK else 1), 0.0
        if name == "thumbnail":
            return 3, 0.0
        with self._lock:
            focus = self._focus.get(_picture(parameters))
        return 2, math.inf if focus is None else distance(parameters, focus)


def _picture(parameters: Mapping[str, str]) -> tuple[str, ...]:
    """Return what says which matrix is looked at."""
    defaults = {"entry": "", "head": "", "batch": "0", "variant": "plain"}
    return tuple(parameters.get(name, default) for name, default in defaults.items())
