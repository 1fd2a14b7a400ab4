"""``attlas demo``: what every head of a trained model does on a real text."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from attlas import models
from attlas.cli import picture, report
from attlas.cli.corpus import write_demo
from attlas.cli.files import is_corpus, read_text
from attlas.cli.formatting import in_bytes, percent, print_heads, secondary_patterns
from attlas.cli.loading import load, tokenize
from attlas.cli.options import parse
from attlas.cli.record import check_out, record_text
from attlas.cli.stats import title_line
from attlas.cli.terminal import Terminal, UsageError
from attlas.cli.view import export, open_if_attended
from attlas.foundation.installation import install_command
from attlas.heads import MIXED, PATTERNS, Head
from attlas.heads.classification import measure_entry
from attlas.recording.atlas import Atlas

# Columns: field of Head, heading, format; those on the right give way where the terminal is narrow.
_COLUMNS = (
    ("layer", "layer", "d"),
    ("head", "head", "d"),
    ("entropy", "entropy", ".2f"),
    ("effective_keys", "keys", ",.1f"),
    ("first", "first", ".2f"),
    ("previous", "previous", ".2f"),
    ("induction", "induction", ".2f"),
    ("induction_text", "on text", ".2f"),
    ("distance", "distance", ",.0f"),
)
_LONGER = "on two cores that takes two minutes more, and its progress says how long"
_SHOWN_BY = {"breadth": "effective_keys"}  # the column that shows the measure of a pattern, where names differ
_COLOURS = {
    "induction": ("red", "bold"),
    "duplicate": ("yellow",),
    "previous": ("blue",),
    "fixed": ("blue",),
    "current": ("cyan",),
    "first": ("dim",),
    "near": ("green",),
    "favourite": ("magenta",),
    "breadth": ("magenta",),
}


def run(arguments: Namespace, terminal: Terminal) -> None:
    """Record the model on the text; print the table; write report, pictures and recording; open them if attended."""
    source, text = read_text(arguments.text)
    out = arguments.out
    run_folder = _run_folder(out)
    terminal.say("attlas demo", "bold")
    with terminal.step("loading the model"):
        loaded = load(models.path() if arguments.model is None else arguments.model)
    ids = tokenize(loaded, text, arguments.tokens)
    is_default = arguments.text is None and arguments.model is None  # the model's card lists what was held out
    with terminal.step("computing the loss"), torch.no_grad():
        batch = ids[None].to(loaded.model.device)
        loss = float(loaded.model(batch, labels=batch, use_cache=False).loss)
    details = {"source": source, "command": arguments.command, "unseen": is_default}
    atlas = record_text(loaded, ids, {}, details, parse(["record", f"--out={run_folder}"]), terminal)
    heads = [head for entry in atlas.entries for head in measure_entry(atlas, entry)]
    terminal.say()
    _table(atlas, heads, loss, terminal)
    terminal.say()
    _patterns(heads, terminal)
    terminal.say()
    terminal.prose(_memory(atlas))
    terminal.say()
    report.run(parse(["report", f"--out={out / 'report.html'}", "--", str(run_folder)]), terminal)
    _draw(run_folder, max(heads, key=lambda head: head.prominence), terminal)
    if is_default:
        terminal.say()
        terminal.prose(f"{out / 'report.html'} can be opened now. The model goes on with 64 more texts; {_LONGER}.")
        write_demo(loaded, out / "corpus", terminal)
        if is_corpus(out / "corpus"):
            export([out / "corpus"], out / "heads.html", terminal)
        terminal.say()
    open_if_attended(run_folder, terminal, browser=not arguments.no_browser)


def _draw(run_folder: Path, head: Head, terminal: Terminal) -> None:
    """Draw every head, and one close up, where matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        terminal.say("  no pictures: matplotlib is not installed:")
        terminal.say(f"  {install_command('plot')}")
        return
    for name, chosen in (("atlas.png", []), ("head.png", [f"--layer={head.layer}", f"--head={head.head}"])):
        picture.run(parse(["picture", f"--out={run_folder.with_name(name)}", *chosen, "--", str(run_folder)]), terminal)


def _run_folder(out: Path) -> Path:
    """Make the folder of the results, and return where the run is saved; an error comes before the work."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        rule, found = "--out must be a folder that can be written.", f"{error.strerror or error}: {out}"
        raise UsageError(rule, found, "--out ./attlas-demo") from None
    folder = out / "run.atlas"
    check_out(folder, overwrite=True)
    return folder


def _table(atlas: Atlas, heads: Sequence[Head], loss: float, terminal: Terminal) -> None:
    held_out = ", which it never saw in training" if atlas.details["unseen"] else ""
    terminal.prose(f"{title_line(atlas)}{held_out} ({loss:.2f} nats a token)", "bold", indent="")
    terminal.say()
    kinds, strong = [], set()
    for i, head in enumerate(heads):
        also = "".join(f", {name}" for name in secondary_patterns(head))
        main = head.patterns[0]
        coloured = terminal.style(main.name, *_COLOURS.get(main.measure, ("dim",))) + terminal.style(also, "dim")
        kinds.append((main.name + also, coloured))
        measures = {_SHOWN_BY.get(kind.measure, kind.measure) for kind in head.patterns}
        strong |= {(i, j) for j, (name, *_) in enumerate(_COLUMNS) if name in measures}
    rows = [asdict(head) for head in heads]
    print_heads(terminal, _COLUMNS, rows, kinds, everything="the report has everything", strong=strong)


def _patterns(heads: Sequence[Head], terminal: Terminal) -> None:
    for kind in (*PATTERNS, MIXED):
        names = [f"{head.layer}·{head.head}" for head in heads if kind in head.patterns]
        if not names:
            continue
        rule = f"{kind.definition}: at least {percent(kind.threshold)}" if kind.measure else kind.definition
        terminal.say(f"  {terminal.style(kind.name, *_COLOURS.get(kind.measure, ('dim',)))}  {', '.join(names)}")
        terminal.say(f"    {kind.does}")
        terminal.prose(rule, "dim", indent="    ")


def _memory(atlas: Atlas) -> str:
    """Say what full matrices would have taken, and what was kept."""
    n, matrices = atlas.entries[0].shape[2], sum(len(entry.heads) for entry in atlas.entries)
    kept = sum(t.nbytes for A in atlas for t in (A.q, A.k, A.lse))
    line = f"{matrices} full matrices of {n:,} × {n:,} in float32 would take {in_bytes(matrices * n * n * 4)}; "
    return f"{line}attlas kept {in_bytes(kept)}: the layers' queries and keys, and one number a row."
