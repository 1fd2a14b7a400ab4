"""Runs a model as it is evaluated, and leaves it as it was."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from attlas.errors import DtypeError, ShapeError, kind


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode for the time of a ``with`` block; then each module is in the mode it was in."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training


@torch.no_grad()
def read(model: nn.Module, ids: Tensor) -> Any:
    """Return what a model gives for a text, shape (batch, n), without a cache; few logits, where it can do so."""
    parameters = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"use_cache": False} if "use_cache" in parameters else {}
    if "logits_to_keep" in parameters:
        options["logits_to_keep"] = 1
    device = next((p.device for p in model.parameters()), ids.device)
    return model(ids.to(device), **options)


def checked_ids(where: str, ids: Tensor, least: int) -> Tensor:
    """Return token ids of shape (batch, n), or raise an error where they are none or too few."""
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype is torch.bool:
        found = f"{ids.dtype}" if isinstance(ids, Tensor) else kind(ids)
        fix = "tokenizer(text, return_tensors='pt').input_ids"
        raise DtypeError(where, "ids must be a tensor of integers.", found=found, fix=fix)
    if ids.ndim not in (1, 2) or ids.shape[-1] < least:
        count = {2: "two", 3: "three"}[least]
        rule = f"ids must have the shape (n,) or (batch, n), with at least {count} tokens."
        raise ShapeError(where, rule, {"ids": ids}, found=f"shape {tuple(ids.shape)}", fix="ids[None]")
    return ids if ids.ndim == 2 else ids[None]
