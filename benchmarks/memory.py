"""Extra peak memory of the process, each case in a process of its own (Linux).

Run with ``make bench`` or ``python benchmarks/memory.py``. Goals: attend, ``A @ v`` and all statistics at
65,536 x 65,536 at most 200 MB; an additive score at 8,192 x 8,192 with 128 hidden units, forward and
backward, at most 300 MB.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attlas
from attlas import stats
from harness import extra_peak_bytes, save
from speed import all_statistics


def every_statistic() -> int:
    n = 65_536
    q, k, v = (torch.randn(1, 1, n, 64) for _ in range(3))
    _warm()

    def run() -> None:
        a = attlas.attend(q, k)
        _ = a @ v
        a.collect(*all_statistics(), stats.Coverage())

    return extra_peak_bytes(run)


def additive() -> int:
    n, hidden = 8_192, 128
    score = attlas.Additive(64, 64, hidden)
    q, k, v = (torch.randn(1, 1, n, 64, requires_grad=True) for _ in range(3))
    _warm()
    return extra_peak_bytes(lambda: attlas.attention(q, k, v, score=score).sum().backward())


def dot_backward() -> int:
    n = 65_536
    q, k, v = (torch.randn(1, 1, n, 64, requires_grad=True) for _ in range(3))
    _warm()
    return extra_peak_bytes(lambda: (attlas.attend(q, k) @ v).sum().backward())


def plain_small() -> int:
    """The plain formula at an eighth of the length, for comparison: 64 times fewer cells."""
    n = 8_192
    q, k, v = (torch.randn(1, 1, n, 64) for _ in range(3))
    _warm()
    return extra_peak_bytes(lambda: torch.softmax(q @ k.mT / 8, dim=-1) @ v)


def _warm() -> None:
    """Let libraries take what they keep for good before the measurement."""
    q = torch.randn(1, 1, 512, 64, requires_grad=True)
    a = attlas.attend(q, q)
    (a @ q).sum().backward()
    sdpa(q, q, q)
    a.collect(stats.Entropy(), stats.TopK(8), stats.Coverage())


CASES = {
    "attend, A @ v, all statistics: 65,536 x 65,536": every_statistic,
    "Additive, forward and backward: 8,192 x 8,192, 128 hidden": additive,
    "A @ v, forward and backward: 65,536 x 65,536": dot_backward,
    "plain softmax(q k^T) v: 8,192 x 8,192": plain_small,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=list(CASES))
    case = parser.parse_args().case
    if case:
        torch.manual_seed(0)
        start = time.perf_counter()
        print(CASES[case](), time.perf_counter() - start)
        return
    results = {}
    for name in CASES:
        done = subprocess.run([sys.executable, __file__, "--case", name], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{name}: exit status {done.returncode}\n{done.stderr}")
        used, seconds = done.stdout.split()
        results[name] = {"extra_peak_MB": round(int(used) / 1e6, 1), "seconds": round(float(seconds), 2)}
        print(f"{name:58s} {results[name]['extra_peak_MB']:9.1f} MB   {results[name]['seconds']:7.2f} s", flush=True)
    save("memory", results)


if __name__ == "__main__":
    main()
