"""Tensors in safetensors files: written in slices with their checksum, and mapped from disk."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from attlas.errors import DtypeError

_SLICE_BYTES = 1 << 20  # bytes that are copied at once; larger ones leave holes in the heap of a process
# The names that safetensors gives to dtypes.
_DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


class Written(NamedTuple):
    """Size and checksum of a file that was written."""

    size: int
    sha256: str


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> Written:
    """Write tensors to a new safetensors file, and wait until they are on disk.

    Parameters
    ----------
    path : Path
        A file that is not there.
    tensors : mapping
        Tensors of any device and stride.

    Returns
    -------
    Written
        Size and checksum.

    Notes
    -----
    Memory: a slice of 1 MiB. safetensors' own writer copies each tensor whole, and its file would have to be
    read again for the checksum.
    """
    total, (header, places, size) = hashlib.sha256(), header_of(tensors)
    with path.open("xb") as file:
        total.update(header)
        file.write(header)
        for name in places:
            for part in _byte_slices(tensors[name]):
                total.update(part)
                file.write(part)
        file.flush()
        os.fsync(file.fileno())
    return Written(size, total.hexdigest())


def write_bytes(path: Path, data: bytes) -> Written:
    """Write a new file, and wait until it is on disk; return its size and checksum."""
    with path.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    return Written(len(data), hashlib.sha256(data).hexdigest())


def header_of(tensors: Mapping[str, Tensor]) -> tuple[bytes, dict[str, int], int]:
    """Return the first bytes of a safetensors file, where each tensor begins in the order of the file, and its size."""
    # The widest first, so that each tensor lies at a multiple of its own size.
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    header, offset, starts = {}, 0, {}
    for name in order:
        t = tensors[name]
        starts[name], end = offset, offset + t.numel() * t.element_size()
        header[name] = {"dtype": _DTYPE_NAMES[t.dtype], "shape": list(t.shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: begin + at for name, at in starts.items()}, begin + offset


def storable(name: str, t: Tensor) -> Tensor:
    """Return a tensor without expanded axes, if it can be stored.

    Raises
    ------
    DtypeError
        If it is no plain tensor of a dtype that files know.
    """
    if t.dtype not in _DTYPE_NAMES or t.layout is not torch.strided or t.device.type == "meta":
        rule = "a tensor that is stored must be dense, of real numbers, whole numbers or True and False."
        found = f"{t.dtype} {t.layout}".replace("torch.", "")
        raise DtypeError(rule, found, f"give {name} as float32: t.float().", arguments={name: t})
    t = t.detach()
    for axis, stride in enumerate(t.stride()):
        if stride == 0 and t.shape[axis] > 1:
            t = t.narrow(axis, 0, 1)
    return t


def fingerprint(t: Tensor) -> str:
    """Return a text that two tensors share if they hold the same numbers in the same order."""
    total = hashlib.sha256(str(t.dtype).encode())
    for part in _byte_slices(t):
        total.update(part)
    return total.hexdigest()


def sha256_of(path: Path) -> str:
    """Return the checksum of a file, read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _byte_slices(t: Tensor) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in order, copying at most a slice at a time."""
    if t.numel() == 0:
        return
    if t.numel() * t.element_size() > _SLICE_BYTES and t.ndim > 0:
        if t.shape[0] > 1:
            step = max(1, t.shape[0] * _SLICE_BYTES // (t.numel() * t.element_size()))
            for part in t.split(step):
                yield from _byte_slices(part)
        else:
            yield from _byte_slices(t[0])
        return
    # A view of existing memory as bytes; an axis of size 1 may have any stride, so the strides are given again.
    t = t.cpu().resolve_neg().contiguous()
    yield memoryview(t.as_strided((t.numel(),), (1,)).view(torch.uint8).numpy())  # type: ignore[arg-type]  # a buffer
