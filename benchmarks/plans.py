"""Whether the plan that attlas chooses is the fastest: random problems, computed by each plan that can.

Run with ``python benchmarks/plans.py [--problems 500] [--seed 0]``. Goal: no problem of which the chosen plan takes
more than 1.15 x the time of the best one. Times are minima of calls by turns, in another order each time; a problem
above the goal is measured again, longer.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import attlas
from attlas import stats
from attlas.errors import BackendError
from harness import save

GOAL = 1.15
PLANS = ("auto", "native", "sdpa", "tiled")
CELLS = 1 << 24  # of all heads together, at most
SHORT, LONG = 0.03, 0.4  # seconds for each plan of a problem, at least, and where it is measured again


_PLANS = {name: attlas.Plan(name) for name in PLANS}


class Problem(NamedTuple):
    """What is computed: sizes, names of score, mask and operation, dtype of the tokens."""

    batch: int
    heads: int
    key_heads: int
    m: int
    n: int
    d: int
    score: str
    mask: str
    operation: str
    dtype: torch.dtype


def scores(heads: int, d: int) -> dict[str, Any]:
    """Return scores by name."""
    return {
        "dot product": attlas.ScaledDot(),
        "soft cap": attlas.SoftCap(attlas.ScaledDot(), 20.0),
        "ALiBi": attlas.ScaledDot() + attlas.Alibi(heads),
        "Gaussian": attlas.Gaussian(float(d) ** 0.5),
        "Laplace": attlas.Laplace(float(d)),
    }


def masks(n: int) -> dict[str, Any]:
    """Return masks by name."""
    return {
        "none": None,
        "causal": attlas.Causal(),
        "window": attlas.Window(63, 0),
        "padding": attlas.Padding([max(n * 3 // 4, 1)]),
        "dilated": attlas.Dilated(128, 0, 4),
        "function": lambda b, h, i, j: (i >= j) & ((i - j) % 3 != 1),
    }


def operations() -> dict[str, Callable[[attlas.AttentionMatrix, Tensor], Any]]:
    """Return what is computed of a matrix, by name."""

    def gradients(A: attlas.AttentionMatrix, v: Tensor) -> None:
        (A @ v).sum().backward()

    return {
        "output": lambda A, v: A @ v,
        "gradients": gradients,
        "entropy": lambda A, v: A.collect(stats.Entropy()),
        "several statistics": lambda A, v: A.collect(
            stats.Entropy(), stats.TopK(min(8, A.shape[-1])), stats.ColumnMass()
        ),
        "largest weights": lambda A, v: A.collect(stats.TopK(min(4, A.shape[-1]))),
    }


def drawn(source: random.Random) -> Problem:
    """Return a random problem that is not too large."""
    while True:
        m, n = (int(2 ** source.uniform(0, 12)) for _ in range(2))
        if source.random() < 0.5:
            m = n
        heads, batch = source.choice((1, 2, 4, 8, 12)), source.choice((1, 1, 2))
        key_heads = source.choice([k for k in (1, 2, 4, heads) if heads % k == 0])
        score = source.choice(("dot product", "dot product", "dot product", "soft cap", "ALiBi", "Gaussian", "Laplace"))
        d = source.choice((2, 4, 8) if score == "Laplace" else (16, 32, 64, 80, 128))
        mask = source.choice(("none", "causal", "causal", "window", "padding", "dilated", "function"))
        dtype = source.choice((torch.float32, torch.float32, torch.bfloat16))
        if batch * heads * m * n <= CELLS:
            operation = source.choice(tuple(operations()))
            return Problem(batch, heads, key_heads, m, n, d, score, mask, operation, dtype)


def calls(problem: Problem) -> dict[str, Callable[[], Any]]:
    """Return a call for each plan that can compute the problem."""
    shapes = [(problem.heads, problem.m), (problem.key_heads, problem.n), (problem.key_heads, problem.n)]
    q, k, v = (torch.randn(problem.batch, h, tokens, problem.d, dtype=problem.dtype) for h, tokens in shapes)
    score, mask = scores(problem.heads, problem.d)[problem.score], masks(problem.n)[problem.mask]
    run, graph = operations()[problem.operation], problem.operation == "gradients"
    for t in (q, k, v):
        t.requires_grad_(graph)
    found = {}
    for name in PLANS:

        def call(name: str = name) -> None:
            with torch.set_grad_enabled(graph):
                run(attlas.attend(q, k, score=score, mask=mask, plan=_PLANS[name]), v)

        try:
            call()
        except BackendError:
            continue
        found[name] = call
    return found


def minima(cases: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
    """Return the least time of each case, of calls by turns for so many seconds each."""
    best = dict.fromkeys(cases, float("inf"))
    order, taken = list(cases), 0.0
    while taken < seconds * len(cases):
        random.shuffle(order)  # a call finds the caches as the one before it left them
        for name in order:
            call = cases[name]
            start = time.perf_counter()
            call()
            own = time.perf_counter() - start
            best[name], taken = min(best[name], own), taken + own
    return best


def ratio(times: dict[str, float]) -> float:
    """Return how many times as long as the best plan the chosen one takes."""
    return times["auto"] / min(times.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--problems", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    source = random.Random(args.seed)
    above: list[dict[str, Any]] = []
    ratios = []
    for number in range(args.problems):
        problem = drawn(source)
        cases = calls(problem)
        times = minima(cases, SHORT)
        if ratio(times) > GOAL:
            again = minima(cases, LONG)
            times = {name: min(times[name], again[name]) for name in times}
        ratios.append(ratio(times))
        if ratios[-1] > GOAL:
            shown = {name: str(value).removeprefix("torch.") for name, value in problem._asdict().items()}
            micro = {name: round(t * 1e6, 1) for name, t in times.items()}
            above.append({"ratio": round(ratios[-1], 2), **shown, "microseconds": micro})
            print(f"{ratios[-1]:5.2f}  {' '.join(shown.values())}  {micro}")
        if number % 50 == 49:
            print(f"{number + 1} problems, {len(above)} above {GOAL}")
    ratios.sort()
    places = {"median": 0.5, "0.9": 0.9, "0.99": 0.99, "worst": 1.0}
    found = {name: round(ratios[min(int(place * len(ratios)), len(ratios) - 1)], 3) for name, place in places.items()}
    save("plans", {"problems": args.problems, "seed": args.seed, "ratio": found, "above the goal": above})


if __name__ == "__main__":
    main()
