"""The monitor in distributed training: its numbers are those of all ranks."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.processes import needs_gloo, on_two
from tests.recording.conftest import share_heads, two_layers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from attlas.errors import OutOfRangeError, RecordingError
from attlas.huggingface import AttentionMonitor

pytestmark = [pytest.mark.filterwarnings("ignore"), needs_gloo]
IDS = torch.arange(3, 25).view(2, 11)


def steps(monitor: AttentionMonitor, model: nn.Module, ids: Tensor) -> dict[str, float]:
    """Return what a monitor logs of one more step."""
    control, state = SimpleNamespace(should_log=False), SimpleNamespace(global_step=0, epoch=None, log_history=[])
    monitor.on_step_begin(None, state, control, model=model)  # type: ignore[arg-type]
    with torch.no_grad():
        model(ids)
    monitor.on_step_end(None, state, control)  # type: ignore[arg-type]
    return monitor.last


def numbers_of_rank(rank: int, tensor_parallel: bool) -> dict[str, float]:
    model = two_layers()
    if not tensor_parallel:
        return steps(AttentionMonitor(every=1), model, IDS[rank : rank + 1])
    return steps(AttentionMonitor(every=1), share_heads(model, init_device_mesh("cpu", (2,))), IDS)


@pytest.mark.parametrize("tensor_parallel", [False, True])
def test_numbers_are_those_of_all_ranks(tmp_path: Path, tensor_parallel: bool) -> None:
    wanted = steps(AttentionMonitor(every=1), two_layers(), IDS)
    for found in on_two(numbers_of_rank, tmp_path, tensor_parallel):
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


def error_of_rank(rank: int) -> str:
    model, monitor, own = two_layers(), AttentionMonitor(every=1, per="layer"), IDS[rank : rank + 1]
    first = steps(monitor, model, own)
    with Collectives() as seen:
        assert steps(monitor, model, own) == first
    assert seen.names == ["allreduce_"]
    monitor.queries = slice(0, 3) if rank == 0 else slice(40, 50)  # rank 1 reads no such query
    with pytest.raises(RecordingError, match="the queries must lie within the text") as caught:
        steps(monitor, model, own)
    monitor.queries, monitor.layers = None, [9] if rank == 0 else [0]  # there are two
    with pytest.raises(OutOfRangeError, match="each layer must be one of the model's attentions"):
        steps(monitor, model, own)
    monitor.layers = [rank]  # ranks of a pipeline have different layers
    numbers, whole = (steps(each, model, IDS[:1]) for each in (monitor, AttentionMonitor(every=1, per="layer")))
    # Of all layers, outputs and statistics come from one call of the kernels: the last bits may be others.
    of_layers = {name: value for name, value in whole.items() if "layer_" in name}
    assert {name: numbers[name] for name in numbers if "layer_" in name} == pytest.approx(of_layers, rel=1e-6)
    return str(caught.value)


def test_one_exchange_a_step_and_one_error(tmp_path: Path) -> None:
    first, second = on_two(error_of_rank, tmp_path)
    assert first == second
