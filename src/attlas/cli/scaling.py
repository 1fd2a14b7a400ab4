"""``attlas scaling``: why the dot product is divided by sqrt(d), for random vectors and for a model's heads."""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from attlas import pictures, scaling
from attlas.cli.checks import check_least, check_target, need
from attlas.cli.files import read_text
from attlas.cli.formatting import json_text, percent
from attlas.cli.loading import load, tokenize
from attlas.cli.options import DISTRIBUTIONS, KEYS, QUERIES
from attlas.cli.scaling_figures import heads_figure, study_figure
from attlas.cli.terminal import Terminal, UsageError
from attlas.errors import ShapeError
from attlas.foundation.installation import install_command

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MOST_NUMBERS = 2**28  # numbers in the keys of one query
_WIDE_TERMINAL = 104  # characters of a line from which on a table shows the standard errors
_RANDOM_OPTIONS = (
    "sizes",
    "keys",
    "queries",
    "distribution",
    "seed",
)  # options that random vectors have and a model has not


def run(arguments: Namespace, terminal: Terminal) -> None:
    """Measure, print the table, and write what was asked for."""
    if arguments.out is not None:
        check_target(arguments.out, "-o", (".png", ".svg", ".pdf"))
        need("matplotlib", "-o", install_command("plot"))
    (_measure_random if arguments.model is None else _measure_model)(arguments, terminal)


def _measure_random(arguments: Namespace, terminal: Terminal) -> None:
    """Measure random vectors."""
    for name in ("text", "tokens", "target"):
        if getattr(arguments, name) is not None:
            raise UsageError(f"--{name} goes with --model.", f"--{name} without --model", f"--model DIR --{name} ...")
    check_least("keys", arguments.keys, 2, KEYS)
    check_least("queries", arguments.queries, 2, QUERIES)
    settings: dict[str, Any] = {
        "distribution": arguments.distribution or DISTRIBUTIONS[0],
        "keys": arguments.keys or KEYS,
        "queries": arguments.queries or QUERIES,
        "seed": arguments.seed or 0,
    }
    sizes = _parsed_sizes(arguments.sizes, settings["keys"])
    with terminal.step("drawing random queries and keys"):
        study = scaling.study(sizes, **settings)
    if arguments.json:
        terminal.data(json_text({**settings, "rows": study.table()}))
    else:
        terminal.say("attlas scaling", "bold")
        terminal.say()
        _say_study(study, terminal)
    _write_picture(arguments, terminal, lambda: study_figure(study))


def _measure_model(arguments: Namespace, terminal: Terminal) -> None:
    """Measure the heads of a model."""
    for name in _RANDOM_OPTIONS:
        if getattr(arguments, name) is not None:
            raise UsageError(f"--{name} is for random vectors.", f"--{name} and --model", f"leave --{name} out")
    target, wanted = _parsed_target(arguments.target)
    source, text = read_text(arguments.text)
    with terminal.step("loading the model"):
        loaded = load(arguments.model)
    ids = tokenize(loaded, text, arguments.tokens)
    with terminal.step(f"reading {len(ids):,} tokens"), torch.no_grad():
        attentions = loaded.model(ids[None], output_attentions=True, use_cache=False).attentions
    heads: list[scaling.HeadScaling] = []
    factors: list[float] = []
    with terminal.step("measuring every head", len(attentions)) as tick:
        for layer, A in enumerate(attentions):
            of_layer = scaling.heads(A).heads
            heads += [replace(head, layer=layer) for head in of_layer]
            factors += _factors_of_heads(A, of_layer, target, wanted)
            tick()
    result = scaling.Heads(tuple(heads))
    title = f"{loaded.name} reads {len(ids):,} tokens of {source}"
    size = attentions[0].q.shape[-1]
    table = [row | {"factor": factor} for row, factor in zip(result.table(), factors, strict=True)]
    head = {"model": loaded.name, "text": source, "tokens": len(ids), "target": target, "wanted": wanted}
    if arguments.json:
        terminal.data(json_text({**head, "rows": table}))
    else:
        terminal.say("attlas scaling", "bold")
        terminal.say()
        _say_heads(result, factors, f"{target} {wanted:g}", f"{title}; heads of size {size}", terminal)
    _write_picture(arguments, terminal, lambda: heads_figure(result, title))


def _factors_of_heads(A: Any, heads: Sequence[scaling.HeadScaling], target: str, wanted: float) -> list[float]:
    """Return the factor of the logits of each head that meets the target."""
    if target == "variance":
        return [head.factor * math.sqrt(wanted) for head in heads]
    try:
        return scaling.temperature(A[0], entropy=wanted).factor.tolist()
    except ShapeError as error:
        raise error.replaced(fix=f"--target {error.fix}") from error


# ------------------------------------------------------------------------------------------------------------ words


def _lines_of_group(
    title: str, columns: Mapping[str, Sequence[str]], terminal: Terminal, *, strong: bool = True
) -> list[str]:
    """Return some columns under one heading as lines: the title, the names of the columns, and the rows.

    `strong` prints the first column bold, and the others dim.
    """
    widths = [max(map(len, (name, *cells))) for name, cells in columns.items()]
    widths[-1] += max(0, len(title) - sum(widths) - 2 * (len(widths) - 1))
    styles = [("bold",) if i == 0 else ("dim",) for i in range(len(widths))] if strong else [()] * len(widths)
    lines = [title.ljust(sum(widths) + 2 * (len(widths) - 1)), "  ".join(map(str.rjust, columns, widths))]
    for row in zip(*columns.values(), strict=True):
        cells = map(str.rjust, row, widths)
        lines.append("  ".join(terminal.style(cell, *names) for cell, names in zip(cells, styles, strict=True)))
    return lines


def _print_groups(groups: Sequence[Sequence[str]], breaks: Mapping[int, str], terminal: Terminal) -> None:
    """Print groups of columns side by side; a line of words stands before the rows named in `breaks`."""
    titles, names, *rows = (f"  {'   '.join(parts)}".rstrip() for parts in zip(*groups, strict=True))
    terminal.say(titles)
    terminal.say(names, "dim")
    for index, row in enumerate(rows):
        if index in breaks:
            terminal.say()
            if breaks[index]:
                terminal.say(f"  {terminal.style(breaks[index], 'bold')}")
        terminal.say(row)


def _groups_of_table(
    table: list[dict[str, Any]],
    headings: Mapping[str, str],
    predicted: str,
    terminal: Terminal,
    *,
    errors: bool = False,
) -> list[list[str]]:
    """Return the columns of each measure of a table: measured, with standard errors if wanted, and predicted."""
    groups = []
    for name, heading in headings.items():
        columns = {"measured": [_measure_in_words(row[name], name) for row in table]}
        if name != "frobenius":  # there is no theory of its mean
            if errors:
                columns[""] = [f"± {_measure_in_words(row[f'{name}_error'], name)}" for row in table]
            columns[predicted] = [_measure_in_words(row[f"{name}_predicted"], name) for row in table]
        groups.append(_lines_of_group(heading, columns, terminal))
    return groups


def _say_study(study: scaling.Study, terminal: Terminal) -> None:
    """Print the measured and the predicted numbers of random vectors as one table, and what it shows in words."""
    table = study.table()
    table = [*table[::2], *table[1::2]]  # without, then with the scale
    title = f"{study.queries:,} random queries with {study.keys:,} keys each, "
    title += f"{study.distribution} coordinates of mean 0 and variance 1"
    terminal.say(title, "bold")
    terminal.say()
    headings = {
        "variance": "variance of the logits",
        "entropy": f"entropy, of ln n = {math.log(study.keys):.2f}",
        "largest": "largest weight",
        "trace": "slope: trace of J",
        "frobenius": "‖J‖",
    }
    sizes = _lines_of_group("", {"d": [f"{row['d']:,}" for row in table]}, terminal)
    groups = _groups_of_table(table, headings, "theory", terminal, errors=terminal.width >= _WIDE_TERMINAL)
    _print_groups([sizes, *groups], {0: "without a scale: q·k", len(table) // 2: "divided by sqrt(d)"}, terminal)
    terminal.say()
    _print_conclusion(study, terminal)


def _print_conclusion(study: scaling.Study, terminal: Terminal) -> None:
    """Say in words what the table shows."""
    plain, scaled = study.rows[-2], study.rows[-1]
    off = max(abs(row.variance.deviations(row.expected.variance)) for row in study.rows)
    for line in (
        f"The variance of q·k is d; the farthest measured value is {off:.1f} standard errors off.",
        f"At d = {plain.d:,} without a scale, one key has {percent(plain.largest.value)} of the weight, and the "
        f"slope of softmax is {plain.trace.value:.2f} of at most 1.",
        f"Divided by sqrt(d) the variance is 1 at every d: one key has {percent(scaled.largest.value)}, the slope is "
        f"{scaled.trace.value:.2f}, and gradients pass.",
    ):
        terminal.say(f"  {line}")
    terminal.say()
    for line in (
        "theory: Var(q·k) = d for every distribution; the rest for Gaussian logits, which q·k tends to as d grows.",
        "J = diag(p) - p pᵀ is the Jacobian of softmax, with trace 1 - Σ p² and Frobenius norm ‖J‖.",
    ):
        terminal.say(f"  {line}", "dim")


def _say_heads(result: scaling.Heads, factors: Sequence[float], target: str, title: str, terminal: Terminal) -> None:
    """Print the measured numbers of the heads of a model beside those of independent tokens, and a verdict."""
    heads = result.heads
    terminal.say(title, "bold")
    terminal.say()
    table = result.table()
    headings = {
        "variance": "variance of logits",
        "entropy": "entropy",
        "largest": "largest weight",
        "trace": "trace of J",
    }
    places = {name: [str(row[name]) for row in table] for name in ("layer", "head")}
    groups = [
        _lines_of_group("", places, terminal, strong=False),
        *_groups_of_table(table, headings, "indep.", terminal),
    ]
    groups.append(
        _lines_of_group("‖J‖", {"": [_measure_in_words(row["frobenius"], "frobenius") for row in table]}, terminal)
    )
    groups.append(
        _lines_of_group("factor for", {target: [_measure_in_words(factor, "factor") for factor in factors]}, terminal)
    )
    _print_groups(groups, {i: "" for i, head in enumerate(heads) if head.head == 0 and head.layer > 0}, terminal)
    terminal.say()
    terminal.say(f"  {_verdict_in_words(result)}")
    terminal.say()
    for line in (
        "indep.: what independent queries and keys of the same means and covariances would give,",
        "  variance scale² qᵀ Cov(k) q, the rest exact for independent Gaussian logits of that variance.",
        "factor: what to multiply the logits with for this target. The scale 1 / sqrt(d) gives variance 1 only at the",
        "  start of training; J = diag(p) - p pᵀ is the Jacobian of softmax.",
    ):
        terminal.say(f"  {line}", "dim")


def _verdict_in_words(result: scaling.Heads) -> str:
    """Say which heads are sharper and which are flatter than independence would make them."""
    compared = [(head.entropy - head.expected.entropy, head) for head in result.heads if head.expected is not None]
    above = sum(head.variance > 1.0 for head in result.heads)
    line = f"{above} of {len(result.heads)} heads have logits of variance above 1"
    if not compared:
        return line + "."
    gap, sharpest = min(compared, key=lambda pair: pair[0])
    if gap >= 0:
        return f"{line}. No head is sharper than independence."
    return (
        f"{line}. Farthest below independence is head {sharpest.layer}·{sharpest.head}: "
        f"{sharpest.entropy:.2f} nats of entropy, {-gap:.2f} less."
    )


def _measure_in_words(value: float | None, name: str) -> str:
    """Return a measure as it is printed, with as many digits as it deserves.

    Examples
    --------
    >>> _measure_in_words(512.3, "variance"), _measure_in_words(0.02541, "largest")
    ('512.30', '0.025')
    """
    if value is None or math.isnan(value):
        return "–"
    return "∞" if math.isinf(value) else format(value, ",.2f" if name in ("variance", "entropy") else ",.3f")


# ------------------------------------------------------------------------------------------------- files and options


def _write_picture(arguments: Namespace, terminal: Terminal, figure: Callable[[], Figure]) -> None:
    """Draw the numbers where that is asked for."""
    if arguments.out is None:
        return
    path = pictures.save(figure(), arguments.out)
    if not arguments.json:
        terminal.say()
        terminal.files([(path, "the numbers as a picture")])


def _parsed_sizes(text: str | None, keys: int) -> list[int]:
    """Return the sizes, or say what is wrong with them; ``...`` goes on by the factor of the two before it."""
    if text is None:
        return [8, 16, 32, 64, 128, 256, 512]
    words = [word.strip() for word in text.split(",")]
    sizes: list[int] = []
    for index, word in enumerate(words):
        last = words[index + 1] if index + 1 < len(words) else ""
        if word in ("...", "…") and len(sizes) >= 2 and last.isdecimal() and sizes[-1] > sizes[-2]:
            while sizes[-1] * sizes[-1] // sizes[-2] < int(last):
                sizes.append(sizes[-1] * sizes[-1] // sizes[-2])
        elif word.isdecimal() and int(word) >= 1:
            sizes.append(int(word))
        else:
            rule = "--sizes must be whole numbers above 0 with commas between."
            raise UsageError(rule, f"--sizes {text}", "--sizes 8,64,512")
    largest = max(sizes)
    if largest * keys > _MOST_NUMBERS:
        rule = f"the keys of one query must not be more than {_MOST_NUMBERS:,} numbers."
        found = f"{keys:,} keys of size {largest:,}: {largest * keys:,} numbers"
        raise UsageError(rule, found, f"--keys {max(2, _MOST_NUMBERS // largest)}")
    return sizes


def _parsed_target(text: str | None) -> tuple[str, float]:
    """Return the quantity that the factor is to reach, and its value."""
    name, _, value = (text or "variance=1").partition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if name not in ("variance", "entropy") or not (math.isfinite(number) and number > 0):
        rule = "--target must be variance=VALUE or entropy=NATS, with a value above 0."
        raise UsageError(rule, f"--target {text}", "--target entropy=2.0")
    return name, number
