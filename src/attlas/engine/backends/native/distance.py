"""Kernels of a distance on the CPU, by direct differences: two products, and the gradients of the smooth ones.

Nothing is rounded before the difference is taken, so that a far cloud of points keeps its digits. Weights that fall
below the normal numbers are exactly 0: no query is slow because its keys are far. Output and log-sum-exp of a
Gaussian of float64 tokens take products of vectors from the keys' mean, tile by tile, where they change no weight by
more than 1e-12 of itself (kernels/products.h), and differences elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attlas.engine.backend import Gradients
from attlas.engine.backends.native import request
from attlas.engine.backends.native.pairwise import PairwiseFamily, unsupported_reason
from attlas.engine.costs import DIRECT_COORDINATES, MOST_COORDINATES
from attlas.engine.problem import Problem, spread_heads, sum_heads
from attlas.scores.kernel import Boxcar, Epanechnikov, Gaussian, Laplace, Triangular

KERNELS: dict[type, str] = {
    Gaussian: "GAUSSIAN",
    Laplace: "LAPLACE",
    Boxcar: "BOXCAR",
    Epanechnikov: "EPANECHNIKOV",
    Triangular: "TRIANGULAR",
}


def _is_dot_product(problem: Problem) -> bool:
    """Return whether tiles compute the distances as dot products: `project` of a Gaussian then gives tuples."""
    return not isinstance(problem.tokens[0], Tensor)


class DistanceKernels(PairwiseFamily):
    """Calls of the kernels of a distance."""

    entry = "distance"

    def __init__(self, problem: Problem, q: Tensor, k: Tensor) -> None:
        super().__init__(problem, q, k)
        self.score: Any = problem.score
        self.kernel = self.kernels.codes[KERNELS[type(problem.score)]]
        with torch.no_grad():
            self.scale = self._inverse_bandwidth().contiguous()

    def _inverse_bandwidth(self) -> Tensor:
        """Return one over the bandwidth of each coordinate, shape (d,), as the score itself makes it."""
        ones, h = self.q.new_ones(self.q.shape[-1]), self.score.bandwidth
        scale: Tensor = ones / (h.to(ones) if h.ndim else h)
        return scale

    def parameters(self) -> Tensor:
        # As in `PairwiseFamily`: one over the bandwidth of each coordinate.
        return self.scale

    @staticmethod
    def unsupported(problem: Problem) -> str | None:
        # The reason why these kernels do not compute a problem; None where they do.
        if type(problem.score) not in KERNELS:
            return "the score is no kernel of a distance"
        if problem.q.shape[-1] > MOST_COORDINATES:
            return f"the tokens have more than {MOST_COORDINATES} coordinates"
        if problem.q.shape[-1] > DIRECT_COORDINATES and _is_dot_product(problem):
            return "this Gaussian is computed as a dot product"
        return unsupported_reason(problem)

    def fields(self) -> dict[str, Any]:
        # The fields of the score in the C structure ``Distance``, as in `PairwiseFamily`.
        return {"kernel": self.kernel, "scale": self.scale.data_ptr()}

    def backward(
        self, parameters: Sequence[Tensor], lse: Tensor, left: Tensor, right: Tensor, delta: Tensor
    ) -> Gradients | None:
        # Two calls for each block of rows: the first gives the gradients of queries and scale, the second, with queries
        # and keys exchanged, those of keys and values. `left`, `right` and `delta` are those of a `CellGradient`.
        problem, dtype = self.problem, self.problem.dtype
        batch, heads, m, n = problem.shape
        d, e = self.q.shape[-1], left.shape[-1]
        values = right.detach().to(dtype)
        keys, right_rows = spread_heads(self.k, heads), spread_heads(values, heads).contiguous()
        d_q, d_k = self.zeros(batch, heads, m, d), self.zeros(batch, heads, n, d)
        d_values = self.zeros(batch, heads, n, e)
        d_scale = self.zeros(d) if parameters else None
        for block in request.row_blocks(problem):
            rows_left, rows_delta = (t[block.slices].detach().to(dtype).contiguous() for t in (left, delta))
            known = lse[block.slices].detach().contiguous()
            fields = block.mask | {"known": known.data_ptr()}
            q = self.q[block.slices]
            first = self.zeros(batch, heads, len(block.rows), d)
            second = None if d_scale is None else torch.empty_like(first)
            # What the fields point to is kept in `_buffers` until the call returns.
            params, _buffers = self.params(q, self.k, values, block.slices[2], **fields)
            if not self.run_backward(params, rows_left, rows_delta, first=first, second=second):
                return None
            d_q[block.slices] = first
            if d_scale is not None and second is not None:
                d_scale += second.sum(dim=(0, 1, 2))
            first, part = self.zeros(batch, heads, n, d), torch.empty_like(d_values)
            fields["out"] = part.data_ptr()
            params, _buffers = self.params(keys, q, rows_left, block.slices[2], by_column=True, **fields)
            if not self.run_backward(params, right_rows, rows_delta, first=first):
                return None
            d_k += first
            d_values += part
        # s = -½ Σ (scale gap)², or -Σ |scale gap|. The kernels leave out the factor that is the same for all pairs.
        gaussian = type(self.score) is Gaussian
        factor = -self.scale.square() if gaussian else -self.scale.abs()
        d_k = sum_heads(d_k, self.k.shape[1])
        d_parameters: list[Tensor | None] = []
        if d_scale is not None:
            d_scale *= -self.scale if gaussian else -self.scale.sign()
            with torch.enable_grad():  # the bandwidth, or what it is made from
                scale = self._inverse_bandwidth()
                d_parameters += torch.autograd.grad(scale, list(parameters), d_scale, allow_unused=True)
        return Gradients([d_q * factor], [d_k * factor], d_parameters, d_values, delta)
