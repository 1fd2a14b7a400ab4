"""What heads bring together, as a matrix: time and memory of `attlas.heads.contributions` at 16,384 tokens, 16 heads.

Run with ``python benchmarks/explain_values.py [--tokens 16384] [--rounds 3]``. Seconds are of the processor, the least
of all rounds, so that another program on the machine counts little. One thread.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch

import attlas
from attlas import stats
from attlas.matrix import AttentionMatrix
from attlas.matrix.kinds.joint import JointNorms, factors_of
from harness import extra_peak_bytes, save

HEADS, SIZE, ROWS = 16, 64, 64


def least(run: Callable[[], Any], rounds: int) -> float:
    """Return the least processor time of some runs, in seconds."""
    found = []
    for _ in range(rounds):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    n, width = args.tokens, HEADS * SIZE
    q, k, v = (torch.randn(1, HEADS, n, SIZE) for _ in range(3))
    outward = torch.randn(HEADS, SIZE, width) / width**0.5
    A = attlas.attend(q, k, mask=attlas.Causal())
    A.lse  # noqa: B018 - known in a recording
    factors = factors_of(v, outward)
    norms = AttentionMatrix(JointNorms(A.weights, factors))
    last = (A[0, :, -1, :].unsqueeze(-1) * v[0]).transpose(0, 1).flatten(1) @ outward.flatten(0, 1)
    error = (norms[0, 0, -1] - last.norm(dim=-1)).abs().max() / last.norm(dim=-1).max()
    results: dict[str, Any] = {
        "tokens": n,
        "heads": HEADS,
        "factors": {"seconds": least(lambda: factors_of(v, outward), args.rounds), "bytes": factors.nbytes},
        "extra peak bytes of the factors": extra_peak_bytes(lambda: factors_of(v, outward)),
        f"{ROWS} rows": least(lambda: norms[0, 0, -ROWS:], args.rounds),
        f"{ROWS} rows of the weights": least(lambda: A[0, :, -ROWS:], args.rounds),
        f"row and column sums of {n // 8} tokens": least(
            lambda: norms.window(slice(0, n // 8), slice(0, n // 8)).collect(stats.RowMass(), stats.ColumnMass()), 1
        ),
        "largest error of the last row, relative to its largest": float(error),
    }
    for name, found in results.items():
        print(f"{name}: {found}")
    save("explain_values", results)


if __name__ == "__main__":
    main()
