"""One attention over one text: the queries of all its calls, each key once, the merged statistics."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from attlas.engine.online import moved_lse
from attlas.foundation.compat import cached_property
from attlas.masks.placed import Block, Stacked
from attlas.matrix import AttentionMatrix, softmax_matrix
from attlas.recording.atlas import Entry
from attlas.recording.atlas.entry import statistic_names
from attlas.recording.copies import HostCopies
from attlas.recording.discovery import AttentionSite
from attlas.recording.disk import RecordingFolder
from attlas.recording.growing import GrowingTensor
from attlas.recording.merging import MergedStatistics, can_merge, with_keys
from attlas.recording.snapshot import answers_later, detached_tensor, fingerprint, kept_mask, snapshot
from attlas.recording.stacking import same_settings, stack_masks
from attlas.stats import Statistic

STEP = 16  # queries of a step of a generation, with or without a draft


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
    copies : HostCopies, optional
        Copies of what is moved to the CPU.
    """

    statistics: tuple[Statistic, ...]
    tokens: bool = True
    device: torch.device | None = None
    disk: RecordingFolder | None = None
    copies: HostCopies | None = None

    def growing(self, count: int = 1) -> list[GrowingTensor]:
        """Return `count` tensors that grow along their axis of tokens, the third, and are kept as the policy says."""
        keep = partial(detached_tensor, device=self.device, copies=self.copies)
        return [GrowingTensor(keep=keep, copies=self.copies) for _ in range(count)]


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
        self._q, self._k, self._lse = policy.growing(3)
        self._values: dict[str, GrowingTensor] = {}
        self._fingerprints, self._query_masks = GrowingTensor(1), GrowingTensor(1)
        # Keys that are dropped or moved to another device are compared by their fingerprints, which stay.
        moved = policy.device is not None and policy.device != call.matrix.problem.device
        self._keeps_fingerprints = moved or not policy.tokens
        # Where the tokens stay, steps may wait: one pass over all their rows at the end is faster than one for each.
        self._steps_wait = policy.tokens and not moved
        self.on_device = answers_later(call.matrix.problem.q)  # the program waits for its numbers
        self._computed = 0  # rows whose log-sum-exp and statistics are known
        self._plan = call.matrix.plan
        self._written: Entry | None = None  # the entry of the first calls, on disk
        self._marks = 0  # of the copies of the last call
        self._is_resumed = False  # whether entries were made that go on: they share what is stored
        self._calls = 0
        self._append_call(call)
        if policy.disk is not None and not self.on_device and self.bytes_to_write:
            self.to_entry()  # for its effect: it writes to the disk

    @property
    def _growing_tokens(self) -> list[GrowingTensor]:
        """Queries, keys and values."""
        return [self._q, self._k, *self._values.values()]

    @property
    def bytes_to_write(self) -> int:
        """Bytes of a first call that is large enough to be written to disk at once, and is not yet; else 0."""
        if self.policy.disk is None or self._written is not None:
            return 0
        size = sum(t.bytes_in_memory for t in self._growing_tokens)
        return 0 if self.policy.disk.is_small(size) else size

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
        answers: list[Tensor] = []  # of a device
        same = same_settings(problem.score, base.score, answers) and same_settings(problem.sink, base.sink, answers)
        if not (problem.score.position_free and same):
            return False
        if call.cross and (call.key_stop != self.key_stop or call.first_key != self.first_key):
            return False
        if not self.first_key <= call.first_key <= self.key_stop <= call.key_stop:
            return False
        start, count = call.first_key - self.first_key, self.key_stop - call.first_key
        if self._keeps_fingerprints:
            equal = self._fingerprints.equals(call.fingerprints[:, :count], start)
        else:
            equal = self._k.equals(problem.k[:, :, :count], start)
        answers += [equal] if isinstance(equal, Tensor) else []
        return torch.stack(answers).all() if answers and equal is not False else equal

    def extend(self, call: PositionedCall) -> None:
        """Add one more call of the text."""
        self._append_call(call)
        if self.policy.disk is not None:
            for tokens in self._growing_tokens:
                self.policy.disk.spill(tokens)

    def _append_call(self, call: PositionedCall) -> None:
        """Store the queries, the new keys, the mask and the statistics of a call, and move the ends of the text."""
        part, n = _recorded_rows(call, asks=not self.on_device), call.matrix.weights.shape[3]
        self._marks = 0 if self.policy.copies is None else self.policy.copies.marks
        problem = part.problem
        rows, column = len(call.rows), call.first_key - self.first_key
        row = self.next_row - self.first_query
        # The log-sum-exp and statistics of a step wait where they did not come with its output: those of all waiting
        # rows are computed together. While rows before wait, later ones do, too.
        waits = (
            self._steps_wait
            and bool(self.blocks)
            and (self._computed < row or (rows <= STEP and self._lacks_numbers(part)))
        )
        if self.policy.statistics and self.mergeable:
            if not waits:
                self._collect_statistics(part, n, column)
        elif self.policy.statistics and not self.blocks:
            used = _over_keys_in_use(part, call)
            self._statistics.add(used.collect(*self.policy.statistics), rows, used.weights.shape[3], column)
        if not self.blocks:
            # Later calls are compared with the sizes and settings of the first, whose queries may be on disk by then.
            first = replace(problem, q=problem.q[:, :, :0], mask=None)
            self._base = snapshot(first, self.policy.device, self.policy.copies)
        mask = None
        if self.policy.tokens:
            mask = kept_mask(problem, self.policy.device, self.policy.copies)
            self._q.append(problem.q)
            if not waits:
                lse = part.softmax_weights.lse()  # in its exact form: weights need it
                self._lse.append(lse if lse.ndim == 3 else self._kept_lse(lse))
        self._computed += 0 if waits else rows
        self._append_keys(call)
        self.blocks.append(Block(mask, range(row, row + rows), range(column, column + n)))
        self._query_masks.append(_query_mask(part, call.query_mask, call.rows))
        self.next_row += rows
        self._calls += 1
        self.next_query, self.key_stop = call.query_stop, max(call.key_stop, self.key_stop)

    def _lacks_numbers(self, part: AttentionMatrix) -> bool:
        """Return whether numbers of some rows are missing: those that did not come with their output.

        On a GPU they count as missing, since the program would have to wait to know.
        """
        return self.on_device or part.softmax_weights.known_lse is None

    def _collect_statistics(self, part: AttentionMatrix, n: int, column: int) -> None:
        """Add the statistics of some rows over n keys, the first of which is at a column of the whole."""
        statistics = [with_keys(s, n) for s in self.policy.statistics]
        self._statistics.add(part.collect(*statistics), part.weights.shape[2], n, column)

    def _compute_waiting(self, matrix: AttentionMatrix) -> None:
        """Compute the log-sum-exp and statistics that were put off, from the matrix of all rows."""
        rows = [range(self._computed, self.next_row - self.first_query)]
        if isinstance(matrix.mask, Stacked):  # steps of different masks: each by its own
            rows = [block.rows for block in self.blocks if block.rows.start >= self._computed]
        # Rows that are computed already count as seeing keys here: what is known of them is in `_query_masks`.
        seeing = [torch.ones(len(matrix), self._computed, dtype=torch.bool, device=matrix.problem.device)]
        for some in rows:
            part = matrix.window(some)
            part = _without_device_waits(part) if self.on_device else part
            if self.policy.statistics and self.mergeable:
                self._collect_statistics(part, self.key_stop - self.first_key, 0)
            self._lse.append(self._kept_lse(part.softmax_weights.lse()))
            seeing.append(_query_mask(part))
        self._computed = self.next_row - self.first_query
        known = self._query_masks.joined()
        self._query_masks = GrowingTensor(1)
        self._query_masks.append(known & torch.cat(seeing, dim=1))

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
                (self._values[name],) = self.policy.growing()
            self._values[name].append(t)

    def _kept_lse(self, lse: Tensor) -> Tensor:
        """Return a log-sum-exp in the form of the device where it is kept, which may have float64."""
        parts = self._lse.parts
        return moved_lse(lse, parts[-1].device if parts else self.policy.device or lse.device)

    def resume(self) -> None:
        """Go on after an entry was made: from now on entries share the buffers of what is stored, which have room."""
        self._is_resumed = True

    def _joined(self, tensor: GrowingTensor) -> Tensor:
        """Return all parts of what is stored as one tensor, which later calls do not change."""
        return tensor.joined_with_room() if self._is_resumed else tensor.joined()

    def matrix(self) -> AttentionMatrix:
        """Return the matrix of all queries so far over all keys."""
        q, k, keys = self._joined(self._q), self._joined(self._k), self.key_stop - self.first_key
        batch, heads = q.shape[:2]
        problem = replace(self._base, q=q, k=k)
        tile = partial(problem.tile, range(batch), range(heads))
        mask = stack_masks(self.blocks, keys, tile)
        problem = replace(problem, mask=mask, versions=())
        if self._computed < q.shape[2]:
            self._compute_waiting(softmax_matrix(problem, self._plan))
        if self._is_resumed and not isinstance(mask, Stacked):  # later calls are compared with one mask, and not each
            self.blocks = [Block(mask, range(q.shape[2]), range(keys))]
        return softmax_matrix(problem, self._plan, lse=self._joined(self._lse))

    def query_mask(self) -> Tensor:
        """Return which recorded queries are tokens that may attend to a key, on the device, shape (batch, rows)."""
        if self.policy.tokens and self._computed < self.next_row - self.first_query:
            self.matrix()  # computes what waits of the last rows, and with it appends their masks to `_query_masks`
        return self._query_masks.joined()

    def _entry_in_memory(self, query_mask: Tensor | None) -> Entry:
        """Return the entry of all calls so far, of the tensors that are stored."""
        if self.policy.copies is not None:
            self.policy.copies.wait(self._marks)
        matrix, rows = self.matrix() if self.policy.tokens else None, self.next_row - self.first_query
        query_mask = self._query_masks.joined().cpu() if query_mask is None else query_mask
        return Entry(
            name=self.site.path,
            layer=self.site.layer,
            kind=self.site.kind,
            call=self.number,
            heads=self.heads,
            queries=(self.first_query, self.next_row),
            first_key=self.first_key,
            shape=(*self._base.shape[:2], rows, self.key_stop - self.first_key),
            matrix=matrix,
            statistics=self._statistics_of_text(matrix),
            query_mask=None if bool(query_mask.all()) else query_mask,
            **{name: self._joined(tensor) for name, tensor in self._values.items()},
        )

    def _statistics_of_text(self, matrix: AttentionMatrix | None) -> dict[str, Any]:
        """Return the statistics of the whole text by name: merged from those of the calls, where that is exact."""
        statistics = self.policy.statistics
        if self.mergeable or self._calls == 1 or matrix is None:
            results = self._statistics.finish(self.key_stop - self.first_key)
        else:
            results = list(matrix.collect(*statistics))
        return dict(zip(statistic_names(statistics), results, strict=True))

    def to_entry(self, query_mask: Tensor | None = None) -> Entry:
        """Return the entry of all calls so far; where the policy names a disk, write it there and return it mapped.

        Parameters
        ----------
        query_mask : Tensor of bool, optional, shape (batch, rows)
            `query_mask` on the CPU, for who has asked for those of several texts at once.
        """
        if self._written is not None and self._written.shape[2] == self.next_row - self.first_query:
            return self._written
        entry = self._entry_in_memory(query_mask)
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


def _recorded_rows(call: PositionedCall, *, asks: bool) -> AttentionMatrix:
    """Return the matrix of the recorded queries of a call; `asks` is whether statistics may look at its numbers."""
    if len(call.rows) != call.matrix.weights.shape[2]:
        part = call.matrix.window(call.rows)
    else:
        call.matrix.weights.check_unchanged()
        part = call.matrix
    return part if asks else _without_device_waits(part)


def _over_keys_in_use(part: AttentionMatrix, call: PositionedCall) -> AttentionMatrix:
    """Return the recorded rows of a call over the keys in use: not those that a static cache has room for."""
    if not call.has_room:
        return part
    problem, count = part.problem, call.key_stop - call.first_key
    block = Block(problem.mask, range(problem.shape[2]), range(problem.shape[3]))
    mask = stack_masks([block], count)
    return softmax_matrix(replace(problem, k=problem.k[:, :, :count], mask=mask, versions=()), part.plan)


def _without_device_waits(part: AttentionMatrix) -> AttentionMatrix:
    """Return the same matrix, set up so that a GPU is not waited for.

    No logit counts as known to be finite or small.
    """
    problem = copy.copy(part.problem)
    vars(problem).update(has_finite_logits=False, has_small_logits=False)
    weights = part.softmax_weights
    return softmax_matrix(problem, part.plan, lse=None if weights.lse_is_rounded else weights.known_lse)


def _query_mask(part: AttentionMatrix, given: Tensor | None = None, rows: range = range(0)) -> Tensor:
    """Return which queries are tokens that may attend to a key, as far as it is known, shape (batch, queries).

    Parameters
    ----------
    part : AttentionMatrix, shape (batch, heads, queries, n)
        The queries.
    given : Tensor of bool, optional, shape (batch, m)
        Which queries of a call are tokens.
    rows : range
        Which of these the queries are.
    """
    batch, heads, m, _ = part.weights.shape
    lse = part.softmax_weights.known_lse
    if lse is None or part.sink is not None or not heads:
        seeing = torch.ones(batch, m, dtype=torch.bool, device=part.problem.device)
    else:
        seeing = ((lse[..., 0] if lse.ndim == 4 else lse) > -torch.inf).any(dim=1)
    return seeing if given is None else given[:, rows.start : rows.stop] & seeing
