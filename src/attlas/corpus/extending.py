"""A corpus that is finished: compared with its source, and extended by the texts that came since."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from attlas.corpus.folder import BASE, CONFIG, Finished, check_files, open_base, open_finished
from attlas.corpus.journal import PARTS
from attlas.corpus.known import ChangedTextError, KnownTexts, changed, content_of, identity_of, row_identity
from attlas.corpus.locks import mutex, remove_unless_held
from attlas.corpus.run_facts import check_same, has_run, load_run
from attlas.corpus.sources import Text, TextSource
from attlas.errors import FileError, RecordingError
from attlas.foundation.files import sync_folder
from attlas.recording.atlas.tensors import sha256_of


def is_written(folder: Path) -> bool:
    """Tell whether the result is there, and not that of the run before, which is being extended."""
    config = folder / CONFIG
    if not config.is_file():
        return False
    return not has_run(folder) or load_run(folder)[2] != sha256_of(config)


def result_of(folder: Path) -> str | None:
    """Return the checksum of the result that a folder holds, None where there is none."""
    config = folder / CONFIG
    return sha256_of(config) if config.is_file() else None


class FinishedCorpus:
    """The result of a run before, which the texts of the source are compared with.

    Parameters
    ----------
    folder : Path
        The corpus.

    Attributes
    ----------
    corpus : Corpus
        The result.
    checksum : str
        The checksum of its ``config.json``, which has those of all other files.
    first : int
        Number of the first text that is new.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        in_place = (folder / CONFIG).is_file()
        self.corpus = open_finished(folder if in_place else folder / PARTS / BASE, verify=not in_place)
        self.checksum = sha256_of(self.corpus.folder / CONFIG)
        # Only the files that are compared with the source are checked here, the others where they are read.
        check_files(self.corpus.folder, self.corpus.config, ("texts.parquet", "failed.jsonl"))
        self.first = 0  # `_entries_of_texts` raises it
        self._known_texts = KnownTexts.of(self._entries_of_texts())

    def _entries_of_texts(self) -> Iterator[tuple[int, int, bool]]:
        """Yield place and identity of each text, and whether it was read; find the number behind all of them."""
        for kind in ("texts", "failed"):
            for row in Finished.rows(self.corpus, kind):
                # The number that the first new text gets.
                self.first = max(self.first, row["text"] + 1)
                yield identity_of(row["source"], row["start"]), row_identity(row), kind == "texts"

    @classmethod
    def of(cls, folder: Path) -> FinishedCorpus | None:
        """Return the result of a run before, None where there is none.

        Raises
        ------
        RecordingError
            If the folder holds something else.
        """
        if (folder / PARTS).is_dir():
            with mutex(folder / PARTS):  # another process may be writing the result
                if (folder / CONFIG).is_file() or (folder / PARTS / BASE).is_dir():
                    return cls(folder)
            return None
        if (folder / CONFIG).is_file():
            return cls(folder)
        if folder.is_dir() and any(folder.iterdir()):
            rule = "the folder must be new, or one of a corpus."
            raise RecordingError(rule, "other files", "another folder.", folder=str(folder), where="corpus()")
        return None

    def new_texts(self, about: dict[str, Any], source: TextSource) -> TextSource | None:
        """Return the texts that were not read before; None where there are none.

        Raises
        ------
        RecordingError
            If this is a corpus of another model or other settings, or a text was changed or removed since.
        """
        check_same(self._folder, about, self.corpus.config, extended=True)
        seed = about["settings"]["seed"]

        def is_new(text: Text) -> bool:
            """Return whether the corpus lacks a text; raise where it has another one at its place in the source."""
            identity = identity_of(text.source, text.start, content_of(text, seed))
            try:
                return not self._known_texts.is_known(identity_of(text.source, text.start), identity)
            except ChangedTextError:
                raise changed(self._folder, text.source, text.start, "another text") from None

        found = None
        for text in source.texts():
            if is_new(text):
                found = text
                if not source.again:  # a pipe cannot be gone through twice: its new texts must come last
                    break
        self._check_all_there()
        return None if found is None else source.only(is_new, found)

    def _check_all_there(self) -> None:
        """Raise the error of a changed source where a text of the corpus did not come up again."""
        if self._known_texts.seen.all():
            return
        gone = set(self._known_texts.keys[~self._known_texts.seen].tolist())
        rows = (row for kind in ("texts", "failed") for row in Finished.rows(self.corpus, kind))
        row = next(row for row in rows if identity_of(row["source"], row["start"]) in gone)
        raise changed(self._folder, row["source"], row["start"], "no text any more")


def keep(folder: Path, result: str) -> None:
    """Keep the files of a finished corpus beside the parts of the run that extends it; who calls has the mutex.

    Parameters
    ----------
    folder : Path
        The corpus.
    result : str
        The checksum of the result.

    Raises
    ------
    RecordingError
        If these files are damaged, and the result was written anew in part, so that there are no others.
    """
    base = folder / PARTS / BASE
    # It may be kept already, also where the result was replaced since. A damaged copy is made again, if there is still
    # something to make it of.
    if result_of(folder) != result or result_of(base) == result:
        try:
            # Only whether it can be opened: an error says that the copy is damaged.
            open_base(folder, result)
        except RecordingError:
            if result_of(folder) != result:
                raise
        else:
            return
    names = [*open_finished(folder).config["files"], CONFIG]
    shutil.rmtree(base, ignore_errors=True)
    (base / "samples").mkdir(parents=True)
    for name in names:
        _link_or_copy(folder / name, base / name)
    sync_folder(base)


def _link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it where a file has only one."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def sources_before(folder: Path) -> list[Finished]:
    """Return the finished corpus that a run extends, if it does, as a source of the result; who calls has the mutex."""
    extended = load_run(folder)[2]
    if extended is None:
        return []
    keep(folder, extended)
    return [Finished(open_base(folder, extended, verify=False))]


def clear(folder: Path, *, abandoned: bool = False) -> None:
    """Remove the parts of a run whose result is written, unless another process is still in the run.

    Parameters
    ----------
    folder : Path
        The corpus.
    abandoned : bool
        Whether its source has nothing new any more, so that a run that was to extend it has nothing to do.
    """
    parts = folder / PARTS
    if parts.is_dir():
        with suppress(FileError), mutex(parts):
            if abandoned or is_written(folder):
                remove_unless_held(parts)
