"""Parts of the texts that are typed, for Why?: recorded where the recording that is shown first has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import nn

from attlas.errors import AttlasError, RecordingError
from attlas.recording import Recording, record
from attlas.recording.atlas import Atlas
from attlas.recording.atlas.streams import row_tensors
from attlas.view.about import bytes_in_words

Reason = list[str]  # a text that the page translates, and its values
Output = TypeVar("Output")

MOST_BYTES = 1 << 30  # of the parts of all typed texts
OPENED_WITHOUT = "the recording that this viewer was opened with has no parts; attlas record --parts keeps them"
UNKNOWN = "the parts of this model are not known: {0}"
TOO_LARGE = "the parts of this text would take {0}; at most {1} are kept"
FAILED = "its parts could not be recorded: {0}"
MADE_ROOM = "its parts made room for those of later texts; read it again"


class TypedParts:
    """Record typed texts, with parts where they are known and fit into a bound of memory.

    Parameters
    ----------
    first : Atlas
        The recording that is shown first: where it has parts, texts are recorded with parts too.
    """

    def __init__(self, first: Atlas) -> None:
        self._is_wanted = bool(first.parts)
        self._bytes_per_token = _bytes_per_token(first)
        self._unknown: Reason | None = None  # why the model has no parts, once that was tried
        self._reasons: WeakKeyDictionary[Atlas, Reason] = WeakKeyDictionary()  # why a text has no parts
        self._sizes: WeakKeyDictionary[Atlas, int] = WeakKeyDictionary()  # bytes of parts, the oldest text first

    def record(
        self, model: nn.Module, count: int, run: Callable[[], Output], **options: Any
    ) -> tuple[Recording, Output]:
        """Return the recording of a pass of `count` tokens, with parts where that can be, and what `run` returned.

        Where parts are refused, the model runs again without them.
        """
        reason, is_unknown = self._refusal(count), False
        if reason is None:
            self._make_room(self._bytes_per_token * count)
            try:
                recording = record(model, parts=True, **options)
                with recording as atlas:
                    output = run()
            except (AttlasError, RuntimeError, MemoryError) as failed:  # the pass without parts says what else is wrong
                reason, is_unknown = _reason_of(failed), isinstance(failed, RecordingError)
            else:
                self._bytes_per_token, self._sizes[atlas] = _bytes_per_token(atlas), _bytes_of_parts(atlas)
                return recording, output
        recording = record(model, values="norms", **options)
        with recording as atlas:
            output = run()
        self._reasons[atlas] = reason
        self._unknown = reason if is_unknown else self._unknown
        return recording, output

    def may_grow(self, atlas: Atlas, count: int) -> bool:
        """Return whether a text may grow to `count` tokens as it was recorded: its parts, if it has any, still fit.

        The parts of the texts that were read first make room.
        """
        if atlas not in self._sizes:
            return True
        if self._refusal(count) is not None:
            return False
        self._make_room(self._bytes_per_token * count - self._sizes[atlas], grows=atlas)
        return True

    def grown(self, before: Atlas, after: Atlas) -> None:
        """Note that a text goes on in another atlas: with parts, or without for the same reason."""
        if before in self._sizes:
            self._sizes[after] = _bytes_of_parts(after)
        elif before in self._reasons:
            self._reasons[after] = self._reasons[before]

    def release(self, atlas: Atlas) -> None:
        """Forget the parts of a text."""
        if self._sizes.pop(atlas, None) is not None:
            atlas.parts = []
            self._reasons[atlas] = [MADE_ROOM]

    def reason(self, atlas: Atlas) -> Reason | None:
        """Return why a typed text has no parts; None where it has them, and for the recording that is shown first."""
        return self._reasons.get(atlas)

    def facts(self, atlas: Atlas) -> dict[str, Any] | None:
        """Return what the page says of the parts of a text; None where texts are read without."""
        if not self._is_wanted:
            return None
        facts: dict[str, Any] = {"per_token": self._bytes_per_token, "most": MOST_BYTES}
        return facts | {"bytes": self._sizes.get(atlas, 0), "reason": self.reason(atlas)}

    def _refusal(self, count: int) -> Reason | None:
        """Return why a text of `count` tokens is read without parts; None where it is read with them."""
        if not self._is_wanted:
            return [OPENED_WITHOUT]
        size = self._bytes_per_token * count
        if self._unknown is None and size > MOST_BYTES:
            return [TOO_LARGE, bytes_in_words(size), bytes_in_words(MOST_BYTES)]
        return self._unknown

    def _make_room(self, size: int, grows: Atlas | None = None) -> None:
        """Forget the parts of the texts that were read first, but for one that `grows`, until `size` more bytes fit."""
        for atlas in list(self._sizes):
            if sum(self._sizes.values()) + size <= MOST_BYTES:
                return
            if atlas is not grows:
                self.release(atlas)


def _reason_of(failed: Exception) -> Reason:
    """Return why a pass gave no parts: the layout of the model is not known, or what else failed."""
    found = failed.found if isinstance(failed, AttlasError) else ""
    line = (found or str(failed) or type(failed).__name__).strip().partition("\n")[0]
    return [UNKNOWN if isinstance(failed, RecordingError) else FAILED, line]


def _bytes_of_parts(atlas: Atlas) -> int:
    """Return the bytes of the rows of the streams that a recording keeps for explanations."""
    return sum({t.data_ptr(): t.nbytes for stream in atlas.parts for t in row_tensors(stream)}.values())


def _bytes_per_token(atlas: Atlas) -> int:
    """Return the bytes of parts that a recording keeps for each token."""
    rows = sum(stream.count if stream.rows is None else len(stream.rows) for stream in atlas.parts)
    return -(-_bytes_of_parts(atlas) // max(rows, 1))
