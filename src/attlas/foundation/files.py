"""Files and folders that are whole or as they were: written under a hidden name beside the target, then renamed."""

from __future__ import annotations

import errno
import os
import shlex
import shutil
import stat
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from attlas.errors import AttlasError, FileError

_DISK_FULL_ERRORS = {getattr(errno, name) for name in ("ENOSPC", "EDQUOT", "EFBIG") if hasattr(errno, name)}
_NO_SYNC = {getattr(errno, name) for name in ("EINVAL", "ENOSYS", "ENOTSUP") if hasattr(errno, name)}
_WRITABLE_RULE = "the file must be one that can be written."
_LOCKED_BYTE = 1 << 20  # Windows forbids to read what is locked: the lock is behind the text
_OTHER_FOLDER_FIX = "give a path in a folder that is there and may be written to."


@contextmanager
def whole_file(path: str | os.PathLike[str], kind: type[AttlasError] = FileError) -> Iterator[Path]:
    """Write a file that is whole, or as it was before.

    Parameters
    ----------
    path : str or PathLike
        Name of the file. Where it is a symbolic link, the file that it leads to is written.
    kind : type of AttlasError
        Class of these errors.

    Yields
    ------
    Path
        An empty file to be written, with the suffix of `path`: hidden, beside the target, of its file system.

    Raises
    ------
    FileError
        Or `kind`: if there is no such folder, nothing may be written in it, the target is a folder, a device or a
        file that may not be written, or the disk is full. What the block raises for other reasons passes.

    Notes
    -----
    When the block ends, what it wrote is on disk before it takes the name. After any failure, an interrupt
    included, the hidden file is gone and the target untouched; a process that was killed leaves the hidden one.
    A new file has the mode that the umask gives, one that replaces another has the mode of that.

    Examples
    --------
    >>> folder = getfixture("tmp_path")
    >>> with whole_file(folder / "a.txt") as unfinished:
    ...     _ = unfinished.write_text("all of it")
    >>> [file.name for file in folder.iterdir()]
    ['a.txt']
    """
    target = Path(path)
    with _worded_errors(target, kind):
        real = Path(os.path.realpath(target))
        mode = _replaced_mode(real)
    # Short enough for every name that the target can have.
    suffix = real.suffix if len(real.suffix) <= 16 else ""
    unfinished = real.with_name(f".{real.stem[:40]}-{os.urandom(8).hex()}{suffix}")
    try:
        with _worded_errors(target, kind):
            created = _create_empty(unfinished, mode)
        with _worded_errors(target, kind, unfinished):
            yield unfinished
        with _worded_errors(target, kind):
            with unfinished.open("rb+") as file:
                _flush_to_disk(file.fileno())
            if stat.S_IMODE(unfinished.stat().st_mode) != created:
                unfinished.chmod(created)
            unfinished.replace(real)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise
    with suppress(OSError):  # the file is there, whole: there is no failure left to tell of
        sync_folder(real.parent)


def save_text(text: str, path: str | os.PathLike[str], kind: type[AttlasError] = FileError) -> Path:
    """Write a text to a file, whole or not at all; see `whole_file`."""
    with whole_file(path, kind) as unfinished:
        unfinished.write_text(text, encoding="utf-8", newline="\n")
    return Path(path)


def replace_folder(folder: Path, target: Path) -> None:
    """Give a complete folder its name, beside it; what had the name is kept as ``.NAME.old-...`` until then.

    Parameters
    ----------
    folder : Path
        What was written, on the file system of the target.
    target : Path
        The name it gets.

    Raises
    ------
    OSError
        If it cannot be renamed; what was there is then there again.

    Examples
    --------
    >>> folder = getfixture("tmp_path")
    >>> (folder / "new").mkdir(), (folder / "run").mkdir(), (folder / "run" / "old").touch()
    (None, None, None)
    >>> replace_folder(folder / "new", folder / "run")
    >>> [path.name for path in folder.rglob("*")]
    ['run']
    """
    old = target.with_name(f".{target.name}.old-{os.urandom(4).hex()}")
    replaced = target.is_dir() and any(target.iterdir())
    try:
        if replaced:
            target.rename(old)
        folder.rename(target)
    except BaseException:
        if old.exists() and not target.exists():
            old.rename(target)
        raise
    with suppress(OSError):
        sync_folder(target.parent)
    if replaced:
        discard_folder(old, target)


def discard_folder(old: Path, target: Path) -> None:
    """Delete a folder that was replaced, after renaming it so that nobody takes a half-deleted one for whole."""
    shutil.rmtree(old.rename(target.with_name(f".{target.name}.partial-{os.urandom(4).hex()}")), ignore_errors=True)


def lock(handle: int, *, wait: bool = False) -> None:
    """Lock an open file; the lock ends when that is closed, and with the process, however that ends.

    Parameters
    ----------
    handle : int
        The open file; a folder too, except on Windows.
    wait : bool
        Whether to wait while another process holds the lock.

    Raises
    ------
    OSError
        If another process holds the lock and nothing waits for it, or the file system has no locks.

    Examples
    --------
    >>> with (getfixture("tmp_path") / "lock").open("w") as file:
    ...     lock(file.fileno())
    """
    if sys.platform == "win32":
        import msvcrt

        os.lseek(handle, _LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(handle, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
        os.lseek(handle, 0, os.SEEK_SET)
    else:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold a lock of a folder for a block, after waiting for other processes that have it.

    Without effect where the system cannot lock a folder.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            handle = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, handle)  # ends the lock too
            lock(handle, wait=True)
        yield


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on disk, where the system can do so."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        _flush_to_disk(handle)
    finally:
        os.close(handle)


def _flush_to_disk(handle: int) -> None:
    """Flush an open file to disk, where its file system supports that."""
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NO_SYNC:  # some network file systems have no such call
            raise


def _create_empty(unfinished: Path, replaced: int | None) -> int:
    """Create an empty file, and return the mode that it gets when it is complete.

    `replaced` is the mode of the file that it will replace, None where there is none.
    """
    # The system applies the umask. One that replaces another may have fewer readers: while it is written it has none.
    handle = os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666 if replaced is None else 0o600)
    try:
        return stat.S_IMODE(os.fstat(handle).st_mode) if replaced is None else replaced
    finally:
        os.close(handle)


def _replaced_mode(target: Path) -> int | None:
    """Return the permissions of the file that is to be replaced, None where there is none.

    Raise an OSError where the target is a folder, a device, or not writable.
    """
    try:
        found = target.stat()
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(target))
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "a device or a pipe, and no file", str(target))
    if not os.access(target, os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(target))
    return stat.S_IMODE(found.st_mode) & 0o777


@contextmanager
def _worded_errors(target: Path, kind: type[AttlasError], unfinished: Path | None = None) -> Iterator[None]:
    """Turn errors of the file system inside a block into errors of class `kind` that name the target.

    With `unfinished`, only errors that are about that file, or a full disk.
    """
    try:
        yield
    except AttlasError:
        raise
    except SafetensorError as error:  # its writer puts the system's error into words of its own
        found, fix = (str(error).splitlines() or ["an error of safetensors"])[0], _OTHER_FOLDER_FIX
        raise kind(_WRITABLE_RULE, found, fix, path=str(target)) from error
    except OSError as error:
        # A block may read other files, whose errors are not ours; a full disk is always the one that is written to.
        if unfinished is not None and error.errno not in _DISK_FULL_ERRORS and error.filename != str(unfinished):
            raise
        found, fix = _fault_and_fix(error, target)
        raise kind(_WRITABLE_RULE, found, fix, path=str(target)) from error


def _fault_and_fix(error: OSError, target: Path) -> tuple[str, str]:
    """Return what went wrong with a file, and what to do about it, from an error of the system."""
    real = Path(os.path.realpath(target))
    said = error.strerror or str(error)
    if error.errno in _DISK_FULL_ERRORS:
        return said, "make room, or give a path on another disk."
    if error.errno == errno.ENAMETOOLONG:
        return said, "give a shorter name."
    if real.is_dir():
        return "a folder", f"give a file in it: {target / f'result{target.suffix}'}"
    if error.errno == errno.ENOENT and not real.parent.exists():
        return f"no such folder: {real.parent}", f"mkdir -p {shlex.quote(str(real.parent))}"
    blamed = real if error.filename == str(real) and error.errno != errno.ENOTDIR else real.parent
    return f"{said}: {blamed}", _OTHER_FOLDER_FIX
