"""Copies of a matrix that outlive the pass: without a graph, without shared storage, on the chosen device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from attlas._compat import changes
from attlas.indexing import Axes
from attlas.masks import Mask
from attlas.matrix import AttentionMatrix
from attlas.scores import Score
from attlas.windows import Translated

__all__ = ["detached", "detached_tensor", "fingerprint", "snapshot"]

_CHUNK = 1024  # keys whose fingerprint is taken together: little memory beside the keys themselves

Thing = TypeVar("Thing", bound=Mask | Score)


def detached_tensor(t: Tensor, device: torch.device | None = None) -> Tensor:
    """Return a tensor without a graph; a copy where the model may write to it, or where its storage is larger.

    Parameters
    ----------
    t : Tensor
        Queries or keys as the model computed them.
    device : torch.device, optional
        Where it is kept; where it is, by default.
    """
    t = t.detach()
    if device is not None and t.device != device:
        return t.to(device)
    # A static cache writes new keys into the tensor that it handed out; a tensor that was written to since it was
    # made, or is part of a larger one, is copied.
    written = t.is_inference() or changes(t) != 0
    return t.clone() if written or t.untyped_storage().nbytes() > t.nbytes else t


def detached(thing: Thing, device: torch.device | None = None) -> Thing:
    """Return a mask or a score whose tensors have no graph, on another device if one is named.

    Parameters
    ----------
    thing : Mask or Score
        It is not changed; one that holds no tensor that matters is returned as it is.
    device : torch.device, optional
        Where its tensors are kept.
    """

    def must_change(t: Tensor) -> bool:
        return t.requires_grad or (device is not None and t.device != device)

    def change(t: Tensor) -> Tensor:
        t = t.detach().clone() if t.is_leaf else t.detach()  # an optimizer changes parameters in place
        return t if device is None else t.to(device)

    return _with_tensors(thing, must_change, change)


def _with_tensors(thing: Thing, must_change: Callable[[Tensor], bool], change: Callable[[Tensor], Tensor]) -> Thing:
    attributes = vars(thing)
    changed = {name: _value_with_tensors(value, must_change, change) for name, value in attributes.items()}
    if all(changed[name] is value for name, value in attributes.items()):
        return thing
    out = copy.copy(thing)
    for name, value in changed.items():
        out.__dict__[name] = value
    return out


def _value_with_tensors(
    value: object, must_change: Callable[[Tensor], bool], change: Callable[[Tensor], Tensor]
) -> object:
    if isinstance(value, Tensor):
        if not must_change(value):
            return value
        changed = change(value)
        return nn.Parameter(changed, requires_grad=False) if isinstance(value, nn.Parameter) else changed
    if isinstance(value, Mask | Score):
        return _with_tensors(value, must_change, change)
    if isinstance(value, tuple | list):
        parts = [_value_with_tensors(part, must_change, change) for part in value]
        return value if all(a is b for a, b in zip(parts, value, strict=True)) else type(value)(parts)
    if isinstance(value, dict):
        items = {name: _value_with_tensors(part, must_change, change) for name, part in value.items()}
        return value if all(items[name] is part for name, part in value.items()) else items
    return value


def snapshot(A: AttentionMatrix, device: torch.device | None, keys: int | None = None) -> AttentionMatrix:
    """Return a matrix that can be kept after the pass: no graph, nothing shared with the model, lse known.

    Parameters
    ----------
    A : AttentionMatrix, shape (batch, heads, m, n)
        The matrix as the model made it.
    device : torch.device, optional
        Where its tensors are kept; where they are, by default.
    keys : int, optional
        How many keys are kept; all, by default.
    """
    problem = A.problem
    lse = detached_tensor(A._exact_lse(), device)  # in float64, whatever the tokens are: weights are made of it again
    there = None if device is None or device == problem.device else device
    mask = None if problem.mask is None else detached(problem.mask, there)
    if mask is not None and there is not None:
        # What a function holds stays where it is.
        mask = Translated(mask, *problem.shape[2:], 0, 0, problem.device) if holds_function(mask) else mask
    problem = replace(
        problem,
        q=detached_tensor(problem.q, there),
        k=detached_tensor(problem.k if keys is None else problem.k[:, :, :keys], there),
        sink=None if problem.sink is None else problem.sink.detach().clone().to(there or problem.device),
        mask=mask,
        score=detached(problem.score, there),
        versions=(),  # of the tensors kept here, and not of those of the model, which may change
    )
    batch, heads = problem.shape[:2]
    return AttentionMatrix(problem, A.plan, Axes((batch, heads), (True, True)), lse)


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
    size = k.element_size()
    bits = k.detach().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    heads, d = k.shape[1], k.shape[3]
    generator = torch.Generator().manual_seed(20)
    weights = torch.randint(-(2**62), 2**62, (heads, d), generator=generator, dtype=torch.int64) * 2 + 1
    weights = weights.to(k.device).view(1, heads, 1, d)
    parts = [(part.long() * weights).sum(dim=(1, 3)) for part in bits.split(_CHUNK, dim=2)]
    return torch.cat(parts, dim=-1) if parts else torch.zeros(k.shape[0], 0, dtype=torch.int64, device=k.device)
