"""The text that a model reads: the token ids of all passes, put together by the keys that they left in the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from attlas.recording.snapshot import fingerprint

if TYPE_CHECKING:
    from attlas.engine.problem import Problem


class RecordedText:
    """Token ids of a text that a model reads in one or more passes.

    Notes
    -----
    A pass with a cache gets only the new tokens. The keys of the cache tell which tokens are before them, bit for bit:
    a beam may go on from another one, rejected tokens of a draft are cut off, and a cache may be that of a text that
    was not recorded. Where they do not tell, the ids are not known.
    """

    def __init__(self) -> None:
        self.ids: Tensor | None = None  # shape (batch, tokens)
        self._keys: Tensor | None = None  # fingerprints, shape (batch, keys)
        self._first_key = 0  # position of the first of them
        self.begin(None)

    def begin(self, ids: Tensor | None) -> None:
        """Begin a pass with new tokens, shape (batch, new tokens); None where they are not known."""
        self._new_ids = ids
        self._first_new: int | None = None  # position of the first new token; None before an attention is read
        self._continued: Tensor | None = None  # the sequence of the pass before that each sequence goes on from

    def is_about(self, problem: Problem) -> bool:
        """Return whether the queries of an attention may be the new tokens, and not the patches of an image."""
        return self._new_ids is None or self._new_ids.shape == (problem.shape[0], problem.shape[2])

    def read(self, problem: Problem, first_query: int, first_key: int) -> bool:
        """Compare the keys of the first attention of a pass with those of the pass before.

        Parameters
        ----------
        problem : Problem, shape (batch, heads, m, n)
            An attention of the pass; later ones are ignored, and so are those that are not about the new tokens.
        first_query, first_key : int
            Positions in the text of query 0 and of key 0.

        Returns
        -------
        bool
            Whether the sequences do not go on from where each of them was before.
        """
        batch, _, m, _ = problem.shape
        if self._first_new is not None or not self.is_about(problem):
            return False
        keys = fingerprint(problem.k[:, :, : max(first_query + m - first_key, 0)])
        self._first_new, self._continued = first_query, self._continued_by(keys, first_query, first_key)
        stop = None if self._keys is None else self._first_key + self._keys.shape[1]
        self._keys, self._first_key = keys, first_key
        goes_on = self._continued is not None and stop == first_query
        return not (goes_on and torch.equal(self._continued, torch.arange(batch)))  # type: ignore[arg-type]  # not None

    def _continued_by(self, keys: Tensor, first_query: int, first_key: int) -> Tensor | None:
        """Return the sequence of the pass before whose keys each sequence has; None where one has no such keys."""
        old, old_first = self._keys, self._first_key
        if old is None or old_first + old.shape[1] < first_query:
            return None
        start = max(first_key, old_first)
        new = keys[:, start - first_key : max(first_query, start) - first_key]
        old = old[:, start - old_first : max(first_query, start) - old_first]
        if torch.equal(new, old):
            return torch.arange(len(new))
        same = (fingerprint(new[:, None, None]) == fingerprint(old[:, None, None]).mT).cpu()
        # Two sequences may agree in the last keys and not in those that a sliding cache has dropped.
        return same.int().argmax(1) if start == 0 and bool(same.any(1).all()) else None

    def end(self) -> bool:
        """End a pass; return whether the ids do not begin with those of the passes before."""
        before, self.ids = self.ids, self._joined()
        if before is None or self.ids is None:
            return before is not self.ids
        return not torch.equal(self.ids[:, : before.shape[1]], before)

    def _joined(self) -> Tensor | None:
        """Return the ids of the whole text, those of earlier passes and the new ones; None if not all are known."""
        if not self._first_new or self._new_ids is None:  # the text begins with this pass, or no attention was read
            return self._new_ids
        if self.ids is None or self._continued is None or self.ids.shape[1] < self._first_new:
            return None
        return torch.cat([self.ids[self._continued, : self._first_new], self._new_ids], dim=1)
