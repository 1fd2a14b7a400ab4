"""``attlas report``: a recording as one HTML file that opens in any browser, also offline."""

from __future__ import annotations

import re
from argparse import Namespace

from attlas.cli.checks import check_target
from attlas.cli.files import title_of
from attlas.cli.formatting import say_page
from attlas.cli.stats import open_atlas
from attlas.cli.terminal import Terminal, UsageError

_HEAD_PATTERN = re.compile(r"(\d+)[.·](\d+)")


def run(arguments: Namespace, terminal: Terminal) -> None:
    """Write the page, and name it."""
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
    heads = (
        None
        if arguments.heads is None
        else [_layer_and_head(part, arguments.heads) for part in arguments.heads.split(",")]
    )
    atlas = open_atlas(arguments.atlas, terminal)
    with terminal.shares("writing the report") as tell:
        export(atlas, arguments.out, heads=heads, title=title_of(atlas, arguments.atlas), progress=tell)


def _layer_and_head(text: str, option: str) -> tuple[int, int]:
    """Return layer and head of one word of --heads, such as 2.4; `option` is the whole text, for the error."""
    match = _HEAD_PATTERN.fullmatch(text.strip())
    if match is None:
        rule = "--heads must be layers and heads, with commas between them."
        raise UsageError(rule, f"--heads {option}", "--heads 2.4,3.2")
    return int(match[1]), int(match[2])
