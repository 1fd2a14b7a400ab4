"""The sizes and settings of a GPT-2."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GPT2Config:
    """Sizes and settings of a GPT-2, under the names of its ``config.json``.

    Parameters
    ----------
    vocab_size, n_positions, n_embd, n_layer, n_head : int
        Tokens known, longest text, size of a token, blocks, heads.
    n_inner : int, optional
        Size of the hidden layer of a block; the default is ``4 * n_embd``.
    activation_function : str
        What stands between its two layers.
    resid_pdrop, embd_pdrop, attn_pdrop : float
        Dropout of what a block adds, of the embedding, of attention weights.
    layer_norm_epsilon, initializer_range : float
        Numbers of the norms and of the first parameters.
    scale_attn_weights, scale_attn_by_inverse_layer_idx : bool
        Whether scores are divided by ``sqrt(d)``, and by the number of the layer.
    add_cross_attention : bool
        Whether blocks attend to an encoder as well.
    tie_word_embeddings : bool
        Whether the head is the embedding.
    bos_token_id, eos_token_id, pad_token_id : int, optional
        Tokens for the beginning, the end and padding.

    Examples
    --------
    >>> from attlas.nn import GPT2Config
    >>> GPT2Config(n_layer=2).n_embd
    768
    """

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    add_cross_attention: bool = False
    tie_word_embeddings: bool = True
    bos_token_id: int | None = 50256
    eos_token_id: int | None = 50256
    pad_token_id: int | None = None

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> GPT2Config:
        """Return the configuration that a ``config.json`` holds; what GPT-2 does not use is left out."""
        return cls(**{name: settings[name] for name in cls.__dataclass_fields__ if name in settings})
