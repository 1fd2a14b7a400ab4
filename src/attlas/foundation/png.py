"""PNG files: written without another library, and pictures of three colours read again as attlas wrote them."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_MOST_PIXELS = 1 << 24
RGB, INDEXED = 2, 3  # what a pixel holds: red, green and blue, or its place in a palette
_FILTER_SUB = 1  # the filter of every row: each byte less the one of the pixel before it


def encoded(picture: Tensor) -> bytes:
    """Return a picture as a PNG file.

    Parameters
    ----------
    picture : Tensor of uint8, shape (height, width, 3)
        Red, green and blue.
    """
    height, width, _ = picture.shape
    pixels = picture.cpu().to(torch.int16)
    pixels[:, 1:] -= pixels[:, :-1].clone()
    rows = torch.cat([torch.full((height, 1), _FILTER_SUB), pixels.remainder(256).flatten(1)], dim=1).to(torch.uint8)
    return file_of((width, height), RGB, rows.numpy().tobytes())


def file_of(size: tuple[int, int], colours: int, lines: bytes, palette: Iterable[tuple[bytes, bytes]] = ()) -> bytes:
    """Return a PNG file with 8 bits for each number.

    Parameters
    ----------
    size : (int, int)
        Width and height.
    colours : int
        `RGB` or `INDEXED`.
    lines : bytes
        The rows of pixels, each after the number of its filter.
    palette : iterable of (bytes, bytes)
        Names and contents of the chunks that an indexed picture has before its pixels.
    """
    header = struct.pack(">IIBBBBB", *size, 8, colours, 0, 0, 0)
    chunks = (b"IHDR", header), *palette, (b"IDAT", zlib.compress(lines, 9)), (b"IEND", b"")
    return _PNG_SIGNATURE + b"".join(_png_chunk(name, data) for name, data in chunks)


def decoded(data: bytes) -> Tensor:
    """Return the picture of a file that `encoded` has written.

    Raises
    ------
    ValueError
        If it has not.
    """
    if data[:8] != _PNG_SIGNATURE or data[12:16] != b"IHDR" or data[37:41] != b"IDAT" or len(data) < 57:
        raise ValueError("no PNG file of attlas")
    width, height, *form = struct.unpack(">IIBBBBB", data[16:29])
    if form != [8, RGB, 0, 0, 0] or not 0 < width * height <= _MOST_PIXELS:
        raise ValueError(f"a PNG file of {height} × {width} pixels in the form {form}, which attlas does not write")
    size = height * (3 * width + 1)
    (length,) = struct.unpack(">I", data[33:37])
    reader = zlib.decompressobj()
    try:
        whole = reader.decompress(data[41 : 41 + length], size + 1)
    except zlib.error as error:
        raise ValueError(f"a PNG file that is damaged: {error}") from error
    if len(whole) != size:
        raise ValueError("a PNG file of another size than it says")
    rows = torch.frombuffer(bytearray(whole), dtype=torch.uint8).view(height, 3 * width + 1)
    if not bool((rows[:, 0] == _FILTER_SUB).all()):
        raise ValueError("a PNG file with filters that attlas does not write")
    return rows[:, 1:].reshape(height, width, 3).long().cumsum(1).remainder(256).to(torch.uint8)


def _png_chunk(name: bytes, data: bytes) -> bytes:
    """Return a chunk of a PNG: length, name, data and checksum."""
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
