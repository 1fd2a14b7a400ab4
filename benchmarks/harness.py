"""What every benchmark shares: paired timing, peak memory, and results with the machine they came from."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from attlas.foundation.files import whole_file

RESULTS = Path(__file__).parent / "results"


def ratios(
    cases: dict[str, Callable[[], Any]], base: str, rounds: int = 5, clock: Callable[[], float] = time.perf_counter
) -> dict[str, dict[str, float]]:
    """Time cases in turn, round by round, and return each one's seconds and its ratio to `base`.

    The ratio is the median over rounds of a quotient taken inside one round, so that a machine whose speed
    drifts does not decide the result.
    """
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for run in cases.values():
        run()
    for number in range(rounds):
        print(f"  round {number + 1} of {rounds}, {len(cases)} cases", file=sys.stderr, flush=True)
        for name, run in cases.items():
            start = clock()
            run()
            seconds[name].append(clock() - start)
    out = {}
    for name, own in seconds.items():
        quotients = [a / b for a, b in zip(own, seconds[base], strict=True)]
        out[name] = {
            "seconds_median": round(statistics.median(own), 4),
            "ratio_median": round(statistics.median(quotients), 3),
            "ratio_min": round(min(quotients), 3),
            "ratio_max": round(max(quotients), 3),
        }
        print(f"{name:58s} {out[name]['seconds_median']:9.3f} s   ratio {out[name]['ratio_median']:7.3f}", flush=True)
    return out


def extra_peak_bytes(run: Callable[[], Any]) -> int:
    """Return by how much the peak of resident memory passes what the process held before `run` (Linux)."""
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to the present size
    before = _status("VmRSS")
    run()
    return _status("VmHWM") - before


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def add(name: str, case: str, result: dict[str, Any]) -> None:
    """Write the result of one case into a file of many, beside what it was measured with; the others stay."""
    file = RESULTS / f"{name}.json"
    known = json.loads(file.read_text())["results"] if file.exists() else {}
    save(name, {**known, case: {"measured with": machine(), **result}})


def save(name: str, results: Any) -> None:
    """Write results beside the machine, versions and commit they were measured with."""
    RESULTS.mkdir(exist_ok=True)
    record = {"machine": machine(), "results": results}
    with whole_file(RESULTS / f"{name}.json") as unfinished:
        unfinished.write_text(json.dumps(record, indent=2) + "\n")
    print(f"written: benchmarks/results/{name}.json")


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "commit": commit.stdout.strip(),
    }
