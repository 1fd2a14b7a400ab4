"""What explained logits cost: a cell of a long text, a table of a long map, a model of a thousand heads.

Run with ``python benchmarks/explain.py``, or ``--only cell,table,heads``: some minutes on two cores. Models are random,
with RMS norms and RoPE. Times are the least of a few runs, of the wall and of all cores of the process; the latter
stands also where the machine had other work. Memory is what a run takes above the recording.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

import attlas
import attlas.huggingface
from attlas import heads
from harness import add, extra_peak_bytes


def llama(layers: int, hidden: int, count: int, groups: int) -> nn.Module:
    """Return a random model with attention that is far from uniform."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=count,
        num_key_value_heads=groups, intermediate_size=2 * hidden, max_position_embeddings=131072,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in path:
                parameter.mul_(3)
    return model


def recorded(model: nn.Module, tokens: int, parts: Any = True) -> attlas.Atlas:
    """Return a recording of a random text with its parts; of the model without its head, whose logits are large."""
    ids = torch.randint(1000, (1, tokens), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), attlas.record(model.model, parts=parts) as atlas:
        model.model(input_ids=ids, use_cache=False)
    return atlas


def least(run: Callable[[], Any], rounds: int) -> dict[str, float]:
    """Return the least seconds of some runs: of the wall, and of all cores."""
    wall, cores = [], []
    for _ in range(rounds):
        start, began = time.perf_counter(), time.process_time()
        run()
        wall.append(time.perf_counter() - start)
        cores.append(time.process_time() - began)
    return {"seconds": min(wall), "core_seconds": min(cores)}


def cell() -> dict[str, Any]:
    """Measure a cell at 100,000 tokens, from a recording of all rows and from one of its two rows."""
    tokens = 100_000
    model, at = llama(4, 192, 6, 3), (tokens - 3, tokens // 3)
    found: dict[str, Any] = {"tokens": tokens, "layers": 4, "heads": 6}
    for name, parts in (("all rows", True), ("two rows", [*at])):
        atlas = recorded(model, tokens, parts)
        why = heads.explain(atlas, 3, 4, cell=at)
        found[name] = least(lambda atlas=atlas: heads.explain(atlas, 3, 4, cell=at), 20) | {
            "parts_bytes": sum(stream.nbytes for stream in atlas.parts),
            "pairs": why.table.numel(),
            "remainder": abs(why.remainder),
            "logit": why.logit,
        }
    return found


def table() -> dict[str, Any]:
    """Measure the table of all pairs of parts of a map of 16,384 tokens."""
    atlas = recorded(llama(8, 512, 8, 8), 16_384)
    why = heads.explain(atlas, 7, 3, groups=("layer", "layer"))  # makes what is made once
    run = lambda: heads.explain(atlas, 7, 3)  # noqa: E731
    peak = extra_peak_bytes(run)
    why = run()
    return least(run, 3) | {
        "tokens": 16_384,
        "shape": list(why.table.shape),
        "peak_bytes": peak,
        "parts_bytes": sum(stream.nbytes for stream in atlas.parts),
        "remainder": abs(why.remainder),
        "logit": why.logit,
    }


def thousand() -> dict[str, Any]:
    """Measure a table of layers against all parts of a model of 1,024 heads, at 2,048 tokens."""
    atlas = recorded(llama(32, 1024, 32, 8), 2048)
    run = lambda: heads.explain(atlas, 31, 7, groups=("layer", None))  # noqa: E731
    peak = extra_peak_bytes(run)
    why = run()
    return least(run, 3) | {
        "tokens": 2048,
        "shape": list(why.table.shape),
        "peak_bytes": peak,
        "parts_bytes": sum(stream.nbytes for stream in atlas.parts),
        "remainder": abs(why.remainder),
        "logit": why.logit,
    }


CASES = {"cell": cell, "table": table, "heads": thousand}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(CASES), help="cell, table, heads")
    torch.set_num_threads(2)
    for name in parser.parse_args().only.split(","):
        result = CASES[name]()
        print(name, result)
        add("explain", name, result)


if __name__ == "__main__":
    main()
