"""The demo's two pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from attlas import pictures
from attlas.cli.demo_result import DemoResult
from attlas.cli.formatting import count, percent, visible

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

__all__ = ["atlas_figure", "head_figure"]


def atlas_figure(result: DemoResult) -> Figure:
    """Draw every head on the text: layers down, heads across, each with the name of what it does."""
    names = []
    for layer in range(result.layers):
        heads = result.heads[layer * result.per_layer : (layer + 1) * result.per_layer]
        names.append([f"{head.layer}·{head.head}  {head.patterns[0].short}" for head in heads])
    title = f"{result.model} reads {count(len(result.tokens))} tokens of {result.source}"
    row_names = [f"layer {i}  " for i in range(result.layers)]
    words = _words(len(result.tokens), result.maps)
    return pictures.grid(result.maps, names, title=title, row_names=row_names, words=words)


def _words(tokens: int, maps: Tensor) -> str:
    return pictures.weight_words((range(tokens), range(tokens)), maps.shape[-2:])


def head_figure(result: DemoResult) -> Figure:
    """Draw the most telling head three times: on the text, on the repeated block, and cell by cell."""
    head, kind = result.most_telling, result.most_telling.patterns[0]
    n, twice, window = len(result.tokens), 2 * result.period, result.window
    share = f" ({kind.definition}: {percent(head.of(kind))})" if kind.measure else ""
    figure = pictures.sheet(13.6, 5.3)
    whole, repeat, close = figure.subplots(1, 3)
    maps, twins = result.maps[head.layer, head.head], result.repeats[head.layer, head.head]
    pictures.draw(whole, maps, extent=(0, n, n, 0))
    pictures.draw(repeat, twins, extent=(0, twice, twice, 0))
    repeat.plot([0, twice], [result.period] * 2, color=pictures.ACCENT, linewidth=0.8, linestyle=(0, (4, 3)))
    repeat.annotate(
        "the second time",
        (twice * 0.97, result.period * 1.01),
        fontsize=8,
        color=pictures.ACCENT,
        ha="right",
        va="top",
    )
    pictures.draw(close, result.closeups[head.layer, head.head])
    pictures.label(close, [visible(result.tokens[i])[:8] for i in window])
    for ax, title, said in (
        (whole, f"{count(n)} tokens of {result.source}", _words(n, maps)),
        (repeat, f"{result.period} random tokens, twice", _words(twice, twins)),
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
