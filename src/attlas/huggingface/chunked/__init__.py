"""Layers that attend in chunks of their own (Longformer, LED, BigBird, LongT5), computed by attlas for a block.

Their code cuts texts into windows and blocks, so that no product in it is one of all queries and keys. Here each layer
computes one lazy matrix with a mask, which recordings hear and interventions change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from attlas.foundation.blocks import SharedBlocks
from attlas.foundation.compat import PADS_TO_BLOCKS, PADS_TO_WINDOWS
from attlas.huggingface.chunked.bigbird import block_sparse_attention, noting_padding
from attlas.huggingface.chunked.longformer import sliding_window_attention, without_padding
from attlas.huggingface.chunked.longt5 import local_attention, transient_global_attention

# By class of transformers: which method is replaced while a model attends with attlas, and by what. The replacement is
# called with the module, the method that it replaces, and its arguments.
METHODS: dict[str, tuple[str, Callable[..., Any]]] = {
    "LongformerSelfAttention": ("forward", partial(sliding_window_attention, True)),
    "LEDEncoderSelfAttention": ("forward", partial(sliding_window_attention, False)),
    "LongformerModel": (PADS_TO_WINDOWS, without_padding),
    "LEDEncoder": (PADS_TO_WINDOWS, without_padding),
    "BigBirdBlockSparseAttention": ("bigbird_block_sparse_attention", block_sparse_attention),
    "BigBirdPegasusBlockSparseAttention": ("bigbird_block_sparse_attention", block_sparse_attention),
    "BigBirdModel": (PADS_TO_BLOCKS, noting_padding),
    "BigBirdPegasusEncoder": (PADS_TO_BLOCKS, noting_padding),
    "LongT5LocalAttention": ("forward", local_attention),
    "LongT5TransientGlobalAttention": ("forward", transient_global_attention),
}

_replacements = SharedBlocks()


@contextmanager
def attending_in_one_matrix(model: nn.Module) -> Iterator[None]:
    """Let the layers of a model that attend in chunks compute one matrix each, for the time of a ``with`` block.

    Parameters
    ----------
    model : nn.Module
        Any module; where it has no such layer, nothing happens. A layer whose method somebody else replaced stays as it
        is.
    """
    with ExitStack() as stack:
        for module in model.modules():
            found = _replacement(module)
            if found is not None:
                stack.enter_context(_replacements.shared(id(module), partial(_replaced, module, *found)))
        yield


def _replacement(module: nn.Module) -> tuple[str, Callable[..., Any]] | None:
    """Return the method of a module that is replaced, and by what; None where none is."""
    for kind in type(module).__mro__:
        if kind.__name__ in METHODS and kind.__module__.startswith("transformers."):
            name, make = METHODS[kind.__name__]
            is_own = getattr(type(module), name, None) is getattr(kind, name, ())  # and not that of a subclass
            return (name, make) if is_own else None
    return None


@contextmanager
def _replaced(module: nn.Module, name: str, make: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of one module, for the time of a ``with`` block, unless somebody else has."""
    if name in vars(module):
        yield
        return
    setattr(module, name, partial(_called, make, module, getattr(module, name)))
    try:
        yield
    finally:
        delattr(module, name)


def _called(
    make: Callable[..., Any], module: nn.Module, original: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Return what a replacement computes; what the method itself does while torch compiles it."""
    if torch.compiler.is_compiling():
        return original(*args, **kwargs)
    return make(module, original, *args, **kwargs)
