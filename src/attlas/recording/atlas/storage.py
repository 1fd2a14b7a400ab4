"""An atlas as a folder: tensors in safetensors files, the rest in ``atlas.json``, whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from glob import escape
from pathlib import Path
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from attlas.engine.problem import Problem
from attlas.errors import DtypeError, RecordingError, public
from attlas.foundation.files import discard_folder, lock, replace_folder, sync_folder
from attlas.foundation.png import encoded
from attlas.masks import Mask, runs_of
from attlas.matrix import AttentionMatrix, SoftmaxWeights, Weights
from attlas.matrix.stored import STORED_KINDS
from attlas.recording.atlas.bookmarks import BOOKMARKS, Bookmark, write_bookmarks
from attlas.recording.atlas.deserialization import Reader, entry_from
from attlas.recording.atlas.entry import Entry
from attlas.recording.atlas.manifest import MANIFEST, is_data_file, write_manifest
from attlas.recording.atlas.serialization import Spec, mask_spec, result_spec, score_spec, settings_of
from attlas.recording.atlas.stored_parts import parts_spec
from attlas.recording.atlas.tensors import Written, fingerprint, storable, write_bytes, write_tensors
from attlas.scores import Score


class Writer:
    """Write an atlas to a folder while its entries come in, so that memory does not grow with their number.

    The folder appears when `finish` has written everything; before that, and if the process dies, there is
    only a hidden folder ``.NAME.partial-...`` beside it, which the next writer removes.

    Parameters
    ----------
    folder : str or Path
        Where the atlas goes.
    overwrite : bool, default False
        Whether an atlas that is there already is replaced, once the new one is complete.
    asked_by : str
        What errors about the folder name as their place.

    Raises
    ------
    RecordingError
        If the folder is there and may not be replaced, or cannot be written.

    See Also
    --------
    attlas.load : the way back.

    Notes
    -----
    Memory: a slice of 1 MiB beside the tensors themselves. Tensors that were only expanded (grouped keys)
    are stored once, and so is a mask that several layers share. Time: that of writing and of SHA-256.

    Examples
    --------
    >>> import tempfile, torch, attlas
    >>> from attlas.recording.atlas import Atlas, Entry
    >>> from attlas.recording.atlas.storage import Writer
    >>> q = torch.randn(1, 2, 5, 8)
    >>> entry = Entry("attn", 0, "self", 0, (0, 1), (0, 5), 0, (1, 2, 5, 5), attlas.attend(q, q))
    >>> with tempfile.TemporaryDirectory() as folder, Writer(f"{folder}/run.atlas") as writer:
    ...     atlas = Atlas([writer.add(entry)])
    ...     writer.finish(atlas.entries, atlas.facts, atlas.bookmarks)
    ...     bool((atlas[0].to_dense() == entry.matrix.to_dense()).all())
    True
    """

    def __init__(self, folder: str | os.PathLike[str], overwrite: bool = False, asked_by: str = "save()") -> None:
        self.folder = Path(folder).absolute()
        self.overwrite = overwrite
        self.asked_by = asked_by
        self.files: dict[str, Written] = {}
        # By identity of what `add` returned: it, its plain data, and the statistics that it had.
        self._records: dict[int, tuple[Entry, Spec, dict[str, Any]]] = {}
        self._shared: dict[str, Spec] = {}
        self._runs: WeakKeyDictionary[Mask, dict[tuple[Any, ...], Mask]] = WeakKeyDictionary()
        self._pending: dict[str, Tensor] = {}
        self._done = False
        self.partial, self._lock = self.begin()
        self._reader = Reader(self.partial)

    def begin(self) -> tuple[Path, int]:
        """Return a new hidden folder beside the target, and a handle that locks it."""
        with self.errors_name_folder():
            self.folder.parent.mkdir(parents=True, exist_ok=True)
            _clear_leftovers(self.folder)
            self._check_target()
            return _new_partial(self.folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove what was written unless it was finished."""
        if not self._done:
            self._done = True
            shutil.rmtree(self.partial, ignore_errors=True)
            os.close(self._lock)

    @torch.no_grad()
    @public("Writer.add()")
    def add(self, entry: Entry) -> Entry:
        """Write one entry, and return it with everything in the memory-mapped file.

        Parameters
        ----------
        entry : Entry
            The entry; its tensors may live on any device.

        Returns
        -------
        Entry
            The same entry, whose tensors are read from disk when they are needed.

        Raises
        ------
        DtypeError
            If something in it cannot be stored.
        RecordingError
            If it cannot be written.
        """
        self._check_open()
        record = self._record(entry)
        self.flush()
        # Scores of the user are read back as the objects that they are.
        written = entry_from(record, self._reader, _scores_by_class(entry.matrix))
        self._records[id(written)] = (written, record, dict(written.statistics))
        return written

    @torch.no_grad()
    @public("Writer.finish()")
    def finish(
        self,
        entries: Sequence[Entry],
        facts: Mapping[str, Any],
        bookmarks: Iterable[Bookmark],
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        """Write what is missing, then ``atlas.json``, and give the folder its name.

        Parameters
        ----------
        entries : sequence of Entry
            Those that `add` returned, or others, which are written now.
        facts : mapping
            What `Atlas.facts` says of them.
        bookmarks : iterable of Bookmark
            Named views.
        progress : callable, optional
            Called with the number of entries done and their total.

        Raises
        ------
        DtypeError
            If something in it cannot be stored.
        RecordingError
            If two entries have one place, or the folder cannot be written.
        """
        self._check_open()
        _check_unique(entries)
        records = []
        for done, entry in enumerate(entries):
            records.append(self._finished(entry))
            if progress is not None:
                progress(done + 1, len(entries))
        ids = None if facts["ids"] is None else self.put("ids", facts["ids"])
        parts = {"parts": [parts_spec(one, self._put_once()) for one in facts["parts"]]} if facts.get("parts") else {}
        # Writes all tensors that `put` keeps, so that `content` names files that are there.
        self.flush()
        content = {**facts, **parts, "ids": ids, "entries": records}
        if facts.get("images"):
            content["images"] = [self._picture(number, picture) for number, picture in enumerate(facts["images"])]
        _check_plain(content)
        with self.errors_name_folder():
            write_bookmarks(self.partial, bookmarks)
        self.seal(content)
        self._done = True
        # Closing the file releases the lock, by which other writers knew that this one was at work.
        os.close(self._lock)

    def seal(self, content: Mapping[str, Any]) -> None:
        """Write ``atlas.json`` and give the folder its name."""
        with self.errors_name_folder():
            write_manifest(self.partial, content, self.files)
            sync_folder(self.partial)
            self._check_target()
            replace_folder(self.partial, self.folder)

    def _finished(self, entry: Entry) -> Spec:
        """Return the record of an entry; what of it is not in a file yet is written now."""
        if id(entry) not in self._records:
            record = self._record(entry)
            self.flush()
            return record
        _, record, known = self._records[id(entry)]
        new = {name: value for name, value in entry.statistics.items() if known.get(name) is not value}
        kept = {name: spec for name, spec in record["statistics"].items() if name in entry.statistics}
        kept |= {name: result_spec(name, value, self.put) for name, value in new.items()}
        return record | {"statistics": kept}

    def _record(self, entry: Entry) -> Spec:
        """Return an entry as plain data; its tensors go to the next file."""
        record: Spec = {"name": entry.name, "kind": entry.kind}
        record |= {key: int(getattr(entry, key)) for key in ("layer", "call", "first_key")}
        record |= {key: list(map(int, getattr(entry, key))) for key in ("heads", "queries", "shape")}
        if entry.query_mask is not None:
            record["query_mask"] = self.put("query_mask", entry.query_mask)
        record |= {name: self.put(name, t) for name, t in entry.values_and_norms.items()}
        _scores_by_class(entry.matrix)  # raises where they could not be read again
        record["matrix"] = None if entry.matrix is None else self._weights(entry.matrix.weights)
        results = entry.statistics.items()
        record["statistics"] = {name: result_spec(name, result, self.put) for name, result in results}
        return record

    @public("save()")
    def _weights(self, weights: Weights) -> Spec:
        """Return weights as plain data; their tensors go to the next file."""
        if weights.softmax is not None:
            return self._softmax(weights.softmax)
        settings = weights.to_dict()
        if settings is None or type(weights).__name__ not in STORED_KINDS:
            rule = "weights of this kind are not stored."
            raise DtypeError(rule, weights.description, "save its statistics, or the matrices that it is made of")
        return {"weights": type(weights).__name__, "settings": self._setting(settings)}

    def _setting(self, value: Any) -> Any:
        """Return a setting of weights as plain data."""
        if isinstance(value, Tensor):
            return {"tensor": self.put("setting", value)}
        if isinstance(value, Weights):
            return {"matrix": self._weights(value), "shape": list(value.shape)}
        if isinstance(value, dict):
            return {name: self._setting(own) for name, own in value.items()}
        return list(map(self._setting, value)) if isinstance(value, list) else value

    def _softmax(self, weights: SoftmaxWeights) -> Spec:
        """Return the problem of a softmax and its log-sum-exp as plain data."""
        problem = weights.problem
        find_runs = partial(self._runs_in, problem)
        return {
            "q": self.put("q", problem.q),
            "k": self.put("k", problem.k),
            "lse": self.put("lse", weights.lse_on_cpu()),
            "sink": None if problem.sink is None else self.put("sink", problem.sink),
            **({"partial": True} if problem.partial else {}),
            **({} if weights.are_shares else {"weighted": True}),
            "score": score_spec(problem.score, self._put_shared),
            "mask": None if problem.mask is None else mask_spec(problem.mask, self._put_shared, find_runs),
            "batch_ids": problem.batch_ids.tolist(),
            "head_ids": problem.head_ids.tolist(),
        }

    def _runs_in(self, problem: Problem, mask: Mask) -> Mask:
        """Return the runs of a mask in a matrix, found once for all entries of one size."""
        ids = (problem.batch_ids, problem.head_ids)
        batch, heads = (int(index.max()) + 1 if index.numel() else 0 for index in ids)
        sizes = (batch, heads, *problem.shape[2:])
        runs = self._runs.setdefault(mask, {})
        if sizes not in runs:
            runs[sizes] = runs_of(mask, *sizes, device=problem.device)
        return runs[sizes]

    @public("save()")
    def part(self, name: str, t: Tensor) -> Tensor:
        """Return the tensor that is written for a tensor; a subclass may write a part of it."""
        return storable(name, t)

    def put(self, name: str, t: Tensor) -> Spec:
        """Keep a tensor for the next file, and return where it will be found."""
        own = self.part(name, t)
        key, number = name, 1  # names are counted: q, q_2, q_3
        while key in self._pending:
            number += 1
            key = f"{name}_{number}"
        self._pending[key] = own
        return {"file": self._file(), "tensor": key, "own": list(own.shape), "shape": list(t.shape)}

    @public("save()")
    def _put_shared(self, name: str, t: Tensor) -> Spec:
        """Keep a tensor unless one with the same numbers was kept before; return where it will be found."""
        own = storable(name, t)
        key = fingerprint(own)
        if key not in self._shared:
            self._shared[key] = self.put(name, own)
        return self._shared[key] | {"own": list(own.shape), "shape": list(t.shape)}

    def _put_once(self) -> Callable[[str, Tensor], Spec]:
        """Return a `put` that keeps a tensor once, wherever the same object stands."""
        known: dict[int, tuple[Tensor, Spec]] = {}

        def put(name: str, t: Tensor) -> Spec:
            """Keep a tensor, and return where it will be found."""
            if id(t) not in known:
                known[id(t)] = t, self.put(name, t)
            return known[id(t)][1]

        return put

    def _file(self) -> str:
        """Return the name of the next file of tensors."""
        return f"{len(self.files):04d}.safetensors"

    def flush(self) -> None:
        """Write the tensors that are kept to a file of their own."""
        if not self._pending:
            return
        name, tensors, self._pending = self._file(), self._pending, {}
        self.files[name] = self.write(name, tensors)

    def _picture(self, number: int, picture: Tensor | None) -> str | None:
        """Write a picture to a file of its own, and return its name."""
        if picture is None:
            return None
        name = f"image-{number}.png"
        with self.errors_name_folder():
            self.files[name] = write_bytes(self.partial / name, encoded(picture))
        return name

    def write(self, name: str, tensors: Mapping[str, Tensor]) -> Written:
        """Write one file of tensors, and return its size and checksum."""
        with self.errors_name_folder():
            return write_tensors(self.partial / name, tensors)

    def _check_open(self) -> None:
        """Raise an error where the writer has finished."""
        if self._done:
            fix = "make another Writer; attlas.load(folder) reads what was finished."
            raise RecordingError("a writer writes one folder.", "a closed writer", fix)

    def _check_target(self) -> None:
        """Raise unless there is no folder of this name, an empty one, or an atlas that may be replaced."""
        folder = self.folder
        is_folder = folder.is_dir() and not folder.is_symlink()
        names = sorted(path.name for path in folder.iterdir()) if is_folder else []
        if not names and (is_folder or not os.path.lexists(folder)):
            return
        foreign = [name for name in names if name not in (MANIFEST, BOOKMARKS) and not is_data_file(name)]
        if foreign or MANIFEST not in names:
            rule, fix = "only a folder that holds an atlas and nothing else is replaced.", "give another folder."
            found = ", ".join(foreign[:4]) or (f"no {MANIFEST}" if is_folder else "no folder")
        elif not self.overwrite:
            rule, found = "the folder must not be there yet.", "an atlas"
            fix = "give another folder, or remove this one."
            if self.asked_by == "save()":
                fix = "give another folder, or overwrite=True to replace it."
        else:
            return
        raise RecordingError(rule, found, fix, folder=str(folder), where=self.asked_by)

    @contextmanager
    def errors_name_folder(self) -> Iterator[None]:
        """Turn an error of the file system into a RecordingError that names the folder."""
        try:
            yield
        except OSError as error:
            rule, fix = "the folder must be one that can be written.", "give a folder on a disk with room."
            found = error.strerror or str(error)
            raise RecordingError(rule, found, fix, folder=str(self.folder), where="save()") from error


def _check_unique(entries: Iterable[Entry]) -> None:
    """Raise if two entries have the same kind, layer and call."""
    names: dict[tuple[str, int], str] = {}
    for entry in entries:
        key = (entry.path, entry.call)
        if key in names:
            rule, fix = "each pass of each layer may stand in an atlas once.", "give the passes of one layer the calls "
            both, found = {"entries": f"{names[key]} and {entry.name}"}, f"both are {entry.path}, call {entry.call}"
            raise RecordingError(rule, found, fix + "0, 1, 2 ...", arguments=both, where="save()")
        names[key] = entry.name


def _check_plain(content: Mapping[str, Any]) -> None:
    """Raise unless names, tokens, spans and details can be written as JSON."""
    for key, value in content.items():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            rule = f"{key} of an atlas must be plain data: texts, finite numbers, True, False, None, lists, dicts."
            raise DtypeError(rule, str(error), f"atlas.{key} = ... without other objects.", where="save()") from error


# ------------------------------------------------------------------------------------------------------- the folder


def _new_partial(folder: Path) -> tuple[Path, int]:
    """Make a hidden folder beside the target, and lock it for as long as this process lives."""
    while True:
        partial = folder.with_name(f".{folder.name}.partial-{os.urandom(4).hex()}")
        partial.mkdir()
        handle = _lock(partial)
        if handle is not None and partial.is_dir():
            return partial, handle
        if handle is not None:  # another writer took it for a leftover before it was locked
            os.close(handle)


def _lock(partial: Path) -> int | None:
    """Lock a folder; None where a living process holds it. The system lets go when that process dies."""
    if os.name == "nt":  # which locks no folders
        return os.open(os.devnull, os.O_RDONLY)
    try:
        handle = os.open(partial, os.O_RDONLY)
    except FileNotFoundError:
        return None
    try:
        lock(handle)
    except OSError:
        os.close(handle)
        return None
    return handle


def _clear_leftovers(folder: Path) -> None:
    """Remove what killed writers of this folder left, and put back what one of them was about to replace."""
    for old in folder.parent.glob(f".{escape(folder.name)}.old-????????"):
        if folder.exists():
            discard_folder(old, folder)
        else:
            old.rename(folder)
    if os.name == "nt":  # a leftover is not told from a writer at work, and stays
        return
    for leftover in folder.parent.glob(f".{escape(folder.name)}.partial-????????"):
        # None where its writer is at work: it holds the lock.
        handle = _lock(leftover)
        if handle is not None:
            shutil.rmtree(leftover, ignore_errors=True)
            os.close(handle)


def _scores_in(value: Any) -> list[Score]:
    """Return the scores that weights use, or the settings (dict or list) that hold weights."""
    if isinstance(value, Weights) and value.softmax is not None:
        return [part for part in value.softmax.problem.score.modules() if isinstance(part, Score)]
    inner = value.to_dict() if isinstance(value, Weights) else value
    settings = inner.values() if isinstance(inner, dict) else inner if isinstance(inner, list) else ()
    return [score for part in settings for score in _scores_in(part)]


def _scores_by_class(matrix: AttentionMatrix | None) -> dict[str, Score]:
    """Return the scores of a matrix by the names of their classes, by which those of the user are read again.

    Raises
    ------
    DtypeError
        If it has two objects of one class of the user's own, which only their settings could tell apart.
    """
    found: dict[str, Score] = {}
    for score in [] if matrix is None else _scores_in(matrix.weights):
        name = type(score).__name__
        if found.setdefault(name, score) is not score and settings_of(score) is None:
            rule = "two scores of one class of your own must have settings to be stored in one matrix."
            raise DtypeError(rule, f"two objects of {name}", f"give {name} a to_dict() and a from_dict().", score=name)
    return found
