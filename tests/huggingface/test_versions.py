"""What holds with every version of transformers from 4.48 on; `make test-transformers` runs it with several of them.

Each model is compared with its own eager attention: outputs and all weights, with padding on either side, with a cache,
and recorded from the state that the model was in.
"""

import copy
from typing import Any

import pytest
import torch
import transformers

import attlas
import attlas.huggingface
from attlas.foundation import compat
from attlas.huggingface import LazyMask, attention_mask
from attlas.huggingface.masks import MASKING
from attlas.matrix import AttentionMatrix

# transformers 4.53 to 4.57 warn of every attention but its own, and return the weights.
pytestmark = pytest.mark.filterwarnings("ignore:`output_attentions=True` is not supported:UserWarning")

SIZES = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
         "pad_token_id": 0}  # fmt: skip
GPT2 = {"vocab_size": 40, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2", GPT2),
    "gpt2 with factors of layers": ("GPT2", GPT2 | {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2 without a factor": ("GPT2", GPT2 | {"scale_attn_weights": False}),
    "llama": ("Llama", SIZES),
    "mistral": ("Mistral", SIZES | {"sliding_window": 6}),
    "gemma2": ("Gemma2", SIZES | {"head_dim": 8, "sliding_window": 6, "query_pre_attn_scalar": 8}),
    "qwen2": ("Qwen2", SIZES | {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1}),
    "phi": ("Phi", SIZES),
    "cohere2": ("Cohere2", SIZES | {"sliding_window": 6}),
    "mixtral": ("Mixtral", SIZES | {"sliding_window": 6, "num_local_experts": 2}),
    "granite": ("Granite", SIZES),
    "olmo2": ("Olmo2", SIZES),
}
TOKENS = torch.randint(1, 40, (2, 14), generator=torch.Generator().manual_seed(1))
PADDING = {"none": None, "left": torch.ones(2, 14).long(), "right": torch.ones(2, 14).long()}
PADDING["left"][0, :4] = 0
PADDING["right"][0, -4:] = 0


def model_of(name: str, implementation: str) -> Any:
    family, settings = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**settings)
    config._attn_implementation = implementation
    kind = getattr(transformers, f"{family}LMHeadModel", None) or getattr(transformers, f"{family}ForCausalLM")
    return kind(config).eval()


def run(model: Any, padding: torch.Tensor | None, **asked: Any) -> Any:
    with torch.no_grad():
        return model(TOKENS, attention_mask=padding, use_cache=False, **asked)


@pytest.mark.parametrize("side", PADDING)
@pytest.mark.parametrize("name", MODELS)
def test_outputs_and_weights_are_those_of_eager(name: str, side: str) -> None:
    padding = PADDING[side]
    real = torch.ones(2, 14).bool() if padding is None else padding.bool()
    wanted = run(model_of(name, "eager"), padding, output_attentions=True)
    found = run(model_of(name, "attlas"), padding, output_attentions=True)
    torch.testing.assert_close(found.logits[real], wanted.logits[real], rtol=1e-5, atol=1e-5)
    assert len(found.attentions) == 2
    for ours, theirs in zip(found.attentions, wanted.attentions, strict=True):
        assert isinstance(ours, AttentionMatrix)
        rows = real[:, None, :, None]
        torch.testing.assert_close(ours.to_dense() * rows, theirs * rows, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("before", ["eager", "sdpa"])
@pytest.mark.parametrize("name", MODELS)
def test_recordings_switch_the_model_and_switch_it_back(name: str, before: str) -> None:
    if (name, before) == ("gemma2", "sdpa"):
        pytest.skip("some versions refuse this model on sdpa")
    padding = PADDING["left"]
    real = padding.bool()
    wanted = run(model_of(name, "eager"), padding, output_attentions=True)
    model = model_of(name, before)
    config = model.config
    for given in (padding, None):
        with attlas.record(model) as atlas:
            found = run(model, given)
        assert config._attn_implementation == before
        if given is None:
            wanted = run(model_of(name, "eager"), None, output_attentions=True)
            real = torch.ones(2, 14).bool()
        torch.testing.assert_close(found.logits[real], wanted.logits[real], rtol=1e-5, atol=1e-5)
        for layer, theirs in enumerate(wanted.attentions):
            rows = real[:, None, :, None]
            torch.testing.assert_close(atlas[layer].to_dense() * rows, theirs * rows, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral"])
def test_steps_with_a_cache_are_those_of_eager(name: str) -> None:
    texts = [
        model_of(name, implementation).generate(
            TOKENS, attention_mask=PADDING["left"], max_new_tokens=8, do_sample=False, pad_token_id=0
        )
        for implementation in ("eager", "attlas")
    ]
    assert torch.equal(*texts)


def test_weights_are_tensors_by_their_class_where_that_is_asked() -> None:
    model = model_of("llama", "attlas")
    wanted = run(model, None, output_attentions=True).attentions[1]
    with attlas.huggingface.weights_as_tensors():
        found = run(model, None, output_attentions=True).attentions[1]
    assert isinstance(found, torch.Tensor)
    assert not isinstance(wanted, torch.Tensor)
    assert torch.equal(found.matrix.to_dense(), wanted.to_dense())


def test_configurations_may_ask_for_attentions() -> None:
    model = model_of("llama", "attlas")
    model.config.output_attentions = True
    assert isinstance(run(model, None).attentions[0], AttentionMatrix)


def test_gradients_are_those_of_eager() -> None:
    grads = []
    for implementation in ("eager", "attlas"):
        model = model_of("gemma2", implementation)
        model(TOKENS, attention_mask=PADDING["right"], use_cache=False).logits[
            PADDING["right"].bool()
        ].square().sum().backward()
        grads.append([p.grad for p in model.parameters()])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_positions_of_queries_say_what_lengths_say() -> None:
    padding = PADDING["left"]
    by_length = attention_mask(batch_size=2, q_length=4, kv_length=14, q_offset=10, attention_mask=padding)
    by_position = attention_mask(
        batch_size=2, cache_position=torch.arange(10, 14), kv_length=14, attention_mask=padding
    )
    assert torch.equal(LazyMask.allowed(by_position), LazyMask.allowed(by_length))
    assert (by_position.first_query, by_position.mask.name()) == (10, by_length.mask.name())


@pytest.mark.skipif(
    MASKING is not None and hasattr(MASKING, "create_bidirectional_mask"), reason="made by this version"
)
def test_programs_of_models_are_refused_where_masks_are_made_otherwise() -> None:
    if MASKING is None:
        pytest.skip("models of this version make their masks themselves")
    model = model_of("llama", "attlas")
    with pytest.raises(Exception, match=r"transformers 5\.20 or newer"):
        torch.compile(model, backend="eager", fullgraph=True)(TOKENS)


def test_names_that_a_version_lacks_stand_for_themselves() -> None:
    nothing = copy
    assert compat.mask_function(nothing, "causal_mask_function")(0, 0, 3, 2)
    assert not compat.mask_function(nothing, "causal_mask_function")(0, 0, 2, 3)
    with pytest.raises(NotImplementedError, match="and_masks"):
        compat.mask_function(nothing, "and_masks")()
