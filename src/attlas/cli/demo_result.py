"""The result of the demo on one text: plain data, from which its table and pictures are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from attlas.heads import Head

__all__ = ["DemoResult", "MemoryCost", "closeup_window", "most_telling"]

_WINDOW = 32  # tokens shown cell by cell


@dataclass(frozen=True)
class MemoryCost:
    """Time and memory of the demo, and the memory that full matrices would have taken.

    Parameters
    ----------
    matrices : int
        Attention matrices of the text: layers × heads.
    tokens : int
        Rows and columns of each.
    full : int
        Bytes of all of them, stored.
    held : int
        Bytes of what the layers computed and keep (queries, keys and values), and of the log-sum-exps.
    peak : int or None
        Most bytes that the process grew by while it read; None where the system does not tell.
    seconds : float
        Time from the model's first token to the last statistic.
    what : str
        What the bytes are that were kept.
    """

    matrices: int
    tokens: int
    full: int
    held: int
    peak: int | None
    seconds: float
    what: str = "the layers' own queries, keys and values, and one number a row"


@dataclass(frozen=True, eq=False)
class DemoResult:
    """The statistics of one model on one text.

    Parameters
    ----------
    model, source : str
        Names of the model and of the text.
    unseen : bool
        Whether the text is known to have been kept out of the model's training.
    tokens : tuple of str
        Text of each token; a token that ends inside a character has the empty string.
    layers, per_layer : int
        Layers, and heads in each.
    heads : tuple of Head
        Measures of every head, layer by layer.
    maps : Tensor, shape (layers, heads, s, s)
        Largest weight in each block of the matrix; NaN where nothing may attend.
    values, indices : Tensor, shape (layers, heads, n, k)
        Largest weights of each query, and the keys that have them.
    window : range
        Part of the text shown cell by cell.
    closeups : Tensor, shape (layers, heads, len(window), len(window))
        The weights there; NaN where nothing may attend.
    period : int
        Length of the random block that occurs twice; 0 where none was read.
    repeats : Tensor, shape (layers, heads, r, r)
        Largest weight in each block of the matrix of the repeated block; NaN where nothing may attend.
    loss : float
        Mean negative log likelihood of the text's tokens, nats; NaN where it is not known.
    cost : MemoryCost
        Time and memory.
    """

    model: str
    source: str
    held_out: bool
    tokens: tuple[str, ...]
    layers: int
    per_layer: int
    heads: tuple[Head, ...]
    maps: Tensor
    values: Tensor
    indices: Tensor
    window: range
    closeups: Tensor
    period: int
    repeats: Tensor
    loss: float
    cost: MemoryCost

    @property
    def most_telling(self) -> Head:
        """The most telling head."""
        return most_telling(self.heads)


def most_telling(heads: Sequence[Head]) -> Head:
    """Return the most telling head: the strongest induction head, or without one the most peculiar head."""
    return max(heads, key=lambda head: head.prominence)


def closeup_window(values: Tensor, indices: Tensor, ids: Tensor) -> tuple[range, int]:
    """Return the part of the text where a head finds most of what followed an earlier copy, and the best query."""
    n, width = len(ids), min(_WINDOW, len(ids))
    positions = torch.arange(n)[:, None]
    before = torch.cat([ids.new_full((1,), -1), ids[:-1]])
    follows_copy = (before[indices] == ids[:, None]) & (positions - indices < width // 2) & (indices > 0)
    mass = (values * follows_copy).sum(-1)
    # Copies stand before: the first third of the window is theirs.
    sums = mass.unfold(0, width, 1)[:, width // 3 :].sum(-1)
    start = int(sums.argmax()) if float(sums.max()) > 0 else (n - width) // 2
    shown = slice(start + width // 3, start + width)
    score = mass[shown] if float(mass[shown].max()) > 0 else values[shown, 0]
    return range(start, start + width), start + width // 3 + int(score.argmax())
