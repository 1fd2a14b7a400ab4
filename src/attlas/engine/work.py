"""The work of ``A @ v``: products, exponentials and bytes, and the least time that they take on this processor."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from attlas.engine import limits as processor
from attlas.engine.backends.native import library
from attlas.engine.problem import Problem, tree_flatten
from attlas.engine.tiling import column_blocks
from attlas.foundation.tiles import cut
from attlas.masks.base import BlockState

_MASK_PANELS = 64  # parts of the rows in which a mask without intervals is asked


@dataclass(frozen=True)
class Work:
    """The work of ``A @ v`` for values of the size of the queries; made by `attlas.explain`.

    Parameters
    ----------
    size : int
        Numbers per value.
    products : int
        Multiplications with addition: those of the logits and those of the output.
    exponentials : int
        One per pair that may attend.
    bytes : int
        Queries, keys and values read once, and the output written once.
    limits : dict of str to float, or None
        Least seconds of the ``"products"``, the ``"exponentials"`` and the ``"memory"`` on this processor, as
        `attlas bench` measured it. None where this is not known.
    unknown : str
        Why `limits` is None.
    seconds : float or None
        Measured time of ``A @ v``, with ``explain(A, measure=True)``.
    """

    size: int
    products: int
    exponentials: int
    bytes: int
    limits: dict[str, float] | None = None
    unknown: str = ""
    seconds: float | None = None

    @property
    def limit(self) -> float | None:
        """The least seconds that ``A @ v`` can take: the largest of `limits`, since the three may overlap."""
        return None if self.limits is None else max(self.limits.values())

    @property
    def reached(self) -> float | None:
        """The limit divided by the measured time; None where one of the two is not known."""
        return None if self.limit is None or self.seconds is None else self.limit / self.seconds

    def __repr__(self) -> str:
        sizes = (
            f"{_amount_in_words(self.products)} products, {_amount_in_words(self.exponentials)} exponentials, "
            f"{_amount_in_words(self.bytes)} bytes"
        )
        lines = [f"work, with values of {self.size} numbers: {sizes}"]
        if self.limits is None:
            lines.append(f"  limit: {self.unknown}")
        else:
            parts = ", ".join(f"{name} {_time_in_words(seconds)}" for name, seconds in self.limits.items())
            lines.append(f"  limit on this processor: {_time_in_words(max(self.limits.values()))} ({parts})")
        if self.seconds is not None:
            share = "" if self.reached is None else f", {self.reached:.0%} of the limit's speed"
            lines.append(f"  measured: {_time_in_words(self.seconds)}{share}")
        return "\n".join(lines)


def count(problem: Problem, run: Callable[[torch.Tensor], Any] | None = None) -> Work | None:
    """Count the work of ``A @ v``, and time it if `run` is given; None for tensors without numbers."""
    if problem.is_symbolic or problem.device.type == "meta":
        return None
    size, pairs = problem.q.shape[-1], _allowed_pairs(problem)
    width = tree_flatten(problem.tokens[0])[0].shape[-1]
    # Numbers that are read and written: queries, an output of their size, keys, and values of the size of the queries.
    tensors = problem.q.numel() * 2 + problem.k.numel() // max(problem.k.shape[-1], 1) * (problem.k.shape[-1] + size)
    work = Work(size, pairs * (width + size), pairs, tensors * problem.q.element_size())
    limits = None
    if problem.device.type != "cpu":
        unknown = "known for processors only, not for this device"
    elif problem.score.as_dot(*problem.tokens) is None:  # type: ignore[arg-type]  # in the score's own form
        unknown = "known for dot products only, not for this score"
    elif (limits := processor.known(kernels())) is None:
        unknown = "not measured yet; run `attlas bench`"
    else:
        least = limits.seconds(problem.q.dtype, work.products, work.exponentials, work.bytes)
        work, unknown = replace(work, limits=least), ""
    return replace(work, unknown=unknown, seconds=None if run is None else _median_seconds(problem, run))


def kernels() -> str:
    """Return the instruction set of the compiled kernels, ``"none"`` without kernels."""
    return library.current().instruction_set


def instruction_sets() -> tuple[tuple[str, ...], str | None]:
    """Return the instruction sets that the compiled kernels can use here, and why they cannot be used, if so."""
    return library.runnable(), library.current().why_not


def _allowed_pairs(problem: Problem) -> int:
    """Return how many pairs may attend; where the mask does not say, those of the tiles that it does not forbid.

    A mask whose rows see one run of keys each tells their lengths; others are asked for blocks.
    """
    batch, heads, m, n = problem.shape
    if problem.mask is None or not m * n:
        return batch * heads * m * n
    whole = problem.tile(range(batch), range(heads), range(m), range(n))
    if (run := problem.mask.allowed_runs(whole)) is not None:
        lengths = (run[1].clamp(max=n) - run[0].clamp(min=0)).clamp(min=0)
        return int(lengths.expand(batch, heads, m).sum())
    pairs = 0
    for b in range(batch):
        for rows in cut(m, max(-(-m // _MASK_PANELS), 1)):
            at = problem.tile(range(b, b + 1), range(heads), rows, range(n))
            segments = (segment for block in column_blocks(at, problem.mask, n) for segment in block.segments)
            pairs += heads * len(rows) * sum(len(c) for c, amount in segments if amount is not BlockState.EMPTY)
    return pairs


def _median_seconds(problem: Problem, run: Callable[[torch.Tensor], Any]) -> float:
    """Return the median time of five products, after one that is not counted."""
    values = torch.randn_like(problem.k[..., :1].expand(*problem.k.shape[:-1], problem.q.shape[-1]))
    times = []
    for _ in range(6):
        start = time.perf_counter()
        run(values)
        if problem.device.type == "cuda":
            torch.cuda.synchronize(problem.device)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def _amount_in_words(number: int) -> str:
    """Return a number of things in words."""
    for name, unit in (("trillion", 10**12), ("billion", 10**9), ("million", 10**6)):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:,}"


def _time_in_words(seconds: float) -> str:
    """Return a time in the unit that suits it."""
    for name, unit in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} µs"
