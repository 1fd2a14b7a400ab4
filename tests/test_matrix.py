"""The lazy matrix beside the dense tensor that it stands for."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import attlas
from attlas import Plan, stats


@pytest.fixture(params=["plain", "causal", "sink", "empty rows", "part"])
def matrix(request: pytest.FixtureRequest) -> attlas.AttentionMatrix:
    q, k = torch.randn(2, 3, 9, 4, dtype=torch.float64), torch.randn(2, 3, 12, 4, dtype=torch.float64)
    options: dict[str, dict[str, Any]] = {
        "causal": {"mask": attlas.Causal()},
        "sink": {"sink": torch.randn(3, dtype=torch.float64)},
        "empty rows": {"mask": attlas.Causal(-4)},
    }
    A = attlas.attend(q, k, **options.get(request.param, {}))
    return A[:, 1] if request.param == "part" else A


def test_logits_are_those_before_softmax(matrix: attlas.AttentionMatrix) -> None:
    logits = matrix.logits.to_dense()
    assert matrix.logits.shape == logits.shape == matrix.shape
    seen = logits > -math.inf
    weights = torch.exp(logits - torch.where(matrix.lse == -math.inf, 0.0, matrix.lse).unsqueeze(-1))
    torch.testing.assert_close(weights, matrix.to_dense())
    count = seen.sum(-1)
    mean = logits.masked_fill(~seen, 0).sum(-1) / count
    variance = ((logits - mean.unsqueeze(-1)).square().masked_fill(~seen, 0).sum(-1)) / count
    has = count > 0
    torch.testing.assert_close(matrix.logits.mean()[has], mean[has])
    torch.testing.assert_close(matrix.logits.var()[has], variance[has])
    torch.testing.assert_close(matrix.logits.amax(), logits.amax(-1))


@pytest.mark.parametrize(
    "idiom",
    ["A.mT.sum(-1)", "A.mT.mean((-1, -2))", "A.mT.amax(-2)", "A.mT.max()", "A.mT.max(-1).indices", "A.mT.argmax(-1)",
     "A.logits.amax(-1)", "A.logits.max()", "A.logits.max(-1).indices", "torch.argmax(A.logits, -1)"],
)  # fmt: skip
def test_views_are_reduced_at_any_length(idiom: str, monkeypatch: pytest.MonkeyPatch) -> None:
    A = attlas.attend(torch.randn(2, 9, 4), torch.randn(2, 12, 4))
    names = {"A": A, "torch": torch}
    wanted = eval(idiom.replace("A.mT", "A.mT.to_dense()").replace("A.logits", "A.logits.to_dense()"), names)
    monkeypatch.setattr(
        "attlas.engine.autodiff.graph.DENSE_LIMIT", 40
    )  # as if the matrix were too large to be written out
    torch.testing.assert_close(eval(idiom, names), wanted)


def test_parts_of_the_problem_are_there() -> None:
    q, k, sink = torch.randn(2, 6, 9, 4), torch.randn(2, 3, 12, 4), torch.randn(6)
    A = attlas.attend(q, k, score=attlas.Cosine(), mask=attlas.Causal(), sink=sink)
    assert torch.equal(A.q, q)
    assert torch.equal(A.k, k)
    assert torch.equal(A.sink, sink)
    assert isinstance(A.score, attlas.Cosine)
    assert isinstance(A.mask, attlas.Causal)
    assert torch.equal(A[1, 4].q, q[1, 4])
    assert torch.equal(A[1, 4].k, k[1, 2])
    assert torch.equal(A[:, 4].k, k[:, 2])
    plain = attlas.attend(q[0, 0], k[0, 0])
    assert (plain.q.shape, plain.k.shape, plain.mask, plain.sink) == ((9, 4), (12, 4), None, None)
    assert attlas.attend(q[:, 0], k[:, 0]).k.shape == (2, 12, 4)


def test_a_statistic_that_is_no_method_is_named() -> None:
    A = attlas.attend(torch.randn(3, 4), torch.randn(3, 4))
    with pytest.raises(AttributeError, match=r"no attribute 'entropy'; attlas\.stats\.entropy\(A\) computes it$"):
        A.entropy()
    with pytest.raises(AttributeError, match=r"no attribute 'nonsense'$"):
        A.nonsense()


def test_check_measures_the_error(matrix: attlas.AttentionMatrix) -> None:
    assert matrix.check() < 1e-12
    assert matrix.check(rows=1) <= matrix.check(rows=100) + 1e-16


def test_check_finds_an_error() -> None:
    class Wrong(attlas.Score):
        """A score whose answer depends on the dtype: exact in float64 alone."""

        def forward(self, q: torch.Tensor, k: torch.Tensor, at: attlas.Tile) -> torch.Tensor:
            return q @ k.mT * (1.0 if q.dtype is torch.float64 else 1.01)

    assert attlas.attend(torch.randn(20, 8), torch.randn(30, 8), score=Wrong()).check() > 1e-4


def test_the_size_of_a_dense_matrix_is_stated() -> None:
    A = attlas.attend(torch.randn(8, 4), torch.randn(8, 4))
    assert A.to_dense(limit=8 * 8 * 4).shape == (8, 8)
    assert A.to_dense(limit=None).shape == (8, 8)
    with pytest.raises(attlas.TooLargeError):
        A.to_dense(limit=8 * 8 * 4 - 1)
    with pytest.raises(MemoryError):
        A.logits.to_dense(limit=8 * 8 * 4 - 1)


def test_repr_says_what_it_is() -> None:
    q, k = torch.randn(2, 3, 9, 4), torch.randn(2, 3, 12, 4)
    A = attlas.attend(q, k, mask=attlas.Causal(), sink=torch.zeros(3))
    assert repr(A) == ("AttentionMatrix(shape=(2, 3, 9, 12), torch.float32, score=ScaledDot, mask=Causal(), sink)")
    assert repr(attlas.attend(q, k)[0, 1]) == "AttentionMatrix(shape=(9, 12), torch.float32, score=ScaledDot)"
    assert repr(A.mT) == repr(A) + ".mT"
    assert repr(A.logits) == repr(A) + ".logits"


def test_the_log_sum_exp_is_kept() -> None:
    q = torch.randn(2, 3, 9, 4)
    for first in (lambda A: A.lse, lambda A: A @ q, lambda A: A.sum(-2)):
        A = attlas.attend(q, q)
        first(A)
        assert A.softmax_weights.lse().data_ptr() == A.softmax_weights.lse().data_ptr()
        torch.testing.assert_close(A.lse, torch.logsumexp(q @ q.mT / 2, -1))


def test_a_statistic_that_skips_the_log_sum_exp_does_not_spoil_it() -> None:
    q = torch.randn(2, 3, 9, 4)
    for plan in (attlas.Plan(), attlas.Plan("tiled", rows=4, columns=3)):
        A = attlas.attend(q, q, mask=attlas.Causal(-3), plan=plan)
        wanted = attlas.attend(q, q, mask=attlas.Causal(-3)).lse
        A.logits.amax(), A.logits.mean()
        torch.testing.assert_close(A.lse, wanted)


def test_copies() -> None:
    """A matrix is data: it can be copied, and pickled where its score and mask can."""
    A = attlas.attend(torch.randn(2, 3, 9, 4), torch.randn(2, 3, 12, 4), mask=attlas.Causal())
    for other in (copy.copy(A), copy.deepcopy(A), pickle.loads(pickle.dumps(A))):
        torch.testing.assert_close(other.to_dense(), A.to_dense())


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("kernel", [attlas.Gaussian, attlas.Laplace, attlas.Epanechnikov])
def test_copies_of_scores_with_a_bandwidth_for_each_coordinate(kernel: Any, learned: bool) -> None:
    widths = torch.tensor([0.5, 1.0, 2.0, 4.0])
    score = kernel(bandwidth=torch.nn.Parameter(widths) if learned else widths)
    for mask in (None, attlas.Causal(), attlas.Window(3, 3), attlas.Padding([12, 5]), attlas.Dilated(3, 0, 3)):
        q, k, v = torch.randn(2, 3, 9, 4), torch.randn(2, 3, 12, 4), torch.randn(2, 3, 12, 5)
        A = attlas.attend(q, k, score=score, mask=mask, sink=torch.randn(3))
        other = copy.deepcopy(A)
        for read in (lambda X: X @ v, lambda X: X.lse, lambda X: X.to_dense(), stats.entropy):  # noqa: B023
            assert torch.equal(read(other), read(A))
        if learned:  # a copy has parameters of its own
            (other @ v).square().sum().backward()
            assert other.score.bandwidth.grad is not None
            assert score.bandwidth.grad is None


PRODUCTS: dict[str, Callable[[Any], Any]] = {
    "A @ A": lambda A: A @ A,
    "A @ A.mT": lambda A: A @ A.mT,
    "A.mT @ A": lambda A: A.mT @ A,
    "A.mT @ A.mT": lambda A: A.mT @ A.mT,
    "A @ A.logits": lambda A: A @ A.logits,
    "A @ function": lambda A: A @ (2.0 * A),
    "A.logits @ A": lambda A: A.logits @ A,
    "torch.matmul": lambda A: torch.matmul(A, A.mT),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_matrix_times_a_matrix(name: str, dtype: torch.dtype) -> None:
    q = torch.randn(2, 3, 7, 4).to(dtype).requires_grad_()
    A = attlas.attend(q, q)
    dense = A.to_dense()
    left, _, right = name.partition(" @ ")
    parts = {"A": dense, "A.mT": dense.mT, "A.logits": A.logits.to_dense(), "function": 2.0 * dense}
    wanted = parts[left] @ parts[right] if right else dense @ dense.mT
    found = PRODUCTS[name](A)
    assert found.dtype is A.dtype
    torch.testing.assert_close(found, wanted)
    a, b = (torch.autograd.grad(t.square().sum(), q, retain_graph=True)[0] for t in (found, wanted))
    close = 2e-2 if dtype.itemsize == 2 else 1e-4
    torch.testing.assert_close(a, b, rtol=close, atol=close)


def test_a_product_that_would_not_fit_stays_lazy() -> None:
    long = torch.zeros(1).expand(20_000, 4)
    A = attlas.attend(long, long)
    torch.testing.assert_close((A @ A.mT)[7, :3], torch.full((3,), 1 / 20_000))
    with pytest.raises(attlas.TooLargeError):
        A @ A.logits


def test_a_batch_of_no_sequence() -> None:
    q, v = torch.randn(0, 2, 5, 4, requires_grad=True), torch.randn(0, 2, 5, 3)
    A = attlas.attend(q, q)
    zeros = torch.zeros(0, 2, 5, 5)
    for name in ("sum", "mean", "amax"):
        for dim in (0, 1, 2, 3, (0, 1), (0, 2), (1, 3), (0, 1, 2, 3)):
            for keepdim in (False, True):
                try:
                    wanted = getattr(zeros, name)(dim, keepdim=keepdim)
                except IndexError:
                    with pytest.raises(IndexError):
                        getattr(A, name)(dim, keepdim=keepdim)
                else:
                    torch.testing.assert_close(getattr(A, name)(dim, keepdim=keepdim), wanted, equal_nan=True)
    for values in (v, v[:, :1]):
        assert A.collect(stats.Pooled(values))[0].shape == (A @ values).shape == (0, 2, 5, 3)
    assert attlas.attend(q[:, 0], q[:, 0]).collect(stats.Pooled(v[:, 0]))[0].shape == (0, 5, 3)
    with pytest.raises(attlas.ShapeError):
        A.collect(stats.Pooled(torch.randn(0, 3, 5, 3)))


@pytest.mark.parametrize("mask", [None, ~attlas.Padding(5), attlas.Causal(-2), torch.zeros(3, 5).bool()])
@pytest.mark.parametrize("n", [0, 5])
def test_a_sink_where_no_key_is_seen(n: int, mask: Any) -> None:
    if n == 0 and mask is not None:
        pytest.skip("a mask of five keys")
    q, k, sink = torch.randn(1, 2, 3, 4), torch.randn(1, 2, n, 4), torch.randn(2, requires_grad=True)
    for plan in (Plan(), Plan("tiled", rows=2)):
        A = attlas.attend(q, k, mask=mask, sink=sink, plan=plan)
        logits = torch.cat([A.logits.to_dense(), sink.view(1, 2, 1, 1).expand(1, 2, 3, 1)], -1)
        wanted = logits.logsumexp(-1)
        torch.testing.assert_close(A.lse, wanted.to(A.lse.dtype))
        for a, b in zip(*(torch.autograd.grad(t.sum(), sink) for t in (A.lse, wanted)), strict=True):
            torch.testing.assert_close(a, b)


def test_zero_length() -> None:
    for m, n in ((0, 5), (5, 0), (0, 0)):
        q, k = torch.randn(2, 3, m, 4, requires_grad=True), torch.randn(2, 3, n, 4, requires_grad=True)
        v = torch.randn(2, 3, n, 2, requires_grad=True)
        A = attlas.attend(q, k, mask=attlas.Causal())
        out = A @ v
        assert out.shape == (2, 3, m, 2)
        assert bool((out == 0).all())
        out.sum().backward()
        assert q.grad is not None
        assert v.grad is not None
        assert A.sum(-1).shape == (2, 3, m)
        assert A.sum(-2).shape == (2, 3, n)
        assert A.check() == 0.0
        assert bool((A.lse == -math.inf).all())
    empty_batch = attlas.attend(torch.randn(0, 3, 5, 4), torch.randn(0, 3, 6, 4))
    assert (empty_batch @ torch.randn(6, 2)).shape == (0, 3, 5, 2)
    assert empty_batch.sum(-1).shape == (0, 3, 5)
    no_size = attlas.attend(torch.randn(2, 5, 0), torch.randn(2, 6, 0))
    torch.testing.assert_close(no_size.to_dense(), torch.full((2, 5, 6), 1 / 6))
    torch.testing.assert_close(no_size @ torch.ones(6, 2), torch.ones(2, 5, 2))
    assert (attlas.attend(torch.randn(5, 4), torch.randn(6, 4)) @ torch.randn(6, 0)).shape == (5, 0)


def test_parts_of_a_subclass_with_an_init_of_its_own() -> None:
    class Named(attlas.AttentionMatrix):
        def __init__(self, A: attlas.AttentionMatrix, name: str) -> None:
            super().__init__(A.weights, A.axes)
            self.name = name

    q = torch.randn(2, 5, 4, requires_grad=True)
    A = Named(attlas.attend(q, q), "mine")
    for part, shape in (
        (A[0], (5, 5)),
        (A.detach(), (2, 5, 5)),
        (A.double(), (2, 5, 5)),
        (A.window((1, 3)), (2, 2, 5)),
    ):
        assert isinstance(part, attlas.AttentionMatrix)
        assert part.shape == shape
