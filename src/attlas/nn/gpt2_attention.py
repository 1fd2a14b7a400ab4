"""GPT-2's attention: transformers' layer, parameter for parameter, with weights that can be looked at."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attlas.errors import ShapeError, public
from attlas.foundation.checks import check_probability
from attlas.masks import Causal, Mask, Window, from_tensor
from attlas.matrix import AttentionMatrix
from attlas.matrix.attend import attend
from attlas.nn.cache import KVCache
from attlas.nn.gpt2_config import GPT2Config
from attlas.nn.layer import positions, returned_weights
from attlas.recording import pooled
from attlas.scores import ScaledDot


class Conv1D(nn.Module):
    """A linear layer whose weight is stored as (inputs, outputs), as GPT-2's checkpoints have it.

    Parameters
    ----------
    nf, nx : int
        Numbers of outputs and of inputs.
    """

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.empty(nx, nf))
        self.bias = nn.Parameter(torch.zeros(nf))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x @ weight + bias``."""
        return torch.addmm(self.bias, x.reshape(-1, self.nx), self.weight).view(*x.shape[:-1], self.nf)

    def extra_repr(self) -> str:
        return f"nf={self.nf}, nx={self.nx}"


class GPT2Attention(nn.Module):
    """The attention of a GPT-2 block; parameters and `state_dict` are those of transformers' GPT2Attention.

    Parameters
    ----------
    config : GPT2Config
        A `GPT2Config` of attlas or of transformers.
    is_cross_attention : bool
        Whether keys and values come from an encoder. The default is False.
    layer_idx : int, optional
        Number of the layer: its place in a cache, and the divisor of its scores with
        ``scale_attn_by_inverse_layer_idx``. The default is 0.

    Attributes
    ----------
    c_attn, c_proj, q_attn : Conv1D
        Queries, keys and values at once; the output; the queries of cross-attention.
    scaling : float
        Factor of the dot product.

    Raises
    ------
    ShapeError
        If the heads do not divide the size, or a dropout is no probability.

    See Also
    --------
    GPT2 : the model that it is part of.

    Notes
    -----
    Scores are ``q · k / sqrt(d)``, divided by ``layer_idx + 1`` where configured, and computed in float32 for
    half precision, which is what ``reorder_and_upcast_attn`` asks for. It can stand in a transformers model:
    it takes the same arguments, its caches included. Its drops are other random numbers than torch's.

    References
    ----------
    .. [1] Radford et al., "Language models are unsupervised multitask learners", 2019.

    Examples
    --------
    >>> import torch
    >>> from attlas.nn import GPT2Attention, GPT2Config
    >>> layer = GPT2Attention(GPT2Config(n_embd=32, n_head=4)).eval()
    >>> out, weights = layer(torch.randn(2, 100, 32))
    >>> out.shape, weights.shape, weights[0, 3, 17, 18:].sum()
    (torch.Size([2, 100, 32]), torch.Size([2, 4, 100, 100]), tensor(0.))
    """

    @public("GPT2Attention()")
    def __init__(
        self, config: GPT2Config | Any, is_cross_attention: bool = False, layer_idx: int | None = None
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = config.n_embd, config.n_head
        self.head_dim = self.embed_dim // self.num_heads
        if self.head_dim * self.num_heads != self.embed_dim:
            found = f"n_embd = {self.embed_dim}, n_head = {self.num_heads}"
            raise ShapeError("n_head must divide n_embd.", found, "GPT2Config(n_embd=768, n_head=12)")
        self.is_cross_attention = is_cross_attention
        self.layer_idx = 0 if layer_idx is None else layer_idx
        self.scaling = self.head_dim**-0.5 if config.scale_attn_weights else 1.0
        if config.scale_attn_by_inverse_layer_idx:
            self.scaling /= self.layer_idx + 1
        self.score = ScaledDot(self.scaling)
        size = self.embed_dim
        self.c_attn = Conv1D(2 * size if is_cross_attention else 3 * size, size)
        if is_cross_attention:
            self.q_attn = Conv1D(size, size)
        self.c_proj = Conv1D(size, size)
        self.attn_dropout = nn.Dropout(check_probability("attn_pdrop", config.attn_pdrop))
        self.resid_dropout = nn.Dropout(check_probability("resid_pdrop", config.resid_pdrop))
        self.is_causal = not is_cross_attention

    def forward(
        self,
        hidden_states: Tensor,
        past_key_values: KVCache | Any = None,
        attention_mask: Tensor | Mask | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | Mask | None = None,
        **kwargs: object,
    ) -> tuple[Tensor, AttentionMatrix | None]:
        """Attend.

        Parameters
        ----------
        hidden_states : Tensor, shape (batch, m, n_embd)
            Tokens.
        past_key_values : KVCache, optional
            The tokens before; a cache of transformers will do.
        attention_mask : Tensor or Mask, optional
            None is causal. A tensor of shape (batch, n), 0 for padding, is joined with the causal mask. A mask
            of attlas, or a tensor of four axes (bool, or numbers that are added), is used as it is.
        encoder_hidden_states : Tensor, optional, shape (batch, n, n_embd)
            Tokens of an encoder, for cross-attention.
        encoder_attention_mask : Tensor or Mask, optional
            Mask of cross-attention, of the same forms; None sees every token.
        **kwargs
            What else a model passes on; it changes nothing here.

        Returns
        -------
        output : Tensor, shape (batch, m, n_embd)
        weights : AttentionMatrix, shape (batch, heads, m, n)
            Lazy, without a graph; None inside torch.export and torch.func, which know tensors only.

        Raises
        ------
        ShapeError
            If it is asked for cross-attention and was not made for it, or the other way round.
        """
        if (encoder_hidden_states is not None) != self.is_cross_attention:
            rule = "encoder_hidden_states belong to cross-attention, and only to it."
            given = "missing" if encoder_hidden_states is None else "given"
            found = f"is_cross_attention = {self.is_cross_attention}, encoder_hidden_states {given}"
            fix = f"GPT2Attention(config, is_cross_attention={not self.is_cross_attention})"
            raise ShapeError(rule, found, fix, where="GPT2Attention()")
        if encoder_hidden_states is not None:
            (q,) = self._split_heads(self.q_attn(hidden_states), 1)
            k, v = self._encoder_keys_and_values(encoder_hidden_states, past_key_values)
            mask = mask_of_keys(encoder_attention_mask, k.shape[2])
        else:
            q, k, v = self._split_heads(self.c_attn(hidden_states), 3)
            if past_key_values is not None:
                # A cache of transformers for decoders with an encoder has one for each of the two.
                own = getattr(past_key_values, "self_attention_cache", past_key_values)
                k, v = own.update(k, v, self.layer_idx)
            mask = mask_of_keys(attention_mask, k.shape[2], past_key_values)
            if mask is None or (isinstance(attention_mask, Tensor) and attention_mask.ndim == 2):
                mask = causal_mask(q.shape[2], mask, past_key_values)
        own = None if self.is_cross_attention else past_key_values
        place = positions(own, self.layer_idx, q.shape[2], k.shape[2])
        weights = attend(q, k, self.score, mask)
        heads, matrix = pooled(self, weights, v, dropout_p=self.attn_dropout.p if self.training else 0.0, **place)
        out: Tensor = self.c_proj(heads.transpose(1, 2).flatten(2))
        if self.training:
            out = self.resid_dropout(out)
        return out, returned_weights(matrix)

    def _split_heads(self, t: Tensor, parts: int) -> tuple[Tensor, ...]:
        """Split what was projected at once into `parts` tensors of shape (batch, heads, tokens, head_dim)."""
        whole = t.view(*t.shape[:2], parts, self.num_heads, self.head_dim)
        return whole.permute(2, 0, 3, 1, 4).unbind(0)

    def _encoder_keys_and_values(self, states: Tensor, cache: KVCache | Any) -> tuple[Tensor, Tensor]:
        """Return keys and values of an encoder's tokens; made at the first step where a cache keeps them."""

        def make() -> tuple[Tensor, Tensor]:
            k, v = self._split_heads(self.c_attn(states), 2)
            return k, v

        return cache.once(self.layer_idx, make) if isinstance(cache, KVCache) else make()


def causal_mask(m: int, padding: Mask | None = None, cache: KVCache | Any = None) -> Mask | None:
    """Return the causal mask of a step of m queries after a cache; None where every key is seen."""
    window: int | None = getattr(cache, "window", None)
    if m == 1:  # the cache holds no more than this query may see
        return padding
    mask = Causal() if window is None else Window(window - 1, 0)
    return mask if padding is None else mask & padding


def mask_of_keys(mask: Tensor | Mask | None, n: int, cache: KVCache | Any = None) -> Mask | None:
    """Return an `attention_mask` as a Mask over n keys; a tensor of two axes is 0 where a token is padding."""
    if mask is None or isinstance(mask, Mask):
        return mask
    if mask.ndim != 2:
        return from_tensor(mask)
    keeps_all = getattr(cache, "window", None) is None  # of a sliding window only the last keys are left
    if mask.shape[1] < n or (keeps_all and mask.shape[1] != n):
        rule = "a mask of padding must have one column for each key, those in the cache too."
        fix = "a tensor of shape (batch, n), 0 where a token is padding."
        raise ShapeError(rule, f"{mask.shape[1]} columns, {n} keys", fix, attention_mask=mask, where="GPT2Attention()")
    return from_tensor(mask[:, None, None, mask.shape[1] - n :] != 0)
