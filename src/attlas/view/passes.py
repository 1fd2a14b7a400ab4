"""Passes over whole heads: read from the store, or computed in the background, first near the rows that are shown."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import OrderedDict
from typing import Any, Literal, NamedTuple, TypeAlias

from attlas.view.exact import Head, Preparation, UnwantedError, Wanted, check_wanted
from attlas.view.pyramid import BASE, Pass, band_height, layout
from attlas.view.source import Place, Source
from attlas.view.store import Draft, Store
from attlas.view.worker import Worker

Kind: TypeAlias = Literal["all", "sums", "prepared"]

_STORE_FORMAT = 1
_TIMED_BANDS = 4  # bands after which their time says how long the rest will take: the first ones are the slowest
_IMMEDIATE_CELLS = 1 << 23  # cells up to which a pass is completed before the answer: some milliseconds
_OPEN_BYTES = 256 << 20  # bytes of passes that are held open


class PassKey(NamedTuple):
    """Which pass: the head, and whether all numbers, only sums, or what its cells are read from are computed."""

    place: Place
    kind: Kind


class PassJob:
    """One pass over a head, computed band by band: some rows at a time.

    Parameters
    ----------
    head : Head
        The matrix.
    store : Store
        Where the result is kept.
    name : str
        Name of the result in the store.
    facts : dict
        What must be equal for a stored pass to be this one.
    kind : {"all", "sums"}
        Whether all numbers are computed, or only sums.
    """

    def __init__(self, head: Head, store: Store, name: str, facts: dict[str, object], kind: Kind = "all") -> None:
        self.head = head
        self._band = head.band if kind == "all" else head.sums
        self.row = 0.0  # the bands nearest to it come first
        self.error = ""
        self.seconds = 0.0  # of computing, so far
        shapes = layout(head.m, head.n)
        stored = store.open(name, facts, shapes)
        # A pass that was stored is whole: else a draft takes its numbers band by band.
        self._draft = Draft(store, name, facts, shapes) if stored is None else None
        arrays = stored if self._draft is None else self._draft.arrays
        height = band_height(head.n, head.heads, dense=head.heads > 1 and kind == "all")
        self.result = Pass(head.m, head.n, arrays or {}, height, complete=stored is not None)
        self.nbytes = sum(array.nbytes for array in self.result.arrays.values())
        self._lock = threading.Lock()
        if self.result.complete:
            self._store_result()

    @property
    def told(self) -> dict[str, Any]:
        """How many bands are done, of how many, and how many seconds are left; None while too few are done to tell."""
        done, total = int(self.result.done.sum()), len(self.result.done)
        enough = done >= min(max(_TIMED_BANDS, total // 20), total)
        return {"done": done, "total": total, "seconds_left": self.seconds / done * (total - done) if enough else None}

    def step(self, wanted: Wanted = None) -> bool:
        """Compute one band; return whether there are more."""
        with self._lock:
            band = None if self.error else self.result.next_band(self.row)
            if band is None:
                return False
            begin = time.monotonic()
            try:
                self.result.add(band, self._band(self.result.rows_of(band), 1 << BASE, wanted))
            except UnwantedError:
                return False
            except (RuntimeError, ValueError, MemoryError) as error:
                self.error = str(error).partition("\n")[0] or type(error).__name__
                return False
            self.seconds += time.monotonic() - begin
            if self.result.complete:
                self._store_result()
            return not self.result.complete

    def _store_result(self) -> None:
        """Move a new result from its draft to the store."""
        if self._draft is not None:
            self._draft.finish()

    def close(self) -> None:
        """Remove the draft of a pass that is not complete; nobody can ask for more of it."""
        with self._lock:
            if self._draft is not None:
                self._draft.discard()
            if not self.result.complete:
                self.error = "nobody asked for it any more"


class Passes:
    """The passes over the heads of what is shown; the last ones used are open.

    Parameters
    ----------
    source : Source
        What is shown.
    store : Store
        Where results are kept.
    worker : Worker
        Computes passes in the background.
    """

    def __init__(self, source: Source, store: Store, worker: Worker) -> None:
        self._source, self._store, self._worker = source, store, worker
        self._jobs: OrderedDict[PassKey, PassJob] = OrderedDict()
        self._lock = threading.Lock()

    def get(
        self, place: Place, head: Head, *, sums: bool = False, row: float | None = None, wanted: Wanted = None
    ) -> PassJob:
        """Return a pass, complete or not; the rest of it is computed in the background, first near a row.

        Parameters
        ----------
        place : Place
            Which head.
        head : Head
            Its matrix.
        sums : bool
            Whether sums of blocks and columns are enough: for a mean over heads they take much less time.
        row : float, optional
            Row that is shown.
        wanted : callable, optional
            Returns whether somebody still waits.

        Raises
        ------
        UnwantedError
            If nobody waits any more while a small pass is computed.
        """
        sums_are_faster = sums and head.heads > 1 and head.is_uniform and self.complete_pass(place) is None
        key = PassKey(place, "sums" if sums_are_faster else "all")
        job = self._job_of_pass(key, head)
        if row is not None:
            job.row = row
        if job.result.complete or job.error:
            return job
        if head.m * head.n * head.heads <= _IMMEDIATE_CELLS:
            while job.step():
                check_wanted(wanted)
        else:
            self._worker.ask(key, job)
        return job

    def prepare(self, place: Place, job: Preparation, wanted: Wanted = None) -> float:
        """Return the share that is there of what the cells of a head are read from; the rest is computed meanwhile."""
        if job.share >= 1:
            return 1.0
        if job.is_short:
            while job.step():
                check_wanted(wanted)
        else:
            self._worker.ask(PassKey(place, "prepared"), job)
        if job.error and job.share < 1:
            raise RuntimeError(job.error)
        return job.share

    def complete_pass(self, place: Place, *, sums: bool = False) -> Pass | None:
        """Return a pass that is complete and open, or None; with `sums`, one of sums alone will do."""
        kinds: tuple[Kind, ...] = ("all", "sums") if sums else ("all",)
        with self._lock:
            jobs = [self._jobs.get(PassKey(place, kind)) for kind in kinds]
        return next((job.result for job in jobs if job is not None and job.result.complete), None)

    def move_to(self, place: Place, row: float) -> None:
        """Let the unfinished passes of a place continue near a row."""
        with self._lock:
            jobs = [(key, job) for key, job in self._jobs.items() if key.place == place]
        for key, job in jobs:
            job.row = row
            if not (job.result.complete or job.error):
                self._worker.ask(key, job)

    @property
    def nbytes(self) -> int:
        """Bytes of the passes that are open, in files that are mapped."""
        with self._lock:
            return sum(job.nbytes for job in self._jobs.values())

    def _job_of_pass(self, key: PassKey, head: Head) -> PassJob:
        """Return the job of a pass, opened if it is not open, and mark it as used last."""
        with self._lock:
            job = self._jobs.get(key)
            if job is None:
                facts = self._facts_of_pass(key, head)
                name = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:40]
                job = self._jobs[key] = PassJob(head, self._store, name, facts, key.kind)
            self._jobs.move_to_end(key)
            self._close_oldest()
            return job

    def _close_oldest(self) -> None:
        """Close the passes that were asked for longest ago, where too many are open; the store keeps complete ones."""
        total = sum(job.nbytes for job in self._jobs.values())
        for key, job in list(self._jobs.items())[:-1]:
            if total <= _OPEN_BYTES:
                return
            total -= job.nbytes
            del self._jobs[key]
            job.close()

    def _facts_of_pass(self, key: PassKey, head: Head) -> dict[str, object]:
        """Return the facts that identify a stored pass; its name in the store depends on their order."""
        place = key.place
        recording = {"format": _STORE_FORMAT, "content": self._source.entries[place.entry].key}
        which = {"batch": place.batch, "head": place.head, "variant": place.variant, "kind": key.kind}
        return recording | which | {"block": 1 << BASE, "m": head.m, "n": head.n}

    def close(self) -> None:
        """Close all passes."""
        with self._lock:
            for job in self._jobs.values():
                job.close()
            self._jobs.clear()
