"""Which way sums a task, and why the others do not: the plan that plan_sums prints."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from attlas.estimators.sums.boxes import QUERIES, box_sums, share_to_compute
from attlas.estimators.sums.direct import direct_sums
from attlas.estimators.sums.gaussian import gaussian_sums
from attlas.estimators.sums.laplace import laplace_sums
from attlas.estimators.sums.line import Line, sorted_line
from attlas.estimators.sums.polynomial import polynomial_sums
from attlas.estimators.sums.result import Sums, unsort
from attlas.estimators.sums.task import Task

__all__ = ["SumsPlan", "choose_way", "run"]

_FEW = 1 << 21  # pairs below which sorting costs more than it saves
_MOST_COORDINATES = 8  # from there on boxes are too wide to be far from anything
_WORTH = 0.9  # part of the time of a direct sum that boxes may be estimated at
# Seconds of one core, measured: a token in both trees, a group of queries and its calls, and a pair (constant, and for
# each coordinate), in float32 and float64.
_TREE, _CALLS = 4e-6, 8e-4
_PAIR = {torch.float32: (1.2e-10, 2.5e-11), torch.float64: (2.7e-10, 2.6e-11)}

_LINES: dict[str, tuple[Callable[[Line], Sums], str]] = {
    "boxcar": (polynomial_sums, "keys on a line: running sums within cells of one bandwidth"),
    "epanechnikov": (polynomial_sums, "keys on a line: running sums of powers within cells of one bandwidth"),
    "gaussian": (gaussian_sums, "keys on a line: exact sums in a few places of each box, a proven polynomial between"),
    "laplace": (laplace_sums, "keys on a line: one recursion from each side"),
    "triangular": (polynomial_sums, "keys on a line: running sums of powers within cells of one bandwidth"),
}


@dataclass(frozen=True)
class SumsPlan:
    """Which way sums a task, and the reason why each other one does not; made by `plan_sums`.

    Attributes
    ----------
    way : str
        ``"direct"``, ``"line"`` or ``"boxes"``.
    because : str
        Why.
    others : dict
        The reason against each other way.

    Examples
    --------
    >>> import torch
    >>> from attlas.estimators import plan_sums
    >>> x = torch.randn(10_000, 1)
    >>> plan_sums("laplace", x, x, x, 0.1).way
    'line'
    """

    way: str
    because: str
    others: dict[str, str]

    def __repr__(self) -> str:
        lines = [f"way: {self.way}, since {self.because}"]
        return "\n".join(lines + [f"  not {name}: {reason}" for name, reason in sorted(self.others.items())])


def choose_way(task: Task) -> SumsPlan:
    """Choose how a task is summed; for boxes this looks at a sample of the data."""
    against = _line_unsupported(task), _boxes_unsupported(task)
    others = {"boxes": against[1], "line": against[0], "direct": "it computes every pair"}
    if against[0] is None:
        way, because = "line", _LINES[task.kernel][1]
        others["boxes"] = "a line needs none"
    elif against[1] is None:
        share = share_to_compute(task)
        if share * _direct_seconds(task) + _overhead(task) <= _WORTH * _direct_seconds(task):
            way, because = "boxes", f"about {share:.0%} of the pairs lie in boxes that are near enough to matter"
        else:
            others["boxes"] = f"about {share:.0%} of the pairs lie in boxes that are near enough to matter"
            way, because = "direct", "little could be left out"
    else:
        way, because = "direct", "every pair is computed by the kernels of attlas"
    return SumsPlan(way, because, {name: reason for name, reason in others.items() if name != way and reason})


def run(task: Task) -> Sums:
    """Sum a task the way that is chosen for it."""
    way = choose_way(task).way
    if way == "line":
        line = sorted_line(task)
        sums = unsort(_LINES[task.kernel][0](line), line.order)
        task.report(len(task.x))
        return sums
    return box_sums(task) if way == "boxes" else direct_sums(task)


def _line_unsupported(task: Task) -> str | None:
    if task.x.shape[1] != 1:
        return f"there are {task.x.shape[1]} coordinates"
    if task.tolerance == 0:
        return "tolerance=0 allows no approximation"
    return _unsupported(task, _FEW)


def _boxes_unsupported(task: Task) -> str | None:
    if task.x.shape[1] > _MOST_COORDINATES:
        return f"boxes in {task.x.shape[1]} coordinates are never far from each other"
    if task.x.shape[1] == 1 and task.tolerance > 0:
        return "keys of one coordinate are sorted on a line, where there are enough of them"
    if task.tolerance == 0 and not task.bounded:
        return "tolerance=0 asks for every pair that has a weight, and all have one"
    found = _unsupported(task, 1)
    if found is None and _overhead(task) > _WORTH * _direct_seconds(task):
        return f"{len(task.x) * len(task.keys):,} pairs are too few for it to pay"
    return found


def _direct_seconds(task: Task) -> float:
    """Return about how long every pair takes one core."""
    constant, each = _PAIR[task.x.dtype]
    return len(task.x) * len(task.keys) * (constant + each * task.x.shape[1])


def _overhead(task: Task) -> float:
    """Return about how long trees and calls take one core."""
    return _TREE * (len(task.x) + len(task.keys)) + _CALLS * len(task.x) / QUERIES


def _unsupported(task: Task, few: int) -> str | None:
    if task.x.device.type != "cpu":
        return f"the tensors are on {task.x.device}"
    pairs = len(task.x) * len(task.keys)
    return f"{pairs:,} pairs are too few for it to pay" if pairs < few else None
