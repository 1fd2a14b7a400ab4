"""Runs a model over a text once, whole or in chunks, and over the text that it generates."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from attlas.recording.hooks import AttentionCall


class ProgressListener:
    """Count the attentions that were read."""

    def __init__(self, tick: Callable[[], None]) -> None:
        self.tick = tick

    def on_attention(self, call: AttentionCall) -> None:
        """Take one matrix."""
        self.tick()


@torch.no_grad()
def run_model(model: Any, ids: Tensor, cache: Any = None, *, caches: bool = False) -> Any:
    """Run a model on some tokens; of its logits only the last are computed, where it can do so.

    Parameters
    ----------
    model : PreTrainedModel
        The model.
    ids : Tensor of int, shape (n,) or (batch, n)
        The tokens.
    cache : Cache, optional
        What the model kept of the tokens before.
    caches : bool
        Whether it keeps keys and values for tokens that follow.
    """
    parameters = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"use_cache": caches} if "use_cache" in parameters else {}
    if cache is not None:
        options["past_key_values"] = cache
    if "logits_to_keep" in parameters:
        options["logits_to_keep"] = 1
    return model(ids[None].to(model.device) if ids.ndim == 1 else ids.to(model.device), **options)


@torch.no_grad()
def read_and_generate(
    model: Any, ids: Tensor, chunk: int | None, more: int, pad: int, tick: Callable[[], None]
) -> Tensor:
    """Run a model over each token of a text once, in chunks, and over what it writes then; return all tokens.

    Parameters
    ----------
    model : PreTrainedModel
        A model that keeps keys and values; one that keeps none reads the text in unconnected pieces.
    ids : Tensor of int, shape (n,)
        The text.
    chunk : int, optional
        How many tokens are read together; all, by default.
    more : int
        How many tokens it writes, at most: always the most likely one.
    pad : int
        A token that stands for nothing.
    tick : callable
        Called for each token that it writes.

    Returns
    -------
    Tensor of int, shape (n to n + more,)
        The text, and what was written; the last token is read like all others.
    """
    cache, parts = None, list(ids.split(chunk or len(ids)))
    for part in parts[:-1] if more else parts:
        cache = getattr(run_model(model, part, cache, caches=True), "past_key_values", None)
    if not more:
        return ids
    prompt = ids[None].to(model.device)
    options = {} if cache is None else {"past_key_values": cache}
    counter = model.register_forward_hook(lambda *_: tick())  # each pass writes a token
    try:
        out = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=more,
            do_sample=False,
            num_beams=1,
            pad_token_id=pad,
            return_dict_in_generate=True,
            **options,
        )
    finally:
        counter.remove()
    # `generate` does not read its last token: this call does, so that it is recorded as well.
    run_model(model, out.sequences[:, -1:], getattr(out, "past_key_values", None), caches=True)
    tokens: Tensor = out.sequences[0].cpu()
    return tokens
