"""The texts of all attentions of a model: each call goes on with the last text of its attention, or begins another."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from attlas.foundation.autocast import without_autocast
from attlas.foundation.devices import free_bytes
from attlas.matrix import observers
from attlas.recording.atlas import Entry
from attlas.recording.copies import HostCopies
from attlas.recording.discovery import AttentionSite
from attlas.recording.pipelines import SummedEntries
from attlas.recording.sequence import STEP, PositionedCall, RecordedSequence, RetentionPolicy
from attlas.recording.snapshot import answers_of

# Path of an attention, and which of its calls in a pass.
Key: TypeAlias = tuple[str, int]

# Bytes of other calls that wait for the end of their pass together, since their tokens may be copies: these at least,
# and a quarter of what the device has free. And bytes of copies in pinned memory that wait to be written to disk.
_MOST_WAITING_BYTES = 2**28


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
    copies : HostCopies, optional
        The copies of what is moved to the CPU.
    summed : int, default 0
        Into how many passes of each attention the statistics of all are added up; with 0 each pass is an entry.

    Notes
    -----
    Whether a call goes on with a text depends on its keys. A GPU computes that, and the program waits for the answer:
    once for all layers of a pass, at its end.
    """

    def __init__(self, entries: list[Entry], copies: HostCopies | None = None, summed: int = 0) -> None:
        self.last: dict[Key, RecordedSequence] = {}
        self._entries = SummedEntries(entries, summed) if summed else entries
        self._copies = copies
        self._undecided: dict[Key, tuple[_NewCall, bool | Tensor]] = {}  # calls of this pass, with their answers
        self._held = 0  # bytes of those that are no step
        self._ended: list[RecordedSequence] = []  # texts of a device that are no entry yet
        self._unwritten: list[RecordedSequence] = []  # new ones of a device that go to disk when the pass has ended
        self._unwritten_bytes = 0

    def add(
        self,
        key: Key,
        site: AttentionSite,
        heads: tuple[int, ...],
        policy: RetentionPolicy,
        call: PositionedCall,
        *,
        begins: bool | Tensor,
        may_wait: bool,
    ) -> None:
        """Add a call to the text that it continues, or begin another.

        Parameters
        ----------
        key : tuple of str and int
            The attention.
        site, heads, policy, call
            As `RecordedSequence` takes them.
        begins : bool or Tensor
            Whether another text begins, whatever the keys are.
        may_wait : bool
            Whether `decide` is called when the pass has ended.
        """
        if key in self._undecided:
            self.decide()  # adds the calls that wait: this one follows them
        new, sequence = _NewCall(site, heads, policy, call), self.last.get(key)
        continues = False if sequence is None or begins is True else sequence.continues(call)
        if isinstance(begins, Tensor) and continues is not False:
            continues = ~begins & continues
        later = isinstance(continues, Tensor) or bool(self._undecided)  # calls are added in their order
        if not (may_wait and later):
            self._add_call(key, new, bool(continues))
            return
        self._undecided[key] = new, continues
        q, k = call.matrix.problem.q, call.matrix.problem.k
        # The keys of a static cache, which has room for more, are copies.
        self._held += 0 if q.shape[2] <= STEP and not call.has_room else q.nbytes + k.nbytes
        if self._held > _MOST_WAITING_BYTES and self._held > free_bytes(q.device) // 4:
            self.decide()  # adds them, so that their tensors are given back

    @without_autocast
    @torch.no_grad()
    def decide(self, others: Sequence[Tensor] = ()) -> list[Tensor]:
        """Add the calls that wait, and return other tensors on the CPU: one wait for each device.

        Parameters
        ----------
        others : sequence of Tensor
            Booleans or whole numbers.
        """
        if not (self._undecided or others):
            return []
        waiting, self._undecided, self._held = self._undecided, {}, 0
        ended, self._ended = self._ended, []
        texts = [*ended, *(self._take_unwritten() if self._unwritten else ())]
        # All answers of a device with one wait: of the calls, of the masks of ended texts, and what the caller asks.
        asked = {key: answer for key, (_, answer) in waiting.items() if isinstance(answer, Tensor)}
        found = iter(answers_of([*asked.values(), *(sequence.query_mask() for sequence in texts), *others]))
        answers = dict(zip(asked, found))  # noqa: B905 - the others follow
        entries = [sequence.to_entry(next(found)) for sequence in texts]
        self._add_ended_entries(entries[: len(ended)])
        with observers.unheard():
            for key, (new, answer) in waiting.items():
                self._add_call(key, new, bool(answers.get(key, answer)))
        if self._copies is not None:
            self._copies.mark()
        return [*found]

    def end_waiting(self) -> None:
        """Add the calls that wait, and the entries of texts that have ended."""
        if self._undecided:
            self.decide()
        sequences, self._ended = self._ended, []
        self._add_ended_entries(_entries_of(sequences))

    def finish(self) -> None:
        """Add the entries of the last text of each attention, after `end_waiting`."""
        self._add_ended_entries(_entries_of([*self.last.values()]))

    def resume(self, entries: list[Entry]) -> None:
        """Go on with the texts after `finish`: from now on ended ones go into a list that has those before."""
        self._entries = entries
        for sequence in self.last.values():
            sequence.resume()

    def _add_ended_entries(self, entries: Iterable[Entry]) -> None:
        """Add entries of texts that have ended."""
        for entry in entries:
            self._entries.append(entry)

    def _add_call(self, key: Key, new: _NewCall, continues: bool) -> None:
        """Add a call to the last text if it `continues` that, or begin another, whose first call it is."""
        sequence, number = self.last.get(key), 0
        if sequence is not None:
            if continues:
                sequence.extend(new.call)
                return
            if sequence.on_device:  # it becomes an entry in `decide`, when the next pass waits for the device
                self._ended.append(sequence)
            else:
                self._entries.append(sequence.to_entry())
            number = sequence.number + 1
        sequence = self.last[key] = RecordedSequence(new.site, number, new.heads, new.policy, new.call)
        if sequence.on_device and sequence.bytes_to_write:  # on the CPU it is written by now
            self._unwritten.append(sequence)
            self._unwritten_bytes += sequence.bytes_to_write
            if self._unwritten_bytes > _MOST_WAITING_BYTES:
                self._write_waiting()

    def _write_waiting(self) -> None:
        """Write the new texts that wait for the disk; the program waits for the device."""
        unwritten = self._take_unwritten()
        masks = answers_of([sequence.query_mask() for sequence in unwritten])
        for sequence, mask in zip(unwritten, masks, strict=True):
            sequence.to_entry(mask)  # for its effect: it writes to the disk

    def _take_unwritten(self) -> list[RecordedSequence]:
        """Return the new texts that wait for the disk, and forget them.

        Their copies are complete after the next wait.
        """
        unwritten, self._unwritten, self._unwritten_bytes = self._unwritten, [], 0
        if unwritten and self._copies is not None:
            self._copies.mark()
        return unwritten


def _entries_of(sequences: Sequence[RecordedSequence]) -> list[Entry]:
    """Return the entries of some texts; those of a device are waited for once."""
    later = [sequence for sequence in sequences if sequence.on_device]
    masks = answers_of([sequence.query_mask() for sequence in later]) if later else []
    known = dict(zip(later, masks, strict=True))
    return [sequence.to_entry(known.get(sequence)) for sequence in sequences]
