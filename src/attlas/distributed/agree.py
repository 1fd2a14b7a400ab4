"""Errors that all ranks of a mesh raise together, so that no rank waits for one that has given up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeVar

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from attlas.errors import AttlasError

T = TypeVar("T")


def agreed(mesh: DeviceMesh, compute: Callable[[], T]) -> T:
    """Run a function without collectives on all ranks; return its result, or raise the first error of any rank on all.

    Cost: one all-reduce of one number for each dimension of the mesh.
    """
    result, error = attempted(compute)
    groups = mesh.get_all_groups()
    flag = torch.tensor([error is not None], dtype=torch.int32, device=mesh.device_type)
    for group in groups:
        distributed.all_reduce(flag, distributed.ReduceOp.MAX, group)
    if flag.item():
        raise_first(error, groups)
    return result  # type: ignore[return-value]  # it is what compute() gave


def attempted(compute: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Call a function, and return its result and None, or None and its error."""
    try:
        return compute(), None
    except Exception as error:  # noqa: BLE001 - any error leaves the other ranks waiting
        return None, error


def raise_first(error: Exception | None, groups: Sequence[Any]) -> NoReturn:
    """Raise on all ranks the first error of any; each rank gives its own, or None.

    Parameters
    ----------
    error : Exception, optional
        What this rank failed by.
    groups : sequence of ProcessGroup or None
        The groups of a mesh; None is the group of all ranks.
    """
    first = _picklable_error(error)
    for group in groups:
        errors: list[Exception | None] = [None] * distributed.get_world_size(group)
        distributed.all_gather_object(errors, first, group)
        first = next((one for one in errors if one is not None), None)
    raise first or RuntimeError("a rank failed.") from error


def gathered(mesh: DeviceMesh, compute: Callable[[], T]) -> dict[int, T]:
    """Return the results of a function without collectives on all ranks, or raise on all the first error of any.

    Parameters
    ----------
    mesh : DeviceMesh
        The ranks.
    compute : callable
        It returns plain data and tensors on the CPU.

    Returns
    -------
    dict
        The results by the global number of the rank, in the order of the mesh.
    """
    result, error = attempted(compute)
    every: dict[int, Any] = {distributed.get_rank(): (result, _picklable_error(error))}
    for group in mesh.get_all_groups():
        parts: list[Any] = [None] * distributed.get_world_size(group)
        distributed.all_gather_object(parts, every, group)
        every = {rank: one for part in parts for rank, one in part.items()}
    every = {rank: every[rank] for rank in mesh.mesh.flatten().tolist()}
    first = next((failure for _, failure in every.values() if failure is not None), None)
    if first is not None:
        raise first from error
    return {rank: found for rank, (found, _) in every.items()}


def _picklable_error(error: Exception | None) -> Exception | None:
    """Return an error that can be pickled for other processes: one of attlas or of Python itself."""
    if error is None or isinstance(error, AttlasError):
        return error
    if type(error).__module__ == "builtins" and not isinstance(error, OSError | UnicodeError):
        return type(error)(*map(str, error.args))
    return RuntimeError(f"{type(error).__name__}: {error}")
