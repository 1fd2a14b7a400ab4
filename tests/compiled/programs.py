"""Small programs around a lazy matrix, run plainly and compiled: their values and all gradients are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func

import attlas
from attlas import masks
from attlas.masks.runs import RunPerRow, runs_of
from attlas.scores import Score

BATCH, HEADS, M, N, D = 2, 4, 24, 24, 16


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def tokens(
    m: int = M, n: int = N, heads: int = HEADS, e: int = D, dtype: torch.dtype = torch.float32, d: int = D
) -> list[Tensor]:
    """Return queries, keys and values that want a gradient."""
    shapes = (BATCH, HEADS, m, d), (BATCH, heads, n, d), (BATCH, heads, n, e)
    return [numbers(*shape, seed=i, dtype=dtype).requires_grad_() for i, shape in enumerate(shapes)]


CELLS = numbers(BATCH, 1, M, N, seed=9) > -0.5
ADDED = numbers(HEADS, M, N, seed=10)
FIRST = torch.arange(M) // 3
LOCAL = attlas.Window(9, 2)

MASKS: dict[str, masks.Mask] = {
    "Causal": attlas.Causal(),
    "Causal from the first key": attlas.Causal(2),
    "Window": attlas.Window(5, 1),
    "Dilated": attlas.Dilated(9, 0, 3),
    "Padding": attlas.Padding([24, 17]),
    "Padding on the left": attlas.Padding([20, 24], side="left"),
    "Prefix": attlas.Prefix([5, 3]) | attlas.Causal(),
    "Documents": attlas.Documents(torch.arange(N) // 7) & attlas.Causal(),
    "Documents of both": attlas.Documents(torch.arange(N) // 7, torch.arange(M) // 5),
    "And": LOCAL & attlas.Causal(),
    "Or": attlas.Prefix(3) | LOCAL,
    "Not": ~attlas.Window(3, 3),
    "Heads": masks.Heads({1: attlas.Window(4, 0), 3: attlas.Padding([24, 12])}, attlas.Causal()),
    "TensorMask": attlas.from_tensor(CELLS),
    "AdditiveMask": attlas.from_tensor(torch.where(CELLS, ADDED, -torch.inf)),
    "Selected": masks.Selected(torch.randint(0, N, (BATCH, 2, M, 6), generator=torch.Generator().manual_seed(1)), 1, 2),
    "RunPerRow": RunPerRow(FIRST, FIRST + 9),
    "Runs": runs_of(attlas.Dilated(9, 0, 3), 1, 1, M, N),
    "Bits": masks.Bits(torch.full((1, 1, M, N // 8), 0b10110101, dtype=torch.uint8), N),
}


def _biased(buckets: int | None) -> Score:
    made = attlas.RelativeBias(HEADS, 16, buckets=buckets)
    nn.init.normal_(made.weight, generator=torch.Generator().manual_seed(3))
    return made


def scores() -> dict[str, Score]:
    """Return every score that attlas exports, and what operators make of them, with parameters of their own."""
    dot = attlas.ScaledDot()
    torch.manual_seed(0)
    return {
        "ScaledDot": dot,
        "scale": attlas.ScaledDot(0.3),
        "SoftCap": attlas.SoftCap(dot, 2.0),
        "Cosine": attlas.Cosine(4.0),
        "Bilinear": attlas.Bilinear(D, D),
        "Additive": attlas.Additive(D, D, 8, bias=True),
        "Alibi": dot + attlas.Alibi(HEADS),
        "RelativeBias": dot + _biased(None),
        "buckets": dot + _biased(8),
        "TensorBias": dot + attlas.TensorBias(nn.Parameter(ADDED.clone())),
        "places alone": _biased(None) + attlas.Alibi(HEADS),
        "Scaled": 2.0 * dot - 0.5 * attlas.Cosine(),
        "ScaledByTensor": nn.Parameter(torch.tensor([0.5, 1.0, 2.0, 1.5])) * dot,
        "temperature": nn.Parameter(torch.tensor(0.7)) * attlas.Bilinear(D, D),
        "cap of a sum": attlas.SoftCap(dot + attlas.Alibi(HEADS), 3.0),
        "Gaussian": attlas.Gaussian(4.0),
        "learned width": attlas.Gaussian(3.0, learn=True),
        "widths": attlas.Gaussian(torch.linspace(2, 4, D), learn=True),
        "Laplace": attlas.Laplace(9.0, learn=True),
        "Epanechnikov": attlas.Epanechnikov(9.0, learn=True),
        "Triangular": attlas.Triangular(9.0),
        "Boxcar": attlas.Boxcar(9.0),
    }


class Program(nn.Module):
    """A function of tokens, and the score that it uses, whose parameters are those of the program."""

    def __init__(self, f: Callable[..., Any], score: Score | None = None) -> None:
        super().__init__()
        self.f, self.score = f, score

    def forward(self, *given: Tensor) -> Any:
        return self.f(*given) if self.score is None else self.f(*given, self.score)


def results(program: nn.Module, given: Sequence[Tensor], run: Callable[..., Any] | None = None) -> list[Tensor | None]:
    """Return the results of a program, and the gradients in what it is given and in its parameters."""
    leaves = [t for t in (*given, *program.parameters()) if t.requires_grad]
    for t in leaves:
        t.grad = None
    found = (program if run is None else run)(*given)
    found = [found] if isinstance(found, Tensor) else list(found)
    loss = [(t.double() * numbers(*t.shape, seed=i).double()).sum() for i, t in enumerate(found) if t.requires_grad]
    if loss:
        torch.stack(loss).sum().backward()
    return [t.detach() for t in found] + [None if t.grad is None else t.grad.clone() for t in leaves]


class Graphs:
    """A backend of torch.compile that keeps the names of the operators of each graph."""

    def __init__(self) -> None:
        self.names: list[list[str]] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
        self.names.append([str(node.target) for node in module.graph.nodes if node.op == "call_function"])
        return aot_autograd(fw_compiler=lambda graph, _: make_boxed_func(graph.forward))(module, inputs)

    @property
    def of_attlas(self) -> set[str]:
        """The operators of attlas in the graphs."""
        return {name.split(".")[1] for names in self.names for name in names if name.startswith("attlas.")}

    @property
    def dense(self) -> set[str]:
        """What computes a softmax, or torch's own attention."""
        return {name for names in self.names for name in names if "softmax" in name or "scaled_dot" in name}


def compare(program: nn.Module, given: Sequence[Tensor], **tolerance: float) -> Graphs:
    """Compare a program that is compiled as one graph with the plain one, values and all gradients."""
    torch._dynamo.reset()
    wanted = results(program, given)
    graphs = Graphs()
    found = results(program, given, torch.compile(program, backend=graphs, fullgraph=True))
    assert len(found) == len(wanted)
    for a, b in zip(found, wanted, strict=True):
        if b is None:  # the plain program does not use it: an operator gives zeros
            assert a is None or not bool(a.any())
        else:
            assert a is not None, "a gradient is missing"
            torch.testing.assert_close(a, b, equal_nan=True, **({"atol": 2e-5, "rtol": 1e-4} | tolerance))
    return graphs
