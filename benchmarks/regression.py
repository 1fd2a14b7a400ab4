"""Kernel regression: attlas beside numpy, statsmodels and KeOps; sums over a million keys; time against their number.

    python benchmarks/regression.py [--quick]

Goals: 10,000 x 10,000 in 5 coordinates at least 500 times statsmodels and 50 times KeOps; 100,000 x 100,000 in 5
coordinates under 3 s; one coordinate: 1,000,000 x 100,000 under 3 s, 1,000,000 x 1,000,000 under 10 s for Gaussian,
Laplace and Epanechnikov; memory under 300 MB beyond the data; time near linear in n.

Bandwidths are Scott's. statsmodels predicts one query after another, so that some queries stand for all of them. KeOps
compiles a kernel at its first call, which is not counted. Peers that are not installed are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import math
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attlas.estimators import kernel_sums, plan_sums
from harness import RESULTS, extra_peak_bytes, save


def problem(m: int, n: int, d: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, float]:
    """Return queries, keys, values and Scott's bandwidth of normal data of variance 1."""
    random = torch.Generator().manual_seed(0)
    x, keys = (torch.randn(size, d, generator=random, dtype=dtype) for size in (m, n))
    noise = 0.1 * torch.randn(n, 1, generator=random, dtype=dtype)
    return x, keys, keys.sum(-1, keepdim=True).sin() + noise, n ** (-1 / (d + 4))


def seconds(run: Callable[[], Any], rounds: int) -> float:
    """Return the least time of a few runs: what else the machine does can only add to it."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def by_numpy(x: np.ndarray, keys: np.ndarray, values: np.ndarray, h: float, rows: int = 200) -> np.ndarray:
    """Return the estimate from the formula, some rows at a time."""
    out = []
    for i in range(0, len(x), rows):
        square = ((x[i : i + rows, None] - keys) ** 2).sum(-1) / (-2 * h * h)
        weight = np.exp(square - square.max(-1, keepdims=True))
        out.append(weight @ values / weight.sum(-1, keepdims=True))
    return np.concatenate(out)


def by_keops(x: Tensor, keys: Tensor, values: Tensor, h: float) -> Callable[[], Tensor] | None:
    """Return the same from KeOps on the CPU, compiled; None where that cannot be."""
    if importlib.util.find_spec("pykeops") is None:
        return None
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from pykeops.torch import LazyTensor

            def run() -> Tensor:
                gap = (LazyTensor(x[:, None, :]) - LazyTensor(keys[None, :, :])) / h
                weight = (-(gap**2).sum(-1) / 2).exp()
                return (weight @ values) / weight.sum(1)

            run()
    except Exception as error:  # noqa: BLE001  # a compiler may be missing, and says so in many ways
        print(f"KeOps does not run here: {type(error).__name__}: {error}")
        return None
    return run


def by_statsmodels(x: Tensor, keys: Tensor, values: Tensor, h: float) -> Callable[[], np.ndarray] | None:
    """Return the same from statsmodels, which computes in float64."""
    if importlib.util.find_spec("statsmodels") is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its own imports
        from statsmodels.nonparametric.kernel_regression import KernelReg

    d = keys.shape[1]
    model = KernelReg(values[:, 0].double().numpy(), keys.double().numpy(), "c" * d, "lc", bw=np.full(d, h))
    return lambda: model.fit(x.double().numpy())[0]


def peers(n: int, sample: int) -> dict[str, Any]:
    """Time n queries and keys in 5 coordinates, each dtype on its own."""
    found: dict[str, Any] = {}
    for dtype in (torch.float32, torch.float64):
        x, keys, values, h = problem(n, n, 5, dtype)
        mine = kernel_sums("gaussian", x, keys, values, h).mean()
        runs: dict[str, tuple[Callable[[], Any] | None, float]] = {
            "attlas": (lambda x=x, k=keys, v=values, h=h: kernel_sums("gaussian", x, k, v, h).mean(), 1.0),
            "KeOps": (by_keops(x, keys, values, h), 1.0),
            "statsmodels": (by_statsmodels(x[:sample], keys, values, h), n / sample),
            "numpy": (
                lambda x=x, k=keys, v=values, h=h: by_numpy(*(t.numpy() for t in (x[:sample], k, v)), h),
                n / sample,
            ),
        }
        known = by_numpy(*(t.double().numpy() for t in (x[:sample], keys, values)), h)
        error = float(np.abs(mine[:sample].double().numpy() - known).max())
        case: dict[str, Any] = {"error against numpy in float64": error}
        for name, (run, factor) in runs.items():
            if run is None:
                continue
            case[name] = {"seconds": round(seconds(run, {"attlas": 10, "KeOps": 3}.get(name, 1)) * factor, 4)}
            if factor != 1.0:
                case[name]["queries timed"] = sample
        for name in ("KeOps", "statsmodels", "numpy"):
            if name in case:
                case[name]["times slower than attlas"] = round(case[name]["seconds"] / case["attlas"]["seconds"], 1)
        found[str(dtype).removeprefix("torch.")] = case
        print(f"{n:,} x {n:,}, d 5, {dtype}: {case}", flush=True)
    return found


def one(kernel: str, m: int, n: int, d: int, dtype: torch.dtype, rounds: int) -> dict[str, Any]:
    """Time one problem, and compare some of its rows with every pair."""
    x, keys, values, h = problem(m, n, d, dtype)
    some = slice(0, m, max(1, m // 50))
    sums = kernel_sums(kernel, x, keys, values, h)
    exact = kernel_sums(kernel, x[some].double(), keys.double(), values.double(), h, tolerance=0.0)
    gap = (sums.mean()[some].double() - exact.mean()).abs().nan_to_num(0.0).max()
    del sums
    found = {
        "seconds": round(seconds(lambda: kernel_sums(kernel, x, keys, values, h), rounds), 3),
        "way": plan_sums(kernel, x, keys, values, h).method,
        "error": float(gap),
    }
    print(f"{kernel}, {m:,} x {n:,}, d {d}, {str(dtype).removeprefix('torch.')}: {found}", flush=True)
    return found


def growth(sizes: list[int], rounds: int) -> dict[str, Any]:
    """Time n queries and n keys of one coordinate; fit seconds = c n^p to the larger half."""
    found: dict[str, Any] = {}
    for kernel in ("gaussian", "laplace", "epanechnikov"):
        times = []
        for n in sizes:
            x, keys, values, h = problem(n, n, 1, torch.float64)
            run = lambda k=kernel, x=x, z=keys, v=values, h=h: kernel_sums(k, x, z, v, h)  # noqa: E731
            run()
            times.append(round(seconds(run, rounds), 4))
        half = len(sizes) // 2
        power = float(np.polyfit([math.log(n) for n in sizes[half:]], [math.log(t) for t in times[half:]], 1)[0])
        found[kernel] = {"n": sizes, "seconds": times, "power of n": round(power, 3)}
        print(f"{kernel}: n {sizes}, seconds {times}, power of n {power:.2f}", flush=True)
    return found


def draw(found: dict[str, Any]) -> None:
    """Draw the times against n, where matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot()
    for kernel, case in found.items():
        axes.loglog(case["n"], case["seconds"], "o-", label=f"{kernel}, n^{case['power of n']:.2f}")
    axes.set(xlabel="queries and keys, one coordinate", ylabel="seconds", title="Kernel sums, tolerance 1e-7")
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend()
    figure.savefig(RESULTS / "regression.svg")
    print("written: benchmarks/results/regression.svg")


def memory(kernel: str, n: int, d: int) -> float:
    """Return the extra peak of memory in MB, from a process of its own."""
    command = [sys.executable, __file__, "--memory", kernel, str(n), str(d)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return round(int(done.stdout.split()[-1]) / 1e6, 1)


def _extra(kernel: str, n: int, d: int) -> None:
    x, keys, values, h = problem(n, n, d, torch.float64)
    kernel_sums(kernel, x[:3000], keys[:3000], values[:3000], h)
    print(extra_peak_bytes(lambda: kernel_sums(kernel, x, keys, values, h)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="small sizes, seconds; writes nothing")
    parser.add_argument("--memory", nargs=3, metavar=("KERNEL", "N", "D"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.memory:
        _extra(given.memory[0], int(given.memory[1]), int(given.memory[2]))
        return
    quick, rounds = given.quick, 1 if given.quick else 2
    million = 100_000 if quick else 1_000_000
    lines = ("gaussian", "laplace", "epanechnikov")
    results: dict[str, Any] = {"peers, d 5": peers(2_000 if quick else 10_000, 50 if quick else 500)}
    results["one coordinate"] = {
        f"{kernel}, {million:,} x {n:,}": one(kernel, million, n, 1, torch.float64, rounds)
        for kernel, n in (("gaussian", million // 10), *((kernel, million) for kernel in lines))
    }
    wide = 10_000 if quick else 100_000
    results["several coordinates"] = {
        f"gaussian, {wide:,} x {wide:,}, d {d}, {str(dtype).removeprefix('torch.')}": one(
            "gaussian", wide, wide, d, dtype, 1
        )
        for d, dtype in ((5, torch.float32), (5, torch.float64), (2, torch.float64))
    }
    results["growth"] = growth([2**p * 1000 for p in range(1, 7 if quick else 11)], rounds)
    results["extra memory, MB"] = {
        f"{kernel}, {n:,} x {n:,}, d {d}": memory(kernel, n, d)
        for kernel, n, d in (*((kernel, million, 1) for kernel in lines), ("gaussian", wide // 5, 5))
    }
    print(results["extra memory, MB"])
    if not quick:
        save("regression", results)
        draw(results["growth"])


if __name__ == "__main__":
    main()
