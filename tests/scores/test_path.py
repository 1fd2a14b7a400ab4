"""The score of PaTH against its definition, in tiles, lists and windows, with its messages."""

from __future__ import annotations

import math

import pytest
import torch
from tests.messages import refusal
from torch import Tensor, nn

import attlas
from attlas.errors import DeviceError, DtypeError, ShapeError
from attlas.recording.atlas.serialization import score_from, score_spec
from attlas.scores import Forget, PaTH
from attlas.scores.placed import translated_score


def tokens(m: int = 9, n: int = 21, heads: int = 2, batch: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, heads, m, 4, dtype=torch.float64), torch.randn(batch, 1, n, 4, dtype=torch.float64)


def turns(*shape: int, chunk: int = 4) -> PaTH:
    w, beta = torch.randn(*shape, 4, dtype=torch.float64), 2 * torch.rand(shape, dtype=torch.float64)
    score = PaTH(nn.functional.normalize(w, dim=-1), beta)
    score.chunk_size = chunk
    return score


def paper(score: PaTH, q: Tensor, k: Tensor) -> Tensor:
    """The definition, cell by cell: the product of all turns after the key, up to that of the query."""
    (m, d), n = q.shape[-2:], k.shape[-2]
    H = torch.eye(d, dtype=q.dtype) - score.beta[..., None, None] * score.w.unsqueeze(-1) * score.w.unsqueeze(-2)
    out = q.new_full((*q.shape[:-1], n), -math.inf)
    for i in range(m):
        for j in range(i + n - m + 1):
            product = torch.eye(d, dtype=q.dtype)
            for t in range(j + 1, i + n - m + 1):
                product = H[..., t, :, :] @ product
            out[..., i, j] = (q[..., i, None, :] @ product @ k[..., j, :, None])[..., 0, 0] / d**0.5
    return out


@pytest.mark.parametrize("shape", [(2, 21), (1, 21), (2, 2, 21)])
@pytest.mark.parametrize("m", [1, 9, 21])
def test_is_the_product_of_the_turns(shape: tuple[int, ...], m: int) -> None:
    score, (q, k) = turns(*shape), tokens(m)
    A = attlas.attend(q, k, score, attlas.Causal())
    wanted = paper(score, q, k.expand(-1, 2, -1, -1))
    torch.testing.assert_close(A.logits[..., :, :], wanted, rtol=1e-9, atol=1e-9)
    alone = attlas.attend(q, k, score)  # keys after the query have no weight
    torch.testing.assert_close(alone.to_dense(), wanted.softmax(-1), rtol=1e-9, atol=1e-9)


def test_tiles_lists_heads_and_windows(logits, tile_at) -> None:
    score, (q, k) = turns(2, 2, 21), tokens()
    whole = logits(score, q, k)
    torch.testing.assert_close(logits(score, q, k, range(2, 5), range(9, 17)), whole[..., 2:5, 9:17])
    torch.testing.assert_close(logits(score, q, k, range(7, 9), range(2)), whole[..., 7:9, :2])  # over chunks between
    rows, columns = torch.tensor([5, 0, 5, 3]), torch.tensor([20, 1, 13])
    at = tile_at(q, k, range(4), range(3), row_index=rows, column_index=columns)
    torch.testing.assert_close(score(q[:, :, rows], k[:, :, columns], at), whole[:, :, rows][..., columns])
    A = attlas.attend(q, k, score)
    torch.testing.assert_close(A[1, 1][:, :], A[:, :, :, :][1, 1])
    for r, c in ((range(2, 5), range(1, 18)), (range(-3, 9), range(-2, 25))):  # a part, and a larger matrix
        moved = translated_score(score, r, c, 9, 21)
        wide_q, wide_k = q.new_zeros(2, 2, len(r), 4), q.new_zeros(2, 1, len(c), 4)
        i, j = (slice(max(span.start, 0), min(span.stop, size)) for span, size in ((r, 9), (c, 21)))
        own = [slice(part.start - span.start, part.stop - span.start) for part, span in ((i, r), (j, c))]
        wide_q[:, :, own[0]], wide_k[:, :, own[1]] = q[:, :, i], k[:, :, j]
        torch.testing.assert_close(logits(moved, wide_q, wide_k)[..., own[0], own[1]], whole[..., i, j])


def test_gradients_with_and_without_forget_gates() -> None:
    (q, k), v = tokens(5, 7), torch.randn(7, 2, dtype=torch.float64)
    w, beta = torch.randn(2, 7, 4, dtype=torch.float64), torch.rand(2, 7, dtype=torch.float64)
    gate = -torch.rand(2, 7, dtype=torch.float64)

    def out(w: Tensor, beta: Tensor, gate: Tensor) -> Tensor:
        score = PaTH(w, beta, scale=0.7)
        score.chunk_size = 2
        plan = attlas.Plan("tiled", rows=2, columns=3)
        return attlas.attend(q, k, score + Forget(gate), attlas.Causal(), plan=plan) @ v

    assert torch.autograd.gradcheck(out, [t.requires_grad_() for t in (w, beta, gate)], fast_mode=True)


def test_what_is_kept_belongs_to_its_tensors() -> None:
    score, (q, k) = turns(2, 21), tokens()
    before = attlas.attend(q, k, score).to_dense()
    with pytest.raises(attlas.ModifiedError):
        A = attlas.attend(q, k, score)
        score.w.mul_(0.5)
        A.to_dense()
    after = attlas.attend(q, k, score).to_dense()
    torch.testing.assert_close(after, paper(score, q, k.expand(-1, 2, -1, -1)).softmax(-1))
    assert not torch.allclose(before, after)


def test_many_tokens_in_float32() -> None:
    n = 3_000
    q, k, v, w = torch.randn(4, 1, 1, n, 16)
    score = PaTH(nn.functional.normalize(w, dim=-1), 2 * torch.rand(1, 1, n))
    A = attlas.attend(q, k, score, attlas.Causal())
    exact = PaTH(score.w.double(), score.beta.double())
    B = attlas.attend(q.double(), k.double(), exact, attlas.Causal())
    rows = [0, 1_500, n - 1]
    assert float((A[..., rows, :] - B[..., rows, :]).abs().max()) < 2e-6
    assert float(((A @ v)[..., rows, :] - B[..., rows, :] @ v.double()).abs().max()) < 1e-5
    assert A.check() < 1e-5


def test_is_stored() -> None:
    score, (q, k) = turns(2, 21), tokens()
    spec = score_spec(score, lambda name, t: {"t": t})
    again = score_from(spec, lambda part: part["t"])
    torch.testing.assert_close(attlas.attend(q, k, again).to_dense(), attlas.attend(q, k, score).to_dense())
    assert repr(score) == "PaTH(w=(2, 21, 4))"


def test_messages() -> None:
    w = torch.randn(2, 21, 4)
    assert refusal(DtypeError, lambda: PaTH([[0.0]])) == "PaTH(): a list"
    assert refusal(ShapeError, lambda: PaTH(torch.zeros(3, 4))) == "PaTH(): 2 axes"
    assert refusal(ShapeError, lambda: PaTH(w, torch.rand(2, 5))) == "PaTH(): (2, 5) in beta, (2, 21, 4) in w"
    assert refusal(ShapeError, lambda: PaTH(w, scale=math.inf)) == "PaTH(): scale = inf"
    assert refusal(DeviceError, lambda: PaTH(w, torch.empty(2, 21, device="meta"))) == "PaTH(): meta and cpu"
    q = torch.randn(1, 4, 9, 4), torch.randn(1, 4, 21, 4)
    with pytest.raises(ShapeError, match="one vector for each batch, head and key") as caught:
        attlas.attend(*q, PaTH(w))
    assert caught.value.fix.startswith("w.repeat_interleave(2, dim=-3)")
    with pytest.raises(ShapeError, match="the same last axis"):
        attlas.attend(torch.randn(1, 2, 9, 4), torch.randn(1, 2, 21, 6), PaTH(w))
