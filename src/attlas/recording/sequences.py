"""The texts of all attentions of a model: each call goes on with the last text of its attention, or begins another."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from attlas.foundation.autocast import without_autocast
from attlas.matrix import observers
from attlas.recording.atlas import Entry
from attlas.recording.discovery import AttentionSite
from attlas.recording.sequence import PositionedCall, RecordedSequence, RetentionPolicy

# Path of an attention, and which of its calls in a pass.
Key: TypeAlias = tuple[str, int]

_STEP = 16  # queries of a call that may wait for the end of its pass: a step of a generation, with or without a draft


class _NewCall(NamedTuple):
    """A call that is no part of a text yet."""

    site: AttentionSite
    heads: tuple[int, ...]
    policy: RetentionPolicy
    call: PositionedCall


class RecordedSequences:
    """The last text of each attention.

    Parameters
    ----------
    entries : list of Entry
        Where a text goes when another begins.

    Notes
    -----
    Whether a call goes on with a text depends on its keys. A GPU computes that, and the program waits for the answer:
    once for all steps of a pass, at its end, and not in each layer.
    """

    def __init__(self, entries: list[Entry]) -> None:
        self.last: dict[Key, RecordedSequence] = {}
        self._entries = entries
        self._undecided: dict[Key, tuple[_NewCall, bool | Tensor]] = {}  # steps of this pass, with their answers

    def add(
        self,
        key: Key,
        site: AttentionSite,
        heads: tuple[int, ...],
        policy: RetentionPolicy,
        call: PositionedCall,
        *,
        begins: bool,
        may_wait: bool,
    ) -> None:
        """Add a call to the text that it continues, or begin another.

        Parameters
        ----------
        key : tuple of str and int
            The attention.
        site, heads, policy, call
            As `RecordedSequence` takes them.
        begins : bool
            Whether it is known that another text begins.
        may_wait : bool
            Whether `decide` is called when the pass has ended.
        """
        if key in self._undecided:
            self.decide()
        new, sequence = _NewCall(site, heads, policy, call), self.last.get(key)
        continues = False if sequence is None or begins else sequence.continues(call)
        # The keys of a static cache, which has room for more, are copies: those of one layer at a time.
        step = call.matrix.weights.shape[2] <= _STEP and not call.has_room
        later = isinstance(continues, Tensor) or bool(self._undecided)  # calls are added in their order
        if may_wait and step and later:
            self._undecided[key] = new, continues
        else:
            self._add(key, new, bool(continues))

    @without_autocast
    @torch.no_grad()
    def decide(self) -> None:
        """Add the calls that wait: one wait for each device, whatever the number of layers."""
        waiting, self._undecided = self._undecided, {}
        by_device: defaultdict[torch.device, list[tuple[Key, Tensor]]] = defaultdict(list)
        continues: dict[Key, bool] = {}
        for key, (_, answer) in waiting.items():
            if isinstance(answer, Tensor):
                by_device[answer.device].append((key, answer))
            else:
                continues[key] = answer
        for answers in by_device.values():
            found = torch.stack([answer for _, answer in answers]).tolist()
            continues |= zip((key for key, _ in answers), found, strict=True)
        with observers.unheard():
            for key, (new, _) in waiting.items():
                self._add(key, new, continues[key])

    def _add(self, key: Key, new: _NewCall, continues: bool) -> None:
        """Add a call to the last text, or begin another."""
        sequence, number = self.last.get(key), 0
        if sequence is not None:
            if continues:
                sequence.extend(new.call)
                return
            self._entries.append(sequence.to_entry())
            number = sequence.number + 1
        self.last[key] = RecordedSequence(new.site, number, new.heads, new.policy, new.call)
