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
#: Words about each kind, by its name.
WORDS = {
    kind.name: {
        "short": kind.short,
        "does": kind.does,
        "measure": kind.measure,
        "threshold": kind.threshold,
        "definition": kind.definition,
        "headline": _SENTENCE_OF_KIND[kind.measure][0] if kind.measure else "follows no simple pattern",
        "evidence": _SENTENCE_OF_KIND[kind.measure][1]
        if kind.measure
        else "It picks by content: no other kind's threshold is reached.",
        "on_text": _ON_THIS_TEXT.get(kind.measure, ""),
    }
    for kind in (*PATTERNS, MIXED)
}


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
