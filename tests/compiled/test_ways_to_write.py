"""The ways to write a product, a read or a mask in a compiled function: one graph, in the order that was written."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.compiled.programs import BATCH, HEADS, Program, compare, numbers, tokens
from torch import Tensor

import attlas
from attlas import masks

C = attlas.Causal()
M = 16  # queries, keys and values are of one size: every order of a product fits


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def square() -> list[Tensor]:
    return tokens(M, M, e=M)


ORDERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "torch.matmul(A, v)": torch.matmul,
    "A.matmul(v)": lambda A, v: A.matmul(v),
    "A.__matmul__(v)": lambda A, v: A.__matmul__(v),
    "torch.matmul(v, A)": lambda A, v: torch.matmul(v, A),
    "v.mT, A": lambda A, v: torch.matmul(v.mT, A),
    "A.mT.matmul(x)": lambda A, v: A.mT.matmul(v),
    "torch.matmul(A.mT, x)": lambda A, v: torch.matmul(A.mT, v),
    "torch.matmul(x, A.mT)": lambda A, v: torch.matmul(v, A.mT),
    "a vector": lambda A, v: torch.matmul(A, v[0, 0, :, 0]),
    "a vector on the left": lambda A, v: torch.matmul(v[0, 0, :, 0], A),
    "einsum over keys": lambda A, v: torch.einsum("bhij,bhjd->bihd", A, v),
    "einsum over queries": lambda A, v: torch.einsum("bhij,bhid->bhjd", A, v),
    "linear": lambda A, v: torch.nn.functional.linear(A, v[0, 0]),
    "bmm": lambda A, v: torch.bmm(A[:, 0], v[:, 0]),
    "one head": lambda A, v: A[1, 2].matmul(v[1, 2]),
    "some heads": lambda A, v: A[:, 1:3].matmul(v[:, 1:3]),
    "listed heads": lambda A, v: A[:, [3, 0]].matmul(v[:, [3, 0]]),
}


@pytest.mark.parametrize("name", ORDERS)
def test_products_keep_their_order(name: str) -> None:
    graphs = compare(Program(lambda q, k, v: ORDERS[name](attlas.attend(q, k, mask=attlas.Window(5, 0)), v)), square())
    assert graphs.of_attlas == {"pool"} or graphs.of_attlas == {"pool_transposed"}
    assert not graphs.dense


@pytest.mark.parametrize("e", [5, 24])
def test_the_operator_where_its_order_is_certain(e: int) -> None:
    def f(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        A = attlas.attend(q, k, mask=C)
        return [A @ v, v.mT @ A.mT, A.mT @ v, A[0, 1] @ v[0, 1]]

    assert compare(Program(f), tokens(M, M, e=e)).of_attlas >= {"pool_transposed"}


OPERATORS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "A @ v": lambda A, v: A @ v,
    "v @ A": lambda A, v: v @ A,
    "v.matmul(A)": lambda A, v: v.matmul(A),
    "A.mT @ v": lambda A, v: A.mT @ v,
    "A @ vector": lambda A, v: A @ v[0, 0, :, 0],
}


@pytest.mark.parametrize("name", OPERATORS)
def test_the_operator_where_its_order_is_lost(name: str) -> None:
    """torch exchanges the two sides of an operator: one graph is refused, and without it torch breaks the graph."""
    q, k, v = square()

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return OPERATORS[name](attlas.attend(q, k, mask=C), v)

    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"matmul\(v\) for A(\.mT)? @ v"):
        torch.compile(f, backend="eager", fullgraph=True)(q, k, v)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(f, backend="eager")(q, k, v), f(q, k, v))


CELLWISE: dict[str, Callable[[Any, Tensor], Any]] = {
    "A + t": lambda A, t: A + t,
    "A - t": lambda A, t: A - t,
    "t - A": lambda A, t: t - A,
    "A * t": lambda A, t: A * t,
    "A / t": lambda A, t: A / t,
    "t / A": lambda A, t: t / (A + 1),
    "A ** t": lambda A, t: A**t,
    "A > t": operator.gt,
    "t > A": lambda A, t: t > A,
    "sum": lambda A, t: (A * t).sum(-1),
    "torch.relu": lambda A, t: torch.relu(A - 0.1),
    "softmax": lambda A, t: torch.softmax(A, -1),
    "stack": lambda A, t: torch.stack([A, A]),
    "sum over queries": lambda A, t: A.sum(-2),
    "mean over heads": lambda A, t: A.mean(1),
    "largest": lambda A, t: A.amax(-2),
    "positions": lambda A, t: A.argmax(-1),
    "topk": lambda A, t: A.topk(3).values,
    "max": lambda A, t: A.max(-1).values,
    "var": lambda A, t: A.var(-1),
    "diagonal": lambda A, t: A.diagonal(0, -2, -1),
    "log-weights": lambda A, t: A.logits.mean(),
    "squeeze": lambda A, t: A[:1].squeeze(0).to_dense(),
}


@pytest.mark.parametrize("name", CELLWISE)
def test_what_tensors_do(name: str) -> None:
    """Differences and quotients, too, keep the order of their two sides."""
    t = numbers(BATCH, HEADS, M, M, seed=5).abs() + 0.1

    def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found = CELLWISE[name](attlas.attend(q, k, mask=attlas.Prefix(9)), t)
        return found if isinstance(found, Tensor) else found.to_dense()

    compare(Program(f), square())


LENGTHS, IDS, SLOPES = torch.tensor([16, 9]), torch.arange(M) // 5, torch.linspace(0.1, 0.5, HEADS)
INSIDE: dict[str, Callable[[], dict[str, Any]]] = {
    "Gaussian": lambda: {"score": attlas.Gaussian(2.0)},
    "Gaussian of each coordinate": lambda: {"score": attlas.Gaussian([2.0] * M)},
    "Gaussian of a tensor": lambda: {"score": attlas.Gaussian(SLOPES.sum() + 1)},
    "Laplace": lambda: {"score": attlas.Laplace(9.0)},
    "SoftCap": lambda: {"score": attlas.SoftCap(attlas.ScaledDot(), 5.0)},
    "Alibi": lambda: {"score": attlas.ScaledDot() + attlas.Alibi(HEADS)},
    "Alibi of a list": lambda: {"score": attlas.ScaledDot() + attlas.Alibi([0.1, 0.2, 0.3, 0.4])},
    "Alibi of a tensor": lambda: {"score": attlas.ScaledDot() + attlas.Alibi(SLOPES)},
    "scale": lambda: {"scale": SLOPES, "mask": attlas.Window(5, 0)},
    "Padding": lambda: {"mask": attlas.Padding([16, 9]) & attlas.Causal()},
    "Padding of a tensor": lambda: {"mask": attlas.Padding(LENGTHS, side="left")},
    "Prefix": lambda: {"mask": attlas.Prefix(LENGTHS - 7) | attlas.Causal()},
    "Documents": lambda: {"mask": attlas.Documents(IDS) & attlas.Causal()},
    "Heads": lambda: {"mask": masks.Heads({1: attlas.Window(2, 0)}, attlas.Causal())},
    "a tensor": lambda: {"mask": IDS[:, None] >= IDS},
    "an additive tensor": lambda: {"mask": -(IDS[:, None] - IDS).abs().float()},
}


@pytest.mark.parametrize("name", INSIDE)
def test_masks_and_scores_made_inside(name: str) -> None:
    graphs = compare(Program(lambda q, k, v: attlas.attention(q, k, v, **INSIDE[name]())), square())
    assert graphs.of_attlas == {"pool"}


def test_a_wrong_width_made_inside_is_refused() -> None:
    f = torch.compile(lambda q: attlas.attention(q, q, q, attlas.Gaussian(-1.0)), backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="every bandwidth must be a finite number above 0"):
        f(torch.randn(1, 1, 4, 4))
    g = torch.compile(lambda q, h: attlas.attention(q, q, q, attlas.Gaussian(h)), backend="eager", fullgraph=True)
    with pytest.raises(attlas.errors.ShapeError, match="every bandwidth must be a finite number above 0"):
        g(torch.randn(1, 1, 4, 4), torch.tensor(-1.0))


def test_wrong_lengths_made_inside_are_refused_when_it_runs() -> None:
    f = torch.compile(lambda q, t: attlas.attention(q, q, q, mask=attlas.Padding(t)), backend="eager", fullgraph=True)
    with pytest.raises(attlas.errors.ShapeError, match="lengths must be 0 or more"):
        f(torch.randn(1, 1, 4, 4), torch.tensor([-1]))


FUNCTIONS: dict[str, dict[str, Any]] = {
    "mask_mod": {"mask": lambda b, h, i, j: (i >= j) | (h == 1)},
    "mask_mod of a tensor": {"mask": lambda b, h, i, j: IDS[i] == IDS[j]},
    "mask_mod beside a mask": {"mask": C & attlas.from_function(lambda b, h, i, j: (i - j) % 3 == 0)},
    "score_mod": {"score": lambda s, b, h, i, j: s - 0.1 * (i - j).abs() * (h + 1)},
    "score_mod of a tensor": {"score": lambda s, b, h, i, j: s * SLOPES[h]},
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_the_user(name: str) -> None:
    """On a CPU they are torch's own operations, with the whole matrix."""
    graphs = compare(Program(lambda q, k, v: attlas.attention(q, k, v, **FUNCTIONS[name])), square())
    assert not graphs.of_attlas


def test_a_learned_bias_in_a_function() -> None:
    bias = torch.nn.Parameter(numbers(HEADS, M, M, seed=8))

    def f(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return attlas.attention(q, k, v, lambda s, b, h, i, j: s + bias[h, i, j])

    compare(Program(f), [*square(), bias])


def test_a_function_of_torch_that_fails_is_named_by_its_own_name() -> None:
    A = attlas.attend(torch.zeros(1, 1, 40000, 1), torch.zeros(1, 1, 40000, 1))
    with pytest.raises(attlas.errors.TooLargeError, match=r"^torch\.sort\(\): it needs whole matrices"):
        torch.sort(A)
    with pytest.raises(attlas.errors.TooLargeError, match=r"^torch\.special\.log_softmax\(\): it needs whole matrices"):
        torch.special.log_softmax(A, -1)
