"""The gradient of a model's weights in training, as transformers' own tests ask for it: with dropout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tests.tiny_models import BART, SIZES, lively
from torch import nn

import attlas
import attlas.huggingface

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

SMALL = {name: size for name, size in SIZES.items() if name not in ("num_key_value_heads", "head_dim")}
MODELS: dict[str, Any] = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SMALL, attention_probs_dropout_prob=0.4)),
    "llama": lambda: transformers.LlamaModel(transformers.LlamaConfig(**SIZES, attention_dropout=0.4)),
    "bart": lambda: transformers.BartModel(transformers.BartConfig(**BART, attention_dropout=0.4)),
}


def train(kind: str, implementation: str) -> tuple[nn.Module, Any]:
    model = lively(MODELS[kind]()).train()
    model.set_attn_implementation(implementation)
    return model, model(torch.arange(3, 14)[None], output_attentions=True)


@pytest.mark.parametrize("kind", MODELS)
def test_weights_keep_their_gradient_in_training(kind: str) -> None:
    names = ("encoder_attentions", "decoder_attentions", "cross_attentions") if kind == "bart" else ("attentions",)
    _, outputs = train(kind, "attlas")
    retained = [A for name in names for A in outputs[name]]
    for A in retained:
        assert isinstance(A, attlas.AttentionMatrix)
        A.retain_grad()
    outputs[0].square().sum().backward(retain_graph=True)
    for A in retained:
        assert A.grad is not None
        assert A.grad.shape == A.shape
        assert bool(A.grad.isfinite().all())
    dropped = torch.stack([(A.grad[:, :, -1] == 0).double().mean() for A in retained]).mean()
    assert 0.2 < float(dropped) < 0.9


def test_without_dropout_it_is_the_gradient_of_eager() -> None:
    found = []
    for implementation in ("attlas", "eager"):
        model = lively(MODELS["llama"]()).eval()
        model.set_attn_implementation(implementation)
        outputs = model(torch.arange(3, 14)[None], output_attentions=True)
        for A in outputs.attentions:
            A.retain_grad()
        outputs[0].square().sum().backward()
        found.append([A.grad for A in outputs.attentions])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)
