"""Mask and score of a whole batch, or of all heads, from those of its parts; all of them as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attlas.errors import RecordingError
from attlas.masks import runs_of
from attlas.masks.placed import Concatenated
from attlas.recording.atlas.serialization import mask_from, mask_spec
from attlas.recording.stacking import same_settings

# How many axes the tensor of a mask has where the batch is the first of them.
_WITH_BATCH = {"Padding": 1, "Prefix": 1, "Documents": 2, "TensorMask": 4, "AdditiveMask": 4,
               "TensorBias": 4, "Selected": 4}  # fmt: skip


class _DifferError(Exception):
    """Two masks that are not of one form."""


def joined_mask(specs: Sequence[Any], sizes: Sequence[int], axis: int, shape: tuple[int, int, int, int]) -> Any:
    """Return the mask of a batch (axis 0), or of all heads (axis 1), as plain data.

    Parameters
    ----------
    specs : sequence of dict or None
        Masks of the parts, as `attlas.recording.atlas.serialization` writes them, with their tensors under "t".
    sizes : sequence of int
        Batches, or heads, of each part.
    axis : {0, 1}
        What the parts divide.
    shape : tuple of int
        Sizes of the whole matrix: batches, heads, m, n.

    Raises
    ------
    RecordingError
        If parts are not of one form, and one adds to the logits.

    Notes
    -----
    Parts of one form give a mask of that form: parameters must agree, tensors are joined. Other parts give the runs
    of keys that they allow.
    """
    if len(specs) == 1 or all(spec is None for spec in specs):
        return specs[0]
    parts = [_conjuncts(spec) for spec in specs]
    try:
        if axis == 0:
            parts = _with_padding(parts, sizes, shape[3])
        if len({len(part) for part in parts}) != 1:
            raise _DifferError
        found = [_joined(some, sizes, axis) for some in zip(*parts, strict=True)]
    except _DifferError:
        return _runs(specs, sizes, axis, shape)
    whole = found[0]
    for one in found[1:]:
        whole = {"class": "And", "left": whole, "right": one}
    return whole


def joined_score(specs: Sequence[Any], sizes: Sequence[int], axis: int) -> Any:
    """Return the score of a batch (axis 0), or of all heads (axis 1), as plain data; None where there is none.

    Its parameters must agree, and only a `TensorBias` may have a tensor of batches or heads.
    """
    try:
        return _joined(specs, sizes, axis)
    except _DifferError:
        return None


def _runs(specs: Sequence[Any], sizes: Sequence[int], axis: int, shape: tuple[int, int, int, int]) -> Any:
    masks = [None if spec is None else mask_from(spec, lambda ref: ref["t"]) for spec in specs]
    if any(mask is not None and mask.log_weights() for mask in masks):
        rule = "masks that add to the logits must be of one form on all ranks to be joined."
        fix = 'record with keep="statistics", or on one process.'
        names = ", ".join("no mask" if mask is None else mask.name() for mask in masks)
        raise RecordingError("save()", rule, found=names, fix=fix)
    found = runs_of(Concatenated(masks, sizes, axis), *shape)
    return mask_spec(found, lambda name, t: {"t": t}, lambda mask: mask)


def _conjuncts(spec: Any) -> list[Any]:
    if spec is None:
        return []
    return _conjuncts(spec["left"]) + _conjuncts(spec["right"]) if spec["class"] == "And" else [spec]


def _kind(spec: Any) -> tuple[Any, ...]:
    return spec["class"], spec.get("side")


def _with_padding(parts: list[list[Any]], sizes: Sequence[int], n: int) -> list[list[Any]]:
    """Let each part say how much padding it has where one does; a batch without any has n tokens."""
    most = max(parts, key=len)
    out = []
    for part, size in zip(parts, sizes, strict=True):
        own = {_kind(spec): spec for spec in part}
        filled = []
        for spec in most:
            if spec["class"] == "Padding" and _kind(spec) not in own:
                spec = spec | {"lengths": {"t": torch.full((size,), n)}}
            else:
                spec = own.pop(_kind(spec), None)
            filled.append(spec)
        if own or None in filled:
            raise _DifferError
        out.append(filled)
    return out


def _joined(specs: Sequence[Any], sizes: Sequence[int], axis: int) -> Any:
    """Return what all parts say, with the tensors of those that have one for each batch or head put together."""
    first = specs[0]
    if not isinstance(first, dict):
        if all(same_settings(first, other) for other in specs):
            return first
        raise _DifferError
    if any(not isinstance(s, dict) or s.keys() != first.keys() or s.get("class") != first.get("class") for s in specs):
        raise _DifferError
    out = {}
    for name, value in first.items():
        if isinstance(value, dict) and isinstance(value.get("t"), Tensor):
            out[name] = {"t": _tensor(first["class"], [s[name]["t"] for s in specs], sizes, axis)}
        else:
            out[name] = _joined([s[name] for s in specs], sizes, axis)
    return out


def _tensor(name: str, tensors: list[Tensor], sizes: Sequence[int], axis: int) -> Tensor:
    if name in ("TensorMask", "Selected"):
        tensors = [t[:, None] if t.ndim == 3 else t for t in tensors]
    first = tensors[0]
    same = all(same_settings(first, other) for other in tensors)
    if name in ("Runs", "Bits"):  # one table for all, or for each
        if same and (first.ndim == 1 or first.shape[axis] == 1):
            return first
        raise _DifferError
    if name not in _WITH_BATCH and first.numel() > 1:
        raise _DifferError
    divides = first.ndim == _WITH_BATCH.get(name) and axis < first.ndim and (axis == 0 or first.ndim == 4)
    if not divides or (same and first.shape[axis] == 1):
        if same:
            return first
        raise _DifferError
    fits = all(t.ndim == first.ndim and t.shape[axis] in (1, size) for t, size in zip(tensors, sizes, strict=True))
    rest = {(t.dtype, *t.shape[:axis], *t.shape[axis + 1 :]) for t in tensors}
    if not fits or len(rest) != 1:
        raise _DifferError
    whole = [t.expand(*t.shape[:axis], n, *t.shape[axis + 1 :]) for t, n in zip(tensors, sizes, strict=True)]
    return torch.cat(whole, axis)
