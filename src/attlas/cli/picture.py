"""``attlas picture``: one head of a recording as a heat map, all of them side by side, or the heads of a corpus."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attlas import pictures
from attlas.cli.card import draw_card
from attlas.cli.checks import check_target
from attlas.cli.files import entry_of, is_corpus, open_folder, title_of
from attlas.cli.formatting import plural
from attlas.cli.options import SIDE
from attlas.cli.terminal import Terminal, UsageError
from attlas.heads.classification import measure_entry
from attlas.pictures.pooling import suited_pool
from attlas.recording.atlas import Atlas, Entry
from attlas.stats.pooled import Pool

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_OVERVIEW_BLOCKS = 96  # blocks along a side of each of many heads, at most
_MOST_LABELLED = 48  # tokens up to which every row and column has its text


def run(arguments: Namespace, terminal: Terminal) -> None:
    """Draw, and name the file."""
    terminal.say(terminal.style(str(draw(arguments, terminal)), "bold"))


def draw(arguments: Namespace, terminal: Terminal) -> Path:
    """Read the folder, draw, and write the file.

    Returns
    -------
    Path
        The file.

    Raises
    ------
    UsageError
        If the recording or the corpus has nothing of what was asked for.
    RecordingError
        If the folder is neither, or a broken one.
    """
    check_target(arguments.out, "-o", (".png", ".svg", ".pdf"))
    pictures.sheet(1, 1)  # without matplotlib, say so now
    if arguments.size is not None and not 1 <= arguments.size <= 8192:
        raise UsageError("--size must be between 1 and 8192.", f"--size {arguments.size}", f"--size {SIDE}")
    if arguments.card or is_corpus(arguments.atlas):
        _refuse_options_of_weights(arguments)
    if is_corpus(arguments.atlas):
        from attlas.cli.corpus_card import draw_corpus  # with the viewer, which pictures of recordings do without

        return pictures.save(draw_corpus(arguments, terminal), arguments.out)
    atlas = open_folder(arguments.atlas)
    if not atlas.entries:
        rule = "the recording must have an attention."
        raise UsageError(rule, f"none in {arguments.atlas}", "attlas record -o run.atlas")
    entries = _last_passes(atlas, arguments.layer)
    if arguments.card:
        _check_head(entries, arguments.head)
        one = entries[0] if arguments.layer is not None else None
        with terminal.step("drawing the card"):
            figure = draw_card(atlas, one, arguments.head, title_of(atlas, arguments.atlas))
    elif arguments.head is None:
        figure = _figure_of_all_heads(atlas, entries, arguments, terminal)
    elif len(entries) > 1:
        raise UsageError("--head goes with --layer.", f"--head {arguments.head} without --layer", "--layer 0 --head 0")
    else:
        figure = _figure_of_head(atlas, entries[0], arguments, terminal)
    return pictures.save(figure, arguments.out)


def _refuse_options_of_weights(arguments: Namespace) -> None:
    """Raise a UsageError where an option is given that is about a picture of weights alone."""
    for name in ("rows", "columns", "size", "pool", "scale", "theme"):
        value = getattr(arguments, name)
        if value is not None:
            other = "--card" if arguments.card else f"a corpus: {arguments.atlas}"
            rule = f"--{name} goes with a picture of the weights of a recording."
            raise UsageError(rule, f"--{name} {value} and {other}", f"leave --{name} out")


def _check_head(entries: Sequence[Entry], head: int | None) -> None:
    """Raise a UsageError unless a head is one of some layers, or none is named."""
    there = sorted({each for entry in entries for each in entry.heads})
    if head is not None and head not in there:
        found = f"--head {head}; there are {', '.join(map(str, there))}"
        raise UsageError("--head must be one of the layer's.", found, f"--head {there[0]}")


def _last_passes(atlas: Atlas, layer: str | None) -> list[Entry]:
    """Return the last pass of each layer of the main kind, or of the one that is named."""
    if layer is None:
        return [atlas.entry(number) for number in atlas.layers()]
    return [entry_of(atlas, int(layer) if layer.removeprefix("-").isdecimal() else layer)]


def _figure_of_head(atlas: Atlas, entry: Entry, arguments: Namespace, terminal: Terminal) -> Figure:
    """Draw one head, cell by cell with its tokens where there are few."""
    head = arguments.head
    _check_head([entry], head)
    rows, columns = _drawn_window(entry, arguments)
    with terminal.step(f"drawing layer {entry.layer}, head {head}"):
        [pool], picture = _pooled_blocks(
            entry, [entry.heads.index(head)], rows, columns, arguments.size or SIDE, arguments
        )
        blocks = picture[0]
    name = f"{atlas.model + ', ' if atlas.model else ''}layer {entry.layer}, head {head}"
    if entry.kind != "self":
        name += f" ({entry.kind})"
    name += _sequence_in_words(entry)
    log = arguments.scale != "linear"
    labels = _token_labels(atlas, entry, rows, columns, blocks)
    if labels:
        return pictures.plot(blocks, labels=labels, title=name, log=log, theme=arguments.theme or "light")
    title = f"{name}: {len(rows):,} queries × {len(columns):,} keys"
    words = pictures.weight_words((rows, columns), blocks.shape[-2:], pool)
    top, left = entry.queries[0] + rows.start, entry.first_key + columns.start
    window = range(top, top + len(rows)), range(left, left + len(columns))
    options = {"log": log, "window": window, "theme": arguments.theme or "light"}
    return pictures.grid(blocks[None, None], title=title, words=words, **options)


def _figure_of_all_heads(atlas: Atlas, entries: list[Entry], arguments: Namespace, terminal: Terminal) -> Figure:
    """Draw every head, layers down and heads across; a head that was not recorded stays empty."""
    heads = sorted({head for entry in entries for head in entry.heads})
    size = arguments.size or _OVERVIEW_BLOCKS
    parts: list[Tensor] = []
    pools: dict[tuple[Entry, int], Pool] = {}  # of each head
    windows = [_drawn_window(entry, arguments) for entry in entries]
    with terminal.step(f"drawing {plural(sum(len(entry.heads) for entry in entries), 'head')}", len(entries)) as tick:
        for entry, (rows, columns) in zip(entries, windows, strict=True):
            pooled, part = _pooled_blocks(entry, range(len(entry.heads)), rows, columns, size, arguments)
            pools |= {(entry, head): pool for head, pool in zip(entry.heads, pooled, strict=True)}
            parts.append(part)
            tick()
    if len({(len(rows), len(columns)) for rows, columns in windows}) > 1:
        rule = "the layers must be of one size to stand side by side."
        raise UsageError(rule, "layers of different lengths", f"--layer {entries[0].layer}")
    maps = torch.full((len(entries), len(heads), *parts[0].shape[1:]), torch.nan)
    for layer, (entry, part) in enumerate(zip(entries, parts, strict=True)):
        maps[layer, [heads.index(head) for head in entry.heads]] = part.to(maps)
    kinds = {(entry, head.head): head.patterns[0].short for entry in entries for head in measure_entry(atlas, entry)}
    common: Pool = "mean" if set(pools.values()) == {"mean"} else "max"
    other = {key: ", mean" if pool != common else "" for key, pool in pools.items()}
    names = [
        [f"{entry.layer}·{head}  {kinds.get((entry, head), '')}{other.get((entry, head), '')}" for head in heads]
        for entry in entries
    ]
    title = f"{atlas.model}: " if atlas.model else ""
    title += (
        f"{_range_in_words('queries', rows, entries[0].shape[2])} × "
        f"{_range_in_words('keys', columns, entries[0].shape[3])}"
    )
    title += _sequence_in_words(entries[0])
    return pictures.grid(
        maps,
        names,
        theme=arguments.theme or "light",
        title=title,
        row_names=[f"layer {entry.layer}  " for entry in entries],
        words=pictures.weight_words((rows, columns), maps.shape[-2:], common),
        log=arguments.scale != "linear",
        window=(rows, columns),
    )


def _sequence_in_words(entry: Entry) -> str:
    """Return which sequence of a batch is drawn, where there are several."""
    return f", sequence 0 of {entry.shape[0]}" if entry.shape[0] > 1 else ""


def _range_in_words(what: str, window: range, size: int) -> str:
    """Return how many queries or keys are drawn, and which, where it is a part of them."""
    which = "" if len(window) == size else f" ({window.start}:{window.stop})"
    return f"{len(window):,} {what}{which}"


def _pooled_blocks(
    entry: Entry, heads: Sequence[int], rows: range, columns: range, size: int, arguments: Namespace
) -> tuple[list[Pool], Tensor]:
    """Return what stands for a block of some heads of batch 0, and their picture, shape (heads, height, width).

    The picture is computed, or that which was kept.
    """
    if entry.matrix is not None:
        matrices = [entry.matrix[0, [head]] for head in heads]
        pools = [arguments.pool or suited_pool(A, rows, columns) for A in matrices]
        drawn = [pictures.blocks(A, size, pool, rows, columns) for A, pool in zip(matrices, pools, strict=True)]
        return pools, torch.cat(drawn)
    kept = entry.statistics.get("picture")
    if not isinstance(kept, Tensor):
        fix = "attlas record --keep disk, or --statistics with picture among them"
        raise UsageError("a picture is made from queries and keys, or was recorded.", f"neither of {entry.name}", fix)
    size_kept = max(kept.shape[-2:])
    has_other_size = arguments.size is not None and min(arguments.size, max(entry.shape[2:])) != size_kept
    if (len(rows), len(columns)) != entry.shape[2:] or arguments.pool == "mean" or has_other_size:
        rule = "another window, pool or size is computed from queries and keys, and these were not kept."
        found = f"a recording of statistics only, with a picture of the whole matrix, --pool max, --size {size_kept}"
        raise UsageError(rule, found, "leave --rows, --columns, --pool and --size out, or attlas record --keep disk")
    return ["max"] * len(heads), kept[0, list(heads)].float()


def _drawn_window(entry: Entry, arguments: Namespace) -> tuple[range, range]:
    """Return the queries and keys that were asked for."""
    ranges = []
    for name, size in (("rows", entry.shape[2]), ("columns", entry.shape[3])):
        given = getattr(arguments, name)
        try:
            ends = [int(word) if word.strip() else None for word in (given or ":").split(":")]
            window = range(*slice(*ends).indices(size)) if len(ends) == 2 else range(0)
        except ValueError:
            window = range(0)
        if not len(window):
            rule = f"--{name} must be a part of the {size:,} there are, A:B."
            raise UsageError(rule, f"--{name} {given}", f"--{name} 0:64")
        ranges.append(window)
    return ranges[0], ranges[1]


def _token_labels(
    atlas: Atlas, entry: Entry, rows: range, columns: range, blocks: Tensor
) -> tuple[list[str], list[str]] | None:
    """Return the texts of the queries and keys of sequence 0 where every cell is shown and all texts are known."""
    places = entry.queries[0] + rows.start, entry.first_key + columns.start
    sizes = len(rows), len(columns)
    queries, keys = (
        texts[0][start : start + size] if texts else []
        for texts, start, size in zip(atlas.texts_of(entry), places, sizes, strict=True)
    )
    fits = sizes == (len(queries), len(keys)) == blocks.shape[-2:] and max(sizes) <= _MOST_LABELLED
    return (queries, keys) if fits else None
