"""What may stand in the place of a mask: a mask, a tensor, or a function of positions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from attlas.errors import DtypeError, kind
from attlas.masks import Mask, from_function, from_tensor


def as_mask(mask: Mask | Tensor | Callable[..., Any]) -> Mask:
    """Return an argument `mask` as a `Mask`, or raise a DtypeError."""
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor):
        return from_tensor(mask)
    if callable(mask) and not isinstance(mask, type) and not hasattr(mask, "mask_mod"):
        return from_function(mask)
    fix = "mask=attlas.Causal()"
    if isinstance(mask, type):
        fix = f"mask={mask.__name__}(), an object and not its class."
    elif hasattr(mask, "mask_mod"):
        fix = "mask=block_mask.mask_mod, the function that it was made of."
    elif hasattr(mask, "__array__"):
        fix = "mask=torch.from_numpy(mask)"
    elif isinstance(mask, list | tuple):
        fix = "one mask of several: mask=first & second."
    rule = "mask must be a Mask, a bool or float tensor, or a function mask_mod(b, h, i, j)."
    named = {"mask": mask.__name__ if isinstance(mask, type) else type(mask).__name__}
    raise DtypeError(rule, kind(mask), fix, arguments=named, where="attend()")
