"""``attlas stats``: what every recorded head does, as a table, JSON or CSV."""

from __future__ import annotations

import argparse
import csv
import difflib
import io
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from attlas.atlas import Atlas
from attlas.cli import head_statistics
from attlas.cli.files import entry_of, open_folder
from attlas.cli.formatting import count, secondary_patterns
from attlas.cli.terminal import Terminal, UsageError
from attlas.heads import PATTERNS, Head
from attlas.heads.classification import detectable

__all__ = ["open_atlas", "run"]

# Columns in the terminal: name in the data, heading, format; those further down give way where it is narrow.
_SHOWN = (
    ("entropy", "entropy", ".2f"),
    ("effective_keys", "keys", ",.1f"),
    ("first", "first", ".2f"),
    ("previous", "previous", ".2f"),
    ("induction", "induction", ".2f"),
    ("first_key_mass", "first key", ".2f"),
    ("max_logit", "max logit", ",.1f"),
    ("max_weight", "largest", ".2f"),
    ("distance", "distance", ",.0f"),
    ("logit_variance", "variance", ",.2f"),
    ("coverage_1", "coverage", ",.0f"),
)
_PLAIN = ("layer", "head", "entropy", "effective_keys", "tokens")  # of a head, and no measure of its kind
# What a head's measures say better: its table has them only where it has no measures.
_SAID = ("first_key_mass",)


def run(arguments: argparse.Namespace, terminal: Terminal) -> None:
    """Read the folder and print its heads."""
    if arguments.top is not None and arguments.top < 1:
        raise UsageError("stats", "--top must be at least 1.", found=f"--top {arguments.top}", fix="--top 5")
    atlas = open_atlas(arguments.atlas, terminal, "stats")
    table = _rows(atlas)
    rows = _chosen(atlas, table, arguments)
    if arguments.json:
        facts = {"model": atlas.model, "source": atlas.details.get("source"), "tokens": _tokens(atlas)}
        plain = [{name: _finite(value) for name, value in row.items()} for row in rows]
        terminal.say(json.dumps({**facts, "rows": plain}, indent=2, ensure_ascii=False, allow_nan=False))
    elif arguments.csv:
        text = io.StringIO()
        writer = csv.DictWriter(text, list(table[0]) if table else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        terminal.say(text.getvalue().rstrip("\n"))
    else:
        _table(atlas, rows, terminal)


def open_atlas(folder: Path, terminal: Terminal, where: str) -> Atlas:
    """Return a saved atlas; what its q and k can still tell is computed, and not kept.

    Raises
    ------
    RecordingError
        If the folder is no atlas.
    """
    atlas = open_folder(folder, where)
    statistics = head_statistics.missing(atlas, atlas.ids)
    if statistics:
        with terminal.step("computing what was not recorded", len(atlas.entries)) as tick:
            atlas.collect(*statistics, progress=lambda done, total: tick())
    return atlas


def _rows(atlas: Atlas) -> list[dict[str, Any]]:
    """Return one record a head: what the atlas tells of it, and what it is."""
    heads = {
        (entry.kind, entry.layer, entry.call, head.head): head
        for entry in atlas.entries
        for head in head_statistics.classify_entry(atlas, entry)
    }
    block = "block" in atlas.details
    rows = []
    for record in atlas.table():
        head = heads.get((record["kind"], record["layer"], record["call"], record["head"]))
        if heads:
            record = {name: value for name, value in record.items() if name not in _SAID}
            record |= _measures(head, block=block)
        rows.append(record)
    return rows


def _measures(head: Head | None, *, block: bool) -> dict[str, Any]:
    names = [name for name in Head.__dataclass_fields__ if name not in _PLAIN]
    names = [name for name in names if block or name not in ("induction", "duplicate")]
    if head is None:
        return dict.fromkeys(("what", *names))
    known = asdict(head)
    return {"what": ", ".join((head.patterns[0].name, *secondary_patterns(head)))} | {
        name: known[name] for name in names
    }


def _chosen(atlas: Atlas, rows: list[dict[str, Any]], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the rows that were asked for, in the order that was asked for."""
    if arguments.layer is not None:
        entry = entry_of(atlas, arguments.layer, "stats")
        rows = [row for row in rows if row["kind"] == entry.kind and row["layer"] == entry.layer]
    if arguments.sort is not None:
        name, up = arguments.sort.removeprefix("+"), arguments.sort.startswith("+")
        if not rows or name not in rows[0]:
            known = list(rows[0]) if rows else []
            near = (difflib.get_close_matches(name, known, 1) or ["head"])[0]
            found, rule = f"--sort {arguments.sort}", f"--sort must be one of {', '.join(known) or 'none'}."
            raise UsageError("stats", rule, found=found, fix=f"--sort {near}")
        full = [row for row in rows if row[name] is not None]
        rows = sorted(full, key=lambda row: row[name], reverse=not up) + [row for row in rows if row[name] is None]
    return rows[: arguments.top]


def _tokens(atlas: Atlas) -> int | None:
    return None if atlas.ids is None else int(atlas.ids.shape[-1])


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _table(atlas: Atlas, rows: list[dict[str, Any]], terminal: Terminal) -> None:
    terminal.prose(_title(atlas), "bold", indent="")
    terminal.say()
    if not rows:
        terminal.say("  no heads")
        return
    kinds, passes = ({row[name] for row in rows} for name in ("kind", "call"))
    places = [(name, name, "") for name, shown in (("kind", kinds), ("call", passes)) if len(shown) > 1]
    columns = [*places[:1], ("layer", "layer", "d"), ("head", "head", "d"), *places[1:]]
    columns += [column for column in _SHOWN if any(row.get(column[0]) is not None for row in rows)]
    what = any(row.get("what") for row in rows)
    cells = [[_cell(row.get(name), form) for name, _, form in columns] for row in rows]
    widths = [
        max(len(column[1]), *map(len, texts)) for column, texts in zip(columns, zip(*cells, strict=True), strict=True)
    ]
    room = terminal.width - 2 - (18 if what else 0)
    keep = len(columns)
    while keep > 4 and sum(widths[:keep]) + 2 * keep > room:
        keep -= 1
    header = "  ".join(column[1].rjust(width) for column, width in zip(columns[:keep], widths, strict=False))
    terminal.say(terminal.style(f"  {header}{'  what it is' if what else ''}", "dim"))
    before = rows[0]["layer"]
    for row, texts in zip(rows, cells, strict=True):
        if row["layer"] != before and not _sorted(rows):
            terminal.say()
        before = row["layer"]
        line = "  ".join(text.rjust(width) for text, width in zip(texts[:keep], widths, strict=False))
        terminal.say(f"  {line}{'  ' + str(row.get('what') or '–') if what else ''}".rstrip())
    length = round(_mean_length(atlas))
    few = [kind.name for kind in PATTERNS if kind not in detectable(length)] if what else []
    if few:
        terminal.say()
        terminal.prose(f"too short a text ({count(length)} tokens) to name heads {', '.join(few)}", "dim")
    if keep < len(columns):
        left = ", ".join(heading for _, heading, _ in columns[keep:])
        terminal.say()
        terminal.prose(f"not shown for want of room: {left}; --csv and --json have everything", "dim")


def _mean_length(atlas: Atlas) -> float:
    """Return the number of tokens of a text, the mean over a batch with padding."""
    entry = atlas.entries[0]
    queries = entry.query_mask
    return float(entry.shape[2] if queries is None else queries.sum(-1).double().mean())


def _sorted(rows: list[dict[str, Any]]) -> bool:
    """Return whether rows stand in another order than that of the layers."""
    layers = [row["layer"] for row in rows]
    return layers != sorted(layers)


def _title(atlas: Atlas) -> str:
    layers = atlas.layers()
    heads = max((len(entry.heads) for entry in atlas.entries), default=0)
    tokens = _tokens(atlas)
    source = atlas.details.get("source")
    read = "" if tokens is None else f", reads {count(tokens)} tokens" + (f" of {source}" if source else "")
    return f"{atlas.model or 'a model'}, {len(layers)} layers × {heads} heads{read}"


def _cell(value: Any, form: str) -> str:
    if value is None:
        return "–"
    if isinstance(value, float) and not math.isfinite(value):
        return "∞" if value == math.inf else "–"
    return format(value, form)
