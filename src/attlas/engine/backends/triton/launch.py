"""Calls of the kernels: memory for the results, the grid, and the joining of what several programs have found.

A kernel is imported, and with it triton, when it is first called. No number is read on the host.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attlas.engine.backends.triton.operands import LN2, LOG2E, Operands, in_ptx, padded
from attlas.engine.backends.triton.pairs import Pairs
from attlas.engine.backends.triton.sizes import Shape, major_of, shape_of, splits_of
from attlas.engine.outputs import Blocks
from attlas.foundation.devices import to_device

#: Numbers of rows that `sums_of_rows` and `sums_of_weights` find.
ROW_NAMES = ("entropy", "squares", "mass", "max_logit", "mean", "variance")
CLASSES = 32  # of keys, for the floor of the largest weights
MOST_LARGEST = 32
_UNITS_OF_GRADIENT_PROGRAM = 128  # of a program that finds their gradients
#: What the kernel `weights` puts down for each strip, and the names that are made of it.
_OF_COLUMNS = {
    "SUMS": {"column_mass", "picture_sum"},
    "MAXIMA": {"column_max", "picture_max"},
    "OFFSETS": {"offsets"},
}


def kernel(name: str) -> Any:
    """Return a kernel by its name, which is that of its module too."""
    return getattr(importlib.import_module(f"attlas.engine.backends.triton.kernels.{name}"), name)


def _launch_kernel(name: str, grid: tuple[int, int], shape: Shape, arguments: Mapping[str, Any]) -> None:
    """Launch a kernel on a grid, with the tile size and the settings of `shape`."""
    kernel(name)[grid](**arguments, ROWS=shape.rows, COLS=shape.columns, **shape.settings)


def _launch_shape(kernel: str, operands: Operands, m: int, width: int = 0) -> Shape:
    """Return the shape that a kernel runs in, for m queries and values of a width."""
    return shape_of(
        kernel,
        operands.q.dtype,
        max(operands.width, width),
        m,
        changed=operands.changed,
        pairs=operands.pairs is not None,
        major=major_of(operands.q.device),
    )


class Online(NamedTuple):
    """What one pass without the log-sum-exp gives.

    Parameters
    ----------
    lse : Tensor, shape (batch, heads, m)
        Exact log-sum-exp, float64, with the sink and the constant of each row.
    results : dict of str to Tensor
        Numbers of rows, and ``out``.
    floor : Tensor or None, shape (batch, heads, m)
        A base-2 logit that the largest ones reach.
    """

    lse: Tensor
    results: dict[str, Tensor]
    floor: Tensor | None


def online(operands: Operands, names: Sequence[str], v: Tensor | None, top: int) -> Online:
    """Return log-sum-exp, numbers of rows by name, the product with values, and a floor for the `top` largest.

    A strip is the queries of one program, a split one of several shares of the keys of a strip; `pairs` counts batch ×
    heads.
    """
    batch, heads, m, n = operands.shape
    pairs = batch * heads
    e = 0 if v is None else v.shape[-1]
    shape = _launch_shape("online", operands, m, padded(e) if e else 0)
    strips = -(-m // shape.rows)
    splits = splits_of(strips * pairs, n, operands.q)

    each = operands.each()  # each run of keys has programs of its own, which are joined as those that share a row
    parts = splits * len(each)

    def rows(wanted: bool = True) -> Tensor | None:
        return torch.empty(parts, pairs, m, dtype=torch.float32, device=operands.q.device) if wanted else None

    moments = "mean" in names or "variance" in names
    peak, total, moment, squares = rows(), rows(), rows("entropy" in names), rows("squares" in names)
    count, mean, spread, floor = rows(moments), rows(moments), rows(moments), rows(top > 0)
    values: dict[str, Any] = dict.fromkeys(("v_batch", "v_head", "v_row"), 0) | {"values_group": 1}
    out = None
    if v is not None:
        v = v if v.stride(-1) == 1 else v.contiguous()
        values = dict(zip(("v_batch", "v_head", "v_row"), v.stride(), strict=False))
        values["values_group"] = heads // v.shape[1]
        out = torch.empty(parts, pairs, m, e, dtype=v.dtype if parts == 1 else torch.float32, device=v.device)
    results = {"OUT": out, "PEAK": peak, "TOTAL": total, "MOMENT": moment, "SQUARES": squares}
    results |= {"COUNT": count, "MEAN": mean, "SPREAD": spread, "FLOOR": floor}
    for number, own in enumerate(each):
        _launch_kernel(
            "online",
            (strips * pairs, splits),
            shape,
            {
                **own.arguments(),
                "V": v,
                **_results_of_split(results, number, splits),
                **values,
                "strips": strips,
                "splits": splits,
                "E": padded(max(e, 1)),
                "VALUES": max(e, 1),
                "CLASSES": min(CLASSES, shape.columns) if top else 1,
                "TOP": top,
            },
        )
    return _join_splits(
        operands, names, peak, total, moment, squares, _mean_and_variance(count, mean, spread), out, floor
    )


def _results_of_split(results: Mapping[str, Tensor | None], number: int, splits: int) -> dict[str, Tensor | None]:
    """Return where the programs of a run of keys put their results."""
    return {name: None if t is None else t[number * splits : (number + 1) * splits] for name, t in results.items()}


def _join_splits(
    operands: Operands,
    names: Sequence[str],
    peak: Any,
    total: Any,
    moment: Tensor | None,
    squares: Tensor | None,
    moments: tuple[Tensor, Tensor] | None,
    out: Tensor | None,
    floor: Tensor | None,
) -> Online:
    """Join the running sums of the programs that share a row, and of the sink, and make results of them.

    The sums are those of ``kernels/online.py``, in base 2; their first axis counts the programs.

    Of program s, with ``f_s = 2^(peak_s - shift)``, total_s counts ``f_s total_s``: ``lse2 = shift + log2(Σ_s f_s
    total_s)``.
    """
    whole = (*operands.shape[:3],)
    peak, total = peak.double(), total.double()
    highest = peak.amax(0)
    top = (
        highest
        if operands.sink is None
        else torch.maximum(highest, _head_numbers_per_row(operands, operands.sink).flatten(0, 1))
    )
    shift = top.masked_fill(top == -math.inf, 0.0)
    down = peak - shift  # -inf where a program saw no key
    factor = torch.exp2(down)
    seen = (total * factor).sum(0)
    every = seen
    if operands.sink is not None:
        every = seen + torch.exp2(_head_numbers_per_row(operands, operands.sink).flatten(0, 1) - shift)
    nothing = every == 0
    safe = every.masked_fill(nothing, 1.0)
    lse2 = torch.where(nothing, -math.inf, shift + torch.log2(safe))
    mass = seen / safe
    found: dict[str, Tensor] = {}
    if "mass" in names:
        found["mass"] = mass.float()
    if moment is not None:
        # In float64 the logarithm of a sum loses nothing to the difference.
        own = factor * (moment + total * down.clamp(min=-1e4))
        entropy = (mass * torch.log2(safe) - own.sum(0) / safe) * LN2
        found["entropy"] = entropy.clamp_(min=0.0).float()
    if squares is not None:
        found["squares"] = ((squares * factor * factor).sum(0) / (safe * safe)).float()
    if "max_logit" in names:
        found["max_logit"] = (highest * LN2).float()
    if moments is not None:
        found |= zip(("mean", "variance"), moments, strict=True)
    found = {name: t.view(whole) for name, t in found.items()}
    if out is not None:
        if len(out) == 1 and operands.sink is None:
            found["out"] = out.view(*whole, -1)
        else:
            shares = (total * factor / safe).unsqueeze(-1).float()
            found["out"] = (out * shares).sum(0).view(*whole, -1)
    floor = None if floor is None else floor.amax(0)
    return Online((lse2 * LN2).view(whole), _plus_row_constant(operands, found), floor)


def _head_numbers_per_row(operands: Operands, t: Tensor) -> Tensor:
    """Repeat one number per head for each row, shape (batch, heads, m)."""
    return t.view(1, -1, 1).expand(operands.shape[:3])


def _plus_row_constant(operands: Operands, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add the constant of each row, which the kernels do not see, to the results that are logits."""
    for name in ("max_logit", "mean"):
        if operands.row is not None and name in found:
            found[name] = (found[name] + operands.row).to(found[name].dtype)
    return found


def _mean_and_variance(
    count: Tensor | None, mean: Tensor | None, spread: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """Return mean and variance of each row's logits, from count, mean and squared deviations of its parts.

    Over the programs that share a row: ``mean = Σ n_p mean_p / Σ n_p``, and the variance is ``Σ (spread_p + n_p (mean_p
    - mean)²) / Σ n_p``.
    """
    if count is None or mean is None or spread is None:
        return None
    total = count.sum(0).clamp(min=1.0)
    middle = (count * mean).sum(0) / total
    return middle, (spread + count * (mean - middle).square()).sum(0) / total


def without_row(operands: Operands, lse: Tensor) -> Tensor:
    """Return a log-sum-exp without the constant of each row, which the kernels do not see."""
    return lse if operands.row is None else lse - operands.row


def in_base_2(lse: Tensor) -> tuple[Tensor, Tensor]:
    """Return a log-sum-exp as two numbers of float32, whose sum is it in base 2; -inf, 0 where a row sees nothing."""
    exact = lse.double() * LOG2E
    high = exact.float()
    return high.contiguous(), (exact - high).nan_to_num(0.0, 0.0, 0.0).float().contiguous()


class Weighed(NamedTuple):
    """What one pass with the log-sum-exp gives.

    Parameters
    ----------
    results : dict of str to Tensor
        By the names of `attlas.engine.outputs`.
    floor : Tensor or None, shape (batch * heads, m)
        A base-2 logit that the largest ones reach.
    """

    results: dict[str, Tensor]
    floor: Tensor | None


def weighed(operands: Operands, wanted: Mapping[str, Any], lse: Tensor, top: int, budget: int) -> Weighed | None:
    """Return numbers of rows, columns, diagonals and pictures, given the log-sum-exp; None where they take too much.

    Diagonals need square tiles that are read from left to right: they take a pass of their own. Names are those of
    `attlas.engine.outputs`.

    Parameters
    ----------
    of : Operands
        What is read.
    wanted : mapping
        Names, and what goes with them.
    lse : Tensor, shape (batch, heads, m)
        Log-sum-exp, without the constant of each row.
    top : int
        How many of the largest weights a floor is for, 0 for none.
    budget : int
        Numbers of scratch memory.
    """
    rest = {name: value for name, value in wanted.items() if name != "offsets"}
    high, low = in_base_2(lse)
    results: dict[str, Tensor] = {}
    floor = None
    if rest or top:
        first = _weights_in_budget(operands, rest, high, low, top, budget, diagonals=False)
        if first is None:
            return None
        results, floor = first
    if "offsets" in wanted:
        second = _weights_in_budget(operands, {"offsets": True}, high, low, 0, budget, diagonals=True)
        if second is None:
            return None
        results |= second.results
    return Weighed(_plus_row_constant(operands, results), floor)


def _weights_in_budget(
    operands: Operands, wanted: Mapping[str, Any], high: Tensor, low: Tensor, top: int, budget: int, *, diagonals: bool
) -> Weighed | None:
    """Run the kernel `weights` for as many heads at a time as the budget allows, and join what it stored.

    A strip is the queries of one program, a split one of several shares of the keys of a strip; `pairs` counts batch ×
    heads. Numbers of columns are stored once for each strip, and joined here.
    """
    batch, heads, m, n = operands.shape
    pairs, device = batch * heads, operands.q.device
    picture: Blocks | None = wanted.get("picture_sum") or wanted.get("picture_max")
    longest = m if picture is None else max(b - a for a, b in pairwise(picture[0]))
    moments = "mean" in wanted or "variance" in wanted
    kind = "diagonals" if diagonals else "moments" if moments else "weights"
    shape = _launch_shape(kind, operands, longest)
    edges = list(range(0, m, shape.rows)) if picture is None else _edges_of_strips(picture[0], shape.rows)
    table = None if picture is None else to_device(torch.tensor(edges, dtype=torch.int32, device="cpu"), device)
    strips = len(edges) - (picture is not None)
    width = m + n - 1 if diagonals else n
    per_pair = strips * width
    has_columns = wanted.keys() & {"column_mass", "column_max", "picture_sum", "picture_max"} or diagonals
    together = max(min(budget // per_pair, pairs), 1) if has_columns else pairs
    if has_columns and strips > max(64, m // 8) and per_pair > budget:
        return None  # blocks of a few rows each: whole matrices would be stored
    splits, each = 1 if diagonals else splits_of(strips * together, n, operands.q), operands.each()

    def rows(on: bool) -> Tensor | None:
        return torch.zeros(splits * len(each), pairs, m, dtype=torch.float32, device=device) if on else None

    found = {name: rows(name in wanted) for name in ("entropy", "squares", "mass")}
    largest, floor, count, mean, spread = map(rows, ("max_logit" in wanted, top > 0, moments, moments, moments))
    columns: dict[str, list[Tensor]] = {name: [] for name in wanted if name not in ROW_NAMES}
    further = {"LARGEST": largest, "FLOOR": floor, "COUNT": count, "MEAN": mean, "SPREAD": spread}
    for start in range(0, pairs, together):
        some = min(together, pairs - start)
        read = {"LSE": high, "LOWS": low, "STRIPS": table, "strips": strips, "splits": splits, "pairs": pairs}
        read |= {"first_pair": start, "CLASSES": min(CLASSES, shape.columns) if top else 1, "TOP": top}
        asked = {kind for kind, names in _OF_COLUMNS.items() if names & wanted.keys()}
        scratch: dict[str, Tensor] = {}
        for number, own in enumerate(each):
            into = {kind: torch.zeros(some, strips, width, dtype=torch.float32, device=device) for kind in asked}
            rest = {
                **read,
                **_results_of_split({name.upper(): t for name, t in found.items()} | further, number, splits),
                **dict.fromkeys(_OF_COLUMNS),
                **into,
            }
            _launch_kernel("weights", (strips * some, splits), shape, own.arguments() | rest)
            scratch = (
                into
                if not number
                else {kind: _merged_sums_or_maxima(kind, t, scratch[kind]) for kind, t in into.items()}
            )
        for name, parts in columns.items():
            kind = next(k for k, names in _OF_COLUMNS.items() if name in names)
            parts.append(_joined_strips(name, scratch.get(kind), picture, edges))
    results = {name: t.sum(0).view(batch, heads, m) for name, t in found.items() if t is not None}
    if largest is not None:
        results["max_logit"] = largest.amax(0).view(batch, heads, m)
    if (both := _mean_and_variance(count, mean, spread)) is not None:
        results |= {name: t.view(batch, heads, m) for name, t in zip(("mean", "variance"), both, strict=True)}
    results |= {name: torch.cat(parts).unflatten(0, (batch, heads)) for name, parts in columns.items()}
    return Weighed(results, None if floor is None else floor.amax(0))


def _merged_sums_or_maxima(kind: str, t: Tensor, before: Tensor) -> Tensor:
    """Return sums or maxima over two runs of keys."""
    return torch.maximum(t, before) if kind == "MAXIMA" else t + before


def _edges_of_strips(edges: Sequence[int], rows: int) -> list[int]:
    """Return where strips of up to `rows` rows begin, none of which crosses an edge; and the end of the last.

    Examples
    --------
    >>> _edges_of_strips([0, 5, 7], 3)
    [0, 3, 5, 7]
    """
    return [start for a, b in pairwise(edges) for start in range(a, b, rows)] + [edges[-1]]


def _joined_strips(name: str, t: Tensor | None, picture: Blocks | None, edges: Sequence[int]) -> Tensor:
    """Join the sums or maxima of all strips of rows into one result.

    Per column, per diagonal, or per block of a picture.

    `t` has the shape (heads, strips, keys or diagonals); with a picture, `edges` are the rows at which strips begin,
    and the end.
    """
    if t is None:
        raise TypeError("there are no strips")
    largest = name in ("column_max", "picture_max")
    if name in ("column_mass", "column_max", "offsets") or picture is None:
        return t.amax(1) if largest else t.sum(1)
    pooled = _pooled_between_edges(t, picture[1], 2, largest=largest)
    return _pooled_between_edges(pooled, [edges.index(edge) for edge in picture[0]], 1, largest=largest)


def _pooled_between_edges(t: Tensor, edges: Sequence[int], axis: int, *, largest: bool) -> Tensor:
    """Return the sums or maxima of the parts of an axis between edges."""
    reduced: Tensor
    sizes = {b - a for a, b in pairwise(edges)}
    inside = t.narrow(axis, edges[0], edges[-1] - edges[0])
    if len(sizes) == 1:
        parts = inside.unflatten(axis, (-1, sizes.pop()))
        reduced = parts.amax(axis + 1) if largest else parts.sum(axis + 1)
        return reduced
    cut = inside.split([b - a for a, b in pairwise(edges)], dim=axis)
    return torch.stack([part.amax(axis) if largest else part.sum(axis) for part in cut], dim=axis)


def largest(operands: Operands, k: int, lse: Tensor, floor: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the k largest weights of each row in descending order, and their keys; 0 and -1 where there are fewer.

    The kernel finds k for each of `splits` shares of the keys; the largest k of them all are taken here.

    Parameters
    ----------
    of : Operands
        What is read.
    k : int
        How many.
    lse : Tensor, shape (batch, heads, m)
        Log-sum-exp, without the constant of each row.
    floor : Tensor, optional, shape (batch * heads, m)
        A base-2 logit that the k largest reach.
    """
    batch, heads, m, n = operands.shape
    pairs, device = batch * heads, operands.q.device
    shape = _launch_shape("select", operands, m)
    strips = -(-m // shape.rows)
    splits = splits_of(strips * pairs, n, operands.q)
    each = operands.each()
    found: dict[str, Tensor | None] = {
        "LOGITS": torch.empty(splits * len(each), pairs, m, k, dtype=torch.float32, device=device),
        "PLACES": torch.empty(splits * len(each), pairs, m, k, dtype=torch.int32, device=device),
    }
    slots = 1 << (k - 1).bit_length()
    for number, own in enumerate(each):
        arguments = {**own.arguments(), "FLOOR": floor, **_results_of_split(found, number, splits)}
        arguments |= {"strips": strips, "splits": splits, "SLOTS": slots, "TOP": k}
        _launch_kernel("select", (strips * pairs, splits), shape, arguments)
    logits, places = (t.movedim(0, 2).reshape(batch, heads, m, -1) for t in found.values() if t is not None)
    best = logits.topk(k, dim=-1)
    keys = places.gather(-1, best.indices).long()
    high, low = (t.unsqueeze(-1) for t in in_base_2(lse))
    shift = high.masked_fill(high == -math.inf, 0.0)
    weights = torch.where(keys < 0, 0.0, torch.exp2(best.values - shift - low))
    return torch.where(high == -math.inf, 0.0, weights), keys


def gradients(name: str, operands: Operands, pairs: int, e: int, arguments: Mapping[str, Any]) -> None:
    """Call one of the two kernels of gradients of dot products, with vectors of e numbers."""
    _, _, m, n = operands.shape
    shape = _launch_shape(name, operands, m, padded(e) if e else 0)
    length, of_strip = (n, shape.columns) if name == "by_key" else (m, shape.rows)
    strips = -(-length // of_strip)
    read = {key: value for key, value in operands.arguments().items() if key not in ("WEIGHTS", "KIND", "PTX")}
    _launch_kernel(name, (strips * pairs, 1), shape, {**read, **arguments, "strips": strips})


def units(own: Pairs, tokens: int, pairs: int, arguments: Mapping[str, Any]) -> None:
    """Call the kernel of hidden units and coordinates for some tokens of so many pairs of batch and head."""
    width = min(padded(own.units), _UNITS_OF_GRADIENT_PROGRAM)
    shape = shape_of("units", torch.float32, width, tokens)
    strips = -(-tokens // shape.rows)
    further = {"strips": strips, "KIND": own.kind, "SIZE": own.units, "UNITS": width, "PTX": in_ptx(own.q)}
    _launch_kernel("units", (strips * pairs, -(-own.units // width)), shape, {**arguments, **further})


def _positions_as_int32(at: Tensor, device: torch.device) -> Tensor:
    """Return positions as int32 on a device, as the kernels read them."""
    return to_device(at, device, torch.int32).contiguous()


def cells(
    operands: Operands,
    rows: range | Tensor,
    columns: range | Tensor,
    lse: Tensor | None,
    *,
    log: bool = False,
) -> Tensor:
    """Return cells of all batches and heads: logits without a log-sum-exp, else weights or with `log` their logarithm.

    Parameters
    ----------
    of : Operands
        What is read.
    rows, columns : range or Tensor
        Which rows and columns.
    lse : Tensor, optional, shape (batch, heads, m)
        Log-sum-exp, without the constant of each row.
    log : bool, default False
        Whether to return logarithms of weights.
    """
    batch, heads, _, _ = operands.shape
    device, pairs = operands.q.device, batch * heads
    shape = _launch_shape("cells", operands, len(rows))
    high, low = (None, None) if lse is None else in_base_2(lse)
    out, *others = (
        torch.empty(batch, heads, len(rows), len(columns), dtype=torch.float32, device=device) for _ in operands.each()
    )
    strips, blocks = -(-len(rows) // shape.rows), -(-len(columns) // shape.columns)
    places: dict[str, Any] = {}
    for name, at in (("rows", rows), ("columns", columns)):
        places[f"{name}_first"] = at.start if isinstance(at, range) else 0
        places[f"{name.upper()}_AT"] = None if isinstance(at, range) else _positions_as_int32(at, device)
    further = {"LSE": high, "LOWS": low, "chosen": len(rows), "width": len(columns), "strips": strips, "LOG": log}
    for own, into in zip(operands.each(), (out, *others), strict=True):
        if into.numel():
            _launch_kernel(
                "cells", (strips * pairs, blocks), shape, {**own.arguments(), **places, **further, "OUT": into}
            )
        if into is not out:  # what one run hides is 0 or -inf
            torch.maximum(out, into, out=out)
    if operands.row is not None and lse is None:
        place: Any = slice(rows.start, rows.stop) if isinstance(rows, range) else to_device(rows, device)
        out += operands.row[:, :, place].unsqueeze(-1).to(out.dtype)
    return out
