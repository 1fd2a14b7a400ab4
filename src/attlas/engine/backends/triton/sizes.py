"""How a matrix is cut: rows and keys of a tile, warps of a program, and how many programs share a row."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

#: Programs below which several share the keys of a row, for each multiprocessor; and fewest keys of a share.
_PROGRAMS_PER_PROCESSOR, _LEAST_KEYS_OF_PROGRAM = 2, 512
_USUAL_MULTIPROCESSORS = 132  # where torch cannot tell how many there are


class Shape(NamedTuple):
    """Size of a tile, and how a program computes it.

    Parameters
    ----------
    rows, columns : int
        Queries of a program, and keys that it reads at a time.
    warps, stages : int
        Of a program; and how many loads are under way at a time.
    """

    rows: int
    columns: int
    warps: int
    stages: int

    @property
    def settings(self) -> dict[str, int]:
        """The settings of a launch, by the names that Triton gives them."""
        return {"num_warps": self.warps, "num_stages": self.stages}


def shape_of(
    kernel: str,
    dtype: torch.dtype,
    width: int,
    m: int,
    *,
    changed: bool = False,
    pairs: bool = False,
    major: int = 9,
) -> Shape:
    """Return the shape that a kernel runs in, for tokens of a dtype and width, and m queries.

    `changed` says that more is done to a dot product than to scale it, which takes registers for each cell, and `pairs`
    that it is none: then width is that of values. `major` is the compute capability of the device: products of 8 and 12
    are in the registers of a warp, so that more warps share a tile.

    The sizes are those for which the machine code has no spill in its loop and fits the shared memory of each GPU;
    ``benchmarks/gpu_model.py`` reads it.
    """
    found = _whole_shape(kernel, dtype, width, changed=changed, pairs=pairs, major=major)
    while found.rows > 16 and found.rows >= 2 * m and kernel != "diagonals":  # whose tiles are squares
        found = found._replace(rows=found.rows // 2)
    return found


def _whole_shape(kernel: str, dtype: torch.dtype, width: int, *, changed: bool, pairs: bool, major: int) -> Shape:
    """Return the shape for many queries."""
    wide = width > 128
    of_float32 = dtype is torch.float32  # without matrix units, from registers
    of_warps = major in (8, 12)  # whose products are in the registers of a warp
    if kernel == "units":
        return Shape(8, 4, 1, 1)
    if kernel == "diagonals":
        return Shape(32, 32, 4, 1)
    if pairs:  # a warp reads 32 keys at a time, and one query for all of them
        return Shape(16, 128, 4, 1)
    if kernel in ("by_query", "by_key"):
        small = wide or of_float32 or (kernel == "by_key" and major == 12 and width > 64)
        return Shape(32, 32, 8 if wide and kernel == "by_key" else 4, 1) if small else Shape(64, 32, 4, 1)
    if kernel == "cells":
        return Shape(32, 32, 4, 1 if wide else 2) if of_float32 else Shape(64, 64, 4, 1)
    if of_float32:
        found = Shape(32, 32, 4, 1 if wide else 2)
    elif wide and kernel == "online" and of_warps:
        return Shape(32, 32, 4, 1)
    elif changed:
        found = Shape(64, 32, 4, 1)
    elif kernel == "weights" and major == 10 and not wide:
        found = Shape(64, 64, 4, 2)
    elif kernel in ("weights", "select"):
        found = Shape(64, 64, 4, 1) if wide else Shape(128, 64, 4, 2)
    else:  # "online" and "moments", which hold more numbers of each row
        found = Shape(64, 32, 4, 1) if wide else Shape(64, 64, 4, 2)
    return found._replace(warps=8) if of_warps and kernel != "moments" else found


@cache
def _multiprocessor_count(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has; a usual number where torch cannot tell."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return _USUAL_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def major_of(device: torch.device) -> int:
    """Return the first number of a device's compute capability; 9 where torch cannot tell."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 9
    return int(torch.cuda.get_device_capability(device)[0])


def splits_of(programs: int, n: int, like: Tensor) -> int:
    """Return how many programs share the keys of a row: more than one where there are few rows and many keys."""
    wanted = -(-_PROGRAMS_PER_PROCESSOR * _multiprocessor_count(like.device) // max(programs, 1))
    return max(min(wanted, n // _LEAST_KEYS_OF_PROGRAM), 1)
