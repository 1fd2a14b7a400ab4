"""What is shown: the attentions of an atlas, or one matrix, as entries with heads."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import islice, zip_longest
from typing import Any, Literal, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor

from attlas.errors import DtypeError, ShapeError, kind
from attlas.foundation.compat import cached_property
from attlas.matrix import AttentionMatrix
from attlas.matrix.value_weighted import value_weighted
from attlas.recording.atlas import Atlas, Entry
from attlas.recording.metadata import token_texts
from attlas.view.about import about
from attlas.view.blocks import Sizes
from attlas.view.cache import Cache
from attlas.view.exact import Head
from attlas.view.images import ShownImages
from attlas.view.pyramid import levels_of
from attlas.view.rolled import RolledEntry, RolloutWeights, rolled_entry
from attlas.view.tokens import Text, pieces_from

_LSE_BYTES = 128 << 20  # bytes of log-sum-exp that are kept
_PIECES_OF_KEY = 64  # of a tensor, of which the key of its content is made,
_NUMBERS_OF_PIECE = 1024  # and numbers of each
_MOST_EXACT_CELLS = 1 << 22  # cells up to which the largest weight is found among all of them,
_SAMPLED_ROWS = 16  # and otherwise in so many rows


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
    """One entry as the viewer shows it: of which recording, and which texts the queries and keys of each sequence are.

    Texts are numbers of `Source.texts`, None where the text is not known.
    """

    entry: Entry
    atlas: Atlas
    texts: tuple[tuple[int | None, int | None], ...]
    recording: str = ""
    grids: tuple[int, ...] = ()  # numbers of the pictures among its keys

    @cached_property
    def levels(self) -> int:
        """How many levels its pictures have."""
        return levels_of(*self.entry.shape[2:])

    @cached_property
    def info(self) -> dict[str, Any]:
        """Plain facts, without the number of the entry."""
        entry, (batch, _, m, n) = self.entry, self.entry.shape
        weights = None if entry.matrix is None else entry.matrix.weights
        softmax = None if weights is None else weights.softmax
        return {
            "layer": entry.layer,
            "kind": entry.kind,
            "call": entry.call,
            "name": entry.name,
            "heads": list(entry.heads),
            "m": m,
            "n": n,
            "first_query": entry.queries[0],
            "first_key": entry.first_key,
            "texts": self.texts,
            "spans": self.sides_with_spans,
            "recording": self.recording,
            "batch": batch,
            "levels": self.levels,
            "causal": weights is not None and weights.mask is not None and weights.mask.is_causal,
            "softmax": softmax is not None,
            "shares": self.are_shares,
            "signed": self.are_signed,
            "largest": self.largest,
            "sink": softmax is not None and softmax.problem.sink is not None,
            "readable": weights is not None,
            "largest_norms": {name: float(t.max()) for name, t in self.norms.items() if t.numel()},
            "grids": self.grids,
            "parts": self.has_parts,
        }

    @property
    def has_parts(self) -> bool:
        """Whether what its queries and keys are made of was recorded."""
        return any(stream.reader(self.entry.name) is not None for stream in self.atlas.parts)

    @cached_property
    def are_signed(self) -> bool:
        """Whether a weight may be negative; of statistics alone, whether one of them is."""
        if self.entry.matrix is not None:
            return self.entry.matrix.weights.are_signed
        return any(bool((t < 0).any()) for t in self._recorded_weights)

    @cached_property
    def are_shares(self) -> bool:
        """Whether its weights are shares of their rows: from 0 to 1, with an entropy."""
        if self.entry.matrix is not None:
            return self.entry.matrix.weights.are_shares
        return not self.are_signed and all(bool((t <= 1.001).all()) for t in self._recorded_weights)

    @cached_property
    def largest(self) -> dict[str, float]:
        """A size that is typical of the largest weights, by variants; empty for shares.

        Notes
        -----
        It is that of the largest weight where there are up to 4 million cells, and of 16 rows otherwise.
        """
        if self.are_shares:
            return {}
        matrix, (_, _, m, n) = self.entry.matrix, self.entry.shape
        if matrix is None or 0 in (m, n):
            sizes = [t.abs().max() for t in self._recorded_weights if t.numel()]
        elif math.prod(self.entry.shape) <= _MOST_EXACT_CELLS:
            sizes = [t.abs().max() for t in matrix.collect(Sizes())[0]]
        else:
            rows = torch.linspace(0, m - 1, _SAMPLED_ROWS).long().unique()
            sizes = [matrix.window(range(row, row + 1)).to_dense(limit=None).abs().max() for row in rows.tolist()]
        most = max((float(size) for size in sizes), default=0.0)
        return {"plain": most if math.isfinite(most) and most > 0 else 1.0}

    @cached_property
    def _recorded_weights(self) -> list[Tensor]:
        """The recorded weights of an entry without a matrix: a picture, and the largest of each query."""
        picture, top = (self.entry.statistics.get(name) for name in ("picture", "top_k"))
        found = [] if top is None else [top.values]
        return [*found, picture.nan_to_num()] if isinstance(picture, Tensor) else found

    @property
    def sides_with_spans(self) -> list[str]:
        """The axes whose positions are those of the named stretches of the recording."""
        named = not self.recording and self.atlas.has_text(self.entry)
        return (["query"] if self.entry.kind == "cross" else ["query", "key"]) if named else []

    @cached_property
    def norms(self) -> dict[str, Tensor]:
        """Norm of the value of each key and head, by the variants of the picture that they make."""
        found = zip(WEIGHTED, (self.entry.value_norms, self.entry.output_norms), strict=True)
        matrix = self.entry.matrix  # weights that are no softmax are shown as they are
        is_softmax = matrix is not None and matrix.weights.softmax is not None
        return {name: t for name, t in found if t is not None} if is_softmax else {}

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
            weights = entry.matrix.weights
            ids = f"{weights.batch_ids.tolist()} {weights.head_ids.tolist()}"
            if weights.softmax is None:
                tensors, text = weights.inputs, weights.description
            else:
                problem = weights.softmax.problem
                tensors = [version.tensor for version in problem.versions]
                text = f"{problem.score!r} {'' if problem.mask is None else problem.mask.name()}"
            total.update(f"{text} {ids}".encode())
            for t in [*tensors, *self.norms.values()]:
                _absorb_tensor(total, t)
        return total.hexdigest()


class Source:
    """Entries, texts and spans of what is shown, and its heads.

    Parameters
    ----------
    shown : Atlas or AttentionMatrix
        A recording, or one matrix; its leading axes are batch and heads as `attend` reads them, one alone is the
        batch.
    tokens : sequence of str, or of such, optional
        Text of each token of sequence 0, or a list for each sequence; by default those of the atlas. A pair of such for
        a matrix whose queries are not among its keys: m is not n, and the mask names no position.
    title : str
        Name of the whole; by default that of the model.
    other : Atlas or AttentionMatrix, optional
        What it is compared with, cell by cell.
    other_title : str
        Name of the other; by default that of its model.

    Raises
    ------
    DtypeError
        If it is neither.
    ShapeError
        If no matrix of the other has the size of one that is shown, or `tokens` are those of one text and the queries
        and keys of the matrix are of two.
    """

    def __init__(
        self,
        shown: Atlas | AttentionMatrix,
        *,
        tokens: Sequence[str] | Sequence[Sequence[str]] | None = None,
        title: str = "",
        other: Atlas | AttentionMatrix | None = None,
        other_title: str = "",
    ) -> None:
        if isinstance(shown, AttentionMatrix):
            if tokens is not None and _has_two_texts(shown):
                shown, tokens = _with_two_texts(shown, tokens)
            else:
                shown = atlas_of(shown)
        if not isinstance(shown, Atlas):
            rule = "there must be an atlas or a matrix to show."
            fix = 'Service(attlas.load("run.atlas")), or Service(attlas.attend(q, k)).'
            raise DtypeError(rule, kind(shown), fix, shown=type(shown).__name__, where="Service()")
        self.atlas = shown
        self.title = title or shown.model or _title_by_size(shown)
        self.first_title = self.title
        self.texts: list[Text] = []
        self.entries: list[Shown] = []
        self.images = ShownImages(shown)
        self._heads: Cache[Head] = Cache(_LSE_BYTES)
        self.no_rollout: list[str] | None = None  # why the first recording has none, a sentence and its values
        self._add_recording(shown, None if tokens is None else token_texts(list(tokens), None))
        if other is not None:
            self._join_recording(atlas_of(other) if isinstance(other, AttentionMatrix) else other, other_title)
        ends = [
            max(each.queries[1], each.first_key + each.shape[3]) for each in (shown.entry for shown in self.entries)
        ]
        self.length = max([*ends, *map(len, self.texts)], default=0)

    def _add_recording(self, atlas: Atlas, tokens: list[list[str]] | None = None, recording: str = "") -> None:
        """Add the entries of a recording and its texts; the user may have given `tokens` of each sequence instead."""
        named = atlas
        if tokens is not None:
            named = copy(atlas)
            named.texts, named.details = tokens, {**atlas.details, "token_bytes": None}
        known: dict[int, int] = {}  # numbers of the texts by the identity of their lists
        for sequence, text in enumerate(named.texts or ()):
            known[id(text)] = self._number_of_text(Text(text, pieces_from(named.details.get("token_bytes"), sequence)))
        for text in named.encoder_texts or ():
            known[id(text)] = self._number_of_text(Text(text))
        for entry in atlas.entries:
            sides = ([known[id(text)] for text in texts or ()] for texts in named.texts_of(entry))
            # The texts of the query and of the key of each sequence; None where there is no text.
            each = islice(zip_longest(*sides, [None] * entry.shape[0]), entry.shape[0])
            grids = () if recording else tuple(self.images.of(entry))
            self.entries.append(Shown(entry, atlas, tuple((query, key) for query, key, _ in each), recording, grids))
        self._add_rollout(atlas, recording)

    def _add_rollout(self, atlas: Atlas, recording: str) -> None:
        """Add the rollouts of a recording behind its layers, or note why there are none."""
        numbers = {id(shown.entry): number for number, shown in enumerate(self.entries)}

        def mean_of_heads(entry: Entry, batch: int) -> Head:
            """Return the mean over the heads of an entry, of which the matrix was kept."""
            return cast(Head, self.head(Place(numbers[id(entry)], batch, "mean", "plain")))

        rolled = rolled_entry(atlas, mean_of_heads)
        if isinstance(rolled, RolledEntry):
            like = next(shown for shown in self.entries if shown.entry.layer in rolled.heads and shown.atlas is atlas)
            self.entries.append(replace(like, entry=rolled))
        elif not recording:
            self.no_rollout = rolled

    def close(self) -> None:
        """Let no rollout be computed any more."""
        for shown in self.entries:
            if isinstance(shown.entry, RolledEntry):
                shown.entry.close()

    def _number_of_text(self, text: Text) -> int:
        """Return the number of a text, which equal texts share."""
        for number, other in enumerate(self.texts):
            if (other.shown, other.joined) == (text.shown, text.joined):
                return number
        self.texts.append(text)
        return len(self.texts) - 1

    def _join_recording(self, other: Atlas, title: str) -> None:
        """Add the entries of another recording, which are compared with those of the first."""
        sizes = {shown.entry.shape[2:] for shown in self.entries}
        if not any(entry.shape[2:] in sizes for entry in other.entries):
            rule = "two recordings are compared cell by cell: both must have read as many tokens."
            found = (
                f"matrices of {_sizes_in_words(sizes)} and of "
                f"{_sizes_in_words({entry.shape[2:] for entry in other.entries})}"
            )
            raise ShapeError(rule, found, "attlas record --tokens N, with the same N for both", where="view")
        title = title or other.model or "other"
        title = f"{title} (2)" if title == self.title else title
        self._add_recording(other, recording=title)
        self.title = f"{self.title} ↔ {title}"

    @cached_property
    def key(self) -> str:
        """A text that changes with what is shown."""
        facts = [
            self.title,
            [text.shown for text in self.texts],
            list(self.atlas.spans.items()),
            sorted(self.atlas.details),
        ]
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
            "first_title": self.first_title,
            "model": self.atlas.model,
            "text_length": self.length,
            "texts": [len(text) for text in self.texts],
            "about": about(self.atlas),
            "spans": {name: list(span) for name, span in self.atlas.spans.items()},
            "entries": [{"id": number, **shown.info} for number, shown in enumerate(self.entries)],
            "units": self.units,
            "pictures": self.images.pictures,
            "grids": self.images.listed,
            "no_rollout": self.no_rollout,
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

    def unit(self, place: Place) -> float:
        """Return what pictures of a place divide its weights by."""
        return self.entries[place.entry].largest.get(place.variant, self.units.get(place.variant, 1.0))

    def norms(self, place: Place) -> Tensor | None:
        """Return the norms of the values of a place, shape (1, heads, n); None where it has none."""
        shown = self.entries[place.entry]
        norms = shown.norms.get(place.variant)
        if norms is None:
            return None
        if place.head != "mean":
            head = place.head * norms.shape[1] // shown.entry.shape[1]  # several heads may share the values of one
            norms = norms[:, head : head + 1]
        return norms[place.batch : place.batch + 1]

    def head(self, place: Place) -> Head | None:
        """Return the matrix of a place; None where only statistics were kept, or where it has no such variant."""
        matrix, norms = self.entries[place.entry].entry.matrix, self.norms(place)
        if matrix is None or (norms is None and place.variant in WEIGHTED):
            return None
        if place.variant == "nosink" and matrix.weights.softmax is None:
            return None
        found = self._heads.get(place)
        if found is None:
            some = slice(None) if place.head == "mean" else slice(place.head, place.head + 1)
            part = matrix[place.batch : place.batch + 1, some]
            part = part if norms is None else value_weighted(part, norms)
            skips, shares = place.variant == "nosink", self.entries[place.entry].are_shares
            found = Head(part, skip_first=skips, unit=self.unit(place), shares=shares)
            if isinstance(part.weights, RolloutWeights):
                found.preparation = part.weights.preparation()
            self._heads.put(place, found, found.nbytes)
        return found


def atlas_of(A: AttentionMatrix) -> Atlas:
    """Return one matrix as an atlas of one entry, whose leading axes are batch and heads."""
    A = A.detach()
    weights, (m, n) = A.weights, A.shape[-2:]
    whole = A if A.shape == weights.shape else AttentionMatrix(weights)
    first = 0 if A.mask is None else max(A.mask.first_query(m, n) or 0, 0)
    heads = tuple(int(head) for head in weights.head_ids)
    queries = first, first + m
    place: dict[str, Any] = {"layer": 0, "kind": "self", "call": 0, "first_key": 0}
    return Atlas([Entry("matrix", heads=heads, queries=queries, shape=weights.shape, matrix=whole, **place)])


def _has_two_texts(A: AttentionMatrix) -> bool:
    """Return whether the queries of a matrix are not known to be some of its keys."""
    (m, n), mask = A.shape[-2:], A.mask
    return m != n and (mask is None or mask.first_query(m, n) is None)


def _with_two_texts(A: AttentionMatrix, tokens: Any) -> tuple[Atlas, list[list[str]]]:
    """Return the atlas of a matrix with the texts of its keys, and the texts of its queries."""
    atlas = atlas_of(A)
    batch, _, m, n = atlas.entries[0].shape
    texts = [token_texts(list(side), None) or [] for side in tokens if not isinstance(side, str)]
    if [[len(text) for text in side] for side in texts] != [[m] * batch, [n] * batch]:
        rule = "queries and keys of two texts need the tokens of both, for each sequence."
        given = {"A": f"{m} queries × {n} keys, and no mask that says which of the keys the queries are"}
        fix = "tokens=(queries, keys); or mask=attlas.Causal() in attend, if the queries are the last of the keys."
        raise ShapeError(rule, f"a list of {len(tokens)}", fix, arguments=given, where="view")
    atlas.entries[0] = replace(atlas.entries[0], kind="cross")
    atlas.encoder_texts = texts[1]
    return atlas, texts[0]


def _sizes_in_words(sizes: Collection[tuple[int, ...]]) -> str:
    return ", ".join(" × ".join(map(str, size)) for size in sorted(sizes)) or "nothing"


def _title_by_size(atlas: Atlas) -> str:
    """Return the size of the largest matrix, which names what has no other name."""
    sizes = [entry.shape[2:] for entry in atlas.entries]
    return " × ".join(f"{size:,}" for size in max(sizes)) if sizes else "attlas"


def _absorb_tensor(total: Any, t: Tensor) -> None:
    """Let a checksum depend on dtype, shape and evenly spread pieces of a tensor."""
    total.update(f"{t.dtype} {tuple(t.shape)}".encode())
    if not t.numel():
        return
    rows = t.detach().reshape(-1, 1) if t.ndim < 2 else t.detach().flatten(0, -2)
    count = max(_NUMBERS_OF_PIECE // rows.shape[-1], 1)
    for place in torch.linspace(0, max(len(rows) - count, 0), _PIECES_OF_KEY).long().unique().tolist():
        total.update(rows[place : place + count].cpu().contiguous().view(torch.uint8).numpy().tobytes())
