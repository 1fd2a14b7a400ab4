"""The mask function that transformers calls once a forward pass: a tensor that holds no numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils import _pytree as pytree
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from attlas.masks import Causal, Mask, Padding, Window, from_function, from_tensor
from attlas.tiles import Tile

__all__ = ["LazyMask", "attention_mask", "mask_of"]

# A rule of transformers: batch, head, query and key, counted from the start of the text, to True or False.
Rule = Callable[[Any, Any, Any, Any], Any]

_ATEN = torch.ops.aten
_THEIRS = causal_mask_function.__module__


class LazyMask(Tensor):
    """A mask of attlas in the clothes of an additive tensor of shape (batch, 1, m, n).

    Models hand masks on, slice and move them; nearly none computes with them. So this tensor holds no
    numbers. Where a model does compute with it, it is written out as ``eager`` would have it: 0 where a
    pair may attend, the smallest number of the dtype elsewhere.

    Parameters
    ----------
    mask : Mask or None
        Which pairs may attend; None allows all.
    shape : tuple of int
        Shape that the model sees.
    dtype : torch.dtype
        Floating point dtype that the model sees.
    device : torch.device or str
        Device that the model sees.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas.huggingface import LazyMask
    >>> mask = LazyMask(attlas.Causal(), (1, 1, 3, 3), torch.float32, "cpu")
    >>> (mask == 0).int()[0, 0]
    tensor([[1, 0, 0],
            [1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """

    mask: Mask | None

    @staticmethod
    def __new__(
        cls, mask: Mask | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
    ) -> LazyMask:
        tensor = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=torch.device(device))
        tensor.mask = mask
        return tensor

    def __init__(
        self, mask: Mask | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
    ) -> None:
        super().__init__()

    def __repr__(self, **_: object) -> str:  # type: ignore[override]  # torch passes the contents, and there are none
        name = "everything" if self.mask is None else self.mask.name()
        return f"LazyMask({name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def allowed(self) -> Tensor:
        """Return the whole mask, True where a pair may attend; m · n bytes for each batch."""
        batch, _, m, n = self.shape
        if self.mask is None:
            return torch.ones(self.shape, dtype=torch.bool, device=self.device)
        at = Tile(
            range(batch),
            range(1),
            range(m),
            range(n),
            m,
            n,
            torch.arange(batch),
            torch.zeros(1, dtype=torch.int64),
            self.device,
        )
        return self.mask.allows(at).expand(self.shape)

    def additive(self) -> Tensor:
        """Return the whole mask as ``eager`` writes it."""
        lowest = torch.finfo(self.dtype).min
        zeros = torch.zeros(self.shape, dtype=self.dtype, device=self.device)
        return zeros.masked_fill(~self.allowed(), lowest)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch annotates it loosely
        cls,
        func: Any,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in (_ATEN.detach.default, _ATEN.alias.default, _ATEN.clone.default, _ATEN._to_copy.default):
            dtype, device = kwargs.get("dtype") or args[0].dtype, kwargs.get("device") or args[0].device
            if dtype.is_floating_point:
                return cls(args[0].mask, tuple(args[0].shape), dtype, device)
        if func is _ATEN.slice.Tensor and not kwargs:
            part = _leading_part(*args)
            if part is not None:
                return cls(args[0].mask, part, args[0].dtype, args[0].device)
        args, kwargs = pytree.tree_map_only(LazyMask, _written_out, (args, kwargs))
        return func(*args, **kwargs)


def _written_out(mask: LazyMask) -> Tensor:
    # Below __torch_dispatch__ torch has switched vmap off for this thread, and a rule may need it: use another one.
    with ThreadPoolExecutor(1) as other:
        return other.submit(mask.additive).result()


def _leading_part(
    mask: LazyMask, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> tuple[int, ...] | None:
    """Return the shape of a slice that keeps places as they are, or None for another slice."""
    if (start or 0) != 0 or step != 1:
        return None
    size = mask.shape[dim]
    shape = list(mask.shape)
    shape[dim] = size if end is None else min(end, size) if end >= 0 else max(size + end, 0)
    return tuple(shape)


def mask_of(given: Tensor, n: int) -> Mask | None:
    """Return the mask that a tensor with four axes stands for.

    Parameters
    ----------
    given : Tensor, shape (batch, 1 or heads, m, n or more)
        A `LazyMask`, or a boolean or additive tensor that the user made.
    n : int
        Number of keys; what a static cache has beyond is cut off.
    """
    if isinstance(given, LazyMask):
        return given.mask
    given = given[..., :n]
    if given.dtype is torch.bool:
        return from_tensor(given)
    # "Forbidden" is the smallest number of the dtype in transformers, and a row of nothing else must stay empty.
    allowed = given > torch.finfo(given.dtype).min
    if bool((given.masked_fill(~allowed, 0) == 0).all()):
        return from_tensor(allowed)
    return from_tensor(given.masked_fill(~allowed, float("-inf")))


def attention_mask(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Rule = causal_mask_function,
    attention_mask: Tensor | None = None,
    use_vmap: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **kwargs: object,
) -> LazyMask:
    """Return the mask of one forward pass, never as numbers.

    Parameters
    ----------
    batch_size, q_length, kv_length : int
        Sizes of the mask.
    q_offset, kv_offset : int
        Absolute position of the first query and of the first key; they differ with a cache.
    mask_function : callable
        Batch, head, query and key (absolute positions) to True where the pair may attend.
    attention_mask : Tensor, optional, shape (batch, tokens)
        True for text, False for padding.
    use_vmap : bool
        Whether `mask_function` takes single numbers only and must be vectorised.
    dtype, device
        Dtype and device of the tensor that the mask stands for.
    **kwargs
        Hints for other implementations; they change nothing here.

    Returns
    -------
    LazyMask, shape (batch, 1, m, n)
        Never None: a model without `is_causal` takes None for "causal".

    Examples
    --------
    >>> import torch
    >>> from attlas.huggingface import attention_mask
    >>> padding = torch.tensor([[0, 1, 1, 1]])
    >>> attention_mask(batch_size=1, q_length=4, kv_length=4, attention_mask=padding)
    LazyMask(Causal(offset=0) & Padding(3, side='left'), shape=(1, 1, 4, 4), dtype=torch.float32)
    """
    first_query = int(q_offset)  # a static cache passes a tensor
    mask: Mask | None = None
    if mask_function is not bidirectional_mask_function:
        mask = _known(mask_function, first_query - kv_offset)
        if mask is None:
            mask = from_function(_moved(mask_function, first_query, kv_offset), broadcasts=not use_vmap)
    padding = None if attention_mask is None else _padding(attention_mask, kv_length, kv_offset)
    if padding is not None:
        mask = padding if mask is None else mask & padding
    return LazyMask(mask, (batch_size, 1, q_length, kv_length), dtype, device)


def _known(rule: Rule, shift: int) -> Mask | None:
    """Return the mask of attlas for a rule that transformers makes itself, so that whole tiles are skipped."""
    if rule is causal_mask_function:
        return Causal(offset=shift)
    parts = _closed_over(rule, "and_masks.<locals>.and_mask", "mask_functions")
    if isinstance(parts, tuple) and len(parts) == 2 and parts[1] is causal_mask_function:
        width = _closed_over(parts[0], "sliding_window_overlay.<locals>.inner_mask", "sliding_window")
        if isinstance(width, int):
            return Window(width - 1, 0, offset=shift)
    return None


def _closed_over(rule: Rule, made_by: str, name: str) -> object:
    """Return a variable that an inner function of transformers closed over; None where it is another function."""
    if getattr(rule, "__qualname__", "") != made_by or getattr(rule, "__module__", "") != _THEIRS:
        return None
    return inspect.getclosurevars(rule).nonlocals.get(name)


def _moved(rule: Rule, first_query: int, first_key: int) -> Rule:
    """Let a rule of absolute positions be asked for rows and columns of the matrix."""
    return lambda b, h, i, j: rule(b, h, i + first_query, j + first_key)


def _padding(given: Tensor, n: int, first_key: int) -> Mask | None:
    """Return the mask of a (batch, tokens) tensor of text and padding; None where all is text."""
    missing = n + first_key - given.shape[-1]
    keep = functional.pad(given.to(torch.bool), (0, max(missing, 0)))[:, first_key : first_key + n]
    if bool(keep.all()):
        return None
    count = keep.sum(-1)
    before = (keep.cumsum(-1) == 0).sum(-1)  # padding on the left
    after = (keep.flip(-1).cumsum(-1) == 0).sum(-1)
    if not bool((before + count + after == n).all()):  # padding between text, or nothing but padding
        return from_tensor(keep[:, None, None, :])
    if not bool(after.any()):
        return Padding(count, side="left")
    return Padding(n - after) if not bool(before.any()) else Padding(n - after) & Padding(n - before, side="left")
