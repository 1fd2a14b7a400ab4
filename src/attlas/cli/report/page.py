"""The page: what is said in words, in a table and in bars, around the packed numbers."""

from __future__ import annotations

import math
import platform
from html import escape, unescape
from importlib.metadata import PackageNotFoundError, metadata, version
from importlib.resources import files
from string import Template

from attlas.cli.reading import Reading
from attlas.cli.report.payload import block, hero_view, payload
from attlas.cli.words import COLUMNS, count, in_bytes, memory, percent
from attlas.heads import KINDS, MIXED, NEAR, Head

__all__ = ["page"]

_LENGTHS = (8_192, 32_768, 131_072)

# What the line under the headline says of the share that made the head's name; {0} is the share.
_SHARES = {
    "duplicate": "Show it random tokens, then the same tokens again: {0} of its attention goes to the earlier copy.",
    "previous": "{0} of its attention goes to the token before.",
    "fixed": "{0} of its attention goes to the tokens at one distance.",
    "current": "{0} of its attention stays on the token itself.",
    "first": "{0} of its attention rests on the first token.",
    "near": f"{{0}} of its attention stays within the last {NEAR} tokens.",
    "favourite": "{0} of its attention goes to the copies of one token.",
    "breadth": "On average, its attention is spread as if it looked evenly at {0} of the tokens that it may see.",
}

# What the headline says of the most telling head, by the measure that decides.
_DOES = {
    "duplicate": "finds the same token again",
    "previous": "looks at the token before",
    "fixed": "looks a fixed way back",
    "current": "stays where it is",
    "first": "rests on the first token",
    "near": "reads its neighbourhood",
    "favourite": "keeps returning to one token",
    "breadth": "looks everywhere",
}

_SNIPPET = """\
import attlas.huggingface
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(
    name, attn_implementation="attlas")
A = model(ids, output_attentions=True).attentions[3]

A[0, 1, -1]                # the last query's weights
attlas.stats.entropy(A)    # every row, exact
A[0, 1].topk(8)            # no m × n matrix anywhere"""


def page(reading: Reading) -> str:
    """Return the report of a reading as the text of one HTML file.

    Nothing in it is loaded from elsewhere, and its content security policy forbids that it could be.
    """
    from attlas.view import bundle  # the viewer, which commands that write no page do without

    headline, standfirst = _headline(reading)
    assets = files("attlas.cli.report")
    parts = {
        "title": escape(f"{unescape(headline)} · attlas".replace("\N{NO-BREAK SPACE}", " ")),
        "headline": headline,
        "standfirst": standfirst,
        "facts": _facts(reading),
        "hero_label": escape(f"Attention map of layer {reading.telling.layer}, head {reading.telling.head}"),
        "hero_caption": _hero_caption(reading),
        "again": '<i class="again"><span>the second time</span></i>' if hero_view(reading) == "repeat" else "",
        "per_layer": str(reading.per_layer),
        "tight": " tight" if reading.per_layer > 8 else "",
        "cell": str(_cell(reading.per_layer)),
        "block": block(reading),
        "jobs": _jobs(reading),
        "cells": f"{reading.cost.matrices} × {count(reading.cost.tokens)} × {count(reading.cost.tokens)}",
        "table": _table(reading),
        "memory": escape(
            f"{memory(reading.cost)} The longer lengths below are computed: full matrices grow with the square of the "
            "length, what attlas keeps with the length."
        ),
        "bars": _bars(reading),
        "repeat_hidden": "" if reading.period else " hidden",
        "excerpts": escape(_excerpts(reading)),
        "words": _words(),
        "command": escape(reading.command),
        "versions": escape(_versions()),
        "snippet": escape(_SNIPPET),
        "footer": f"Every number on this page was computed by {_project()} from queries, keys and one number per row. "
        "Layers and heads are counted from 0. The page loads nothing from anywhere.",
        "css": assets.joinpath("page.css").read_text("utf-8"),
        "js": bundle.script("oklab.js")
        + "".join(assets.joinpath(x).read_text("utf-8") for x in ("maps.js", "page.js")),
        "data": payload(reading),
    }
    return Template(assets.joinpath("page.html").read_text("utf-8")).substitute(parts)


def _headline(reading: Reading) -> tuple[str, str]:
    head = reading.telling
    kind = head.kinds[0]
    text, model = escape(reading.source), escape(reading.model)
    where = f"Layer\N{NO-BREAK SPACE}{head.layer}, head\N{NO-BREAK SPACE}{head.head}"
    unseen = ", which it never saw in training" if reading.unseen else ""
    setting = (
        f"One of {len(reading.heads)} heads of {model}, reading {count(len(reading.tokens))} tokens of {text}{unseen}."
    )
    if kind.measure == "induction":
        return (
            f"{where} remembers what came next",
            f"Show it random tokens, then the same tokens again: <b>{percent(head.induction)}</b> of its attention "
            f"goes to the token that followed the first time. {setting}",
        )
    if kind.measure:
        share = percent(head.of(kind))
        return f"{where} {_DOES[kind.measure]}", f"{_SHARES[kind.measure].format(f'<b>{share}</b>')} {setting}"
    return f"{len(reading.heads)} heads read {text}", setting


def _cell(per_layer: int) -> int:
    """Return the largest side of a map in the grid, in pixels, so that the list of kinds fits beside it."""
    beside = 780 // per_layer - 12
    return min(beside, 150) if beside >= 100 else 138


def _hero_caption(reading: Reading) -> str:
    head = reading.telling
    name = f"Layer {head.layer}, head {head.head}"
    if hero_view(reading) == "repeat":
        return (
            f"{name} on {reading.period} random tokens, twice; queries down, keys across. The stripe in the lower left "
            "quarter starts where the block starts again."
        )
    return f"{name} on the text; queries down, keys across."


def _facts(reading: Reading) -> str:
    named = sum(head.kinds[0] is not MIXED for head in reading.heads)
    cost = reading.cost
    facts = [
        ("heads with a simple job", f"{named} of {len(reading.heads)}"),
        ("full matrices would take", in_bytes(cost.full)),
        ("attlas keeps", in_bytes(cost.held)),
        ("to run and read it", _time(cost.seconds)),
    ]
    facts = [fact for fact in facts if fact[1]]
    return "".join(f"<div><dt>{label}</dt><dd>{value}</dd></div>" for label, value in facts)


def _excerpts(reading: Reading) -> str:
    shown = sum(map(len, reading.shown))
    return (
        f"Shown are {count(shown)} of {count(len(reading.tokens))} tokens: both ends of the text, the places that "
        "single heads look at most, and some between. The numbers and maps are of the whole text."
    )


def _time(seconds: float) -> str:
    if math.isnan(seconds):
        return ""
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _jobs(reading: Reading) -> str:
    """Say which heads are of each kind, the most telling kind first."""
    items = []
    for kind in (*KINDS, MIXED):
        found = [i for i, head in enumerate(reading.heads) if head.kinds[0] is kind]
        if not found:
            continue
        chips = "".join(
            f'<button type="button" data-i="{i}">{reading.heads[i].layer}·{reading.heads[i].head}</button>'
            for i in found
        )
        items.append(
            f'<div><dt><span class="kind" data-kind="{kind.measure or "mixed"}">{escape(kind.name)}</span></dt>'
            f'<dd>{escape(kind.does)}<div class="chips">{chips}</div></dd></div>'
        )
    return "".join(items)


def _table(reading: Reading) -> str:
    header = "".join(
        f'<th class="{"name" if column.words else "number"}" title="{escape(column.meaning)}">'
        f'<button type="button">{escape(column.title)}</button></th>'
        for column in COLUMNS
    )
    rows = "".join(f'<tr data-i="{i}">{_row(head)}</tr>' for i, head in enumerate(reading.heads))
    return f"<table><thead><tr>{header}</tr></thead><tbody>{rows}</tbody></table>"


def _row(head: Head) -> str:
    cells = []
    for column in COLUMNS:
        value = column.value(head)
        if isinstance(value, str):
            kind = head.kinds[0].measure or "mixed"
            cells.append(f'<td class="name"><span class="kind" data-kind="{kind}">{escape(value)}</span></td>')
        else:
            share = f' class="share" style="--v:{min(max(value, 0.0), 1.0):.3f}"' if column.share else ""
            cells.append(f'<td{share} data-v="{value:.6g}">{escape(column.show(head))}</td>')
    return "".join(cells)


def _bars(reading: Reading) -> str:
    cost = reading.cost
    per_token = cost.held / cost.tokens
    rows = [(f"{count(cost.tokens)} tokens, this text", float(cost.full), float(cost.held))]
    for length in _LENGTHS:
        if length > cost.tokens:
            rows.append((f"{count(length)} tokens", cost.full * (length / cost.tokens) ** 2, per_token * length))
    longest = max(full for _, full, _ in rows)
    return "".join(
        f'<div class="bar-row"><span>{label}</span><div class="bar-pair">'
        f"{_bar(full, longest, 'full matrices', '')}{_bar(held, longest, 'attlas', ' ours')}"
        "</div></div>"
        for label, full, held in rows
    )


def _bar(size: float, longest: float, label: str, style: str) -> str:
    return (
        f'<div class="bar{style}"><i style="--v:{size / longest:.6f}"></i>'
        f"<span>{in_bytes(size)}</span><small>{label}</small></div>"
    )


def _words() -> str:
    items = []
    for kind in (*KINDS, MIXED):
        rule = f"{kind.definition}: at least {percent(kind.threshold)}" if kind.measure else kind.definition
        items.append(
            f'<div><dt><span class="kind" data-kind="{kind.measure or "mixed"}">{escape(kind.name)}</span></dt>'
            f"<dd>{escape(kind.does)} Here: {escape(rule)}.</dd></div>"
        )
    items += [
        f"<div><dt>{escape(column.title)}</dt><dd>{escape(column.meaning)}</dd></div>"
        for column in COLUMNS
        if column.explain
    ]
    return "".join(items)


def _project() -> str:
    """Return the name of the project, with a link where the installed package says one."""
    try:
        links = metadata("attlas").get_all("Project-URL") or []
    except PackageNotFoundError:
        links = []
    found = [link.split(",", 1)[-1].strip() for link in links]
    safe = [link for link in found if link.startswith("https://")]
    return f'<a href="{escape(safe[0])}">attlas</a>' if safe else "attlas"


def _versions() -> str:
    found = []
    for name in ("attlas", "torch", "transformers"):
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:  # run from a checkout that is not installed
            continue
    return ", ".join([*found, f"Python {platform.python_version()}"])
