"""Masks and scores that FlexAttention takes, and those that it does not; and its results without its compiler.

No GPU was there: kernels that torch compiles were not run. What is compared is what attlas makes for them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention as module

import attlas
from attlas import masks, scores
from attlas.engine import operations
from attlas.engine.backend import Request
from attlas.engine.backends.flex import backend
from attlas.engine.plan import Plan
from attlas.engine.problem import Problem, spread_heads
from attlas.masks.placed import Concatenated, OutsideRectangle, Placed, Positions
from attlas.masks.runs import RunPerRow, runs_of

M, N, HEADS, WIDTH = 200, 300, 4, 8


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def eager(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Any, block_mask: Any, scale: float, grouped: bool
) -> tuple[Tensor, Tensor]:
    """Compute FlexAttention by torch's own operations, whole."""
    request = getattr(module, "AuxRequest", None)  # since torch 2.9
    wanted = {"return_lse": True} if request is None else {"return_aux": request(lse=True)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out, lse = module.flex_attention(q, k, v, score_mod, block_mask, scale, grouped, **wanted)
    return out, lse if isinstance(lse, Tensor) else lse.lse


class Own(attlas.Mask):
    """A mask of a user's own."""

    def allows(self, at: attlas.Tile) -> Tensor:
        return (at.i * 7 + at.j * 3) % 5 > 1


class Later(attlas.Window):
    """A subclass that means something else."""

    def allows(self, at: attlas.Tile) -> Tensor:
        return ~super().allows(at)


def checkers(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return ((i + b) // 3 + j // 2 + h) % 2 == 0


def choice(*lead: int, most: int = N, seed: int = 5) -> Tensor:
    return (random(*lead, M, 7, seed=seed).abs() * 1e5).long() % (most + 9) - 4


def packed(allowed: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(allowed.numpy(), axis=-1, bitorder="little"))


C = attlas.Causal()
IDS = (random(2, N, seed=1).abs() * 3).long().sort().values
FIRST = (random(M, seed=2).abs() * 1e4).long() % N
HIDDEN = Positions((0, 3, 140, 150)), Positions((130, 140, 290, 1 << 62))
MASKS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "Causal": attlas.Causal,
    "Causal(0)": lambda: attlas.Causal(0),
    "Causal(-150)": lambda: attlas.Causal(-150),
    "Window": lambda: attlas.Window(40, 3),
    "Window(left)": lambda: attlas.Window(None, 20, -130),
    "Window(all)": lambda: attlas.Window(None, None),
    "Dilated": lambda: attlas.Dilated(90, 0, 7),
    "Dilated(offset)": lambda: attlas.Dilated(90, None, 7, offset=-50),
    "Padding": lambda: attlas.Padding([300, 170]),
    "Padding(one)": lambda: attlas.Padding(140),
    "Padding(left)": lambda: attlas.Padding([120, 300], side="left"),
    "Prefix | Causal": lambda: attlas.Prefix([150, 20]) | C,
    "Documents": lambda: attlas.Documents(IDS),
    "Documents(one)": lambda: attlas.Documents(IDS[0]),
    "Documents(both) & Causal": lambda: attlas.Documents(IDS, query_ids=IDS[:, :M].flip(0)) & attlas.Causal(0),
    "~Window": lambda: ~attlas.Window(30, 30),
    "~(Causal & Padding)": lambda: ~(C & attlas.Padding([100, 300])),
    "Heads": lambda: attlas.Heads({1: attlas.Window(9, 0), 3: attlas.Padding([200, 100])}, C),
    "Heads(function) & Padding": lambda: attlas.Heads({1: attlas.from_function(checkers)}) & attlas.Padding(250),
    "bool": lambda: random(M, N) > 0.3,
    "bool(heads)": lambda: random(2, HEADS, M, N) > 0.3,
    "bool(keys)": lambda: random(2, 1, 1, N) > 0.3,
    "bool(blocks)": lambda: random(1, 1, 3, 5).repeat_interleave(100, 2).repeat_interleave(80, 3)[:, :, :M, :N] > 0.0,
    "additive": lambda: random(2, 1, M, N).masked_fill(random(2, 1, M, N, seed=3) > 0.5, -torch.inf),
    "additive & Causal": lambda: attlas.from_tensor(random(M, N)) & C,
    "function": lambda: checkers,
    "function(table)": lambda: attlas.from_function(lambda b, h, i, j: IDS[b, i] == IDS[b, j]),
    "function & Window": lambda: attlas.from_function(checkers) & attlas.Window(60, 0),
    "Selected": lambda: masks.Selected(choice()),
    "Selected(groups, blocks) & Causal": lambda: masks.Selected(choice(2, 2, most=N // 3), 3, 2) & C,
    "RunPerRow": lambda: RunPerRow(FIRST, FIRST + 50),
    "Runs": lambda: runs_of(attlas.Dilated(60, 0, 3) & attlas.Padding([300, 290]), 2, 1, M, N),
    "Runs(heads)": lambda: runs_of(attlas.from_function(lambda b, h, i, j: (j + i) % (50 + h) < 20), 1, HEADS, M, N),
    "Runs(nothing)": lambda: runs_of(~attlas.Window(None, None), 1, 1, M, N),
    "Runs(many)": lambda: runs_of(attlas.from_tensor(random(2, HEADS, M, N) > 0.0), 2, HEADS, M, N),
    "Bits": lambda: masks.Bits(packed(random(2, HEADS, M, N) > 0.0), N),
    "Bits(one)": lambda: masks.Bits(packed(random(1, 1, M, N) > 0.0), N),
    "Placed": lambda: Placed(attlas.Dilated(60, 0, 2, offset=9), range(-20, M), range(-10, N + 5)),
    "OutsideRectangle": lambda: OutsideRectangle(*HIDDEN, 0, 0) & C,
    "OutsideRectangle(keys)": lambda: OutsideRectangle(None, HIDDEN[1], 0, 5),
    "nothing": lambda: ~attlas.Prefix(10**6),
}
NOT_MASKS: dict[str, Callable[[], attlas.Mask]] = {
    "own": Own,
    "own & Causal": lambda: Own() & C,
    "subclass": lambda: Later(3, 3),
    "Concatenated": lambda: Concatenated([C, None], [1, 1], 0),
}


def double(score: attlas.Score) -> attlas.Score:
    with torch.no_grad():
        for number, p in enumerate(score.double().parameters()):
            p.add_(random(*p.shape, seed=number + 3) * 0.1)
    return score


def leaf(t: Tensor) -> Tensor:
    return t.requires_grad_()


def distance(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return torch.tanh(s) - (i - j).abs() * 0.01 * (h + 1)


def third(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return s / 3 + b


class Table(nn.Module):
    """A score_mod that is a module with a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(random(2 * N, seed=6))

    def forward(self, s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + self.table[j - i + M]


class WithRow(attlas.Score):
    """A dot product with a constant of each query."""

    def forward(self, q: Tensor, k: Tensor, at: attlas.Tile) -> Tensor:
        return q @ k.mT + q.sum(-1, keepdim=True)

    def as_dot(self, q: Tensor, k: Tensor) -> scores.Dot:
        return scores.Dot(q, k, 1.0, row=q.sum(-1))


class Steps(attlas.Score):
    """A score of places of a user's own, with a table."""

    positional = True

    def forward(self, q: Tensor, k: Tensor, at: attlas.Tile) -> Tensor:
        return (at.j - at.i).to(at.dtype) * 0.01

    def bias(self, at: attlas.Tile) -> scores.Bias:
        first = at.columns.start - (at.rows.stop - 1)
        steps = torch.arange(first, at.columns.stop - at.rows.start, dtype=at.dtype, device=at.device)
        return scores.Bias(distance=0.01 * steps.view(1, 1, -1))


class Untold(attlas.Score):
    """A score of places of a user's own, without a table."""

    positional = True

    def forward(self, q: Tensor, k: Tensor, at: attlas.Tile) -> Tensor:
        return (at.j - at.i).to(at.dtype) * 0.01


DOT = attlas.ScaledDot()
TENSOR = lambda: attlas.TensorBias(leaf(random(1, N)))  # noqa: E731
SCORES: dict[str, Callable[[], attlas.Score]] = {
    "ScaledDot": attlas.ScaledDot,
    "ScaledDot(0.3)": lambda: attlas.ScaledDot(0.3),
    "SoftCap": lambda: attlas.SoftCap(DOT, 2.0),
    "SoftCap + Alibi": lambda: attlas.SoftCap(DOT, 2.0) + attlas.Alibi(HEADS),
    "SoftCap(sum)": lambda: attlas.SoftCap(DOT + attlas.Alibi(HEADS), 2.0),
    "SoftCap(forbidden)": lambda: attlas.SoftCap(DOT + attlas.TensorBias(MASKS["additive"]()), 2.0),
    "Cosine": lambda: attlas.Cosine(8.0),
    "Bilinear": lambda: double(attlas.Bilinear(WIDTH, WIDTH)),
    "Gaussian": lambda: attlas.Gaussian(3.0),
    "Alibi": lambda: DOT + attlas.Alibi(HEADS),
    "Alibi(leaf)": lambda: DOT + attlas.Alibi(leaf(random(HEADS).abs() * 0.1)),
    "RelativeBias": lambda: DOT + double(attlas.RelativeBias(HEADS, 40)),
    "RelativeBias(buckets)": lambda: attlas.ScaledDot(1.0) + double(attlas.RelativeBias(HEADS, 64, buckets=16)),
    "TensorBias": lambda: DOT + attlas.TensorBias(leaf(random(HEADS, M, N))),
    "TensorBias(keys)": lambda: DOT + attlas.TensorBias(leaf(random(2, 1, 1, N))),
    "two tensors": lambda: DOT + attlas.Alibi(HEADS) + (0.5 * attlas.TensorBias(random(M, N)) + TENSOR()),
    "Forget": lambda: DOT + attlas.Forget(leaf(nn.functional.logsigmoid(random(2, HEADS, N)).detach())),
    "Steps": lambda: DOT + Steps(),
    "twice": lambda: 2.0 * DOT,
    "twice(biased)": lambda: -0.5 * (DOT + attlas.Alibi(HEADS)),
    "temperature": lambda: leaf(random(1)[0].abs() + 0.5) * DOT,
    "temperature(heads)": lambda: leaf(random(HEADS).abs() + 0.5) * DOT,
    "temperature(forbidden)": lambda: leaf(random(HEADS).abs() + 0.5) * (DOT + attlas.TensorBias(MASKS["additive"]())),
    "ScoreMod": lambda: attlas.ScoreMod(distance),
    "ScoreMod(module)": lambda: attlas.ScoreMod(Table()),
    "ScoreMod(SoftCap)": lambda: attlas.ScoreMod(distance, attlas.SoftCap(DOT, 2.0)),
    "ScoreMod(ScoreMod) * 2": lambda: 2.0 * attlas.ScoreMod(distance, attlas.ScoreMod(third)),
    "ScoreMod + Alibi": lambda: attlas.ScoreMod(distance) + attlas.Alibi(HEADS),
    "ScoreMod(row)": lambda: attlas.ScoreMod(distance, WithRow()),
    "row": WithRow,
}  # fmt: skip
NOT_SCORES: dict[str, Callable[[], attlas.Score]] = {
    "Laplace": attlas.Laplace,
    "Boxcar": lambda: attlas.Boxcar(9.0),
    "Epanechnikov": lambda: attlas.Epanechnikov(9.0),
    "Triangular": lambda: attlas.Triangular(9.0),
    "Additive": lambda: attlas.Additive(WIDTH, WIDTH, 8),
    "PaTH": lambda: attlas.PaTH(random(1, HEADS, max(M, N), WIDTH, seed=50), random(1, HEADS, max(M, N), seed=51)),
    "two dot products": lambda: DOT + attlas.Cosine(2.0),
    "places alone": lambda: attlas.Alibi(HEADS),
    "places without a table": lambda: DOT + Untold(),
}


def tokens(key_heads: int = 2, size: int = WIDTH, e: int = 5) -> tuple[Tensor, Tensor, Tensor]:
    q, k = random(2, HEADS, M, size, seed=20), random(2, key_heads, N, size, seed=21)
    return leaf(q), leaf(k), leaf(random(2, key_heads, N, e, seed=22))


def found_and_wanted(problem: Problem, v: Tensor) -> tuple[list[Any], list[Any]]:
    """Return output, log-sum-exp and all gradients, from FlexAttention and from the definition."""
    leaves = [t for t in (*problem.leaves, v) if t.requires_grad]
    slope = random(*problem.shape[:3], v.shape[-1], seed=30)
    pairs = []
    request = Request(problem, problem.project(), Plan())
    out, lse = backend.computed(request, v, eager)
    dense = operations.dense(problem)
    defined = dense.weights @ spread_heads(v, problem.shape[1])
    for some, total in ((out, lse), (defined, dense.lse)):
        grads = torch.autograd.grad(some, leaves, slope, allow_unused=True)
        every = [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, grads, strict=True)]
        pairs.append([some, total.detach(), *every])
    return pairs[0], pairs[1]


def agrees(problem: Problem, v: Tensor) -> None:
    found, wanted = found_and_wanted(problem, v)
    for own, defined in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, defined, rtol=1e-9, atol=1e-9)
