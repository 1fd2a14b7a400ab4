"""Finds the attention layers of a model that do not use the attention interface of transformers."""

from __future__ import annotations

from torch import nn

from attlas.recording.discovery import INTERFACE, is_part_of, mentions


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
    names in the code of each class.

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
    modules = dict(model.named_modules())
    attention = {path for path, module in modules.items() if type(module).__name__.endswith("Attention")}
    asking = {path for path, module in modules.items() if mentions(module, INTERFACE)}
    # A layer that holds another one leaves the attending to it.
    inner = attention | asking
    return [
        path
        for path in modules
        if path in attention - asking and not any(other != path and is_part_of(other, path) for other in inner)
    ]
