"""``attlas demo``: what every head of a trained model does on a real text."""

from __future__ import annotations

import argparse
import importlib.util
import shlex
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from attlas import models, pictures
from attlas.atlas import load as load_atlas
from attlas.cli.corpus import write_demo
from attlas.cli.corpus_view import export, is_corpus
from attlas.cli.demo_figures import atlas_figure, head_figure
from attlas.cli.demo_result import DemoResult
from attlas.cli.demo_run import read
from attlas.cli.files import read_text, title_of
from attlas.cli.formatting import COLUMNS, count, memory, percent, secondary_patterns
from attlas.cli.loading import load, tokenize
from attlas.cli.report import write
from attlas.cli.terminal import Terminal, UsageError
from attlas.cli.view import open_if_attended
from attlas.heads import MIXED, PATTERNS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["run"]

_RUN = "run.atlas"
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


def run(arguments: argparse.Namespace, terminal: Terminal) -> None:
    """Run the model on the text; print the table; write report, pictures and recording; open it if there is a user."""
    text_file, text = read_text(arguments.text, "demo")
    folder = models.path() if arguments.model is None else arguments.model
    _writable(arguments.out)
    run_folder = arguments.out / _RUN
    if run_folder.exists() and not (run_folder / "atlas.json").is_file():
        found = f"no recording, and in the place of one: {run_folder}"
        raise _error("--out must be a folder where the run can be saved.", found, "--out ./attlas-demo")
    terminal.say(terminal.style("attlas demo", "bold"))
    with terminal.step("loading the model"):
        loaded = load(folder)
    ids = tokenize(loaded, text, arguments.tokens)
    held_out = arguments.text is None and arguments.model is None  # its card lists the modules that were held out
    result = read(loaded, ids, text_file.name, _command(arguments), terminal, held_out=held_out, keep=run_folder)
    terminal.say()
    _table(result, terminal)
    terminal.say()
    _patterns(result, terminal)
    terminal.say()
    terminal.prose(memory(result.cost))
    terminal.say()
    with terminal.step("writing the report"):
        atlas = load_atlas(run_folder)
        report = write(atlas, arguments.out / "report.html", title_of(atlas, run_folder))
    _write(result, report, terminal)
    if arguments.text is None and arguments.model is None:
        terminal.say()
        write_demo(loaded, arguments.out / "corpus", terminal)
        if is_corpus(arguments.out / "corpus"):
            export([arguments.out / "corpus"], arguments.out / "heads.html", terminal)
        terminal.say()
    open_if_attended(run_folder, terminal, browser=not arguments.no_browser)


def _writable(out: Path) -> None:
    """Make the folder, so that an error comes before the work and not after it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        found = f"{error.strerror or error}: {out}"
        raise _error("--out must be a folder that can be written.", found, "--out ./attlas-demo") from None


def _error(rule: str, found: str, fix: str) -> UsageError:
    return UsageError("demo", rule, found=found, fix=fix)


def _command(arguments: argparse.Namespace) -> str:
    words = ["attlas", "demo"]
    for name in ("text", "tokens", "model"):
        value = getattr(arguments, name)
        if value is not None:
            words += [f"--{name}", shlex.quote(str(value))]
    return " ".join(words)


def _table(result: DemoResult, terminal: Terminal) -> None:
    held_out = ", which it never saw in training" if result.held_out else ""
    title = (
        f"{result.model}, {result.layers} layers × {result.per_layer} heads, "
        f"reads {count(len(result.tokens))} tokens of {result.source}{held_out} ({result.loss:.2f} nats a token)"
    )
    terminal.prose(title, "bold", indent="")
    terminal.say()
    widths = [max(len(column.short), *(len(column.show(head)) for head in result.heads)) for column in COLUMNS]
    room = (
        terminal.width
        - 2
        - max(len(", ".join((head.patterns[0].name, *secondary_patterns(head)))) for head in result.heads)
    )
    keep = len(COLUMNS)
    while keep > 4 and sum(widths[:keep]) + 2 * keep > room:  # those further right give way
        keep -= 1
    left, columns, widths = COLUMNS[keep:], COLUMNS[:keep], widths[:keep]
    header = "  ".join(column.short.rjust(width) for column, width in zip(columns, widths, strict=True))
    terminal.say(terminal.style(f"  {header}  what it is", "dim"))
    for head in result.heads:
        if head.head == 0 and head.layer > 0:
            terminal.say()
        cells = []
        for column, width in zip(columns, widths, strict=True):
            strong = column.measure in {kind.measure for kind in head.patterns} - {""}
            cells.append(terminal.style(column.show(head).rjust(width), *(("bold",) if strong else ())))
        also = terminal.style("".join(f", {name}" for name in secondary_patterns(head)), "dim")
        named = terminal.style(head.patterns[0].name, *_COLOURS.get(head.patterns[0].measure, ("dim",)))
        terminal.say(f"  {'  '.join(cells)}  {named}{also}")
    if left:
        terminal.say()
        names = ", ".join(column.short for column in left)
        terminal.prose(f"not shown for want of room: {names}; the report has everything", "dim")


def _patterns(result: DemoResult, terminal: Terminal) -> None:
    for kind in (*PATTERNS, MIXED):
        heads = [f"{head.layer}·{head.head}" for head in result.heads if kind in head.patterns]
        if not heads:
            continue
        rule = f"{kind.definition}: at least {percent(kind.threshold)}" if kind.measure else kind.definition
        terminal.say(f"  {terminal.style(kind.name, *_COLOURS.get(kind.measure, ('dim',)))}  {', '.join(heads)}")
        terminal.say(f"    {kind.does}")
        terminal.prose(rule, "dim", indent="    ")


def _write(result: DemoResult, report: Path, terminal: Terminal) -> None:
    """Draw the pictures beside the report, where matplotlib is installed, and say what was written."""
    out, written = report.parent, [(report, "opens in any browser, also offline")]
    drawn: list[tuple[str, str, Callable[[DemoResult], Figure]]] = [
        ("atlas.png", "every head on the text", atlas_figure),
        ("head.png", f"layer {result.most_telling.layer}, head {result.most_telling.head} close up", head_figure),
    ]
    missing = importlib.util.find_spec("matplotlib") is None
    for name, what, figure in drawn:
        if not missing:
            with terminal.step(f"drawing {name}"):
                written.append((pictures.save(figure(result), out / name), what))
    width = max(len(str(path)) for path, _ in written)
    for path, what in written:
        terminal.say(f"  {terminal.style(str(path).ljust(width), 'bold')}  {what}")
    if missing:
        terminal.say("  no pictures: matplotlib is not installed; pip install 'attlas[plot]'")
