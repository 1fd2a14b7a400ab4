"""Where an attention function of transformers goes wrong in silence: each trap is a test."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tests.huggingface.conftest import both
from tests.tiny_models import BART, SIZES, SPECIAL, T5, lively
from torch import Tensor, nn
from transformers import masking_utils

import attlas
from attlas.engine.backends import reference
from attlas.huggingface import LazyMask, attention_forward, attention_mask

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

Seen = list[dict[str, Any]]


def causal(kind: str, **more: Any) -> nn.Module:
    config = transformers.AutoConfig.for_model(kind, **SIZES | more)
    return lively(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="attlas"), 1.4)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """What each call of the attention function was handed, in order."""
    calls: Seen = []

    def watched(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        output, A = attention_forward(module, query, key, value, mask, **kwargs)
        calls.append(kwargs | {"mask": mask, "q": query, "k": key, "v": value, "A": A, "output": output})
        return output, A

    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "attlas", watched)
    return calls


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(3, 61, (2, 11), generator=torch.Generator().manual_seed(5))


def left(ids: Tensor) -> Tensor:
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    return mask


# --------------------------------------------------------------------------------------------------------- registering


def test_a_mask_always_arrives(seen: Seen, ids: Tensor) -> None:
    """Without a mask function of the same name padding is dropped in silence."""
    model = causal("llama")
    with torch.no_grad():
        model(ids)
        model(ids, attention_mask=left(ids))
    assert all(isinstance(call["mask"], LazyMask) for call in seen)
    assert [call["mask"].mask.name() for call in seen[1:3]] == [
        "Causal(offset=0)",
        "Causal(offset=0) & Padding([11, 7], side='left')",
    ]


def test_the_name_takes_no_path_of_another_kernel() -> None:
    name = attlas.huggingface.NAME
    assert not any(word in name for word in ("flash", "sdpa", "flex_attention", "paged|", "/"))
    assert name not in causal("llama").config.to_json_string()


@pytest.mark.parametrize("given", [{}, {"scaling": None}], ids=["missing", "None"])
def test_without_scaling_it_is_the_usual_one(given: dict[str, Any]) -> None:
    q, k, v = (torch.randn(1, 2, 5, 16) for _ in range(3))
    found, _ = attention_forward(nn.Identity(), q, k, v, None, unknown=3, sliding_window=4, **given)
    wanted = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(found.transpose(1, 2), wanted)


def test_sub_models_are_reached() -> None:
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**SIZES),
        vision_config=transformers.CLIPVisionConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=8, patch_size=2
        ),
    )
    model = transformers.LlavaForConditionalGeneration(config)
    model.set_attn_implementation("attlas")
    assert model.model.language_model.config._attn_implementation == "attlas"
    assert model.model.vision_tower.config._attn_implementation == "attlas"


# --------------------------------------------------------------------------------------------------------------- masks


def test_a_mask_that_is_fed_back_is_the_same_mask(ids: Tensor) -> None:
    model = causal("llama")
    mask = attention_mask(batch_size=2, q_length=11, kv_length=11, attention_mask=left(ids).bool())
    with torch.no_grad():
        wanted = model(ids, attention_mask=left(ids)).logits
        assert torch.equal(model(ids, attention_mask=mask).logits, wanted)
        assert torch.equal(model(ids, attention_mask=mask.contiguous()).logits, wanted)


def test_copies_keep_the_place_in_the_text() -> None:
    mask = attention_mask(batch_size=1, q_length=3, kv_length=8, q_offset=torch.tensor(12), kv_offset=7)
    for same in (mask, mask.detach(), mask.clone(), mask.contiguous(), mask.to(torch.float16), mask[:, :, :2]):
        assert (same.first_query, same.first_key) == (12, 7)
        assert type(same.first_query) is type(same.first_key) is int
    assert LazyMask(None, (1, 1, 2, 2), torch.float32, "cpu").first_query == 0


def test_keys_of_a_sliding_cache_are_known_by_the_mask_alone(seen: Seen, ids: Tensor) -> None:
    model = causal("mistral", sliding_window=4)
    with torch.no_grad():
        cache = model(ids[:, :7], use_cache=True).past_key_values
        seen.clear()
        model(ids[:, 7:9], past_key_values=cache)
    call = seen[0]
    assert call["k"].shape[-2] == 5  # three of before, two new
    assert (call["mask"].first_query, call["mask"].first_key) == (7, 4)


def test_queries_without_keys_keep_later_layers_finite(ids: Tensor) -> None:
    model = causal("llama")
    nothing = torch.zeros(2, 11, dtype=torch.int64)
    nothing[0] = 1
    with torch.no_grad():
        output = model(ids, attention_mask=nothing, output_attentions=True)
    assert torch.isfinite(output.logits).all()
    assert (output.attentions[1].to_dense()[1] == 0).all()


@pytest.mark.parametrize("cut", [None, 2], ids=["one text", "two blocks of images"])
def test_image_tokens_see_each_other(cut: int | None, seen: Seen) -> None:
    """Gemma 3: the rule of image blocks cannot broadcast, and is asked through vmap by eager."""
    sizes = SIZES | {"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"]}
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**sizes),
        vision_config=transformers.SiglipVisionConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, image_size=8, patch_size=2
        ),
        mm_tokens_per_image=4,
        image_token_id=60,
    )
    model = lively(transformers.Gemma3ForConditionalGeneration._from_config(config, attn_implementation="attlas"), 1.4)
    text = [5, 6, 60, 60, 60, 60, 7, 8, 9, 10, 11]
    images = 1
    if cut is not None:
        text, images = [*text, 60, 60, 60, 60, 12], 2
    ids = torch.tensor([text])
    given = {"input_ids": ids, "pixel_values": torch.randn(images, 3, 8, 8), "token_type_ids": (ids == 60).long()}
    ours, theirs = both(model, **given)
    torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-4, rtol=1e-4)
    for A, weights in zip(ours.attentions, theirs.attentions, strict=True):
        torch.testing.assert_close(A.to_dense(), weights, atol=1e-5, rtol=1e-4)
        assert (A[0, :, 2, 3:6] > 0).all()
    names = [call["mask"].mask.name() for call in seen if isinstance(call["mask"], LazyMask)]
    assert any("Documents" in name for name in names)
    assert not any("from_function" in name for name in names)


# ----------------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize("kind", ["llama", "gpt_oss"])
def test_bfloat16_is_nearer_to_the_exact_weights_than_eager(kind: str, seen: Seen, ids: Tensor) -> None:
    """Eager rounds scores to bfloat16: the judge is float64 from the same queries and keys."""
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1} if kind == "gpt_oss" else {}
    model = causal(kind, **experts).to(torch.bfloat16)
    with torch.no_grad():
        model(ids, attention_mask=left(ids))
        calls, text = list(seen), left(ids).bool()
        model.set_attn_implementation("eager")
        theirs = model(ids, attention_mask=left(ids), output_attentions=True).attentions
    A = calls[0]["A"]  # the first layer: later ones do not have the same queries
    exact = reference.dense(reference.in_float64(A.problem), torch.arange(11)).weights
    ours, eager = ((weights.double() - exact).abs().amax((1, 3))[text].max() for weights in (A.to_dense(), theirs[0]))
    assert ours < 1e-5
    assert eager > 10 * ours


def test_the_sink_counts_in_the_weights(seen: Seen, ids: Tensor) -> None:
    """granite_swa: eager returns weights without the sink, though its output uses it."""
    model = causal("granite_swa", sliding_window=4, layer_types=["sliding_attention", "full_attention"])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "sink" in name:
                parameter.normal_()
        ours = model(ids)
        calls = list(seen)
        model.set_attn_implementation("eager")
        theirs = model(ids, output_attentions=True)
    torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-4, rtol=1e-4)
    sinks = 0
    for call, weights in zip(calls, theirs.attentions, strict=True):
        dense = call["A"].to_dense()
        v = call["v"].repeat_interleave(2, dim=1)
        torch.testing.assert_close((dense @ v).transpose(1, 2), call["output"], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(dense, weights * dense.sum(-1, keepdim=True), atol=1e-5, rtol=1e-4)
        sinks += call["A"].problem.sink is not None
    assert sinks


def test_a_sink_of_each_query() -> None:
    q, k, v = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 7, 8), torch.randn(2, 2, 7, 6)
    sinks, bias = torch.randn(2, 4, 5, 1), torch.randn(1, 4, 5, 7)
    output, A = attention_forward(nn.Identity(), q, k, v, None, scaling=0.5, sinks=sinks, position_bias=bias)
    scores = q @ k.repeat_interleave(2, 1).mT * 0.5 + bias
    wanted = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
    torch.testing.assert_close(A.to_dense(), wanted)
    torch.testing.assert_close(output.transpose(1, 2), wanted @ v.repeat_interleave(2, 1))


def test_whisper_scales_its_queries_itself(seen: Seen) -> None:
    places = {"max_source_positions": 16, "max_target_positions": 16, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(**BART | places, num_mel_bins=8)
    model = lively(transformers.WhisperForConditionalGeneration._from_config(config, attn_implementation="attlas"), 1.4)
    given = {"input_features": torch.randn(2, 8, 32), "decoder_input_ids": torch.randint(3, 61, (2, 5))}
    ours, theirs = both(model, **given)
    assert seen[0]["scaling"] == 1.0
    torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-4, rtol=1e-4)
    for kind in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        torch.testing.assert_close(ours[kind][0].to_dense(), theirs[kind][0], atol=1e-5, rtol=1e-4)


# ------------------------------------------------------------------------------------------------------------- training


def gradients(model: nn.Module, implementation: str, ids: Tensor) -> dict[str, Tensor]:
    model.set_attn_implementation(implementation)
    model.zero_grad()
    labels = ids.clone()
    labels[1, :5] = -100  # the first word of a text is predicted from padding, a row that sees no key
    model(ids, attention_mask=left(ids), labels=labels).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(ids: Tensor, reentrant: bool, seen: Seen) -> None:
    model = causal("llama").train()
    wanted = gradients(model, "eager", ids)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.enable_input_require_grads()
    found = gradients(model, "attlas", ids)
    assert len(seen) == 4  # each layer twice
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-3, msg=name)


def test_dropout_of_layers_that_name_it_outside_of_training() -> None:
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    module = nn.Identity().eval()
    found, _ = attention_forward(module, q, k, v, None, dropout=0.5)
    assert torch.equal(found, attention_forward(module, q, k, v, None)[0])
    assert not torch.equal(found, attention_forward(module.train(), q, k, v, None, dropout=0.5)[0])


def test_autocast_decides_as_for_the_function_of_torch(ids: Tensor, seen: Seen) -> None:
    model = causal("llama")
    outputs = []
    for implementation in ("attlas", "sdpa"):
        model.set_attn_implementation(implementation)
        with torch.autocast("cpu", torch.bfloat16):
            outputs.append(model(ids).logits)
    assert seen[0]["A"].problem.q.dtype is torch.bfloat16
    torch.testing.assert_close(outputs[0], outputs[1], atol=0.06, rtol=0.05)
    outputs[0].float().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


# ----------------------------------------------------------------------------------------------------------- generation

CACHES: dict[str, dict[str, Any]] = {
    "dynamic": {},
    "static": {"cache_implementation": "static", "disable_compile": True},
    "no cache": {"use_cache": False},
    "a prompt in pieces": {"prefill_chunk_size": 3},
    "beams": {"num_beams": 3},
    "beams, static": {"num_beams": 2, "cache_implementation": "static", "disable_compile": True},
}


@pytest.mark.parametrize("kind", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("name", CACHES)
def test_generation_with_each_cache(name: str, kind: str, ids: Tensor) -> None:
    layers = {"layer_types": ["sliding_attention", "full_attention"]} if kind == "gemma2" else {}
    window = {} if kind == "llama" else {"sliding_window": 5}
    model = causal(kind, **layers, **window)
    options = CACHES[name] | {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ours = model.generate(ids * left(ids), attention_mask=left(ids), **options)
    model.set_attn_implementation("eager")
    assert torch.equal(ours, model.generate(ids * left(ids), attention_mask=left(ids), **options))


STATIC = {"cache_implementation": "static", "disable_compile": True}


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("kind", ["llama", "mistral"])
@pytest.mark.parametrize(
    "options", [{}, {"num_beams": 2}, STATIC, {"num_beams": 2} | STATIC], ids=["greedy", "beams", "static", "both"]
)
def test_weights_of_each_step_equal_eager(ids: Tensor, options: dict[str, Any], kind: str, mode: Any) -> None:
    model = causal(kind, **({"sliding_window": 5} if kind == "mistral" else {}))
    more = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    steps = []
    for implementation in ("attlas", "eager"):
        model.set_attn_implementation(implementation)
        with mode():
            found = model.generate(ids, output_attentions=True, return_dict_in_generate=True, **options, **more)
        steps.append(found.attentions)
    assert len(steps[0]) == len(steps[1]) == 6
    for ours, theirs in zip(*steps, strict=True):
        for A, weights in zip(ours, theirs, strict=True):
            torch.testing.assert_close(A.to_dense(), weights, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["t5", "bart"])
def test_generation_with_an_encoder(kind: str, ids: Tensor) -> None:
    config = transformers.AutoConfig.for_model(kind, **(T5 | SPECIAL if kind == "t5" else BART))
    model = lively(transformers.AutoModelForSeq2SeqLM.from_config(config, attn_implementation="attlas"), 1.4)
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "num_beams": 2}
    ours = model.generate(ids, attention_mask=left(ids), **options)
    model.set_attn_implementation("eager")
    assert torch.equal(ours, model.generate(ids, attention_mask=left(ids), **options))


def test_it_can_be_compiled() -> None:
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))

    def pooled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention_forward(nn.Identity(), q, k, v, None, is_causal=True)[0] + 1

    with torch.no_grad():
        wanted = pooled(q, k, v)
        torch.testing.assert_close(torch.compile(pooled, backend="eager")(q, k, v), wanted)


# ------------------------------------------------------------------------------------------------- steps of one token


@pytest.mark.parametrize("heads", [4, 2, 1], ids=["MHA", "GQA", "MQA"])
@pytest.mark.parametrize("width", [8, 6], ids=["same size", "other size"])
def test_a_step_of_one_token_sees_what_its_row_says(heads: int, width: int) -> None:
    q, k, v = torch.randn(3, 4, 1, 8), torch.randn(3, heads, 9, 8), torch.randn(3, heads, 9, width)
    keep = torch.ones(3, 9, dtype=torch.bool)
    keep[1, :4] = False
    keep[2] = False  # a text of nothing but padding
    mask = attention_mask(batch_size=3, q_length=1, kv_length=9, q_offset=8, attention_mask=keep)
    output, A = attention_forward(nn.Identity(), q, k, v, mask)
    torch.testing.assert_close(output.transpose(1, 2), A @ v, atol=1e-6, rtol=1e-5)
    assert (output[2] == 0).all()
    assert (A[1, :, 0, :4] == 0).all()
    # The next layer finds the row written out already.
    assert mask.row(9) is not None
    assert torch.equal(attention_forward(nn.Identity(), q, k, v, mask)[0], output)


@pytest.mark.parametrize("window", [None, 3, 9, 20], ids=str)
@pytest.mark.parametrize("first_key", [0, 5])
def test_a_mask_that_hides_nothing_from_one_query_is_none(window: int | None, first_key: int) -> None:
    rule = masking_utils.causal_mask_function
    if window is not None:
        rule = masking_utils.sliding_window_causal_mask_function(window)
    for last in range(first_key + 6, first_key + 12):
        given = {"batch_size": 1, "q_length": 1, "kv_length": 9, "q_offset": last, "kv_offset": first_key}
        mask = attention_mask(**given, mask_function=rule)
        wanted = masking_utils.sdpa_mask(**given, mask_function=rule, allow_is_causal_skip=False)
        assert torch.equal(mask.allowed(), wanted)
        assert (mask.mask is None) == bool(wanted.all())


def test_keys_are_copied_only_where_a_cache_may_overwrite_them(seen: Seen, ids: Tensor) -> None:
    model = causal("llama")
    with torch.no_grad():
        model(ids)
        model(ids, past_key_values=transformers.StaticCache(config=model.config, max_cache_len=16))
    fresh, written = seen[0], seen[2]
    assert fresh["A"].problem.k.data_ptr() == fresh["k"].data_ptr()
    assert written["A"].problem.k.data_ptr() != written["k"].data_ptr()


@pytest.mark.parametrize("kind", ["swin", "beit"])
def test_a_learned_bias_of_zeros_has_a_gradient(kind: str) -> None:
    """A new model starts with zeros in its bias: without a gradient they stay zeros for ever."""
    torch.manual_seed(3)
    swin = {"embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 2}
    beit = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    beit |= {"use_relative_position_bias": True, "use_mask_token": False}
    config = transformers.AutoConfig.for_model(kind, image_size=8, patch_size=2, **(swin if kind == "swin" else beit))
    model = transformers.AutoModel.from_config(config, attn_implementation="eager").eval()
    images, found = torch.randn(2, 3, 8, 8), {}
    for implementation in ("eager", "attlas"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        model(images).last_hidden_state.square().sum().backward()
        biases = {name: p for name, p in model.named_parameters() if "relative_position_bias_table" in name}
        assert biases
        assert all(bool((p == 0).all()) for p in biases.values())
        found[implementation] = [p.grad for p in biases.values()]
    assert all(float(grad.abs().max()) > 0 for grad in found["eager"])
    torch.testing.assert_close(found["attlas"], found["eager"], atol=1e-4, rtol=1e-3)


def test_a_layer_that_calls_itself_causal_and_makes_no_mask_sees_everything(ids: Tensor) -> None:
    """BridgeTower's cross layers do; eager has no mask there."""

    class CallsItselfCausal(nn.Module):
        is_causal = True

    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    output, A = attention_forward(CallsItselfCausal(), q, k, v, None)
    weights = torch.softmax(q @ k.mT / 8**0.5, dim=-1)
    torch.testing.assert_close(A.to_dense(), weights)
    torch.testing.assert_close(output.transpose(1, 2), weights @ v)


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_head_is_zeroed_in_place_in_training(kind: str, ids: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interventions write into the output of the attention function, and forward hooks into that of the layer."""
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    model = causal(kind, **(sizes if kind == "gpt2" else {})).train()
    layer = model.transformer.h[0].attn if kind == "gpt2" else model.model.layers[0].self_attn
    layer.register_forward_hook(lambda module, args, output: (output[0].mul_(2.0), *output[1:]))
    functions = transformers.AttentionInterface._global_mapping
    from transformers.models.gpt2 import modeling_gpt2
    from transformers.models.llama import modeling_llama

    eager = (modeling_gpt2 if kind == "gpt2" else modeling_llama).eager_attention_forward
    for name, function in {"zeroed": attention_forward, "zeroed eager": eager}.items():

        def zeroing(*args: Any, function: Any = function, **kwargs: Any) -> Any:
            output, weights = function(*args, **kwargs)
            output[:, :, 1] = 0
            return output, weights

        monkeypatch.setitem(functions, name, zeroing)
    monkeypatch.setitem(masking_utils.AttentionMaskInterface._global_mapping, "zeroed", attention_mask)
    monkeypatch.setitem(masking_utils.AttentionMaskInterface._global_mapping, "zeroed eager", masking_utils.eager_mask)
    found = {}
    for name in ("zeroed", "zeroed eager"):
        model.set_attn_implementation(name)
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        found[name] = [loss.detach(), *(p.grad.clone() for p in model.parameters())]
    torch.testing.assert_close(found["zeroed"], found["zeroed eager"], atol=1e-4, rtol=1e-3)
