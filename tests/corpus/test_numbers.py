"""The numbers of a corpus against a dense computation in float64 that knows nothing of attlas."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.messages import refusal

import attlas
from attlas import heads
from attlas.corpus import Corpus, repeats
from attlas.corpus.measuring import measure_layer
from attlas.corpus.numbers import COUNTS, SUMS
from attlas.errors import ShapeError

pytest.importorskip("pyarrow", reason="pyarrow is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

VOCABULARY = 12


def tiny(kind: str = "gpt2", **further: Any) -> torch.nn.Module:
    """Return a model whose heads attend to some keys much more than to others."""
    torch.manual_seed(1)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY, n_positions=64, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
        config = transformers.MistralConfig(
            vocab_size=VOCABULARY, num_key_value_heads=2, max_position_embeddings=64, **sizes, **further
        )
        model = transformers.MistralForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0 if parameter.ndim > 1 else 1.0)
    return model.double().eval()


def texts() -> list[list[int]]:
    """Return texts with many repeated tokens, of several lengths."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in (2, 40, 64, 64, 9, 23)]


def dense(model: torch.nn.Module, ids: list[int]) -> list[np.ndarray]:
    """Return the weights of every layer as eager attention computes them, (heads, n, n)."""
    model.set_attn_implementation("eager")
    with torch.no_grad():
        found = model(torch.tensor([ids]), output_attentions=True, use_cache=False).attentions
    return [weights[0].double().numpy() for weights in found]


class Oracle:
    """Every number of a head over all texts, by its definition, cell by cell."""

    def __init__(self, model: torch.nn.Module, corpus: list[list[int]]) -> None:
        self.rows: dict[tuple[int, int], dict[str, list[float]]] = {}
        self.activations: dict[tuple[int, int], list[float]] = {}
        for ids in corpus:
            for layer, weights in enumerate(dense(model, ids)):
                for head, A in enumerate(weights):
                    self._text(self.rows.setdefault((layer, head), {}), A, ids)
                    own = A[1:, 1:].max(initial=0.0)
                    self.activations.setdefault((layer, head), []).append(own)

    @staticmethod
    def _text(rows: dict[str, list[float]], A: np.ndarray, ids: list[int]) -> None:
        for i, row in enumerate(A):
            seen = [j for j in range(len(ids)) if row[j] > 0]
            entropy = -sum(row[j] * math.log(row[j]) for j in seen)
            copies = [j for j in range(i) if ids[j] == ids[i]]
            found = {
                "entropy": entropy,
                "effective_keys": 1 / sum(row[j] ** 2 for j in seen),
                "max_weight": max(row),
                "self_attention_score": row[i],
            }
            if i:
                found["prev_token_score"] = row[i - 1]
            if copies:
                found["induction_score"] = sum(row[j + 1] for j in copies if row[j + 1] >= 0.01)
            targets = {
                "current": [i],
                "previous": [i - 1],
                "near": [j for j in seen if abs(i - j) < heads.NEAR],
                "first": [0],
                "induction_text": [j + 1 for j in copies],
                "duplicate_text": copies,
            }
            for name, keys in targets.items():
                visible = [j for j in keys if j in seen]
                if visible and len(seen) > len(visible):
                    found[name] = sum(row[j] for j in visible)
            if len(seen) > 1:
                found["breadth"] = min(found["effective_keys"] / len(seen), 1.0)
            for name, value in found.items():
                rows.setdefault(name, []).append(value)
            rows.setdefault("distances", []).extend((abs(i - j), row[j]) for j in seen)

    def of(self, layer: int, head: int) -> dict[str, float]:
        """Return the numbers of a head."""
        rows = dict(self.rows[layer, head])
        distances, weights = (np.array(x) for x in zip(*rows.pop("distances"), strict=True))
        mean = float((distances * weights).sum() / weights.sum())
        found = {name: float(np.mean(values)) for name, values in rows.items()}
        found |= {
            "qk_distance": mean,
            "qk_distance_variance": float((distances**2 * weights).sum() / weights.sum() - mean**2),
        }
        activations = self.activations[layer, head]
        return found | {"mean_max_activation": float(np.mean(activations)), "max_activation": max(activations)}


@pytest.fixture(params=["gpt2", "full", "sliding"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[torch.nn.Module, Corpus]]:
    """Give a model and its corpus: own keys for each head, shared keys, and a window of 24 keys."""
    model = (
        tiny()
        if request.param == "gpt2"
        else tiny("mistral", sliding_window=24 if request.param == "sliding" else None)
    )
    found = attlas.corpus(model, texts(), tmp_path / "corpus", batch=2)
    assert found is not None
    return model, found


def test_numbers_equal_a_dense_computation(made: tuple[torch.nn.Module, Corpus]) -> None:
    model, corpus = made
    oracle = Oracle(model, texts())
    assert refusal(ShapeError, lambda: corpus.table("json")) == "table(): kind = 'json'"
    table = corpus.table().set_index(["layer", "head"])
    assert len(table) == len(oracle.rows) >= 4
    for place, row in table.iterrows():
        for name, value in oracle.of(*place).items():
            assert row[name] == pytest.approx(value, abs=1e-6, rel=1e-6), (place, name)


def test_distances_and_tokens_equal_a_dense_computation(made: tuple[torch.nn.Module, Corpus]) -> None:
    model, corpus = made
    sums = {place: np.zeros(64) for place in corpus.heads}
    kept = {place: np.zeros(64) for place in corpus.heads}
    tokens = {(place, side): np.zeros(VOCABULARY) for place in corpus.heads for side in ("query", "key", "key_mass")}
    for ids in texts():
        for layer, weights in enumerate(dense(model, ids)):
            for head, A in enumerate(weights):
                for i, row in enumerate(A):
                    top = {j for j in np.argsort(-row)[:8] if row[j] >= 0.005}
                    for j, weight in enumerate(row):
                        sums[layer, head][abs(i - j)] += weight
                        tokens[(layer, head), "key_mass"][ids[j]] += weight * (j > 0)
                        if j in top:
                            kept[layer, head][abs(i - j)] += weight
                            tokens[(layer, head), "query"][ids[i]] += weight
                            tokens[(layer, head), "key"][ids[j]] += weight
    for place in corpus.heads:
        page = corpus.head(*place)
        by_distance = {row["lower"]: (row["weight"], row["kept_weight"]) for row in page.distances}
        assert all(row["upper"] == row["lower"] + 1 for row in page.distances)
        for distance in range(64):
            weight, some = by_distance.get(distance, (0.0, 0.0))
            assert weight == pytest.approx(sums[place][distance], abs=1e-6)
            assert some == pytest.approx(kept[place][distance], abs=1e-5)  # kept weights are float32
        for side in ("query", "key", "key_mass"):
            found = dict(page.tokens[side])
            for token, weight in enumerate(tokens[place, side]):
                assert found.get(f"#{token}", 0.0) == pytest.approx(weight, abs=1e-5)


def test_samples_are_the_largest_keys(made: tuple[torch.nn.Module, Corpus]) -> None:
    model, corpus = made
    for place in corpus.heads:
        samples = corpus.samples(*place)
        assert {sample.text for sample in samples} == set(range(len(texts())))
        for sample in samples:
            A = dense(model, sample.ids)[place[0]][place[1]]
            assert sample.ids == texts()[sample.text]
            assert sample.max_activation == pytest.approx(A[1:, 1:].max(initial=0), abs=1e-6)
            for i, (keys, weights) in enumerate(zip(sample.keys, sample.weights, strict=True)):
                best = [w for w in sorted(A[i], reverse=True)[:8] if w >= 0.005]
                assert weights[: len(best)] == pytest.approx(best, abs=1e-6)
                assert (keys[len(best) :] == -1).all()
                assert A[i][keys[: len(best)]] == pytest.approx(best, abs=1e-6)


def test_scores_are_those_of_heads(tmp_path: Path) -> None:
    """On one text the pooled scores are what `attlas.heads.scores` gives."""
    model, ids = tiny(), texts()[2]
    corpus = attlas.corpus(model, [ids], tmp_path / "corpus")
    assert corpus is not None
    model.set_attn_implementation("attlas")
    with torch.no_grad():
        attentions = model(torch.tensor([ids]), output_attentions=True).attentions
    table = corpus.table()
    names = {"current": "current_token", "previous": "previous_token", "near": "local", "first": "first_token"}
    names |= {"breadth": "broad", "induction_text": "induction", "duplicate_text": "duplicate_token"}
    for layer, A in enumerate(attentions):
        scores = heads.scores(A, torch.tensor(ids))
        favourite = A.collect(heads.FavouriteToken(torch.tensor(ids)))[0][0]
        rows = table[table["layer"] == layer]
        for name, score in names.items():
            np.testing.assert_allclose(rows[name], scores[score][0], atol=1e-9)
        np.testing.assert_allclose(rows["favourite"], favourite, atol=1e-9)


@pytest.mark.parametrize("score", [attlas.SoftCap(attlas.ScaledDot(), 2.0), attlas.Alibi([0.5, 0.1])])
def test_other_scores_count_the_same_copies(score: attlas.Score) -> None:
    ids = torch.tensor([texts()[1]])
    q, k = torch.randn(2, 1, 2, 40, 8, dtype=torch.float64)
    A = attlas.attend(q, k, score=score, mask=attlas.Causal())
    found = measure_layer(A, ids)[0]
    sums = dict(zip(SUMS, found.sums.T, strict=True))
    counts = dict(zip(COUNTS, found.counts, strict=True))
    expected = heads.induction(A, ids), heads.duplicate_token(A, ids)
    for name, mean in zip(("induction_text", "duplicate_text"), expected, strict=True):
        np.testing.assert_allclose(sums[name] / counts[name], mean[0], atol=1e-12)
    dense_weights, same = A.to_dense()[0].numpy(), ids[0].numpy()
    large = [
        sum(W[i, j + 1] for i in range(40) for j in range(i) if same[i] == same[j] and W[i, j + 1] >= 0.01)
        for W in dense_weights
    ]
    np.testing.assert_allclose(sums["induction"], large, atol=1e-12)


def test_a_mask_with_two_runs_of_keys_is_refused() -> None:
    q = torch.randn(1, 1, 16, 8)
    A = attlas.attend(q, q, mask=attlas.Dilated(6, 0, 2))
    with pytest.raises(attlas.RecordingError, match="one run of keys"):
        measure_layer(A, torch.zeros(1, 16, dtype=torch.int64))


@pytest.mark.parametrize("mask", [attlas.Causal(), attlas.Window(9, 0)])
def test_few_cells_at_once_give_the_same(mask: attlas.Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that stand alone in a block or with others, and blocks that are cut by rows."""
    ids = torch.tensor([[*texts()[1], *[3] * 20, *texts()[1]]])
    q, k = torch.randn(2, 1, 2, 100, 8, dtype=torch.float64)
    A = attlas.attend(q, k, mask=mask)
    found = measure_layer(A, ids)[0]
    for sizes, cells, rows in ((4,), 64, 1), ((8, 16), 64, 3), ((2, 32), 4096, 16), ((64,), 1 << 20, 16):
        monkeypatch.setattr(repeats, "_BLOCK_SIZES", sizes)
        monkeypatch.setattr(repeats, "_CELLS_AT_ONCE", cells)
        monkeypatch.setattr(repeats, "_LEAST_ROWS_AT_ONCE", rows)
        again = measure_layer(A, ids)[0]
        np.testing.assert_allclose(again.sums, found.sums, atol=1e-12)
        np.testing.assert_array_equal(again.counts, found.counts)
    expected = heads.induction(A, ids)[0]
    sums, counts = (dict(zip(names, x.T, strict=True)) for names, x in ((SUMS, found.sums), (COUNTS, found.counts)))
    np.testing.assert_allclose(sums["induction_text"] / counts["induction_text"], expected, atol=1e-12)
