"""Files and folders that are whole or as they were, whatever happens while they are written."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from tests.messages import said

from attlas import pictures
from attlas.errors import AttlasError, CheckpointError, FileError, public
from attlas.estimators import AttentionRegressor
from attlas.estimators.stream import predict_file
from attlas.foundation.files import replace_folder, save_text, sync_folder, whole_file
from attlas.nn import GPT2, GPT2Config, KVCache

posix = pytest.mark.skipif(os.name != "posix", reason="modes, links and limits are those of POSIX")


ELSEWHERE = "give a path in a folder that is there and may be written to."


@pytest.fixture
def umask() -> Iterator[Callable[[int], int]]:
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


@pytest.fixture
def guest() -> Iterator[Path]:
    """Give a folder that may be written, and take the rights of the superuser away: everything is allowed to him."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    superuser = os.geteuid() == 0
    if superuser:
        os.chown(folder, 65534, 65534)
        os.seteuid(65534)
    yield folder
    if superuser:
        os.seteuid(0)
    folder.chmod(0o777)
    shutil.rmtree(folder)


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def refused(path: Path, found: str, fix: str = ELSEWHERE) -> None:
    """Hold the whole text of an error to what it should be; the block must not begin."""
    with pytest.raises(FileError) as error, public("picture"), whole_file(path):
        pytest.fail("nothing can be written here")
    assert said(error.value) == f"picture: {found}"
    assert error.value.fix == fix
    assert isinstance(error.value, OSError)


def test_what_is_written_takes_the_name_in_the_end(tmp_path: Path) -> None:
    target = tmp_path / "a.txt"
    target.write_text("before")
    with whole_file(target) as unfinished:
        assert unfinished.parent == tmp_path
        assert unfinished.suffix == ".txt"
        assert unfinished.name.startswith(".a-")
        unfinished.write_text("after")
        assert target.read_text() == "before"
    assert target.read_text() == "after"
    assert names(tmp_path) == ["a.txt"]


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit, ValueError, GeneratorExit])
def test_a_block_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path, stop: type[BaseException]) -> None:
    (tmp_path / "a.txt").write_text("before")
    for name in ("a.txt", "b.txt"):
        with pytest.raises(stop), whole_file(tmp_path / name) as unfinished:
            unfinished.write_text("half")
            raise stop
    assert (tmp_path / "a.txt").read_text() == "before"
    assert names(tmp_path) == ["a.txt"]


def test_errors_of_other_files_pass_as_they_are(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as error, whole_file(tmp_path / "a.txt") as unfinished:
        unfinished.write_text((tmp_path / "none.txt").read_text())
    assert not isinstance(error.value, AttlasError)
    assert names(tmp_path) == []


def test_what_is_no_file_in_a_folder(tmp_path: Path) -> None:
    missing = tmp_path / "not there"
    refused(missing / "a.png", f"no such folder: {missing}", f"mkdir -p '{missing}'")
    (tmp_path / "taken").touch()
    refused(tmp_path / "taken" / "a.png", f"Not a directory: {tmp_path / 'taken'}")
    refused(tmp_path, "a folder", f"give a file in it: {tmp_path / 'result'}")
    (tmp_path / "a.png").mkdir()
    refused(tmp_path / "a.png", "a folder", f"give a file in it: {tmp_path / 'a.png' / 'result.png'}")
    assert names(tmp_path) == ["a.png", "taken"]


@posix
def test_a_device_or_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "a.png"
    os.mkfifo(pipe)
    refused(pipe, f"a device or a pipe, and no file: {pipe}")
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_target_that_becomes_a_folder_meanwhile(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="found: a folder"), public("f()"), whole_file(tmp_path / "a.txt") as unfinished:
        unfinished.write_text("all of it")
        (tmp_path / "a.txt").mkdir()
    assert names(tmp_path) == ["a.txt"]


@posix
def test_a_folder_that_may_not_be_written(guest: Path) -> None:
    (guest / "a.png").write_text("before")
    (guest / "a.png").chmod(0o666)
    guest.chmod(0o555)
    refused(guest / "b.png", f"Permission denied: {guest}")
    refused(guest / "a.png", f"Permission denied: {guest}")
    assert (guest / "a.png").read_text() == "before"


@posix
def test_a_file_that_may_not_be_written(guest: Path) -> None:
    (guest / "a.png").write_text("before")
    (guest / "a.png").chmod(0o444)
    refused(guest / "a.png", f"Permission denied: {guest / 'a.png'}")
    assert (guest / "a.png").read_text() == "before"
    assert names(guest) == ["a.png"]


def test_long_names(tmp_path: Path) -> None:
    longest = tmp_path / ("n" * 251 + ".txt")  # the hidden name must not be longer than the system allows
    with whole_file(longest) as unfinished:
        unfinished.write_text("all of it")
    assert longest.read_text() == "all of it"
    for name in ("ä" * 120 + ".png", "a." + "b" * 250):
        with whole_file(tmp_path / name) as unfinished:
            unfinished.write_text("all of it")
    refused(tmp_path / ("n" * 300), "File name too long", "give a shorter name.")


@posix
def test_a_file_that_grows_too_large(tmp_path: Path) -> None:
    import resource

    (tmp_path / "a.txt").write_text("before")
    (tmp_path / "a.safetensors").write_text("before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(FileError) as full, public("f()"), whole_file(tmp_path / "a.txt") as unfinished:
            unfinished.write_bytes(bytes(1 << 20))
        with pytest.raises(FileError) as large, public("f()"), whole_file(tmp_path / "a.safetensors") as unfinished:
            save_file({"x": np.zeros(1 << 20)}, unfinished)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n  found: File too large\n  fix: make room, or give a path on another disk." in str(full.value)
    assert "File too large" in str(large.value)
    assert [(tmp_path / name).read_text() for name in names(tmp_path)] == ["before", "before"]


def test_a_file_system_that_cannot_sync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(handle: int) -> None:
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "fsync", unknown)
    with whole_file(tmp_path / "a.txt") as unfinished:
        unfinished.write_text("all of it")
    sync_folder(tmp_path)
    assert (tmp_path / "a.txt").read_text() == "all of it"


@posix
def test_what_was_written_is_synced_before_it_takes_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    sync, replace = os.fsync, Path.replace

    def synced(handle: int) -> None:
        order.append("folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file")
        sync(handle)

    def replaced(self: Path, target: Path) -> Path:
        order.append("name")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    with whole_file(tmp_path / "a.txt"):
        pass
    assert order == ["file", "name", "folder"]


@posix
def test_modes(tmp_path: Path, umask: Callable[[int], int]) -> None:
    for mask, mode in ((0o022, 0o644), (0o002, 0o664), (0o077, 0o600)):
        umask(mask)
        new = tmp_path / f"{mask:o}.txt"
        with whole_file(new):
            pass
        assert mode_of(new) == mode
    umask(0o022)
    secret = tmp_path / "secret.txt"
    secret.touch()
    for mode in (0o600, 0o640, 0o755, 0o666):
        secret.chmod(mode)
        with whole_file(secret) as unfinished:
            assert mode_of(unfinished) == 0o600, "nobody reads along what only some may read"
        assert mode_of(secret) == mode


@posix
def test_links(tmp_path: Path) -> None:
    """A symbolic link stays one, and the file that it leads to is written; another hard link keeps the old content."""
    (tmp_path / "disk").mkdir()
    for name in ("there.txt", "new.txt"):
        (tmp_path / f"to-{name}").symlink_to(Path("disk") / name)
    (tmp_path / "disk" / "there.txt").write_text("before")
    os.link(tmp_path / "disk" / "there.txt", tmp_path / "hard.txt")
    for name in ("there.txt", "new.txt"):
        with whole_file(tmp_path / f"to-{name}") as unfinished:
            assert unfinished.parent == tmp_path / "disk"
            unfinished.write_text("after")
        assert (tmp_path / f"to-{name}").is_symlink()
        assert (tmp_path / "disk" / name).read_text() == "after"
    assert (tmp_path / "hard.txt").read_text() == "before"
    (tmp_path / "nowhere.txt").symlink_to(tmp_path / "none" / "x.txt")
    refused(tmp_path / "nowhere.txt", f"no such folder: {tmp_path / 'none'}", f"mkdir -p {tmp_path / 'none'}")
    (tmp_path / "round.txt").symlink_to("round.txt")
    with pytest.raises(FileError, match="symbolic links"), public("f()"), whole_file(tmp_path / "round.txt"):
        pass


def written_by(writer: str, path: Path) -> object:
    """Write a file with one of the functions that do so."""
    if writer == "pictures.save()":
        return pictures.save(pictures.sheet(1, 1), path, dpi=20)
    if writer == "save_text()":
        with public("save_text()"):
            return save_text("text", path)
    if writer == "predict_file()":
        return predict_file(AttentionRegressor(bandwidth=1.0).fit(X, X[:, 0]), X, path)
    if writer == "AttentionRegressor.save()":
        return AttentionRegressor(bandwidth=1.0).fit(X, X[:, 0]).save(path)
    cache = KVCache()
    cache.update(torch.ones(1, 1, 3, 2), torch.ones(1, 1, 3, 2), 0)
    return cache.save(path)


X = np.linspace(0.0, 1.0, 20)[:, None]
WRITERS = {
    "pictures.save()": FileError,
    "save_text()": FileError,
    "predict_file()": FileError,
    "AttentionRegressor.save()": CheckpointError,
    "KVCache.save()": FileError,
}


@posix
@pytest.mark.parametrize("writer", WRITERS)
def test_all_functions_write_in_the_same_way(
    writer: str, tmp_path: Path, umask: Callable[[int], int], fill_disk: Callable[[], None]
) -> None:
    suffix = ".csv" if writer == "predict_file()" else ".png"
    path, link = tmp_path / f"a{suffix}", tmp_path / f"b{suffix}"
    umask(0o002)
    written_by(writer, path)
    assert mode_of(path) == 0o664
    path.chmod(0o600)
    path.write_text("before")
    link.symlink_to(path)
    written_by(writer, link)
    assert link.is_symlink()
    assert mode_of(path) == 0o600
    assert path.read_bytes() != b"before"

    fill_disk()
    path.write_text("before")
    for target, found in ((path, "No space left on device"), (tmp_path / "none" / path.name, "no such folder")):
        with pytest.raises(WRITERS[writer]) as error:
            written_by(writer, target)
        assert f"  path: {target}\n  found: {found}" in str(error.value)
    assert path.read_text() == "before"
    assert names(tmp_path) == [path.name, link.name]


def test_a_model_is_written_in_the_same_way(tmp_path: Path, fill_disk: Callable[[], None]) -> None:
    model = GPT2(GPT2Config(vocab_size=7, n_positions=8, n_embd=4, n_layer=1, n_head=1))
    model.save_pretrained(tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in names(tmp_path)}
    assert list(before) == ["config.json", "model.safetensors"]

    fill_disk()
    with pytest.raises(CheckpointError, match="found: No space left on device"):
        GPT2(model.config).save_pretrained(tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in names(tmp_path)} == before


# ----------------------------------------------------------------------------------------------------------- folders


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Give a complete folder, and one that is there under its name."""
    new, old = tmp_path / "new", tmp_path / "run"
    for folder in (new, old):
        folder.mkdir()
        (folder / "file").write_text(folder.name)
    return new, old


def test_a_folder_takes_the_place_of_another(folders: tuple[Path, Path], tmp_path: Path) -> None:
    new, old = folders
    replace_folder(new, old)
    assert (old / "file").read_text() == "new"
    assert names(tmp_path) == ["run"]
    replace_folder(old, tmp_path / "other")
    assert names(tmp_path) == ["other"]


@pytest.mark.parametrize("stop", [OSError, KeyboardInterrupt])
def test_a_folder_that_cannot_be_renamed_leaves_the_old_one(
    folders: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: type[BaseException]
) -> None:
    new, old = folders
    rename = Path.rename

    def broken(self: Path, target: Path) -> Path:
        if self == new:
            raise stop
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", broken)
    with pytest.raises(stop):
        replace_folder(new, old)
    assert (old / "file").read_text() == "run"
    assert (new / "file").read_text() == "new"
    assert names(tmp_path) == ["new", "run"]
