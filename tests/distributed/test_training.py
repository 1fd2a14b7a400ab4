"""A step of training under FSDP2 and DDP is that of one process, and each rank records its own texts."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.recording.conftest import SIZES, causal_model
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import attlas
import attlas.huggingface
from attlas import stats
from attlas.distributed import save

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not distributed.is_gloo_available(), reason="torch has no gloo here"),
]
IDS = torch.randint(3, 60, (4, 22), generator=torch.Generator().manual_seed(0))


def model() -> nn.Module:
    config = transformers.MistralConfig(**SIZES | {"num_hidden_layers": 2}, sliding_window=9)
    made = causal_model(config).double()
    made.set_attn_implementation("attlas")
    return made.train()


def step(trained: nn.Module, ids: Tensor) -> tuple[Tensor, Any]:
    """Return the loss of a step that leaves gradients, and what was recorded of it."""
    with attlas.record(trained, statistics=[stats.Entropy()]) as atlas:
        logits = trained(ids, use_cache=False).logits
        loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
    return loss.detach(), atlas


def sharded(whole: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for layer in whole.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(whole, mesh=mesh)


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {"FSDP2": sharded, "DDP": DistributedDataParallel}


def _process(rank: int, folder: str, wrapper: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        trained = WRAPPERS[wrapper](model())
        loss, atlas = step(trained, IDS.chunk(2)[rank])
        slopes = {name.removeprefix("module."): p.grad for name, p in trained.named_parameters()}
        slopes = {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in slopes.items()}
        torch.save((loss, slopes), f"{folder}/{rank}")
        save(atlas, f"{folder}/run.atlas", init_device_mesh("cpu", (2,)), [Shard(0)])
        with torch.no_grad():  # parameters are gathered anew for each pass
            assert (
                trained(IDS[:1], use_cache=False).logits - model()(IDS[:1], use_cache=False).logits
            ).abs().max() < 1e-12
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_step_is_that_of_one_process(tmp_path: Path, wrapper: str) -> None:
    one = model()
    wanted, atlas = step(one, IDS)
    torch.multiprocessing.start_processes(_process, (str(tmp_path), wrapper), nprocs=2, start_method="fork")
    (first, slopes), (second, others) = (torch.load(tmp_path / str(rank)) for rank in range(2))
    assert abs((first + second) / 2 - wanted) < 1e-12
    true = {name: p.grad for name, p in one.named_parameters()}
    assert slopes.keys() == others.keys() == true.keys()
    for name, slope in true.items():
        assert slope is not None
        torch.testing.assert_close(slopes[name], slope, atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(others[name], slopes[name], atol=0, rtol=0)
    found = attlas.load(tmp_path / "run.atlas")
    assert len(found.entries) == len(atlas.entries) == 2
    for entry, true_entry in zip(found.entries, atlas.entries, strict=True):
        name = entry.name.removeprefix("module.")  # DDP is a module that holds the model
        assert (name, entry.layer, entry.heads) == (true_entry.name, true_entry.layer, true_entry.heads)
        torch.testing.assert_close(entry.matrix.to_dense(), true_entry.matrix.to_dense(), atol=1e-12, rtol=1e-12)
        for name, result in true_entry.statistics.items():
            torch.testing.assert_close(entry.statistics[name], result.detach(), atol=1e-12, rtol=1e-12)
