"""Scores of places against their formula and against transformers' T5."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from tests.messages import refusal
from torch import nn

from attlas.errors import DtypeError, ShapeError
from attlas.scores import Alibi, RelativeBias, TensorBias


def tokens(m=5, n=7, heads=3, batch=2):
    return torch.randn(batch, heads, m, 4, dtype=torch.float64), torch.randn(batch, 1, n, 4, dtype=torch.float64)


def paper(heads):
    """The recursion of the authors' published code."""

    def power(n):
        start = 2 ** (-(2 ** -(math.log2(n) - 3)))
        return [start * start**i for i in range(n)]

    if math.log2(heads).is_integer():
        return power(heads)
    closest = 2 ** math.floor(math.log2(heads))
    return power(closest) + paper(2 * closest)[0::2][: heads - closest]


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 12, 16, 20, 31])
def test_alibi_slopes_of_the_paper(heads, logits):
    torch.testing.assert_close(Alibi(heads).slopes, torch.tensor(paper(heads), dtype=torch.float64))
    q, k = tokens(heads=heads)
    score = Alibi()
    assert torch.equal(logits(score, q, k), logits(Alibi(heads), q, k))
    assert repr(score) == f"Alibi(heads={heads})"


def test_learned_slopes():
    score = Alibi(nn.Parameter(torch.rand(3, dtype=torch.float64)))
    assert len(list(score.parameters())) == 1
    fixed = torch.rand(3, dtype=torch.float64, requires_grad=True)
    score = Alibi(fixed)
    assert score.slopes is fixed
    assert not score.state_dict()


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(32, 128), (16, 20), (4, 7), (320, 800)])
def test_buckets_are_those_of_t5(buckets, max_distance, bidirectional):
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    offsets = torch.arange(-1200, 1201)
    expected = modeling.T5Attention._relative_position_bucket(offsets, bidirectional, buckets, max_distance)
    score = RelativeBias(2, max_distance, buckets=buckets, bidirectional=bidirectional)
    assert torch.equal(score.bucket(offsets), expected)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_bias_is_that_of_t5(bidirectional, logits):
    transformers = pytest.importorskip("transformers")
    modeling = pytest.importorskip("transformers.models.t5.modeling_t5")
    config = transformers.T5Config(d_model=8, d_kv=4, num_heads=3, is_decoder=not bidirectional)
    layer = modeling.T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    score = RelativeBias(3, 128, buckets=32, bidirectional=bidirectional)
    score.weight = layer.relative_attention_bias.weight
    q, k = tokens(40, 40, batch=1)
    torch.testing.assert_close(logits(score, q.float(), k.float()), layer.compute_bias(40, 40), rtol=0, atol=0)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("m", "n"), [(5, 5), (3, 9), (9, 3), (1, 1), (0, 3), (3, 0)])
def test_clipped_table(m, n, bidirectional, logits):
    score = RelativeBias(3, max_distance=2, bidirectional=bidirectional).double()
    assert torch.equal(score.weight, torch.zeros(5 if bidirectional else 3, 3))
    nn.init.normal_(score.weight)
    q, k = tokens(m, n)
    offset = np.arange(n) - (np.arange(m)[:, None] + n - m)
    row = np.clip(offset, -2, 2 if bidirectional else 0) + 2
    expected = torch.from_numpy(score.weight.detach().numpy()[row]).permute(2, 0, 1).expand(2, 3, m, n)
    assert torch.equal(logits(score, q, k), expected)


@pytest.mark.parametrize("buckets", [None, 8])
def test_relative_bias_of_tiles_and_lists(buckets, logits, tile_at):
    score = RelativeBias(3, max_distance=5, buckets=buckets).double()
    nn.init.normal_(score.weight)
    q, k = tokens(6, 20)
    whole = logits(score, q, k)
    assert torch.equal(logits(score, q, k, range(2, 5), range(9, 17)), whole[..., 2:5, 9:17])
    rows = torch.tensor([5, 0, 3])
    at = tile_at(q, k, range(3), range(4, 9), row_index=rows)
    assert torch.equal(score(q, k, at).expand(2, 3, 3, 5), whole[:, :, rows, 4:9])


@pytest.mark.parametrize("shape", [(), (7,), (5, 7), (5, 1), (3, 1, 7), (3, 5, 7), (2, 1, 5, 7), (2, 3, 5, 7)])
def test_tensor_bias(shape, logits):
    t = torch.randn(shape, dtype=torch.float64)
    q, k = tokens()
    expected = t.expand(2, 3, 5, 7)
    assert torch.equal(logits(TensorBias(t), q, k), expected)
    assert torch.equal(logits(TensorBias(t), q, k, range(1, 4), range(2, 7)), expected[..., 1:4, 2:7])
    assert logits(TensorBias(t), q.float(), k.float()).dtype is torch.float32


def test_tensor_bias_copies_nothing_and_follows_ids(tile_at):
    t = torch.randn(2, 3, 5, 7)
    t[0, 0, 0, 0] = -math.inf
    score = TensorBias(t)
    q, k = (x.float() for x in tokens())
    at = tile_at(q, k, range(1, 4), range(2, 7))
    part = score(q, k, at)
    assert part.untyped_storage().data_ptr() == t.untyped_storage().data_ptr()
    sub = tile_at(q[:1, :2], k)
    object.__setattr__(sub, "head_ids", torch.tensor([2, 0]))
    object.__setattr__(sub, "batch_ids", torch.tensor([1]))
    assert torch.equal(score(q, k, sub), t[1:, [2, 0]])
    rows, columns = torch.tensor([4, 0]), torch.tensor([6, 6, 1])
    at = tile_at(q, k, range(2), range(3), row_index=rows, column_index=columns)
    assert torch.equal(score(q, k, at), t[:, :, rows][..., columns])


def test_tensor_bias_is_learned_where_it_requires_a_gradient(logits):
    q, k = tokens()
    for t in (nn.Parameter(torch.randn(3, 5, 7, dtype=torch.float64)), torch.randn(5, 1, dtype=torch.float64)):
        t.requires_grad_()
        score = TensorBias(t)
        assert score.t is t
        assert isinstance(t, nn.Parameter) == bool(list(score.parameters()))
        assert torch.autograd.gradcheck(lambda _, s=score: logits(s, q, k), (t,))


def test_every_score_of_places_says_so():
    for score in (Alibi(2), RelativeBias(2), TensorBias(torch.ones(1))):
        assert score.positional
        assert score.finite is not isinstance(score, TensorBias)


def test_repr():
    assert repr(RelativeBias(2, 8, buckets=6, bidirectional=False)) == (
        "RelativeBias(heads=2, max_distance=8, buckets=6, bidirectional=False)"
    )
    assert repr(TensorBias(torch.ones(2, 3))) == "TensorBias(t=(2, 3))"
    assert repr(Alibi()) == "Alibi()"


def test_messages_of_heads():
    q, k = tokens(heads=3)
    score = Alibi()
    score.check(q[:, :2], k, 2)
    for alibi in (score, Alibi(2), Alibi([0.5, 0.25])):
        assert refusal(ShapeError, lambda a=alibi: a.check(q, k, 3)) == "attend(): 3 heads in q, 2 in Alibi()"
    assert refusal(ShapeError, lambda: RelativeBias(2).check(q, k, 3)) == "attend(): 3 heads in q, 2 in RelativeBias()"


def test_messages_of_slopes():
    assert refusal(DtypeError, lambda: Alibi(torch.tensor([1, 2]))) == "Alibi(): int64"
    assert refusal(DtypeError, lambda: Alibi("steep")) == "Alibi(): a str"
    assert refusal(ShapeError, lambda: Alibi([0.5, math.nan])) == "Alibi(): a slope that is not finite"
    assert refusal(ShapeError, lambda: Alibi(0.5)) == "Alibi(): 0 axes"
    assert refusal(ShapeError, lambda: Alibi(0)) == "Alibi(): slopes = 0"


def test_messages_of_buckets():
    for buckets, bidirectional in ((2, True), (7, True), (1, False)):
        call = lambda b=buckets, d=bidirectional: RelativeBias(2, buckets=b, bidirectional=d)  # noqa: E731
        assert refusal(ShapeError, call) == (f"RelativeBias(): buckets = {buckets}")
    assert (
        refusal(ShapeError, lambda: RelativeBias(2, max_distance=8, buckets=32))
        == "RelativeBias(): max_distance = 8, 8 such distances"
    )
    assert refusal(ShapeError, lambda: RelativeBias(2.0)) == "RelativeBias(): heads = 2.0"


def test_messages_of_tensors():
    assert refusal(DtypeError, lambda: TensorBias(torch.ones(2, 3, dtype=torch.bool))) == "TensorBias(): bool"
    assert refusal(DtypeError, lambda: TensorBias([1.0])) == "TensorBias(): a list"
    assert refusal(ShapeError, lambda: TensorBias(torch.ones(1, 1, 1, 2, 3))) == "TensorBias(): 5 axes"
    q, k = tokens()
    assert (
        refusal(ShapeError, lambda: TensorBias(torch.ones(2, 5, 7)).check(q, k, 3))
        == "attend(): (2, 5, 7) in t, (batch, heads, m, n) = (2, 3, 5, 7)"
    )
