"""The monitor in distributed training: its numbers are those of all ranks."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tests.recording.conftest import SIZES, causal_model
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from attlas.huggingface import AttentionMonitor

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not distributed.is_gloo_available(), reason="torch has no gloo here"),
]


def numbers(model: nn.Module, ids: Tensor, rank: int = 0) -> dict[str, float]:
    """Return what the monitor logs of one step."""
    monitor, control = AttentionMonitor(every=1), SimpleNamespace(should_log=False)
    state: Any = SimpleNamespace(global_step=0, is_world_process_zero=rank == 0, epoch=None, log_history=[])
    monitor.on_step_begin(None, state, control, model=model)  # type: ignore[arg-type]
    with torch.no_grad():
        model(ids)
    monitor.on_step_end(None, state, control)  # type: ignore[arg-type]
    return monitor.last


def llama() -> nn.Module:
    return causal_model(transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 2}))


def _process(rank: int, folder: str, ids: Tensor, tensor_parallel: bool) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        model = llama()
        if tensor_parallel:
            plan = {"o_proj": RowwiseParallel()} | {f"{name}_proj": ColwiseParallel() for name in "qkv"}
            for layer in model.model.layers:
                parallelize_module(layer.self_attn, init_device_mesh("cpu", (2,)), plan)
        found = numbers(model, ids if tensor_parallel else ids[rank : rank + 1], rank)
        torch.save(found, f"{folder}/{rank}")
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("tensor_parallel", [False, True])
def test_numbers_are_those_of_all_ranks(tmp_path: Path, tensor_parallel: bool) -> None:
    ids = torch.arange(3, 25).view(2, 11)
    wanted = numbers(llama(), ids)
    arguments = (str(tmp_path), ids, tensor_parallel)
    torch.multiprocessing.start_processes(_process, arguments, nprocs=2, start_method="fork")
    for rank in range(2):
        found = torch.load(tmp_path / str(rank), weights_only=True)
        assert found.keys() == wanted.keys()
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)
