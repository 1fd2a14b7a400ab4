"""``attlas demo``: what every head of a trained model does on a real text."""

from __future__ import annotations

import importlib.util
from argparse import Namespace
from pathlib import Path

from attlas import models, pictures
from attlas.cli.checks import check_folder
from attlas.cli.corpus import write_demo
from attlas.cli.corpus_view import export
from attlas.cli.demo_figures import atlas_figure, head_figure
from attlas.cli.demo_run import DemoResult, read
from attlas.cli.files import is_corpus, read_text, title_of
from attlas.cli.formatting import in_bytes, percent, print_heads, secondary_patterns
from attlas.cli.loading import load, tokenize
from attlas.cli.report import write
from attlas.cli.terminal import Terminal, UsageError
from attlas.cli.view import open_if_attended
from attlas.heads import MIXED, PATTERNS

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
    """Run the model on the text; print the table; write report, pictures and recording; open it if there is a user."""
    text_file, text = read_text(arguments.text)
    out = arguments.out
    run_folder = _run_folder(out)
    terminal.say("attlas demo", "bold")
    with terminal.step("loading the model"):
        loaded = load(models.path() if arguments.model is None else arguments.model)
    ids = tokenize(loaded, text, arguments.tokens)
    as_shipped = arguments.text is None and arguments.model is None  # the model's card lists what was held out
    result = read(loaded, ids, text_file.name, arguments.command, terminal, held_out=as_shipped, folder=run_folder)
    terminal.say()
    _table(result, terminal)
    terminal.say()
    _patterns(result, terminal)
    terminal.say()
    terminal.prose(_memory(result))
    terminal.say()
    with terminal.step("writing the report"):
        report = write(result.atlas, out / "report.html", title_of(result.atlas, run_folder))
    _write(result, report, terminal)
    if as_shipped:
        terminal.say()
        write_demo(loaded, out / "corpus", terminal)
        if is_corpus(out / "corpus"):
            export([out / "corpus"], out / "heads.html", terminal)
        terminal.say()
    open_if_attended(run_folder, terminal, browser=not arguments.no_browser)


def _run_folder(out: Path) -> Path:
    """Make the folder of the results, and return where the run is saved; an error comes before the work."""
    rule, fix = "--out must be a folder that can be written.", "--out ./attlas-demo"
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(rule, f"{error.strerror or error}: {out}", fix) from None
    check_folder(out, rule, fix)
    folder = out / "run.atlas"
    if folder.exists() and not (folder / "atlas.json").is_file():
        found = f"no recording, and in the place of one: {folder}"
        raise UsageError("--out must be a folder where the run can be saved.", found, fix)
    return folder


def _table(result: DemoResult, terminal: Terminal) -> None:
    atlas, heads = result.atlas, result.heads
    held_out = ", which it never saw in training" if atlas.details["unseen"] else ""
    shape = f"{atlas.model}, {len(atlas)} layers × {len(atlas.entries[0].heads)} heads, "
    text = f"{result.title.removeprefix(f'{atlas.model} ')}{held_out} ({result.loss:.2f} nats a token)"
    terminal.prose(shape + text, "bold", indent="")
    terminal.say()
    kinds, strong = [], set()
    for i, head in enumerate(heads):
        also = "".join(f", {name}" for name in secondary_patterns(head))
        main = head.patterns[0]
        coloured = terminal.style(main.name, *_COLOURS.get(main.measure, ("dim",))) + terminal.style(also, "dim")
        kinds.append((main.name + also, coloured))
        measures = {_SHOWN_BY.get(kind.measure, kind.measure) for kind in head.patterns}
        strong |= {(i, j) for j, (name, *_) in enumerate(_COLUMNS) if name in measures}
    left = print_heads(
        terminal,
        [heading for _, heading, _ in _COLUMNS],
        [[format(getattr(head, name), form) for name, _, form in _COLUMNS] for head in heads],
        kinds,
        breaks={i for i, head in enumerate(heads) if head.head == 0 and head.layer > 0},
        strong=strong,
    )
    if left:
        terminal.say()
        terminal.prose(f"not shown for want of room: {', '.join(left)}; the report has everything", "dim")


def _patterns(result: DemoResult, terminal: Terminal) -> None:
    for kind in (*PATTERNS, MIXED):
        heads = [f"{head.layer}·{head.head}" for head in result.heads if kind in head.patterns]
        if not heads:
            continue
        rule = f"{kind.definition}: at least {percent(kind.threshold)}" if kind.measure else kind.definition
        terminal.say(f"  {terminal.style(kind.name, *_COLOURS.get(kind.measure, ('dim',)))}  {', '.join(heads)}")
        terminal.say(f"    {kind.does}")
        terminal.prose(rule, "dim", indent="    ")


def _memory(result: DemoResult) -> str:
    """Say what full matrices would have taken, and what was used."""
    n, matrices, peak = result.atlas.entries[0].shape[2], len(result.heads), result.atlas.details["peak"]
    line = f"{matrices} full matrices of {n:,} × {n:,} in float32 would take {in_bytes(matrices * n * n * 4)}; "
    line += f"attlas kept {in_bytes(result.held)}: the layers' queries and keys, and one number a row."
    return line if peak is None else f"{line} Reading every cell took {in_bytes(peak)} more at the peak."


def _write(result: DemoResult, report: Path, terminal: Terminal) -> None:
    """Draw the pictures beside the report, where matplotlib is installed, and say what was written."""
    head, written = result.most_telling, [(report, "opens in any browser, also offline")]
    plots = importlib.util.find_spec("matplotlib") is not None
    for name, text, figure in (
        ("atlas.png", "every head on the text", atlas_figure),
        ("head.png", f"layer {head.layer}, head {head.head} close up", head_figure),
    ):
        if plots:
            with terminal.step(f"drawing {name}"):
                written.append((pictures.save(figure(result), report.with_name(name)), text))
    terminal.files(written)
    if not plots:
        terminal.say("  no pictures: matplotlib is not installed; pip install 'attlas[plot]'")
