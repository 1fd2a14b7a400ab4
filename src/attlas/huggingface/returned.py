"""In which class attention returns its weights: as lazy matrices, or as tensors by their class."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from attlas.foundation.blocks import BlockValue

AS_TENSORS: BlockValue[bool] = BlockValue("weights_as_tensors", False)


@contextmanager
def weights_as_tensors() -> Iterator[None]:
    """Let models on attlas return weights that are a `torch.Tensor` by their class, for the time of a ``with`` block.

    Returns
    -------
    context manager
        The block.

    Notes
    -----
    Each is `AttentionMatrix.as_tensor` of the matrix that is returned otherwise: lazy, and nothing is stored. Libraries
    that ask ``isinstance(x, torch.Tensor)`` take it: captum's `LayerActivation`, circuitsvis, the hooks of
    TransformerLens. The block holds for the thread that enters it.

    Examples
    --------
    >>> import torch, attlas.huggingface
    >>> from transformers import GPT2Config, GPT2LMHeadModel
    >>> model = GPT2LMHeadModel(
    ...     GPT2Config(vocab_size=50, n_positions=64, n_embd=16, n_layer=2, n_head=2)
    ... ).eval()
    >>> model.set_attn_implementation("attlas")
    >>> with attlas.huggingface.weights_as_tensors():
    ...     weights = model(torch.arange(20)[None], output_attentions=True).attentions[0]
    >>> isinstance(weights, torch.Tensor), weights.shape
    (True, torch.Size([1, 2, 20, 20]))
    """
    with AS_TENSORS.held(True):
        yield
