"""Models of transformers that write their attention out by hand: outputs and weights are those of eager."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from tests.tiny_models import FALCON, SIZES, SPECIAL, VOCABULARY, lively
from torch import nn

import attlas
from attlas.recording import record

GPT = {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4, **SPECIAL}
BERT = {name: value for name, value in SIZES.items() if name not in ("num_key_value_heads", "head_dim")}
MODELS: dict[str, tuple[type[nn.Module], Any]] = {
    "bloom": (
        transformers.BloomForCausalLM,
        transformers.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4, **SPECIAL),
    ),
    "gptj": (transformers.GPTJForCausalLM, transformers.GPTJConfig(rotary_dim=4, **GPT)),
    "gpt_neo": (
        transformers.GPTNeoForCausalLM,
        transformers.GPTNeoConfig(
            vocab_size=VOCABULARY, hidden_size=32, num_layers=2, num_heads=4, max_position_embeddings=64, window_size=5,
            attention_types=[[["global", "local"], 1]], **SPECIAL,
        ),
    ),
    "deberta": (
        transformers.DebertaV2ForMaskedLM,
        transformers.DebertaV2Config(
            relative_attention=True, pos_att_type=["c2p", "p2c"], max_relative_positions=16, position_buckets=8, **BERT
        ),
    ),
    "mpnet": (transformers.MPNetForMaskedLM, transformers.MPNetConfig(**BERT)),
    "falcon": (transformers.FalconForCausalLM, transformers.FalconConfig(alibi=True, **FALCON)),
}  # fmt: skip


def make(name: str) -> nn.Module:
    torch.manual_seed(4)
    kind, config = MODELS[name]
    model = lively(kind(config)).eval()
    if name not in ("falcon", "deberta"):
        model.config._attn_implementation = "eager"
    return model


def inputs(side: str | None) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(ids)
    if side is not None:
        mask[1, slice(0, 4) if side == "left" else slice(8, 12)] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


# Of DeBERTa the products with the table of distances, whose numbers are then a bias.
DENSE = {"deberta": {"gather of logits"}}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("side", [None, "left"])
def test_outputs_and_weights_are_those_of_eager(name: str, side: str | None) -> None:
    model, given = make(name), inputs(side)
    text = given["attention_mask"].bool()
    before = model.config._attn_implementation
    with torch.no_grad():
        wanted = model(**given, output_attentions=True)
        with attlas.lazily(model) as block:
            found = model(**given, output_attentions=True)
    assert model.config._attn_implementation == before
    torch.testing.assert_close(found.logits[text], wanted.logits[text], rtol=1e-4, atol=2e-5)
    assert {use.operation for use in block.dense_uses} == DENSE.get(name, set())
    for a, b in zip(found.attentions, wanted.attentions, strict=True):
        assert isinstance(a, attlas.AttentionMatrix)
        a, b = (t.masked_fill(~text[:, None, :, None], 0.0) for t in (a.to_dense(), b))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["bloom", "deberta"])
def test_gradients_are_those_of_eager(name: str) -> None:
    model, given = make(name), inputs(None)
    found = []
    for lazily in (False, True):
        model.zero_grad()
        if lazily:
            with attlas.lazily(model):
                model(**given).logits.square().mean().backward()
        else:
            model(**given).logits.square().mean().backward()
        found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
    for a, b in zip(*found, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


def test_generation_is_recorded() -> None:
    model, given = make("gptj"), inputs("left")
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = model.generate(**given, **options)
    with record(model, handwritten=True) as atlas:
        found = model.generate(**given, **options)
    assert torch.equal(found, wanted)
    assert len(atlas.entries) == 2
    assert not atlas.dense_uses
    mask = torch.cat([given["attention_mask"], torch.ones(2, 4, dtype=torch.int64)], 1)
    with torch.no_grad():
        dense = model(found[:, :-1], attention_mask=mask, output_attentions=True).attentions
    rows = mask.bool()[:, None, :, None]
    for entry, weights in zip(atlas.entries, dense, strict=True):
        difference = (entry.matrix.to_dense() - weights).masked_fill(~rows, 0.0)
        assert difference.abs().max() < 1e-5


def test_no_mask_stays_no_mask() -> None:
    # The convolution of Autoformer has no place for a mask; on eager there is none where nothing is hidden.
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "prediction_length": 4, "context_length": 16}
    torch.manual_seed(0)
    model = transformers.AutoformerModel(transformers.AutoformerConfig(num_time_features=1, **sizes)).eval()
    given = {
        "past_values": torch.randn(2, 23),
        "past_time_features": torch.randn(2, 23, 1),
        "past_observed_mask": torch.ones(2, 23),
        "future_values": torch.randn(2, 4),
        "future_time_features": torch.randn(2, 4, 1),
    }
    with torch.no_grad():
        wanted = model(**given)
        with attlas.lazily(model):
            found = model(**given)
    torch.testing.assert_close(found.last_hidden_state, wanted.last_hidden_state)


@pytest.mark.filterwarnings(
    "ignore::attlas.errors.RecordingWarning"
)  # without `handwritten`, some layers are not heard
@pytest.mark.parametrize("handwritten", [False, True])
def test_layers_of_informer_have_sizes_of_their_own(handwritten: bool) -> None:
    sizes: Any = {
        "d_model": 16, "encoder_layers": 3, "decoder_layers": 2, "prediction_length": 8, "context_length": 40,
        "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_time_features": 1, "dropout": 0.0,
    }  # fmt: skip
    torch.manual_seed(0)
    model = transformers.InformerModel(transformers.InformerConfig(**sizes)).eval()
    times = {"past_time_features": torch.randn(2, 47, 1), "future_time_features": torch.randn(2, 8, 1)}
    given = times | {"past_values": torch.randn(2, 47), "future_values": torch.randn(2, 8)}
    found = []
    with torch.no_grad():
        for recorded in (False, True):
            torch.manual_seed(1)  # its layers draw keys to choose queries by
            with record(model, handwritten=handwritten) if recorded else nullcontext() as atlas:
                found.append(model(**given, past_observed_mask=torch.ones(2, 47)).last_hidden_state)
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-5)
    # The encoder halves the text after each of its layers but the last.
    encoder = [entry.shape[3] for entry in atlas.entries if entry.kind == "encoder"]
    assert encoder == ([40, 20, 10] if handwritten else [])


@pytest.mark.parametrize("places", [4, 8])
def test_convolutional_attention_is_lazy_or_counted(places: int) -> None:
    # Chameleon's and Janus's encoders of pictures make their keys as columns: as many rows as there are channels.
    models: Any = transformers.models
    torch.manual_seed(0)
    for block in (
        models.chameleon.modeling_chameleon.ChameleonVQVAEEncoderAttnBlock(32),
        models.janus.modeling_janus.JanusVQVAEAttnBlock(32),
    ):
        x = torch.randn(2, 32, places, places)
        with torch.no_grad():
            wanted = block(x)
            with attlas.lazily(block) as lazy:
                found = block(x)
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
        is_lazy = places**2 > 32
        assert ("softmax of numbers" in {use.operation for use in lazy.dense_uses}) is not is_lazy
        assert is_lazy is not bool(lazy.dense_uses)
        assert ("nothing was" in repr(attlas.explain(lazy))) is is_lazy
