"""One attention over one text: the queries of all its calls, each key once, the merged statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attlas.engine.online import moved_lse
from attlas.foundation.compat import cached_property
from attlas.masks.placed import Block
from attlas.matrix import AttentionMatrix, softmax_matrix
from attlas.recording.atlas import Entry
from attlas.recording.atlas.entry import statistic_names
from attlas.recording.discovery import AttentionSite
from attlas.recording.disk import RecordingFolder
from attlas.recording.growing import GrowingTensor
from attlas.recording.merging import MergedStatistics, can_merge, with_keys
from attlas.recording.snapshot import detached_tensor, fingerprint, kept_mask, snapshot
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

    @cached_property
    def fingerprints(self) -> Tensor:
        """Fingerprints of the keys in use, shape (batch, keys)."""
        return fingerprint(self.matrix.problem.k[:, :, : self.key_stop - self.first_key])

    @property
    def query_stop(self) -> int:
        """Position after the last query of the call."""
        return self.first_query + self.matrix.weights.shape[2]

    @property
    def has_room(self) -> bool:
        """Whether not all keys are in use, as in a static cache."""
        return self.key_stop < self.first_key + self.matrix.weights.shape[3]

    @cached_property
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
        keep = partial(detached_tensor, device=policy.device)
        self._q, self._k, self._lse = GrowingTensor(keep=keep), GrowingTensor(keep=keep), GrowingTensor(keep=keep)
        self._values: dict[str, GrowingTensor] = {}
        self._fingerprints, self._query_masks = GrowingTensor(1), GrowingTensor(1)
        # Keys that are dropped or moved to another device are compared by their fingerprints, which stay.
        moved = policy.device is not None and policy.device != call.matrix.problem.device
        self._keeps_fingerprints = moved or not policy.tokens
        self._plan = call.matrix.plan
        self._written: Entry | None = None  # the entry of the first calls, on disk
        self._append(call)
        if policy.disk is not None and not policy.disk.is_small(sum(t.bytes_in_memory for t in self._tokens)):
            self.to_entry()

    @property
    def _tokens(self) -> list[GrowingTensor]:
        """Queries, keys and values."""
        return [self._q, self._k, *self._values.values()]

    def continues(self, call: PositionedCall) -> bool | Tensor:
        """Return whether a call continues this text: its queries come next, and the keys that both have are equal.

        The keys are compared on their device: where that is not the CPU, the answer may be a tensor on it.
        """
        problem, base = call.matrix.problem, self._base
        follows = call.first_query == self.next_query and call.first_query + call.rows.start == self.next_row
        if not (follows and (self.policy.tokens or self.mergeable)):
            return False
        sizes, known = ((p.shape[:2], p.q.shape[3], p.k.shape[1], p.k.shape[3]) for p in (problem, base))
        if sizes != known:
            return False
        same = same_settings(problem.score, base.score) and same_settings(problem.sink, base.sink)
        if not (problem.score.position_free and same):
            return False
        if call.cross and (call.key_stop != self.key_stop or call.first_key != self.first_key):
            return False
        if not self.first_key <= call.first_key <= self.key_stop <= call.key_stop:
            return False
        start, count = call.first_key - self.first_key, self.key_stop - call.first_key
        if self._keeps_fingerprints:
            return self._fingerprints.equals(call.fingerprints[:, :count], start)
        return self._k.equals(problem.k[:, :, :count], start)

    def extend(self, call: PositionedCall) -> None:
        """Add one more call of the text."""
        self._append(call)
        if self.policy.disk is not None:
            for tokens in self._tokens:
                self.policy.disk.spill(tokens)

    def _append(self, call: PositionedCall) -> None:
        """Store the queries, the new keys, the mask and the statistics of a call, and move the ends of the text."""
        part, n = _recorded_rows(call), call.matrix.weights.shape[3]
        problem = part.problem
        rows, column = len(call.rows), call.first_key - self.first_key
        if self.policy.statistics and (self.mergeable or not self.blocks):
            statistics = [with_keys(s, n) if self.mergeable else s for s in self.policy.statistics]
            self._statistics.add(part.collect(*statistics), rows, n, column)
        if not self.blocks:
            # Later calls are compared with the sizes and settings of the first, whose queries may be on disk by then.
            first = replace(problem, q=problem.q[:, :, :0], mask=None)
            self._base = snapshot(first, self.policy.device)
        mask = None
        if self.policy.tokens:
            mask = kept_mask(problem, self.policy.device)
            self._q.append(problem.q)
            lse = part.softmax_weights.lse()  # in its exact form: weights need it
            self._lse.append(lse if lse.ndim == 3 else self._kept_lse(lse))
        self._append_keys(call)
        row = self.next_row - self.first_query
        self.blocks.append(Block(mask, range(row, row + rows), range(column, column + n)))
        self._query_masks.append(_query_mask(part, call))
        self.next_row += rows
        self.next_query, self.key_stop = call.query_stop, max(call.key_stop, self.key_stop)

    def _append_keys(self, call: PositionedCall) -> None:
        """Store the keys of a call that no call before had, and their values; or the fingerprints of these keys."""
        new = slice(self.key_stop - call.first_key, call.key_stop - call.first_key)
        if self.blocks and new.start == new.stop:
            return
        if self._keeps_fingerprints:
            self._fingerprints.append(call.fingerprints[:, new])
        if not self.policy.tokens:
            return
        self._k.append(call.matrix.problem.k[:, :, new])
        for name, t in call.values(new).items() if call.values else ():
            if name not in self._values:
                self._values[name] = GrowingTensor(keep=partial(detached_tensor, device=self.policy.device))
            self._values[name].append(t)

    @property
    def key_count(self) -> int:
        """Number of keys of the whole text."""
        return self.key_stop - self.first_key

    def _kept_lse(self, lse: Tensor) -> Tensor:
        """Return a log-sum-exp in the form of the device where it is kept, which may have float64."""
        parts = self._lse.parts
        return moved_lse(lse, parts[-1].device if parts else self.policy.device or lse.device)

    def matrix(self) -> AttentionMatrix:
        """Return the matrix of all queries so far over all keys."""
        q, k, lse = self._q.joined(), self._k.joined(), self._lse.joined()
        batch, heads = q.shape[:2]
        problem = replace(self._base, q=q, k=k)
        tile = partial(problem.tile, range(batch), range(heads))
        problem = replace(problem, mask=stack_masks(self.blocks, self.key_count, tile), versions=())
        return softmax_matrix(problem, self._plan, lse=lse)

    def _entry_in_memory(self) -> Entry:
        """Return the entry of all calls so far, of the tensors that are stored."""
        matrix = self.matrix() if self.policy.tokens else None
        rows, query_mask = self.next_row - self.first_query, self._query_masks.joined().cpu()
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
            query_mask=None if bool(query_mask.all()) else query_mask,
            **{name: tensor.joined() for name, tensor in self._values.items()},
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
                self._q.replace(problem.q)
                self._k.replace(problem.k)
                self._lse.replace(entry.matrix.softmax_weights.lse())
                for name, t in entry.values_and_norms.items():
                    self._values[name].replace(t)
        return entry


def _recorded_rows(call: PositionedCall) -> AttentionMatrix:
    """Return the matrix of the recorded queries of a call."""
    if len(call.rows) != call.matrix.weights.shape[2]:
        return call.matrix.window(call.rows)
    call.matrix.weights.check_unchanged()
    return call.matrix


def _query_mask(part: AttentionMatrix, call: PositionedCall) -> Tensor:
    """Return which recorded queries of a call are tokens that may attend to a key, shape (batch, rows)."""
    given = None if call.query_mask is None else call.query_mask[:, call.rows.start : call.rows.stop]
    batch, heads, rows, _ = part.weights.shape
    lse = part.softmax_weights.known_lse
    if lse is None or part.sink is not None or not heads:
        return torch.ones(batch, rows, dtype=torch.bool) if given is None else given
    seeing = ((lse[..., 0] if lse.ndim == 4 else lse) > -torch.inf).any(dim=1)
    return seeing if given is None else given.to(seeing.device, non_blocking=True) & seeing
