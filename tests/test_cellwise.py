"""Functions of each weight: sums and their gradients equal the dense ones, tile by tile."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attlas
from attlas import Plan
from attlas.matrix.protocol import LazyTensor

M, N = 9, 13


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


W, KEYS, QUERIES, HEADS = numbers(M, N), numbers(N, seed=1), numbers(M, 1, seed=2), numbers(4, 1, 1, seed=3)

LINEAR: dict[str, Callable[[Any], Tensor]] = {
    "product": lambda A: (A * W).sum(),
    "product of rows": lambda A: (W * A).sum(-1),
    "product of columns": lambda A: (A * W).sum(-2),
    "product with keys": lambda A: (A * KEYS).sum((-1, 1)),
    "product with queries and heads": lambda A: (A * QUERIES * HEADS).sum(-2, keepdim=True),
    "product with a number": lambda A: (2 * A / torch.tensor(3.0)).sum(-1),
    "squares": lambda A: A.pow(2).sum(-1),
    "squares of columns": lambda A: torch.square(A).sum(-2),
    "distance from a target": lambda A: (A - W).square().sum(-1),
    "distance from a row": lambda A: torch.sub(KEYS, A).abs().mean((0, 2)),
    "entropy": lambda A: -(A * (A + 1e-9).log()).sum(-1),
    "logarithms": lambda A: (A + 0.1).log().sum(-2),
    "hinge": lambda A: (A - 0.2).clamp(min=0).sum(),
    "chosen": lambda A: torch.where(W > 0, A, 0.0).sum(-1),
    "masked": lambda A: A.masked_fill(W > 0, 0.5).sum(-2),
    "variance": lambda A: A.var(-1),
    "variance of all": lambda A: A.var(),
    "norm": lambda A: A.norm(dim=-1),
    "counts": lambda A: (A > 0.1).sum(-1) + ((A > 0.1) & (W > 0)).sum(-1),
}
OVER_HEADS: dict[str, Callable[[Any], Tensor]] = {
    "sum": lambda A: A.sum(1),
    "mean": lambda A: A.mean(1),
    "batches": lambda A: A.mean((0, 1), keepdim=True),
    "largest": lambda A: A.amax(1),
    "of a function of 0": lambda A: (1 - A).sum(1) + A.exp().mean(1) + (A == 0).any(1) + (A > 0).all(0).sum(0),
    "of batches, with numbers of each cell": lambda A: torch.where(W > 0, A, KEYS).sum((0, 1)) + (A - W).abs().sum(0),
    "of a product": lambda A: (A * W).clamp(min=0).mean(1),
}
MASKS: dict[str, Any] = {
    "none": None,
    "causal": attlas.Causal(-2),
    "rows without keys": attlas.Causal(-6),  # a tile of them is skipped
    "window": attlas.Window(2, 0),
    "holes": attlas.from_function(lambda b, h, i, j: (i + j + h) % 3 > 0),
}


def matrix(mask: Any, plan: Plan | None = None) -> tuple[attlas.AttentionMatrix, tuple[Tensor, ...]]:
    q, k, sink = (numbers(*s, seed=5).requires_grad_() for s in ((2, 4, M, 6), (2, 2, N, 6), (4,)))
    return attlas.attend(q, k, mask=mask, sink=sink, plan=plan), (q, k, sink)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", [*LINEAR, *OVER_HEADS])
def test_equal_the_dense_ones(name: str, mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use = (LINEAR | OVER_HEADS)[name]
    for plan in (None, Plan("tiled", rows=4, columns=5)):
        A, leaves = matrix(MASKS[mask], plan)
        wanted = use(A.to_dense())
        with monkeypatch.context() as context:
            # The whole matrix is refused, and the result over heads is half of it.
            context.setattr("attlas.engine.autodiff.graph.DENSE_LIMIT", A.numel() * 8 // 2)
            found = use(A)
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-12)
            if not wanted.is_floating_point():
                assert not found.requires_grad
                continue
            slope = numbers(*wanted.shape, seed=7)
            gradients = torch.autograd.grad(found, leaves, slope)
        for a, b in zip(gradients, torch.autograd.grad(wanted, leaves, slope), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["product", "squares of columns", "variance", "entropy"])
def test_gradients_of_gradients(name: str) -> None:
    A, leaves = matrix(attlas.Causal())
    found = []
    for cells in (A, A.to_dense()):
        (slope,) = torch.autograd.grad(LINEAR[name](cells).square().sum(), leaves[0], create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), leaves))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-11)


def test_an_infinite_slope_of_a_hidden_weight_ends_there() -> None:
    A, leaves = matrix(attlas.Causal())
    A.sqrt().sum().backward()
    assert all(bool(t.grad.isfinite().all()) for t in leaves)


def test_what_needs_the_dense_matrix_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    A, _ = matrix(None)
    B, _ = matrix(attlas.Causal())
    learned = W.clone().requires_grad_()
    (A * learned).sum().backward()
    torch.testing.assert_close(learned.grad, A.sum((0, 1)))
    monkeypatch.setattr("attlas.engine.autodiff.graph.DENSE_LIMIT", 100)
    with pytest.raises(attlas.TooLargeError, match=r"A \* \.\.\.: it needs whole matrices"):
        A * learned
    with pytest.raises(attlas.TooLargeError, match=r"A \* \.\.\.: it needs whole matrices"):
        A * B
    with pytest.raises(attlas.TooLargeError, match=r"A\.amax\(\): it needs whole matrices"):
        A.amax(1)


def test_it_is_not_changed_in_place() -> None:
    A, _ = matrix(None)
    cells = A + 2
    for change in (
        lambda: cells.__setitem__((..., 0), 0.0),
        lambda: cells.clamp_(max=0.3),
        lambda: torch.relu_(cells),
        lambda: cells.transpose_(-1, -2),
    ):
        with pytest.raises(attlas.errors.StoredOnlyError, match=r"take a Tensor first, f\(A\)\.to_dense\(\)"):
            change()
    same = cells
    same += W  # another function of the same weights, still lazy
    assert isinstance(same, LazyTensor)
    assert same is not cells
    torch.testing.assert_close(same.sum(-1), (A.to_dense() + 2 + W).sum(-1))
    torch.testing.assert_close(cells.sum(-1), (A.to_dense() + 2).sum(-1))


def test_it_is_stored_as_a_tensor() -> None:
    A = matrix(attlas.Causal())[0].detach()
    torch.testing.assert_close(pickle.loads(pickle.dumps(A * W)), A.to_dense() * W)
    torch.testing.assert_close(copy.deepcopy(A * W), A.to_dense() * W)


def test_what_no_operator_takes() -> None:
    A = matrix(None)[0].detach()
    assert (A == None) is False  # noqa: E711 - the comparison is what is tested
    assert (A != "text") is True
    assert A in [None, A]
    for dense in (False, True):
        with pytest.raises(TypeError):
            (A.to_dense() if dense else A) * "text"
        with pytest.raises(TypeError):
            (A.to_dense() if dense else A) + None


def test_a_sparse_tensor_takes_the_dense_matrix() -> None:
    A = matrix(attlas.Causal())[0].detach()[0, 0]
    torch.testing.assert_close((A * W.to_sparse()).to_dense(), A.to_dense() * W)


def test_a_tensor_that_changes_before_it_is_used() -> None:
    A, _ = matrix(None)
    t = W.clone()
    found = A * t
    t.zero_()
    with pytest.raises(attlas.ModifiedError, match="t was changed in place"):
        found.sum(-1)

    with pytest.raises(attlas.ModifiedError, match="t was changed in place"):
        (found + 1).sum(-1)
    for use in (lambda: found.detach().sum(), found.any, found.all):
        with pytest.raises(attlas.ModifiedError, match="t was changed in place"):
            use()
    t = W.clone()
    total = (A * t).sum()
    t.zero_()
    with pytest.raises(attlas.ModifiedError, match="t was changed in place"):
        total.backward()


def test_what_is_made_without_a_graph_is_constant() -> None:
    A, leaves = matrix(attlas.Causal())
    D = A.to_dense()

    def loss(cells: Any) -> Tensor:
        with torch.no_grad():
            constant = cells * 1.0 + cells.clamp(max=0.2)
        assert not constant.requires_grad
        assert not constant.sum(-1).requires_grad
        assert not (constant + 1).sum(-1).requires_grad
        with torch.no_grad():
            large = cells > 0.2
        return (constant * cells).sum() + (cells.square() * large * (cells * 1).detach()).sum()

    wanted = torch.autograd.grad(loss(D), leaves)
    for a, b in zip(torch.autograd.grad(loss(A), leaves), wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_comparisons_are_indices() -> None:
    A, t = matrix(attlas.Causal())[0], numbers(2, 4, M, N)
    D, wanted = A.to_dense(), t.clone()
    torch.testing.assert_close(t[A > 0.2], t[D > 0.2])
    chosen = [((cells > 0.2) & ~(cells * 2 > 1.5)) | (cells == 0) for cells in (A, D)]
    t[chosen[0]] = 0
    wanted[chosen[1]] = 0
    torch.testing.assert_close(t, wanted)


def test_no_deviation_has_no_slope() -> None:
    A, leaves = matrix(attlas.Causal(-2))
    q = torch.zeros(3, 2, dtype=torch.float64, requires_grad=True)
    B = attlas.attend(q, torch.full((4, 2), 1000.0, dtype=torch.float64) * torch.arange(4)[:, None])
    for name, cells, tensors in (("std", A, leaves), ("std", B, (q,)), ("norm", A, leaves)):
        for dim in (-1, -2):
            found, wanted = (
                torch.autograd.grad(getattr(x, name)(dim=dim).sum(), tensors) for x in (cells, cells.to_dense())
            )
            for a, b in zip(found, wanted, strict=True):
                torch.testing.assert_close(a, b)


def test_truths_have_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    A, (q, *_) = matrix(None)
    monkeypatch.setattr("attlas.engine.autodiff.graph.DENSE_LIMIT", A.numel() * 8 - 1)
    assert not (A > 0.1).requires_grad
    assert not (A > 0.1).float().sum().requires_grad
    for name in ("backward", "requires_grad_", "retain_grad", "register_hook"):
        with pytest.raises(attlas.GradientError, match="truths and counts have no gradient"):
            getattr(A > 0.1, name)()
    with pytest.raises(attlas.GradientError, match="truths and counts have no gradient"):
        torch.autograd.grad(A > 0.1, q)
