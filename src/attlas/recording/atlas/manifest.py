"""``atlas.json``: what a saved atlas holds, with the size and checksum of every file, its own included."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from glob import escape
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from attlas.errors import AttlasError, RecordingError
from attlas.recording.atlas.serialization import FormatError, check_type
from attlas.recording.atlas.tensors import Written, sha256_of

MANIFEST = "atlas.json"
FILE = re.compile(r"\d{4,9}\.safetensors")
PICTURE = re.compile(r"image-\d{1,6}\.png")
# Version 2: the log-sum-exp in float64, which queries are padding, texts of every sequence. All of 1 is read.
# Version 3 is that of folders with weights that are no softmax, version 4 of those with pictures, version 5 of those
# with parts; others stay readable by older versions of attlas.
_FORMAT, _VERSION, _OF_PICTURES, _OF_KINDS, _OF_SOFTMAX = "attlas-atlas", 5, 4, 3, 2
_LARGEST = 1 << 29  # bytes of atlas.json: a million tokens take some 20 MB
_EMPTY = "0" * 64
_DIGEST = re.compile(rb'"sha256":"([0-9a-f]{64})"')
# Errors that reading a changed file may raise.
_WRONG = (AttlasError, SafetensorError, OSError, ValueError, TypeError, LookupError, RuntimeError, ArithmeticError,
          AttributeError, RecursionError, MemoryError)  # fmt: skip


def write_manifest(folder: Path, content: Mapping[str, Any], files: Mapping[str, Written]) -> None:
    """Write ``atlas.json``, the last file of a folder, and wait until it is on disk."""
    # The checksum is that of the text with zeros in its own place.
    listed = {name: {"bytes": written.size, "sha256": written.sha256} for name, written in files.items()}
    kinds = any("weights" in (record.get("matrix") or ()) for record in content.get("entries", ()))
    version = _OF_PICTURES if content.get("images") else _OF_KINDS if kinds else _OF_SOFTMAX
    version = _VERSION if content.get("parts") else version
    whole = {"format": _FORMAT, "version": version, "sha256": _EMPTY, **content, "files": listed}
    text = json.dumps(whole, allow_nan=False, separators=(",", ":")).encode("ascii")
    # The first zeros are the checksum's place: it comes before the contents.
    text = text.replace(_EMPTY.encode(), hashlib.sha256(text).hexdigest().encode(), 1)
    with (folder / MANIFEST).open("xb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> dict[str, Any]:
    """Return the contents of ``atlas.json``, after a check of its own checksum.

    Raises
    ------
    RecordingError
        If there is none, or it is not one that this version of attlas can read.
    """
    if not folder.is_dir():
        found = "a file, and no folder" if folder.exists() else "no such folder"
        fix = "attlas.load(folder) with the folder of save()."
        aside = sorted(folder.parent.glob(f".{escape(folder.name)}.old-????????"))
        if aside and not folder.exists():  # the process died in the moment between two renames
            fix = f"a writer was stopped as it replaced the folder; rename {aside[0].name} to {folder.name}."
        raise folder_error(folder, "", "a saved atlas is a folder.", found, fix)
    path = folder / MANIFEST
    if not path.exists():
        rule, found = "the folder must hold a recording.", f"no recording in this folder: it has no {MANIFEST}"
        raise folder_error(folder, "", rule, found, "the folder that save(), or `attlas record`, has written.")
    with errors_name_file(folder, MANIFEST):
        size = plain_file_size(path)
        if size > _LARGEST:
            raise FormatError(f"{size:,} bytes, more than {_LARGEST:,}")
        text = path.read_bytes()
        if not text.isascii():
            raise FormatError("its text is not the one that attlas wrote, which is ASCII")
        content = json.loads(text.decode("ascii"), object_pairs_hook=_unique, parse_constant=_no_constant)
        if not isinstance(content, dict) or content.get("format") != _FORMAT:
            raise FormatError(f"JSON, but not of the format {_FORMAT!r}")
        version, digest = content.get("version"), _DIGEST.search(text)
        if type(version) is int and version > _VERSION:
            rule, found = "the folder must be of a format that this attlas knows.", f"format version {version}"
            raise folder_error(folder, MANIFEST, rule, f"{found}, this attlas reads up to {_VERSION}", "update attlas.")
        known, checksum = type(version) is int and version >= 1, content.get("sha256")
        if known and isinstance(checksum, str) and (digest is None or digest[1].decode() != checksum):
            raise FormatError("its text is not the one that attlas wrote: another program has written the JSON again")
        if not known or digest is None:
            raise FormatError(f"format version {str(version)[:60]} without a checksum")
        # The checksum was taken with zeros in its place.
        blank = text[: digest.start(1)] + _EMPTY.encode() + text[digest.end(1) :]
        if hashlib.sha256(blank).hexdigest() != content["sha256"]:
            raise FormatError("a checksum that is not that of its text: it was changed, or cut off")
        return content


def is_data_file(name: str) -> bool:
    """Return whether a file of this name holds tensors or a picture of a folder."""
    return FILE.fullmatch(name) is not None or PICTURE.fullmatch(name) is not None


def check_files(folder: Path, files: Any, *, verify: bool) -> None:
    """Check name, kind and size of every file that belongs to a folder, and its checksum if asked.

    Raises
    ------
    RecordingError
        If one is missing, or not the one that was written.
    """
    with errors_name_file(folder, MANIFEST):
        listed = dict(check_type(files, "files", dict))
        for name, file in listed.items():
            if not is_data_file(name):
                raise FormatError(f"a file named {name[:60]!r}, not 0000.safetensors")
            check_type(file, f"files of {name}", dict)
            check_type(file.get("bytes"), f"bytes of {name}", int)
            check_type(file.get("sha256"), f"sha256 of {name}", str)
    for name, file in listed.items():
        with errors_name_file(folder, name):
            size = plain_file_size(folder / name)
            if size != file["bytes"]:
                raise FormatError(f"{size:,} bytes, and {file['bytes']:,} were written")
    if not verify:
        return
    with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
        digests = pool.map(sha256_of, [folder / name for name in listed])
        for name in listed:
            with errors_name_file(folder, name):
                if next(digests) != listed[name]["sha256"]:
                    raise FormatError("a checksum that is not the one that was written: its contents were changed")


@contextmanager
def errors_name_file(folder: Path, file: str) -> Iterator[None]:
    """Turn every error while one file is read into a RecordingError that names the file."""
    try:
        yield
    except RecordingError:
        raise
    except _WRONG as error:
        text = str(error)
        if isinstance(error, AttlasError):
            text = error.found or text
        if isinstance(error, FileNotFoundError):
            text = "no such file"
        if isinstance(error, RecursionError):
            text = "too many parts within parts"
        found = (text.splitlines() or [type(error).__name__])[0][:300]
        rule = f"{file} must be as attlas wrote it."
        raise folder_error(folder, file, rule, found, "save the atlas again, or copy the folder again.") from error


def folder_error(folder: Path, file: str, rule: str, found: str, fix: str) -> RecordingError:
    """Return an error about a folder."""
    arguments = {"folder": str(folder)} | ({"file": file} if file else {})
    return RecordingError(rule, found, fix, arguments=arguments, where="load()")


def plain_file_size(path: Path) -> int:
    """Return the bytes of a plain file; raise for a link, which may lead out of the folder, and for a pipe."""
    status = path.lstat()
    if not stat.S_ISREG(status.st_mode):
        raise FormatError("a symbolic link" if stat.S_ISLNK(status.st_mode) else "no plain file")
    return status.st_size


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the pairs of a JSON object as a dict; raise a FormatError where a name occurs twice."""
    unique = dict(pairs)
    if len(unique) != len(pairs):
        raise FormatError("a name that stands twice in one object")
    return unique


def _no_constant(name: str) -> float:
    """Raise a FormatError for NaN and infinity, which JSON does not have."""
    raise FormatError(f"{name}, which is no number of JSON")
