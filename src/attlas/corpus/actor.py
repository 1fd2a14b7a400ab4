"""An actor for Ray Data: each batch of rows that it reads becomes a part of a corpus."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from attlas.corpus.building import Run
from attlas.corpus.journal import PARTS, Journal, parts_of
from attlas.corpus.locks import mutex, remove_unless_held
from attlas.corpus.reading import ModelReader
from attlas.corpus.run_facts import about_run, has_run, load_run
from attlas.corpus.sources import Cutter, check_installed, document_of
from attlas.errors import RecordingError

if TYPE_CHECKING:
    from attlas.corpus.folder import Corpus

_MOST_TEXTS = 1 << 16  # texts of one document, at most


class CorpusActor:
    """Reads batches of documents with a model; a class for ``ray.data.Dataset.map_batches``.

    Parameters
    ----------
    make : callable
        Returns the model and its tokenizer (or None), on the device of the actor. Ray calls it once for each actor.
    folder : str or Path
        The corpus, in a file system that all actors share.
    column : str, optional
        Column of the documents; text, input_ids, ids or content by default.
    number : str, default "number"
        Column of whole numbers, a different one for each document.
    **settings
        ``length``, ``stride``, ``seed``, ``samples`` and ``patch_sdpa`` as of `attlas.corpus`.

    See Also
    --------
    finish : makes the corpus of what all actors have read.

    Notes
    -----
    A batch that Ray runs a second time, because an actor was lost, takes the place of what it left before: nothing is
    counted twice. A batch is as large on disk as the sums of a corpus are, so that batches of some hundred documents
    are right. Text ``t`` of document ``d`` has the number ``65536 d + t``.

    Examples
    --------
    >>> import tempfile
    >>> from attlas.corpus.actor import CorpusActor, finish
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> def make():
    ...     return GPT2LMHeadModel(
    ...         GPT2Config(vocab_size=20, n_positions=16, n_embd=8, n_layer=2, n_head=2)
    ...     ), None
    >>> with tempfile.TemporaryDirectory() as folder:  # with Ray: dataset.map_batches(CorpusActor, ...)
    ...     actor = CorpusActor(make, f"{folder}/run")
    ...     read = actor({"number": [0, 1], "ids": [[1, 2, 3, 1], [4, 5, 6]]})
    ...     read["tokens"].tolist(), finish(f"{folder}/run")
    ([4, 3], Corpus(GPT2LMHeadModel, 4 heads, 2 texts, 7 tokens))
    """

    def __init__(
        self,
        make: Callable[[], tuple[nn.Module, Any]],
        folder: str | os.PathLike[str],
        *,
        column: str | None = None,
        number: str = "number",
        patch_sdpa: bool = False,
        **settings: Any,
    ) -> None:
        check_installed()
        from attlas.corpus.folder import CONFIG

        model, tokenizer = make()
        self._folder, self._column, self._number = Path(folder), column, number
        about = about_run(model, "ray.data", tokenizer, column=column, **settings)
        if (self._folder / CONFIG).is_file():
            rule, fix = "the folder must be new, or that of other actors.", "another folder, and attlas join."
            raise RecordingError(rule, "a finished corpus", fix, folder=folder, where="CorpusActor")
        (self._folder / PARTS).mkdir(parents=True, exist_ok=True)
        self._reader = ModelReader(model, patch_sdpa=patch_sdpa)
        sizes = about["settings"]
        self._cutter = Cutter(tokenizer, sizes["length"], sizes["stride"], about["model"]["vocabulary"])
        with self._reader.running():
            self._run = Run(self._folder, self._reader, about, tokenizer)

    def __call__(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Read a batch; return the number of each document and how many tokens of it were read."""
        numbers = [int(number) for number in batch[self._number]]
        apart = self._folder / PARTS / f"begun-{uuid.uuid4().hex}"
        apart.mkdir()
        tokens = []
        try:
            with self._reader.running(), Journal(apart, min(numbers), self._run.checksum) as journal:
                # By ascending number, as the lines of a part are.
                for row in np.argsort(numbers, kind="stable"):
                    one = {name: column[row] for name, column in batch.items() if name != self._number}
                    texts = list(self._cutter.cut(document_of(f"#{numbers[row]}", one, self._column)))[:_MOST_TEXTS]
                    before = self._run.tokens
                    # Reads the texts and notes what was measured; those of document d begin at d * _MOST_TEXTS.
                    self._run.unit(journal, list(enumerate(texts, numbers[row] * _MOST_TEXTS)))
                    tokens.append((row, self._run.tokens - before))
                journal.commit()
            # Moved into place whole: a killed actor leaves no half of a part.
            name = f"{min(numbers):04d}.sqlite"
            (apart / name).replace(self._folder / PARTS / name)
        finally:
            shutil.rmtree(apart, ignore_errors=True)
        return {self._number: np.array(numbers), "tokens": np.array([count for _, count in sorted(tokens)])}


def finish(folder: str | os.PathLike[str]) -> Corpus:
    """Make the corpus of what all actors have read.

    Parameters
    ----------
    folder : str or Path
        The folder that the actors were given.

    Returns
    -------
    Corpus

    Raises
    ------
    RecordingError
        If nothing was read, or a text is in two batches.
    """
    from attlas.corpus.extending import is_written
    from attlas.corpus.folder import open_folder, write

    target = Path(folder)
    if has_run(target):
        with mutex(target / PARTS):
            if not is_written(target):
                facts, run, _ = load_run(target)
                with parts_of(target, run) as parts:
                    write(target, facts, parts)
            remove_unless_held(target / PARTS)
    return open_folder(target, verify=False)
