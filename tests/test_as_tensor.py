"""A lazy matrix that is a torch.Tensor by its class gives what the dense tensor gives, and stays lazy where it can."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attlas
from attlas.errors import StoredOnlyError, TooLargeError
from attlas.matrix.tensor import MatrixTensor

LAZY: dict[str, Callable[[Tensor], Any]] = {
    "clone": lambda t: t.clone(),
    "detach": lambda t: t.detach(),
    "cat of one": lambda t: torch.cat([t]),
    "one sequence": lambda t: t[0],
    "everything": lambda t: t[:, :, ...],
    "mT": lambda t: t.mT,
    "to": lambda t: t.to("cpu"),
    "to None": lambda t: t.to(None),
    "module": torch.nn.Identity(),
    "scaled": lambda t: 2 * t,
}
READ: dict[str, Callable[[Tensor], Any]] = {
    "row": lambda t: t[0, 1, -1],
    "sum": lambda t: t.sum(-2),
    "product": lambda t: t @ torch.ones(30, 3, dtype=torch.float64),
    "product from the left": lambda t: torch.ones(3, 30, dtype=torch.float64) @ t,
    "einsum": lambda t: torch.einsum("bhij,bhjd->bhid", t, torch.ones(1, 2, 30, 3, dtype=torch.float64)),
    "topk": lambda t: t.topk(3, -1)[0],
    "compared": lambda t: (t > 0.1).double(),
    "array": lambda t: torch.tensor(t.numpy(force=True)),
    "list": lambda t: torch.tensor(t.detach().tolist(), dtype=torch.float64),
    "shape": lambda t: torch.tensor([*t.shape, t.ndim, len(t), t.is_floating_point()]),
}


def matrix() -> attlas.AttentionMatrix:
    torch.manual_seed(0)
    q = torch.randn(1, 2, 30, 8, dtype=torch.float64, requires_grad=True)
    return attlas.attend(q, torch.randn(1, 2, 30, 8, dtype=torch.float64), mask=attlas.Causal())


@pytest.mark.parametrize("name", [*LAZY, *READ])
def test_it_gives_what_the_dense_tensor_gives(name: str) -> None:
    A, f = matrix(), (LAZY | READ)[name]
    found, wanted = f(A.as_tensor()), f(A.to_dense())
    assert isinstance(found, MatrixTensor) == (name in LAZY)
    assert isinstance(found, Tensor)
    assert found.requires_grad == wanted.requires_grad
    torch.testing.assert_close(found.matrix.to_dense() if name in LAZY else found, wanted, rtol=1e-9, atol=1e-12)


def test_gradients_reach_queries() -> None:
    A = matrix()
    (A.as_tensor().sum(-2).square().sum() + A.as_tensor()[0, 1, 3].square().sum()).backward()
    q = A.weights.queries if hasattr(A.weights, "queries") else A.problem.q
    dense = matrix()
    (dense.to_dense().sum(-2).square().sum() + dense.to_dense()[0, 1, 3].square().sum()).backward()
    wanted = dense.weights.queries if hasattr(dense.weights, "queries") else dense.problem.q
    torch.testing.assert_close(q.grad, wanted.grad, rtol=1e-9, atol=1e-12)


def test_what_it_cannot_do_is_refused() -> None:
    t = matrix().as_tensor()
    assert repr(t).startswith("MatrixTensor(AttentionMatrix(")
    with pytest.raises(StoredOnlyError):
        t.mul_(2)
    with pytest.raises(TooLargeError, match=r"A.tolist\(\)"):
        attlas.attend(torch.zeros(1, 1, 1100, 2), torch.zeros(1, 1, 1100, 2)).as_tensor().tolist()
    q = torch.zeros(1, 8, 1, 8).expand(1, 8, 20_000, 8)
    with pytest.raises(TooLargeError):
        torch.linalg.svd(attlas.attend(q, q).as_tensor())


def test_hand_written_weights_and_logits_are_kept_lazily() -> None:
    kept: list[Any] = []

    class Attention(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor) -> Tensor:
            scores = q @ k.transpose(-1, -2) / 3 + torch.arange(20.0).reshape(1, 1, 1, 20)
            scores = scores.masked_fill(torch.ones(20, 20, dtype=torch.bool).triu(1), torch.finfo(scores.dtype).min)
            weights = scores.softmax(-1)
            kept.extend(t.detach() for t in (scores, weights))
            return weights @ q

    model, q = Attention(), torch.randn(1, 2, 20, 8, requires_grad=True)
    model(q, q)
    with attlas.lazily(model) as block:
        model(q, q)
    assert not block.dense_uses
    scores, weights, lazy_scores, lazy_weights = kept
    assert isinstance(lazy_weights, MatrixTensor)
    assert not isinstance(lazy_scores, Tensor)
    for key in ((0, 1, 3), (0, slice(None), slice(2, 5), slice(-4, None)), (..., -1), (slice(None), 0, 4, 3)):
        torch.testing.assert_close(lazy_scores[key], scores[key], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lazy_weights[key], weights[key], rtol=1e-5, atol=1e-6)
        assert not lazy_scores[key].requires_grad
    assert lazy_scores.computed is None
    assert lazy_scores[0].shape == (2, 20, 20)
    torch.testing.assert_close(lazy_scores[0][1, 3], scores[0, 1, 3], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lazy_scores.to_dense(), scores, rtol=1e-5, atol=1e-5)
