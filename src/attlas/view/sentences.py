"""What the page says of a head: what it is, and what it does on the text that is shown."""

from __future__ import annotations

from typing import Any

from attlas.heads import MIXED, PATTERNS, Head, Pattern
from attlas.heads.classification import BLOCK_MEASURES, detectable
from attlas.heads.patterns import NEAR

# The measures of the text that are those on the random block, over the queries whose token occurred before.
_ON_TEXT = {"induction": "induction_text", "duplicate": "duplicate_text"}
# What is said of a head of a kind: what it does, and of which share of its weight; {0} is the share.
_SENTENCE_OF_KIND = {
    "induction": (
        "remembers what came next",
        "Show it random tokens, then the same tokens again: {0} of its attention goes to the token that followed the "
        "first time.",
    ),
    "duplicate": (
        "finds the same token again",
        "Show it random tokens, then the same tokens again: {0} of its attention goes to the earlier copy.",
    ),
    "previous": ("looks at the token before", "{0} of its attention goes to the token before."),
    "fixed": ("looks a fixed way back", "{0} of its attention goes to the tokens at one distance."),
    "current": ("stays where it is", "{0} of its attention stays on the token itself."),
    "first": ("rests on the first token", "{0} of its attention rests on the first token."),
    "near": ("reads its neighbourhood", f"{{0}} of its attention stays within the last {NEAR} tokens."),
    "favourite": ("keeps returning to one token", "{0} of its attention goes to the copies of one token."),
    "breadth": (
        "looks everywhere",
        "On average, its attention is spread as if it looked evenly at {0} of the tokens that it may see.",
    ),
}
# The same in few words, of the text that is shown; {1} is the share by chance.
_ON_THIS_TEXT = {
    "induction": "{0} on what followed earlier copies, {1} by chance.",
    "duplicate": "{0} on earlier copies of the token, {1} by chance.",
    "previous": "{0} goes to the token before.",
    "fixed": "{0} goes to the tokens at one distance.",
    "current": "{0} stays on the token itself.",
    "first": "{0} rests on the first token.",
    "near": f"{{0}} stays within the last {NEAR} tokens.",
    "favourite": "{0} goes to the copies of one token.",
    "breadth": "as if it looked evenly at {0} of the tokens that it may see.",
}
_NO_KIND = "follows no simple pattern"
# The headlines of several heads of a kind, by that of one.
_OF_SEVERAL = {
    "remembers what came next": "remember what came next",
    "finds the same token again": "find the same token again",
    "looks at the token before": "look at the token before",
    "looks a fixed way back": "look a fixed way back",
    "stays where it is": "stay where they are",
    "rests on the first token": "rest on the first token",
    "reads its neighbourhood": "read their neighbourhood",
    "keeps returning to one token": "keep returning to one token",
    "looks everywhere": "look everywhere",
    _NO_KIND: "follow no simple pattern",
}
# What is known of a kind for each text, where that is another number than the one that decides; {0} is its mean.
_OVER_TEXTS = {
    "induction": ("induction_text", "On the texts, {0} goes to what followed earlier copies"),
    "duplicate": ("duplicate_text", "On the texts, {0} goes to earlier copies of the token"),
    **dict.fromkeys(("fixed", "favourite", ""), ("max_activation", "Its largest weight in a text is {0} on average")),
}
#: Words about each kind, by its name.
WORDS = {
    kind.name: {
        "short": kind.short,
        "does": kind.does,
        "measure": kind.measure,
        "threshold": kind.threshold,
        "definition": kind.definition,
        "headline": _SENTENCE_OF_KIND[kind.measure][0] if kind.measure else _NO_KIND,
        "evidence": _SENTENCE_OF_KIND[kind.measure][1]
        if kind.measure
        else "It picks by content: no other kind's threshold is reached.",
        "on_text": _ON_THIS_TEXT.get(kind.measure, ""),
    }
    for kind in (*PATTERNS, MIXED)
}


def headline(kind: Pattern, count: int, heads: int) -> str:
    """Return how many heads are of a kind, as a headline.

    Parameters
    ----------
    kind : Pattern
        The kind.
    count, heads : int
        How many are of it, of how many.

    Returns
    -------
    str
        In two lines.
    """
    one = str(WORDS[kind.name]["headline"])
    if heads == 1:
        return f"The only head\n{one}"
    if count < heads:
        return f"{count:,} of {heads:,} heads\n{one if count == 1 else _OF_SEVERAL[one]}"
    whole = f"None of {heads:,} heads\n{one}" if kind is MIXED else f"All {heads:,} heads\n{_OF_SEVERAL[one]}"
    return whole.replace("follows no simple", "follows a simple")


def over_texts(kind: Pattern) -> tuple[str, str]:
    """Return what is known of the heads of a kind for each text.

    Parameters
    ----------
    kind : Pattern
        The kind.

    Returns
    -------
    (str, str)
        The name of the number, and a clause about its mean {0}; an empty clause where the number is the one that
        decides about the kind, which has a sentence already.
    """
    return _OVER_TEXTS.get(kind.measure, (kind.measure, ""))


def on_text(own: Pattern, head: Head, *, elsewhere: bool) -> dict[str, Any] | None:
    """Return the kind of sentence about a head on the text that is shown, and the shares that it names.

    Parameters
    ----------
    own : Pattern
        What the head is.
    head : Head
        Its measures on the text.
    elsewhere : bool
        Whether what the head is was measured on another text. If not, its sentence is about this one already, unless
        it is one about random tokens.

    Returns
    -------
    dict or None
        ``{"kind", "share", "chance"}``; None where there is nothing to say. That is the measure of the head's own
        kind, where it can be told on so short a text; a kind that the text shows instead goes before a low value.
    """
    value: dict[str, Any] | None = None
    if own.measure in _ON_TEXT:
        if head.chance > 0:  # some token occurs twice
            value = {"kind": own.name, "share": getattr(head, _ON_TEXT[own.measure]), "chance": head.chance}
    elif elsewhere and own in detectable(head.tokens):
        value = {"kind": own.name, "share": head.of(own), "chance": None}
    if not elsewhere or (value is not None and value["share"] >= own.threshold / 2):
        return value
    # On this text the head hardly does what it is known for: say what it does here, if that is the pattern of a kind.
    shown = next((kind for kind in head.patterns if kind.measure and kind.measure not in BLOCK_MEASURES), None)
    return value if shown is None else {"kind": shown.name, "share": head.of(shown), "chance": None}
