"""`intervene()` changes what a model attends to, for the time of a ``with`` block."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

from torch import Tensor, nn

from attlas.errors import DtypeError, OutOfRangeError, RecordingError, kind, public
from attlas.foundation.checks import instance_of, refuse_context_parallel
from attlas.foundation.compat import in_backward
from attlas.interventions.compact import Memory, without_hidden_keys
from attlas.interventions.edits import Call, Intervention
from attlas.matrix.sweep import SweptWeights
from attlas.recording.discovery import AttentionSite
from attlas.recording.errors import no_layer_attended
from attlas.recording.following import ModelFollower
from attlas.recording.hooks import AttentionCall, Change, Pool, is_recording
from attlas.recording.linear import telling_of_linear_calls
from attlas.recording.linear_calls import LinearCall, read_matrix
from attlas.recording.parallel import heads_here
from attlas.recording.parts.recorder import PartsHearing, PartsRecorder
from attlas.recording.traced import Handler, Hooks


@public("intervene()")
def intervene(
    model: nn.Module, interventions: Intervention | Iterable[Intervention], *, patch_sdpa: bool = False
) -> Intervening:
    """Change what a model attends to, for the time of a ``with`` block.

    Parameters
    ----------
    model : nn.Module
        A model of transformers, or any other whose attention `attlas.record` records: modules that compute with
        `attlas.attention` or ``A @ v`` need nothing else.
    interventions : Intervention or iterable of Intervention
        What is changed, in this order: `Suppress`, `ScaleLogits`, `Temperature`, `ReplaceWeights`, `DetachWeights`,
        `Ablate`, `RemovePart` of `attlas.interventions`. With none the model computes as it is, on attlas: a baseline.
    patch_sdpa : bool, default False
        Whether torch's ``scaled_dot_product_attention`` is caught, for models that call it themselves.

    Returns
    -------
    Intervening
        A context manager that gives the model. After the block the model is as it was.

    Raises
    ------
    DtypeError
        If `model` is no module, or an intervention is none.
    OutOfRangeError
        If the model has no such layer; in the forward pass, if a layer has no such head; at the end of the block, if
        a position lay beyond the longest text.
    RecordingError
        In the block, if the model computes its attention by itself, or does not run; at its end, if a chosen layer did
        not attend, so that nothing of it was changed.

    Warns
    -----
    UserWarning
        If some of the model's attentions ran and could not be changed; they are named.

    See Also
    --------
    attlas.record : inside the block it records the weights as they were changed.
    attlas.heads.effect : the effect of many interventions on the loss.

    Notes
    -----
    Positions are those of the text, from its first token (padding included): a suppressed span of the prompt stays
    suppressed in every step of a generation. Blocks may be nested, the outer one is applied first. It belongs to the
    thread that entered it. With gradient checkpointing, call ``backward()`` inside the block, which computes the
    attention again.

    In a layer of linear attention (the gated delta rule, KDA, Mamba-2, lightning, those of `attlas.nn`) `Ablate` leaves
    out heads and `Suppress` pairs. Nothing else can be changed there, and an intervention that means such a layer, by
    its number or as one of all, is refused: name the layers that have a softmax. Positions are those of one call from
    the first token on: with a cache that holds a state they are refused. A recording has the weights of such a layer
    as they are. Layers with one matrix for each channel (Mamba-1, RG-LRU, RWKV-4) stay as they are.

    Cost: that of the changed attention with the kernels of attlas. A mask hides what is suppressed, and whole tiles
    of it are skipped.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas.interventions import Ablate, Suppress
    >>> from torch import nn
    >>> layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    >>> model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    >>> x = torch.randn(1, 10, 32)
    >>> with attlas.intervene(model, [Suppress(keys=(2, 5)), Ablate(heads={1: [0]})], patch_sdpa=True):
    ...     changed = model(x)
    >>> bool((changed == model(x)).all())
    False
    """
    fix = "attlas.intervene(model, [...]), the model itself: pipe.model of a pipeline."
    instance_of("model", model, nn.Module, "an nn.Module", fix)
    given = [interventions] if isinstance(interventions, Intervention) else interventions
    items = list(given) if isinstance(given, Iterable) else [given]
    wrong = next((item for item in items if not isinstance(item, Intervention)), None)
    if wrong is not None:
        fix = "attlas.intervene(model, [attlas.interventions.Suppress(keys=(3, 9))])"
        raise DtypeError("interventions must be objects of attlas.interventions.", kind(wrong), fix)
    return Intervening(model, tuple(items), patch_sdpa)


class Intervening(ModelFollower, PartsHearing, AbstractContextManager[nn.Module]):
    """Interventions on one model; made by `intervene`, entered once.

    See Also
    --------
    intervene : makes one.

    Examples
    --------
    >>> from attlas.interventions import Intervening, Suppress, intervene
    >>> from torch import nn
    >>> isinstance(intervene(nn.MultiheadAttention(8, 2), Suppress(keys=0)), Intervening)
    True
    """

    where = "intervene()"

    def __init__(self, model: nn.Module, interventions: tuple[Intervention, ...], patch_sdpa: bool) -> None:
        # The arguments are those of `intervene`, checked.
        selections = tuple(item.selection for item in interventions)
        super().__init__(model, selections, patch_sdpa=patch_sdpa, linear=True)
        self._interventions = interventions
        self._memory = Memory()
        follows = any(item.follows_stream for item in interventions)
        self._parts = PartsRecorder(model, self._attentions, lambda t: t, slice(None)) if follows else None
        # By intervention and axis, one more than the last position of the longest text that it was asked about.
        self._reached: dict[tuple[int, str], int] = {}

    def __enter__(self) -> nn.Module:
        # Tell attentions, and functions of linear attention, to ask this object while the block runs.
        fix = "with attlas.intervene(model, interventions): each time anew; blocks may be nested."
        self._enter_once("a block of interventions", fix)
        with ExitStack() as stack:
            if functions := self._attentions.linear_functions:
                stack.enter_context(telling_of_linear_calls(functions, change=self.change_linear))
            self._follow_model(stack)
        return self._model

    def _extra_handlers(self) -> dict[str, Handler]:
        return {"begin part": self._begin_part, "end part": self._end_part}

    def _add_hooks(self, hooks: Hooks) -> None:
        # Of what is written to the residual stream.
        if self._parts is not None:
            self._parts.add_hooks(hooks)

    def _begin_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super()._begin_pass(args, kwargs)
        if self._parts is not None:
            self._parts.begin_pass()

    def _complete_block(self) -> None:
        """Raise an error where an intervention had no effect.

        No chosen layer attended, or a position lies beyond the text.
        """
        for number, item in enumerate(self._interventions):
            # What of the choice of layers no attention answered to.
            silent = item.selection.unmatched(self._attentions, self._followed_sites)
            if silent:
                raise no_layer_attended(silent, [site.path for site in self._followed_sites]).replaced(where=item.where)
            for axis, positions in item.positions.items():
                reached = self._reached.get((number, axis))
                if reached is not None and positions.last_required >= reached:
                    rule = f"{axis} must lie within the text."
                    found = f"position {positions.last_required}, the longest text has {reached} tokens"
                    fix = f"{axis}=slice({max(reached - 8, 0)}, {reached}), or an open end: slice(3, None)."
                    raise OutOfRangeError(rule, found, fix, arguments={axis: str(positions)}, where=item.where)

    def on_attention(self, call: AttentionCall) -> None:
        # A chosen attention that only offers its weights, to be read, cannot be changed.
        site = None if in_backward() else self._site_of_module(call.module, call.number)
        if site is None or not any(self._is_about_site(item, site) for item in self._interventions):
            return
        rule = "an attention that only offers its weights cannot be changed."
        fix = "attlas.attention(q, k, v), or A @ v, without offer(module, A): both are changed by themselves."
        raise RecordingError(rule, type(call.module).__name__, fix, module=site.path, where=self.where)

    def _is_about_site(self, item: Intervention, site: AttentionSite) -> bool:
        """Return whether an intervention is about this attention."""
        return item.selection.includes(site, self._attentions)

    @public()
    def change(self, module: nn.Module, change: Change, first_query: int | None, first_key: int | None) -> Change:
        """Return how an attention computes with the interventions that choose it, before its values are pooled.

        Called inside the forward pass.

        Parameters
        ----------
        module : nn.Module
            The attention layer.
        change : Change
            How it computes without these interventions.
        first_query, first_key : int, optional
            Positions in the text of query 0 and of key 0.
        """
        refuse_context_parallel()
        swept = isinstance(change.matrix.weights, SweptWeights)
        if swept and read_matrix(change.matrix, change.matrix.weights.keys).tokens:
            self._attentions.hear_linear(module, counts=True)
        site = self._site_of_module(module, change.number)
        if site is None:
            return change
        if in_backward() and self._has_reused_modules(site.kind):
            rule = "a module that is used again in one pass is not known again when it is computed again."
            fix = "model.gradient_checkpointing_disable()"
            raise RecordingError(rule, "gradient checkpointing", fix, module=site.path)
        if swept:
            return change._replace(pool=self._pool_of_linear(site, change.pool))
        query, key = self._positions_of_first(site, change.matrix, first_query, first_key)
        if self._parts is not None:
            heard = AttentionCall(module, change.matrix, first_query, first_key, None, change.number)
            self._parts.attend(heard, site, query)
        # Keys that a `Suppress` hides from a run of rows are left out of the product, which is faster than a mask.
        change = change._replace(pool=without_hidden_keys(change.pool, self._memory))
        for number, item in enumerate(self._interventions):
            if self._is_about_site(item, site):
                change = self._with_intervention(number, item, module, site, change, (query, key))
        return change

    @public()
    def change_linear(self, module: nn.Module | None, out: Tensor, read: Callable[[], LinearCall]) -> Tensor:
        """Return what the heads of a layer of linear attention compute; called inside the forward pass.

        Parameters
        ----------
        module : nn.Module, optional
            The layer; the innermost that runs, where it is not given.
        out : Tensor, shape (batch, heads, n, e)
            What they compute without these interventions.
        read : callable
            Returns what the layer was given.
        """
        here = self._passes.running(module) if is_recording(self) else None
        site = None if here is None else self._site_of_module(here.module)
        return out if site is None else self._changed_output(site, out, read)

    def _pool_of_linear(self, site: AttentionSite, pool: Pool) -> Pool:
        """Return how values are pooled with a matrix that is no softmax."""
        return lambda A, v: self._changed_output(site, pool(A, v), lambda: read_matrix(A, v))

    def _changed_output(self, site: AttentionSite, out: Tensor, read: Callable[[], LinearCall]) -> Tensor:
        """Return what the heads of a linear attention compute, shape (batch, heads, n, e), as it is changed."""
        for number, item in enumerate(self._interventions):
            if not self._is_about_site(item, site):
                continue
            heads = item.selection.heads_of(site, self._attentions, out.shape[1])
            for axis in ("queries", "keys"):
                self._reached[number, axis] = max(self._reached.get((number, axis), 0), out.shape[2])
            call = Call(site, heads, heads, tuple(range(len(heads))), len(heads), 0, 0)
            changed = item.linear_output(out, call, read)
            if changed is None:
                softmax = self._attentions.softmax_layers(site.kind)
                rule = (
                    "weights of a linear attention are made in its state: Ablate and Suppress alone change its output."
                )
                fix = f"layers={softmax}, those with a softmax, or Ablate(layers=[{site.layer}])."
                raise RecordingError(rule, type(item).__name__, fix, module=site.path, where=item.where)
            if item.positions and not read().begins:
                rule = "positions in a layer of linear attention must be those of one call, from the first token on."
                raise RecordingError(rule, "a state", "leave them out, or run without a cache.", module=site.path)
            out = changed
        return out

    def _with_intervention(
        self,
        number: int,
        item: Intervention,
        module: nn.Module,
        site: AttentionSite,
        change: Change,
        position: tuple[int, int],
    ) -> Change:
        """Return the change of an attention with one more intervention added.

        `position` holds the positions in the text of query 0 and key 0.
        """
        (query, key), (_, own, m, n) = position, change.matrix.weights.shape
        # A static cache has room for keys that no query has reached.
        known = {
            "queries": query + m,
            "keys": key + n if site.kind == "cross" else min(key + n, max(query + m, key + 1)),
        }
        for axis, reached in known.items():
            self._reached[number, axis] = max(self._reached.get((number, axis), 0), reached)
        first, count = heads_here(module, change.matrix)
        heads = item.selection.heads_of(site, self._attentions, count)
        # Of each chosen head that is here: its index in the matrix, its number, its place among the chosen ones.
        here = [(head - first, head, place) for place, head in enumerate(heads) if first <= head < first + own]
        if not here:
            return change
        indices, numbers, places = zip(*here, strict=True)
        made_without = None if self._parts is None else self._parts.made_without
        call = Call(site, indices, numbers, places, len(heads), query, key, made_without)
        shown = change.shown
        return change._replace(
            matrix=item.matrix(change.matrix, call),
            pool=item.pool(change.pool, call),
            shown=lambda A: item.shown(shown(A), call),
        )
