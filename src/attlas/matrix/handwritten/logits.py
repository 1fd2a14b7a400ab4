"""Logits that are not computed: a product of queries and keys, and what code did with it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from attlas.foundation.autocast import autocast_dtype
from attlas.masks import Mask
from attlas.matrix.handwritten.lazy import Call, Uncomputed
from attlas.matrix.handwritten.lowering import largest_of_rows, matrix_of
from attlas.matrix.handwritten.scope import current, left
from attlas.matrix.handwritten.state import Product, State
from attlas.matrix.handwritten.steps import Step, cut_of, parts_of
from attlas.matrix.handwritten.weights import LazyWeights


class Logits(Uncomputed):
    """The logits that a model computes with, as a lazy tensor.

    Parameters
    ----------
    state : State
        What all views share.
    shape : tuple of int
        The shape that the model sees.
    """

    label = what = "logits"
    state: State

    def __init__(self, state: State, shape: tuple[int, ...]) -> None:
        super().__init__(state, shape, state.product.q.device)

    def __repr__(self) -> str:
        kinds = ", ".join(step.kind for step in self.state.steps)
        return f"Logits(shape={tuple(self.shape)}, {self.dtype}, steps=[{kinds}])"

    @property
    def requires_grad(self) -> bool:
        """Whether a graph is recorded."""
        product = self.state.product
        tensors = (product.q, product.k, *(t for step in self.state.steps for t in step.tensors))
        return product.has_graph and any(t.requires_grad for t in tensors)

    @property
    def is_counted(self) -> bool:
        """Whether it is counted where this is computed: any product of keys that were transposed for it."""
        return self.state.product.is_certain

    def compute(self) -> Tensor:
        """Compute the product and all steps that it does not include yet."""
        state = self.state
        state.check_unchanged()
        with torch.set_grad_enabled(state.product.has_graph):
            x = state.product.compute()
        x = x.reshape(state.sizes)
        for step in state.steps[state.product.included :]:
            x = step(x)
        # The numbers of the views are those of one tensor.
        state.computed = x.reshape(self.shape).contiguous()
        return state.computed

    def returned(self) -> Any:
        """Return the numbers, for a model that returns logits."""
        return self.to_dense()

    # --------------------------------------------------------------------------------------------- what it is made into

    @property
    def is_matrix(self) -> bool:
        """Whether the last two axes that the model sees are queries and keys."""
        return len(self.shape) > 2 and tuple(self.shape[-2:]) == self.state.sizes[2:]

    def viewed(self, shape: tuple[int, ...]) -> Logits:
        # A view as (batch, heads, m, n) of logits that were made as (batch * heads, m, n) tells the number of heads.
        view, state = Logits(self.state, shape), self.state
        if not state.is_split and view.is_matrix and len(shape) == 4 and shape[0] * shape[1] == state.batch:
            state.split(shape[0], shape[1])
        return view

    def copied(self) -> Logits:
        return Logits(replace(self.state), tuple(self.shape))

    def cast(self, dtype: torch.dtype) -> Logits:
        return self.after(Step("cast", dtype=dtype), dtype)

    def after(self, step: Step, dtype: torch.dtype | None = None) -> Logits:
        """Return the logits after one more step."""
        state = replace(self.state, steps=(*self.state.steps, step), dtype=dtype or self.dtype)
        return Logits(state, tuple(self.shape))

    def operand(self, given: Any) -> Tensor | None:
        """Return a tensor in the axes of the steps; None where it does not broadcast to the logits."""
        if not is_plain(given) or given.ndim > len(self.shape) or (given.ndim and given.device != self.device):
            return None
        t: Tensor = given
        t = t if self.state.product.has_graph or torch.is_grad_enabled() else t.detach()
        t = t.reshape((1,) * (len(self.shape) - t.ndim) + t.shape).to(self.device)
        if any(size not in (1, full) for size, full in zip(t.shape, self.shape, strict=True)):
            return None
        batch, heads, m, n = self.state.sizes
        if not self.is_matrix:
            return t.expand(self.shape).reshape(batch, heads, m, n)
        lead, full, rest = tuple(t.shape[:-2]), tuple(self.shape[:-2]), tuple(t.shape[-2:])
        if all(size == 1 for size in lead):
            return t.reshape(1, 1, *rest)
        if lead != full and full[-1] == heads and lead[-1] == 1:
            return t.expand(*full[:-1], 1, *rest).reshape(batch, 1, *rest)
        if lead != full and full[-1] == heads and all(size == 1 for size in lead[:-1]):
            return t.reshape(1, heads, *rest)
        return t.expand(*full, *rest).reshape(batch, heads, *rest)

    def promoted(self, t: Tensor) -> torch.dtype:
        """Return the dtype of a result with a tensor."""
        return self.dtype if t.ndim == 0 else torch.promote_types(self.dtype, t.dtype)

    # ------------------------------------------------------------------------------------------------ operations

    def _call_add(self, call: Call) -> Any:
        """Add or subtract a number, a tensor, a mask or other logits."""
        sides = _operands_and_factor(call)
        if sides is None:
            return NotImplemented
        a, b, alpha = sides
        sign = -alpha if call.name == "sub" else alpha
        if call.name == "rsub":  # b - a
            a, b, sign = b, a, -alpha
        if a is not self:  # b is: a ± sign * self
            return _other_plus_signed(self, a, sign)
        return self._plus_multiple(b, sign)

    def _plus_multiple(self, other: Any, sign: float) -> Any:
        """Return the logits plus something times a number."""
        if isinstance(other, Logits) and other.computed is None:
            joined = _sum_as_one_product(self, other, sign)
            if joined is not None:
                return joined
            other = other.written_out("add") if other.is_counted else other.to_dense()
        elif isinstance(other, Uncomputed):
            other = other.to_dense()
        if _is_number(other):
            return self.after(Step("shift", numbers=(float(other) * sign,)))
        found = _mask_of_lazy_mask(other)
        if found is not None:
            if (
                sign == 1.0
                and len(self.shape) == 4
                and self.is_matrix
                and _fits_queries_and_keys(tuple(other.shape), self.state.sizes)
            ):
                dtype = torch.promote_types(self.dtype, other.dtype)
                return self.after(Step("hide", (other,), mask=found[0]), dtype)
            other = torch.clone(other + 0.0)  # as numbers: one row of keys, or a form that a matrix does not have
        t = self.operand(other)
        return NotImplemented if t is None else self.after(Step("add", (t,), (sign,)), self.promoted(other))

    def _call_multiply(self, call: Call) -> Any:
        """Multiply with a number or a tensor."""
        sides = _operands_and_factor(call)
        if sides is None or all(isinstance(side, Uncomputed) for side in sides[:2]):
            return NotImplemented
        other = sides[1] if sides[0] is self else sides[0]
        if _is_number(other):
            return self.after(Step("scale", numbers=(float(other),)))
        if is_plain(other) and other.ndim == 0 and not other.requires_grad and other.device.type == "cpu":
            return self.after(Step("scale", numbers=(float(other),)))
        t = self.operand(other)
        return NotImplemented if t is None else self.after(Step("multiply", (t,)), self.promoted(other))

    def _call_divide(self, call: Call) -> Any:
        """Divide by a number or a tensor."""
        sides = _operands_and_factor(call)
        if sides is None or sides[0] is not self or isinstance(sides[1], Uncomputed) or "rounding_mode" in call.kwargs:
            return NotImplemented
        other = sides[1]
        if is_plain(other) and other.ndim == 0 and not other.requires_grad and other.device.type == "cpu":
            other = other.item()
        if _is_number(other):
            return NotImplemented if other == 0 else self.after(Step("divide_by_number", numbers=(float(other),)))
        t = self.operand(other)
        return NotImplemented if t is None else self.after(Step("divide", (t,)), self.promoted(other))

    def _call_negate(self, call: Call) -> Any:
        """Change the sign."""
        return self.after(Step("scale", numbers=(-1.0,)))

    def _call_masked_fill(self, call: Call) -> Any:
        """Fill a number where a mask is True."""
        args = (*call.args[1:], *(call.kwargs[name] for name in ("mask", "value") if name in call.kwargs))
        if not call.args or call.args[0] is not self or len(args) != 2:
            return NotImplemented
        return self._with_filled_cells(args[0], args[1])

    def _with_filled_cells(self, mask: Any, value: Any, *, inverted: bool = False) -> Any:
        """Return the logits with a number, or the numbers of a tensor, where a mask is True."""
        if isinstance(mask, Uncomputed) or not isinstance(mask, Tensor) or mask.dtype is not torch.bool:
            return NotImplemented
        t = self.operand(mask)
        if t is None:
            return NotImplemented
        if isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad and is_plain(value):
            value = value.item()
        if _is_number(value):
            return self.after(Step("keep" if inverted else "fill", (t,), (float(value),)))
        other = self.operand(value)
        if other is None or not other.is_floating_point():
            return NotImplemented
        return self.after(Step("choose", (t if inverted else ~t, other)), self.promoted(value))

    def _call_where(self, call: Call) -> Any:
        """Choose between the logits and a number or a tensor."""
        if call.kwargs or len(call.args) != 3:
            return NotImplemented
        first, second, third = call.args
        if first is self:  # logits.where(condition, other)
            return self._with_filled_cells(second, third, inverted=True)
        if second is self:
            return self._with_filled_cells(first, third, inverted=True)
        return self._with_filled_cells(first, second) if third is self else NotImplemented

    def _call_clamp(self, call: Call) -> Any:
        """Keep the logits between two numbers."""
        names = {"clamp": ("min", "max"), "clamp_min": ("min",), "clamp_max": ("max",)}[call.name]
        given = dict(zip(names, call.args[1:], strict=False)) | call.kwargs
        bounds = [_bound_as_number(given.get(name)) for name in ("min", "max")]
        if call.args[0] is not self or not given.keys() <= {"min", "max"} or NotImplemented in bounds:
            return NotImplemented
        return self.after(Step("clamp", numbers=tuple(bounds)))

    def _call_max_or_min(self, call: Call) -> Any:
        """Compute max, maximum or minimum: with a number a clamp, else the largest of each row."""
        others = [part for part in call.args if part is not self]
        if len(call.args) == 2 and len(others) == 1 and not call.kwargs and is_plain(others[0]):
            bound = _bound_as_number(others[0])
            if bound is not NotImplemented:
                return self.after(Step("clamp", numbers=(bound, None) if call.name != "minimum" else (None, bound)))
        return self._row_maxima(call) if call.name == "max" and call.args[0] is self else NotImplemented

    def _call_tanh(self, call: Call) -> Any:
        """Add a tanh to the steps."""
        return self.after(Step("tanh"))

    def _row_maxima(self, call: Call) -> Any:
        """Return the largest logit of each row, from one pass over the matrix."""
        given = dict(zip(("dim", "keepdim"), call.args[1:], strict=False)) | call.kwargs
        dim, keepdim = given.get("dim", given.get("axis")), bool(given.get("keepdim", False))
        if dim not in (-1, (-1,), [-1], len(self.shape) - 1) or not self.is_matrix or self.requires_grad:
            return NotImplemented
        matrix = matrix_of(self.state, as_computed=True)
        if matrix is None:
            return NotImplemented
        shape = (*self.shape[:-1], 1) if keepdim else tuple(self.shape[:-1])
        values, keys = (part.reshape(shape) for part in largest_of_rows(matrix))
        values = values.to(self.dtype)
        return values if call.name == "amax" else torch.return_types.max((values, keys))

    def _call_softmax(self, call: Call) -> Any:
        """Return the weights of a softmax over the keys."""
        names = ("dim", "_stacklevel", "dtype") if len(call.args) != 3 else ("dim", "dtype")
        given = dict(zip(names, call.args[1:], strict=False)) | call.kwargs
        dim, dtype = given.get("dim"), given.get("dtype")
        if dim not in (-1, len(self.shape) - 1) or not self.is_matrix or not given.keys() <= {*names, "dtype"}:
            return NotImplemented
        if dtype is None and autocast_dtype(torch.empty(0, dtype=self.dtype, device=self.device)) is not None:
            dtype = torch.float32  # as autocast computes softmax
        state = self.state
        scope = current()
        # Batch and heads share one axis: the module that runs says how many heads there are.
        if not state.is_split and scope is not None and (heads := scope.heads(state.batch)) > 1:
            state.split(state.batch // heads, heads)
        # The matrix of weights, where product and steps make one.
        matrix = matrix_of(state)
        if matrix is None:
            return NotImplemented
        return LazyWeights.of(matrix, tuple(self.shape), dtype or self.dtype)

    def detach(self) -> Any:
        """Return the same logits without a graph, still lazy: who keeps them reads single rows."""
        found = self.computed
        return Logits(_state_without_graph(self.state), tuple(self.shape)) if found is None else found.detach()

    def _call_index(self, call: Call) -> Any:
        """Return the logits of some batches, heads, queries and keys, computed of these alone."""
        parts = None if call.kwargs or len(call.args) != 2 else parts_of(call.args[1], tuple(self.shape))
        state, is_whole = self.state, tuple(self.shape) == self.state.sizes
        if parts is None:
            return NotImplemented
        cut, index = parts
        if all(part == slice(None) for part in cut) and 0 not in index:
            return self
        if not self.is_matrix or state.product.included or not state.product.is_certain:
            return NotImplemented
        if is_whole and state.batch == 1 and index[0] == 0 and all(part == slice(None) for part in cut[1:]):
            return self.viewed(tuple(self.shape[1:]))
        if len(cut) == 3 and state.batch == 1:
            cut, index = (slice(None), *cut), (0, *index)
        elif not is_whole:
            return NotImplemented
        q, k = state.tokens()
        with torch.set_grad_enabled(state.product.has_graph and torch.is_grad_enabled()), left():
            x = cut_of(q, (*cut[:3], slice(None))) @ cut_of(k, (*cut[:2], cut[3], slice(None))).mT
            for step in state.steps:
                x = step.of_part(cut, state.sizes)(x)
        return x[index]

    known: ClassVar[dict[str, Callable[[Any, Call], Any]]] = {
        **dict.fromkeys(("add", "sub", "rsub"), _call_add),
        "mul": _call_multiply,
        "div": _call_divide,
        "neg": _call_negate,
        "masked_fill": _call_masked_fill,
        "where": _call_where,
        **dict.fromkeys(("clamp", "clamp_min", "clamp_max"), _call_clamp),
        **dict.fromkeys(("max", "maximum", "minimum"), _call_max_or_min),
        "amax": _row_maxima,
        "tanh": _call_tanh,
        **dict.fromkeys(("softmax", "_softmax"), _call_softmax),
        "getitem": _call_index,
    }


def _state_without_graph(state: State) -> State:
    """Return the same logits without a graph."""
    state.check_unchanged()
    product = replace(state.product, q=state.product.q.detach(), k=state.product.k.detach())
    product.has_graph = False
    return replace(state, product=product, steps=tuple(step.detach() for step in state.steps))


def _other_plus_signed(logits: Logits, other: Any, sign: float) -> Any:
    """Return ``other + sign * logits``."""
    own = logits if sign == 1.0 else logits.after(Step("scale", numbers=(sign,)))
    return own._plus_multiple(other, 1.0)


def _operands_and_factor(call: Call) -> tuple[Any, Any, float] | None:
    """Return both sides of a sum or product, and the factor of the second; None for other arguments."""
    args = (*call.args, *([call.kwargs["other"]] if "other" in call.kwargs else []))
    alpha = call.kwargs.get("alpha", 1)
    if len(args) != 2 or not call.kwargs.keys() <= {"other", "alpha"} or not _is_number(alpha):
        return None
    return args[0], args[1], float(alpha)


def _is_number(value: Any) -> bool:
    """Return whether something is a number of Python."""
    return isinstance(value, int | float)


def is_plain(t: Any) -> bool:
    """Return whether something is a stored tensor of torch itself."""
    return type(t) in (Tensor, nn.Parameter, nn.Buffer) and t.layout is torch.strided and not t.is_complex()


def _bound_as_number(value: Any) -> Any:
    """Return a bound as a number, or None; NotImplemented for anything else."""
    if value is None or _is_number(value):
        return None if value is None else float(value)
    if is_plain(value) and value.numel() == 1 and not value.requires_grad:
        return float(value)
    return NotImplemented


def _mask_of_lazy_mask(t: Any) -> tuple[Mask | None] | None:
    """Return the mask that a lazy mask of transformers holds, in a tuple, as it may be None.

    None for any other tensor.
    """
    if not isinstance(t, Tensor) or not hasattr(t, "mask") or not t.is_floating_point():
        return None
    mask = t.mask
    return (mask,) if mask is None or isinstance(mask, Mask) else None


def _fits_queries_and_keys(given: tuple[int, ...], sizes: tuple[int, ...]) -> bool:
    """Return whether a lazy mask has the queries and keys of logits."""
    return len(given) == 4 and given[0] in (1, sizes[0]) and given[1] in (1, sizes[1]) and given[2:] == sizes[2:]


def _sum_as_one_product(a: Logits, b: Logits, sign: float) -> Logits | None:
    """Return the sum of two plain products as one product: queries and keys are put side by side.

    None where either is more than a product times a number.
    """
    first, second = a.state, b.state
    factors = [_factor_of_product(state) for state in (first, second)]
    same = a.shape == b.shape and first.sizes == second.sizes and first.dtype is second.dtype
    if not same or None in factors or first.product.lead != second.product.lead:
        return None
    one, other = first.product, second.product
    if one.has_graph != other.has_graph or one.q.dtype is not other.q.dtype:
        return None

    def wide(t: Tensor) -> Tensor:
        return t.expand(*one.lead, *t.shape[-2:])

    q = torch.cat([wide(one.q) * factors[0], wide(other.q) * (factors[1] * sign)], dim=-1)  # type: ignore[operator]
    k = torch.cat([wide(one.k), wide(other.k)], dim=-1)

    def compute() -> Tensor:
        x, y = (Logits(replace(state, computed=None), tuple(a.shape)).compute() for state in (first, second))
        return torch.add(x, y, alpha=sign) if sign != 1.0 else x + y

    product = Product(q, k, compute, one.lead, first.dtype, is_certain=one.is_certain or other.is_certain)
    return Logits(replace(first, product=product, steps=()), tuple(a.shape))


def _factor_of_product(state: State) -> float | None:
    """Return the number that a product was multiplied with; None where more was done with it."""
    factor = 1.0
    for step in state.steps:
        if step.kind not in ("scale", "divide_by_number") or step.numbers[0] is None:
            return None
        factor = factor * step.numbers[0] if step.kind == "scale" else factor / step.numbers[0]
    return factor if math.isfinite(factor) else None
