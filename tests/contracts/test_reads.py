"""Reads carry the gradient that is recorded, and none where none is; they copy nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.contracts.test_idioms import Dense
from torch import Tensor

import attlas
from attlas import stats
from attlas.engine.backends import reference

READS: dict[str, Callable[[Any], Any]] = {
    "lse": lambda A: A.lse,
    "row": lambda A: A[0, 1, 3, :],
    "column": lambda A: A[:, :, :, 3],
    "cell": lambda A: A[0, 0, 2, 3],
    "pairs": lambda A: A[..., [1, 2], [3, 4]],
    "block of a head": lambda A: A[0, 1][2:5, 1:4],
    "dense": lambda A: A.to_dense(),
    "logits": lambda A: A.logits[:, :, 2, :],
    "dense logits": lambda A: A.logits.to_dense(),
    "logits mean": lambda A: A.logits.mean(),
    "logits var": lambda A: A.logits.var(),
    "logits amax": lambda A: A.logits.amax(),
    "sum of rows": lambda A: A.sum(-1),
    "sum of columns": lambda A: A.sum(-2),
    "mean": lambda A: A.mean(-2),
    "amax": lambda A: A.amax(-1),
    "amax of columns": lambda A: A.amax(-2),
    "topk": lambda A: A.topk(3),
}
SCORES: dict[str, Callable[[], attlas.Score]] = {
    "ScaledDot": attlas.ScaledDot,
    "Gaussian": lambda: attlas.Gaussian(1.0, learn=True),
    "Additive": lambda: attlas.Additive(8, 8, 4),
    "TensorBias": lambda: attlas.ScaledDot() + attlas.TensorBias(torch.randn(5, 7, requires_grad=True)),
}


def tensors(result: Any) -> list[Tensor]:
    return [result] if isinstance(result, Tensor) else [t for part in result for t in tensors(part)]


@pytest.fixture(params=list(SCORES))
def matrix(request: pytest.FixtureRequest) -> attlas.AttentionMatrix:
    q, k = (torch.randn(2, 2, t, 8, requires_grad=True) for t in (5, 7))
    return attlas.attend(q, k, score=SCORES[request.param](), sink=torch.zeros(2, requires_grad=True))


@pytest.mark.parametrize("read", list(READS))
def test_a_read_carries_the_gradient(read: str, matrix: attlas.AttentionMatrix) -> None:
    leaves = [t for t in matrix.problem.leaves if t.requires_grad]
    matrix @ torch.randn(7, 3)  # what a product keeps must not stand in for it
    with torch.no_grad():
        numbers = tensors(READS[read](matrix))
    assert not any(t.requires_grad for t in numbers)
    assert not any(t.requires_grad for t in tensors(READS[read](matrix.detach())))
    whole = reference.dense(matrix.problem)
    plain = Dense.of(whole.weights, whole.logits, whole.lse)
    for t, number, wanted in zip(tensors(READS[read](matrix)), numbers, tensors(READS[read](plain)), strict=True):
        torch.testing.assert_close(t, number)
        if t.is_floating_point():
            slope = torch.randn_like(t)
            found = torch.autograd.grad(t, leaves, slope, allow_unused=True, retain_graph=True)
            exact = torch.autograd.grad(wanted, leaves, slope, retain_graph=True, allow_unused=True)
            for leaf, *both in zip(leaves, found, exact, strict=True):
                a, b = (torch.zeros_like(leaf) if grad is None else grad for grad in both)
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_a_statistic_of_numbers_alone_records_no_graph(matrix: attlas.AttentionMatrix) -> None:
    found = matrix.collect(stats.ArgMax(), stats.ColumnArgMax(), stats.Coverage())
    assert not any(t.requires_grad for t in found)


def test_the_product_records_a_graph(matrix: attlas.AttentionMatrix) -> None:
    assert (matrix @ torch.randn(7, 3)).requires_grad
    assert (matrix.mT @ torch.randn(5, 3)).requires_grad
    assert (matrix[0, 1] @ torch.randn(7, 3)).requires_grad
    with torch.no_grad():
        assert not (matrix @ torch.randn(7, 3)).requires_grad
        assert not (matrix.mT @ torch.randn(5, 3)).requires_grad


def test_the_product_in_inference_mode() -> None:
    with torch.inference_mode():
        q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
        A = attlas.attend(q, k, score=attlas.Gaussian(1.0, learn=True), mask=attlas.Causal())
        out = A @ v
        torch.testing.assert_close(out, A.to_dense() @ v)


def test_a_matrix_read_without_a_graph_multiplies_with_one() -> None:
    q, k, v = (torch.randn(1, 2, 9, 8, requires_grad=True) for _ in range(3))
    A = attlas.attend(q, k, score=attlas.Gaussian(1.0, learn=True))
    with torch.no_grad():
        first = A.lse
        A @ v
    assert (A @ v).requires_grad
    torch.testing.assert_close(A.lse, first)


@pytest.mark.parametrize("shape", [(5, 8), (3, 5, 8), (2, 4, 5, 8), (2, 3, 4, 5, 8)])
def test_attend_copies_nothing(shape: tuple[int, ...]) -> None:
    q, k = torch.randn(shape), torch.randn(shape)
    A = attlas.attend(q, k, mask=attlas.Causal())
    for given, held in ((q, A.problem.q), (k, A.problem.k)):
        assert held.data_ptr() == given.data_ptr()
        assert held.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()
    part = A[0] if len(shape) > 2 else A
    assert part.problem.q.untyped_storage().data_ptr() == q.untyped_storage().data_ptr()


def test_attend_copies_nothing_of_what_is_not_contiguous() -> None:
    base = torch.randn(2, 9, 4, 8)
    A = attlas.attend(base.transpose(1, 2), base[:, :, ::2].transpose(1, 2))
    assert A.problem.q.data_ptr() == A.problem.k.data_ptr() == base.data_ptr()
    one = torch.randn(1, 2, 9, 8)
    assert attlas.attend(torch.randn(3, 2, 9, 8), one).problem.k.data_ptr() == one.data_ptr()


def test_a_view_of_heads_copies_nothing() -> None:
    q, k = torch.randn(2, 8, 5, 4), torch.randn(2, 2, 7, 4)
    A = attlas.attend(q, k)
    for part in (A[1], A[:, 4:], A[1, 2], A[:, 5], A[..., :4, :, :][0], A[-1:]):
        if isinstance(part, Tensor):
            continue
        for given, held in ((q, part.problem.q), (k, part.problem.k)):
            assert held.untyped_storage().data_ptr() == given.untyped_storage().data_ptr()


@pytest.mark.parametrize("name", list(SCORES))
def test_inputs_are_not_written_to(name: str) -> None:
    q, k, v, sink = torch.randn(2, 2, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 3), torch.randn(2)
    additive = torch.randn(5, 7).masked_fill(torch.rand(5, 7) > 0.8, -torch.inf)
    given = {"q": q, "k": k, "v": v, "sink": sink, "mask": additive}
    before = {key: t.clone() for key, t in given.items()}
    A = attlas.attend(q, k, score=SCORES[name](), mask=additive, sink=sink)
    dense = A.to_dense()
    A @ v, A.mT @ torch.randn(5, 2), A.lse, A.sum(-2), A.topk(2), A.logits.mean()
    for key, t in given.items():
        assert torch.equal(t, before[key]), key
    torch.testing.assert_close(A.to_dense(), dense)
    dense.zero_()
    assert bool((A.to_dense() > 0).any())


def test_what_a_read_returns_belongs_to_the_reader() -> None:
    q, bias = torch.zeros(5, 8), torch.randn(5, 7)
    A = attlas.attend(q, torch.zeros(7, 8), score=attlas.TensorBias(bias))
    before = bias.clone()
    for result in (A.logits[:, :], A.logits[2, :], A.logits.to_dense(), A[:, :]):
        result.fill_(9.0)
    assert torch.equal(bias, before)
    assert bool((A.logits.to_dense() == before).all())


class Slice(attlas.Score):
    """A score of a user's own that hands out a part of its own tensor."""

    def __init__(self, t: Tensor) -> None:
        super().__init__()
        self.t = t

    def forward(self, q: Tensor, k: Tensor, at: attlas.Tile) -> Tensor:
        if at.scattered:
            return self.t[:, :, at.i.flatten()][..., at.j.flatten()]
        return self.t[:, :, at.rows.start : at.rows.stop, at.columns.start : at.columns.stop]


class Whole(Slice):
    """As above, and the tensor itself where the tile is as large."""

    def forward(self, q: Tensor, k: Tensor, at: attlas.Tile) -> Tensor:
        return self.t if at.shape[2:] == self.t.shape[2:] else super().forward(q, k, at)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("score", [Slice, Whole])
@pytest.mark.parametrize("plan", [attlas.Plan(), attlas.Plan("tiled", rows=2)], ids=["auto", "tiled"])
def test_a_tensor_that_a_score_holds_is_not_written_to(mode: Any, score: Any, plan: attlas.Plan) -> None:
    with mode():
        t = torch.randn(1, 1, 5, 7)
        before = t.clone()
        q, k, v = torch.randn(1, 1, 5, 4), torch.randn(1, 1, 7, 4), torch.randn(7, 2)
        uses = [use for name, use in READS.items() if name not in ("row", "block of a head")]
        uses += [lambda A: A @ v, lambda A: A.mT @ q, lambda A: A[0, 0, 3, :], lambda A: A[0, 0, 2:5, 1:4]]
        for mask in (None, attlas.Causal()):
            for use in uses:
                use(attlas.attend(q, k, score=score(t), mask=mask, plan=plan))
                assert torch.equal(t, before)
        torch.testing.assert_close(attlas.attend(q, k, score=score(t), plan=plan).to_dense(), torch.softmax(t, -1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_sums_with_a_graph_are_no_less_exact(dtype: torch.dtype) -> None:
    q = torch.randn(2, 40, 8).to(dtype).requires_grad_()
    A = attlas.attend(q, q, mask=attlas.Causal())
    torch.testing.assert_close(A.sum(-2), A.detach().sum(-2), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(A.mean((0, -1)), A.detach().mean((0, -1)), rtol=1e-5, atol=1e-5)
