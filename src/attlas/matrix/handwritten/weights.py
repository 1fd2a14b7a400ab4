"""Weights of lazy logits: an attention matrix, and what code does with weights before it pools values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from attlas.engine.dropout import Dropout
from attlas.foundation.autocast import autocast_dtype, cast_values
from attlas.foundation.checks import check_values
from attlas.foundation.compat import changes
from attlas.foundation.indexing import Axes
from attlas.matrix import observers
from attlas.matrix.handwritten.lazy import Call, Uncomputed
from attlas.matrix.handwritten.scope import current, left
from attlas.matrix.matrix import AttentionMatrix
from attlas.matrix.protocol import OPERATIONS


@dataclass(eq=False)
class WeightState:
    """What all views of the same weights share.

    Parameters
    ----------
    matrix : AttentionMatrix, shape (batch, heads, m, n)
        The weights of the softmax.
    dtype : torch.dtype
        That the model sees.
    dropout : Dropout, optional
        Which weights are dropped: the same in each product.
    of_rows, of_keys : Tensor, optional, shape (batch or 1, heads or 1, m or 1, 1) and (batch or 1, heads or 1, 1, n)
        Factors of the weights.
    computed : Tensor, optional
        The numbers.
    """

    matrix: AttentionMatrix
    dtype: torch.dtype
    dropout: Dropout | None = None
    of_rows: Tensor | float = 1.0
    of_keys: Tensor | None = None
    computed: Tensor | None = None
    changes: int = 0  # how often the numbers were changed in place when they were computed
    is_heard: bool = False  # whether a recording has the matrix

    @property
    def is_plain(self) -> bool:
        """Whether nothing was done with the weights of the softmax but to drop some."""
        return self.of_keys is None and isinstance(self.of_rows, float) and self.of_rows == 1.0


class LazyWeights(Uncomputed):
    """The weights that a model computes with, as a lazy tensor.

    Parameters
    ----------
    state : WeightState
        What all views share.
    shape : tuple of int
        The shape that the model sees.
    """

    label = what = "weights"
    state: WeightState

    def __init__(self, state: WeightState, shape: tuple[int, ...]) -> None:
        super().__init__(state, shape, state.matrix.device)

    @classmethod
    def of(cls, matrix: AttentionMatrix, shape: tuple[int, ...], dtype: torch.dtype) -> LazyWeights:
        """Return the weights of a matrix in the shape and dtype that the model sees."""
        return cls(WeightState(matrix, dtype), shape)

    def __repr__(self) -> str:
        return f"LazyWeights(shape={tuple(self.shape)}, {self.dtype}, {self.state.matrix!r})"

    @property
    def requires_grad(self) -> bool:
        """Whether a graph is recorded."""
        return self.state.matrix.requires_grad

    def compute(self) -> Tensor:
        """Compute the weights of the softmax, and what was done with them: dropout, factors of rows and of keys."""
        state, keys = self.state, self.state.matrix.weights.keys
        if state.dropout is None:
            x = state.matrix.to_dense(limit=None)
        else:  # dropped as in products: those with the values 1 of each key
            x = self._times_values(torch.eye(keys.shape[-2], dtype=keys.dtype, device=keys.device)[None, None])
        x = x.to(state.dtype) * state.of_rows if not state.is_plain else x.to(state.dtype)
        x = x if state.of_keys is None else x * state.of_keys
        state.computed = x.reshape(self.shape).contiguous()
        state.changes = 0 if state.computed.is_inference() else changes(state.computed)
        return state.computed

    def written_out(self, operation: str) -> Tensor:
        """Return the numbers for an operation that needs them; a recording gets the matrix before."""
        scope = current()
        if not self.state.is_heard and self.computed is None and scope is not None and scope.offer is not None:
            self.state.is_heard = True
            scope.offer(self.state.matrix)
        return super().written_out(operation)

    def returned(self) -> Any:
        """Return the attention matrix, for a model that returns its weights."""
        state, matrix = self.state, self.as_matrix()
        found = state.computed
        is_changed = found is not None and (found.is_inference() or changes(found) != state.changes)
        return self.written_out("return") if matrix is None or is_changed or not state.is_plain else matrix

    def detach(self) -> Any:
        """Return the weights without a graph: a lazy tensor, which can be kept, where nothing was done with them."""
        matrix = self._unchanged_matrix()
        return super().detach() if matrix is None or self.computed is not None else matrix.detach().as_tensor()

    def as_matrix(self) -> AttentionMatrix | None:
        """Return the weights as a matrix with the axes that the model sees; None where it has no such axes."""
        matrix, lead = self.state.matrix, tuple(self.shape[:-2])
        if self.state.of_keys is not None or tuple(self.shape[-2:]) != tuple(matrix.shape[-2:]):
            return None
        batch, heads = matrix.weights.shape[:2]
        if lead == (batch, heads):
            return matrix
        if (len(lead) > 2 and lead[-1] == heads) or (lead == (batch,) and heads == 1):
            return matrix.with_weights(matrix.weights, Axes(lead, (True,) * len(lead)))
        return None

    # --------------------------------------------------------------------------------------------- what it is made into

    def viewed(self, shape: tuple[int, ...]) -> LazyWeights:
        return LazyWeights(self.state, shape)

    def copied(self) -> LazyWeights:
        return LazyWeights(replace(self.state), tuple(self.shape))

    def cast(self, dtype: torch.dtype) -> LazyWeights:
        return self._with_changes(dtype=dtype)

    def _with_changes(self, **changed: Any) -> LazyWeights:
        """Return weights of which something is changed."""
        return LazyWeights(replace(self.state, **changed), tuple(self.shape))

    def _row_or_key_factor(self, given: Any) -> Tensor | None:
        """Return a factor in the axes of the matrix; None where it is no factor of rows or keys."""
        if not isinstance(given, Tensor) or given.device != self.device or given.ndim > len(self.shape):
            return None
        t: Tensor = given
        t = t.reshape((1,) * (len(self.shape) - t.ndim) + t.shape)
        m, n = self.state.matrix.shape[-2:]
        fits = all(size in (1, full) for size, full in zip(t.shape, self.shape, strict=True))
        if not fits or tuple(self.shape[-2:]) != (m, n) or (t.shape[-1] != 1 and t.shape[-2] != 1):
            return None
        lead, full, rest = tuple(t.shape[:-2]), tuple(self.shape[:-2]), t.shape[-2:]
        batch, heads = self.state.matrix.shape[:2]
        if all(size == 1 for size in lead):
            return t.reshape(1, 1, *rest)
        return t.expand(*full, *rest).reshape(batch, heads, *rest)

    def _scaled_by_factor(self, t: Tensor | float) -> LazyWeights:
        """Return weights times a factor of rows or of keys."""
        state = self.state
        if isinstance(t, Tensor) and t.shape[-1] != 1:
            of_keys = t if state.of_keys is None else state.of_keys * t
            return self._with_changes(of_keys=of_keys, dtype=_product_dtype(self.dtype, t))
        return self._with_changes(of_rows=state.of_rows * t, dtype=_product_dtype(self.dtype, t))

    # ------------------------------------------------------------------------------------------------ operations

    def _call_multiply(self, call: Call) -> Any:
        """Multiply with a number, or a factor of each head, query or key."""
        if call.kwargs or len(call.args) != 2:
            return NotImplemented
        other = call.args[1] if call.args[0] is self else call.args[0]
        if isinstance(other, int | float):
            return self._scaled_by_factor(float(other))
        t = self._row_or_key_factor(other)
        return NotImplemented if t is None else self._scaled_by_factor(t)

    def _call_divide(self, call: Call) -> Any:
        """Divide by a number."""
        fits = (
            not call.kwargs and len(call.args) == 2 and call.args[0] is self and isinstance(call.args[1], int | float)
        )
        return self._scaled_by_factor(1.0 / call.args[1]) if fits and call.args[1] else NotImplemented

    def _call_masked_fill(self, call: Call) -> Any:
        """Set the weights of whole rows or keys to 0."""
        args = (*call.args[1:], *(call.kwargs[name] for name in ("mask", "value") if name in call.kwargs))
        if len(args) != 2 or call.args[0] is not self or not isinstance(args[0], Tensor):
            return NotImplemented
        t = self._row_or_key_factor(args[0])
        is_zero = isinstance(args[1], int | float) and args[1] == 0
        return (
            self._scaled_by_factor((~t).to(self.dtype))
            if is_zero and t is not None and t.dtype is torch.bool
            else NotImplemented
        )

    def _call_dropout(self, call: Call) -> Any:
        """Drop weights when values are pooled."""
        given = dict(zip(("p", "training", "inplace"), call.args[1:], strict=False)) | call.kwargs
        given["training"] = given.pop("train", given.get("training", True))
        p = given.get("p", 0.5)
        if not given["training"] or p == 0:
            return self
        again = self.state.dropout is not None or not 0 <= p <= 1
        return NotImplemented if again else self._with_changes(dropout=Dropout.draw(float(p)))

    def _call_nan_to_num(self, call: Call) -> Any:
        """Return the weights themselves: they are finite, so that nan_to_num changes nothing."""
        return self if len(call.args) == 1 and not call.kwargs else NotImplemented

    def _call_product(self, call: Call) -> Any:
        """Return the weights times values."""
        if call.kwargs.keys() - {"other", "mat2"} or len(call.args) + len(call.kwargs) != 2:
            return NotImplemented
        first, second = (*call.args, *call.kwargs.values())
        if first is self and isinstance(second, Tensor):
            return self.pooled(second)
        if second is self and isinstance(first, Tensor) and (matrix := self._unchanged_matrix()) is not None:
            return first @ matrix
        return NotImplemented

    def pooled(self, v: Tensor) -> Any:
        """Return the weights times values of any axes that fit."""
        state, lead = self.state, tuple(self.shape[:-2])
        batch, heads, m, n = state.matrix.shape
        own = tuple(v.shape[:-2])
        fits = v.ndim > 1 and tuple(self.shape[-2:]) == (m, n) and v.shape[-2] == n and len(own) <= len(lead)
        if not fits or any(a not in (1, b) for a, b in zip(reversed(own), reversed(lead), strict=False)):
            return NotImplemented
        e = v.shape[-1]
        own = (1,) * (len(lead) - len(own)) + own
        v4 = v.reshape(*own, n, e)
        if len(lead) > 1 and lead[-1] == heads and own[-1] == 1:
            v4 = v4.expand(*lead[:-1], 1, n, e).reshape(batch, 1, n, e)
        else:
            v4 = v4.expand(*lead, n, e).reshape(batch, heads, n, e)
        v4 = v4 if state.of_keys is None else v4 * state.of_keys.mT
        tokens = state.matrix.weights.keys.dtype
        if v4.dtype is not tokens and autocast_dtype(v4) is None:
            v4 = v4.to(tokens)
        out = self._times_values(v4)
        if not (isinstance(state.of_rows, float) and state.of_rows == 1.0):
            out = out * state.of_rows
        wanted = autocast_dtype(v) or v.dtype
        return out.to(wanted).reshape(*lead, m, e).contiguous()

    def _times_values(self, values: Tensor) -> Tensor:
        """Return the weights of the softmax, some dropped, times values (batch or 1, heads or 1, n, e)."""
        matrix, dropout = self.state.matrix, self.state.dropout
        values, dtype = cast_values(values, matrix.weights.keys)
        values = check_values(values, matrix.weights.keys, matrix.axes, matrix.weights.shape[1])
        self.state.is_heard = True
        with left():
            multiply = observers.product if observers.active else observers.unobserved_product
            out = multiply(matrix, values, dropout)
        return out if dtype is None else out.to(dtype)

    def __matmul__(self, v: Any) -> Any:
        return called_matmul(self, v)

    def _call_einsum(self, call: Call) -> Any:
        """Return an einsum that sums over keys or queries."""
        return OPERATIONS["einsum"](torch.einsum, call.args, call.kwargs)

    def _unchanged_matrix(self) -> AttentionMatrix | None:
        """Return the weights as a matrix where nothing was done with them, and the model sees its dtype."""
        matrix = self.as_matrix()
        if matrix is None or not self.state.is_plain or self.state.dropout is not None or self.dtype != matrix.dtype:
            return None
        return matrix

    def _call_transpose(self, call: Call) -> Any:
        """Return the transposed matrix, for ``v @ weights.mT``."""
        matrix, last = self._unchanged_matrix(), {len(self.shape) - 1, len(self.shape) - 2}
        axes = call.args[1:]
        if call.name == "permute":
            axes = tuple(axes[0]) if len(axes) == 1 and not isinstance(axes[0], int) else axes
            wanted = (*range(len(self.shape) - 2), len(self.shape) - 1, len(self.shape) - 2)
            swaps = tuple(axis % len(self.shape) for axis in axes) == wanted
        else:
            swaps = len(axes) == 2 and {axis % len(self.shape) for axis in axes} == last
        return matrix.mT if matrix is not None and swaps else NotImplemented

    @property
    def mT(self) -> Any:
        """The transposed matrix, for ``v @ weights.mT``."""
        matrix = self._unchanged_matrix()
        return self.written_out("mT").mT if matrix is None else matrix.mT

    def _call_matrix_method(self, call: Call) -> Any:
        """Call the method of the attention matrix of the same name, which needs no dense weights."""
        matrix = self._unchanged_matrix()
        if matrix is None or call.args[0] is not self:
            return NotImplemented
        with left():
            return getattr(matrix, "__getitem__" if call.name == "getitem" else call.name)(
                *call.args[1:], **call.kwargs
            )

    known: ClassVar[dict[str, Callable[[Any, Call], Any]]] = {
        "mul": _call_multiply,
        "div": _call_divide,
        "masked_fill": _call_masked_fill,
        "dropout": _call_dropout,
        "nan_to_num": _call_nan_to_num,
        **dict.fromkeys(("matmul", "bmm"), _call_product),
        "einsum": _call_einsum,
        **dict.fromkeys(("transpose", "permute", "swapaxes"), _call_transpose),
        **dict.fromkeys(("sum", "mean", "amax", "argmax", "topk", "getitem"), _call_matrix_method),
    }


def called_matmul(weights: LazyWeights, v: Any) -> Any:
    """Return the weights times values: by the matrix where that can be, else from all numbers."""
    found = weights.pooled(v) if isinstance(v, Tensor) and weights.computed is None else NotImplemented
    if found is not NotImplemented:
        return found
    v = v.to_dense() if isinstance(v, Uncomputed) else v
    return weights.written_out("matmul") @ v


def _product_dtype(dtype: torch.dtype, t: Tensor | float) -> torch.dtype:
    """Return the dtype that torch gives a product with a factor."""
    return torch.promote_types(dtype, t.dtype) if isinstance(t, Tensor) and t.ndim else dtype
