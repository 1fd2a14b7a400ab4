"""``attlas report``: a recording as one HTML file that opens in any browser, also offline."""

from __future__ import annotations

from argparse import Namespace

from attlas.cli.checks import check_target, layer_and_head
from attlas.cli.files import title_of
from attlas.cli.formatting import say_page
from attlas.cli.stats import open_atlas
from attlas.cli.terminal import Terminal
from attlas.heads.classification import measure_entry
from attlas.heads.telling import telling_query
from attlas.recording.atlas import Atlas


def run(arguments: Namespace, terminal: Terminal) -> None:
    """Write the page, and name it."""
    write(arguments, terminal)
    say_page(arguments.out, terminal)


def write(arguments: Namespace, terminal: Terminal) -> None:
    """Read the folder, and write the page, with a query in colour from which its first head shows what it does.

    Raises
    ------
    UsageError
        If the page cannot be written there, or has no such heads.
    RecordingError
        If the folder is no recording.
    """
    from attlas.view import export  # the viewer, which commands that write no page do without

    check_target(arguments.out, "-o", (".html", ".htm"))
    chosen = arguments.heads
    heads = None if chosen is None else [layer_and_head(word, "--heads", chosen) for word in chosen.split(",")]
    atlas = open_atlas(arguments.atlas, terminal)
    with terminal.shares("writing the report") as tell:
        heads = heads or _most_telling(atlas)
        query = telling_query(atlas, *heads[0]) if heads else None
        title = title_of(atlas, arguments.atlas)
        export(atlas, arguments.out, heads=heads or None, title=title, query=query, progress=tell)


def _most_telling(atlas: Atlas) -> list[tuple[int, int]]:
    """Return layer and head of the most telling head; none where the kinds of heads are not recorded."""
    measured = [head for layer in atlas.layers() for head in measure_entry(atlas, atlas.entry(layer))]
    best = max(measured, key=lambda head: head.prominence, default=None)
    return [] if best is None else [(best.layer, best.head)]
