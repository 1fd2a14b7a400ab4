"""``attlas corpus``: what every head of a model does over many texts."""

from __future__ import annotations

import importlib.util
import os
import shlex
import sysconfig
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import attlas
from attlas.cli.checks import check_least
from attlas.cli.formatting import counted, plural
from attlas.cli.loading import LoadedModel, load
from attlas.cli.terminal import Terminal, UsageError
from attlas.foundation.installation import install_command

if TYPE_CHECKING:
    from attlas.corpus import Corpus

_HEADS_SHOWN = 8  # heads in the list at the end
_DEMO_TEXTS = 64
_SECONDS_MEASURED = 3.0  # seconds of reading from which the demo says how long the rest takes
# Held out of the shipped model's training: its card lists them.
_HELD_OUT_MODULES = ("_bootsubprocess", "_compat_pickle", "_osx_support", "_py_abc", "_strptime", "argparse",
                     "collections", "ipaddress", "quopri", "subprocess", "tempfile", "timeit",
                     "turtledemo")  # fmt: skip


def run(arguments: Namespace, terminal: Terminal) -> None:
    """Read the texts, or export what was read before."""
    if arguments.export is not None:
        _export_corpus(arguments, terminal)
        return
    if arguments.source is None or arguments.out is None:
        raise UsageError("a model, a source and -o are needed.", "fewer", "attlas corpus MODEL SOURCE -o DIR")
    for name, least in (("length", 2), ("stride", 1), ("texts", 1), ("batch", 1), ("samples", 1)):
        check_least(name, getattr(arguments, name), least, max(least, 64))
    rank = int(os.environ.get("RANK", "0"))
    device = arguments.device
    if device == "cuda" and "LOCAL_RANK" in os.environ:
        device = f"cuda:{os.environ['LOCAL_RANK']}"
    loaded = load(
        arguments.model,
        attention="sdpa" if arguments.patch_sdpa else "attlas",
        dtype=getattr(torch, arguments.dtype),
        device=device,
    )
    if loaded.context is not None and (arguments.length or 0) > loaded.context:
        rule = f"--length must fit into the context of the model, {loaded.context:,} tokens."
        raise UsageError(rule, f"--length {arguments.length}", f"--length {loaded.context}")
    names = ("length", "stride", "batch", "seed", "samples", "column", "patch_sdpa", "failures")
    options = {name: getattr(arguments, name) for name in names} | {"limit": arguments.texts}
    found = _read_texts(loaded, arguments.source, arguments.out, options, terminal, shown=rank == 0)
    if found is not None:
        say(found, terminal)


def _read_texts(
    loaded: LoadedModel,
    source: Any,
    out: Path,
    options: dict[str, Any],
    terminal: Terminal,
    *,
    shown: bool = True,
    after_each: Callable[[int, int], None] | None = None,
) -> Corpus | None:
    """Read, with a line, if `shown`, that says how fast and how long; `after_each` gets the texts and tokens read."""
    with terminal.shares("reading") as tell:
        begin = time.monotonic()

        def progress(texts: int, tokens: int, share: float) -> None:
            """Show how much was read, how fast, and how long the rest takes."""
            if after_each is not None:
                after_each(texts, tokens)
            took = max(time.monotonic() - begin, 1e-9)
            left = f", {_time_in_words(took / share - took)} left" if share > 0.01 else ""
            tell(share, f"{texts:,} texts, {tokens:,} tokens, {round(tokens / took):,} tokens/s{left}")

        given = options | {"tokenizer": loaded.tokenizer, "progress": progress if shown else None}
        return attlas.corpus(loaded.model, source, out, **given)


def _time_in_words(seconds: float) -> str:
    """Return seconds in words: 40 s, 12 min, 3.5 h."""
    minutes, hours = seconds / 60, seconds / 3600
    return f"{seconds:.0f} s" if minutes < 2 else f"{minutes:.0f} min" if hours < 2 else f"{hours:.1f} h"


def _export_corpus(arguments: Namespace, terminal: Terminal) -> None:
    """Write a corpus in the form of another tool."""
    from attlas.corpus import Corpus
    from attlas.corpus.headvis import export_headvis

    out = arguments.out
    if out is None or arguments.source is not None:
        found = "no -o" if out is None else f"a source: {arguments.source}"
        rule = "--export takes a corpus, and -o says where its tree goes."
        raise UsageError(rule, found, f"attlas corpus {shlex.quote(arguments.model)} --export headvis -o tree")
    corpus = attlas.load(arguments.model)
    if not isinstance(corpus, Corpus):
        fix = "attlas corpus DIR --export headvis -o tree"
        raise UsageError("--export takes a corpus.", str(arguments.model), fix)
    with terminal.step("writing"):
        export_headvis(corpus, out)
    terminal.say(f"  {terminal.style(str(out), 'bold')}  the tree of HeadVis, {len(corpus.heads)} heads")
    if not corpus.config["complete"]:
        terminal.say("  the corpus is not finished: attlas corpus with the same arguments goes on where it was", "dim")


def say(corpus: Corpus, terminal: Terminal) -> None:
    """Say what was read, which kinds of heads there are, and where the result is."""
    counts, model = corpus.config["counts"], corpus.config["model"]
    failed = f", {counts['failed']:,} failed" if counts["failed"] else ""
    terminal.prose(
        f"{model['name']}, {plural(len(corpus.heads), 'head')} over {plural(counts['texts'], 'text')} of "
        f"{corpus.config['source']}, {plural(counts['tokens'], 'token')}{failed}",
        "bold",
        indent="",
    )
    table = corpus.table("arrow").to_pylist()
    terminal.prose(counted(Counter(row["kind"] for row in table)))
    terminal.say("  head   entropy  previous  induction  distance  largest  kind", "dim")
    for row in sorted(table, key=lambda row: -row["induction_score"])[:_HEADS_SHOWN]:
        numbers = (
            f"{row['entropy']:8.2f}{row['previous']:10.2f}{row['induction_score']:11.2f}{row['qk_distance']:10.0f}"
        )
        place = f"{row['layer']}·{row['head']}"
        terminal.say(f"  {place:6s}{numbers}{row['mean_max_activation']:9.2f}  {row['kind']}")
    folder = shlex.quote(str(corpus.folder))
    terminal.say(f"  {terminal.style(str(corpus.folder), 'bold')}  attlas view {folder} opens it")
    terminal.say(f"  attlas picture {folder} --card -o card.png draws it, to share")


class _TimeEstimate:
    """Says once how long the rest of the texts takes, from the speed of the first ones.

    Parameters
    ----------
    texts : int
        How many texts are read.
    length : int
        Tokens of each, at most.
    terminal : Terminal
        Where it is said.
    """

    def __init__(self, texts: int, length: int, terminal: Terminal) -> None:
        self._texts, self._length, self._terminal = texts, length, terminal
        self._begin: tuple[float, int] | None = None  # after the first text, which takes longer than others
        self._is_said = False

    def __call__(self, texts: int, tokens: int) -> None:
        """Take how many texts and tokens were read so far; say the estimate when enough was measured."""
        now = time.monotonic()
        if self._begin is None:
            self._begin = now, tokens
        seconds, read = now - self._begin[0], tokens - self._begin[1]
        if self._is_said or not read or seconds < _SECONDS_MEASURED:
            return
        self._is_said = True
        left = (self._texts - texts) * self._length * seconds / read
        self._terminal.prose(
            f"The model now reads {self._texts} more texts, which takes about {_time_in_words(left)} more."
        )


def write_demo(loaded: LoadedModel, out: Path, terminal: Terminal) -> None:
    """Read files of Python's standard library that the shipped model did not see in training, and say what was found.

    Parameters
    ----------
    loaded : LoadedModel
        The shipped model.
    out : Path
        The folder of the corpus.
    terminal : Terminal
        Where it is said, how long it still takes as well.
    """
    if importlib.util.find_spec("pyarrow") is None:
        terminal.say("  no corpus: pyarrow is not installed:")
        terminal.say(f"  {install_command('corpus')}")
        return
    library = Path(sysconfig.get_path("stdlib"))
    files = [library / f"{name}.py" for name in _HELD_OUT_MODULES]
    files += sorted(path for name in _HELD_OUT_MODULES for path in (library / name).rglob("*.py"))
    there = [path for path in files if path.is_file()]
    estimate = _TimeEstimate(_DEMO_TEXTS, loaded.context or 0, terminal)
    corpus = _read_texts(loaded, there, out, {"limit": _DEMO_TEXTS}, terminal, after_each=estimate)
    if corpus is not None:
        counts = corpus.config["counts"]
        kinds = counted(Counter(row["kind"] for row in corpus.table("arrow").to_pylist()))
        terminal.prose(f"All heads over {counts['texts']:,} texts, {counts['tokens']:,} tokens: {kinds}.")
