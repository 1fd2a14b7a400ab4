"""Layers of linear attention in models of transformers: their matrices times their values are their own outputs."""

from __future__ import annotations

import functools
import importlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attlas
from attlas import heads, stats
from attlas.errors import ShapeError
from attlas.recording import linear
from attlas.recording.atlas import Entry

transformers = pytest.importorskip("transformers")

_COMMON = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 128,
           "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}  # fmt: skip
_DELTA = {"linear_key_head_dim": 8, "linear_value_head_dim": 12, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16}  # fmt: skip
#: By the type of the model: settings, and how many of its layers are linear.
MODELS: dict[str, tuple[dict[str, Any], int]] = {
    "qwen3_next": ({**_COMMON, **_DELTA, **_EXPERTS, "num_hidden_layers": 8}, 6),
    "olmo_hybrid": ({**_COMMON, **_DELTA, "linear_num_key_heads": 4, "num_hidden_layers": 4}, 3),
    "mamba2": ({"vocab_size": 97, "hidden_size": 32, "state_size": 8, "num_heads": 8, "head_dim": 8, "n_groups": 2,
                "chunk_size": 8, "expand": 2, "num_hidden_layers": 2}, 2),
    "falcon_h1": ({**_COMMON, "num_hidden_layers": 2, "mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8,
                   "mamba_d_state": 8, "mamba_n_groups": 2, "mamba_chunk_size": 8}, 2),
    "nemotron_h": ({**_COMMON, "layers_block_type": ["mamba", "attention", "mamba"], "mamba_num_heads": 8,
                    "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8}, 2),
}  # fmt: skip
TOKENS = 21


@functools.cache
def tiny(kind: str) -> nn.Module:
    """Return a small model with random weights."""
    settings, _ = MODELS[kind]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **settings)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if parameter.ndim >= 2 and "A_log" not in name:
            nn.init.normal_(parameter, std=0.3)
    return model


@contextmanager
def outputs(model: nn.Module) -> Iterator[list[Tensor]]:
    """Collect what the model's own functions of linear attention return, shape (batch, heads, tokens, size)."""
    found: list[Tensor] = []
    file = importlib.import_module(type(model).__module__)
    before = {name: getattr(file, name) for name in linear._FUNCTIONS if hasattr(file, name)}
    for name, original in before.items():

        @functools.wraps(original)
        def run(*args: Any, _original: Any = original, **kwargs: Any) -> Any:
            result = _original(*args, **kwargs)
            own = result[0] if isinstance(result, tuple) else result
            found.append((own if own.ndim == 4 else own.unsqueeze(1)).transpose(1, 2).detach().clone())
            return result

        setattr(file, name, run)
    try:
        yield found
    finally:
        for name, original in before.items():
            setattr(file, name, original)


def linear_entries(atlas: attlas.Atlas) -> list[Entry]:
    return [entry for entry in atlas.entries if entry.matrix is not None and entry.matrix.weights.softmax is None]


def pooled(entry: Entry) -> Tensor:
    assert entry.matrix is not None
    assert entry.values is not None
    return entry.matrix @ entry.values


def tokens() -> Tensor:
    return torch.randint(3, 90, (2, TOKENS), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("training", [False, True], ids=["eval", "training"])
@pytest.mark.parametrize("kind", MODELS)
def test_a_matrix_times_its_values_is_the_output_of_the_layer(kind: str, *, training: bool, padded: bool) -> None:
    model, ids = tiny(kind).train(training), tokens()
    mask = torch.ones_like(ids)
    mask[0, :5] = 0 if padded else 1
    try:
        with outputs(model) as own, attlas.record(model, values=True) as atlas:
            model(input_ids=ids, attention_mask=mask, use_cache=False)
    finally:
        model.eval()
    entries = linear_entries(atlas)
    assert len(entries) == len(own) == MODELS[kind][1]
    for entry, output in zip(entries, own, strict=True):
        error = (pooled(entry) - output).abs().max() / output.abs().max()
        assert float(error) < 5e-6  # the functions of transformers themselves are that far off in float32
        assert entry.query_mask is None or (padded and int((~entry.query_mask).sum()) == 5)
    assert not atlas.missing_layers()
    assert torch.equal(atlas.ids, ids)


@pytest.mark.parametrize("kind", MODELS)
def test_a_generation_is_one_matrix(kind: str) -> None:
    model, ids = tiny(kind), tokens()
    with outputs(model) as own, attlas.record(model, values=True) as atlas, torch.no_grad():
        model.generate(ids, max_new_tokens=4, do_sample=False)
    entries, length = linear_entries(atlas), TOKENS + 3
    assert len(entries) == MODELS[kind][1]
    for number, entry in enumerate(entries):
        assert entry.shape[2:] == (length, length)
        mine, prompt = pooled(entry), own[number]
        scale = prompt.abs().max()
        assert float((mine[:, :, :TOKENS] - prompt).abs().max() / scale) < 5e-6
        if kind == "falcon_h1":  # its steps hand the output gate over as well
            continue
        steps = own[len(entries) + number :: len(entries)]
        assert float((mine[:, :, TOKENS:] - torch.cat(steps, dim=2)).abs().max() / scale) < 5e-6
    assert atlas.ids.shape == (2, length)


def test_layers_have_the_numbers_of_the_model_and_work_together(tmp_path: Path) -> None:
    model, ids = tiny("qwen3_next"), tokens()
    numbers = [stats.ColumnMass(), stats.Entropy(), stats.TopK(2)]
    with attlas.record(model, statistics=numbers) as atlas, torch.no_grad():
        model(input_ids=ids)
    assert atlas.layers() == list(range(8))
    assert [atlas[layer].weights.softmax is not None for layer in range(8)] == [layer % 4 == 3 for layer in range(8)]
    entry = atlas.entry(0)
    assert entry.statistics.keys() == {"column_mass", "top_k"}  # such rows have no entropy
    torch.testing.assert_close(entry.statistics["column_mass"], atlas[0].sum(-2))
    atlas.collect(stats.EffectiveKeys(), stats.MaxWeight())
    assert "effective_keys" not in entry.statistics
    assert {"effective_keys", "max_weight"} <= atlas.entry(3).statistics.keys()
    torch.testing.assert_close(entry.statistics["max_weight"], atlas[0].amax(-1))
    with pytest.raises(ShapeError, match="weights must be shares of a row"):
        attlas.Atlas(linear_entries(atlas)).collect(stats.Entropy())
    shares = heads.rollout(atlas)
    dense = torch.eye(TOKENS).expand(2, TOKENS, TOKENS)
    for layer in range(8):
        dense = (0.5 * atlas[layer].to_dense().mean(1) + 0.5 * torch.eye(TOKENS)) @ dense
    torch.testing.assert_close(shares, dense[:, -1:], rtol=1e-4, atol=1e-5)
    assert {row["layer"] for row in atlas.table()} == set(range(8))
    atlas.save(tmp_path / "run.atlas")
    again = attlas.load(tmp_path / "run.atlas")
    for layer in range(8):
        torch.testing.assert_close(again[layer].to_dense(), atlas[layer].to_dense(), rtol=0, atol=0)
    page = atlas.export(tmp_path / "page.html").read_text("utf-8")
    data = json.loads(re.search(r'id="attlas-data"[^>]*>(.*?)</script>', page, re.DOTALL)[1])
    assert [(entry["layer"], entry["shares"]) for entry in data["info"]["entries"]] == [
        (layer, layer % 4 == 3) for layer in range(8)
    ]
    assert {each["entry"] for each in data["packed"]} == set(range(8))


def test_chosen_layers_heads_and_queries() -> None:
    model, ids = tiny("qwen3_next"), tokens()
    with attlas.record(model) as whole, torch.no_grad():
        model(input_ids=ids)
    options: dict[str, Any] = {"layers": [1, 3], "heads": [2], "queries": slice(-6, None), "values": True}
    for keep in ("device", "cpu", "disk"):
        context = pytest.warns(UserWarning, match="deleted with the atlas") if keep == "disk" else nullcontext()
        with context, attlas.record(model, keep=keep, **options) as atlas, torch.no_grad():
            model(input_ids=ids)
        assert atlas.layers() == [1, 3]
        entry = atlas.entry(1)
        assert (entry.heads, entry.queries) == ((2,), (TOKENS - 6, TOKENS))
        torch.testing.assert_close(atlas[1].to_dense(), whole[1].to_dense()[:, 2:3, -6:])
    with attlas.record(model, statistics=[stats.ColumnMass()], keep="statistics") as counted, torch.no_grad():
        model(input_ids=ids)
    assert counted.entry(0).matrix is None
    torch.testing.assert_close(counted.entry(0).statistics["column_mass"], whole[0].sum(-2))
    with attlas.record(model, linear=False) as softmax, torch.no_grad():
        model(input_ids=ids)
    assert softmax.layers() == [3, 7]
    assert softmax.missing_layers() == [0, 1, 2, 4, 5, 6]
    with pytest.raises(ShapeError, match="linear must be True or False"):
        attlas.record(model, linear="no")  # type: ignore[arg-type]


def test_a_state_of_tokens_that_were_not_recorded_is_said() -> None:
    model, ids = tiny("qwen3_next"), tokens()
    with torch.no_grad():
        past = model(input_ids=ids, use_cache=True).past_key_values
        with attlas.record(model) as atlas:
            model(input_ids=ids[:, :1], past_key_values=past, use_cache=True)
    assert atlas.layers() == [3, 7]  # rows of the others would lack what the state holds
    assert any("Qwen3NextGatedDeltaNet" in line for line in atlas.unrecorded)


def test_two_texts_are_two_calls_and_everything_is_put_back() -> None:
    model, ids = tiny("mamba2"), tokens()
    file = importlib.import_module(type(model).__module__)
    before = file.mamba2_chunk_scan
    with attlas.record(model) as outer, torch.no_grad():
        assert file.mamba2_chunk_scan is not before
        model(input_ids=ids)
        with attlas.record(model) as inner:
            model(input_ids=ids[:, :9])
    assert file.mamba2_chunk_scan is before
    assert [entry.call for entry in outer.entries if entry.layer == 0] == [0, 1]
    assert [entry.shape[2] for entry in outer.entries if entry.layer == 0] == [TOKENS, 9]
    torch.testing.assert_close(inner[0].to_dense(), outer[0].to_dense())  # the last call of a layer
