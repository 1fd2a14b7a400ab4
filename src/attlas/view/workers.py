"""A few threads that answer requests: the most urgent first, and none that nobody waits for any more."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from attlas.view.urgency import Urgency, is_quick

if TYPE_CHECKING:
    from attlas.view.service import Answer, Service

__all__ = ["Job", "Workers"]


class Job:
    """One request, from the moment it comes until it is answered or dropped.

    Parameters
    ----------
    name : str
        What is asked for.
    parameters : mapping
        What it is asked with.
    loop : AbstractEventLoop
        Where the answer is awaited.
    """

    def __init__(self, name: str, parameters: Mapping[str, str], loop: asyncio.AbstractEventLoop) -> None:
        self.name = name
        self.parameters = parameters
        self.answer: asyncio.Future[Answer | None] = loop.create_future()
        self._loop = loop
        self._dropped = threading.Event()

    def drop(self) -> None:
        """Say that nobody waits for the answer any more."""
        self._dropped.set()

    def wanted(self) -> bool:
        """Tell whether somebody still waits."""
        return not self._dropped.is_set()

    def finish(self, answer: Answer | None, error: BaseException | None = None) -> None:
        """Hand over the answer, None where the request was dropped; from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._set, answer, error)
        except RuntimeError:  # the loop has ended; so has everybody who waited
            self.drop()

    def _set(self, answer: Answer | None, error: BaseException | None) -> None:
        if self.answer.done():
            return
        if error is None:
            self.answer.set_result(answer)
        else:
            self.answer.set_exception(error)


class Workers:
    """Threads that ask a service.

    Parameters
    ----------
    service : Service
        What answers; many threads ask it at once.
    urgency : Urgency
        Which request goes first.
    threads : int
        Threads for requests of every kind; one more takes only those that are quick.

    Notes
    -----
    Waiting requests are ranked when a thread is free, and not when they come: what a page looks at may have
    changed in between. There are never more of them than connections, so that a look at each is cheap.
    """

    def __init__(self, service: Service, urgency: Urgency, threads: int) -> None:
        self._service = service
        self._urgency = urgency
        self._ready = threading.Condition()
        self._waiting: list[Job] = []
        self._running: set[Job] = set()
        self._closed = False
        kinds = [False] * threads + [True]
        self._threads = [
            threading.Thread(target=self._serve, args=(quick,), name=f"attlas-view-{number}", daemon=True)
            for number, quick in enumerate(kinds)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, name: str, parameters: Mapping[str, str]) -> Job:
        """Take a request; its answer is awaited in the running loop."""
        job = Job(name, parameters, asyncio.get_running_loop())
        with self._ready:
            if self._closed:
                job.drop()
                job.finish(None)
            else:
                self._waiting.append(job)
                self._ready.notify_all()
        return job

    def close(self, seconds: float = 5.0) -> None:
        """Drop what waits and what runs, and wait for the threads.

        Parameters
        ----------
        seconds : float
            How long, at most. A thread that computes looks up between tiles.
        """
        self.drop()
        until = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(until - time.monotonic(), 0.0))

    def drop(self) -> None:
        """Drop what waits and what runs, and take nothing more."""
        with self._ready:
            self._closed = True
            waiting, self._waiting = self._waiting, []
            for job in (*waiting, *self._running):
                job.drop()
            self._ready.notify_all()
        for job in waiting:
            job.finish(None)

    def _serve(self, quick: bool) -> None:
        """Answer requests until there is an end to it."""
        while (job := self._next(quick)) is not None:
            try:
                answer = self._ask(job) if job.wanted() else None
            except Exception as error:  # noqa: BLE001  # a fault of the service is told by whoever awaits the answer
                job.finish(None, error)
            else:
                job.finish(answer)
            with self._ready:
                self._running.discard(job)

    def _ask(self, job: Job) -> Answer:
        answer = self._service.answer(job.name, job.parameters, wanted=job.wanted)
        if job.name == "focus" and answer.status == 200:
            self._urgency.look(job.parameters)
        return answer

    def _next(self, quick: bool) -> Job | None:
        """Wait for the most urgent request; None at the end."""
        with self._ready:
            while not self._closed:
                offered = [job for job in self._waiting if is_quick(job.name) or not quick]
                if offered:
                    job: Job = min(offered, key=lambda job: self._urgency.rank(job.name, job.parameters))
                    self._waiting.remove(job)
                    self._running.add(job)
                    return job
                self._ready.wait()
            return None
