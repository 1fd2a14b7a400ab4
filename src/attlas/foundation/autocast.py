"""What ``torch.autocast`` does with the arguments of torch's own attention, done with those of attlas."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def autocast_dtype(t: object) -> torch.dtype | None:
    """Return the dtype to which ``torch.autocast`` casts a tensor; None where it is off, or leaves the tensor alone.

    It leaves alone what is no tensor of floating point, and float64.
    """
    if not isinstance(t, Tensor) or not t.is_floating_point() or t.dtype is torch.float64:
        return None
    kind = t.device.type
    return torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else None


def cast(t: Any, *, rounds: bool = True) -> Any:
    """Return queries, keys or values as ``torch.autocast`` casts them, with a graph to what they were.

    Parameters
    ----------
    t : Tensor
        What is no tensor of floating point is returned as it is.
    rounds : bool, default True
        Whether the score is one whose tokens are rounded to 16 bits, as those of torch's attention; tokens of others
        are float32, as those of ``torch.cdist``.
    """
    dtype = autocast_dtype(t)
    return t if dtype is None else t.to(dtype if rounds else torch.float32)


def cast_values(v: Any, tokens: Tensor) -> tuple[Any, torch.dtype | None]:
    """Return the values, cast as ``torch.autocast`` casts them, and the dtype of the product.

    Parameters
    ----------
    v : Tensor
        Values. What is no tensor is returned as it is.
    tokens : Tensor
        Keys of the matrix, in the dtype that the product is computed in.

    Returns
    -------
    values : Tensor
        The values in the dtype of the tokens.
    dtype : torch.dtype or None
        Dtype of the product; None where it is that of the values.
    """
    kind = tokens.device.type
    if kind == "meta" or not torch.is_autocast_enabled(kind):
        return v, None
    dtype = autocast_dtype(v)
    if dtype is None or autocast_dtype(tokens) is None:
        return v, None
    return v.to(tokens.dtype), dtype


def without_autocast(f: Callable[P, R]) -> Callable[P, R]:
    """Switch ``torch.autocast`` off in a function: what it computes stays in the dtype of its arguments."""

    @wraps(f)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        # Only where it is on: to enter `torch.autocast` costs time in each call.
        with ExitStack() as stack:
            for kind in ("cpu", "cuda", "xpu", "mps"):
                if torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, enabled=False))
            return f(*args, **kwargs)

    return run
