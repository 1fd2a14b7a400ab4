"""Replaces torch's batched products for a block, so that products of queries and keys are not computed."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from attlas.foundation.arguments import arguments_of, with_arguments
from attlas.foundation.autocast import autocast_dtype
from attlas.foundation.blocks import SharedBlocks
from attlas.foundation.compat import transforming
from attlas.foundation.patching import replaced_everywhere
from attlas.matrix import observers
from attlas.matrix.handwritten.lazy import Uncomputed
from attlas.matrix.handwritten.logits import Logits, is_plain
from attlas.matrix.handwritten.scope import Scope, current, entered
from attlas.matrix.handwritten.state import Product, State
from attlas.matrix.handwritten.steps import Step

_patches = SharedBlocks()
_CAUGHT_FUNCTIONS = ("matmul", "bmm", "baddbmm", "einsum", "softmax")
_CAUGHT_METHODS = ("matmul", "bmm", "baddbmm", "__matmul__", "softmax")


@contextmanager
def catching(scope: Scope) -> Iterator[None]:
    """Let products of queries and keys in this thread be lazy logits, for the time of a ``with`` block.

    Notes
    -----
    Every loaded module that holds one of torch's functions is patched, see `replaced_everywhere`; other threads notice
    a call more. What holds it elsewhere, code inside torch.compile and scripts of torch.jit keep torch's, and compute
    as before.
    """
    with _patches.shared("products", _products_replaced), entered(scope):
        yield


@contextmanager
def _products_replaced() -> Iterator[None]:
    """Replace torch's products and softmax, as functions and as methods, for a ``with`` block."""
    makers: dict[str, Callable[..., Any]] = {
        "matmul": _logits_of_matmul,
        "bmm": _logits_of_matmul,
        "__matmul__": _logits_of_matmul,
        "baddbmm": _logits_of_baddbmm,
        "einsum": _logits_of_einsum,
        "softmax": _count_plain_softmax,
    }
    of_tensors = makers | {"softmax": _softmax_of_model}
    functions = {
        getattr(torch, name): _replacement_of(getattr(torch, name), makers[name]) for name in _CAUGHT_FUNCTIONS
    }
    functions[functional.softmax] = _replacement_of(functional.softmax, _count_plain_softmax)
    methods = [(name, vars(Tensor).get(name), getattr(Tensor, name)) for name in _CAUGHT_METHODS]
    apply = vars(torch.autograd.Function)["apply"]
    for name, _, value in methods:
        setattr(Tensor, name, _replacement_of(value, of_tensors[name]))
    torch.autograd.Function.apply = classmethod(_apply_to_numbers)  # type: ignore[assignment, method-assign]
    try:
        with replaced_everywhere(functions):
            yield
    finally:
        for name, own, _ in methods:
            if own is None:  # torch's method is inherited
                delattr(Tensor, name)
            else:
                setattr(Tensor, name, own)
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]


def _replacement_of(original: Callable[..., Any], make: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function that stands for one of torch's: `make` gives lazy logits, or NotImplemented."""

    def run(*args: Any, **kwargs: Any) -> Any:
        """Return lazy logits where `make` gives them, else what torch's function returns."""
        if torch.compiler.is_compiling():  # first: a compiler must not meet the rest
            return original(*args, **kwargs)
        scope = current()
        found = NotImplemented if scope is None else make(scope, original, args, kwargs)
        return original(*args, **kwargs) if found is NotImplemented else found

    run.__name__ = getattr(original, "__name__", "function")
    run.__doc__ = original.__doc__
    run.__wrapped__ = original  # type: ignore[attr-defined]  # as functools.wraps does
    return run


def _apply_to_numbers(cls: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a function with a backward of its own with numbers: it sees no operation that a lazy tensor could follow."""
    if arguments_of(Uncomputed, args, kwargs):  # else its lists stay what they are
        args, kwargs = with_arguments(Uncomputed, lambda part: part.written_out(cls.__name__), args, kwargs)
    return _TORCH_APPLY(cls, *args, **kwargs)


_TORCH_APPLY = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]  # a class method


# ------------------------------------------------------------------------------------------------------------- products


def _logits_of_matmul(scope: Scope, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return ``q @ k.mT`` as lazy logits; NotImplemented for any other product."""
    if kwargs or len(args) != 2:
        return NotImplemented
    a, b = args
    if not (_is_batched(a) and _is_batched(b)) or not _may_be_logits(a, b.shape[-2], b.shape[-1]):
        return NotImplemented
    is_transposed = _is_transposed(b)
    # A right factor that was not transposed counts as keys only if it has more columns than rows: more keys than
    # coordinates.
    if not (is_transposed or b.shape[-2] < b.shape[-1]) or not _is_of_model():
        return NotImplemented
    return _lazy_logits(original, (a, b), a, b.mT, (), is_certain=is_transposed)


def _logits_of_baddbmm(
    scope: Scope, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the logits of ``beta * bias + alpha * q @ k.mT``; NotImplemented for another product."""
    given = dict(zip(("input", "batch1", "batch2"), args, strict=False)) | kwargs
    beta, alpha = given.pop("beta", 1), given.pop("alpha", 1)
    if given.keys() != {"input", "batch1", "batch2"} or not all(isinstance(x, int | float) for x in (beta, alpha)):
        return NotImplemented
    bias, a, b = given["input"], given["batch1"], given["batch2"]
    if not (_is_batched(a) and _is_batched(b) and _is_tensor(bias)):
        return NotImplemented
    if not _may_be_logits(a, b.shape[-2], b.shape[-1]) or not _is_transposed(b) or not _is_of_model():
        return NotImplemented
    steps = () if alpha == 1 else (Step("scale", numbers=(float(alpha),)),)
    logits = _lazy_logits(original, args, a, b.mT, steps, kwargs=kwargs)
    if logits is NotImplemented or beta == 0:
        return logits
    t = logits.operand(bias)
    if t is None:
        return NotImplemented
    state = logits.state
    state.steps = (*steps, Step("add", (t,), (float(beta),)))
    state.product.included = len(state.steps)  # computing the product does these steps too
    return logits


def _logits_of_einsum(scope: Scope, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the logits of an einsum that sums over the last axis of queries and keys; NotImplemented for another."""
    if kwargs or not args or not isinstance(args[0], str):
        return NotImplemented
    operands = tuple(args[1]) if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
    if len(operands) != 2 or not all(map(_is_tensor, operands)):
        return NotImplemented
    terms, arrow, out = args[0].replace(" ", "").partition("->")
    letters = terms.split(",")
    if not arrow or "." in args[0] or len(letters) != 2 or len(out) < 3:
        return NotImplemented
    if any(len(set(term)) != t.ndim or len(term) != t.ndim for term, t in zip(letters, operands, strict=True)):
        return NotImplemented
    lead, i, j = out[:-2], out[-2], out[-1]
    if i in letters[1] and j in letters[0]:
        operands, letters = operands[::-1], letters[::-1]
    (first, second), (a, b) = letters, operands
    summed = {*first, *second} - {*out}
    alone = i in first and i not in second and j in second and j not in first
    if len(summed) != 1 or not alone or not summed <= {*first} & {*second} or {*first, *second} - summed != {*out}:
        return NotImplemented
    (c,) = summed
    q, k = _axes_in_order(a, first, [*lead, i, c]), _axes_in_order(b, second, [*lead, j, c])
    if not _may_be_logits(q, k.shape[-1], k.shape[-2]) or not _is_of_model():
        return NotImplemented
    # Keys whose summed axis lies last, or after that of the tokens, were written for a product of queries and keys.
    is_certain = first[-1] == second[-1] == c or second.index(c) > second.index(j)
    if not is_certain and k.shape[-1] >= k.shape[-2]:
        return NotImplemented
    return _lazy_logits(original, args, q, k, (), is_certain=is_certain)


def _axes_in_order(t: Tensor, letters: str, wanted: list[str]) -> Tensor:
    """Return a tensor with its axes in an order, and an axis of size 1 for each letter that it lacks."""
    t = t.permute([letters.index(letter) for letter in wanted if letter in letters])
    return t[tuple(slice(None) if letter in letters else None for letter in wanted)]


def _lazy_logits(
    original: Callable[..., Any],
    args: tuple[Any, ...],
    q: Tensor,
    k: Tensor,
    steps: tuple[Step, ...],
    *,
    is_certain: bool = True,
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """Return lazy logits; NotImplemented where queries and keys do not fit together, so that torch says so.

    `is_certain` says that the keys were transposed for the product, as only products of queries and keys are; one that
    is not certain may be another product, and is not counted where it is computed. `steps` are what `args` do besides.
    """
    own, other = tuple(q.shape[:-2]), tuple(k.shape[:-2])
    if own == other:
        lead = own
    else:
        try:
            lead = tuple(torch.broadcast_shapes(own, other))
        except RuntimeError:
            return NotImplemented
    dtype = autocast_dtype(q) or q.dtype
    if q.shape[-1] != k.shape[-1] or (autocast_dtype(k) or k.dtype) is not dtype or q.device != k.device:
        return NotImplemented
    given = tuple(t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() and t.dtype is not dtype else t
                  for t in args)  # fmt: skip
    product = Product(q, k, partial(original, *given, **(kwargs or {})), lead, dtype, len(steps), is_certain)
    batch, heads = (lead[0], 1) if len(lead) == 1 else (torch.Size(lead[:-1]).numel(), lead[-1])
    state = State(product, batch, heads, steps, dtype, is_split=len(lead) > 1)
    return Logits(state, (*lead, q.shape[-2], k.shape[-2]))


def _is_tensor(t: Any) -> bool:
    """Return whether something is a stored tensor of torch itself, of floating point."""
    return is_plain(t) and t.is_floating_point()


def _is_batched(t: Any) -> bool:
    """Return whether something is a tensor of several matrices."""
    return _is_tensor(t) and t.ndim > 2


def _may_be_logits(a: Tensor, size: int, keys: int) -> bool:
    """Return whether a product may be one of queries and keys, by their sizes.

    One query is as quickly multiplied as followed, and its weights take no more memory than it does: only a recording
    needs them.
    """
    if a.shape[-1] < 2 or a.shape[-1] != size or not keys or not a.numel() or a.device.type == "meta":
        return False
    return a.shape[-2] > 1 or observers.active


def _is_transposed(b: Tensor) -> bool:
    """Return whether the rows of a right factor lie in memory as columns, as those of transposed keys do."""
    return b.stride(-2) == 1 and (b.stride(-1) != 1 or b.shape[-1] == 1)


def _is_of_model() -> bool:
    """Return whether code of a model multiplies, and not attlas or torch itself, and no transform of torch.func."""
    frame = sys._getframe(3)  # above the function that asks, and the one that replaces torch's
    while frame.f_globals.get("__name__") == __name__ and frame.f_back is not None:
        frame = frame.f_back
    name = frame.f_globals.get("__name__", "")
    if name.startswith("attlas.") or (name.startswith("torch.") and name != "torch.nn.functional"):
        return False
    return not transforming()


# -------------------------------------------------------------------------------------------------------------- softmax


def _count_plain_softmax(
    scope: Scope, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Count a softmax of numbers that may be logits: their product was not found to be one of queries and keys."""
    x: Any = args[0] if args else kwargs.get("input")
    if _is_tensor(x) and x.ndim > 2 and x.shape[-1] > 1 and x.shape[-2] > 1 and _is_of_model():
        scope.softmax_of(x)
    return NotImplemented


def _softmax_of_model(scope: Scope, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Count a softmax called as a method, unless torch's own function calls it, which was counted."""
    if sys._getframe(2).f_globals.get("__name__", "").startswith("torch."):
        return NotImplemented
    return _count_plain_softmax(scope, original, args, kwargs)
