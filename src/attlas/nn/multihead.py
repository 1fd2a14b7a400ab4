"""Multi-head attention: torch's own layer, with weights that can be looked at."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from operator import and_
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from attlas.errors import ShapeError, public
from attlas.foundation.checks import check_probability
from attlas.foundation.tiles import Tile
from attlas.masks import BlockState, Causal, Mask, Window, from_tensor
from attlas.matrix import AttentionMatrix
from attlas.matrix.attend import attend
from attlas.nn.cache import KVCache
from attlas.nn.layer import positions, returned_weights
from attlas.nn.mean import HeadMean
from attlas.recording import pooled
from attlas.scores import ScaledDot, Score


class MultiHeadAttention(nn.Module):
    """Multi-head attention, in place of `torch.nn.MultiheadAttention`, with weights that cost nothing.

    Parameters
    ----------
    embed_dim : int
        Size of the queries and of the output.
    num_heads : int
        Number of heads; it divides `embed_dim`.
    dropout : float
        Probability that a weight is dropped in training. The default is 0.
    bias : bool
        Whether the projections have a bias. The default is True.
    add_bias_kv : bool
        Whether one learned key and value is appended. The default is False.
    add_zero_attn : bool
        Whether one key and value of zeros is appended. The default is False.
    kdim, vdim : int, optional
        Sizes of keys and values; the default is `embed_dim`.
    batch_first : bool
        Whether tokens have the shape (batch, tokens, size); the default is (tokens, batch, size).
    device, dtype
        Where and how the parameters are made.
    num_kv_heads : int, optional
        Heads of keys and values, each of which serves several query heads (grouped heads). The default is
        `num_heads`; another number makes smaller projections than torch's.
    score : Score, optional
        How alike query and key are, in each head; the default is the scaled dot product.
    layer_idx : int
        Number of this layer in a `KVCache` that several layers share. The default is 0.

    Raises
    ------
    ShapeError
        If the sizes do not divide each other, or `dropout` is no probability.

    See Also
    --------
    torch.nn.MultiheadAttention : same constructor, call and `state_dict`.
    HeadMean : the weights where ``average_attn_weights=True``.

    Notes
    -----
    The second result is lazy: an `AttentionMatrix` of shape (batch, heads, m, n) where
    ``average_attn_weights=False``, a `HeadMean` of shape (batch, m, n) where it is True. It holds queries and
    keys without their graph, so ``need_weights=True`` costs nothing; ``to_dense()`` gives torch's tensor (of
    weights before dropout). `attn_mask` may be any mask of attlas as well; in a tensor of bool True means, as
    in torch, that the pair is **not** seen.

    Three differences. A row without any key is NaN in torch; here its weights are 0, and its output is the
    bias of `out_proj`. ``is_causal=True`` needs no `attn_mask` here, and one that is given is obeyed.
    Drops are other random numbers than torch's. Cost: that of torch's fused kernel, weights or not.

    Examples
    --------
    >>> import torch
    >>> from attlas.nn import MultiHeadAttention
    >>> layer = MultiHeadAttention(embed_dim=32, num_heads=4, batch_first=True)
    >>> x = torch.randn(2, 100, 32)
    >>> out, weights = layer(x, x, x, average_attn_weights=False)
    >>> out.shape, weights.shape, weights[0, 3, 17, :5].shape
    (torch.Size([2, 100, 32]), torch.Size([2, 4, 100, 100]), torch.Size([5]))
    >>> _ = torch.nn.MultiheadAttention(32, 4).load_state_dict(layer.state_dict())
    """

    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None

    @public("MultiHeadAttention()")
    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        score: Score | None = None,
        layer_idx: int = 0,
    ) -> None:
        super().__init__()
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.dropout = check_probability("dropout", dropout)
        _check_heads(embed_dim, num_heads, self.num_kv_heads)
        self.head_dim = embed_dim // num_heads
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.batch_first, self.add_zero_attn, self.layer_idx = batch_first, add_zero_attn, layer_idx
        self.score = ScaledDot() if score is None else score
        # torch.nn.TransformerEncoderLayer asks its attention for this.
        self._qkv_same_embed_dim = self.kdim == embed_dim and self.vdim == embed_dim

        def empty(*shape: int) -> nn.Parameter:
            """Return a parameter with no values yet."""
            return nn.Parameter(torch.empty(shape, device=device, dtype=dtype))

        width = self.num_kv_heads * self.head_dim
        packed = self._qkv_same_embed_dim
        self.in_proj_weight = empty(embed_dim + 2 * width, embed_dim) if packed else None
        self.q_proj_weight = None if packed else empty(embed_dim, embed_dim)
        self.k_proj_weight = None if packed else empty(width, self.kdim)
        self.v_proj_weight = None if packed else empty(width, self.vdim)
        self.in_proj_bias = empty(embed_dim + 2 * width) if bias else None
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, device=device, dtype=dtype)
        self.bias_k = empty(1, 1, width) if add_bias_kv else None
        self.bias_v = empty(1, 1, width) if add_bias_kv else None
        self._reset_parameters()

    def _reset_parameters(self) -> None:
        """Initialise the parameters as torch's nn.MultiheadAttention does."""
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                nn.init.zeros_(bias)
        for token in (self.bias_k, self.bias_v):
            if token is not None:
                nn.init.xavier_normal_(token)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | Mask | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        cache: KVCache | None = None,
    ) -> tuple[Tensor, AttentionMatrix | HeadMean | None]:
        """Attend, and return the output and the lazy weights.

        Parameters
        ----------
        query, key, value : Tensor
            Tokens: (m, size) alone, (m, batch, size), or (batch, m, size) where ``batch_first``.
        key_padding_mask : Tensor, optional, shape (batch, n) or (n,)
            True, or a number that is added, where a key is padding.
        need_weights : bool
            Whether the weights are returned; else None. Inside torch.export and torch.func, which know
            tensors only, it is None in any case.
        attn_mask : Tensor or Mask, optional
            Tensor of shape (m, n) or (batch * heads, m, n): True where a pair is not seen, or numbers that
            are added. Or a mask of attlas, which says what is seen. Keys that the layer appends are not among
            its keys, and are seen by every query.
        average_attn_weights : bool
            Whether the weights are the mean over heads.
        is_causal : bool
            Whether each query sees the keys up to its own place; ignored where `attn_mask` says it.
        cache : KVCache, optional
            Keys and values of the tokens before, in front of those of this call. Masks then span them all.

        Raises
        ------
        ShapeError
            If sizes do not fit.
        """
        single = query.ndim == 2
        tokens = [query, key, value]
        if single:
            tokens = [t.unsqueeze(0) for t in tokens]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        elif not self.batch_first:
            tokens = [t.transpose(0, 1) for t in tokens]
        q, k, v = self._project_tokens(tokens, shared=key is value and query is key)
        if cache is not None:
            k, v = cache.update(k, v, self.layer_idx)
        real = k.shape[2]
        k, v = self._append_bias_and_zero(k, v)
        mask = self._mask_of_keys(q, real, k.shape[2] - real, key_padding_mask, attn_mask, is_causal, cache)
        place = positions(cache, self.layer_idx, q.shape[2], real)
        if not place and k.shape[2] > real:
            place = {"first_query": max(real - q.shape[2], 0)}
        weights = attend(q, k, self.score, mask)
        heads, matrix = pooled(self, weights, v, dropout_p=self.dropout if self.training else 0.0, **place)
        out: Tensor = self.out_proj(heads.transpose(1, 2).flatten(2))
        if single:
            out = out.squeeze(0)
        elif not self.batch_first:
            out = out.transpose(0, 1)
        returned = returned_weights(matrix) if need_weights else None
        if returned is None:
            return out, None
        returned = returned[0] if single else returned
        return out, HeadMean(returned) if average_attn_weights else returned

    def _project_tokens(self, tokens: list[Tensor], *, shared: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Check the tokens and project them to q, k and v, shape (batch, heads, tokens, head_dim).

        `shared` says that all three are one tensor, projected by one product.
        """
        width = self.num_kv_heads * self.head_dim
        sizes = [self.embed_dim, width, width]
        wanted = (self.embed_dim, self.kdim, self.vdim)
        for name, t, size in zip(("query", "key", "value"), tokens, wanted, strict=True):
            batch = tokens[0].shape[0]
            if t.ndim == 3 and t.shape[-1] == size and t.shape[0] == batch:
                continue
            found = f"{name} has {t.ndim} axes, the last of size {t.shape[-1]}; they should be 3 and {size}"
            order = "(batch, tokens, size)" if self.batch_first else "(tokens, batch, size)"
            if t.ndim == 3 and t.shape[-1] == size:
                found = f"query has {batch} sequences, {name} has {t.shape[0]}, with the axes {order}"
            shown = [part if self.batch_first or part.ndim < 2 else part.transpose(0, 1) for part in tokens]
            given = {"query": shown[0], "key": shown[1], "value": shown[2], "batch_first": self.batch_first}
            rule = "tokens must have the sizes of the layer, and one batch."
            fix = f"give them as {order}, or make the layer with batch_first={not self.batch_first}."
            raise ShapeError(rule, found, fix, arguments=given, where="MultiHeadAttention()")
        if self.in_proj_weight is not None and shared:
            parts = functional.linear(tokens[0], self.in_proj_weight, self.in_proj_bias).split(sizes, dim=-1)
        else:
            if self.in_proj_weight is not None:
                weights: Any = self.in_proj_weight.split(sizes)
            else:
                weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.split(sizes)
            parts = tuple(functional.linear(t, w, b) for t, w, b in zip(tokens, weights, biases, strict=True))
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in parts)
        return q, k, v

    def _append_bias_and_zero(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append to keys and values the learned token (`add_bias_kv`) and the one of zeros (`add_zero_attn`)."""
        ends: list[tuple[Tensor, Tensor]] = []
        shape = (k.shape[0], self.num_kv_heads, 1, self.head_dim)
        if self.bias_k is not None and self.bias_v is not None:
            learned = [t.view(1, self.num_kv_heads, 1, self.head_dim).expand(shape) for t in (self.bias_k, self.bias_v)]
            ends.append((learned[0], learned[1]))
        if self.add_zero_attn:
            ends.append((k.new_zeros(shape), v.new_zeros(shape)))
        if not ends:
            return k, v
        return torch.cat([k, *(end[0] for end in ends)], dim=2), torch.cat([v, *(end[1] for end in ends)], dim=2)

    def _mask_of_keys(
        self,
        q: Tensor,
        real: int,
        extra: int,
        padding: Tensor | None,
        given: Tensor | Mask | None,
        is_causal: bool,
        cache: KVCache | None,
    ) -> Mask | None:
        """Return the mask of all keys.

        The first `real` ones as the arguments say, the `extra` appended ones always seen.
        """
        m = q.shape[2]
        parts: list[Mask] = []
        if isinstance(given, Mask):
            parts.append(_mask_with_appended(given, real, extra))
        elif given is not None:
            of_heads = given.unflatten(0, (-1, self.num_heads)) if given.ndim == 3 else given
            parts.append(_mask_from_torch(of_heads, extra))
        elif is_causal:
            # Like torch, the first query with the first key; queries after a cache are the last ones.
            parts.append(_mask_with_appended(Causal(0 if cache is None else None), real, extra))
        if cache is not None and cache.window is not None and m > 1:
            parts.append(_mask_with_appended(Window(cache.window - 1, None), real, extra))
        if padding is not None:
            parts.append(_mask_from_torch(padding[:, None, None, :], extra))
        return reduce(and_, parts) if parts else None

    def extra_repr(self) -> str:
        grouped = "" if self.num_kv_heads == self.num_heads else f", num_kv_heads={self.num_kv_heads}"
        return f"embed_dim={self.embed_dim}, num_heads={self.num_heads}{grouped}"


class _WithAppended(Mask):
    """A mask of the keys that are tokens; every query sees the keys that the layer appends to them.

    Parameters
    ----------
    tokens : Mask
        The mask of a matrix without these keys.
    n : int
        Number of keys that are tokens.
    """

    def __init__(self, tokens: Mask, n: int) -> None:
        self.tokens, self.n = tokens, n

    def allows(self, at: Tile) -> Tensor:
        # The tile with the columns of tokens alone is asked of the inner mask.
        is_token: Tensor | slice
        if at.column_index is None:
            part = at.narrow(range(at.columns.start, max(at.columns.start, min(at.columns.stop, self.n))))
            is_token = slice(0, len(part.columns))
        else:
            is_token = at.j.flatten() < self.n
            index = at.column_index[is_token.to(at.column_index.device)]
            part = replace(at, columns=range(len(index)), column_index=index)
        seen = self.tokens.allows(replace(part, n=self.n))
        seen = seen.expand(torch.broadcast_shapes(seen.shape, (1, len(part.columns))))
        allowed = seen.new_ones(*seen.shape[:-1], len(at.columns))
        allowed[..., is_token] = seen
        return allowed

    def coverage(self, at: Tile) -> BlockState:
        # A tile that has an appended key is not all the inner mask's.
        if at.column_index is not None or at.columns.stop > self.n:
            return BlockState.PARTIAL
        return self.tokens.coverage(replace(at, n=self.n))

    def check(self, batch: tuple[int, ...], heads: int, m: int, n: int) -> None:
        self.tokens.check(batch, heads, m, self.n)

    def name(self) -> str:
        return f"{self.tokens.name()} of the first {self.n} keys"


def _mask_with_appended(mask: Mask, real: int, extra: int) -> Mask:
    """Extend a mask of `real` keys by `extra` keys that every query sees."""
    if not extra:
        return mask
    if mask.log_weights():
        rule = "an additive mask is given as a tensor where the layer appends keys."
        fix = "attn_mask=t, the tensor itself."
        raise ShapeError(rule, mask.name(), fix, attn_mask=mask.name(), where="MultiHeadAttention()")
    return _WithAppended(mask, real)


def _mask_from_torch(t: Tensor, extra: int) -> Mask:
    """Return a mask tensor of torch as a Mask, with `extra` more keys that every query sees.

    In torch's tensor True hides a pair; numbers are added to the logits.
    """
    if t.is_floating_point():
        return from_tensor(functional.pad(t, (0, extra)) if extra else t)
    seen = ~t.bool()
    return from_tensor(functional.pad(seen, (0, extra), value=True) if extra else seen)


def _check_heads(embed_dim: int, num_heads: int, num_kv_heads: int) -> None:
    """Raise a ShapeError unless num_heads divides embed_dim, and num_kv_heads divides num_heads."""
    whole = all(isinstance(n, int) and n > 0 for n in (embed_dim, num_heads, num_kv_heads))
    if whole and embed_dim % num_heads == 0 and num_heads % num_kv_heads == 0:
        return
    rule = "num_heads must divide embed_dim, and num_kv_heads must divide num_heads."
    found = f"embed_dim = {embed_dim}, num_heads = {num_heads}, num_kv_heads = {num_kv_heads}"
    raise ShapeError(rule, found, "MultiHeadAttention(embed_dim=512, num_heads=8)")
