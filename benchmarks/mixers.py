"""Matrices of linear attention, and differences of matrices, against a softmax matrix, as ratios inside one run.

Run with ``python benchmarks/mixers.py [--rounds 3] [--tokens 65536] [--row 1000000]``; on two idle cores it takes some
three minutes. Goals, one head, d 128, float32, causal: a row of a gated delta matrix of 1,000,000 tokens 0.05 s; all
statistics of 65,536 x 65,536 cells 1.8 times those of a softmax matrix, under 300 MB; ``A @ v`` of 16,384 tokens 0.7
times a softmax product; a product with a difference of two softmax matrices 2.1 times that with one.
"""

from __future__ import annotations

import argparse
import statistics as numbers
import subprocess
import sys
import time

import torch
from torch.nn.functional import normalize
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attlas
from attlas import stats
from attlas.engine.backends.native import library
from cpu import everything
from harness import extra_peak_bytes, ratios, save

D = 128
KINDS = ("linear", "ssd", "gla", "gated delta", "kda")


def layer(kind: str, n: int) -> attlas.AttentionMatrix:
    """Return the matrix of a linear attention layer with one head."""
    q, k = (normalize(torch.randn(n, D), dim=-1) for _ in range(2))
    beta = torch.rand(n)
    of_tokens, of_channels = -0.1 * torch.rand(n), -0.1 * torch.rand(n, D) if kind in ("gla", "kda") else None
    gates = {
        "linear": {},
        "ssd": {"decay": of_tokens, "write": beta},
        "gla": {"decay": of_channels},
        "gated delta": {"decay": of_tokens, "write": beta, "erase": beta},
        "kda": {"decay": of_channels, "write": beta, "erase": beta},
    }
    return attlas.transport(q, k, scale=D**-0.5, **gates[kind])


def softmax(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return queries and keys."""
    return torch.randn(1, 1, n, D), torch.randn(1, 1, n, D)


def of_weights() -> list[stats.Statistic]:
    """Return every statistic of `cpu.everything` that weights without a softmax have, and pictures of both kinds."""
    return [
        stats.RowMass(), stats.TopK(8), stats.MaxWeight(), stats.ColumnMass(), stats.ColumnMax(), stats.Offsets(),
        stats.Picture(256, 256), stats.Picture(256, 256, "max"),
    ]  # fmt: skip


def row(n: int, rounds: int) -> dict[str, object]:
    """Return the seconds of one row, the last, of several kinds."""
    found: dict[str, object] = {}
    for kind in KINDS:
        A, seconds = layer(kind, n), []
        for _ in range(rounds + 1):
            start = time.perf_counter()
            A[n - 1]
            seconds.append(time.perf_counter() - start)
        found[kind] = {"seconds_median": round(numbers.median(seconds[1:]), 4), "seconds_min": round(min(seconds), 4)}
        print(f"{'row of ' + format(n, ',') + ' tokens, ' + kind:58s} {found[kind]}", flush=True)
    return found


def statistics(n: int, rounds: int, kinds: tuple[str, ...]) -> dict[str, object]:
    """Compare all statistics; a softmax has some more, which it finds in the same pass."""
    q, k = softmax(n)
    cases = {"softmax": lambda: attlas.attend(q, k, mask=attlas.Causal()).collect(*everything())}
    matrices = {kind: layer(kind, n) for kind in kinds}
    cases |= {kind: lambda A=A: A.collect(*of_weights()) for kind, A in matrices.items()}
    return ratios(cases, "softmax", rounds)


def products(n: int, rounds: int) -> dict[str, object]:
    """Compare products with vectors."""
    (q, k), v = softmax(n), torch.randn(1, 1, n, D)
    cases = {
        "softmax": lambda: attlas.attend(q, k, mask=attlas.Causal()) @ v,
        "torch": lambda: sdpa(q, k, v, is_causal=True),
    }
    matrices = {kind: layer(kind, n) for kind in KINDS}
    cases |= {kind: lambda A=A: A @ v[0, 0] for kind, A in matrices.items()}
    return ratios(cases, "softmax", rounds)


def difference(n: int, rounds: int) -> dict[str, object]:
    """Compare the product of a difference of two softmax matrices with that of one."""
    (q, k), (p, r), v = softmax(n), softmax(n), torch.randn(1, 1, n, D)
    mask, factor = attlas.Causal(), torch.tensor([0.3])

    def two() -> attlas.AttentionMatrix:
        return attlas.attend(q, k, mask=mask) - factor.view(1, 1, 1, 1) * attlas.attend(p, r, mask=mask)

    cases = {
        "one matrix": lambda: attlas.attend(q, k, mask=mask) @ v,
        "A - lam B": lambda: two() @ v,
    }
    return ratios(cases, "one matrix", rounds)


def memory(n: int) -> int:
    """Return the further bytes that all statistics take."""
    A = layer("gated delta", n)
    layer("gated delta", 600).collect(*of_weights())
    return extra_peak_bytes(lambda: A.collect(*of_weights()))


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=65_536, help="of all statistics; products take a quarter")
    parser.add_argument("--row", type=int, default=1_000_000)
    parser.add_argument("--memory", action="store_true", help="print the memory of the statistics, nothing else")
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.memory:
        print(memory(args.tokens))
        return
    results: dict[str, object] = {"instruction set": library.current().instruction_set, "d": D}
    results[f"a row of {args.row:,} tokens"] = row(args.row, args.rounds)
    print("== A @ v")
    results[f"A @ v, {args.tokens // 4:,} tokens"] = products(args.tokens // 4, 2 * args.rounds)
    print("== a difference of two matrices")
    results[f"A @ v, A - lam B, {args.tokens // 4:,} tokens"] = difference(args.tokens // 4, 2 * args.rounds)
    print("== all statistics")
    results[f"all statistics, {args.tokens:,} tokens"] = statistics(args.tokens, args.rounds, ("linear", "gated delta"))
    results[f"all statistics, {args.tokens // 4:,} tokens"] = statistics(args.tokens // 4, args.rounds, KINDS)
    command = [sys.executable, __file__, "--memory", "--tokens", str(args.tokens)]
    used = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    print(f"{'extra peak of all statistics, gated delta':58s} {used / 1e6:9.1f} MB")
    results["extra_peak_MB of all statistics, gated delta"] = round(used / 1e6, 1)
    save("mixers", results)


if __name__ == "__main__":
    main()
