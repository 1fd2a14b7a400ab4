"""What is shown: the attentions of an atlas, or one matrix, as entries with heads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attlas.atlas import Atlas, Entry
from attlas.errors import DtypeError, explain, kind
from attlas.indexing import Axes
from attlas.matrix import AttentionMatrix
from attlas.recording.places import first_query_of, is_causal
from attlas.view.pyramid import levels_of
from attlas.view.tokens import Text

__all__ = ["Shown", "Source"]

_PIECES = 64  # of a tensor, of which the key of its content is made
_PIECE = 1024


@dataclass(frozen=True, eq=False)
class Shown:
    """One entry as the viewer shows it."""

    entry: Entry
    matrix: AttentionMatrix | None

    @property
    def info(self) -> dict[str, Any]:
        """Plain facts, without the number of the entry."""
        entry, (batch, _, m, n) = self.entry, self.entry.shape
        problem = None if self.matrix is None else self.matrix.problem
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
            "batch": batch,
            "levels": levels_of(m, n),
            "causal": problem is not None and is_causal(problem.mask),
            "sink": problem is not None and problem.sink is not None,
            "readable": self.matrix is not None,
        }


class Source:
    """Entries, text and spans of what is shown.

    Parameters
    ----------
    shown : Atlas or AttentionMatrix
        A recording, or one matrix of any leading axes: the last of them is the heads, the others the batch.
    tokens : sequence of str, optional
        Text of each token; by default that of the atlas.
    title : str
        Name of the whole.

    Raises
    ------
    DtypeError
        If it is neither.
    """

    def __init__(self, shown: Atlas | AttentionMatrix, *, tokens: Sequence[str] | None = None, title: str = "") -> None:
        if isinstance(shown, AttentionMatrix):
            shown = _atlas_of(shown)
        if not isinstance(shown, Atlas):
            raise DtypeError(
                explain(
                    "Service()",
                    "there must be an atlas or a matrix to show.",
                    {"shown": type(shown).__name__},
                    found=kind(shown),
                    fix='Service(attlas.load("run.atlas")), or Service(attlas.attend(q, k)).',
                )
            )
        self.atlas = shown
        self.title = title or shown.model or "attlas"
        self.entries = [Shown(entry, entry.matrix) for entry in shown.entries]
        self.length = _text_length(shown.entries)
        given = list(tokens) if tokens is not None else list(shown.tokens or ())
        self.text = Text(given)
        self.length = max(self.length, len(given))
        self.key = self._key()

    @property
    def info(self) -> dict[str, Any]:
        """Facts of the whole, without those of the pictures."""
        atlas = self.atlas
        return {
            "key": self.key,
            "title": self.title,
            "model": atlas.model,
            "text_length": self.length,
            "spans": {name: list(span) for name, span in atlas.spans.items()},
            "entries": [{"id": number, **shown.info} for number, shown in enumerate(self.entries)],
        }

    def _key(self) -> str:
        """Return a text that changes with what is shown."""
        total = hashlib.sha256(json.dumps([self.title, self.text.tokens, self.atlas.spans]).encode())
        for shown in self.entries:
            total.update(key_of(shown).encode())
        return total.hexdigest()[:32]


def key_of(shown: Shown) -> str:
    """Return a text that changes with the weights of an entry.

    Notes
    -----
    Made of the sizes, the names of score and mask, the log-sum-exp where it is known, and 64 pieces of 4 kB of
    q and of k: reading them whole would take seconds for a long recording.
    """
    entry = shown.entry
    total = hashlib.sha256(json.dumps([entry.name, entry.path, entry.call, entry.heads, entry.shape]).encode())
    if shown.matrix is not None:
        problem = shown.matrix.problem
        mask = "" if problem.mask is None else problem.mask.name()
        total.update(f"{problem.score!r} {mask} {problem.batch_ids.tolist()} {problem.head_ids.tolist()}".encode())
        for t in (problem.q, problem.k, *(() if problem.sink is None else (problem.sink,))):
            _absorb(total, t)
    for name in sorted(entry.statistics):
        total.update(name.encode())
    return total.hexdigest()


def _absorb(total: Any, t: Tensor) -> None:
    """Let the key depend on dtype, shape and evenly spread pieces of a tensor."""
    total.update(f"{t.dtype} {tuple(t.shape)}".encode())
    rows = t.reshape(-1, t.shape[-1]) if t.is_contiguous() else t.flatten(0, -2)
    count = max(_PIECE // max(t.shape[-1], 1), 1)
    places = torch.linspace(0, max(len(rows) - count, 0), _PIECES).long().unique().tolist() if len(rows) else []
    for place in places:
        piece = rows[place : place + count].detach().cpu().contiguous()
        total.update(piece.view(torch.uint8).numpy().tobytes() if piece.numel() else b"")


def _atlas_of(A: AttentionMatrix) -> Atlas:
    """Return one matrix as an atlas of one entry."""
    A = A.detach()
    m, n = A.shape[-2:]
    problem = A.problem
    whole = AttentionMatrix(problem, A.plan, Axes(tuple(problem.shape[:2]), (True, True)), None)
    if A.ndim and A.shape[:-2] == whole.shape[:-2]:
        whole = A
    first = first_query_of(problem.mask, m, n)
    first = max(first, 0) if first is not None else 0
    heads = tuple(int(head) for head in problem.head_ids)
    entry = Entry("matrix", 0, "self", 0, heads, (first, first + m), 0, problem.shape, whole)
    return Atlas([entry])


def _text_length(entries: Sequence[Entry]) -> int:
    ends = [max(entry.queries[1], entry.first_key + entry.shape[3]) for entry in entries]
    return max(ends, default=0)
