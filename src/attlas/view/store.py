"""What a pass has found, as files beside the atlas: mapped into memory, complete or not there at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from attlas.foundation.files import replace_folder
from attlas.view.codes import Array

Layout = Mapping[str, tuple[tuple[int, ...], str]]

_FACTS_FILE = "pass.json"
_PIECE_BYTES = 1 << 20
_PARTIAL_PREFIX = ".partial-"


class Store:
    """A folder of passes, each a folder of arrays under the key of its content.

    Parameters
    ----------
    folder : str or Path, optional
        Where they stay; without it, or where it cannot be written, a temporary folder that `close` removes.

    Notes
    -----
    A pass is written under a hidden name and renamed when it is whole. On opening, shapes and checksums are
    looked at, about a gigabyte a second: a folder that was cut off, changed or made by something else is not
    used, and is replaced by the next pass of its name. Nothing else in the folder is touched.

    Attributes
    ----------
    folder : Path
        Where they are.
    stays : bool
        Whether what is stored is there the next time.
    """

    def __init__(self, folder: str | os.PathLike[str] | None = None) -> None:
        self._checked: set[str] = set()
        found = None if folder is None else _writable_folder(Path(folder).absolute())
        self.stays = found is not None
        self.folder = Path(tempfile.mkdtemp(prefix="attlas-view-")) if found is None else found
        if found is None:  # also where nobody closes it
            weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def open(self, name: str, facts: Mapping[str, Any], layout: Layout) -> dict[str, Array] | None:
        """Return the arrays of a pass, mapped and read-only; None where there is none that is whole."""
        folder = self.folder / name
        try:
            found = json.loads((folder / _FACTS_FILE).read_bytes())
            checksums = found.pop("checksums")
            if found != dict(facts):
                return None
            if name not in self._checked and any(
                checksums[key] != _checksum_of_file(_file_of_key(folder, key)) for key in layout
            ):
                return None
            arrays: dict[str, Array] = {}
            for key, (shape, dtype) in layout.items():
                if 0 in shape:
                    arrays[key] = np.zeros(shape, dtype)
                    continue
                arrays[key] = np.load(_file_of_key(folder, key), mmap_mode="r", allow_pickle=False)
                if arrays[key].shape != shape or arrays[key].dtype != np.dtype(dtype):
                    return None
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return None
        self._checked.add(name)
        return arrays

    def known(self, name: str) -> None:
        """Take a pass for whole from now on, since this process has written it."""
        self._checked.add(name)

    def close(self) -> None:
        """Remove what does not stay."""
        if not self.stays:
            shutil.rmtree(self.folder, ignore_errors=True)


class Draft:
    """Arrays of a pass that is not complete.

    Parameters
    ----------
    store : Store
        Where they go.
    name : str
        Folder of the pass.
    facts : mapping
        Plain facts by which the pass is known again.
    layout : mapping
        Shape and dtype of each array.

    Attributes
    ----------
    arrays : dict of array
        Zeros to be filled.
    """

    def __init__(self, store: Store, name: str, facts: Mapping[str, Any], layout: Layout) -> None:
        self._store, self._name, self._facts = store, name, dict(facts)
        self._folder: Path | None = None
        try:
            self._folder = store.folder / f"{_PARTIAL_PREFIX}{name}-{os.urandom(8).hex()}"
            self._folder.mkdir()
            self.arrays = {key: _mapped_array(_file_of_key(self._folder, key), *kind) for key, kind in layout.items()}
        except OSError:
            self.discard()
            self.arrays = {key: np.zeros(shape, dtype) for key, (shape, dtype) in layout.items()}

    def finish(self) -> None:
        """Write what is left, and give the folder its name; without room on the disk the arrays stay in memory."""
        if self._folder is None:
            return
        try:
            for array in self.arrays.values():
                if isinstance(array, np.memmap):
                    array.flush()
            checksums = {key: _checksum_of_file(_file_of_key(self._folder, key)) for key in self.arrays}
            (self._folder / _FACTS_FILE).write_text(
                json.dumps({**self._facts, "checksums": checksums}), encoding="utf-8"
            )
            self._rename_folder(self._folder)
        except OSError:
            self.discard()  # what is mapped stays until it is let go
        self._folder = None

    def _rename_folder(self, folder: Path) -> None:
        """Give the finished folder its name, in place of another that is there."""
        target = self._store.folder / self._name
        if target.is_symlink() or (target.exists() and not target.is_dir()):
            raise FileExistsError(target)  # not ours: it is left as it is
        # What is there could not be used, or another process has finished it meanwhile.
        replace_folder(folder, target)
        self._store.known(self._name)

    def discard(self) -> None:
        """Remove what was written."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None


def _writable_folder(folder: Path) -> Path | None:
    """Return a folder that can be written, made where it is missing; None where that cannot be."""
    try:
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError:
        return None
    return folder


def _file_of_key(folder: Path, key: str) -> Path:
    return folder / f"{key}.npy"


def _mapped_array(file: Path, shape: tuple[int, ...], dtype: str) -> Array:
    """Return a new array of zeros that lives in a file, whose room on the disk is taken now."""
    if 0 in shape:
        np.save(file, np.zeros(shape, dtype))
        return np.zeros(shape, dtype)
    array = np.lib.format.open_memmap(file, mode="w+", dtype=np.dtype(dtype), shape=shape)
    if hasattr(os, "posix_fallocate"):  # a full disk must say so here: later it would kill the process
        with file.open("r+b") as opened:
            os.posix_fallocate(opened.fileno(), 0, file.stat().st_size)
    return array


def _checksum_of_file(file: Path) -> int:
    """Return the CRC-32 of a file."""
    total = 0
    with file.open("rb") as opened:
        while piece := opened.read(_PIECE_BYTES):
            total = zlib.crc32(piece, total)
    return total
