"""Chooses the backend: the cheapest that supports the request, or the one that the plan names."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from attlas.engine.backend import Backend, Request
from attlas.engine.backends.native import library
from attlas.engine.costs import Operation, costs_of
from attlas.engine.plan import BACKENDS as NAMES
from attlas.errors import BackendError

BACKENDS: Sequence[Backend] = tuple(
    backend for name in NAMES for backend in importlib.import_module(f"attlas.engine.backends.{name}").BACKENDS
)
#: The fallback: it supports every request.
TILED = BACKENDS[-1]


@dataclass(frozen=True)
class Choice:
    """The backend that computes ``A @ v``, and why each other one does not.

    Parameters
    ----------
    backend : str
        Its name.
    because : str
        Why it is this one.
    others : dict of str to str
        Each other backend and the reason.
    costs : dict of str to float
        What was compared: the time of each backend that can compute it, by measurement; 1 is that of torch's fused
        kernel.
    work : attlas.work.Work, optional
        Products, exponentials and bytes, and the least time that they take on this processor.
    """

    backend: str
    because: str
    others: dict[str, str]
    costs: dict[str, float] = field(default_factory=dict)
    work: Any = None

    def __repr__(self) -> str:
        lines = [f"backend: {self.backend}, since {self.because}"]
        lines += [f"  not {name}: {reason}" for name, reason in sorted(self.others.items())]
        return "\n".join(lines + [repr(self.work)] * (self.work is not None))


def candidates(request: Request, operation: Operation) -> Iterator[Backend]:
    """Yield the backends to try in turn, cheapest first; the tiled one, which computes everything, is the last.

    A backend that returns None leaves the problem to the next. What a named backend does not support, other than the
    output, is computed by tiles.

    Raises
    ------
    BackendError
        If the plan names a backend that cannot compute the output of this problem.
    """
    name = request.plan.backend
    backends = allowed_backends(name, operation)
    if len(backends) > 1:
        costs = costs_of(_rows(backends), request.problem, operation, library.current().instruction_set)
        backends = _cheapest_first(backends, costs)
    first: Backend | None = None
    for backend in backends:
        # The request is prepared once, for the first backend; the others must take the same tokens.
        same_tokens = first is None or backend.takes_fused == first.takes_fused
        if same_tokens and backend.unsupported(request, operation) is None:
            first = first or backend
            yield backend
    if first is None and operation == "output":
        rule = "the plan asks for a backend that cannot run this problem."
        given = {"plan": repr(request.plan), "score": type(request.problem.score).__name__}
        found = f"{name} does not run: {_compare(request, backends)[1][name]}"
        raise BackendError(rule, found, "leave the plan out, or Plan(backend='tiled').", arguments=given, where="A @ v")
    if TILED not in backends or (first is not None and first.takes_fused):
        yield TILED


def choose(request: Request) -> Choice:
    """Say which backend computes ``A @ v``.

    Raises
    ------
    BackendError
        If the plan names a backend that cannot run this problem.
    """
    chosen = next(candidates(request, "output"))
    compared, reasons = _compare(request, BACKENDS)
    costs = {backend.name: cost for backend, cost in sorted(compared.items(), key=lambda item: -item[1])}
    if request.plan.backend == "auto":
        because = f"it is the fastest here: about {costs[chosen.name]:g} × the time of torch's fused kernel"
        others = {name: f"it takes about {cost:g} × the time of torch's fused kernel" for name, cost in costs.items()}
    else:
        because = "the plan asks for it"
        others = dict.fromkeys(costs, f"the plan asks for {chosen.name}")
    others = {name: reason for name, reason in (reasons | others).items() if name != chosen.name}
    return Choice(chosen.name, because, others, costs)


@cache
def allowed_backends(name: str, operation: Operation) -> tuple[Backend, ...]:
    """Return the backends of an operation that a plan with this name allows; ``"auto"`` allows all."""
    return tuple(one for one in BACKENDS if name in ("auto", one.name) and operation in one.computes)


@cache
def _rows(backends: tuple[Backend, ...]) -> tuple[str, ...]:
    """Return the rows of backends in the table of costs."""
    return tuple(backend.row for backend in backends)


@cache
def _cheapest_first(backends: tuple[Backend, ...], costs: tuple[float, ...]) -> tuple[Backend, ...]:
    """Return backends by their costs; of two that cost the same, the first comes first."""
    return tuple(sorted(backends, key=dict(zip(backends, costs, strict=True)).__getitem__))


def _compare(request: Request, backends: Iterable[Backend]) -> tuple[dict[Backend, float], dict[str, str]]:
    """Return the cost of each backend that computes the output, and the reason of each name that does not."""
    costs: dict[Backend, float] = {}
    reasons: dict[str, str] = {}
    instruction_set = library.current().instruction_set
    for backend in backends:
        reason = backend.unsupported(request, "output")
        if reason is None:
            (costs[backend],) = costs_of((backend.row,), request.problem, "output", instruction_set)
        elif backend.name not in reasons or request.dot is None:  # two of one name: that for this kind of score
            reasons[backend.name] = reason
    return costs, reasons
