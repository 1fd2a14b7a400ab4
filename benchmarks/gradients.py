"""Time and memory of gradients of statistics, on one thread.

Run with ``make bench`` or ``python benchmarks/gradients.py [--tokens 8192] [--heads 8] [--rounds 5]``.
Goals: the backward pass of output, entropy and column mass at most 1.25 times that of the output; the divergence of
two matrices, forward and backward, at most 3 times forward and backward of one output. Times are those of the
processor, so that other programs hardly change them.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import attlas
from attlas import stats
from harness import extra_peak_bytes, ratios, save

STATISTICS = stats.Entropy(), stats.ColumnMass()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    q, k, v, other = (torch.randn(1, args.heads, args.tokens, 64, requires_grad=True) for _ in range(4))
    results = {
        "shape": list(q.shape),
        "backward": backward(q, k, v, args.rounds),
        "divergence": divergence(q, k, v, other, args.rounds),
        "entropy and column mass: 65,536 x 65,536": {"extra_peak_MB": round(memory() / 1e6, 1)},
    }
    save("gradients", results)


def backward(q: Tensor, k: Tensor, v: Tensor, rounds: int) -> dict[str, dict[str, float]]:
    """Return ratios of backward passes alone: their forward passes run once."""
    A = attlas.attend(q, k)
    cases = {
        "output": back((A @ v,), q, k, v),
        "output, entropy and column mass, one collect": back(A.collect(stats.Pooled(v), *STATISTICS), q, k, v),
        "output, then entropy and column mass": back((A @ v, *A.collect(*STATISTICS)), q, k, v),
    }
    return ratios(cases, "output", rounds, time.process_time)


def back(outputs: tuple[Tensor, ...], *inputs: Tensor) -> Callable[[], Any]:
    """Return the backward pass of outputs."""
    gradients = [torch.randn_like(t) for t in outputs]
    return lambda: torch.autograd.grad(outputs, inputs, gradients, retain_graph=True)


def divergence(q: Tensor, k: Tensor, v: Tensor, other: Tensor, rounds: int) -> dict[str, dict[str, float]]:
    """Return ratios of forward and backward together."""

    def output() -> None:
        torch.autograd.grad((attlas.attend(q, k) @ v).sum(), (q, k, v))

    def kl() -> None:
        found = attlas.divergence(attlas.attend(q, k), attlas.attend(other, k)).sum()
        torch.autograd.grad(found, (q, k, other))

    return ratios({"output": output, "KL divergence of two matrices": kl}, "output", rounds, time.process_time)


def memory() -> int:
    """Return the bytes that the gradient of entropy and column mass of one head takes beyond the inputs."""
    q, k = (torch.randn(1, 1, 65_536, 64, requires_grad=True) for _ in range(2))
    small = [t[..., :512, :].detach().requires_grad_() for t in (q, k)]

    def run(q: Tensor, k: Tensor) -> None:
        entropy, mass = attlas.attend(q, k).collect(*STATISTICS)
        (entropy.sum() + mass.square().sum()).backward()

    run(*small)  # what libraries keep for good
    return extra_peak_bytes(lambda: run(q, k))


if __name__ == "__main__":
    main()
