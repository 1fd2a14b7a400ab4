"""A `mask_mod` or `score_mod` of the user in a compiled program: FlexAttention off the CPU, torch's operations on it.

The CPU is taken for a GPU: torch traces the program as it does there, and computes FlexAttention whole, with gradients.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.compiled.programs import Program
from tests.flex_cases import MASKS, SCORES, M, N, checkers, distance
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as module

import attlas
from attlas import stats
from attlas.engine.backends.flex import traced
from attlas.engine.backends.flex.blocks import BLOCK
from attlas.masks.argument import as_mask

HEADS, D = 4, 16
FUNCTION = attlas.from_function(checkers)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the CPU for a GPU, and let torch go back through FlexAttention on it."""
    monkeypatch.setattr(traced, "BACKENDS", {"flex": {"cpu", "cuda"}})
    monkeypatch.setattr(module, "_validate_device", lambda *tokens: None)


class Compiled:
    """A program as one graph, which is kept."""

    def __init__(self, program: Program, dynamic: bool | None = None) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.run = torch.compile(program, fullgraph=True, backend=self._keep, dynamic=dynamic)

    def _keep(self, graph: fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.graphs.append(graph)
        return graph.forward

    @property
    def flex(self) -> int:
        """Calls of FlexAttention in the graphs."""
        nodes = [node for graph in self.graphs for node in graph.graph.nodes]
        return sum(str(node.target) == "flex_attention" for node in nodes)

    def largest(self) -> int:
        """Return the most numbers that a tensor of the graphs has."""
        nodes = [node for graph in self.graphs for node in graph.graph.nodes]
        values = [node.meta.get("example_value") for node in nodes]
        return max(value.numel() for value in values if isinstance(value, Tensor))


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tokens(m: int = M, n: int = N) -> list[Tensor]:
    shapes = (2, HEADS, m, D), (2, 2, n, D), (2, 2, n, 5)
    return [numbers(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]


def agrees(program: Program, compiled: Compiled, given: list[Tensor]) -> None:
    """Compare values and all gradients of a compiled program with those of the plain one."""
    leaves = [t for t in (*given, *program.parameters()) if t.requires_grad]
    results = []
    for run in (program, compiled.run):
        out = run(*given)
        slope = torch.cos(torch.arange(out.numel())).view(out.shape)
        results.append((out, *torch.autograd.grad(out, leaves, slope)))
    for wanted, found in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-4 * float(wanted.detach().abs().max()), rtol=1e-4)


def test_one_graph_for_all_lengths(gpu: None) -> None:
    masks = MASKS["Heads(function) & Padding"](), FUNCTION & attlas.Window(60, 0), FUNCTION | attlas.Prefix([9, 3])

    def product(q: Tensor, k: Tensor, v: Tensor, score: attlas.Score) -> Tensor:
        A, B = attlas.attend(q, k, score, mask=masks[0]), attlas.attend(q, k, distance, mask=masks[1] & masks[2])
        return A.pooled(v) + B.pooled(v)

    program = Program(product, SCORES["ScoreMod(module)"]().float() + attlas.Alibi(HEADS))
    compiled = Compiled(program, dynamic=True)
    for m, n in ((M, N), (210, 270)):
        agrees(program, compiled, tokens(m, n))
    assert len(compiled.graphs) == 1
    assert compiled.flex == 2
    assert compiled.largest() < M * N


def test_log_sum_exp_and_sink(gpu: None) -> None:
    sink = torch.tensor([0.0, 1.0, -2.0, 5.0], requires_grad=True)
    mask = MASKS["function(table)"]() & MASKS["Bits(one)"]()

    def read(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        A = attlas.attend(q, k, distance, mask=mask, sink=sink)
        return A.pooled(v) + A.lse.unsqueeze(-1)

    program = Program(read)
    compiled = Compiled(program)
    agrees(program, compiled, [*tokens(), sink])
    assert compiled.flex == 2
    assert compiled.largest() < M * N


def test_a_gpu_gets_all_tensors_there() -> None:
    """Tensors without numbers say that they are on a GPU; torch refuses operations that mix them with others."""

    def attention(q: Tensor, k: Tensor, v: Tensor, change: Any, mask: Any, *_: Any) -> tuple[Tensor, Tensor]:
        place = torch.arange(2, dtype=torch.int32, device=q.device)
        allowed = mask.mask_mod(place.clamp(max=0), place.clamp(max=0), place, place)
        changed = change(torch.where(allowed, 1.0, 2.0), place, place, place, place)
        out = q.new_empty(*q.shape[:3], v.shape[-1]) + changed.sum() + mask.kv_indices.sum()
        return out, q.new_empty(q.shape[:3])

    def product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = attlas.Heads({1: FUNCTION}, attlas.Window(50, 0)) & attlas.Causal()
        return attlas.attention(q, k, v, distance, mask=mask)

    with FakeTensorMode(), torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(traced, "flex_attention", attention)
        given = [torch.empty(t.shape, device="cuda") for t in tokens()]
        out = torch.compile(product, fullgraph=True, dynamic=True, backend="eager")(*given)
        assert str(out.device) == "cuda:0"
        assert out.shape == (2, HEADS, M, 5)


@pytest.mark.parametrize("on", ["cpu", "gpu"])
def test_torch_operations_are_left(on: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "BACKENDS", {"flex": {"cuda"} if on == "cpu" else {"cpu"}})
    runs = FUNCTION & as_mask(MASKS["Runs"]())

    def product(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if on == "cpu":
            return attlas.attention(q, k, v, distance, mask=FUNCTION)
        A = attlas.attend(q, k, mask=FUNCTION)
        return attlas.attention(q, k, v, mask=runs) + A.pooled(v, 1e-9) + A.collect(stats.Entropy())[0].unsqueeze(-1)

    program = Program(product)
    compiled = Compiled(program)
    with torch.no_grad():
        torch.testing.assert_close(compiled.run(*tokens()), program(*tokens()), atol=1e-5, rtol=1e-4)
    assert compiled.flex == 0


LOCAL = {
    "Causal": attlas.Causal(),
    "Window": attlas.Window(200, 5),
    "Window(left)": attlas.Window(None, 20, -130),
    "Dilated": attlas.Dilated(90, None, 7, offset=-50),
    "And": attlas.Causal() & attlas.Window(150, 150) & FUNCTION,
    "Or": attlas.Window(20, 20) | attlas.Window(0, 0, 300),
}


@pytest.mark.parametrize("name", LOCAL)
def test_blocks_that_masks_beside_a_function_leave_out(name: str) -> None:
    m, n, mask = 700, 900, LOCAL[name]
    rows, columns = torch.arange(0, m, BLOCK).unsqueeze(-1), torch.arange(0, n, BLOCK)
    found = traced._reachable_blocks(mask, rows, columns, m, n)
    allowed = attlas.attend(torch.zeros(m, 1), torch.zeros(n, 1), mask=mask).to_dense() > 0
    padded = torch.nn.functional.pad(allowed, (0, -n % BLOCK, 0, -m % BLOCK))
    true = padded.unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK)).any(3).any(1)
    assert found is not None
    assert torch.equal(found, true)
    assert traced._reachable_blocks(FUNCTION | mask, rows, columns, m, n) is None
