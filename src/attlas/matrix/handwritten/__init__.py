"""Attention that a model writes out by hand, ``softmax(q @ k.mT * scale + mask) @ v``, as lazy tensors."""

from attlas.matrix.handwritten.caught import catching
from attlas.matrix.handwritten.lazy import as_matrices
from attlas.matrix.handwritten.scope import DenseUse, DenseUses, Scope

__all__ = ["DenseUse", "DenseUses", "Scope", "as_matrices", "catching"]
