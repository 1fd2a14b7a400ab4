"""Models as torch.compile and torch.export record them: one graph, and the numbers of the plain model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tests.huggingface.conftest import CONFIGS, make
from tests.tiny_models import T5
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from transformers import masking_utils

import attlas
from attlas.huggingface import traced as module
from attlas.recording import record

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

TOKENS, VOCABULARY = 12, 61


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def text(rows: int = 2) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, TOKENS), generator=torch.Generator().manual_seed(5))


def padding(side: str) -> Tensor:
    keep = torch.ones(2, TOKENS, dtype=torch.int64)
    keep[1, slice(0, 4) if side == "left" else slice(TOKENS - 4, None)] = 0
    return keep


def whole(model: nn.Module) -> Any:
    """Compile into one graph, or fail."""
    return torch.compile(model, fullgraph=True, backend="eager")


@pytest.mark.parametrize("kind", [name for name in CONFIGS if name != "llama"])
@torch.no_grad()
def test_one_graph_gives_the_numbers_of_the_plain_model(kind: str) -> None:
    model = make(kind)
    real = padding("left").bool()
    given = {"attention_mask": padding("left"), "output_attentions": True, "use_cache": False}
    plain, compiled = model(text(), **given), whole(model)(text(), **given)
    torch.testing.assert_close(compiled.logits[real], plain.logits[real], rtol=1e-4, atol=1e-4)
    rows = real[:, None, :, None]
    for ours, lazy in zip(compiled.attentions, plain.attentions, strict=True):
        assert isinstance(lazy, attlas.AttentionMatrix)
        assert type(ours) is Tensor
        torch.testing.assert_close(ours * rows, lazy.to_dense() * rows, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["bert", "t5"])
@torch.no_grad()
def test_encoders_and_biases(kind: str) -> None:
    torch.manual_seed(3)
    if kind == "bert":
        sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 48}
        model: Any = transformers.BertModel(transformers.BertConfig(vocab_size=VOCABULARY, **sizes))
        given = {"input_ids": text(), "attention_mask": padding("right")}
    else:
        config = transformers.T5Config(**T5 | {"num_layers": 1})
        model = transformers.T5Model(config)
        given = {"input_ids": text(), "attention_mask": padding("right"), "decoder_input_ids": text()[:, :5]}
        given["use_cache"] = False  # type: ignore[assignment]
    model.eval().set_attn_implementation("attlas")
    real = given["attention_mask"].bool() if kind == "bert" else slice(None)
    plain, ours = model(**given), whole(model)(**given)
    torch.testing.assert_close(ours[0][real], plain[0][real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("given", "causal"),
    [
        ({}, True),
        ({"attention_mask": torch.ones(2, 6, dtype=torch.bool)}, True),
        ({"attention_mask": torch.arange(12).view(2, 6) != 0}, False),
        ({"q_length": 2, "q_offset": 4}, False),
        ({"mask_function": masking_utils.sliding_window_causal_mask_function(3)}, False),
    ],
    ids=["causal", "no padding", "padding", "a step with a cache", "window"],
)
def test_the_written_mask_is_that_of_transformers_asked_once(
    given: dict[str, Any], causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def counted(**settings: Any) -> Tensor | None:
        asked.append(settings)
        return masking_utils.sdpa_mask(**settings)

    monkeypatch.setattr(module, "sdpa_mask", counted)
    rule = masking_utils.causal_mask_function
    given = {"batch_size": 2, "q_length": 6, "kv_length": 6, "mask_function": rule, "device": "cpu"} | given
    found = module.dense_mask(given)
    assert len(asked) == 1
    assert getattr(found, "attlas_causal", False) is causal
    assert torch.equal(found, masking_utils.sdpa_mask(**given, allow_is_causal_skip=False))


def test_gradients_through_the_graph() -> None:
    model, ids = make("llama").train(), text()
    loss = model(ids, labels=ids, use_cache=False).loss
    loss.backward()
    wanted = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    whole(model)(ids, labels=ids, use_cache=False).loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted[name], rtol=1e-3, atol=1e-5, msg=name)


@torch.no_grad()
def test_weights_under_autocast_are_not_rounded() -> None:
    model, ids = make("llama"), text()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        plain, compiled = (run(ids, output_attentions=True, use_cache=False) for run in (model, whole(model)))
    torch.testing.assert_close(compiled.attentions[0], plain.attentions[0].to_dense(), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_one_program_serves_every_length() -> None:
    model, ids, counter = make("llama"), text(), CompileCounter()
    compiled = torch.compile(model, fullgraph=True, backend=counter, dynamic=True)
    for length in (5, 7, 9, TOKENS):
        compiled(ids[:, :length], use_cache=False)
    assert counter.frame_count == 1


@torch.no_grad()
def test_a_step_with_a_static_cache() -> None:
    model, ids = make("mistral, window"), text(1)
    compiled = whole(model)
    found = []
    for run in (model, compiled):
        cache = transformers.StaticCache(config=model.config, max_cache_len=TOKENS)
        run(ids[:, :-1], past_key_values=cache)
        found.append(run(ids[:, -1:], past_key_values=cache).logits)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(torch.__version__ < (2, 9), reason="torch 2.8 keeps results of an operator that nobody reads")
@torch.no_grad()
def test_weights_that_nobody_reads_are_dropped() -> None:
    """The largest tensor of the compiled graph of a plain causal model has no m x n numbers for each head."""
    sizes: list[tuple[int, ...]] = []

    def look(graph: torch.fx.GraphModule, _: object) -> Any:
        sizes.extend(
            tuple(node.meta["val"].shape) for node in graph.graph.nodes if hasattr(node.meta.get("val"), "shape")
        )
        return graph.forward

    from torch._dynamo.backends.common import aot_autograd

    model, ids = make("llama"), text()
    compiled = torch.compile(model, fullgraph=True, backend=aot_autograd(fw_compiler=look))(ids, use_cache=False)
    torch.testing.assert_close(compiled.logits, model(ids, use_cache=False).logits, rtol=1e-4, atol=1e-4)
    assert sizes
    assert (2, 4, TOKENS, TOKENS) not in sizes


@torch.no_grad()
def test_a_recording_still_hears_a_compiled_model() -> None:
    model, ids = make("llama"), text()
    plain = model(ids, output_attentions=True, use_cache=False).attentions
    compiled = torch.compile(model, backend="eager")
    compiled(ids, use_cache=False)
    with record(model) as atlas:
        compiled(ids, use_cache=False)
    assert len(atlas) == 2
    torch.testing.assert_close(atlas[1].to_dense(), plain[1].to_dense(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "strict"),
    [("llama", False), ("gemma2, capped", False), ("gpt_oss, sinks", False), ("gpt_oss, sinks", True)],
)
@torch.no_grad()
def test_an_exported_model_has_the_weights_that_it_returns(kind: str, strict: bool) -> None:
    """torch.export drops nothing: a program without attentions must not compute them."""
    model, ids = make(kind), text(1)
    plain = model(ids, use_cache=False, output_attentions=True)
    weights = (1, model.config.num_attention_heads, TOKENS, TOKENS)
    for asked in (False, True):
        given = {"use_cache": False, "output_attentions": asked}
        program = torch.export.export(model, (ids,), given, strict=strict)
        found = program.module()(ids, **given)
        torch.testing.assert_close(found.logits, plain.logits, rtol=1e-4, atol=1e-4)
        sizes = [tuple(getattr(node.meta.get("val"), "shape", ())) for node in program.graph.nodes]
        if asked:
            assert len(found.attentions) == len(plain.attentions)
            for own, lazy in zip(found.attentions, plain.attentions, strict=True):
                torch.testing.assert_close(own, lazy.to_dense(), rtol=1e-4, atol=1e-5)
        elif kind == "llama":  # torch's own function has no caps and no sinks
            assert weights not in sizes


@torch.no_grad()
def test_a_cap_is_one_operator_of_a_program_that_keeps_them() -> None:
    model, ids = make("gemma2, capped"), text(1)
    plain = model(ids, use_cache=False).logits
    with attlas.export_operators():
        program = torch.export.export(model, (ids,), {"use_cache": False}, strict=False)
    torch.testing.assert_close(program.module()(ids, use_cache=False).logits, plain, rtol=1e-4, atol=1e-4)
    assert "attlas.pool" in str(program.graph)
    sizes = [tuple(getattr(node.meta.get("val"), "shape", ())) for node in program.graph.nodes]
    assert (1, model.config.num_attention_heads, TOKENS, TOKENS) not in sizes


@torch.no_grad()
def test_exported_attentions_above_the_limit_are_refused() -> None:
    model = make("llama")
    ids = torch.zeros(1, 9000, dtype=torch.int64)
    with pytest.raises(attlas.errors.TooLargeError, match="returns its attentions"):
        torch.export.export(model, (ids,), {"use_cache": False, "output_attentions": True}, strict=False)
