"""Copies of a matrix that outlive the pass: without a graph, without shared storage, on the chosen device."""

from __future__ import annotations

import copy
import operator
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from attlas.foundation.compat import changes, tree_leaves, tree_map_only
from attlas.foundation.devices import to_device
from attlas.masks import Mask
from attlas.masks.placed import Placed

if TYPE_CHECKING:
    from attlas.engine.problem import Problem
    from attlas.recording.copies import HostCopies

_LEAST_CHUNK_KEYS = 1024  # keys whose fingerprint is taken together, at least,
_MOST_CHUNKS = 8  # and the most chunks: little memory beside the keys themselves, and no more calls for more keys
_INTEGERS_BY_BYTES = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # whole numbers by their bytes

Thing = TypeVar("Thing", bound=Mask | nn.Module)


def detached_tensor(t: Tensor, device: torch.device | None = None, copies: HostCopies | None = None) -> Tensor:
    """Return a tensor without a graph; a copy where the model may write to it, or where its storage is larger.

    Parameters
    ----------
    t : Tensor
        Queries or keys as the model computed them.
    device : torch.device, optional
        Where it is kept; where it is, by default.
    copies : HostCopies, optional
        Copies to the CPU, so that nobody waits for them.
    """
    t = t.detach()
    if device is not None and t.device != device:
        return _on_device(t, device, copies)
    # A static cache writes new keys into the tensor that it handed out; a tensor that was written to since it was
    # made, or is part of a larger one, is copied.
    written = t.is_inference() or changes(t) != 0
    return t.clone() if written or t.untyped_storage().nbytes() > t.nbytes else t


def _on_device(t: Tensor, device: torch.device, copies: HostCopies | None) -> Tensor:
    """Return a tensor on another device."""
    return t.to(device) if copies is None or device.type != "cpu" else copies.copy(t)


def detached(thing: Thing, device: torch.device | None = None, copies: HostCopies | None = None) -> Thing:
    """Return a mask or a score whose tensors have no graph, on another device if one is named.

    Parameters
    ----------
    thing : Mask, or a score or a layer within one
        It is not changed; one that holds no tensor that matters is returned as it is.
    device : torch.device, optional
        Where its tensors are kept.
    copies : HostCopies, optional
        Copies to the CPU, so that nobody waits for them.
    """

    def detach(part: Any) -> Any:
        """Return a tensor, score or mask without a graph, on the device; a copy of one that a graph starts from."""
        if isinstance(part, Mask | nn.Module):  # a score, or a layer within one
            return detached(part, device, copies)
        moves = device is not None and part.device != device
        if not (moves or part.requires_grad):
            return part
        t = part.detach().clone() if part.is_leaf else part.detach()  # an optimizer changes parameters in place
        t = _on_device(t, device, copies) if moves and device is not None else t
        return nn.Parameter(t, requires_grad=False) if isinstance(part, nn.Parameter) else t

    # Numbers that a mask has copied stay as they are, whatever becomes of the tensor that they are copied from.
    attributes = {name: value for name, value in vars(thing).items() if name != "given" or not isinstance(thing, Mask)}
    copied = tree_map_only((Tensor, Mask, nn.Module), detach, attributes)
    linked = vars(thing).get("given") is not None and isinstance(thing, Mask)
    if not linked and all(map(operator.is_, tree_leaves(copied), tree_leaves(attributes))):
        return thing
    out = copy.copy(thing)
    vars(out).update(copied | ({"given": None} if linked else {}))
    return out


def snapshot(problem: Problem, device: torch.device | None = None, copies: HostCopies | None = None) -> Problem:
    """Return a problem without its keys that can be kept after the pass: no graph, nothing shared with the model.

    Parameters
    ----------
    problem : Problem, shape (batch, heads, m, n)
        The problem as the model made it.
    device : torch.device, optional
        Where its tensors are kept; where they are, by default.
    copies : HostCopies, optional
        Copies to the CPU, so that nobody waits for them.
    """
    target = None if device is None or device == problem.device else device
    return replace(
        problem,
        q=detached_tensor(problem.q, target, copies),
        k=detached_tensor(problem.k[:, :, :0], target, copies),
        sink=None if problem.sink is None else detached_tensor(problem.sink.detach().clone(), target, copies),
        mask=kept_mask(problem, device, copies),
        score=detached(problem.score, target, copies),
        detached=True,
        read=(),
        versions=(),  # of the tensors kept here, and not of those of the model, which may change
    )


def kept_mask(problem: Problem, device: torch.device | None = None, copies: HostCopies | None = None) -> Mask | None:
    """Return the mask of a problem as `snapshot` keeps it."""
    if problem.mask is None:
        return None
    target = None if device is None or device == problem.device else device
    mask = detached(problem.mask, target, copies)
    if target is not None and holds_function(mask):
        rows, columns = map(range, problem.shape[2:])
        return Placed(mask, rows, columns, problem.device)  # what a function holds stays where it is
    return mask


def holds_function(mask: Mask) -> bool:
    """Return whether a mask calls a user's function, which may use tensors that attlas cannot move."""
    held = (part for value in vars(mask).values() for part in (value if isinstance(value, tuple) else (value,)))
    return hasattr(mask, "mask_mod") or any(holds_function(part) for part in held if isinstance(part, Mask))


def fingerprint(k: Tensor) -> Tensor:
    """Return one whole number for each key of each batch, by which the same bits are known again.

    Parameters
    ----------
    k : Tensor, shape (batch, heads, n, d)
        Keys.

    Returns
    -------
    Tensor of int64, shape (batch, n)
        Sum of all bits under odd weights of 64 bits: two different keys agree once in some 10¹⁸ times.
    """
    bits = k.detach().view(_INTEGERS_BY_BYTES[k.element_size()])
    weights = _bit_weights(k.shape[1], k.shape[3], k.device)
    parts = bits.split(_chunk_size(k.shape[2]), dim=2)
    numbers = (part.to(torch.int64, copy=True).mul_(weights) for part in parts)
    return torch.cat([part.sum(dim=(1, 3)) for part in numbers], dim=-1)


def _chunk_size(keys: int) -> int:
    """Return how many of some keys get their fingerprint together."""
    return max(_LEAST_CHUNK_KEYS, -(-keys // _MOST_CHUNKS))


@lru_cache(maxsize=64)
def _bit_weights(heads: int, d: int, device: torch.device) -> Tensor:
    """Return the weights of the bits of a key, shape (1, heads, 1, d)."""
    with torch.inference_mode(False):  # they serve later calls outside of inference mode, too
        generator = torch.Generator().manual_seed(20)
        weights = torch.randint(-(2**62), 2**62, (heads, d), generator=generator, dtype=torch.int64) * 2 + 1
        out: Tensor = to_device(weights, device).view(1, heads, 1, d)
        return out


def same_bits(a: Tensor, b: Tensor) -> bool | Tensor:
    """Return whether two tensors of one device have the same dtype, sizes and bits; NaN then equals itself.

    As whole numbers of 64 bits, where the last axis allows it, two keys are compared in half the time or less. On a
    device other than the CPU, the answer of same dtypes and sizes is a tensor on it.
    """
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    size = next((size for size in (8, 4, 2) if _holds_words(a, size) and _holds_words(b, size)), None)
    if size is not None:
        a, b = a.view(_INTEGERS_BY_BYTES[size]), b.view(_INTEGERS_BY_BYTES[size])
    return (a == b).all() if answers_later(a) else torch.equal(a, b)


def answers_later(t: Tensor) -> bool:
    """Return whether a tensor is on a device that the program would have to wait for to read a number."""
    return t.device.type != "cpu"


def answers_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of booleans or whole numbers on the CPU: one wait for each other device that some are on.

    A GPU works behind the program. To read one of its numbers, the program waits until all work before it is done.
    """
    found = list(tensors)
    by_device: defaultdict[torch.device, list[int]] = defaultdict(list)
    for place, t in enumerate(found):
        if t.device.type != "cpu":
            by_device[t.device].append(place)
    for places in by_device.values():
        numbers = torch.cat([found[place].flatten().to(torch.int64) for place in places]).cpu()
        parts = numbers.split([found[place].numel() for place in places])
        for place, part in zip(places, parts, strict=True):
            found[place] = part.view(found[place].shape).to(found[place].dtype)
    return found


def _holds_words(t: Tensor, size: int) -> bool:
    """Return whether a tensor can be viewed as whole numbers of `size` bytes without a copy."""
    own = t.element_size()
    if own >= size:
        return own == size
    count = size // own  # numbers in a word
    places = (t.shape[-1], t.storage_offset(), *t.stride()[:-1])
    return t.stride(-1) == 1 and all(place % count == 0 for place in places)
