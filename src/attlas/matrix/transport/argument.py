"""Checks of the arguments of `transport`: gates in each form that they may have, brought to four axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from attlas.errors import DeviceError, ShapeError, counted
from attlas.foundation.checks import (
    accumulation_dtype,
    as_plain,
    check_floating,
    check_inputs,
    finite_number,
    holds_numbers,
    waits_for,
)
from attlas.foundation.compat import tracing
from attlas.matrix.transport.tokens import GatedTokens

_GATE_SHAPES = {
    "decay": "a number, (heads,), (..., n) or (..., n, d)",
    "write": "a number, (heads,) or (..., n)",
    "erase": "a number, (heads,) or (..., n)",
    "diagonal": "a number, (heads,) or (..., n)",
}


def gated_tokens(
    q: Tensor, k: Tensor, decay: Any, write: Any, erase: Any, diagonal: Any, scale: Any
) -> tuple[GatedTokens, tuple[int, ...]]:
    """Check the arguments of `transport` against each other.

    Returns
    -------
    tokens : GatedTokens
        With four axes, and heads of its own for each tensor.
    leading : tuple of int
        Leading axes of the matrix as the user sees them.
    """
    q4, k4, lead = check_inputs(q, k)
    if q4.shape[2] != k4.shape[2] or q4.shape[3] != k4.shape[3]:
        rule = "each token of a linear attention layer has one query and one key, of one size."
        found = f"queries {tuple(q4.shape[2:])}, keys {tuple(k4.shape[2:])} of (tokens, size)"
        fix = "pass the queries of all tokens; A.window(rows=(n - m, n)) has the last m of them."
        raise ShapeError(rule, found, fix, arguments={"q (..., n, d)": q, "k (..., n, d)": k})
    gates: dict[str, Tensor] = {}
    pair = isinstance(erase, tuple | list)
    given = {"decay": decay, "write": write, "erase": None if pair else erase, "diagonal": diagonal}
    for name, value in given.items():
        if value is not None:
            gates[name] = _gate_with_axes(name, value, q4, lead)
    if pair:
        gates |= _rank_one_vectors(erase, q4, lead)
    if "decay" in gates:
        _check_decay(gates["decay"])
    heads = _head_count({"q": q4, "k": k4, **gates}, lead)
    tokens = GatedTokens(q4, k4, heads, scale=finite_number("scale", scale, "scale=q.shape[-1] ** -0.5"), **gates)
    return tokens, (*lead[:-1], heads) if len(lead) >= 2 else lead


def _gate_with_axes(
    name: str, value: Any, q: Tensor, lead: tuple[int, ...], sizes: Sequence[int] | None = None
) -> Tensor:
    """Return a gate with the axes (batch or 1, heads of its own, n or 1, size).

    `sizes` is given for the vectors p and r of a pair, which have d numbers.
    """
    if isinstance(value, Real) and not isinstance(value, bool):
        value = torch.tensor(float(value), dtype=accumulation_dtype(q.dtype), device=q.device)
    rule = f"{name} must be a floating point tensor or a number."
    check_floating(rule, name, value, f"{name}.float()" if isinstance(value, Tensor) else f"torch.as_tensor({name})")
    t = as_plain(name, value)
    if t.device != q.device:
        rule = f"{name} must be on the device of q."
        fix = f"{name}.to({str(q.device)!r})"
        raise DeviceError(rule, f"{t.device} and {q.device}", fix, arguments={name: t, "q": q})
    rank = len(lead)
    n, d = q.shape[2:]
    if t.ndim == 0:
        return t.reshape(1, 1, 1, 1)
    if t.ndim == 1 and rank >= 2:
        return t.reshape(1, -1, 1, 1)
    if t.ndim == rank + 1:
        t = t.unsqueeze(-1)
    wanted = (1, d) if name == "decay" else (d,) if sizes is not None else (1,)
    batch = lead[:-1] if rank >= 2 else lead
    fits = t.ndim == rank + 2 and t.shape[-1] in wanted and t.shape[-2] in (1, n)
    own = tuple(t.shape[:-2])
    own_batch = own[:-1] if rank >= 2 else own
    fits = fits and all(a in (1, b) for a, b in zip(own_batch, batch, strict=True))
    if not fits or (rank >= 2 and own[-1] == 0):
        forms = "(..., n, d)" if sizes is not None else _GATE_SHAPES[name]
        rule = f"{name} must be {forms}, with the leading axes of q; a size of 1 stands for all."
        found = f"shape {tuple(value.shape)}, n = {n}, d = {d}, leading axes {lead}"
        shape = (*lead, n, d) if sizes is not None else (*lead, n)
        raise ShapeError(rule, found, f"pass {name} as {shape}.", arguments={name: value, "q": q})
    if rank < 2:
        t = t.unsqueeze(-3)
    while t.ndim < 4:
        t = t.unsqueeze(0)
    if t.ndim > 4:  # several batch axes: one that stands for all is written out where others do not
        axes = t.shape[:-3]
        t = t.expand(*((1,) * len(axes) if all(a == 1 for a in axes) else batch), *t.shape[-3:]).flatten(0, -4)
    return t


def _rank_one_vectors(erase: Sequence[Any], q: Tensor, lead: tuple[int, ...]) -> dict[str, Tensor]:
    """Return the two vectors of a rank one part."""
    if len(erase) != 2 or not all(isinstance(t, Tensor) and t.ndim > len(lead) + 1 for t in erase):
        rule = "a pair erase=(p, r) must be two tensors of shape (..., n, d)."
        found = ", ".join(str(tuple(t.shape)) if isinstance(t, Tensor) else type(t).__name__ for t in erase)
        raise ShapeError(rule, f"shapes {found}", "erase=(-beta.unsqueeze(-1) * k, k) is that of the delta rule.")
    return {name: _gate_with_axes(name, t, q, lead, q.shape[2:]) for name, t in zip(("p", "r"), erase, strict=True)}


def _check_decay(decay: Tensor) -> None:
    """Raise a ShapeError where a log decay is above 0; on the CPU alone, where nobody waits for the answer."""
    if tracing() or waits_for(decay.device) or not holds_numbers(decay) or not decay.numel():
        return
    largest = float(decay.detach().max())
    if largest > 0:
        rule = "decay must hold logarithms of factors from 0 to 1, so that it is at most 0."
        fix = "decay=factors.log(), if these are the factors themselves."
        raise ShapeError(rule, f"a largest decay of {largest:.3g}", fix, decay=decay)


def _head_count(tensors: Mapping[str, Tensor], lead: tuple[int, ...]) -> int:
    """Return the heads of the matrix: the most that a tensor has, which those of the others divide."""
    heads = max(t.shape[1] for t in tensors.values())
    for name, t in tensors.items():
        if heads % t.shape[1]:
            rule = "the heads of each tensor must divide the most heads that one has."
            found = f"{counted(t.shape[1], 'head')} of {name}, {counted(heads, 'head')} of another"
            fix = f"pass {name} with a number of heads that divides {heads}; the axes are (batch, heads, tokens, size)."
            raise ShapeError(rule, found, fix, arguments=tensors)
    return heads
