"""When a program is compiled again, what is refused because it is too large, and what memory a graph takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.compiled.programs import HEADS, Program, numbers, results, scores, tokens
from torch import Tensor
from torch._dynamo.testing import CompileCounter

import attlas
from attlas import stats
from attlas.errors import TooLargeError

C = attlas.Causal()


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def both(q: Tensor, k: Tensor, v: Tensor, score: Any) -> list[Tensor]:
    A = attlas.attend(q, k, score, mask=attlas.Window(9, 0))
    return [A.matmul(v), A.collect(stats.Entropy())[0], A.mT.matmul(v), A[:, :, -1], A.sum(-2)]


LENGTHS = (33, 40, 57)
OF_ANY_LENGTH = sorted(scores().keys() - {"TensorBias"})  # which has a number for each pair
MASKS_OF_ANY_LENGTH: dict[str, Any] = {
    "Causal": attlas.Causal(),
    "Window": attlas.Window(9, 0),
    "Dilated": attlas.Dilated(9, 0, 3),
    "Padding": attlas.Padding([24, 17]) & attlas.Causal(),
    "Prefix": attlas.Prefix([5, 3]) | attlas.Causal(),
    "Not": ~attlas.Window(3, 3),
    "one tensor a head": attlas.from_tensor(torch.tensor([True, True, False, True]).view(1, HEADS, 1, 1)),
}


def check_one_graph(program: Callable[..., Any]) -> None:
    """Check that a program of several lengths is compiled once, and its results."""
    counter = CompileCounter()
    compiled = torch.compile(program, backend=counter, fullgraph=True, dynamic=True)
    for n in LENGTHS:
        given = [t.detach() for t in tokens(n, n)]
        for a, b in zip(compiled(*given), program(*given), strict=True):
            torch.testing.assert_close(a, b, atol=2e-5, rtol=1e-4)
    assert counter.frame_count == 1


@pytest.mark.parametrize("name", OF_ANY_LENGTH)
def test_lengths_that_vary_need_one_graph(name: str) -> None:
    check_one_graph(Program(both, scores()[name]))


@pytest.mark.parametrize("name", MASKS_OF_ANY_LENGTH)
def test_lengths_that_vary_need_one_graph_for_a_mask(name: str) -> None:
    """With a sink, too, and a factor: numbers of a fixed size beside sizes that vary."""
    sink, mask = numbers(HEADS, seed=4), MASKS_OF_ANY_LENGTH[name]
    score = numbers(HEADS, seed=5) * attlas.ScaledDot()

    def program(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        A = attlas.attend(q, k, score, mask=mask, sink=sink)
        return [A.matmul(v), A.collect(stats.Entropy())[0], A.mT.matmul(v), A[:, :, -1], A.sum(-2)]

    check_one_graph(program)


class Model(torch.nn.Module):
    """A layer whose mask and score change between calls."""

    def __init__(self) -> None:
        super().__init__()
        self.score: Any = attlas.ScaledDot() + attlas.RelativeBias(HEADS, 16)
        self.mask: Any = attlas.Documents(torch.arange(24) // 5)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attlas.attention(q, k, v, self.score, self.mask)


@pytest.mark.parametrize("dynamic", [None, True], ids=["as it comes", "dynamic"])
def test_other_tensors_do_not_compile_again_and_other_settings_do(dynamic: bool | None) -> None:
    model, counter = Model(), CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True, dynamic=dynamic)

    def check(wanted: int) -> None:
        given = [numbers(*t.shape, seed=wanted) for t in tokens()]
        with torch.no_grad():
            torch.testing.assert_close(compiled(*given), model(*given))
        assert counter.frame_count == wanted

    check(1)
    with torch.no_grad():
        model.score.right.weight.normal_()
    check(1)
    model.mask = attlas.Documents(torch.arange(24) // 3)
    check(1)
    model.mask = attlas.Window(5, 0)
    check(2)
    model.mask = attlas.Window(6, 0)
    check(3)
    model.score = attlas.SoftCap(attlas.ScaledDot(), 3.0)
    check(4)
    model.score = attlas.SoftCap(attlas.ScaledDot(), 4.0)
    check(5)


class Own(attlas.Score):
    """A score of the user's own."""

    def forward(self, q: Tensor, k: Tensor, at: attlas.Tile) -> Tensor:
        return -torch.cdist(q, k)


LARGE = 12_000  # queries and keys of four heads: 2.3 GB of float32
REFUSED: dict[str, Callable[..., Any]] = {
    "a score of the user's own": lambda q: attlas.attention(q, q, q, Own()),
    "a function": lambda q: attlas.attention(q, q, q, lambda s, b, h, i, j: s + h),
    "statistics": lambda q: attlas.attend(q, q, Own()).collect(stats.Entropy())[0],
    "transposed": lambda q: attlas.attend(q, q, Own()).mT.matmul(q),
    "lse": lambda q: attlas.attend(q, q, Own()).lse,
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_whole_matrix_is_refused_while_it_is_traced(name: str) -> None:
    q = torch.empty(1, 4, LARGE, 2)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="which here needs the whole matrix"):
        torch.compile(REFUSED[name], backend="eager", fullgraph=True)(q)


def test_transforms_refuse_a_whole_matrix() -> None:
    q = torch.empty(1, 4, LARGE, 2)
    with pytest.raises(TooLargeError, match=r"found: 2,304,000,000 bytes.*\n.*a loop in place of the transform"):
        torch.func.grad(lambda q: attlas.attention(q, q, q).sum())(q)


def test_tensors_without_numbers_are_of_any_size() -> None:
    q = torch.empty(1, 4, LARGE, 2, device="meta")
    assert attlas.attention(q, q, q, mask=attlas.Window(9, 0)).shape == q.shape


def test_a_part_of_a_matrix_counts_the_keys_that_it_does_not_have() -> None:
    """Rows of a window sum to less than 1, also where torch's own operations compute it."""
    q, k, v = (t.detach().double() for t in tokens())
    wanted = attlas.attend(q, k)[:, :, 3:9, 2:7]

    def f(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
        W = attlas.attend(q, k).window(slice(3, 9), slice(2, 7))
        return W.to_dense(), W.matmul(v[..., 2:7, :]), W.mT.matmul(v[..., 3:9, :])

    for run in (f, torch.compile(f, backend="eager", fullgraph=True), torch.func.vmap(f, 0)):
        dense, product, transposed = run(q, k, v)
        torch.testing.assert_close(dense.reshape(wanted.shape), wanted)
        torch.testing.assert_close(product.reshape(v[:, :, 3:9].shape), wanted @ v[:, :, 2:7])
        torch.testing.assert_close(transposed.reshape(v[:, :, 2:7].shape), wanted.mT @ v[:, :, 3:9])


def test_results_of_a_program_without_gradients_keep_none() -> None:
    """Where nothing wants a gradient, an operator keeps no log-sum-exp."""
    program = Program(both, scores()["ScaledDot"])
    given = [t.detach() for t in tokens()]
    found = results(program, given, torch.compile(program, backend="aot_eager", fullgraph=True))
    for a, b in zip(found, results(program, given), strict=True):
        assert a is not None
        assert b is not None
        torch.testing.assert_close(a, b)
