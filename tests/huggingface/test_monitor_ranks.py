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
from torch.utils._python_dispatch import TorchDispatchMode

from attlas.errors import OutOfRangeError, RecordingError
from attlas.huggingface import AttentionMonitor

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not distributed.is_gloo_available(), reason="torch has no gloo here"),
]


def steps(monitor: AttentionMonitor, model: nn.Module, ids: Tensor) -> dict[str, float]:
    """Return what a monitor logs of one more step."""
    control, state = SimpleNamespace(should_log=False), SimpleNamespace(global_step=0, epoch=None, log_history=[])
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
        found = steps(AttentionMonitor(every=1), model, ids if tensor_parallel else ids[rank : rank + 1])
        torch.save(found, f"{folder}/{rank}")
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("tensor_parallel", [False, True])
def test_numbers_are_those_of_all_ranks(tmp_path: Path, tensor_parallel: bool) -> None:
    ids = torch.arange(3, 25).view(2, 11)
    wanted = steps(AttentionMonitor(every=1), llama(), ids)
    arguments = (str(tmp_path), ids, tensor_parallel)
    torch.multiprocessing.start_processes(_process, arguments, nprocs=2, start_method="fork")
    for rank in range(2):
        found = torch.load(tmp_path / str(rank), weights_only=True)
        assert found.keys() == wanted.keys()
        assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)


class Collectives(TorchDispatchMode):
    """Names the collectives of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        family, _, name = func._schema.name.partition("::")
        if family == "c10d":
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def _of_rank(rank: int, folder: str, ids: Tensor) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        model, monitor = llama(), AttentionMonitor(every=1, per="layer")
        first = steps(monitor, model, ids[rank : rank + 1])
        with Collectives() as seen:
            assert steps(monitor, model, ids[rank : rank + 1]) == first
        assert seen.names == ["allreduce_"]
        monitor.queries = slice(0, 3) if rank == 0 else slice(40, 50)  # rank 1 reads no such query
        with pytest.raises(RecordingError, match="the queries must lie within the text") as caught:
            steps(monitor, model, ids[rank : rank + 1])
        Path(folder, f"error {rank}").write_text(str(caught.value))
        monitor.queries, monitor.layers = None, [9] if rank == 0 else [0]  # there are two
        with pytest.raises(OutOfRangeError, match="each layer must be one of the model's attentions"):
            steps(monitor, model, ids[rank : rank + 1])
        monitor.layers = [rank]  # ranks of a pipeline have different layers
        numbers = steps(monitor, model, ids[:1])
        assert {name: numbers[name] for name in numbers if "layer_" in name} == {
            name: value for name, value in steps(AttentionMonitor(every=1, per="layer"), model, ids[:1]).items()
            if "layer_" in name
        }  # fmt: skip
    finally:
        distributed.destroy_process_group()


def test_one_exchange_a_step_and_one_error(tmp_path: Path) -> None:
    ids = torch.arange(3, 25).view(2, 11)
    torch.multiprocessing.start_processes(_of_rank, (str(tmp_path), ids), nprocs=2, start_method="fork")
    first, second = ((tmp_path / f"error {rank}").read_text() for rank in range(2))
    assert first == second
