"""The compiler that users get, which makes C++ of a graph: each operator and its gradient stand in it once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.compiled.programs import HEADS, Program, results, scores, tokens
from torch import Tensor

import attlas
from attlas import stats

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
WINDOW = attlas.Window(5, 0)


def every_operator(q: Tensor, k: Tensor, v: Tensor, score: Any) -> tuple[Tensor, ...]:
    """Return results of all four operators, each with something of torch's own after it."""
    A = attlas.attend(q, k, score=score, mask=WINDOW, sink=q.new_ones(HEADS))
    entropy, mass = A.collect(stats.Entropy(), stats.ColumnMass())
    return A.matmul(v).tanh(), A.mT.matmul(v) * 2.0, entropy.exp(), mass + 1.0, A[:, :, 3:9].square()


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["RelativeBias", "learned width"])
def test_values_and_gradients(name: str, dtype: torch.dtype) -> None:
    program, given = Program(every_operator, scores()[name]), tokens(dtype=dtype)
    compiled = torch.compile(program, fullgraph=True)
    bound = {"atol": 2e-5, "rtol": 1e-4} if dtype is torch.float32 else {"atol": 3e-2, "rtol": 3e-2}
    for found, wanted in zip(results(program, given, compiled), results(program, given), strict=True):
        assert found is not None
        assert wanted is not None
        assert bool(wanted.any())
        torch.testing.assert_close(found, wanted, **bound)


def test_lengths_that_vary_are_one_program() -> None:
    counter = torch._dynamo.utils.counters
    compiled = torch.compile(every_operator, fullgraph=True, dynamic=True)
    counter.clear()
    for length in (24, 31, 40):
        given = tokens(length, length)
        for found, wanted in zip(compiled(*given, None), every_operator(*given, None), strict=True):
            torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)
    assert counter["stats"]["unique_graphs"] == 1


def test_dropout_is_drawn_anew() -> None:
    """Each call of a compiled program drops other weights, the same after the same seed, and the mean stays."""
    q, k, v = (t.detach() for t in tokens())
    compiled = torch.compile(lambda q, k, v: attlas.attention(q, k, v, mask=WINDOW, dropout_p=0.5), fullgraph=True)
    torch.manual_seed(1)
    first, second = compiled(q, k, v), compiled(q, k, v)
    torch.manual_seed(1)
    assert torch.equal(compiled(q, k, v), first)
    assert not torch.equal(first, second)
    mean = torch.stack([compiled(q, k, v) for _ in range(300)]).mean(0)
    torch.testing.assert_close(mean, attlas.attention(q, k, v, mask=WINDOW), atol=0.5, rtol=0)
