"""What is written to the terminal: plain when it is piped, one moving line and colours when it is not."""

from __future__ import annotations

import argparse
import io
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from attlas.errors import AttlasError

_COLOUR_CODES = {
    "bold": "1",
    "dim": "2",
    "red": "31",
    "green": "32",
    "yellow": "33",
    "blue": "34",
    "magenta": "35",
    "cyan": "36",
}
_BAR_WIDTH = 24
_MOST_LINE_COLUMNS = 110  # columns of running text, at most
_QUIET_SECONDS = 20.0  # seconds after which a log hears that something long goes on


class Help(argparse.HelpFormatter):
    """Wrap descriptions as ever, and leave examples as they were typed."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text.rstrip() if text.startswith("example") else super()._fill_text(text, width, indent)


class UsageError(AttlasError):
    """A request on the command line that cannot be carried out; `main` fills in the command as `where`."""


class Terminal:
    """Results go to the standard output, progress and complaints to the standard error.

    Parameters
    ----------
    out, err : TextIO, optional
        Where to write; the default is the process's own streams.

    Attributes
    ----------
    keeps_steps : bool
        Whether the line of a step stays on the screen, with its time, when the step is done. In a log it always does.
    """

    def __init__(self, out: TextIO | None = None, err: TextIO | None = None) -> None:
        # A process that was started without a standard output has None in its place.
        self.out = out or sys.stdout or io.StringIO()
        self.err = err or sys.stderr or io.StringIO()
        self.keeps_steps = True
        self._is_line_moving = False
        for stream in (self.out, self.err):
            # A terminal that cannot show a character gets a question mark, and not a crash.
            if hasattr(stream, "reconfigure"):
                stream.reconfigure(errors="replace")

    @property
    def width(self) -> int:
        """Columns of the terminal."""
        return shutil.get_terminal_size((100, 24)).columns

    def say(self, text: str = "", *names: str) -> None:
        """Write one line of the result, in a style where the standard output shows styles."""
        if self._is_line_moving:
            self._clear_moving_line()
        print(self.style(text, *names), file=self.out, flush=True)

    def data(self, text: str) -> None:
        """Write a result for another program: UTF-8, whatever the terminal can show."""
        if hasattr(self.out, "reconfigure"):
            self.out.reconfigure(encoding="utf-8")
        self.say(text)

    def prose(self, text: str, *names: str, indent: str = "  ") -> None:
        """Write sentences, broken into lines where the terminal ends."""
        width = min(self.width, _MOST_LINE_COLUMNS)
        for line in textwrap.wrap(text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False):
            self.say(line, *names)

    def complain(self, text: str) -> None:
        """Write an error."""
        self._clear_moving_line()
        head, _, rest = text.partition("\n")
        head = self.style(f"attlas: {head}", "bold", stream=self.err)
        print(head, rest, sep="\n" if rest else "", file=self.err)

    def style(self, text: str, *names: str, stream: TextIO | None = None) -> str:
        """Return text in a style where a stream, by default the standard output, shows styles."""
        stream = stream or self.out
        # https://no-color.org: any value but the empty one switches colours off.
        coloured = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        if not (coloured and names and text):
            return text
        return f"\x1b[{';'.join(_COLOUR_CODES[name] for name in names)}m{text}\x1b[0m"

    def files(self, written: Sequence[tuple[Path, str]], width: int = 0) -> None:
        """Name the files that were written, in a column of at least `width` characters, and say what each is."""
        width = max([width, *(len(str(path)) for path, _ in written)])
        for path, text in written:
            self.say(f"  {self.style(str(path).ljust(width), 'bold')}  {text}")

    @contextmanager
    def step(self, label: str, total: int = 0) -> Iterator[Callable[..., None]]:
        """Show that something is being done, and when it is done how long it took.

        Parameters
        ----------
        label : str
            What is being done.
        total : int
            How many parts it has; the yielded function is called after each, with any arguments.
        """
        begin, done = time.perf_counter(), 0
        show = self._progress_line(label)

        def say() -> None:
            moving = f"  {self._bar_of_share(done / total)} {done}/{total}" if total else " …"
            show(moving, f"{done}/{total}" if 0 < done < total else "")

        def tick(*_: Any) -> None:
            """Count one part as done, and show it."""
            nonlocal done
            done += 1
            say()

        say()
        yield tick
        self._finish_step(label, f"{time.perf_counter() - begin:.1f} s")

    @contextmanager
    def shares(self, label: str) -> Iterator[Callable[..., None]]:
        """Show how far something is, and when it is done how long it took.

        Parameters
        ----------
        label : str
            What is being done.

        Yields
        ------
        callable
            Takes the share that is done, and may take words about it; these stand at the end in place of the time.
        """
        begin, words = time.perf_counter(), ""
        show = self._progress_line(label)

        def tell(share: float, text: str = "") -> None:
            """Show the share that is done; keep the words for the line at the end."""
            nonlocal words
            words = text
            show(f"  {self._bar_of_share(share)} {text or f'{share:.0%}'}", f"{share:.0%}  {text}".rstrip())

        yield tell
        self._finish_step(label, words or f"{time.perf_counter() - begin:.1f} s")

    def _progress_line(self, label: str) -> Callable[[str, str], None]:
        """Return a function that shows progress: the first text on a moving line, in a log the second now and then."""
        last = time.perf_counter()

        def show(moving: str, logged: str) -> None:
            """Redraw the moving line of a terminal; elsewhere print a new line, every `_QUIET_SECONDS` at most."""
            nonlocal last
            if self._has_moving_line():
                print(f"\r\x1b[K  {label}{moving}", end="", file=self.err, flush=True)
                self._is_line_moving = True
            elif logged and time.perf_counter() - last >= _QUIET_SECONDS:
                last = time.perf_counter()
                print(f"  {label}  {logged}", file=self.err, flush=True)

        return show

    def _finish_step(self, label: str, text: str) -> None:
        """End the line of a step: name it and say its time, unless steps vanish when they are done."""
        self._clear_moving_line()
        if self._has_moving_line() and not self.keeps_steps:
            return
        print(f"  {label}  {self.style(text, 'dim', stream=self.err)}", file=self.err, flush=True)

    def _clear_moving_line(self) -> None:
        """Remove the moving line, where there is one."""
        if self._has_moving_line():
            print("\r\x1b[K", end="", file=self.err, flush=True)
        self._is_line_moving = False

    def _has_moving_line(self) -> bool:
        """Whether a line on the terminal can be overwritten while something runs."""
        return self.err.isatty() and os.environ.get("TERM") != "dumb"

    def _bar_of_share(self, share: float) -> str:
        """Return a bar that is filled to a share from 0 to 1."""
        filled = int(_BAR_WIDTH * share)
        return f"{'━' * filled}{self.style('━' * (_BAR_WIDTH - filled), 'dim', stream=self.err)}"
