"""Statistics of a matrix whose cells are divided over ranks: computed part by part, and merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed import all_gather
from torch.nn import functional

from attlas.distributed.layout import Layout, Role
from attlas.distributed.parts import with_graph
from attlas.engine.outputs import MISSING
from attlas.engine.problem import Problem
from attlas.engine.statistic import Part, keep_larger, merge_sums
from attlas.errors import BackendError, DtypeError, GradientError, public
from attlas.foundation.compat import tree_map
from attlas.foundation.placed import original_tile
from attlas.foundation.tiles import Tile
from attlas.foundation.trees import rebuilt, tensors_in
from attlas.matrix import AttentionMatrix
from attlas.matrix.protocol import check_are_statistics
from attlas.matrix.softmax import cut_out
from attlas.recording.merging import can_merge
from attlas.stats import Statistic

# What a collective can do by itself.
_COLLECTIVE_REDUCTIONS: dict[Any, str] = {merge_sums: "sum", keep_larger: "max"}


class Collector:
    """Statistics of this rank's parts, and what all ranks make of them.

    Parameters
    ----------
    layout : Layout
        What this rank has.
    whole : Problem
        The whole matrix, of tokens without numbers.
    parts : tuple of AttentionMatrix
        This rank's parts, which know the log-sum-exp of whole rows.
    """

    def __init__(self, layout: Layout, whole: Problem, parts: tuple[AttentionMatrix, ...]) -> None:
        self.layout = layout
        self.whole = whole
        self.parts = parts

    def _axis_of_results(self, statistic: Statistic) -> str | None:
        """Return which axis a statistic's results count, "rows", "columns" or "diagonals".

        None where they cannot be merged.
        """
        return statistic.axis if can_merge(statistic) else None

    def _dividing_roles(self, statistic: Statistic) -> list[Role]:
        """Return which of "queries" and "keys" ranks divide so that results of a statistic must be merged over them.

        Results that count the queries themselves are only put side by side; so it is with keys.
        """
        axis = self._axis_of_results(statistic)
        by: dict[Role, str] = {"queries": "rows", "keys": "columns"}
        return [role for role, own in by.items() if axis != own and self.layout.dims(role)]

    def _merges_carries(self, statistic: Statistic) -> bool:
        """Return whether parts are merged as carries, before `Statistic.finish`, and not as finished results.

        So it is for numbers of rows whose keys are divided over ranks, and for results that have no axis to join along.
        """
        axis = self._axis_of_results(statistic)
        if axis == "rows" or (axis is None and len(self.parts) == 1):
            return bool(self._dividing_roles(statistic))
        return axis is None

    def sees_tiles(self, statistic: Any) -> bool:
        """Check a statistic, and return whether it is computed tile by tile where others come from the kernels."""
        self._check_computable(statistic)
        tiles = self._merges_carries(statistic) and _row_outputs(statistic, self.whole) is None
        return tiles and self.whole.device.type == "cpu"

    def local(self, statistics: list[Any]) -> list[Any]:
        """Return the results of this rank's parts: a result, or the state for the whole matrix."""
        rows = zip(self.parts, self.layout.rows, strict=True)
        asked = [[self._statistic_of_part(s, part, own) for s in statistics] for part, own in rows]
        found = [part.collect(*some) for part, some in zip(self.parts, asked, strict=True)]
        by_statistic = (zip(*lists, strict=True) for lists in (asked, found))
        return [self._joined_results(*own) for own in zip(statistics, *by_statistic, strict=True)]

    @public("collect()")
    def _check_computable(self, statistic: Any) -> None:
        """Raise an error where a statistic cannot be computed of cells that are divided over ranks."""
        check_are_statistics([statistic])
        if statistic.v is not None:
            rule = "values are pooled apart from statistics where DTensors are given."
            raise BackendError(rule, f"{type(statistic).__name__} with values", "A @ v", where="A.collect()")
        merges = bool(self._dividing_roles(statistic)) or (
            len(self.parts) > 1 and self._axis_of_results(statistic) != "rows"
        )
        name = type(statistic).__name__
        defines_merge = type(statistic).merge is not Statistic.merge and statistic.describes("merge", ("start", "step"))
        if merges and not defines_merge:
            rule, found = f"{name} must define merge(self, a, b).", f"{name} on cells that are divided over ranks"
            raise DtypeError(rule, found, "merge_sums of attlas.engine.statistic, for sums.")
        recorded = statistic.differentiable and any(part.needs_graph for part in self.parts)
        if merges and recorded and _COLLECTIVE_REDUCTIONS.get(type(statistic).merge) != "sum":
            rule = f"{name} of cells that are divided over ranks carries no gradient."
            raise GradientError(rule, "a recorded gradient", "call it under torch.no_grad().", where="A.collect()")

    def _statistic_of_part(self, statistic: Statistic, part: AttentionMatrix, rows: range) -> Statistic:
        """Return what a part collects: the statistic itself, or one that returns its carry for the whole matrix.

        Carries are added up over the ranks, and finished then. `rows` are those of the part in the whole matrix.
        """
        if not self._merges_carries(statistic):
            return statistic
        m = self.whole.shape[2]
        own_rows = self._axis_of_results(statistic) == "rows"
        return _RunningStatistic(statistic, self._problem_of_rows(part, rows if own_rows else range(m)),
                                 0 if own_rows else rows.start, self.layout.columns.start)  # fmt: skip

    def _problem_of_rows(self, part: AttentionMatrix, rows: range) -> Problem:
        """Return a problem of some queries and all keys, of this rank's batches and heads, with tokens of no memory."""
        whole, own = self.whole, part.problem
        base = cut_out(whole, rows, range(whole.shape[3]))
        q = own.q.new_zeros(1).expand(*own.shape[:2], len(rows), own.q.shape[-1])
        k = own.k.new_zeros(1).expand(*own.k.shape[:2], whole.shape[3], own.k.shape[-1])
        base = replace(base, q=q, k=k, score=own.score, sink=own.sink, partial=own.partial, ids=own.ids, versions=())
        # Closed forms over all keys would look at tokens that are not here: these cached properties of a problem are
        # set to what is known without them.
        vars(base).update(tokens=own.tokens, has_finite_logits=False, has_small_logits=False)
        return base

    def _joined_results(self, statistic: Statistic, asked: Sequence[Any], found: Sequence[Any]) -> Any:
        """Join the results of this rank's parts, in `found`, of the statistics that they collected, in `asked`."""
        if self._merges_carries(statistic):
            carries = [rebuilt(one.form, list(tensors)) for one, tensors in zip(asked, found, strict=True)]
            return _merged_carries(statistic, carries)
        if self._axis_of_results(statistic) == "diagonals":
            found = [self._padded_diagonals(t, rows) for t, rows in zip(found, self.layout.rows, strict=True)]
        if len(found) == 1:
            return found[0]
        if self._axis_of_results(statistic) != "rows":
            return _merged_carries(statistic, found)
        return tree_map(lambda *parts: torch.cat(parts, dim=2), *found)

    def _padded_diagonals(self, t: Tensor, rows: range) -> Tensor:
        """Return sums of the diagonals of some rows, padded with zeros to all diagonals of the whole matrix."""
        m, n = self.whole.shape[2:]
        if not len(rows) or not len(self.layout.columns):
            return t.new_zeros(*t.shape[:2], max(m + n - 1, 0))
        first = self.layout.columns.start - (rows.stop - 1) + m - 1
        return functional.pad(t, (first, m + n - 1 - first - t.shape[-1]))

    def merged(self, statistic: Statistic, own: Any) -> Any:
        """Merge the results of one statistic over the ranks, and return them as DTensors."""
        layout, axis, split = self.layout, self._axis_of_results(statistic), self._dividing_roles(statistic)
        how = _COLLECTIVE_REDUCTIONS.get(type(statistic).merge)
        if split and how is not None:
            own = tree_map(lambda t: None if t is None else layout.reduced(t, split, how), own)
        else:
            for dim in (dim for role in split for dim in layout.dims(role)):
                own = _merged_carries(statistic, self._carries_of_ranks(own, dim))
        # It may write into the carry, and autograd forbids that for a result of a collective.
        result = statistic.finish(_copied_carry(own)) if self._merges_carries(statistic) else own
        query_axis, key_axis = 0 if axis == "rows" else None, 0 if axis == "columns" else None
        return tree_map(
            lambda t: layout.wrap(self._result_with_graph(statistic, t), query_axis=query_axis, key_axis=key_axis),
            result,
        )

    def _result_with_graph(self, statistic: Statistic, t: Tensor) -> Tensor:
        """Return a result that takes part in the backward on every rank, where its statistic is differentiable."""
        return with_graph(t, self.parts) if statistic.differentiable and t.is_floating_point() else t

    def _carries_of_ranks(self, carry: Any, dim: int) -> list[Any]:
        """Return the carries of all ranks along one dimension of the mesh, in the order of the ranks."""
        mesh, tensors = self.layout.mesh, tensors_in(carry)
        ranks, group = mesh.size(dim), mesh.get_group(dim)
        columns = []
        for t in tensors:
            found = [torch.empty_like(t, memory_format=torch.contiguous_format) for _ in range(ranks)]
            all_gather(found, t.contiguous(), group)
            columns.append(found)
        return [rebuilt(carry, [column[rank] for column in columns]) for rank in range(ranks)]


class _RunningStatistic(Statistic):
    """A statistic that runs over a part of a matrix and keeps a carry of the whole.

    Parameters
    ----------
    inner : Statistic
        What is computed.
    base : Problem
        What the carry is for: all keys, and all queries or those of the part.
    row, column : int
        Where query 0 and key 0 of the part are in it.
    """

    def __init__(self, inner: Statistic, base: Problem, row: int, column: int) -> None:
        self.inner, self.base, self.row, self.column = inner, base, row, column
        self.whole_rows, self.differentiable = inner.whole_rows, inner.differentiable
        self.form: Any = None  # of the carry, without its numbers: those have a graph that knows this statistic

    def start(self, problem: Problem) -> Any:
        # `base` is the problem of the whole matrix, without numbers: the carry has its size.
        return self.inner.start(self.base)

    def step(self, carry: Any, part: Part, at: Tile) -> Any:
        # The part of a rank is shown to the statistic at its position in the whole matrix.
        m, n = self.base.shape[2:]
        at = original_tile(at, range(-self.row, m - self.row), range(-self.column, n - self.column))
        return self.inner.step(carry, _MovedPart(part, self.base, at), at)  # type: ignore[arg-type]  # it acts as a part

    def finish(self, carry: Any) -> tuple[Tensor, ...]:
        # The carry itself, as plain tensors: the ranks merge carries, and not results.
        tensors = tensors_in(carry)
        self.form = rebuilt(carry, [t.new_empty(0) for t in tensors])
        return tuple(tensors)

    def outputs(self, problem: Problem) -> Mapping[str, Any] | None:
        # As for the inner statistic, which is asked about the whole.
        return _row_outputs(self.inner, self.base)

    def carry_from(self, results: Mapping[str, Any], problem: Problem) -> Any:
        # Numbers of keys become those of the whole matrix.
        if (keys := results.get("top_keys")) is not None:  # counted in the part; negative ones are none
            results = {**results, "top_keys": torch.where(keys < 0, keys, keys + self.column)}
        return self.inner.carry_from(results, problem)

    def from_outputs(self, results: Mapping[str, Any], problem: Problem) -> Any:
        # MISSING lets tiles compute the statistic.
        carry = self.carry_from(results, problem)
        return MISSING if carry is None else self.finish(carry)


def _row_outputs(statistic: Statistic, problem: Problem) -> Mapping[str, Any] | None:
    """Return the outputs of the kernels that a statistic of rows is computed from, for `problem`.

    None where it takes none, or where its carry could not be made of them: then parts are computed tile by tile.
    """
    own = type(statistic)
    tell = own.carry_from is not Statistic.carry_from or own.from_outputs is Statistic.from_outputs
    tell = tell and can_merge(statistic) and statistic.describes("outputs")
    return statistic.outputs(problem) if tell and statistic.axis == "rows" else None


class _MovedPart:
    """A `Part`, as `Statistic.step` gets one, that tells its position in the whole matrix.

    Its numbers stay as they are.
    """

    def __init__(self, part: Part, problem: Problem, at: Tile) -> None:
        self._part, self.problem, self.at = part, problem, at
        shift = at.columns.start - part.at.columns.start
        self.block = replace(
            part.block,
            columns=_shifted_range(part.block.columns, shift),
            segments=tuple((_shifted_range(columns, shift), state) for columns, state in part.block.segments),
        )

    def __getattr__(self, name: str) -> Any:
        # All that is not redefined here is asked of the part.
        return getattr(self._part, name)


def _shifted_range(span: range, shift: int) -> range:
    """Return a range moved by `shift`."""
    return range(span.start + shift, span.stop + shift)


def _copied_carry(carry: Any) -> Any:
    """Return the carry with clones of its tensors that have a graph."""
    return rebuilt(carry, [t.clone() if t.requires_grad else t for t in tensors_in(carry)])


def _merged_carries(statistic: Statistic, carries: Sequence[Any]) -> Any:
    """Merge the states that `Statistic.step` has left for several parts, one after the other."""
    first, *others = carries
    for other in others:
        first = statistic.merge(first, other)
    return first
