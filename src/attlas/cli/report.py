"""``attlas report``: a recording as one HTML file that opens in any browser, also offline."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from attlas.atlas import Atlas
from attlas.cli import head_statistics
from attlas.cli.demo_result import closeup_window, most_telling
from attlas.cli.files import check_target, title_of
from attlas.cli.formatting import in_bytes
from attlas.cli.stats import open_atlas
from attlas.cli.terminal import Terminal, UsageError
from attlas.errors import AttlasError

__all__ = ["run", "write"]

_HEAD = re.compile(r"(\d+)[.·](\d+)")


def run(arguments: argparse.Namespace, terminal: Terminal) -> None:
    """Read the folder, and write the page."""
    check_target(arguments.out, "-o", (".html", ".htm"), "report")
    heads = None if arguments.heads is None else [_head(part, arguments.heads) for part in arguments.heads.split(",")]
    atlas = open_atlas(arguments.atlas, terminal, "report")
    with terminal.shares("writing the report") as tell:
        title = title_of(atlas, arguments.atlas)
        write(atlas, arguments.out, title, heads, tell)
    size = in_bytes(arguments.out.stat().st_size)
    terminal.say(f"{terminal.style(str(arguments.out), 'bold')}  {size}, opens in any browser, also offline")


def write(
    atlas: Atlas,
    path: Path,
    title: str,
    heads: list[tuple[int, int]] | None = None,
    tell: Callable[[float], object] | None = None,
) -> Path:
    """Write the page of a recording, with a query in colour from which its first head shows what it does."""
    from attlas.view import export  # the viewer, which commands that write no page do without

    first = heads[0] if heads else _telling(atlas)
    query = None if first is None else _query(atlas, *first)
    chosen = heads or (None if first is None else [first])
    try:
        return export(atlas, path, heads=chosen, title=title, query=query, progress=tell)
    except AttlasError as error:
        raise error.replaced(where="report") from error


def _telling(atlas: Atlas) -> tuple[int, int] | None:
    """Return layer and head of the most telling head, None where the kinds of heads are not recorded."""
    measured = [head for layer in atlas.layers() for head in head_statistics.classify_entry(atlas, atlas.entry(layer))]
    if not measured:
        return None
    head = most_telling(measured)
    return head.layer, head.head


def _query(atlas: Atlas, layer: int, head: int) -> int | None:
    entries = [entry for entry in atlas.entries if entry.layer == layer and head in entry.heads]
    top = entries[0].statistics.get("top_k") if entries else None
    if top is None or atlas.ids is None or atlas.ids.shape[-1] != entries[0].shape[2]:
        return None
    index = entries[0].heads.index(head)
    return closeup_window(top.values[0, index].float(), top.indices[0, index], atlas.ids[0])[1]


def _head(text: str, option: str) -> tuple[int, int]:
    match = _HEAD.fullmatch(text.strip())
    if match is None:
        rule = "--heads must be layers and heads, with commas between them."
        raise UsageError("report", rule, found=f"--heads {option}", fix="--heads 2.4,3.2")
    return int(match[1]), int(match[2])
