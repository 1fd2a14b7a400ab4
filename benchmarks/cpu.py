"""The native CPU kernels against torch's scaled_dot_product_attention, as ratios inside one run.

Run with ``make bench`` or ``python benchmarks/cpu.py [--rounds 7] [--quick] [--only NAME] [--avx2]``. Each size is
written as soon as it is known, with the machine and commit that it was measured with, and the others in the file stay.
Goals, for 8 heads, 8,192 tokens, d 64, float32, full and causal: forward at most 0.65 of SDPA's forward; with
log-sum-exp, entropy, top-8, moments and maximum 0.80; with all statistics 1.05; all statistics alone, given the
log-sum-exp, 0.45 (causal 0.50). Forward and backward are compared with SDPA's. With ``--avx2`` both use AVX2 alone, on
one thread whose processor time counts. Additive scores and distances are measured by cpu_kernels.py.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attlas
from attlas import stats
from attlas.engine.backends.native import library
from harness import add, ratios

# What makes torch, the libraries under it and attlas use AVX2 on a processor that has more.
AVX2 = {
    "ATTLAS_NATIVE": "avx2",
    "ATEN_CPU_CAPABILITY": "avx2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "OMP_NUM_THREADS": "1",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="only the size that the goals speak of")
    parser.add_argument("--only", metavar="NAME", help="only what has this in its name")
    parser.add_argument("--avx2", action="store_true", help="force AVX2, one thread, and count its processor time")
    args = parser.parse_args()
    if args.avx2 and any(os.environ.get(name) != value for name, value in AVX2.items()):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **AVX2})  # read when torch is loaded
    file, clock, forced = "cpu", time.perf_counter, {}
    if args.avx2:
        torch.set_num_threads(1)
        file, clock, forced = "cpu-avx2", time.process_time, {"forced": AVX2}
    torch.manual_seed(0)
    names = [name for name in SIZES if args.only is None or args.only in name]
    if not names:
        parser.error(f"--only: no such name; there are {', '.join(map(repr, SIZES))}")
    for name in names[:2] if args.quick else names:
        print(f"== {name}")
        heads, kept, queries, tokens, d, dtype, causal = SIZES[name]
        q, k, v = (torch.randn(1, h, t, d).to(dtype) for h, t in ((heads, queries), (kept, tokens), (kept, tokens)))
        compared = step(q, k, v) if queries == 1 else cases(q, k, v, causal=causal)
        rounds = 3 * args.rounds if queries == 1 else args.rounds if tokens <= 8192 else 3
        how = {"instruction set": library.current().instruction_set, **forced}
        add(file, name, how | ratios(compared, "sdpa", rounds, clock))
        if 1 < queries <= 8192:
            both = ratios(both_ways(q, k, v, causal=causal), "sdpa", rounds, clock)
            add(file, f"{name}, forward and backward", how | both)


def sizes() -> dict[str, tuple[int, int, int, int, int, torch.dtype, bool]]:
    """Return heads, key heads, queries, keys, d, dtype and whether causal, by name; first what the goals speak of."""
    out: dict[str, tuple[int, int, int, int, int, torch.dtype, bool]] = {}
    for name, heads, tokens, d, dtype in (
        ("8 heads, 8192, d 64, float32", 8, 8192, 64, torch.float32),
        ("8 heads, 8192, d 128, float32", 8, 8192, 128, torch.float32),
        ("8 heads, 1024, d 64, float32", 8, 1024, 64, torch.float32),
        ("8 heads, 8192, d 64, bfloat16", 8, 8192, 64, torch.bfloat16),
        ("1 head, 8192, d 64, float32", 1, 8192, 64, torch.float32),
        ("1 head, 8192, d 128, float32", 1, 8192, 128, torch.float32),
        ("1 head, 65536, d 64, float32", 1, 65536, 64, torch.float32),
    ):
        out[name] = heads, heads, tokens, tokens, d, dtype, False
        out[f"{name}, causal"] = heads, heads, tokens, tokens, d, dtype, True
    for heads, kept in ((1, 1), (8, 8), (32, 8)):
        for keys in (1024, 65536):
            name = f"{heads} heads of queries, {kept} of keys, one query, {keys} keys"
            out[name] = heads, kept, 1, keys, 64, torch.float32, False
    return out


def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> dict[str, Callable[[], object]]:
    """Return what one new token costs."""
    grouped = q.shape[1] != k.shape[1]
    return {"sdpa": lambda: sdpa(q, k, v, enable_gqa=grouped), "A @ v": lambda: attlas.attend(q, k) @ v}


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

    def then(*wanted: stats.Statistic) -> object:
        A = attlas.attend(q, k, mask=mask)
        return A @ v, A.collect(*wanted)

    return {
        "sdpa": lambda: sdpa(q, k, v, is_causal=causal),
        "A @ v": lambda: attlas.attend(q, k, mask=mask) @ v,
        "A @ v, then entropy, top-8, moments, maximum": lambda: then(*rows()),
        "A @ v, entropy, top-8, moments, maximum": lambda: both(*rows()),
        "A @ v, all statistics": lambda: both(*everything()),
        "A @ v, all statistics, coverage": lambda: both(*everything(), stats.Coverage()),
        "all statistics": lambda: attlas.attend(q, k, mask=mask).collect(*everything()),
        "all statistics and coverage": lambda: attlas.attend(q, k, mask=mask).collect(*everything(), stats.Coverage()),
        "log-sum-exp given: entropy": lambda: given(stats.Entropy()),
        "log-sum-exp given: column mass": lambda: given(stats.ColumnMass()),
        "log-sum-exp given: all statistics": lambda: given(*everything()),
    }


def both_ways(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> dict[str, Callable[[], object]]:
    """Return the output and its gradients, by name."""
    mask = attlas.Causal() if causal else None
    tokens = [t.clone().requires_grad_() for t in (q, k, v)]
    q, k, v = tokens
    grad = torch.randn_like(q)
    return {
        "sdpa": lambda: torch.autograd.grad(sdpa(q, k, v, is_causal=causal), tokens, grad),
        "A @ v": lambda: torch.autograd.grad(attlas.attend(q, k, mask=mask) @ v, tokens, grad),
    }


SIZES = sizes()

if __name__ == "__main__":
    main()
