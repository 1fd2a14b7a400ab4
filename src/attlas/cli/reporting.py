"""``attlas report``: a recording as one HTML file that opens in any browser, also offline."""

from __future__ import annotations

import argparse
import shlex

from attlas.cli.files import check_target, save_text
from attlas.cli.recorded import reading_of
from attlas.cli.report import page
from attlas.cli.stats import open_atlas
from attlas.cli.terminal import Terminal
from attlas.cli.words import in_bytes

__all__ = ["run"]


def run(arguments: argparse.Namespace, terminal: Terminal) -> None:
    """Read the folder, and write the page."""
    check_target(arguments.out, "-o", (".html", ".htm"), "report")
    atlas = open_atlas(arguments.atlas, terminal, "report")
    with terminal.step("writing the report"):
        folder, file = (shlex.quote(str(path)) for path in (arguments.atlas, arguments.out))
        text = page(reading_of(atlas, f"attlas report {folder} -o {file}"))
        written = save_text(text, arguments.out, "report")
    size = in_bytes(written.stat().st_size)
    terminal.say(f"{terminal.style(str(written), 'bold')}  {size}, opens in any browser, also offline")
