"""``attlas report``: a recording or a corpus as one HTML file that opens in any browser, also offline."""

from __future__ import annotations

from argparse import Namespace

from attlas.cli import corpora
from attlas.cli.checks import check_target, layer_and_head
from attlas.cli.files import is_corpus, title_of
from attlas.cli.formatting import say_page
from attlas.cli.stats import open_atlas
from attlas.cli.terminal import Terminal, UsageError


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
    """Read the folder, and write the page, which opens with its tour, or at the first of the heads that are asked for.

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
        export(atlas, arguments.out, heads=heads, title=title_of(atlas, arguments.atlas), progress=tell)
