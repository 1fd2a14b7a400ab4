"""A whole Llama-like forward on attlas and on torch's own attention: time, and extra peak memory of recordings (Linux).

Run with ``python benchmarks/huggingface.py`` (``--quick`` for small sizes, ``--memory`` or ``--time`` for one half).
Goals at 16 layers x 8 heads, d 64, 16,384 tokens: memory of ``keep="statistics"`` and of ``keep="disk"`` at most 250 MB
over an sdpa forward, each in a fresh process; time of attlas with nothing recorded at most 1.03 x sdpa, recording all
row statistics and column mass at most 1.6 x.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

import attlas.huggingface
from attlas import stats
from attlas.recording import record
from harness import RESULTS, extra_peak_bytes, machine, ratios, save

FULL = {"layers": 16, "tokens": 16_384}
QUICK = {"layers": 2, "tokens": 4_096}


def model_of(layers: int, tokens: int) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=tokens,
    )
    return transformers.LlamaModel._from_config(config, attn_implementation="sdpa").eval()


def row_statistics() -> list[stats.Statistic]:
    """Every number of a row that costs a pass and no sort, and the mass of columns."""
    return [
        stats.RowMass(),
        stats.Entropy(),
        stats.EffectiveKeys(),
        stats.MaxWeight(),
        stats.MaxLogit(),
        stats.LogitMoments(),
        stats.ColumnMass(),
    ]


def forward(model: nn.Module, ids: torch.Tensor, name: str) -> None:
    with torch.no_grad():
        model.set_attn_implementation(attlas.huggingface.NAME if name == "attlas" else "sdpa")
        if name in ("sdpa", "attlas"):
            model(ids, use_cache=False)
        elif name == "statistics":
            with record(model, keep="statistics", statistics=row_statistics()):
                model(ids, use_cache=False)
        else:
            with (
                tempfile.TemporaryDirectory(dir=os.environ.get("ATTLAS_BENCH")) as folder,
                record(model, keep="disk", folder=Path(folder) / "run.atlas"),
            ):
                model(ids, use_cache=False)


def peak_of(name: str, layers: int, tokens: int) -> None:
    """Print the extra peak memory of one forward in this process."""
    model = model_of(layers, tokens)
    ids = torch.randint(0, 1000, (1, tokens))
    forward(model, ids[:, :256], name)  # what libraries take for good
    print(extra_peak_bytes(lambda: forward(model, ids, name)))


def memory(sizes: dict[str, int]) -> dict[str, Any]:
    peaks = {}
    for name in ("sdpa", "attlas", "statistics", "disk"):
        given = [f"--layers={sizes['layers']}", f"--tokens={sizes['tokens']}"]
        command = [sys.executable, __file__, f"--case={name}", *given]
        print(f"  {name}, in a process of its own ...", flush=True)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{name}: exit status {done.returncode}\n{done.stderr}")
        peaks[name] = int(done.stdout.split()[-1])
        extra = (peaks[name] - peaks["sdpa"]) / 1e6
        print(f"{name:58s} {peaks[name] / 1e6:9.1f} MB   over sdpa {extra:7.1f} MB", flush=True)
    return {name: {"over_sdpa_MB": round((peak - peaks["sdpa"]) / 1e6, 1)} for name, peak in peaks.items()}


def times(sizes: dict[str, int], rounds: int) -> dict[str, Any]:
    model = model_of(**sizes)
    ids = torch.randint(0, 1000, (1, sizes["tokens"]))

    def case(name: str) -> Callable[[], None]:
        return lambda: forward(model, ids, name)

    return ratios({name: case(name) for name in ("sdpa", "attlas", "statistics", "disk")}, "sdpa", rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--tokens", type=int)
    parser.add_argument("--case", choices=["sdpa", "attlas", "statistics", "disk"], help=argparse.SUPPRESS)
    given = parser.parse_args()
    sizes = dict(QUICK if given.quick else FULL)
    sizes |= {name: value for name in sizes if (value := getattr(given, name)) is not None}
    if given.case:
        peak_of(given.case, **sizes)
        return
    both = given.memory == given.time
    results: dict[str, Any] = {"sizes": sizes}
    # Each half is saved when it is done, beside the other one where that was measured here, at this commit and size.
    known = RESULTS / "huggingface.json"
    if known.exists():
        before = json.loads(known.read_text(encoding="utf-8"))
        same = before["machine"] == machine() and before["results"].get("sizes") == sizes
        results = before["results"] if same else results
    for half, wanted, run in (
        ("memory", given.memory or both, lambda: memory(sizes)),
        ("time", given.time or both, lambda: times(sizes, given.rounds)),
    ):
        if wanted:
            print(f"{half}: {sizes['layers']} layers, {sizes['tokens']:,} tokens", flush=True)
            results[half] = run()
            if not given.quick:
                save("huggingface", results)


if __name__ == "__main__":
    main()
