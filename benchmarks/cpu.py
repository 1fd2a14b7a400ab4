"""The native CPU kernels against torch's scaled_dot_product_attention, as ratios inside one run.

Run with ``make bench`` or ``python benchmarks/cpu.py [--rounds 7] [--quick]``. Goals, for 8 heads, 8,192 tokens, d 64,
float32, full and causal: forward at most 0.65 of SDPA's forward; with log-sum-exp, entropy, top-8, moments and maximum
0.80; with all statistics 1.05; all statistics alone, given the log-sum-exp, 0.45 (causal 0.50). Additive scores and
distances are measured by cpu_kernels.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attlas
from attlas import stats
from attlas.engine.native import library
from harness import ratios, save


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="only the size that the goals speak of")
    args = parser.parse_args()
    torch.manual_seed(0)
    results: dict[str, object] = {"instruction set": library.instruction_set(), "threads": torch.get_num_threads()}
    sizes = [("8 heads, 8192, d 64, float32", 8, 8192, 64, torch.float32)]
    if not args.quick:
        sizes += [
            ("8 heads, 8192, d 128, float32", 8, 8192, 128, torch.float32),
            ("8 heads, 1024, d 64, float32", 8, 1024, 64, torch.float32),
            ("8 heads, 8192, d 64, bfloat16", 8, 8192, 64, torch.bfloat16),
            ("1 head, 65536, d 64, float32", 1, 65536, 64, torch.float32),
        ]
    q, k, v = torch.randn(1, 8, 1, 64), torch.randn(1, 8, 65536, 64), torch.randn(1, 8, 65536, 64)
    print("== one query, 65536 keys")
    decode = {"sdpa": lambda: sdpa(q, k, v), "A @ v": lambda: attlas.attend(q, k) @ v}
    results["8 heads, one query, 65536 keys"] = ratios(decode, "sdpa", 3 * args.rounds)
    for name, heads, tokens, d, dtype in sizes:
        print(f"== {name}")
        q, k, v = (torch.randn(1, heads, tokens, d).to(dtype) for _ in range(3))
        rounds = args.rounds if tokens <= 8192 else 3
        results[name] = ratios(cases(q, k, v, causal=False), "sdpa", rounds)
        results[f"{name}, causal"] = ratios(cases(q, k, v, causal=True), "sdpa", rounds)
        save("cpu", results)  # the largest size takes minutes: what is known is kept


def rows() -> list[stats.Statistic]:
    """Return the statistics of rows that the second goal names."""
    return [stats.Entropy(), stats.TopK(8), stats.LogitMoments(), stats.MaxLogit()]


def everything() -> list[stats.Statistic]:
    """Return every statistic that the design names, but coverage."""
    more = [stats.EffectiveKeys(), stats.MaxWeight(), stats.ColumnMass(), stats.ColumnMax(), stats.Offsets()]
    return [*rows(), *more, stats.Picture(256, 256)]


def cases(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> dict[str, Callable[[], object]]:
    """Return what is measured, by name; each starts from tokens alone unless it says otherwise."""
    mask = attlas.Causal() if causal else None
    known = attlas.attend(q, k, mask=mask)
    known.lse  # noqa: B018 - kept by the matrix

    def both(*wanted: stats.Statistic) -> object:
        return attlas.attend(q, k, mask=mask).collect(stats.Pooled(v), *wanted)

    def given(*wanted: stats.Statistic) -> object:
        return known.collect(*wanted)

    return {
        "sdpa": lambda: sdpa(q, k, v, is_causal=causal),
        "A @ v": lambda: attlas.attend(q, k, mask=mask) @ v,
        "A @ v, entropy, top-8, moments, maximum": lambda: both(*rows()),
        "A @ v, all statistics": lambda: both(*everything()),
        "A @ v, all statistics, coverage": lambda: both(*everything(), stats.Coverage()),
        "all statistics": lambda: attlas.attend(q, k, mask=mask).collect(*everything()),
        "all statistics and coverage": lambda: attlas.attend(q, k, mask=mask).collect(*everything(), stats.Coverage()),
        "log-sum-exp given: entropy": lambda: given(stats.Entropy()),
        "log-sum-exp given: column mass": lambda: given(stats.ColumnMass()),
        "log-sum-exp given: all statistics": lambda: given(*everything()),
    }


if __name__ == "__main__":
    main()
