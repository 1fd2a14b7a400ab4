"""``attlas doctor``: what it prints of this processor, of a pretended GPU, and of kernels that are wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.cli.conftest import Run
from tests.cuda_kernels import pretended

import attlas
from attlas.cli import doctor, doctor_cases, main
from attlas.engine import trust

SMALL = ["doctor", "--device", "cpu", "--tokens", "64", "--heads", "2", "--size", "16", "--seconds", "300"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(trust, "_faults_of_process", {})
    monkeypatch.setattr(doctor_cases, "_TIMED_ROUNDS", 2)
    yield tmp_path / "attlas"
    trust._table_in_file.cache_clear()


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of the cases."""
    kept = [case for case in doctor_cases.CASES if case.name in ("causal", "Gaussian")]
    monkeypatch.setattr(doctor_cases, "CASES", kept)


def report(said: Run, *words: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(said(*SMALL, *words, "--json"))
    return found


def test_all_backends_of_this_processor_are_right(said: Run, folder: Path) -> None:
    found = report(said)
    assert found["passed"] is True
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["attlas"] == attlas.__version__
    assert found["versions"].keys() == {"python", "torch", "triton", "transformers", "attlas"}
    assert found["device"].keys() == {"type", "name", "threads"}
    assert found["cache"]["trouble"] is None
    assert found["waits"] is None
    assert set(found["backends"]) == {"native", "sdpa", "tiled"}
    for name, own in found["backends"].items():
        assert own.keys() == {case.name for case in doctor_cases.CASES}
        for case, marks in own.items():
            assert marks.keys() == {"output", "gradients", "statistics"}
            assert all(text == "passed" or (name != "tiled" and text.startswith("not")) for text in marks.values()), (
                case
            )
    rows = found["times"]["rows"]
    assert [row["name"] for row in rows if row["backend"] == ""] == ["SDPA", "SDPA, with gradients"]
    assert all(row["seconds"] > 0 and row["ratio"] > 0 and not row["error"] for row in rows)
    assert not folder.exists()  # nothing is remembered of a processor


def test_what_is_printed(said: Run, few: None) -> None:
    out = said(*SMALL)
    assert max(map(len, out.splitlines())) <= 100
    for name in ("device", "python", "torch", "triton", "transformers", "attlas", "CPU kernels"):
        assert re.search(rf"^  {name} +\S", out, flags=re.M), out
    assert re.search(r"^  causal +. +✓ +✓|^  causal +✓ ", out, flags=re.M), out
    assert re.search(r"^  SDPA +[\d.,]+ (ms|µs) +1\.00  torch$", out, flags=re.M), out
    assert re.search(r"^  A @ v +[\d.,]+ (ms|µs) +[\d.]+  \w+$", out, flags=re.M), out
    assert "never: it is the host" in out
    assert "all that ran is right" in out


def test_wrong_kernels_and_errors_are_told(said: Run, few: None, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    results = doctor_cases._tensors_of_operation

    def wrong(operation: str, given: Any, own: Any, plan: attlas.Plan) -> Any:
        if plan.backend == "sdpa" and operation == "gradients":
            raise ValueError("out of resource: shared memory\nand more")
        factor = 1.1 if plan.backend == "tiled" and operation == "output" else 1.0
        return [t * factor for t in results(operation, given, own, plan)]

    def rows(q: Any, k: Any, v: Any) -> Iterator[Any]:
        yield [("SDPA", lambda: q @ k.mT, None, "output"), ("broken", lambda: q @ k, None, "output")]

    monkeypatch.setattr(doctor_cases, "_tensors_of_operation", wrong)
    monkeypatch.setattr(doctor_cases, "rows", rows)
    folder.touch()
    trust.forget(torch.device("cpu"))
    (folder.parent / "other").mkdir()
    out = said(*SMALL)
    assert "✗ tiled, causal, output: its output differs by 0.1 of its largest number" in out
    assert "✗ sdpa, causal, gradients: ValueError: out of resource: shared memory" in out
    assert re.search(r"^  broken +failed$", out, flags=re.M), out
    assert "✗ broken: RuntimeError: " in out
    assert "Please open an issue of attlas" in out
    assert "cache folder: " in out
    found = report(said)
    assert found["passed"] is False
    assert found["backends"]["tiled"]["causal"]["statistics"] == "passed"
    assert str(folder / "kernels.json") in found["cache"]["trouble"]


def test_a_gpu_that_is_pretended(said: Run, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """It takes the ways of a GPU; a family of kernels that fails is told with its name."""
    kept = [case for case in doctor_cases.CASES if case.name in ("causal", "sink", "one query")]
    monkeypatch.setattr(doctor_cases, "CASES", kept)
    monkeypatch.setattr(doctor_cases, "waits", lambda device: {"A @ v": 0, "top-8": "RuntimeError: no"})
    family = trust.Family("triton", "row statistics, bfloat16, d 64")
    forget = trust.forget

    def then_fails(device: torch.device) -> None:
        forget(device)
        with pytest.warns(UserWarning, match="attlas doctor"):
            trust.fault_of(family, device, lambda: "the entropy differs", attlas.Plan())

    monkeypatch.setattr(trust, "forget", then_fails)
    with pretended() as (device, kernels):
        out = said("doctor", "--device", "cuda", *SMALL[3:])
        assert not [place for _, place in device.mixed if not place.startswith("cli/")], device.report()
        assert kernels.taken
    assert "✗ triton: row statistics, bfloat16, d 64" in out
    assert "✗ triton: row statistics, bfloat16, d 64: the entropy differs" in out.replace("\n ", "")
    assert re.search(r"^  A @ v +0$", out, flags=re.M), out
    assert "✗ top-8: RuntimeError: no" in out
    assert "bfloat16, causal" in out
    assert not folder.exists()


def test_waits_are_those_that_torch_warns_of(monkeypatch: pytest.MonkeyPatch) -> None:
    import warnings

    modes: list[object] = ["default"]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def waits() -> None:
        for text in ("called a synchronizing CUDA operation",) * 2 + ("something else",):
            if modes[-1] == "warn":
                warnings.warn(text, stacklevel=1)

    def broken() -> None:
        raise RuntimeError("no\nmore")

    assert doctor_cases._count_of_waits(waits) == 2
    assert doctor_cases._count_of_waits(broken) == "RuntimeError: no"
    assert modes == ["default", "warn", "default"]
    assert doctor_cases.waits(torch.device("cpu")) is None


def test_without_time_it_says_what_is_missing(said: Run) -> None:
    out = said(*SMALL[:-1], "0.001")
    assert "39 comparisons had no time left; --seconds gives more." in out
    assert "?" in out
    assert re.search(r"^  SDPA +\S+ (ms|µs)", out, flags=re.M), out  # a table there is


@pytest.mark.parametrize(
    ("arguments", "found"), [(["--tokens", "0"], "--tokens 0"), (["--seconds", "nan"], "--seconds nan")]
)
def test_wrong_numbers(arguments: list[str], found: str, complaint: Run) -> None:
    assert complaint("doctor", *arguments) == f"doctor: {found}"


def test_a_device_that_is_not_here(complaint: Run) -> None:
    assert complaint("doctor", "--device", "nothing").startswith("doctor: --device nothing: ")


def test_the_device_is_that_of_this_machine() -> None:
    device = doctor.device_of(None)
    assert device.type == "cpu" or torch.accelerator.is_available()
    assert doctor.device_of("cpu") == torch.device("cpu")


def test_help_says_how_long_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    assert "less than two minutes" in " ".join(capsys.readouterr().out.split())


def test_kernels_that_are_known_to_be_wrong_are_not_what_is_not_their_work(monkeypatch: pytest.MonkeyPatch) -> None:
    class Known:
        computes = frozenset({"output"})

        def unsupported(self, request: Any, operation: str) -> str:
            return "they failed"

    monkeypatch.setattr(doctor_cases, "backends_of", lambda name, device: (Known(),))
    cpu, case = torch.device("cpu"), doctor_cases.CASES[0]
    assert doctor_cases.compare("flex", case, cpu)["output"] == "not computed: they failed"
    monkeypatch.setattr(trust, "faults", lambda name, device: {"a family": "they failed"})
    found = doctor_cases.compare("flex", case, cpu)
    assert found["output"] == found["gradients"] == "failed: they failed"
    assert found["statistics"] == "not computed: it has no statistics"
