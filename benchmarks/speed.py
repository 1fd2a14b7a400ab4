"""The table of speed in one run: every row as a ratio to torch's scaled_dot_product_attention, with its goal.

Run with ``python benchmarks/speed.py [--rounds 5] [--tokens 8192] [--only WORDS]``, a few minutes on an idle machine.
Ratios are medians over rounds of quotients taken inside one round, with the smallest and the largest; small problems
are called many times in a round. The last rows are those of AVX2, forced for attlas and torch in a process of its own.
A generation and a corpus need transformers. With ``ATTLAS_NATIVE=none`` it measures plain torch, and writes that apart.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attlas
from attlas import stats
from attlas.engine.backends.native import library
from cpu import AVX2
from harness import ratios, save

HEADS, SIZE = 8, 64
CAUSAL = attlas.Causal()
Call = Callable[[], Any]


class Row(NamedTuple):
    """What is compared.

    Parameters
    ----------
    name : str
        What is computed.
    goal : float
        The largest ratio that is wanted.
    """

    name: str
    goal: float


def tokens(m: int, n: int, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values of 8 heads."""
    return tuple(torch.randn(batch, HEADS, count, SIZE) for count in (m, n, n))


def row_statistics() -> list[stats.Statistic]:
    """Return the statistics of rows that the goals name."""
    return [stats.Entropy(), stats.TopK(8), stats.LogitMoments(), stats.MaxLogit()]


def then(q: Tensor, k: Tensor, v: Tensor, mask: attlas.Mask | None, *asked: stats.Statistic) -> Call:
    """Return a call that computes the output, and then statistics of the same matrix."""

    def run() -> Any:
        A = attlas.attend(q, k, mask=mask)
        return A @ v, A.collect(*asked)

    return run


def large(count: int) -> Iterator[tuple[str, Call, dict[Row, Call]]]:
    """Yield the name of each group of long matrices, SDPA's call, and the rows that are compared with it."""
    q, k, v = tokens(count, count)
    dot, relative = attlas.ScaledDot(), attlas.RelativeBias(HEADS, 128, buckets=32)
    torch.nn.init.normal_(relative.weight)
    gates = attlas.Forget(logsigmoid(torch.randn(HEADS, count) + 3.0))
    table = attlas.TensorBias(torch.randn(count, count))

    def product(score: attlas.Score | None = None, mask: Any = None) -> Call:
        return lambda: attlas.attend(q, k, score=score, mask=mask) @ v

    def function(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i // 64) >= (j // 64)

    more = stats.ColumnMass(), stats.Picture(256, 256)
    yield (
        "full",
        lambda: sdpa(q, k, v),
        {
            Row("output", 0.45): product(),
            Row("relative bias", 0.65): product(dot + relative),
            Row("tensor of all pairs", 0.90): product(dot + table),
            Row("mask_mod", 0.75): product(None, function),
            Row("output, then row statistics", 0.60): then(q, k, v, None, *row_statistics()),
            Row("output, then these, column mass, picture", 0.75): then(q, k, v, None, *row_statistics(), *more),
        },
    )
    yield (
        "causal",
        lambda: sdpa(q, k, v, is_causal=True),
        {
            Row("output", 0.46): product(None, CAUSAL),
            Row("ALiBi", 0.60): product(dot + attlas.Alibi(HEADS), CAUSAL),
            Row("Forget", 0.60): product(dot + gates, CAUSAL),
            Row("Gaussian", 0.70): product(attlas.Gaussian(8.0), CAUSAL),
            Row("output, then row statistics", 0.65): then(q, k, v, CAUSAL, *row_statistics()),
            Row("output, then these, column mass, picture", 0.75): then(q, k, v, CAUSAL, *row_statistics(), *more),
        },
    )


def small() -> Iterator[tuple[str, Call, dict[Row, Call], int]]:
    """Yield the same for few queries and keys, and how often each is called in a round."""
    for keys, goals, calls in ((1024, (1.5, 3.0), 400), (65536, (1.1, 1.1), 10)):
        q, k, v = tokens(1, keys)
        output = lambda q=q, k=k, v=v: attlas.attend(q, k) @ v  # noqa: E731
        both = lambda q=q, k=k, v=v: attlas.attend(q, k).collect(stats.Pooled(v), stats.Entropy())  # noqa: E731
        rows = {
            Row("output", goals[0]): output,
            Row("output, then entropy", goals[1]): then(q, k, v, None, stats.Entropy()),
            Row("output and entropy in one call", goals[1]): both,
        }
        yield f"one query, {keys:,} keys", lambda q=q, k=k, v=v: sdpa(q, k, v), rows, calls
    for m, n in ((1, 64), (16, 64), (64, 64)):
        q, k, v = tokens(m, n, batch=256)
        own = lambda q=q, k=k: attlas.attend(q, k).collect(stats.Entropy())  # noqa: E731
        both = lambda q=q, k=k, v=v: attlas.attend(q, k).collect(stats.Pooled(v), stats.Entropy())  # noqa: E731
        rows = {Row("entropy", 1.25): own, Row("output and entropy in one call", 1.25): both}
        yield f"{m} × {n}, batch of 256", lambda q=q, k=k, v=v: sdpa(q, k, v), rows, 10


def times(call: Call, count: int) -> Call:
    """Return a call that makes another one several times."""

    def run() -> None:
        for _ in range(count):
            call()

    return run if count > 1 else call


def compared(group: str, base: Call, rows: dict[Row, Call], rounds: int, calls: int = 1) -> dict[str, Any]:
    """Measure a group and print it beside its goals."""
    print(f"== {group}")
    cases = {"sdpa": times(base, calls), **{row.name: times(call, calls) for row, call in rows.items()}}
    found: dict[str, Any] = ratios(cases, "sdpa", rounds)
    for row in rows:
        found[row.name]["goal"] = row.goal
    return found


def models(rounds: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the ratios of a recorded generation to that on SDPA, and of a corpus to the plain forward."""
    import corpus
    import generation

    model, names = generation.model_of(), {"attlas": 1.02, "recorded, entropy": 1.25}
    print("== generation of 128 tokens, 4 layers")
    cases = {name: lambda name=name: generation.write(model, name, 128) for name in ("sdpa", *names)}
    found: dict[str, Any] = ratios(cases, "sdpa", rounds)
    for name, goal in names.items():
        found[name]["goal"] = goal
    yield "generation of 128 tokens, 4 layers", found
    print(f"== corpus, {corpus.SHIPPED}, all statistics")
    own, ids = corpus.shipped(quick=False)
    with torch.enable_grad(), corpus.reading(own, ids[None]) as read:
        cases = {"plain forward, sdpa": lambda: corpus.plain(own, ids[None]), "corpus": read}
        found = ratios(cases, "plain forward, sdpa", rounds)
    found["corpus"]["goal"] = 1.15
    yield f"corpus, {corpus.SHIPPED}", found


def avx2_rows(count: int, rounds: int) -> dict[str, Any]:
    """Return three rows of a process that has AVX2 alone."""
    command = [sys.executable, __file__, "--avx2", "--tokens", str(count), "--rounds", str(rounds)]
    done = subprocess.run(command, env={**os.environ, **AVX2}, stdout=subprocess.PIPE, text=True, check=True)
    *table, result = done.stdout.splitlines()
    print("\n".join(table))
    found: dict[str, Any] = json.loads(result)
    return found


def forced(count: int, rounds: int) -> dict[str, Any]:
    """Measure the rows of a process that has AVX2 alone, with one thread."""
    torch.set_num_threads(1)
    goals = {"output": 0.70, "relative bias": 0.75, "output, then row statistics": 0.95}
    group, base, rows = next(large(count))
    rows = {row._replace(goal=goals[row.name]): call for row, call in rows.items() if row.name in goals}
    return compared(f"AVX2 forced, one thread, {group}", base, rows, rounds)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", metavar="WORDS", help="only the groups with this in their name")
    parser.add_argument("--avx2", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.manual_seed(0)
    if args.avx2:
        print(json.dumps(forced(args.tokens, args.rounds)))
        return
    results: dict[str, Any] = {"tokens": args.tokens, "instruction set": library.current().instruction_set}
    for group, base, rows in large(args.tokens):
        if args.only in group:
            results[group] = compared(f"{group}, {args.tokens:,} tokens", base, rows, args.rounds)
    for group, base, rows, calls in small():
        if args.only in group:
            results[group] = compared(f"{group}, {calls} calls", base, rows, 3 * args.rounds, calls)
    if args.only in "generation, corpus" and importlib.util.find_spec("transformers"):
        results |= models(args.rounds)
    if args.only in "AVX2" and "avx2" in library.runnable():
        results["AVX2 forced"] = avx2_rows(args.tokens, args.rounds)
    print(f"\n{'':64s} {'goal':>6s} {'ratio':>7s}   smallest to largest")
    for group, found in results.items():
        for name, row in found.items() if isinstance(found, dict) else ():
            if "goal" in row:
                spread = f"{row['ratio_min']:.2f} to {row['ratio_max']:.2f}"
                print(f"{group + ': ' + name:64s} {row['goal']:6.2f} {row['ratio_median']:7.2f}   {spread}")
    if not args.only:
        save("speed" if library.available() else "speed-plain-torch", results)


if __name__ == "__main__":
    main()
