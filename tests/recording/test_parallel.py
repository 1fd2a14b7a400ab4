"""Models spread over two processes: heads are numbered through, and a part of the keys is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.processes import needs_gloo, on_two
from tests.recording.conftest import share_heads, two_layers
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.experimental import context_parallel

import attlas
import attlas.huggingface
from attlas.errors import BackendError, RecordingError
from attlas.recording import record

pytestmark = [pytest.mark.filterwarnings("ignore"), needs_gloo]
IDS = torch.arange(3, 14)[None]


def sharded() -> nn.Module:
    """Return a model whose heads are shared by two processes."""
    return share_heads(two_layers(), init_device_mesh("cpu", (2,)))


def recorded(rank: int, heads: Any) -> tuple[list[list[int]], list[Tensor]]:
    model = sharded()
    with torch.no_grad(), record(model, heads=heads) as atlas:
        model(IDS)
    return [list(entry.heads) for entry in atlas.entries], [A.to_dense() for A in atlas]


def test_heads_are_numbered_through(tmp_path: Path) -> None:
    model = two_layers()
    with torch.no_grad(), record(model) as whole:
        model(IDS)
    (left, low), (right, high) = on_two(recorded, tmp_path, None)
    assert left == [[0, 1], [0, 1]]
    assert right == [[2, 3], [2, 3]]
    for A, one, other in zip(whole, low, high, strict=True):
        torch.testing.assert_close(torch.cat([one, other], dim=1), A.to_dense(), atol=1e-5, rtol=1e-4)


def test_chosen_heads_are_those_of_the_whole_layer(tmp_path: Path) -> None:
    model = two_layers()
    with torch.no_grad(), record(model, heads=[3]) as whole:
        model(IDS)
    (left, low), (right, high) = on_two(recorded, tmp_path, [-1])
    assert (left, low) == ([], [])
    assert right == [[3], [3]]
    for A, one in zip(whole, high, strict=True):
        torch.testing.assert_close(one, A.to_dense(), atol=1e-5, rtol=1e-4)


def heads_that_cannot_be_told(rank: int) -> str:
    model = sharded()
    for layer in model.model.layers:  # as where one matrix makes queries, keys and values
        attention = layer.self_attn
        attention.register_parameter("packed", attention.k_proj.weight)
        query = attention.q_proj.weight.full_tensor().chunk(2)[rank]
        attention.q_proj = nn.Linear(*query.T.shape, bias=False)
        attention.q_proj.weight = nn.Parameter(query)
    with pytest.raises(RecordingError) as caught, torch.no_grad(), record(model):
        model(IDS)
    return str(caught.value)


def test_heads_that_cannot_be_told_are_refused(tmp_path: Path) -> None:
    texts = on_two(heads_that_cannot_be_told, tmp_path)
    assert texts[0] == texts[1]
    assert "  found: tensor parallelism, and no projection with 16 rows here\n" in texts[0]


def inside_context_parallel(rank: int) -> list[str]:
    q, k, v = (torch.randn(1, 4, 8, 16) for _ in range(3))
    model, ids, texts = two_layers(), IDS[:, :8].clone(), []
    mesh = init_device_mesh("cpu", (2,))
    with context_parallel(mesh, buffers=[q, k, v, ids], buffer_seq_dims=[2, 2, 2, 1]):
        with pytest.raises(BackendError) as caught:
            attlas.huggingface.attention_forward(nn.Identity(), q, k, v, None)
        texts.append(str(caught.value))
        with pytest.raises(BackendError, match=r"attend\(\): every process must hold all keys"):
            attlas.attend(q, k)
        with pytest.raises(BackendError) as caught, record(model):
            model(ids)
        texts.append(str(caught.value))
        model.set_attn_implementation("attlas")
        with pytest.raises(BackendError) as caught:
            model(ids)
        texts.append(str(caught.value))
    with record(model) as atlas, torch.no_grad():
        model(ids)  # all is well again outside
    assert atlas[0].shape == (1, 4, 8, 8)
    return texts


def test_a_part_of_the_keys_is_refused(tmp_path: Path) -> None:
    for first, second, third in on_two(inside_context_parallel, tmp_path):
        assert first == third
        assert first.startswith("attlas.huggingface: every process must hold all keys of its queries.")
        assert second.startswith("record(): every process must hold all keys of its queries.")
