"""The attention matrix of DTensors: each rank has a part of it, and results are DTensors."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from attlas.distributed.agree import agreed
from attlas.distributed.collecting import Collector
from attlas.distributed.groups import by_group, is_divided
from attlas.distributed.layout import Layout, Role, check_dtensor, like
from attlas.distributed.parts import parts_of, with_graph
from attlas.engine.online import finite_shift, share_of
from attlas.engine.problem import spread_heads
from attlas.errors import BackendError, GradientError, public
from attlas.foundation.checks import check_values
from attlas.foundation.indexing import Axes, Where, parse
from attlas.matrix import AttentionMatrix, observers, softmax_matrix
from attlas.stats import Statistic, TopK


class _RefusedAttributes:
    """Raises an error that says what to use instead, for attributes that only a tensor has."""

    _shown = "A"

    def __getattr__(self, name: str) -> Any:
        # Called for names that the class does not have: for those of Tensor the error says what to use instead.
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        rule = "a matrix of DTensors has A @ v, A.mT @ x, A.lse, A.topk(), A.collect() and A[...]."
        fix = "A.collect(stats.Picture(...)), this rank's A.parts, or attend(q.full_tensor(), k.full_tensor())."
        where = f"{self._shown}.{name}"
        raise BackendError(rule, where, fix, where=where)


class DistributedMatrix(_RefusedAttributes):
    """softmax(score(Q, K)) of queries and keys that are divided over the ranks of a mesh. Made by `attlas.attend`.

    It has products, the log-sum-exp, statistics and reads of cells. Their results are DTensors: sharded along batch and
    heads as the tokens are, per-row results sharded along the queries as q is, everything else summed once and
    replicated. ``A[...]`` gives cells, rows, columns and tiles to all ranks, which ask for the same ones: each computes
    those that it has, and one all-reduce sums them.

    Attributes
    ----------
    shape : torch.Size
        Shape of the whole matrix, (..., m, n).

    See Also
    --------
    attlas.attend : makes one.

    Notes
    -----
    With r ranks, what a rank sends: queries sharded, ``(r - 1) / r`` of all keys once, and as much of the values for
    ``A @ v``. Keys sharded and queries whole, the output and two numbers of each query and head. Before each exchange
    and after each computation, one number tells whether a rank has failed, so that all raise its error.

    Where the keys and values of all heads take more than `Plan.gathered_bytes`, each method gathers and releases them
    one group of heads at a time. The keys are then sent again for each product, statistic and read, and keys and values
    once more for a backward, which computes the output a second time.

    Every method that exchanges something must be called by all ranks.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas import stats
    >>> from torch.distributed import HashStore, destroy_process_group, init_process_group
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> from torch.distributed.tensor import Shard, distribute_tensor
    >>> init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    >>> mesh = init_device_mesh("cpu", (1,))
    >>> q, k = (distribute_tensor(torch.randn(64, 8), mesh, [Shard(0)]) for _ in range(2))
    >>> A = attlas.attend(q, k, mask=attlas.Causal())
    >>> entropy, mass = A.collect(stats.Entropy(), stats.ColumnMass())
    >>> entropy.placements, mass.placements
    ((Shard(dim=0),), (Replicate(),))
    >>> destroy_process_group()
    """

    def __init__(self, layout: Layout, whole: AttentionMatrix, tokens: tuple[Any, ...]) -> None:
        self.shape = whole.shape
        self.layout = layout
        self.whole = whole
        self.tokens = tokens  # queries, keys, and a scale that is a tensor
        self._parts = None if is_divided(self) else parts_of(layout, whole, *tokens)

    @property
    def parts(self) -> tuple[AttentionMatrix, ...]:
        """What this rank computes: one lazy matrix, of shape (batch, heads, rows, n), for each run of its queries.

        The keys of all heads are kept from here on. Where `Plan.gathered_bytes` has no room for them they are gathered
        here, so that all ranks must ask for it.
        """
        if self._parts is None:
            self._parts = parts_of(self.layout, self.whole, *self.tokens)
        return self._parts

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that can get a gradient: queries, keys, scale, sink, and the tensors of the score."""
        return [t for t in (*self.tokens, *self.whole.problem.leaves[2:]) if t is not None]

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of ranks."""
        return self.layout.mesh

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the numbers."""
        return self.whole.dtype

    @property
    def device(self) -> torch.device:
        """Device of this rank's tokens."""
        return self.whole.device

    @property
    def requires_grad(self) -> bool:
        """Whether a tensor that the matrix depends on requires a gradient."""
        return any(t.requires_grad for t in self.leaves)

    def __repr__(self) -> str:
        roles = ", ".join(f"axis {role}" if isinstance(role, int) else role for role in self.layout.roles)
        return (
            f"DistributedMatrix(shape={tuple(self.shape)}, {self.dtype}, mesh {tuple(self.device_mesh.shape)}: {roles})"
        )

    @public("A[...]")
    def __getitem__(self, key: object) -> DTensor:
        """Return cells as a DTensor that is the same on all ranks; all ranks ask for the same ones."""
        layout = self.layout
        dims = [role for role in dict.fromkeys(layout.roles) if role != "nothing"]

        def read() -> Where:
            """Return which cells the key asks for."""
            self.whole.weights.check_unchanged()
            return parsed(key, layout)

        where = agreed(self.device_mesh, read)
        batches, heads, axes = where.leading  # type: ignore[misc]  # parsed() fills it in
        own = by_group(self, lambda A: A._cells_of_this_rank(where), wanted=(batches, heads))
        cells = where.squeezed(axes.restore(layout.reduced(own, dims)))
        return DTensor.from_local(cells, self.device_mesh, [Replicate()] * self.device_mesh.ndim, run_check=False)

    @public("A[...]")
    def _cells_of_this_rank(self, where: Where) -> Tensor:
        """Return the asked cells, with 0 for those that other ranks have: the sum over ranks has all."""
        parts = self._with_whole_rows()
        return with_graph(agreed(self.device_mesh, lambda: own_cells(where, self.layout, parts)), parts)

    # ------------------------------------------------------------------------------------------------------ products

    @public("A @ v")
    def __matmul__(self, v: DTensor) -> DTensor:
        # Group of heads by group, where the keys of all take too much memory.
        self._check_factor(v, "keys")
        return by_group(self, DistributedMatrix._product_of_group, v, values=True)

    def _product_of_group(self, v: DTensor) -> DTensor:
        """Return ``A @ v`` for one group of heads, see `by_group`."""
        layout = self.layout
        values = layout.part_of(v, "keys")
        with observers.unheard():  # a recording would take a part for the whole
            own = self._call_agreed(lambda: [part @ values for part in self.parts])
        rounded = [part.softmax_weights for part in self.parts if part.softmax_weights.lse_is_rounded]
        if self._is_divided_along("keys"):
            both = zip(own, self._shares_of_parts(), strict=True)
            own = [layout.reduced(t * share.to(t.dtype), ["keys"]) for t, share in both]
        for weights in rounded:  # by torch's kernel: what is read next computes a more precise one
            weights.forget_lse()
        return layout.wrap(torch.cat(own, dim=2), query_axis=0)

    def pooled(self, v: DTensor, dropout_p: float = 0.0) -> DTensor:
        """Return ``A @ v`` for `attlas.attention`."""
        if dropout_p > 0.0:
            rule = "weights that are divided over ranks cannot be dropped."
            raise BackendError(rule, "dropout_p > 0 and DTensors", "dropout_p=0.0", where="attention()")
        return self @ v

    @property
    def mT(self) -> Transposed:
        """The transposed matrix: ``A.mT @ x`` sums, for each key, what the queries give to it."""
        return Transposed(self)

    @public("A.mT @ x")
    def _gathered_by_keys(self, x: DTensor) -> DTensor:
        """Return ``A.mT @ x``: what each key gathers from the queries."""
        self._check_factor(x, "queries")
        return by_group(self, DistributedMatrix._transposed_product, x)

    def _transposed_product(self, x: DTensor) -> DTensor:
        """Return ``A.mT @ x`` for one group of heads, see `by_group`."""
        layout = self.layout
        tokens = layout.part_of(x, "queries")
        pieces = tokens.split([part.shape[-2] for part in self.parts], dim=2)
        if self._is_divided_along("keys"):
            heads = len(layout.heads)
            pieces = tuple(
                spread_heads(piece, heads) * share.to(piece.dtype)
                for piece, share in zip(pieces, self._shares_of_parts(), strict=True)
            )
        found = self._call_agreed(lambda: sum(part.mT @ piece for part, piece in zip(self.parts, pieces, strict=True)))
        return layout.wrap(layout.reduced(found, ["queries"]), key_axis=0)

    def _check_factor(self, t: Any, tokens: Role) -> None:
        """Raise an error unless `t` can be multiplied with the matrix along its queries or keys.

        All ranks raise it together where they exchange something.
        """

        def check() -> None:
            """Raise an error where the tensor does not fit, or tokens of the matrix were changed in place."""
            name, size, token = ("v", "n", "key") if tokens == "keys" else ("x", "m", "query")
            check_dtensor(name, t, self.device_mesh)
            self.whole.weights.check_unchanged()
            problem, names = self.whole.problem, (name, size, token)
            own = problem.k if tokens == "keys" else problem.q
            check_values(like(t), own, self.whole.axes, problem.shape[1], names)

        # Calls it, and raises on all ranks if it raises on one.
        self._call_agreed(check)

    def _is_divided_along(self, role: Role) -> bool:
        """Return whether a dimension of the mesh divides the queries, or the keys."""
        return bool(self.layout.dims(role))

    def _call_agreed(self, compute: Any) -> Any:
        """Call a function without collectives; where ranks exchange something, all raise the error of any."""
        exchanges = self._is_divided_along("queries") or self._is_divided_along("keys")
        return agreed(self.device_mesh, compute) if exchanges else compute()

    # --------------------------------------------------------------------------------------------------- log-sum-exp

    @property
    def lse(self) -> DTensor:
        """Log-sum-exp of each row of logits, shape (..., m), sharded as the queries; -inf for a row without a key."""
        return by_group(self, DistributedMatrix._log_sum_exp)

    def _log_sum_exp(self) -> DTensor:
        """Return `lse` for one group of heads, see `by_group`."""
        own = self._lses_of_this_rank(self.parts)
        total = [self._over_keys(lse) for lse in own] if self._is_divided_along("keys") else own
        return self.layout.wrap(torch.cat([t.to(self.dtype) for t in total], dim=2), query_axis=0)

    def _lses_of_this_rank(self, parts: tuple[AttentionMatrix, ...]) -> list[Tensor]:
        """Return the log-sum-exp of each part's rows over this rank's keys, in float64 with a graph."""

        def of(part: AttentionMatrix) -> Tensor:
            """Return the log-sum-exp of one part's rows, with a graph where it needs one."""
            known = part.softmax_weights.lse()
            if part.needs_graph:  # numbers of float64, and the gradient of what torch records
                recorded = part.lse.double()
                known = known + torch.where(recorded == -math.inf, 0.0, recorded - recorded.detach())
            return known

        return self._call_agreed(lambda: [of(part) for part in parts])

    def _shares_of_parts(self) -> list[Tensor]:
        """Return which share of its row's weight each part has: (batch, heads, rows, 1), float64, with a graph."""
        own = self._lses_of_this_rank(self.parts)
        return [share_of(lse, self._over_keys(lse, shared=False)).unsqueeze(-1) for lse in own]

    def _over_keys(self, lse: Tensor, *, shared: bool = True) -> Tensor:
        """Return the log-sum-exp of rows over the keys of all ranks, from that over this rank's keys.

        ``log Σ_r exp(lse_r - top) + top``; `shared` as of `Layout.reduced`.
        """
        layout = self.layout
        # The largest of all ranks is subtracted first, so that no exp overflows.
        top = finite_shift(layout.reduced(lse.detach(), ["keys"], "max"))
        total = layout.reduced(torch.exp(lse - top), ["keys"], shared=shared)
        nothing = total == 0
        found = torch.where(nothing, 1.0, total).log() + top
        return found.masked_fill(nothing, -math.inf)

    # ---------------------------------------------------------------------------------------------------- statistics

    def collect(self, *statistics: Statistic) -> tuple[Any, ...]:
        """Compute statistics, each rank in one pass over its part.

        Parameters
        ----------
        *statistics : Statistic
            Statistics of `attlas.stats`, or your own.

        Returns
        -------
        tuple
            One result for each, DTensors or named tuples of them. Per-row results are sharded along the queries as q
            is, per-column results along the keys where the keys are; everything else is merged and replicated.

        Raises
        ------
        DtypeError
            If an argument is no Statistic, or one whose parts cannot be merged: it needs `Statistic.merge`.
        ShapeError
            If a statistic does not fit the sizes of the matrix.
        GradientError
            If a gradient is recorded that the merged result could not carry.
        BackendError
            If a statistic pools values, as `attlas.stats.Pooled` does; ``A @ v`` takes values that are DTensors.

        Notes
        -----
        A statistic that needs whole rows gathers keys that are sharded; all ranks then compute it.
        """
        whole = [s for s in statistics if isinstance(s, Statistic) and s.whole_rows and self._is_divided_along("keys")]
        others = [s for s in statistics if s not in whole]
        results: dict[Any, Any] = dict(zip(whole, self._whole_rows.collect(*whole), strict=True)) if whole else {}
        if others:
            results |= zip(others, by_group(self, lambda A: A._merged_statistics(others)), strict=True)
        return tuple(results[s] for s in statistics)

    @public("A.collect()")
    def _merged_statistics(self, statistics: list[Any]) -> list[Any]:
        """Return the results of statistics that can be merged."""
        layout, problem = self.layout, self.whole.problem
        results: dict[Any, Any] = {}
        first = Collector(layout, problem, self.parts)
        tiled = self._call_agreed(lambda: [first.sees_tiles(statistic) for statistic in statistics])
        for seen in sorted(set(tiled)):
            some = [statistic for statistic, own in zip(statistics, tiled, strict=True) if own is seen]
            collector = Collector(layout, problem, self._with_whole_rows(tiled=seen))
            local = self._call_agreed(partial(collector.local, some))
            results |= {s: collector.merged(s, own) for s, own in zip(some, local, strict=True)}
        return [results[statistic] for statistic in statistics]

    def _with_whole_rows(self, *, tiled: bool = False) -> tuple[AttentionMatrix, ...]:
        """Return this rank's parts, which know the log-sum-exp over the keys of all ranks.

        Where parts are `tiled`, so is that: each backend rounds logits in its own way, and weights sum to 1 only if
        they and their sum come from the same logits.
        """
        parts = self.parts
        if tiled:
            plan = replace(self.whole.plan, backend="tiled")
            parts = tuple(softmax_matrix(part.problem, plan, part.axes) for part in parts)
        if not self._is_divided_along("keys"):
            return parts
        if any(part.needs_graph for part in self.parts):
            rule, found = "what is read of keys that are sharded carries no gradient.", "a tensor requires a gradient"
            raise GradientError(rule, found, "call it under torch.no_grad(), or redistribute the keys to Replicate().")
        # Their rows are parts of longer ones (`partial`), whose log-sum-exp counts the sink already.
        return tuple(
            softmax_matrix(replace(part.problem, sink=None, partial=True), part.plan, part.axes, self._over_keys(lse))
            for part, lse in zip(parts, self._lses_of_this_rank(parts), strict=True)
        )

    @property
    def _whole_rows(self) -> DistributedMatrix:
        """The same matrix in a layout where this rank has all keys of its queries."""
        layout = self.layout
        roles: tuple[Role, ...] = tuple("nothing" if role == "keys" else role for role in layout.roles)
        return DistributedMatrix(replace(layout, roles=roles), self.whole, self.tokens)

    def topk(self, k: int) -> Any:
        """Return the k largest weights of each row and their keys, in descending order.

        Parameters
        ----------
        k : int
            How many, at most n.

        Returns
        -------
        values, indices : DTensor, shape (..., m, k)

        Raises
        ------
        ShapeError
            If `k` is not between 1 and n.
        """
        return self.collect(TopK(k))[0]


class Transposed(_RefusedAttributes):
    """The transposed matrix of a DistributedMatrix; made by ``A.mT``."""

    _shown = "A.mT"

    def __init__(self, matrix: DistributedMatrix) -> None:
        self.matrix = matrix

    @property
    def shape(self) -> torch.Size:
        """Shape, (..., n, m)."""
        *leading, m, n = self.matrix.shape
        return torch.Size((*leading, n, m))

    def __matmul__(self, x: DTensor) -> DTensor:
        return self.matrix._gathered_by_keys(x)


@public("A[...]")
def parsed(key: object, layout: Layout) -> Where:
    """Parse the index of some cells; its batches and heads become lists of numbers. Raise where it is not supported."""
    axes = Axes(layout.leading, (True,) * layout.rank)
    where = parse(key, axes, layout.m, layout.n)
    fix = "A[..., 5:9, :], or stats.Picture and stats.Spans for sums over large parts."
    if layout.order is not None:
        rule = "cells are read where tokens are sharded in the order of the text."
        raise BackendError(rule, "order=...", "a statistic, this rank's A.parts, or attend() without order.")
    if where is None or where.pairs:
        rule = "an index names batches, heads, rows and columns, at most one of them by a list."
        raise BackendError(rule, f"A[{key!r}]", fix)
    if where.rows is None:
        rule = "an index must name rows or columns: a part of a matrix of DTensors is not lazy."
        raise BackendError(rule, f"A[{key!r}]", f"attend(q[...], k[...]) of the part, or {fix}")
    batches, heads, kept = where.leading or (slice(None), slice(None), axes)
    sizes = (math.prod(layout.leading[:-1]), layout.leading[-1]) if layout.rank >= 2 else (math.prod(layout.leading), 1)
    batches, heads = (torch.arange(size, device="cpu")[own] for size, own in zip(sizes, (batches, heads), strict=True))
    return where._replace(leading=(batches, heads, kept))


def own_cells(where: Where, layout: Layout, parts: tuple[AttentionMatrix, ...]) -> Tensor:
    """Return the asked cells that this rank has, with 0 for the others, shape (batch, heads, rows, columns)."""
    asked_batches, asked_heads, _ = where.leading  # type: ignore[misc]  # parsed() fills it in
    asked_rows, asked_columns = _as_positions(where.rows), _as_positions(where.columns)
    shape = [len(t) for t in (asked_batches, asked_heads, asked_rows, asked_columns)]
    problem = parts[0].problem
    result = torch.zeros(shape, dtype=problem.dtype, device=problem.device)
    # `to_x` are places among what was asked for, `x` those in this rank's part.
    to_batch, batch = (asked_batches.unsqueeze(-1) == problem.batch_ids).nonzero().unbind(-1)
    to_head, head = (asked_heads.unsqueeze(-1) == problem.head_ids).nonzero().unbind(-1)
    to_column, column = _positions_within(asked_columns, layout.columns)
    own = Axes((len(batch), len(head)), (True, True))
    for part, rows in zip(parts, layout.rows, strict=True):
        to_row, row = _positions_within(asked_rows, rows)
        if min(map(len, (batch, head, row, column))) == 0:
            continue
        cells = part.selected(Where((batch, head, own), None, None, False)).read(Where(None, row, column, False))
        place = to_batch[:, None, None, None], to_head[:, None, None], to_row[:, None], to_column
        result = result.index_put(tuple(t.to(result.device) for t in place), cells)
    return result


def _as_positions(index: Any) -> Tensor:
    """Return an index of rows or columns as a tensor of positions."""
    if isinstance(index, Tensor):
        return index.cpu()
    return torch.tensor([index] if isinstance(index, int) else index, dtype=torch.int64, device="cpu")


def _positions_within(asked: Tensor, own: range) -> tuple[Tensor, Tensor]:
    """Return which of the asked positions lie in the range `own`, as indices of `asked`, and their places in `own`."""
    to = ((asked >= own.start) & (asked < own.stop)).nonzero().squeeze(-1)
    return to, asked[to] - own.start
