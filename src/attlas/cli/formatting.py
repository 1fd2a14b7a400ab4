"""Formats numbers for people, reports as JSON, and the table of heads."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from itertools import accumulate
from typing import Any

from attlas.cli.terminal import Terminal
from attlas.heads import Head


def secondary_patterns(head: Head) -> list[str]:
    """Return the patterns of a head after the first; for a mixed head, the nearest pattern."""
    if head.nearest is not None:
        return [f"some {head.nearest.short}"]
    return [kind.name for kind in head.patterns[1:]]


def print_heads(
    terminal: Terminal,
    headings: Sequence[str],
    rows: Sequence[Sequence[str]],
    kinds: Sequence[tuple[str, str]],
    *,
    breaks: Collection[int] = (),
    strong: Collection[tuple[int, int]] = (),
) -> Sequence[str]:
    """Print a table with one line per head.

    Parameters
    ----------
    terminal : Terminal
        Where it is printed.
    headings : sequence of str
        Names of the columns.
    rows : sequence of sequence of str
        The cells.
    kinds : sequence of (str, str)
        What each head is, in a last column: plain, and with its colours. Empty for a table without this column.
    breaks : collection of int
        Rows before which a line is left out.
    strong : collection of (int, int)
        Row and column of the cells that are printed bold.

    Returns
    -------
    sequence of str
        The columns on the right that do not fit into the terminal and are not printed.
    """
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    room = terminal.width - 2 - max((len(plain) for plain, _ in kinds), default=0)
    shown = max(4, sum(total <= room for total in accumulate(width + 2 for width in widths)))
    header = "  ".join(map(str.rjust, headings[:shown], widths))
    terminal.say(f"  {header}{'  what it is' if kinds else ''}", "dim")
    for i, row in enumerate(rows):
        if i in breaks:
            terminal.say()
        cells = map(str.rjust, row[:shown], widths)
        styled = [terminal.style(cell, *(("bold",) if (i, j) in strong else ())) for j, cell in enumerate(cells)]
        terminal.say(f"  {'  '.join([*styled, *(coloured for _, coloured in kinds[i : i + 1])])}")
    return headings[shown:]


def percent(share: float) -> str:
    """Return a share of 1 as per cent with two digits that mean something.

    Examples
    --------
    >>> percent(0.874), percent(0.051), percent(0.0004)
    ('87 %', '5.1 %', '0.04 %')
    """
    value = 100 * share
    return f"{value:.0f} %" if value >= 9.95 else f"{value:.1f} %" if value >= 0.995 else f"{value:.2f} %"


def in_bytes(size: float) -> str:
    """Return a size in the unit that suits it.

    Examples
    --------
    >>> in_bytes(512), in_bytes(335_544_320), in_bytes(3 * 2**40)
    ('512 B', '320 MiB', '3.0 TiB')
    """
    unit = 0
    while size >= 1023.5 and unit < 5:
        size, unit = size / 1024, unit + 1
    name = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")[unit]
    return f"{size:.0f} {name}" if unit == 0 or size >= 9.95 else f"{size:.1f} {name}"


def visible(text: str) -> str:
    """Return a token's text with its white space made visible."""
    shown = text.replace("\n", "↵").replace("\t", "⇥").replace("\r", "␍").replace(" ", "␣")
    return shown or "⋯"


def json_text(report: Any) -> str:
    """Return a report as JSON, with null for the numbers that JSON does not know: NaN and infinity."""
    return json.dumps(_finite(report), indent=2, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
