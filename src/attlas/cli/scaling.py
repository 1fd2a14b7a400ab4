"""``attlas scaling``: why the dot product is divided by sqrt(d), for random vectors and for a model's heads."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from attlas import pictures, scaling
from attlas.cli.files import check_target, read_text, save_text
from attlas.cli.formatting import count, percent
from attlas.cli.loading import load, tokenize
from attlas.cli.options import KEYS, QUERIES
from attlas.cli.scaling_figures import heads_figure, study_figure
from attlas.cli.terminal import Terminal, UsageError
from attlas.errors import MissingExtraError, ShapeError

__all__ = ["run"]

_MOST = 2**28  # numbers in the keys of one query
_RANDOM = ("sizes", "keys", "queries", "distribution", "seed")  # options that random vectors have and a model has not


def run(arguments: argparse.Namespace, terminal: Terminal) -> None:
    """Measure, print the table, and write what was asked for."""
    if arguments.plot is not None:
        check_target(arguments.plot, "--plot", (".png", ".svg", ".pdf"), "scaling")
        _need_matplotlib()
    if arguments.json is not None:
        check_target(arguments.json, "--json", (".json",), "scaling")
    (_random if arguments.model is None else _model)(arguments, terminal)


def _random(arguments: argparse.Namespace, terminal: Terminal) -> None:
    """Measure random vectors."""
    for name in ("text", "tokens", "target"):
        if getattr(arguments, name) is not None:
            raise _error(f"--{name} goes with --model.", f"--{name} without --model", f"--model DIR --{name} ...")
    keys = _at_least("keys", arguments.keys, KEYS, 2)
    queries = _at_least("queries", arguments.queries, QUERIES, 2)
    distribution = arguments.distribution or next(iter(scaling.DISTRIBUTIONS))
    if distribution not in scaling.DISTRIBUTIONS:
        names = ", ".join(scaling.DISTRIBUTIONS)
        raise _error(
            f"--distribution must be one of {names}.", f"--distribution {distribution}", "--distribution normal"
        )
    sizes = _sizes(arguments.sizes, keys)
    seed = arguments.seed or 0
    rows: list[scaling.Measured] = []
    terminal.say(terminal.style("attlas scaling", "bold"))
    with terminal.step("drawing random queries and keys", len(sizes)) as tick:
        for d in sizes:
            rows += scaling.study([d], keys=keys, queries=queries, distribution=distribution, seed=seed).rows
            tick()
    study = scaling.Study(distribution, keys, queries, seed, tuple(rows))
    terminal.say()
    _say_study(study, terminal)
    head = {"distribution": distribution, "keys": keys, "queries": queries, "seed": seed}
    _write(arguments, terminal, head, study.table(), lambda: study_figure(study))


def _model(arguments: argparse.Namespace, terminal: Terminal) -> None:
    """Measure the heads of a model."""
    for name in _RANDOM:
        if getattr(arguments, name) is not None:
            raise _error(f"--{name} is for random vectors.", f"--{name} and --model", f"leave --{name} out")
    target, target_value = _target(arguments.target)
    text_file, text = read_text(arguments.text, "scaling")
    terminal.say(terminal.style("attlas scaling", "bold"))
    with terminal.step("loading the model"):
        loaded = load(arguments.model, "scaling")
    ids = tokenize(loaded, text, arguments.tokens, "scaling")
    with terminal.step(f"reading {count(len(ids))} tokens"), torch.no_grad():
        attentions = loaded.model(ids[None], output_attentions=True, use_cache=False).attentions
    heads: list[scaling.HeadScaling] = []
    factors: list[float] = []
    with terminal.step("measuring every head", len(attentions)) as tick:
        for layer, A in enumerate(attentions):
            of_layer = scaling.heads([A]).heads
            heads += [scaling.HeadScaling(**{**vars(head), "layer": layer}) for head in of_layer]
            factors += _factors(A, of_layer, target, target_value)
            tick()
    result = scaling.Heads(tuple(heads))
    title = f"{loaded.name} reads {count(len(ids))} tokens of {text_file.name}"
    size = getattr(attentions[0].problem.q, "shape", (0,))[-1]
    terminal.say()
    _say_heads(result, factors, f"{target} {target_value:g}", f"{title}; heads of size {size}", terminal)
    table = result.table()
    for row, factor in zip(table, factors, strict=True):
        row["factor"] = factor
    head = {"model": loaded.name, "text": text_file.name, "tokens": len(ids), "target": target, "wanted": target_value}
    _write(arguments, terminal, head, table, lambda: heads_figure(result, title))


def _factors(A: Any, heads: Sequence[scaling.HeadScaling], target: str, target_value: float) -> list[float]:
    """Return the factor of the logits of each head that meets the target."""
    if target == "variance":
        return [head.factor * math.sqrt(target_value) for head in heads]
    try:
        return [float(factor) for factor in scaling.temperature(A[0], entropy=target_value).factor]
    except ShapeError as error:
        raise error.replaced(UsageError, where="scaling", fix=f"--target {error.fix}") from error


# ------------------------------------------------------------------------------------------------------------ words


@dataclass(frozen=True)
class _Group:
    """Some columns under one heading; the cells of each row are already words."""

    title: str
    columns: Sequence[str]
    cells: Sequence[Sequence[str]]
    strong: int = -1  # the column that is printed bold; those after it are dim

    def widths(self) -> list[int]:
        widths = [max(map(len, texts)) for texts in zip(self.columns, *self.cells, strict=True)]
        widths[-1] += max(0, len(self.title) - sum(widths) - 2 * (len(widths) - 1))
        return widths


def _print(groups: Sequence[_Group], breaks: dict[int, str], terminal: Terminal) -> None:
    """Print groups of columns side by side; a line of words stands before the rows named in `breaks`."""
    widths = [group.widths() for group in groups]
    titles = [g.title.ljust(sum(w) + 2 * (len(w) - 1)) for g, w in zip(groups, widths, strict=True)]
    names = ["  ".join(map(str.rjust, g.columns, w)) for g, w in zip(groups, widths, strict=True)]
    terminal.say(("  " + "   ".join(titles)).rstrip())
    terminal.say(terminal.style(("  " + "   ".join(names)).rstrip(), "dim"))
    for row in range(len(groups[0].cells)):
        if row in breaks:
            terminal.say()
            if breaks[row]:
                terminal.say(f"  {terminal.style(breaks[row], 'bold')}")
        parts = []
        for group, width in zip(groups, widths, strict=True):
            cells = [text.rjust(w) for text, w in zip(group.cells[row], width, strict=True)]
            styles = [
                ("bold",) if i == group.strong else ("dim",) if i > group.strong else () for i in range(len(cells))
            ]
            parts.append("  ".join(terminal.style(c, *s) for c, s in zip(cells, styles, strict=True)))
        terminal.say("  " + "   ".join(parts).rstrip())


def _say_study(study: scaling.Study, terminal: Terminal) -> None:
    rows = [*study.rows[::2], *study.rows[1::2]]  # without, then with the scale
    half = len(study.rows) // 2
    most = math.log(study.keys)
    title = (
        f"{count(study.queries)} random queries with {count(study.keys)} keys each, "
        f"{study.distribution} coordinates of mean 0 and variance 1"
    )
    terminal.say(terminal.style(title, "bold"))
    terminal.say()
    titles = {
        "variance": "variance of the logits",
        "entropy": f"entropy, of ln n = {most:.2f}",
        "largest": "largest weight",
        "trace": "slope: trace of J",
        "frobenius": "‖J‖",
    }
    groups = [_Group("", ("d",), [(count(row.d),) for row in rows])]
    wide = terminal.width >= 104
    for name, heading in titles.items():
        columns, cells = ["measured"], [[_number(getattr(row, name).value, name)] for row in rows]
        if name != "frobenius":  # there is no theory of its mean
            if wide:
                columns.append("")
                cells = [
                    [*cell, f"± {_number(getattr(row, name).error, name)}"]
                    for cell, row in zip(cells, rows, strict=True)
                ]
            columns.append("theory")
            cells = [[*cell, _number(getattr(row.expected, name), name)] for cell, row in zip(cells, rows, strict=True)]
        groups.append(_Group(heading, columns, cells, strong=0))
    _print(groups, {0: "without a scale: q·k", half: "divided by sqrt(d)"}, terminal)
    terminal.say()
    _conclude(study, terminal)


def _conclude(study: scaling.Study, terminal: Terminal) -> None:
    """Say in words what the table shows."""
    plain, scaled = study.rows[-2], study.rows[-1]
    off = max((abs(row.variance.deviations(row.expected.variance)) for row in study.rows), default=0.0)
    lines = [
        f"The variance of q·k is d; the farthest measured value is {off:.1f} standard errors off.",
        f"At d = {count(plain.d)} without a scale, one key has {percent(plain.largest.value)} of the weight, and the "
        f"slope of softmax is {plain.trace.value:.2f} of at most 1.",
        f"Divided by sqrt(d) the variance is 1 at every d: one key has {percent(scaled.largest.value)}, the slope is "
        f"{scaled.trace.value:.2f}, and gradients pass.",
    ]
    notes = [
        "theory: Var(q·k) = d for every distribution; the rest for Gaussian logits, which q·k tends to as d grows.",
        "J = diag(p) - p pᵀ is the Jacobian of softmax, with trace 1 - Σ p² and Frobenius norm ‖J‖.",
    ]
    for line in lines:
        terminal.say(f"  {line}")
    terminal.say()
    for line in notes:
        terminal.say(terminal.style(f"  {line}", "dim"))


def _say_heads(result: scaling.Heads, factors: Sequence[float], target: str, title: str, terminal: Terminal) -> None:
    heads = result.heads
    terminal.say(terminal.style(title, "bold"))
    terminal.say()
    groups = [_Group("", ("layer", "head"), [(str(head.layer), str(head.head)) for head in heads], strong=2)]
    for name, heading in (
        ("variance", "variance of logits"),
        ("entropy", "entropy"),
        ("largest", "largest weight"),
        ("trace", "trace of J"),
    ):
        cells = []
        for head in heads:
            expected = math.nan if head.expected is None else getattr(head.expected, name)
            cells.append((_number(getattr(head, name), name), _number(expected, name)))
        groups.append(_Group(heading, ("measured", "indep."), cells, strong=0))
    groups.append(_Group("‖J‖", ("",), [(_number(head.frobenius, "frobenius"),) for head in heads], strong=0))
    groups.append(_Group("factor for", (target,), [(_number(factor, "factor"),) for factor in factors], strong=0))
    _print(groups, {i: "" for i, head in enumerate(heads) if head.head == 0 and head.layer > 0}, terminal)
    terminal.say()
    terminal.say(f"  {_verdict(result)}")
    terminal.say()
    for line in (
        "indep.: what independent queries and keys of the same means and covariances would give,",
        "  variance scale² qᵀ Cov(k) q, the rest exact for independent Gaussian logits of that variance.",
        "factor: what to multiply the logits with for this target. The scale 1 / sqrt(d) gives variance 1 only at the",
        "  start of training; J = diag(p) - p pᵀ is the Jacobian of softmax.",
    ):
        terminal.say(terminal.style(f"  {line}", "dim"))


def _verdict(result: scaling.Heads) -> str:
    """Say which heads are sharper and which are flatter than independence would make them."""
    compared = [(head.entropy - head.expected.entropy, head) for head in result.heads if head.expected is not None]
    above = sum(head.variance > 1.0 for head in result.heads)
    line = f"{above} of {len(result.heads)} heads have logits of variance above 1"
    if not compared:
        return line + "."
    gap, sharpest = min(compared, key=lambda pair: pair[0])
    return (
        f"{line}. Farthest below independence is head {sharpest.layer}·{sharpest.head}: "
        f"{sharpest.entropy:.2f} nats of entropy, {-gap:.2f} less."
        if gap < 0
        else f"{line}. No head is sharper than independence."
    )


def _number(value: float, name: str) -> str:
    """Return a measure as it is printed, with as many digits as it deserves.

    Examples
    --------
    >>> _number(512.3, "variance"), _number(0.02541, "largest"), _number(float("nan"), "trace")
    ('512.30', '0.025', '–')
    """
    if math.isnan(value):
        return "–"
    return "∞" if math.isinf(value) else format(value, ",.2f" if name in ("variance", "entropy") else ",.3f")


# ------------------------------------------------------------------------------------------------- files and options


def _write(
    arguments: argparse.Namespace,
    terminal: Terminal,
    head: dict[str, Any],
    table: list[dict[str, Any]],
    figure: Any,
) -> None:
    """Write plot and numbers where they are asked for."""
    written = []
    if arguments.plot is not None:
        written.append((pictures.save(figure(), arguments.plot), "the numbers as a picture"))
    if arguments.json is not None:
        rows = [{name: _finite(value) for name, value in row.items()} for row in table]
        text = json.dumps({**head, "rows": rows}, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
        written.append((save_text(text, arguments.json, "scaling"), "the numbers"))
    width = max((len(str(path)) for path, _ in written), default=0)
    if written:
        terminal.say()
    for path, what in written:
        terminal.say(f"  {terminal.style(str(path).ljust(width), 'bold')}  {what}")


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _sizes(text: str | None, keys: int) -> list[int]:
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
            raise _error(
                "--sizes must be whole numbers above 0 with commas between.", f"--sizes {text}", "--sizes 8,64,512"
            )
    largest = max(sizes)
    if largest * keys > _MOST:
        raise _error(
            f"the keys of one query must not be more than {_MOST:,} numbers.",
            f"{keys:,} keys of size {largest:,}: {largest * keys:,} numbers",
            f"--keys {max(2, _MOST // largest)}",
        )
    return sizes


def _at_least(name: str, value: int | None, default: int, least: int) -> int:
    if value is not None and value < least:
        raise _error(f"--{name} must be at least {least}.", f"--{name} {value}", f"--{name} {default}")
    return default if value is None else value


def _target(text: str | None) -> tuple[str, float]:
    """Return what the factor is to reach, and its value."""
    name, _, value = (text or "variance=1").partition("=")
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if name not in ("variance", "entropy") or not (math.isfinite(number) and number > 0):
        raise _error(
            "--target must be variance=VALUE or entropy=NATS, with a value above 0.",
            f"--target {text}",
            "--target entropy=2.0",
        )
    return name, number


def _need_matplotlib() -> None:
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingExtraError(
            "scaling",
            "matplotlib must be installed for --plot.",
            found="no module named matplotlib",
            fix="pip install 'attlas[plot]'",
        )


def _error(rule: str, found: str, fix: str) -> UsageError:
    return UsageError("scaling", rule, found=found, fix=fix)
