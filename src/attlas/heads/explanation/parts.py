"""Queries and keys of one head as sums of parts: what each layer wrote, behind norms with the scales that they had."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from attlas.recording.parts import Reader, Stream, Write

Side = Literal["query", "key"]
Names: TypeAlias = Mapping[tuple[int, int], str]  # of heads, by layer and head: "previous token"
Factors: TypeAlias = tuple[Tensor, ...]  # of each row, each (batch, n)


@dataclass(frozen=True)
class Part:
    """One part of queries and keys.

    Parameters
    ----------
    name : str
        What a person reads: ``"token"``, ``"position"``, ``"head 0·0"``, ``"MLP 0"``, ``"bias of k"``.
    kind : str
        "token", "position", "embedding", "head", "cross head", "attention", "MLP", "mixer", "bias", "stream", "other",
        or "score" for what the score adds by itself, such as ALiBi.
    layer : int, optional
        Layer that wrote it; None for what no layer wrote.
    head : int, optional
        Head that wrote it.
    role : str
        What that head does, where it was named: ``"previous token"``.

    Examples
    --------
    >>> from attlas.heads import Part
    >>> print(Part("head 0·0", "head", 0, 0, "previous token"))
    head 0·0 (previous token)
    """

    name: str
    kind: str
    layer: int | None = None
    head: int | None = None
    role: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.role})" if self.role else self.name


class Piece(NamedTuple):
    """One write as a map to queries or keys: its rows times `weight`, times the factors of each row."""

    write: Write
    weight: Tensor  # (size, d)
    factors: Factors
    first: int = 0  # index of its first part


class Bias(NamedTuple):
    """What is the same in all rows, but for factors of each: a bias of an output projection, or of a norm."""

    vector: Tensor  # (d,)
    factors: Factors


class Walked(NamedTuple):
    """What a way back through a stream has found.

    `joined` is what was written in front of the last norm that parts pass: one part, called `name`.
    """

    pieces: list[Piece]
    biases: list[Bias]
    joined: list[Piece | Bias]
    norms: int
    name: str


def _walked(writes: Sequence[Write], weight: Tensor, factors: Factors, most: int | None) -> Walked:
    """Go back through what was written to a stream, with the map and the factors of what is written there.

    `most` is how many norms of the whole stream parts pass; None for all.
    """
    found: list[Piece | Bias] = []
    joined: list[Piece | Bias] = []
    norms, name = 0, ""
    for place in reversed(range(len(writes))):
        write = writes[place]
        inner, own = weight * write.scale, factors
        if write.norm is not None:
            if write.norm.bias is not None:
                (joined if name else found).append(Bias(write.norm.bias.to(weight) @ inner, own))
            inner, own = write.norm.folded(inner), (*own, write.norm.factors)
        if write.x is None:
            weight, factors = inner, own
            if norms == most and not name:
                # This norm is the one that is not passed: what it gave is one part, its bias included.
                name = f"stream in front of {writes[place + 1].name}" if place + 1 < len(writes) else "stream"
                if write.norm is not None and write.norm.bias is not None:
                    joined.append(found.pop())
            norms += not name
            continue
        if write.bias is not None:
            (joined if name else found).append(Bias(write.bias.to(weight) @ inner, own))
        (joined if name else found).append(Piece(write, inner, own))
    pieces = [one for one in reversed(found) if isinstance(one, Piece)]
    return Walked(pieces, [one for one in found if isinstance(one, Bias)], joined, norms, name)


class HeadParts:
    """The parts of the queries, or of the keys, of one head.

    Parameters
    ----------
    stream : Stream
        The residual stream.
    reader : Reader
        How the attention reads it.
    side : {"query", "key"}
        Which of the two.
    head : int
        Number of the query head.
    sequence : int
        Which sequence of the batch.
    names : mapping of (int, int) to str
        What heads do.
    norms : int, optional
        How many norms of the whole stream parts pass, back from the attention; None for all.

    Attributes
    ----------
    parts : tuple of Part
        In the order in which they were written; at last biases of the stream, and the bias of q or k.

    Notes
    -----
    A part costs n · d numbers: a head of d_v coordinates passes its output projection and W_q or W_k as one map of
    d_v × d. Nothing of the size of the stream is made for it.
    """

    def __init__(
        self, stream: Stream, reader: Reader, side: Side, head: int, sequence: int, names: Names, norms: int | None
    ) -> None:
        self.reader, self.sequence, self.side = reader, sequence, side
        projection = reader.q if side == "query" else reader.k
        own = head if side == "query" else head // (len(reader.q.channels) // len(projection.channels))
        weight, self._own = projection.of_head(own, _wide(projection.weight.dtype))
        self._added, scales, self.dtype = projection.added(own), projection.factors(own), weight.dtype
        self._scales: Factors = () if scales is None else (scales,)
        factors: Factors = ()
        if reader.norm is not None:
            if reader.norm.bias is not None:
                self._own = self._own + reader.norm.bias.to(weight) @ weight
            weight, factors = reader.norm.folded(weight), (reader.norm.factors,)
        self._has_own = bool(self._own.any()) or self._added is not None
        walked = _walked(stream.writes[: reader.count], weight, factors, norms)
        self.norms, self._biases, self._joined = walked.norms, walked.biases, walked.joined
        self._pieces: list[Piece] = []
        parts = [Part(walked.name, "stream")] if walked.joined else []
        for piece in walked.pieces:
            self._pieces.append(piece._replace(first=len(parts)))
            parts += _parts_of(piece.write, names)
        parts += [Part("biases", "bias")] if self._biases else []
        letter = "q" if side == "query" else "k"
        parts += [Part(f"bias of {letter}", "bias", reader.layer)] if self._has_own else []
        self.parts = tuple(parts)

    def __len__(self) -> int:
        return len(self.parts)

    def at(self, places: Tensor | slice) -> Tensor:
        """Return all parts at some of the kept rows, shape (parts, rows, d)."""
        return torch.cat([x for _, x in self.each(places)])

    def each(self, places: Tensor | slice = slice(None), *, turned: bool = True) -> Iterator[tuple[int, Tensor]]:
        """Yield the parts of each write at some rows, (parts, rows, d), with the index of the first; in their order."""
        if self._joined:
            yield 0, self._finished(self._sum(self._joined, places), places, turned=turned)
        for piece in self._pieces:
            yield piece.first, self._finished(self._of_piece(piece, places), places, turned=turned)
        last = len(self.parts) - bool(self._biases) - self._has_own
        if self._biases:
            yield last, self._finished(self._sum(self._biases, places), places, turned=turned)
        if self._has_own:
            own = self._scaled(self._own.expand(1, self._rows(places), -1), self._scales, places)
            own = own if self._added is None else own + self._added.to(own)
            yield len(self.parts) - 1, self._turned(own, places) if turned else own

    def _sum(self, terms: Sequence[Piece | Bias], places: Tensor | slice) -> Tensor:
        """Return the sum of pieces and biases at some rows, shape (1, rows, d)."""
        total: Tensor | float = 0.0
        for term in terms:
            if isinstance(term, Bias):
                own = self._scaled(term.vector.expand(1, self._rows(places), -1), term.factors, places)
            else:
                own = self._of_piece(term, places).sum(0, keepdim=True)
            total = total + own
        return torch.as_tensor(total)

    def one(self, index: int, places: Tensor | slice = slice(None)) -> Tensor:
        """Return one part at some rows, shape (rows, d)."""
        for piece in self._pieces:
            if piece.first <= index < piece.first + max(piece.write.heads, 1):
                some = slice(index - piece.first, index - piece.first + 1) if piece.write.heads else None
                return self._finished(self._of_piece(piece, places, some), places)[0]
        return next(x[0] for first, x in self.each(places) if first == index)

    def of_values(self, index: int, place: int) -> Tensor:
        """Return the map from what a head pooled at one row to its part there, shape (d_v, d)."""
        piece = next(p for p in self._pieces if p.first <= index < p.first + p.write.heads)
        outputs = self._outputs(piece, slice(index - piece.first, index - piece.first + 1))[0]
        at = torch.tensor([place], device=outputs.device)
        return self._finished(outputs.unsqueeze(1) * self._factor(piece.factors, at).unsqueeze(-1), at)[:, 0]

    def _of_piece(self, piece: Piece, places: Tensor | slice, some: slice | None = None) -> Tensor:
        """Return the parts of one write at some rows, (parts, rows, d): of all heads, or of some."""
        write = piece.write
        x = write.x[self.sequence, places].to(piece.weight)  # type: ignore[index]  # a piece has rows
        if write.weight is None or not write.heads:
            return self._scaled((x @ piece.weight).unsqueeze(0), piece.factors, places)
        heads = x.unflatten(-1, (write.heads, -1)).transpose(0, 1)  # (heads, rows, d_v)
        heads = heads if some is None else heads[some]
        if heads.shape[1] < heads.shape[2]:  # few rows: through the stream
            out = torch.bmm(heads, self._output(write, some).to(x)) @ piece.weight
        else:
            out = torch.bmm(heads, self._outputs(piece, some))
        return self._scaled(out, piece.factors, places)

    @staticmethod
    def _output(write: Write, some: slice | None) -> Tensor:
        """Return the output projection of each head, (heads, d_v, size)."""
        weight = write.weight.mT.unflatten(0, (write.heads, -1))  # type: ignore[union-attr]  # heads have one
        return weight if some is None else weight[some]

    def _outputs(self, piece: Piece, some: slice | None) -> Tensor:
        """Return the map of each head from what it pooled to queries or keys, (heads, d_v, d)."""
        return self._output(piece.write, some).to(piece.weight) @ piece.weight

    def _rows(self, places: Tensor | slice) -> int:
        """Return the number of some rows."""
        if isinstance(places, Tensor):
            return len(places)
        x = next(piece.write.x for piece in (*self._pieces, *self._joined) if isinstance(piece, Piece))
        return len(range(*places.indices(x.shape[1])))  # type: ignore[union-attr]  # a piece has rows

    def _factor(self, factors: Factors, places: Tensor | slice) -> Tensor:
        """Return the product of the factors of some rows, shape (rows,)."""
        return torch.as_tensor(prod([f[self.sequence, places].to(self.dtype) for f in factors]))

    def _scaled(self, x: Tensor, factors: Factors, places: Tensor | slice) -> Tensor:
        """Return rows (..., rows, d) times the factors of each row."""
        return x * self._factor(factors, places).unsqueeze(-1) if factors else x

    def _finished(self, x: Tensor, places: Tensor | slice, *, turned: bool = True) -> Tensor:
        """Return parts behind the norm of the head and the rotation."""
        x = self._scaled(x, self._scales, places)
        return self._turned(x, places) if turned else x

    def _turned(self, x: Tensor, places: Tensor | slice) -> Tensor:
        """Return parts (parts, rows, d) behind the rotation."""
        rotation = self.reader.rotation
        return x if rotation is None else rotation.turned(x, rotation.turns[self.sequence, places])


def _parts_of(write: Write, names: Names) -> list[Part]:
    """Return the parts that one write makes."""
    layer = None if write.layer < 0 else write.layer
    if not write.heads:
        return [Part(write.name, write.kind, layer)]
    every = range(write.heads)
    return [Part(f"{write.name}·{h}", write.kind, layer, h, names.get((write.layer, h), "")) for h in every]


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which parts are computed: at least float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32
