"""The command line: runs a command, and shows its errors."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from attlas.cli.options import parse
from attlas.cli.terminal import Terminal
from attlas.errors import AttlasError


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
    terminal = Terminal()  # before the options, whose help a terminal may not be able to show
    arguments = parse(sys.argv[1:] if argv is None else argv)
    try:
        importlib.import_module(f"attlas.cli.{arguments.module}").run(arguments, terminal)
    except AttlasError as error:
        terminal.complain(str(error.replaced(where=arguments.module)))
        return 2
    except KeyboardInterrupt:
        terminal.complain("stopped.")
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as `attlas demo | head` does
        _drop_output()
        return 141
    except OSError as error:  # such as a full disk behind the standard output
        _drop_output()
        terminal.complain(f"{arguments.module}: {error}")
        return 2
    return 0


def _drop_output() -> None:
    """Write what is left of the standard output to nowhere: writing it again at the end would fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
