"""Scores of places against torch's scaled_dot_product_attention without them, as ratios inside one run.

Run with ``python benchmarks/biases.py [--rounds 5] [--tokens 8192] [--kernels avx2|none]``. One thread, whose processor
time counts, so that other work on the machine changes little. With ``--kernels avx2`` torch and attlas use AVX2 alone;
with ``none`` attlas computes without its kernels. Each way is written beside the others, with the machine and commit
that it was measured with. Goals, for 8 heads, 8,192 tokens, d 64, float32, forward: ALiBi and forget gates, causal,
0.60; a relative bias 0.65; a tensor of all pairs 0.90.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable

import torch
from torch.nn.functional import logsigmoid
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attlas
from attlas.engine.backends.native import library
from cpu import AVX2
from harness import add, ratios

FORCED = {"avx2": AVX2, "none": {"ATTLAS_NATIVE": "none"}}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--kernels", choices=FORCED, help="what attlas computes with; the best by default")
    args = parser.parse_args()
    forced = FORCED.get(args.kernels, {})
    if any(os.environ.get(name) != value for name, value in forced.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **forced})  # read when torch is loaded
    torch.set_num_threads(1)
    torch.manual_seed(0)
    heads = 8
    q, k, v = (torch.randn(1, heads, args.tokens, 64) for _ in range(3))
    relative = attlas.RelativeBias(heads, 128, buckets=32)
    relative.weight.normal_()
    scores = {
        "ALiBi": attlas.Alibi(heads),
        "forget gates": attlas.Forget(logsigmoid(torch.randn(heads, args.tokens) + 3.0)),
        "relative bias": relative,
        "tensor of all pairs": attlas.TensorBias(torch.randn(args.tokens, args.tokens)),
    }
    results = {}
    for name, mask in (("causal", attlas.Causal()), ("full", None)):
        cases = {"sdpa": lambda causal=mask is not None: sdpa(q, k, v, is_causal=causal)}
        cases |= {f"A @ v, {bias}": biased(q, k, v, score, mask) for bias, score in scores.items()}
        print(f"== {name}")
        results[name] = ratios(cases, "sdpa", args.rounds, time.process_time)
    kernels = library.current().instruction_set
    how = {"instruction set": kernels, "shape": list(q.shape), "clock": "processor time of one thread"}
    add("biases", f"kernels: {kernels}", {**how, **({"forced": forced} if forced else {}), **results})


def biased(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, score: attlas.Score, mask: attlas.Mask | None
) -> Callable[[], torch.Tensor]:
    """Return what computes the output of a dot product with a score of places."""
    return lambda: attlas.attend(q, k, score=attlas.ScaledDot() + score, mask=mask) @ v


if __name__ == "__main__":
    main()
