"""Chooses the backend: the cheapest that supports the request, or the one that the plan names."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from typing import Any

from attlas.engine.backend import Backend, Request
from attlas.engine.costs import Operation, costs_of
from attlas.engine.plan import BACKENDS
from attlas.errors import BackendError


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
    device = request.problem.device.type
    backends = allowed_backends(name, operation, device)
    if len(backends) > 1:
        rows, kernels = _cost_rows(backends)
        costs = costs_of(rows, request.problem, operation, "" if kernels is None else kernels().instruction_set)
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
        found = f"{name} does not run: {_costs_and_refusals(request, [name])[1][name]}"
        raise BackendError(rule, found, "leave the plan out, or Plan(backend='tiled').", arguments=given, where="A @ v")
    (tiled,) = backends_of("tiled", device)  # it takes whatever is left
    if tiled not in backends or (first is not None and first.takes_fused):
        yield tiled


def choose(request: Request) -> Choice:
    """Say which backend computes ``A @ v``.

    Raises
    ------
    BackendError
        If the plan names a backend that cannot run this problem.
    """
    chosen = next(candidates(request, "output"))
    compared, reasons = _costs_and_refusals(request, BACKENDS)
    costs = {backend.name: cost for backend, cost in sorted(compared.items(), key=lambda item: -item[1])}
    if request.plan.backend == "auto":
        because = f"it is the fastest here: about {costs[chosen.name]:g} × the time of torch's fused kernel"
        if not chosen.measured:
            because = "it should be the fastest here, by a cost that nobody has measured"
        others = {name: f"it takes about {cost:g} × the time of torch's fused kernel" for name, cost in costs.items()}
    else:
        because = "the plan asks for it"
        others = dict.fromkeys(costs, f"the plan asks for {chosen.name}")
    others = {name: reason for name, reason in (reasons | others).items() if name != chosen.name}
    return Choice(chosen.name, because, others, costs)


@cache
def backends_of(name: str, device: str) -> tuple[Backend, ...]:
    """Return the objects of a backend, whose module is imported now; none where it does not exist for a device.

    Parameters
    ----------
    name : str
        A name in `attlas.engine.plan.BACKENDS`.
    device : str
        Type of the device.
    """
    devices = BACKENDS[name]
    if devices is not None and device not in devices:
        return ()
    found: tuple[Backend, ...] = importlib.import_module(f"attlas.engine.backends.{name}").BACKENDS
    return found


@cache
def allowed_backends(name: str, operation: Operation, device: str) -> tuple[Backend, ...]:
    """Return the backends of an operation on a device that a plan with this name allows; ``"auto"`` allows all."""
    names = BACKENDS if name == "auto" else (name,)
    return tuple(one for own in names for one in backends_of(own, device) if operation in one.computes)


@cache
def _cost_rows(backends: tuple[Backend, ...]) -> tuple[tuple[str, ...], Callable[[], Any] | None]:
    """Return the row of each backend in the table `engine/costs.py`, and what loads their compiled kernels.

    None without.
    """
    kernels = [type(backend).kernels for backend in backends]
    return tuple(backend.row for backend in backends), next(filter(None, kernels), None)


@cache
def _cheapest_first(backends: tuple[Backend, ...], costs: tuple[float, ...]) -> tuple[Backend, ...]:
    """Return backends in ascending order of cost; equal costs keep the given order."""
    return tuple(sorted(backends, key=dict(zip(backends, costs, strict=True)).__getitem__))


def _costs_and_refusals(request: Request, names: Iterable[str]) -> tuple[dict[Backend, float], dict[str, str]]:
    """Return the cost of each backend that computes the output, and why each other one does not, by name."""
    costs: dict[Backend, float] = {}
    device = request.problem.device.type
    objects = {name: backends_of(name, device) for name in names}
    reasons = {name: f"it runs on {' and '.join(sorted(BACKENDS[name] or ()))} only" for name in names}
    reasons = {name: reason for name, reason in reasons.items() if not objects[name]}
    for backend in chain.from_iterable(objects.values()):
        reason = backend.unsupported(request, "output")
        if reason is None:
            rows, kernels = _cost_rows((backend,))
            instruction_set = "" if kernels is None else kernels().instruction_set
            (costs[backend],) = costs_of(rows, request.problem, "output", instruction_set)
        elif backend.name not in reasons or request.dot is None:  # two of one name: that for this kind of score
            reasons[backend.name] = reason
    return costs, reasons
