"""Bytes that a rank sends and memory that it takes, counted operation by operation."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import attlas
from attlas import stats

pytestmark = pytest.mark.filterwarnings("ignore")

RANKS, N, HEADS, KEY_HEADS, SIZE = 4, 64, 4, 2, 16
KEYS = (RANKS - 1) * N // RANKS * KEY_HEADS * SIZE * 4  # bytes of a rank's keys, sent to each of the others


class Traffic(TorchDispatchMode):
    """Counts the bytes that a rank sends in the usual (ring) form of each collective."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it comes back as ordinary operations and collectives
        family, _, name = func._schema.name.partition("::")
        if family == "_c10d_functional" and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            share = (RANKS - 1) / RANKS
            factor = {"all_gather_into_tensor": RANKS - 1, "reduce_scatter_tensor": share, "all_reduce": 2 * share}
            self.sent += args[0].numel() * args[0].element_size() * factor[name]
        return func(*args, **(kwargs or {}))


def count(work: Callable[[], Any]) -> float:
    with Traffic() as traffic:
        work()
    return traffic.sent


@pytest.mark.skipif(torch.__version__ < (2, 9), reason="modes of torch 2.8 fail in several threads")
def test_bytes_sent(on_ranks: Callable[..., list[Any]]) -> None:
    def tokens(heads: int, seed: int) -> Tensor:
        return torch.randn(1, heads, N, SIZE, generator=torch.Generator().manual_seed(seed))

    def job(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (RANKS,))

        def shard(t: Tensor, placement: Any) -> DTensor:
            return distribute_tensor(t, mesh, [placement], src_data_rank=None)

        plain = tokens(HEADS, 0), tokens(KEY_HEADS, 1), tokens(KEY_HEADS, 2)
        for placement in (Shard(0), Shard(1), Replicate()):
            q, k, v = (shard(plain[0], placement) for _ in range(3))
            assert count(lambda q=q, k=k, v=v: (attlas.attend(q, k) @ v, stats.picture(attlas.attend(q, k), 8, 8))) == 0
        q, k, v = (shard(t, Shard(2)).requires_grad_() for t in plain)
        with torch.no_grad():
            assert count(lambda: attlas.attend(q, k) @ v) == 2 * KEYS
            A = attlas.attend(q, k)
            assert count(lambda: A.collect(stats.Entropy(), stats.TopK(8))) == 0  # rows stay where they are
            columns = 2 * (RANKS - 1) / RANKS * HEADS * N * 4
            assert count(lambda: A.collect(stats.ColumnMass())) == columns
            assert count(lambda: A[0, 1, 5:9, 3:20]) == 2 * (RANKS - 1) / RANKS * 4 * 17 * 4
        out = attlas.attend(q, k) @ v
        gradient = out.detach()
        assert count(lambda: torch.autograd.grad(out, [q, k, v], gradient)) == 2 * KEYS  # reduce-scatter
        with torch.no_grad():
            whole = shard(plain[0], Replicate())
            merged = 2 * (RANKS - 1) / RANKS * HEADS * N * (SIZE * 4 + 2 * 8)
            assert count(lambda: attlas.attend(whole, k) @ v) == merged

    on_ranks(RANKS, job)


class Memory(TorchDispatchMode):
    """Knows the largest sum of bytes that tensors had at a time, of those that were made in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.given: set[int] = set()
        self.made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        for own, tensors in ((False, tree_leaves(args)), (True, tree_leaves(out))):
            for t in tensors:
                if type(t) is not Tensor or t.is_meta or t.untyped_storage()._cdata in (*self.made, *self.given):
                    continue
                storage = t.untyped_storage()
                if own:
                    self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                else:
                    self.given.add(storage._cdata)
        self.made = {key: one for key, one in self.made.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.made.values()))
        return out


def peak(work: Callable[[], Any]) -> int:
    with Memory() as memory:
        work()
    return memory.peak


def test_memory_is_that_of_the_gathered_keys_and_values(on_ranks: Callable[..., list[Any]]) -> None:
    size = KEY_HEADS * 512 * 32 * 4  # all keys, or all values

    def job(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (RANKS,))
        q = torch.randn(1, HEADS, 512, 32)
        k, v = torch.randn(2, 1, KEY_HEADS, 512, 32)
        many = [distribute_tensor(t, mesh, [Shard(2)], src_data_rank=None) for t in (q, k, v)]
        one = [q.chunk(RANKS, dim=2)[rank].clone(), k, v]
        asked = stats.Entropy(), stats.ColumnMass()

        def product(q: Any, k: Any, v: Any) -> Any:
            return attlas.attend(q, k) @ v

        def gradients(q: Any, k: Any, v: Any) -> Any:
            leaves = [t.detach().requires_grad_() for t in (q, k, v)]
            out = product(*leaves)
            return torch.autograd.grad(out, leaves, out.detach())

        with torch.no_grad():
            # Both gathered, and for a time a copy of its own part of each, which is a quarter.
            assert peak(lambda: product(*many)) - peak(lambda: product(*one)) <= 2.6 * size
            collected = peak(lambda: attlas.attend(*many[:2]).collect(*asked))
            assert collected - peak(lambda: attlas.attend(*one[:2]).collect(*asked)) <= 1.35 * size
        assert peak(lambda: gradients(*many)) - peak(lambda: gradients(*one)) <= 3.1 * size

    on_ranks(RANKS, job)


COUNTED = """
import sys, torch, attlas
q, k = torch.randn(2, 1, 4, 64, 16)

def calls():
    seen = []
    sys.setprofile(lambda frame, event, argument: seen.append(event) if "call" in event else None)
    attlas.attend(q, k)
    sys.setprofile(None)
    return len(seen)

calls()
before = calls()
import torch.distributed.tensor.experimental
import attlas.distributed
calls()
print(before, calls())
"""


def test_plain_tensors_cost_no_more() -> None:
    """attend() does as much for plain tensors after everything distributed was imported."""
    found = subprocess.run([sys.executable, "-c", COUNTED], check=True, capture_output=True, text=True)
    before, after = map(int, found.stdout.split())
    assert 40 < after <= before + 4
