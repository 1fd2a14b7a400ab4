"""Layers of linear attention in models of transformers: their matrices times their values are their own outputs."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from tests.linear_models import CHANNELS, of_layers, outputs, tiny
from torch import Tensor, nn

import attlas
from attlas import heads, stats
from attlas.errors import DtypeError, OutOfRangeError, RecordingError, ShapeError
from attlas.interventions import Ablate, DetachWeights, ScaleLogits, Suppress, Temperature
from attlas.recording.atlas import Entry
from attlas.recording.linear_calls import OF_HEADS

pytest.importorskip("transformers")

#: Each way to compute in transformers, and each way to be put together.
KINDS = ("qwen3_next", "olmo_hybrid", "mamba2", "falcon_h1", "nemotron_h", "minimax", "jamba", "zamba",
         "recurrent_gemma", "rwkv")  # fmt: skip
TOKENS = 21


def linear_entries(atlas: attlas.Atlas) -> list[Entry]:
    own = [entry for entry in atlas.entries if entry.is_linear]
    return own or atlas.entries  # RWKV-4 is a softmax


def pooled(entry: Entry) -> Tensor:
    assert entry.matrix is not None
    assert entry.values is not None
    return entry.matrix @ entry.values


def tokens() -> Tensor:
    return torch.randint(3, 90, (2, TOKENS), generator=torch.Generator().manual_seed(1))


def tolerance(kind: str) -> float:
    """The delta rule of transformers itself is 1e-6 to 6e-6 off in float32: it subtracts sums of logarithms."""
    return 6e-6 if kind in ("qwen3_next", "olmo_hybrid") else 1e-6


def options(kind: str) -> dict[str, Any]:
    return {"values": True, **({"channels": slice(None)} if kind in CHANNELS else {})}


def check_equal(kind: str, entries: list[Entry], found: list[Tensor]) -> None:
    for entry, output in zip(entries, of_layers(kind, found), strict=True):
        mine = pooled(entry)
        assert mine.shape == output.shape
        assert float((mine - output).abs().max() / output.abs().max()) < tolerance(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_matrix_times_its_values_is_the_output_of_the_layer_in_training_and_with_padding(kind: str) -> None:
    model, ids = tiny(kind).train(), tokens()
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    given = {} if kind == "rwkv" else {"attention_mask": mask}  # it takes no mask
    try:
        with outputs(model) as own, attlas.record(model, **options(kind)) as atlas:
            model(input_ids=ids, use_cache=False, **given)
    finally:
        model.eval()
    entries = linear_entries(atlas)
    check_equal(kind, entries, own)
    for entry in entries:
        assert entry.query_mask is None or (given and int((~entry.query_mask).sum()) == 5)
        assert kind not in CHANNELS or entry.heads == tuple(range(entry.shape[1]))
    assert not atlas.missing_layers()
    assert torch.equal(atlas.ids, ids)


@pytest.mark.parametrize("kind", KINDS)
def test_a_generation_is_one_matrix(kind: str) -> None:
    model, ids, length = tiny(kind), tokens(), TOKENS + 3
    ids = ids[:1] if kind == "rwkv" else ids  # steps of RWKV in transformers mix the texts of a batch
    with outputs(model) as own, attlas.record(model, **options(kind)) as atlas, torch.no_grad():
        model.generate(ids, max_new_tokens=4, do_sample=False)
    check_equal(kind, linear_entries(atlas), own)
    assert {entry.shape[2:] for entry in atlas.entries} == {(length, length)}
    assert {entry.call for entry in atlas.entries} == {0}
    assert atlas.ids.shape == (len(ids), length)


@pytest.mark.parametrize(
    ("kind", "softmax", "linear"), [("falcon_h1", [0, 1], [0, 1]), ("zamba2", [1, 3], [0, 1, 2, 3])]
)
def test_two_mixers_of_a_layer_have_its_number(
    kind: str, softmax: list[int], linear: list[int], tmp_path: Path
) -> None:
    model, ids = tiny(kind), tokens()
    with attlas.record(model, statistics=[stats.ColumnMass()], tokens=list("abcdefghijklmnopqrstu")) as atlas:
        model(input_ids=ids, use_cache=False)
        model(input_ids=ids[:, :9], use_cache=False)
        model(input_ids=ids, use_cache=False)
    assert atlas.kinds == ("self", "linear")
    assert (atlas.layers(), atlas.layers("linear"), atlas.missing_layers()) == (softmax, linear, [])
    assert atlas[1].weights.softmax is not None
    assert atlas["linear.1"].weights.softmax is None
    assert [entry.call for entry in atlas.entries if entry.path == "linear.1"] == [0, 1, 2]
    first, last = atlas.entry(("linear.1", 0)), atlas.entry("linear.1")
    assert not atlas.has_text(first)
    assert atlas.texts_of(last)[0] == atlas.texts_of(last)[1] == [list("abcdefghijklmnopqrstu")]
    names = {(row["kind"], row["layer"]) for row in atlas.table()}
    assert names == {("self", n) for n in softmax} | {("linear", n) for n in linear}
    with pytest.raises(ShapeError, match="each layer must have one mixer"):
        heads.rollout(atlas)
    torch.testing.assert_close(heads.rollout(atlas, missing="identity"), heads.rollout([atlas[n] for n in softmax]))
    both = atlas.mean([1, "linear.1"], over_heads=True)
    dense = sum(atlas[key].to_dense().mean(1, keepdim=True) for key in (1, "linear.1")) / 2
    torch.testing.assert_close(both.to_dense(), dense, rtol=1e-5, atol=1e-6)
    assert heads.rollout([both, both]).shape == (2, 1, TOKENS)
    atlas.save(tmp_path / "run.atlas")
    assert attlas.load(tmp_path / "run.atlas").layers("linear") == linear
    with attlas.record(model, layers=["linear.1"]) as one, torch.no_grad():
        model(input_ids=ids)
    assert [entry.path for entry in one.entries] == ["linear.1"]
    with attlas.record(model, linear=False) as alone, torch.no_grad():  # the other mixer is named, and not forgotten
        model(input_ids=ids)
    assert alone.layers() == softmax
    assert any(line.startswith("linear layer") for line in alone.unrecorded)
    with pytest.raises(ShapeError, match=r"each layer must have one mixer|every layer of the model must be there"):
        heads.rollout(alone)


def test_channels_are_chosen(tmp_path: Path) -> None:
    model, ids = tiny("zamba"), tokens()
    with attlas.record(model, values=True, channels=slice(None)) as whole, torch.no_grad():
        model(input_ids=ids)
    with attlas.record(model, values=True, channels=[40, 3]) as atlas, torch.no_grad():  # of both scans of a layer
        model(input_ids=ids)
    entries, others = linear_entries(atlas), linear_entries(whole)
    assert others[0].shape[1] == 64
    for entry, other in zip(entries, others, strict=True):
        assert entry.heads == (3, 40)
        torch.testing.assert_close(entry.need_matrix().to_dense(), other.need_matrix().to_dense()[:, [3, 40]])
        torch.testing.assert_close(pooled(entry), pooled(other)[:, [3, 40]])
    atlas.collect(stats.ColumnMass())
    assert [row["head"] for row in atlas.table() if row["name"] == entries[0].name] == [3, 40]
    atlas.save(tmp_path / "run.atlas")
    again = attlas.load(tmp_path / "run.atlas")
    torch.testing.assert_close(again["linear.0"].to_dense(), atlas["linear.0"].to_dense(), rtol=0, atol=0)
    with attlas.record(model) as without, torch.no_grad():  # none, by default
        model(input_ids=ids)
    assert not any(entry.is_linear for entry in without.entries)
    assert any("Mamba" in line for line in without.unrecorded)
    with pytest.raises(OutOfRangeError, match="each channel must be one of the layer's"):  # noqa: SIM117
        with attlas.record(model, channels=[64]), torch.no_grad():
            model(input_ids=ids)
    for wrong in ([-1], "all", [], slice(-3, None)):
        with pytest.raises(DtypeError, match="channels"):
            attlas.record(model, channels=wrong)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="channels belong to layers of linear attention"):
        attlas.record(model, channels=[0], linear=False)
    alone = tiny("rwkv")
    with pytest.raises(RecordingError, match="one matrix for each channel"), attlas.record(alone), torch.no_grad():
        alone(input_ids=ids)


def test_channels_of_rwkv_are_a_softmax(tmp_path: Path) -> None:
    model, ids = tiny("rwkv"), tokens()
    with attlas.record(model, channels=range(4, 8), statistics=[stats.Entropy()]) as atlas, torch.no_grad():
        model(input_ids=ids)
    torch.testing.assert_close(atlas[1].sum(-1), torch.ones(2, 4, TOKENS))
    torch.testing.assert_close(atlas.entry(1).statistics["entropy"], stats.entropy(atlas[1]))
    atlas.save(tmp_path / "run.atlas")
    torch.testing.assert_close(attlas.load(tmp_path / "run.atlas")[1].to_dense(), atlas[1].to_dense())


def test_layers_have_the_numbers_of_the_model_and_work_together(tmp_path: Path) -> None:
    model, ids = tiny("qwen3_next", 8), tokens()
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


def test_the_mean_of_layers_is_lazy() -> None:
    model, ids = tiny("qwen3_next"), tokens()
    with attlas.record(model) as atlas, torch.no_grad():
        model(input_ids=ids)
    mean = atlas.mean()
    dense = torch.stack([atlas[layer].to_dense() for layer in range(4)]).mean(0)
    torch.testing.assert_close(mean.to_dense(), dense)
    torch.testing.assert_close(mean @ torch.ones(TOKENS, 1), dense.sum(-1, keepdim=True))
    some = atlas.mean([0, "model.layers.3.self_attn"])
    torch.testing.assert_close(some.sum(-2), (atlas[0].sum(-2) + atlas[3].sum(-2)) / 2)
    with pytest.raises(ShapeError, match="there must be a layer"):
        atlas.mean([])
    with attlas.record(model, heads={0: [1], 1: [0, 1]}) as other, torch.no_grad():
        model(input_ids=ids)
    with pytest.raises(ShapeError, match="must have one shape"):
        other.mean()
    assert other.mean(over_heads=True).shape == (2, 1, TOKENS, TOKENS)


def test_scores_norms_tables_and_effects_of_mixed_models(tmp_path: Path) -> None:
    model, ids = tiny("qwen3_next"), tokens()
    with attlas.record(model, values=True) as atlas, torch.no_grad():
        model(input_ids=ids)
    dense, entry = atlas[0].to_dense(), atlas.entry(0)
    signed, shares = heads.scores(atlas[0], ids), heads.scores(atlas[3], ids)
    assert signed.keys() == shares.keys() - {"broad"}  # which is an entropy
    torch.testing.assert_close(signed["current_token"], dense.diagonal(dim1=-2, dim2=-1)[..., 1:].mean(-1))
    torch.testing.assert_close(signed["first_token"], dense[..., 1:, 0].mean(-1), rtol=1e-4, atol=1e-6)
    with pytest.raises(ShapeError, match="weights must be shares of a row"):
        atlas[0].collect(heads.Broad())
    assert entry.values is not None
    weighted = dense * entry.values.norm(dim=-1).unsqueeze(-2)
    torch.testing.assert_close(entry.value_weighted().to_dense(), weighted)
    with pytest.raises(RecordingError, match="the output projection of the layer must be known"):
        entry.value_weighted(output=True)
    with attlas.record(model, values="norms") as norms, torch.no_grad():
        model(input_ids=ids)
    assert norms.entry(0).values is None
    torch.testing.assert_close(norms.entry(0).value_weighted().to_dense(), weighted)
    norms.save(tmp_path / "run.atlas")
    again = attlas.load(tmp_path / "run.atlas").entry(0).value_weighted()
    torch.testing.assert_close(again.to_dense(), weighted)
    with pytest.raises(ShapeError, match="weights must be shares of a row"):
        atlas.token_table(0, head=0)
    assert len(atlas.token_table(3, head=0)) == TOKENS
    with pytest.raises(DtypeError, match="a property of a softmax"):
        heads.missed(atlas[0])
    effects = heads.effect(model, ids, heads=[1])
    assert [(row["layer"], row["head"]) for row in effects] == [(0, 1), (1, 1), (2, 1), (3, 1)]
    with attlas.intervene(model, Ablate(layers=[0], heads=[1])), torch.no_grad():
        logits = model(ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].mT, ids[:, 1:])
    assert effects[0]["value"] == pytest.approx(float(loss), rel=1e-5)
    (hidden,) = heads.effect(model, ids, spans={"first": (0, 3)}, layers=[0, 3])  # in layers of both kinds
    with attlas.intervene(model, Suppress(layers=[0, 3], keys=(0, 3), queries=slice(3, None))), torch.no_grad():
        logits = model(ids, use_cache=False).logits
    loss = torch.nn.functional.cross_entropy(logits[:, :-1].mT, ids[:, 1:])
    assert hidden["value"] == pytest.approx(float(loss), rel=1e-5)
    corpus = attlas.corpus(model, [row.tolist() for row in ids], tmp_path / "corpus")  # of the layers with a softmax
    assert set(corpus.table()["layer"].tolist()) == {3}


def test_output_gates_are_measured(tmp_path: Path) -> None:
    model, ids = tiny("bailing_hybrid"), tokens()  # a gate for each head of its softmax layers
    seen: list[Tensor] = []
    attention = model.get_submodule("model.layers.1.self_attn")
    hook = attention.o_proj.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with attlas.record(model, values=True, gates=True) as atlas, torch.no_grad():
        model.generate(ids, max_new_tokens=3, do_sample=False)
    hook.remove()
    entry = atlas.entry(1)
    assert entry.values is not None
    assert entry.gates is not None
    own = torch.cat(seen, dim=1).unflatten(-1, (4, -1)).transpose(1, 2)
    torch.testing.assert_close(entry.gated @ entry.values, own, rtol=1e-4, atol=1e-5)
    assert 0 < float(entry.gates.min()) < float(entry.gates.max()) < 1  # a sigmoid
    torch.testing.assert_close(entry.gated.to_dense(), entry.gates.unsqueeze(-1) * entry.need_matrix().to_dense())
    with pytest.raises(RecordingError, match="one factor for each query and head"):  # a norm, and a gate a channel
        assert atlas.entry(0).gated
    atlas.save(tmp_path / "run.atlas")
    torch.testing.assert_close(attlas.load(tmp_path / "run.atlas").entry(1).gated.sum(-1), entry.gates)
    other = tiny("qwen3_next")
    with attlas.record(other, values=True, gates=True) as channels, torch.no_grad():
        other(input_ids=ids)
    with pytest.raises(RecordingError, match="one factor for each query and head"):
        assert channels.entry(3).gated
    plain = tiny("olmo_hybrid")  # no gate
    with attlas.record(plain, layers=[3], heads=[2], values=True, gates=True) as whole, torch.no_grad():
        plain(input_ids=ids)
    torch.testing.assert_close(whole.entry(3).gated.to_dense(), whole[3].to_dense(), rtol=1e-4, atol=1e-6)
    with attlas.record(plain, values=True) as without, torch.no_grad():
        plain(input_ids=ids)
    with pytest.raises(RecordingError, match="the gates must have been recorded"):
        assert without.entry(3).gated
    with pytest.raises(ShapeError, match="gates are measured of whole texts"):
        attlas.record(plain, gates=True)


def test_chosen_layers_heads_and_queries() -> None:
    model, ids = tiny("qwen3_next"), tokens()
    with attlas.record(model) as whole, torch.no_grad():
        model(input_ids=ids)
    chosen: dict[str, Any] = {"layers": [1, 3], "heads": [2], "queries": slice(-6, None), "values": True}
    for keep in ("device", "cpu", "disk"):
        context = pytest.warns(UserWarning, match="deleted with the atlas") if keep == "disk" else nullcontext()
        with context, attlas.record(model, keep=keep, **chosen) as atlas, torch.no_grad():
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
    assert softmax.layers() == [3]
    assert softmax.missing_layers() == [0, 1, 2]
    with pytest.raises(ShapeError, match="linear must be True or False"):
        attlas.record(model, linear="no")  # type: ignore[arg-type]


def test_a_state_of_tokens_that_were_not_recorded_is_said() -> None:
    model, ids = tiny("qwen3_next"), tokens()
    with torch.no_grad():
        past = model(input_ids=ids, use_cache=True).past_key_values
        with attlas.record(model) as atlas:
            model(input_ids=ids[:, :1], past_key_values=past, use_cache=True)
    assert atlas.layers() == [3]  # rows of the others would lack what the state holds
    assert any("Qwen3NextGatedDeltaNet" in line for line in atlas.unrecorded)


@pytest.mark.parametrize("kind", ["qwen3_next", "nemotron_h", "falcon_h1", "minimax"])
def test_heads_of_linear_layers_are_ablated(kind: str) -> None:
    model, ids = tiny(kind), tokens()
    key = "linear.0" if kind == "falcon_h1" else 0
    with outputs(model) as own, attlas.intervene(model, []), torch.no_grad():
        plain = model(ids, use_cache=False).logits
    with attlas.intervene(model, [Ablate(layers=[key], heads=[1], value=0.5)]), torch.no_grad():
        with attlas.record(model, values=True) as atlas:
            changed = model(ids, use_cache=False).logits
        steps = model.generate(ids, max_new_tokens=3, do_sample=False)
    # The weights are those of the layer as it is; the same change by the output of the first layer itself.
    torch.testing.assert_close(pooled(atlas.entry(key)), own[0], rtol=1e-4, atol=1e-5)
    replaced = own[0].clone()
    replaced[:, 1] = 0.5
    with first_output(model, replaced), attlas.intervene(model, []), torch.no_grad():
        torch.testing.assert_close(changed, model(ids, use_cache=False).logits)
    assert not torch.allclose(changed, plain)
    # A cache goes on as the whole text does.
    with attlas.intervene(model, [Ablate(layers=[key], heads=[1], value=0.5)]), torch.no_grad():
        whole = model(steps[:, :-1], use_cache=False).logits[:, TOKENS - 1 :]
    assert torch.equal(whole.argmax(-1), steps[:, TOKENS:])
    with attlas.intervene(model, [Ablate(layers=[key], heads=[1], queries=slice(4, 6))]), torch.no_grad():
        some = model(ids, use_cache=False).logits
    torch.testing.assert_close(some[:, :4], plain[:, :4])
    assert not torch.allclose(some[:, 4:], plain[:, 4:])


@pytest.mark.parametrize("kind", ["qwen3_next", "nemotron_h", "minimax"])
def test_pairs_of_linear_layers_are_suppressed(kind: str) -> None:
    model, ids = tiny(kind), tokens()
    with attlas.record(model, values=True) as atlas, outputs(model) as own, torch.no_grad():
        model(ids, use_cache=False)
    entry, replaced = atlas.entry(0), own[0].clone()
    dense = entry.need_matrix().to_dense()
    replaced[:, 1, 4:] -= dense[:, 1, 4:, 2:5] @ entry.values[:, 1, 2:5]
    with first_output(model, replaced), attlas.intervene(model, []), torch.no_grad():
        wanted = model(ids, use_cache=False).logits
    item = Suppress(layers=[0], heads=[1], queries=slice(4, None), keys=(2, 5))
    with attlas.intervene(model, item), torch.no_grad():
        torch.testing.assert_close(model(ids, use_cache=False).logits, wanted, rtol=1e-3, atol=1e-4)


@contextmanager
def first_output(model: nn.Module, wanted: Tensor) -> Iterator[None]:
    """Put an output in the place of what the heads of the first linear layer compute, shape (batch, heads, n, e)."""
    own = wanted.transpose(1, 2)
    if type(model).__name__.startswith("MiniMax"):
        norm = model.get_submodule("model.layers.0.self_attn.norm")
        hook = norm.register_forward_pre_hook(lambda _, args: (own.flatten(2),))
        yield
        hook.remove()
        return
    file, calls = importlib.import_module(type(model).__module__), []
    name = next(n for n in OF_HEADS if hasattr(file, n))
    original = getattr(file, name)

    def run(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        calls.append(result)
        if len(calls) > 1:
            return result
        return (own, *result[1:]) if isinstance(result, tuple) else own

    with mock.patch.object(file, name, run):
        yield


def test_what_cannot_be_changed_in_a_linear_layer_is_refused() -> None:
    model, ids = tiny("qwen3_next"), tokens()
    for item in (ScaleLogits(2.0, keys=0), Temperature(2.0), DetachWeights()):
        with pytest.raises(RecordingError, match="Ablate and Suppress alone change its output"):  # noqa: SIM117
            with attlas.intervene(model, item), torch.no_grad():
                model(ids)
    with attlas.intervene(model, Suppress(layers=[3], keys=0)), attlas.record(model) as atlas, torch.no_grad():
        model(ids)
    assert float(atlas[3][:, :, 1:, 0].abs().max()) == 0.0
    for item in (Ablate(layers=[0], queries=2), Suppress(layers=[0], keys=2)):
        with torch.no_grad(), pytest.raises(RecordingError, match="from the first token on"):  # noqa: SIM117
            with attlas.intervene(model, item):
                model.generate(ids, max_new_tokens=3, do_sample=False)
    with pytest.raises(OutOfRangeError, match="each head"), attlas.intervene(model, Ablate(heads={0: [4]})):
        model(ids)
    loss = []
    for chosen in ([Ablate(heads={0: [1]})], []):
        model.zero_grad()
        with attlas.intervene(model, chosen):
            model(ids, use_cache=False).logits.square().mean().backward()
        loss.append(model.get_submodule("model.layers.0.linear_attn.in_proj_ba").weight.grad.clone())
    assert not torch.allclose(loss[0], loss[1])


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
