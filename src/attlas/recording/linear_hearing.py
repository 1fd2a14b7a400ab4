"""What a recording hears of layers of linear attention, and of other matrices that are no softmax."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from attlas.errors import RecordingError, public
from attlas.recording.discovery import AttentionSite
from attlas.recording.following import ModelFollower
from attlas.recording.gates import GateRecorder
from attlas.recording.hooks import AttentionCall, is_recording
from attlas.recording.linear_calls import LinearCall, read_matrix
from attlas.recording.linear_recorder import LinearRecorder
from attlas.recording.linear_sequence import LinearSequence
from attlas.recording.selection import Selection
from attlas.recording.sequence import RetentionPolicy
from attlas.recording.text import RecordedText
from attlas.recording.traced import Hooks


class LinearHearing(ModelFollower):
    """The part of a recording that keeps matrices which are no softmax; `Recording` sets what it is asked for."""

    _selection: Selection
    _policy: RetentionPolicy
    _values: bool | Literal["norms"]
    _hears_linear: bool
    _gates: GateRecorder | None
    _hooks: Hooks
    _texts: dict[str, RecordedText]
    _without_text: set[str]
    _padding_masks: dict[str, Tensor]
    _linear: LinearRecorder | None = None
    _first_of_state: int | None = None  # of the running pass: the first token that a state was given

    @public()
    def on_linear(self, call: LinearCall) -> None:
        """Record one call of a layer of linear attention; nothing in another thread or in a backward pass."""
        here = self._passes.running()
        if here is None or not is_recording(self):
            return
        site = self._site_of_module(here.module)
        if site is None:
            return
        number, here.linear_calls = here.linear_calls, here.linear_calls + 1
        heard = self._linear_texts().hear(site, self._passes.occurrence(site.path), number, call)
        if heard is None:
            return
        sequence, call, first = heard
        self._first_query = first if self._first_query is None else self._first_query
        self._first_of_state = first
        if not self._attentions.has_softmax:  # else its keys tell how the text goes on
            self._texts["self"].read_state(len(call.values), first, continues=first > 0)
        self._add_linear(sequence, call, site, first)

    def _hear_swept(self, call: AttentionCall) -> None:
        """Record a product of a module that tells of it by itself with a matrix that is no softmax."""
        weights, values = call.matrix.weights, call.values
        if values is None and self._values:
            rule = "values=True needs the values of every recorded attention."
            fix = "attlas.recording.pooled(module, A, v) in that module."
            raise RecordingError(rule, f"none from {type(call.module).__name__}", fix, where="record()")
        own = read_matrix(call.matrix.detach(), weights.keys if values is None else values)
        if own.tokens:
            self._attentions.hear_linear(call.module, counts=self._hears_linear)
            if not self._hears_linear:
                return
        site = self._site_of_module(call.module, call.number)
        if site is None or not self._selection.includes(site, self._attentions):
            return
        if self._gates is not None:
            self._hooks.add(self._gates.add(site), "gate", "before")
        text, inside = self._texts["encoder" if site.kind == "encoder" else "self"], self._passes.inside
        if not (text.is_about(weights.shape) if inside else text.ids is None):
            self._without_text.add(site.path)
        heard = self._linear_texts().hear(site, self._passes.occurrence(site.path), 0, own)
        if heard is not None:
            self._add_linear(heard[0], own, site, 0)

    def _linear_texts(self) -> LinearRecorder:
        """Return what keeps the matrices that are no softmax."""
        if self._linear is None:
            self._linear = LinearRecorder(self._selection, self._attentions, self._policy, keeps_values=self._values)
        return self._linear

    def _add_linear(self, sequence: LinearSequence, call: LinearCall, site: AttentionSite, first: int) -> None:
        """Add a call to its text, with the queries of it that are tokens."""
        batch, _, n, _ = call.values.shape
        given = self._padding_masks.get("self" if site.kind == "linear" else site.kind)
        mask = None if given is None else given[:, first : first + n]
        fits = mask is not None and mask.shape == (batch, n)
        sequence.add(call, mask.bool() if mask is not None and fits else None)
