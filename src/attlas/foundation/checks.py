"""Checks of arguments, done once in the public functions: q, k, v, the sink, devices, choices, classes, numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real
from types import UnionType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn import functional

from attlas.errors import BackendError, DeviceError, DtypeError, OutOfRangeError, ShapeError, counted, kind
from attlas.foundation.compat import replaced_by_context_parallel, tracing
from attlas.foundation.indexing import Axes

_FLOAT_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)

WITHOUT_FLOAT64 = ("mps",)  # kinds of devices


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that scores and sums are computed in: float64 for float64, else float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64; Apple's GPUs do not."""
    return device.type not in WITHOUT_FLOAT64


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the most precise dtype in which a device sums: float64, or float32 where it has no other."""
    return torch.float64 if has_float64(device) else torch.float32


def all_finite(*tensors: Tensor) -> bool:
    """Return whether no number is NaN or infinite.

    A finite sum has finite terms only, and takes a tenth of the time of a check of each number. If the sum overflows,
    each number is checked. Elsewhere than on the CPU each number is checked at once, so that the host waits only once.
    """
    if tensors and tensors[0].device.type != "cpu":
        return bool(torch.stack([t.isfinite().all() for t in tensors]).all())
    sums = (t.sum(dtype=accumulation_dtype(t.dtype)) for t in tensors)
    return all(bool(s.isfinite()) or bool(t.isfinite().all()) for s, t in zip(sums, tensors, strict=True))


def surely_finite(*tensors: Tensor) -> bool:
    """Return whether all numbers are known to be finite.

    False on a device, where the answer would have to be waited for.
    """
    return tensors[0].device.type == "cpu" and all_finite(*tensors)


def waits_for(device: torch.device) -> bool:
    """Return whether the host waits for a device where it reads a number: everywhere but on the CPU."""
    return device.type != "cpu"


def holds_numbers(t: Tensor) -> bool:
    """Return whether a tensor has numbers in its own memory.

    Tensors of the meta device have none, and neither have subclasses that stand for other tensors.
    """
    return not t.is_meta and (type(t) is Tensor or _keeps_numbers(t))


def _keeps_numbers(t: Tensor) -> bool:
    """Return whether a subclass of Tensor has its numbers itself: it does not redefine ``__torch_dispatch__``."""
    return type(t).__torch_dispatch__ is Tensor.__torch_dispatch__  # a subclass that only changes methods


def as_plain(name: str, t: Tensor) -> Tensor:
    """Return a strided tensor that attlas can compute with; a result of a collective is waited for.

    Raises
    ------
    DtypeError
        If the tensor is sparse, nested, masked, or one that is distributed over ranks.
    """
    if type(t) in (Tensor, nn.Parameter) and t.layout is torch.strided and not t.is_nested:
        return t
    found, fix = f"a tensor with layout {t.layout}", f"{name}.to_dense()"
    if t.is_nested:
        found, fix = "a nested tensor", f"{name}.to_padded_tensor(0.0), with mask=attlas.Padding(lengths)"
    elif type(t).__name__ == "AsyncCollectiveTensor":
        return t.wait()  # type: ignore[attr-defined,no-any-return]  # a result that is on its way
    elif type(t).__name__ == "DTensor":
        found, fix = "a DTensor, of which each rank holds a part", f"{name}.full_tensor(), or {name}.to_local()"
    elif type(t).__name__ == "MaskedTensor":
        found, fix = "a MaskedTensor", f"{name}.get_data(), with mask=attlas.from_tensor(...)"
    elif t.layout is torch.strided:
        if tracing() or _keeps_numbers(t) or type(t).__name__ == "FakeTensor":
            return t
        found, fix = f"a {type(t).__name__}, which stands for other tensors", "the tensor that it stands for"
    raise DtypeError(f"{name} must be an ordinary tensor.", found, fix, arguments={name: type(t).__name__})


def as_floats(value: Any) -> Tensor:
    """Return a tensor as it is, and numbers as a float64 tensor.

    Anything else gives an empty bool tensor, which the caller refuses by its dtype.
    """
    if isinstance(value, Tensor):
        return value
    try:
        plain = isinstance(value, str | bytes | bool)
        return torch.tensor(None if plain else value, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        return torch.empty(0, dtype=torch.bool)


def check_floating(rule: str, name: str, t: object, fix: str) -> None:
    """Raise a DtypeError where a value is no tensor of floating point."""
    if not (isinstance(t, Tensor) and t.is_floating_point()):
        raise wrong_type(rule, name, t, fix)


def wrong_type(rule: str, name: str, t: object, fix: str) -> DtypeError:
    """Return a DtypeError that says a value is not a tensor, or a tensor of another dtype than the rule wants."""
    given, found = (t, str(t.dtype).removeprefix("torch.")) if isinstance(t, Tensor) else (type(t).__name__, kind(t))
    return DtypeError(rule, found, fix, arguments={name: given})


def is_integer(value: object) -> TypeGuard[int]:
    """Return whether a value is an int and not a bool, which Python counts among them."""
    return isinstance(value, int) and not isinstance(value, bool)


def one_of(name: str, value: object, choices: Sequence[object], fix: str = "") -> None:
    """Raise a ShapeError unless the value of an argument is one of its choices."""
    if value in choices:
        return
    words = [f'"{choice}"' if isinstance(choice, str) else repr(choice) for choice in choices]
    rule = f"{name} must be {', '.join(words[:-1])} or {words[-1]}."
    raise ShapeError(rule, f"{name} = {value!r}", fix or f"{name}={words[0]}")


def instance_of(name: str, value: object, wanted: type | UnionType, what: str, fix: str) -> None:
    """Raise a DtypeError unless an argument is of a class; `what` is the wanted class in words, "an nn.Module"."""
    if not isinstance(value, wanted):
        raise DtypeError(f"{name} must be {what}.", kind(value), fix)


def whole_number(name: str, value: object, fix: str = "") -> int:
    """Return a count, or raise a ShapeError where it is no int above 0."""
    if is_integer(value) and value >= 1:
        return value
    fix = fix or f"give {name} as an int, such as 8."
    raise ShapeError(f"{name} must be a whole number above 0.", f"{name} = {value!r}", fix)


def check_sequence(sequence: object, batch: int) -> None:
    """Raise an OutOfRangeError unless `sequence` is the number of a sequence of the batch."""
    if not is_integer(sequence) or not 0 <= sequence < batch:
        rule, fix = "sequence must be one of the batch.", f"sequence={max(batch - 1, 0)}"
        raise OutOfRangeError(rule, f"{batch} sequences", fix, sequence=repr(sequence))


def heads_of_three_axes(given: int, leading: tuple[int, ...]) -> str:
    """Return the fix where the batch, the only leading axis of the tokens, is as long as what is given for heads.

    Parameters
    ----------
    given : int
        For how many heads something was given.
    leading : tuple of int
        Leading axes of the tokens.

    Returns
    -------
    str
        Empty elsewhere.
    """
    if leading != (given,) or given < 2:
        return ""
    return "q[None], k[None] and v[None], if the first axis counts heads: three axes are (batch, tokens, size)."


def check_inputs(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, tuple[int, ...]]:
    """Check queries and keys against each other and bring them to four axes, without a copy.

    Returns
    -------
    q : Tensor, shape (batch, heads, m, d)
        Queries.
    k : Tensor, shape (batch, key heads, n, dk)
        Keys; key heads divide heads.
    leading : tuple of int
        Leading axes of the matrix as the user sees them: ``()``, ``(batch,)`` or ``(..., heads)``.

    Raises
    ------
    DtypeError
        If one is no tensor, not floating point, or the dtypes differ.
    DeviceError
        If they live on different devices.
    ShapeError
        If an axis is missing or the leading axes do not fit.
    """
    if _fit_as_they_are(q, k) and q.shape[1] == k.shape[1] and k.shape[1] > 0:
        return q, k, tuple(q.shape[:2])
    labels = {"q (..., m, d)": q, "k (..., n, d)": k}
    check_tensors(labels)
    q, k = as_plain("q", q), as_plain("k", k)
    rank = max(q.ndim, k.ndim) - 2
    q4, k4 = _with_batch_and_heads(q, rank), _with_batch_and_heads(k, rank)
    batch = _broadcast_batch_axes(q4.shape[:-3], k4.shape[:-3], labels, "k")
    query_heads, key_heads = q4.shape[-3], k4.shape[-3]
    if query_heads == 1:
        query_heads = key_heads
    if key_heads == 0 or query_heads % key_heads != 0:
        rule = "the heads of k must divide the heads of q (grouped heads)."
        fix = f"give k a number of heads that divides {query_heads}; the axes are (batch, heads, tokens, size)."
        raise ShapeError(rule, f"{query_heads} query heads, {key_heads} key heads", fix, arguments=labels)
    # With one leading axis or none, the user sees no axis of heads, and no axis of a batch that was not given.
    leading = (*batch, query_heads) if rank >= 2 else batch[len(batch) - rank :]
    return _with_flat_batches(q4, batch, query_heads), _with_flat_batches(k4, batch, key_heads), leading


def check_values(
    v: Tensor, tokens: Tensor, axes: Axes, heads: int, names: tuple[str, str, str] = ("v", "n", "key")
) -> Tensor:
    """Check the tensor that a matrix is multiplied with, and bring it to (batch, value heads, tokens, e).

    Parameters
    ----------
    v : Tensor, shape (..., tokens, e)
        Values; their heads divide the query heads.
    tokens : Tensor, shape (batch, heads of its own, tokens, d)
        Keys of the matrix (queries, for the transposed product).
    axes : Axes
        Leading axes of the matrix.
    heads : int
        Number of query heads.
    names : tuple of str
        What the argument, the size and the token are called in an error.

    Raises
    ------
    DtypeError, DeviceError, ShapeError
        If it does not fit the matrix.
    """
    usual = axes.kept == (True, True) and _fit_as_they_are(v, tokens) and v.shape[2] == tokens.shape[2]
    if usual and v.shape[0] == axes.layout[0] and v.shape[1] > 0 and heads % v.shape[1] == 0:
        return v
    name, size, token = names
    labels = {f"{token} tokens (batch, heads, {size}, d)": tokens, f"{name} (..., {size}, e)": v}
    check_tensors(labels)
    v = as_plain(name, v)
    if v.shape[-2] != tokens.shape[-2]:
        found = f"{v.shape[-2]} rows in {name}, {size} = {tokens.shape[-2]}"
        fix = f"pass {name} as (..., {tokens.shape[-2]}, e)."
        raise ShapeError(f"there must be one row of {name} for each {token}.", found, fix, arguments=labels)
    layout = axes.layout
    fits = v.ndim - 2 <= len(axes.shape)
    if fits:
        v4 = _with_batch_and_heads(axes.spread(v), len(layout))
        batch = layout[:-1] if len(layout) >= 2 else (layout or (1,))
        own = (1,) * (len(batch) - v4.ndim + 3) + tuple(v4.shape[:-3])  # its batch axes, 1 for those that it lacks
        fits = all(a == 1 or a == b for a, b in zip(own, batch, strict=True))
        fits = fits and (v4.shape[-3] == heads or (v4.shape[-3] != 0 and heads % v4.shape[-3] == 0))
    if not fits:
        rule = f"the leading axes of {name} must fit those of the matrix; its heads divide the query heads."
        found = f"leading axes {tuple(v.shape[:-2])} in {name}, {axes.shape} in the matrix"
        given = {f"{name} (..., {size}, e)": v, "A": f"leading axes {axes.shape}"}
        raise ShapeError(rule, found, f"pass {name} as {_axes_text(axes.shape, tokens.shape[-2])}.", arguments=given)
    return _with_flat_batches(v4, batch, v4.shape[-3])


def check_sink(sink: Tensor, q: Tensor, leading: tuple[int, ...] = ()) -> Tensor:
    """Check a sink, one logit for each query head, and bring it to shape (heads,); `leading` are the user's axes."""
    heads = q.shape[1]
    if not isinstance(sink, Tensor) or not sink.is_floating_point():
        rule = "sink must be a floating point tensor with one logit for each head."
        given = sink if isinstance(sink, Tensor) else type(sink).__name__
        found = "integers" if isinstance(sink, Tensor) else kind(sink)
        fix = "torch.as_tensor(sink, dtype=q.dtype, device=q.device)"
        raise DtypeError(rule, found, fix, arguments={"sink (heads,)": given})
    if sink.device != q.device:
        rule, fix, found = "sink must be on the device of q.", "sink.to(q.device)", f"{sink.device} and {q.device}"
        raise DeviceError(rule, found, fix, arguments={"sink (heads,)": sink, "q (batch, heads, m, d)": q})
    if sink.ndim > 1 or not is_one_or(sink.numel(), heads):
        rule = "sink must hold one logit for each query head."
        fix = heads_of_three_axes(sink.numel(), leading) or f"pass a tensor of shape ({heads},)."
        found = f"shape {tuple(sink.shape)}, {counted(heads, 'head')}"
        raise ShapeError(rule, found, fix, arguments={"sink (heads,)": sink, "q (batch, heads, m, d)": q})
    return as_plain("sink", sink).reshape(-1).expand(heads)


def is_one_or(size: int, full: int) -> bool:
    """Return whether a size is that of the matrix, or 1.

    torch.compile finds a size that varies in no tuple, so that each is compared by itself.
    """
    return size == 1 or size == full


def check_tensors(labels: dict[str, Tensor]) -> None:
    """Raise an error unless all arguments are floating-point tensors of one dtype and device with at least two axes.

    `labels` has each by its name and axes, such as "q (..., m, d)".
    """
    first_label, first = next(iter(labels.items()))
    for label, t in labels.items():
        name = label.partition(" ")[0]
        if not isinstance(t, Tensor):
            rule = f"{name} must be a torch.Tensor."
            raise DtypeError(rule, kind(t), f"torch.as_tensor({name})", arguments={label: type(t).__name__})
        if t.dtype not in _FLOAT_DTYPES:
            rule, fix = f"{name} must be float64, float32, float16 or bfloat16.", f"{name}.float()"
            raise DtypeError(rule, f"{name} is {str(t.dtype).removeprefix('torch.')}", fix, arguments=labels)
        if t.ndim < 2:
            rule = f"{name} needs at least two axes, tokens and size."
            fix = f"{name}.unsqueeze(-1) for tokens of size 1."
            if t.ndim == 1 and any(o.ndim > 1 and o.shape[-1] == len(t) for o in labels.values()):
                fix = f"{name}.unsqueeze(0), one token."
            raise ShapeError(rule, f"shape {tuple(t.shape)} in {name}", fix, arguments=labels)
        if t.dtype is not first.dtype:
            rule = f"{first_label.partition(' ')[0]} and {name} must have the same dtype."
            found = f"{str(first.dtype).removeprefix('torch.')} and {str(t.dtype).removeprefix('torch.')}"
            raise DtypeError(rule, found, f"{name}.to({first.dtype})", arguments=labels)
        if t.device != first.device:
            rule = f"{first_label.partition(' ')[0]} and {name} must be on the same device."
            fix = f"{name}.to({str(first.device)!r})"
            raise DeviceError(rule, f"{first.device} and {t.device}", fix, arguments=labels)


def _fit_as_they_are(t: Tensor, other: Tensor) -> bool:
    """Return whether two tensors pass the usual case without a closer look.

    Both are plain strided tensors of four axes, and have one batch size, dtype and device; only heads and tokens are
    left to check.
    """
    return (
        type(t) is type(other) is Tensor
        and t.ndim == other.ndim == 4
        and t.dtype is other.dtype
        and t.dtype in _FLOAT_DTYPES
        and t.device == other.device
        and t.layout is other.layout is torch.strided
        and not (t.is_nested or other.is_nested)
        and t.shape[0] == other.shape[0]
    )


def _with_batch_and_heads(t: Tensor, rank: int) -> Tensor:
    """Return a tensor (..., tokens, size) with at least four axes, (..., batch, heads, tokens, size).

    `rank` is the number of leading axes of the matrix: with one or none, there are no heads, and an axis of size 1 is
    added.
    """
    if rank <= 1:
        t = t.unsqueeze(-3)
    while t.ndim < max(rank, 2) + 2:
        t = t.unsqueeze(0)
    return t


def _axes_text(leading: tuple[int, ...], tokens: int) -> str:
    """Return the shape that values must have, as text for an error."""
    plain = f"({tokens}, e)"
    return f"({', '.join(map(str, leading))}, {tokens}, e), or {plain} for all" if leading else plain


def _broadcast_batch_axes(
    first: tuple[int, ...], second: tuple[int, ...], labels: dict[str, Tensor], name: str
) -> tuple[int, ...]:
    """Return the batch axes of two tensors, broadcast; raise a ShapeError about `name`, the second, if they differ."""
    if first == second:
        return tuple(first)
    try:
        return tuple(torch.broadcast_shapes(first, second))
    except RuntimeError:
        rule = f"the batch axes of {name} must fit those of the queries: equal, or 1."
        fix = "pass tensors as (batch, heads, tokens, size) of one batch."
        raise ShapeError(rule, f"batch axes {tuple(first)} and {tuple(second)}", fix, arguments=labels) from None


def _with_flat_batches(t: Tensor, batch: tuple[int, ...], heads: int) -> Tensor:
    """Return a tensor as (batch, heads, tokens, size): batch axes are broadcast to `batch`, then flattened to one.

    It is a view wherever strides allow it.
    """
    if t.ndim == 4 and t.shape[0] == batch[0] and t.shape[1] == heads:
        return t
    return t.expand(*batch, heads, *t.shape[-2:]).flatten(0, len(batch) - 1)


def usable_device(device: str | torch.device) -> torch.device:
    """Return a torch.device; raise a DeviceError where torch cannot use it on this machine."""
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        rule, reason = "the device must be one that torch can use here.", (str(error).splitlines() or [""])[0]
        raise DeviceError(rule, f"device = {str(device)!r}: {reason}", 'device="cpu"') from None
    return found


def refuse_context_parallel() -> None:
    """Raise a BackendError inside torch's ``context_parallel``, where a process holds a part of the keys."""
    if not torch.compiler.is_compiling() and functional.scaled_dot_product_attention in replaced_by_context_parallel():
        found = "torch's context_parallel, where each process holds a part of the sequence"
        fix = "attlas.distributed.context_parallel(mesh, model), or DTensors."
        raise BackendError("every process must hold all keys of its queries.", found, fix)


def finite_number(name: str, value: float, fix: str, *, above: float = -math.inf) -> float:
    """Return a setting as a float; raise a ShapeError unless it is finite and greater than `above`."""
    if isinstance(value, Real) and not isinstance(value, bool) and above < value < math.inf:
        return float(value)
    rule = f"{name} must be a finite number{'' if above == -math.inf else f' above {above:g}'}."
    raise ShapeError(rule, f"{name} = {value!r}", fix)


def check_probability(name: str, value: object) -> float:
    """Return a probability as a float, or raise a ShapeError where it is none."""
    if isinstance(value, int | float) and not isinstance(value, bool) and 0.0 <= value <= 1.0:
        return float(value)
    raise ShapeError(f"{name} must be a probability, from 0 to 1.", f"{name} = {value!r}", f"{name}=0.1")
