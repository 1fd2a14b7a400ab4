"""Numbers in words: shares, bytes, the columns of the table, the line about memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from attlas.cli.reading import Cost
from attlas.heads import NEAR, Head

__all__ = ["COLUMNS", "Column", "count", "in_bytes", "memory", "others", "percent", "visible"]


@dataclass(frozen=True)
class Column:
    """One column of the table of heads.

    Parameters
    ----------
    title : str
        Heading.
    meaning : str
        What the number is, in one sentence.
    value : callable
        Head to number or words.
    form : str
        Format of the number.
    short : str
        Heading in the terminal; empty where it is not printed there.
    measure : str
        Field of `Head` that decides about a kind, where the column shows one.
    share : bool
        Whether the number is a share of 1.
    words : bool
        Whether the column holds words.
    explain : bool
        Whether its meaning is not yet said by the kinds of head.
    """

    title: str
    meaning: str
    value: Callable[[Head], float | str]
    form: str = ".2f"
    short: str = ""
    measure: str = ""
    share: bool = False
    words: bool = False
    explain: bool = False

    def show(self, head: Head) -> str:
        """Return the value as it is printed."""
        value = self.value(head)
        return value if isinstance(value, str) else format(value, self.form)


COLUMNS = (
    Column("layer", "Layer, counted from 0.", lambda head: head.layer, "d", short="layer"),
    Column("head", "Head, counted from 0.", lambda head: head.head, "d", short="head"),
    Column(
        "what it is",
        "The kinds whose threshold it reaches.",
        lambda head: ", ".join((head.kinds[0].name, *others(head))),
        words=True,
    ),
    Column(
        "entropy",
        "Entropy of a row in nats, mean over queries.",
        lambda head: head.entropy,
        short="entropy",
        explain=True,
    ),
    Column(
        "eff. keys",
        "Effective keys: exp(entropy) of a row, mean over queries. Over how many keys the weight is spread.",
        lambda head: head.effective_keys,
        ",.1f",
        short="keys",
        measure="breadth",
        explain=True,
    ),
    Column(
        "first",
        "Weight on the first token, mean over later queries.",
        lambda head: head.first,
        short="first",
        measure="first",
        share=True,
    ),
    Column(
        "previous",
        "Weight on the token before.",
        lambda head: head.previous,
        short="previous",
        measure="previous",
        share=True,
    ),
    Column(
        "induction",
        "Weight on what followed, on a repeated random block.",
        lambda head: head.induction,
        short="induction",
        measure="induction",
        share=True,
    ),
    Column(
        "ind. text",
        "Induction on the text itself: weight on the keys that follow an earlier copy of the query's token, mean over "
        "queries that have one.",
        lambda head: head.induction_text,
        short="on text",
        share=True,
        explain=True,
    ),
    Column(
        "duplicate",
        "Weight on the earlier copy, on a repeated random block.",
        lambda head: head.duplicate,
        measure="duplicate",
        share=True,
    ),
    Column(
        "near",
        f"Weight on the last {NEAR} tokens, the query's own included.",
        lambda head: head.near,
        measure="near",
        share=True,
    ),
    Column(
        "distance",
        "Mean distance: how many tokens back the weight lies, mean over queries.",
        lambda head: head.distance,
        ",.0f",
        short="distance",
        explain=True,
    ),
)


def others(head: Head) -> list[str]:
    """Return what a head is besides its first kind; for a mixed head, what it comes near to."""
    if head.leaning is not None:
        return [f"some {head.leaning.short}"]
    return [kind.name for kind in head.kinds[1:]]


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


def memory(cost: Cost) -> str:
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
