"""The memory that a compiled program takes beyond the plain one, at 8,192 tokens."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.compiled.programs import numbers
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import attlas
from attlas import stats

LENGTH, HEADS, D = 8192, 2, 64
BOUND = 64 << 20  # the whole matrix has 512 MiB
C = attlas.Causal()

PROGRAMS: dict[str, Callable[..., Tensor]] = {
    "window": lambda q, k, v: attlas.attention(q, k, v, mask=attlas.Window(256, 0)),
    "soft cap": lambda q, k, v: attlas.attention(q, k, v, attlas.SoftCap(attlas.ScaledDot(), 30.0), mask=C),
    "sink": lambda q, k, v, sink: attlas.attention(q, k, v, mask=C, sink=sink),
    "Gaussian": lambda q, k, v: attlas.attention(q, k, v, attlas.Gaussian(8.0), mask=C),
    "entropy": lambda q, k, v: attlas.attend(q, k, mask=C).collect(stats.Entropy())[0],
    "transposed": lambda q, k, v: attlas.attend(q, k, mask=C).mT.matmul(v),
}


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def peak(run: Callable[[], Any]) -> int:
    """Return the most bytes of tensors that a call holds at a time beyond those that are there before it."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as made:
        run()
    held = largest = 0
    events = [event for event in made.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        largest = max(largest, held)
    return largest


def test_the_measure_sees_a_whole_matrix() -> None:
    q = torch.zeros(1, 1, 2048, 4)
    assert peak(lambda: torch.softmax(q @ q.mT, -1).sum()) >= 2 * 4 * 2048 * 2048


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward and backward"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_beyond_the_plain_call(name: str, backward: bool) -> None:
    shape = 1, HEADS, LENGTH, D
    given = [numbers(*shape, seed=i).requires_grad_(backward) for i in range(3)]
    if name == "sink":
        given.append(nn.Parameter(torch.zeros(HEADS), requires_grad=backward))
    compiled = torch.compile(PROGRAMS[name], backend="aot_eager", fullgraph=True)

    def run(program: Callable[..., Tensor]) -> int:
        def once() -> None:
            found = program(*given)
            if backward:
                found.sum().backward()

        taken = peak(once)
        for t in given:
            t.grad = None
        return taken

    taken, plain = run(compiled), run(PROGRAMS[name])
    assert taken - plain <= BOUND
