"""Passes over all pairs of rows and keys, a strip of whole rows at a time, several strips at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

__all__ = ["over_strips", "strips"]

Part = TypeVar("Part")

# Pairs that are looked at together. On a CPU a few tensors of this size stay in a core's cache.
_CELLS = 1 << 16
_CELLS_OF_ACCELERATOR = 1 << 24


def strips(count: int, columns: int, device: torch.device, *, width: int = 1) -> Iterator[slice]:
    """Cut rows into strips of whole rows: of about as many cells as are fast, and of one row at least."""
    cells = _CELLS if device.type == "cpu" else _CELLS_OF_ACCELERATOR
    step = max(1, cells // max(1, columns * width))
    for start in range(0, count, step):
        yield slice(start, min(count, start + step))


def over_strips(work: Callable[[slice], Part], rows: Iterable[slice], device: torch.device) -> list[Part]:
    """Return what a function makes of each strip, in their order, without gradients.

    Notes
    -----
    On a CPU each strip is the work of one thread, of as many as torch has. A strip is a dozen short operations;
    shared between threads, each would end with all of them waiting for the slowest, which takes a hundred times as
    long as the operation on a machine that has other work. Results do not depend on the number of threads.
    """

    def alone(part: slice) -> Part:
        with torch.no_grad():
            return work(part)

    parts = list(rows)
    threads = min(torch.get_num_threads(), len(parts))
    if device.type != "cpu" or threads < 2:
        return [alone(part) for part in parts]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads, "attlas-strips", torch.set_num_threads, (1,)) as pool:
            return list(pool.map(alone, parts))
    finally:
        torch.set_num_threads(before)
