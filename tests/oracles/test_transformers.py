"""transformers' eager attention beside ours: plain, scaled, capped, with sinks, grouped and masked."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import attlas
from attlas import Plan


def eager(model: str, *, groups: int, **extra: Any) -> Any:
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    layer = torch.nn.Module()
    layer.num_key_value_groups = groups
    layer.training = False
    layer.config = SimpleNamespace(_attn_implementation="eager")
    for name, value in extra.items():
        setattr(layer, name, value)

    def run(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> tuple[Tensor, Tensor]:
        out, weights = module.eager_attention_forward(layer, q, k, v, mask, **options)
        return out.transpose(1, 2), weights

    return run


def additive(allowed: Tensor) -> Tensor:
    lowest = torch.finfo(torch.float32).min
    return torch.zeros(allowed.shape).masked_fill(~allowed, lowest)[None, None]


@pytest.fixture(params=["auto", "tiled"])
def plan(request: pytest.FixtureRequest) -> Plan:
    return Plan() if request.param == "auto" else Plan("tiled", rows=5, columns=9)


@pytest.fixture
def tensors() -> list[Tensor]:
    return [torch.randn(2, 4, 12, 16), torch.randn(2, 2, 20, 16), torch.randn(2, 2, 20, 16)]


def agree(A: attlas.AttentionMatrix, v: Tensor, wanted: tuple[Tensor, Tensor]) -> None:
    torch.testing.assert_close(A @ v, wanted[0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(A.to_dense(), wanted[1], rtol=1e-4, atol=1e-5)


def test_llama(plan: Plan, tensors: list[Tensor]) -> None:
    q, k, v = tensors
    allowed = torch.ones(12, 20, dtype=torch.bool).tril(8)
    wanted = eager("llama", groups=2)(q, k, v, additive(allowed), scaling=16**-0.5)
    agree(attlas.attend(q, k, mask=attlas.Causal(), plan=plan), v, wanted)
    agree(attlas.attend(q, k, mask=additive(allowed), plan=plan), v, wanted)


def test_gemma2_caps_its_logits_and_slides_a_window(plan: Plan, tensors: list[Tensor]) -> None:
    q, k, v = tensors
    allowed = torch.ones(12, 20, dtype=torch.bool).tril(8).triu(8 - 4)
    wanted = eager("gemma2", groups=2)(q, k, v, additive(allowed), scaling=0.2, softcap=5.0)
    score = attlas.SoftCap(attlas.ScaledDot(0.2), 5.0)
    agree(attlas.attend(q, k, score=score, mask=attlas.Window(4, 0), plan=plan), v, wanted)


def test_gpt_oss_has_sinks(plan: Plan, tensors: list[Tensor]) -> None:
    q, k, v = tensors
    sinks = torch.randn(4)
    allowed = torch.ones(12, 20, dtype=torch.bool).tril(8)
    run = eager("gpt_oss", groups=2, sinks=sinks)
    wanted = run(q, k, v, additive(allowed), scaling=0.25, s_aux=sinks)
    agree(attlas.attend(q, k, scale=0.25, mask=attlas.Causal(), sink=sinks, plan=plan), v, wanted)


def test_t5_has_a_bias_of_distance(plan: Plan, tensors: list[Tensor]) -> None:
    module = pytest.importorskip("transformers.models.t5.modeling_t5")
    config = pytest.importorskip("transformers").T5Config(num_heads=4, d_model=64, d_kv=16, is_decoder=False)
    layer = module.T5Attention(config, has_relative_attention_bias=True)
    bias = layer.compute_bias(20, 20).detach()
    score = attlas.RelativeBias(
        4, config.relative_attention_max_distance, buckets=config.relative_attention_num_buckets
    )
    score.weight.data.copy_(layer.relative_attention_bias.weight)
    k, v = tensors[1:]
    A = attlas.attend(k.repeat_interleave(2, 1), k, score=attlas.ScaledDot(1.0) + score, plan=plan)
    wanted = torch.softmax(k.repeat_interleave(2, 1) @ k.repeat_interleave(2, 1).mT + bias, -1)
    agree(A, v, (wanted @ v.repeat_interleave(2, 1), wanted))
