"""The lazy matrix in the hands of code that was written for tensors."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

import attlas
from attlas import TooLargeError
from attlas.matrix import softmax_matrix
from attlas.matrix.value_weighted import value_weighted


@pytest.fixture
def matrix() -> attlas.AttentionMatrix:
    q, k = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 12, 8)
    return attlas.attend(q, k, mask=attlas.Causal(), sink=torch.randn(4))


@pytest.fixture
def large() -> attlas.AttentionMatrix:
    tokens = torch.zeros(1, 8, 1, 4).expand(1, 8, 20_000, 4)
    return attlas.attend(tokens, tokens, mask=attlas.Causal())


AXES = [None, *(s for r in (1, 2, 3) for s in itertools.combinations(range(4), r))]


@pytest.mark.parametrize("dim", AXES, ids=str)
@pytest.mark.parametrize("name", ["sum", "mean", "amax"])
def test_reductions_over_any_axes(matrix: attlas.AttentionMatrix, name: str, dim: Any) -> None:
    dense = matrix.to_dense()
    for keepdim in (False, True):
        found = getattr(matrix, name)(dim, keepdim)
        wanted = getattr(dense, name)(tuple(range(4)) if dim is None else dim, keepdim)
        torch.testing.assert_close(found, wanted)
    if dim is not None and len(dim) == 1:
        torch.testing.assert_close(getattr(matrix, name)(dim=dim[0] - 4), getattr(dense, name)(dim=dim))


@pytest.mark.parametrize("plan", [attlas.Plan("tiled", rows=2, columns=5), attlas.Plan()], ids=["small tiles", "usual"])
@pytest.mark.parametrize("lead", [(), (3,), (3, 4), (2, 3, 4)], ids=str)
def test_leading_axes_of_any_number(lead: tuple[int, ...], plan: attlas.Plan) -> None:
    A = attlas.attend(torch.randn(*lead, 7, 4), torch.randn(*lead, 9, 4), mask=attlas.Window(3, 1), plan=plan)
    dense = A.to_dense()
    for axis in range(len(lead)):
        torch.testing.assert_close(A.mean(axis), dense.mean(axis))
        torch.testing.assert_close(A.amax(axis), dense.amax(axis))
    if len(lead) == 3:  # an axis that an index took away
        torch.testing.assert_close(A[1].sum(0), dense[1].sum(0))
        torch.testing.assert_close(A[:, 1].sum((0, 1)), dense[:, 1].sum((0, 1)))


def test_what_it_is(matrix: attlas.AttentionMatrix) -> None:
    assert matrix.size() == (2, 4, 9, 12)
    assert matrix.size(-1) == 12
    assert matrix[0].size(0) == 4
    assert (matrix.dim(), matrix.ndim, len(matrix), matrix.numel()) == (4, 4, 2, 864)
    assert not matrix.requires_grad
    assert not matrix.is_cuda
    q = torch.randn(1, 2, 3, 4, requires_grad=True)
    A = attlas.attend(q, q)
    assert A.requires_grad
    assert not A.data.requires_grad
    assert not A.detach().requires_grad


def test_stays_lazy(large: attlas.AttentionMatrix) -> None:
    same = (large.contiguous(), large.clone(), large.detach(), large.cpu(), large.float(), large.to("cpu"), large.data)
    for other in (
        *same,
        torch.clone(large),
        torch.detach(large),
        large.to(torch.float64),
        large.to(dtype=torch.double),
    ):
        assert isinstance(other, attlas.AttentionMatrix)
        assert other.shape == large.shape
    assert large.to(torch.float64).dtype is torch.float64
    assert large.squeeze(0).shape == large.squeeze().shape == torch.squeeze(large, 0).shape == (8, 20_000, 20_000)
    assert large.squeeze(1) is large
    assert large.unsqueeze(0).shape == (1, 1, 8, 20_000, 20_000)
    assert large[:, [0, 3]].shape == (1, 2, 20_000, 20_000)


def test_another_dtype_is_another_precision(matrix: attlas.AttentionMatrix) -> None:
    exact = matrix.to(torch.float64)
    torch.testing.assert_close(exact.to_dense().float(), matrix.to_dense())
    assert exact.check() < 1e-12
    torch.testing.assert_close(exact.float().to_dense(), matrix.to_dense())
    half = matrix.to(torch.bfloat16)
    assert isinstance(half, torch.Tensor)
    torch.testing.assert_close(half, matrix.to_dense().bfloat16())


def test_the_log_sum_exp_of_a_part_goes_along(matrix: attlas.AttentionMatrix) -> None:
    weighted = value_weighted(matrix, 9 * torch.rand(2, 2, 12))
    for part in (matrix.window(slice(2, 8), slice(0, 3)), weighted, weighted.window((1, 7), (2, 9))):
        assert part.check() < 1e-5
        for moved in (part.double(), part.double().to(torch.float32)):
            assert moved.check() < 1e-5
            torch.testing.assert_close(moved.to_dense().float(), part.to_dense(), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(moved.sum(-1).float(), part.to_dense().sum(-1), rtol=1e-5, atol=1e-6)
        wrong = softmax_matrix(part.problem, part.plan, part.axes)
        assert (wrong.to_dense() - part.to_dense()).abs().max() > 1e-2  # without it


def test_axes_of_one_query_or_key() -> None:
    A = attlas.attend(torch.randn(1, 4, 1, 8), torch.randn(1, 4, 6, 8))
    dense = A.to_dense()
    torch.testing.assert_close(A.squeeze(), dense.squeeze())
    torch.testing.assert_close(A.squeeze(2), dense.squeeze(2))
    torch.testing.assert_close(A.squeeze(-2), dense.squeeze(-2))
    torch.testing.assert_close(A.squeeze(0).to_dense(), dense.squeeze(0))


@pytest.mark.parametrize("lead", [(), (3,), (2, 3)], ids=str)
def test_new_axes(lead: tuple[int, ...]) -> None:
    A = attlas.attend(torch.randn(*lead, 5, 4), torch.randn(*lead, 6, 4))
    dense = A.to_dense()
    for dim in range(-dense.ndim - 1, dense.ndim + 1):
        found = A.unsqueeze(dim)
        found = found if isinstance(found, torch.Tensor) else found.to_dense()
        torch.testing.assert_close(found, dense.unsqueeze(dim))
    if len(lead) == 2:
        wide = A.unsqueeze(0)
        torch.testing.assert_close(wide @ torch.ones(6, 2), dense.unsqueeze(0) @ torch.ones(6, 2))
        torch.testing.assert_close(wide[0, 1].to_dense(), dense[1])
        torch.testing.assert_close(wide.sum((0, 2)), dense.unsqueeze(0).sum((0, 2)))


def test_nothing_large_is_written_out(large: attlas.AttentionMatrix) -> None:
    calls = [
        torch.stack([large]).sort,
        (large * 2).sort,
        lambda: large.permute(0, 2, 1, 3),
        large.numpy,
        lambda: np.asarray(large),
        large.tolist,
        large.mean(1).sort,
        (large @ large).sort,
        lambda: large.to(torch.float16),
        lambda: large.argmax(1),
    ]
    for call in calls:
        with pytest.raises(TooLargeError):
            call()
    # Each is small enough, together they are not.
    part = attlas.attend(torch.zeros(1, 1, 12_000, 4), torch.zeros(1, 1, 12_000, 4))
    with pytest.raises(TooLargeError, match="matrices: 2"):
        torch.cat([part, part])


def test_the_limit_counts_the_result_of_a_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attlas.engine.autodiff.graph.DENSE_LIMIT", 4 * 9 * 12)
    A = attlas.attend(torch.randn(64, 9, 4), torch.randn(64, 12, 4))
    assert A.mean(0).shape == (9, 12)
    with pytest.raises(TooLargeError):
        torch.stack([A]).sort()


def test_nothing_is_changed_in_place(matrix: attlas.AttentionMatrix) -> None:
    for name in ("mul_", "zero_", "requires_grad_", "register_hook", "backward"):
        assert not hasattr(matrix, name)
    with pytest.raises(AttributeError, match="fix: take a Tensor first"):
        matrix.zero_()
    with pytest.raises(AttributeError, match="'AttentionMatrix' object has no attribute 'heads'"):
        _ = matrix.heads
    with pytest.raises(TypeError, match="fix: take a Tensor first"):
        matrix[0, 0, 0, 0] = 1.0


@pytest.mark.parametrize(
    ("operation", "pattern", "settings"),
    [
        ("rearrange", "b h i j -> (b h) i j", {}),
        ("rearrange", "b h i j -> b i j h", {}),
        ("reduce", "b h i j -> b i j", {"reduction": "mean"}),
        ("reduce", "b h i j -> b h j", {"reduction": "max"}),
        ("reduce", "b h i (j x) -> b h i j", {"reduction": "sum", "x": 3}),
        ("repeat", "b h i j -> b h r i j", {"r": 2}),
        ("einsum", "b h i j, b h j d -> b h i d", {}),
    ],
)
def test_einops(operation: str, pattern: str, settings: dict[str, Any]) -> None:
    einops = pytest.importorskip("einops")
    q, k, v = (torch.randn(2, 3, n, 4, requires_grad=True) for n in (5, 9, 9))
    A = attlas.attend(q, k)
    found, expected = (
        getattr(einops, operation)(*((t, v) if operation == "einsum" else (t,)), pattern, **settings)
        for t in (A, torch.softmax(q @ k.mT / 2, dim=-1))
    )
    torch.testing.assert_close(found, expected)
    for a, b in zip(*(torch.autograd.grad(t.square().sum(), (q, k)) for t in (found, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_print_shows_the_weights_of_a_small_matrix() -> None:
    q, k = torch.randn(2, 6, 4, requires_grad=True), torch.randn(2, 5, 4)
    A = attlas.attend(q, k)
    assert str(A) == f"{A!r}\n{A.detach().to_dense()}"
    assert f"{A}" == str(A)
    larger = attlas.attend(torch.randn(7, 4), k[0])
    assert str(larger) == repr(larger)
    empty = attlas.attend(torch.randn(0, 4), k[0])
    assert str(empty).startswith(repr(empty))
    with torch.no_grad():
        q += 1
    assert str(A) == repr(A)


def test_what_needs_no_number_is_told_of_any_size() -> None:
    q = torch.zeros(1, 8, 60_000, 4)
    A = attlas.attend(q, q)  # 115 GB if it were written out
    assert torch.is_floating_point(A)
    assert (torch.numel(A), A.element_size(), A.stride()[-1], A.is_complex()) == (8 * 60_000**2, 4, 1, False)
    small = attlas.attend(q[0, 0, :5], q[0, 0, :6])
    assert torch.is_floating_point(input=small)
