"""Files of an unfinished corpus that are damaged: the result is the same, or an error names the file."""

import json
import os
import random
import shutil
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.corpus.stopping import contents

import attlas
from attlas.corpus import building, journal, locks, store
from attlas.corpus import folder as corpus_folder
from attlas.corpus.journal import parts_of
from attlas.corpus.run_facts import load_run

Texts = list[list[int]]
OPTIONS: dict[str, Any] = {"samples": 3, "batch": 2}
WRONG = ["null", "3", '"text"', "[]", "{}", '{"checksum": 3}', "{", "\xff"]


@pytest.fixture(scope="module")
def made(model: torch.nn.Module, texts: Texts, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a corpus, one that is unfinished, one that is being extended, and one that was so when it was written."""
    folder = tmp_path_factory.mktemp("made")
    source = folder / "in"
    source.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "_SYNCHRONOUS_MODE", "OFF")
        for number, ids in enumerate([*texts[:7], [1, 99]]):
            np.save(source / f"{number:02d}.npy", np.array(ids))
        attlas.corpus(model, source, folder / "extended", **OPTIONS)
        for number, ids in enumerate(texts[8:], 8):
            np.save(source / f"{number:02d}.npy", np.array(ids))
        attlas.corpus(model, source, folder / "whole", **OPTIONS)
        for kind in ("unfinished", "extended"):
            for rank in (0, 1):
                assert attlas.corpus(model, source, folder / kind, rank=rank, world=3, **OPTIONS) is None
        shutil.copytree(folder / "extended", folder / "written")
        (folder / "written" / "config.json").unlink()
    return folder


def files_of(folder: Path) -> list[str]:
    """Return the files of a run that is unfinished, without the result that it extends."""
    return sorted(path.relative_to(folder).as_posix() for path in (folder / "parts").rglob("*") if path.is_file())


def outcome(call: Callable[[], bool], file: Path) -> str:
    """Return "same", or "refused" for an error that names the file; anything else fails."""
    try:
        assert call(), f"{file} is damaged, and the result another one"
        return "same"
    except attlas.RecordingError as error:
        refused = error
    assert file.name in str(refused), refused
    assert refused.fix
    return "refused"


def replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


DAMAGES: dict[str, Callable[[Path], object]] = {
    "removed": Path.unlink,
    "emptied": lambda file: file.write_bytes(b""),
    "cut off": lambda file: os.truncate(file, file.stat().st_size // 2),
    "one byte less": lambda file: os.truncate(file, max(file.stat().st_size - 1, 0)),
    "a folder": replace_by_folder,
    "other bytes": lambda file: file.write_bytes(b"SQLite format 3\0" + bytes(range(256)) * 20),
}


@pytest.mark.parametrize("kind", ["unfinished", "extended", "written"])
def test_each_file_is_damaged(model: torch.nn.Module, made: Path, kind: str, tmp_path: Path) -> None:
    """The run that goes on gives the bytes that it would have given, and so does who opens the folder."""
    whole, number = contents(made / "whole"), 0
    found: dict[str, set[str]] = {}
    for name in files_of(made / kind):
        base, few = "/base/" in name, ("removed", "one byte less")
        if base and Path(name).name not in ("config.json", "texts.parquet", "failed.jsonl", "state.safetensors"):
            continue  # the others are alike
        if kind == "extended" and not name.endswith(("e.safetensors", ".json")):
            continue  # as with "unfinished", and the files of the result are there
        lock = not (made / kind / name).stat().st_size
        for damage in few if base else ("removed", "a folder") if lock else DAMAGES:
            number += 1
            folder = tmp_path / str(number)
            shutil.copytree(made / kind, folder)
            DAMAGES[damage](folder / name)
            # A process whose file is gone has read nothing.
            loaded = outcome(lambda folder=folder: attlas.load(folder).config["counts"] is not None, folder / name)
            again = outcome(
                lambda folder=folder: (
                    attlas.corpus(model, made / "in", folder, **OPTIONS) is not None and contents(folder) == whole
                ),
                folder / name,
            )
            found.setdefault("base" if base else Path(name).suffix, set()).update((loaded, again))
            shutil.rmtree(folder)
    assert found[".json"] == {"same", "refused"}
    assert found.get(".sqlite", {"same", "refused"}) == {"same", "refused"}
    assert found.get("base") == {"unfinished": None, "extended": {"same"}, "written": {"refused"}}[kind]


def test_the_run_is_said_in_another_way(model: torch.nn.Module, made: Path, tmp_path: Path) -> None:
    """JSON of other types, of other settings, and of an older attlas."""
    path = tmp_path / "corpus" / "parts" / "run.json"
    shutil.copytree(made / "unfinished", tmp_path / "corpus")
    good = json.loads(path.read_text())
    other = [json.dumps(good | {name: 3}) for name in good] + [
        json.dumps(good | {"settings": good["settings"] | {"seed": 5}})
    ]
    for text in (*WRONG, *other):
        path.write_bytes(text.encode("latin-1"))
        for call in (
            lambda: attlas.load(tmp_path / "corpus") is None,
            lambda: attlas.corpus(model, made / "in", tmp_path / "corpus", **OPTIONS) is None,
        ):
            assert outcome(call, path) == "refused"
    (tmp_path / "corpus" / "parts" / "0000.safetensors").touch()
    path.write_text(json.dumps({name: value for name, value in good.items() if name not in ("checksum", "extended")}))
    with pytest.raises(attlas.RecordingError, match=r"run\.json[^$]*an older attlas"):
        attlas.load(tmp_path / "corpus")


def everything(folder: Path) -> list[Any]:
    """Return all that the parts of a corpus say."""
    facts, run, _ = load_run(folder)
    found: list[Any] = [facts]
    with parts_of(folder, run) as parts:
        for part in parts:
            found += [*part.lines("texts"), *part.lines("failed"), part.kept]
            samples = [part.sample(text) or {} for text in part.kept]
            for tensors in (part.state.tensors() if part.state is not None else {}, *samples):
                found.append({name: tensor.numpy().tobytes() for name, tensor in tensors.items()})
    return found


def test_flipped_bits_are_found(model: torch.nn.Module, made: Path, tmp_path: Path) -> None:
    """Each bit of what is used, anywhere; half of a file are pages that the next commit takes."""
    folder, draw, found = tmp_path / "corpus", random.Random(3), Counter[str]()
    shutil.copytree(made / "unfinished", folder)
    expected, whole = everything(folder), contents(made / "whole")
    files = [folder / name for name in files_of(folder) if name.endswith((".sqlite", ".json"))]
    for number in range(160):
        file = files[number % len(files)]
        good = file.read_bytes()
        at = draw.randrange(len(good) if number % 4 else min(len(good), 1 << 15))
        file.write_bytes(good[:at] + bytes([good[at] ^ 1 << draw.randrange(8)]) + good[at + 1 :])
        result = outcome(lambda: everything(folder) == expected, file)
        if number % 20 == 0:
            shutil.copytree(folder, tmp_path / "run")
            again = outcome(
                lambda: (
                    attlas.corpus(model, made / "in", tmp_path / "run", **OPTIONS) is not None
                    and contents(tmp_path / "run") == whole
                ),
                file,
            )
            assert again == result or again == "refused"
            shutil.rmtree(tmp_path / "run")
        file.write_bytes(good)
        found[result] += 1
    assert found["refused"] > 50
    assert found["same"] > 10


def test_entries_that_were_changed_are_found(made: Path, tmp_path: Path) -> None:
    """By SQL, so that the pages of the file are right: a row less, a row under another number, other sums."""
    run = load_run(made / "unfinished")[1]
    changes = (
        "DELETE FROM entries WHERE kind = 'texts' AND number IN (4, 8)",
        "DELETE FROM entries WHERE kind = 'failed'",
        "DELETE FROM entries WHERE kind = 'head'",
        "DELETE FROM entries WHERE kind = 'state' AND chunk = 3",
        "DELETE FROM entries WHERE kind = 'state' AND chunk = 0",
        "DELETE FROM entries WHERE kind = 'sample' AND chunk = 1",
        "UPDATE entries SET number = number + 100 WHERE kind = 'texts'",
        "UPDATE entries SET number = number + 1 WHERE kind = 'state'",
        "UPDATE entries SET data = zeroblob(length(data)) WHERE kind = 'state' AND chunk = 2",
        "UPDATE entries SET data = 'text' WHERE kind = 'texts'",
        "UPDATE entries SET digest = 5",
        "CREATE VIEW more AS SELECT * FROM entries",
        "CREATE TRIGGER t BEFORE INSERT ON entries BEGIN SELECT 1; END",
        "DROP TABLE entries",
    )
    for number, change in enumerate(changes):
        folder = tmp_path / str(number)
        shutil.copytree(made / "unfinished", folder)
        file = next(path for path in (folder / "parts").glob("*.sqlite") if "failed" not in change or has_failed(path))
        connection = sqlite3.connect(file)
        connection.execute(change)
        connection.commit()
        connection.close()
        assert outcome(lambda folder=folder: everything(folder) is None, file) == "refused", change
    with (
        pytest.raises(attlas.RecordingError, match=r"0000\.sqlite[^$]*another run"),
        parts_of(made / "unfinished", run[::-1]),
    ):
        pass


def has_failed(path: Path) -> bool:
    connection = sqlite3.connect(path)
    (count,) = connection.execute("SELECT count(*) FROM entries WHERE kind = 'failed'").fetchone()
    connection.close()
    return bool(count)


def test_a_damaged_file_is_removed_as_the_error_says(model: torch.nn.Module, made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "corpus"
    shutil.copytree(made / "unfinished", folder)
    for name in ("0000.sqlite", "run.json"):
        path = folder / "parts" / name
        os.truncate(path, 100)
        with pytest.raises(attlas.RecordingError, match="remove this file"):
            attlas.corpus(model, made / "in", folder, **OPTIONS)
        path.unlink()
    # What SQLite would undo an old commit from is of another file than the new one.
    (folder / "parts" / "0000.sqlite-journal").write_bytes(b"\xd9\xd5\x05\xf9 \xa1c\xd7" + bytes(1000))
    assert attlas.corpus(model, made / "in", folder, **OPTIONS) is not None
    assert contents(folder) == contents(made / "whole")


def test_locks_that_are_folders(model: torch.nn.Module, texts: Texts, tmp_path: Path) -> None:
    for name in ("parts/mutex", "parts/lock-1-0", "parts/lock-7-3"):
        folder = tmp_path / name.rpartition("/")[2]
        (folder / name).mkdir(parents=True)
        with pytest.raises(attlas.RecordingError, match=name):
            attlas.corpus(model, texts, folder)
    (tmp_path / "file").mkdir()
    (tmp_path / "file" / "parts").write_text("mine")
    with pytest.raises(attlas.RecordingError, match=r"parts|other files"):
        attlas.corpus(model, texts, tmp_path / "file")


def test_large_samples_and_sums_are_divided(
    model: torch.nn.Module, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries of a few bytes, and largest keys that do not wait for a commit."""
    monkeypatch.setattr(store, "_CHUNK_BYTES", 5000)
    monkeypatch.setattr(journal, "_MOST_HELD_BYTES", 100)
    assert attlas.corpus(model, made / "in", tmp_path / "corpus", rank=0, world=2, **OPTIONS) is None
    assert attlas.load(tmp_path / "corpus").samples(0, 0)
    assert attlas.corpus(model, made / "in", tmp_path / "corpus", **OPTIONS) is not None
    assert contents(tmp_path / "corpus") == contents(made / "whole")


# -------------------------------------------------------------------------------------------------- beside a writer


def test_parts_that_are_read_stay_as_they_are(made: Path, tmp_path: Path) -> None:
    """A commit between two looks at a file would be half of what is read."""
    shutil.copytree(made / "unfinished", tmp_path / "corpus")
    run = load_run(tmp_path / "corpus")[1]
    connection = sqlite3.connect(tmp_path / "corpus" / "parts" / "0000.sqlite", timeout=0, isolation_level=None)

    def commit() -> None:
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("DELETE FROM entries WHERE kind = 'texts'")
        try:
            connection.execute("COMMIT")
        finally:
            if connection.in_transaction:
                connection.execute("ROLLBACK")

    with parts_of(tmp_path / "corpus", run), pytest.raises(sqlite3.OperationalError, match="locked"):
        commit()
    with parts_of(tmp_path / "corpus", run, copied=True) as parts:
        commit()
        assert list(parts[0].lines("texts"))
    connection.close()


def test_a_corpus_opens_while_it_is_written(model: torch.nn.Module, texts: Texts, tmp_path: Path) -> None:
    """At any moment: it has just begun, is unfinished, or is there; nothing else is said."""
    folder, ended, seen, errors = tmp_path / "corpus", threading.Event(), Counter[str](), []

    def look() -> None:
        while not ended.is_set():
            try:
                found = attlas.load(folder)
                seen["complete" if found.config["complete"] else "unfinished"] += 1
                for place in found.heads:
                    found.samples(*place)
            except attlas.RecordingError as error:
                seen["refused"] += 1
                if not any(words in str(error) for words in ("no text yet", "no recording", "nothing", "once more")):
                    errors.append(error)
            except BaseException as error:  # noqa: BLE001 - what a thread raises is shown by the test
                errors.append(error)

    folder.mkdir()
    reader = threading.Thread(target=look)
    reader.start()
    try:
        for count in (10, 20):
            attlas.corpus(model, texts[:count], folder, samples=2, every=0.0)
    finally:
        ended.set()
        reader.join()
    assert not errors, errors[:3]
    assert seen["unfinished"] + seen["complete"] > 3


def test_a_corpus_that_has_just_begun_says_so(model: torch.nn.Module, texts: Texts, tmp_path: Path) -> None:
    (tmp_path / "corpus" / "parts").mkdir(parents=True)
    with pytest.raises(attlas.RecordingError, match=r"no text yet[^$]*wait"):
        attlas.load(tmp_path / "corpus")

    def first() -> Iterator[list[int]]:
        with pytest.raises(attlas.RecordingError, match=r"no text yet[^$]*wait"):
            attlas.load(tmp_path / "corpus")
        yield [1, 99]
        with pytest.raises(attlas.RecordingError, match="no text yet, 1 that failed"):
            attlas.load(tmp_path / "corpus")
        yield texts[0]

    attlas.corpus(model, first(), tmp_path / "corpus", every=0.0, failures=0.9)


def test_files_that_vanish_while_a_corpus_is_opened(
    model: torch.nn.Module, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process finishes the corpus between the look at its state and the look at its files."""
    folder, opened = tmp_path / "corpus", corpus_folder._open_corpus
    shutil.copytree(made / "unfinished", folder)

    def finished_meanwhile(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(corpus_folder, "_open_corpus", opened)
        assert attlas.corpus(model, made / "in", folder, **OPTIONS) is not None
        raise FileNotFoundError(2, "No such file", "parts/0000.sqlite")

    monkeypatch.setattr(corpus_folder, "_open_corpus", finished_meanwhile)
    assert attlas.load(folder).config["complete"]


@pytest.mark.parametrize("kind", ["unfinished", "extended"])
def test_a_process_starts_while_another_one_ends(
    model: torch.nn.Module, made: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All is read, and two processes start again: one removes the parts, at any step that the other one takes."""
    whole = contents(made / "whole")
    shutil.copytree(made / kind, tmp_path / "read")
    with monkeypatch.context() as patch:
        patch.setattr(building.Run, "finish", lambda *_: None)
        for rank in (0, 1):
            attlas.corpus(model, made / "in", tmp_path / "read", rank=rank, world=2, **OPTIONS)
    assert (tmp_path / "read" / "parts").exists()
    names = ((building, "hold"), (building, "mutex"), (building, "load_run"), (building, "parts_of"),
             (building, "Journal"), (locks, "mutex"), (locks, "_open_lock_file"))  # fmt: skip
    for step in range(0, 60, 2):
        folder, left, inside = tmp_path / str(step), [step], [False]
        shutil.copytree(tmp_path / "read", folder)

        def meanwhile(real: Any, folder: Path = folder, left: list[int] = left, inside: list[bool] = inside) -> Any:
            def call(*args: Any, **kwargs: Any) -> Any:
                mutex = folder / "parts" / "mutex"
                if not inside[0] and left[0] >= 0:
                    inside[0] = True
                    if not mutex.exists() or locks._is_lock_free(mutex):  # otherwise the other process waits
                        left[0] -= 1
                        if left[0] < 0:
                            assert attlas.corpus(model, made / "in", folder, rank=1, world=2, **OPTIONS) is not None
                    inside[0] = False
                return real(*args, **kwargs)

            return call

        with monkeypatch.context() as patch:
            for owner, name in names:
                patch.setattr(owner, name, meanwhile(getattr(owner, name)))
            found = attlas.corpus(model, made / "in", folder, rank=0, world=2, **OPTIONS)
        assert found is not None
        assert contents(folder) == whole
        if left[0] >= 0:
            break
    else:
        pytest.fail("more steps than were tried")
    assert step > 4


def test_the_last_process_that_leaves_removes_the_parts(
    model: torch.nn.Module, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One has found that not all is read, and is still in the run when the other one writes the result."""
    finish = building.Run.finish

    def slowly(self: building.Run, failures: float) -> Any:
        found = finish(self, failures)
        monkeypatch.setattr(building.Run, "finish", finish)
        assert attlas.corpus(model, made / "in", tmp_path / "corpus", rank=1, world=2, **OPTIONS) is not None
        return found

    monkeypatch.setattr(building.Run, "finish", slowly)
    assert attlas.corpus(model, made / "in", tmp_path / "corpus", rank=0, world=2, **OPTIONS) is None
    # The numbers of a model that two processes run in one differ by its rounding.
    assert contents(tmp_path / "corpus").keys() == contents(made / "whole").keys()
