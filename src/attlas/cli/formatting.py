"""Formats numbers for people: shares, bytes, the columns of the table of heads, the line about memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attlas.cli.demo_result import MemoryCost
from attlas.heads import Head

__all__ = ["COLUMNS", "HeadColumn", "count", "in_bytes", "memory", "percent", "secondary_patterns", "visible"]


@dataclass(frozen=True)
class HeadColumn:
    """One column of the table of heads.

    Parameters
    ----------
    short : str
        Heading.
    value : callable
        Head to number.
    form : str
        Format of the number.
    measure : str
        Field of `Head` that decides about a pattern, if the column shows one.
    """

    short: str
    value: Callable[[Head], float]
    form: str = ".2f"
    measure: str = ""

    def show(self, head: Head) -> str:
        """Return the value as it is printed."""
        return format(self.value(head), self.form)


COLUMNS = (
    HeadColumn("layer", lambda head: head.layer, "d"),
    HeadColumn("head", lambda head: head.head, "d"),
    HeadColumn("entropy", lambda head: head.entropy),
    HeadColumn("keys", lambda head: head.effective_keys, ",.1f", "breadth"),
    HeadColumn("first", lambda head: head.first, measure="first"),
    HeadColumn("previous", lambda head: head.previous, measure="previous"),
    HeadColumn("induction", lambda head: head.induction, measure="induction"),
    HeadColumn("on text", lambda head: head.induction_text),
    HeadColumn("distance", lambda head: head.distance, ",.0f"),
)


def secondary_patterns(head: Head) -> list[str]:
    """Return the patterns of a head after the first; for a mixed head, the nearest pattern."""
    if head.nearest is not None:
        return [f"some {head.nearest.short}"]
    return [kind.name for kind in head.patterns[1:]]


def percent(share: float) -> str:
    """Return a share of 1 as per cent with two digits that mean something.

    Examples
    --------
    >>> percent(0.874), percent(0.051), percent(0.0004)
    ('87 %', '5.1 %', '0.04 %')
    """
    value = 100 * share
    return f"{value:.0f} %" if value >= 9.95 else f"{value:.1f} %" if value >= 0.995 else f"{value:.2f} %"


def count(number: int) -> str:
    """Return a whole number with thousands set apart."""
    return f"{number:,}"


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


def memory(cost: MemoryCost) -> str:
    """Return the line that says what full matrices would have cost against what was used."""
    side = count(cost.tokens)
    line = (
        f"{cost.matrices} full matrices of {side} × {side} in float32 would take {in_bytes(cost.full)}; attlas kept "
        f"{in_bytes(cost.held)}: {cost.what}"
    )
    if cost.peak is None:
        return line + "."
    return line + f". Reading every cell took {in_bytes(cost.peak)} more at the peak."


def visible(text: str) -> str:
    """Return a token's text with its white space made visible."""
    shown = text.replace("\n", "↵").replace("\t", "⇥").replace("\r", "␍").replace(" ", "␣")
    return shown or "⋯"
