"""Corpora that a command opens: checked, and as the page of all heads in one file."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import attlas
from attlas.cli.files import is_corpus
from attlas.cli.terminal import Terminal, UsageError

if TYPE_CHECKING:  # a command that opens no corpus loads no pyarrow
    from attlas.corpus import Corpus


def opened_corpora(folders: Sequence[Path], terminal: Terminal, command: str) -> list[Corpus]:
    """Return the corpora of several folders.

    Parameters
    ----------
    folders : sequence of Path
        What `attlas corpus` has written.
    terminal : Terminal
        Where progress is shown.
    command : str
        The command that takes a folder of another kind alone, as ``attlas view``.

    Returns
    -------
    list of Corpus
        As many as folders.

    Raises
    ------
    UsageError
        If a folder holds no corpus.
    """
    corpora = []
    for folder in folders:
        if not is_corpus(folder):
            rule = "several folders must be corpora; a recording is opened alone."
            raise UsageError(rule, str(folder), f"{command} {shlex.quote(str(folder))}")
        with terminal.step(f"opening {folder.name}"):
            corpora.append(attlas.load(folder))
    return corpora


def export(folders: Sequence[Path], path: Path, terminal: Terminal) -> None:
    """Write the page of some corpora as one file that works offline.

    Parameters
    ----------
    folders : sequence of Path
        What `attlas corpus` has written.
    path : Path
        The file.
    terminal : Terminal
        Where progress is shown.

    Raises
    ------
    UsageError
        If a folder holds no corpus.
    """
    from attlas.view import export_corpus  # the viewer, which commands that write no page do without

    corpora = opened_corpora(folders, terminal, "attlas report")
    with terminal.shares("writing the page") as tell:
        export_corpus(corpora, path, titles=[folder.resolve().name for folder in folders], progress=tell)
