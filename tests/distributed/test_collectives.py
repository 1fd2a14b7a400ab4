"""Results of functional collectives that are on their way: they are waited for wherever a tensor is given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import attlas
from attlas import stats

pytestmark = pytest.mark.filterwarnings("ignore")

Q = torch.randn(1, 2, 200, 4, generator=torch.Generator().manual_seed(0))
USES: dict[str, tuple[Tensor, Callable[[Any], Any]]] = {
    "tokens": (Q, lambda t: attlas.attend(t, t, mask=attlas.Causal()) @ t),
    "attention": (Q, lambda t: attlas.attention(t, t, t)),
    "transposed": (Q, lambda t: attlas.attend(Q, Q).mT @ t),
    "statistics": (Q, lambda t: attlas.attend(t, t).collect(stats.Entropy(), stats.ColumnMass())[1]),
    "cells": (Q, lambda t: attlas.attend(t, t)[0, 1, 5:9]),
    "sink": (Q[0, :, 0, 0], lambda t: attlas.attend(Q, Q, sink=t) @ Q),
    "scale": (Q[0, :, 0, 0].abs(), lambda t: attlas.attend(Q, Q, scale=t) @ Q),
    "tensor mask": ((Q @ Q.mT)[0, 0] > 0, lambda t: attlas.attend(Q, Q, mask=t) @ Q),
    "added mask": ((Q @ Q.mT)[0, 0], lambda t: attlas.attend(Q, Q, mask=t) @ Q),
    "bias": ((Q @ Q.mT)[0, 0], lambda t: attlas.attend(Q, Q, score=attlas.ScaledDot() + attlas.TensorBias(t)) @ Q),
    "padding": (torch.tensor([40]), lambda t: attlas.attend(Q, Q, mask=attlas.Padding(t)) @ Q),
    "documents": (torch.arange(200) // 30, lambda t: attlas.attend(Q, Q, mask=attlas.Documents(t)) @ Q),
    "bandwidth": (torch.tensor(0.7), lambda t: attlas.attend(Q, Q, score=attlas.Gaussian(t)) @ Q),
    "bandwidth of few": (
        torch.tensor(0.7),
        lambda t: attlas.attend(Q[..., :9, :], Q[..., :9, :], score=attlas.Gaussian(t)) @ Q[..., :9, :],
    ),
    "index": (torch.tensor([3, 190]), lambda t: attlas.attend(Q, Q)[0, 0, t]),
}


@pytest.mark.parametrize("name", USES)
def test_results_on_their_way_are_waited_for(on_ranks: Callable[..., list[Any]], name: str) -> None:
    t, use = USES[name]
    wanted = use(t)

    def job(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (world,))
        sent = t if t.is_floating_point() or rank == 0 else torch.zeros_like(t)
        sent = sent / world if t.is_floating_point() else sent
        given = collectives.all_reduce(sent, "max" if t.dtype is torch.bool else "sum", (mesh, 0))
        assert type(given).__name__ == "AsyncCollectiveTensor"
        torch.testing.assert_close(use(given), wanted)

    on_ranks(2, job, 20)


@pytest.mark.parametrize("plan", [None, attlas.Plan(gathered_bytes=1)], ids=str)
def test_parts_on_their_way_are_waited_for(on_ranks: Callable[..., list[Any]], plan: attlas.Plan | None) -> None:
    def job(rank: int, world: int) -> None:
        mesh = init_device_mesh("cpu", (world,))

        def sharded() -> DTensor:
            sent = collectives.all_reduce(Q.chunk(world, dim=2)[rank] / world, "sum", (mesh, 0))
            return DTensor.from_local(sent, mesh, [Shard(2)], run_check=False)

        wanted = Q.view(1, 2, world, -1, 4).sum(2) / world
        wanted = torch.cat([wanted] * world, dim=2)
        A = attlas.attend(sharded(), sharded(), plan=plan)
        torch.testing.assert_close(A.lse.full_tensor(), attlas.attend(wanted, wanted).lse)
        torch.testing.assert_close((A @ sharded()).full_tensor(), attlas.attend(wanted, wanted) @ wanted)

    on_ranks(2, job, 20)
