"""Wrong arguments: all ranks raise the same error, and what is not supported is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.distributed.conftest import check_same_error
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

import attlas
from attlas import stats
from attlas.distributed import head_tail_order
from attlas.errors import AttlasError, BackendError, DeviceError, DtypeError, GradientError, OutOfRangeError, ShapeError
from attlas.foundation import checks

pytestmark = pytest.mark.filterwarnings("ignore")


def tokens(*placements: Placement, heads: int = 4) -> DTensor:
    mesh = init_device_mesh("cpu", (2,))
    t = torch.randn(2, heads, 8, 6, generator=torch.Generator().manual_seed(0))
    return distribute_tensor(t, mesh, placements or [Shard(2)], src_data_rank=None)


def partial() -> DTensor:
    return DTensor.from_local(torch.zeros(2, 4, 8, 6), init_device_mesh("cpu", (2,)), [Partial()], run_check=False)


def wrong_mask(rank: int) -> None:
    attlas.attend(tokens(), tokens(), mask=torch.ones(3, 3) > 0 if rank == 1 else attlas.Causal())


def wrong_function(rank: int) -> None:
    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if rank == 1:
            raise KeyError("only here")
        return s

    attlas.attend(tokens(), tokens(), score=score).collect(stats.ColumnMass())


def wrong_values(rank: int) -> None:
    v = tokens()
    attlas.attend(tokens(), tokens()) @ (v if rank == 0 else v.to_local())


def wrong_statistic(rank: int) -> None:
    attlas.attend(tokens(Replicate()), tokens()).collect(stats.TopK(8 + rank))


@pytest.mark.parametrize(
    ("work", "error", "text"),
    [
        (wrong_mask, ShapeError, "mask"),
        (wrong_function, KeyError, "only here"),
        (wrong_values, DtypeError, "v must be a DTensor, as q and k are."),
        (wrong_statistic, ShapeError, "k cannot be larger than the number of keys."),
    ],
)
def test_all_ranks_raise_the_error_of_one(work: Callable[[int], None], error: type[Exception], text: str) -> None:
    check_same_error(work, error, text)


def test_a_mesh_of_devices_without_float64_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "WITHOUT_FLOAT64", ("cpu",))
    check_same_error(lambda rank: attlas.attend(tokens(), tokens()), DeviceError, "cpu, which has no float64")


class ShortOfMemory(attlas.Score):
    """A score that one rank cannot compute; the checks of attend() ask it about zeros."""

    def forward(self, q: Tensor, k: Tensor, at: Any) -> Tensor:
        if distributed.get_rank() == 1 and bool(q.any()):
            raise MemoryError("none is left")
        return q @ k.mT


def matrix(*placements: Placement) -> Any:
    return attlas.attend(tokens(*placements), tokens(), score=ShortOfMemory())


WORK: dict[str, Callable[[], Any]] = {
    "product": lambda: matrix() @ tokens(),
    "product of sharded keys": lambda: matrix(Replicate()) @ tokens(),
    "transposed": lambda: matrix().mT @ tokens(),
    "transposed of sharded keys": lambda: matrix(Replicate()).mT @ tokens(Replicate()),
    "log-sum-exp": lambda: matrix(Replicate()).lse,
    "statistic": lambda: matrix().collect(stats.ColumnMass()),
    "statistic of sharded keys": lambda: matrix(Replicate()).collect(stats.Entropy()),
    "cells": lambda: matrix()[..., :3],
}


@pytest.mark.parametrize("name", WORK)
def test_all_ranks_raise_where_one_cannot_compute(name: str) -> None:
    check_same_error(lambda rank: WORK[name](), MemoryError, "none is left")


class Own(stats.Statistic):
    def start(self, problem: Any) -> Tensor:
        return torch.zeros(problem.shape[:2])

    def step(self, carry: Tensor, part: Any, at: Any) -> Tensor:
        return carry + part.weights.square().sum((-1, -2))


class Derived(stats.Entropy):
    """A derived statistic whose carry is another one, and that says nothing of how it is merged."""

    def step(self, carry: Tensor, part: Any, at: Any) -> Tensor:
        carry[at.place] = torch.maximum(carry[at.place], part.weights.sum(-1))
        return carry


def transformed() -> None:
    q, k = tokens(), tokens()
    torch.func.grad(lambda t: attlas.attend(q, k).topk(2).values.sum() + t)(torch.zeros(()))


def closes_over() -> None:
    table = torch.zeros(8, requires_grad=True)
    attlas.attend(tokens(), tokens(), score=lambda s, b, h, i, j: s + table[i])


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "lazy part": (lambda: attlas.attend(tokens(), tokens())[0], BackendError, "an index must name rows or columns"),
    "new axis": (lambda: attlas.attend(tokens(), tokens())[None, 0, 0], BackendError, "an index names batches, heads"),
    "pairs": (lambda: attlas.attend(tokens(), tokens())[..., [0, 1], [2, 3]], BackendError, "at most one of them"),
    "outside": (lambda: attlas.attend(tokens(), tokens())[0, 0, 8], OutOfRangeError, "index 8 on axis 2"),
    "cells in another order": (
        lambda: attlas.distributed.attend(tokens(), tokens(), order=torch.arange(8))[0, 0, 0],
        BackendError,
        "cells are read where tokens are sharded in the order",
    ),
    "sum": (lambda: attlas.attend(tokens(), tokens()).sum(-1), BackendError, "found: A.sum"),
    "transposed": (lambda: attlas.attend(tokens(), tokens()).mT.sum(0), BackendError, "found: A.mT.sum"),
    "size": (lambda: attlas.attend(tokens(Shard(3)), tokens()), ShapeError, "each token of q must be whole."),
    "partial": (lambda: attlas.attend(partial(), tokens()), ShapeError, "q must be sharded or replicated."),
    "plain keys": (lambda: attlas.attend(tokens(), tokens().to_local()), DtypeError, "q and k must both be DTensors"),
    "plain queries": (lambda: attlas.attend(torch.zeros(1, 2), tokens()), DtypeError, "q is a Tensor"),
    "dropout": (lambda: attlas.attention(tokens(), tokens(), tokens(), dropout_p=0.5), BackendError, "dropout_p=0.0"),
    "own statistic": (lambda: attlas.attend(tokens(), tokens()).collect(Own()), DtypeError, "Own must define merge"),
    "derived": (
        lambda: attlas.attend(tokens(), tokens()).collect(Derived()),
        DtypeError,
        "Derived must define merge",
    ),
    "class": (lambda: attlas.attend(tokens(), tokens()).collect(stats.Entropy), DtypeError, "every argument must be"),
    "pooled values": (
        lambda: attlas.attend(tokens(Shard(0)), tokens(Shard(0))).collect(stats.Pooled(torch.zeros(2, 1, 8, 3))),
        BackendError,
        "values are pooled apart from statistics",
    ),
    "transform": (transformed, BackendError, "DTensors are attended to eagerly."),
    "closure": (closes_over, GradientError, "a tensor that a function reads."),
    "order": (
        lambda: attlas.distributed.attend(tokens(), tokens(), order=torch.zeros(8, dtype=torch.int64)),
        ShapeError,
        "order must be a permutation",
    ),
    "order of keys": (
        lambda: attlas.distributed.attend(tokens(Replicate()), tokens(), order=torch.arange(8)),
        ShapeError,
        "queries must be sharded too",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_named(name: str) -> None:
    work, error, text = REFUSED[name]
    assert issubclass(error, AttlasError)
    check_same_error(lambda rank: work(), error, text)


def test_an_order_needs_whole_pieces() -> None:
    with pytest.raises(ShapeError, match="n must be a multiple of"):
        head_tail_order(10, 2)
