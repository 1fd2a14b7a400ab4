"""Text as it is written: Chinese, emoji, tokens that are a part of a character."""

from typing import Any

import pytest

from attlas.view.tokens import Joined, Text, pieces_from


def test_plain_tokens_stay_as_they_are() -> None:
    text = Text(["Hello", " ", "\n", "日本", "", "x"])
    assert text.shown == ["Hello", " ", "\n", "日本", "", "x"]
    assert text.joined == []
    assert len(text) == 6


@pytest.mark.parametrize(
    ("pieces", "shown", "joined"),
    [
        ({0: b"\xe6", 1: b"\x97\xa5"}, ["⟨E6⟩", "⟨97 A5⟩"], [(0, 2, "日")]),
        ({0: b"\xf0\x9f", 1: b"\x98", 2: b"\x80"}, ["⟨F0 9F⟩", "⟨98⟩", "⟨80⟩"], [(0, 3, "😀")]),
        # Two characters in three tokens: the group goes on while a character is open.
        ({0: b"\xe6", 1: b"\x97\xa5\xe6", 2: b"\x9c\xac"}, ["⟨E6⟩", "⟨97 A5 E6⟩", "⟨9C AC⟩"], [(0, 3, "日本")]),
        # Text after the last byte belongs to the token, and is shown.
        ({0: b"\xe6", 1: b"\x97\xa5!"}, ["⟨E6⟩", "⟨97 A5⟩!"], [(0, 2, "日!")]),
        # Two characters one after another are two groups.
        (
            {0: b"\xc3", 1: b"\xa9", 2: b"\xc3", 3: b"\xa8"},
            ["⟨C3⟩", "⟨A9⟩", "⟨C3⟩", "⟨A8⟩"],
            [(0, 2, "é"), (2, 4, "è")],
        ),
        # A byte that nothing completes.
        ({0: b"\xe6"}, ["⟨E6⟩"], [(0, 1, "\ufffd")]),
        ({0: b"\xff", 1: b"\xfe"}, ["⟨FF⟩", "⟨FE⟩"], [(0, 1, "\ufffd"), (1, 2, "\ufffd")]),
    ],
)
def test_parts_of_characters_show_their_bytes(pieces: dict[int, bytes], shown: list[str], joined: list[Any]) -> None:
    text = Text(["a", *[""] * len(pieces), "b"], {place + 1: piece for place, piece in pieces.items()})
    assert text.shown == ["a", *shown, "b"]
    assert text.joined == [Joined(start + 1, stop + 1, whole) for start, stop, whole in joined]


def test_recordings_without_bytes_tell_what_belongs_together() -> None:
    text = Text(["a", "", "", "😀", "", "b", ""])
    assert text.joined == [Joined(1, 4, "😀")]
    assert text.shown == ["a", "⟨…⟩", "⟨…⟩", "⟨…⟩", "", "b", ""]


def test_search_crosses_tokens_and_characters() -> None:
    text = Text(["Der ", "", "", " Fl", "uß", " DER"], {1: b"\xe6", 2: b"\x97\xa5"})
    assert text.search("der", 10) == ([(0, 1), (5, 6)], 2)
    assert text.search("DER", 1) == ([(0, 1)], 2)
    assert text.search("日", 10) == ([(1, 3)], 1)
    assert text.search("FLUSS d", 10) == ([(3, 6)], 1)
    assert text.search(" 日 f", 10) == ([(0, 4)], 1)
    assert text.search("nothing", 10) == ([], 0)
    assert Text([]).search("x", 5) == ([], 0)


def test_joined_groups_of_a_stretch() -> None:
    text = Text([""] * 6, {i: (b"\xc3", b"\xa9")[i % 2] for i in range(6)})
    assert [group.start for group in text.joined_in(range(3, 5))] == [2, 4]
    assert [group.start for group in text.joined_in(range(2))] == [0]
    assert text.joined_in(range(6, 6)) == []


def test_what_a_recording_says_of_bytes_is_checked() -> None:
    assert pieces_from({"3": "e697", "x": "00", "4": "zz", "5": 7, "6": "", "7": "e6f"}) == {3: b"\xe6\x97"}
    assert pieces_from(None) == {}
    assert pieces_from([1]) == {}
