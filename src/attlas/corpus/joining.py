"""attlas.join() puts several corpora together."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from attlas.corpus.run_facts import check_same
from attlas.corpus.sources import check_installed
from attlas.errors import RecordingError, public

if TYPE_CHECKING:
    from attlas.corpus.folder import Corpus


@public("join()")
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
    attlas.corpus : makes one, and reads texts that are added to its source.

    Notes
    -----
    Exact: all sums are whole numbers, and the sampled texts of the whole are among those of the parts. Texts are
    numbered anew, those of the first folder first. Memory: the sums of two corpora, and a line for each text.

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
        raise RecordingError(rule, f"{len(opened)} folders", "finish each by its own command.")
    if target.exists():
        raise RecordingError("the folder must be new.", str(target), "another folder.")
    first, sources = 0, []
    seen: set[str] = set()
    for one in opened:
        settings = {name: value for name, value in one.config["settings"].items() if name != "texts"}
        check_same(one.folder, {**opened[0].config, "source": "", "settings": settings}, one.config | {"source": ""})
        source = Finished(one, first)
        sources.append(source)
        for row in source.lines("texts"):
            first = max(first, row["text"] + 1)
            place = f"{one.config['source']} {row['source']} {row['start']} {row['hash']}"
            if place in seen:
                found = f"{row['source']}, token {row['start']}, in two folders"
                raise RecordingError("a text may be in one folder only.", found, "leave one out.")
            seen.add(place)
        first = max([first, *(row["text"] + 1 for row in source.lines("failed"))])
    facts = dict(opened[0].config)
    facts["vocabulary"] = json.loads((opened[0].folder / "vocabulary.json").read_text(encoding="utf-8"))
    facts["source"] = ", ".join(dict.fromkeys(one.config["source"] for one in opened))
    facts["settings"] = facts["settings"] | {"texts": None}
    target.mkdir(parents=True)
    write(target, facts, sources)
    return open_folder(target, verify=False)
