"""Run a model over texts, and measure every head of every layer while it runs."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from attlas.corpus.measuring import TextIndex, TextNumbers, measure_layer, pool_and_measure
from attlas.errors import AttlasError, RecordingError
from attlas.foundation.reasons import in_one_line
from attlas.heads.classification import measure_block, repeated_block
from attlas.heads.evaluation import evaluating, vocabulary_size
from attlas.matrix import AttentionMatrix
from attlas.recording.atlas.tensors import fingerprint as checksum
from attlas.recording.attn_implementation import attending_with_attlas
from attlas.recording.discovery import ModelAttentions
from attlas.recording.hooks import AttentionCall, Change, is_changing, is_recording, subscribed
from attlas.recording.metadata import model_name
from attlas.recording.module_call import ModuleCall
from attlas.recording.passes import Passes
from attlas.recording.patch import patched_sdpa

_BLOCK_PERIOD, _BLOCK_COUNT = 128, 4


def fingerprint(model: nn.Module) -> str:
    """Return a text that tells models apart: their configuration and their weights."""
    total = hashlib.sha256(json.dumps(_config_of_model(model).get("all", {}), sort_keys=True, default=str).encode())
    for name, weight in model.named_parameters():
        total.update(f"{name} {tuple(weight.shape)} {checksum(weight.detach())}".encode())
    return total.hexdigest()[:16]


def _config_of_model(model: nn.Module) -> dict[str, Any]:
    """Return the configuration of a model of transformers, as plain data ("all") and of its text part ("text")."""
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "get_text_config"):
        return {}
    plain = {k: v for k, v in config.to_dict().items() if not k.startswith("_") and k != "transformers_version"}
    return {"all": plain, "text": config.get_text_config()}


def model_facts(model: nn.Module) -> dict[str, Any]:
    """Return the facts of a model that are known before it runs: a dictionary for JSON."""
    config = getattr(model, "config", None)
    text = _config_of_model(model).get("text")
    weight = next(model.parameters(), None)
    return {
        "name": model_name(model).rstrip("/").split("/")[-1],
        "path": str(getattr(config, "name_or_path", "") or "") or None,
        "type": getattr(config, "model_type", None) or type(model).__name__,
        "class": type(model).__name__,
        "fingerprint": fingerprint(model),
        "dtype": "float32" if weight is None else str(weight.dtype).removeprefix("torch."),
        "context": getattr(text, "max_position_embeddings", None),
        "vocabulary": vocabulary_size(model),
    }


#: Takes the path, the matrix and the values of a self-attention, and returns the output; without values nothing.
_TakeAttention = Callable[[str, AttentionMatrix, Tensor | None], Tensor | None]


class _AttentionListener:
    """Passes each self-attention of a forward pass to a function."""

    def __init__(self, attentions: ModelAttentions) -> None:
        self.attentions = attentions
        self.take: _TakeAttention | None = None  # called with each attention; None: nothing is measured now
        self.passes: Passes | None = None

    def running(self, module: nn.Module | None = None) -> ModuleCall | None:
        """Return the innermost call of a module that runs."""
        return None if self.passes is None else self.passes.running(module)

    def path_of(self, module: nn.Module, number: int) -> str | None:
        """Return the path of an attention of a module that is measured now."""
        site = None if self.take is None else self.attentions.site(module, number)
        return None if site is None or site.kind == "cross" else site.path

    def on_attention(self, call: AttentionCall) -> None:
        """Take one matrix."""
        path = self.path_of(call.module, call.number)
        if self.take is not None and path is not None:
            # Without values there is no output to return: it measures the matrix.
            self.take(path, call.matrix, None)


class _PoolingListener(_AttentionListener):
    """Lets the function compute the output, too, so that both come from one pass over the matrix."""

    def change(self, module: nn.Module, change: Change, first_query: Any, first_key: Any) -> Change:
        """Return the change in which the function pools the values, if it listens to this attention."""
        path, take = self.path_of(module, change.number), self.take
        if take is None or path is None or change.repeated:
            return change
        return change._replace(pool=lambda matrix, values: cast(Tensor, take(path, matrix, values)))


class ModelReader:
    """Runs a model over batches of texts, and measures each attention as it comes.

    Parameters
    ----------
    model : nn.Module
        A model of transformers, any that computes with `attlas.attention`, or, with `patch_sdpa`, any that calls
        torch's attention.
    patch_sdpa : bool
        Whether torch's ``scaled_dot_product_attention`` is caught.
    """

    def __init__(self, model: nn.Module, *, patch_sdpa: bool = False) -> None:
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            rule = "the model must read one text; an encoder with a decoder reads two."
            raise RecordingError(rule, type(model).__name__, "give its encoder: model.get_encoder().", where="corpus()")
        self.model, self._patch = model, patch_sdpa
        self._attentions = ModelAttentions(model, patched=patch_sdpa)
        self._listener = _AttentionListener(self._attentions)
        self.paths: list[str] = []
        self.widths: list[int] = []
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        known = inspect.signature(model.forward).parameters
        self._given: dict[str, Any] = {"use_cache": False} if "use_cache" in known else {}
        if "logits_to_keep" in known:
            self._given["logits_to_keep"] = 1  # nobody reads the logits

    @contextmanager
    def running(self) -> Iterator[ModelReader]:
        """Let the model attend with attlas, for the time of a ``with`` block."""
        with ExitStack() as stack:
            stack.enter_context(evaluating(self.model))
            stack.enter_context(attending_with_attlas(self.model))
            # An intervention pools the values in its own way: the output cannot come from the pass that measures.
            self._listener = (_AttentionListener if is_changing() else _PoolingListener)(self._attentions)
            watched = list(self.model.named_modules()) if self._patch else self._attentions.watched()
            passes = self._listener.passes = Passes(self.model, watched, lambda: is_recording(self._listener))
            stack.enter_context(subscribed(self._listener))
            stack.enter_context(passes.followed())
            if self._patch:
                stack.enter_context(patched_sdpa(lambda: passes.innermost if is_recording(self._listener) else None))
            yield self

    @property
    def heads(self) -> list[tuple[int, int]]:
        """Layer and number of each head, once the block was read."""
        found = [re.search(r"\.(\d+)(\.|$)", path) for path in self.paths]  # "h.3.attn" is of layer 3
        layers = [int(one[1]) for one in found if one is not None]
        if len({*layers}) != len(self.paths):  # a module that is used again, or an encoder beside another
            layers = list(range(len(self.paths)))
        return [(layer, head) for layer, width in zip(layers, self.widths, strict=True) for head in range(width)]

    @property
    def modules(self) -> list[str]:
        """Path of the module of each head."""
        return [path for path, width in zip(self.paths, self.widths, strict=True) for _ in range(width)]

    def read(self, texts: Sequence[NDArray[np.int64]]) -> list[list[TextNumbers] | str]:
        """Return the numbers of each layer on each text, or the reason why the text failed."""
        found: list[list[TextNumbers] | str] = []
        for _, run in groupby(texts, key=len):  # of one length: nothing has to be filled up
            same = list(run)
            try:
                found += self._numbers_of_texts(same)
            except Exception as error:  # noqa: BLE001 - a text that fails is named, and the run goes on
                found += self.read(same[:1]) + self.read(same[1:]) if len(same) > 1 else [_reason_of_failure(error)]
        return found

    def _numbers_of_texts(self, texts: Sequence[NDArray[np.int64]]) -> list[list[TextNumbers] | str]:
        """Return the numbers of each layer for each text, from one pass of texts of one length.

        Raises a RecordingError where other layers attend than in the first pass.
        """
        ids = torch.from_numpy(np.stack(texts))
        layers: list[tuple[str, list[TextNumbers]]] = []
        indices = [TextIndex(row) for row in texts]

        def take(path: str, A: AttentionMatrix, values: Tensor | None) -> Tensor | None:
            """Measure one attention; return its output too where it is given values."""
            out: Tensor | None = None
            if values is None:
                numbers = measure_layer(A, ids, indices)
            else:
                out, numbers = pool_and_measure(A, values, ids, indices)
            layers.append((path, numbers))
            return out

        self._run_model(ids, take)
        paths, widths = [path for path, _ in layers], [len(texts[0].sums) for _, texts in layers]
        if (paths, widths) != (self.paths, self.widths):
            rule, fix = "each text must pass the same layers.", "a model whose layers are the same for every text."
            raise RecordingError(rule, f"{len(paths)} layers, {len(self.paths)} before", fix, where="corpus()")
        return [[numbers[b] for _, numbers in layers] for b in range(len(texts))]

    @torch.no_grad()
    def _run_model(self, ids: Tensor, take: _TakeAttention) -> None:
        """Run the model on ids of shape (batch, n) while `take` gets each of its attentions."""
        self._listener.take = take
        try:
            self.model(ids.to(self._device), **self._given)
        finally:
            self._listener.take = None

    def block(self, vocabulary: int, context: int | None) -> NDArray[np.float64]:
        """Return the scores on a random block that occurs twice, shape (heads, 2): induction and duplicate.

        This pass comes first, and finds the layers.

        Raises
        ------
        RecordingError
            If no attention of the model is heard.
        """
        period = min(_BLOCK_PERIOD, (context or 2 * _BLOCK_PERIOD) // 2)
        found: list[Tensor] = []

        def take(path: str, A: AttentionMatrix, values: Tensor | None) -> Tensor | None:
            """Measure one attention on the random block; return its output too where it is given values."""
            out = None if values is None else A @ values
            scores = measure_block(A, period)
            found.append(torch.stack([scores["induction"], scores["duplicate"]], dim=-1).cpu().double())
            self.paths.append(path)
            self.widths.append(len(found[-1]))
            return out

        self._run_model(repeated_block(vocabulary, period, _BLOCK_COUNT), take)
        if not found:
            rule = "the model must take its attention from the interface of transformers, or from attlas."
            fix = "attlas.corpus(..., patch_sdpa=True), where it calls scaled_dot_product_attention."
            raise RecordingError(rule, f"{type(self.model).__name__} computes it itself", fix, where="corpus()")
        return torch.cat(found).numpy()


def _reason_of_failure(error: Exception) -> str:
    """Return in one line why a text failed."""
    if isinstance(error, AttlasError):
        return f"{error.rule} found: {error.found}" if error.found else error.rule
    return in_one_line(error)
