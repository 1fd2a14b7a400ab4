"""The benchmark of GPUs runs here, small, and a row that fails is told while the others go on."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.cuda_kernels import pretended

FOLDER = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ModuleType]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location("benchmark_of_gpus", FOLDER / "gpu.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("harness", None)


def test_all_rows_run_on_a_cpu(gpu: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    record = gpu.main(["--tiny", "--device", "cpu", "--out", str(file)])
    assert json.loads(file.read_text())["results"].keys() == record["results"].keys()
    assert {"card", "versions", "machine", "families", "seconds"} < record.keys()
    failed = {name: found["error"] for name, found in record["results"].items() if "error" in found}
    assert set(failed.values()) == {"RuntimeError: memory is counted on CUDA only"}, failed
    goals = {found["goal"] for found in record["results"].values()}
    assert goals == {None, 1.15, 1.65, 2.2, 0.75, 0.01, 1.0, 0.2, 2.0, 1.3}  # those of the issue
    for found in record["results"].values():
        assert found["goal"] is None or "error" in found or found["holds"] == (found["figure"] <= found["goal"])
    assert not (tmp_path / "cache").exists()


def test_a_row_that_fails_is_told_on_a_device_that_is_not_there(gpu: ModuleType, tmp_path: Path) -> None:
    with pretended() as (device, kernels):
        record = gpu.main(["--tiny", "--device", "cuda", "--rows", "64 tokens", "--out", str(tmp_path / "gpu.json")])
        assert not device.mixed, device.report()
    results = record["results"]
    (memory,) = (found for name, found in results.items() if name.startswith("memory"))
    assert memory["error"].startswith("AssertionError: Torch not compiled")
    assert memory["where"].endswith(tuple("0123456789"))
    assert sum("figure" in found for found in results.values()) == len(results) - 1
    assert results["output, 64 tokens, d 16"]["backend"] == "sdpa"
    assert kernels.taken


def test_rows_that_are_not_reached_are_told(gpu: ModuleType, tmp_path: Path) -> None:
    record = gpu.main(["--tiny", "--device", "cpu", "--seconds", "-1", "--out", str(tmp_path / "gpu.json")])
    assert {found["error"] for found in record["results"].values()} == {"not reached in the time"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which would be measured")
def test_without_a_gpu_nothing_is_written(gpu: ModuleType, tmp_path: Path) -> None:
    assert gpu.main(["--out", str(tmp_path / "gpu.json")]) == {}
    assert not (tmp_path / "gpu.json").exists()
