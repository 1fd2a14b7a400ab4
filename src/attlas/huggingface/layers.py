"""Finds the attention layers of a model that do not use the attention interface of transformers."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import CodeType

from torch import nn

__all__ = ["modules_without_interface"]

# A layer that lets its model choose looks its function up under one of these names.
_INTERFACE_NAMES = {"ALL_ATTENTION_FUNCTIONS", "get_interface"}


def modules_without_interface(model: nn.Module) -> list[str]:
    """Return the paths of the attention layers of a model that do not use the attention interface.

    Parameters
    ----------
    model : nn.Module
        A model of transformers, or any other.

    Returns
    -------
    list of str
        Paths as of ``model.named_modules()``, in order; empty where every attention layer uses the interface. What
        these layers attend to is not captured, whatever `attn_implementation` says.

    Notes
    -----
    A layer counts as attention where the name of its class ends so, and as a user of the interface where the code
    of its class, or of a layer inside it, names ``ALL_ATTENTION_FUNCTIONS``. No code is run. Cost: a look at the
    names in the code of each class, kept for the next call.

    Examples
    --------
    >>> from transformers import FalconConfig, FalconModel, GPT2Config, GPT2Model
    >>> from attlas.huggingface import modules_without_interface
    >>> sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 20}
    >>> modules_without_interface(FalconModel(FalconConfig(**sizes)))
    ['h.0.self_attention', 'h.1.self_attention']
    >>> modules_without_interface(GPT2Model(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=20)))
    []
    """
    attention = [path for path, module in model.named_modules() if type(module).__name__.endswith("Attention")]
    asking = {path for path, module in model.named_modules() if _uses_interface(module.__class__.__mro__)}
    # A layer that holds another one leaves the attending to it.
    return [
        path
        for path in attention
        if path not in asking and not any(other.startswith(f"{path}." if path else "") for other in asking)
        if not any(other != path and other.startswith(f"{path}." if path else "") for other in attention)
    ]


@functools.cache
def _uses_interface(classes: tuple[type, ...]) -> bool:
    """Tell whether a method of a class, or of what it inherits, names the interface."""
    own = (base for base in classes if base not in nn.Module.__mro__)
    methods = (method for base in own for method in vars(base).values())
    return any(_INTERFACE_NAMES & set(names) for method in methods for names in _names(method))


def _names(method: object) -> Iterator[tuple[str, ...]]:
    """Yield the names in the code of a method, under its decorators too, and in the functions inside it."""
    while method is not None:
        code = getattr(method, "__code__", None)
        waiting = [code] if isinstance(code, CodeType) else []
        while waiting:
            one = waiting.pop()
            yield one.co_names
            waiting += [constant for constant in one.co_consts if isinstance(constant, CodeType)]
        method = getattr(method, "__wrapped__", None)
