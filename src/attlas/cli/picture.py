"""``attlas picture``: one head of a recording as a heat map, or all of them side by side."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attlas import pictures
from attlas.atlas import Atlas, Entry
from attlas.cli.files import check_target, entry_of, open_folder
from attlas.cli.formatting import count
from attlas.cli.options import SIDE
from attlas.cli.terminal import Terminal, UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["run"]

_OVERVIEW = 96  # blocks along a side of each of many heads, at most
_LABELLED = 48  # tokens up to which every row and column has its text


def run(arguments: argparse.Namespace, terminal: Terminal) -> None:
    """Read the folder, draw, and write the file."""
    check_target(arguments.out, "-o", (".png", ".svg", ".pdf"), "picture")
    pictures.sheet(1, 1)  # without matplotlib, say so now
    if arguments.size is not None and not 1 <= arguments.size <= 8192:
        raise _error("--size must be between 1 and 8192.", f"--size {arguments.size}", f"--size {SIDE}")
    atlas = open_folder(arguments.atlas, "picture")
    if not atlas.entries:
        raise _error(
            "the recording must have an attention.", f"none in {arguments.atlas}", "attlas record -o run.atlas"
        )
    entries = _entries(atlas, arguments.layer)
    if arguments.head is None:
        figure = _overview(atlas, entries, arguments, terminal)
    elif len(entries) > 1:
        raise _error("--head goes with --layer.", f"--head {arguments.head} without --layer", "--layer 0 --head 0")
    else:
        figure = _one(atlas, entries[0], arguments, terminal)
    written = pictures.save(figure, arguments.out)
    terminal.say(f"{terminal.style(str(written), 'bold')}")


def _entries(atlas: Atlas, layer: str | None) -> list[Entry]:
    """Return the last pass of each layer of the main kind, or of the one that is named."""
    if layer is None:
        return [atlas.entry(number) for number in atlas.layers()]
    named = layer.removeprefix("-").isdecimal()
    return [entry_of(atlas, int(layer) if named else layer, "picture")]


def _one(atlas: Atlas, entry: Entry, arguments: argparse.Namespace, terminal: Terminal) -> Figure:
    """Draw one head, cell by cell with its tokens where there are few."""
    head = arguments.head
    if head not in entry.heads:
        known = ", ".join(map(str, entry.heads))
        raise _error(
            "--head must be one of the layer's.", f"--head {head}; there are {known}", f"--head {entry.heads[0]}"
        )
    index = entry.heads.index(head)
    rows, columns = _window(entry, arguments)
    size = arguments.size or SIDE
    with terminal.step(f"drawing layer {entry.layer}, head {head}"):
        maps = _blocks(entry, [index], rows, columns, size, arguments)[0]
    name = f"{atlas.model + ', ' if atlas.model else ''}layer {entry.layer}, head {head}"
    if entry.kind != "self":
        name += f" ({entry.kind})"
    log = arguments.scale == "log"
    labels = _labels(atlas, entry, rows, columns, maps)
    if labels:
        return pictures.labelled(maps, labels, title=name, log=log)
    title = f"{name}: {count(len(rows))} queries × {count(len(columns))} keys"
    words = pictures.weight_words((rows, columns), maps.shape[-2:], arguments.pool)
    top, left = entry.queries[0] + rows.start, entry.first_key + columns.start
    window = range(top, top + len(rows)), range(left, left + len(columns))
    return pictures.grid(maps[None, None], title=title, words=words, log=log, window=window)


def _overview(atlas: Atlas, entries: list[Entry], arguments: argparse.Namespace, terminal: Terminal) -> Figure:
    """Draw every head, layers down and heads across; a head that was not recorded stays empty."""
    heads = sorted({head for entry in entries for head in entry.heads})
    size = arguments.size or _OVERVIEW
    parts: list[Tensor] = []
    sizes = set()
    with terminal.step(f"drawing {sum(len(entry.heads) for entry in entries)} heads", len(entries)) as tick:
        for entry in entries:
            rows, columns = _window(entry, arguments)
            sizes.add((len(rows), len(columns)))
            parts.append(_blocks(entry, list(range(len(entry.heads))), rows, columns, size, arguments))
            tick()
    if len(sizes) > 1:
        fix = f"--layer {entries[0].layer}"
        raise _error("the layers must be of one size to stand side by side.", "layers of different lengths", fix)
    maps = torch.full((len(entries), len(heads), *parts[0].shape[1:]), torch.nan)
    for layer, (entry, part) in enumerate(zip(entries, parts, strict=True)):
        for head, picture in zip(entry.heads, part, strict=True):
            maps[layer, heads.index(head)] = picture
    names = [[f"{entry.layer}·{head}" for head in heads] for entry in entries]
    title = f"{atlas.model}: " if atlas.model else ""
    title += f"{_said('queries', rows, entries[0].shape[2])} × {_said('keys', columns, entries[0].shape[3])}"
    return pictures.grid(
        maps,
        names,
        title=title,
        row_names=[f"layer {entry.layer}  " for entry in entries],
        words=pictures.weight_words((rows, columns), maps.shape[-2:], arguments.pool),
        log=arguments.scale == "log",
        window=(rows, columns),
    )


def _said(what: str, window: range, size: int) -> str:
    """Return how many queries or keys are drawn, and which, where it is a part of them."""
    which = "" if len(window) == size else f" ({window.start}:{window.stop})"
    return f"{count(len(window))} {what}{which}"


def _blocks(
    entry: Entry, heads: list[int], rows: range, columns: range, size: int, arguments: argparse.Namespace
) -> Tensor:
    """Return the picture of some heads of batch 0, shape (heads, height, width): computed, or that which was kept."""
    m, n = entry.shape[2:]
    kept = entry.statistics.get("picture")
    if entry.matrix is None and isinstance(kept, Tensor):
        if (len(rows), len(columns)) == (m, n) and arguments.pool == "max":
            return kept[0, heads].float()
        raise _error(
            "another window or pool is computed from queries and keys, and these were not kept.",
            "a recording of statistics only, with a picture of the whole matrix, --pool max",
            "leave --rows, --columns and --pool out, or attlas record --keep disk",
        )
    if entry.matrix is None:
        raise _error(
            "a picture is made from queries and keys, or was recorded.",
            f"neither of {entry.name}",
            "attlas record --keep disk, or --statistics with picture among them",
        )
    A = entry.matrix
    return torch.cat([pictures.blocks(A[0, [head]], size, arguments.pool, rows, columns) for head in heads])


def _window(entry: Entry, arguments: argparse.Namespace) -> tuple[range, range]:
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
            raise _error(
                f"--{name} must be a part of the {count(size)} there are, A:B.", f"--{name} {given}", f"--{name} 0:64"
            )
        ranges.append(window)
    return ranges[0], ranges[1]


def _labels(atlas: Atlas, entry: Entry, rows: range, columns: range, maps: Any) -> list[str]:
    """Return the texts of the tokens where every cell is shown and rows and columns are the same tokens."""
    start = entry.queries[0] + rows.start
    same = start == entry.first_key + columns.start and len(rows) == len(columns) == maps.shape[-1]
    if not same or len(rows) > _LABELLED or atlas.tokens is None or entry.kind == "cross":
        return []
    return atlas.tokens[start : start + len(rows)]


def _error(rule: str, found: str, fix: str) -> UsageError:
    return UsageError("picture", rule, found=found, fix=fix)
