"""Recordings of random matrices."""

from typing import Any

import torch

import attlas
from attlas.recording.atlas import Atlas, Entry

__all__ = ["atlas_of", "random_matrix"]


def random_matrix(n: int, heads: int = 2, seed: int = 0, spread: float = 1.0, **options: Any) -> attlas.AttentionMatrix:
    """Return a causal matrix of shape (1, heads, n, n); the larger the spread, the sharper its weights."""
    q, k = spread * torch.randn((2, 1, heads, n, 16), generator=torch.Generator().manual_seed(seed))
    return attlas.attend(q, k, mask=attlas.Causal(), **options)


def atlas_of(*matrices: attlas.AttentionMatrix, **options: Any) -> Atlas:
    """Return a recording with one layer for each matrix."""
    entries = [
        Entry(f"layers.{at}", at, "self", 0, tuple(range(A.shape[1])), (0, A.shape[2]), 0, tuple(A.shape), A)
        for at, A in enumerate(matrices)
    ]
    return Atlas(entries, **options)
