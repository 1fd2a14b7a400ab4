"""The calls of one layer of linear attention that belong to one text: they become one entry of the atlas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from attlas.matrix import AttentionMatrix, observers
from attlas.matrix.transport.function import transport
from attlas.matrix.value_weighted import norms_of
from attlas.recording.atlas import Entry
from attlas.recording.atlas.entry import statistic_names
from attlas.recording.discovery import AttentionSite
from attlas.recording.linear_calls import LinearCall
from attlas.recording.sequence import RetentionPolicy
from attlas.stats import Statistic


class LinearSequence:
    """The calls of one layer of linear attention, from the first token on.

    Parameters
    ----------
    site : AttentionSite
        The layer.
    number : int
        Number of texts of this layer before this one.
    policy : RetentionPolicy
        What is stored.
    keeps_values : bool or "norms"
        Whether the values are stored, or their norms alone.

    Notes
    -----
    A later call goes on with the text where it began with the state that the call before has left, number for number.
    Queries, keys and gates of all calls are kept, and the matrix is that of all tokens; the state is not.
    """

    def __init__(self, site: AttentionSite, number: int, policy: RetentionPolicy, *, keeps_values: bool | str) -> None:
        self.site, self.number, self.policy = site, number, policy
        self._keeps_values = keeps_values
        # By name ("q", "k", "decay", ...): what each call has given of it, joined when the matrix is made.
        self._pieces: dict[str, list[Tensor]] = {}
        self._values: list[Tensor] = []
        self._norms: list[Tensor] = []
        self._query_masks: list[Tensor] = []
        # Of the last call: scale of the queries, what makes the matrix, and the state that it ended with.
        self._scale = 1.0
        self._make: Callable[..., AttentionMatrix] = transport
        self._state: Tensor | None = None
        self.length = 0
        #: Numbers of the channels, where each has a matrix of its own.
        self.channels: tuple[int, ...] | None = None

    def continues(self, call: LinearCall) -> bool:
        """Return whether a call goes on from where this text ends."""
        state, before = self._state, call.before
        if state is None or before is None or state.shape != before.shape:
            return False
        return torch.equal(state.to(before.dtype), before)

    def add(self, call: LinearCall, query_mask: Tensor | None) -> None:
        """Add the tokens of a call."""
        for name, t in call.tokens.items():
            if t.ndim > 1 or name not in self._pieces:  # what no token changes is kept once
                self._pieces.setdefault(name, []).append(self._stored_copy(t))
        if self._keeps_values:
            norms = norms_of(call.values).unsqueeze(-1)
            self._norms.append(self._stored_copy(norms))
        if self._keeps_values is True:
            self._values.append(self._stored_copy(call.values))
        batch, _, n, _ = call.values.shape
        mask = torch.ones(batch, n, dtype=torch.bool) if query_mask is None else query_mask.cpu().expand(batch, n)
        self._query_masks.append(mask)
        # Of the last call: scale and function that make the matrix, and the state to which the next call must fit.
        self._scale, self._make = call.scale, call.matrix
        self._state = None if call.after is None else call.after.detach().clone()
        self.length += n

    def _stored_copy(self, t: Tensor) -> Tensor:
        """Return a tensor as it is stored: the model may change its own."""
        t = t.detach()
        return t.to(self.policy.device, copy=True) if self.policy.device is not None else t.clone()

    def join_channels(self, others: Sequence[LinearSequence]) -> None:
        """Add the channels of calls of the same layer and text, which computed other channels."""
        parts = [self, *others]
        tokens = [part._tokens_of_all_calls() for part in parts]
        counts = [len(part.channels or ()) for part in parts]
        for name, first in tokens[0].items():
            own = [
                t if t.ndim == 1 or t.shape[1] == count else t.expand(-1, count, -1, -1)
                for t, count in zip((part[name] for part in tokens), counts, strict=True)
            ]
            self._pieces[name] = [torch.cat(own, dim=0 if first.ndim == 1 else 1)]
        for name in ("_values", "_norms"):
            if getattr(self, name):
                setattr(self, name, [torch.cat([torch.cat(getattr(part, name), dim=2) for part in parts], dim=1)])
        self.channels = tuple(channel for part in parts for channel in part.channels or ())

    def _tokens_of_all_calls(self) -> dict[str, Tensor]:
        """Return the tokens of all calls so far by name, each as one tensor."""
        return {name: pieces[0] if len(pieces) == 1 else torch.cat(pieces, 2) for name, pieces in self._pieces.items()}

    def matrix(self) -> AttentionMatrix:
        """Return the matrix of all tokens."""
        joined = self._tokens_of_all_calls()
        self._pieces = {name: [t] for name, t in joined.items()}
        made, device = self._make(scale=self._scale, **joined), self.policy.device
        return made if device is None or made.device == device else made.to(device)

    @torch.no_grad()
    def to_entry(self, heads: Sequence[int], rows: range, site: AttentionSite) -> Entry:
        """Return the entry of some heads and queries; where the policy names a disk, it is written there.

        Parameters
        ----------
        heads : sequence of int
            The heads, or all channels that were recorded.
        rows : range
            The queries.
        site : AttentionSite
            The layer with its final number.
        """
        with observers.unheard():
            whole = self.matrix()
            matrix = whole if len(heads) == whole.weights.shape[1] else whole[:, list(heads)]  # never of channels
            matrix = matrix if len(rows) == self.length else matrix.window(rows)
            results = _linear_statistics(matrix, self.policy.statistics)
        mask = torch.cat(self._query_masks, dim=1)[:, rows.start : rows.stop]
        values = _values_of_heads(self._values, heads)
        norms = _values_of_heads(self._norms, heads)
        entry = Entry(
            name=site.path,
            layer=site.layer,
            kind=site.kind,
            call=self.number,
            heads=tuple(heads),
            queries=(rows.start, rows.stop),
            first_key=0,
            shape=matrix.weights.shape,
            matrix=matrix if self.policy.tokens else None,
            statistics=results,
            query_mask=None if bool(mask.all()) else mask,
            values=values,
            value_norms=None if norms is None else norms.squeeze(-1),
        )
        return entry if self.policy.disk is None else self.policy.disk.add(entry)


def _values_of_heads(parts: Sequence[Tensor], heads: Sequence[int]) -> Tensor | None:
    """Return the values of some heads; None where none were kept."""
    if not parts:
        return None
    whole = torch.cat(list(parts), dim=2)
    return whole if len(heads) == whole.shape[1] else whole[:, list(heads)]


def _linear_statistics(matrix: AttentionMatrix, statistics: Sequence[Statistic]) -> dict[str, Any]:
    """Return the results of those statistics that weights of linear attention have, by name; they have no entropy."""
    pairs = zip(statistic_names(statistics), statistics, strict=True)
    own = {name: statistic for name, statistic in pairs if matrix.weights.has(statistic)}
    return dict(zip(own, matrix.collect(*own.values()), strict=True)) if own else {}
