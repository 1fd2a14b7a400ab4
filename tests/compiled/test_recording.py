"""A recording of a compiled model: one graph, and the atlas of the model without a compiler."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tests.huggingface.conftest import make
from tests.tiny_models import BART, T5, VOCABULARY, lively
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import attlas
from attlas import stats
from attlas.recording import record
from attlas.recording.atlas import Atlas

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

TOKENS = 12
NUMBERS = (stats.Entropy(), stats.ColumnMass(), stats.MaxLogit())
FAMILIES = ["gpt2", "llama"]
BACKENDS = ["eager", "aot_eager"]


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


def text(seed: int = 5, rows: int = 2) -> Tensor:
    return torch.randint(3, VOCABULARY, (rows, TOKENS), generator=torch.Generator().manual_seed(seed))


def padding(side: str) -> Tensor:
    keep = torch.ones(2, TOKENS, dtype=torch.int64)
    keep[1, slice(0, 4) if side == "left" else slice(TOKENS - 4, None)] = 0
    return keep


def whole(model: nn.Module, backend: str = "eager") -> tuple[Any, CompileCounterWithBackend]:
    """Compile into one graph, or fail; count the graphs."""
    counter = CompileCounterWithBackend(backend)
    return torch.compile(model, fullgraph=True, backend=counter), counter


def recorded(model: nn.Module, run: Callable[[], object], **settings: Any) -> Atlas:
    with torch.no_grad(), record(model, **settings) as atlas:
        run()
    return atlas


def assert_equal(ours: Atlas, plain: Atlas, *, prefix: str = "") -> None:
    """Two atlases have the same entries, to the rounding of the output of the layers before."""
    assert len(ours.entries) == len(plain.entries) > 0
    for own, other in zip(ours.entries, plain.entries, strict=True):
        for name in ("layer", "kind", "call", "heads", "queries", "first_key", "shape"):
            assert getattr(own, name) == getattr(other, name), name
        assert own.name == prefix + other.name
        assert (own.query_mask is None) == (other.query_mask is None)
        if own.query_mask is not None:
            assert torch.equal(own.query_mask, other.query_mask)
        assert own.statistics.keys() == other.statistics.keys()
        for name, number in own.statistics.items():
            torch.testing.assert_close(number, other.statistics[name], rtol=2e-5, atol=2e-5)
        assert (own.matrix is None) == (other.matrix is None)
        if own.matrix is not None:
            torch.testing.assert_close(own.matrix.to_dense(), other.matrix.to_dense(), rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(own.matrix.lse, other.matrix.lse, rtol=1e-5, atol=1e-5)
        for name, number in own.values_and_norms.items():
            torch.testing.assert_close(number, other.values_and_norms[name], rtol=1e-4, atol=1e-5)
    assert (ours.ids is None) == (plain.ids is None)
    if ours.ids is not None:
        assert torch.equal(ours.ids, plain.ids)
    assert prefix or ours.details == plain.details


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_one_graph_and_the_atlas_of_the_plain_model(family: str, backend: str) -> None:
    model = make(family)
    compiled, counter = whole(model, backend)
    wanted = compiled(text(), use_cache=False).logits
    assert counter.frame_count == 1
    for seed in (5, 6):
        given = {"attention_mask": padding("left"), "use_cache": False}
        ours = recorded(model, lambda: compiled(text(seed), **given), statistics=NUMBERS)  # noqa: B023
        assert_equal(ours, recorded(model, lambda: model(text(seed), **given), statistics=NUMBERS))  # noqa: B023
        assert counter.frame_count == 2  # each further recording runs the same program
    # Afterwards the program without a recording runs, as it was.
    assert torch.equal(compiled(text(), use_cache=False).logits, wanted)
    assert counter.frame_count == 2
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(name.startswith("_attlas") for module in model.modules() for name in vars(module))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_recording_of_the_compiled_module_itself(family: str) -> None:
    model = make(family)
    compiled, counter = whole(model)
    ours = recorded(compiled, lambda: compiled(text(), use_cache=False))
    assert counter.frame_count == 1
    assert_equal(ours, recorded(model, lambda: model(text(), use_cache=False)), prefix="_orig_mod.")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_model_that_is_compiled_in_place(backend: str) -> None:
    """The pass begins and ends within the program: these hooks are operators, too."""
    model, ids = make("llama"), text()
    plain = recorded(model, lambda: model(ids, padding("left"), use_cache=False), statistics=NUMBERS)
    counter = CompileCounterWithBackend(backend)
    model.compile(fullgraph=True, backend=counter)
    for _ in range(2):
        ours = recorded(model, lambda: model(ids, padding("left"), use_cache=False), statistics=NUMBERS)
        assert_equal(ours, plain)
        assert counter.frame_count == 1


def test_a_part_of_what_is_compiled() -> None:
    model, ids = make("llama"), text()
    plain = recorded(model.model, lambda: model(ids, use_cache=False))
    compiled, counter = whole(model, "aot_eager")
    assert_equal(recorded(model.model, lambda: compiled(ids, use_cache=False)), plain)
    assert counter.frame_count == 1


@pytest.mark.parametrize("settings", [
    {"keep": "cpu"},
    {"keep": "disk"},
    {"keep": "statistics", "statistics": NUMBERS},
    {"layers": [-1], "heads": [1, 3], "queries": slice(-3, None)},
    {"values": True},
    {"values": "norms"},
], ids=["cpu", "disk", "statistics", "parts", "values", "norms"])  # fmt: skip
def test_what_is_kept(settings: dict[str, Any]) -> None:
    model, ids = make("llama"), text()
    compiled, _ = whole(model, "aot_eager")
    ours = recorded(model, lambda: compiled(ids, use_cache=False), **settings)
    assert_equal(ours, recorded(model, lambda: model(ids, use_cache=False), **settings))


@pytest.mark.parametrize("family", ["mistral, window", "gemma2, capped", "gpt_oss, sinks"])
def test_windows_caps_and_sinks(family: str) -> None:
    model, ids = make(family), text()
    compiled, counter = whole(model, "aot_eager")
    given = {"attention_mask": padding("left"), "use_cache": False}
    ours = recorded(model, lambda: compiled(ids, **given), statistics=NUMBERS)
    assert counter.frame_count == 1
    assert_equal(ours, recorded(model, lambda: model(ids, **given), statistics=NUMBERS))


@pytest.mark.parametrize("kind", ["bert", "t5", "bart"])
def test_encoders_biases_and_cross_attention(kind: str) -> None:
    torch.manual_seed(3)
    if kind == "bert":
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
        model: Any = transformers.BertModel(transformers.BertConfig(vocab_size=VOCABULARY, **sizes))
        given = {"input_ids": text(), "attention_mask": padding("right")}
    else:
        config = transformers.T5Config(**T5) if kind == "t5" else transformers.BartConfig(**BART)
        model = transformers.AutoModel.from_config(config)
        given = {"input_ids": text(), "attention_mask": padding("right"), "decoder_input_ids": text(6)[:, :5]}
        given["use_cache"] = False  # type: ignore[assignment]
    model = lively(model.eval(), 4.0)
    compiled, counter = whole(model)
    ours = recorded(model, lambda: compiled(**given))
    assert counter.frame_count == 1
    assert_equal(ours, recorded(model, lambda: model(**given)))


def test_a_mask_of_the_user() -> None:
    model, ids = make("llama"), text()
    allowed = torch.rand(2, 1, TOKENS, TOKENS, generator=torch.Generator().manual_seed(2)) < 0.5
    given = {"attention_mask": allowed | torch.eye(TOKENS, dtype=torch.bool), "use_cache": False}
    compiled, counter = whole(model)
    assert_equal(recorded(model, lambda: compiled(ids, **given)), recorded(model, lambda: model(ids, **given)))
    assert counter.frame_count == 1


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("family", [*FAMILIES, "mistral, window"])
def test_generation(family: str, cache: str | None) -> None:
    model, ids = make(family), text()
    settings: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "disable_compile": True}
    settings |= {"cache_implementation": cache, "attention_mask": padding("left")}
    plain = recorded(model, lambda: model.generate(ids, **settings), statistics=NUMBERS)
    model.forward = torch.compile(model.forward, backend="eager")
    ours = recorded(model, lambda: model.generate(ids, **settings), statistics=NUMBERS)
    assert_equal(ours, plain)
    assert len(ours.entries) == 2
    assert [entry.queries for entry in ours.entries] == [(0, TOKENS + 3)] * 2


def test_generation_of_a_model_that_is_compiled_in_place() -> None:
    model, ids = make("llama"), text()
    settings: dict[str, Any] = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "disable_compile": True}
    plain = recorded(model, lambda: model.generate(ids, **settings))
    model.compile(backend="eager", dynamic=True)
    assert_equal(recorded(model, lambda: model.generate(ids, **settings)), plain)


@torch.no_grad()
def test_steps_of_a_generation_share_programs() -> None:
    model, ids = make("llama"), text()
    compiled, counter = whole(model)

    def run(forward: Any) -> None:
        cache = transformers.DynamicCache(config=model.config)
        forward(ids, past_key_values=cache)
        for step in range(5):
            forward(ids[:, step : step + 1], past_key_values=cache)

    ours = recorded(model, lambda: run(compiled))
    programs = counter.frame_count
    assert_equal(ours, recorded(model, lambda: run(model)))
    recorded(model, lambda: run(compiled))
    assert counter.frame_count == programs <= 4


def test_a_module_that_is_used_for_every_layer() -> None:
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    config = transformers.AlbertConfig(vocab_size=VOCABULARY, embedding_size=16, **sizes)
    torch.manual_seed(3)
    model, ids = transformers.AlbertModel(config).eval(), text()
    compiled, counter = whole(model)
    ours = recorded(model, lambda: compiled(ids))
    assert_equal(ours, recorded(model, lambda: model(ids)))
    assert len(ours) == 3
    assert counter.frame_count == 1


def test_gradients_are_those_without_a_recording() -> None:
    model, ids = make("llama").train(), text()
    compiled, counter = whole(model, "aot_eager")
    grads: list[list[Tensor]] = []
    for records in (False, True):
        model.zero_grad()
        if records:
            with record(model) as atlas:
                compiled(ids, labels=ids, use_cache=False).loss.backward()
        else:
            compiled(ids, labels=ids, use_cache=False).loss.backward()
        grads.append([parameter.grad.clone() for parameter in model.parameters()])
    assert counter.frame_count == 2
    assert [(entry.layer, entry.call) for entry in atlas.entries] == [(0, 0), (1, 0)]
    assert all(itertools.starmap(torch.equal, zip(*grads, strict=True)))


def test_what_checkpointing_computes_again_is_not_recorded_again() -> None:
    model, ids = make("llama").train(), text()
    model.gradient_checkpointing_enable()
    compiled, counter = whole(model, "aot_eager")
    with record(model) as atlas:
        compiled(ids, labels=ids, use_cache=False).loss.backward()
    assert [(entry.layer, entry.call) for entry in atlas.entries] == [(0, 0), (1, 0)]
    assert counter.frame_count == 1


def test_nested_recordings_and_one_that_leaves_first() -> None:
    model, ids = make("llama"), text()
    compiled, counter = whole(model)
    with torch.no_grad(), record(model) as outer:
        inner = recorded(model, lambda: compiled(ids, use_cache=False), statistics=NUMBERS, keep="statistics")
        compiled(text(6), use_cache=False)
    assert [(e.layer, e.call) for e in outer.entries] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    torch.testing.assert_close(inner.entry(1).statistics["entropy"], stats.entropy(outer.entries[2].matrix))
    assert counter.frame_count == 2


@torch.no_grad()
def test_another_model_of_the_same_class_is_not_recorded_and_is_when_it_should_be() -> None:
    model, other, ids = make("llama"), make("llama"), text()
    compiled = torch.compile(other, backend="eager", fullgraph=True)
    with record(model) as atlas:
        model(ids, use_cache=False)
        compiled(ids, use_cache=False)
    assert len(atlas.entries) == 2
    assert len(recorded(other, lambda: compiled(ids, use_cache=False)).entries) == 2


@torch.no_grad()
def test_an_error_in_a_program_does_not_shift_what_follows() -> None:
    model, ids = make("llama"), text()
    plain = recorded(model, lambda: model(ids, use_cache=False))
    model.compile(backend="eager")
    compiled = recorded(model, lambda: model(ids, use_cache=False))
    assert_equal(compiled, plain)
    with record(model) as atlas:
        with pytest.raises(IndexError):
            model(torch.full_like(ids, VOCABULARY + 5), use_cache=False)
        model(ids, use_cache=False)
    assert_equal(atlas, plain)


@torch.no_grad()
def test_an_error_of_the_recording_is_its_own() -> None:
    model = make("llama")
    compiled, _ = whole(model)
    with pytest.raises(attlas.errors.OutOfRangeError, match="head"), record(model, heads=[99]):
        compiled(text(), use_cache=False)


@torch.no_grad()
def test_interventions_still_change_a_compiled_model() -> None:
    model, ids = make("llama"), text()
    compiled = torch.compile(model, backend="eager")
    change = attlas.interventions.Suppress(keys=2)
    with attlas.intervene(model, [change]):
        wanted = model(ids, use_cache=False).logits
        with record(model) as atlas:
            found = compiled(ids, use_cache=False).logits
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    assert not atlas[1].to_dense()[..., 2].any()


@torch.no_grad()
def test_what_runs_in_python_is_recorded_beside_a_program() -> None:
    """A graph that the model itself breaks: hooks in Python and operators tell of the same pass."""
    model, ids = make("llama"), text()
    plain = recorded(model, lambda: model(ids, use_cache=False))
    forward = model.model.layers[1].self_attn.forward
    model.model.layers[1].self_attn.forward = torch.compiler.disable(forward)
    compiled = torch.compile(model, backend="eager")
    assert_equal(recorded(model, lambda: compiled(ids, use_cache=False)), plain)
