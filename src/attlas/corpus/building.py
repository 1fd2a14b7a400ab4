"""attlas.corpus() reads texts with a model, and keeps what every head does on them."""

from __future__ import annotations

import os
import shutil
import time
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from attlas.corpus.journal import PARTS, Journal, parts_of
from attlas.corpus.known import ChangedTextError, KnownTexts, changed, content_of, identity_of
from attlas.corpus.locks import hold, mutex
from attlas.corpus.measuring import TextNumbers
from attlas.corpus.reading import ModelReader
from attlas.corpus.run_facts import SAMPLES, TOP, about_run, check_same, has_run, load_run, save_run
from attlas.corpus.sampling import hash_of
from attlas.corpus.sources import Cutter, Text, TextSource, check_installed, documents, name_of
from attlas.corpus.state import State
from attlas.errors import OutOfRangeError, RecordingError, ShapeError, public
from attlas.foundation.checks import instance_of

if TYPE_CHECKING:
    from attlas.corpus.extending import FinishedCorpus
    from attlas.corpus.folder import Corpus, Source

_MOST_TOKENS = 16384
_FEW_TEXTS = 50  # texts before which a share of failures tells nothing
_COMMIT_SHARE = 0.05  # share of the time that commits may take

#: Called after each batch with the texts and the tokens that this process has read so far, and the share of the whole.
Progress = Callable[[int, int, float], None]


@public("corpus()")
def corpus(
    model: nn.Module,
    texts: Any,
    folder: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    length: int | None = None,
    stride: int | None = None,
    limit: int | None = _MOST_TOKENS,
    batch: int = 1,
    seed: int = 0,
    samples: int = SAMPLES,
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
        If the folder holds another corpus (of another model or other settings), a text that was read was changed or
        removed since, a file of an unfinished corpus is damaged, another run writes into it, too many texts failed, or
        the model cannot be recorded.
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

    Texts that came into the source since are read by the same call, into a finished corpus, too, and behind a smaller
    `limit`: every number is that of a call on all of them. Those that stand before others in the source are numbered
    last. Until the result is written, the folder holds that of before.

    Of hybrid models the layers with a softmax are measured, under the numbers of the model; layers of linear attention
    have no such statistics and are left out.

    Cost: the forward pass of the model with attlas, and one pass of statistics over each matrix: 1.5 times the pass
    with torch's attention at 2,048 tokens, 0.9 times at 16,384. Memory: linear in `length`, 24 bytes per head and
    token of the vocabulary, and 30 bytes for each text that was read before. All texts of before are tokenized again,
    and compared.

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
    instance_of("model", model, nn.Module, "an nn.Module", "attlas.corpus(model, ...)")
    rank = int(os.environ.get("RANK", "0")) if rank is None else rank
    world = int(os.environ.get("WORLD_SIZE", "1")) if world is None else world
    if not 0 <= rank < world:
        raise OutOfRangeError("rank must be below world.", f"rank {rank} of {world}", "rank=0")
    from attlas.corpus.extending import FinishedCorpus, clear, result_of

    target = Path(folder)
    settings: dict[str, Any] = {"limit": limit, "batch": batch, "seed": seed, "samples": samples, "column": column}
    about = about_run(model, name_of(texts), tokenizer, length=length, stride=stride, **settings)
    sizes = about["settings"]
    cutter = Cutter(tokenizer, sizes["length"], sizes["stride"], about["model"]["vocabulary"])
    source = TextSource(texts, column, cutter, limit)
    if isinstance(texts, str | Path) and source.again:
        next(documents(texts, column), None)  # a source that cannot be read leaves no folder that is bound to it
    while True:
        result, before = result_of(target), FinishedCorpus.of(target)
        wanted: TextSource | None = source
        if before is not None:
            wanted = before.new_texts(about, source)
            if wanted is None and result is not None:
                clear(target, abandoned=True)
                return before.corpus
        # Where another run finishes meanwhile, the error is suppressed, and all begins again from its result.
        ended = False
        with (
            suppress(FinishedMeanwhileError),
            hold(target / PARTS, rank, world),
            ModelReader(model, patch_sdpa=patch_sdpa).running() as reader,
        ):
            run = Run(target, reader, about, tokenizer, result, before, rank, world)
            run.read(wanted, batch, failures, every, progress)
            found, ended = run.finish(failures), True
        if ended:
            clear(target)  # the last process that has left does so
            return found
        if before is not None and not source.again:
            rule = "a pipe can be gone through once."
            raise RecordingError(rule, "a corpus that was finished meanwhile", "run the same command again.")


class FinishedMeanwhileError(Exception):
    """Another process has written the result since it was looked at."""


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
    result : str, optional
        Checksum of the result that was in the folder.
    before : FinishedCorpus, optional
        What the run extends.
    rank, world : int
        Which process of how many.

    Raises
    ------
    FinishedMeanwhileError
        If the folder has another result now.
    """

    def __init__(
        self,
        folder: Path,
        reader: ModelReader,
        about: dict[str, Any],
        tokenizer: Any,
        result: str | None = None,
        before: FinishedCorpus | None = None,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        self.folder, self.reader, self.rank, self.world = folder, reader, rank, world
        self.seed, self.samples = about["settings"]["seed"], about["settings"]["samples"]
        self.vocabulary: int = about["model"]["vocabulary"]
        # What a model without a configuration reads at once is not known: the texts say how much is enough.
        self._block = reader.block(self.vocabulary, about["model"]["context"] or about["settings"]["length"])
        self.about, self.checksum = self._agreed_facts(about, tokenizer, result, before)
        with parts_of(folder, self.checksum) as parts:
            self._known_texts = KnownTexts.together([part.known for part in parts])
        self._first = 0 if before is None else before.first
        self._identities = array("Q")  # of all texts of the source
        self.tokens = self.texts = self.failed = 0
        self._reason: object = ""  # why the last of those failed
        self._is_batch_complete = True  # no batch is half taken in
        self._limit, self._share = about["settings"]["texts"], 0.0

    def begun(self, share: float) -> None:
        """Take note that a share of the source was read."""
        self._share = share

    def _agreed_facts(
        self, about: dict[str, Any], tokenizer: Any, result: str | None, before: FinishedCorpus | None
    ) -> tuple[dict[str, Any], str]:
        """Return the facts of the run, as its first process has written them, and their checksum."""
        from attlas.corpus.extending import is_written, keep, result_of

        parts = self.folder / PARTS
        with mutex(parts):
            if result_of(self.folder) != result:
                raise FinishedMeanwhileError
            if is_written(self.folder):  # parts of a process that was killed when the result was there
                for path in parts.iterdir():
                    if path.is_dir():
                        shutil.rmtree(path)
                    elif path.name != "mutex" and not path.name.startswith("lock-"):
                        path.unlink()
            extended = None if before is None else before.checksum
            if extended is not None:
                keep(self.folder, extended)
            if not has_run(self.folder):
                words = [f"#{i}" if tokenizer is None else str(tokenizer.decode([i])) for i in range(self.vocabulary)]
                save_run(self.folder, about | {"vocabulary": words, "modules": self.reader.modules}, extended)
        known, checksum, _ = load_run(self.folder)
        check_same(self.folder, about, known)
        return known, checksum

    def read(
        self, source: TextSource | None, batch: int, failures: float, every: float, progress: Progress | None
    ) -> None:
        """Read those batches of a source whose number modulo `world` is `rank`; without a source there are none.

        What was read is committed every `every` seconds. `failures` is the share of texts that may fail.
        """
        if source is None:
            return
        self._check_known(source)
        last, wait = time.monotonic(), every
        with Journal(self.folder / PARTS, self.rank, self.checksum) as journal:
            try:
                texts, number = source.texts(self.begun), self._first
                # Batches begin at multiples of `batch`, so that all processes cut them alike.
                while unit := list(enumerate(islice(texts, batch - number % batch), number)):
                    batch_number, number = number // batch, number + len(unit)
                    unread = [(at, text) for at, text in unit if not self._is_known_text(at, text, new=True)]
                    if batch_number % self.world != self.rank or not unread:
                        continue
                    self._is_batch_complete = False
                    self.unit(journal, unread)
                    self._is_batch_complete = True
                    self._check_failures(failures)
                    if time.monotonic() - last >= wait:
                        begin = time.monotonic()
                        journal.commit()
                        last = time.monotonic()
                        wait = max(every, (last - begin) / _COMMIT_SHARE)
                    if progress is not None:
                        share = 0.0 if self._limit is None else number / self._limit
                        progress(self.texts, self.tokens, min(max(share, self._share), 1.0))
            except BaseException:
                if self._is_batch_complete:
                    with suppress(OSError, RecordingError):  # the first error says more
                        journal.commit()
                raise
            journal.commit()
        self._check_all_there()

    def _is_known_text(self, number: int, text: Text, *, new: bool = False) -> bool:
        """Tell whether a text was read, or failed as it is; with `new`, it is one of the source from now on."""
        identity = identity_of(text.source, text.start, content_of(text, self.seed))
        if new:
            self._identities.append(identity)
        try:
            return self._known_texts.is_known(number, identity)
        except ChangedTextError:
            raise changed(self.folder, text.source, text.start, "another text") from None

    def _check_known(self, source: TextSource) -> None:
        """Compare what was read before with the source, before anything is read that does not belong to it."""
        if source.again and len(self._known_texts):
            # The keys are numbers of texts, ascending. A text of the source that is another one now raises.
            for number, text in zip(
                range(self._first, int(self._known_texts.keys[-1]) + 1), source.texts(), strict=False
            ):
                self._is_known_text(number, text)
            self._check_all_there()

    def _check_all_there(self) -> None:
        """Raise the error of a changed source where a text that was read before did not come up again."""
        if self._known_texts.seen.all():
            return
        number = int(self._known_texts.keys[~self._known_texts.seen][0])
        with parts_of(self.folder, self.checksum) as parts:
            rows = (row for part in parts for kind in ("texts", "failed") for row in part.lines(kind))
            row = next(row for row in rows if row["text"] == number)
        raise changed(self.folder, row["source"], row["start"], "no text any more")

    def unit(self, journal: Journal, unit: Sequence[tuple[int, Text]]) -> None:
        """Read some texts, each with its number; one that fails gets a line that says why."""
        found: list[list[TextNumbers] | str] = self.reader.read([text.ids for _, text in unit if text.ids is not None])
        results = iter(found)
        for number, text in unit:
            result = text.reason if text.ids is None else next(results)
            self.texts += 1
            place = {"text": number, "source": text.source, "start": text.start}
            if text.ids is None:
                self.failed += 1
                self._reason = result
                journal.line("failed", place | {"reason": result})
                continue
            hashed = hash_of(text.ids, self.seed)
            if isinstance(result, str):
                self.failed += 1
                self._reason = result
                journal.line("failed", place | {"reason": result, "hash": f"{hashed:016x}"})
                continue
            self.tokens += len(text.ids)
            if journal.state is None:
                journal.state = State(self.reader.heads, self.vocabulary, self.samples, TOP)
                journal.state.block[:] = self._block
            heads = journal.state.add(number, hashed, result)
            journal.line("texts", place | {"tokens": len(text.ids), "hash": f"{hashed:016x}"})
            if len(heads):
                journal.save_sample(number, self._largest_keys(journal.state, heads, result, text))

    def _largest_keys(
        self, state: State, heads: np.typing.NDArray[np.int64], layers: Sequence[TextNumbers], text: Text
    ) -> dict[str, Tensor]:
        """Return what is kept of a text: its ids, the heads that keep it, and the largest keys of each row in these."""
        keys, weights = (np.concatenate([getattr(layer, name) for layer in layers]) for name in ("keys", "weights"))
        return {
            "heads": torch.tensor([state.heads[head] for head in heads], dtype=torch.int32),
            "keys": torch.from_numpy(keys[heads].astype(np.int32)),
            "weights": torch.from_numpy(weights[heads].astype(np.float32)),
            "ids": torch.from_numpy(np.asarray(text.ids)),
        }

    def _check_failures(self, share: float) -> None:
        """Raise an error where more than `share` of the texts failed; the first few texts tell nothing yet."""
        if self.failed > share * max(self.texts, _FEW_TEXTS):
            self._too_many()

    def _too_many(self) -> None:
        """Raise the error that too many texts failed."""
        rule, fix = "only a small share of the texts may fail.", "mend the source or the model, or allow more failures."
        found = f"{self.failed} of {self.texts} texts failed, the last one: {self._reason}"
        raise RecordingError(rule, found, fix, folder=str(self.folder), where="corpus()")

    def finish(self, failures: float) -> Corpus | None:
        """Write the result if all processes are done, and return it; `failures` is the share of texts that may fail."""
        from attlas.corpus.extending import is_written
        from attlas.corpus.folder import open_folder

        with mutex(self.folder / PARTS):
            if not is_written(self.folder) and not self._write_result(failures):
                return None
        return open_folder(self.folder, verify=False)

    def _write_result(self, failures: float) -> bool:
        """Write the result; return whether all processes are done."""
        from attlas.corpus.extending import sources_before
        from attlas.corpus.folder import failed_rows, write

        with parts_of(self.folder, self.checksum) as parts:
            sources: list[Source] = [*sources_before(self.folder), *parts]
            identities = np.frombuffer(self._identities, dtype=np.uint64)
            if KnownTexts.together([part.known for part in parts]).count(identities, self._first) < len(identities):
                return False
            rows = failed_rows(sources)
            self.failed, self._reason = len(rows), rows[-1]["reason"] if rows else ""
            self.texts = self.failed + sum(one.state.texts for one in sources if one.state is not None)
            if not self.texts:
                raise ShapeError("there must be something to read.", "no text", "another source.", where="corpus()")
            if self.failed == self.texts or (self.failed > failures * self.texts and self.texts >= _FEW_TEXTS):
                self._too_many()
            write(self.folder, self.about, sources)
        return True
