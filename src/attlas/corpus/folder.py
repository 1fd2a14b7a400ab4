"""The folder of a corpus: written from what was read, and opened again."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import merge
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

import attlas
from attlas.corpus import sketch, tables
from attlas.corpus.journal import PARTS, Part, parts_of, payload_name
from attlas.corpus.measuring import KEPT, LEAST
from attlas.corpus.numbers import NUMBERS
from attlas.corpus.run_facts import has_run, load_run
from attlas.corpus.state import State
from attlas.errors import AttlasError, OutOfRangeError, RecordingError, import_extra, public
from attlas.foundation.checks import one_of
from attlas.foundation.compat import cached_property
from attlas.foundation.files import save_text, sync_folder, whole_file
from attlas.recording.atlas.tensors import sha256_of

FORMAT, VERSION = "attlas-corpus", 1
CONFIG, _STATE_FILE, _VOCABULARY_FILE = "config.json", "state.safetensors", "vocabulary.json"
BASE = "base"  # folder of a finished corpus within the parts of the run that extends it
_FILE_NAME = re.compile(r"(samples/)?\w[\w.]*")
_MOST_ATTEMPTS = 5
_ROWS_AT_ONCE = 4096  # rows of a table that are written at once
_TEXT_COLUMNS = {"text": pa.int64(), "source": pa.string(), "start": pa.int64()}  # columns that tell a text


# What a corpus is joined from: parts of an unfinished one, or finished ones.
Source: TypeAlias = "Part | Finished"


def merged(sources: Sequence[Source]) -> State:
    """Return the sums of several sources together."""
    states = [source.state for source in sources if source.state is not None]
    if not states:
        raise RecordingError("some text must have been read.", "none", "look at failed.jsonl, or wait for it.")
    total = State.of(states[0].tensors())
    for state in states[1:]:
        if state.heads != total.heads:
            found = f"{len(total.heads)} and {len(state.heads)} heads"
            raise RecordingError("the parts must be of one model.", found, "join those of one model.", where="join()")
        total.merge(state)
    return total


def failed_rows(sources: Sequence[Source]) -> list[dict[str, Any]]:
    """Return the rows of texts that failed, by ascending number.

    A text that was read since is left out. So is the row of a finished corpus whose place has another row in a part:
    the text was changed since, and was then read or failed again.
    """
    found = {row["text"]: row for source in sources for row in source.lines("failed")}
    # Of a finished corpus, the numbers of failed texts by their places: in parts the same text has another number.
    places: dict[tuple[str, int], list[int]] = {}
    for row in (row for source in sources if isinstance(source, Finished) for row in source.lines("failed")):
        places.setdefault((row["source"], row["start"]), []).append(row["text"])
    for part in (source for source in sources if found and isinstance(source, Part)):
        for row in part.lines("texts"):
            found.pop(row["text"], None)
        for row in (*part.lines("texts"), *part.lines("failed")) if places else ():
            for number in places.get((row["source"], row["start"]), []):
                found.pop(number, None)
    return [found[number] for number in sorted(found)]


@public("corpus()")
def write(folder: Path, facts: dict[str, Any], sources: Sequence[Source], *, complete: bool = True) -> None:
    """Write every file of a corpus; ``config.json``, which names all others, comes last.

    Parameters
    ----------
    folder : Path
        Where to; it is there. What it holds of an older corpus is replaced.
    facts : dict
        ``model``, ``modules``, ``tokenizer``, ``vocabulary``, ``source`` and ``settings``.
    sources : sequence of Source
        What was read. No text is in two of them.
    complete : bool
        Whether that is all.
    """
    state, vocabulary = merged(sources), facts["vocabulary"]
    # Without it the folder is no finished corpus, until the last line here.
    (folder / CONFIG).unlink(missing_ok=True)
    # Begun by a process that was killed: by `whole_file`, and within it by safetensors.
    for path in (*folder.glob(".*-" + "[0-9a-f]" * 16 + ".*"), *folder.glob(".tmp" + "[0-9A-Za-z]" * 6)):
        path.unlink()
    _write_table(folder / "heads.parquet", tables.heads_table(state, facts["modules"], vocabulary))
    _write_table(folder / "distributions.parquet", tables.distributions_table(state))
    _write_table(folder / "distances.parquet", tables.distances_table(state))
    _write_table(folder / "tokens.parquet", tables.tokens_table(state, vocabulary))
    _write_table(folder / "samples.parquet", tables.samples_table(state))
    counts = {"texts": 0, "tokens": 0, "failed": 0}
    kept = set(state.samples.kept())
    rows: list[dict[str, Any]] = []
    schema = pa.schema(_TEXT_COLUMNS | {"tokens": pa.int32(), "hash": pa.string()})
    with whole_file(folder / "texts.parquet") as file, pq.ParquetWriter(file, schema) as writer:
        lines = merge(*(source.lines("texts") for source in sources), key=lambda row: row["text"])
        last = -1
        while some := list(islice(lines, _ROWS_AT_ONCE)):
            numbers = [last, *(row["text"] for row in some)]
            if any(a == b for a, b in pairwise(numbers)):
                fix = "attlas corpus into another folder."
                raise RecordingError("each text must be read once.", "a text in two parts", fix, folder=str(folder))
            last = numbers[-1]
            rows += [row for row in some if row["text"] in kept]
            counts["texts"] += len(some)
            counts["tokens"] += sum(row["tokens"] for row in some)
            writer.write_table(pa.Table.from_pylist([{n: row[n] for n in schema.names} for row in some], schema))
    with whole_file(folder / "failed.jsonl") as file, file.open("w", encoding="utf-8") as out:
        for row in failed_rows(sources):
            counts["failed"] += 1
            out.write(json.dumps(row, ensure_ascii=False) + "\n")
    _write_samples(folder, state, rows, sources, vocabulary)
    with whole_file(folder / _STATE_FILE) as file:
        save_file(state.tensors(), file)
    save_text(json.dumps(vocabulary, ensure_ascii=False), folder / _VOCABULARY_FILE)
    config = _contents_of_config(state, facts, counts, complete=complete) | {"files": _sizes_and_checksums(folder)}
    save_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", folder / CONFIG)
    sync_folder(folder)


def _write_table(path: Path, table: pa.Table) -> None:
    """Write a table as Parquet, under a temporary name first."""
    with whole_file(path) as file:
        pq.write_table(table, file)


def _write_samples(
    folder: Path, state: State, rows: Sequence[dict[str, Any]], sources: Sequence[Source], vocabulary: Sequence[str]
) -> None:
    """Write the largest keys of each text that is kept, of the heads for which it is, and its tokens."""
    shutil.rmtree(folder / "samples", ignore_errors=True)
    (folder / "samples").mkdir()
    texts = []
    for row in sorted(rows, key=lambda row: row["text"]):
        text = row["text"]
        held = next((sample for source in sources if (sample := source.sample(text)) is not None), None)
        if held is None:
            fix = "attlas corpus into another folder."
            raise RecordingError("each sampled text must be there.", f"no text {text}", fix)
        heads = state.samples.heads_of(text)
        order = {tuple(place): at for at, place in enumerate(held["heads"].tolist())}
        places = torch.tensor([order[state.heads[head]] for head in heads])  # a source may have kept it for more heads
        some: dict[str, Tensor] = {name: held[name][places].contiguous() for name in ("heads", "keys", "weights")}
        with whole_file(folder / "samples" / payload_name(text)) as file:
            save_file(some | {"ids": held["ids"]}, file)
        ids = held["ids"].tolist()
        tokens = [vocabulary[one] for one in ids]
        texts.append({name: row[name] for name in _TEXT_COLUMNS} | {"ids": ids, "tokens": tokens})
    schema = pa.schema(_TEXT_COLUMNS | {"ids": pa.list_(pa.int32()), "tokens": pa.list_(pa.string())})
    _write_table(folder / "sampled_texts.parquet", pa.Table.from_pylist(texts, schema))


def _contents_of_config(
    state: State, facts: dict[str, Any], counts: dict[str, int], *, complete: bool
) -> dict[str, Any]:
    """Return the contents of config.json, without the checksums of the files."""
    layers = sorted({layer for layer, _ in state.heads})
    per_layer = [sum(layer == one for layer, _ in state.heads) for one in layers]
    model = facts["model"] | {"n_layers": len(layers), "n_heads": max(per_layer), "layers": layers, "heads": per_layer}
    return {
        "format": FORMAT,
        "version": VERSION,
        "attlas": attlas.__version__,
        "complete": complete,
        "model": model,
        "modules": facts["modules"],
        "tokenizer": facts["tokenizer"],
        "source": facts["source"],
        "settings": facts["settings"],
        "counts": counts,
        "k": KEPT,
        "least": LEAST,
        "n_intervals": tables.INTERVALS,
        "quantiles": list(tables.QUANTILES),
        "sketch": {"unit": {"absolute": sketch.ABSOLUTE}, "log": {"relative": sketch.RELATIVE}},
        "numbers": {n.name: {"sketch": n.sketch, "definition": n.definition} for n in NUMBERS},
    }


def _sizes_and_checksums(folder: Path) -> dict[str, dict[str, Any]]:
    """Return size and checksum of every other file of a corpus, by its path in the folder."""
    found = sorted(
        [*folder.glob("*.parquet"), folder / "failed.jsonl", folder / _STATE_FILE, folder / _VOCABULARY_FILE]
    )
    found += sorted((folder / "samples").glob("*.safetensors"))
    return {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": sha256_of(path)} for path in found
    }


@dataclass(frozen=True, eq=False)
class Sample:
    """One text that was kept for a head.

    Parameters
    ----------
    text : int
        Its place in the corpus.
    source : str
        Where it is from.
    start : int
        Its first token in the document.
    interval : int
        The interval of `max_activation` that it lies in, from 1.
    max_activation : float
        The largest weight of this head on it, without query 0 and key 0.
    largest : bool
        Whether it is one of the texts with the largest.
    tokens : list of str
        Each token, decoded alone.
    ids : list of int
        The tokens.
    keys, weights : array, shape (tokens, 8)
        The largest keys of each row and their weights; -1 and 0 where there is none from 0.005 on.

    Examples
    --------
    >>> import tempfile, attlas
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> config = GPT2Config(vocab_size=20, n_positions=16, n_embd=8, n_layer=2, n_head=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     corpus = attlas.corpus(GPT2LMHeadModel(config), [[1, 2, 3, 1, 2]], folder)
    ...     sample = corpus.samples(1, 0)[0]
    ...     sample.text, sample.ids, sample.keys.shape
    (0, [1, 2, 3, 1, 2], (5, 8))
    """

    text: int
    source: str
    start: int
    interval: int
    max_activation: float
    largest: bool
    tokens: list[str] = field(repr=False)
    ids: list[int] = field(repr=False)
    keys: NDArray[np.int32] = field(repr=False)
    weights: NDArray[np.float32] = field(repr=False)


@dataclass(frozen=True, eq=False)
class HeadPage:
    """Everything that is known of one head but its samples.

    Parameters
    ----------
    numbers : dict
        Its row of the table of heads.
    distributions : dict of str to dict
        Of each number over texts: ``min``, ``max``, ``mean``, ``quantiles``, and bins ``lower``, ``upper``, ``count``.
    distances : list of dict
        Weight by distance: ``lower``, ``upper``, ``weight``, ``kept_weight``.
    tokens : dict of str to list of (str, float)
        Top tokens by weight, of ``query``, ``key`` and ``key_mass``.

    Examples
    --------
    >>> import tempfile, attlas
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> config = GPT2Config(vocab_size=20, n_positions=16, n_embd=8, n_layer=2, n_head=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     corpus = attlas.corpus(GPT2LMHeadModel(config), [[1, 2, 3, 1, 2]], folder)
    ...     page = corpus.head(1, 0)
    ...     page.numbers["queries"], page.distributions["entropy"]["texts"], len(page.distances)
    (5, 1, 5)
    """

    numbers: dict[str, Any]
    distributions: dict[str, dict[str, Any]]
    distances: list[dict[str, Any]]
    tokens: dict[str, list[tuple[str, float]]]


class Corpus:
    """What every head of a model does over many texts; opened by `attlas.load`.

    Parameters
    ----------
    folder : Path
        Where it is.
    config : dict
        What its ``config.json`` says.

    Attributes
    ----------
    folder, config
        As above.

    See Also
    --------
    attlas.corpus : makes one.

    Examples
    --------
    >>> import tempfile, attlas
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> config = GPT2Config(vocab_size=20, n_positions=16, n_embd=8, n_layer=2, n_head=2)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     corpus = attlas.corpus(GPT2LMHeadModel(config), [[1, 2, 3, 1, 2]], folder)
    ...     opened = attlas.load(folder)
    ...     opened.heads, opened.table()["texts"].tolist()
    ([(0, 0), (0, 1), (1, 0), (1, 1)], [1, 1, 1, 1])
    """

    def __init__(self, folder: Path, config: dict[str, Any]) -> None:
        self.folder, self.config = folder, config
        self._opened = file_stamp(folder / CONFIG)

    def __repr__(self) -> str:
        counts = self.config["counts"]
        return (
            f"Corpus({self.config['model']['name']}, {len(self.heads)} heads, {counts['texts']:,} texts, "
            f"{counts['tokens']:,} tokens)"
        )

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Raise an error where what a block reads may be of another corpus: more texts were read into the folder."""
        error = None
        try:
            yield
        except OSError as missing:
            error = missing
        # The name of `config.json` is free before any other file is replaced.
        if file_stamp(self.folder / CONFIG) != self._opened:
            rule = "the folder of a corpus that is open must stay as it is."
            found = "other files: more texts are being read, or were"
            raise RecordingError(
                rule, found, "attlas.load(folder) once more.", folder=str(self.folder), where="corpus"
            ) from error
        if error is not None:
            raise _broken_folder_error(self.folder, f"{error.strerror or error}: {error.filename}") from error

    def _read_table(self, name: str) -> pa.Table:
        """Return the table in a file of the folder; raise where the folder was changed meanwhile."""
        with self.reading():
            return pq.read_table(self.folder / f"{name}.parquet")

    @cached_property
    def _result_tables(self) -> dict[str, pa.Table]:
        """The tables of results by name."""
        return {name: self._read_table(name) for name in ("heads", "distributions", "distances", "tokens", "samples")}

    @property
    def heads(self) -> list[tuple[int, int]]:
        """Layer and number of each head."""
        table = self._result_tables["heads"]
        return list(zip(table["layer"].to_pylist(), table["head"].to_pylist(), strict=True))

    @public("table()")
    def table(self, kind: str = "pandas") -> Any:
        """Return one row per head, with every number.

        Parameters
        ----------
        kind : {"pandas", "polars", "arrow"}
            Library of the table.

        Raises
        ------
        ShapeError
            If `kind` is something else.
        MissingExtraError
            If the library is not installed.
        """
        one_of("kind", kind, ("pandas", "polars", "arrow"), 'table("pandas")')
        table = self._result_tables["heads"]
        if kind == "arrow":
            return table
        library = import_extra(kind, f"{kind} must be installed.", f"pip install {kind}, or table('arrow')")
        return library.from_arrow(table) if kind == "polars" else table.to_pandas()

    def texts(self) -> pa.Table:
        """Return one row per text that was read."""
        return self._read_table("texts")

    def failed(self) -> list[dict[str, Any]]:
        """Return the texts that failed, each with its reason."""
        with self.reading():
            lines = (self.folder / "failed.jsonl").read_text(encoding="utf-8").split("\n")
        return [json.loads(line) for line in lines if line]

    def _rows_of_head(self, name: str, layer: int, head: int) -> list[dict[str, Any]]:
        """Return the rows of one head in a table, each as a dict; raise where there is no such head."""
        if (layer, head) not in self.heads:
            fix = "see corpus.heads"
            raise OutOfRangeError("there must be such a head.", f"layer {layer}, head {head}", fix, where="Corpus")
        table = self._result_tables[name]
        chosen = pc.and_(pc.equal(table["layer"], layer), pc.equal(table["head"], head))
        rows: list[dict[str, Any]] = table.filter(chosen).to_pylist()
        return rows

    def head(self, layer: int, head: int) -> HeadPage:
        """Return everything that is known of a head but its samples.

        Raises
        ------
        OutOfRangeError
            If there is no such head.
        """
        tokens: dict[str, list[tuple[str, float]]] = {}
        for row in self._rows_of_head("tokens", layer, head):
            tokens.setdefault(row["side"], []).append((row["token"], row["weight"]))
        return HeadPage(
            self._rows_of_head("heads", layer, head)[0],
            {row["number"]: row for row in self._rows_of_head("distributions", layer, head)},
            self._rows_of_head("distances", layer, head),
            tokens,
        )

    @cached_property
    def _sampled_texts(self) -> dict[int, dict[str, Any]]:
        """The sampled texts by their numbers."""
        return {row["text"]: row for row in self._read_table("sampled_texts").to_pylist()}

    def samples(self, layer: int, head: int) -> list[Sample]:
        """Return the texts that were kept for a head, by descending largest weight.

        Raises
        ------
        OutOfRangeError
            If there is no such head.
        """
        found = []
        for row in self._rows_of_head("samples", layer, head):
            text = self._sampled_texts[row["text"]]
            with self.reading():
                held = read_rows(self.folder / "samples" / payload_name(row["text"]), row["row"])
            facts: dict[str, Any] = {name: row[name] for name in ("text", "interval", "max_activation", "largest")}
            facts |= {name: text[name] for name in ("source", "start", "ids", "tokens")}
            found.append(Sample(**facts, keys=held["keys"], weights=held["weights"]))
        return found

    def view(self, **options: Any) -> None:
        """Open the page of all heads in the browser, and serve it until Ctrl-C.

        See `attlas.view.serve` for the options; with ``model=``, a sampled text opens its full map.
        """
        attlas.view.serve(self, **options)

    def export(self, path: str | os.PathLike[str], **options: Any) -> Path:
        """Write the page of all heads as one HTML file that needs no server.

        See `attlas.view.export_corpus` for the options.

        Returns
        -------
        Path
        """
        return attlas.view.export_corpus(self, path, **options)


def read_rows(path: Path, row: int) -> dict[str, NDArray[Any]]:
    """Return the largest keys of one head on a text, without reading those of others."""
    from safetensors import safe_open

    with safe_open(path, framework="np") as file:
        return {name: file.get_slice(name)[row : row + 1][0] for name in ("keys", "weights")}


class Finished:
    """A finished corpus as a source of another; its texts are counted from `first` on."""

    def __init__(self, corpus: Corpus, first: int = 0) -> None:
        self._corpus, self._first = corpus, first
        self.state: State | None = State.of(load_file(corpus.folder / _STATE_FILE))
        self.state.samples.renumber(first)

    @staticmethod
    def rows(corpus: Corpus, kind: str) -> Iterator[dict[str, Any]]:
        """Yield the rows of ``texts`` or ``failed`` of a corpus."""
        if kind == "failed":
            yield from corpus.failed()
        else:
            with corpus.reading(), pq.ParquetFile(corpus.folder / "texts.parquet") as file:
                for batch in file.iter_batches(_ROWS_AT_ONCE):
                    yield from batch.to_pylist()

    def lines(self, kind: str) -> Iterator[dict[str, Any]]:
        """Yield the rows of ``texts`` or ``failed``, with the numbers that they get."""
        for row in self.rows(self._corpus, kind):
            yield row | {"text": row["text"] + self._first}

    def sample(self, text: int) -> dict[str, Tensor] | None:
        """Return the largest keys of a text, None where they are not here."""
        path = self._corpus.folder / "samples" / payload_name(max(text - self._first, 0))
        return load_file(path) if text >= self._first and path.is_file() else None


def open_folder(folder: Path, *, verify: bool = True) -> Corpus:
    """Open the folder of a corpus; one that is not finished as it was at the last commit.

    Parameters
    ----------
    folder : Path
        The folder.
    verify : bool
        Whether the checksum of every file is computed, or its size only looked at.

    Raises
    ------
    RecordingError
        If it is no corpus, has just begun, was changed or cut off, or is of a newer format.
    """
    for left in range(_MOST_ATTEMPTS, -1, -1):
        before = _stamps_of_files(folder)
        try:
            return _open_corpus(folder, verify=verify)
        except (AttlasError, OSError) as error:
            # A process that writes may have finished the corpus, or begun to write it anew, since it was looked at.
            if left and _stamps_of_files(folder) != before:
                continue
            if isinstance(error, AttlasError):
                raise
            raise _broken_folder_error(folder, f"{error.strerror or error}: {error.filename}") from error
    raise _broken_folder_error(folder, "files that change all the time")


def _stamps_of_files(folder: Path) -> list[tuple[int, int, int] | None]:
    """Return the stamps of the result and of the run in a folder; they differ where the folder has changed."""
    return [file_stamp(path) for path in (folder / CONFIG, folder / PARTS / "run.json")]


def file_stamp(path: Path) -> tuple[int, int, int] | None:
    """Return inode, size and time of a file, which differ where it was replaced; None where there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns


def _open_corpus(folder: Path, *, verify: bool) -> Corpus:
    """Open a finished corpus, or what has been read of one that is not."""
    if (folder / CONFIG).is_file():
        return open_finished(folder, verify=verify)
    if has_run(folder) or any((folder / PARTS).glob("[0-9]*.sqlite")):
        return _corpus_so_far(folder)
    if (folder / PARTS).is_dir():
        raise _just_begun(folder, "no text yet")
    return open_finished(folder)


def _corpus_so_far(folder: Path) -> Corpus:
    """Write what was read so far into a folder that lives as long as the corpus."""
    facts, run, extended = load_run(folder)
    holder = Path(tempfile.mkdtemp(prefix="attlas-corpus-"))
    try:
        with parts_of(folder, run, copied=True) as parts:
            base = [] if extended is None else [Finished(open_base(folder, extended))]
            sources: list[Source] = [*base, *parts]
            if not any(source.state is not None for source in sources):
                failed = sum(part.totals["failed"][0] for part in parts)
                raise _just_begun(folder, f"no text yet, {failed} that failed" if failed else "no text yet")
            write(holder, facts, sources, complete=False)
        corpus = open_finished(holder, verify=False)
    except BaseException:
        shutil.rmtree(holder, ignore_errors=True)
        raise
    # Removes the folder when nobody holds the corpus any more.
    weakref.finalize(corpus, shutil.rmtree, holder, ignore_errors=True)
    return corpus


def _just_begun(folder: Path, found: str) -> RecordingError:
    """Return the error of a corpus of which no text has been read yet."""
    fix = "wait for the process that reads, or run its attlas corpus again if it has ended."
    return RecordingError("some text must have been read.", found, fix, folder=str(folder), where="load()")


def open_finished(folder: Path, *, verify: bool = True) -> Corpus:
    """Open the folder of a finished corpus; see `open_folder`."""
    config = _checked_config(folder)
    check_files(folder, config, checksums=verify)
    return Corpus(folder, config)


def open_base(folder: Path, checksum: str, *, verify: bool = True) -> Corpus:
    """Open the finished corpus that a run extends, of which the checksum of its ``config.json`` is known."""
    base = folder / PARTS / BASE
    corpus = open_finished(base, verify=verify)
    if sha256_of(base / CONFIG) != checksum:
        raise _broken_folder_error(base, f"{CONFIG}: other bytes than were written")
    return corpus


def check_files(
    folder: Path, config: dict[str, Any], names: Sequence[str] | None = None, *, checksums: bool = True
) -> None:
    """Raise an error where files of a corpus are not those that its ``config.json`` names.

    Parameters
    ----------
    folder : Path
        The corpus.
    config : dict
        What its ``config.json`` says.
    names : sequence of str, optional
        Those that are looked at, all by default.
    checksums : bool
        Whether their checksums are computed, or their sizes only looked at.
    """
    for name in config["files"] if names is None else names:
        path, facts = folder / name, config["files"][name]
        size = path.stat().st_size if path.is_file() else None
        if size != facts["size"] or (checksums and sha256_of(path) != facts["sha256"]):
            found = "missing" if size is None else f"{size} bytes of {facts['size']}, or other ones"
            raise _broken_folder_error(folder, f"{name}: {found}")


def _checked_config(folder: Path) -> dict[str, Any]:
    """Return the contents of config.json; raise where this attlas cannot read the folder that it describes."""
    try:
        config: dict[str, Any] = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise _broken_folder_error(folder, f"{CONFIG}: {(str(error).splitlines() or ['cannot be read'])[0]}") from error
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise _broken_folder_error(folder, "another config.json")
    if config.get("version") != VERSION:
        raise _broken_folder_error(folder, f"format {config.get('version')}, and this attlas reads {VERSION}")
    files = config.get("files")
    if not isinstance(files, dict) or not all(map(_FILE_NAME.fullmatch, files)):
        raise _broken_folder_error(folder, "a config.json that names other files")
    return config


def _broken_folder_error(folder: Path, found: str) -> RecordingError:
    """Return the error of a folder that is no whole corpus."""
    fix = "attlas corpus MODEL SOURCE -o DIR, or copy the folder again."
    return RecordingError(
        "the folder must be a whole corpus that attlas wrote.", found, fix, folder=str(folder), where="load()"
    )
