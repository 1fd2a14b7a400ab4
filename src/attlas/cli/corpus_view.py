"""``attlas view`` of corpora: all heads of one or more in the browser, or as one file."""

from __future__ import annotations

import contextlib
import importlib.util
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import attlas
from attlas.cli.files import is_corpus
from attlas.cli.formatting import in_bytes
from attlas.cli.loading import load
from attlas.cli.terminal import Terminal, UsageError

if TYPE_CHECKING:  # a command that shows no corpus loads neither pyarrow nor the viewer
    from attlas.corpus import Corpus
    from attlas.view.corpus import Loader, NoModelError


def show(folders: Sequence[Path], terminal: Terminal, arguments: Namespace) -> None:
    """Serve the page of some corpora until Ctrl-C.

    Parameters
    ----------
    folders : sequence of Path
        What `attlas corpus` has written.
    terminal : Terminal
        Where the address is written.
    arguments : Namespace
        Those of ``attlas view``; ``model`` is for corpora that do not say where theirs is.
    """
    from attlas.view.corpus import CorpusService
    from attlas.view.server import stay

    corpora = _opened(folders, terminal)

    def announce(url: str) -> None:
        terminal.say(url, "bold")
        for corpus in corpora:
            counts = corpus.config["counts"]
            size = f"{counts['tokens']:,} tokens in {counts['texts']:,} texts"
            name = corpus.config["model"]["name"]
            terminal.say(f"  {len(corpus.heads):,} heads of {name}, {size}", "dim")
        terminal.say("  Ctrl-C closes it", "dim")

    loaders = [_loader(corpus, arguments.model) for corpus in corpora]
    titles = [folder.resolve().name for folder in folders]
    with contextlib.closing(CorpusService(corpora, titles=titles, loaders=loaders)) as service:
        stay(service, port=arguments.port, browser=not arguments.no_browser, announce=announce, at=arguments.at or "")
    terminal.complain("the viewer is closed.")


def export(folders: Sequence[Path], path: Path, terminal: Terminal) -> None:
    """Write the page of some corpora as one file that works offline.

    Parameters
    ----------
    folders : sequence of Path
        What `attlas corpus` has written.
    path : Path
        The file.
    terminal : Terminal
        Where that is said.
    """
    from attlas.view import export_corpus

    corpora = _opened(folders, terminal)
    with terminal.shares("writing the page") as tell:
        export_corpus(corpora, path, titles=[folder.resolve().name for folder in folders], progress=tell)
    size = in_bytes(path.stat().st_size)
    terminal.say(f"{terminal.style(str(path), 'bold')}  {size}, opens in any browser, also offline")


def _opened(folders: Sequence[Path], terminal: Terminal) -> list[Corpus]:
    corpora = []
    for folder in folders:
        if not is_corpus(folder):
            rule = "several folders must be corpora; a recording is opened alone."
            raise UsageError(rule, str(folder), f"attlas view {folder}")
        with terminal.step(f"opening {folder.name}"):
            corpora.append(attlas.load(folder))
    return corpora


def _loader(corpus: Corpus, given: str | None) -> Loader | NoModelError:
    """Return what loads the model of a corpus, or why nothing can."""
    from attlas.view.corpus import NO_PLACE, NO_TRANSFORMERS, NOT_THERE, OTHER_MODEL, NoModelError

    facts = corpus.config["model"]
    source = given or facts["path"]
    if source is None:
        return NoModelError(NO_PLACE)
    if not Path(source).exists() and (Path(source).is_absolute() or given is not None):
        return NoModelError(NOT_THERE, source)
    if importlib.util.find_spec("transformers") is None:
        return NoModelError(NO_TRANSFORMERS)

    def loaded() -> Any:
        from attlas.corpus.reading import fingerprint

        model = load(source, dtype=getattr(torch, facts["dtype"])).model
        if fingerprint(model) != facts["fingerprint"]:
            raise NoModelError(OTHER_MODEL, source)
        return model

    return loaded
