"""The parts of an unfinished corpus: one for each process, and each as it was at some moment."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from heapq import merge
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from attlas.corpus.state import State
from attlas.errors import FileError, RecordingError
from attlas.files import lock, whole_file

PARTS = "parts"
_LOCK = "lock"


def payload_name(text: int) -> str:
    """Return the name of the file with the largest keys of a text."""
    return f"{text:08d}.safetensors"


class Part:
    """What one process has read, as it was at the last commit.

    Parameters
    ----------
    folder : Path
        ``parts`` of a corpus.
    rank : int
        Number of the process.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        tensors = load_file(self._file("safetensors"))
        self.done: NDArray[np.uint8] = np.unpackbits(tensors.pop("done").numpy())
        self.sizes = dict(zip(("texts", "failed"), tensors.pop("sizes").tolist(), strict=True))
        self.state = State.of(tensors)

    def _file(self, kind: str) -> Path:
        return self.folder / f"{self.rank:04d}.{kind}"

    def lines(self, kind: str) -> Iterator[dict[str, Any]]:
        """Return the lines of ``texts`` or ``failed`` that were there at the commit, by ascending text."""
        # Each run of the process has appended in ascending order what was left for it to read.
        starts, last = [0], -1
        for at, row in self._lines(kind, 0, self.sizes[kind]):
            starts += [at] if row["text"] < last else []
            last = row["text"]
        runs = [self._lines(kind, start, stop) for start, stop in pairwise([*starts, self.sizes[kind]])]
        return (row for _, row in merge(*runs, key=lambda line: line[1]["text"]))

    def _lines(self, kind: str, start: int, stop: int) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield the lines between two places of the file, each with its own place."""
        with self._file(f"{kind}.jsonl").open("rb") as file:
            file.seek(start)
            while (at := file.tell()) < stop:
                yield at, json.loads(file.readline())

    def payload(self, text: int) -> Path:
        """Return the file with the largest keys of a text."""
        return self.folder / f"{self.rank:04d}" / payload_name(text)


def parts_of(folder: Path) -> list[Part]:
    """Return what each process has read of a corpus, by its number."""
    found = sorted((folder / PARTS).glob("[0-9]*.safetensors"))
    return [Part(folder / PARTS, int(path.stem)) for path in found]


class Journal:
    """What one process reads: kept in memory, and on disk as it was at the last commit.

    Parameters
    ----------
    folder : Path
        ``parts`` of the corpus, which is there.
    rank : int
        Number of the process.

    Notes
    -----
    Lines are only ever appended; a commit writes how many bytes of them hold beside the sums, in one file that takes
    the place of the one before. So a process that is killed anywhere has lost what came after the last commit, and
    nothing else; a machine too, since all is on disk before a commit names it.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.folder, self.rank = folder, rank
        self.state: State | None = None
        self.done: set[int] = set()
        self.sizes = {"texts": 0, "failed": 0}
        self._new: set[int] = set()  # texts whose largest keys were written since the last commit
        self._files: dict[str, Any] = {}
        if self._file("safetensors").exists():
            part = Part(folder, rank)
            self.state, self.sizes = (part.state if part.state.heads else None), part.sizes
            self.done = set(np.flatnonzero(part.done).tolist())
        (folder / f"{rank:04d}").mkdir(exist_ok=True)

    def _file(self, kind: str) -> Path:
        return self.folder / f"{self.rank:04d}.{kind}"

    def __enter__(self) -> Journal:
        try:
            with _disk_errors(self.folder):
                for kind, size in self.sizes.items():
                    self._files[kind] = self._file(f"{kind}.jsonl").open("ab")
                    self._files[kind].truncate(size)
                self._sweep()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        for file in self._files.values():
            with suppress(OSError):  # what is not on disk yet is not committed
                file.close()

    def line(self, kind: str, row: Mapping[str, Any]) -> None:
        """Append a line to ``texts`` or ``failed``."""
        with _disk_errors(self.folder):
            self._files[kind].write(json.dumps(row).encode() + b"\n")

    def save_sample(self, text: int, tensors: Mapping[str, Tensor]) -> None:
        """Write the largest keys of a text."""
        with _disk_errors(self.folder):
            save_file(dict(tensors), self.folder / f"{self.rank:04d}" / payload_name(text))
        self._new.add(text)

    def commit(self) -> None:
        """Make what was read since the last commit last."""
        if self.state is None and not any(file.tell() for file in self._files.values()):
            return
        with _disk_errors(self.folder):
            kept = set() if self.state is None else set(self.state.samples.kept())
            for text in self._new & kept:
                with (self.folder / f"{self.rank:04d}" / payload_name(text)).open("rb") as file:
                    os.fsync(file.fileno())
            self._new.clear()
            for kind, file in self._files.items():
                file.flush()
                os.fsync(file.fileno())
                self.sizes[kind] = file.tell()
        state = State([], 0, 0, 0) if self.state is None else self.state
        bits = np.zeros(max(self.done, default=-1) + 1, dtype=np.uint8)
        bits[list(self.done)] = 1
        tensors = state.tensors() | {"done": torch.from_numpy(np.packbits(bits))}
        tensors["sizes"] = torch.tensor([self.sizes["texts"], self.sizes["failed"]])
        with whole_file(self._file("safetensors"), "corpus()") as unfinished:
            save_file(tensors, unfinished)
        self._sweep()

    def _sweep(self) -> None:
        """Remove the largest keys of texts that are kept no longer, or came after the last commit."""
        kept = set() if self.state is None else {payload_name(text) for text in self.state.samples.kept()}
        for path in (self.folder / f"{self.rank:04d}").iterdir():
            if path.name not in kept:
                path.unlink()


@contextmanager
def _disk_errors(folder: Path) -> Iterator[None]:
    """Raise a FileError that says what to do, where the disk raises an error."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        if isinstance(error, FileError):
            raise
        rule = "the folder must be one that can be written."
        found = getattr(error, "strerror", None) or str(error).splitlines()[0]
        fix = "make room, and run the same command again: it goes on where it was."
        raise FileError("corpus()", rule, {"folder": str(folder)}, found=found, fix=fix) from error


@contextmanager
def hold(folder: Path, rank: int, world: int) -> Iterator[None]:
    """Keep other runs out of a folder, for as long as this process lives.

    Raises
    ------
    RecordingError
        If another run writes into it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        with mutex(folder):
            for path in folder.glob(f"{_LOCK}-*"):
                _, processes, number = path.name.split("-")
                if (int(processes) != world or int(number) == rank) and not _free(path):
                    rule = "one run at a time may write into a folder."
                    given, fix = {"folder": str(folder.parent)}, "wait for it, or give -o another folder."
                    raise RecordingError("corpus()", rule, given, found="another run that writes into it", fix=fix)
            handle = os.open(folder / f"{_LOCK}-{world}-{rank}", os.O_RDWR | os.O_CREAT, 0o644)
            stack.callback(os.close, handle)
            lock(handle)
        yield


def _free(path: Path) -> bool:
    handle = os.open(path, os.O_RDWR)
    try:
        lock(handle)
    except OSError:
        return False
    finally:
        os.close(handle)
    return True


@contextmanager
def mutex(folder: Path) -> Iterator[None]:
    """Let one process at a time look at the locks, and join the parts."""
    handle = os.open(folder / "mutex", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        lock(handle, wait=True)
        yield
    finally:
        os.close(handle)
