"""The score of forget gates against its definition, its precision and its messages."""

from __future__ import annotations

import math

import pytest
import torch
from tests.messages import refusal
from torch import Tensor, nn
from torch.nn import functional

import attlas
from attlas import Plan
from attlas.distributed.batched_masks import joined_score
from attlas.errors import DtypeError, ShapeError
from attlas.recording.atlas.serialization import score_from, score_spec
from attlas.scores import Forget
from attlas.scores.placed import translated_score


def tokens(m: int = 5, n: int = 7, heads: int = 3, batch: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, heads, m, 4, dtype=torch.float64), torch.randn(batch, 1, n, 4, dtype=torch.float64)


def gates(*shape: int) -> Tensor:
    return functional.logsigmoid(torch.randn(shape, dtype=torch.float64) + 1)


def paper(log_gate: Tensor, m: int, n: int) -> Tensor:
    """The definition: the product of the forget gates after the key, up to that of the query."""
    out = torch.full((*log_gate.shape[:-1], m, n), -math.inf, dtype=log_gate.dtype)
    for i in range(m):
        for j in range(min(i + n - m + 1, n)):
            out[..., i, j] = log_gate[..., j + 1 : i + n - m + 1].exp().prod(-1).log()
    return out


@pytest.mark.parametrize("shape", [(3, 7), (1, 7), (2, 3, 7), (1, 3, 7), (2, 1, 7)])
@pytest.mark.parametrize("m", [1, 5, 7])
def test_is_the_product_of_the_gates(shape: tuple[int, ...], m: int) -> None:
    log_gate, (q, k) = gates(*shape), tokens(m)
    found = attlas.attend(q, k, score=Forget(log_gate), mask=attlas.Causal()).logits[..., :, :]
    torch.testing.assert_close(found, paper(log_gate, m, 7).expand(2, 3, m, 7))


def test_keys_after_the_query_and_queries_before_every_key(logits) -> None:
    log_gate = torch.tensor([[-1.0, -2.0, -4.0]], dtype=torch.float64)
    q, k = tokens(5, 3, heads=1, batch=1)
    wanted = [[1, 3, 7], [1, 3, 7], [0, 2, 6], [-2, 0, 4], [-6, -4, 0]]
    assert logits(Forget(log_gate), q, k)[0, 0].tolist() == wanted


def test_tiles_lists_and_heads(logits, tile_at) -> None:
    log_gate, (q, k) = gates(2, 3, 20), tokens(6, 20)
    score = Forget(log_gate)
    whole = logits(score, q, k)
    torch.testing.assert_close(logits(score, q, k, range(2, 5), range(9, 17)), whole[..., 2:5, 9:17])
    rows = torch.tensor([5, 0, 3])
    at = tile_at(q, k, range(3), range(4, 9), row_index=rows)
    torch.testing.assert_close(score(q, k, at), whole[:, :, rows, 4:9])
    sub = tile_at(q[:1, :2], k)
    object.__setattr__(sub, "head_ids", torch.tensor([2, 0]))
    object.__setattr__(sub, "batch_ids", torch.tensor([1]))
    torch.testing.assert_close(score(q, k, sub), whole[1:, [2, 0]])
    A = attlas.attend(q, k, score=attlas.ScaledDot() + score, mask=attlas.Causal())
    torch.testing.assert_close(A[1, 2][:, :], A[:, :, :, :][1, 2])


def test_windows(logits) -> None:
    log_gate, (q, k) = gates(3, 9), tokens(6, 9)
    whole = logits(Forget(log_gate), q, k)
    for rows, columns in ((range(6), range(9)), (range(2, 5), range(1, 8)), (range(5, 6), range(4))):
        moved = translated_score(Forget(log_gate), rows, columns, 6, 9)
        some = q[:, :, rows.start : rows.stop], k[:, :, columns.start : columns.stop]
        found = logits(moved, *some)
        torch.testing.assert_close(found, whole[..., rows.start : rows.stop, columns.start : columns.stop])


@pytest.mark.parametrize("plan", ["auto", "tiled", "sdpa", "reference"])
def test_sums_of_many_tokens_are_exact(plan: str) -> None:
    # c falls to -13,000: in float32 its roundings are 1e-3, and those of sums of 20,000 numbers are larger.
    n, m = 20_000, 16
    log_gate = -torch.rand(2, n)
    log_gate[:, -600:] = -0.01
    q, k, v = torch.randn(1, 2, m, 4), torch.randn(1, 2, n, 4), torch.randn(1, 2, n, 3)
    score = attlas.ScaledDot() + Forget(log_gate)
    with torch.no_grad():
        found = attlas.attend(q, k, score=score, mask=attlas.Causal(), plan=Plan(plan)) @ v
        c = log_gate.double().cumsum(-1)
        s = q.double() @ k.double().mT / 2 + c[:, -m:, None] - c[:, None]
        s = s.masked_fill(torch.ones(m, n, dtype=torch.bool).triu(n - m + 1), -math.inf)
    torch.testing.assert_close(found.double(), s.softmax(-1) @ v.double(), atol=2e-6, rtol=0)


@pytest.mark.parametrize("shape", [(3, 7), (2, 3, 7), (1, 7)])
def test_gradients_of_the_gates(shape: tuple[int, ...]) -> None:
    (q, k), x, v = tokens(), torch.randn(shape, dtype=torch.float64, requires_grad=True), torch.randn(7, 2).double()

    def out(x: Tensor) -> Tensor:
        score = attlas.ScaledDot() + Forget(functional.logsigmoid(x))
        return attlas.attend(q, k, score=score, mask=attlas.Causal(), plan=Plan("tiled", rows=2, columns=3)) @ v

    assert torch.autograd.gradcheck(out, (x,))


def test_is_learned_where_it_requires_a_gradient() -> None:
    parameter = nn.Parameter(gates(3, 7))
    assert list(Forget(parameter).parameters()) == [parameter]
    leaf = gates(3, 7).requires_grad_()
    assert Forget(leaf).log_gate is leaf
    assert not list(Forget(leaf).parameters())


def put(name: str, t: Tensor) -> dict[str, Tensor]:
    return {"t": t}


def stored(score: attlas.Score) -> attlas.Score:
    return score_from(score_spec(score, put), lambda spec: spec["t"])


@pytest.mark.parametrize("shape", [(3, 7), (2, 3, 7)])
@pytest.mark.parametrize("learn", [False, True])
def test_is_stored(shape: tuple[int, ...], learn: bool, logits) -> None:
    t = gates(*shape)
    score = Forget(nn.Parameter(t) if learn else t)
    again = stored(score)
    assert isinstance(again, Forget)
    assert isinstance(again.log_gate, nn.Parameter) is learn
    assert torch.equal(logits(again, *tokens()), logits(score, *tokens()))


def test_parts_of_batches_and_heads_are_joined() -> None:
    whole = gates(3, 4, 7)
    for axis, sizes in ((0, [1, 2]), (1, [3, 1])):
        parts = [score_spec(Forget(part), put) for part in whole.split(sizes, dim=axis)]
        joined = score_from(joined_score(parts, sizes, axis), lambda spec: spec["t"])
        assert torch.equal(joined.log_gate, whole)
    of_all = score_spec(Forget(whole[0]), put)
    assert torch.equal(score_from(joined_score([of_all] * 2, [1, 2], 0), lambda spec: spec["t"]).log_gate, whole[:1])


def test_properties_and_repr() -> None:
    score = Forget(gates(3, 7))
    assert score.positional
    assert not score.finite  # numbers on a GPU are not asked
    assert repr(score) == "Forget(log_gate=(3, 7))"


def test_messages_of_gates() -> None:
    assert refusal(DtypeError, lambda: Forget(torch.zeros(2, 3, dtype=torch.bool))) == "Forget(): bool"
    assert refusal(DtypeError, lambda: Forget([[0.0]])) == "Forget(): a list"
    assert refusal(ShapeError, lambda: Forget(torch.zeros(3))) == "Forget(): 1 axes"
    assert refusal(ShapeError, lambda: Forget(torch.zeros(1, 1, 1, 3))) == "Forget(): 4 axes"
    assert refusal(ShapeError, lambda: Forget(torch.full((2, 3), 0.5))) == "Forget(): a number above 0"
    for number in (-math.inf, math.nan):
        assert refusal(ShapeError, lambda x=number: Forget(torch.full((2, 3), x))) == (
            "Forget(): a number that is not finite"
        )


@pytest.mark.parametrize("shape", [(3, 5), (2, 7), (3, 1), (3, 3, 7), (2, 1, 5)])
def test_messages_of_sizes(shape: tuple[int, ...]) -> None:
    q, k = tokens()
    text = refusal(ShapeError, lambda: attlas.attend(q, k, score=Forget(gates(*shape))))
    assert text == f"attend(): {shape} in log_gate, (batch, heads, n) = (2, 3, 7)"


def test_three_axes_have_no_heads() -> None:
    q = torch.randn(4, 6, 8)
    with pytest.raises(ShapeError) as caught:
        attlas.attend(q, q, score=Forget(-torch.rand(4, 6)))
    assert caught.value.fix.startswith("q[None], k[None]")
    assert attlas.attend(q[None], q[None], score=Forget(-torch.rand(4, 6))).shape == (1, 4, 6, 6)
