"""The parts of an unfinished corpus: one file for each process, and each as it was at the last commit."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from numpy.typing import NDArray
from torch import Tensor

from attlas.corpus.known import KnownTexts, row_identity
from attlas.corpus.state import State
from attlas.corpus.store import Store
from attlas.foundation.compat import cached_property

PARTS = "parts"
_ENTRY_KINDS = ("texts", "failed")
_FORMAT_VERSION = 1
_MOST_HELD_BYTES = 1 << 26  # bytes of largest keys that wait for the next commit


def payload_name(text: int) -> str:
    """Return the name of the file with the largest keys of a text."""
    return f"{text:08d}.safetensors"


class Part:
    """What one process has read, as it was at the last commit.

    Parameters
    ----------
    store : Store
        Its file.
    run : str
        Checksum of what the run is about.

    Attributes
    ----------
    known : KnownTexts
        The texts, by number.
    generation : int
        Number of the last commit.
    kept : list of int
        Texts whose largest keys are there.

    Raises
    ------
    RecordingError
        If the file is damaged, or of another run.
    """

    def __init__(self, store: Store, run: str) -> None:
        self.store = store
        with store.parsing():
            head = json.loads(store.get("head", 0))
            if (head["version"], head["run"]) != (_FORMAT_VERSION, run):
                raise store.damaged("what another run has read")
            self.generation, self.has_state = int(head["generation"]), bool(head["state"])
            self.kept = [int(text) for text in head["kept"]]
            self.totals = {
                kind: [0, 0] for kind in _ENTRY_KINDS
            }  # of the rows of a kind: their number, a sum of identities
            self.known = KnownTexts.of(self._entries_of_texts())
            if self.totals != head["totals"]:
                raise store.damaged("fewer or more texts than were committed")

    def _entries_of_texts(self) -> Iterator[tuple[int, int, bool]]:
        """Yield number and identity of each text, and whether it was read; add up the totals."""
        for kind in _ENTRY_KINDS:
            for row in self.lines(kind):
                _add_row(self.totals[kind], row)
                yield row["text"], row_identity(row), kind == "texts"

    @cached_property
    def state(self) -> State | None:
        """The sums, None where no text was read."""
        if not self.has_state:
            return None
        with self.store.parsing():
            arrays = self.store.get_arrays("state", self.generation)
            return State.of({name: torch.from_numpy(array) for name, array in arrays.items()})

    def lines(self, kind: str) -> Iterator[dict[str, Any]]:
        """Yield the rows of ``texts`` or ``failed``, by ascending text."""
        for number, _, data in self.store.entries(kind):
            with self.store.parsing():
                row: dict[str, Any] = json.loads(data)
                if row["text"] != number:
                    raise self.store.damaged(f"text {row['text']} as text {number}")
            yield row

    def sample(self, text: int) -> dict[str, Tensor] | None:
        """Return the largest keys of a text, None where they are not here."""
        if text not in self.kept:
            return None
        return {name: torch.from_numpy(array) for name, array in self.store.get_arrays("sample", text).items()}


def _add_row(totals: list[int], row: Mapping[str, Any], times: int = 1) -> None:
    """Count a row, and add up identities: a row that is missing, or that stands there twice, changes both."""
    totals[0] += times
    totals[1] = (totals[1] + times * (row_identity(row) + row["text"])) % (1 << 64)


@contextmanager
def parts_of(folder: Path, run: str, *, copied: bool = False) -> Iterator[list[Part]]:
    """Open what each process has read of a corpus, by its number, for the time of a ``with`` block.

    Parameters
    ----------
    folder : Path
        The corpus.
    run : str
        Checksum of what the run is about.
    copied : bool
        Whether copies are read, each as it is between two commits, so that a process that writes waits for no reader.
    """
    with ExitStack() as stack:
        apart = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="attlas-parts-"))) if copied else None
        found = []
        for path in sorted((folder / PARTS).glob("[0-9]*.sqlite")):
            store = stack.enter_context(Store(path))
            if apart is None:
                store.hold_still()
            else:
                store.copy_to(apart / path.name)
                store.close()
                store = stack.enter_context(Store(apart / path.name, shown=path))
            found.append(Part(store, run))
        yield found


class Journal:
    """What one process reads: kept in memory, and on disk as it was at the last commit.

    Parameters
    ----------
    folder : Path
        ``parts`` of the corpus, which is there.
    rank : int
        Number of the process.
    run : str
        Checksum of what the run is about.

    Attributes
    ----------
    state : State or None
        The sums, None before the first text.

    Notes
    -----
    A commit is one transaction: a process that is killed anywhere has lost what came after the last one, and nothing
    else; a machine too. Memory: the largest keys that wait for a commit, 64 MiB or those of one text.
    """

    def __init__(self, folder: Path, rank: int, run: str) -> None:
        path = folder / f"{rank:04d}.sqlite"
        self._run, self._rows = run, list[tuple[str, dict[str, Any]]]()
        self._samples: dict[int, dict[str, NDArray[Any]]] = {}
        self.state: State | None = None
        if not (path.exists() or path.is_symlink()):
            Store.create(path, "head", 0, self._head_entry({kind: [0, 0] for kind in _ENTRY_KINDS}, 0))
        self._store = Store(path)
        try:
            self._store.check_pages()
            part = Part(self._store, run)
            self.state, self._totals, self._generation = part.state, part.totals, part.generation
            for text in part.kept:  # damage is found before days of reading, and not after them
                part.sample(text)
        except BaseException:
            self._store.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._store.close()

    def line(self, kind: str, row: Mapping[str, Any]) -> None:
        """Append a row to ``texts`` or ``failed``."""
        self._rows.append((kind, dict(row)))

    def save_sample(self, text: int, tensors: Mapping[str, Tensor]) -> None:
        """Keep the largest keys of a text."""
        self._samples[text] = {name: tensor.numpy() for name, tensor in tensors.items()}
        if sum(array.nbytes for arrays in self._samples.values() for array in arrays.values()) > _MOST_HELD_BYTES:
            with self._store.commit():  # no head names them yet
                self._write_samples()
            self._samples.clear()

    def commit(self) -> None:
        """Make what was read since the last commit last."""
        if not self._rows:
            return
        totals = {kind: list(total) for kind, total in self._totals.items()}
        generation = self._generation + 1
        with self._store.commit():
            for kind, row in self._rows:
                self._forget_failure(row["text"], totals)
                _add_row(totals[kind], row)
                self._store.put(kind, row["text"], json.dumps(row).encode())
            self._write_samples()
            if self.state is not None:
                # Beside the sums before, whose pages the next commit takes: nothing is written twice.
                arrays = {name: tensor.numpy() for name, tensor in self.state.tensors().items()}
                self._store.put_arrays("state", generation, arrays)
                self._store.remove("state", self._generation)
            self._store.put("head", 0, self._head_entry(totals, generation))
            self._remove_unkept()
        self._totals, self._generation = totals, generation
        self._rows.clear()
        self._samples.clear()

    def _head_entry(self, totals: Mapping[str, list[int]], generation: int) -> bytes:
        """Return the entry that says what else must be in the file."""
        facts = {
            "version": _FORMAT_VERSION,
            "run": self._run,
            "generation": generation,
            "state": self.state is not None,
        }
        return json.dumps(facts | {"totals": totals, "kept": self._kept_texts()}).encode()

    def _kept_texts(self) -> list[int]:
        """Return the numbers of the texts whose largest keys are kept."""
        return [] if self.state is None else self.state.samples.kept()

    def _forget_failure(self, text: int, totals: Mapping[str, list[int]]) -> None:
        """Remove the row of a text that failed, and is another one now."""
        for _, _, data in list(self._store.entries("failed", text)):
            _add_row(totals["failed"], json.loads(data), -1)
            self._store.remove("failed", text)

    def _write_samples(self) -> None:
        """Write the arrays of those texts that are still kept."""
        kept = set(self._kept_texts())
        for text, arrays in self._samples.items():
            if text in kept:
                self._store.remove("sample", text)  # one that a process wrote before it was killed
                self._store.put_arrays("sample", text, arrays)

    def _remove_unkept(self) -> None:
        """Remove the largest keys of texts that are kept no longer, or came after the last commit."""
        for text in set(self._store.numbers("sample")) - set(self._kept_texts()):
            self._store.remove("sample", text)
