"""What ``attlas doctor`` runs: small problems for every backend, waits of the host, and times."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attlas
from attlas import BackendError, Plan, stats
from attlas.cli.bench_cases import ratios
from attlas.engine import trust
from attlas.engine.backend import Request
from attlas.engine.costs import Operation
from attlas.engine.dispatch import backends_of, candidates
from attlas.foundation.reasons import in_one_line

PASSED = "passed"
#: Backends that compile a program for each kind of mask and score, which takes seconds: they run some cases only.
COMPILED = frozenset({"flex"})

OPERATIONS = ("output", "gradients", "statistics")
_TIMED_ROUNDS = 12


@dataclass(frozen=True)
class Case:
    """A small problem.

    Parameters
    ----------
    name : str
        What it is.
    m, n, d : int
        Queries, keys, and numbers of each.
    given : callable
        Returns arguments of `attlas.attend`.
    dtype : torch.dtype, optional
        Of the tokens; by default that of the device.
    compiles : bool
        Whether backends of `COMPILED` run it.
    threads : bool
        Whether all threads of the processor share it. They wait for one another where other programs run, so that small
        problems take much longer than on one thread.
    """

    name: str
    m: int = 96
    n: int = 130
    d: int = 64
    given: Callable[[], dict[str, Any]] = field(default=dict)
    dtype: torch.dtype | None = None
    compiles: bool = False
    threads: bool = False


def _documents_case() -> dict[str, Any]:
    """Return the arguments of a mask of documents of 37 tokens each."""
    ids = torch.arange(160) // 37
    return {"mask": attlas.Documents(ids) & attlas.Causal()}


CASES = (
    Case("all keys"),
    Case("causal", 160, 160, given=lambda: {"mask": attlas.Causal()}, threads=True),
    Case("causal, d 128", 160, 160, 128, lambda: {"mask": attlas.Causal()}),
    Case("causal, float32", 160, 160, 64, lambda: {"mask": attlas.Causal()}, torch.float32),
    Case("window", given=lambda: {"mask": attlas.Window(50, 3)}, compiles=True),
    Case("documents", 160, 160, given=_documents_case, compiles=True),
    Case("padding", given=lambda: {"mask": attlas.Padding([90, 130])}),
    Case("one query", 1, 700),
    Case(
        "soft cap and ALiBi",
        given=lambda: {"score": attlas.SoftCap(attlas.ScaledDot(), 5.0) + attlas.Alibi(4), "mask": attlas.Causal()},
        compiles=True,
    ),
    Case("sink", given=lambda: {"sink": torch.linspace(-1.0, 2.0, 4)}),
    Case("Additive", d=16, given=lambda: {"score": attlas.Additive(16, 16, 32)}),
    Case("Gaussian", d=3, given=lambda: {"score": attlas.Gaussian(1.0)}),
    Case("Laplace", d=3, given=lambda: {"score": attlas.Laplace(1.0)}),
)


def tokens(case: Case, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries of four heads, keys and values of two, of two sequences; the same numbers on every device."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 4, case.m, case.d), (2, 2, case.n, case.d), (2, 2, case.n, max(case.d, 16)))
    q, k, v = (torch.randn(shape, generator=generator).to(case.dtype or dtype).to(device) for shape in shapes)
    return q, k, v


def dtype_of(device: torch.device) -> torch.dtype:
    """Return the dtype that models mostly have on a device."""
    return torch.bfloat16 if device.type in ("cuda", "xpu") else torch.float32


def compare(name: str, case: Case, device: torch.device) -> dict[str, str]:
    """Compare a backend with the definition in float64: for each operation `PASSED`, or why not.

    What the backend does not compute begins with "not computed", and a difference or an error with "failed".
    """
    given = tokens(case, device, dtype_of(device))
    own = {kind: value.to(device) if _has_dtype_and_device(value) else value for kind, value in settings(case).items()}
    found: dict[str, str] = {}
    for operation in OPERATIONS:
        try:
            A = attlas.attend(given[0], given[1], plan=Plan(name), **own)
            request = Request(A.problem, A.problem.tokens, A.plan)
            asked: Operation = "statistics" if operation == "statistics" else "output"  # gradients are those of outputs
            able = [backend for backend in backends_of(name, device.type) if asked in backend.computes]
            reasons = [backend.unsupported(request, asked) for backend in able]
            if all(reasons):
                reason = reasons[0] if reasons else f"it has no {asked}"
                wrong = reason in trust.faults(name, device).values()
                found[operation] = f"{'failed' if wrong else 'not computed'}: {reason}"
                continue
            with nullcontext() if case.threads else _on_one_thread():
                fault = _where_it_differs(case, operation, given, own, Plan(name))
            found[operation] = PASSED if fault is None else f"failed: {fault}"
        except BackendError as error:
            found[operation] = f"failed: {error.found}"
        except Exception as error:  # noqa: BLE001 - it is told, and the next one is tried
            found[operation] = f"failed: {in_one_line(error)}"
    return found


def _has_dtype_and_device(value: object) -> bool:
    """Return whether an argument has a dtype and a device: a tensor or a score; a module moves in place."""
    return isinstance(value, Tensor | torch.nn.Module)


def settings(case: Case) -> dict[str, Any]:
    """Return new arguments of `attlas.attend` for a case, with the same numbers each time."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return case.given()


@cache
def exact(case: Case, operation: str, dtype: torch.dtype) -> list[Tensor]:
    """Return what an operation gives by the definition, in float64 on the CPU, for tokens of a dtype."""
    given = [t.double() for t in tokens(case, torch.device("cpu"), dtype)]
    own = {kind: value.double() if _has_dtype_and_device(value) else value for kind, value in settings(case).items()}
    with _on_one_thread():
        return _tensors_of_operation(operation, given, own, Plan("reference"))


@contextmanager
def _on_one_thread() -> Iterator[None]:
    """Let torch compute with one thread, for the time of a ``with`` block."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _where_it_differs(
    case: Case, operation: str, given: Sequence[Tensor], own: dict[str, Any], plan: Plan
) -> str | None:
    """Return where an operation differs from the definition."""
    tolerance = trust.TOLERANCE[given[0].dtype] * (4 if operation == "gradients" else 1)
    wanted = exact(case, operation, given[0].dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what failed is told once, below
        found = _tensors_of_operation(operation, given, own, plan)
    names = {"output": ["its output"], "gradients": ["a gradient"] * 3}.get(operation, ["a statistic"] * len(wanted))
    for name, some, true in zip(names, found, wanted, strict=True):
        if (fault := trust.difference(name, some.cpu(), true, tolerance)) is not None:
            return fault
    return None


def _tensors_of_operation(operation: str, given: Sequence[Tensor], own: dict[str, Any], plan: Plan) -> list[Tensor]:
    """Return what an operation gives: tensors of numbers, without those of keys."""
    q, k, v = given
    if operation == "gradients":
        leaves = [t.detach().requires_grad_() for t in given]
        out = attlas.attend(leaves[0], leaves[1], plan=plan, **own) @ leaves[2]
        # Other numbers at each place, so that an error in one cannot hide behind another.
        slope = torch.cos(torch.arange(out.numel(), device="cpu")).view(out.shape).to(out)
        return list(torch.autograd.grad(out, leaves, slope))
    with torch.no_grad():
        A = attlas.attend(q, k, plan=plan, **own)
        if operation == "output":
            return [A @ v]
        found: list[Any] = []
        for result in A.collect(*row_statistics(), *column_statistics(), stats.TopK(1)):
            found += result if isinstance(result, tuple) else [result]
    return [t for t in found if t.is_floating_point()]


def row_statistics() -> tuple[stats.Statistic, ...]:
    """Return the statistics of rows that one pass of a kernel gives, without the largest weights."""
    return stats.Entropy(), stats.MaxLogit(), stats.MaxWeight(), stats.LogitMoments()


def column_statistics() -> tuple[stats.Statistic, ...]:
    """Return the statistics of columns and diagonals that one pass of a kernel gives."""
    return stats.ColumnMass(), stats.ColumnMax(), stats.Offsets()


# --------------------------------------------------------------------------------------------------------------- waits


def waits(device: torch.device) -> dict[str, int | str] | None:
    """Return how often the host waits for a GPU in some calls, after a first one; None where torch does not count."""
    if device.type != "cuda":
        return None
    case = Case("causal", 256, 256)
    q, k, v = tokens(case, device, dtype_of(device))
    leaves, causal = [t.detach().requires_grad_() for t in (q, k, v)], attlas.Causal()

    def attend(q: Tensor = q, k: Tensor = k, mask: attlas.Mask = causal, **settings: Any) -> attlas.AttentionMatrix:
        return attlas.attend(q, k, mask=mask, **settings)

    calls: dict[str, Callable[[], object]] = {
        "A @ v": lambda: attend() @ v,
        "A @ v, window": lambda: attend(mask=attlas.Window(50, 0)) @ v,
        "A @ v, ALiBi": lambda: attend(score=attlas.ScaledDot() + attlas.Alibi(4)) @ v,
        "A @ v and its gradients": lambda: torch.autograd.grad(
            (attend(leaves[0], leaves[1]) @ leaves[2]).sum(), leaves
        ),
        "row statistics": lambda: attend().collect(*row_statistics()),
        "column statistics": lambda: attend().collect(*column_statistics()),
        "top-8": lambda: attend().collect(stats.TopK(8)),
        "a tile of weights": lambda: attend()[0, 0, 64:128, 64:128],
    }
    return {name: _count_of_waits(call) for name, call in calls.items()}


def _count_of_waits(call: Callable[[], object]) -> int | str:
    """Return how often one call waits for the GPU; or its error."""
    try:
        call()
        torch.cuda.synchronize()
        mode = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                call()
        finally:
            torch.cuda.set_sync_debug_mode(mode)
    except Exception as error:  # noqa: BLE001 - the other calls are counted
        return in_one_line(error)
    return sum("synchronizing" in str(one.message) for one in caught)


# --------------------------------------------------------------------------------------------------------------- times


@dataclass(frozen=True)
class Timed:
    """A line of the table of times.

    Parameters
    ----------
    name : str
        What was run.
    seconds : float or None
        Median time; None where it failed.
    ratio : float or None
        Median of the quotients by the time of torch's kernel in the same round.
    backend : str
        What computed it; empty for torch.
    error : str
        Why it failed.
    """

    name: str
    seconds: float | None
    ratio: float | None
    backend: str = ""
    error: str = ""


#: What is timed: its name, a call, and the matrix that says which backend computes it, with the operation.
_TimedRow = tuple[str, Callable[[], object], attlas.AttentionMatrix | None, Operation]


def rows(q: Tensor, k: Tensor, v: Tensor) -> Iterator[list[_TimedRow]]:
    """Yield groups of what is timed, all causal; the first of each is torch's kernel, whose time divides the others'.

    A row has a name, a call, and the matrix and operation that tell which backend the call uses.
    """
    causal, n, heads = attlas.Causal(), k.shape[-2], q.shape[1]
    plain = attlas.attend(q, k, mask=causal)
    near = attlas.Window(max(n // 16, 1), 0)
    score = attlas.SoftCap(attlas.ScaledDot(), 30.0) + attlas.Alibi(heads)
    biased = attlas.attend(q, k, score=score, mask=causal)
    row, every = row_statistics(), (*row_statistics(), *column_statistics())

    def collect(*statistics: stats.Statistic) -> Callable[[], object]:
        return lambda: attlas.attend(q, k, mask=causal).collect(*statistics)

    square = slice(n - min(n, 256), n)
    yield [
        ("SDPA", partial(sdpa, q, k, v, is_causal=True), None, "output"),
        ("A @ v", lambda: attlas.attend(q, k, mask=causal) @ v, plain, "output"),
        (
            f"A @ v, window of {n // 16:,}",
            lambda: attlas.attend(q, k, mask=near) @ v,
            attlas.attend(q, k, mask=near),
            "output",
        ),
        ("A @ v, soft cap and ALiBi", lambda: attlas.attend(q, k, score=score, mask=causal) @ v, biased, "output"),
        ("row statistics", collect(*row), plain, "statistics"),
        ("row and column statistics", collect(*every), plain, "statistics"),
        ("the same and top-8", collect(*every, stats.TopK(min(8, n))), plain, "statistics"),
        ("A @ v and row statistics", collect(stats.Pooled(v), *row), plain, "statistics"),
        ("a tile of 256 × 256", lambda: attlas.attend(q, k, mask=causal)[0, 0, square, square], plain, "cells"),
    ]
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    slope = torch.ones_like(v)
    with_graph = attlas.attend(leaves[0], leaves[1], mask=causal)

    def gradients(run: Callable[[], Tensor]) -> Callable[[], object]:
        """Return a function that computes an output and its gradients for q, k and v, which is what is timed."""

        def both() -> object:
            with torch.enable_grad():
                return torch.autograd.grad(run(), leaves, slope)

        return both

    def entropy() -> object:
        with torch.enable_grad():
            found = stats.entropy(attlas.attend(leaves[0], leaves[1], mask=causal))
            return torch.autograd.grad(found.sum(), leaves[:2])

    yield [
        (
            "SDPA, with gradients",
            gradients(lambda: sdpa(leaves[0], leaves[1], leaves[2], is_causal=True)),
            None,
            "output",
        ),
        (
            "A @ v, with gradients",
            gradients(lambda: attlas.attend(leaves[0], leaves[1], mask=causal) @ leaves[2]),
            with_graph,
            "output",
        ),
        ("entropy, with gradients", entropy, plain, "statistics"),
    ]


def timed(group: list[_TimedRow], device: torch.device, most_seconds: float, tick: Callable[[], None]) -> list[Timed]:
    """Time a group of rows in turn, round by round; one that fails is told, and the others go on."""
    errors: dict[str, str] = {}

    def guarded(name: str, run: Callable[[], object]) -> Callable[[], None]:
        """Return `run` as a function that notes its first error in `errors`, and does nothing from then on."""

        def once() -> None:
            if name in errors:
                return
            try:
                run()
                synchronize(device)
            except Exception as error:  # noqa: BLE001 - the other rows are timed
                errors[name] = in_one_line(error)

        return once

    synchronize(device)
    measured = ratios({name: guarded(name, run) for name, run, *_ in group}, _TIMED_ROUNDS, tick, most_seconds)
    base = group[0][0]
    out = []
    for name, _, matrix, operation in group:
        if name in errors:
            out.append(Timed(name, None, None, error=errors[name]))
        else:
            ratio = None if base in errors else measured[name].median
            out.append(Timed(name, measured[name].seconds, ratio, _first_backend(matrix, operation)))
    return out


def _first_backend(A: attlas.AttentionMatrix | None, operation: Operation) -> str:
    """Return the name of the backend that an operation is given to first."""
    if A is None:
        return ""
    with torch.no_grad():
        return next(candidates(Request(A.problem, A.problem.tokens, A.plan), operation)).name


def synchronize(device: torch.device) -> None:
    """Wait until a device has done its work."""
    if device.type != "cpu" and torch.accelerator.is_available():
        torch.accelerator.synchronize(device)
