"""Masks under DeepSpeed's Ulysses, which hands over the whole text, some heads, and no mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attlas.errors import BackendError
from attlas.huggingface.ranks import world
from attlas.masks import Causal, Documents, Mask, Window

_CAUSAL = {"full_attention", "sliding_attention", None}


def mask_of_positions(module: nn.Module, query: Tensor, key: Tensor, given: dict[str, Any]) -> Mask:
    """Return the mask of a layer by its window and the positions of all tokens.

    Parameters
    ----------
    module : nn.Module
        The attention layer.
    query, key : Tensor, shape (batch, heads, n, d)
        Tokens of the whole text, and heads of one rank.
    given : dict
        What the layer passes on: ``position_ids`` of shape (1 or batch, n), which begin again with each document, and
        ``sliding_window``.

    Raises
    ------
    BackendError
        If these do not say what the mask is.
    """
    config, number, n = getattr(module, "config", None), getattr(module, "layer_idx", None), key.shape[2]
    layers = getattr(config, "layer_types", None)
    kind = layers[number] if layers and number is not None else None
    window = given.get("sliding_window", getattr(module, "sliding_window", None))
    if window is None and kind is None:
        window = getattr(config, "sliding_window", None)
    positions = given.get("position_ids")
    heads = query.shape[1] if world() > 1 else None
    for found, wrong in (
        ("a layer that is not causal", not getattr(module, "is_causal", False)),
        (f"a layer of {kind}", kind not in _CAUSAL or (kind == "sliding_attention" and window is None)),
        ("chunks", kind is None and getattr(config, "attention_chunk_size", None) is not None),
        (f"all {heads} heads, which it divides", heads == getattr(config, "num_attention_heads", 0)),
        (f"{query.shape[2]} queries and {n} keys", query.shape[2] != n),
        (f"no position_ids of {n} tokens", not isinstance(positions, Tensor) or positions.shape[-1] != n),
    ):
        if wrong:
            rule = "without a mask, a layer must be causal and have the positions of all tokens, as under Ulysses."
            fix = "attlas.distributed.context_parallel(mesh, model), which keeps the masks of the model."
            raise BackendError("attlas.huggingface", rule, {"layer": type(module).__name__}, found=found, fix=fix)
    positions = torch.as_tensor(positions).reshape(-1, n)
    document = (positions.diff(dim=1, prepend=positions[:, :1] - 1) != 1).cumsum(1)
    mask: Mask = Causal() if window is None else Window(window - 1, 0)
    return mask & Documents(document) if bool(document.any()) else mask
