"""Formats numbers for people, reports as JSON, and the table of heads."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from attlas.cli.terminal import Terminal
from attlas.heads import Head

#: What stands for the text of a token that has none of its own: its bytes are a part of a character.
PART_OF_CHARACTER = "a part of a character"


def secondary_patterns(head: Head) -> list[str]:
    """Return the patterns of a head after the first; for a mixed head, the nearest pattern."""
    if head.nearest is not None:
        return [f"some {head.nearest.short}"]
    return [kind.name for kind in head.patterns[1:]]


def print_heads(
    terminal: Terminal,
    columns: Sequence[tuple[str, str, str]],
    rows: Sequence[Mapping[str, Any]],
    kinds: Sequence[tuple[str, str]],
    *,
    everything: str,
    notes: Sequence[str] = (),
) -> None:
    """Print a table with one line per head, and what it leaves out.

    Parameters
    ----------
    terminal : Terminal
        Where it is printed. Columns on the right that do not fit are named below the table.
    columns : sequence of (str, str, str)
        Name in the rows, heading, and format.
    rows : sequence of mapping
        The numbers of each head. A line is left out before each layer, where they are in the order of layers.
    kinds : sequence of (str, str)
        What each head is, in a last column: plain, and with its colours. Empty for a table without this column.
    everything : str
        Where the columns are that do not fit.
    notes : sequence of str
        Sentences below the table.
    """
    headings, layers = [heading for _, heading, _ in columns], [row["layer"] for row in rows]
    table = [[_formatted_number(row.get(name), form) for name, _, form in columns] for row in rows]
    widths = [max(map(len, column)) for column in zip(headings, *table, strict=True)]
    room = terminal.width - 2 - max((len(plain) for plain, _ in kinds), default=0)
    shown = max(4, sum(total <= room for total in accumulate(width + 2 for width in widths)))
    header = "  ".join(map(str.rjust, headings[:shown], widths))
    terminal.say(f"  {header}{'  what it is' if kinds else ''}", "dim")
    for i, row in enumerate(table):
        if i and layers[i] != layers[i - 1] and layers == sorted(layers):
            terminal.say()
        cells = map(str.rjust, row[:shown], widths)
        terminal.say(f"  {'  '.join([*cells, *(coloured for _, coloured in kinds[i : i + 1])])}")
    left = [f"not shown for want of room: {', '.join(headings[shown:])}; {everything}"] if headings[shown:] else []
    for note in (*notes, *left):
        terminal.say()
        terminal.prose(note, "dim")


def _formatted_number(value: Any, form: str) -> str:
    """Return a number in a format such as ".2f"; a dash where it is unknown, NaN or minus infinity."""
    if value is None or value != value or value == -math.inf:
        return "–"
    return "∞" if value == math.inf else format(value, form)


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


def say_page(path: Path, terminal: Terminal) -> None:
    """Name an HTML file that was written."""
    terminal.say(f"{terminal.style(str(path), 'bold')}  {page_size(path)}, opens in any browser, also offline")


def page_size(path: Path) -> str:
    """Return the size of a file that was written."""
    return in_bytes(path.stat().st_size)


def json_text(report: Any) -> str:
    """Return a report as JSON, with null for the numbers that JSON does not know: NaN and infinity."""
    return json.dumps(_finite_or_none(report), indent=2, ensure_ascii=False, allow_nan=False)


def _finite_or_none(value: Any) -> Any:
    """Return plain data with None in the place of NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {name: _finite_or_none(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_finite_or_none(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def counted(numbers: Counter[str]) -> str:
    """Return how often each name occurs, the most frequent first.

    Examples
    --------
    >>> from collections import Counter
    >>> counted(Counter(["broad", "local", "broad"]))
    '2 broad, 1 local'
    """
    return ", ".join(f"{number:,} {name}" for name, number in numbers.most_common())


def plural(number: int, word: str) -> str:
    """Return a number with its noun."""
    return f"{number:,} {word}{'s' if number != 1 else ''}"
