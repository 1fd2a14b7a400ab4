"""``attlas report``: a recording or a corpus as one HTML file that opens in any browser, also offline."""

from __future__ import annotations

import re
from argparse import Namespace

from attlas.cli import corpora
from attlas.cli.checks import check_target
from attlas.cli.files import is_corpus, title_of
from attlas.cli.formatting import say_page
from attlas.cli.stats import open_atlas
from attlas.cli.terminal import Terminal, UsageError
from attlas.heads.classification import measure_entry
from attlas.heads.telling import telling_query
from attlas.recording.atlas import Atlas

_HEAD_PATTERN = re.compile(r"(\d+)[.·](\d+)")


def run(arguments: Namespace, terminal: Terminal) -> None:
    """Write the page, and name it."""
    folders = [arguments.atlas, *arguments.others]
    if len(folders) > 1 or is_corpus(folders[0]):
        if arguments.heads is not None:
            raise UsageError("--heads is for a recording; a corpus has all heads.", "--heads", "leave --heads out")
        check_target(arguments.out, "-o", (".html", ".htm"))
        corpora.export(folders, arguments.out, terminal)
    else:
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
    heads = (
        None
        if arguments.heads is None
        else [_layer_and_head(part, arguments.heads) for part in arguments.heads.split(",")]
    )
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


def _layer_and_head(text: str, option: str) -> tuple[int, int]:
    """Return layer and head of one word of --heads, such as 2.4; `option` is the whole text, for the error."""
    match = _HEAD_PATTERN.fullmatch(text.strip())
    if match is None:
        rule = "--heads must be layers and heads, with commas between them."
        raise UsageError(rule, f"--heads {option}", "--heads 2.4,3.2")
    return int(match[1]), int(match[2])
