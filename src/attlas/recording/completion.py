"""How a recording becomes an atlas when its block ends, and how it goes on in a further block."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Self

from attlas.errors import RecordingError, ShapeError, public
from attlas.matrix.handwritten import Scope
from attlas.matrix.handwritten.scope import DENSE_USES
from attlas.recording import errors, metadata
from attlas.recording.atlas import Atlas, Entry
from attlas.recording.atlas.atlas import FIRST_CALLS
from attlas.recording.atlas.entry import KINDS
from attlas.recording.atlas.images.inputs import RecordedImages
from attlas.recording.atlas.layers import LAYER_COUNTS, OTHER_KINDS, UNRECORDED
from attlas.recording.linear_hearing import LinearHearing
from attlas.recording.parts.recorder import PartsHearing
from attlas.recording.sequences import RecordedSequences


class Completion(LinearHearing, PartsHearing):
    """The part of a recording that makes the atlas of what was heard; `Recording` sets what it is asked for."""

    atlas: Atlas
    _keep: str
    _tokens: Any
    _sums_passes: bool
    _scope: Scope | None
    _sequences: RecordedSequences
    _images: RecordedImages | None
    _first_calls: dict[str, int]  # by path: the number of the first entry that is about the text
    _heads_elsewhere: bool
    _ended: list[Entry] | None = None  # entries of texts that have ended, once a block has ended well

    @public("recording.resumed()")
    def resumed(self) -> Self:
        """Return this recording, ready for one more ``with`` block that goes on where the block before has ended.

        Each block gives an atlas of its own, of everything that was recorded up to its end: what the blocks before
        have given does not change. A text that is read further, with the cache of its first tokens, is one entry.

        Returns
        -------
        Recording
            This one; it may be entered in another thread.

        Raises
        ------
        RecordingError
            If no block has ended, or the last one has ended with an error.
        ShapeError
            If the recording keeps no queries and keys in memory, or has gates, channels, images, sums of passes, or
            attention that is written out by hand.

        See Also
        --------
        record : makes a recording.

        Notes
        -----
        Queries, keys and values that are added go into buffers with room for more, and the atlases of all blocks share
        them: a block copies what is new, and everything once in a while. Between two blocks the model is as it was.

        Examples
        --------
        >>> import torch, attlas
        >>> from torch import nn
        >>> from attlas.recording import record
        >>> layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        >>> model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        >>> recording = record(model, patch_sdpa=True)
        >>> with recording as first:
        ...     output = model(torch.randn(1, 10, 32))
        >>> with recording.resumed() as both:
        ...     output = model(torch.randn(1, 12, 32))
        >>> len(first.entries), len(both.entries)  # another text is another pass of each attention
        (2, 4)
        """
        settings = {
            f'keep="{self._keep}"': self._keep not in ("device", "cpu"),
            "gates": self._gates is not None,
            "channels": bool(self._selection.channels),
            "images": self._images is not None,
            "sum_passes": self._sums_passes,
            "handwritten": self._scope is not None,
        }
        if any(settings.values()):
            rule = "what goes on is queries and keys in memory, of attentions as they are."
            fix = 'attlas.record(model), or keep="cpu", without these settings.'
            raise ShapeError(rule, ", ".join(name for name, is_set in settings.items() if is_set), fix)
        if self._ended is None:
            rule = "a block goes on after one that has ended without an error."
            fix = "with recording as atlas: model(ids); or a new attlas.record(model)."
            raise RecordingError(rule, "no block has ended, or the last one has failed", fix)
        if self._entered:  # it may have been asked before
            self._entered = False
            # An atlas of its own: the ones before are somebody's, and so are their lists.
            self.atlas = Atlas(model=self.atlas.model, details=metadata.model_details(self._model, self._keep))
            self.atlas.entries += self._ended
            self._sequences.resume(self.atlas.entries)
        return self

    @public()
    def _complete_block(self) -> None:
        """Add the entries of open sequences and sort all by layer, add the text, and give the folder its name."""
        self._sequences.end_waiting()
        ended = [*self.atlas.entries]
        self._sequences.finish()
        if self._linear is not None:
            self.atlas.entries += self._linear.entries()
        self.atlas.entries[:] = [self._renumbered_entry(entry) for entry in self.atlas.entries]
        if not self.atlas.entries and not self._heads_elsewhere:
            if self._selection.queries is None:
                raise errors.no_layer_attended(self._selection.named, list(self._matched))
            raise errors.no_query_recorded(self._selection.queries)
        self.atlas.entries.sort(key=lambda entry: (KINDS.index(entry.kind), entry.layer, entry.call))
        if self._gates is not None:
            self.atlas.entries[:] = self._gates.completed(self.atlas.entries)
        if self._parts is not None:
            with public(self.where):
                self.atlas.parts[:] = self._parts.streams()
        self._complete_text()
        self._complete_layers()
        if self._policy.disk is not None:
            self._policy.disk.finish(self.atlas.entries, self.atlas.facts, self.atlas.bookmarks)
        self._ended = ended

    def _complete_text(self) -> None:
        """Add the token ids and their texts to the atlas, and which entries are not about them."""
        ids, encoder_ids = self._texts["self"].ids, self._texts["encoder"].ids
        if self.atlas.kinds[:1] == ("encoder",):
            ids, encoder_ids = encoder_ids, None
        self.atlas.ids, self.atlas.texts = ids, metadata.token_texts(self._tokens, ids)
        if not isinstance(self._tokens, list | tuple):
            self.atlas.encoder_texts = metadata.token_texts(self._tokens, encoder_ids)
        pieces = [metadata.token_bytes(self._tokens, text) for text in ([] if ids is None else ids.tolist())]
        self.atlas.details |= {"token_bytes": pieces} if any(pieces) else {}
        # No entry of an attention without a text is about the text: the first that could be is beyond the last.
        beyond_last = {entry.name: entry.call + 1 for entry in self.atlas.entries if entry.name in self._without_text}
        later = {path: call for path, call in (self._first_calls | beyond_last).items() if call}
        self.atlas.details |= {FIRST_CALLS: later} if later else {}
        self.atlas.details |= {} if self._images is None else self._images.details(self._model, ids)

    def _complete_layers(self) -> None:
        """Add the number of the model's layers of each kind, and those that have no weights, or none to record."""
        counts = {kind: count for kind, count in self._attentions.counts.items() if count}
        for entry in self.atlas.entries:  # a module that is used again gives more layers
            counts[entry.kind] = max(counts[entry.kind], entry.layer + 1)
        empty = self._attentions.without_attention()
        missed = [*self._unrecorded]
        if self._linear is not None and self._linear.without_past:
            recorded = {entry.name for entry in self.atlas.entries}
            missed += [(path, self._model.get_submodule(path)) for path in sorted(self._linear.without_past - recorded)]
        unrecorded = self._attentions.not_recorded(empty, missed)
        if self._attentions.other_linear and (beside := self._attentions.beside_attention()):
            unrecorded["linear"] = unrecorded.get("linear", {}) | beside
        self.atlas.details |= {LAYER_COUNTS: counts, UNRECORDED: unrecorded}
        other = self._attentions.of_other_kinds(empty)
        self.atlas.details |= {OTHER_KINDS: other} if other else {}
        if self._scope is not None:
            self.atlas.details[DENSE_USES] = [use._asdict() for use in self._scope.dense_uses]

    def _renumbered_entry(self, entry: Entry) -> Entry:
        """Return an entry with the final number of its layer: an attention that was found late shifts later ones."""
        layer = self.final_layer(self._attentions.sites[entry.name], entry.layer)
        return entry if entry.layer == layer else replace(entry, layer=layer)
