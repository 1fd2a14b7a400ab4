"""The command line: read, go on, join, export; and runs of two processes."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.pages import data_of

import attlas
from attlas.cli import main


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a folder with three files."""
    folder = tmp_path_factory.mktemp("words")
    for name in "abc":
        (folder / f"{name}.py").write_text(f"import {name}\n\n\ndef {name}():\n    return {name}\n" * 6)
    return folder


def test_read_join_export(words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in "ab":
        out = str(tmp_path / name)
        assert main(["corpus", "shipped", str(words / f"{name}.py"), "-o", out, "--length", "64"]) == 0
    told = capsys.readouterr()
    assert "python-gpt2, 24 heads over" in told.out
    assert "induction" in told.out
    assert "tokens/s" in told.err
    assert main(["join", str(tmp_path / "a"), str(tmp_path / "b"), "-o", str(tmp_path / "both")]) == 0
    assert main(["corpus", str(tmp_path / "both"), "--export", "headvis", str(tmp_path / "tree")]) == 0
    assert len(list((tmp_path / "tree" / "heads").iterdir())) == 24
    for command in (["stats"], ["picture", "-o", str(tmp_path / "x.png")], ["export", "-o", str(tmp_path / "x.html")]):
        assert main([command[0], str(tmp_path / "both"), *command[1:]]) == 2
        told = capsys.readouterr().err
        assert f"found: a corpus: {tmp_path / 'both'}" in told
        assert f"fix: attlas view {tmp_path / 'both'}" in told
    texts = [attlas.load(tmp_path / name).config["counts"]["texts"] for name in ("a", "b", "both")]
    assert texts[0] + texts[1] == texts[2]
    for wrong in (["corpus", "shipped"], ["corpus", str(tmp_path / "both"), "--export", "other", str(tmp_path / "x")]):
        assert main(wrong) == 2
    assert main(["corpus", "shipped", str(words / "c.py"), "-o", str(tmp_path / "a")]) == 2
    assert "one corpus" in capsys.readouterr().err


def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attlas.cli.corpus._UNSEEN", ("this", "_sitebuiltins"))  # short ones
    assert main(["demo", "--tokens", "64", "--out", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "over 2 texts" in told
    assert "heads.html" in told
    assert len(attlas.load(tmp_path / "corpus").heads) == 24
    assert {"info", "head:0:0", "head:0:23", "sample:0:23:0"} <= data_of(tmp_path / "heads.html")["answers"].keys()


def launcher() -> list[str]:
    """Return the command that starts two processes: accelerate's, which calls torchrun's, or torchrun's own."""
    if importlib.util.find_spec("accelerate") is None:
        return ["torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    # It starts several processes without a GPU only when it is told that there are some, or by MPI.
    return [
        *("accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1"),
        *("--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port", "0"),
    ]


@pytest.mark.slow
@pytest.mark.skipif(not torch.distributed.is_available(), reason="torch was built without torch.distributed")
def test_two_processes_write_the_same_files_as_one(words: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", *launcher(), "-m", "attlas"]
    arguments = ["corpus", "shipped", str(words), "--length", "32", "--texts", "6", "-o"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *arguments, str(tmp_path / "two")], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "reading  3 texts" in done.stderr, "the first process reads every second one"
    assert main([*arguments, str(tmp_path / "one")]) == 0
    files = [sorted(path for path in (tmp_path / name).rglob("*") if path.is_file()) for name in ("one", "two")]
    assert [path.name for path in files[0]] == [path.name for path in files[1]]
    for one, two in zip(*files, strict=True):
        assert one.read_bytes() == two.read_bytes(), one.name
