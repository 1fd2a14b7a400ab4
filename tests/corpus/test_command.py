"""The command line: read, go on, join, export; and runs of two processes."""

import importlib.util
import io
import os
from pathlib import Path

import pytest
import torch
from tests.pages import data_of

import attlas
from attlas.cli import main
from attlas.cli.corpus import _TimeEstimate
from attlas.cli.terminal import Terminal


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
    assert main(["corpus", str(tmp_path / "both"), "--export", "headvis", "-o", str(tmp_path / "tree")]) == 0
    assert len(list((tmp_path / "tree" / "heads").iterdir())) == 24
    said = capsys.readouterr().out
    assert f"  attlas picture {tmp_path / 'both'} --card -o card.png draws it, to share\n" in said
    assert main(["stats", str(tmp_path / "both")]) == 2
    told = capsys.readouterr().err
    assert f"found: a corpus: {tmp_path / 'both'}" in told
    assert f"fix: attlas view {tmp_path / 'both'}" in told
    texts = [attlas.load(tmp_path / name).config["counts"]["texts"] for name in ("a", "b", "both")]
    assert texts[0] + texts[1] == texts[2]
    both = str(tmp_path / "both")
    for wrong in (
        ["corpus", "shipped"],
        ["corpus", both, "--export", "headvis"],
        ["corpus", both, str(words), "--export", "headvis", "-o", str(tmp_path / "x")],
        ["corpus", str(words), "--export", "headvis", "-o", str(tmp_path / "x")],
        ["report", both, "--heads", "2.4", "-o", str(tmp_path / "x.html")],
        ["report", both, both, "-o", str(tmp_path / "x.txt")],
    ):
        assert main(wrong) == 2
    assert main(["corpus", "shipped", str(words / "c.py"), "-o", str(tmp_path / "a")]) == 2
    assert "one corpus" in capsys.readouterr().err


def test_what_cannot_be_read_leaves_no_folder(words: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["corpus", "shipped", str(words), "-o", str(tmp_path / "new")]
    for wrong, message in (
        ([*given[:2], str(tmp_path / "missing"), *given[3:]], f"found: no file at {tmp_path / 'missing'}"),
        ([*given, "--texts", "0"], "--texts must be at least 1."),
        ([*given, "--length", "4096"], "fix: --length 2048"),
    ):
        assert main(wrong) == 2
        assert message in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_demo(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attlas.cli.corpus._HELD_OUT_MODULES", ("this", "_sitebuiltins"))  # short ones
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    assert main(["demo", "--tokens", "64", "--output", str(tmp_path)]) == 0
    told = capsys.readouterr().out
    assert "All heads over 2 texts" in told
    assert "heads.html" in told
    assert len(attlas.load(tmp_path / "stdlib.corpus").heads) == 24
    assert {"info", "head:0:0", "head:0:23", "sample:0:23:0"} <= data_of(tmp_path / "heads.html")["answers"].keys()


def test_the_demo_says_once_how_long_it_still_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the texts after the first, which is slow: 2,000 tokens took 4 s, 60 texts of 1,000 at most are left."""
    times = iter([100.0, 102.0, 104.0, 200.0])
    monkeypatch.setattr("attlas.cli.corpus.time.monotonic", lambda: next(times))
    out = io.StringIO()
    estimate = _TimeEstimate(64, 1000, Terminal(out))
    for texts, tokens in ((1, 500), (3, 1500), (4, 2500), (5, 3500)):
        estimate(texts, tokens)
    assert out.getvalue() == "  The model now reads 64 more texts, which takes about 2 min more.\n"


def read_as(rank: int, arguments: list[str]) -> None:
    """Read as one of two processes that torchrun or accelerate starts: both say so in these variables."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2"}
    assert main(arguments) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")
def test_two_processes_write_the_same_files_as_one(
    words: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    arguments = ["corpus", "shipped", str(words), "--length", "32", "--texts", "6", "-o"]
    torch.multiprocessing.start_processes(
        read_as, ([*arguments, str(tmp_path / "two")],), nprocs=2, start_method="fork"
    )
    assert "reading  3 texts" in capfd.readouterr().err, "the first process reads every second one"
    assert main([*arguments, str(tmp_path / "one")]) == 0
    files = [sorted(path for path in (tmp_path / name).rglob("*") if path.is_file()) for name in ("one", "two")]
    assert [path.name for path in files[0]] == [path.name for path in files[1]]
    for one, two in zip(*files, strict=True):
        assert one.read_bytes() == two.read_bytes(), one.name
