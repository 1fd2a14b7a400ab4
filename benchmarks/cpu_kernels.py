"""Additive scores and distances on the CPU: the native kernels, the tiled backend, and plain torch in chunks.

    python benchmarks/cpu_kernels.py [rounds]

Ratios are medians over rounds of quotients taken inside one round. Next to the time on the clock stands the time of
all cores together, which other work on the machine disturbs less.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import attlas
from attlas import Plan, stats
from cpu import everything
from harness import machine, save

TILED = Plan("tiled")
ROUNDS = int(sys.argv[1]) if sys.argv[1:] else 7


def compare(title: str, work: float, unit: str, cases: dict[str, Callable[[], Any]], rounds: int = 7) -> dict[str, Any]:
    """Time cases in turn, the first being the base, and return seconds, rates and ratios of base to case."""
    clock: dict[str, list[float]] = {name: [] for name in cases}
    cores: dict[str, list[float]] = {name: [] for name in cases}
    cases[next(reversed(cases))]()  # threads and pages are there before the clock runs
    for _ in range(min(ROUNDS, rounds)):
        for name, run in cases.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run()
            clock[name].append(time.perf_counter() - wall)
            cores[name].append(time.process_time() - cpu)
    base, out = next(iter(cases)), {}
    print(f"\n{title}, load {os.getloadavg()[0]:.1f}")
    for name in cases:
        seconds = statistics.median(clock[name])
        out[name] = {
            "seconds": round(seconds, 4),
            f"{unit} a second": round(work / seconds / 1e9, 2),
            f"{unit} a second of one core": round(work / statistics.median(cores[name]) / 1e9, 2),
            "times faster": round(statistics.median(a / b for a, b in zip(clock[base], clock[name], strict=True)), 2),
            "times faster, by cores": round(
                statistics.median(a / b for a, b in zip(cores[base], cores[name], strict=True)), 2
            ),
        }
        print(f"{name:44s} {json.dumps(out[name])}", flush=True)
    return out


def additive(m: int = 4096, hidden: int = 128, e: int = 64) -> dict[str, Any]:
    """Additive attention of m × m tokens: hidden units a second, in thousand millions."""
    q, k, v = torch.randn(1, 1, m, 64), torch.randn(1, 1, m, 64), torch.randn(1, 1, m, e)
    score, slope = attlas.Additive(64, 64, hidden), torch.randn(1, 1, m, e)

    def chunked(rows: int = 8) -> Tensor:
        a, b = score.project(q, k)
        parts = [torch.tanh(a[..., i : i + rows, None, :] + b[..., None, :, :]) @ score.w_v for i in range(0, m, rows)]
        return torch.softmax(torch.cat(parts, -2), -1) @ v

    def forward(plan: Plan | None) -> Callable[[], Tensor]:
        return torch.no_grad()(lambda: attlas.attend(q, k, score=score, plan=plan) @ v)

    def both(plan: Plan | None) -> Callable[[], None]:
        def run() -> None:
            given = [t.detach().requires_grad_() for t in (q, k, v)]
            out = attlas.attend(given[0], given[1], score=score, plan=plan) @ given[2]
            torch.autograd.grad(out, (*given, *score.parameters()), slope)

        return run

    units = m * m * hidden
    return {
        "forward": compare(
            "additive, forward",
            units,
            "G units",
            {"chunked tanh in torch": torch.no_grad()(chunked), "tiled": forward(TILED), "native": forward(None)},
        ),
        "forward and backward": compare(
            "additive, forward and backward", units, "G units", {"tiled": both(TILED), "native": both(None)}, rounds=3
        ),
    }


def gaussian(n: int = 100_000) -> dict[str, Any]:
    """Gaussian kernel regression of n queries and keys, one value: pairs a second, in thousand millions."""
    found = {}
    for dtype in (torch.float32, torch.float64):
        for d in (1, 2, 3, 5, 8):
            for e in (1,) if d > 1 else (1, 2, 8):
                q, k, v = (torch.randn(1, 1, n, size, dtype=dtype) for size in (d, d, e))
                cases: dict[str, Callable[[], Any]] = {}
                for h in (1.0, 0.02):  # the second leaves most weights below the normal numbers
                    A = attlas.Gaussian(h)
                    cases[f"native, bandwidth {h}"] = torch.no_grad()(
                        lambda q=q, k=k, v=v, A=A: attlas.attend(q, k, score=A) @ v
                    )
                name = f"d {d}, {e} values" + (", float64" if dtype is torch.float64 else "")
                found[name] = compare(f"Gaussian, {name}", n * n, "G pairs", cases)
    some = 2000 if n > 2000 else n
    q, k, v = torch.randn(1, 1, some, 1), torch.randn(1, 1, n, 1), torch.randn(1, 1, n, 1)
    score = attlas.Gaussian(1.0)

    def plain(rows: int = 100) -> Tensor:
        parts = [torch.cdist(q[..., i : i + rows, :], k).square_().mul_(-0.5) for i in range(0, some, rows)]
        return torch.cat([torch.softmax(part, -1) @ v for part in parts], -2)

    cases = {
        "chunked torch": torch.no_grad()(plain),
        "tiled": torch.no_grad()(lambda: attlas.attend(q, k, score=score, plan=TILED) @ v),
        "native": torch.no_grad()(lambda: attlas.attend(q, k, score=score) @ v),
    }
    found["against others, 2000 queries"] = compare("Gaussian, d 1, 2000 queries", some * n, "G pairs", cases)

    def both(plan: Plan | None) -> Callable[[], None]:
        def run() -> None:
            learned = attlas.Gaussian(0.5, learn=True)
            given = [t.detach().requires_grad_() for t in (q, k, v)]
            out = attlas.attend(given[0], given[1], score=learned, plan=plan) @ given[2]
            torch.autograd.grad(out.sum(), (*given, *learned.parameters()))

        return run

    found["forward and backward, 2000 queries"] = compare(
        "Gaussian, d 1, forward and backward", some * n, "G pairs", {"tiled": both(TILED), "native": both(None)}
    )
    return found


def read() -> dict[str, Any]:
    """All statistics together, from the tokens on: cells a second, in thousand millions."""
    found = {}
    scores: dict[str, tuple[attlas.Score, int, int]] = {
        "Gaussian, d 1": (attlas.Gaussian(0.5), 1, 16384),
        "Gaussian, d 5": (attlas.Gaussian(1.0), 5, 16384),
        "Laplace, d 3": (attlas.Laplace(1.0), 3, 16384),
        "Epanechnikov, d 2": (attlas.Epanechnikov(2.0), 2, 16384),
        "Additive, hidden 128": (attlas.Additive(64, 64, 128), 64, 4096),
    }
    for name, (score, d, n) in scores.items():
        q, k = torch.randn(1, 1, n, d), torch.randn(1, 1, n, d)

        def run(plan: Plan | None, *more: stats.Statistic, q: Tensor = q, k: Tensor = k, s: Any = score) -> object:
            return attlas.attend(q, k, score=s, plan=plan).collect(*everything(), *more)

        cases: dict[str, Callable[[], Any]] = {
            "tiled": torch.no_grad()(lambda run=run: run(TILED)),
            "native": torch.no_grad()(lambda run=run: run(None)),
            "native, coverage too": torch.no_grad()(lambda run=run: run(None, stats.Coverage())),
            "native, entropy alone": torch.no_grad()(
                lambda q=q, k=k, s=score: attlas.attend(q, k, score=s).collect(stats.Entropy())
            ),
        }
        found[name] = compare(f"All statistics, {name}, {n} x {n}", n * n, "G cells", cases, rounds=3)
    return found


def main() -> None:
    torch.manual_seed(0)
    print(machine())
    save("cpu_kernels", {"additive": additive(), "gaussian": gaussian(), "all statistics": read()})


if __name__ == "__main__":
    main()
