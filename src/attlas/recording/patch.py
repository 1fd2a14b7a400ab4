"""Replaces torch's scaled_dot_product_attention during a recording by one that also records its matrix."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from attlas.foundation.autocast import cast
from attlas.foundation.blocks import SharedBlocks
from attlas.foundation.patching import replaced_everywhere
from attlas.masks import Causal, Mask, from_tensor
from attlas.matrix import AttentionMatrix, observers
from attlas.matrix.attend import attend
from attlas.matrix.handwritten.scope import current
from attlas.recording.hooks import is_changing, is_recording, offer, pooled_in, uncompiled

_FUNCTION_NAME = "scaled_dot_product_attention"
_original_attention = functional.scaled_dot_product_attention
# torch's attention with weights, for models that call it themselves: WavLM, pooling heads.
_original_with_weights = functional.multi_head_attention_forward
_patches = SharedBlocks()
_module_finders: list[Callable[[], nn.Module | None]] = []  # the `innermost` of each open block
_is_listening: ContextVar[bool] = ContextVar("attlas_listens", default=False)
_shown_matrices: ContextVar[list[AttentionMatrix] | None] = ContextVar("attlas_shown", default=None)


@contextmanager
def patched_sdpa(innermost: Callable[[], nn.Module | None]) -> Iterator[None]:
    """Offer the matrix of each call of torch's function, for the time of a ``with`` block.

    Parameters
    ----------
    innermost : callable
        Returns the module that runs in this thread; None where it is none of the recorded model's.

    Notes
    -----
    Every loaded module that holds the function under any name is patched; other threads notice a call
    more. What holds it elsewhere (a default argument, a closure, an attribute of an object) keeps torch's.
    The fast path of ``nn.TransformerEncoder`` and ``nn.MultiheadAttention`` is off for the time.
    """
    with _patches.shared("attention", _functions_replaced):
        with _patches.lock:
            _module_finders.append(innermost)
        try:
            yield
        finally:
            with _patches.lock:
                _module_finders.remove(innermost)


@contextmanager
def listening() -> Iterator[None]:
    """Record calls of torch's attention function in this thread without computing them: they return zeros."""
    token = _is_listening.set(True)
    try:
        yield
    finally:
        _is_listening.reset(token)


@contextmanager
def shown_matrices() -> Iterator[list[AttentionMatrix]]:
    """Collect the matrices of calls of torch's functions that interventions change, for a block in this thread."""
    found: list[AttentionMatrix] = []
    token = _shown_matrices.set(found)
    try:
        yield found
    finally:
        _shown_matrices.reset(token)


@contextmanager
def _functions_replaced() -> Iterator[None]:
    """Replace torch's functions, and let its layers call them, for the time of a ``with`` block."""
    global _offer_or_operator, _change_or_operator  # made into functions that torch.compile leaves alone
    _offer_or_operator, _change_or_operator = uncompiled(_offer_to_finders), uncompiled(_pool_for_finders)
    functions = {
        _original_attention: scaled_dot_product_attention,
        _original_with_weights: multi_head_attention_forward,
    }
    fast_path = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with replaced_everywhere(functions):
            observers.patched = True
            yield
    finally:
        observers.patched = False
        torch.backends.mha.set_fastpath_enabled(fast_path)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the output of torch's function, changed by interventions, and offer the weights to recordings."""
    options = (attn_mask, is_causal, scale, enable_gqa)
    compute = partial(
        _original_attention, query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )
    # Kernels of attlas call torch's function, too, and their matrix was offered already.
    if not is_recording() or sys._getframe(1).f_globals.get("__name__", "").startswith("attlas."):
        return compute()
    # Inside `listening()`: the matrix is wanted alone, and zeros stand for the output.
    if _is_listening.get():
        _offer_or_operator(query, key, value, *options)
        return query.new_zeros(*_leading_axes(query, key, enable_gqa), query.shape[-2], value.shape[-1])
    if is_changing():
        return _change_or_operator(compute, query, key, value, dropout_p, *options)
    out = compute()
    _offer_or_operator(query, key, value, *options)
    return out


def multi_head_attention_forward(*args: Any, **kwargs: Any) -> Any:
    """Return what torch's function of this name returns, and offer its weights where it is asked for them.

    Without weights it calls torch's function for attention, where recordings hear it. A layer of torch is heard as a
    whole, and attention that is lazy is heard by its products.
    """
    of_layer = sys._getframe(1).f_globals.get("__name__") == "torch.nn.modules.activation"
    if of_layer or not is_recording() or _is_listening.get() or current() is not None or not _running_modules():
        return _original_with_weights(*args, **kwargs)
    given = inspect.signature(_original_with_weights).bind(*args, **kwargs)
    given.apply_defaults()
    options = given.arguments
    if not options["need_weights"]:
        return _original_with_weights(*args, **kwargs)

    def ask(need_weights: bool) -> Any:
        return _original_with_weights(**{**options, "need_weights": need_weights})

    answer: Callable[..., Any] = uncompiled(answered)
    return answer(ask, average=options["average_attn_weights"], batched=options["query"].ndim == 3)


def answered(ask: Callable[[bool], Any], *, average: bool, batched: bool) -> tuple[Tensor, Tensor]:
    """Return what a function of torch returns when asked for weights, and offer its matrix to recordings.

    Parameters
    ----------
    ask : callable
        Calls it with weights or without. Without, it calls torch's function for attention, where interventions change
        it.
    average : bool
        Whether it returns the mean of the heads.
    batched : bool
        Whether its weights have a batch axis.
    """
    if is_changing():
        with shown_matrices() as shown:
            out, _ = ask(False)
        weights = shown[-1].to_dense().to(out.dtype)
        weights = weights.mean(dim=1) if average else weights
        return out, weights if batched else weights.squeeze(0)
    found: tuple[Tensor, Tensor] = ask(True)
    with torch.no_grad(), listening():  # once more without weights: it then calls torch's function, which is heard
        ask(False)
    return found


def _running_modules() -> list[nn.Module]:
    """Return the modules that run now, each once, of all models that are followed."""
    found = [finder() for finder in tuple(_module_finders)]
    return list({id(module): module for module in found if module is not None}.values())


def _offer_to_finders(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> None:
    """Offer the matrix of one call of torch's function to recordings, for each module that `_module_finders` find."""
    values = _tokens_with_four_axes(cast(value), _leading_axes(query, key, options[-1]), options[-1])
    for module in _running_modules():
        offer(module, matrix_of(query, key, *options), values=values)


def _pool_for_finders(
    compute: Callable[[], Tensor], query: Tensor, key: Tensor, value: Tensor, dropout_p: float, *options: Any
) -> Tensor:
    """Return the output of one call of torch's function as interventions change it; unchanged, it is `compute()`."""
    own, lead = matrix_of(query, key, *options), _leading_axes(query, key, options[-1])
    values = _tokens_with_four_axes(cast(value), lead, options[-1])

    def pool(A: AttentionMatrix, v: Tensor) -> Tensor:
        """Return ``A @ v``, as torch's own function gives it unless an intervention changed the matrix or values."""
        if A is own and v is values:
            out = compute()
            return out.reshape(*own.shape[:-1], out.shape[-1])
        return A.pooled(v, dropout_p)

    out, shown = pooled_in(_running_modules(), own, values, pool)
    # A list where a caller collects matrices, by `shown_matrices`.
    found = _shown_matrices.get()
    if found is not None:
        found.append(shown)
    return out.reshape(*lead, *out.shape[-2:])


_offer_or_operator: Callable[..., None] = _offer_to_finders
_change_or_operator: Callable[..., Tensor] = _pool_for_finders


def matrix_of(
    query: Tensor,
    key: Tensor,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionMatrix:
    """Return the weights of one call of torch's function.

    Parameters
    ----------
    query : Tensor, shape (..., m, d)
        Queries; three axes are (batch, m, d), and (heads, m, d) with `enable_gqa`.
    key : Tensor, shape (..., n, d)
        Keys.
    attn_mask : Tensor, optional, broadcastable to (..., m, n)
        True where a query may see a key, or numbers that are added.
    is_causal : bool, default False
        Whether query i sees the keys up to i, counted from the first ones also where m is not n.
    scale : float, optional
        Factor of the dot product.
    enable_gqa : bool, default False
        Whether key has fewer heads.
    """
    lead = _leading_axes(query, key, enable_gqa)
    mask: Mask | None = Causal(0) if is_causal else None
    if attn_mask is not None:
        t = attn_mask
        if t.ndim > 4 or len(lead) != 2:
            t = _four_axes(t, lead, enable_gqa)
        mask = from_tensor(t[(None,) * (4 - t.ndim)])
    q, k = (_tokens_with_four_axes(t, lead, enable_gqa) for t in (query, key))
    return attend(q, k, mask=mask, scale=scale)


def _leading_axes(query: Tensor, key: Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """Return the leading axes of what torch's function returns."""
    return tuple(query.shape[:-2] if enable_gqa else torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]))


def _tokens_with_four_axes(t: Tensor, lead: tuple[int, ...], enable_gqa: bool) -> Tensor:
    """Give queries, keys or values the axes (batch, heads, tokens, size).

    `lead` has the leading axes of the output. With `enable_gqa` a tensor may have fewer heads, and keeps these.
    """
    return _four_axes(t, (*lead[:-1], t.shape[-3]) if enable_gqa else lead, enable_gqa)


def _four_axes(t: Tensor, lead: tuple[int, ...], enable_gqa: bool) -> Tensor:
    """Give a tensor with these leading axes the axes (batch, heads, tokens, size).

    Of three axes the first are heads with `enable_gqa`, as torch reads them then, and else the batch.
    """
    t = t.expand(*lead, *t.shape[-2:])
    if t.ndim == 2:
        return t[None, None]
    if t.ndim == 3:
        return t.unsqueeze(0 if enable_gqa else 1)
    return t if t.ndim == 4 else t.flatten(0, -4)
