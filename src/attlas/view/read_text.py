"""Texts that a model is given to read: what may be typed, and what is kept of one that was read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from attlas.recording.atlas import Atlas
from attlas.view.parameters import QuestionError
from attlas.view.service import Service

MOST_CHARACTERS = 200_000  # of a text, at most
_NAME = 40  # characters of a text that name it


@dataclass
class ReadText:
    """A text that was read, its recording, its token ids, and the likeliest next token where the model generates."""

    service: Service
    name: str
    text: str = ""
    ids: list[int] = field(default_factory=list)
    next_token: int | None = None


def check_text(text: Any) -> str:
    """Return a text of the user; raise a QuestionError where it is empty or too long."""
    if not isinstance(text, str) or not text.strip():
        raise QuestionError(400, "type a text first")
    if len(text) > MOST_CHARACTERS:
        raise QuestionError(400, f"the text has {len(text):,} characters; at most {MOST_CHARACTERS:,} are read")
    return text


def first_words(text: str) -> str:
    """Return the first words of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= _NAME else f"{line[: _NAME - 1].rstrip()}…"


def token_ids(atlas: Atlas) -> list[int]:
    """Return the token ids of a recording of one text; none where it has more texts or no ids."""
    return [] if atlas.ids is None or atlas.ids.ndim != 2 or len(atlas.ids) != 1 else list(map(int, atlas.ids[0]))
