"""``attlas demo``: what every head of a trained model does on a real text."""

from __future__ import annotations

import importlib.util
import shlex
from argparse import Namespace
from collections import Counter
from pathlib import Path

import torch

from attlas import models
from attlas.cli import picture, report
from attlas.cli.card import example_sentence
from attlas.cli.corpora import export
from attlas.cli.corpus import write_demo
from attlas.cli.files import is_corpus, read_text
from attlas.cli.formatting import counted, in_bytes, page_size
from attlas.cli.loading import load, tokenize
from attlas.cli.options import parse
from attlas.cli.record import check_out, record_text
from attlas.cli.stats import title_line
from attlas.cli.terminal import Terminal, UsageError
from attlas.cli.view import open_if_attended
from attlas.foundation.installation import install_command
from attlas.heads import Head
from attlas.heads.classification import measure_entry
from attlas.heads.telling import telling_query
from attlas.recording.atlas import Atlas


def run(arguments: Namespace, terminal: Terminal) -> None:
    """Record the model on a text, say what its heads do, and write a report, pictures and a corpus."""
    source, text = read_text(arguments.text)
    out = arguments.out
    run_folder = _run_folder(out)
    terminal.keeps_steps = False  # the output is short; times of the steps are in logs only
    with terminal.step("loading the model"):
        loaded = load(models.path() if arguments.model is None else arguments.model)
    ids = tokenize(loaded, text, arguments.tokens)
    is_default = arguments.text is None and arguments.model is None  # the model's card lists what was held out
    with terminal.step("computing the loss"), torch.no_grad():
        batch = ids[None].to(loaded.model.device)
        loss = float(loaded.model(batch, labels=batch, use_cache=False).loss)
    details = {"source": source, "command": arguments.command, "unseen": is_default}
    parts = {"parts": True} if arguments.model is None else {}  # the layout of the shipped model is known
    atlas = record_text(loaded, ids, parts, details, parse(["record", f"--output={run_folder}"]), terminal)
    heads = [head for entry in atlas.entries for head in measure_entry(atlas, entry)]
    clearest = max(heads, key=lambda head: head.prominence)
    held_out = ", unseen in training" if is_default else ""
    terminal.prose(f"{title_line(atlas)}{held_out} ({loss:.2f} nats per token)", "bold", indent="")
    _say_example(atlas, clearest, terminal)
    terminal.prose(f"All {len(heads)} heads: {counted(Counter(head.patterns[0].name for head in heads))}.")
    terminal.prose(_memory_in_words(atlas))
    terminal.say()
    _write_files(run_folder, clearest, terminal)
    if is_default:
        corpus = out / "stdlib.corpus"  # the page calls it so
        write_demo(loaded, corpus, terminal)
        if is_corpus(corpus):
            page = out / "heads.html"
            export([corpus], page, terminal)
            terminal.files([(page, f"{page_size(page)}: every head on all these texts")])
    terminal.say()
    command = f"attlas stats {shlex.quote(str(run_folder))}"
    terminal.say(f"  {terminal.style(command, 'bold')}  prints the numbers of every head as a table")
    open_if_attended(run_folder, terminal, browser=not arguments.no_browser)


def _say_example(atlas: Atlas, head: Head, terminal: Terminal) -> None:
    """Say what the head with the clearest pattern does, and what it attends to at one token of the text."""
    pattern = head.patterns[0]
    does = pattern.does[:1].lower() + pattern.does[1:]
    terminal.prose(f"Head {head.layer}·{head.head} ({pattern.name}) {does}")
    query = telling_query(atlas, head.layer, head.head)
    if query is not None and atlas.tokens and atlas.ids is not None:
        terminal.prose(example_sentence(atlas.tokens, atlas.ids, atlas.entry(head.layer), head, query))


def _write_files(run_folder: Path, head: Head, terminal: Terminal) -> None:
    """Write the report and name it at once; then draw all heads, and one close up, where matplotlib is installed."""
    page = run_folder.with_name("report.html")
    report.write(parse(["report", f"--output={page}", "--", str(run_folder)]), terminal)
    terminal.files([(page, f"{page_size(page)}: every head and its evidence; can be opened now")])
    if importlib.util.find_spec("matplotlib") is None:
        terminal.say("  no pictures: matplotlib is not installed:")
        terminal.say(f"  {install_command('plot')}")
        return
    one = ["--card", f"--layer={head.layer}", f"--head={head.head}"]
    for name, chosen in (("atlas.png", []), ("head.png", one)):
        path = run_folder.with_name(name)
        picture.draw(parse(["picture", f"--output={path}", *chosen, "--", str(run_folder)]), terminal)
        what = f"a card of head {head.layer}·{head.head}, to share" if chosen else "all heads side by side"
        terminal.files([(path, what)], width=len(str(page)))


def _run_folder(out: Path) -> Path:
    """Make the folder of the results, and return where the run is saved; an error comes before the work."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        rule = "-o must be a folder that can be written."
        raise UsageError(rule, f"{error.strerror or error}: {out}", "-o ./attlas-demo") from None
    folder = out / "run.atlas"
    check_out(folder, overwrite=True)
    return folder


def _memory_in_words(atlas: Atlas) -> str:
    """Say what whole matrices would have taken, and what was kept."""
    n, matrices = atlas.entries[0].shape[2], sum(len(entry.heads) for entry in atlas.entries)
    kept = sum(t.nbytes for A in atlas for t in (A.q, A.k, A.lse))
    line = f"{matrices} matrices of {n:,} × {n:,} would take {in_bytes(matrices * n * n * 4)}; "
    return f"{line}attlas kept queries, keys and one number per row: {in_bytes(kept)}."
