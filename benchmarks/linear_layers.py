"""Every type of linear attention layer of transformers that attlas hears: how far `A @ v` is from what it computes.

Run with ``python benchmarks/linear_layers.py``, or ``--only mamba,minimax``: one to two minutes. Each type is built
small and random, and recorded in evaluation and training mode, with padding on the left, and generating with a cache.
The section of `results/sweep.md` about these layers is written anew; `sweep.py` keeps it.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

import attlas
from attlas.recording.atlas import Entry
from harness import RESULTS, save

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.linear_models import CHANNELS, MODELS, of_layers, outputs, tiny

MODES = ("eval", "training", "padded", "generating")
BATCH, TOKENS, MISSING, STEPS = 2, 45, 9, 5
LIMIT = 1e-6
MARK = "## Layers of linear attention"
#: Why a layer of transformers itself is further than 1e-6 from its definition.
REASON = "transformers subtracts sums of logarithms in float32"


def measure(kind: str, mode: str) -> dict[str, float]:
    """Return the largest error of the layers of a model, relative to the largest number of the layer."""
    if mode == "generating" and kind == "glm5_next_text":  # it has no head
        return {}
    model = tiny(kind).train(mode == "training")
    batch = 1 if kind == "rwkv" and mode == "generating" else BATCH  # its steps mix the texts of a batch
    ids = torch.randint(3, 90, (batch, TOKENS), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :MISSING] = mode != "padded"
    given: dict[str, Any] = {"input_ids": ids} if kind == "rwkv" else {"input_ids": ids, "attention_mask": mask}
    exact: list[Tensor] | None = [] if mode == "eval" and kind != "minimax" else None
    options = {"channels": slice(None)} if kind in CHANNELS else {}
    with outputs(model, exact) as found, attlas.record(model, values=True, **options) as atlas, torch.no_grad():
        if mode == "generating":
            model.generate(**given, max_new_tokens=STEPS, do_sample=False)
        else:
            model(**given, use_cache=False)
    model.eval()
    entries = [entry for entry in atlas.entries if entry.is_linear or kind == "rwkv"]
    layers = of_layers(kind, found)
    numbers = {"error": largest(entries, layers)}
    if exact:
        true = of_layers(kind, exact)
        numbers |= {"to float64": largest(entries, true), "layer to float64": distance(layers, true)}
    return numbers | {"layers": len(entries)}


def largest(entries: list[Entry], wanted: list[Tensor]) -> float:
    """Return the largest distance of weights times values from outputs."""
    return distance([entry.need_matrix() @ entry.values for entry in entries], wanted)


def distance(found: list[Tensor], wanted: list[Tensor]) -> float:
    """Return the largest difference of tensors, relative to the largest number of each."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True))


def row(kind: str) -> dict[str, Any]:
    """Return a row of the table."""
    found: dict[str, Any] = {"type": kind, "matrix of each": "channel" if kind in CHANNELS else "head"}
    for mode in MODES:
        numbers = measure(kind, mode)
        if mode == "eval":
            found |= {name: value for name, value in numbers.items() if name != "error"}
        found[mode] = numbers.get("error")
    return found


HEAD = f"""{MARK}

transformers {{version}}. Each type is built small and random, {TOKENS} tokens, {MISSING} of them padding where padded,
{STEPS} steps generated; `benchmarks/linear_layers.py` says how. Numbers are ``|A v - o|`` in float32, relative to the
largest number of o, the worst of all layers: o is what the layer computes before its norm and output gate. *A v to
float64* and *layer to float64* are the distances of both from the layer's own function in float64: where the layer is
further than {LIMIT:.0e}, {REASON}. Steps of `rwkv` are those of one text, since
transformers mixes the texts of a batch there; it takes no mask. `glm5_next_text` has no head, and generates nothing.

"""


def table(rows: list[dict[str, Any]]) -> str:
    """Return the section of Markdown."""
    names = ("type", "matrix of each", "layers", *MODES, "to float64", "layer to float64")
    titles = ["A v to float64" if name == "to float64" else name for name in names]
    lines = ["| " + " | ".join(titles) + " |", "| --- " * len(names) + "|"]
    for one in rows:
        cells = [one.get(name) for name in names]
        texts = ["" if x is None else f"{x:.0e}" if isinstance(x, float) else str(x) for x in cells]
        lines.append("| " + " | ".join(texts) + " |")
    return HEAD.format(version=transformers.__version__) + "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="types, divided by commas")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    rows = []
    for kind in options.only.split(",") if options.only else MODELS:
        rows.append(row(kind))
        print(json.dumps(rows[-1]), flush=True)
    if not options.only:
        save("linear_layers", rows)
        page = RESULTS / "sweep.md"
        text, _, _ = page.read_text(encoding="utf-8").partition(MARK)
        page.write_text(f"{text.rstrip()}\n\n{table(rows)}", encoding="utf-8")
    # A layer may be as far from the weights as it is from its own definition.
    wrong = [
        one["type"]
        for one in rows
        if max(one[mode] or 0.0 for mode in MODES) > LIMIT and one.get("to float64", 1.0) > LIMIT
    ]
    if wrong:
        sys.exit(f"further than {LIMIT:.0e}: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
