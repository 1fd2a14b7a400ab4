"""Runs that are killed, that share the work, that fail: nothing is lost, nothing is counted twice."""

import copy
import multiprocessing
import os
import random
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.corpus.stopping import Killed, contents, stop_at

import attlas
from attlas.corpus.folder import Corpus

Texts = list[list[int]]
OPTIONS: dict[str, Any] = {"samples": 3, "every": 0.0, "batch": 2}


@pytest.fixture(scope="module")
def whole(model: torch.nn.Module, texts: Texts, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Give the files of a run that nothing has stopped."""
    folder = tmp_path_factory.mktemp("whole") / "corpus"
    assert attlas.corpus(model, texts, folder, **OPTIONS | {"every": 1e9}) is not None
    return contents(folder)


def test_stopped_many_times_between_any_two_writes(
    model: torch.nn.Module, texts: Texts, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """A file that was begun and not renamed, lines behind the last commit, samples that nothing names: all are met."""
    draw, stopped, number = random.Random(5), 0, 0
    while stopped < 15:
        folder, number = tmp_path / str(number), number + 1
        while True:
            with pytest.MonkeyPatch.context() as monkeypatch:
                stop_at(monkeypatch, draw)
                try:
                    attlas.corpus(model, texts, folder, **OPTIONS)
                    break
                except Killed:
                    stopped += 1
        assert attlas.corpus(model, texts, folder, **OPTIONS) is not None
        found = contents(folder)
        left = {name for name in found if Path(name).name.startswith(".")}  # what a killed process began to write
        assert {name: data for name, data in found.items() if name not in left} == whole


def run(model: torch.nn.Module, texts: Texts, folder: Path, options: dict[str, Any]) -> None:
    """Be one process of a run."""
    torch.set_num_threads(1)
    attlas.corpus(model, texts, folder, **OPTIONS | options)


def forked(*args: Any) -> Any:
    """Start a process that has everything loaded."""
    process = multiprocessing.get_context("fork").Process(target=run, args=args)
    process.start()
    return process


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")
def test_killed_by_kill_9(model: torch.nn.Module, texts: Texts, whole: dict[str, bytes], tmp_path: Path) -> None:
    draw, killed = random.Random(7), 0
    folder = tmp_path / "corpus"

    def finish(folder: Path) -> None:
        """Run the same command once more: one that was killed after its last file has left its parts."""
        forked(model, texts, folder, {}).join()
        assert contents(folder) == whole

    while killed < 10:
        process = forked(model, texts, folder, {})
        process.join(draw.random() * 0.25)
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
            killed += 1
        process.join()
        if (folder / "config.json").exists():
            finish(folder)
            folder = tmp_path / str(killed)
    finish(folder)


def kill_inside(steps: int, model: torch.nn.Module, texts: Texts, folder: Path) -> None:
    """Be a process that is killed in the middle of a commit, which has reached the disk in part."""

    class Killing(sqlite3.Connection):
        def execute(self, asked: str, *args: Any) -> Any:
            if asked == "BEGIN IMMEDIATE":
                super().execute("PRAGMA cache_size = 2")  # pages are written as they come
                left = iter(range(steps))
                self.set_progress_handler(
                    lambda: os.kill(os.getpid(), signal.SIGKILL) if next(left, None) is None else 0, 1
                )
            return super().execute(asked, *args)

    connect = sqlite3.connect
    sqlite3.connect = lambda *args, **kwargs: connect(*args, factory=Killing, **kwargs)  # type: ignore[assignment]
    run(model, texts, folder, {})


@pytest.mark.skipif(not hasattr(os, "fork"), reason="processes cannot be forked here")
def test_killed_in_the_middle_of_a_commit(
    model: torch.nn.Module, texts: Texts, whole: dict[str, bytes], tmp_path: Path
) -> None:
    """What a commit has begun is undone by whoever opens the file next: who reads it, too."""
    assert attlas.corpus(model, texts, tmp_path / "begun", rank=0, world=2, **OPTIONS) is None
    undone = 0
    for steps in (100, 300, 500, 700):
        folder = tmp_path / str(steps)
        shutil.copytree(tmp_path / "begun", folder)
        process = multiprocessing.get_context("fork").Process(target=kill_inside, args=(steps, model, texts, folder))
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        undone += (folder / "parts" / "0000.sqlite-journal").exists()
        assert attlas.load(folder).config["counts"]["texts"] >= 10
        assert attlas.corpus(model, texts, folder, **OPTIONS) is not None
        assert contents(folder) == whole
    assert undone


@pytest.mark.parametrize("world", [2, 4])
def test_processes_give_the_same_bytes(
    model: torch.nn.Module, texts: Texts, whole: dict[str, bytes], tmp_path: Path, world: int
) -> None:
    made = [attlas.corpus(model, texts, tmp_path / "corpus", rank=r, world=world, **OPTIONS) for r in range(world)]
    assert made[:-1] == [None] * (world - 1)
    assert isinstance(made[-1], Corpus)
    assert contents(tmp_path / "corpus") == whole


@pytest.mark.parametrize(("rank", "world"), [(0, 2), (1, 3)])
def test_another_number_of_processes_goes_on(
    model: torch.nn.Module, texts: Texts, whole: dict[str, bytes], rank: int, world: int, tmp_path: Path
) -> None:
    """Of several processes one alone has ended; a single process then reads what the others have not."""
    assert attlas.corpus(model, texts, tmp_path / "corpus", rank=rank, world=world, **OPTIONS) is None
    for name in (".heads-0123456789abcdef.parquet", ".tmpa1B2c3"):  # one that was killed may leave these
        (tmp_path / "corpus" / name).write_bytes(b"unfinished")
    assert attlas.corpus(model, texts, tmp_path / "corpus", **OPTIONS) is not None
    assert contents(tmp_path / "corpus") == whole


def test_order_and_batch_change_no_number(model: torch.nn.Module, texts: Texts, tmp_path: Path) -> None:
    double = model.double()
    try:
        first = attlas.corpus(double, texts, tmp_path / "a", samples=3)
        other = attlas.corpus(double, texts[::-1], tmp_path / "b", samples=3, batch=5)
    finally:
        model.float()
    assert first is not None
    assert other is not None
    a, b = first.table("arrow").to_pylist(), other.table("arrow").to_pylist()
    for row, again in zip(a, b, strict=True):
        for name, value in row.items():
            assert value == (pytest.approx(again[name], rel=1e-9) if isinstance(value, float) else again[name])
    for place in first.heads:
        ids = [sorted(map(tuple, (s.ids for s in corpus.samples(*place)))) for corpus in (first, other)]
        assert ids[0] == ids[1], "the sample depends on the texts alone"


def test_join_is_one_run_over_all(
    model: torch.nn.Module, texts: Texts, whole: dict[str, bytes], tmp_path: Path
) -> None:
    for name, some in ("a", texts[:8]), ("b", texts[8:14]), ("c", texts[14:]):
        attlas.corpus(model, some, tmp_path / name, **OPTIONS)
    # A text of the second folder has the same place there as one of the first: they are other texts.
    joined = attlas.join([tmp_path / name for name in "abc"], tmp_path / "joined")
    found = contents(joined.folder)
    same = [
        name
        for name in whole
        if name.startswith("samples/") or name.endswith(".parquet") or name == "state.safetensors"
    ]
    assert len(same) > 7
    different = {name for name in same if found[name] != whole[name]}
    assert different <= {"texts.parquet", "sampled_texts.parquet"}, "which name the rows of each source"
    with pytest.raises(attlas.RecordingError, match="in two folders"):
        attlas.join([tmp_path / "a", tmp_path / "b", tmp_path / "a"], tmp_path / "twice")


def test_two_runs_into_one_folder(model: torch.nn.Module, texts: Texts, tmp_path: Path) -> None:
    def slow() -> Iterator[list[int]]:
        for ids in texts[:4]:
            with pytest.raises(attlas.RecordingError, match="one run at a time"):
                attlas.corpus(model, texts, tmp_path / "corpus")
            with pytest.raises(attlas.RecordingError, match="one run at a time"):
                attlas.corpus(model, texts, tmp_path / "corpus", rank=1, world=2)
            yield ids

    assert attlas.corpus(model, slow(), tmp_path / "corpus") is not None


def test_another_model_or_setting_is_refused(model: torch.nn.Module, texts: Texts, tmp_path: Path) -> None:
    attlas.corpus(model, texts[:3], tmp_path / "corpus")
    for options in {"length": 16}, {"seed": 1}, {"limit": 7}:
        with pytest.raises(attlas.RecordingError, match="one corpus"):
            attlas.corpus(model, texts[:3], tmp_path / "corpus", **options)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "letter.txt").write_text("mine")
    with pytest.raises(attlas.RecordingError, match="other files"):
        attlas.corpus(model, texts[:3], tmp_path / "other")


def test_a_weight_of_the_model_was_changed(model: torch.nn.Module, texts: Texts, tmp_path: Path) -> None:
    attlas.corpus(model, texts[:3], tmp_path / "corpus")
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed.get_input_embeddings().weight[-1, -1] += 1
    with pytest.raises(attlas.RecordingError, match="another model"):
        attlas.corpus(changed, texts[:3], tmp_path / "corpus")


@pytest.mark.parametrize("world", [1, 2])
def test_other_texts_are_refused(model: torch.nn.Module, texts: Texts, world: int, tmp_path: Path) -> None:
    attlas.corpus(model, texts[:4], tmp_path / "corpus", world=world)  # all of them, or every other one
    with pytest.raises(attlas.RecordingError, match="#0, token 0: another text"):
        attlas.corpus(model, texts[1:5], tmp_path / "corpus")
    assert attlas.corpus(model, texts[:4], tmp_path / "corpus") is not None


def test_a_full_disk_loses_nothing(
    model: torch.nn.Module, texts: Texts, whole: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a commit the file may not grow; what was committed is there, and goes on."""

    class Full(sqlite3.Connection):
        commits = 0

        def execute(self, asked: str, *args: Any) -> Any:
            found = super().execute(asked, *args)
            Full.commits += asked == "COMMIT"
            if Full.commits == 2:  # one made the file
                super().execute("PRAGMA max_page_count = 1")
            return found

    connect = sqlite3.connect
    with monkeypatch.context() as patch:
        patch.setattr(sqlite3, "connect", lambda *args, **kwargs: connect(*args, factory=Full, **kwargs))
        with pytest.raises(attlas.errors.FileError, match=r"0000\.sqlite[^$]*disk is full[^$]*goes on where it was"):
            attlas.corpus(model, texts, tmp_path / "corpus", **OPTIONS)
    unfinished = attlas.load(tmp_path / "corpus")
    assert not unfinished.config["complete"]
    assert 2 <= unfinished.config["counts"]["texts"] < len(texts)
    assert attlas.corpus(model, texts, tmp_path / "corpus", **OPTIONS) is not None
    assert contents(tmp_path / "corpus") == whole


def test_a_file_that_cannot_be_read_leaves_the_folder_loadable(model: torch.nn.Module, tmp_path: Path) -> None:
    """A truncated Parquet file ends the run with its name; mended, the same command goes on."""
    source, folder = tmp_path / "in", tmp_path / "corpus"
    source.mkdir()
    np.save(source / "a.npy", np.array([1, 2, 3, 1, 2]))
    pq.write_table(pa.table({"ids": [[4, 5, 6], [7, 8, 9, 7]]}), source / "b.parquet")
    good = (source / "b.parquet").read_bytes()
    (source / "b.parquet").write_bytes(good[: len(good) // 2])
    with pytest.raises(attlas.AttlasError, match=r"b\.parquet"):
        attlas.corpus(model, source, folder)
    unfinished = attlas.load(folder)
    assert (unfinished.config["complete"], unfinished.config["counts"]["texts"]) == (False, 1)
    (source / "b.parquet").write_bytes(good)
    assert attlas.corpus(model, source, folder) is not None
    attlas.corpus(model, source, tmp_path / "at_once")
    assert contents(folder) == contents(tmp_path / "at_once")


def test_an_unfinished_folder_opens(model: torch.nn.Module, texts: Texts, tmp_path: Path) -> None:
    def broken() -> Iterator[list[int]]:
        yield from texts[:8]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        attlas.corpus(model, broken(), tmp_path / "corpus", batch=2)
    found = attlas.load(tmp_path / "corpus")
    assert (found.config["complete"], found.config["counts"]["texts"]) == (False, 8)
    assert len(found.samples(0, 1)) == 8
    assert attlas.load(attlas.corpus(model, texts[:8], tmp_path / "other").folder).config["complete"]


def test_a_changed_folder_is_refused(model: torch.nn.Module, texts: Texts, tmp_path: Path) -> None:
    attlas.corpus(model, texts[:3], tmp_path / "corpus")
    file = tmp_path / "corpus" / "heads.parquet"
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    with pytest.raises(attlas.RecordingError, match=r"heads\.parquet"):
        attlas.load(tmp_path / "corpus", verify=False)
    file.write_bytes(data[:9] + bytes([data[9] ^ 1]) + data[10:])
    with pytest.raises(attlas.RecordingError, match=r"heads\.parquet"):
        attlas.load(tmp_path / "corpus")


def test_a_second_call_reads_nothing_again(model: torch.nn.Module, texts: Texts, tmp_path: Path) -> None:
    attlas.corpus(model, texts[:3], tmp_path / "corpus")
    again = attlas.corpus(model, texts[:3], tmp_path / "corpus", progress=lambda *_: pytest.fail("read again"))
    assert again is not None
