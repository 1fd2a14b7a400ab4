"""A step of training under FSDP2 and DDP is that of one process, and each rank records its own texts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.processes import needs_gloo, on_two
from tests.recording.conftest import two_layers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import attlas
import attlas.huggingface
from attlas import stats
from attlas.distributed import save

pytestmark = [pytest.mark.filterwarnings("ignore"), needs_gloo]
IDS = torch.randint(3, 60, (4, 22), generator=torch.Generator().manual_seed(0))


def model() -> nn.Module:
    made = two_layers(window=9).double()
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


def trained_on_rank(rank: int, wrapper: str, folder: Path) -> tuple[Tensor, dict[str, Tensor]]:
    trained = WRAPPERS[wrapper](model())
    loss, atlas = step(trained, IDS.chunk(2)[rank])
    slopes = {name.removeprefix("module."): p.grad for name, p in trained.named_parameters()}
    save(atlas, folder, init_device_mesh("cpu", (2,)), [Shard(0)])
    with torch.no_grad():  # parameters are gathered anew for each pass
        found, wanted = (one(IDS[:1], use_cache=False).logits for one in (trained, model()))
    assert (found - wanted).abs().max() < 1e-12
    return loss, {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in slopes.items()}


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_step_is_that_of_one_process(tmp_path: Path, wrapper: str) -> None:
    one = model()
    wanted, atlas = step(one, IDS)
    (first, slopes), (second, others) = on_two(trained_on_rank, tmp_path, wrapper, tmp_path / "run.atlas")
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
