"""What is shown: the attentions of an atlas, or one matrix, as entries with heads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from attlas._compat import cached_property
from attlas.atlas import Atlas, Entry
from attlas.errors import DtypeError, ShapeError, kind
from attlas.indexing import Axes
from attlas.matrix import AttentionMatrix
from attlas.value_weighted import value_weighted
from attlas.view.about import about
from attlas.view.cache import Cache
from attlas.view.exact import Head
from attlas.view.pyramid import levels_of
from attlas.view.tokens import Text, pieces_from

__all__ = ["WEIGHTED", "Place", "Shown", "Source", "Variant"]

_HEADS = 128 << 20  # bytes of log-sum-exp that are kept
_PIECES = 64  # of a tensor, of which the key of its content is made,
_PIECE = 1024  # and numbers of each


Variant: TypeAlias = Literal["plain", "nosink", "value", "output"]
WEIGHTED = ("value", "output")  # variants in which each weight is times the norm of its value


class Place(NamedTuple):
    """Which picture is meant."""

    entry: int
    batch: int
    head: int | Literal["mean"]
    variant: Variant

    @property
    def plain(self) -> Place:
        """The weights themselves."""
        return self._replace(variant="plain")


@dataclass(frozen=True, eq=False)
class Shown:
    """One entry as the viewer shows it: of which recording, and how far its positions are moved."""

    entry: Entry
    atlas: Atlas
    recording: str = ""
    origin: int = 0

    @cached_property
    def levels(self) -> int:
        """How many levels its pictures have."""
        return levels_of(*self.entry.shape[2:])

    @cached_property
    def info(self) -> dict[str, Any]:
        """Plain facts, without the number of the entry."""
        entry, (batch, _, m, n) = self.entry, self.entry.shape
        problem = None if entry.matrix is None else entry.matrix.problem
        return {
            "layer": entry.layer,
            "kind": entry.kind,
            "call": entry.call,
            "name": entry.name,
            "heads": list(entry.heads),
            "m": m,
            "n": n,
            "first_query": entry.queries[0] + self.origin,
            "first_key": entry.first_key + self.origin,
            "origin": self.origin,
            "recording": self.recording,
            "batch": batch,
            "levels": self.levels,
            "causal": problem is not None and problem.mask is not None and problem.mask.is_causal,
            "sink": problem is not None and problem.sink is not None,
            "readable": problem is not None,
            "largest_norms": {name: float(t.max()) for name, t in self.norms.items() if t.numel()},
        }

    @cached_property
    def norms(self) -> dict[str, Tensor]:
        """Norm of the value of each key and head, by the variants of the picture that they make."""
        found = zip(WEIGHTED, (self.entry.value_norms, self.entry.output_norms), strict=True)
        return {} if self.entry.matrix is None else {name: t for name, t in found if t is not None}

    @cached_property
    def key(self) -> str:
        """A text that changes with the weights of the entry.

        Notes
        -----
        Made of the sizes, of score and mask as they print, and of 64 pieces of 1,024 numbers of q, of k and of
        what the score and the mask hold: to read a long recording whole would take seconds.
        """
        entry = self.entry
        total = hashlib.sha256(json.dumps([entry.name, entry.path, entry.call, entry.heads, entry.shape]).encode())
        if entry.matrix is not None:
            problem = entry.matrix.problem
            mask = "" if problem.mask is None else problem.mask.name()
            total.update(f"{problem.score!r} {mask} {problem.batch_ids.tolist()} {problem.head_ids.tolist()}".encode())
            for t in [*(version.tensor for version in problem.versions), *self.norms.values()]:
                _absorb(total, t)
        return total.hexdigest()


class Source:
    """Entries, text and spans of what is shown, and its heads.

    Parameters
    ----------
    shown : Atlas or AttentionMatrix
        A recording, or one matrix; its leading axes are batch and heads as `attend` reads them, one alone is the
        batch.
    tokens : sequence of str, optional
        Text of each token; by default that of the atlas.
    title : str
        Name of the whole; by default that of the model.
    other : Atlas or AttentionMatrix, optional
        What it is compared with, cell by cell. If it read another text, this text comes behind the first one.
    other_title : str
        Name of the other; by default that of its model.

    Raises
    ------
    DtypeError
        If it is neither.
    ShapeError
        If no matrix of the other has the size of one that is shown.
    """

    def __init__(
        self,
        shown: Atlas | AttentionMatrix,
        *,
        tokens: Sequence[str] | None = None,
        title: str = "",
        other: Atlas | AttentionMatrix | None = None,
        other_title: str = "",
    ) -> None:
        if isinstance(shown, AttentionMatrix):
            shown = atlas_of(shown)
        if not isinstance(shown, Atlas):
            raise DtypeError(
                "Service()",
                "there must be an atlas or a matrix to show.",
                {"shown": type(shown).__name__},
                found=kind(shown),
                fix='Service(attlas.load("run.atlas")), or Service(attlas.attend(q, k)).',
            )
        self.atlas = shown
        self.title = title or shown.model or "attlas"
        self.entries = [Shown(entry, shown) for entry in shown.entries]
        texts = list(shown.tokens or ()) if tokens is None else [str(token) for token in tokens]
        pieces = pieces_from(shown.details.get("token_bytes")) if tokens is None else {}
        self.length = max(_length(shown.entries), len(texts))
        if other is not None:
            self._join(atlas_of(other) if isinstance(other, AttentionMatrix) else other, other_title, texts, pieces)
        self.text = Text(texts, pieces)
        self._heads: Cache[Head] = Cache(_HEADS)

    def _join(self, other: Atlas, title: str, texts: list[str], pieces: dict[int, bytes]) -> None:
        """Add the entries of another recording, and its text where it read another one."""
        sizes = {shown.entry.shape[2:] for shown in self.entries}
        if not any(entry.shape[2:] in sizes for entry in other.entries):
            raise ShapeError(
                "view",
                "two recordings are compared cell by cell: both must have read as many tokens.",
                found=f"matrices of {_sizes(sizes)} and of {_sizes({entry.shape[2:] for entry in other.entries})}",
                fix="attlas record --tokens N, with the same N for both",
            )
        title = title or other.model or "other"
        title = f"{title} (2)" if title == self.title else title
        origin = 0
        if list(other.tokens or ()) != texts:
            origin = self.length
            texts += ["" for _ in range(origin - len(texts))]
            texts += other.tokens or ()
            pieces |= {at + origin: piece for at, piece in pieces_from(other.details.get("token_bytes")).items()}
        self.entries += [Shown(entry, other, title, origin) for entry in other.entries]
        self.length = max(self.length, origin + _length(other.entries), len(texts))
        self.title = f"{self.title} ↔ {title}"

    @cached_property
    def key(self) -> str:
        """A text that changes with what is shown."""
        facts = [self.title, self.text.shown, list(self.atlas.spans.items()), sorted(self.atlas.details)]
        total = hashlib.sha256(json.dumps(facts).encode())
        for shown in self.entries:
            total.update(shown.key.encode())
        return total.hexdigest()[:32]

    @cached_property
    def info(self) -> dict[str, Any]:
        """Facts of the whole, without those of the pictures."""
        return {
            "key": self.key,
            "title": self.title,
            "model": self.atlas.model,
            "text_length": self.length,
            "texts": len(self.text),
            "about": about(self.atlas),
            "spans": {name: list(span) for name, span in self.atlas.spans.items()},
            "entries": [{"id": number, **shown.info} for number, shown in enumerate(self.entries)],
            "units": self.units,
        }

    @cached_property
    def units(self) -> dict[str, float]:
        """The largest norm of all values, for each variant that has norms: the weight 1 in codes of its pictures."""
        every = [shown.info["largest_norms"] for shown in self.entries]
        return {
            name: max(norms.get(name, 0.0) for norms in every) or 1.0
            for name in WEIGHTED
            if any(name in norms for norms in every)
        }

    def norms(self, place: Place) -> Tensor | None:
        """Return the norms of the values of a place, shape (1, heads, n); None where it has none."""
        shown = self.entries[place.entry]
        norms = shown.norms.get(place.variant)
        if norms is None:
            return None
        if place.head != "mean":
            head = place.head * norms.shape[1] // shown.entry.shape[1]
            norms = norms[:, head : head + 1]
        return norms[place.batch : place.batch + 1]

    def head(self, place: Place) -> Head | None:
        """Return the matrix of a place; None where only statistics were kept, or no values for a weighted variant."""
        matrix, norms = self.entries[place.entry].entry.matrix, self.norms(place)
        if matrix is None or (norms is None and place.variant in WEIGHTED):
            return None
        found = self._heads.get(place)
        if found is None:
            some = slice(None) if place.head == "mean" else slice(place.head, place.head + 1)
            part = matrix[place.batch : place.batch + 1, some]
            part = part if norms is None else value_weighted(part, norms)
            found = Head(part, skip_first=place.variant == "nosink", unit=self.units.get(place.variant, 1.0))
            self._heads.put(place, found, found.nbytes)
        return found


def atlas_of(A: AttentionMatrix) -> Atlas:
    """Return one matrix as an atlas of one entry, whose leading axes are batch and heads."""
    A = A.detach()
    problem, (m, n) = A.problem, A.shape[-2:]
    axes = Axes((problem.shape[0], problem.shape[1]), (True, True))
    whole = A if A.shape == problem.shape else AttentionMatrix(problem, A.plan, axes)
    first = 0 if problem.mask is None else max(problem.mask.first_query(m, n) or 0, 0)
    heads = tuple(int(head) for head in problem.head_ids)
    return Atlas([Entry("matrix", 0, "self", 0, heads, (first, first + m), 0, problem.shape, whole)])


def _length(entries: Sequence[Entry]) -> int:
    """Return how many places of the text queries and keys stand at."""
    ends = [max(entry.queries[1], entry.first_key + entry.shape[3]) for entry in entries]
    return max(ends, default=0)


def _sizes(sizes: Collection[tuple[int, ...]]) -> str:
    return ", ".join(" × ".join(map(str, size)) for size in sorted(sizes)) or "nothing"


def _absorb(total: Any, t: Tensor) -> None:
    """Let a checksum depend on dtype, shape and evenly spread pieces of a tensor."""
    total.update(f"{t.dtype} {tuple(t.shape)}".encode())
    if not t.numel():
        return
    rows = t.detach().reshape(-1, 1) if t.ndim < 2 else t.detach().flatten(0, -2)
    count = max(_PIECE // rows.shape[-1], 1)
    for place in torch.linspace(0, max(len(rows) - count, 0), _PIECES).long().unique().tolist():
        total.update(rows[place : place + count].cpu().contiguous().view(torch.uint8).numpy().tobytes())
