"""Mask and score of a whole batch, or of all heads, from those of its parts; all of them as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from attlas.errors import RecordingError
from attlas.masks import Bits, Heads, Mask, Runs, runs_of
from attlas.masks.placed import Concatenated
from attlas.recording.atlas.serialization import class_named, mask_from, mask_spec
from attlas.recording.stacking import same_settings
from attlas.scores import Alibi, Forget, RelativeBias, Score, TensorBias


class _DifferError(Exception):
    """The stored forms of two masks, or scores, cannot be joined into one."""


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
    parts = [_conjuncts_of_mask(spec) for spec in specs]
    try:
        if axis == 0:
            parts = _with_padding(parts, sizes, shape[3])
        if len({len(part) for part in parts}) != 1:
            raise _DifferError
        found = [_joined_settings(some, sizes, axis) for some in zip(*parts, strict=True)]
    except _DifferError:
        return _joined_as_runs(specs, sizes, axis, shape)
    whole = found[0]
    for one in found[1:]:
        whole = {"class": "And", "left": whole, "right": one}
    return whole


def joined_score(specs: Sequence[Any], sizes: Sequence[int], axis: int) -> Any:
    """Return the score of a batch (axis 0), or of all heads (axis 1), as plain data; None where there is none.

    Its parameters must agree, and only `TensorBias` and `Forget` may have a tensor of batches or heads.
    """
    try:
        return _joined_settings(specs, sizes, axis)
    except _DifferError:
        return None


def _joined_as_runs(specs: Sequence[Any], sizes: Sequence[int], axis: int, shape: tuple[int, int, int, int]) -> Any:
    """Join masks of different forms: ask what they allow, and return it as runs of keys in stored form."""
    masks = [None if spec is None else mask_from(spec, lambda ref: ref["t"]) for spec in specs]
    if any(mask is not None and mask.log_weights() for mask in masks):
        rule = "masks that add to the logits must be of one form on all ranks to be joined."
        names = ", ".join("no mask" if mask is None else mask.name() for mask in masks)
        raise RecordingError(rule, names, 'record with keep="statistics", or on one process.', where="save()")
    found = runs_of(Concatenated(masks, sizes, axis), *shape)
    return mask_spec(found, lambda name, t: {"t": t}, lambda mask: mask)


def _conjuncts_of_mask(spec: Any) -> list[Any]:
    """Return the masks that a stored mask joins with ``&``, from left to right; none for None."""
    if spec is None:
        return []
    return _conjuncts_of_mask(spec["left"]) + _conjuncts_of_mask(spec["right"]) if spec["class"] == "And" else [spec]


def _class_and_side(spec: Any) -> tuple[Any, ...]:
    """Return what stored masks must have in common to be joined: the class, and the side of `Padding`."""
    return spec["class"], spec.get("side")


def _with_padding(parts: list[list[Any]], sizes: Sequence[int], n: int) -> list[list[Any]]:
    """Add a padding of length n to the parts that have none, where another has one, so that all have one form.

    `parts` are the conjuncts of the mask of each part. Raise a _DifferError where other masks differ.
    """
    most = max(parts, key=len)
    out = []
    for part, size in zip(parts, sizes, strict=True):
        own = {_class_and_side(spec): spec for spec in part}
        filled = []
        for spec in most:
            if spec["class"] == "Padding" and _class_and_side(spec) not in own:
                spec = spec | {"lengths": {"t": torch.full((size,), n)}}
            else:
                spec = own.pop(_class_and_side(spec), None)
            filled.append(spec)
        if own or None in filled:
            raise _DifferError
        out.append(filled)
    return out


def _joined_settings(
    specs: Sequence[Any], sizes: Sequence[int], axis: int, owner: type[Mask | Score] | None = None
) -> Any:
    """Join the stored settings of all parts: tensors of a batch or head are concatenated, all else must be equal.

    `owner` is the class of the score or mask whose settings these are. Raise a _DifferError where parts differ.
    """
    first = specs[0]
    if not isinstance(first, dict):
        if all(same_settings(first, other) for other in specs):
            return first
        raise _DifferError
    if any(not isinstance(s, dict) or s.keys() != first.keys() or s.get("class") != first.get("class") for s in specs):
        raise _DifferError
    if isinstance(first.get("t"), Tensor):
        return {"t": _joined_tensor(owner, [s["t"] for s in specs], sizes, axis)}
    owner = class_named(first["class"]) if "class" in first else owner
    if owner is Heads and axis == 1:  # each part counts its own heads
        raise _DifferError
    return {name: _joined_settings([s[name] for s in specs], sizes, axis, owner) for name in first}


def _joined_tensor(owner: type[Mask | Score] | None, tensors: list[Tensor], sizes: Sequence[int], axis: int) -> Tensor:
    """Join one tensor of the settings of all parts, along `axis` where it counts batches or heads.

    Else it must be equal in all. `owner` is the class that holds it, None for one of the user's own.
    """
    if owner is None or (issubclass(owner, Score) and owner not in (Forget, TensorBias)):
        # A parameter of a score may count heads, by an axis that is not known; that of these two does.
        if tensors[0].numel() > 1 or (axis == 1 and owner in (Alibi, RelativeBias)):
            raise _DifferError
        return _shared_tensor(tensors)
    # Masks of shape (batch, m, n) have one head for all.
    tensors = [t[:, None] if t.ndim == 3 and owner.batch_axis(t) == 0 else t for t in tensors]
    first = tensors[0]
    if owner in (Runs, Bits):  # one table for all, or for each
        if first.ndim > 1 and first.shape[axis] > 1:
            raise _DifferError
        return _shared_tensor(tensors)
    divided = owner.batch_axis(first) == 0 and (axis == 0 or first.ndim == 4)
    if not divided or (first.shape[axis] == 1 and _are_equal(tensors)):
        return _shared_tensor(tensors)
    fits = all(t.ndim == first.ndim and t.shape[axis] in (1, size) for t, size in zip(tensors, sizes, strict=True))
    rest = {(t.dtype, *t.shape[:axis], *t.shape[axis + 1 :]) for t in tensors}
    if not fits or len(rest) != 1:
        raise _DifferError
    whole = [t.expand(*t.shape[:axis], n, *t.shape[axis + 1 :]) for t, n in zip(tensors, sizes, strict=True)]
    return torch.cat(whole, axis)


def _are_equal(tensors: Sequence[Tensor]) -> bool:
    """Return whether all tensors hold the same numbers."""
    return all(same_settings(tensors[0], other) for other in tensors)


def _shared_tensor(tensors: Sequence[Tensor]) -> Tensor:
    """Return the tensor that all parts have; raise a _DifferError where they differ."""
    if not _are_equal(tensors):
        raise _DifferError
    return tensors[0]
