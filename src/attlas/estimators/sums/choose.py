"""Chooses the method that sums a task; the plan says why not the others."""

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

_FEW_PAIRS = 1 << 21  # pairs below which sorting costs more than it saves
_MOST_COORDINATES = 8  # with more coordinates, boxes are so wide that all are near each other
_WORTHWHILE_SHARE = 0.9  # boxes are chosen if they are estimated to take at most this share of the time of a direct sum
# Seconds of one core, measured: for a query or key in its tree of boxes; for a group of queries and the calls for it;
# for a pair, a constant and a term for each coordinate.
_SECONDS_PER_TOKEN, _SECONDS_PER_GROUP = 4e-6, 8e-4
_SECONDS_PER_PAIR = {torch.float32: (1.2e-10, 2.5e-11), torch.float64: (2.7e-10, 2.6e-11)}

_LINE_METHODS: dict[str, tuple[Callable[[Line], Sums], str]] = {
    "boxcar": (polynomial_sums, "keys on a line: running sums within cells of one bandwidth"),
    "epanechnikov": (polynomial_sums, "keys on a line: running sums of powers within cells of one bandwidth"),
    "gaussian": (gaussian_sums, "keys on a line: exact sums in a few places of each box, a proven polynomial between"),
    "laplace": (laplace_sums, "keys on a line: one recursion from each side"),
    "triangular": (polynomial_sums, "keys on a line: running sums of powers within cells of one bandwidth"),
}


@dataclass(frozen=True)
class SumsPlan:
    """Which method sums a task, and the reason against each other one; made by `plan_sums`.

    Attributes
    ----------
    method : str
        ``"direct"``, ``"line"`` or ``"boxes"``.
    because : str
        Why.
    others : dict
        The reason against each other method.

    Examples
    --------
    >>> import torch
    >>> from attlas.estimators import plan_sums
    >>> x = torch.randn(10_000, 1)
    >>> plan_sums("laplace", x, x, x, 0.1).method
    'line'
    """

    method: str
    because: str
    others: dict[str, str]

    def __repr__(self) -> str:
        lines = [f"method: {self.method}, since {self.because}"]
        return "\n".join(lines + [f"  not {name}: {reason}" for name, reason in sorted(self.others.items())])


def choose_plan(task: Task) -> SumsPlan:
    """Choose the method that sums a task; for boxes this looks at a sample of the data."""
    others = {"boxes": _why_no_boxes(task), "line": _why_no_line(task), "direct": "it computes every pair"}
    if others["line"] is None:
        method, because = "line", _LINE_METHODS[task.kernel][1]
        others["boxes"] = "a line needs none"
    elif others["boxes"] is None:
        share, direct = share_to_compute(task), _direct_seconds(task)
        method, because = "boxes", f"about {share:.0%} of the pairs lie in boxes that are near enough to matter"
        if share * direct + _box_overhead_seconds(task) > _WORTHWHILE_SHARE * direct:
            others["boxes"] = because
            method, because = "direct", "little could be left out"
    else:
        method, because = "direct", "every pair is computed by the kernels of attlas"
    return SumsPlan(method, because, {name: reason for name, reason in others.items() if name != method and reason})


def run_plan(task: Task) -> Sums:
    """Sum a task by the method that `choose_plan` chooses."""
    method = choose_plan(task).method
    if method == "boxes":
        return box_sums(task)
    line = sorted_line(task) if method == "line" else None
    if line is None or not len(line.keys):  # all keys of a line may have weight 0
        return direct_sums(task)
    sums = unsort(_LINE_METHODS[task.kernel][0](line), line.order)
    task.report(len(task.x))
    return sums


def _why_no_line(task: Task) -> str | None:
    """Return the reason against the method "line", None if there is none."""
    if task.x.shape[1] != 1:
        return f"there are {task.x.shape[1]} coordinates"
    if task.tolerance == 0:
        return "tolerance=0 allows no approximation"
    return _why_only_direct(task, _FEW_PAIRS)


def _why_no_boxes(task: Task) -> str | None:
    """Return the reason against the method "boxes", None if there is none."""
    if task.x.shape[1] > _MOST_COORDINATES:
        return f"boxes in {task.x.shape[1]} coordinates are never far from each other"
    if task.x.shape[1] == 1 and task.tolerance > 0:
        return "keys of one coordinate are sorted on a line, where there are enough of them"
    if task.tolerance == 0 and not task.bounded:
        return "tolerance=0 asks for every pair that has a weight, and all have one"
    reason = _why_only_direct(task, 1)
    if reason is None and _box_overhead_seconds(task) > _WORTHWHILE_SHARE * _direct_seconds(task):
        return f"{len(task.x) * len(task.keys):,} pairs are too few for it to pay"
    return reason


def _direct_seconds(task: Task) -> float:
    """Return the estimated seconds that one core takes for every pair."""
    constant, per_coordinate = _SECONDS_PER_PAIR[task.x.dtype]
    return len(task.x) * len(task.keys) * (constant + per_coordinate * task.x.shape[1])


def _box_overhead_seconds(task: Task) -> float:
    """Return the estimated seconds that one core takes for trees and calls."""
    return _SECONDS_PER_TOKEN * (len(task.x) + len(task.keys)) + _SECONDS_PER_GROUP * len(task.x) / QUERIES


def _why_only_direct(task: Task, few: int) -> str | None:
    """Return the reason against any method but the direct one: another device, or fewer than `few` pairs."""
    if task.x.device.type != "cpu":
        return f"the tensors are on {task.x.device}"
    pairs = len(task.x) * len(task.keys)
    return f"{pairs:,} pairs are too few for it to pay" if pairs < few else None
