"""Which texts are kept: some at random, the same for all heads, and those with the largest weights of each head."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def hash_of(ids: NDArray[np.int64], seed: int) -> int:
    """Return a number of 63 bits that stands for a text: those with the smallest are the sample.

    It depends on the tokens and the seed alone, so that neither order nor processes change the sample.
    """
    data = hashlib.blake2b(ids.astype("<i8").tobytes(), digest_size=8, key=seed.to_bytes(8, "little")).digest()
    return int.from_bytes(data, "little") >> 1


class Samples:
    """The texts that are kept of a corpus.

    Parameters
    ----------
    heads : int
        Number of heads of the model.
    size : int
        Texts that are drawn at random.
    top : int
        Texts with the largest weights that are kept for each head.

    Attributes
    ----------
    hashes, texts : array of int64, shape (kept,)
        The random texts, by ascending hash.
    activations : array, shape (kept, heads)
        Their largest weights.
    top_texts, top_hashes : array of int64, shape (heads, top)
        The texts with the largest weights, the largest first; -1 for none.
    top_activations : array, shape (heads, top)
        Their largest weights, -1 for none.
    """

    _NAMES = ("hashes", "texts", "activations", "top_texts", "top_hashes", "top_activations")

    def __init__(self, heads: int, size: int, top: int) -> None:
        self.size, self.top = size, top
        self.hashes = self.texts = np.zeros(0, dtype=np.int64)
        self.activations = np.zeros((0, heads))
        self.top_texts = self.top_hashes = np.full((heads, top), -1, dtype=np.int64)
        self.top_activations = np.full((heads, top), -1.0)

    def add(self, text: int, text_hash: int, activations: NDArray[np.float64]) -> NDArray[np.int64]:
        """Offer a text; return the heads for which it is kept.

        All heads keep it if it is one of the `size` texts of smallest hash; else those heads do in which it has one of
        the `top` largest weights.

        Parameters
        ----------
        text, text_hash : int
            Its place in the corpus, and its `hash_of`.
        activations : array, shape (heads,)
            Its largest weight in each head.
        """
        self._merge_texts(np.array([text]), np.array([text_hash]), activations[None])
        ones = np.ones((len(activations), 1), dtype=np.int64)
        self._merge_top(ones * text, ones * text_hash, activations[:, None])
        return self.heads_of(text)

    def merge(self, other: Samples) -> None:
        """Take in the texts of another part of the corpus."""
        self._merge_texts(other.texts, other.hashes, other.activations)
        self._merge_top(other.top_texts, other.top_hashes, other.top_activations)

    def _merge_texts(
        self, texts: NDArray[np.int64], hashes: NDArray[np.int64], activations: NDArray[np.float64]
    ) -> None:
        """Take in texts, shape (texts,), and their largest weights, (texts, heads); keep those of smallest hash."""
        hashes, texts = np.concatenate([self.hashes, hashes]), np.concatenate([self.texts, texts])
        order = np.lexsort([texts, hashes])[: self.size]
        self.hashes, self.texts = hashes[order], texts[order]
        self.activations = np.concatenate([self.activations, activations])[order]

    def _merge_top(self, texts: NDArray[np.int64], hashes: NDArray[np.int64], largest: NDArray[np.float64]) -> None:
        """Take in texts of each head, all of shape (heads, texts), and keep those with the largest weights."""
        texts = np.concatenate([self.top_texts, texts], axis=1)
        hashes = np.concatenate([self.top_hashes, hashes], axis=1)
        largest = np.concatenate([self.top_activations, largest], axis=1)
        order = np.lexsort([texts, hashes, -largest], axis=1)[:, : self.top]
        self.top_texts, self.top_hashes = (np.take_along_axis(t, order, axis=1) for t in (texts, hashes))
        self.top_activations = np.take_along_axis(largest, order, axis=1)

    def heads_of(self, text: int) -> NDArray[np.int64]:
        """Return the heads for which a text is kept."""
        if text in self.texts:
            return np.arange(len(self.top_texts))
        return np.flatnonzero((self.top_texts == text).any(axis=1))

    def kept(self) -> list[int]:
        """Return all texts that are kept, ascending."""
        return sorted({*self.texts.tolist(), *self.top_texts[self.top_texts >= 0].tolist()})

    def of_head(self, head: int) -> list[tuple[int, int, float, bool]]:
        """Return text, hash, largest weight and whether it is one of the largest, by descending weight."""
        top = set(self.top_texts[head].tolist())
        random = zip(self.texts, self.hashes, self.activations[:, head], strict=True)
        largest = zip(self.top_texts[head], self.top_hashes[head], self.top_activations[head], strict=True)
        found = {int(t): (int(t), int(h), float(a), int(t) in top) for t, h, a in (*random, *largest) if t >= 0}
        return sorted(found.values(), key=lambda one: (-one[2], one[1], one[0]))

    def renumber(self, by: int) -> None:
        """Add to the number of each text."""
        self.texts = self.texts + by
        self.top_texts = np.where(self.top_texts < 0, -1, self.top_texts + by)

    def tensors(self) -> dict[str, Tensor]:
        """Return everything as tensors."""
        return {f"samples.{name}": torch.from_numpy(getattr(self, name).copy()) for name in self._NAMES}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take everything from `tensors`."""
        for name in self._NAMES:
            setattr(self, name, tensors[f"samples.{name}"].numpy().copy())
