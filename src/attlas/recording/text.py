"""The text that a model reads: the token ids of all passes, put together by the keys that they left in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attlas.foundation.devices import to_device
from attlas.recording.snapshot import answers_later, fingerprint

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
        self._is_known: Tensor | None = None  # on a device: whether `_continued` holds for all

    def is_about(self, shape: tuple[int, int, int, int]) -> bool:
        """Return whether the queries of an attention may be the new tokens, and not the patches of an image."""
        return self._new_ids is None or self._new_ids.shape == (shape[0], shape[2])

    def read(self, problem: Problem, first_query: int, first_key: int) -> bool | Tensor:
        """Compare the keys of the first attention of a pass with those of the pass before.

        Parameters
        ----------
        problem : Problem, shape (batch, heads, m, n)
            An attention of the pass; later ones are ignored, and so are those that are not about the new tokens.
        first_query, first_key : int
            Positions in the text of query 0 and of key 0.

        Returns
        -------
        bool or Tensor
            Whether the sequences do not go on from where each of them was before; a boolean on the device of the keys.
        """
        batch, _, m, _ = problem.shape
        if self._first_new is not None or not self.is_about(problem.shape):
            return False
        keys = fingerprint(problem.k[:, :, : max(first_query + m - first_key, 0)])
        self._first_new, self._continued = first_query, self._continued_sequences(keys, first_query, first_key)
        stop = None if self._keys is None else self._first_key + self._keys.shape[1]
        self._keys, self._first_key = keys, first_key
        if self._continued is None or stop != first_query:
            return True
        own = torch.arange(batch, device=self._continued.device)
        if self._is_known is not None:
            return ~(self._is_known & (self._continued == own).all())
        return not torch.equal(self._continued, own)

    def read_state(self, batch: int, first_query: int, *, continues: bool) -> None:
        """Note what a layer without keys says of a pass: whether its state goes on from where each sequence was.

        Parameters
        ----------
        batch : int
            Number of sequences.
        first_query : int
            Position of the first new token.
        continues : bool
            Whether the state is the one that the pass before has left.
        """
        if self._first_new is None:
            self._first_new, self._keys = first_query, None
            self._continued = torch.arange(batch) if continues else None

    def _continued_sequences(self, keys: Tensor, first_query: int, first_key: int) -> Tensor | None:
        """Return the sequence of the pass before whose keys each sequence has; None where one has no such keys.

        Keys of a device are compared there, and the answer comes with `_is_known`.
        """
        old, old_first = self._keys, self._first_key
        if old is None or old_first + old.shape[1] < first_query:
            return None
        start = max(first_key, old_first)
        new = keys[:, start - first_key : max(first_query, start) - first_key]
        old = old[:, start - old_first : max(first_query, start) - old_first]
        later = answers_later(keys)
        if later:
            old = to_device(old, keys.device)
        equal = new.shape == old.shape and ((new == old).all() if later else torch.equal(new, old))
        own = torch.arange(len(new), device=new.device)
        if equal is True:
            return own
        # Which sequence of the pass before has the same keys, as after a beam search has reordered them.
        same = _hash_of_sequences(new)[:, None] == _hash_of_sequences(old)
        # Two sequences may agree in the last keys and not in those that a sliding cache has dropped.
        found, known = same.int().argmax(1), same.any(1).all() if start == 0 else False
        if not later:
            return found if bool(known) else None
        if known is False and equal is False:
            return None
        self._is_known = equal | known  # type: ignore[assignment]  # one of them is a tensor
        return found if equal is False else torch.where(equal, own, found)

    def questions(self) -> list[Tensor]:
        """Return the tensors that `end` needs on the CPU, so that the caller copies all with one wait."""
        found = []
        for t in (self._new_ids, self._continued, self._is_known):
            if t is not None:
                found.append(t)
        return found

    def end(self, answers: Sequence[Tensor]) -> bool:
        """End a pass; return whether the ids do not begin with those of the passes before.

        Parameters
        ----------
        answers : sequence of Tensor
            The `questions` on the CPU.
        """
        given = iter(answers)
        self._new_ids = None if self._new_ids is None else next(given)
        self._continued = None if self._continued is None else next(given)
        if self._is_known is not None and not bool(next(given)):
            self._continued = None
        before, self.ids = self.ids, self._ids_of_whole_text()
        if before is None or self.ids is None:
            return before is not self.ids
        return not torch.equal(self.ids[:, : before.shape[1]], before)

    def _ids_of_whole_text(self) -> Tensor | None:
        """Return the ids of the whole text, those of earlier passes and the new ones; None if not all are known."""
        if not self._first_new or self._new_ids is None:  # the text begins with this pass, or no attention was read
            return self._new_ids
        if self.ids is None or self._continued is None or self.ids.shape[1] < self._first_new:
            return None
        return torch.cat([self.ids[self._continued, : self._first_new], self._new_ids], dim=1)


def _hash_of_sequences(keys: Tensor) -> Tensor:
    """Return a hash of each sequence of fingerprints, shape (batch,): equal for equal sequences."""
    odd = (2 * torch.arange(keys.shape[1], device=keys.device) + 1) * -7046029254386353131  # 2**64 by the golden ratio
    return ((keys ^ (keys >> 32)) * odd).sum(1)


def hidden_state(output: Any) -> Tensor | None:
    """Return the tensor in the output of an encoder that a decoder reads."""
    return output[0] if isinstance(output, tuple) else getattr(output, "last_hidden_state", None)


def count_beams(encoded: Tensor | None, given: Tensor | None) -> tuple[int, Tensor]:
    """Return how often `given` may have each sequence of `encoded`, and a boolean on its device: whether it has."""
    if encoded is None or given is None or not len(encoded):
        return 0, torch.tensor(False)
    beams = len(given) // len(encoded)
    repeated = encoded.repeat_interleave(beams, dim=0)
    if not beams or repeated.shape != given.shape or repeated.device != given.device:
        return 0, torch.tensor(False)
    return beams, (repeated == given).all()
