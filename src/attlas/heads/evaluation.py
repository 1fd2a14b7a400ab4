"""Runs a model as it is evaluated, and leaves it as it was."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
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
    """Return the output of a model for texts, shape (batch, n), without a cache and with few logits where it can."""
    parameters = inspect.signature(model.forward).parameters
    options: dict[str, Any] = {"use_cache": False} if "use_cache" in parameters else {}
    if "logits_to_keep" in parameters:
        options["logits_to_keep"] = 1
    device = next((p.device for p in model.parameters()), ids.device)
    return model(ids.to(device), **options)


def text_config(model: nn.Module) -> Any:
    """Return the configuration of a model of transformers that reads text; None for other models."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


@contextmanager
def embeddings_that_read(model: nn.Module, ids: Tensor) -> Iterator[list[int]]:
    """Give the sizes of the embeddings that are looked up with the ids, once the model has read them."""
    sizes: list[int] = []

    def look(module: nn.Embedding, args: tuple[Any, ...]) -> None:
        """Note the size of an embedding that is called with the ids of the text."""
        given = args[0] if args else None
        if isinstance(given, Tensor) and given.shape == ids.shape and torch.equal(given.cpu(), ids.cpu()):
            sizes.append(module.num_embeddings)

    with ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, nn.Embedding):
                stack.callback(module.register_forward_pre_hook(look).remove)
        yield sizes


def vocabulary_size(model: nn.Module) -> int:
    """Return the number of tokens that a model knows; 0 where no embedding reads them.

    A model without a configuration reads two equal tokens: tables of positions, which can be larger than those of
    tokens, are looked up with other numbers.
    """
    size = getattr(text_config(model), "vocab_size", None)
    tables = [part.num_embeddings for part in model.modules() if isinstance(part, nn.Embedding)]
    if size is not None or len(tables) < 2:
        return int(max(tables, default=0) if size is None else size)
    ids = torch.zeros(1, 2, dtype=torch.int64)
    with evaluating(model), embeddings_that_read(model, ids) as sizes:
        read(model, ids)
    return min(sizes, default=max(tables))


def checked_ids(ids: Tensor, least: int) -> Tensor:
    """Return token ids of shape (batch, n), or raise an error where they are none or too few."""
    if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.dtype is torch.bool:
        found = f"{ids.dtype}" if isinstance(ids, Tensor) else kind(ids)
        raise DtypeError("ids must be a tensor of integers.", found, "tokenizer(text, return_tensors='pt').input_ids")
    if ids.ndim not in (1, 2) or ids.shape[-1] < least:
        count = {2: "two", 3: "three"}[least]
        rule = f"ids must have the shape (n,) or (batch, n), with at least {count} tokens."
        raise ShapeError(rule, f"shape {tuple(ids.shape)}", "ids[None]", ids=ids)
    return ids if ids.ndim == 2 else ids[None]
