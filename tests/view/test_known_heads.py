"""What heads are called where that was measured elsewhere, and what the page says of them on the text that is shown."""

from dataclasses import fields
from typing import Any

import pytest

from attlas.heads import MIXED, PATTERNS, Head, Pattern
from attlas.recording.atlas import Atlas
from attlas.view.known_heads import KnownHead, heads_of_corpus, is_of_same_model
from attlas.view.sentences import WORDS, headline, on_text, over_texts

OF_NAME = {pattern.name: pattern for pattern in (*PATTERNS, MIXED)}


def head(tokens: int = 500, **measures: float) -> Head:
    numbers = dict.fromkeys((field.name for field in fields(Head)), 0.0) | {"chance": 0.02} | measures
    return Head(**(numbers | {"layer": 0, "head": 0, "tokens": tokens}))


# What the head is; whether that was measured elsewhere; its measures on the text; the kind that is said, and its share.
CASES: list[tuple[str, bool, dict[str, Any], tuple[str, float] | None]] = [
    ("induction", False, {"induction": 0.7, "induction_text": 0.47}, ("induction", 0.47)),
    ("induction", True, {"induction": 0.7, "induction_text": 0.47, "fixed": 0.6}, ("induction", 0.47)),
    ("induction", True, {"induction": 0.7, "induction_text": 0.1}, ("induction", 0.1)),
    ("induction", True, {"induction": 0.7, "induction_text": 0.1, "first": 0.8}, ("first-token sink", 0.8)),
    ("induction", True, {"induction": 0.7, "chance": 0.0}, None),  # no token comes twice
    ("induction", True, {"induction": 0.7, "chance": 0.0, "first": 0.8}, ("first-token sink", 0.8)),
    ("duplicate token", False, {"duplicate": 0.9, "duplicate_text": 0.3}, ("duplicate token", 0.3)),
    ("previous token", False, {"previous": 0.9}, None),  # its sentence is about this text
    ("previous token", True, {"previous": 0.9}, ("previous token", 0.9)),
    ("previous token", True, {"previous": 0.1}, ("previous token", 0.1)),
    ("previous token", True, {"previous": 0.1, "current": 0.7}, ("current token", 0.7)),
    ("broad", True, {"tokens": 20, "breadth": 0.9}, None),  # too short to tell
    ("broad", True, {"tokens": 20, "breadth": 0.9, "previous": 0.8}, ("previous token", 0.8)),
    ("mixed", False, {"first": 0.8}, None),
    ("mixed", True, {"first": 0.8}, ("first-token sink", 0.8)),
    ("mixed", True, {}, None),
]


@pytest.mark.parametrize(("own", "elsewhere", "measures", "wanted"), CASES)
def test_the_second_line_says_what_the_head_does_on_the_text(
    own: str, elsewhere: bool, measures: dict[str, Any], wanted: tuple[str, float] | None
) -> None:
    found = on_text(OF_NAME[own], head(**measures), elsewhere=elsewhere)
    assert (found and (found["kind"], found["share"])) == wanted
    if found is not None:
        assert WORDS[found["kind"]]["on_text"]
        assert (found["chance"] is not None) == ("{1}" in str(WORDS[found["kind"]]["on_text"]))


def test_a_known_head_is_as_telling_as_a_measured_one() -> None:
    for measures in ({"induction": 0.7}, {"previous": 0.9, "near": 0.99}, {"breadth": 0.3}, {}):
        measured = head(**measures)
        known = KnownHead.measured(measured)
        assert known.kinds == tuple(pattern.name for pattern in measured.patterns)
        assert known.prominence == measured.prominence
        assert known.share == measured.of(measured.patterns[0])


def test_a_corpus_of_another_version_keeps_what_its_page_says() -> None:
    columns = {
        "layer": [0, 0, 1],
        "head": [0, 1, 0],
        "kind": ["induction", "mixed", "unheard of"],
        "queries": [5000, 5000, 5000],
        "texts": [10, 10, 10],
        "induction": [0.45, 0.1, 0.9],  # below the threshold of this version
        "first": [0.7, None, 0.0],
        "breadth": [float("nan"), 0.0, 0.0],
    }
    found = heads_of_corpus(columns, "old.corpus")
    assert found.heads[0, 0].kinds == ("induction", "first-token sink")
    assert found.heads[0, 0].share == 0.45
    assert found.heads[0, 1].kinds == ("mixed",)
    assert set(found.heads) == {(0, 0), (0, 1)}


MINE = {"period": 128, "induction": [[0.5, 0.1]], "duplicate": [[0.0, 0.2]]}


@pytest.mark.parametrize(
    ("block", "same"),
    [
        (MINE, True),
        (MINE | {"induction": [[0.5001, 0.1]]}, True),  # another processor
        (MINE | {"induction": [[0.6, 0.1]]}, False),
        (MINE | {"period": 64}, False),
        (MINE | {"duplicate": [[0.0], [0.2, 0.1]]}, False),
        (MINE | {"duplicate": "none"}, False),
        ({"period": 128}, False),
        (None, False),
    ],
)
def test_a_recording_is_of_the_model_that_does_the_same_on_random_tokens(block: Any, same: bool) -> None:
    assert is_of_same_model(Atlas([], details={"block": block}), MINE) == same


@pytest.mark.parametrize("kind", [*PATTERNS, MIXED], ids=lambda kind: kind.name)
def test_headlines_count_the_heads_of_a_kind(kind: Pattern) -> None:
    one = WORDS[kind.name]["headline"]
    assert headline(kind, 1, 1) == f"The only head\n{one}"
    assert headline(kind, 1, 24) == f"1 of 24 heads\n{one}"
    count, several = headline(kind, 2, 1024).split("\n")
    assert count == "2 of 1,024 heads"
    verb, *_ = one.split()
    assert several.split()[0] == verb.removesuffix("s")
    every = "None of 24 heads\nfollows a simple pattern" if kind is MIXED else f"All 24 heads\n{several}"
    assert headline(kind, 24, 24) == every


def test_what_is_known_of_a_kind_for_each_text_is_a_number_of_corpora() -> None:
    from attlas.corpus.numbers import NUMBERS

    assert {over_texts(kind)[0] for kind in (*PATTERNS, MIXED)} <= {number.name for number in NUMBERS}
