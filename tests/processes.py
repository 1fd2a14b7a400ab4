"""Two processes that talk through gloo, or through NCCL."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

__all__ = ["join", "needs_gloo", "on_two"]

needs_gloo = pytest.mark.skipif(not distributed.is_gloo_available(), reason="torch has no gloo here")


def join(rank: int, folder: Path, backend: str = "gloo") -> None:
    """Make this process one of two, which meet in a folder."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    distributed.init_process_group(backend, init_method=f"file://{folder}/meet", rank=rank, world_size=2)


def _process(rank: int, work: Callable[..., Any], folder: Path, given: tuple[Any, ...], backend: str) -> None:
    join(rank, folder, backend)
    try:
        torch.save(work(rank, *given), folder / str(rank))
    finally:
        distributed.destroy_process_group()


def on_two(
    work: Callable[..., Any], folder: Path, *given: Any, backend: str = "gloo", start: str = "fork"
) -> list[Any]:
    """Return what ``work(rank, *given)`` gives in each of two processes."""
    arguments = (work, folder, given, backend)
    torch.multiprocessing.start_processes(_process, arguments, nprocs=2, start_method=start)
    return [torch.load(folder / str(rank), weights_only=True) for rank in range(2)]
