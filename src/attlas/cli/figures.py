"""The demo's two pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attlas import pictures
from attlas.cli.reading import Reading
from attlas.cli.words import count, percent, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

__all__ = ["atlas_figure", "head_figure"]


def atlas_figure(reading: Reading) -> Figure:
    """Draw every head on the text: layers down, heads across, each with the name of what it does."""
    names = []
    for layer in range(reading.layers):
        heads = reading.heads[layer * reading.per_layer : (layer + 1) * reading.per_layer]
        names.append([f"{head.layer}·{head.head}  {head.patterns[0].short}" for head in heads])
    title = f"{reading.model} reads {count(len(reading.tokens))} tokens of {reading.source}"
    row_names = [f"layer {i}  " for i in range(reading.layers)]
    words = _words(len(reading.tokens), reading.maps)
    return pictures.grid(reading.maps, names, title=title, row_names=row_names, words=words)


def _words(tokens: int, maps: Tensor) -> str:
    return pictures.weight_words((range(tokens), range(tokens)), maps.shape[-2:])


def head_figure(reading: Reading) -> Figure:
    """Draw the most telling head three times: on the text, on the repeated block, and cell by cell."""
    head, kind = reading.telling, reading.telling.patterns[0]
    n, twice, window = len(reading.tokens), 2 * reading.period, reading.window
    share = f" ({kind.definition}: {percent(head.of(kind))})" if kind.measure else ""
    figure = pictures.sheet(13.6, 5.3)
    whole, repeat, close = figure.subplots(1, 3)
    maps, twins = reading.maps[head.layer, head.head], reading.repeats[head.layer, head.head]
    pictures.draw(whole, maps, extent=(0, n, n, 0))
    pictures.draw(repeat, twins, extent=(0, twice, twice, 0))
    repeat.plot([0, twice], [reading.period] * 2, color=pictures.ACCENT, linewidth=0.8, linestyle=(0, (4, 3)))
    repeat.annotate(
        "the second time",
        (twice * 0.97, reading.period * 1.01),
        fontsize=8,
        color=pictures.ACCENT,
        ha="right",
        va="top",
    )
    pictures.draw(close, reading.closeups[head.layer, head.head])
    pictures.label(close, [visible(reading.tokens[i])[:8] for i in window])
    for ax, title, said in (
        (whole, f"{count(n)} tokens of {reading.source}", _words(n, maps)),
        (repeat, f"{reading.period} random tokens, twice", _words(twice, twins)),
        (close, f"tokens {window.start} to {window.stop - 1}", "weight of each cell"),
    ):
        ax.set_title(title, fontsize=9.5, loc="left", pad=46, parse_math=False)
        ax.set_xlabel(f"key · color: {said}", fontsize=8)
        ax.set_ylabel("query", fontsize=8.5)
    pictures.scale(figure, [whole, repeat, close])
    figure.suptitle(
        f"Layer {head.layer}, head {head.head}: {kind.name}{share}",
        x=0.01,
        ha="left",
        fontsize=12,
        color=pictures.INK,
        parse_math=False,
    )
    return figure
