"""What a recording keeps of the layers of linear attention: the texts of each, and the channels that were chosen."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from attlas.recording.atlas import Entry
from attlas.recording.discovery import AttentionSite, ModelAttentions
from attlas.recording.linear_calls import LinearCall
from attlas.recording.linear_sequence import LinearSequence
from attlas.recording.selection import Selection
from attlas.recording.sequence import RetentionPolicy


class LinearRecorder:
    """The texts that the layers of linear attention of a model have read.

    Parameters
    ----------
    selection : Selection
        What is recorded.
    attentions : ModelAttentions
        The attentions of the model.
    policy : RetentionPolicy
        What is stored.
    keeps_values : bool or "norms"
        Whether the values are stored, or their norms alone.

    Attributes
    ----------
    without_past : set of str
        Paths of layers whose state came from tokens that were not recorded: their rows would lack what it holds.
    """

    def __init__(
        self, selection: Selection, attentions: ModelAttentions, policy: RetentionPolicy, *, keeps_values: bool | str
    ) -> None:
        self._selection, self._attentions, self.policy = selection, attentions, policy
        self._keeps_values = keeps_values
        # By path, occurrence, and place among the calls of one layer, which compute some of its channels each.
        self._sequences: dict[tuple[str, int, int], LinearSequence] = {}
        self._begun: Counter[tuple[str, int, int]] = Counter()  # how many texts, the last one included
        self._ended: list[tuple[tuple[str, int, int], LinearSequence]] = []
        self._channel_counts: dict[str, int] = {}  # by path: the channels of the layer, as far as they ran
        self.without_past: set[str] = set()

    def hear(
        self, site: AttentionSite, occurrence: int, number: int, call: LinearCall
    ) -> tuple[LinearSequence, LinearCall, int] | None:
        """Find the text that a call belongs to.

        Parameters
        ----------
        site : AttentionSite
            The layer.
        occurrence : int
            How often its module was called before in this pass.
        number : int
            Place of the call among those of the layer, which compute other channels.
        call : LinearCall
            What it computes.

        Returns
        -------
        tuple or None
            The text, the call with the tokens of chosen channels, and the position of its first token; None where it is
            not recorded.
        """
        channels = self._channels_of_call(site, call, number)
        if channels is not None:
            if not channels:
                return None
            # `channels` are numbers in the layer; this call has those from number * (its own count) on.
            places = torch.tensor(channels, device=call.values.device) - number * (call.channels or 0)
            tokens = {} if call.choose is None else call.choose(places)
            call = call._replace(tokens=tokens, values=call.values[:, places])
        key = (site.path, occurrence, number)
        sequence = self._sequences.get(key)
        if not call.begins and (sequence is None or not sequence.continues(call)):
            # The state came with tokens that nobody recorded: the rows of these tokens are not known.
            self.without_past.add(site.path)
            if sequence is not None:
                self._ended.append((key, self._sequences.pop(key)))
            return None
        if sequence is None or call.begins:
            if sequence is not None:
                self._ended.append((key, sequence))
            sequence = LinearSequence(site, self._begun[key], self.policy, keeps_values=self._keeps_values)
            # A new text begins here.
            self._begun[key] += 1
            sequence.channels = None if channels is None else tuple(channels)
            self._sequences[key] = sequence
        return sequence, call, sequence.length

    def number_of(self, path: str, occurrence: int) -> int:
        """Return how many texts a layer has read before the last one."""
        sequence = self._sequences.get((path, occurrence, 0))
        return 0 if sequence is None else sequence.number

    def _channels_of_call(self, site: AttentionSite, call: LinearCall, number: int) -> list[int] | None:
        """Return the chosen channels that a call computes; None for a layer with heads in the place of channels."""
        if call.channels is None:
            return None
        first, stop = number * call.channels, (number + 1) * call.channels
        self._channel_counts[site.path] = max(self._channel_counts.get(site.path, 0), stop)
        if not self._selection.includes(site, self._attentions):
            return []
        return [channel for channel in self._selection.channels_of(stop, ended=False) if channel >= first]

    def entries(self) -> list[Entry]:
        """Return the entries of all layers, of the heads or channels and queries that were asked for."""
        for path, count in self._channel_counts.items():
            site = self._attentions.sites[path]
            if self._selection.includes(site, self._attentions):
                # Raises where a channel was asked for that the layer does not have.
                self._selection.channels_of(count, site=site)
        # Of one layer and text, the calls that computed some channels each.
        texts: dict[tuple[str, int, int], list[LinearSequence]] = {}
        for (path, occurrence, _), sequence in [*self._ended, *self._sequences.items()]:
            texts.setdefault((path, occurrence, sequence.number), []).append(sequence)
        entries = []
        for (path, *_), (sequence, *others) in texts.items():
            if others:
                sequence.join_channels(others)
            site = self._attentions.sites.get(path, sequence.site)
            if not self._selection.includes(site, self._attentions):
                continue
            heads: Sequence[int] | None = sequence.channels
            if heads is None:
                heads = self._selection.heads_of(site, self._attentions, sequence.matrix().weights.shape[1])
            rows = self._selection.rows(0, sequence.length)
            if len(heads) and len(rows):
                entries.append(sequence.to_entry(heads, rows, site))
        return entries
