"""What all heads of a layer together bring from one token to another: sizes of sums of vectors, as a lazy matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from attlas.errors import DtypeError, RecordingError, ShapeError, kind, public
from attlas.matrix import AttentionMatrix
from attlas.matrix.kinds.joint import JointNorms, factors_of
from attlas.matrix.kinds.output_shares import output_shares
from attlas.recording.atlas import Atlas, Entry
from attlas.recording.values import output_map


@torch.no_grad()
@public("contributions()")
def contributions(atlas: Atlas, layer: Any, model: nn.Module, *, residual: Tensor | None = None) -> AttentionMatrix:
    """Return how much all heads of a layer together bring from each token to each, as a lazy matrix with one head.

    Parameters
    ----------
    atlas : Atlas
        A recording of the model, ``with attlas.record(model, values=True, gates=True) as atlas:``.
    layer : int, str or tuple
        The layer, as ``atlas[...]`` takes it.
    model : nn.Module
        The recorded model: its output projection is read.
    residual : Tensor, optional, shape (m, width) or (batch, m, width)
        The residual stream that the layer reads and adds to, such as ``hidden_states[layer]`` of a model of
        transformers. With it the shares of ALTI are returned.

    Returns
    -------
    AttentionMatrix, shape (batch, 1, m, n)
        ``‖T_ij‖`` with ``T_ij = Σ_h A^h_ij v^h_j W_O^h``, the vector that key j adds to the residual stream at query
        i, through all recorded heads. With `residual`, shares of 1: ``max(0, ‖y_i‖ - ‖y_i - T_ij‖)`` divided by its
        sum over j, where ``y_i`` is the residual stream behind the attention, and the token itself also brings the
        stream that it had, ``T_ii + x_i``. Statistics, pictures, `rollout` and the viewer take it as any other matrix.

    Raises
    ------
    RecordingError
        If values or gates were not recorded, or the output projection of the layer is not known.
    ShapeError
        If `residual` does not fit the layer, or not all heads of the layer were recorded and `residual` is given.
    DtypeError
        If an argument is of another type.
    OutOfRangeError
        If there is no such layer.

    See Also
    --------
    attlas.Entry.value_weighted : the same for each head by itself.
    rollout : from outputs to inputs, through all layers.

    Notes
    -----
    Heads may cancel: the norm of their sum is at most the sum of their norms, and often much less. The norm needs no
    vector as wide as the model: the products of what the heads write of a key are a matrix of heads × heads, made once
    for each key. Memory: ``heads²`` numbers a key. A cell costs the weights of all heads, and ``heads²`` products.

    ALTI [1]_ takes the L1 norm, which has no such form: with the Euclidean norm, as in [2]_, tokens are ranked much
    alike, but the numbers differ. With shares of all layers and ``residual=0.0``, `rollout` is its rollout. Each row is
    looked at once more, for its sum.

    The bias of the output projection belongs to no token. What comes behind the projection, such as a second norm or
    a factor of the layer, is not counted. Gates are: a recording with ``gates=True`` has measured that what enters the
    projection is the gate times ``A @ v``.

    References
    ----------
    .. [1] Ferrando et al., "Measuring the mixing of contextual information in the transformer", 2022.
    .. [2] Kobayashi et al., "Attention is not only a weight: analyzing transformers with vector norms", 2020.

    Examples
    --------
    >>> import torch, attlas.huggingface, attlas.models
    >>> from attlas import heads
    >>> from transformers import AutoModelForCausalLM
    >>> model = AutoModelForCausalLM.from_pretrained(attlas.models.path(), attn_implementation="attlas")
    >>> ids = heads.repeated_block(4096, period=32, blocks=1)
    >>> with torch.no_grad(), attlas.record(model, values=True, gates=True) as atlas:
    ...     stream = model(ids, output_hidden_states=True).hidden_states
    >>> together = heads.contributions(atlas, 3, model)
    >>> together.shape
    torch.Size([1, 1, 64, 64])
    >>> one_by_one = atlas.entry(3).value_weighted(output=True)
    >>> bool(together.sum() < one_by_one.sum())  # heads cancel
    True
    >>> shares = [heads.contributions(atlas, l, model, residual=stream[l]) for l in atlas.layers()]
    >>> round(float(heads.rollout(shares, residual=0.0).sum()), 3)
    1.0
    """
    if not isinstance(atlas, Atlas):
        fix = "attlas.record(model, values=True, gates=True)"
        raise DtypeError("atlas must be a recording.", kind(atlas), fix, atlas=type(atlas).__name__)
    if not isinstance(model, nn.Module):
        rule = "model must be the recorded model."
        raise DtypeError(rule, kind(model), "the nn.Module that was recorded", model=type(model).__name__)
    entry = atlas.entry(layer)
    weights = entry.gated.weights.detach()
    values, outward, bias = _values_and_map(entry, model)
    values, outward = (t.to(weights.device, weights.dtype) for t in (values, outward))
    own = outward[list(entry.heads)]
    norms = JointNorms(weights, factors_of(values, own))
    if residual is None:
        return AttentionMatrix(norms)
    if len(own) < len(outward):
        rule = "shares of the output need all heads of the layer."
        found = f"{len(own)} of {len(outward)} heads were recorded"
        raise ShapeError(rule, found, "record(model) without heads=, or leave residual out")
    stream = _stream(residual, entry, own.shape[-1]).to(weights.device, weights.dtype)
    return AttentionMatrix(output_shares(norms, values, own, stream, None if bias is None else bias.to(stream)))


def _values_and_map(entry: Entry, model: nn.Module) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the values of an entry, the linear map behind its heads, (heads, e, width), and its bias; or raise."""
    rule, found, fix = (
        "the values of the layer must have been recorded.",
        "no values",
        "record(model, values=True, gates=True)",
    )
    values = entry.values
    if values is not None:
        outward = output_map(model, entry.name, values.shape[-1])
        if outward is not None and len(outward[0]) > max(entry.heads, default=-1):
            return values, *outward
        rule = "the output projection behind the heads must be known, and not quantised."
        found = f"none of {len(entry.heads)} heads × {values.shape[-1]} behind {entry.name!r} in this model"
        fix = "the recorded model; entry.value_weighted() for the values in front of a projection"
    raise RecordingError(rule, found, fix)


def _stream(residual: Tensor, entry: Entry, width: int) -> Tensor:
    """Return the residual stream with a batch, shape (batch, m, width), or raise an error where it does not fit."""
    if not isinstance(residual, Tensor) or not residual.is_floating_point():
        rule = "residual must be a Tensor of floating point."
        raise DtypeError(rule, kind(residual), "model(ids, output_hidden_states=True).hidden_states[layer]")
    batch, _, m, n = entry.shape
    stream = residual.unsqueeze(0) if residual.ndim == 2 else residual
    if tuple(stream.shape) != (batch, m, width) or m > n:
        rule = "residual must be the stream of the layer's queries, which are the last of its keys."
        found = f"residual of shape {tuple(residual.shape)}, (batch, m, width) = {(batch, m, width)}, {n} keys"
        raise ShapeError(rule, found, "hidden_states[layer] of the same text, in self-attention", residual=residual)
    return stream.detach()
