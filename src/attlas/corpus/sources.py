"""Documents of a corpus, one after the other and always in the same order, and the texts that are cut from them."""

from __future__ import annotations

import glob
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from attlas.errors import FileError, ShapeError, import_extra, public
from attlas.foundation.installation import install_command

_LINE_SUFFIXES = {".jsonl", ".ndjson"}
_ARROW_SUFFIXES = {".arrow", ".feather", ".ipc"}
_TEXT_COLUMNS = ("text", "input_ids", "ids", "content")  # names that are looked for where none is given


class Document(NamedTuple):
    """One document: characters, tokens, or the reason why it cannot be read."""

    source: str
    content: str | NDArray[np.int64] | None
    reason: str = ""


class Text(NamedTuple):
    """Tokens that the model reads at once: where they come from, and the first of them in the document."""

    source: str
    start: int
    ids: NDArray[np.int64] | None
    reason: str = ""


@public("corpus()")
def check_installed() -> None:
    """Raise a MissingExtraError without pyarrow."""
    import_extra("pyarrow", "pyarrow must be installed.", install_command("corpus"))


def name_of(source: Any) -> str:
    """Return how a source is named in the results."""
    common = _common_folder(source)
    if common is not None:
        return _encodable_name(os.fspath(common))
    return _encodable_name(str(source)) if isinstance(source, str | Path) else type(source).__name__


def _common_folder(source: Any) -> Path | None:
    """Return the folder that a list of paths has in common, None for anything else."""
    if isinstance(source, list) and source and all(isinstance(one, Path) for one in source):
        with suppress(ValueError):  # some are absolute
            return Path(os.path.commonpath(source))
    return None


def documents(
    source: Any, column: str | None = None, begun: Callable[[float], None] = lambda share: None
) -> Iterator[Document]:
    """Yield the documents of a source.

    Parameters
    ----------
    source : str, Path or iterable
        A file, a folder (all files in it, by name), a pattern such as ``"data/*.txt"``, ``"-"`` for the standard
        input; or paths, str, token ids or mappings, one a document, as a dataset of `datasets` yields them.
    column : str, optional
        The column of JSON lines, Parquet, Arrow and mappings; the default is the first of text, input_ids, ids and
        content that there is.
    begun : callable
        Called when a file begins, with the share of all bytes that stand before it.

    Raises
    ------
    FileError
        If a file cannot be read.
    ShapeError
        If there is no such column, or nothing to read.
    """
    if isinstance(source, str | Path) and str(source) == "-":
        if sys.stdin is None:
            raise FileError("the standard input must be open.", "it is closed", "cat FILE |")
        yield from _rows_of_lines(sys.stdin.buffer, "stdin", column)
    elif isinstance(source, str | Path):
        files = _files_and_names(source)
        before, total = 0, sum(path.stat().st_size for path, _ in files)
        for path, name in files:
            begun(before / max(total, 1))
            before += path.stat().st_size
            try:
                yield from _documents_of_file(path, name, column)
            except OSError as error:  # errors of pyarrow about files are these, or ValueError
                raise _unreadable_file_error(path, error) from error
    elif isinstance(source, Iterable):
        common = _common_folder(source)
        for row, one in enumerate(source):
            if isinstance(one, Path):
                yield from _named_apart(one, common, documents(one, column))
            else:
                yield document_of(f"#{row}", one, column)
    else:
        rule = "texts must be a path, or several texts, rows or sequences of token ids."
        raise ShapeError(rule, type(source).__name__, 'attlas.corpus(model, "data/*.txt", ...)', where="corpus()")


def _named_apart(path: Path, common: Path | None, found: Iterable[Document]) -> Iterator[Document]:
    """Name the documents of one of several paths by what the paths do not have in common: no two have one name."""
    name = path.as_posix() if common is None else path.relative_to(common).as_posix()
    for document in found:
        if path.is_dir() and name != ".":
            document = document._replace(source=_encodable_name(f"{name}/{document.source}"))
        elif path.is_file() and name != ".":
            document = document._replace(
                source=_encodable_name(name) + document.source.removeprefix(_encodable_name(path.name))
            )
        yield document


def _unreadable_file_error(path: Path, error: Exception) -> FileError:
    """Return the error of a file that cannot be read."""
    words = getattr(error, "strerror", None) or (str(error).splitlines() or [type(error).__name__])[0]
    fix = "mend or remove the file, and run the same command again: it goes on where it was."
    return FileError("each file must be one that can be read.", words, fix, file=str(path), where="corpus()")


def _files_and_names(source: str | Path) -> list[tuple[Path, str]]:
    """Return the files of a source, and their names in the results, in the order of their names."""
    folder = Path(source)
    if folder.is_dir():
        found = [path for path in folder.rglob("*") if path.is_file() and not _is_hidden(path.relative_to(folder))]
        named = [(path, path.relative_to(folder).as_posix()) for path in found]
    elif folder.is_file():
        named = [(folder, folder.name)]
    else:
        found = [Path(one) for one in glob.glob(str(source), recursive=True)]  # noqa: PTH207 - it may be absolute
        named = [(path, path.as_posix()) for path in found if path.is_file()]
    if not named:
        fix = "give a folder, a file, or a pattern in quotes."
        raise ShapeError("there must be something to read.", f"no file at {source}", fix, where="corpus()")
    return sorted(((path, _encodable_name(name)) for path, name in named), key=lambda one: one[1])


def _encodable_name(name: str) -> str:
    """Return a name that any file can hold: the system's names are bytes, and not all of them are text."""
    return name.encode("utf-8", "backslashreplace").decode()


def _is_hidden(path: Path) -> bool:
    """Return whether a part of a path begins with a dot or is a cache of Python."""
    return any(part.startswith(".") or part == "__pycache__" for part in path.parts)


def _documents_of_file(path: Path, name: str, column: str | None) -> Iterator[Document]:
    """Yield the documents of a file; its suffix says what it is, and a file with another one is a text."""
    suffix = path.suffix.lower()
    if suffix == ".parquet" or suffix in _ARROW_SUFFIXES:
        yield from _rows_of_table(path, name, column)
    elif suffix in _LINE_SUFFIXES:
        with path.open("rb") as file:
            yield from _rows_of_lines(file, name, column, rows=True)
    elif suffix == ".npy":
        yield document_of(name, np.load(path, allow_pickle=False), column)
    else:
        yield _decoded_document(name, path.read_bytes())


def _decoded_document(name: str, data: bytes) -> Document:
    """Return the text in some bytes as a document, or one without a text that says why it has none."""
    try:
        return Document(name, data.decode())
    except UnicodeDecodeError as error:
        return Document(name, None, f"not UTF-8: {error.reason} at byte {error.start}")


def _rows_of_lines(file: Any, name: str, column: str | None, *, rows: bool = False) -> Iterator[Document]:
    """Yield the rows of JSON lines; a stream whose first line is no object is one text."""
    first = file.readline()
    if not rows and not first.lstrip().startswith(b"{"):
        yield _decoded_document(name, first + file.read())
        return
    for number, line in enumerate(chain([first], file)):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            yield Document(f"{name}#{number}", None, f"not JSON: {error}")
        else:
            yield document_of(f"{name}#{number}", row, column)


def _rows_of_table(path: Path, name: str, column: str | None) -> Iterator[Document]:
    """Yield the rows of a Parquet or Arrow file, some at a time."""
    check_installed()
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if path.suffix.lower() == ".parquet":
            file = pq.ParquetFile(path)
            names = file.schema_arrow.names
            batches = file.iter_batches(batch_size=64, columns=[_text_column(path, names, column)])
        else:
            batches, names = _arrow_batches(pa, path)
        chosen, row = _text_column(path, names, column), 0
        for batch in batches:
            for one in batch.column(batch.schema.get_field_index(chosen)).to_pylist():
                yield document_of(f"{name}#{row}", one, column)
                row += 1
    except pa.ArrowException as error:
        raise _unreadable_file_error(path, error) from error


def _arrow_batches(pa: Any, path: Path) -> tuple[Iterable[Any], list[str]]:
    """Return the batches of an Arrow file and the names of its columns."""
    source = pa.memory_map(str(path))
    try:
        reader = pa.ipc.open_file(source)
        return (reader.get_batch(i) for i in range(reader.num_record_batches)), reader.schema.names
    except pa.ArrowInvalid:  # datasets writes streams
        stream = pa.ipc.open_stream(pa.memory_map(str(path)))
        return stream, stream.schema.names


def _text_column(where: object, names: Iterable[str], column: str | None) -> str:
    """Return the name of the column with the texts: `column`, or the first usual name; raise where there is none."""
    names = list(names)
    chosen = next((name for name in ((column,) if column else _TEXT_COLUMNS) if name in names), None)
    if chosen is None:
        rule = f"there must be a column {column!r}." if column else "the column with the texts must be named."
        fix = f"--column {names[0]}" if names else "a file with a column"
        raise ShapeError(rule, f"columns {', '.join(map(str, names[:12]))}", fix, source=str(where), where="corpus()")
    return chosen


def document_of(source: str, one: Any, column: str | None) -> Document:
    """Return the document that a row, a str or token ids make."""
    if isinstance(one, Mapping):
        one = one[_text_column(source, one, column)]
    if isinstance(one, str):
        return Document(source, one)
    if isinstance(one, bytes):
        return _decoded_document(source, one)
    try:
        ids = np.asarray(one)
    except (ValueError, TypeError):
        ids = np.zeros((0, 0))
    if ids.ndim == 1 and ids.size and ids.dtype.kind in "iu":
        return Document(source, ids.astype(np.int64))
    return Document(source, None, f"neither text nor token ids: {type(one).__name__}")


class TextSource:
    """The texts of a source, in their order.

    Parameters
    ----------
    source : str, Path or iterable
        As of `documents`.
    column : str, optional
        As of `documents`.
    cutter : Cutter
        What makes texts of documents.
    limit : int, optional
        Texts at most.

    Attributes
    ----------
    again : bool
        Whether `texts` begins anew each time; a pipe or an iterator goes on where it was.
    """

    def __init__(self, source: Any, column: str | None, cutter: Cutter, limit: int | None) -> None:
        # An iterator, such as the standard input, can be read only once.
        self._source, self._column, self._cutter, self._limit = source, column, cutter, limit
        self.again = str(source) != "-" if isinstance(source, str | Path) else not isinstance(source, Iterator)
        self._is_wanted: Callable[[Text], bool] = lambda text: True
        self._rest: Iterator[Text] | None = None

    def texts(self, begun: Callable[[float], None] = lambda share: None) -> Iterator[Text]:
        """Yield the texts; `begun` is called as by `documents`."""
        stream = self._rest
        if stream is None:
            found = documents(self._source, self._column, begun)
            stream = islice((text for document in found for text in self._cutter.cut(document)), self._limit)
            self._rest = None if self.again else stream
        return filter(self._is_wanted, stream)

    def only(self, is_wanted: Callable[[Text], bool], first: Text) -> TextSource:
        """Return a source of some of the texts, of which `first` is the first and was taken from this one."""
        found = copy(self)
        found._is_wanted = is_wanted
        found._rest = None if self._rest is None else chain([first], self._rest)
        return found


class Cutter:
    """Cuts documents into texts of at most so many tokens.

    Parameters
    ----------
    tokenizer : tokenizer of transformers, optional
        What makes tokens of characters.
    length, stride : int
        Tokens of a text, and from the begin of one to that of the next in its document.
    vocabulary : int
        Tokens that the model knows.
    """

    def __init__(self, tokenizer: Any, length: int, stride: int, vocabulary: int) -> None:
        self.tokenizer, self.length, self.stride, self.vocabulary = tokenizer, length, stride, vocabulary
        self._before, self._after = ([], []) if tokenizer is None else _special_tokens(tokenizer)

    def cut(self, document: Document) -> Iterator[Text]:
        """Yield the texts of a document; one that cannot be read is one text with the reason."""
        ids, reason = self._token_ids(document)
        before, after = (self._before, self._after) if isinstance(document.content, str) else ([], [])
        room = self.length - len(before) - len(after)
        if ids is None or len(ids) + len(before) + len(after) < 2:
            yield Text(document.source, 0, None, reason or "fewer than 2 tokens")
            return
        stride = min(self.stride, room)
        # No text begins where the one before it has reached the end of the document.
        for start in range(0, max(len(ids) - max(room - stride, 0), 1), stride):
            part = np.concatenate([before, ids[start : start + room], after]).astype(np.int64)
            if len(part) > 1:
                yield Text(document.source, start, part)

    def _token_ids(self, document: Document) -> tuple[NDArray[np.int64] | None, str]:
        """Return the token ids of a document; or None, and the reason why it has none."""
        if document.content is None:
            return None, document.reason
        if isinstance(document.content, str):
            if self.tokenizer is None:
                rule = "texts must be token ids where there is no tokenizer."
                raise ShapeError(rule, "characters", "attlas.corpus(model, texts, tokenizer=...)", where="corpus()")
            given = {"add_special_tokens": False, "return_attention_mask": False, "verbose": False}
            ids = np.array(self.tokenizer(document.content, **given)["input_ids"], dtype=np.int64)
        else:
            ids = document.content
        if ids.size and (ids.min() < 0 or ids.max() >= self.vocabulary):
            wrong = ids.min() if ids.min() < 0 else ids.max()
            return None, f"token {wrong} is not one of the model's {self.vocabulary}"
        return ids, ""


def _special_tokens(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the tokens that the tokenizer puts before and behind each text."""
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a")["input_ids"]
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    return [], []
