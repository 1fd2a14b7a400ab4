"""Hears ``nn.MultiheadAttention`` that is asked for its weights, which it computes without torch's function."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from torch import Tensor, nn

from attlas.recording.hooks import is_recording, uncompiled
from attlas.recording.patch import answered

_is_answering: ContextVar[bool] = ContextVar("attlas_answering", default=False)


def torch_layers(model: nn.Module) -> list[nn.MultiheadAttention]:
    """Return the layers of torch in a model that attend as torch's class says."""
    return [
        module
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention) and type(module).forward is nn.MultiheadAttention.forward
    ]


def is_answering() -> bool:
    """Return whether a layer of torch computes the weights that it was asked for."""
    return _is_answering.get()


@contextmanager
def asked_for_weights(layers: list[nn.MultiheadAttention]) -> Iterator[None]:
    """Let layers of torch pass their matrix to recordings where they are asked for weights, for the time of a block.

    Notes
    -----
    The layer computes what it returns as before, and its queries and keys once more, to be heard. Only where
    interventions change it, its output and its weights come from the changed matrix; these weights are those before
    dropout.
    """
    before = [(layer, vars(layer).get("forward")) for layer in layers]
    try:
        for layer in layers:
            vars(layer)["forward"] = _replacement_forward(layer.forward)
        yield
    finally:
        for layer, forward in reversed(before):
            if forward is None:
                vars(layer).pop("forward", None)
            else:
                vars(layer)["forward"] = forward


def _replacement_forward(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward that replaces `attend`, that of a layer: `_layer_output` takes the calls that want weights.

    Without weights a layer calls torch's function for attention, where recordings hear it.
    """
    answer = uncompiled(partial(_layer_output, attend))

    def forward(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> Any:
        """Return what the layer returns; a call that wants weights goes by way of `answer`, and is heard."""
        run = answer if need_weights else attend
        return run(query, key, value, key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal)

    return forward


def _layer_output(
    attend: Callable[..., Any],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    padding: Tensor | None,
    need_weights: bool,
    mask: Tensor | None,
    average: bool,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    """Return the output of the layer, and offer its matrix to recordings."""
    ask = partial(attend, query, key, value, padding)
    if not is_recording() or _is_answering.get():  # another recording of the same layer hears it
        return ask(need_weights, mask, average, is_causal)  # type: ignore[no-any-return]  # as torch says
    token = _is_answering.set(True)
    try:
        return answered(
            lambda weights: ask(weights, mask, average, is_causal), average=average, batched=query.ndim == 3
        )
    finally:
        _is_answering.reset(token)
