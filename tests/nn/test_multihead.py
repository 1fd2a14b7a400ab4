"""MultiHeadAttention against torch.nn.MultiheadAttention: the inputs that torch ships, and many more."""

import copy
import itertools
import math
import sys
import types
import unittest

import numpy as np
import pytest
import torch
from torch import nn

import attlas
from attlas.engine.autodiff import graph
from attlas.nn import HeadMean, KVCache, MultiHeadAttention


def shipped_inputs(training, monkeypatch):
    """Return the inputs of torch's own test of its layer."""
    # torch's tests take a base class from this package, which is not needed to read their inputs.
    absent = types.ModuleType("expecttest")
    absent.TestCase = unittest.TestCase
    if "expecttest" not in sys.modules:
        monkeypatch.setitem(sys.modules, "expecttest", absent)
    modules = pytest.importorskip("torch.testing._internal.common_modules", reason="torch came without its tests")
    torch.backends.__allow_nonbracketed_mutation_flag = True  # its import forbids this to all other tests
    info = next(info for info in modules.module_db if info.module_cls is nn.MultiheadAttention)
    return info.module_inputs_func(info, "cpu", torch.float64, requires_grad=True, training=training)


def pair(*args, **kwargs):
    """Return torch's layer and ours with the same numbers, no projection being 0."""
    kwargs.setdefault("dtype", torch.float64)
    theirs = nn.MultiheadAttention(*args, **kwargs)
    for p in theirs.parameters():
        nn.init.normal_(p, std=0.5)
    ours = MultiHeadAttention(*args, **kwargs)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def run(layer, tensors, forward):
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out, weights = layer(*leaves, **forward)
    return leaves, out, weights


def same(theirs, ours, tensors, forward):
    """Compare output, weights and every gradient."""
    left, out, weights = run(theirs, tensors, forward)
    right, our_out, our_weights = run(ours, tensors, forward)
    torch.testing.assert_close(our_out, out)
    assert (our_weights is None) == (weights is None)
    if weights is not None:
        assert our_weights.shape == weights.shape
        torch.testing.assert_close(our_weights.to_dense(), weights.detach())
    slope = torch.randn_like(out)
    theirs.zero_grad()
    ours.zero_grad()
    out.backward(slope)
    our_out.backward(slope)
    for a, b in zip([*left, *theirs.parameters()], [*right, *ours.parameters()], strict=True):
        torch.testing.assert_close(b.grad, a.grad)


@pytest.mark.parametrize("training", [True, False])
def test_equals_torch_on_every_input_that_torch_ships(training, monkeypatch):
    torch.manual_seed(0)
    inputs = shipped_inputs(training, monkeypatch)
    assert len(inputs) == 64
    for item in inputs:
        constructor, forward = item.constructor_input, item.forward_input
        theirs = nn.MultiheadAttention(*constructor.args, **constructor.kwargs, dtype=torch.float64).train(training)
        ours = MultiHeadAttention(*constructor.args, **constructor.kwargs, dtype=torch.float64).train(training)
        missing = ours.load_state_dict(theirs.state_dict())
        assert not missing.missing_keys
        assert not missing.unexpected_keys
        theirs.load_state_dict(ours.state_dict())
        same(theirs, ours, forward.args, forward.kwargs)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kdim": 10, "vdim": 6},
        {"add_bias_kv": True},
        {"add_zero_attn": True},
        {"bias": False},
        {"add_bias_kv": True, "add_zero_attn": True, "kdim": 4},
    ],
)
@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("masks", ["none", "bool", "float", "heads", "padding", "both", "float padding"])
def test_equals_torch(batch_first, options, average, masks):
    torch.manual_seed(0)
    theirs, ours = pair(8, 2, batch_first=batch_first, **options)
    batch, m, n = 3, 5, 7
    sizes = [(m, 8), (n, options.get("kdim", 8)), (n, options.get("vdim", 8))]
    tensors = [torch.randn(batch, *size, dtype=torch.float64) for size in sizes]
    if not batch_first:
        tensors = [t.transpose(0, 1) for t in tensors]
    padding = torch.arange(n) >= torch.tensor([[7], [4], [5]])
    forward = {
        "none": {},
        "bool": {"attn_mask": torch.ones(m, n, dtype=torch.bool).triu(2)},
        "float": {"attn_mask": torch.randn(m, n, dtype=torch.float64).masked_fill(torch.rand(m, n) < 0.2, -math.inf)},
        "heads": {"attn_mask": torch.rand(batch * 2, m, n) < 0.3},
        "padding": {"key_padding_mask": padding},
        "both": {"key_padding_mask": padding, "attn_mask": torch.ones(m, n, dtype=torch.bool).triu(1)},
        "float padding": {"key_padding_mask": torch.randn(batch, n, dtype=torch.float64)},
    }[masks]
    same(theirs, ours, tensors, {**forward, "average_attn_weights": average})
    same(theirs, ours, tensors, {**forward, "need_weights": False})


def test_causal_as_in_torch():
    theirs, ours = pair(8, 2, batch_first=True)
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.float64)
    for weights in (True, False):
        forward = {"attn_mask": mask, "is_causal": True, "need_weights": weights}
        torch.testing.assert_close(ours(x, x, x, **forward)[0], theirs(x, x, x, **forward)[0])
    torch.testing.assert_close(ours(x, x, x, is_causal=True)[0], theirs(x, x, x, attn_mask=mask)[0])
    torch.testing.assert_close(ours(x, x, x, attn_mask=attlas.Causal())[0], theirs(x, x, x, attn_mask=mask)[0])


TOKENS = torch.arange(5)
APPENDED = {
    "causal": (attlas.Causal(), TOKENS[:, None] >= TOKENS),
    "window": (attlas.Window(1, 1), (TOKENS - TOKENS[:, None]).abs() <= 1),
    "padding": (attlas.Padding(3, side="left"), (TOKENS >= 2).expand(5, 5)),
    "tensor": (attlas.from_tensor(TOKENS[:, None] != TOKENS), TOKENS[:, None] != TOKENS),
    "documents": (attlas.Documents([0, 0, 1, 1, 1]), (TOKENS < 2) == (TOKENS < 2)[:, None]),
}


@pytest.mark.parametrize("name", APPENDED)
def test_a_mask_is_about_tokens_and_not_about_the_keys_that_are_appended(name):
    theirs, ours = pair(8, 2, batch_first=True, add_bias_kv=True, add_zero_attn=True)
    mask, seen = APPENDED[name]
    x = torch.randn(2, 5, 8, dtype=torch.float64)
    found, weights = ours(x, x, x, attn_mask=mask, average_attn_weights=False)
    expected, dense = theirs(x, x, x, attn_mask=~seen, average_attn_weights=False)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(weights.to_dense(), dense)
    torch.testing.assert_close(weights[1, 0, [4, 0]][:, [6, 2, 4]], dense[1, 0, [4, 0]][:, [6, 2, 4]])


def test_an_additive_mask_of_attlas_cannot_be_appended_to():
    ours, x = MultiHeadAttention(8, 2, add_zero_attn=True), torch.ones(5, 1, 8)
    with pytest.raises(attlas.ShapeError, match="fix: attn_mask=t, the tensor itself"):
        ours(x, x, x, attn_mask=attlas.from_tensor(torch.rand(5, 5)))


def test_same_seed_same_parameters():
    for options in ({}, {"kdim": 3, "vdim": 5}, {"add_bias_kv": True}, {"bias": False}):
        torch.manual_seed(0)
        theirs = nn.MultiheadAttention(8, 2, **options)
        torch.manual_seed(0)
        ours = MultiHeadAttention(8, 2, **options)
        assert list(theirs.state_dict()) == list(ours.state_dict())
        assert all(torch.equal(a, b) for a, b in zip(theirs.parameters(), ours.parameters(), strict=True))


def test_a_query_without_a_key_gives_the_bias():
    theirs, ours = pair(8, 2, batch_first=True)
    x = torch.randn(1, 3, 8, dtype=torch.float64)
    hidden = torch.tensor([[True] * 3, [False] * 3, [False] * 3])
    out, weights = ours(x, x, x, attn_mask=hidden)
    assert theirs(x, x, x, attn_mask=hidden)[0][0, 0].isnan().all()
    torch.testing.assert_close(out[0, 0], ours.out_proj.bias)
    assert weights[0, 0].eq(0).all()


def test_takes_the_place_of_torchs_layer_in_a_transformer():
    encoder = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [False, False, False, True, True]])
    want = encoder(x, src_key_padding_mask=padding)
    ours = MultiHeadAttention(16, 4, batch_first=True)
    ours.load_state_dict(encoder.self_attn.state_dict())
    encoder.self_attn = ours
    torch.testing.assert_close(encoder(x, src_key_padding_mask=padding), want)


def test_weights_keep_no_graph():
    _, ours = pair(8, 2, batch_first=True)
    x = torch.randn(2, 4, 8, dtype=torch.float64, requires_grad=True)
    _, weights = ours(x, x, x, average_attn_weights=False)
    assert not weights.problem.q.requires_grad
    assert not weights.problem.k.requires_grad


def test_grouped_heads_are_repeated_heads():
    ours = MultiHeadAttention(8, 4, batch_first=True, num_kv_heads=2)
    x = torch.randn(2, 5, 8)
    whole = nn.MultiheadAttention(8, 4, batch_first=True)
    q, k, v = ours.in_proj_weight.split([8, 4, 4])
    repeat = lambda w: w.view(2, 2, -1).repeat_interleave(2, 0).flatten(0, 1)  # noqa: E731
    whole.load_state_dict({"in_proj_weight": torch.cat([q, repeat(k), repeat(v)]), "in_proj_bias": torch.zeros(24),
                           "out_proj.weight": ours.out_proj.weight, "out_proj.bias": ours.out_proj.bias})  # fmt: skip
    torch.testing.assert_close(ours(x, x, x)[0], whole(x, x, x)[0])
    assert ours(x, x, x, average_attn_weights=False)[1].shape == (2, 4, 5, 5)


@pytest.mark.parametrize("score", [attlas.Gaussian(2.0, learn=True), attlas.Alibi(2) + attlas.ScaledDot(),
                                   attlas.Additive(4, 4, 3)])  # fmt: skip
def test_any_score(score):
    torch.manual_seed(0)
    ours = MultiHeadAttention(8, 2, batch_first=True, score=copy.deepcopy(score)).double()
    x = torch.randn(2, 4, 8, dtype=torch.float64)
    out, weights = ours(x, x, x, attn_mask=attlas.Causal(), average_attn_weights=False)
    assert weights.check() < 1e-9
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 4, dtype=torch.float64))
    out.sum().backward()
    assert all(p.grad is not None for p in ours.parameters())


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 1}, {"add_bias_kv": True, "add_zero_attn": True}])
def test_cache_reads_token_by_token(options, window):
    ours = MultiHeadAttention(8, 2, batch_first=True, **options).double().requires_grad_(False)
    x = torch.randn(2, 9, 8, dtype=torch.float64)
    mask = attlas.Causal() if window is None else attlas.Window(window - 1, 0)
    whole, _ = ours(x, x, x, attn_mask=mask)
    cache = KVCache(window=window, capacity=2)
    steps = [ours(part, part, part, is_causal=True, cache=cache)[0] for part in x.split([4, 1, 2, 1, 1], dim=1)]
    torch.testing.assert_close(torch.cat(steps, 1), whole)


def test_head_mean_reads_like_the_dense_mean(monkeypatch):
    torch.manual_seed(0)
    A = attlas.attend(torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4), mask=attlas.Causal())
    dense, mean = A.to_dense().mean(1), HeadMean(A)
    assert mean.shape == mean.size() == dense.shape
    assert (mean.ndim, mean.size(-1), len(mean), mean.dtype, mean.device) == (3, 7, 2, A.dtype, A.device)
    torch.testing.assert_close(mean.to_dense(), dense)
    whole = slice(None)
    index = [(0, 3), (whole, 2), (..., 1), (0, slice(1, 3), 4), (1, [0, 2], [1, 3]), (..., -2, slice(2))]
    for key in [*index, (whole, whole, 3), (slice(1), ..., 0)]:
        torch.testing.assert_close(mean[key], dense[key])
    assert isinstance(mean[1], HeadMean)
    torch.testing.assert_close(mean[1][2], dense[1, 2])
    two = torch.tensor(2)
    index = [(torch.tensor(1), two), (None, 0), (..., None), (0, np.arange(5) > 2), (two - 1, ..., [True] * 7)]
    for key in [*index, (slice(None), torch.tensor([[0, 1], [2, 2]])), dense > 0.2, ([0, 1], [1, 2])]:
        torch.testing.assert_close(mean[key], dense[key])
    for dim, keepdim in itertools.product((-1, -2, 1, 2), (True, False)):
        torch.testing.assert_close(mean.sum(dim, keepdim), dense.sum(dim, keepdim))
        torch.testing.assert_close(mean.mean(dim, keepdim), dense.mean(dim, keepdim))
    for dim in (0, (0, -1), (1, 2), None):  # the batch is an axis of the mean, and the heads are none
        torch.testing.assert_close(mean.sum(dim), dense.sum(dim))
        torch.testing.assert_close(mean.mean(dim, keepdim=True), dense.mean(dim, keepdim=True))
    torch.testing.assert_close(torch.relu(mean), dense)
    np.testing.assert_array_equal(mean.numpy(), mean.to_dense().numpy())
    v = torch.randn(2, 7, 6)
    torch.testing.assert_close(mean @ v, dense @ v)
    torch.testing.assert_close(mean @ v[0, :, 0], dense @ v[0, :, 0])
    with pytest.raises(attlas.TooLargeError, match="limit=None insists"):
        mean.to_dense(limit=10)
    with pytest.raises(attlas.ShapeError, match="more indices than axes"):
        mean[0, 0, 0, 0]
    with monkeypatch.context() as patch:
        patch.setattr(graph, "DENSE_LIMIT", 10)
        torch.testing.assert_close(mean.to_dense(limit=None), dense)
    assert repr(mean) == "HeadMean(shape=(2, 5, 7), heads=3, torch.float32)"


def test_errors_say_what_to_type():
    with pytest.raises(attlas.ShapeError, match="num_heads = 3"):
        MultiHeadAttention(8, 3)
    with pytest.raises(attlas.ShapeError, match="num_kv_heads = 3"):
        MultiHeadAttention(8, 4, num_kv_heads=3)
    with pytest.raises(attlas.ShapeError, match="dropout must be a probability"):
        MultiHeadAttention(8, 4, dropout=2)
    with pytest.raises(
        attlas.ShapeError, match=r"value: \(3, 2, 9\) .*\n.*\n  found: value has 3 axes, the last of size 9;"
    ):
        MultiHeadAttention(8, 2)(torch.ones(3, 2, 8), torch.ones(3, 2, 8), torch.ones(3, 2, 9))
