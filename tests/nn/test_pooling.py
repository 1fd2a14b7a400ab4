"""Pooling layers against their formulas, in float64, and what they keep of a call."""

import copy
import gc
import math
import pickle
import weakref

import pytest
import torch
from tests.messages import refusal

import attlas
from attlas.nn import AdditiveAttention, AttentionPooling, DotProductAttention


def softmax_of(logits, allowed=None):
    """Softmax of a matrix of numbers, spelled out; 0 for a row without keys."""
    if allowed is not None:
        logits = logits.masked_fill(~allowed, -math.inf)
    e = torch.exp(logits - logits.amax(-1, keepdim=True).clamp(min=-1e30))
    total = e.sum(-1, keepdim=True)
    return torch.where(total > 0, e / total, 0.0)


def layers():
    return {
        "pooling": (AttentionPooling([0.7, 1.3]), 2, 2),
        "fixed pooling": (AttentionPooling(0.8, learn=False), 2, 2),
        "laplace": (AttentionPooling(0.8, kernel=attlas.Laplace), 2, 2),
        "dot": (DotProductAttention(), 3, 3),
        "plain dot": (DotProductAttention(scale=1.0), 3, 3),
        "additive": (AdditiveAttention(4, 3, 5), 4, 3),
        "additive with bias": (AdditiveAttention(4, 3, 5, bias=True), 4, 3),
    }


def formula(layer, q, k):
    """Log-weights of every pair, from the papers."""
    score = layer.score
    if isinstance(layer, AdditiveAttention):
        W_q, W_k, w = score.W_q.weight, score.W_k.weight, score.w_v
        b = 0 if score.W_q.bias is None else score.W_q.bias
        rows = [[(w * torch.tanh(W_q @ q_i + W_k @ k_j + b)).sum() for k_j in k] for q_i in q]
        return torch.stack([torch.stack(row) for row in rows])
    if isinstance(layer, DotProductAttention):
        return q @ k.T * (1 / math.sqrt(q.shape[-1]) if score.scale is None else score.scale)
    gap = (q[:, None] - k[None]) / score.bandwidth
    return -gap.abs().sum(-1) if isinstance(score, attlas.Laplace) else -0.5 * gap.square().sum(-1)


each_layer = pytest.mark.parametrize("name", list(layers()))


@each_layer
@pytest.mark.parametrize("lens", [None, [2, 5], [0, 1], [[1, 2, 3, 4], [5, 4, 0, 1]]])
def test_equals_the_formula(name, lens):
    torch.manual_seed(0)
    layer, dq, dk = layers()[name]
    layer = layer.double()
    q, k, v = (torch.randn(2, n, d, dtype=torch.float64) for n, d in ((4, dq), (5, dk), (5, 2)))
    lens = None if lens is None else torch.tensor(lens)
    out = layer(q, k, v, lens)
    for b in range(2):
        allowed = None if lens is None else torch.arange(5) < lens[b].reshape(-1, 1)
        weights = softmax_of(formula(layer, q[b], k[b]), None if allowed is None else allowed.expand(4, 5))
        torch.testing.assert_close(out[b], weights @ v[b], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(layer.weights[b].to_dense(), weights.detach(), rtol=1e-10, atol=1e-12)


def test_known_values_of_additive_attention():
    """By hand: with unit matrices the score of q = 0 and k is w · tanh(k)."""
    layer = AdditiveAttention(2, 2, 2).double()
    with torch.no_grad():
        layer.score.W_q.weight.copy_(torch.eye(2))
        layer.score.W_k.weight.copy_(torch.eye(2))
        layer.score.w_v.copy_(torch.tensor([1.0, -2.0]))
    q = torch.tensor([[0.0, 0.0], [1.0, -1.0]], dtype=torch.float64)
    k = torch.tensor([[0.5, 0.0], [0.0, 0.25]], dtype=torch.float64)
    layer(q, k, torch.eye(2, dtype=torch.float64))
    want = [[math.tanh(0.5), -2 * math.tanh(0.25)],
            [math.tanh(1.5) - 2 * math.tanh(-1), math.tanh(1) - 2 * math.tanh(-0.75)]]  # fmt: skip
    torch.testing.assert_close(layer.weights.logits.to_dense(), torch.tensor(want, dtype=torch.float64))
    first = 1 / (1 + math.exp(want[0][1] - want[0][0]))
    torch.testing.assert_close(layer.weights[0], torch.tensor([first, 1 - first], dtype=torch.float64))


@each_layer
def test_gradcheck(name):
    torch.manual_seed(0)
    layer, dq, dk = layers()[name]
    layer = layer.double()
    tensors = [torch.randn(1, n, d, dtype=torch.float64, requires_grad=True) for n, d in ((3, dq), (4, dk), (4, 2))]
    parameters = list(layer.parameters())

    def call(q, k, v, *_):
        return layer(q, k, v, torch.tensor([3]), attlas.Causal())

    assert torch.autograd.gradcheck(call, (*tensors, *parameters), fast_mode=True)


def test_numbers_on_a_line():
    x, y = torch.linspace(0, 5, 20, dtype=torch.float64), torch.randn(20, dtype=torch.float64)
    at = torch.tensor([0.3, 2.0], dtype=torch.float64)
    pool = AttentionPooling(0.5, learn=False)
    weights = softmax_of(-0.5 * ((at[:, None] - x) / 0.5) ** 2)
    torch.testing.assert_close(pool(at, x, y), weights @ y)


def test_lengths_and_mask_are_joined():
    layer = DotProductAttention()
    q, v = torch.randn(2, 4, 3), torch.randn(2, 4, 2)
    masks = (attlas.Causal(), torch.ones(4, 4, dtype=torch.bool).tril(), lambda b, h, i, j: j <= i)
    outs = [layer(q, q, v, torch.tensor([2, 4]), mask) for mask in masks]
    torch.testing.assert_close(outs[1], outs[0])
    torch.testing.assert_close(outs[2], outs[0])
    assert layer.weights[0, :, 2:].eq(0).all()
    assert layer.weights[1, 1, 2:].eq(0).all()


def test_valid_lens_at_any_size():
    """Whole tiles beyond the lengths are left out, and the result is that of the whole formula."""
    layer = DotProductAttention()
    q, k, v = torch.randn(2, 70, 4), torch.randn(2, 900, 4), torch.randn(2, 900, 3)
    for lens in (torch.tensor([900, 300]), torch.randint(0, 901, (2, 70))):
        out = layer(q, k, v, lens)
        allowed = torch.arange(900) < lens.reshape(2, -1, 1)
        torch.testing.assert_close(out, softmax_of(q @ k.mT / 2, allowed.expand(2, 70, 900)) @ v)
        torch.testing.assert_close(layer.weights[1].sum(-1), (lens[1] > 0).float().expand(70))
        assert layer.weights.check() < 1e-5
    more_heads = layer(q.unsqueeze(1).expand(-1, 3, -1, -1), k.unsqueeze(1), v.unsqueeze(1), lens)
    torch.testing.assert_close(more_heads[:, 2], out)


def test_dropout_is_for_training():
    torch.manual_seed(0)
    layer = DotProductAttention(dropout=0.5)
    q, k = torch.randn(1, 50, 4), torch.randn(1, 60, 4)
    v = torch.ones(1, 60, 1)
    assert layer(q, k, v).std() > 0.05
    assert (layer(q, k, v).mean() - 1).abs() < 0.1
    torch.testing.assert_close(layer.eval()(q, k, v), torch.ones(1, 50, 1))
    assert repr(layer) == "DotProductAttention(\n  dropout=0.5\n  (score): ScaledDot()\n)"


def test_weights_keep_no_graph_alive():
    layer = AdditiveAttention(3, 3, 4)
    x = torch.randn(2, 5, 3)
    hidden = torch.nn.Linear(3, 3)(x)  # made by a graph
    node = weakref.ref(hidden.grad_fn) if _weak(hidden.grad_fn) else None
    out = layer(hidden, x, x)
    assert layer.weights[0, 0].shape == (5,)
    assert not layer.weights.problem.q.requires_grad
    del out, hidden
    gc.collect()
    assert node is None or node() is None
    layer.forget()
    with pytest.raises(attlas.RecordingError, match="no call that can be read"):
        _ = layer.weights


def _weak(node):
    try:
        weakref.ref(node)
    except TypeError:
        return False
    return True


def test_weights_belong_to_the_parameters_that_made_them():
    layer = AdditiveAttention(3, 3, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    x = torch.randn(2, 5, 3)
    layer(x, x, x).sum().backward()
    before = layer.weights[0].to_dense()
    optimizer.step()
    with pytest.raises(attlas.RecordingError, match="have changed since the call"):
        _ = layer.weights
    layer(x, x, x)
    assert not torch.equal(layer.weights[0].to_dense(), before)


@each_layer
def test_copies_are_the_parameters_alone(name):
    layer, dq, dk = layers()[name]
    q, k, v = torch.randn(2, 3, dq), torch.randn(2, 4, dk), torch.randn(2, 4, 2)
    layer(q, k, v)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(other(q, k, v), layer(q, k, v))
        assert {n: p.shape for n, p in other.state_dict().items()} == {
            n: p.shape for n, p in layer.state_dict().items()
        }
    with pytest.raises(attlas.RecordingError):
        _ = copy.deepcopy(layer).weights


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@each_layer
def test_half_precision(name, dtype):
    torch.manual_seed(0)
    layer, dq, dk = layers()[name]
    q, k, v = torch.randn(2, 3, dq), torch.randn(2, 4, dk), torch.randn(2, 4, 2)
    want = layer(q, k, v)
    found = layer.to(dtype)(q.to(dtype), k.to(dtype), v.to(dtype).requires_grad_())
    assert found.dtype is dtype
    assert (found - want).abs().max() < 0.03
    found.sum().backward()
    assert all(p.grad.isfinite().all() for p in layer.parameters())


def test_errors_say_what_to_type():
    layer = DotProductAttention()
    x = torch.ones(2, 3, 4)
    with pytest.raises(attlas.DtypeError, match="valid_lens must be whole numbers"):
        layer(x, x, x, torch.tensor([1.0, 2.0]))
    with pytest.raises(attlas.ShapeError, match=r"valid_lens must have the shape \(batch,\) or \(batch, m\)"):
        layer(x, x, x, torch.ones(2, 3, 4, dtype=torch.int64))
    found = refusal(attlas.ShapeError, lambda: layer(x, x, x, torch.tensor([1, 2, 3])))
    assert found == "DotProductAttention(): shape (3, 1), batch = 2, m = 3"
    with pytest.raises(attlas.ShapeError, match="dropout must be a probability"):
        DotProductAttention(dropout=1.5)
    with pytest.raises(attlas.DtypeError, match="kernel must be a class of score"):
        AttentionPooling(1.0, kernel=3)
