"""Attention for torch.compile and torch.export: a dense mask and torch operations only, so that no graph breaks."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional

from attlas.errors import BackendError, TooLargeError
from attlas.foundation.compat import collector_of_outputs
from attlas.huggingface.chosen import whole_of
from attlas.huggingface.masks import MASKING, causal_mask_function
from attlas.masks import Causal, Mask, from_tensor
from attlas.matrix import observers
from attlas.matrix.attend import attend
from attlas.recording.hooks import is_recording_anywhere, is_told_by_operators
from attlas.scores import ScaledDot, Score, SoftCap, TensorBias

_OUTPUT_COLLECTOR = collector_of_outputs(sys.modules.get("transformers.utils.output_capturing"))
# Older versions take positions in place of a length, and are not followed into programs.
sdpa_mask = getattr(MASKING, "sdpa_mask", None)
if sdpa_mask is not None and "q_length" not in inspect.signature(sdpa_mask).parameters:
    sdpa_mask = None
_MOST_WEIGHT_BYTES = 1 << 30  # bytes of weights of one layer in an exported program, as A.to_dense() gives


def dense_mask(arguments: dict[str, Any]) -> Tensor:
    """Return the mask of one forward pass as a tensor of booleans, by transformers' own function for SDPA.

    Where torch's kernel can make the mask itself, because it is causal and nothing else, the tensor says so in an
    attribute, and the compiler drops the numbers. A model that slices the mask loses the attribute, and is right too.
    """
    if sdpa_mask is None:
        rule = "a program of a model needs transformers 5.20 or newer."
        found, fix = (
            f"transformers {transformers.__version__}",
            "pip install -U 'transformers>=5.20', or no torch.compile.",
        )
        raise BackendError(rule, found, fix, where="attlas.huggingface")
    m, n = arguments["q_length"], arguments["kv_length"]
    plain = arguments["mask_function"] is causal_mask_function and m == n
    # It returns None for what it leaves to the kernel, and never where it is told to leave nothing.
    written: Tensor | None = sdpa_mask(**arguments, allow_is_causal_skip=plain, allow_is_bidirectional_skip=False)
    if written is None:
        causal = torch.ones(m, n, dtype=torch.bool, device=arguments["device"]).tril()
        written = causal.expand(arguments["batch_size"], 1, m, n)
        written.attlas_causal = True  # type: ignore[attr-defined]  # ours
    return written


def writes_out_masks() -> bool:
    """Return whether masks are dense tensors: torch traces the program, and Python is not called at each attention."""
    return torch.compiler.is_compiling() and (not is_recording_anywhere() or is_told_by_operators())


def weights_are_returned(keywords: dict[str, Any]) -> bool:
    """Return whether a program must compute the weights of a layer, because its model may return them.

    A compiler drops what nobody reads, and torch.export does not: an exported program would compute the weights of
    every layer. Then the model is asked, by what transformers collects of its layers; a model of which that is not
    known gets its weights.

    Parameters
    ----------
    keywords : dict
        What the layer passed on.
    """
    if not torch.compiler.is_exporting() or keywords.get("output_attentions"):
        return True
    collected = None if _OUTPUT_COLLECTOR is None else _OUTPUT_COLLECTOR.get()
    return collected is None or any("attentions" in name for name in collected)


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    allowed: Tensor | None,
    scaling: float | None,
    *,
    causal: bool,
    dropout: float,
    softcap: float | None,
    sink: Tensor | None,
    bias: Tensor | None,
    chosen: Mask | None = None,
    returned: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Return the pooled values, shape (batch, heads, m, e), and the dense weights, shape (batch, heads, m, n).

    The weights are plain operations of torch, computed apart from the pooled values, so that the compiler drops them
    where nobody reads them; None where they are not `returned`. Values are pooled by torch's own function, or where
    logits are capped or have a sink, (heads,) or (batch, heads, m, 1), by attlas.
    """
    m, n = query.shape[-2], key.shape[-2]
    only_causal = getattr(allowed, "attlas_causal", False) or (allowed is None and causal)
    square = only_causal and m == n and bias is None and chosen is None  # then torch's kernel makes the mask itself
    allowed = None if allowed is None else allowed[..., :n]
    if allowed is None and causal and m > 1:
        allowed = torch.ones(m, n, dtype=torch.bool, device=query.device).tril(n - m)
    if chosen is not None:
        own = whole_of(chosen, query.shape[:3], n, query.device)
        if allowed is not None and allowed.dtype is not torch.bool:
            allowed = allowed.masked_fill(~own, float("-inf"))
        else:
            allowed = own if allowed is None else allowed & own
    weights = None
    if returned:
        _check_size(query, n)
        with torch.autocast(query.device.type, enabled=False):  # it would round the logits to 16 bits
            weights = _weights_by_definition(query, key, allowed, scaling, softcap, sink, bias)
    added = None if square else _mask_argument(allowed, bias, query.dtype)
    if softcap is None and sink is None:
        grouped = query.shape[1] != key.shape[1]
        pooled = functional.scaled_dot_product_attention(
            query, key, value, added, dropout, is_causal=square, scale=scaling, enable_gqa=grouped
        )
        return pooled, weights
    score: Score = ScaledDot(scaling)
    score = score if softcap is None else SoftCap(score, softcap)
    if sink is not None and sink.ndim > 1:
        # A sink of each query: taken off all logits of its row, it leaves a sink of 0.
        score, sink = score + TensorBias(-sink), query.new_zeros(query.shape[1])
    mask = Causal() if square else None if added is None else from_tensor(added)
    A = attend(query, key, score=score, mask=mask, sink=sink)
    if not observers.active:
        return A.pooled(value, dropout), weights
    # Recordings are told of it by an operator: to multiply by `A @ v` would call them, and break the graph.
    return observers.untold_product(A, value.to(query.dtype), dropout).to(value.dtype), weights


def _check_size(query: Tensor, n: int) -> None:
    """Raise a TooLargeError where an exported program would hold more than 1 GiB of weights."""
    batch, heads, m, _ = query.shape
    size = batch * heads * m * n * max(query.element_size(), 4)
    if not torch.compiler.is_exporting() or not isinstance(size, int) or size <= _MOST_WEIGHT_BYTES:
        return
    rule = "torch.export traces a model that returns its attentions, and they would be larger than the limit."
    found, fix = f"{size:,} bytes, the limit is {_MOST_WEIGHT_BYTES:,}", "output_attentions=False, or fewer tokens."
    # The compiler can make no MemoryError; its own error has the texts of this one.
    error = BackendError if torch.compiler.is_dynamo_compiling() else TooLargeError
    raise error(rule, found, fix, query=query, where="attlas.huggingface")


def _mask_argument(allowed: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return the mask argument of SDPA: the allowed pairs, or one bias that hides the others."""
    if bias is None:
        return allowed if allowed is None or allowed.dtype is torch.bool else allowed.to(dtype)
    if allowed is None:
        return bias.to(dtype)
    if allowed.dtype is torch.bool:
        return bias.to(dtype).masked_fill(~allowed, float("-inf"))
    return (bias + allowed).to(dtype)


def _weights_by_definition(
    query: Tensor,
    key: Tensor,
    allowed: Tensor | None,
    scaling: float | None,
    softcap: float | None,
    sink: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Return the weights by the definition, in float32 or more; a row without a key has weights 0."""
    accurate = torch.promote_types(query.dtype, torch.float32)
    keys = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = torch.matmul(query.to(accurate), keys.to(accurate).mT) * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    added = _mask_argument(allowed, bias, accurate)
    if added is not None:
        logits = logits.masked_fill(~added, float("-inf")) if added.dtype is torch.bool else logits + added
    top = logits.amax(-1, keepdim=True)
    if sink is not None:
        sink = (sink.view(1, -1, 1, 1) if sink.ndim == 1 else sink).to(accurate)
        top = torch.maximum(top, sink)
    top = top.clamp(min=torch.finfo(accurate).min)  # a row of nothing but -inf
    powers = torch.exp(logits - top)
    total = powers.sum(-1, keepdim=True)
    if sink is not None:
        total = total + torch.exp(sink - top)
    return torch.where(total > 0, powers / total.clamp(min=torch.finfo(accurate).tiny), torch.zeros_like(powers))
