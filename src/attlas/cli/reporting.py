"""``attlas report``: a recording as one HTML file that opens in any browser, also offline."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from attlas.cli.files import check_target, save_text
from attlas.cli.recorded import reading_of
from attlas.cli.report import page
from attlas.cli.stats import open_atlas
from attlas.cli.terminal import Help, Terminal
from attlas.cli.words import in_bytes

if TYPE_CHECKING:
    from argparse import _SubParsersAction

__all__ = ["add", "run"]

_EXAMPLES = """\
example:
  attlas report run.atlas -o report.html
"""


def add(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command to the command line."""
    command = commands.add_parser(
        "report",
        help="write a recording as one HTML file",
        description="Write one HTML file with every head of a recording, the text and what each token looks at. It "
        "loads nothing from anywhere.",
        epilog=_EXAMPLES,
        formatter_class=Help,
        allow_abbrev=False,
    )
    command.add_argument("atlas", type=Path, metavar="FOLDER", help="what attlas record has written")
    command.add_argument("-o", "--out", type=Path, required=True, metavar="FILE", help="report.html")
    command.set_defaults(run=run)


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
