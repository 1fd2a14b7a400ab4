"""The tree of HeadVis against dense eager attention, number by number, by the definitions of its facts."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import attlas
from attlas import models
from attlas.corpus import sketch
from attlas.corpus.headvis import METRICS, export_headvis
from attlas.corpus.sampling import Samples, hash_of
from attlas.corpus.tables import _intervals_of_texts

TOKENS = 192


@pytest.fixture(scope="module")
def dense() -> dict[str, Any]:
    """Give the shipped model in float64, texts of 192, 100 and 60 tokens, and their weights by eager attention."""
    transformers = pytest.importorskip("transformers")
    model = transformers.GPT2LMHeadModel.from_pretrained(models.path(), attn_implementation="eager").double().eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(models.path())
    ids = tokenizer(Path(json.__file__).read_text(encoding="utf-8"))["input_ids"]
    texts = [ids[:TOKENS], ids[1000:1100], ids[1100:1200], ids[1200:1260]]
    with torch.no_grad():
        weights = [model(torch.tensor([t]), output_attentions=True, use_cache=False).attentions for t in texts]
    heads = {(layer, h): [w[layer][0, h].numpy() for w in weights] for layer in range(4) for h in range(6)}
    return {"model": model, "tokenizer": tokenizer, "texts": texts, "heads": heads}


@pytest.fixture(scope="module")
def corpus(dense: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder, options = tmp_path_factory.mktemp("headvis") / "run", {"length": TOKENS, "batch": 2}
    return attlas.corpus(dense["model"], dense["texts"], folder, tokenizer=dense["tokenizer"], **options)


@pytest.fixture(scope="module")
def tree(corpus: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the exported tree."""
    return export_headvis(corpus, tmp_path_factory.mktemp("headvis") / "tree")


def kept(A: np.ndarray) -> dict[tuple[int, int], float]:
    """Return the kept cells: at most 8 keys of a row, none below 0.005."""
    best = np.argsort(-A, axis=1)[:, :8]
    return {(i, j): A[i, j] for i, row in enumerate(best) for j in row if A[i, j] >= 0.005}


def test_scatter(tree: Path, corpus: Any) -> None:
    """The numbers are those of the corpus, which tests/corpus/test_numbers.py holds to their definitions."""
    rows, table = json.loads((tree / "scatter_data.json").read_text()), corpus.table()
    ours = {name: name.replace("pattern_entropy", "entropy") for name in METRICS}
    for name, same in {"layer": "layer", "head": "head", **ours}.items():
        assert [row[name] for row in rows] == table[same].tolist()
    assert len(ours) == 6


def test_what_was_not_measured_is_null(dense: dict[str, Any], tmp_path: Path) -> None:
    """No token of these texts occurs twice: 0 would say that the heads do not copy."""
    texts = [list(range(start, start + 20)) for start in (100, 200, 300)]
    corpus = attlas.corpus(dense["model"], texts, tmp_path / "run")
    assert corpus is not None
    rows = json.loads((export_headvis(corpus, tmp_path / "tree") / "scatter_data.json").read_text())
    assert {row["induction_score"] for row in rows} == {None}
    assert all(isinstance(row[name], float) for row in rows for name in METRICS if name != "induction_score")


def test_samples_are_those_that_were_kept(dense: dict[str, Any], tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    texts = torch.randint(100, (50, 6), generator=generator).tolist()
    corpus = attlas.corpus(dense["model"], texts, tmp_path / "run")
    assert corpus is not None
    tree = export_headvis(corpus, tmp_path / "tree")
    for layer, head in corpus.heads:
        data = json.loads((tree / "heads" / f"L{layer}H{head}.json").read_text())
        intervals = Counter(one["interval"] for one in data["sequences"])
        assert intervals == {5: 10, 4: 3, 3: 3, 2: 3, 1: 3}
        assert data["statistics"]["n_samples"] == 22
        assert sum(data["histogram"]["bin_values"]) == 50
    assert json.loads((tree / "config.json").read_text())["statistics_display"]["n_samples"]["label"] == "Texts kept"


def true_intervals(activations: np.ndarray) -> np.ndarray:
    """Return the fifth of the texts that each text belongs to, by its rank."""
    ranks = np.empty(len(activations), dtype=int)
    ranks[np.argsort(activations, kind="stable")] = np.arange(1, len(activations) + 1)
    return np.ceil(ranks * 5 / len(activations)).astype(int)


@pytest.mark.parametrize("name", ["even", "near 1", "all 1", "two values", "few"])
def test_intervals_divide_every_head(name: str) -> None:
    """By rank, also where all of the largest weights are in one bin of their distribution, or one number."""
    draw = np.random.default_rng(3)
    activations = {
        "even": draw.random(2000),
        "near 1": 1 - draw.random(2000) * 1e-6,
        "all 1": np.ones(2000),
        "two values": draw.choice([0.25, 1.0], 2000),
        "few": draw.random(12),
    }[name]
    samples, counts = Samples(1, 32, 10), np.zeros(sketch.SIZE, dtype=np.int32)
    np.add.at(counts, sketch.bin_of(activations, "unit"), 1)
    for text, activation in enumerate(activations):
        samples.add(text, int(draw.integers(1 << 62)), np.array([activation]))
    sampled = samples.of_head(0)
    found = np.array(_intervals_of_texts(counts, [(activation, largest) for *_, activation, largest in sampled]))
    assert (np.diff(found) <= 0).all(), "the largest first"
    largest = np.array([is_largest for *_, is_largest in sampled])
    assert (found[largest] == 5).all() or name == "few"
    if name == "few":
        np.testing.assert_array_equal(found, true_intervals(activations)[[text for text, *_ in sampled]])
    else:
        least = 1 if name == "two values" else 3  # of which half of the drawn texts of 1 are among the largest
        assert all((found[~largest] == interval).sum() >= least for interval in (1, 2, 3, 4))
    if name == "even":
        assert np.abs(found - true_intervals(activations)[[text for text, *_ in sampled]]).max() == 0


def test_heads(tree: Path, dense: dict[str, Any]) -> None:
    decode = dense["tokenizer"].decode
    for (layer, head), weights in dense["heads"].items():
        data = json.loads((tree / "heads" / f"L{layer}H{head}.json").read_text())
        cells = [kept(A) for A in weights]
        edges = data["qk_distance_histogram"]["bin_edges"]
        assert edges == [0, *(2**i for i in range(13))]
        bars, queries, keys = np.zeros(len(edges) - 1), {}, {}
        for some, ids in zip(cells, dense["texts"], strict=True):
            for (i, j), weight in some.items():
                bars[0 if i == j else int(math.log2(abs(i - j))) + 1] += weight
                for side, at in ((queries, i), (keys, j)):
                    token = decode([ids[at]])
                    side[token] = side.get(token, 0.0) + weight
        np.testing.assert_allclose(data["qk_distance_histogram"]["bin_values"], bars, atol=1e-5)
        for name, side in (("top_query_tokens", queries), ("top_key_tokens", keys)):
            assert len(data[name]) == min(50, len(side))
            largest = sorted(side.values(), reverse=True)[: len(data[name])]
            np.testing.assert_allclose([row["weight"] for row in data[name]], largest, rtol=1e-6)
            for row in data[name]:
                assert row["weight"] == pytest.approx(side[row["token"]], rel=1e-6)
        activations = [A[1:, 1:].max() for A in weights]
        counts, _ = np.histogram(activations, np.linspace(0, 1, 51))
        assert data["histogram"]["bin_edges"] == pytest.approx(np.linspace(0, 1, 51).tolist())
        assert data["histogram"]["bin_values"] == counts.tolist()
        assert data["statistics"] == {"n_samples": 4, "mean_max_activation": pytest.approx(np.mean(activations))}
        assert sorted(one["sequence_id"] for one in data["sequences"]) == [0, 1, 2, 3]
        for one in data["sequences"]:
            _check_sequence(one, cells[one["sequence_id"]], dense["texts"][one["sequence_id"]], decode)
            assert one["max_activation"] == pytest.approx(activations[one["sequence_id"]], abs=1e-6)
        top = max(data["sequences"], key=lambda one: one["max_activation"])
        assert top["interval"] == 5


def _check_sequence(one: dict[str, Any], cells: dict[tuple[int, int], float], ids: list[int], decode: Any) -> None:
    assert one["seq_len"] == len(ids)
    assert one["tokens"] == [decode([number]) for number in ids]
    found = dict(zip(one["attention_indices"], one["attention_values"], strict=True))
    expected = {i * len(ids) + j: weight for (i, j), weight in cells.items()}
    different = found.keys() ^ expected.keys()
    assert len(different) <= len(expected) // 1000, "ties and weights at the threshold only"
    for cell in found.keys() & expected.keys():
        assert found[cell] == pytest.approx(expected[cell], abs=1e-6)


def test_config(tree: Path) -> None:
    config = json.loads((tree / "config.json").read_text())
    assert config["metrics"] == list(METRICS) == list(config["metric_descriptions"])
    assert (config["n_layers"], config["n_heads"], len(config["heads"])) == (4, 6, 24)
    assert config["head_data_pattern"] == "L{layer}H{head}.json"
    # What the importers of Neuronpedia ask for: of the pipeline, or else of the whole, and none may be null.
    pipeline = config | config["pipeline_config"]
    assert {name: pipeline[name] for name in ("model_name", "dtype", "attn_implementation")} == {
        "model_name": "python-gpt2",
        "dtype": "float64",
        "attn_implementation": "attlas",
    }
    assert (pipeline["n_sequences"], pipeline["seq_len"], pipeline["dataset_name"]) == (4, TOKENS, "list")
    assert config["pipeline_config"].keys() >= {"n_sequences", "seq_len", "attn_implementation"}
    assert config["pipeline_config"]["actual_sequences_processed"] == 4
    assert config["pipeline_config"]["attention_layer_indices"] == [0, 1, 2, 3]
    assert json.loads((tree / "server_config.json").read_text()) == {}
    assert json.loads((tree / "attributions" / "manifest.json").read_text()) == {}


def test_intervals_and_samples(model: torch.nn.Module, tmp_path: Path) -> None:
    """The highest interval has the ten largest texts exactly; each other one three with the smallest hash."""
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(12, (12,), generator=generator).tolist() for _ in range(120)]
    corpus = attlas.corpus(model, texts, tmp_path / "run", samples=60, seed=3, batch=40)
    assert corpus is not None
    tree = export_headvis(corpus, tmp_path / "tree")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        weights = model(torch.tensor(texts), output_attentions=True).attentions
    hashes = [hash_of(np.array(ids), 3) for ids in texts]
    random = sorted(range(120), key=lambda text: hashes[text])[:60]
    for layer, head in corpus.heads:
        largest = weights[layer][:, head, 1:, 1:].amax((1, 2))
        best = largest.argsort(descending=True)[:10].tolist()
        assert {s.text for s in corpus.samples(layer, head)} == {*random, *best}
        sequences = json.loads((tree / "heads" / f"L{layer}H{head}.json").read_text())["sequences"]
        assert {one["sequence_id"] for one in sequences if one["interval"] == 5} == set(best)
        for interval in range(1, 5):
            inside = [one["max_activation"] for one in sequences if one["interval"] == interval]
            assert len(inside) == 3
            # The share of texts below, up to the width of a bin of the sketch.
            low, high = (torch.quantile(largest, share / 5).item() for share in (interval - 1, interval))
            assert all(low - 1e-3 <= value <= high + 1e-3 for value in inside)
