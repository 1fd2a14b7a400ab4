"""Kernels are trusted once they were compared: each kind, when it is first used on a device, on a small problem.

What runs are the same compiled kernels, with the same constants, for a small matrix of random tokens; it is compared
with the definition. `attlas.engine.trust` remembers what was found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from attlas.engine import trust
from attlas.engine.backend import Request
from attlas.engine.backends.triton import launch, pairs
from attlas.engine.backends.triton.backward import gradients as gradients_of_dots
from attlas.engine.backends.triton.operands import LN2, LOG2E, Operands, operands_of, padded
from attlas.engine.backends.triton.reading import found_by
from attlas.engine.backends.triton.slopes import gradients
from attlas.engine.gradient import CellGradient
from attlas.engine.problem import spread_heads

# Sizes of the small problem: more than a tile, the last one not whole, and multiples of 16 as most sizes are.
_TESTED_BATCH, _TESTED_HEADS, _TESTED_M, _TESTED_N = 1, 4, 144, 208
_KIND_NAMES = {code: kind.__name__ for kind, code in pairs.KINDS.items()}
_COMPARED_TERMS = ("row", "log", "square", "column", "lse", "mean", "linear", "centre")
_COMPARED_FORMS = ("weights", "logits", "log weights")


def known_fault(request: Request) -> str | None:
    """Return in one sentence why the kernels for these tokens are not used, as far as that is known."""
    words = _constants_in_words(operands_of(request))
    return next((f for kind, f in trust.faults("triton", request.device).items() if kind.endswith(f": {words}")), None)


def is_right(request: Request, wanted: Mapping[str, Any], v: Tensor | None = None, *, lse_known: bool = False) -> bool:
    """Return whether the kernels for what is wanted are right on the device of a request; they are compared once.

    Raises
    ------
    BackendError
        If they are not, and the plan asks for them.
    """
    operands = operands_of(request)
    e, dtype = (0, None) if v is None else (v.shape[-1], v.dtype)
    of_values = "" if dtype is operands.q.dtype else f" of {str(dtype).removeprefix('torch.')}"
    names = [f"{name} {wanted[name]}" if name == "largest" else name for name in sorted(wanted)]
    also = [f"output of {padded(e)} numbers{of_values}"] * (v is not None) + ["lse known"] * lse_known
    kind = f"{', '.join(names + also)}: {_constants_in_words(operands)}"
    check = partial(compare, operands, wanted, e, lse_known=lse_known, v_dtype=dtype)
    return trust.fault_of(trust.Family("triton", kind), request.device, check, request.plan) is None


def has_right_gradients(request: Request, gradient: CellGradient) -> bool:
    """Return whether the kernels of gradients are right on the device of a request; they are compared once.

    Raises
    ------
    BackendError
        If they are not, and the plan asks for them.
    """
    operands, left = operands_of(request), gradient.left
    terms = [name for name in _COMPARED_TERMS if getattr(gradient, name) is not None]
    dtype = None if left is None or gradient.right is None else (left.dtype, gradient.right.dtype)
    e = 0 if left is None else left.shape[-1]
    words = [f"{padded(e)} numbers of {' and '.join(str(t).removeprefix('torch.') for t in dtype)}"] if dtype else []
    kind = f"gradients by {', '.join([*words, *terms])}: {_constants_in_words(operands)}"
    check = partial(compare_gradients, operands, terms, e, dtype)
    return trust.fault_of(trust.Family("triton", kind), request.device, check, request.plan) is None


def compare_gradients(
    operands: Operands, terms: Sequence[str], e: int, dtypes: tuple[torch.dtype, torch.dtype] | None
) -> str | None:
    """Return where gradients differ from the formulas of `CellGradient` for a small problem; None where nowhere."""
    small = _small_problem(operands)
    batch, heads, m, n = small.shape
    tolerance = 4 * trust.TOLERANCE[operands.q.dtype]

    def random(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return _random_numbers(shape[:-1], shape[-1], dtype, operands.q.device, seed)

    own = {name: random(batch, heads, n if name == "column" else m, seed=5 + i) for i, name in enumerate(terms)}
    if dtypes is not None:
        own["left"] = random(batch, heads, m, e, seed=3, dtype=dtypes[0])
        own["right"] = random(batch, small.k.shape[1], n, e, seed=4, dtype=dtypes[1])
    with torch.enable_grad():
        q, k = (t.double().requires_grad_() for t in (small.q, small.k))
        logits, lse, weights = _reference_weights(small, q @ spread_heads(k, heads).mT)
        seen, plain = logits > -math.inf, weights.detach()
        log = torch.where(seen, logits.detach() - finite(lse.detach()).unsqueeze(-1), 0.0)
        slope, delta = _slope_in_weights(own, plain, log)
        slope = plain * (slope - (plain * slope).sum(-1, keepdim=True))
        if "lse" in own:
            slope = slope + plain * own["lse"].double().unsqueeze(-1)
        if "mean" in own:
            centre, linear, mean = (own[name].double().unsqueeze(-1) for name in ("centre", "linear", "mean"))
            slope = slope + torch.where(seen, (logits.detach() - centre) * linear + mean, 0.0)
        wanted = torch.autograd.grad(torch.where(seen, logits, 0.0), [q, k], slope)
    given: dict[str, Any] = {**own, "delta": delta.float()}
    found = gradients_of_dots(small, lse.detach(), CellGradient(**given))
    for name, some, true in zip(("q", "k"), (found.q, found.k), wanted, strict=True):
        if (fault := trust.difference(f"the gradient in {name}", some, true, tolerance)) is not None:
            return fault
    if found.pooled is None:
        return None
    return trust.difference("A.mT @ left", found.pooled, plain.mT @ own["left"].double(), tolerance)


def _slope_in_weights(own: Mapping[str, Tensor], weights: Tensor, log: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient in the weights by its terms, and its mean by the terms left, log and square."""
    slope = torch.zeros_like(weights)
    if "left" in own:
        slope = slope + own["left"].double() @ spread_heads(own["right"], weights.shape[1]).double().mT
    if "log" in own:
        slope = slope + own["log"].double().unsqueeze(-1) * log
    if "square" in own:
        slope = slope + own["square"].double().unsqueeze(-1) * weights
    delta = (weights * slope).sum(-1)
    for name, axis in (("row", -1), ("column", -2)):
        slope = slope + own[name].double().unsqueeze(axis) if name in own else slope
    return slope, delta


def _constants_in_words(operands: Operands) -> str:
    """Return the constants that the kernels are compiled for in words, without the names of what is wanted."""
    parts = {
        "masked": operands.first,
        "numbers of keys": operands.keys,
        "numbers of distances": operands.distances,
        "sink": operands.sink,
    }
    also = [name for name, t in parts.items() if t is not None] + ["capped"] * operands.cap
    size = (
        f"d {operands.size}" if operands.pairs is None else f"{_KIND_NAMES[operands.kind]} of {operands.size} numbers"
    )
    return ", ".join([str(operands.q.dtype).removeprefix("torch."), size, *also])


def compare(
    operands: Operands, wanted: Mapping[str, Any], e: int, *, lse_known: bool, v_dtype: torch.dtype | None = None
) -> str | None:
    """Return where the kernels differ from the definition for a small problem of the same kind; None where nowhere."""
    small, tolerance = _small_problem(operands), trust.TOLERANCE[v_dtype or operands.q.dtype]
    v = (
        _random_numbers((*small.k.shape[:2], _TESTED_N), e, v_dtype or operands.q.dtype, operands.q.device, 3)
        if e
        else None
    )
    logits, lse, weights = definition(small)
    if "gradient" in wanted:
        return _compare_gradients(small, lse, tolerance)
    if wanted.keys() & set(_COMPARED_FORMS):
        (form,) = wanted
        found = {
            form: launch.cells(
                small, range(3, _TESTED_M), range(5, _TESTED_N), None if form == "logits" else lse, log=form[0] == "l"
            )
        }
        cells = {"weights": weights, "logits": logits, "log weights": logits - finite(lse).unsqueeze(-1)}
        right = {form: cells[form][:, :, 3:, 5:]}
    else:
        edges = [0, 2 * _TESTED_M // 3, _TESTED_M], [0, _TESTED_N // 4, 2 * _TESTED_N // 3, _TESTED_N]
        asked = {name: edges if name.startswith("picture") else value for name, value in wanted.items()}
        some = found_by(small, asked, v, lse if lse_known else None, 1 << 24, complete=operands.sink is None)
        if some is None:
            return "nothing was found"
        found = some
        right = numbers_of(asked, logits, lse, weights, v)
    for name, wanted_numbers in right.items():
        if (fault := trust.difference(name, found[name], wanted_numbers, tolerance)) is not None:
            return fault
    return None


def _compare_gradients(operands: Operands, lse: Tensor, tolerance: float) -> str | None:
    """Return where the gradients of pairs differ from those of the definition; None where nowhere."""
    if operands.pairs is None:
        return None
    batch, heads, m, n = operands.shape
    left, right = (_random_numbers((batch, heads, size), 3, torch.float32, operands.q.device, 5) for size in (m, n))
    with torch.enable_grad():
        leaves = [t.requires_grad_() for t in pairs.inputs_of(operands.pairs, m, n)]
        weights = _reference_weights(operands, pairs.definition(operands.kind, *leaves))[2]
        out = weights @ right.double()
        wanted = torch.autograd.grad(out, leaves, left.double())
    delta = (left * out.detach()).sum(-1).float()
    found = gradients(operands, lse, CellGradient(left, right, delta=delta), 1 << 24)
    for name, own, true in zip(("q", "k", "weights"), (found.q, found.k, found.weights), wanted, strict=True):
        if (fault := trust.difference(f"the gradient in {name}", own, true, 4 * tolerance)) is not None:
            return fault
    return None


def definition(operands: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, log-sum-exp and weights of all cells in float64, in torch's own operations."""
    _, heads, m, n = operands.shape
    if operands.pairs is not None:
        return _reference_weights(operands, pairs.definition(operands.kind, *pairs.inputs_of(operands.pairs, m, n)))
    return _reference_weights(operands, operands.q.double() @ spread_heads(operands.k, heads).double().mT)


def _reference_weights(operands: Operands, s: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits, log-sum-exp and weights from products."""
    n = operands.shape[3]
    logits = (
        operands.scale2 * torch.tanh(s * operands.rate * (0.5 * LN2)) if operands.cap else s * operands.scale2
    ) * LN2
    if operands.keys is not None:
        logits = logits + operands.keys.double().unsqueeze(-2) * LN2
    if operands.distances is not None:
        logits = logits + operands.distances.double().unfold(-1, n, 1).flip(-2) * LN2
    if operands.first is not None and operands.stop is not None:
        at = torch.arange(n, device=operands.q.device)
        hidden = (at < operands.first.unsqueeze(-1)) | (at >= operands.stop.unsqueeze(-1))
        logits = logits.masked_fill(hidden, -math.inf)
    every = logits
    if operands.sink is not None:
        sink = (operands.sink * LN2).view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        every = torch.cat([logits, sink], dim=-1)
    lse = torch.logsumexp(every, dim=-1)
    weights = torch.exp(logits - finite(lse).unsqueeze(-1))
    return logits, lse, weights


def numbers_of(
    wanted: Mapping[str, Any], logits: Tensor, lse: Tensor, weights: Tensor, v: Tensor | None
) -> dict[str, Tensor]:
    """Return numbers of a matrix by their definition, by the names of `attlas.engine.outputs`."""
    seen = logits > -math.inf
    keys = seen.sum(-1).clamp(min=1)
    mean = torch.where(seen, logits, 0.0).sum(-1) / keys
    spread = torch.where(seen, logits - mean.unsqueeze(-1), 0.0).square().sum(-1) / keys
    m, n = weights.shape[-2:]
    found = {
        "lse": lse,
        "entropy": -torch.special.xlogy(weights, weights).sum(-1),
        "squares": weights.square().sum(-1),
        "mass": weights.sum(-1),
        "max_logit": logits.amax(-1),
        "mean": mean,
        "variance": spread,
        "column_mass": weights.sum(-2),
        "column_max": weights.amax(-2),
    }
    if "largest" in wanted:
        found["top_values"] = weights.topk(wanted["largest"], dim=-1).values
    if "offsets" in wanted:
        places = torch.stack([weights.diagonal(d, -2, -1).sum(-1) for d in range(1 - m, n)], dim=-1)
        found["offsets"] = places
    for name in ("picture_sum", "picture_max"):
        if name in wanted:
            rows, columns = ([b - a for a, b in pairwise(edges)] for edges in wanted[name])
            bands = [band.split(columns, -1) for band in weights.split(rows, -2)]
            cells = [[p.sum((-2, -1)) if name == "picture_sum" else p.amax((-2, -1)) for p in band] for band in bands]
            found[name] = torch.stack([torch.stack(row, -1) for row in cells], -2)
    own = {"top_values": "largest"}
    found = {name: t for name, t in found.items() if own.get(name, name) in wanted}
    if v is not None:
        found["out"] = weights @ spread_heads(v, weights.shape[1]).double()
    return found


def finite(lse: Tensor) -> Tensor:
    """Return a log-sum-exp with 0 for a row that sees nothing."""
    return lse.masked_fill(lse == -math.inf, 0.0)


def _small_problem(operands: Operands) -> Operands:
    """Return a small problem for which the same kernels are compiled."""
    dtype, device, size = operands.q.dtype, operands.q.device, operands.size
    group = 1 if operands.q.shape[1] == operands.k.shape[1] else 2
    rows = torch.arange(_TESTED_M, device=device)
    first = (rows - 40).clamp(min=0).to(torch.int32).view(1, 1, -1)
    stop = (rows + 50).clamp(max=_TESTED_N).to(torch.int32).view(1, 1, -1).clone()
    stop[..., 7] = 0  # a query without a key
    masked, scale = operands.first is not None, 2.0 / math.sqrt(size)

    def table(like: Tensor | None, length: int) -> Tensor | None:
        return None if like is None else torch.linspace(-2, 1, length, device=device).view(1, 1, -1).contiguous()

    q = _random_numbers((_TESTED_BATCH, _TESTED_HEADS, _TESTED_M), size, dtype, device, 1)
    k = _random_numbers((_TESTED_BATCH, _TESTED_HEADS // group, _TESTED_N), size, dtype, device, 2)
    own = None
    if operands.pairs is not None:
        own = _pairs_of_kind(operands.kind, size, q, k)
        q, k = own.q, own.k
    return Operands(
        q,
        k,
        scale2=(2.0 if operands.cap else 1.0 if own else scale) * LOG2E,
        rate=scale * LOG2E if operands.cap else 0.0,
        cap=operands.cap,
        first=first if masked else None,
        stop=stop if masked else None,
        keys=table(operands.keys, _TESTED_N),
        distances=table(operands.distances, _TESTED_M + _TESTED_N - 1),
        row=None,
        sink=None
        if operands.sink is None
        else torch.linspace(-1, 3, _TESTED_HEADS, dtype=torch.float64, device=device),
        pairs=own,
        m=_TESTED_M,
        n=_TESTED_N,
    )


def _pairs_of_kind(kind: int, size: int, q: Tensor, k: Tensor) -> pairs.Pairs:
    """Return tokens for a kind of pairs: some hidden units far from 0, most weights of a bounded kind 0."""
    units = torch.linspace(-1.0, 1.5, size, device=q.device)
    if kind == pairs.ADDITIVE:
        q[:, :, :9] *= 6.0
        return pairs.additive(q, k, units)
    scale = (units.abs() + 0.5) / math.sqrt(size)
    return pairs.distance(kind, q, k, scale * 0.5 if kind >= pairs.BOXCAR else scale)


def _random_numbers(lead: tuple[int, ...], size: int, dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    """Return the same random numbers on each device."""
    made = torch.randn(*lead, size, generator=torch.Generator().manual_seed(seed))
    return made.to(device).to(dtype)
