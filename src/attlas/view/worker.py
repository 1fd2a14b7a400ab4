"""Work in the background, in small steps, which lets every question go first."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Protocol

_PATIENCE_SECONDS = 0.25  # seconds that a step waits at most while questions are being answered
_MOST_WAITING_JOBS = 16  # jobs that wait; those that nobody has asked for longest are given up


class Job(Protocol):
    """Work that is done step by step."""

    def step(self) -> bool:
        """Do a little, and return whether there is more."""


class Worker:
    """One thread that works on what was asked for last.

    Notes
    -----
    Between two steps it waits until no question is being answered, a quarter of a second at most, so that many
    questions cannot stop it for good.
    """

    def __init__(self) -> None:
        self._jobs: dict[Hashable, Job] = {}  # the last one is asked for last
        self._change = threading.Condition()  # guards what follows, and tells the thread of changes
        self._questions = 0  # that are being answered now
        self._closed = False
        self._thread: threading.Thread | None = None

    def ask(self, key: Hashable, job: Job, *, urgent: bool = True) -> None:
        """Put a job before all others, or where it is not urgent behind them; one that waits already is moved."""
        with self._change:
            if self._closed:
                return
            old = self._jobs.pop(key, None)
            job = job if old is None else old
            self._jobs = {**self._jobs, key: job} if urgent else {key: job, **self._jobs}
            for idle in list(self._jobs)[: max(len(self._jobs) - _MOST_WAITING_JOBS, 0)]:
                del self._jobs[idle]
            if self._thread is None:
                self._thread = threading.Thread(target=self._run_jobs, name="attlas-view", daemon=True)
                self._thread.start()
            self._change.notify_all()

    @property
    def jobs(self) -> dict[Hashable, Job]:
        """What waits and what is being done, the most urgent first."""
        with self._change:
            return dict(reversed(self._jobs.items()))

    @contextmanager
    def question(self) -> Iterator[None]:
        """Let the work wait while a question is answered."""
        with self._change:
            self._questions += 1
        try:
            yield
        finally:
            with self._change:
                self._questions -= 1
                self._change.notify_all()

    def rest(self) -> None:
        """Give up all jobs, after the step that is being done."""
        with self._change:
            self._jobs.clear()

    @property
    def closed(self) -> bool:
        """Whether no more work is done."""
        return self._closed

    def close(self) -> None:
        """Stop after the step that is being done, and wait for it."""
        with self._change:
            self._closed = True
            self._jobs.clear()
            self._change.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run_jobs(self) -> None:
        """Do the most urgent job step by step until the worker is closed; let it wait while questions are answered."""
        while True:
            with self._change:
                self._change.wait_for(lambda: self._closed or self._jobs)
                end = time.monotonic() + _PATIENCE_SECONDS
                while self._questions and not self._closed and time.monotonic() < end:
                    self._change.wait(end - time.monotonic())
                if self._closed:
                    return
                if not self._jobs:
                    continue
                key, job = next(reversed(self._jobs.items()))
            if not job.step():
                with self._change:
                    if self._jobs.get(key) is job:
                        del self._jobs[key]
