"""One head of a recording, with the parts of its queries and keys."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attlas.errors import OutOfRangeError, RecordingError, counted, listed
from attlas.foundation.checks import check_sequence
from attlas.heads.explanation.parts import HeadParts, Names, Part, Side
from attlas.matrix import AttentionMatrix
from attlas.recording.atlas import Atlas, Entry
from attlas.recording.parts import Reader, Stream


class EarlierHead(NamedTuple):
    """An earlier head: its weights, and its values, shape (n, d_v)."""

    A: AttentionMatrix
    values: Tensor

    def weights_of(self, place: int) -> Tensor:
        """Return its weights at one row, shape (n,)."""
        return self.A[place, :]


_NORMS = "parts pass {norms} of the whole stream, with the scales that they had"
_JOINED = "; what was written in front of the norm before is one part"


class Located:
    """One head of a recording.

    Parameters
    ----------
    atlas : Atlas
        The recording.
    layer : int, str or tuple
        As ``atlas[...]`` takes it.
    head : int
        The head, as the model counts it.
    sequence : int
        Which sequence of the batch.
    names : mapping of (int, int) to str
        What heads do.
    norms : int, optional
        How many norms of the whole stream parts pass.
    """

    def __init__(self, atlas: Atlas, layer: Any, head: int, sequence: int, names: Names, norms: int | None) -> None:
        self.atlas, self.head, self.sequence = atlas, head, sequence
        self.entry: Entry = atlas.entry(layer)
        matrix = self.entry.need_matrix()
        if head not in self.entry.heads:
            rule, found = "the head must have been recorded.", f"head {head}; there are {listed(self.entry.heads)}"
            raise OutOfRangeError(rule, found, f"head={self.entry.heads[0]}", layer=self.entry.path)
        check_sequence(sequence, matrix.shape[0])
        self.A: AttentionMatrix = matrix[sequence, self.entry.heads.index(head)]
        self.stream, self.reader = _stream_of(atlas, self.entry)
        self.query = HeadParts(self.stream, self.reader, "query", head, sequence, names, norms)
        self.key = HeadParts(self.stream, self.reader, "key", head, sequence, names, norms)

    @property
    def notes(self) -> tuple[str, ...]:
        """What must be said of the parts: norms of the whole stream that they pass."""
        if not self.key.norms:
            return ()
        joined = self.key.parts[0].kind == "stream"
        return (_NORMS.format(norms=counted(self.key.norms, "norm")) + (_JOINED if joined else ""),)

    def side(self, side: Side) -> HeadParts:
        """Return the parts of the queries, or of the keys."""
        if side in ("query", "key"):
            return self.query if side == "query" else self.key
        raise OutOfRangeError('side must be "query" or "key".', f"side = {side!r}", 'side="key"')

    def places(self, side: str, indices: Sequence[int]) -> Tensor:
        """Return where some queries or keys of the matrix stand among the kept rows."""
        first = self.entry.queries[0] if side == "query" else self.entry.first_key
        device = self.reader.q.weight.device
        return self.stream.places(torch.tensor(indices, device=device, dtype=torch.long) + first)

    def earlier(self, part: Part) -> EarlierHead:
        """Return the head that wrote a part.

        Raises
        ------
        RecordingError
            If the part is no head's, or that head was not recorded with its values.
        """
        rule, fix = (
            "the part must be that of a head whose weights and values were recorded.",
            "attlas.record(model, parts=True)",
        )
        reader = next((r for r in self.stream.readers if r.layer == part.layer), None)
        if part.kind != "head" or reader is None or part.head is None:
            raise RecordingError(rule, f"{part.name}, a part of the kind {part.kind!r}", 'why.sources("head 0·0")')
        entry = self.atlas.entry((reader.name, self.entry.call))
        if entry.values is None or entry.matrix is None or part.head not in entry.heads:
            raise RecordingError(rule, f"no values of {part.name}", fix)
        index = entry.heads.index(part.head)
        values = entry.values[self.sequence, index // (len(entry.heads) // entry.values.shape[1])]
        return EarlierHead(entry.matrix[self.sequence, index], values)


def _stream_of(atlas: Atlas, entry: Entry) -> tuple[Stream, Reader]:
    """Return the stream that an attention reads, and how.

    Raises
    ------
    RecordingError
        If the recording has no parts, or none of this attention.
    """
    if not atlas.parts:
        rule = "the recording must have parts, and this one has none."
        raise RecordingError(rule, "a recording without parts", "attlas.record(model, parts=True)", layer=entry.path)
    found = [(stream, reader) for stream in atlas.parts if (reader := stream.reader(entry.name)) is not None]
    for stream, reader in found:
        if (stream.first, stream.first + stream.count) == entry.queries and (
            len(found) == 1 or found[entry.call][0] is stream
        ):
            return stream, reader
    rule = "parts are recorded of whole texts, for self-attention whose queries and keys are linear in the stream."
    known = listed([reader.name for stream in atlas.parts for reader in stream.readers])
    raise RecordingError(
        rule,
        f"no parts of {entry.name}, call {entry.call}; there are those of {known}",
        "choose such a layer.",
        layer=entry.path,
    )
