"""`record()` follows a model while it runs and collects its attention in an Atlas."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from attlas.errors import ShapeError, public
from attlas.foundation.checks import instance_of, is_integer, refuse_context_parallel
from attlas.foundation.compat import in_backward, transforming
from attlas.matrix import AttentionMatrix
from attlas.matrix.handwritten import Scope
from attlas.matrix.sweep import SweptWeights
from attlas.recording import errors, metadata
from attlas.recording.atlas import Atlas
from attlas.recording.atlas.entry import statistic_names
from attlas.recording.atlas.images.inputs import FEATURES, PIXELS, RecordedImages
from attlas.recording.atlas.padding import real_queries
from attlas.recording.completion import Completion
from attlas.recording.copies import HostCopies
from attlas.recording.discovery import AttentionSite
from attlas.recording.disk import RecordingFolder, temporary_folder
from attlas.recording.gates import GateRecorder
from attlas.recording.handwritten import handwritten as attention_by_hand
from attlas.recording.hooks import AttentionCall, is_recording, offer
from attlas.recording.linear import telling_of_linear_calls
from attlas.recording.merging import can_merge
from attlas.recording.parallel import heads_here
from attlas.recording.parts.recorder import KeptRows, PartsRecorder, checked_parts, stored_rows
from attlas.recording.pipelines import denoiser_of
from attlas.recording.selection import Selection
from attlas.recording.sequence import PositionedCall, RetentionPolicy
from attlas.recording.sequences import RecordedSequences
from attlas.recording.text import RecordedText, count_beams, hidden_state
from attlas.recording.traced import Handler, Hooks, numbered
from attlas.recording.values import values_of_call
from attlas.stats import Statistic

Keep = Literal["device", "cpu", "disk", "statistics"]


@public("record()")
def record(
    model: Any,
    *,
    layers: Iterable[int | str] | int | str | None = None,
    heads: Any = None,
    statistics: Sequence[Statistic] = (),
    keep: Keep = "device",
    queries: slice | range | None = None,
    folder: str | Path | None = None,
    patch_sdpa: bool = False,
    tokens: Any = None,
    values: bool | Literal["norms"] = False,
    linear: bool = True,
    channels: slice | Sequence[int] | int | None = None,
    gates: bool = False,
    handwritten: bool = False,
    sum_passes: int = 0,
    images: Any = None,
    parts: bool | slice | Sequence[int] | Tensor = False,
) -> Recording:
    """Record what a model attends to, for the time of a ``with`` block.

    Parameters
    ----------
    model : nn.Module
        A model of transformers, which attends with attlas for the time of the block whatever it was on
        before; any module whose parts compute with `attlas.attention` or ``A @ v``; or, with `patch_sdpa`, any that
        calls torch's ``scaled_dot_product_attention``. A pipeline of diffusers stands for its UNet or transformer
        (or both transformers, by the names that they have in it), with `patch_sdpa`.
    layers : sequence of int or str, optional
        Which attentions: numbers of the model's layers (negative ones from its end), paths of modules or of
        what holds them, ``"cross.3"``, ``"cross"``. Of a module with several, ``"blocks.0.attn#0"`` is the first,
        ``"blocks.0.attn#1"`` the second. The default is all.
    heads : sequence of int, or mapping of layer to such, optional
        Which heads. A mapping alone also says which layers.
    statistics : sequence of Statistic
        Numbers that are computed in the forward pass, at once for all of a layer; where q and k stay on a GPU, those
        of the steps of a generation at the end of the text.
    keep : {"device", "cpu", "disk", "statistics"}, default "device"
        Where q, k and lse of each attention go: they stay, are moved to the CPU, are written to `folder`
        as the forward goes, or are dropped as soon as the statistics are known.
    queries : slice or range, optional
        Which queries, by their place in the text; negative ends of a slice count from the end of each
        call: ``slice(-32, None)`` records the last 32 of a prompt, and each token generated after it.
    folder : str or Path, optional
        Where ``keep="disk"`` writes the atlas; it must not exist yet. Without one, a temporary folder is
        used, which a warning names and which goes with the atlas.
    patch_sdpa : bool, default False
        Whether torch's ``scaled_dot_product_attention`` is caught, for models that call it themselves.
    tokens : list of str, or list of such, or tokenizer, optional
        Text of each token, or a list for each sequence of a batch; a tokenizer of transformers says it of the
        ids that the model was given. `Atlas.texts` has every sequence, `Atlas.tokens` the first.
    values : bool or "norms", default False
        Whether v is kept beside q and k, grouped heads as they are: ``entry.matrix @ entry.values`` is then the
        output of the heads, and `Entry.value_weighted` gives ``‖A_ij v_j‖`` and, where the model has an output
        projection, ``‖A_ij v_j W_O^h‖``. "norms" keeps what these two need and not v: one number per key and head.
    linear : bool, default True
        Whether layers of linear attention of transformers are recorded too: the gated delta rule (Qwen3-Next,
        Qwen3.5, Olmo-Hybrid), KDA (Kimi Linear, Bailing), Mamba-2 (Bamba, Falcon-H1, Nemotron-H, Zamba2) and lightning
        attention (MiniMax-01); and `GatedDelta` and `LinearAttention` of `attlas.nn`, or a module of yours that calls
        `attlas.recording.pooled` with such a matrix. Their matrices are those of `attlas.transport`; statistics that
        they do not have, such as the entropy, are left out.
    channels : sequence of int, range, slice or int, optional
        Which channels of layers that have one matrix for each channel, and not for each head: Mamba-1 (Mamba,
        FalconMamba, Jamba, Zamba), RG-LRU (RecurrentGemma) and RWKV-4. They are the heads of the entry, with the
        numbers that they have in the layer; ``slice(None)`` is all. The default is none: a layer may have thousands,
        and `Atlas.unrecorded` then names it.
    gates : bool, default False
        Whether the output gates are recorded, with ``values=True``: `Entry.gated` is then the matrix that reaches the
        output projection. They are measured: what enters the projection, divided by ``A @ v``.
    handwritten : bool, default False
        Whether attention that the model writes out by hand is recorded too, ``softmax(q @ k.mT + mask) @ v``: it is
        lazy for the time of the block, as in `attlas.lazily`. ``attlas.explain(atlas)`` says what of it was computed
        densely. Calls of torch's ``scaled_dot_product_attention`` are caught as well.
    sum_passes : int, default 0
        With 1, and ``keep="statistics"``, the statistics of all passes of an attention are added up while they are
        recorded, such as those of the steps of a diffusion model; with 2, those of every other pass, where a step has
        two passes. With 0, each pass is an entry.
    images : sequence of pictures, or picture, optional
        The pictures that the model is shown, in their order in the text: PIL images, or arrays of shape (height, width,
        3). `Atlas.images` keeps them, at most 1,024 pixels a side, and `Atlas.image_map` draws weights over them. Where
        the processor cuts a picture, as that of CLIP does, give what it leaves.
    parts : bool, slice, Tensor or sequence of int, default False
        Whether what `attlas.heads.explain` needs is kept: what each layer added to the residual stream, and how each
        attention reads it. True keeps all rows, positions in the text only these rows. It keeps v, too.

    Returns
    -------
    Recording
        A context manager that gives an `Atlas`, complete when the block ends.

    Raises
    ------
    DtypeError
        If `model` is no module, or a statistic, layer or head is of a wrong type.
    ShapeError
        If `keep` or `queries` cannot be used, or settings do not fit together.
    OutOfRangeError
        If the model has no such layer; in the forward pass, if a layer has no such head.
    RecordingError
        In the block, if the model computes all its attentions by itself or does not run, or if the number of a layer
        is known only when the model has run.

    Warns
    -----
    UserWarning
        If some of the model's attentions ran and could not be recorded; they are named.

    See Also
    --------
    attlas.load : an atlas that was saved.

    Notes
    -----
    Generation (and a prompt read in chunks) is one entry for each attention: the queries of all steps, and
    the final keys once. A call goes on with an entry if its keys begin with those kept, bit for bit; a
    reordered beam begins a new one, and so does every new text. Where a score looks at places, such as the
    position bias of T5, each call is an entry. Statistics of the steps are joined where that is exact:
    numbers of rows, column mass and maximum, diagonals. With others, pictures for instance, each step is
    an entry if only statistics are kept; else they are computed from the whole at the end.

    Of what modules compute with attlas, an attention is a product of a matrix with values (`attlas.attention`,
    ``A @ v``, the same by `torch.matmul` or `torch.einsum`), before dropout, under the name of the innermost module
    that runs. Products of one matrix with several values are one attention, whose values are the first; each other
    matrix is one more, ``"blocks.0.attn#1"``. ``A.mT @ x``, reads, statistics and functions of the weights are none,
    and neither are matrices of DTensors. `pooled` and `offer` say more: positions in a text, or weights that are
    multiplied by other means. A matrix without heads or batch gets axes of size 1.

    A layer has the number of its place in the model's list of layers, whether every layer attends or, in a hybrid
    model, every fourth; `Atlas.missing_layers` says which are not there. Lists of the same kind are counted one after
    the other, an encoder apart from its decoder. A module that is used for several layers (ALBERT) gives one layer for
    each use in a pass. One that is called several times within its own forward (windows of an image) gives as many
    passes of one layer. What gradient checkpointing computes again in the backward pass is not recorded again. All is
    detached.

    Batches with padding: the 2-D ``attention_mask`` of each call (``decoder_attention_mask`` for a decoder) says
    which queries are tokens, `Entry.query_mask`; means and scores leave the others out.

    Where layers have a softmax and a linear attention side by side (Falcon-H1, Zamba2), both have the number of their
    layer, and all linear ones of the model are of the kind "linear": ``atlas[3]`` and ``atlas["linear.3"]``.

    A recording belongs to the thread that entered it; recordings may be nested, and each gets everything.

    An ``nn.MultiheadAttention`` that is asked for its weights is recorded without `patch_sdpa`: its queries and keys
    are computed once more. A pooling head, which asks with learned queries, is of the kind "cross".

    Under tensor parallelism each process records the heads that it has, by their numbers in the whole layer; a
    process that has none of the chosen heads has no entry of that layer. `attlas.distributed.save` writes the parts of
    all processes as one atlas. torch's ``context_parallel`` is refused.

    A model of transformers on torch.compile is recorded in one graph, by operators, which give copies of q and k, and
    of v where values are kept. Its log-sum-exp and statistics are one more pass over each matrix. With `patch_sdpa`,
    with interventions and in modules that compute with attlas, the graph breaks at each attention.

    Cost: nothing but the statistics' pass over each matrix; a step of a generation compares the keys before it, once,
    and no other work of it grows with what is recorded. A GPU is waited for once a pass, and once for each call of a
    layer of linear attention, whose state is compared. Memory: q, k and lse, unless they are dropped or written; then
    one layer at a time. Queries, keys and gates of linear layers are kept until the end: of a channel of Mamba-1, one
    number for each token and each number of its state. Parts: what each MLP and the embeddings returned, and what
    enters each output projection, so 2 · layers · n · hidden numbers in the dtype of the model (2 MB for each thousand
    tokens of the shipped model, 8 GiB for 16,384 tokens of 32 layers of 4,096 in bfloat16), a number for each norm and
    token, and nothing of the size of n · heads · hidden. The time is that of a few passes over these numbers.

    Examples
    --------
    >>> import torch, attlas
    >>> from torch import nn
    >>> from attlas import stats
    >>> from attlas.recording import record
    >>> layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    >>> model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    >>> with record(model, patch_sdpa=True, statistics=[stats.Entropy()]) as atlas:
    ...     output = model(torch.randn(1, 10, 32))
    >>> len(atlas), atlas[1].shape
    (2, torch.Size([1, 4, 10, 10]))
    >>> atlas.entry(0).statistics["entropy"].shape
    torch.Size([1, 4, 10])
    """
    fix = "attlas.record(model), the model itself: pipe.model of a pipeline."
    if not isinstance(model, nn.Module) and (denoiser := denoiser_of(model)) is not None:
        model, patch_sdpa = denoiser, True
    instance_of("model", model, nn.Module, "an nn.Module", fix)
    if sum_passes != 0 and (not is_integer(sum_passes) or sum_passes < 0 or keep != "statistics"):
        rule = 'sum_passes must be a number of passes, 0 or more, and belongs to keep="statistics".'
        found = f"sum_passes = {sum_passes!r}, keep = {keep!r}"
        raise ShapeError(rule, found, 'sum_passes=1, keep="statistics", statistics=[stats.KeyMaps([2, 5])]')
    if keep not in get_args(Keep):
        names = ", ".join(f'"{name}"' for name in get_args(Keep))
        raise ShapeError(f"keep must be one of {names}.", f"keep = {keep!r}", 'keep="cpu"')
    if isinstance(statistics, Statistic):
        statistics = (statistics,)
    if not statistic_names(statistics) and keep == "statistics":  # which checks that each is a Statistic, too
        fix = "statistics=[stats.Entropy(), stats.ColumnMass()]"
        raise ShapeError('keep="statistics" keeps nothing but statistics.', "no statistic", fix)
    if values not in (False, True, "norms") or (values and keep == "statistics"):
        rule = 'values must be False, True or "norms", and belong to recorded queries and keys.'
        raise ShapeError(rule, f"values = {values!r}, keep = {keep!r}", 'values=True, keep="disk"')
    if folder is not None and keep != "disk":
        fix = 'keep="disk", or atlas.save(folder) after the block.'
        raise ShapeError('a folder is written by keep="disk" only.', f"folder = {str(folder)!r}, keep = {keep!r}", fix)
    selection = Selection(layers, heads, queries, channels=channels)
    path = None if folder is None else Path(folder)
    metadata.check_tokens(tokens)
    if gates not in (False, True) or (gates and (values is not True or keep == "disk" or queries is not None)):
        rule = 'gates are measured of whole texts whose values are kept, and keep="disk" writes entries before that.'
        found = f"gates = {gates!r}, values = {values!r}, keep = {keep!r}, queries = {queries!r}"
        raise ShapeError(rule, found, 'gates=True, values=True, keep="cpu", without queries; then atlas.save(folder)')
    if channels is not None and not linear:
        raise ShapeError("channels belong to layers of linear attention.", "linear=False", "leave out linear.")
    for name, flag in (("linear", linear), ("handwritten", handwritten)):
        if not isinstance(flag, bool):
            raise ShapeError(f"{name} must be True or False.", f"{name} = {flag!r}", f"{name}=False")
    rows, values = (None, values) if parts is False else checked_parts(parts, values, keep, queries)
    recording = Recording(
        model, selection, tuple(statistics), keep, path, patch_sdpa, tokens, values, linear, gates, handwritten,
        sum_passes, rows,
    )  # fmt: skip
    if images is not None:
        recording.atlas.images = recording.images().shown(images)
    return recording


class Recording(Completion, AbstractContextManager[Atlas]):
    """A recording of one model; made by `record`, entered once.

    See Also
    --------
    record : makes one.

    Examples
    --------
    >>> from torch import nn
    >>> from attlas.recording import Recording, record
    >>> isinstance(record(nn.MultiheadAttention(8, 2)), Recording)
    True
    """

    def __init__(
        self,
        model: nn.Module,
        selection: Selection,
        statistics: tuple[Statistic, ...],
        keep: str,
        folder: Path | None,
        patch_sdpa: bool,
        tokens: Any,
        values: bool | Literal["norms"],
        linear: bool = True,
        gates: bool = False,
        handwritten: bool = False,
        sum_passes: int = 0,
        parts: KeptRows | None = None,
    ) -> None:
        # The arguments are those of `record`, checked; `is_lazy` and `_scope` are for attention written out by hand.
        patched, channels = patch_sdpa or handwritten, bool(selection.channels)
        super().__init__(model, (selection,), patch_sdpa=patched, linear=linear, channels=channels)
        self.is_lazy = handwritten
        self._scope = Scope(model, lambda: self._passes.innermost, self._record_offered) if handwritten else None
        self._values = values
        self.takes_values = bool(values)
        self._selection = selection
        self._tokens = tokens
        self._keep = keep
        self._folder = folder
        device = torch.device("cpu") if keep in ("cpu", "disk") else None
        copies = None if device is None else HostCopies()
        self._policy = RetentionPolicy(statistics, tokens=keep != "statistics", device=device, copies=copies)
        self._gates: GateRecorder | None = None
        if gates:
            sites = [site for site in self._attentions.sites.values() if selection.includes(site, self._attentions)]
            self._gates = GateRecorder(model, sites, device)
        if parts is not None:
            self._parts = PartsRecorder(model, self._attentions, lambda t: stored_rows(t, self._policy), parts)
        self._hears_linear = linear
        # Of other statistics, not each step is asked; of some layers, heads or queries, not the matrix that multiplies.
        whole = (selection.layers, selection.heads, selection.queries) == (None, None, None)
        self.announced = statistics if whole and all(map(can_merge, statistics)) else ()
        self._known_heads: dict[tuple[str, int, int, int], tuple[int, int]] = {}  # by path and sizes
        self._heads_elsewhere = False  # whether another process has all chosen heads of a layer
        self._padding_masks: dict[str, Tensor] = {}
        # Of the running pass: which queries are tokens, by mask, place and sizes, and the mask itself.
        self._query_masks: dict[tuple[Any, ...], tuple[Any, Tensor | None]] = {}
        self._texts = {"self": RecordedText(), "encoder": RecordedText()}
        self._encoder = metadata.encoder_of(model)  # generate() runs it by itself and gives its output to each pass
        self._encoding = False  # whether it runs so
        self._encoded: Tensor | None = None  # the output of its last run by itself,
        self._encoded_ids: Tensor | None = None  # and what it read
        self._given: Tensor | None = None  # the output of an encoder that the running pass was given
        # Whether the running pass does not go on from the tokens of the pass before; on a device, a boolean on it.
        self._restarted: bool | Tensor = False
        self._first_calls: dict[str, int] = {}  # by path: the number of the first entry that is about the text
        self._without_text: set[str] = set()  # paths of attentions that are about no text
        self.atlas = Atlas(model=metadata.model_name(model), details=metadata.model_details(model, keep))
        self._sums_passes = bool(sum_passes)
        self._sequences = RecordedSequences(self.atlas.entries, copies, sum_passes)
        self._images: RecordedImages | None = None  # of a model that was given some

    def images(self) -> RecordedImages:
        """Follow the images that the model is given, from the first on."""
        self._images = self._images or RecordedImages()
        return self._images

    def __enter__(self) -> Atlas:
        # Open all that the settings ask for, and follow the model; if one fails, the others are closed.
        fix = "with attlas.record(model) as atlas: each time anew, or with recording.resumed() as atlas: to go on."
        self._enter_once("a recording", fix)
        self._ended = None
        with ExitStack() as stack:
            if self._keep == "disk":
                disk = stack.enter_context(RecordingFolder(self._folder or temporary_folder(self.atlas)))
                self._policy = replace(self._policy, disk=disk)
            if self._encoder is not None:
                stack.enter_context(numbered([self._encoder]))
            if functions := self._attentions.linear_functions:
                stack.enter_context(telling_of_linear_calls(functions, self.on_linear))
            if hasattr(self._model, FEATURES):
                stack.enter_context(self.images().heard(self._model, lambda: self._hears_encoder))
            if self._scope is not None:
                stack.enter_context(attention_by_hand(self._scope))
            self._follow_model(stack)
        return self.atlas

    @property
    def _hears_encoder(self) -> bool:
        """Whether a call of the encoder is followed: it is, outside of the passes of the model."""
        return is_recording(self) and not self._passes.inside

    def _record_offered(self, matrix: AttentionMatrix) -> None:
        """Record weights that are written out by the module that runs."""
        module = self._passes.innermost
        if module is not None:
            offer(module, matrix)

    def _extra_handlers(self) -> dict[str, Handler]:
        return {"begin encoder": self._begin_encoder, "end encoder": self._end_encoder, "gate": self._hear_gate,
                "begin part": self._begin_part, "end part": self._end_part}  # fmt: skip

    def _hear_gate(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """Keep the input of an output projection, from which gates are measured."""
        if self._gates is not None and args and is_recording(self) and not in_backward():
            self._gates.hear(module, args[0])

    def _add_hooks(self, hooks: Hooks) -> None:
        """Add the hooks of gates and of an encoder."""
        if self._gates is not None:
            hooks.add(self._gates.modules, "gate", "before")
            self._hooks = hooks
        if self._parts is not None:
            self._parts.add_hooks(hooks)
        if self._encoder is not None:
            hooks.add([self._encoder], "begin encoder", "before")
            hooks.add([self._encoder], "end encoder", "after", always=True)

    # ------------------------------------------------------------------------------------------------- passes

    def _begin_pass(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a pass: note its token ids, its padding, and the output of an encoder that it was given."""
        super()._begin_pass(args, kwargs)
        self._sequences.decide()  # of a pass that raised an error
        ids, self._padding_masks, arguments = metadata.text_inputs(self._model, args, kwargs)
        if not PIXELS.isdisjoint(arguments):
            self.images().hear(arguments)
        self._query_masks, self._first_of_state = {}, None
        if self._parts is not None:
            self._parts.begin_pass()
        self._restarted, self._given = False, hidden_state(kwargs.get("encoder_outputs"))
        for name, text in self._texts.items():
            text.begin(ids.get(name))

    def _begin_encoder(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a run of the encoder that is no part of a pass."""
        if not self._hears_encoder or in_backward():
            return
        ids, masks, _ = metadata.text_inputs(module, args, kwargs)
        self._encoding, self._encoded = True, None
        self._padding_masks, self._query_masks = {"encoder": masks["self"]} if "self" in masks else {}, {}
        self._texts["encoder"].begin(ids.get("self"))

    def _end_encoder(self, module: nn.Module, args: Any, output: Any) -> None:
        """End a run of the encoder that is no part of a pass; `output` is None after an error.

        If it has read another text, the entries so far are not about it: the first of each attention that is, is noted.
        """
        if not self._encoding or not is_recording(self):
            return
        self._encoding, self._padding_masks, self._query_masks = False, {}, {}
        if output is None:
            return
        text = self._texts["encoder"]
        changed = text.end(self._sequences.decide(text.questions()))
        self._encoded, self._encoded_ids = hidden_state(output), self._texts["encoder"].ids
        if changed:
            # This run has begun the last entry of the encoder; that of cross-attention is still of the text before.
            self._first_calls |= {
                key[0]: sequence.number + (sequence.site.kind == "cross")
                for key, sequence in self._sequences.last.items()
                if sequence.site.kind != "self"
            }

    def _end_pass(self) -> None:
        """End a pass: find the text of the encoder, and note the first entries of each text that began with it."""
        super()._end_pass()
        if self._parts is not None:
            with public(self.where):
                self._parts.end_pass()
        beams, is_repeated = count_beams(self._encoded, self._given)
        asked, text_of_encoder = self._texts["self"].questions(), self._texts["encoder"]
        found = self._sequences.decide([*asked, *text_of_encoder.questions(), is_repeated])
        answers = {"self": found[: len(asked)], "encoder": found[len(asked) : -1]}
        if not any(site.kind == "encoder" for site in self._visits.values()):
            # What the encoder read for the output that the pass was given: `generate` repeats that for each beam.
            ids = self._encoded_ids if beams and bool(found[-1]) else None
            text_of_encoder.begin(None if ids is None else ids.repeat_interleave(beams, dim=0))
            answers["encoder"] = text_of_encoder.questions()
        for name, text in self._texts.items():
            ended = text.end(answers[name])
            if ended:
                self._begin_entries_of(name)
            if name == "self" and self._images is not None:
                self._images.end(ended or text.ids is None)
        self._padding_masks, self._query_masks = {}, {}  # an encoder that runs by itself has another text

    def _begin_entries_of(self, name: str) -> None:
        """Note that entries before those of this pass are of another text than the one now in ``_texts[name]``."""
        unrelated_kind = "self" if name == "encoder" else "encoder"  # cross-attention is about both texts
        for (path, occurrence), site in self._visits.items():
            if site.kind != unrelated_kind and (path, occurrence) in self._sequences.last:
                self._first_calls[path] = self._sequences.last[path, occurrence].number
            elif name == "self" and self._linear is not None and self._linear.number_of(path, occurrence):
                self._first_calls[path] = self._linear.number_of(path, occurrence)

    # ------------------------------------------------------------------------------------------------ matrices

    @public()
    def on_attention(self, call: AttentionCall) -> None:
        """Record the chosen heads and queries of one attention of the model; nothing in a backward pass."""
        if in_backward():
            return
        refuse_context_parallel()
        if transforming():
            raise errors.inside_transform(call.module)
        if isinstance(call.matrix.weights, SweptWeights):
            self._hear_swept(call)
            return
        site = self._site_of_module(call.module, call.number)
        positioned = None if site is None else self._call_with_position(site, call)
        if self._parts is not None and site is not None and self._passes.inside:
            self._parts.attend(
                call, site, self._positions_of_first(site, call.matrix, call.first_query, call.first_key)[0]
            )
        if site is None or positioned is None or not self._selection.includes(site, self._attentions):
            return
        if self._gates is not None:
            self._hooks.add(self._gates.add(site), "gate", "before")
        with torch.no_grad():
            matrix = call.matrix
            first, count = self._heads_here(site, call)
            here = range(first, first + matrix.weights.shape[1])
            chosen = self._selection.heads_of(site, self._attentions, count)
            heads = tuple([head for head in chosen if head in here])
            if len(heads) < len(chosen):
                self._mark_divided()
            if not heads:
                self._heads_elsewhere = True
                return
            if len(heads) != len(here):
                positioned = replace(positioned, matrix=matrix[:, [head - first for head in heads]])
            if self._values:
                positioned = replace(
                    positioned,
                    values=values_of_call(
                        self._model, site.path, site.module, call.values, heads, count, here, whole=self._values is True
                    ),
                )
            key = (site.path, self._passes.occurrence(site.path))
            begins = self._sums_passes or (positioned.cross and self._restarted)
            self._sequences.add(key, site, heads, self._policy, positioned, begins=begins, may_wait=self._passes.inside)

    def _heads_here(self, site: AttentionSite, call: AttentionCall) -> tuple[int, int]:
        """Return `heads_here` of a call; cached, since it looks through the parameters of the layer."""
        weights = call.matrix.weights
        key = (site.path, weights.shape[1], weights.key_heads, weights.queries.shape[-1])
        if key not in self._known_heads:
            self._known_heads[key] = heads_here(call.module, call.matrix)
        return self._known_heads[key]

    def _call_with_position(self, site: AttentionSite, call: AttentionCall) -> PositionedCall | None:
        """Return a call with its position in the text; None where none of its queries is recorded."""
        matrix, cross = call.matrix, site.kind == "cross"
        first_query, first_key = self._positions_of_first(site, matrix, call.first_query, call.first_key)
        known, (m, n) = self._first_of_state, matrix.weights.shape[2:]
        if known is not None and site.kind == "self" and not first_key and n == known + m:
            first_query = known  # caches of such models may not know how many tokens they hold
        text, inside = self._texts["self" if cross else site.kind], self._passes.inside
        if inside and not cross:
            restarted = text.read(matrix.problem, first_query, first_key)
            self._restarted = self._restarted | restarted if site.kind == "self" else self._restarted
        # An attention that runs outside a pass, and outside a run of the encoder, cannot be about a text that is known.
        reads = inside or (self._encoding and site.kind == "encoder")
        if not (text.is_about(matrix.weights.shape) if reads else text.ids is None):
            self._without_text.add(site.path)
        rows = self._selection.rows(first_query, matrix.weights.shape[2])
        if not len(rows):
            return None
        query_mask = self._query_mask(site, matrix, first_query, first_key)
        keeps_all_keys = call.first_query is None
        return PositionedCall(matrix, rows, first_query, first_key, cross, query_mask, keeps_all_keys=keeps_all_keys)

    def _query_mask(
        self, site: AttentionSite, matrix: AttentionMatrix, first_query: int, first_key: int
    ) -> Tensor | None:
        """Return which queries are tokens; it is computed once for all layers of a pass that share their mask."""
        mask = matrix.mask
        key = (site.kind, id(mask), first_query, first_key, *matrix.weights.shape)
        if key not in self._query_masks:
            given, cross = self._padding_masks.get(site.kind), site.kind == "cross"
            self._query_masks[key] = mask, real_queries(matrix, given, first_query, first_key, cross=cross)
        return self._query_masks[key][1]

    def _mark_divided(self) -> None:
        """Note that other processes have further heads; refuse to write a folder, which would look complete."""
        self.atlas.divided = True
        if self._folder is not None:
            raise errors.part_of_heads(self._folder)
