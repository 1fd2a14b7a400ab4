"""What the functions of one pair read: numbers of a tensor by batch, head, query and key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from attlas.engine.problem import Problem
from attlas.foundation.tiles import Tile

#: A function of batch, head, query and key, which are integer tensors; batch and head are counted from 0.
OfPair: TypeAlias = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

#: What a function is made of, as a key: two with the same key are compiled from the same code.
Kind: TypeAlias = tuple[object, ...]


class Untranslatable(Exception):  # noqa: N818 - it is no error, and never leaves the backend
    """Why something has no form of one pair, as a part of a sentence."""


class Span:
    """All places along one axis, as a `range` of them: in a program that is traced that would make its size a constant.

    Parameters
    ----------
    size : int
        How many there are.
    """

    start, step = 0, 1

    def __init__(self, size: int) -> None:
        self.stop = size

    def __len__(self) -> int:
        return self.stop


def whole(problem: Problem) -> Tile:
    """Return the tile of a whole matrix."""
    if not torch.compiler.is_compiling():
        return problem.tile(*map(range, problem.shape))
    # While torch traces, a `range` would make the sizes of the matrix constants of the program: `Span` does not. No
    # part of a matrix is traced here, so that batches and heads count from 0 (`is_counted`).
    batch, heads, m, n = problem.shape
    spans: Any = [Span(size) for size in problem.shape]
    b, h = torch.arange(batch, device="cpu"), torch.arange(heads, device="cpu")
    return Tile(spans[0], spans[1], spans[2], spans[3], m, n, b, h, problem.device, problem.dtype)


def reader(t: Tensor) -> tuple[Callable[..., Tensor], Kind]:
    """Return a function that reads a tensor at one place along each axis, and its key (`Kind`).

    The key says what code the function needs: programs are compiled once for each.

    An axis of size 1 stands for every place, and is not looked at.
    """
    axes = tuple(axis for axis, size in enumerate(t.shape) if size != 1)
    t = t.reshape([t.shape[axis] for axis in axes])

    def read(*places: Tensor) -> Tensor:
        return t[tuple(places[axis] for axis in axes)] if axes else t

    return read, ("table", axes, t.dtype, t.requires_grad)


def of_ids(t: Tensor, axis: int, ids: Tensor) -> Tensor:
    """Return the entries of some batches or heads along an axis, whose size 1 stands for all."""
    if t.shape[axis] == 1 or (t.shape[axis] == len(ids) and is_counted(ids)):
        return t
    return t.index_select(axis, ids.to(t.device))


def is_counted(ids: Tensor) -> bool:
    """Return whether numbers on the CPU are 0, 1, 2 ...; in a program that torch traces, no other matrix comes here."""
    return torch.compiler.is_compiling() or torch.equal(ids, torch.arange(len(ids), device="cpu"))


def code_of(f: object) -> object:
    """Return the key under which a program compiled for a user's function is kept.

    It is the function's code: a lambda in a loop is compiled once. `functools.partial` is looked through;
    a module counts by itself, and another callable object by its class.
    """
    while (inner := getattr(f, "func", None)) is not None:
        f = inner
    return getattr(f, "__code__", None) or (id(f) if isinstance(f, nn.Module) else type(f))


def binary_steps(most: int) -> Sequence[int]:
    """Return the steps of a search among up to `most` entries: descending powers of 2.

    Examples
    --------
    >>> binary_steps(5), binary_steps(0)
    ([4, 2, 1], [])
    """
    return [1 << power for power in reversed(range(most.bit_length()))]
