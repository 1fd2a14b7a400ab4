"""Speed against torch's scaled_dot_product_attention, as ratios inside one run.

Run with ``make bench`` or ``python benchmarks/speed.py [--tokens 8192] [--heads 8] [--rounds 5]``.
Goals: ``A @ v`` at most 1.05 (forward, and forward with backward); attend() under 50 microseconds; all
statistics in one pass at most 2.2. With ``ATTLAS_NATIVE=none`` it measures plain torch, and writes that apart.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attlas
from attlas import stats
from attlas.engine.backends.native import library
from harness import ratios, save


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, args.heads, args.tokens, 64) for _ in range(3))
    grad = torch.randn_like(v)
    results = {
        "shape": list(q.shape),
        "attend": attend_microseconds(q, k),
        "forward": forward(q, k, v, args.rounds),
        "statistics": statistics_(q, k, v, args.rounds),
        "backward": backward(q, k, v, grad, args.rounds),
    }
    save("speed" if library.available() else "speed-plain-torch", results)


def attend_microseconds(q: torch.Tensor, k: torch.Tensor) -> dict[str, float]:
    """Return what attend() itself costs, with and without a mask."""
    causal = attlas.Causal()
    out = {}
    for name, mask in (("attend()", None), ("attend(mask=Causal())", causal)):
        times = []
        for _ in range(2000):
            start = time.perf_counter()
            attlas.attend(q, k, mask=mask)
            times.append(time.perf_counter() - start)
        out[name] = round(statistics.median(times) * 1e6, 1)
        print(f"{name:58s} {out[name]:9.1f} µs")
    return out


@torch.no_grad()
def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rounds: int) -> dict[str, dict[str, float]]:
    """Return ratios of the output to SDPA's."""
    lengths, heads = torch.tensor([q.shape[-2] * 15 // 16]), q.shape[1]
    dot, table = attlas.ScaledDot(), torch.randn(q.shape[-2], k.shape[-2])
    relative = attlas.RelativeBias(heads, 128, buckets=32)
    relative.weight.normal_()
    cases = {
        "sdpa": lambda: sdpa(q, k, v),
        "sdpa, causal": lambda: sdpa(q, k, v, is_causal=True),
        "A @ v": lambda: attlas.attend(q, k) @ v,
        "A @ v, causal": lambda: attlas.attend(q, k, mask=attlas.Causal()) @ v,
        "A @ v, causal and padding": lambda: attlas.attend(q, k, mask=attlas.Causal() & attlas.Padding(lengths)) @ v,
        "A @ v, window of 512": lambda: attlas.attend(q, k, mask=attlas.Window(511, 0)) @ v,
        "A @ v, causal ALiBi": lambda: attlas.attend(q, k, score=dot + attlas.Alibi(heads), mask=attlas.Causal()) @ v,
        "A @ v, relative bias": lambda: attlas.attend(q, k, score=dot + relative) @ v,
        "A @ v, bias of each pair": lambda: attlas.attend(q, k, score=dot + attlas.TensorBias(table)) @ v,
        "A @ v, Gaussian": lambda: attlas.attend(q, k, score=attlas.Gaussian(8.0)) @ v,
        "A @ v, tiled": lambda: attlas.attend(q, k, plan=attlas.Plan("tiled")) @ v,
    }
    return ratios(cases, "sdpa", rounds)


def all_statistics() -> list[attlas.engine.statistic.Statistic]:
    """Return every statistic that the design names."""
    return [
        stats.Entropy(),
        stats.EffectiveKeys(),
        stats.MaxWeight(),
        stats.MaxLogit(),
        stats.LogitMoments(),
        stats.TopK(8),
        stats.ColumnMass(),
        stats.ColumnMax(),
        stats.Offsets(),
        stats.Spans([slice(0, 1024), slice(1024, 4096)], [slice(0, 1024), slice(1024, 4096)]),
        stats.Picture(256, 256),
    ]


def statistics_(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rounds: int) -> dict[str, dict[str, float]]:
    """Return ratios of reads to SDPA's forward; the log-sum-exp is never known before."""
    causal = attlas.Causal()
    cases = {
        "sdpa": lambda: sdpa(q, k, v),
        "lse": lambda: attlas.attend(q, k).lse,
        "entropy": lambda: attlas.attend(q, k).collect(stats.Entropy()),
        "column mass": lambda: attlas.attend(q, k).collect(stats.ColumnMass()),
        "top-8": lambda: attlas.attend(q, k).collect(stats.TopK(8)),
        "picture 256 x 256": lambda: attlas.attend(q, k).collect(stats.Picture(256, 256)),
        "coverage": lambda: attlas.attend(q, k).collect(stats.Coverage()),
        "all statistics but coverage": lambda: attlas.attend(q, k).collect(*all_statistics()),
        "all statistics": lambda: attlas.attend(q, k).collect(*all_statistics(), stats.Coverage()),
        "all statistics but coverage, causal": lambda: attlas.attend(q, k, mask=causal).collect(*all_statistics()),
    }
    return ratios(cases, "sdpa", rounds)


def backward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, rounds: int
) -> dict[str, dict[str, float]]:
    """Return ratios of forward and backward together."""
    inputs = [t.clone().requires_grad_() for t in (q, k, v)]

    def both(
        mask: attlas.Mask | None = None, plan: attlas.Plan | None = None, score: attlas.Score | None = None
    ) -> None:
        out = attlas.attend(inputs[0], inputs[1], mask=mask, plan=plan, score=score) @ inputs[2]
        torch.autograd.grad(out, inputs, grad)

    cases = {
        "sdpa, forward and backward": lambda: torch.autograd.grad(sdpa(*inputs), inputs, grad),
        "A @ v, forward and backward": both,
        "A @ v, forward and backward, causal": lambda: both(attlas.Causal()),
        "A @ v, forward and backward, window of 512": lambda: both(attlas.Window(511, 0)),
        "A @ v, forward and backward, soft cap": lambda: both(score=attlas.SoftCap(attlas.ScaledDot(), 30.0)),
        "A @ v, forward and backward, tiled": lambda: both(plan=attlas.Plan("tiled")),
    }
    return ratios(cases, "sdpa, forward and backward", rounds)


if __name__ == "__main__":
    main()
