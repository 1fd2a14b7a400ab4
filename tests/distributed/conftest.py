"""Ranks for the tests: threads of one process, by torch's own threaded process group."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import distributed

Job = Callable[[int, int], Any]


def run_in_threads(ranks: int, job: Job, seconds: float = 120) -> list[Any]:
    """Return what ``job(rank, ranks)`` gives on each rank; an error of any rank is raised."""
    from torch.distributed.tensor import _redistribute
    from torch.testing._internal.distributed.multi_threaded_pg import (
        ProcessLocalGroup,
        _install_threaded_pg,
        _uninstall_threaded_pg,
    )

    # torch keeps plans by thread, and the number of a thread may be that of another rank of an earlier test.
    _redistribute._gen_transform_infos.cache_clear()
    # torch 2.8 has no planner.
    getattr(_redistribute, "clear_redistribute_planner_cache", lambda: None)()
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    _install_threaded_pg()
    store, results, errors = distributed.HashStore(), [None] * ranks, [""] * ranks

    def work(rank: int) -> None:
        torch.set_num_threads(1)
        try:
            distributed.init_process_group("threaded", rank=rank, world_size=ranks, store=store)
            results[rank] = job(rank, ranks)
        except BaseException as error:  # noqa: BLE001 - the other threads must not wait for this one
            errors[rank] = "" if isinstance(error, SystemExit) else traceback.format_exc()
            ProcessLocalGroup.exception_handle(error)
        finally:
            if distributed.is_initialized():
                distributed.destroy_process_group()

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    hanging = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    _uninstall_threaded_pg()
    ProcessLocalGroup.reset()
    torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if any(errors):
        raise AssertionError("\n".join(text for text in errors if text))
    assert not hanging, f"ranks {hanging} hang"
    return results


def check_same_error(work: Callable[[int], Any], error: type[Exception], text: str) -> None:
    """Ask that a function of the rank raises one and the same error on two ranks."""

    def job(rank: int, world: int) -> tuple[str, str]:
        with pytest.raises(error, match=text) as caught:
            work(rank)
        return str(caught.value), getattr(caught.value, "fix", "")

    first, second = run_in_threads(2, job, 20)
    assert first == second


@pytest.fixture
def on_ranks() -> Callable[..., list[Any]]:
    """Run a function on some ranks."""
    return run_in_threads
