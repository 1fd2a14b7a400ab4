"""attlas.corpus() reads texts with a model, and attlas.join() puts several corpora together."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from attlas.corpus.journal import PARTS, Journal, hold, mutex, parts_of
from attlas.corpus.measuring import TextNumbers
from attlas.corpus.reading import ModelReader, model_facts
from attlas.corpus.sampling import hash_of
from attlas.corpus.sources import Cutter, Text, check_installed, documents, name_of
from attlas.corpus.state import State
from attlas.errors import DtypeError, OutOfRangeError, RecordingError, ShapeError, kind
from attlas.files import save_text
from attlas.inputs import whole_number

if TYPE_CHECKING:
    from attlas.corpus.folder import Corpus

_COMPARED = 64  # texts that must be those of the run before
_LENGTH, _MOST, _SAMPLES, _TOP = 4096, 16384, 32, 10
_FEW = 50  # texts before which a share of failures tells nothing
_COMMITS = 0.05  # share of the time that commits may take

#: Called after each batch with the texts and the tokens that this process has read so far, and the share of the whole.
Progress = Callable[[int, int, float], None]


def corpus(
    model: nn.Module,
    texts: Any,
    folder: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    length: int | None = None,
    stride: int | None = None,
    limit: int | None = _MOST,
    batch: int = 1,
    seed: int = 0,
    samples: int = _SAMPLES,
    column: str | None = None,
    patch_sdpa: bool = False,
    failures: float = 0.1,
    rank: int | None = None,
    world: int | None = None,
    every: float = 10.0,
    progress: Progress | None = None,
) -> Corpus | None:
    """Read many texts with a model, and keep what every head does on them.

    Parameters
    ----------
    model : nn.Module
        A model of transformers that reads one text, or, with `patch_sdpa`, any that calls torch's attention and takes
        token ids of shape (batch, n).
    texts : str, Path or iterable
        A file, a folder, a pattern, ``"-"`` for the standard input; or str, token ids or mappings, one a document.
        Files are text, JSON lines, Parquet, Arrow or ``.npy`` with token ids, by their suffix.
    folder : str or Path
        Where the result is written, and what was read before is found again.
    tokenizer : tokenizer of transformers, optional
        For documents of characters, and for the texts of tokens in the results.
    length : int, optional
        Tokens of a text, 4,096 or what the model can read. Longer documents are cut into several texts.
    stride : int, optional
        Tokens from the begin of one text to that of the next, by default `length`: none is read twice.
    limit : int or None, default 16384
        Texts that are read at most.
    batch : int, default 1
        Texts that the model reads at once. Only neighbours of the same length are: nothing is filled up.
    seed : int, default 0
        Seed of the sampled texts.
    samples : int, default 32
        Texts whose largest keys are kept for all heads, drawn at random, beside the 10 with the largest weights of
        each head.
    column : str, optional
        Column of JSON lines, Parquet, Arrow or mappings: text, input_ids, ids or content by default.
    patch_sdpa : bool
        Whether torch's ``scaled_dot_product_attention`` is caught, for models that call it themselves.
    failures : float, default 0.1
        Share of texts that may fail before the run ends with an error.
    rank, world : int, optional
        Number of this process and of all that share the work, by default those of torchrun or accelerate
        (``RANK``, ``WORLD_SIZE``), or one.
    every : float, default 10.0
        Seconds after which what was read is on disk for good.
    progress : callable, optional
        Called after each batch with the texts and tokens that this process has read, and the share of the whole that
        is known to lie behind it.

    Returns
    -------
    Corpus or None
        The result; None in all processes but the one that is done last.

    Raises
    ------
    RecordingError
        If the folder holds another corpus (of another model, other settings, or other first texts), another run writes
        into it, too many texts failed, or the model cannot be recorded.
    FileError
        If a file cannot be read or written.
    ShapeError
        If settings do not fit the model, or there is nothing to read.
    MissingExtraError
        If pyarrow is not installed.

    See Also
    --------
    attlas.load : opens the result, and an unfinished one too.
    attlas.join : puts corpora of several machines together.

    Notes
    -----
    Killed at any moment, the same call goes on where it was. All sums are whole numbers: the files have the same bytes
    with any number of processes and after any number of restarts. Another `batch` may change results by the rounding
    of the model. A text that fails is named in ``failed.jsonl``.

    Cost: the forward pass of the model with attlas, and one pass of statistics over each matrix: 1.5 times the pass
    with torch's attention at 2,048 tokens, 0.9 times at 16,384. Memory: linear in `length`, and 24 bytes a head and
    token of the vocabulary; it does not grow with the number of texts.

    Examples
    --------
    >>> import tempfile, attlas
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> config = GPT2Config(vocab_size=20, n_positions=16, n_embd=8, n_layer=2, n_head=2)
    >>> texts = [[1, 2, 3, 1, 2, 3, 4], [5, 6, 7, 5, 6, 7]]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     found = attlas.corpus(GPT2LMHeadModel(config), texts, folder)
    ...     found, found.table()["queries"].tolist()
    (Corpus(GPT2LMHeadModel, 4 heads, 2 texts, 13 tokens), [13, 13, 13, 13])
    """
    check_installed()
    if not isinstance(model, nn.Module):
        raise DtypeError("corpus()", "model must be an nn.Module.", found=kind(model), fix="attlas.corpus(model, ...)")
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    world = int(os.environ.get("WORLD_SIZE", "1")) if world is None else world
    if not 0 <= rank < world:
        raise OutOfRangeError("corpus()", "rank must be below world.", found=f"rank {rank} of {world}", fix="rank=0")
    target = Path(folder)
    settings: dict[str, Any] = {"limit": limit, "batch": batch, "seed": seed, "samples": samples, "column": column}
    about = about_run(model, name_of(texts), tokenizer, length=length, stride=stride, **settings)
    sizes = about["settings"]
    cutter = Cutter(tokenizer, sizes["length"], sizes["stride"], about["model"]["vocabulary"])
    first = (text for document in documents(texts, column) for text in cutter.cut(document))
    known = _finished(target, about, () if about["source"] == "-" else first)
    if known is not None:
        return known
    if isinstance(texts, str | Path) and about["source"] != "-":
        next(documents(texts, column), None)  # a source that cannot be read leaves no folder that is bound to it
    with hold(target / PARTS, rank, world), ModelReader(model, patch_sdpa=patch_sdpa).running() as reader:
        run = Run(target, reader, about, tokenizer, rank, world)
        stream = (text for document in documents(texts, column, run.begun) for text in cutter.cut(document))
        units = run.read(islice(stream, limit), batch, failures, every, progress)
        return run.finish(units, failures)


def about_run(
    model: nn.Module,
    source: str,
    tokenizer: Any = None,
    *,
    length: int | None = None,
    stride: int | None = None,
    limit: int | None = None,
    batch: int = 1,
    seed: int = 0,
    samples: int = _SAMPLES,
    column: str | None = None,
) -> dict[str, Any]:
    """Return what a run is about: the model, the source and all settings that change a result."""
    facts = model_facts(model)
    length, stride = _sizes(length, stride, facts["context"])
    for name, value in (("batch", batch), ("samples", samples), *([] if limit is None else [("limit", limit)])):
        whole_number("corpus()", name, value, f"{name}=1")
    settings = {"length": length, "stride": stride, "texts": limit, "batch": batch, "seed": seed, "samples": samples}
    return {
        "model": facts,
        "tokenizer": None if tokenizer is None else _tokenizer_facts(tokenizer),
        "source": source,
        "settings": settings | {"top": _TOP, "column": column},
    }


def _sizes(length: int | None, stride: int | None, context: int | None) -> tuple[int, int]:
    chosen = min(_LENGTH, context or _LENGTH) if length is None else length
    whole_number("corpus()", "length", chosen, "length=512")
    whole_number("corpus()", "stride", chosen if stride is None else stride, "stride=512")
    if chosen < 2 or (context is not None and chosen > context):
        rule = "length must be 2 or more, and fit into the context of the model."
        raise ShapeError("corpus()", rule, found=f"length = {chosen}, context = {context}", fix=f"length={context}")
    return chosen, chosen if stride is None else stride


def _tokenizer_facts(tokenizer: Any) -> dict[str, Any]:
    path = str(getattr(tokenizer, "name_or_path", "") or "")
    return {"name": type(tokenizer).__name__, "path": path or None}


def _difference(about: dict[str, Any], other: dict[str, Any]) -> str:
    """Return in what two corpora differ; nothing where they are one."""
    model, known = about["model"], other.get("model", {})
    if model["fingerprint"] != known.get("fingerprint"):
        return f"one of another model, {known.get('name')}"
    settings, before = about["settings"], other.get("settings", {})
    different = [f"{name} = {before.get(name)}" for name in settings if settings[name] != before.get(name)]
    if about["source"] != other.get("source"):
        different.append(f"source = {other.get('source')}")
    return f"one with {', '.join(different)}" if different else ""


def _check_same(folder: Path, about: dict[str, Any], other: dict[str, Any]) -> None:
    difference = _difference(about, other)
    if difference:
        raise _another_corpus(folder, difference, "settings as before.")


def _another_corpus(folder: Path, found: str, same: str) -> RecordingError:
    rule, fix = "a folder holds one corpus.", f"another folder, or the same {same}"
    return RecordingError("corpus()", rule, {"folder": str(folder)}, found=found, fix=fix)


def _check_texts(folder: Path, texts: Iterable[tuple[int, Text]], hashes: Mapping[int, str], seed: int) -> None:
    """Raise an error where texts are not those that were read under their numbers before."""
    for number, text in texts:
        if text.ids is not None and hashes.get(number, "") not in ("", f"{hash_of(text.ids, seed):016x}"):
            raise _another_corpus(folder, f"one of another text {number}, {text.source}", "texts in the same order.")


def _first_hashes(lines: Iterable[dict[str, Any]]) -> dict[int, str]:
    """Return the hashes of the first texts that were read, by the number of the text."""
    return {row["text"]: row["hash"] for row in takewhile(lambda row: row["text"] < _COMPARED, lines)}


def _finished(folder: Path, about: dict[str, Any], texts: Iterable[Text]) -> Corpus | None:
    """Return the corpus if a run before has finished it."""
    from attlas.corpus.folder import CONFIG, Finished, open_folder

    if not (folder / CONFIG).is_file():
        if folder.is_dir() and not (folder / PARTS).is_dir() and any(folder.iterdir()):
            rule = "the folder must be new, or one of a corpus."
            raise RecordingError("corpus()", rule, {"folder": str(folder)}, found="other files", fix="another folder.")
        return None
    found = open_folder(folder, verify=False)
    _check_same(folder, about, found.config)
    hashes = _first_hashes(Finished(found).lines("texts"))
    _check_texts(folder, enumerate(islice(texts, max(hashes, default=-1) + 1)), hashes, about["settings"]["seed"])
    shutil.rmtree(folder / PARTS, ignore_errors=True)
    return found


class Run:
    """One process of a run.

    Parameters
    ----------
    folder : Path
        The result.
    reader : ModelReader
        The model.
    about : dict
        What the run is about.
    tokenizer : tokenizer, optional
        For the texts of tokens.
    rank, world : int
        Which process of how many.
    """

    def __init__(
        self, folder: Path, reader: ModelReader, about: dict[str, Any], tokenizer: Any, rank: int = 0, world: int = 1
    ) -> None:
        self.folder, self.reader, self.rank, self.world = folder, reader, rank, world
        self.seed, self.samples = about["settings"]["seed"], about["settings"]["samples"]
        self.vocabulary: int = about["model"]["vocabulary"]
        self._block = reader.block(self.vocabulary, about["model"]["context"])
        self.about = self._agreed(about, tokenizer)
        self.done = _Bits(folder)
        self.tokens = self.texts = self.failed = 0
        self._whole = True  # no batch is half taken in
        self._limit, self._share = about["settings"]["texts"], 0.0

    def begun(self, share: float) -> None:
        """Take note that a share of the source was read."""
        self._share = share

    def _agreed(self, about: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
        """Return what all processes know of the run, from the first of them."""
        path = self.folder / PARTS / "run.json"
        with mutex(self.folder / PARTS):
            if not path.is_file():
                words = [f"#{i}" if tokenizer is None else str(tokenizer.decode([i])) for i in range(self.vocabulary)]
                facts = about | {"vocabulary": words, "modules": self.reader.modules}
                save_text(json.dumps(facts), path, "corpus()")
        known: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        _check_same(self.folder, about, known)
        return known

    def read(self, texts: Iterator[Text], batch: int, failures: float, every: float, progress: Progress | None) -> int:
        """Read what this process has to; return how many batches there are in all."""
        number, last, wait = 0, time.monotonic(), every
        with Journal(self.folder / PARTS, self.rank) as journal:
            try:
                while unit := list(islice(texts, batch)):
                    if number in self.done:
                        _check_texts(self.folder, enumerate(unit, number * batch), self.done.hashes, self.seed)
                    if number % self.world == self.rank and number not in self.done:
                        self._whole = False
                        self.unit(journal, number * batch, unit)
                        journal.done.add(number)
                        self._whole = True
                        self._check_failures(failures)
                        if time.monotonic() - last >= wait:
                            begin = time.monotonic()
                            journal.commit()
                            last = time.monotonic()
                            wait = max(every, (last - begin) / _COMMITS)
                        if progress is not None:
                            share = 0.0 if self._limit is None else (number + 1) * batch / self._limit
                            progress(self.texts, self.tokens, min(max(share, self._share), 1.0))
                    number += 1
            except BaseException:
                if self._whole:
                    with suppress(OSError):  # the first error says more
                        journal.commit()
                raise
            journal.commit()
        return number

    def unit(self, journal: Journal, first: int, unit: Sequence[Text]) -> None:
        """Read a batch; a text that fails gets a line that says why."""
        found: list[list[TextNumbers] | str] = self.reader.read([text.ids for text in unit if text.ids is not None])
        results = iter(found)
        for number, text in enumerate(unit, first):
            result = text.reason if text.ids is None else next(results)
            self.texts += 1
            place = {"text": number, "source": text.source, "start": text.start}
            if isinstance(result, str) or text.ids is None:
                self.failed += 1
                journal.line("failed", place | {"reason": result})
                continue
            self.tokens += len(text.ids)
            if journal.state is None:
                journal.state = State(self.reader.heads, self.vocabulary, self.samples, _TOP)
                journal.state.block[:] = self._block
            hashed = hash_of(text.ids, self.seed)
            heads = journal.state.add(number, hashed, result)
            journal.line("texts", place | {"tokens": len(text.ids), "hash": f"{hashed:016x}"})
            if len(heads):
                journal.save_sample(number, self._largest_keys(journal.state, heads, result, text))

    def _largest_keys(
        self, state: State, heads: np.typing.NDArray[np.int64], layers: Sequence[TextNumbers], text: Text
    ) -> dict[str, Tensor]:
        keys, weights = (np.concatenate([getattr(layer, name) for layer in layers]) for name in ("keys", "weights"))
        return {
            "heads": torch.tensor([state.heads[head] for head in heads], dtype=torch.int32),
            "keys": torch.from_numpy(keys[heads].astype(np.int32)),
            "weights": torch.from_numpy(weights[heads].astype(np.float32)),
            "ids": torch.from_numpy(np.asarray(text.ids)),
        }

    def _check_failures(self, share: float) -> None:
        if self.failed > share * max(self.texts, _FEW):
            self._too_many()

    def _too_many(self) -> None:
        rule, fix = "only a small share of the texts may fail.", "mend the source, or raise failures=."
        found = f"{self.failed} of {self.texts} texts failed, see the files failed.jsonl in it"
        raise RecordingError("corpus()", rule, {"folder": str(self.folder)}, found=found, fix=fix)

    def finish(self, units: int, failures: float) -> Corpus | None:
        """Write the result if all processes are done, and return it."""
        from attlas.corpus.folder import CONFIG, open_folder, write

        if not units:
            raise ShapeError("corpus()", "there must be something to read.", found="no text", fix="another source.")
        with suppress(FileNotFoundError), mutex(self.folder / PARTS):  # another process may have written all by now
            if not (self.folder / CONFIG).is_file():
                parts = parts_of(self.folder)
                if sum(int(part.done.sum()) for part in parts) < units:
                    return None
                self.failed = sum(1 for part in parts for _ in part.lines("failed"))
                self.texts = self.failed + sum(int(p.state.counts[0, -1]) for p in parts if p.state.heads)
                if self.failed == self.texts or (self.failed > failures * self.texts and self.texts >= _FEW):
                    self._too_many()
                write(self.folder, self.about, parts)
        shutil.rmtree(self.folder / PARTS, ignore_errors=True)
        return open_folder(self.folder, verify=False)


class _Bits:
    """The batches that were read before, by any process."""

    def __init__(self, folder: Path) -> None:
        parts = parts_of(folder)
        self._parts = [part.done for part in parts]
        self.hashes = {text: hashed for part in parts for text, hashed in _first_hashes(part.lines("texts")).items()}

    def __contains__(self, number: int) -> bool:
        return any(number < len(done) and done[number] for done in self._parts)


def join(folders: Sequence[str | os.PathLike[str]], folder: str | os.PathLike[str]) -> Corpus:
    """Put corpora of one model together: every number is as if one run had read all texts.

    Parameters
    ----------
    folders : sequence of str or Path
        Finished corpora of the same model and settings, of different texts.
    folder : str or Path
        Where the result goes; it must not exist yet.

    Returns
    -------
    Corpus

    Raises
    ------
    RecordingError
        If they are not of one model, a text is in two of them, or the folder is there already.

    See Also
    --------
    attlas.corpus : makes one; its processes join their parts by themselves.

    Notes
    -----
    Exact: all sums are whole numbers, and the sampled texts of the whole are among those of the parts. Texts are
    numbered anew, those of the first folder first. Memory: the sums of two corpora, and 8 bytes a text.

    Examples
    --------
    >>> import tempfile, attlas
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> config = GPT2Config(vocab_size=20, n_positions=16, n_embd=8, n_layer=2, n_head=2)
    >>> model = GPT2LMHeadModel(config)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for name, texts in ("a", [[1, 2, 3, 1, 2]]), ("b", [[5, 6, 7]]):
    ...         made = attlas.corpus(model, texts, f"{folder}/{name}")
    ...     attlas.join([f"{folder}/a", f"{folder}/b"], f"{folder}/c")
    Corpus(GPT2LMHeadModel, 4 heads, 2 texts, 8 tokens)
    """
    check_installed()
    from attlas.corpus.folder import Finished, open_folder, write

    target, opened = Path(folder), [open_folder(Path(one)) for one in folders]
    if not opened or not all(one.config["complete"] for one in opened):
        rule = "finished corpora are joined."
        raise RecordingError("join()", rule, found=f"{len(opened)} folders", fix="finish each by its own command.")
    if target.exists():
        raise RecordingError("join()", "the folder must be new.", found=str(target), fix="another folder.")
    first, sources = 0, []
    seen: set[str] = set()
    for one in opened:
        settings = {name: value for name, value in one.config["settings"].items() if name != "texts"}
        _check_same(one.folder, {**opened[0].config, "source": "", "settings": settings}, one.config | {"source": ""})
        source = Finished(one, first)
        sources.append(source)
        for row in source.lines("texts"):
            first = max(first, row["text"] + 1)
            place = f"{one.config['source']} {row['source']} {row['start']} {row['hash']}"
            if place in seen:
                found = f"{row['source']}, token {row['start']}, in two folders"
                raise RecordingError("join()", "a text may be in one folder only.", found=found, fix="leave one out.")
            seen.add(place)
        first = max([first, *(row["text"] + 1 for row in source.lines("failed"))])
    facts = dict(opened[0].config)
    facts["vocabulary"] = json.loads((opened[0].folder / "vocabulary.json").read_text(encoding="utf-8"))
    facts["source"] = ", ".join(dict.fromkeys(one.config["source"] for one in opened))
    facts["settings"] = facts["settings"] | {"texts": None}
    target.mkdir(parents=True)
    write(target, facts, sources)
    return open_folder(target, verify=False)
