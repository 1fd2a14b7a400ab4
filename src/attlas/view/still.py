"""Small pictures that stand for a matrix or an atlas in a notebook, where nothing runs."""

from __future__ import annotations

import base64
import math
from html import escape
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from attlas import pictures
from attlas.errors import public
from attlas.foundation import png
from attlas.matrix import AttentionMatrix
from attlas.recording.atlas import Atlas, Entry
from attlas.stats.pooled import block_edges, count_blocks
from attlas.view import codes
from attlas.view.exact import Head
from attlas.view.source import atlas_of

_MOST_CELLS = 1 << 24  # weights that all pictures of one output may take
_MOST_HEADS = 8  # of a matrix
_MOST_LAYERS, _MOST_PICTURES_PER_LAYER = 4, 6  # of an atlas
_PICTURE_SIDES = (16, 128)  # pixels of a picture

_MASKED_COLOUR = (128, 128, 128, 40)  # masked: a little grey, on light and dark paper
# Inverted lightness with the same hues; what a notebook program says of its theme goes before the system's setting.
_INVERTED_STYLE = "{filter:invert(1) hue-rotate(180deg)}"
_DARK_STYLE = (
    "<style>"
    f"@media (prefers-color-scheme:dark){{.attlas-preview img{_INVERTED_STYLE}}}"
    "[data-jp-theme-light=true] .attlas-preview img,.vscode-light .attlas-preview img{filter:none}"
    f"[data-jp-theme-light=false] .attlas-preview img,.vscode-dark .attlas-preview img{_INVERTED_STYLE}"
    "</style>"
)


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
    them. Colours are logarithmic, from a sixteenth of an even weight up to 1; on dark paper large weights are light.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas.view import preview
    >>> html = preview(attlas.attend(torch.zeros(1, 2, 9, 4), torch.zeros(1, 2, 9, 4)))
    >>> html.count("<img"), "<script" in html
    (2, False)
    """
    words = f"{_DARK_STYLE}<pre style='margin:0 0 8px;background:none'>{escape(repr(shown))}</pre>"
    if isinstance(shown, AttentionMatrix) and 0 in shown.shape:
        return f"<div class='attlas-preview'>{words}</div>"
    several = isinstance(shown, Atlas)
    entries = shown.entries if isinstance(shown, Atlas) else atlas_of(shown).entries
    figures, note = _figures_and_note([entry for entry in entries if entry.matrix is not None], several)
    picture = f"<div style='display:flex;flex-wrap:wrap;gap:10px 12px'>{figures}</div>" if figures else ""
    return f"<div class='attlas-preview'>{words}{picture}{note}</div>"


@public("_repr_html_")
def _figures_and_note(entries: list[Entry], several: bool) -> tuple[str, str]:
    """Return the pictures, and what a reader must know of them; `several` says whether the layers are several."""
    chosen = [
        (entry, head)
        for entry in _spread_items(entries, _MOST_LAYERS)
        for head in _spread_items(list(range(len(entry.heads))), _MOST_PICTURES_PER_LAYER if several else _MOST_HEADS)
        if 0 not in entry.shape
    ]
    if not chosen:
        return "", ""
    cells = sum(entry.shape[2] * entry.shape[3] for entry, _ in chosen)
    side = _PICTURE_SIDES[1] // (2 if several else 1)
    if cells > _MOST_CELLS:
        longest = max(entry.shape[3] for entry, _ in chosen)
        side = max(_PICTURE_SIDES[0], min(side, _MOST_CELLS // (longest * len(chosen))))
    parts, signed = [], False
    for entry, head in chosen:
        A = entry.need_matrix()[:1, head : head + 1]
        picture = _sampled_codes(A, side) if cells > _MOST_CELLS else _pooled_codes(A, side)
        name = f"head {entry.heads[head]}"
        name = f"layer {entry.layer}, {name}" if several else name
        signed = signed or A.weights.are_signed
        parts.append(_html_figure(_codes_as_png(picture, entry.shape[3]), name, 72 if several else 112))
    total = sum(len(entry.heads) * entry.shape[0] for entry in entries)
    notes = [f"{len(parts)} of {total:,} heads"] if total > len(parts) else []
    batch = max(entry.shape[0] for entry, _ in chosen)
    notes += [f"sequence 0 of {batch}"] if batch > 1 else []
    most = max(entry.shape[2] for entry, _ in chosen)
    notes += [f"{count_blocks(most, side)} of {most:,} queries"] if cells > _MOST_CELLS else []
    notes += ["sizes of weights, some of which are negative"] if signed else []
    return "".join(parts), _note_of_parts([*notes, ".view() has their signs" if signed else ".view() opens all of it"])


def _pooled_codes(A: AttentionMatrix, side: int) -> NDArray[np.uint16]:
    """Return the largest weight of each block, from all cells of a head, as codes."""
    picture = pictures.blocks(A, side)[0, 0].abs().numpy()
    return codes.encode(np.nan_to_num(picture), ~np.isnan(picture))


def _sampled_codes(A: AttentionMatrix, side: int) -> NDArray[np.uint16]:
    """Return one exact query for each row of pixels, its keys pooled to the largest weight, as codes."""
    m, n = A.shape[-2:]
    high, columns = count_blocks(m, side), block_edges(range(n), count_blocks(n, side))
    table = Head(A).sampled((2 * torch.arange(high) + 1) * m // (2 * high), columns, "max")
    return codes.encode(np.abs(table.max), table.cells > 0)


def _html_figure(png: bytes, name: str, side: int) -> str:
    """Return a PNG as an HTML figure with its name."""
    source = base64.b64encode(png).decode()
    return (
        f"<figure style='margin:0'><img src='data:image/png;base64,{source}' width='{side}' height='{side}' "
        f"style='image-rendering:pixelated;border-radius:3px' alt='Attention weights, {escape(name, quote=True)}'>"
        f"<figcaption style='font-size:11px;opacity:0.75'>{escape(name)}</figcaption></figure>"
    )


def _note_of_parts(parts: list[str]) -> str:
    return f"<div style='font-size:11px;opacity:0.75;margin-top:6px'>{escape(' · '.join(parts))}</div>"


def _spread_items(items: list[Any], count: int) -> list[Any]:
    """Return at most `count` of some items, the first and the last among them, evenly apart."""
    if len(items) <= count:
        return items
    return [items[round(i * (len(items) - 1) / max(count - 1, 1))] for i in range(count)]


def _codes_as_png(picture: NDArray[np.uint16], n: int) -> bytes:
    """Return codes as a PNG of indexed colours."""
    low = max(-40.0, -math.ceil(math.log2(max(n, 2))) - 4.0)  # log2 of the least weight with a colour: about 1 / (16 n)
    log2 = codes.LOG2_MIN + (picture.astype(np.float64) - codes.FIRST) * -codes.LOG2_MIN / (codes.LAST - codes.FIRST)
    colours = np.rint(255 * pictures.palette()[::2]).astype(np.uint8)
    place = np.clip((log2 - low) / -low, 0, 1)
    index = (1 + np.rint(place * (len(colours) - 1))).astype(np.uint8)  # entry 0 of the palette is for masked cells
    index[picture == codes.MASKED] = 0
    height, width = index.shape
    lines = np.concatenate([np.zeros((height, 1), np.uint8), index], axis=1)  # each line begins with its filter, none
    palette = (b"PLTE", bytes(_MASKED_COLOUR[:3]) + colours.tobytes()), (b"tRNS", bytes(_MASKED_COLOUR[3:]))
    return png.file_of((width, height), png.INDEXED, lines.tobytes(), palette)
