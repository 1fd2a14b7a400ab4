"""Steps of a generation and chunks of a prompt are one entry: q of each step and the final K once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.stats.definitions import diagonals
from torch import Tensor, nn

from attlas import stats
from attlas.recording import record
from attlas.recording.atlas import Atlas

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
NUMBERS = [stats.Entropy(), stats.ColumnMass(), stats.TopK(2), stats.Offsets()]
STEPS = 6


def generate(model: nn.Module, ids: Tensor, **options: Any) -> Tensor:
    return model.generate(ids, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False, **options)


def compare(atlas: Atlas, weights: tuple[Tensor, ...], kind: str = "self") -> None:
    """Compare matrices and statistics of an atlas with the weights of eager attention on the whole text."""
    assert atlas.layers(kind) == list(range(len(weights)))
    for layer, dense in enumerate(weights):
        entry = atlas.entry(f"{kind}.{layer}")
        if entry.matrix is not None:
            assert entry.matrix.shape == dense.shape
            torch.testing.assert_close(entry.matrix.to_dense(), dense, atol=1e-5, rtol=1e-4)
            assert entry.matrix.check() < 1e-5
        if not entry.statistics:
            continue
        entropy = torch.special.entr(dense).sum(-1)
        torch.testing.assert_close(entry.statistics["entropy"], entropy, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(entry.statistics["column_mass"], dense.sum(-2), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(entry.statistics["top_k"].values, dense.topk(2, -1).values, atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(entry.statistics["offsets"], diagonals(dense), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("keep", ["device", "cpu", "disk", "statistics"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_generation_is_one_entry(
    llama: nn.Module, ids: Tensor, eager: Callable[..., Any], keep: Any, cache: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run.atlas" if keep == "disk" else None
    with record(llama, statistics=NUMBERS, keep=keep, folder=folder) as atlas:
        options = {"cache_implementation": "static", "disable_compile": True} if cache == "static" else {}
        text = generate(llama, ids, **options)[:, :-1]
    assert llama.config._attn_implementation == "sdpa"
    assert len(atlas.entries) == 3
    assert torch.equal(atlas.ids, text)
    for entry in atlas.entries:
        assert (entry.queries, entry.first_key, entry.call) == ((0, 16), 0, 0)
        assert (entry.matrix is None) == (keep == "statistics")
        assert entry.shape == (2, 4, 16, 16)
    compare(atlas, eager(llama, text).attentions)
    if folder is not None:
        assert sorted(path.suffix for path in folder.iterdir())[0] == ".json"
        assert [path.name for path in tmp_path.iterdir()] == ["run.atlas"]


@pytest.mark.parametrize("keep", ["device", "statistics"])
def test_a_sliding_cache_is_put_together_again(
    mistral: nn.Module, ids: Tensor, eager: Callable[..., Any], keep: Any
) -> None:
    with record(mistral, statistics=NUMBERS, keep=keep) as atlas:
        text = generate(mistral, ids)[:, :-1]
    weights = eager(mistral, text, use_cache=False).attentions
    if len(atlas.entries) == 3:
        assert {entry.first_key for entry in atlas.entries} == {0}
        compare(atlas, weights)
        return
    # Where the mask does not say at which key a cache begins, each of its steps is an entry.
    assert len(atlas.entries) > 3
    entropy = torch.special.entr(weights[1][:, :, :11]).sum(-1)
    torch.testing.assert_close(atlas.entry((1, 0)).statistics["entropy"], entropy, atol=1e-4, rtol=1e-4)


def test_left_padding(llama: nn.Module, ids: Tensor, eager: Callable[..., Any]) -> None:
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    with record(llama) as atlas:
        text = generate(llama, ids, attention_mask=mask)[:, :-1]
    assert len(atlas.entries) == 3
    assert atlas[0].problem.mask.name() == "Causal(offset=0) & Padding([16, 12], side='left')"
    whole = torch.cat([mask, torch.ones(2, 5, dtype=mask.dtype)], dim=1)
    weights = eager(llama, text, attention_mask=whole, position_ids=(whole.cumsum(-1) - 1).clamp(min=0)).attentions
    for A, dense in zip(atlas, weights, strict=True):
        dense[1, :, :4] = 0.0  # queries that see no key: eager spreads their weight over all keys
        torch.testing.assert_close(A.to_dense(), dense, atol=1e-5, rtol=1e-4)


def test_a_prompt_in_chunks_is_one_entry(llama: nn.Module, ids: Tensor, eager: Callable[..., Any]) -> None:
    cache = transformers.DynamicCache(config=llama.config)
    with record(llama, statistics=NUMBERS) as atlas, torch.no_grad():
        for chunk in ids.split(4, dim=1):
            llama(chunk, past_key_values=cache)
    assert torch.equal(atlas.ids, ids)
    compare(atlas, eager(llama, ids).attentions)


def test_big_chunks_are_put_aside_on_disk(
    llama: nn.Module, ids: Tensor, eager: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("attlas.recording.disk._SMALL_ENTRY_BYTES", 1)
    monkeypatch.setattr("attlas.recording.disk._TAIL_BYTES", 1)
    cache = transformers.DynamicCache(config=llama.config)
    with record(llama, keep="disk", folder=tmp_path / "a") as atlas, torch.no_grad():
        for chunk in ids.split(3, dim=1):
            llama(chunk, past_key_values=cache)
    compare(atlas, eager(llama, ids).attentions)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_each_text_is_an_entry(llama: nn.Module, ids: Tensor, eager: Callable[..., Any]) -> None:
    with record(llama) as atlas, torch.no_grad():
        llama(ids)
        llama(ids)  # the same text again is another pass, and not one that goes on
        llama(ids[:, :5])
    assert [(e.layer, e.call, e.shape[2]) for e in atlas.entries] == [
        (layer, call, (11, 11, 5)[call]) for layer in range(3) for call in range(3)
    ]
    assert torch.equal(atlas.ids, ids[:, :5])
    torch.testing.assert_close(atlas[1].to_dense(), eager(llama, ids[:, :5]).attentions[1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("keep", ["device", "statistics"])
def test_keys_of_another_text_begin_a_new_entry(llama: nn.Module, ids: Tensor, keep: Any) -> None:
    cache = transformers.DynamicCache(config=llama.config)
    with record(llama, statistics=NUMBERS, keep=keep) as atlas, torch.no_grad():
        llama(ids[:, :6], past_key_values=cache)
        cache.layers[1].keys = cache.layers[1].keys.clone().index_fill_(2, torch.tensor([2]), 0.5)
        cache.reorder_cache(torch.tensor([0, 1]))
        llama(ids[:, 6:8], past_key_values=cache)
    assert [(e.layer, e.call, e.queries) for e in atlas.entries] == [
        (0, 0, (0, 8)),
        (1, 0, (0, 6)),
        (1, 1, (6, 8)),
        (2, 0, (0, 8)),
    ]
    assert atlas.entry(1).shape[2:] == (2, 8)


def test_beams(llama: nn.Module, ids: Tensor) -> None:
    with record(llama, layers=[0]) as atlas:
        answer = generate(llama, ids, num_beams=3, output_attentions=True, return_dict_in_generate=True)
    # Beams that were not reordered go on; every query of every step is in exactly one entry.
    assert [entry.queries[0] for entry in atlas.entries[1:]] == [entry.queries[1] for entry in atlas.entries[:-1]]
    steps = torch.cat([step[0].to_dense()[:, :, :1, :11] for step in answer.attentions[1:]], dim=2)
    rows = torch.cat([entry.matrix.to_dense()[..., :11] for entry in atlas.entries], dim=2)
    torch.testing.assert_close(rows[:, :, 11:], steps, atol=1e-6, rtol=1e-5)


def test_what_cannot_be_joined_is_kept_for_each_step(llama: nn.Module, ids: Tensor) -> None:
    numbers = [stats.Picture(1, 2), stats.Entropy()]
    with record(llama, statistics=numbers, keep="statistics", layers=[1]) as atlas:
        generate(llama, ids)
    assert [(e.call, e.shape[2], e.shape[3]) for e in atlas.entries] == [(0, 11, 11)] + [
        (i, 1, 11 + i) for i in range(1, 6)
    ]
    with record(llama, statistics=numbers, layers=[1]) as atlas:
        generate(llama, ids)
    (entry,) = atlas.entries
    for name, expected in zip(("picture", "entropy"), entry.matrix.collect(*numbers), strict=True):
        torch.testing.assert_close(entry.statistics[name], expected)


@pytest.mark.parametrize("keep", ["device", "statistics"])
def test_the_last_queries_of_a_prompt_and_each_step(
    llama: nn.Module, ids: Tensor, eager: Callable[..., Any], keep: Any
) -> None:
    with record(llama, queries=slice(-3, None), statistics=NUMBERS, keep=keep) as atlas:
        text = generate(llama, ids)[:, :-1]
    assert {entry.queries for entry in atlas.entries} == {(8, 16)}
    for entry, dense in zip(atlas.entries, eager(llama, text).attentions, strict=True):
        torch.testing.assert_close(entry.statistics["column_mass"], dense[:, :, 8:].sum(-2), atol=1e-4, rtol=1e-4)
        if keep == "device":
            torch.testing.assert_close(entry.matrix.to_dense(), dense[:, :, 8:], atol=1e-5, rtol=1e-4)


def test_queries_by_their_place_in_the_text(llama: nn.Module, ids: Tensor, eager: Callable[..., Any]) -> None:
    with record(llama, queries=range(9, 13)) as atlas:
        text = generate(llama, ids)[:, :-1]
    assert {entry.queries for entry in atlas.entries} == {(9, 13)}
    assert atlas[0].shape == (2, 4, 4, 13)
    dense = eager(llama, text).attentions[0]
    torch.testing.assert_close(atlas[0].to_dense(), dense[:, :, 9:13, :13], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("keep", ["device", "disk", "statistics"])
def test_encoder_and_decoder(
    bart: nn.Module, ids: Tensor, eager: Callable[..., Any], keep: Any, tmp_path: Path
) -> None:
    folder = tmp_path / "a" if keep == "disk" else None
    with record(bart, statistics=NUMBERS, keep=keep, folder=folder) as atlas:
        text = generate(bart, ids)[:, :-1]
    assert {kind: len(atlas.layers(kind)) for kind in atlas.kinds} == {"self": 3, "encoder": 2, "cross": 3}
    assert len(atlas.entries) == 8
    whole = eager(bart, ids, decoder_input_ids=text)
    compare(atlas, whole.decoder_attentions)
    compare(atlas, whole.encoder_attentions, "encoder")
    compare(atlas, whole.cross_attentions, "cross")
    assert atlas.entry("cross.1").name == "model.decoder.layers.1.encoder_attn"
    assert torch.equal(atlas.ids, text)


def test_the_same_question_asked_twice_is_two_passes(bart: nn.Module, ids: Tensor) -> None:
    with record(bart, layers=["cross.0"]) as atlas, torch.no_grad():
        bart(ids, decoder_input_ids=ids[:, :4])
        bart(ids, decoder_input_ids=ids[:, :4])
    assert [(e.call, e.queries) for e in atlas.entries] == [(0, (0, 4)), (1, (0, 4))]


def test_position_bias_is_an_entry_a_step(t5: nn.Module, ids: Tensor, eager: Callable[..., Any]) -> None:
    with record(t5) as atlas:
        text = generate(t5, ids)[:, :-1]
    whole = eager(t5, ids, decoder_input_ids=text)
    compare(atlas, whole.encoder_attentions, "encoder")
    for layer, dense in enumerate(whole.decoder_attentions):
        rows = [entry for entry in atlas.entries if entry.path == f"self.{layer}"]
        for entry in rows:
            first, last = entry.queries
            expected = dense[:, :, first:last, : entry.shape[3]]
            torch.testing.assert_close(entry.matrix.to_dense(), expected, atol=1e-5, rtol=1e-4)
        assert sum(entry.shape[2] for entry in rows) == text.shape[1]


def test_steps_with_a_position_bias_are_joined_in_the_table(t5: nn.Module, ids: Tensor) -> None:
    """The rows of its entries say what those of one pass over the whole text say."""
    with record(t5, statistics=NUMBERS[:2]) as atlas:
        text = generate(t5, ids)[:, :-1]
    with record(t5, statistics=NUMBERS[:2]) as whole, torch.no_grad():
        t5(input_ids=ids, decoder_input_ids=text)
    joined, wanted = atlas.table(join_steps=True), whole.table()
    assert len(joined) == len(wanted) < len(atlas.table())
    for record_of_head, numbers in zip(joined, wanted, strict=True):
        for name, number in numbers.items():
            approximately = pytest.approx(number, abs=1e-4) if isinstance(number, float) else number
            assert record_of_head[name] == approximately, name


@pytest.mark.parametrize("keep", ["statistics", "device"])
@pytest.mark.parametrize("padded", [False, True])
def test_pictures_of_a_static_cache_have_the_keys_in_use(
    llama: nn.Module, ids: Tensor, padded: bool, keep: Any
) -> None:
    """Its room for more keys is no part of a step, which is an entry of its own where only pictures are kept."""
    found = []
    mask = torch.ones_like(ids)
    mask[0, :3] = int(not padded)
    for static in (True, False):
        room = transformers.StaticCache(config=llama.config, max_cache_len=30)
        cache = room if static else transformers.DynamicCache(config=llama.config)
        with record(llama, keep=keep, statistics=[stats.Picture(1, 4)]) as atlas, torch.no_grad():
            llama(ids, attention_mask=mask, past_key_values=cache)
            if not padded:
                llama(ids[:, :1], past_key_values=cache)
        found.append({(entry.path, entry.call, entry.shape): entry.statistics["picture"] for entry in atlas.entries})
    assert len(found[0]) == 3 * (2 if keep == "statistics" and not padded else 1)
    torch.testing.assert_close(found[0], found[1], equal_nan=True)
