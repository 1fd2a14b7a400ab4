"""Layers that models are built from, each with weights that can be looked at."""

from attlas.nn.cache import KVCache
from attlas.nn.gpt2 import GPT2, GPT2Output
from attlas.nn.gpt2_attention import GPT2Attention
from attlas.nn.gpt2_config import GPT2Config
from attlas.nn.linear import GatedDelta, LinearAttention
from attlas.nn.mean import HeadMean
from attlas.nn.multihead import MultiHeadAttention
from attlas.nn.pooling import AdditiveAttention, AttentionPooling, DotProductAttention

__all__ = [
    "GPT2", "AdditiveAttention", "AttentionPooling", "DotProductAttention", "GPT2Attention", "GPT2Config", "GPT2Output",
    "GatedDelta", "HeadMean", "KVCache", "LinearAttention", "MultiHeadAttention",
]  # fmt: skip
