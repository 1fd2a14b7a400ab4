"""Layers that models are built from, each with weights that can be looked at."""

from attlas.nn.additive import AdditiveAttention
from attlas.nn.cache import KVCache
from attlas.nn.mean import HeadMean
from attlas.nn.multihead import MultiHeadAttention
from attlas.nn.pooling import AttentionPooling, DotProductAttention

__all__ = [
    "AdditiveAttention",
    "AttentionPooling",
    "DotProductAttention",
    "HeadMean",
    "KVCache",
    "MultiHeadAttention",
]
