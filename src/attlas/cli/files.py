"""Files that commands read and write: a text, a recording, a result."""

from __future__ import annotations

import codecs
import importlib.util
import json
import shlex
import sys
from pathlib import Path

from attlas.cli.terminal import UsageError
from attlas.errors import ShapeError
from attlas.recording.atlas import Atlas, Entry, load

_EXAMPLE_MODULE = "timeit"  # held out of the shipped model's training; the model's card lists all such modules


def read_text(file: Path | None) -> tuple[str, str]:
    """Return the name of a text and the text; without a file, one of the standard library.

    The file ``-`` is the standard input.

    Raises
    ------
    UsageError
        If the file cannot be read, is not UTF-8, or has no text.
    """
    if file is None:
        spec = importlib.util.find_spec(_EXAMPLE_MODULE)
        if spec is None or spec.origin is None or not Path(spec.origin).is_file():
            raise UsageError("there is no source of the standard library here.", "no timeit.py", "--text FILE")
        file = Path(spec.origin)
    name, text = read_lines(file, "--text")
    if not text.strip():
        raise UsageError("--text must not be empty.", f"{name} has no text", "--text FILE, with some pages of text")
    return name, text


def read_lines(file: Path, what: str) -> tuple[str, str]:
    """Return the name of a file of text, and what is in it, with a line feed at the end of every line.

    Parameters
    ----------
    file : Path
        The file, in UTF-8, or in UTF-16 with a mark of the byte order; ``-`` is the standard input.
    what : str
        What errors call it.

    Raises
    ------
    UsageError
        If the file cannot be read, or is no such text.
    """
    piped = str(file) == "-"
    name = "standard input" if piped else file.name
    if piped and sys.stdin is None:
        raise UsageError(f"{what} - needs an open standard input.", "it is closed", "cat FILE |")
    try:
        raw = sys.stdin.buffer.read() if piped else file.read_bytes()
    except OSError as error:
        found = f"{error.strerror or error}: {file}"
        raise UsageError(f"{what} must be a file that can be read.", found, "a file that exists") from None

    def unfit(found: str, program: str, converted: str) -> UsageError:
        """Return the error of a file that a program must convert first, with the command that does."""
        fix = f"{program} |" if piped else f"{program} {shlex.quote(str(file))} > {shlex.quote(converted)}"
        return UsageError(f"{what} must be text in UTF-8.", found, fix)

    if raw.startswith(b"\x1f\x8b"):
        raise unfit(f"a gzip file: {name}", "zcat", f"unpacked-{file.stem}")
    encoding = "utf-16" if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    try:
        return name, raw.decode(encoding).replace("\r\n", "\n").replace("\r", "\n")
    except UnicodeDecodeError as error:
        found = f"byte {error.object[error.start]:#04x} at place {error.start:,} of {name}"
        raise unfit(found, "iconv -f latin1 -t utf-8", f"utf-8-{name}") from None


def is_corpus(folder: Path) -> bool:
    """Tell whether a folder holds a corpus, finished or not, and no recording."""
    if any((folder / "parts" / name).exists() for name in ("run.json", "mutex")):
        return True
    try:
        return bool(json.loads((folder / "config.json").read_text(encoding="utf-8"))["format"] == "attlas-corpus")
    except (OSError, ValueError, LookupError, TypeError):
        # A broken corpus is opened as one: the error then says what it has.
        return (folder / "heads.parquet").exists() and not (folder / "atlas.json").exists()


def open_folder(folder: Path) -> Atlas:
    """Return a saved recording.

    Raises
    ------
    UsageError
        If there is no such folder, or it holds a corpus.
    RecordingError
        If the folder is no recording, or a broken one.
    """
    rule = "FOLDER must be what attlas record has written."
    if is_corpus(folder):
        raise UsageError(rule, f"a corpus: {folder}", f"attlas view {shlex.quote(str(folder))}")
    if not folder.is_dir():
        found, new = ("no folder", "run.atlas") if folder.exists() else ("nothing there", shlex.quote(str(folder)))
        raise UsageError(rule, f"{found}: {folder}", f"attlas record -o {new}")
    return load(folder)


def entry_of(atlas: Atlas, layer: int | str) -> Entry:
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
        rule = "--layer must be one of the recording."
        raise UsageError(rule, f"--layer {layer}", fix, arguments={"there are": error.found}) from error


def title_of(atlas: Atlas, folder: Path) -> str:
    """Return the title of a page about a recording: its text and its model, as far as they are known."""
    named = [str(part) for part in (atlas.details.get("source"), atlas.model) if part]
    return " · ".join(named) or folder.resolve().name
