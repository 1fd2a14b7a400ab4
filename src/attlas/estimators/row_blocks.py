"""Passes over all pairs of rows and keys, in blocks of whole rows, several blocks at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

Part = TypeVar("Part")

# Pairs that are looked at together. On a CPU a few tensors of this size stay in a core's cache.
_PAIRS_AT_ONCE = 1 << 16
_CELLS_OF_ACCELERATOR = 1 << 24


def row_blocks(count: int, columns: int, device: torch.device, *, width: int = 1) -> Iterator[slice]:
    """Divide the rows into blocks of at least one whole row, with about as many cells as are fast."""
    cells = _PAIRS_AT_ONCE if device.type == "cpu" else _CELLS_OF_ACCELERATOR
    step = max(1, cells // max(1, columns * width))
    for start in range(0, count, step):
        yield slice(start, min(count, start + step))


@contextmanager
def one_thread(device: torch.device) -> Iterator[int]:
    """Let each operation of torch on a CPU be the work of one thread, and yield how many threads there were.

    Notes
    -----
    A search is thousands of short operations. Shared between threads, each would end with all of them waiting for the
    slowest, which takes a hundred times as long as the operation on a machine that has other work.
    """
    before = torch.get_num_threads()
    if device.type != "cpu" or before < 2:
        yield 1
        return
    torch.set_num_threads(1)
    try:
        yield before
    finally:
        torch.set_num_threads(before)


def map_blocks(work: Callable[[slice], Part], rows: Iterable[slice], threads: int) -> list[Part]:
    """Apply a function to each block, and return its results in the same order, without gradients.

    Notes
    -----
    Use it within `one_thread`: each of `threads` threads computes one block at a time. Results do not depend on their
    number.
    """

    def alone(part: slice) -> Part:
        """Compute one block without a graph; each thread has a grad mode of its own."""
        with torch.no_grad():
            return work(part)

    parts = list(rows)
    if min(threads, len(parts)) < 2:
        return [alone(part) for part in parts]
    with ThreadPoolExecutor(min(threads, len(parts)), "attlas-rows", torch.set_num_threads, (1,)) as pool:
        return list(pool.map(alone, parts))
