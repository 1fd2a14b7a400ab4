"""What the kernels of additive scores and of distances are handed: tensors, and the mask as intervals or bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from attlas.engine.backend import Gradients
from attlas.engine.native import library, masking, request
from attlas.engine.online import merge
from attlas.engine.plan import Plan
from attlas.engine.problem import Problem, spread_heads
from attlas.inputs import all_finite
from attlas.masks.base import BlockState
from attlas.tiles import cut

__all__ = ["Family", "Rows", "View", "fields", "refusal", "views", "with_sink"]


class Rows(NamedTuple):
    """Numbers of each row, shape (batch, heads, m): log-sum-exp, entropy in nats, largest logit."""

    lse: Tensor
    entropy: Tensor
    max_logit: Tensor


@dataclass(frozen=True, eq=False)
class View:
    """Some queries and what the mask says of them, in the fields of the C++ structure ``PairwiseParams``.

    Parameters
    ----------
    rows : range
        The queries.
    mask : dict
        Fields ``low``, ``high``, ``allowed`` and their strides.
    held : tuple of Tensor
        What the addresses point to.
    """

    rows: range
    mask: dict[str, int]
    held: tuple[Tensor, ...] = ()

    @property
    def place(self) -> tuple[slice, slice, slice]:
        """Where these queries lie in a tensor of shape (batch, heads, m)."""
        return slice(None), slice(None), slice(self.rows.start, self.rows.stop)


def refusal(problem: Problem, entry: str) -> str | None:
    """Return why a C function cannot compute this problem, whatever its score; None where it can."""
    if problem.device.type != "cpu":
        return "the tokens are not on the CPU"
    if not library.has(entry):
        return library.why_not() or f"the library has no kernels for {entry}"
    if 0 in (*problem.shape, problem.q.shape[-1], problem.k.shape[-1]):
        return "there is nothing to compute"
    return None


def views(problem: Problem, plan: Plan) -> Iterator[View]:
    """Yield the queries in parts, each with its mask; those that see no key are left out.

    Intervals serve all queries at once. Any other mask is asked for its cells, some rows at a time.
    """
    batch, heads, m, n = problem.shape
    if problem.mask is None:
        yield View(range(m), {})
        return
    if problem.allowed_runs is not None:
        yield View(range(m), *masking.of_runs(*problem.allowed_runs))
        return
    rows = max(plan.budget("cpu") // (batch * heads * n), 16)
    for some in cut(m, rows):
        at = problem.tile(range(batch), range(heads), some, range(n))
        coverage = problem.mask.coverage(at)
        if coverage is BlockState.EMPTY:
            continue
        if coverage is BlockState.FULL:
            yield View(some, {})
            continue
        yield View(some, *masking.of_cells(problem.mask.allows(at), len(some), n))


def fields(
    view: View, rows: Tensor, columns: Tensor, values: Tensor, *, by_column: bool = False, **results: Any
) -> tuple[Any, list[Tensor]]:
    """Return a C++ structure ``PairwiseParams`` and the tensors that it points to, which must live as long.

    Parameters
    ----------
    view : View
        The queries of this call. They are the rows of `rows`, or of `columns` where `by_column`.
    rows, columns : Tensor, shape (batch, heads, tokens, d) and (batch, some heads, tokens, d)
        Tokens in the dtype of the sums.
    values : Tensor, shape (batch, some heads, columns, e)
        Vectors of the columns.
    by_column : bool
        Whether the columns are the queries.
    **results
        Contiguous tensors by the name of their field, ``known`` included.
    """
    # The kernel trusts these strides: an axis of another length would lead it out of the tensor.
    held = [t.expand(rows.shape[0], *t.shape[1:]) for t in (rows, columns, values)]
    held = [t if t.stride(-1) == 1 else t.contiguous() for t in held]
    place = library.structure("Tensor4")
    tensors = [place(data=t.data_ptr(), batch=t.stride(0), head=t.stride(1), row=t.stride(2)) for t in held]
    batch, heads, m, d = rows.shape
    given = {name: t for name, t in results.items() if t is not None}
    pairs = library.structure("PairwiseParams")(
        batch=batch,
        heads=heads,
        token_heads=columns.shape[1],
        value_heads=values.shape[1],
        m=m,
        n=columns.shape[2],
        d=d,
        e=values.shape[3],
        rows=tensors[0],
        columns=tensors[1],
        values=tensors[2],
        type=library.code("FLOAT64" if rows.dtype is torch.float64 else "FLOAT32"),
        threads=library.threads(),
        by_column=int(by_column),
        **view.mask,
        **{name: t.data_ptr() for name, t in given.items()},
    )
    return pairs, [*held, *given.values(), *view.held]


def no_keys(*shape: int) -> Tensor:
    """Return the log-sum-exp of rows that see no key."""
    return torch.full(shape, -torch.inf, dtype=torch.float64, device="cpu")


def with_sink(problem: Problem, lse: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the log-sum-exp with the sink counted, and the part of each row's weight that it leaves to the keys."""
    if problem.sink is None:
        return lse, None
    total, share, _ = merge(lse, problem.sink.to(lse.dtype).view(1, -1, 1))
    return total, share


class Family:
    """The products and the numbers of rows that one family of kernels gives; a subclass says how to call it.

    Parameters
    ----------
    problem : Problem
        The matrix.
    q, k : Tensor
        Projected tokens in the dtype of the sums, shape (batch, heads, m, d) and (batch, key heads, n, d).
    plan : Plan
        Bounds the memory that a mask's cells take.
    """

    def __init__(self, problem: Problem, q: Tensor, k: Tensor, plan: Plan) -> None:
        self.problem, self.plan = problem, plan
        self.q, self.k = q.detach().to(problem.dtype), k.detach().to(problem.dtype)

    def sums(self, pairs: Any) -> bool:
        """Run the forward kernel; False where it does not take the problem."""
        raise NotImplementedError

    def statistics(self, pairs: Any, found: Any) -> bool:
        """Run the kernel of what needs the log-sum-exp; False where it does not take the problem."""
        raise NotImplementedError

    def parameters(self) -> Tensor:
        """Return the numbers of the score that the kernels are handed beside the tokens."""
        raise NotImplementedError

    def backward(
        self, parameters: Sequence[Tensor], lse: Tensor, left: Tensor, right: Tensor, delta: Tensor
    ) -> Gradients | None:
        """Return the gradients of ``sum_ij A_ij (left_i · right_j)``; None as in `forward`."""
        raise NotImplementedError

    def new(self, *shape: int, fill: float = 0.0) -> Tensor:
        """Return a tensor in the dtype of the sums."""
        return torch.full(shape, fill, dtype=self.problem.dtype, device="cpu")

    def forward(self, v: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return ``A @ v``, shape (batch, heads, m, e), and the log-sum-exp; None where tokens are not finite."""
        batch, heads, m, _ = self.problem.shape
        values = v.detach().to(self.problem.dtype)
        if not all_finite(self.q, self.k, values):
            return None
        out, lse = self.new(batch, heads, m, v.shape[-1]), no_keys(batch, heads, m)
        for view in views(self.problem, self.plan):
            whole = len(view.rows) == m
            part = out if whole else self.new(batch, heads, len(view.rows), v.shape[-1])
            part_lse = lse if whole else no_keys(batch, heads, len(view.rows))
            wanted: dict[str, Any] = {"out": part if v.shape[-1] else None, "lse": part_lse}
            pairs, held = fields(view, self.q[view.place], self.k, values, **wanted)
            if not self.sums(pairs):
                return None
            del held
            if not whole:
                out[view.place], lse[view.place] = part, part_lse
        if not all_finite(out):  # values so large that their sum is not: the tiled backend has its own way with them
            return None
        lse, share = with_sink(self.problem, lse)
        return (out if share is None else out * share.unsqueeze(-1)).to(v.dtype), lse

    def rows(self) -> Rows | None:
        """Return log-sum-exp, entropy and largest logit of each row; None where tokens are not finite."""
        batch, heads, m, _ = self.problem.shape
        if not all_finite(self.q, self.k):
            return None
        found = [no_keys(batch, heads, m), *(self.new(batch, heads, m, fill=fill) for fill in (0.0, -torch.inf))]
        for view in views(self.problem, self.plan):
            parts = [torch.empty_like(whole[view.place]) for whole in found]
            wanted: dict[str, Any] = dict(zip(("lse", "entropy", "max_logit"), parts, strict=True))
            pairs, held = fields(view, self.q[view.place], self.k, self.k[..., :0], **wanted)
            if not self.sums(pairs):
                return None
            del held
            for whole, part in zip(found, parts, strict=True):
                whole[view.place] = part
        lse, share = with_sink(self.problem, found[0])
        if share is not None:  # p = share * p': its entropy is share * (entropy of p' - log share)
            found[1] = found[1] * share - torch.xlogy(share, share)
        return Rows(lse, found[1].clamp(min=0.0).to(self.problem.dtype), found[2])  # rounding must not take it below 0

    def found(self, wanted: Mapping[str, Any], lse: Tensor) -> dict[str, Tensor] | None:
        """Return what is wanted of the matrix, as `request.compute` names it; None where tokens are not finite."""
        if not all_finite(self.q, self.k):
            return None
        nothing, structure = self.k[..., :0], library.structure("AttentionParams")

        def run(rows: slice, results: dict[str, Any]) -> bool:
            q = self.q[:, :, rows]
            pairs, held = fields(View(range(q.shape[2]), {}), q, self.k, nothing)
            sizes = {name: getattr(pairs, name) for name in ("batch", "heads", "m", "n", "d", "type", "threads")}
            # Logits are in powers of 2.
            done = self.statistics(pairs, structure(**sizes, scale=math.log(2.0), **results))
            del held
            return done

        return request.compute(self.problem, wanted, run, lse=lse.detach())

    def transposed(self, lse: Tensor, x: Tensor) -> Tensor | None:
        """Return ``A.mT @ x``, shape (batch, heads, n, e), in the dtype of the sums; None as in `forward`."""
        batch, heads, _, n = self.problem.shape
        values = x.detach().to(self.problem.dtype)
        if not all_finite(self.q, self.k, values, lse.clamp(min=-1.0)):
            return None
        total = self.new(batch, heads, n, x.shape[-1])
        keys = spread_heads(self.k, heads)
        for view in views(self.problem, self.plan):
            part = torch.empty_like(total)
            known = lse[view.place].contiguous()
            pairs, held = fields(
                view, keys, self.q[view.place], values[view.place], by_column=True, known=known, out=part
            )
            if not self.sums(pairs):
                return None
            del held
            total += part
        return total
