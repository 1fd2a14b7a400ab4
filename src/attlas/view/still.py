"""Small pictures that stand for a matrix or an atlas in a notebook, where nothing runs."""

from __future__ import annotations

import base64
import contextlib
import math
import re
import struct
import zlib
from functools import cache
from html import escape
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from attlas import stats
from attlas.atlas import Atlas
from attlas.matrix import AttentionMatrix
from attlas.view import codes
from attlas.view.service import Service

__all__ = ["preview"]

_CELLS = 1 << 24  # weights that all pictures of one output may take
_HEADS = 8  # of a matrix
_LAYERS, _PER_LAYER = 4, 6  # of an atlas
_SIDES = (16, 128)  # pixels of a picture

_LAND = (128, 128, 128, 40)  # masked: a breath of grey, on light and dark paper
_WAIT = (128, 128, 128, 90)
_FIRST = 2  # entries of the palette before the colours


def preview(shown: Atlas | AttentionMatrix) -> str:
    """Return a small static picture as HTML: what notebooks show for a matrix or an atlas.

    Parameters
    ----------
    shown : Atlas or AttentionMatrix
        What is pictured; nothing of it changes.

    Returns
    -------
    str
        The text of `repr`, and a picture of each head, or of some heads where there are many. Without scripts,
        and without anything to load.

    Notes
    -----
    Cost: at most 16.8 million weights, whatever the size. A pixel is the largest weight of its block; where all
    weights would be more than that, a row of pixels is one exact query, and the caption says how many there are of
    them. Colours are logarithmic, from a sixteenth of an even weight up to 1, as on the page.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas.view import preview
    >>> html = preview(attlas.attend(torch.zeros(2, 9, 4), torch.zeros(2, 9, 4)))
    >>> html.count("<img"), "<script" in html
    (2, False)
    """
    words = f"<pre style='margin:0 0 8px;background:none'>{escape(repr(shown))}</pre>"
    if isinstance(shown, AttentionMatrix) and 0 in shown.shape:
        return f"<div>{words}</div>"
    with contextlib.closing(Service(shown)) as service:
        figures, note = _figures(service, isinstance(shown, Atlas))
    picture = f"<div style='display:flex;flex-wrap:wrap;gap:10px 12px'>{figures}</div>" if figures else ""
    return f"<div>{words}{picture}{note}</div>"


def _figures(service: Service, several: bool) -> tuple[str, str]:
    """Return the pictures, and what a reader must know of them."""
    entries = service.source.info["entries"]
    readable = [at for at, entry in enumerate(entries) if entry["readable"]]
    chosen = [
        (at, head)
        for at in _spread(readable, _LAYERS if several else 1)
        for head in _spread(list(range(len(entries[at]["heads"]))), _PER_LAYER if several else _HEADS)
    ]
    if not chosen:
        return "", ""
    longest = max(entries[at]["n"] for at, _ in chosen)
    cells = sum(entries[at]["m"] * entries[at]["n"] for at, _ in chosen)
    side = _SIDES[1] // (2 if several else 1)
    if cells > _CELLS:
        side = max(_SIDES[0], min(side, _CELLS // (longest * len(chosen))))
    parts = []
    for at, head in chosen:
        entry = entries[at]
        picture = _sampled(service, at, head, side) if cells > _CELLS else _pooled(service, at, head, side)
        name = f"head {entry['heads'][head]}"
        name = f"layer {entry['layer']}, {name}" if several else name
        parts.append(_figure(_png(picture, entry["n"]), name, 72 if several else 112))
    total = sum(len(entries[at]["heads"]) * entries[at]["batch"] for at in readable)
    notes = [f"{len(parts)} of {total:,} heads"] if total > len(parts) else []
    notes += [f"{side} of {max(entries[at]['m'] for at, _ in chosen):,} queries"] if cells > _CELLS else []
    return "".join(parts), _note([*notes, ".view() opens all of it"])


def _pooled(service: Service, at: int, head: int, side: int) -> NDArray[np.uint16]:
    """Return the largest weight of each block, from all cells of a head."""
    A = service.source.entries[at].matrix
    if A is None:
        return np.zeros((1, 1), np.uint16)
    A = A[0, head]
    values = A.collect(stats.Picture(min(side, A.shape[0]), min(side, A.shape[1]), "max"))[0].cpu().numpy()
    return codes.encode(np.nan_to_num(values), ~np.isnan(values))


def _sampled(service: Service, at: int, head: int, side: int) -> NDArray[np.uint16]:
    """Return one exact query for each row of pixels, pooled along the keys to the largest weight."""
    answer = service.answer("thumbnail", {"entry": str(at), "head": str(head), "pool": "max", "size": str(side)})
    if answer.status != 200:
        return np.full((1, 1), codes.PENDING, np.uint16)
    return np.frombuffer(answer.body, "<u2").reshape(side, side)


def _figure(png: bytes, name: str, side: int) -> str:
    source = base64.b64encode(png).decode()
    return (
        f"<figure style='margin:0'><img src='data:image/png;base64,{source}' width='{side}' height='{side}' "
        f"style='image-rendering:pixelated;border-radius:3px' alt='Attention weights, {escape(name, quote=True)}'>"
        f"<figcaption style='font-size:11px;opacity:0.75'>{escape(name)}</figcaption></figure>"
    )


def _note(parts: list[str]) -> str:
    return f"<div style='font-size:11px;opacity:0.75;margin-top:6px'>{escape(' · '.join(parts))}</div>"


def _spread(items: list[Any], count: int) -> list[Any]:
    """Return at most `count` of some items, the first and the last among them, evenly apart."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / max(count - 1, 1))] for i in range(count)]


def _png(picture: NDArray[np.uint16], n: int) -> bytes:
    """Return codes as a PNG of indexed colours."""
    low = max(-40.0, -math.ceil(math.log2(max(n, 2))) - 4.0)
    log2 = codes.LOG2_MIN + (picture.astype(np.float64) - codes.FIRST) * -codes.LOG2_MIN / (codes.LAST - codes.FIRST)
    colours = _colours()[::2]  # two entries of the palette are taken
    place = np.clip((log2 - low) / -low, 0, 1)
    index = (_FIRST + np.rint(place * (len(colours) - 1))).astype(np.uint8)
    index[picture == codes.ZERO] = _FIRST
    index[picture == codes.MASKED] = 0
    index[picture == codes.PENDING] = 1
    height, width = index.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), index], axis=1)  # each line begins with its filter, none
    table = b"".join(bytes(colour[:3]) for colour in (_LAND, _WAIT)) + colours.tobytes()
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        _chunk(name, data)
        for name, data in (
            (b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)),
            (b"PLTE", table),
            (b"tRNS", bytes((_LAND[3], _WAIT[3]))),
            (b"IDAT", zlib.compress(lines.tobytes(), 9)),
            (b"IEND", b""),
        )
    )


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


@cache
def _colours() -> NDArray[np.uint8]:
    """Return the 256 colours that the page begins with; they are written down there, once."""
    text = resources.files("attlas.view").joinpath("static", "palettes.js").read_text("utf-8")
    found = re.search(r"viridis:\s*((?:\"[0-9a-f]+\"[\s+]*)+)", text)
    digits = "" if found is None else re.sub(r"[^0-9a-f]", "", found[1])
    return np.frombuffer(bytes.fromhex(digits), np.uint8).reshape(-1, 3)
