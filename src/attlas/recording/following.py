"""Follows the attentions of a model while it runs: which layer each call is, and where it stands in its text."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from attlas.errors import RecordingError, public
from attlas.foundation.checks import refuse_context_parallel
from attlas.matrix import AttentionMatrix
from attlas.recording import errors, metadata
from attlas.recording.attn_implementation import attending_with_attlas
from attlas.recording.discovery import AttentionSite, ModelAttentions
from attlas.recording.hooks import Listener, is_recording, subscribed
from attlas.recording.module_call import ModuleCall
from attlas.recording.passes import Passes
from attlas.recording.patch import patched_sdpa
from attlas.recording.selection import Selection
from attlas.recording.torch_layers import asked_for_weights, is_answering, torch_layers
from attlas.recording.traced import Handler, Hooks


class ModelFollower(Listener):
    """Base of a recording and of interventions: hears of every attention of a model for the time of a ``with`` block.

    Parameters
    ----------
    model : nn.Module
        The model.
    selections : sequence of Selection
        What is asked for: layers that the model cannot have are refused at once.
    patch_sdpa : bool
        Whether torch's ``scaled_dot_product_attention`` is caught.
    linear : bool, default False
        Whether layers of linear attention are heard, too.
    channels : bool, default False
        Whether those with one matrix for each channel are, too.
    """

    where = "record()"
    is_lazy = False  # whether attention that is written out by hand is heard

    def __init__(
        self,
        model: nn.Module,
        selections: tuple[Selection, ...],
        *,
        patch_sdpa: bool,
        linear: bool = False,
        channels: bool = False,
    ) -> None:
        self._model = model
        self._selections = selections
        self._patch = patch_sdpa
        self._attentions = attentions = ModelAttentions(model, patched=patch_sdpa, linear=linear, channels=channels)
        # A model that says it has more layers than attentions may use one for several: that shows when it runs.
        layers = metadata.model_details(model).get("num_hidden_layers", 0)
        if attentions.sites and layers <= attentions.counts["self"]:
            for selection in selections:
                selection.check(attentions, ended=False)
        self._stack = ExitStack()
        self._entered = False
        self._ran: set[str] = set()  # paths of the watched modules that ran in a pass
        self._recorded: set[str] = set()  # paths of the attentions whose matrix was offered
        self._unrecorded: list[tuple[str, nn.Module]] = []  # attentions that ran and were not, when the block has ended
        # Of the running pass: the layer of each call by path and occurrence, and the position of its first query.
        self._visits: dict[tuple[str, int], AttentionSite] = {}
        self._first_query: int | None = None
        self._reused_sites: set[AttentionSite] = set()  # layers that modules gave which are used again in one pass
        # By path: the names of each selection that meant an attention when it was first heard.
        self._matched: dict[str, list[tuple[int | str, ...]]] = {}
        watched = list(model.named_modules()) if patch_sdpa else attentions.watched()
        active = partial(is_recording, self)
        self._passes: Passes = Passes(model, watched, active, self._begin_pass, self._end_pass, self._extra_handlers())

    def _follow_model(self, stack: ExitStack) -> None:
        """Let the model attend with attlas, and listen to each of its attentions, until the block ends."""
        stack.enter_context(attending_with_attlas(self._model))
        self._add_hooks(stack.enter_context(self._passes.followed()))
        layers = torch_layers(self._model)
        if self._patch or layers:
            stack.enter_context(patched_sdpa(self._followed_module))
            stack.enter_context(asked_for_weights(layers))
        stack.enter_context(subscribed(self))
        # All went well: what was entered here is left when the block ends, and not when `stack` does.
        self._stack = stack.pop_all()

    def _extra_handlers(self) -> dict[str, Handler]:
        """Return, by name, handlers of hooks that a subclass adds; none here."""
        return {}

    def _add_hooks(self, hooks: Hooks) -> None:
        """Add the hooks of a subclass to the model; none here."""

    def running(self, module: nn.Module | None = None) -> ModuleCall | None:
        """Return the innermost call of a module that runs; by default, of any module of the model."""
        return self._passes.running(module)

    def _followed_module(self) -> nn.Module | None:
        """Return the running module if calls of torch's attention function are followed now; else None."""
        heard = is_recording(self) and (self._patch or is_answering())
        return self._passes.innermost if heard else None

    @public()
    def _enter_once(self, name: str, fix: str) -> None:
        """Raise an error where the block was entered before, or cannot be entered here."""
        if self._entered:
            raise RecordingError(f"{name} is entered once.", f"the same {name.split()[-1]} in a second `with`", fix)
        refuse_context_parallel()
        self._entered = True

    def __exit__(self, error_type: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        with self._stack:  # everything is put back, whatever happens
            if error_type is None:
                self._check_complete()
                self._complete_block()

    def _complete_block(self) -> None:
        """Do what remains when the block has ended well."""

    def _check_complete(self) -> None:
        """Raise an error where no attention or no such layer ran; warn of attentions that could not be recorded."""
        self._check_recorded()
        for selection in self._selections:
            selection.check(self._attentions, self._reused_sites)
        known, self._unrecorded = self._unrecorded, self._attentions.unrecorded(self._ran, self._recorded)
        if self._unrecorded and self._unrecorded != known:  # a block before may have said so
            warnings.warn(self._unfollowed_warning(), stacklevel=3)

    def _unfollowed_warning(self) -> Warning:
        """Return the warning of attentions that ran and could not be followed."""
        return errors.some_unrecorded(self._unrecorded, self.where, patched=self._patch, lazy=self.is_lazy)

    def _check_recorded(self) -> None:
        """Raise an error where no attention of the model could be followed."""
        if not self._recorded:
            raise errors.no_attention(
                self._model,
                self._attentions,
                self._ran,
                self._passes.number,
                patched=self._patch,
                where=self.where,
                lazy=self.is_lazy,
            )

    @property
    def _followed_sites(self) -> list[AttentionSite]:
        """The attentions whose matrix this follower got so far."""
        return [*(self._attentions.sites[path] for path in self._matched), *self._reused_sites]

    # ------------------------------------------------------------------------------------------------- passes

    def _begin_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a pass of the model, called with the arguments of its forward."""
        self._visits.clear()
        self._first_query = None

    @public()
    def _end_pass(self) -> None:
        """End a pass of the model that raised no error."""
        # A selection that names numbers must mean the same attentions at the end of the pass as when they ran: those
        # that were found meanwhile may have changed the numbers.
        self._ran |= {path for path, count in self._passes.calls.items() if count}
        self._check_recorded()
        for path, matched in self._matched.items():
            site = self._attentions.sites[path]
            for selection, before in zip(self._selections, matched, strict=True):
                if selection.matching(site, self._attentions) != before and not self._has_reused_modules(site.kind):
                    raise errors.layer_number_changed(site, self._attentions)

    # -------------------------------------------------------------------------------------------- attentions

    @public()
    def _site_of_module(self, module: nn.Module, number: int = 0) -> AttentionSite | None:
        """Return the attention of a module that runs, with its layer; None for a module of another model.

        A module that is used again in one pass counts as another layer, and so does every attention of its kind that
        follows: they are numbered in the order in which they run.
        """
        site = self._attentions.site(module, number)
        if site is None:
            return None
        # Heard of: what stays out of this set is named as not recorded.
        self._recorded.add(site.module)
        if site.path not in self._matched:
            self._matched[site.path] = [selection.matching(site, self._attentions) for selection in self._selections]
        if not self._passes.inside:
            return site
        # How often the module was called before in this pass.
        occurrence = self._passes.occurrence(site.module)
        key = (site.path, occurrence)
        if key in self._visits:
            return self._visits[key]
        occurrences = [number for (_, number), visit in self._visits.items() if visit.kind == site.kind]
        if occurrence or any(occurrences):
            if any(selection.counts_from_the_end for selection in self._selections):
                raise errors.negative_layer_of_reused_module(site)
            site = replace(site, layer=len(occurrences))
            self._reused_sites.add(site)
        self._visits[key] = site
        return site

    def final_layer(self, site: AttentionSite, layer: int) -> int:
        """Return the number of a layer that was `layer` when it ran: attentions that were found later may shift it."""
        return layer if self._has_reused_modules(site.kind) else self._attentions.sites[site.path].layer

    def _has_reused_modules(self, kind: str) -> bool:
        """Return whether layers of a kind are numbered as they run, because a module was used again in one pass."""
        return any(site.kind == kind for site in self._reused_sites)

    def _positions_of_first(
        self, site: AttentionSite, matrix: AttentionMatrix, first_query: int | None, first_key: int | None
    ) -> tuple[int, int]:
        """Return the positions in the text of query 0 and of key 0."""
        m, n = matrix.weights.shape[2:]
        first_key = 0 if first_key is None else int(first_key)
        if site.kind == "cross":
            # Only the self-attention of the same pass knows how much of the text was read before.
            first_query = self._first_query or 0
        elif first_query is None:
            mask = matrix.mask
            position = None if mask is None else mask.first_query(m, n)
            first_query = max(n - m if position is None else position, 0) + first_key
        first_query = int(first_query)
        if site.kind == "self" and self._first_query is None:
            self._first_query = first_query
        return first_query, first_key
