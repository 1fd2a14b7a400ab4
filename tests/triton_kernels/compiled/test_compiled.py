"""Kernels compile for GPUs that are not here, fit into their memory, and spill nothing in their loops. No GPU.

``make test-triton`` runs it, in a process of its own: kernels that were imported for the interpreter cannot be
compiled. The compiler refuses what the interpreter lets pass: variables that change their type in a loop, for example.
"""

from __future__ import annotations

import json
import os
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("it needs the compiler of Triton: make test-triton", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed: make test-triton")


def load() -> Any:
    spec = spec_from_file_location("gpu_model", ROOT / "benchmarks" / "gpu_model.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


model = load()
FLOOR = "rows, columns, floor of the largest"


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what was compiled, for the next run."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(ROOT / "build" / "triton"))


@pytest.mark.parametrize(
    ("case", "d", "architecture"),
    [
        *((FLOOR, 128, 90), ("output, rows", 64, 90), ("largest with keys", 128, 80), ("output, rows", 128, 86)),
        *((FLOOR, 256, 89), ("cells", 64, 100), ("rows, columns", 128, 120), ("moments", 64, 90)),
        *(("rows, columns", 64, "gfx942"), ("log-sum-exp", 64, "gfx942"), ("diagonals", 64, 80)),
        *(("gradients of queries", 64, 90), ("gradients of keys", 128, 80)),
        *(("Additive, output", 128, 90), ("Laplace, rows, columns", 8, 86), ("Additive, gradients of units", 128, 90)),
    ],
)
def test_compiles(case: str, d: int, architecture: Any) -> None:
    found = model.read(case, d, architecture)
    assert found["fits"], found
    if isinstance(architecture, int):
        assert found["programs"] >= 1
        assert found["spills_in_loop"] == 0, found
        assert found["instructions_a_cell"] > 0 or case == "cells"  # a program of theirs has one tile, without a loop


def test_cap_and_places_need_smaller_tiles() -> None:
    found = model.read(FLOOR, 80, 80, asked=("KEYS", "DISTANCES"), CAP=True)
    assert found["fits"]
    assert found["spills_in_loop"] == 0, found


def test_every_kernel_is_a_case() -> None:
    folder = ROOT / "src" / "attlas" / "engine" / "backends" / "triton" / "kernels"
    kernels = {file.stem for file in folder.glob("*.py")} - {"__init__", "tiles", "slopes"}
    assert {kernel for kernel, *_ in model.CASES.values()} == kernels


#: Kernels that keep numbers of a row in memory in their loop: a known cost, and the only ones.
#: Tiles without would take 22 to 60 % more instructions for a cell.
SPILL = {("output, rows, floor of the largest", 256, 90), ("Additive, gradients of units", 128, 120)}
SPILL |= {("gradients of queries", 128, 86), ("gradients of queries", 128, 89), ("gradients of queries", 256, 100)}


def test_the_stored_results_are_predictions() -> None:
    stored = json.loads(model.RESULTS.read_text("utf-8"))
    assert stored["about"]["what"].startswith("PREDICTIONS")
    found = {(one["case"], one["d"], one["architecture"]): one for one in stored["kernels"]}
    assert set(found) | {tuple(job) for job in stored["about"].get("not_read", [])} == set(model.jobs())
    assert not [one for one in found.values() if "error" in one or not one["fits"]]
    assert {job for job, one in found.items() if one.get("spills_in_loop")} <= SPILL
    assert found["Additive, output", 128, 90]["predicted_ms"] <= 2.0  # of 8,192 x 8,192 pairs
