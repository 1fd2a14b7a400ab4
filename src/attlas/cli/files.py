"""Files that commands read and write: a text, whole results, and the folder they go to."""

from __future__ import annotations

import importlib.util
import shlex
import sys
import tempfile
from pathlib import Path

from attlas.atlas import Atlas, Entry, load
from attlas.cli.terminal import UsageError
from attlas.errors import RecordingError, ShapeError
from attlas.files import whole_file

__all__ = ["check_target", "entry_of", "open_folder", "read_text", "save_text", "title_of"]

STDIN = "standard input"
_TEXT = "timeit"  # held out of the shipped model's training; the model's card lists all such modules


def read_text(file: Path | None, where: str) -> tuple[Path, str]:
    """Return the file and its text, or say what is wrong with it; without a file, one of the standard library.

    The file ``-`` is the standard input.

    Raises
    ------
    UsageError
        If the file cannot be read, is not UTF-8, or has no text.
    """
    if file is None:
        spec = importlib.util.find_spec(_TEXT)
        if spec is None or spec.origin is None or not Path(spec.origin).is_file():
            raise _error(where, "there is no source of the standard library here.", "no timeit.py", "--text FILE")
        file = Path(spec.origin)
    piped = str(file) == "-"
    fix = f"iconv -f latin1 -t utf-8 {shlex.quote(str(file))} > text.txt"
    try:
        raw = sys.stdin.buffer.read() if piped else file.read_bytes()
        file = Path(STDIN) if piped else file
        # As a file that is opened for reading: every end of a line is \n, and a mark of the byte order is none.
        text = raw.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        byte = f"byte {error.object[error.start]:#04x} at place {error.start:,} of {file}"
        raise _error(where, "--text must be UTF-8.", byte, "iconv -f latin1 -t utf-8 |" if piped else fix) from None
    except OSError as error:
        found = f"{error.strerror or error}: {file}"
        raise _error(
            where, "--text must be a file that can be read.", found, "--text FILE, with a file that exists"
        ) from None
    if not text.strip():
        raise _error(where, "--text must not be empty.", f"{file} has no text", "--text FILE, with some pages of text")
    return file, text


def open_folder(folder: Path, where: str) -> Atlas:
    """Return a saved atlas.

    Raises
    ------
    UsageError
        If there is no such folder.
    RecordingError
        If the folder is no atlas, or a broken one.
    """
    if not folder.is_dir():
        found, new = ("no folder", "run.atlas") if folder.exists() else ("nothing there", shlex.quote(str(folder)))
        rule = "FOLDER must be what attlas record has written."
        raise _error(where, rule, f"{found}: {folder}", f"attlas record -o {new}")
    try:
        return load(folder)
    except RecordingError as error:
        raise error.replaced(where=where) from error


def check_target(path: Path, option: str, suffixes: tuple[str, ...], where: str) -> None:
    """Raise a UsageError unless a file can be written; called before the work.

    Raises
    ------
    UsageError
        If the suffix is none of `suffixes`, or the folder cannot be written.
    """
    suggestion = path.with_suffix(suffixes[0]).name if path.name else f"result{suffixes[0]}"
    if path.suffix.lower() not in suffixes:
        named = ", ".join(suffixes)
        raise _error(
            where, f"{option} must be a file that ends in {named}.", f"{option} {path}", f"{option} {suggestion}"
        )
    try:
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        found = f"{error.strerror or error}: {path.parent}"
        raise _error(
            where, f"{option} must lie in a folder that can be written.", found, f"{option} {suggestion}"
        ) from None
    if path.is_dir():
        raise _error(where, f"{option} must be a file.", f"a folder: {path}", f"{option} {path / suggestion}")
    if path.exists() and not path.is_file():
        raise _error(where, f"{option} must be a file.", f"a device or a pipe: {path}", "give another name")


def save_text(text: str, path: Path, where: str) -> Path:
    """Write a text to a file, whole or not at all.

    Raises
    ------
    FileError
        If the file cannot be written.
    """
    with whole_file(path, where) as unfinished:
        unfinished.write_text(text, encoding="utf-8", newline="\n")
    return path


def entry_of(atlas: Atlas, layer: int | str, where: str) -> Entry:
    """Return the attention of a layer, by its number or its name.

    Raises
    ------
    UsageError
        If there is none.
    """
    try:
        return atlas.entry(layer)
    except ShapeError as error:
        known = atlas.layers()
        fix = f"--layer {known[-1]}" if known else "a recording with an attention"
        raise UsageError(
            where,
            "--layer must be one of the recording.",
            {"there are": error.found},
            found=f"--layer {layer}",
            fix=fix,
        ) from error


def title_of(atlas: Atlas, folder: Path) -> str:
    """Return what a page about a recording is called: its text and its model, as far as they are known."""
    named = [str(part) for part in (atlas.details.get("source"), atlas.model) if part]
    return " · ".join(named) or folder.resolve().name


def _error(where: str, rule: str, found: str, fix: str) -> UsageError:
    return UsageError(where, rule, found=found, fix=fix)
