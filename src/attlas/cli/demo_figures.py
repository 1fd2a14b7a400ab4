"""The demo's two pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from attlas import pictures
from attlas.cli import head_statistics
from attlas.cli.demo_run import DemoResult
from attlas.cli.formatting import percent, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor


def atlas_figure(result: DemoResult) -> Figure:
    """Draw every head on the text: layers down, heads across, each with the name of what it does."""
    entries = result.atlas.entries
    names = [
        [f"{head.layer}·{head.head}  {head.patterns[0].short}" for head in result.heads if head.layer == entry.layer]
        for entry in entries
    ]
    maps = torch.stack([entry.statistics["picture"][0].float().cpu() for entry in entries])
    row_names = [f"layer {entry.layer}  " for entry in entries]
    words = _words(entries[0].shape[2], maps)
    return pictures.grid(maps, names, title=result.title, row_names=row_names, words=words)


def _words(tokens: int, maps: Tensor) -> str:
    return pictures.weight_words((range(tokens), range(tokens)), maps.shape[-2:])


def head_figure(result: DemoResult) -> Figure:
    """Draw the most telling head three times: on the text, on the repeated block, and cell by cell."""
    head, kind, tokens = result.most_telling, result.most_telling.patterns[0], result.atlas.tokens or []
    n, twice = len(tokens), result.repeated[0].shape[-1]
    share = f" ({kind.definition}: {percent(head.of(kind))})" if kind.measure else ""
    figure = pictures.sheet(13.6, 5.3)
    whole, repeat, close = figure.subplots(1, 3)
    map_of_text = result.atlas.entry(head.layer).statistics["picture"][0, head.head].float().cpu()
    side = head_statistics.side_of(len(result.heads))
    map_of_block = pictures.blocks(result.repeated[head.layer][0, [head.head]], side)[0]
    pictures.draw(whole, map_of_text, extent=(0, n, n, 0))
    pictures.draw(repeat, map_of_block, extent=(0, twice, twice, 0))
    style = {"color": pictures.ACCENT}
    repeat.plot([0, twice], [twice / 2] * 2, linewidth=0.8, linestyle=(0, (4, 3)), **style)
    repeat.annotate("the second time", (twice * 0.97, twice * 0.505), fontsize=8, ha="right", va="top", **style)
    window, cells = result.closeup()
    pictures.draw(close, cells)
    pictures.label(close, [visible(text)[:8] for text in tokens[window.start : window.stop]])
    for ax, title, said in (
        (whole, f"{n:,} tokens of {result.atlas.details['source']}", _words(n, map_of_text)),
        (repeat, f"{twice // 2} random tokens, twice", _words(twice, map_of_block)),
        (close, f"tokens {window.start} to {window.stop - 1}", "weight of each cell"),
    ):
        ax.set_title(title, fontsize=9.5, loc="left", pad=46, parse_math=False)
        ax.set_xlabel(f"key · color: {said}", fontsize=8)
        ax.set_ylabel("query", fontsize=8.5)
    pictures.scale(figure, [whole, repeat, close])
    title = f"Layer {head.layer}, head {head.head}: {kind.name}{share}"
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=pictures.INK, parse_math=False)
    return figure
