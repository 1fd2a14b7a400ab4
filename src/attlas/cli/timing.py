"""Times of several functions as ratios: each round runs all of them, so that a drifting machine slows all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ratio:
    """The time of one case, and its quotients by that of the base: one per round.

    Parameters
    ----------
    seconds : float
        Median time.
    median, least, most : float
        Of the quotients.
    """

    seconds: float
    median: float
    least: float
    most: float


def ratios(
    cases: Mapping[str, Callable[[], Any]],
    base: str,
    rounds: int,
    tick: Callable[[], None] | None = None,
    most_seconds: float = float("inf"),
) -> dict[str, Ratio]:
    """Time cases in turn, round by round, after a run of each that is not counted.

    Parameters
    ----------
    cases : Mapping of str to callable
        What is timed.
    base : str
        The case that the others are divided by.
    rounds : int
        How often each runs.
    tick : callable, optional
        Called after each round, the first included that is not counted.
    most_seconds : float
        No round begins after this time, except the first two that count.
    """
    begin = time.perf_counter()
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        if number > 2 and time.perf_counter() - begin > most_seconds:
            break
        for name, run in cases.items():
            seconds[name].append(run_once(run))
        if tick is not None:
            tick()
    out = {}
    for name, (_, *own) in seconds.items():
        quotients = [a / b for a, b in zip(own, seconds[base][1:], strict=True)]
        out[name] = Ratio(statistics.median(own), statistics.median(quotients), min(quotients), max(quotients))
    return out


def run_once(run: Callable[[], Any]) -> float:
    """Return the seconds that a function takes."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start
