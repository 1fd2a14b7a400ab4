"""Models on attlas equal the same models on ``eager``: logits, weights, generated text, gradients."""

import importlib
import sys
from collections.abc import Callable

import pytest
import torch
import transformers
from tests.messages import said
from torch import Tensor, nn

import attlas
from attlas.errors import MissingExtraError

Padded = Callable[[str | None], tuple[Tensor, Tensor]]
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_logits_and_weights_equal_eager(model: nn.Module, side: str | None, padded: Padded) -> None:
    ids, mask = padded(side)
    with torch.no_grad():
        ours = model(ids, attention_mask=mask, output_attentions=True)
        model.set_attn_implementation("eager")
        theirs = model(ids, attention_mask=mask, output_attentions=True)
    text = mask.bool()
    torch.testing.assert_close(ours.logits[text], theirs.logits[text], atol=1e-4, rtol=1e-4)
    for A, weights in zip(ours.attentions, theirs.attentions, strict=True):
        assert isinstance(A, attlas.AttentionMatrix)
        difference = (A.to_dense() - weights).abs().amax((1, 3))
        assert difference[text].max() < 1e-4  # queries that are text; those of padding may see no key
        assert torch.isfinite(A.to_dense()).all()


SMALL = {"vocab_size": 61, "num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
OTHERS = {
    "bert": lambda: transformers.BertModel(transformers.BertConfig(**SMALL)),
    "t5": lambda: transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
    ),
    "bart": lambda: transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=61,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_position_embeddings=64,
            forced_eos_token_id=None,
        )
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_encoders_and_cross_attention_equal_eager(name: str, padded: Padded) -> None:
    model = OTHERS[name]().eval()
    ids, mask = padded("right")
    given = {"input_ids": ids, "attention_mask": mask, "output_attentions": True}
    if name != "bert":
        given["decoder_input_ids"] = ids[:, :5]
    outputs = []
    for implementation in ("attlas", "eager"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            outputs.append(model(**given))
    torch.testing.assert_close(outputs[0][0], outputs[1][0], atol=1e-4, rtol=1e-4)
    kinds = ["attentions"] if name == "bert" else ["encoder_attentions", "decoder_attentions", "cross_attentions"]
    for kind in kinds:
        assert len(outputs[0][kind]) == 2
        for A, weights in zip(outputs[0][kind], outputs[1][kind], strict=True):
            torch.testing.assert_close(A.to_dense(), weights, atol=1e-5, rtol=1e-4)


def test_queries_without_a_key_have_no_weight(llama: nn.Module, padded: Padded) -> None:
    ids, mask = padded("left")
    with torch.no_grad():
        A = llama(ids, attention_mask=mask, output_attentions=True).attentions[0]
    assert (A[2, :, :9] == 0).all()
    assert (A.lse[2, :, :9] == -torch.inf).all()


@pytest.mark.parametrize("side", [None, "left"])
def test_greedy_text_equals_eager(model: nn.Module, side: str | None, padded: Padded) -> None:
    ids, mask = padded(side)
    options = {"attention_mask": mask, "max_new_tokens": 14, "do_sample": False, "pad_token_id": 0}
    ours = model.generate(ids, **options)
    model.set_attn_implementation("eager")
    assert torch.equal(ours, model.generate(ids, **options))


def test_greedy_text_with_a_static_cache(gpt2: nn.Module, padded: Padded) -> None:
    ids, mask = padded("left")
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    ours = gpt2.generate(ids, **options, cache_implementation="static", disable_compile=True)
    gpt2.set_attn_implementation("eager")
    assert torch.equal(ours, gpt2.generate(ids, **options))


def test_each_step_of_generation_has_its_weights(gpt2: nn.Module, padded: Padded) -> None:
    ids, _ = padded(None)
    found = gpt2.generate(
        ids, max_new_tokens=3, do_sample=False, pad_token_id=0, output_attentions=True, return_dict_in_generate=True
    )
    shapes = [tuple(step[1].shape) for step in found.attentions]
    assert shapes[:2] == [(3, 4, 17, 17), (3, 4, 1, 18)]


def test_gradients_equal_eager(model: nn.Module, padded: Padded) -> None:
    ids, mask = padded("right")
    gradients = []
    for implementation in ("attlas", "eager"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        logits = model(ids, attention_mask=mask).logits
        logits[mask.bool()].square().sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    for name, gradient in gradients[1].items():
        scale = gradient.abs().max().item() + 1e-6
        torch.testing.assert_close(gradients[0][name] / scale, gradient / scale, atol=1e-4, rtol=0, msg=name)


def test_dropout_is_used_in_training_only(gpt2: nn.Module, padded: Padded) -> None:
    ids, _ = padded(None)
    for block in gpt2.transformer.h:
        block.attn.attn_dropout.p = 0.5
    for module in gpt2.modules():
        if isinstance(module, nn.Dropout) and module.p != 0.5:
            module.p = 0.0
    with torch.no_grad():
        still = gpt2(ids).logits
        gpt2.train()
        first, second = gpt2(ids).logits, gpt2(ids).logits
        gpt2.eval()
        assert torch.equal(gpt2(ids).logits, still)
    assert not torch.equal(first, second)
    assert not torch.equal(first, still)


@pytest.mark.parametrize("additive", [False, True])
def test_a_mask_with_four_axes_is_taken_as_it_is(gpt2: nn.Module, additive: bool, padded: Padded) -> None:
    ids, _ = padded(None)
    allowed = torch.ones(17, 17, dtype=torch.bool).tril() & ~torch.eye(17, dtype=torch.bool).roll(-3, 1)
    mask = allowed.expand(3, 1, 17, 17)
    if additive:
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    with torch.no_grad():
        ours = gpt2(ids, attention_mask=mask, output_attentions=True)
        gpt2.set_attn_implementation("eager")
        lowest = torch.finfo(torch.float32).min
        theirs = gpt2(ids, attention_mask=mask if additive else torch.zeros(mask.shape).masked_fill(~mask, lowest))
    torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-4, rtol=1e-4)
    assert (ours.attentions[0].to_dense()[:, :, ~allowed] == 0).all()


def test_packed_texts_do_not_see_each_other(gpt2: nn.Module, padded: Padded) -> None:
    ids, _ = padded(None)
    places = torch.cat([torch.arange(7), torch.arange(10)]).expand(3, -1)
    with torch.no_grad():
        ours = gpt2(ids, position_ids=places, use_cache=False, output_attentions=True)
        gpt2.set_attn_implementation("eager")
        theirs = gpt2(ids, position_ids=places, use_cache=False)
    torch.testing.assert_close(ours.logits, theirs.logits, atol=1e-4, rtol=1e-4)
    assert (ours.attentions[0][:, :, 7:, :7] == 0).all()


def test_a_causal_model_without_padding_runs_on_a_fused_kernel(gpt2: nn.Module, padded: Padded) -> None:
    ids, _ = padded(None)
    with torch.no_grad():
        A = gpt2(ids, output_attentions=True).attentions[0]
    assert attlas.explain(A).backend in ("native", "sdpa")


def test_missing_transformers_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "attlas.huggingface")
    with pytest.raises(MissingExtraError) as error:
        importlib.import_module("attlas.huggingface")
    assert said(error.value) == "attlas.huggingface: no module named transformers"
