"""A corpus as the tree of files that the front end of HeadVis reads."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np

from attlas.corpus.folder import Corpus, Sample
from attlas.corpus.sketch import edges_of
from attlas.errors import RecordingError, public
from attlas.foundation.files import save_text

_TEXTS_OF_HIGHEST, _TEXTS_OF_OTHERS = 10, 3  # texts of the highest interval, and of each other one
_HISTOGRAM_BARS = 50
_LAST_EDGE = 4096
# Their names, ours, and what they mean.
METRICS = {
    "self_attention_score": "self_attention_score",
    "prev_token_score": "prev_token_score",
    "pattern_entropy": "entropy",
    "qk_distance": "qk_distance",
    "qk_distance_variance": "qk_distance_variance",
    "induction_score": "induction_score",
}


@public("export")
def export_headvis(corpus: Corpus, folder: str | os.PathLike[str]) -> Path:
    """Write a corpus as the data tree of HeadVis.

    Parameters
    ----------
    corpus : Corpus
        What `attlas.load` opened.
    folder : str or Path
        Where to; it must not exist yet.

    Returns
    -------
    Path
        The folder.

    Raises
    ------
    RecordingError
        If there is something already.

    Notes
    -----
    Scores are sums over all texts divided by counts over all texts. Texts of an interval are those with the smallest
    hash under the seed of the corpus, and those with the largest weights in the highest interval.

    Examples
    --------
    >>> import tempfile, attlas
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> config = GPT2Config(vocab_size=20, n_positions=16, n_embd=8, n_layer=2, n_head=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     corpus = attlas.corpus(GPT2LMHeadModel(config), [[1, 2, 3, 1, 2]], f"{folder}/run")
    ...     tree = export_headvis(corpus, f"{folder}/tree")
    ...     sorted(path.name for path in (tree / "heads").iterdir())
    ['L0H0.json', 'L0H1.json', 'L1H0.json', 'L1H1.json']
    """
    target = Path(folder)
    if target.exists():
        raise RecordingError("the folder must be new.", str(target), "another folder.")
    (target / "heads").mkdir(parents=True)
    (target / "attributions").mkdir()
    hashes = {row["text"]: row["hash"] for row in corpus.texts().to_pylist()}
    scatter = []
    for layer, head in corpus.heads:
        numbers = corpus.head(layer, head).numbers
        scatter.append(
            {"layer": layer, "head": head} | {name: _number_or_none(numbers[ours]) for name, ours in METRICS.items()}
        )
        _write_json(target / "heads" / f"L{layer}H{head}.json", _headvis_head(corpus, layer, head, hashes))
    _write_json(target / "scatter_data.json", scatter)
    _write_json(target / "server_config.json", {})
    _write_json(target / "attributions" / "manifest.json", {})
    _write_json(target / "config.json", _headvis_config(corpus))
    return target


def _write_json(path: Path, what: Any) -> None:
    """Write plain data as JSON."""
    save_text(json.dumps(what, ensure_ascii=False, allow_nan=False), path)


def _number_or_none(x: float) -> float | None:
    """Return a number that JSON knows: null where nothing was measured, as induction where no token is repeated."""
    return None if np.isnan(x) else float(x)


def _headvis_config(corpus: Corpus) -> dict[str, Any]:
    """Return config.json as HeadVis reads it: what was measured, and how it is shown."""
    config = corpus.config
    model, counts = config["model"], config["counts"]
    return {
        "model_name": model["name"],
        "np_model_id": model["name"],
        "dataset_name": config["source"],
        "heads": [list(place) for place in corpus.heads],
        "n_layers": model["n_layers"],
        "n_heads": model["n_heads"],
        "n_intervals": config["n_intervals"],
        "metrics": list(METRICS),
        "metric_descriptions": {name: config["numbers"][ours]["definition"] for name, ours in METRICS.items()},
        "head_data_pattern": "L{layer}H{head}.json",
        "has_umap": False,
        "umap_heads": [],
        "custom_plots": [
            {"key": "qk_distance_histogram", "label": "Distance from query to key"},
            {"key": "histogram", "label": "Largest weight of each text"},
        ],
        "custom_tables": [
            {"key": "top_query_tokens", "label": "Query tokens"},
            {"key": "top_key_tokens", "label": "Key tokens"},
        ],
        "statistics_display": {
            "n_samples": {"label": "Texts kept", "format": "default"},
            "mean_max_activation": {"label": "Mean of the largest weight", "format": "default"},
        },
        "pipeline_config": {
            "made_by": f"attlas {config['attlas']}",
            **config["settings"],
            # Who puts runs into a database tells them apart by these.
            "n_sequences": counts["texts"],
            "seq_len": config["settings"]["length"],
            "dtype": model["dtype"],
            "attn_implementation": "attlas",
            "total_tokens": counts["tokens"],
            "actual_sequences_processed": counts["texts"],
            "num_hidden_layers": model["n_layers"],
            "num_attention_heads": model["n_heads"],
            "attention_layer_indices": model["layers"],
            "top_k": config["k"],
            "min_attention": config["least"],
        },
    }


def _headvis_head(corpus: Corpus, layer: int, head: int, hashes: dict[int, str]) -> dict[str, Any]:
    """Return the file of one head: its texts, distances and tokens; `hashes` are those of the texts by number."""
    page = corpus.head(layer, head)
    activation = page.distributions["max_activation"]
    chosen = _chosen_samples(corpus, corpus.samples(layer, head), hashes)
    return {
        "sequences": [_headvis_sequence(one) for one in chosen],
        "qk_distance_histogram": _binned_distances(page.distances, corpus.config["settings"]["length"]),
        **{
            f"top_{side}_tokens": [{"token": token, "weight": weight} for token, weight in page.tokens.get(side, [])]
            for side in ("query", "key")
        },
        "histogram": _histogram_of_texts(activation),
        "statistics": {"n_samples": len(chosen), "mean_max_activation": page.numbers["mean_max_activation"]},
    }


def _chosen_samples(corpus: Corpus, samples: list[Sample], hashes: dict[int, str]) -> list[Sample]:
    """Return the texts of each interval, the highest first."""
    highest = corpus.config["n_intervals"]
    found = [one for one in samples if one.interval == highest][:_TEXTS_OF_HIGHEST]
    for interval in range(highest - 1, 0, -1):
        inside = sorted((one for one in samples if one.interval == interval), key=lambda one: hashes[one.text])
        found += inside[:_TEXTS_OF_OTHERS]
    return found


def _headvis_sequence(sample: Sample) -> dict[str, Any]:
    """Return one text as HeadVis reads it; its kept cells are indices ``row * n + key`` of the flattened matrix."""
    n = len(sample.ids)
    rows, places = (sample.keys >= 0).nonzero()
    return {
        "sequence_id": sample.text,
        "interval": sample.interval,
        "tokens": sample.tokens,
        "attention_indices": (rows * n + sample.keys[rows, places]).tolist(),
        "attention_values": sample.weights[rows, places].tolist(),
        "seq_len": n,
        "max_activation": sample.max_activation,
    }


def _binned_distances(rows: list[dict[str, Any]], length: int) -> dict[str, Any]:
    """Return the kept weight by distance, in bins whose edges are powers of two up to the length of a text."""
    edges = [0, 1]
    while edges[-1] < max(length, _LAST_EDGE):
        edges.append(edges[-1] * 2)
    lower = [row["lower"] for row in rows]
    kept = [row["kept_weight"] for row in rows]
    values, _ = np.histogram(lower, edges, weights=kept)
    return {"bin_edges": edges, "bin_values": values.tolist()}


def _histogram_of_texts(activation: dict[str, Any]) -> dict[str, Any]:
    """Return how many texts have their largest weight in each of `_HISTOGRAM_BARS` bins of equal width."""
    edges = edges_of("unit")
    group = (len(edges) - 1) // _HISTOGRAM_BARS  # bins of the corpus that make up one
    middles = (np.array(activation["lower"]) + np.array(activation["upper"])) / 2
    values, _ = np.histogram(middles, edges[::group], weights=activation["count"])
    return {"bin_edges": edges[::group].tolist(), "bin_values": values.astype(int).tolist()}
