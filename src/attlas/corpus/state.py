"""The sums of a corpus. All are whole numbers, so that neither order, processes nor restarts change a bit of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from attlas.corpus import sketch
from attlas.corpus.measuring import BINS, SINGLE, TextNumbers
from attlas.corpus.numbers import BLOCK, COUNTS, NUMBERS, SUMS, values
from attlas.corpus.sampling import Samples
from attlas.errors import TooLargeError

_SUM_BITS = 40  # after the binary point, of sums over rows; they grow without limit
_FRACTION_BITS = 30  # after the binary point, of weight by token and by distance: 64 bits hold that of 2³³ queries
_LIMB_BITS = 62  # bits of the lower of the two int64 as which a file holds a whole number of any size
SIDES = ("query", "key", "key_mass")
_ARRAY_NAMES = ("counts", "cells", "distances", "kept_distances", "tokens", "bins")


class State:
    """Everything that is known of the texts that were read.

    Parameters
    ----------
    heads : sequence of (int, int)
        Layer and number of each head.
    vocabulary : int
        Number of tokens.
    size, top : int
        Texts that are kept at random, and the largest of each head.

    Notes
    -----
    Memory does not grow with texts: 24 bytes per head and token of the vocabulary, and 130 KB per head.
    """

    def __init__(self, heads: Sequence[tuple[int, int]], vocabulary: int, size: int, top: int) -> None:
        count = len(heads)
        self.heads = [tuple(head) for head in heads]
        # Sums of `TextNumbers` over all texts, as whole numbers.
        self.sums: NDArray[Any] = np.zeros((count, len(SUMS)), dtype=object)
        self.totals: NDArray[Any] = np.zeros((count, len(NUMBERS)), dtype=object)  # of each number, over texts
        self.counts = np.zeros((count, len(COUNTS)), dtype=np.int64)
        self.cells = np.zeros((count, SINGLE), dtype=np.int64)
        self.distances = np.zeros((count, BINS), dtype=np.int64)
        self.kept_distances = np.zeros((count, BINS), dtype=np.int64)
        self.tokens = np.zeros((len(SIDES), count, vocabulary), dtype=np.int64)
        # The distribution of each number over texts, and its smallest and largest value.
        self.bins = np.zeros((count, len(NUMBERS), sketch.SIZE), dtype=np.int32)
        self.low = np.full((count, len(NUMBERS)), np.inf)
        self.high = np.full((count, len(NUMBERS)), -np.inf)
        # Scores on the random block, which is read once.
        self.block = np.full((count, len(BLOCK)), np.nan)
        self.samples = Samples(count, size, top)

    @property
    def texts(self) -> int:
        """Number of texts. Every head counts each of them once, so that the first head has their number."""
        return int(self.counts[0, COUNTS.index("texts")])

    def add(self, text: int, text_hash: int, layers: Sequence[TextNumbers]) -> NDArray[np.int64]:
        """Add a text; return the heads for which it is kept.

        Parameters
        ----------
        text, text_hash : int
            Its place in the corpus and its hash.
        layers : sequence of TextNumbers
            What its layers do, in the order of `heads`.
        """
        sums = np.concatenate([layer.sums for layer in layers])
        counts, cells = (
            np.concatenate([np.repeat(getattr(layer, name)[None], len(layer.sums), axis=0) for layer in layers])
            for name in ("counts", "cells")
        )
        self.sums += _as_whole_numbers(sums, _SUM_BITS).astype(object)
        self.counts += counts
        self.cells += cells
        self.distances += _rounded_weights([layer.distances for layer in layers])
        self.kept_distances += _rounded_weights([layer.kept_distances for layer in layers])
        for side, name in enumerate(("query_kept", "key_kept", "key_mass")):
            self.tokens[side][:, layers[0].tokens] += _rounded_weights([getattr(layer, name) for layer in layers])
        self._add_numbers(values(sums, counts.astype(np.float64)))
        return self.samples.add(text, text_hash, sums[:, SUMS.index("max_activation")])

    def _add_numbers(self, found: Mapping[str, NDArray[np.float64]]) -> None:
        """Add the numbers of one text to the distributions, shape (heads,) for each name; NaN does not count."""
        each = np.arange(len(self.heads))
        for j, number in enumerate(NUMBERS):
            x = found[number.name]
            some = ~np.isnan(x)
            self.bins[each[some], j, sketch.bin_of(x, number.sketch)[some]] += 1
            self.totals[:, j] += _as_whole_numbers(np.nan_to_num(x), _SUM_BITS).astype(object)
            self.low[some, j] = np.minimum(self.low[some, j], x[some])
            self.high[some, j] = np.maximum(self.high[some, j], x[some])

    def merge(self, other: State) -> None:
        """Add what another part of the corpus has; no text may be in both."""
        for name in ("sums", "totals", *_ARRAY_NAMES):
            getattr(self, name)[...] += getattr(other, name)
        self.low, self.high = np.minimum(self.low, other.low), np.maximum(self.high, other.high)
        self.block = np.where(np.isnan(self.block), other.block, self.block)
        self.samples.merge(other.samples)

    def numbers(self) -> dict[str, NDArray[np.float64]]:
        """Return every number over all texts, each of shape (heads,)."""
        return values(_as_real_numbers(self.sums, _SUM_BITS), self.counts.astype(np.float64))

    def means(self) -> NDArray[np.float64]:
        """Return the mean over texts of each number, shape (heads, numbers); NaN where no text has it."""
        texts = self.bins.sum(-1)
        with np.errstate(invalid="ignore"):
            return _as_real_numbers(self.totals, _SUM_BITS) / np.where(texts, texts, np.nan)

    def by_distance(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Return all and the kept weight by distance, shape (heads, bins)."""
        return self.distances / 2.0**_FRACTION_BITS, self.kept_distances / 2.0**_FRACTION_BITS

    def by_token(self, side: int, head: int) -> NDArray[np.float64]:
        """Return the weight of a head by token, shape (vocabulary,); `side` is an index of `SIDES`."""
        return np.asarray(self.tokens[side, head] / 2.0**_FRACTION_BITS)

    def tensors(self) -> dict[str, Tensor]:
        """Return everything as tensors, for a file.

        `sums` and `totals` are Python integers of any size, and become two tensors of int64 each: their lowest 62 bits,
        and the rest. Weight by token and by distance is int64 with 30 bits after the point, which must not overflow.
        """
        if max(int(t.max(initial=0)) for t in (self.tokens, self.distances)) >= 1 << _LIMB_BITS:
            rule = "the weight of one token must stay below that of 2³² queries."
            raise TooLargeError(rule, "a longer corpus", "attlas.corpus() for each half of it.", where="corpus()")
        found = {name: torch.from_numpy(getattr(self, name)) for name in (*_ARRAY_NAMES, "low", "high", "block")}
        for name in ("sums", "totals"):
            x = getattr(self, name)
            found[f"{name}.low"] = torch.from_numpy((x & ((1 << _LIMB_BITS) - 1)).astype(np.int64))
            found[f"{name}.high"] = torch.from_numpy((x >> _LIMB_BITS).astype(np.int64))
        found["heads"] = torch.tensor(self.heads, dtype=torch.int64).view(-1, 2)
        found["kept"] = torch.tensor([self.samples.size, self.samples.top])
        return found | self.samples.tensors()

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> State:
        """Return the state that `tensors` has written."""
        size, top = tensors["kept"].tolist()
        state = cls([(a, b) for a, b in tensors["heads"].tolist()], 0, size, top)  # all its arrays are replaced below
        for name in (*_ARRAY_NAMES, "low", "high", "block"):
            setattr(state, name, tensors[name].numpy().copy())
        for name in ("sums", "totals"):
            high, low = (tensors[f"{name}.{part}"].numpy().astype(object) for part in ("high", "low"))
            setattr(state, name, (high << _LIMB_BITS) + low)
        state.samples.load(tensors)
        return state


def _as_whole_numbers(x: NDArray[np.float64], bits: int) -> NDArray[Any]:
    """Return numbers times a power of two, as whole numbers of any size."""
    scaled = np.rint(np.ldexp(x, bits))
    if not scaled.size or np.abs(scaled).max() < 2.0**62:
        return scaled.astype(np.int64)
    return np.asarray(np.vectorize(int, otypes=[object])(scaled))


def _rounded_weights(parts: Sequence[NDArray[np.float64]]) -> NDArray[np.int64]:
    """Return the weights of all layers, each of shape (heads, ...), as whole numbers of ``2 ** -_BITS``."""
    return np.rint(np.ldexp(np.concatenate(parts), _FRACTION_BITS)).astype(np.int64)


def _as_real_numbers(x: NDArray[Any], bits: int) -> NDArray[np.float64]:
    """Return what `_as_whole_numbers` has made of numbers as numbers again: whole numbers divided by ``2 ** bits``."""
    # Division of whole numbers in Python is rounded once, whatever their size.
    return np.asarray(np.vectorize(lambda one: one / (1 << bits), otypes=[np.float64])(x))
