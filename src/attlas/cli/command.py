"""The command line: which commands there are, and how their errors are shown."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import attlas
from attlas.cli import bench, demo, picture, record, regress, reporting, scaling, stats, view
from attlas.cli.terminal import Terminal
from attlas.errors import AttlasError

__all__ = ["main", "parser"]


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    top = argparse.ArgumentParser(
        prog="attlas",
        description="Exact attention whose weights you can look at, at any length.",
        epilog="attlas COMMAND --help says what a command takes.",
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"attlas {attlas.__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND")
    demo.add(commands)
    record.add(commands)
    view.add(commands)
    stats.add(commands)
    picture.add(commands)
    reporting.add(commands)
    scaling.add(commands)
    regress.add(commands)
    bench.add(commands)
    return top


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : sequence of str, optional
        Arguments without the program's name; the default is those of this process.

    Returns
    -------
    int
        Exit status: 0, 2 for what the user can mend, 130 after Ctrl-C.
    """
    top, terminal = parser(), Terminal()
    arguments = top.parse_args(argv)
    if not hasattr(arguments, "run"):
        top.print_help(sys.stderr)
        top.exit(2)
    try:
        arguments.run(arguments, terminal)
    except AttlasError as error:
        terminal.complain(str(error))
        return 2
    except KeyboardInterrupt:
        terminal.complain("stopped.")
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as `attlas demo | head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0
