"""A module that attends to DTensors: a recording does not take the part of one rank for the whole."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import attlas
from attlas.interventions import Ablate


class Attention(nn.Module):
    """Attends to DTensors and to the whole tensor."""

    def forward(self, q: Any, whole: Tensor) -> tuple[Any, Tensor]:
        return attlas.attend(q, q, mask=attlas.Causal()) @ q, attlas.attention(whole, whole, whole)


def test_parts_of_ranks_are_not_heard(on_ranks: Callable[..., Any]) -> None:
    whole = torch.randn(1, 2, 8, 4)
    wanted = attlas.attention(whole, whole, whole, mask=attlas.Causal())

    def job(rank: int, ranks: int) -> tuple[Tensor, list[str], Tensor]:
        q = distribute_tensor(whole, init_device_mesh("cpu", (ranks,)), [Shard(2)])
        model = Attention()
        with attlas.intervene(model, Ablate()), attlas.record(model) as atlas:
            out, ablated = model(q, whole)
        return out.full_tensor(), [entry.name for entry in atlas.entries], ablated

    for out, names, ablated in on_ranks(2, job):
        torch.testing.assert_close(out, wanted)
        assert names == [""]
        assert not ablated.any()
