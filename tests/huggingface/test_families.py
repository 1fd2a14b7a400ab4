"""Families of models, tiny and random: logits and every weight equal those of ``eager``.

One test a family: texts padded on the left and on the right; where the family has a cache, a prompt in two pieces and
two steps of decoding. Rows that see no key are left out: ``eager`` gives them uniform weights, attlas none.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tests.huggingface.conftest import both
from tests.tiny_models import BART, SPECIAL, T5, lively
from tests.tiny_models import SIZES as TINY
from torch import Tensor, nn

import attlas
import attlas.huggingface

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

HEADS = TINY
SIZES = {name: size for name, size in TINY.items() if name != "head_dim"}
EXPERTS = HEADS | {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = SIZES | {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,  # not the size of q and k
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
}
OLD = {"vocab_size": 61, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, **SPECIAL}
ENCODER = {name: size for name, size in SIZES.items() if name != "num_key_value_heads"}
WINDOW = {"sliding_window": 4}
BOTH = {"layer_types": ["sliding_attention", "full_attention"]}

DECODERS: dict[str, dict[str, Any]] = {
    "gpt2": OLD | {"scale_attn_by_inverse_layer_idx": True},
    "gpt_bigcode": OLD | {"multi_query": True},
    "opt": ENCODER | {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "biogpt": ENCODER,
    "gpt_neox": ENCODER,
    "llama": SIZES,
    "mistral": HEADS | WINDOW,
    "mixtral": EXPERTS | WINDOW,
    "qwen2": SIZES,
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3": HEADS,
    "qwen3_moe": EXPERTS,
    "gemma": HEADS,
    "gemma2": HEADS | WINDOW | BOTH | {"attn_logit_softcapping": 0.5, "query_pre_attn_scalar": 5},
    "gemma3_text": HEADS | WINDOW | BOTH,
    "vaultgemma": HEADS | WINDOW | BOTH | {"attn_logit_softcapping": 0.5},
    "gpt_oss": EXPERTS | WINDOW | BOTH | {"intermediate_size": 16},
    "phi": SIZES,
    "phi3": SIZES | WINDOW,
    "olmo": SIZES,
    "olmo2": SIZES,
    "olmo3": SIZES | WINDOW | BOTH,
    "olmoe": EXPERTS,
    "cohere": SIZES,
    "cohere2": SIZES | WINDOW | BOTH,
    "granite": SIZES | {"attention_multiplier": 0.3},
    "granitemoe": EXPERTS,
    "stablelm": SIZES,
    "starcoder2": SIZES | WINDOW,
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "llama4_text": EXPERTS
    | {"intermediate_size_mlp": 48, "attention_chunk_size": 5, "layer_types": ["chunked_attention", "full_attention"]},
    "smollm3": SIZES | {"no_rope_layers": [1, 0]},
    "exaone4": HEADS | WINDOW | BOTH,
    "glm": HEADS,
    "glm4": HEADS,
    "nemotron": HEADS,
    "persimmon": ENCODER,
    "helium": HEADS,
    "ernie4_5": HEADS,
    "arcee": HEADS,
    "seed_oss": HEADS,
    "apertus": SIZES,
    "modernbert-decoder": ENCODER | {"local_attention": 8, "cls_token_id": 1, "sep_token_id": 2},
    "inkling2_text": HEADS
    | WINDOW
    | {"layer_types": ["hybrid_sliding", "hybrid"], "sliding_window_size": 4, "swa_head_dim": 8}
    | {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "n_routed_experts": 4, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 16},
}
SEQ2SEQ: dict[str, dict[str, Any]] = {
    "bart": BART,
    "mbart": BART,
    "pegasus": BART,
    "marian": BART,
    "m2m_100": BART,
    "blenderbot": BART,
    "t5": T5 | SPECIAL,
    "mt5": T5 | SPECIAL,
    "umt5": T5 | SPECIAL,
}
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": ENCODER,
    "roberta": ENCODER,
    "xlm-roberta": ENCODER,
    "camembert": ENCODER,
    "electra": ENCODER | {"embedding_size": 16},
    "albert": ENCODER | {"embedding_size": 16},
    "distilbert": {"vocab_size": 61, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4} | SPECIAL,
    "modernbert": ENCODER | {"local_attention": 6, "cls_token_id": 1, "sep_token_id": 2},
    "ernie": ENCODER,
    "splinter": ENCODER,  # says nothing of causality, which transformers then takes for causal where the mask is None
}
IMAGES: dict[str, dict[str, Any]] = {
    "vit": ENCODER | {"image_size": 8, "patch_size": 2},
    "deit": ENCODER | {"image_size": 8, "patch_size": 2},
    "siglip_vision_model": ENCODER | {"image_size": 8, "patch_size": 2},
    "clip_vision_model": ENCODER | {"image_size": 8, "patch_size": 2},
    "dinov2": ENCODER | {"image_size": 8, "patch_size": 2},
}


def make(kind: str, sizes: dict[str, Any], owner: Any) -> nn.Module:
    """Return a random model whose outputs depend on attention by more than rounding."""
    return lively(
        owner.from_config(transformers.AutoConfig.for_model(kind, **sizes), attn_implementation="attlas"), 1.4
    )


def texts(side: str, tokens: int = 9, missing: int = 4) -> tuple[Tensor, Tensor]:
    """Return ids of two texts, the second one shorter, and which of them are text."""
    ids = torch.randint(3, 61, (2, tokens), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    mask[1, slice(None, missing) if side == "left" else slice(-missing, None)] = 0
    return ids * mask, mask


KINDS = ("attentions", "encoder_attentions", "decoder_attentions", "cross_attentions")


def compare(ours: Any, theirs: Any, text: Tensor | None) -> None:
    """Ask that outputs at places of text, and all weights of rows that see a key, are equal."""
    found, wanted = ours[0], theirs[0]
    if text is not None:
        found, wanted = found[text], wanted[text]
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    compared = 0
    for kind in KINDS:
        for A, weights in zip(ours.get(kind) or (), theirs.get(kind) or (), strict=True):
            assert isinstance(A, attlas.AttentionMatrix)
            assert A.shape == weights.shape
            seen = A.lse > -torch.inf
            if text is not None and A.shape[-2] == text.shape[1]:
                # A row of padding that saw no key in one layer carries it into the next, where it may see some.
                seen &= text[:, None]
            assert (A.to_dense() - weights)[seen].abs().max() < 1e-4
            assert torch.isfinite(A.to_dense()).all()
            compared += 1
    assert compared


def in_pieces(model: nn.Module, ids: Tensor, mask: Tensor, pieces: list[int]) -> list[Any]:
    """Feed a text piece by piece to one cache."""
    outputs, cache, start = [], None, 0
    for size in pieces:
        stop = start + size
        with torch.no_grad():
            output = model(
                input_ids=ids[:, start:stop],
                attention_mask=mask[:, :stop],
                past_key_values=cache,
                use_cache=True,
                output_attentions=True,
            )
        cache, start = output.past_key_values, stop
        outputs.append(output)
    return outputs


@pytest.mark.parametrize("kind", DECODERS)
def test_decoders(kind: str) -> None:
    if kind not in transformers.CONFIG_MAPPING:
        pytest.skip("this transformers does not have the model")
    model = make(kind, DECODERS[kind], transformers.AutoModelForCausalLM)
    for side in ("left", "right"):
        ids, mask = texts(side)
        compare(*both(model, input_ids=ids, attention_mask=mask), mask.bool())
    ids, mask = texts("left")
    pieces = [5, 2, 1, 1]
    found, wanted = [], []
    for implementation, into in (("attlas", found), ("eager", wanted)):
        model.set_attn_implementation(implementation)
        into += in_pieces(model, ids, mask, pieces)
    for start, size, ours, theirs in zip([0, 5, 7, 8], pieces, found, wanted, strict=True):
        compare(ours, theirs, mask[:, start : start + size].bool())


@pytest.mark.parametrize("kind", SEQ2SEQ)
def test_encoders_with_decoders(kind: str) -> None:
    model = make(kind, SEQ2SEQ[kind], transformers.AutoModelForSeq2SeqLM)
    for side in ("left", "right"):
        ids, mask = texts(side)
        words, _ = texts("right", tokens=6, missing=0)
        compare(*both(model, input_ids=ids, attention_mask=mask, decoder_input_ids=words), None)


@pytest.mark.parametrize("kind", ENCODERS)
def test_encoders(kind: str) -> None:
    model = make(kind, ENCODERS[kind], transformers.AutoModel)
    for side in ("left", "right"):
        ids, mask = texts(side)
        compare(*both(model, input_ids=ids, attention_mask=mask), mask.bool())


@pytest.mark.parametrize("kind", IMAGES)
def test_images(kind: str) -> None:
    model = make(kind, IMAGES[kind], transformers.AutoModel)
    compare(*both(model, pixel_values=torch.randn(2, 3, 8, 8)), None)
