"""``attlas stats``: what every recorded head does, as a table, JSON or CSV."""

from __future__ import annotations

import csv
import difflib
import io
from argparse import Namespace
from pathlib import Path
from typing import Any

from attlas.cli import head_statistics
from attlas.cli.checks import check_least
from attlas.cli.files import entry_of, open_folder
from attlas.cli.formatting import json_text, plural, print_heads, secondary_patterns
from attlas.cli.terminal import Terminal, UsageError
from attlas.heads import PATTERNS, Head
from attlas.heads.classification import detectable, measure_entry
from attlas.recording.atlas import Atlas

# Columns in the terminal: name in the data, heading, format; those further down give way where it is narrow.
_SHOWN_COLUMNS = (
    ("entropy", "entropy", ".2f"),
    ("effective_keys", "keys", ",.1f"),
    ("first", "first", ".2f"),
    ("previous", "previous", ".2f"),
    ("induction", "induction", ".2f"),
    ("induction_text", "on text", ".2f"),
    ("first_key_mass", "first key", ".2f"),
    ("max_logit", "max logit", ",.1f"),
    ("max_weight", "largest", ".2f"),
    ("distance", "distance", ",.0f"),
    ("logit_variance", "variance", ",.2f"),
    ("coverage_1", "coverage", ",.0f"),
)
_PATTERN_COLOURS = {
    "induction": ("red", "bold"),
    "duplicate": ("yellow",),
    "previous": ("blue",),
    "fixed": ("blue",),
    "current": ("cyan",),
    "first": ("dim",),
    "near": ("green",),
    "favourite": ("magenta",),
    "breadth": ("magenta",),
}  # of the patterns, by their measure
_NOT_MEASURES = ("layer", "head", "entropy", "effective_keys", "tokens")  # fields of Head that decide about no pattern
# Columns of a recording that the measures of its heads replace.
_REPLACED_COLUMNS = ("first_key_mass",)


def run(arguments: Namespace, terminal: Terminal) -> None:
    """Read the folder and print its heads."""
    check_least("top", arguments.top, 1, 5)
    atlas = open_atlas(arguments.atlas, terminal)
    table = _records_of_heads(atlas)
    rows = _chosen_rows(atlas, table, arguments)
    if arguments.json:
        facts = {"model": atlas.model, "source": atlas.details.get("source"), "tokens": _token_count(atlas)}
        terminal.data(json_text({**facts, "rows": rows}))
    elif arguments.csv:
        text = io.StringIO()
        writer = csv.DictWriter(text, list(table[0]) if table else [], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        terminal.data(text.getvalue().rstrip("\n"))
    else:
        _print_table(atlas, rows, terminal)


def open_atlas(folder: Path, terminal: Terminal) -> Atlas:
    """Return a saved recording; statistics that its q and k can still give are computed, and not kept.

    Raises
    ------
    RecordingError
        If the folder is no recording.
    """
    atlas = open_folder(folder)
    statistics = head_statistics.missing(atlas, atlas.ids)
    if statistics:
        with terminal.step("computing what was not recorded", len(atlas.entries)) as tick:
            atlas.collect(*statistics, progress=tick)
    return atlas


def _records_of_heads(atlas: Atlas) -> list[dict[str, Any]]:
    """Return one record per head: the recorded numbers, and its measures and patterns where they are known."""
    heads = {
        (entry.kind, entry.layer, entry.call, head.head): head
        for entry in atlas.entries
        for head in measure_entry(atlas, entry)
    }
    records: list[dict[str, Any]] = atlas.table()
    if not heads:
        return records
    names = [name for name in Head.__dataclass_fields__ if name not in _NOT_MEASURES]
    if "block" not in atlas.details:
        names = [name for name in names if name not in ("induction", "duplicate")]
    rows = []
    for record in records:
        head = heads.get((record["kind"], record["layer"], record["call"], record["head"]))
        what = None if head is None else ", ".join((head.patterns[0].name, *secondary_patterns(head)))
        measures = {name: None if head is None else getattr(head, name) for name in names}
        rows.append(
            {name: value for name, value in record.items() if name not in _REPLACED_COLUMNS} | {"what": what} | measures
        )
    return rows


def _chosen_rows(atlas: Atlas, rows: list[dict[str, Any]], arguments: Namespace) -> list[dict[str, Any]]:
    """Return the rows that were asked for, in the order that was asked for."""
    if arguments.layer is not None:
        entry = entry_of(atlas, arguments.layer)
        rows = [row for row in rows if row["kind"] == entry.kind and row["layer"] == entry.layer]
    if arguments.sort is not None:
        name, up = arguments.sort.removeprefix("+"), arguments.sort.startswith("+")
        known = list(rows[0]) if rows else []
        if name not in known:
            near = (difflib.get_close_matches(name, known, 1) or ["head"])[0]
            rule = f"--sort must be one of {', '.join(known) or 'none'}."
            raise UsageError(rule, f"--sort {arguments.sort}", f"--sort {near}")
        full = [row for row in rows if row[name] is not None]
        rows = sorted(full, key=lambda row: row[name], reverse=not up) + [row for row in rows if row[name] is None]
    return rows[: arguments.top]


def _token_count(atlas: Atlas) -> int | None:
    """Return how many tokens a recording has; None where their ids are not known."""
    return None if atlas.ids is None else int(atlas.ids.shape[-1])


def _print_table(atlas: Atlas, rows: list[dict[str, Any]], terminal: Terminal) -> None:
    """Print the heads as a table, with the columns that some head has a number for."""
    terminal.prose(title_line(atlas), "bold", indent="")
    terminal.say()
    if not rows:
        terminal.say("  no heads")
        return
    kind, call = ([(name, name, "")] if len({row[name] for row in rows}) > 1 else [] for name in ("kind", "call"))
    columns = [*kind, ("layer", "layer", "d"), ("head", "head", "d"), *call]
    columns += [column for column in _SHOWN_COLUMNS if any(row.get(column[0]) is not None for row in rows)]
    patterns = [str(row.get("what") or "") for row in rows] if any(row.get("what") for row in rows) else []
    length = round(_mean_length(atlas))
    few = [kind.name for kind in PATTERNS if kind not in detectable(length)] if patterns else []
    print_heads(
        terminal,
        columns,
        rows,
        [(names or "–", _patterns_in_colour(names, terminal)) for names in patterns],
        everything="--csv and --json have everything",
        notes=[
            *([f"too short a text ({length:,} tokens) to name heads {', '.join(few)}"] if few else []),
            *([f"not recorded: {'; '.join(atlas.unrecorded)}"] if atlas.unrecorded else []),
        ],
    )


def _patterns_in_colour(names: str, terminal: Terminal) -> str:
    """Return the names of a head's patterns, the first one in its colour."""
    first, comma, others = names.partition(", ")
    measure = next((pattern.measure for pattern in PATTERNS if pattern.name == first), "")
    return terminal.style(first or "–", *_PATTERN_COLOURS.get(measure, ("dim",))) + terminal.style(
        comma + others, "dim"
    )


def _mean_length(atlas: Atlas) -> float:
    """Return the number of tokens of a text, the mean over a batch with padding."""
    entry = atlas.entries[0]
    queries = entry.query_mask
    return float(entry.shape[2] if queries is None else queries.sum(-1).double().mean())


def title_line(atlas: Atlas) -> str:
    """Return the title of a recording: model, layers and heads, and the text as far as it is known."""
    heads = max((len(entry.heads) for entry in atlas.entries), default=0)
    tokens, source = _token_count(atlas), atlas.details.get("source")
    read = "" if tokens is None else f", reads {plural(tokens, 'token')}" + (f" of {source}" if source else "")
    count, missing = len(atlas.layers()), len(atlas.missing_layers())
    layers = f"{count} of {count + missing} layers" if missing else plural(count, "layer")
    return f"{atlas.model or 'a model'}, {layers} × {plural(heads, 'head')}{read}"
