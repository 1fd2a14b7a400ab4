"""A corpus whose source has changed: new texts are read, and what was read must be as it was."""

import io
import os
import random
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.corpus.stopping import Killed, contents, stop_at

import attlas
from attlas.corpus import store
from attlas.corpus.folder import Corpus

Texts = list[list[int]]
OPTIONS: dict[str, Any] = {"samples": 3, "every": 0.0}


def fill(folder: Path, texts: Texts, first: int = 0) -> Path:
    """Write a file for each text, by its number."""
    folder.mkdir(exist_ok=True)
    for number, ids in enumerate(texts, first):
        np.save(folder / f"{number:03d}.npy", np.array(ids))
    return folder


def short(count: int) -> Texts:
    """Return different texts of three tokens."""
    return [[1 + i // 100, i // 10 % 10, i % 10] for i in range(count)]


def stopped(texts: Texts, after: int) -> Iterator[list[int]]:
    """Give some texts, and then what ends a run."""
    yield from texts[:after]
    raise KeyboardInterrupt


def test_a_finished_corpus_reads_what_was_added(model: torch.nn.Module, texts: Texts, tmp_path: Path) -> None:
    """The same command gives the bytes of a fresh run over all texts, and then reads nothing again."""
    source, folder = fill(tmp_path / "in", texts[:12]), tmp_path / "corpus"
    before = attlas.corpus(model, source, folder, **OPTIONS)
    assert before is not None
    assert before.config["counts"]["texts"] == 12
    fill(source, texts[12:], 12)
    read: list[int] = []
    found = attlas.corpus(model, source, folder, **OPTIONS, progress=lambda texts, *_: read.append(texts))
    assert read == list(range(1, 9)), "the new ones alone"
    assert found is not None
    assert found.config["counts"]["texts"] == 20
    attlas.corpus(model, source, tmp_path / "fresh", **OPTIONS)
    assert contents(folder) == contents(tmp_path / "fresh")
    again = attlas.corpus(model, source, folder, **OPTIONS, progress=lambda *_: pytest.fail("read again"))
    assert isinstance(again, Corpus)


def test_texts_are_added_anywhere(model: torch.nn.Module, texts: Texts, tmp_path: Path) -> None:
    """Every number is that of a fresh run; the new texts are numbered last."""
    source, folder = fill(tmp_path / "in", texts), tmp_path / "corpus"
    for number in range(0, 20, 3):
        (source / f"{number:03d}.npy").rename(tmp_path / f"{number:03d}.npy")
    attlas.corpus(model, source, folder, **OPTIONS)
    for path in tmp_path.glob("*.npy"):
        path.rename(source / path.name)
    found = attlas.corpus(model, source, folder, **OPTIONS)
    fresh = attlas.corpus(model, source, tmp_path / "fresh", **OPTIONS)
    assert found is not None
    assert fresh is not None
    for name in ("heads", "distributions", "distances", "tokens"):
        assert (folder / f"{name}.parquet").read_bytes() == (tmp_path / "fresh" / f"{name}.parquet").read_bytes()
    rows, expected = (corpus.texts().to_pylist() for corpus in (found, fresh))
    assert [row["text"] for row in rows] == list(range(20))
    assert [row["source"] for row in rows[13:]] == [f"{number:03d}.npy" for number in range(0, 20, 3)]
    assert {(row["source"], row["hash"]) for row in rows} == {(row["source"], row["hash"]) for row in expected}
    for place in fresh.heads:
        samples = [[(s.ids, s.interval, s.source) for s in corpus.samples(*place)] for corpus in (found, fresh)]
        assert samples[0] == samples[1]
        for ours, theirs in zip(found.samples(*place), fresh.samples(*place), strict=True):
            np.testing.assert_array_equal(ours.keys, theirs.keys)
            np.testing.assert_array_equal(ours.weights, theirs.weights)


@pytest.mark.parametrize("links", [True, False])
def test_an_extension_that_is_stopped_many_times(
    model: torch.nn.Module, texts: Texts, tmp_path: Path, links: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until the result is written the folder holds the corpus of before; on disks without links, too."""

    def no_link(*_: object) -> None:
        raise OSError("no links")

    if not links:
        monkeypatch.setattr(os, "link", no_link)
    source = fill(tmp_path / "in", texts)
    attlas.corpus(model, source, tmp_path / "fresh", **OPTIONS)
    whole, draw, stopped, number = contents(tmp_path / "fresh"), random.Random(int(links)), 0, 0
    while stopped < 4:
        folder, number = tmp_path / str(number), number + 1
        for path in source.glob("01[2-9].npy"):
            path.rename(tmp_path / path.name)
        attlas.corpus(model, source, folder, **OPTIONS)
        for path in tmp_path.glob("*.npy"):
            path.rename(source / path.name)
        while True:
            with pytest.MonkeyPatch.context() as patch:
                stop_at(patch, draw)
                try:
                    attlas.corpus(model, source, folder, **OPTIONS)
                    break
                except Killed:
                    stopped += 1
            assert 12 <= attlas.load(folder).config["counts"]["texts"] <= 20
        assert attlas.corpus(model, source, folder, **OPTIONS) is not None
        found = {name: data for name, data in contents(folder).items() if not Path(name).name.startswith(".")}
        assert found == whole


def test_two_processes_extend(model: torch.nn.Module, texts: Texts, tmp_path: Path) -> None:
    source, folder = fill(tmp_path / "in", texts[:11]), tmp_path / "corpus"
    attlas.corpus(model, source, folder, **OPTIONS)
    fill(source, texts[11:], 11)
    assert attlas.corpus(model, source, folder, rank=0, world=2, **OPTIONS) is None
    assert attlas.load(folder).config["counts"]["texts"] == 11, "the corpus of before, until the new one is written"
    assert attlas.corpus(model, source, folder, rank=1, world=2, **OPTIONS) is not None
    attlas.corpus(model, source, tmp_path / "fresh", **OPTIONS)
    assert contents(folder) == contents(tmp_path / "fresh")


def test_what_was_added_is_taken_away_again(model: torch.nn.Module, texts: Texts, tmp_path: Path) -> None:
    source, folder = fill(tmp_path / "in", texts[:6]), tmp_path / "corpus"
    attlas.corpus(model, source, folder, **OPTIONS)
    before = contents(folder)
    fill(source, texts[6:8], 6)
    assert attlas.corpus(model, source, folder, rank=0, world=2, **OPTIONS) is None
    for number in (6, 7):
        (source / f"{number:03d}.npy").unlink()
    assert attlas.corpus(model, source, folder, **OPTIONS) is not None
    assert contents(folder) == before


@pytest.fixture(scope="module")
def made(model: torch.nn.Module, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a source of 70 texts, its corpus, and two that were stopped where the first of two processes had ended."""
    folder = tmp_path_factory.mktemp("made")
    source = fill(folder / "in", short(70))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_SYNCHRONOUS_MODE", "OFF")
        attlas.corpus(model, source, folder / "finished", samples=3)
        attlas.corpus(model, source, folder / "unfinished", samples=3, world=2, rank=0)
    return folder


@pytest.mark.parametrize("kind", ["finished", "unfinished"])
@pytest.mark.parametrize("number", [0, 66, 68])
def test_a_text_that_was_read_must_stay(model: torch.nn.Module, made: Path, kind: str, number: int) -> None:
    """Whatever its place: a corpus of other texts than its source has would be a wrong one without a word."""
    source, folder = made / "in", made / kind
    before, file = contents(folder), source / f"{number:03d}.npy"
    old = file.read_bytes()
    np.save(file, np.array([9, 9, 9]))
    with pytest.raises(attlas.RecordingError, match=rf"{file.name}, token 0: another text[^$]*attlas join"):
        attlas.corpus(model, source, folder, samples=3)
    file.unlink()
    with pytest.raises(attlas.RecordingError, match=r"\.npy, token 0: (no text any more|another text)[^$]*attlas join"):
        attlas.corpus(model, source, folder, samples=3)
    file.write_bytes(old)
    after = contents(folder)
    assert {name: after[name] for name in before} == before


def test_the_text_is_put_back(model: torch.nn.Module, made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "unfinished", tmp_path / "corpus")
    assert attlas.corpus(model, made / "in", tmp_path / "corpus", samples=3) is not None
    assert contents(tmp_path / "corpus") == contents(made / "finished")


def test_a_resumed_run_reads_nothing_of_another_source(model: torch.nn.Module, tmp_path: Path) -> None:
    """A file before the place where the run was stopped is gone: what stands there now is not read in its place."""
    texts, folder = short(40), tmp_path / "corpus"
    with pytest.raises(KeyboardInterrupt):
        attlas.corpus(model, stopped(texts, 30), folder)
    before = (folder / "parts" / "0000.sqlite").read_bytes()
    with pytest.raises(attlas.RecordingError, match="#10, token 0: another text"):
        attlas.corpus(model, (ids for ids in texts[:10] + texts[11:]), folder)
    assert (folder / "parts" / "0000.sqlite").read_bytes() == before
    found = attlas.corpus(model, (ids for ids in texts), folder)
    assert found is not None
    assert found.config["counts"]["texts"] == 40


def test_an_unfinished_corpus_takes_what_was_added_behind(model: torch.nn.Module, texts: Texts, tmp_path: Path) -> None:
    source, folder = fill(tmp_path / "in", texts[:9]), tmp_path / "corpus"
    assert attlas.corpus(model, source, folder, rank=1, world=2, **OPTIONS) is None
    fill(source, texts[9:], 9)
    assert attlas.corpus(model, source, folder, **OPTIONS) is not None
    attlas.corpus(model, source, tmp_path / "fresh", **OPTIONS)
    assert contents(folder) == contents(tmp_path / "fresh")


def test_more_texts_than_before(model: torch.nn.Module, texts: Texts, tmp_path: Path) -> None:
    """A limit may be raised when it was reached; a smaller one is another corpus."""
    attlas.corpus(model, texts, tmp_path / "corpus", limit=8, **OPTIONS)
    with pytest.raises(attlas.RecordingError, match="texts = 8"):
        attlas.corpus(model, texts, tmp_path / "corpus", limit=7, **OPTIONS)
    for limit in (13, None):
        attlas.corpus(model, texts, tmp_path / "corpus", limit=limit, **OPTIONS)
        attlas.corpus(model, texts, tmp_path / f"fresh{limit}", limit=limit, **OPTIONS)
        assert contents(tmp_path / "corpus") == contents(tmp_path / f"fresh{limit}")
    with pytest.raises(attlas.RecordingError, match="texts = None"):
        attlas.corpus(model, texts, tmp_path / "corpus", limit=30, **OPTIONS)


def test_a_pipe_goes_on_behind_what_was_read(
    model: torch.nn.Module, texts: Texts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def piped(some: Texts) -> Corpus | None:
        data = "".join(f'{{"ids": {ids}}}\n' for ids in some).encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        return attlas.corpus(model, "-", tmp_path / "corpus", **OPTIONS)

    for count in (5, 5, 9):
        found = piped(texts[:count])
        assert found is not None
        assert found.config["counts"]["texts"] == count
    whole = contents(tmp_path / "corpus")
    with pytest.raises(attlas.RecordingError, match="stdin#2, token 0: another text"):
        piped([*texts[:2], *texts[3:9]])
    with pytest.raises(attlas.RecordingError, match="stdin#8, token 0: no text any more"):
        piped(texts[:8])
    assert contents(tmp_path / "corpus") == whole
    for count in (12, 14):
        found = attlas.corpus(model, iter(texts[:count]), tmp_path / "iterator", **OPTIONS)
    attlas.corpus(model, iter(texts[:14]), tmp_path / "fresh", **OPTIONS)
    assert contents(tmp_path / "iterator") == contents(tmp_path / "fresh")


@pytest.mark.parametrize("finished", [True, False])
def test_a_text_that_failed_may_be_mended(model: torch.nn.Module, texts: Texts, tmp_path: Path, finished: bool) -> None:
    """It has left nothing in the sums, and is read when it can be; one that is as it was is not tried again."""
    source, folder = fill(tmp_path / "in", [*texts[:5], [1, 99], *texts[5:9]]), tmp_path / "corpus"
    if finished:
        found = attlas.corpus(model, source, folder, **OPTIONS)
        assert found is not None
        assert [row["source"] for row in found.failed()] == ["005.npy"]
        attlas.corpus(model, source, folder, **OPTIONS, progress=lambda *_: pytest.fail("read again"))
    else:
        assert attlas.corpus(model, source, folder, rank=1, world=2, **OPTIONS) is None
    np.save(source / "005.npy", np.array([1, 2, 1]))
    found = attlas.corpus(model, source, folder, **OPTIONS)
    fresh = attlas.corpus(model, source, tmp_path / "fresh", **OPTIONS)
    assert found is not None
    assert fresh is not None
    assert found.failed() == []
    assert found.config["counts"] == fresh.config["counts"]
    for name in ("heads", "distributions", "tokens"):
        assert (folder / f"{name}.parquet").read_bytes() == (tmp_path / "fresh" / f"{name}.parquet").read_bytes()
    if not finished:
        assert contents(folder) == contents(tmp_path / "fresh")


def test_a_text_on_which_the_model_failed_is_not_tried_again(model: torch.nn.Module, tmp_path: Path) -> None:
    real, calls = model.transformer.wte.forward, []

    def embed(ids: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == 3 and (ids[:, :3] == 7).all(dim=1).any():
            calls.append(ids)
            raise RuntimeError("out of luck")
        return real(ids)

    model.transformer.wte.forward = embed
    try:
        for _ in range(2):
            found = attlas.corpus(model, [[1, 2, 3], [7, 7, 7]], tmp_path / "out", failures=0.6)
    finally:
        model.transformer.wte.forward = real
    assert len(calls) == 1
    assert found is not None
    assert [row["reason"] for row in found.failed()] == ["RuntimeError: out of luck"]


def test_a_corpus_that_is_open_says_that_it_was_written_anew(
    model: torch.nn.Module, texts: Texts, tmp_path: Path
) -> None:
    """Its tables and the samples beside them would be of two corpora."""
    attlas.corpus(model, texts[:6], tmp_path / "corpus", samples=2)
    opened = attlas.load(tmp_path / "corpus")
    assert opened.heads
    attlas.corpus(model, texts, tmp_path / "corpus", samples=2)
    for read in (lambda: opened.samples(0, 0), opened.texts, opened.failed):
        with pytest.raises(attlas.RecordingError, match=r"attlas\.load\(folder\) once more"):
            read()
    assert attlas.load(tmp_path / "corpus").samples(0, 0)


def test_another_batch_at_the_seam_changes_no_more_than_rounding(
    model: torch.nn.Module, texts: Texts, tmp_path: Path
) -> None:
    """The last batch was not full: the new texts have one of their own."""
    source, same = fill(tmp_path / "in", [[*ids, 1, 2][:4] for ids in texts[:7]]), {"samples": 3, "batch": 4}
    attlas.corpus(model, source, tmp_path / "corpus", **same)
    fill(source, [[*ids, 3, 4][:4] for ids in texts[7:]], 7)
    found = attlas.corpus(model, source, tmp_path / "corpus", **same)
    fresh = attlas.corpus(model, source, tmp_path / "fresh", **same)
    assert found is not None
    assert fresh is not None
    for row, again in zip(found.table("arrow").to_pylist(), fresh.table("arrow").to_pylist(), strict=True):
        for name, value in row.items():
            assert value == (
                pytest.approx(again[name], rel=1e-5, nan_ok=True) if isinstance(value, float) else again[name]
            )
