"""Ctrl-C, and any other signal, while a kernel runs: it stops where the handler raises, and goes on elsewhere."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.engine.native.conftest import needs_kernels
from torch import Tensor

import attlas
from attlas import stats
from attlas.engine.backends.native import library

pytestmark = [
    needs_kernels,
    pytest.mark.usefixtures("threads"),
    pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no timers of signals"),
]
NATIVE = attlas.Plan("native")


class Stop(BaseException):
    """What a handler raises, as that of Ctrl-C raises KeyboardInterrupt."""


class Signals:
    """Sends a signal soon after each call of a kernel begins, and counts the runs of its handler."""

    def __init__(self) -> None:
        self.runs = 0
        self.then: Callable[[], Any] = lambda: None
        self.unfinished = 0  # calls that an exception ended
        self.inside = False  # whether a call runs; a signal may also come between two of them
        self.stopped = False

    def handle(self, number: int, frame: Any) -> None:
        self.runs += 1
        self.then()

    def stop(self) -> None:
        if self.inside and not self.stopped:
            self.stopped = True
            raise Stop


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> Iterator[Signals]:
    found = Signals()
    loaded = library._library_or_reason(library._LIBRARY_FILE)
    assert isinstance(loaded, library._LoadedLibrary)
    run = loaded.run
    before = signal.signal(signal.SIGALRM, found.handle)

    def started(*arguments: Any) -> int:
        if threading.current_thread() is threading.main_thread():
            signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0005)
        done, found.inside = False, True
        try:
            status = run(*arguments)
            done, found.inside = True, False
        finally:
            found.inside = False
            found.unfinished += not done
            if threading.current_thread() is threading.main_thread():
                signal.setitimer(signal.ITIMER_REAL, 0)
        return status

    monkeypatch.setattr(loaded, "run", started)
    loaded.look_every(0)
    yield found
    loaded.look_every(0.1)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def tokens(t: int, d: int, **kinds: Any) -> Tensor:
    return torch.randn(1, 2, t, d, generator=torch.Generator().manual_seed(t), **kinds)


def gradient(A: Any, leaf: Tensor) -> Tensor:
    (found,) = torch.autograd.grad((A @ leaf.detach()[..., :4]).square().sum(), leaf)
    return found


def matrix(t: int = 1200, d: int = 32, **kinds: Any) -> attlas.AttentionMatrix:
    q = tokens(t, d, **{name: kinds.pop(name) for name in ("requires_grad", "dtype") if name in kinds})
    return attlas.attend(q, q, **kinds)


def own_score(score: attlas.Score, t: int = 1200, d: int = 3) -> attlas.AttentionMatrix:
    return matrix(t, d, score=score, requires_grad=True)


#: Each family of kernels, forward and back.
FAMILIES: dict[str, Callable[[], Any]] = {
    "output": lambda: (A := matrix(plan=NATIVE)) @ A.problem.q,
    "output of 16 bits": lambda: (A := matrix(2500, plan=NATIVE, dtype=torch.bfloat16)) @ A.problem.q,
    "masked cell by cell": lambda: (A := matrix(plan=NATIVE, mask=lambda b, h, i, j: (i + j) % 3 > 0)) @ A.problem.q,
    "statistics": lambda: torch.cat([t.flatten() for t in matrix().collect(stats.Entropy(), stats.ColumnMass())]),
    "coverage": lambda: matrix().collect(stats.Coverage())[0],
    "few queries": lambda: attlas.attend(tokens(2, 64), k := tokens(60_000, 64), plan=NATIVE) @ k,
    "gradients": lambda: gradient(A := matrix(plan=NATIVE, requires_grad=True), A.problem.q),
    "gradients of statistics": lambda: torch.autograd.grad(
        stats.entropy(A := matrix(requires_grad=True)).sum(), A.problem.q
    )[0],
    "distance": lambda: (A := own_score(attlas.Gaussian(1.0)).detach()) @ A.problem.q,
    "distance, transposed": lambda: (A := own_score(attlas.Laplace(1.0)).detach()).mT @ A.problem.q,
    "gradients of a distance": lambda: gradient(A := own_score(attlas.Laplace(1.0)), A.problem.q),
    "statistics of a distance": lambda: own_score(attlas.Gaussian(1.0)).detach().collect(stats.Offsets())[0],
    "additive": lambda: (A := own_score(attlas.Additive(3, 3, 16), 900).detach()) @ A.problem.q,
    "gradients of an additive score": lambda: gradient(A := own_score(attlas.Additive(3, 3, 16), 600), A.problem.q),
}


def run(family: str) -> Tensor:
    torch.manual_seed(0)  # of the parameters
    found: Tensor = FAMILIES[family]()
    return found.detach()


# The narrower sets divide the work in the same way.
EACH = [(family, "") for family in FAMILIES] + [
    (family, name) for family in ("output", "gradients") for name in library.SETS
]


@pytest.mark.parametrize(("family", "name"), EACH)
def test_a_handler_that_raises_ends_the_call(
    family: str, name: str, use: Callable[[str], None], signals: Signals
) -> None:
    if name:
        use(name)
    torch.set_num_threads(2)
    wanted = run(family)  # the handler returns, and the call goes on
    assert signals.runs > 0
    assert signals.unfinished == 0
    signals.runs, signals.then = 0, signals.stop
    with pytest.raises(Stop):
        run(family)
    assert signals.unfinished == 1
    torch.testing.assert_close(run(family), wanted, equal_nan=True)  # the pool of threads is as it was


def test_nothing_is_computed_after_it(signals: Signals) -> None:
    """Of an output that was NaN before, the rows that were not computed yet are NaN."""
    q = tokens(3000, 32)
    out, lse = torch.full((1, 2, 3000, 32), torch.nan), torch.empty(1, 2, 3000, dtype=torch.float64)
    tensor4 = library.current().structures["Tensor4"](q.data_ptr(), *q.stride()[:3])
    sizes = {"batch": 1, "heads": 2, "key_heads": 2, "m": 3000, "n": 3000, "d": 32, "e": 32, "threads": 1}
    results = {"out": out.data_ptr(), "lse": lse.data_ptr()}
    fields = sizes | results | dict.fromkeys("qkv", tensor4) | {"scale": 0.2}
    fields["type"] = library.current().codes["FLOAT32"]
    signals.then = signals.stop
    with pytest.raises(Stop):
        library.current().call("dot", **fields)
    assert bool(out.isnan().any())
    assert library.current().call("dot", **fields) == library.current().codes["DONE"]
    assert bool(out.isfinite().all())


def test_ctrl_c(signals: Signals) -> None:
    signals.then = lambda: signal.raise_signal(signal.SIGINT)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run("output")
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_handler_may_call_the_kernels(signals: Signals) -> None:
    small = tokens(40, 8)
    known = torch.softmax(small @ small.mT / 8**0.5, -1) @ small
    inside: list[Tensor] = []

    def compute() -> None:
        if not inside:
            inside.append(torch.empty(0))
            inside.append(attlas.attend(small, small, plan=NATIVE) @ small)

    signals.then = compute
    found = run("gradients")
    torch.testing.assert_close(inside[1], known)
    signals.then = lambda: None
    torch.testing.assert_close(run("gradients"), found)


def test_another_thread_is_not_interrupted(signals: Signals) -> None:
    """Python runs handlers on its main thread, which waits here and may be interrupted."""
    wanted, found = run("output"), []
    signals.then = signals.stop
    signals.runs = 0
    thread = threading.Thread(target=lambda: found.append(run("output")))
    thread.start()
    with pytest.raises(Stop):
        run("statistics")
    thread.join()
    assert torch.equal(found[0], wanted)


def test_small_numbers_are_not_flushed_in_a_handler(signals: Signals) -> None:
    """Kernels of a distance count numbers below the normal ones as 0; code of the user does not."""
    seen: list[float] = []
    signals.then = lambda: seen.append(float.fromhex("0x1p-1070") / 2.0 * 2.0)
    run("distance")
    assert seen
    assert set(seen) == {float.fromhex("0x1p-1070")}
