"""``attlas report``: a recording as one HTML file that opens in any browser, also offline."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path

from attlas.atlas import Atlas
from attlas.cli import numbers
from attlas.cli.files import check_target, title_of
from attlas.cli.reading import telling, window_of
from attlas.cli.stats import open_atlas
from attlas.cli.terminal import Terminal, UsageError
from attlas.cli.words import in_bytes
from attlas.errors import AttlasError

__all__ = ["run", "write"]

_HEAD = re.compile(r"(\d+)[.·](\d+)")


def run(arguments: argparse.Namespace, terminal: Terminal) -> None:
    """Read the folder, and write the page."""
    check_target(arguments.out, "-o", (".html", ".htm"), "report")
    heads = None if arguments.heads is None else [_head(part, arguments.heads) for part in arguments.heads.split(",")]
    atlas = open_atlas(arguments.atlas, terminal, "report")
    with terminal.step("writing the report", 100) as tick:
        done = 0

        def tell(share: float) -> None:
            nonlocal done
            while done < int(100 * share):
                tick()
                done += 1

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
    measured = [head for layer in atlas.layers() for head in numbers.classify_entry(atlas, atlas.entry(layer))]
    if not measured:
        return None
    found = telling(measured)
    return found.layer, found.head


def _query(atlas: Atlas, layer: int, head: int) -> int | None:
    known = [entry for entry in atlas.entries if entry.layer == layer and head in entry.heads]
    top = known[0].statistics.get("top_k") if known else None
    if top is None or atlas.ids is None or atlas.ids.shape[-1] != known[0].shape[2]:
        return None
    index = known[0].heads.index(head)
    return window_of(top.values[0, index].float(), top.indices[0, index], atlas.ids[0])[1]


def _head(text: str, given: str) -> tuple[int, int]:
    found = _HEAD.fullmatch(text.strip())
    if found is None:
        rule = "--heads must be layers and heads, with commas between them."
        raise UsageError("report", rule, found=f"--heads {given}", fix="--heads 2.4,3.2")
    return int(found[1]), int(found[2])
