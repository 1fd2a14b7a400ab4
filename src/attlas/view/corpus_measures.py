"""The numbers of heads over a corpus, in plain words: what a scatter writes on its axes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from attlas.heads import NEAR
from attlas.view.columns import Column

# What a page shows at first, as far as a corpus has it.
START = {
    "x": "effective_keys", "y": "qk_distance", "xlog": True, "ylog": True, "colour": "kind", "size": "induction",
}  # fmt: skip


_ON_RANDOM_TOKENS = "on random tokens that occur twice"
_KNOWN_MEASURES = (
    Column("entropy", "Entropy", "nats", "How spread a token's attention is: 0 where it looks at a single token."),
    Column(
        "effective_keys",
        "Effective keys",
        "keys",
        "How many tokens a token looks at: so many, looked at alike, would be as spread.",
    ),
    Column("max_weight", "Largest weight", "", "Share of a token's attention that its favourite token gets."),
    Column("qk_distance", "Distance", "tokens", "How many tokens back a head looks, on average over its attention."),
    Column("qk_distance_variance", "Variance of distance", "", "How much that distance varies, in squared tokens."),
    Column("first", "First token", "", "Share of attention on the first token, where many heads rest."),
    Column("near", "Neighbourhood", "", f"Share of attention within the last {NEAR} tokens."),
    Column("previous", "Previous token", "", "Share of attention on the token just before."),
    Column("current", "Current token", "", "Share of attention that stays on the token itself."),
    Column("fixed", "One distance", "", "Share of attention at the one distance from 2 on that gets the most."),
    Column("fixed_distance", "That distance", "tokens", "The distance from 2 on that gets the most attention."),
    Column("favourite", "One token", "", "Share of attention on all copies of the one token that gets the most."),
    Column("breadth", "Breadth", "", "Effective keys as a share of the tokens that a token may look at."),
    Column(
        "induction",
        "Induction",
        "",
        f"Share of attention on what followed the earlier copy of a token, {_ON_RANDOM_TOKENS}.",
    ),
    Column(
        "induction_text",
        "Induction on texts",
        "",
        "Share of attention on tokens that followed earlier copies, over tokens that have such copies.",
    ),
    Column("duplicate", "Copies", "", f"Share of attention on the earlier copy of a token, {_ON_RANDOM_TOKENS}."),
    Column(
        "duplicate_text",
        "Copies on texts",
        "",
        "Share of attention on earlier copies of the token itself, over tokens that have such copies.",
    ),
    Column(
        "mean_max_activation",
        "Peak, mean",
        "",
        "Largest weight in a text, outside of its first token; mean over the texts.",
    ),
    Column("max_activation", "Peak", "", "Largest weight in any text, outside of its first token."),
    Column("self_attention_score", "Self-attention score", "", "HeadVis: weight on the diagonal, over all tokens."),
    Column(
        "prev_token_score", "Previous-token score", "", "HeadVis: weight one token back, over all but the first token."
    ),
    Column(
        "induction_score",
        "Induction score",
        "",
        "HeadVis: weights of at least 0.01 after earlier copies, over tokens that have such copies.",
    ),
)


def measures(columns: Iterable[str], spread: Iterable[str], definitions: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return the numbers of a corpus in the order of the page, with their words.

    Parameters
    ----------
    columns : iterable of str
        Names of the columns of numbers.
    spread : iterable of str
        Names of those that are known for each text.
    definitions : mapping of str to str
        What the corpus itself says of some; it speaks for numbers that have no other words.
    """
    left, spread = list(columns), set(spread)
    known = [each for each in _KNOWN_MEASURES if each.name in left]
    named = {each.name for each in known}
    others = [
        Column(name, name.replace("_", " ").capitalize(), "", definitions.get(name, "A number of the corpus."))
        for name in left
        if name not in named
    ]
    return [{**each._asdict(), "spread": each.name in spread} for each in (*known, *others)]
