"""One attention over one text: the queries of all its calls, each key once, the merged statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from attlas.masks import Mask
from attlas.masks.placed import Block
from attlas.matrix import AttentionMatrix, softmax_matrix
from attlas.recording.atlas import Entry
from attlas.recording.atlas.entry import statistic_names
from attlas.recording.discovery import AttentionSite
from attlas.recording.disk import RecordingFolder
from attlas.recording.merging import MergedStatistics, can_merge, with_keys
from attlas.recording.snapshot import detached_tensor, fingerprint, snapshot
from attlas.recording.stacking import same_settings, stack_masks
from attlas.stats import Statistic


@dataclass(frozen=True, eq=False)
class RetentionPolicy:
    """What a recording stores of each attention, and where.

    Parameters
    ----------
    statistics : tuple of Statistic
        Numbers that are computed in the forward pass.
    tokens : bool
        Whether q and k are stored.
    device : torch.device, optional
        Device to which q and k are moved; by default they stay on theirs.
    disk : RecordingFolder, optional
        Folder to which q and k are written.
    """

    statistics: tuple[Statistic, ...]
    tokens: bool = True
    device: torch.device | None = None
    disk: RecordingFolder | None = None


@dataclass(frozen=True, eq=False)
class PositionedCall:
    """One call of an attention with its position in a text: the whole text, a chunk of it, or one step of a generation.

    Parameters
    ----------
    matrix : AttentionMatrix, shape (batch, recorded heads, m, n)
        The weights of all queries of the call.
    rows : range
        Which of its queries are recorded.
    first_query, first_key : int
        Positions in the text of query 0 and of key 0.
    cross : bool
        Whether the keys are those of another text, the same in each call.
    keeps_all_keys : bool
        Whether keys after the last query count; if not, they are the unused part of a static cache.
    query_mask : Tensor of bool, optional, shape (batch, m)
        Which of its queries are tokens and no padding; None where all are.
    values : callable, optional
        Returns what is recorded of the values of some keys, by the names of the fields of an entry.
    """

    matrix: AttentionMatrix
    rows: range
    first_query: int
    first_key: int
    cross: bool
    query_mask: Tensor | None = None
    keeps_all_keys: bool = field(default=False, kw_only=True)
    values: Callable[[slice], dict[str, Tensor]] | None = field(default=None, kw_only=True)

    @property
    def query_stop(self) -> int:
        """Position after the last query of the call."""
        return self.first_query + self.matrix.weights.shape[2]

    @property
    def key_stop(self) -> int:
        """Position after the last key in use: a static cache has room for more."""
        stop = self.first_key + self.matrix.weights.shape[3]
        mask = self.matrix.mask
        if self.cross or self.keeps_all_keys or mask is None or not mask.is_causal:
            return stop
        return min(stop, max(self.query_stop, self.first_key + 1))


class RecordedSequence:
    """The calls of one attention that belong to one text; they become one entry of the atlas.

    Parameters
    ----------
    site : AttentionSite
        The attention.
    number : int
        Number of texts of this attention before this one.
    heads : tuple of int
        The heads that are recorded.
    policy : RetentionPolicy
        What is stored.
    call : PositionedCall
        The first call.
    """

    def __init__(
        self, site: AttentionSite, number: int, heads: tuple[int, ...], policy: RetentionPolicy, call: PositionedCall
    ) -> None:
        self.site, self.number, self.heads, self.policy = site, number, heads, policy
        self.first_query = call.first_query + call.rows.start
        self.first_key = call.first_key
        self.next_row = self.first_query  # position after the last recorded query
        self.next_query, self.key_stop = call.query_stop, call.first_key  # positions after the last query and key
        self.mergeable = all(map(can_merge, policy.statistics))
        self.blocks: list[Block] = []  # masks and sizes of the calls
        self._statistics = MergedStatistics(policy.statistics)
        self._base = call.matrix.problem  # settings of all calls; its tensors are those of the first
        # Tensors of the calls in their order; keys, values and fingerprints of those calls that brought new keys.
        self._q: list[Tensor] = []
        self._k: list[Tensor] = []
        self._lse: list[Tensor] = []
        self._values: dict[str, list[Tensor]] = {}
        self._fingerprints: list[Tensor] = []
        self._query_masks: list[Tensor] = []
        self._plan = call.matrix.plan
        self._written: Entry | None = None  # the entry of the first calls, on disk
        self._append(call)
        if policy.disk is not None and not policy.disk.are_small(*self._q, *self._k, *chain(*self._values.values())):
            self.to_entry()

    def continues(self, call: PositionedCall) -> bool:
        """Return whether a call continues this text: its queries come next, and the keys that both have are equal."""
        problem, base = call.matrix.problem, self._base
        follows = call.first_query == self.next_query and call.first_query + call.rows.start == self.next_row
        if not (follows and (self.policy.tokens or self.mergeable)):
            return False
        if problem.shape[:2] != base.shape[:2] or problem.k.shape[1] != base.k.shape[1]:
            return False
        same = same_settings(problem.score, base.score) and same_settings(problem.sink, base.sink)
        if not (problem.score.position_free and same):
            return False
        if call.cross and (call.key_stop != self.key_stop or call.first_key != self.first_key):
            return False
        if not self.first_key <= call.first_key <= self.key_stop <= call.key_stop:
            return False
        return self._same_keys(problem.k[:, :, : self.key_stop - call.first_key], call.first_key - self.first_key)

    def _same_keys(self, k: Tensor, start: int) -> bool:
        """Return whether some keys equal as many stored keys from `start` on, bit for bit."""
        if not self.policy.tokens:
            stored = torch.cat(self._fingerprints, dim=-1)[:, start : start + k.shape[2]]
            return torch.equal(fingerprint(k), stored)
        stop, piece_start = start + k.shape[2], 0
        for piece in self._k:
            low, high = max(piece_start, start), min(piece_start + piece.shape[2], stop)
            if low < high:
                old, new = piece[:, :, low - piece_start : high - piece_start], k[:, :, low - start : high - start]
                if not torch.equal(old, new.to(old.device)):
                    return False
            piece_start += piece.shape[2]
        return True

    def extend(self, call: PositionedCall) -> None:
        """Add one more call of the text."""
        self._append(call)
        if self.policy.disk is not None:
            # The first piece may be on disk already; later pieces are written to disk when they are large.
            written = 0 if self._written is None else 1
            for pieces in (self._q, self._k, *self._values.values()):
                pieces[written:] = self.policy.disk.spill(pieces[written:])

    def _append(self, call: PositionedCall) -> None:
        """Store the queries, the new keys, the mask and the statistics of a call, and move the ends of the text."""
        part, n = call.matrix.window(call.rows), call.matrix.weights.shape[3]
        rows, column = part.weights.shape[2], call.first_key - self.first_key
        if self.policy.statistics and (self.mergeable or not self.blocks):
            statistics = [with_keys(s, n) if self.mergeable else s for s in self.policy.statistics]
            self._statistics.add(part.collect(*statistics), rows, n, column)
        mask = self._append_queries(part)
        self._append_keys(call)
        row = self.next_row - self.first_query
        self.blocks.append(Block(mask, range(row, row + rows), range(column, column + n)))
        self._query_masks.append(_query_mask(part, call))
        self.next_row += rows
        self.next_query, self.key_stop = call.query_stop, max(call.key_stop, self.key_stop)

    def _append_queries(self, part: AttentionMatrix) -> Mask | None:
        """Store the recorded queries of a call and their log-sum-exps; return what is kept of its mask."""
        problem = part.problem
        if not self.policy.tokens:
            problem = replace(problem, q=problem.q[:, :, :0], mask=None, versions=())
        stored = snapshot(problem, self.policy.device)
        if not self.blocks:
            # Later calls are compared with the sizes and settings of the first, whose queries may be on disk by then.
            self._base = replace(stored, q=stored.q[:, :, :0].clone(), mask=None, versions=())
        if self.policy.tokens:
            self._q.append(stored.q)
            self._lse.append(
                detached_tensor(part.softmax_weights.lse(), self.policy.device)
            )  # in float64: weights need it
        return stored.mask

    def _append_keys(self, call: PositionedCall) -> None:
        """Store the keys of a call that no call before had, and their values; or the fingerprints of these keys."""
        new = slice(self.key_stop - call.first_key, call.key_stop - call.first_key)
        k = call.matrix.problem.k[:, :, new]
        if self.blocks and not k.shape[2]:
            return
        if not self.policy.tokens:
            self._fingerprints.append(fingerprint(k))
            return
        self._k.append(detached_tensor(k, self.policy.device))
        for name, t in call.values(new).items() if call.values else ():
            self._values.setdefault(name, []).append(detached_tensor(t, self.policy.device))

    @property
    def key_count(self) -> int:
        """Number of keys of the whole text."""
        return self.key_stop - self.first_key

    def matrix(self) -> AttentionMatrix:
        """Return the matrix of all queries so far over all keys."""
        for pieces in (self._q, self._k, self._lse):
            pieces[:] = [torch.cat(pieces, dim=2)] if len(pieces) > 1 else pieces
        (q,), (k,), (lse,) = self._q, self._k, self._lse
        batch, heads = q.shape[:2]
        problem = replace(self._base, q=q, k=k, versions=())
        tile = partial(problem.tile, range(batch), range(heads))
        problem = replace(problem, mask=stack_masks(self.blocks, self.key_count, tile), versions=())
        return softmax_matrix(problem, self._plan, lse=lse)

    def _entry_in_memory(self) -> Entry:
        """Return the entry of all calls so far, of the tensors that are stored."""
        matrix = self.matrix() if self.policy.tokens else None
        rows = self.next_row - self.first_query
        return Entry(
            name=self.site.path,
            layer=self.site.layer,
            kind=self.site.kind,
            call=self.number,
            heads=self.heads,
            queries=(self.first_query, self.next_row),
            first_key=self.first_key,
            shape=(*self._base.shape[:2], rows, self.key_count),
            matrix=matrix,
            statistics=self._results(matrix),
            query_mask=None if all(map(torch.all, self._query_masks)) else torch.cat(self._query_masks, dim=1),
            **{name: torch.cat(pieces, dim=2) for name, pieces in self._values.items()},
        )

    def _results(self, matrix: AttentionMatrix | None) -> dict[str, Any]:
        """Return the statistics of the whole text by name: merged from those of the calls, where that is exact."""
        statistics = self.policy.statistics
        if self.mergeable or len(self.blocks) == 1 or matrix is None:
            results = self._statistics.finish(self.key_count)
        else:
            results = list(matrix.collect(*statistics))
        return dict(zip(statistic_names(statistics), results, strict=True))

    def to_entry(self) -> Entry:
        """Return the entry of all calls so far; where the policy names a disk, write it there and return it mapped."""
        if self._written is not None and self._written.shape[2] == self.next_row - self.first_query:
            return self._written
        entry = self._entry_in_memory()
        if self.policy.disk is not None:
            self._written = entry = self.policy.disk.add(entry)
            if entry.matrix is not None:
                problem = entry.matrix.problem
                self._q, self._k, self._lse = [problem.q], [problem.k], [entry.matrix.softmax_weights.lse()]
                self._values = {name: [t] for name, t in entry.values_and_norms.items()}
        return entry


def _query_mask(part: AttentionMatrix, call: PositionedCall) -> Tensor:
    """Return which recorded queries of a call are tokens that may attend to a key, shape (batch, rows)."""
    batch, _, rows, _ = part.weights.shape
    query_mask = torch.ones(batch, rows, dtype=torch.bool)
    if call.query_mask is not None:
        query_mask = call.query_mask[:, call.rows.start : call.rows.stop]
    lse = part.softmax_weights.known_lse
    if lse is None or part.sink is not None or not part.weights.shape[1]:
        return query_mask
    return query_mask & (lse > -torch.inf).any(dim=1).cpu()
