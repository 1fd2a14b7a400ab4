"""Tiny models, and the oracle: attention with dense weights that a test edits by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers", reason="interventions on models of transformers need it")

Edit = Callable[[str, Tensor, int, int], Tensor]
_edits: list[dict[str, Any]] = []


def _dense(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    position_bias: Tensor | None = None,
    **_: object,
) -> tuple[Tensor, Tensor]:
    """Attend as a textbook does, with the edits that are in force."""
    key, value = (t.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for t in (key, value))
    logits = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if position_bias is not None:
        logits = logits + position_bias[..., : key.shape[2]]
    seen = torch.zeros_like(logits) if attention_mask is None else attention_mask[..., : key.shape[2]].to(logits)
    logits = logits.masked_fill(seen < -1e30, -math.inf)
    edits = _edits[-1]
    path = edits["paths"][id(module)]
    first = 0 if edits["cross"](path) else key.shape[2] - query.shape[2]
    logits = edits["logits"](path, logits, first)
    top = logits.amax(-1, keepdim=True)
    powers = torch.exp(logits - torch.where(top == -math.inf, 0.0, top))
    total = powers.sum(-1, keepdim=True)
    weights = edits["weights"](path, powers / torch.where(total == 0, 1.0, total), first)
    out = edits["output"](path, weights @ value, first)
    return out.transpose(1, 2).contiguous(), weights


def _same(path: str, t: Tensor, first: int) -> Tensor:
    return t


@contextmanager
def _edited(model: nn.Module, **edits: Any) -> Iterator[None]:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import eager_mask

    AttentionInterface.register("dense_by_hand", _dense)
    AttentionMaskInterface.register("dense_by_hand", eager_mask)
    before = model.config._attn_implementation
    paths = {id(module): path for path, module in model.named_modules()}
    plain = {"logits": _same, "weights": _same, "output": _same, "cross": lambda path: "EncDec" in path}
    _edits.append(plain | {"paths": paths} | edits)
    model.set_attn_implementation("dense_by_hand")
    try:
        yield
    finally:
        model.set_attn_implementation(before)
        _edits.pop()


@pytest.fixture
def edited() -> Callable[..., AbstractContextManager[None]]:
    """Return what lets a model attend with dense weights, edited by functions of (path, tensor, first query)."""
    return _edited


def _llama(**more: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=50, pad_token_id=0, bos_token_id=1, eos_token_id=None, **more,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def _gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_embd=32, n_layer=3, n_head=4, vocab_size=50, n_positions=64, bos_token_id=1, eos_token_id=None,
        embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


def _t5() -> nn.Module:
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=50, pad_token_id=0, eos_token_id=1,
        decoder_start_token_id=0, dropout_rate=0.0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


@pytest.fixture
def tiny() -> Callable[[str], nn.Module]:
    """Return what makes a tiny model of random weights in float64."""
    makers = {"llama": _llama, "gpt2": _gpt2, "t5": _t5}

    def make(name: str) -> nn.Module:
        torch.manual_seed(0)
        model = makers[name]().double().eval()
        with torch.no_grad():  # random weights of the usual size attend to everything alike
            for name, p in model.named_parameters():
                if p.ndim == 2 and any(part in name for part in ("q_proj", "k_proj", "c_attn", ".q.", ".k.", "bias")):
                    p.mul_(8.0)
        return model

    return make
