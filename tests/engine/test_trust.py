"""Kernels are compared with tiles once on a device, and what was found is remembered in the user's cache folder."""

from __future__ import annotations

import json
import pickle
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from tests.pretend import PretendDevice

from attlas import BackendError, Plan
from attlas.engine import trust
from attlas.engine.trust import Family

GPU = torch.device("cuda", 0)
ROWS = Family("triton", "row statistics, bfloat16, d 64")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache folder of the test, a GPU that has a name, and a process that knows nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(trust, "_faults_of_process", {})
    monkeypatch.setattr(trust, "_write_errors", [])
    monkeypatch.setattr(trust, "setting_of", lambda device: "a card" if device.type == "cuda" else None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield tmp_path / "attlas"
    trust._table_in_file.cache_clear()


class Check:
    """A comparison that gives a fault, and counts its calls."""

    def __init__(self, fault: str | BaseException | None = None) -> None:
        self.fault, self.calls = fault, 0

    def __call__(self) -> str | None:
        self.calls += 1
        if isinstance(self.fault, BaseException):
            raise self.fault
        return self.fault


def ask(check: Check, family: Family = ROWS, plan: Plan | None = None, device: torch.device = GPU) -> str | None:
    return trust.fault_of(family, device, check, plan or Plan())


def new_process() -> None:
    trust._faults_of_process.clear()
    trust._table_in_file.cache_clear()


def test_a_family_is_compared_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = Check()
    assert not trust.is_known(ROWS, GPU)
    assert [ask(check), ask(check)] == [None, None]
    new_process()
    assert ask(check) is None
    assert check.calls == 1
    assert [file.name for file in folder.iterdir()] == ["kernels.json"]
    assert trust.results(GPU) == {"triton": {ROWS.name: None}}
    assert trust.trouble() is None
    assert ask(check, ROWS._replace(name="tiles of cells")) is None
    assert ask(check, ROWS._replace(backend="flex")) is None
    monkeypatch.setattr(trust, "setting_of", lambda device: "a card, another driver")
    ask(check)
    assert check.calls == 4


FAULTS = {
    "mismatch": ("the entropy differs by 0.3 of its largest number", "the entropy differs by 0.3"),
    "compiler": (RuntimeError("PassManager::run failed\nand more"), "RuntimeError: PassManager::run failed"),
    "shared memory": (
        ValueError("out of resource: shared memory, Required: 245760, Hardware limit: 101376."),
        "ValueError: out of resource: shared memory, Required: 245760, Hardware limit: 101376.",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_family_that_fails_is_used_no_more(name: str) -> None:
    fault, said = FAULTS[name]
    check = Check(fault)
    with pytest.warns(UserWarning, match="tiles instead: the results are right") as caught:
        found = ask(check)
    assert found is not None
    assert found.startswith(f"triton ({ROWS.name}) failed on cuda:0: {said}")
    (text,) = (str(one.message) for one in caught)
    assert text.startswith(found)
    assert "`attlas doctor`" in text
    assert ask(check) == found  # without another warning
    new_process()
    assert trust.known_fault(ROWS, GPU) == ask(check) == found
    with pytest.raises(BackendError) as raised:
        ask(check, plan=Plan("reference")) and ask(check, ROWS._replace(backend="flex"), Plan("flex"))
    assert raised.value.found.startswith(f"flex ({ROWS.name}) failed on cuda:0: {said}")
    assert check.calls == 2
    new_process()
    assert trust.faults("triton", GPU) == {ROWS.name: found}  # of the file
    ask(Check(), ROWS._replace(name="others"))
    with pytest.warns(UserWarning, match="cells"):
        trust.failed(ROWS._replace(name="cells", kept=False), GPU, ValueError("no"), Plan())
    assert trust.faults("triton", GPU).keys() == {ROWS.name, "cells"}
    assert trust.faults("triton", torch.device("cpu")) == {}


def test_a_plan_that_names_them_raises_each_time() -> None:
    check, family = Check("it is wrong"), ROWS._replace(backend="flex")
    for _ in range(2):
        with pytest.raises(BackendError, match="the plan asks for a backend that fails here"):
            ask(check, family, Plan("flex"))
    assert check.calls == 1


def test_they_may_fail_later() -> None:
    assert ask(Check()) is None
    with pytest.warns(UserWarning, match="no room"):
        trust.failed(ROWS, GPU, RuntimeError("no room for shared memory"), Plan())
    new_process()
    assert "no room" in (trust.known_fault(ROWS, GPU) or "")


def test_what_passes_by_is_not_remembered(folder: Path) -> None:
    with pytest.warns(UserWarning, match="OutOfMemoryError: full"):
        ask(Check(torch.OutOfMemoryError("full")))
    with pytest.raises(KeyboardInterrupt):
        ask(Check(KeyboardInterrupt()))
    assert not trust.is_known(ROWS, GPU)
    assert not folder.exists()
    assert ask(Check()) is None


def test_code_of_a_user_is_known_to_its_process_alone(folder: Path) -> None:
    check, family = Check(), ROWS._replace(kept=False)
    assert [ask(check, family), ask(check, family)] == [None, None]
    assert not folder.exists()
    new_process()
    ask(check, family)
    assert check.calls == 2


def test_nothing_is_written_of_a_cpu_or_of_a_device_that_is_not_there(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder.parent))
    monkeypatch.setattr(trust, "_faults_of_process", {})
    check = Check()
    with PretendDevice("cuda") as device:
        ask(check, device=device.device) or ask(check, device=device.device)
    if not torch.cuda.is_available():
        assert trust.setting_of(device.device) is None
        assert not folder.exists()
    assert trust.setting_of(torch.device("cpu")) is None
    assert check.calls == 1


BROKEN: dict[str, Callable[[Path], object]] = {
    "no json": lambda file: file.write_text("{"),
    "of another shape": lambda file: file.write_text(json.dumps({"a card": {"triton": {ROWS.name: 3}}})),
    "a list": lambda file: file.write_text("[1]"),
    "without an end": lambda file: file.write_text("[" * 100_000),
    "a pickle": lambda file: file.write_bytes(pickle.dumps({"a card": {"triton": {ROWS.name: None}}})),
    "a folder": lambda file: file.mkdir(),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_no_error_and_is_named(name: str, folder: Path) -> None:
    folder.mkdir()
    BROKEN[name](folder / "kernels.json")
    assert str(folder / "kernels.json") in (trust.trouble() or "")
    check = Check()
    assert [ask(check), ask(check)] == [None, None]
    assert check.calls == 1
    if name != "a folder":  # it is written anew
        assert trust.trouble() is None
        new_process()
        ask(check)
        assert check.calls == 1


def test_a_folder_that_cannot_be_used_is_no_error_and_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.touch()
    check = Check()
    assert [ask(check), ask(check)] == [None, None]
    assert check.calls == 1
    assert "cannot be kept" in (trust.trouble() or "")
    for name in ("XDG_CACHE_HOME", "HOME", "USERPROFILE"):
        monkeypatch.delenv(name, raising=False)

    def nobody() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", nobody)
    new_process()
    assert ask(check) is None
    assert "home directory" in (trust.trouble() or "")


def test_the_file_is_whole_or_as_it_was(folder: Path, fill_disk: Callable[[], None]) -> None:
    ask(Check())
    before = (folder / "kernels.json").read_text()
    fill_disk()
    ask(Check(), ROWS._replace(name="others"))
    assert [file.name for file in folder.iterdir()] == ["kernels.json"]
    assert (folder / "kernels.json").read_text() == before
    assert "cannot be kept" in (trust.trouble() or "")


def test_what_others_write_stays_and_old_settings_go(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(20):
        monkeypatch.setattr(trust, "setting_of", lambda device, number=number: f"card {number}")
        new_process()
        ask(Check())
    table = json.loads((folder / "kernels.json").read_text())
    assert list(table) == [f"card {number}" for number in range(4, 20)]
    table["card 19"]["flex"] = {"causal": "it is wrong"}
    (folder / "kernels.json").write_text(json.dumps(table))
    ask(Check(), ROWS._replace(name="others"))
    assert json.loads((folder / "kernels.json").read_text())["card 19"] == {
        "triton": {ROWS.name: None, "others": None},
        "flex": {"causal": "it is wrong"},
    }
    trust.forget(GPU)
    assert list(json.loads((folder / "kernels.json").read_text()))[-1] == "card 18"
    check = Check()
    ask(check)
    assert check.calls == 1


def test_a_setting_names_all_that_a_result_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some Card 9000")
    monkeypatch.setattr(trust, "driver_of", lambda device: "555.42")
    monkeypatch.setattr(trust, "version_of_triton", lambda: "3.7.1")
    text = trust.setting_of.__wrapped__(GPU)
    assert text == f"Some Card 9000, driver 555.42, torch {torch.__version__}, triton 3.7.1, attlas 0.1.0"


def test_a_comparison_may_wait_and_a_graph_is_not_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[object] = ["error"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    check = Check()
    assert "before this CUDA graph" in (ask(check) or "")
    assert not check.calls
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert ask(check) is None
    assert modes == ["error", "default", "error"]


def test_differences() -> None:
    wanted = torch.tensor([1.0, -torch.inf, 4.0])

    def told(found: torch.Tensor) -> str | None:
        return trust.difference("its lse", found, wanted, 1e-2)

    assert told(wanted.clone()) is None
    assert told(wanted + torch.tensor([0.03, 0.0, 0.0])) is None
    assert told(wanted + torch.tensor([0.05, 0.0, 0.0])) == "its lse differs by 0.01 of its largest number"
    assert told(torch.zeros(3)) == "its lse differs by inf of its largest number"
    assert told(wanted * torch.nan) == "its lse differs by inf of its largest number"
    assert told(wanted[:2]) == "its lse has the shape (2,), and not (3,)"
    nothing = torch.zeros(2)
    assert trust.difference("it", nothing, nothing, 1e-2) is None
    assert trust.difference("it", nothing + 1e-3, nothing, 1e-2) is not None
