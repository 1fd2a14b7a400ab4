"""Layers of linear attention: equal to the recurrence of their state, and to the functions of transformers."""

from __future__ import annotations

import copy

import pytest
import torch
from tests.messages import refusal
from torch import Tensor
from torch.nn import functional

import attlas
from attlas.errors import DtypeError, RecordingError, ShapeError
from attlas.nn import GatedDelta, LinearAttention


def tokens(*shape: int, count: int = 3) -> tuple[Tensor, ...]:
    return tuple(torch.randn(*shape, dtype=torch.float64) for _ in range(count))


def positive(x: Tensor) -> Tensor:
    return functional.elu(x) + 1


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("feature_map", [None, positive])
def test_linear_attention_equals_the_formula(normalize, feature_map):
    q, k, v = tokens(2, 4, 70, 6)
    decay, write = -torch.rand(2, 4, 70, dtype=torch.float64), torch.rand(2, 4, 70, dtype=torch.float64)
    layer = LinearAttention(feature_map, normalize)
    for given in ((), (decay,), (decay, write)):
        out = layer(q, k, v, *given)
        f = feature_map or (lambda x: x)
        expected = (f(q) @ f(k).mT / 6**0.5).tril()
        if given:
            total = decay.cumsum(-1)
            expected = expected * (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().exp()
        expected = expected * write.unsqueeze(-2) if len(given) > 1 else expected
        expected = expected / expected.sum(-1, keepdim=True) if normalize else expected
        torch.testing.assert_close(out, expected @ v)
        torch.testing.assert_close(layer.weights.to_dense(), expected)


def test_linear_attention_has_gradients():
    leaves = [t.requires_grad_() for t in tokens(1, 2, 9, 3)]
    layer = LinearAttention(positive, normalize=True)
    assert torch.autograd.gradcheck(layer, leaves, fast_mode=True)
    assert not layer.weights.requires_grad


def delta(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> Tensor:
    """Return the outputs of the delta rule, token by token, as the paper writes it."""
    state = q.new_zeros(*q.shape[:2], k.shape[-1], v.shape[-1])
    out = []
    for t in range(q.shape[2]):
        state = state * decay[:, :, t].exp()[..., None, None]
        held = (state * k[:, :, t, :, None]).sum(-2)
        state = state + k[:, :, t, :, None] * (beta[:, :, t, None] * (v[:, :, t] - held)).unsqueeze(-2)
        out.append((state * q[:, :, t, :, None]).sum(-2))
    return torch.stack(out, 2)


def test_gated_delta_equals_the_paper():
    q, k, v = tokens(2, 3, 75, 6)
    beta, decay = torch.rand(2, 3, 75, dtype=torch.float64), -torch.rand(2, 3, 75, dtype=torch.float64)
    k = functional.normalize(k, dim=-1)
    layer = GatedDelta(normalize=False, scale=0.3)
    torch.testing.assert_close(layer(q, k, v, beta, decay), delta(0.3 * q, k, v, beta, decay))
    torch.testing.assert_close(layer(q, k, v), delta(0.3 * q, k, v, torch.ones_like(beta), torch.zeros_like(beta)))


@pytest.mark.parametrize("heads", [4, 2])
def test_gated_delta_equals_transformers(heads):
    """The function of Qwen3-Next, in the sizes of a step of training and with grouped heads."""
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    q, k = (t.float() for t in tokens(2, heads, 150, 16, count=2))
    v = torch.randn(2, 4, 150, 8)
    beta, decay = torch.rand(2, 4, 150), -torch.rand(2, 4, 150)
    given = [t.transpose(1, 2) for t in (q, k, v, decay, beta)]
    expected, _ = modeling.torch_chunk_gated_delta_rule(*given, use_qk_l2norm_in_kernel=True)
    layer = GatedDelta()
    out = layer(q, k, v, beta, decay)
    exact = GatedDelta()(*(t.double() for t in (q, k, v, beta, decay)))
    assert float((out - expected.transpose(1, 2)).abs().max()) < 1e-5
    assert float((out - exact).abs().max()) < 2e-6
    torch.testing.assert_close(layer.weights.to_dense() @ v, out)
    rounded = GatedDelta()(*(t.bfloat16() for t in (q, k, v)), beta, decay)
    assert rounded.dtype is torch.bfloat16
    expected, _ = modeling.torch_chunk_gated_delta_rule(
        *(t.transpose(1, 2) for t in (q.bfloat16(), k.bfloat16(), v.bfloat16(), decay, beta)),
        use_qk_l2norm_in_kernel=True,
    )
    torch.testing.assert_close(rounded, expected.transpose(1, 2), atol=2e-3, rtol=1e-2)


@pytest.mark.parametrize("make", [LinearAttention, GatedDelta])
def test_what_a_layer_keeps(make):
    layer = make()
    with pytest.raises(RecordingError, match="must have been called"):
        layer.weights  # noqa: B018
    q, k, v = (t.requires_grad_() for t in tokens(1, 2, 9, 3))
    out = layer(q, k, v)
    assert out.requires_grad
    assert isinstance(layer.weights, attlas.AttentionMatrix)
    assert not layer.weights.requires_grad
    assert copy.deepcopy(layer)._last_matrix is None
    assert not layer.state_dict()
    layer.forget()
    with pytest.raises(RecordingError, match="must have been called"):
        layer.weights  # noqa: B018
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), out)


def test_settings_are_checked():
    assert refusal(DtypeError, lambda: LinearAttention(3)) == "LinearAttention(): an int"
    assert refusal(DtypeError, lambda: LinearAttention(torch.nn.ReLU)) == "LinearAttention(): the class ReLU"
    assert refusal(DtypeError, lambda: LinearAttention(normalize=1)) == "LinearAttention(): an int"
    assert refusal(DtypeError, lambda: GatedDelta("l2")) == "GatedDelta(): a str"
    assert refusal(ShapeError, lambda: GatedDelta(scale="1")) == "GatedDelta(): scale = '1'"
    positive_decay = refusal(ShapeError, lambda: GatedDelta()(*tokens(1, 2, 9, 3), decay=0.9))
    assert positive_decay == "transport(): a largest decay of 0.9"
