"""Replaces torch's scaled_dot_product_attention during a recording by one that also records its matrix."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from attlas.attend import attend
from attlas.masks import Causal, Mask, from_tensor
from attlas.matrix import AttentionMatrix
from attlas.recording.hooks import is_changing, is_recording, offer, pooled_in, uncompiled
from attlas.tensorlike import dropped_product

__all__ = ["matrix_of", "patched_sdpa"]

_NAME = "scaled_dot_product_attention"
_original = functional.scaled_dot_product_attention
_lock = threading.Lock()
_finders: list[Callable[[], nn.Module | None]] = []
_patched_names: list[tuple[ModuleType, str]] = []


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
    _install(innermost)
    try:
        yield
    finally:
        _remove(innermost)


_fast_path = True


def _install(finder: Callable[[], nn.Module | None]) -> None:
    global _fast_path, _offer, _change  # noqa: PLW0603 - what is put back when the last recording ends, and what is called
    with _lock:
        _offer, _change = uncompiled(_offer_to_finders), uncompiled(_pool_for_finders)
        _finders.append(finder)
        if len(_finders) > 1:
            return
        _fast_path = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        for module in list(sys.modules.values()):
            names = vars(module) if isinstance(module, ModuleType) and module.__name__ != __name__ else {}
            _patched_names.extend((module, name) for name, value in list(names.items()) if value is _original)
        for module, name in _patched_names:
            setattr(module, name, scaled_dot_product_attention)


def _remove(finder: Callable[[], nn.Module | None]) -> None:
    with _lock:
        _finders.remove(finder)
        if _finders:
            return
        torch.backends.mha.set_fastpath_enabled(_fast_path)
        for module, name in _patched_names:
            if getattr(module, name, None) is scaled_dot_product_attention:
                setattr(module, name, _original)
        _patched_names.clear()


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
    """Return what torch returns, as interventions change it, and offer the weights on the way."""
    options = (attn_mask, is_causal, scale, enable_gqa)
    # Kernels of attlas call torch's function, too, and their matrix was offered already.
    if not is_recording() or sys._getframe(1).f_globals.get("__name__", "").startswith("attlas."):
        return _original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if is_changing():
        return _change(query, key, value, dropout_p, *options)  # type: ignore[no-any-return]  # a Tensor
    out = _original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    _offer(query, key, value, *options)
    return out


def _modules() -> list[nn.Module]:
    """Return the modules that run now, each once, of all models that are followed."""
    found = [finder() for finder in tuple(_finders)]
    return list({id(module): module for module in found if module is not None}.values())


def _offer_to_finders(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> None:
    values = _values(query, key, value, enable_gqa=options[-1])
    for module in _modules():
        offer(module, matrix_of(query, key, *options), values=values)


def _values(query: Tensor, key: Tensor, value: Tensor, *, enable_gqa: bool) -> Tensor:
    """Return values with the four axes of their matrix."""
    lead = _leading(query, key, enable_gqa)
    return _four_axes(value, (*lead[:-1], value.shape[-3]) if enable_gqa else lead, enable_gqa)


def _pool_for_finders(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float,
    attn_mask: Tensor | None,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Return the output of one call of torch's function as interventions change it."""
    own = matrix_of(query, key, attn_mask, is_causal, scale, enable_gqa)

    def pool(A: AttentionMatrix, v: Tensor) -> Tensor:
        if A is own and v is values:  # nothing is changed
            out = _original(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
            return out.reshape(*own.shape[:-1], out.shape[-1])
        return dropped_product(A, v, dropout_p)

    values = _values(query, key, value, enable_gqa=enable_gqa)
    out, _ = pooled_in(_modules(), own, values, pool)
    return out.reshape(*_leading(query, key, enable_gqa), *out.shape[-2:])


# What `_install` makes of it before the function is caught.
_offer: Callable[..., None] = _offer_to_finders
_change: Callable[..., Any] = _pool_for_finders


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
    lead = _leading(query, key, enable_gqa)
    mask: Mask | None = Causal(0) if is_causal else None
    if attn_mask is not None:
        t = attn_mask
        if t.ndim > 4 or len(lead) != 2:
            t = _four_axes(t, lead, enable_gqa)
        mask = from_tensor(t[(None,) * (4 - t.ndim)])
    q = _four_axes(query, lead, enable_gqa)
    k = _four_axes(key, (*lead[:-1], key.shape[-3]) if enable_gqa else lead, enable_gqa)
    return attend(q, k, mask=mask, scale=scale)


def _leading(query: Tensor, key: Tensor, enable_gqa: bool) -> tuple[int, ...]:
    """Return the leading axes of what torch's function returns."""
    return tuple(query.shape[:-2] if enable_gqa else torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]))


def _four_axes(t: Tensor, lead: tuple[int, ...], enable_gqa: bool) -> Tensor:
    """Give a tensor with these leading axes the axes (batch, heads, tokens, size)."""
    t = t.expand(*lead, *t.shape[-2:])
    if t.ndim == 2:
        return t[None, None]
    if t.ndim == 3:
        return t.unsqueeze(0 if enable_gqa else 1)
    return t if t.ndim == 4 else t.flatten(0, -4)
