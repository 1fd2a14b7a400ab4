"""What a device was asked about numbers, so that the host waits for each answer once, however often it needs it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

_answers: ContextVar[Iterator[tuple[dict[int, float], int]] | None] = ContextVar("attlas_answers", default=None)


def answers_kept(owner: Any) -> AbstractContextManager[None]:
    """Let `answer_of` take its answers from those of an earlier time, in the same order, and add new ones to them.

    On the CPU nothing is kept, since nobody waits for it, and in a program that is traced nothing is asked.

    Parameters
    ----------
    owner : Problem
        What the questions are about; it keeps the answers.
    """
    return nullcontext() if owner.device.type == "cpu" or owner.is_symbolic else _kept(owner)


@contextmanager
def _kept(owner: Any) -> Iterator[None]:
    answers: dict[int, float] = vars(owner).setdefault("answers", {})
    token = _answers.set((answers, place) for place in range(1 << 62))
    try:
        yield
    finally:
        _answers.reset(token)


def answer_of(ask: Callable[[], float]) -> float:
    """Return a number that a device is asked for, or the answer that is kept.

    Parameters
    ----------
    ask : callable
        Asks the device, and waits.

    Examples
    --------
    >>> from attlas.foundation.answers import answer_of
    >>> answer_of(lambda: 1.0)
    1.0
    """
    places = _answers.get()
    if places is None:
        return ask()
    answers, place = next(places)
    if place not in answers:
        answers[place] = ask()
    return answers[place]
