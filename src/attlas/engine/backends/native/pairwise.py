"""The scores that are no dot product: the calls that their kernels have in common."""

from __future__ import annotations

import ctypes
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from attlas.engine.backend import Gradients
from attlas.engine.backends.native import bias, library, request
from attlas.engine.online import merge
from attlas.engine.problem import Problem, spread_heads
from attlas.foundation.checks import all_finite


def unsupported_reason(problem: Problem) -> str | None:
    """Return why the kernels cannot compute this problem, whatever its score; None where they can."""
    if (reason := library.current().why_not) is not None:
        return reason
    if 0 in (*problem.shape, problem.q.shape[-1], problem.k.shape[-1]):
        return "there is nothing to compute"
    return None


def pairwise_params(
    kernels: library.Kernels, rows: Tensor, columns: Tensor, values: Tensor, *, by_column: bool = False, **fields: Any
) -> tuple[Any, list[Tensor]]:
    """Return a C++ structure ``PairwiseParams``, and the copies of tensors that it points to.

    Parameters
    ----------
    kernels : Kernels
        The kernels.
    rows, columns : Tensor, shape (batch, heads, tokens, d) and (batch, some heads, tokens, d)
        Tokens in the dtype of the sums.
    values : Tensor, shape (batch, some heads, columns, e)
        Vectors of the columns.
    by_column : bool
        Whether the columns are the queries.
    **fields
        Further fields: the mask, the known log-sum-exp and the addresses of results. The caller keeps their tensors
        alive.
    """
    # The kernel trusts these strides: an axis of another length would lead it out of the tensor.
    buffers = [t.expand(rows.shape[0], *t.shape[1:]) for t in (rows, columns, values)]
    buffers = [t if t.stride(-1) == 1 else t.contiguous() for t in buffers]
    batch, heads, m, d = rows.shape
    params = kernels.structures["PairwiseParams"](
        batch=batch,
        heads=heads,
        token_heads=columns.shape[1],
        value_heads=values.shape[1],
        m=m,
        n=columns.shape[2],
        d=d,
        e=values.shape[3],
        **kernels.tensors4(rows=buffers[0], columns=buffers[1], values=buffers[2]),
        type=kernels.codes["FLOAT64" if rows.dtype is torch.float64 else "FLOAT32"],
        threads=torch.get_num_threads(),
        by_column=int(by_column),
        **fields,
    )
    return params, buffers


class PairwiseFamily(ABC):
    """Outputs and row statistics of one family of kernels; a subclass names the kernels and makes their gradients.

    Parameters
    ----------
    problem : Problem
        The matrix.
    q, k : Tensor
        Projected tokens in the dtype of the sums, shape (batch, heads, m, d) and (batch, key heads, n, d).

    Attributes
    ----------
    entry : str
        Name of the C function; the structure of the family has the same name with a capital.
    """

    entry: ClassVar[str]

    def __init__(self, problem: Problem, q: Tensor, k: Tensor) -> None:
        self.problem, self.kernels = problem, library.current()
        self.q, self.k = q.detach().to(problem.dtype), k.detach().to(problem.dtype)

    @staticmethod
    @abstractmethod
    def unsupported(problem: Problem) -> str | None:
        """Return why these kernels do not compute a problem, or None where they do."""

    @abstractmethod
    def fields(self) -> dict[str, Any]:
        """Return the fields of the score in the structure of the family."""

    def run_forward(self, params: Any) -> bool:
        """Run the forward kernel; return False where it does not take the problem."""
        return self.kernels.call(self.entry, pairs=params, **self.fields()) == self.kernels.codes["DONE"]

    def run_backward(self, params: Any, left: Tensor, delta: Tensor, **results: Tensor | None) -> bool:
        """Run the kernel of gradients; return False where it does not take the problem."""
        kernels = self.kernels
        own = kernels.structures[self.entry.capitalize()](pairs=params, **self.fields())
        slopes = kernels.structures["Slopes"](left=left.data_ptr(), delta=delta.data_ptr())
        addresses = {name: 0 if t is None else t.data_ptr() for name, t in results.items()}
        status = kernels.call(f"{self.entry}_backward", of=own, slopes=slopes, **addresses)
        return status == kernels.codes["DONE"]

    @abstractmethod
    def parameters(self) -> Tensor:
        """Return the parameters of the score that the kernels get beside the tokens."""

    @abstractmethod
    def backward(
        self, parameters: Sequence[Tensor], lse: Tensor, left: Tensor, right: Tensor, delta: Tensor
    ) -> Gradients | None:
        """Return the gradients of ``sum_ij A_ij (left_i · right_j)``; None as in `forward`."""

    def params(
        self, rows: Tensor, columns: Tensor, values: Tensor, span: slice, **fields: Any
    ) -> tuple[Any, list[Any]]:
        """Return `pairwise_params` with the positional terms of the rows in `span`, and all that it points to."""
        by_column = fields.get("by_column", False)
        places, kept = bias.pairwise_fields(self.kernels, self.problem, span, by_column=by_column)
        params, buffers = pairwise_params(self.kernels, rows, columns, values, **places, **fields)
        return params, [*buffers, *kept]

    def zeros(self, *shape: int) -> Tensor:
        """Return zeros in the dtype of the sums."""
        return torch.zeros(shape, dtype=self.problem.dtype, device="cpu")

    def forward(self, v: Tensor | None, wanted: Mapping[str, Any]) -> dict[str, Tensor] | None:
        """Return the log-sum-exp, ``out`` for given values, and what is wanted of entropy and largest logit.

        One pass computes them all. None where a number is not finite.
        """
        values = self.k[..., :0] if v is None else v.detach().to(self.problem.dtype)
        if not all_finite(self.q, self.k, values):
            return None

        def run(rows: slice, fields: dict[str, Any]) -> bool:
            """Compute some rows, with results in `fields`; return False where the kernel does not take them."""
            fields.pop("sink", None)  # the kernel knows no sink: it is added below
            params, _buffers = self.params(self.q[:, :, rows], self.k, values, rows, **fields)
            return self.run_forward(params)

        found = request.compute(self.problem, {"lse": True, **wanted}, run, v=v)
        if found is None or ("out" in found and not all_finite(found["out"])):  # tiled sums values that overflow
            return None
        if self.problem.sink is not None:
            found = _rescaled_with_sink(found, self.problem.sink)
        if "entropy" in found:
            found["entropy"] = found["entropy"].clamp(min=0.0)  # rounding must not take it below 0
        return found

    def statistics(self, wanted: Mapping[str, Any], lse: Tensor) -> dict[str, Tensor] | None:
        """Return the wanted results, by the names of `attlas.engine.outputs`; None where tokens are not finite."""
        if not all_finite(self.q, self.k):
            return None
        no_values, structure = self.k[..., :0], self.kernels.structures["AttentionParams"]

        def run(rows: slice, fields: dict[str, Any]) -> bool:
            """Compute some rows, with results in `fields`; return False where the kernel does not take them."""
            params, _buffers = self.params(self.q[:, :, rows], self.k, no_values, rows)
            sizes = {name: getattr(params, name) for name in ("batch", "heads", "m", "n", "d", "type", "threads")}
            results = structure(**sizes, scale=math.log(2.0), **fields)  # logits are in powers of 2
            params.statistics = ctypes.addressof(results)
            return self.run_forward(params)

        return request.compute(self.problem, wanted, run, lse=lse.detach())

    def transposed(self, lse: Tensor, x: Tensor) -> Tensor | None:
        """Return ``A.mT @ x``, shape (batch, heads, n, e), in the dtype of the sums; None as in `forward`."""
        batch, heads, _, n = self.problem.shape
        values = x.detach().to(self.problem.dtype)
        # The log-sum-exp of a row without keys is -inf, and allowed.
        if not all_finite(self.q, self.k, values, lse.clamp(min=-1.0)):
            return None
        total = self.zeros(batch, heads, n, x.shape[-1])
        keys = spread_heads(self.k, heads)
        for block in request.row_blocks(self.problem):
            part, known = torch.empty_like(total), lse[block.slices].contiguous()
            fields = block.mask | {"known": known.data_ptr(), "out": part.data_ptr()}
            # Keys are the rows of this call and queries its columns. What the fields point to is kept in `_buffers`.
            params, _buffers = self.params(
                keys, self.q[block.slices], values[block.slices], block.slices[2], by_column=True, **fields
            )
            if not self.run_forward(params):
                return None
            total += part
        return total


def _rescaled_with_sink(found: dict[str, Tensor], sink: Tensor) -> dict[str, Tensor]:
    """Return results that were found without the sink, rescaled so that they count its weight."""
    dtype = found["lse"].dtype
    lse, share, _ = merge(found["lse"], sink.detach().to(dtype).view(1, -1, 1))
    counted = found | {"lse": lse}
    if "out" in found:
        counted["out"] = found["out"] * share.unsqueeze(-1)
    if "entropy" in found:  # p = share * p': its entropy is share * (entropy of p' - log share)
        counted["entropy"] = (found["entropy"] * share - torch.xlogy(share, share)).to(found["entropy"].dtype)
    return counted
