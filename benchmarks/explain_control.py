"""An induction head without one earlier head in its keys: its weights over induction cells, for every earlier head.

Run with ``python benchmarks/explain_control.py``: some minutes on two cores. The shipped model reads 1,500 tokens of
Python's own `string.py`. A cell counts where an earlier copy of the query's token precedes the key, and both induction
heads give it more than 0.35. `RemovePart` takes one head of layer 0 out of the keys of an induction head: the writer,
head 0·0, and as controls all others of its layer. One of these is drawn by chance, with a seed that was set before the
numbers were seen. What `explain(...).without(...)` predicts is
computed for all cells at once, and compared with it in one.
"""

from __future__ import annotations

import argparse
import inspect
import random
import string
from typing import Any

import torch
import transformers
from torch import Tensor

import attlas
import attlas.models
from attlas import heads
from attlas.interventions import RemovePart
from harness import save

TOKENS, LEAST, TARGETS, WRITER, SEED = 1500, 0.35, ((2, 4), (3, 2)), 0, 0


def predicted(atlas: attlas.Atlas, layer: int, head: int, source: str) -> Tensor:
    """Return the weights of a head, (n, n), without one part of its keys, with norms that keep their scales."""
    why = heads.explain(atlas, layer, head, cell=(-1, 0))
    part = why._located.key.one([part.name for part in why.key_parts].index(source))
    lost = why.factor * atlas[layer].problem.q[0, head] @ part.mT
    weights = (atlas[layer][0, head].logits.to_dense() - lost).softmax(-1)
    expected = why.without(source).weight
    assert abs(float(weights[-1, 0]) - expected) <= 1e-4 * max(expected, 1e-2)
    return weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    torch.set_num_threads(2)
    torch.set_grad_enabled(False)
    model = attlas.nn.GPT2.from_pretrained(attlas.models.path()).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(attlas.models.path())
    ids = tokenizer(inspect.getsource(string), return_tensors="pt").input_ids[:, :TOKENS]
    with attlas.record(model, parts=True) as atlas:
        model(ids)
    least = torch.stack([atlas[layer][0, head].to_dense() for layer, head in TARGETS]).amin(0)
    found = [(i, j) for i, j in (least > LEAST).nonzero().tolist() if 1 <= j <= i - 3 and ids[0, j - 1] == ids[0, i]]
    i, j = torch.tensor(found).T
    sources = range(model.config.n_head)
    drawn = random.Random(SEED).choice([head for head in sources if head != WRITER])
    results: dict[str, Any] = {"tokens": ids.shape[1], "cells": len(found), "seed": SEED, "drawn": f"head 0·{drawn}"}
    for layer, head in TARGETS:
        before = atlas[layer][0, head].to_dense()[i, j]
        without: dict[str, dict[str, float]] = {}
        for source in (f"head 0·{number}" for number in sources):
            removal = RemovePart(source, target=(layer, head))
            with attlas.intervene(model, removal), attlas.record(model, layers=[layer]) as changed:
                model(ids)
            without[source] = {
                "weight": float(changed[layer][0, head].to_dense()[i, j].mean()),
                "predicted": float(predicted(atlas, layer, head, source)[i, j].mean()),
            }
            print(
                f"head {layer}·{head}, weight {float(before.mean()):.3f}, without {source}: {without[source]}",
                flush=True,
            )
        controls = [one["weight"] for source, one in without.items() if source != f"head 0·{WRITER}"]
        results[f"head {layer}·{head}"] = {
            "mean weight": float(before.mean()),
            "without": without,
            "controls": {"mean": sum(controls) / len(controls), "least": min(controls), "largest": max(controls)},
        }
    save("explain_control", results)


if __name__ == "__main__":
    main()
