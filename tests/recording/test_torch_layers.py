"""Layers of torch that are asked for their weights are recorded and changed, and return what they return without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import attlas
import attlas.huggingface
from attlas import heads
from attlas import interventions as iv
from attlas.recording import record

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def attention(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(3)
    layer = nn.MultiheadAttention(32, 4, batch_first=True, **options)
    nn.init.normal_(layer.in_proj_weight, std=0.4)
    return layer


def tokens(*lead: int) -> tuple[Tensor, Tensor, Tensor]:
    x, y = torch.randn(*lead, 5, 32), torch.randn(*lead, 7, 32)
    return x, y, y


ALLOWED = torch.ones(5, 7, dtype=torch.bool).tril(2)
GIVEN: dict[str, dict[str, Any]] = {
    "as they are": {},
    "a weight per head": {"average_attn_weights": False},
    "a mask": {"attn_mask": ~ALLOWED},
    "numbers": {"attn_mask": torch.randn(8, 5, 7), "average_attn_weights": False},
    "padding": {"key_padding_mask": torch.arange(7).expand(2, -1) >= torch.tensor([[7], [4]])},
}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
@pytest.mark.parametrize("patch_sdpa", [False, True])
def test_it_is_recorded_and_returns_the_same_bits(given: dict[str, Any], patch_sdpa: bool) -> None:
    layer, three = attention(), tokens(2)
    wanted = layer(*three, **given)
    with record(layer, patch_sdpa=patch_sdpa, values=True) as atlas:
        found = layer(*three, **given)
    assert all(map(torch.equal, found, wanted))
    (entry,) = atlas.entries
    weights = entry.matrix.to_dense()
    weights = weights if given.get("average_attn_weights") is False else weights.mean(1)
    torch.testing.assert_close(weights, wanted[1].detach())
    out = (entry.matrix @ entry.values).transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer.out_proj(out), wanted[0])
    assert layer(*three, need_weights=False)[1] is None
    assert "forward" not in vars(layer)


@pytest.mark.parametrize("average", [False, True])
def test_one_sequence_without_a_batch(average: bool) -> None:
    layer, three = attention(), tokens()
    wanted = layer(*three, average_attn_weights=average)
    with attlas.intervene(layer, [iv.Temperature(1.0)]), record(layer) as atlas:
        found = layer(*three, average_attn_weights=average)
    assert atlas[0].shape == (1, 4, 5, 7)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_training_draws_what_it_draws_without() -> None:
    layer, three = attention(dropout=0.5).train(), tokens(2)
    torch.manual_seed(7)
    wanted = layer(*three)
    after = torch.rand(1)
    torch.manual_seed(7)
    with record(layer) as atlas:
        found = layer(*three)
    assert all(map(torch.equal, found, wanted))
    assert torch.equal(torch.rand(1), after)
    torch.testing.assert_close(atlas[0].sum(-1), torch.ones(2, 4, 5))
    found[0].sum().backward()
    assert layer.in_proj_weight.grad is not None


@torch.no_grad()
def test_it_is_changed_with_the_weights_that_it_returns() -> None:
    layer, three = attention().eval(), tokens(2)
    with attlas.intervene(layer, [iv.Suppress(keys=[0, 3])]), record(layer) as atlas:
        out, weights = layer(*three)
    seen = torch.ones(1, 7, dtype=torch.bool)
    seen[:, [0, 3]] = False
    wanted = layer(*three, attn_mask=~seen.expand(5, 7))
    torch.testing.assert_close((out, weights), wanted)
    torch.testing.assert_close(atlas[0].to_dense().mean(1), wanted[1])


@torch.no_grad()
def test_two_recordings_hear_it_once_each() -> None:
    layer = attention().eval()
    model = nn.Sequential()
    model.add_module("inner", layer)
    with record(layer) as inner, record(model) as outer:
        layer(*tokens(2))
        with record(layer, patch_sdpa=True) as third:
            layer(*tokens(2))
    assert [len(atlas.entries) for atlas in (inner, outer, third)] == [2, 2, 1]
    assert "forward" not in vars(layer)


def test_a_forward_of_the_layers_own_is_put_back() -> None:
    """Libraries that move weights set one for each object."""
    layer, calls = attention(), []

    def forward(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return nn.MultiheadAttention.forward(layer, *args, **kwargs)

    layer.forward = forward  # type: ignore[method-assign]
    with record(layer) as atlas:
        layer(*tokens(2))
    assert len(atlas) == 1
    assert calls == [1, 1]
    assert layer.forward is forward


@torch.no_grad()
def test_a_compiled_layer() -> None:
    torch._dynamo.reset()
    layer, three = attention().eval(), tokens(2)
    wanted = layer(*three)
    run = torch.compile(layer, backend="eager")
    with record(layer) as atlas:
        found = run(*three)
    torch.testing.assert_close(found, wanted)
    assert len(atlas) == 1


@torch.no_grad()
def test_the_pooling_head_of_siglip() -> None:
    """It asks with a query of its own: the layers over the patches stay apart, and roll out as before."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.SiglipVisionConfig(**sizes, image_size=8, patch_size=2)
    model, pixels = transformers.SiglipVisionModel(config).eval(), torch.randn(2, 3, 8, 8)
    model.set_attn_implementation("attlas")
    wanted = model(pixels)
    with record(model) as atlas:
        found = model(pixels)
    assert torch.equal(found.pooler_output, wanted.pooler_output)
    assert [(entry.kind, entry.layer, entry.shape[2:]) for entry in atlas.entries] == [
        ("self", 0, (16, 16)),
        ("self", 1, (16, 16)),
        ("cross", 0, (1, 16)),
    ]
    probe, states = model.head.probe.repeat(2, 1, 1), wanted.last_hidden_state
    _, weights = model.head.attention(probe, states, states, average_attn_weights=False)
    torch.testing.assert_close(atlas["cross.0"].to_dense(), weights)
    torch.testing.assert_close(heads.rollout(atlas).sum(-1), torch.ones(2, 1))
    assert not atlas.unrecorded
