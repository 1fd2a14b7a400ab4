"""The lazy matrix: `AttentionMatrix`, what it computes from, and what torch and numpy may ask of it."""

from attlas.matrix.matrix import AttentionMatrix

__all__ = ["AttentionMatrix"]
