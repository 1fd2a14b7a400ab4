"""The tables of the contracts: a new score, mask or plan is one line here, and every law then holds for it.

Each score and mask stands beside its formula, written out whole and without a tile: that is the oracle.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attlas
from attlas import Plan
from attlas.engine.plan import BACKENDS

INF = math.inf


@dataclass(frozen=True)
class Sizes:
    """Sizes of one problem."""

    m: int
    n: int
    batch: int = 2
    heads: int = 4
    key_heads: int = 2
    value_heads: int = 2
    query_size: int = 6
    key_size: int = 6
    value_size: int = 5

    def random(self, *shape: int, seed: int = 0) -> Tensor:
        """Return numbers that depend on nothing but the shape and a seed."""
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -------------------------------------------------------------------------------------------------------------- scores


@dataclass(frozen=True)
class ScoreCase:
    """A score, and its formula on whole tensors: ``formula(score, q, k, gap, sizes)`` with ``gap = j - i'``."""

    make: Callable[[Sizes], attlas.Score]
    formula: Callable[..., Tensor]
    query_size: int = 6
    key_size: int = 6


class Cauchy(attlas.Score):
    """A score of a user's own, with nothing but `forward` and one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.width = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def forward(self, q: Tensor, k: Tensor, at: attlas.Tile) -> Tensor:
        return -torch.log1p((q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1) / self.width.to(q))


def leaf(*values: float) -> Tensor:
    return torch.tensor(values[0] if len(values) == 1 else values, dtype=torch.float64, requires_grad=True)


def double(score: attlas.Score, seed: int = 3) -> attlas.Score:
    """Return a score in float64, with parameters that are not at their start."""
    with torch.no_grad():
        for p in score.double().parameters():
            p.add_(Sizes(1, 1).random(*p.shape, seed=seed) * 0.1)
    return score


def dot(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT / math.sqrt(q.shape[-1])


def gaps(q: Tensor, k: Tensor, h: Any) -> Tensor:
    return (q.unsqueeze(-2) - k.unsqueeze(-3)) / h


def gaussian(score: Any, q: Tensor, k: Tensor, gap: Tensor, sizes: Sizes) -> Tensor:
    return -0.5 * gaps(q, k, score.bandwidth).square().sum(-1)


def bounded(kernel: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    def formula(score: Any, q: Tensor, k: Tensor, gap: Tensor, sizes: Sizes) -> Tensor:
        u = gaps(q, k, score.bandwidth).square().sum(-1).sqrt()
        return torch.where(u < 1, kernel(torch.where(u < 1, u, torch.full_like(u, 0.5))), -INF)

    return formula


def additive(score: Any, q: Tensor, k: Tensor, gap: Tensor, sizes: Sizes) -> Tensor:
    return torch.tanh(score.W_q(q).unsqueeze(-2) + score.W_k(k).unsqueeze(-3)) @ score.w_v


def slopes(heads: int) -> Tensor:
    exponents = {1: [8], 2: [4, 8], 3: [4, 8, 2], 4: [2, 4, 6, 8]}[heads]
    return 2.0 ** -torch.tensor(exponents, dtype=torch.float64).view(-1, 1, 1)


def per_head(numbers: Tensor) -> Tensor:
    return numbers.view(-1, 1, 1)


def table(score: Any, gap: Tensor) -> Tensor:
    return score.weight[gap.clamp(-score.max_distance, score.max_distance) + score.max_distance].movedim(-1, 0)


def bias(sizes: Sizes, *lead: int) -> Tensor:
    return sizes.random(*lead, sizes.m, sizes.n, seed=11).requires_grad_()


def gates(sizes: Sizes, *lead: int) -> Tensor:
    return nn.functional.logsigmoid(sizes.random(*lead, sizes.n, seed=13)).requires_grad_()


def forgotten(log_gate: Tensor, gap: Tensor) -> Tensor:
    """Return the sum of log gates after the key, up to that of the query; with a minus for keys after the query."""
    n = gap.shape[1]
    place, key = torch.arange(n), torch.arange(n)[:, None]
    query = gap[:, :1, None] * -1  # i' of each row, as key 0 is at place 0
    between = ((place > key) & (place <= query)).double() - ((place <= key) & (place > query)).double()
    return torch.einsum("...l,ijl->...ij", log_gate, between)


def turns(sizes: Sizes, *lead: int) -> attlas.Score:
    """Return the score of PaTH, with chunks of 8 tokens, so that a query is carried over several."""
    w, beta = sizes.random(*lead, sizes.n, sizes.query_size, seed=14), sizes.random(*lead, sizes.n, seed=15)
    score = attlas.PaTH(nn.functional.normalize(w, dim=-1).requires_grad_(), (2 * beta.sigmoid()).requires_grad_())
    score.chunk_size = 8 if sizes.n < 100 else 64
    return score


def turned(score: Any, q: Tensor, k: Tensor, gap: Tensor) -> Tensor:
    """Return ``q' H_i ... H_{j+1} k_j``, of one key after the other; -inf for keys after the query."""
    x, columns = q / math.sqrt(q.shape[-1]), []
    for j in reversed(range(k.shape[-2])):
        seen, w = gap[:, j] <= 0, score.w[..., j : j + 1, :]
        columns.append(torch.where(seen, (x * k[..., j : j + 1, :]).sum(-1), -INF))
        x = torch.where(seen[:, None], x - score.beta[..., j, None, None] * (x * w).sum(-1, keepdim=True) * w, x)
    return torch.stack(columns[::-1], -1) if columns else q.new_zeros(*q.shape[:-1], 0)


def relative(sizes: Sizes) -> Callable[..., Tensor]:
    """Return a FlexAttention score_mod with a learned bias of each distance."""
    table = sizes.random(2 * (sizes.m + sizes.n), seed=12).requires_grad_()
    middle, shift = sizes.m + sizes.n, sizes.n - sizes.m

    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.tanh(score) + table[j - i - shift + middle]

    score_mod.table = table  # type: ignore[attr-defined]  # where the formula finds it
    return score_mod


SCORES: dict[str, ScoreCase] = {
    "ScaledDot": ScoreCase(lambda s: attlas.ScaledDot(), lambda score, q, k, gap, s: dot(q, k)),
    "ScaledDot(1)": ScoreCase(lambda s: attlas.ScaledDot(1.0), lambda score, q, k, gap, s: q @ k.mT),
    "SoftCap": ScoreCase(
        lambda s: attlas.SoftCap(attlas.ScaledDot(), 1.5),
        lambda score, q, k, gap, s: 1.5 * torch.tanh(dot(q, k) / 1.5),
    ),
    "Cosine": ScoreCase(
        lambda s: attlas.Cosine(3.0),
        lambda score, q, k, gap, s: 3 * (q @ k.mT) / (q.norm(dim=-1).unsqueeze(-1) * k.norm(dim=-1).unsqueeze(-2)),
    ),
    "Gaussian": ScoreCase(lambda s: attlas.Gaussian(0.9), gaussian, 3, 3),
    "Gaussian(vector)": ScoreCase(lambda s: attlas.Gaussian([0.9, 1.5, 2.0]), gaussian, 3, 3),
    "Gaussian(learn)": ScoreCase(lambda s: double(attlas.Gaussian(0.9, learn=True)), gaussian, 3, 3),
    "Gaussian(leaf)": ScoreCase(lambda s: attlas.Gaussian(leaf(0.9, 1.5, 2.0)), gaussian, 3, 3),
    "Gaussian(wide)": ScoreCase(lambda s: attlas.Gaussian(2.0), gaussian, 9, 9),
    "Gaussian(wide, learn)": ScoreCase(
        lambda s: double(attlas.Gaussian(torch.linspace(2, 4, 9), learn=True)), gaussian, 9, 9
    ),
    "Gaussian(wide, leaf)": ScoreCase(lambda s: attlas.Gaussian(leaf(2.5)), gaussian, 9, 9),
    "Gaussian(parameter)": ScoreCase(lambda s: attlas.Gaussian(nn.Parameter(leaf(1.2).detach())), gaussian, 3, 3),
    "Laplace": ScoreCase(
        lambda s: double(attlas.Laplace([1.0, 2.0, 3.0], learn=True)),
        lambda score, q, k, gap, s: -gaps(q, k, score.bandwidth).abs().sum(-1),
        3,
        3,
    ),
    "Boxcar": ScoreCase(lambda s: attlas.Boxcar(2.0), bounded(lambda u: u * 0), 3, 3),
    "Epanechnikov": ScoreCase(
        lambda s: double(attlas.Epanechnikov(2.5, learn=True)), bounded(lambda u: torch.log(1 - u * u)), 3, 3
    ),
    "Triangular": ScoreCase(lambda s: attlas.Triangular(leaf(2.5)), bounded(lambda u: torch.log(1 - u)), 3, 3),
    "Additive": ScoreCase(lambda s: double(attlas.Additive(4, 6, 5)), additive, 4, 6),
    "Additive(bias)": ScoreCase(lambda s: double(attlas.Additive(6, 3, 7, bias=True)), additive, 6, 3),
    "Bilinear(up)": ScoreCase(
        lambda s: double(attlas.Bilinear(4, 6)), lambda score, q, k, gap, s: q @ score.weight @ k.mT, 4, 6
    ),
    "Bilinear(down)": ScoreCase(
        lambda s: double(attlas.Bilinear(6, 4, scale=0.5)),
        lambda score, q, k, gap, s: 0.5 * (q @ score.weight @ k.mT),
        6,
        4,
    ),
    "Alibi": ScoreCase(
        lambda s: attlas.ScaledDot() + attlas.Alibi(),
        lambda score, q, k, gap, s: dot(q, k) - slopes(s.heads) * gap.abs(),
    ),
    "Alibi(leaf)": ScoreCase(
        lambda s: attlas.Alibi(torch.linspace(0.1, 0.4, s.heads, dtype=torch.float64, requires_grad=True)),
        lambda score, q, k, gap, s: -per_head(score.slopes) * gap.abs(),
    ),
    "RelativeBias": ScoreCase(
        lambda s: attlas.ScaledDot() + double(attlas.RelativeBias(s.heads, 5)),
        lambda score, q, k, gap, s: dot(q, k) + table(score.right, gap),
    ),
    "RelativeBias(alone)": ScoreCase(
        lambda s: double(attlas.RelativeBias(s.heads, 4)), lambda score, q, k, gap, s: table(score, gap)
    ),
    "TensorBias": ScoreCase(
        lambda s: attlas.ScaledDot() + attlas.TensorBias(bias(s, s.batch, s.heads)),
        lambda score, q, k, gap, s: dot(q, k) + score.right.t,
    ),
    "TensorBias(alone)": ScoreCase(
        lambda s: attlas.TensorBias(bias(s, s.heads)), lambda score, q, k, gap, s: score.t.expand(s.batch, -1, -1, -1)
    ),
    "Forget": ScoreCase(
        lambda s: attlas.ScaledDot() + attlas.Forget(gates(s, s.batch, s.heads)),
        lambda score, q, k, gap, s: dot(q, k) + forgotten(score.right.log_gate, gap),
    ),
    "Forget(alone)": ScoreCase(
        lambda s: attlas.Forget(gates(s, s.heads)), lambda score, q, k, gap, s: forgotten(score.log_gate, gap)
    ),
    "ScaledByTensor": ScoreCase(
        lambda s: nn.Parameter(leaf(0.7).detach()) * attlas.ScaledDot(),
        lambda score, q, k, gap, s: score.factor * dot(q, k),
    ),
    "ScaledByTensor(heads)": ScoreCase(
        lambda s: torch.linspace(0.5, 2, s.heads, dtype=torch.float64).requires_grad_() * attlas.ScaledDot(),
        lambda score, q, k, gap, s: per_head(score.factor) * dot(q, k),
    ),
    "PaTH + Forget": ScoreCase(
        lambda s: turns(s, s.batch, s.heads) + attlas.Forget(gates(s, s.heads)),
        lambda score, q, k, gap, s: turned(score.left, q, k, gap) + forgotten(score.right.log_gate, gap),
    ),
    "ScoreMod": ScoreCase(
        lambda s: attlas.ScoreMod(relative(s)),
        lambda score, q, k, gap, s: torch.tanh(dot(q, k)) + score.score_mod.table[gap + s.m + s.n],
    ),
    "Sum": ScoreCase(
        lambda s: 0.5 * attlas.Laplace(leaf(1.5)) + attlas.ScaledDot() + 2 * double(attlas.RelativeBias(s.heads, 3)),
        lambda score, q, k, gap, s: (
            -0.5 * gaps(q, k, score.left.left.inner.bandwidth).abs().sum(-1)
            + dot(q, k)
            + 2 * table(score.right.inner, gap)
        ),
    ),
    "Sum(places)": ScoreCase(
        lambda s: attlas.Alibi(s.heads) + (-attlas.TensorBias(bias(s)) + 0.5 * attlas.ScaledDot()),
        lambda score, q, k, gap, s: (
            -slopes(s.heads) * gap.abs() - score.right.left.inner.t + 0.5 * dot(q, k)
        ),
    ),
    "Multiple": ScoreCase(
        lambda s: -1.5 * attlas.Gaussian(leaf(3.0)),
        lambda score, q, k, gap, s: -1.5 * gaussian(score.inner, q, k, gap, s),
        9,
        9,
    ),
    "SoftCap(sum)": ScoreCase(
        lambda s: attlas.SoftCap(attlas.ScaledDot() + attlas.Alibi(s.heads), 2.0),
        lambda score, q, k, gap, s: 2 * torch.tanh((dot(q, k) - slopes(s.heads) * gap.abs()) / 2),
    ),
    "SoftCap(bounded)": ScoreCase(
        lambda s: attlas.SoftCap(attlas.Epanechnikov(leaf(2.5)), 2.0),
        lambda score, q, k, gap, s: _capped(bounded(lambda u: torch.log(1 - u * u))(score.score, q, k, gap, s), 2.0),
        3,
        3,
    ),
    "own": ScoreCase(
        lambda s: Cauchy(), lambda score, q, k, gap, s: -torch.log1p(gaps(q, k, 1.0).square().sum(-1) / score.width)
    ),
}  # fmt: skip


def _capped(logits: Tensor, cap: float) -> Tensor:
    return torch.where(logits == -INF, logits, cap * torch.tanh(logits.clamp(min=-1e3) / cap))


# --------------------------------------------------------------------------------------------------------------- masks


@dataclass(frozen=True)
class MaskCase:
    """A mask, and its formula on whole index tensors: a bool, or numbers that are added to the logits."""

    make: Callable[[Sizes], Any]
    formula: Callable[..., Tensor]


class Even(attlas.Mask):
    """A mask of a user's own, with nothing but `allows`."""

    def allows(self, at: attlas.Tile) -> Tensor:
        return (at.i + at.j + at.h) % 2 == 0


def lengths(s: Sizes) -> Tensor:
    return torch.tensor([max(s.n - 3 * b, 0) for b in range(s.batch)])


def ids(count: int, width: int) -> Tensor:
    return torch.arange(count) // max(width, 1)


def holes(s: Sizes, *lead: int) -> Tensor:
    return s.random(*lead, s.m, s.n, seed=7) > 0.5


def numbers(s: Sizes, *lead: int) -> Tensor:
    return s.random(*lead, s.m, s.n, seed=8).masked_fill(s.random(*lead, s.m, s.n, seed=9) > 0.7, -INF)


def checkers(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return ((i + b) // 3 + j // 2 + h) % 2 == 0


def documents(s: Sizes) -> attlas.Mask:
    return attlas.Documents(ids(s.n, 4), ids(s.m, 3))


def choice(s: Sizes, *lead: int, blocks: int) -> Tensor:
    """Chosen blocks of keys: some twice, some below 0, some beyond the last key."""
    return (s.random(*lead, s.m, 5, seed=12) * 1e6).long() % (blocks + 3) - 1


def is_chosen(entries: Tensor, j: Tensor, block: int = 1) -> Tensor:
    return (entries.unsqueeze(-2) == (j // block).unsqueeze(-1)).any(-1)


MASKS: dict[str, MaskCase] = {
    "none": MaskCase(lambda s: None, lambda s, b, h, i, j: j == j),
    "Causal": MaskCase(lambda s: attlas.Causal(), lambda s, b, h, i, j: j <= i + s.n - s.m),
    "Causal(0)": MaskCase(lambda s: attlas.Causal(0), lambda s, b, h, i, j: j <= i),
    "Causal(-4)": MaskCase(lambda s: attlas.Causal(-4), lambda s, b, h, i, j: j <= i - 4),
    "Causal(6)": MaskCase(lambda s: attlas.Causal(6), lambda s, b, h, i, j: j <= i + 6),
    "Window": MaskCase(
        lambda s: attlas.Window(3, 1), lambda s, b, h, i, j: (j >= i + s.n - s.m - 3) & (j <= i + s.n - s.m + 1)
    ),
    "Window(left)": MaskCase(lambda s: attlas.Window(None, 2, 0), lambda s, b, h, i, j: j <= i + 2),
    "Dilated": MaskCase(
        lambda s: attlas.Dilated(None, 0, 3),
        lambda s, b, h, i, j: (j <= i + s.n - s.m) & ((j - i - s.n + s.m) % 3 == 0),
    ),
    "Padding": MaskCase(
        lambda s: attlas.Padding(lengths(s)), lambda s, b, h, i, j: j < lengths(s).view(-1, 1, 1, 1)
    ),
    "Padding(left) & Causal": MaskCase(
        lambda s: attlas.Padding(lengths(s), side="left") & attlas.Causal(),
        lambda s, b, h, i, j: (j >= s.n - lengths(s).view(-1, 1, 1, 1)) & (j <= i + s.n - s.m),
    ),
    "Documents": MaskCase(documents, lambda s, b, h, i, j: i // 3 == j // 4),
    "Documents & Causal": MaskCase(
        lambda s: documents(s) & attlas.Causal(0), lambda s, b, h, i, j: (i // 3 == j // 4) & (j <= i)
    ),
    "Prefix | Causal": MaskCase(
        lambda s: attlas.Prefix(4) | attlas.Causal(), lambda s, b, h, i, j: (j < 4) | (j <= i + s.n - s.m)
    ),
    "~Window": MaskCase(lambda s: ~attlas.Window(2, 2, 0), lambda s, b, h, i, j: (j - i).abs() > 2),
    "bool tensor": MaskCase(holes, lambda s, b, h, i, j: holes(s)),
    "bool tensor(heads)": MaskCase(
        lambda s: holes(s, s.batch, s.heads), lambda s, b, h, i, j: holes(s, s.batch, s.heads)
    ),
    "additive": MaskCase(lambda s: numbers(s, s.batch, 1), lambda s, b, h, i, j: numbers(s, s.batch, 1)),
    "additive & Causal": MaskCase(
        lambda s: attlas.from_tensor(numbers(s)) & attlas.Causal(),
        lambda s, b, h, i, j: numbers(s).masked_fill(j > i + s.n - s.m, -INF),
    ),
    "function": MaskCase(lambda s: checkers, lambda s, b, h, i, j: checkers(b, h, i, j)),
    "own": MaskCase(lambda s: Even(), lambda s, b, h, i, j: (i + j + h) % 2 == 0),
    "Heads": MaskCase(
        lambda s: attlas.masks.Heads({0: attlas.Window(3, 1)} | ({2: None} if s.heads > 2 else {}), attlas.Causal()),
        lambda s, b, h, i, j: torch.where(
            h == 0, (j - i - s.n + s.m >= -3) & (j - i - s.n + s.m <= 1), (j - i <= s.n - s.m) | (h == 2)
        ),
    ),
    "Heads(function) & Padding": MaskCase(
        lambda s: attlas.masks.Heads({1: attlas.from_function(checkers)}) & attlas.Padding(lengths(s)),
        lambda s, b, h, i, j: ((h != 1) | checkers(b, h, i, j)) & (j < lengths(s).view(-1, 1, 1, 1)),
    ),
    "Selected": MaskCase(
        lambda s: attlas.masks.Selected(choice(s, blocks=s.n)),
        lambda s, b, h, i, j: is_chosen(choice(s, blocks=s.n), j),
    ),
    "Selected(batch) & Causal": MaskCase(
        lambda s: attlas.masks.Selected(choice(s, s.batch, 1, blocks=s.n)) & attlas.Causal(),
        lambda s, b, h, i, j: is_chosen(choice(s, s.batch, 1, blocks=s.n), j) & (j <= i + s.n - s.m),
    ),
    "Selected(groups, blocks)": MaskCase(
        lambda s: attlas.masks.Selected(choice(s, 1, s.key_heads, blocks=s.n // 3), 3, s.heads // s.key_heads),
        lambda s, b, h, i, j: is_chosen(choice(s, 1, s.key_heads, blocks=s.n // 3), j, 3).repeat_interleave(
            s.heads // s.key_heads, dim=1
        ),
    ),
    "nothing": MaskCase(lambda s: ~attlas.Prefix(10**6), lambda s, b, h, i, j: j < 0),
}  # fmt: skip


# --------------------------------------------------------------------------------------------------------------- plans

# Native kernels, SDPA, FlexAttention and Triton kernels take some problems only, and have tests of their own.
PLANS: dict[str, Plan] = {name: Plan(name) for name in BACKENDS if name not in ("native", "sdpa", "flex", "triton")} | {
    "auto": Plan(),
    "auto 5x7": Plan(rows=5, columns=7),
    "auto 16 cells": Plan(cells=16),
    "tiled 5x7": Plan("tiled", rows=5, columns=7),
    "tiled 64x1": Plan("tiled", rows=64, columns=1),
    "tiled 1x64": Plan("tiled", rows=1, columns=64),
    "tiled 16 cells": Plan("tiled", cells=16),
    "tiled 300 cells": Plan("tiled", rows=9, cells=300),
}

SHAPES: dict[str, tuple[int, int]] = {
    "1x1": (1, 1),
    "1x67": (1, 67),
    "13x1": (13, 1),
    "19x23": (19, 23),
    "23x19": (23, 19),
    "29x29": (29, 29),
    "67x5": (67, 5),
    "0x7": (0, 7),
    "7x0": (7, 0),
    "0x0": (0, 0),
}

GROUPS: dict[str, tuple[int, int, int]] = {
    "mha": (2, 2, 2),
    "gqa": (4, 2, 2),
    "mqa": (3, 1, 1),
    "values of their own": (4, 2, 1),
    "a value head each": (4, 1, 4),
}


# ------------------------------------------------------------------------------------------------------------ problems


@dataclass(frozen=True, eq=False)
class Case:
    """One problem: how it is asked of attlas, and what its formula gives."""

    sizes: Sizes
    score: attlas.Score
    score_case: ScoreCase
    mask: Any
    mask_case: MaskCase
    sink: Tensor | None
    q: Tensor
    k: Tensor
    v: Tensor

    def matrix(self, plan: Plan | None = None) -> attlas.AttentionMatrix:
        return attlas.attend(self.q, self.k, score=self.score, mask=self.mask, sink=self.sink, plan=plan)

    def leaves(self) -> dict[str, Tensor]:
        """Return everything that wants a gradient."""
        found = {"q": self.q, "k": self.k, "v": self.v}
        if self.sink is not None:
            found["sink"] = self.sink
        for module in self.score.modules():
            for name, t in (*module.named_parameters(recurse=False), *vars(module).items()):
                for part in t if isinstance(t, list) else [t]:
                    if isinstance(part, Tensor) and part.requires_grad:
                        found[f"{type(module).__name__}.{name}"] = part
            for name, t in module.named_buffers(recurse=False):
                if t.requires_grad:
                    found[f"{type(module).__name__}.{name}"] = t
            if isinstance(module, attlas.ScoreMod) and hasattr(module.score_mod, "table"):
                found["ScoreMod.table"] = module.score_mod.table
        return found

    def places(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        s = self.sizes
        grid = torch.arange(s.batch), torch.arange(s.heads), torch.arange(s.m), torch.arange(s.n)
        return tuple(t.view([-1 if a == axis else 1 for a in range(4)]) for axis, t in enumerate(grid))

    def logits(self) -> Tensor:
        """Return the masked log-weights of the formulas."""
        s, (b, h, i, j) = self.sizes, self.places()
        k = self.k.repeat_interleave(s.heads // s.key_heads, dim=1)
        gap = (j - i - (s.n - s.m)).squeeze(0).squeeze(0)
        logits = self.score_case.formula(self.score, self.q, k, gap, s).expand(s.batch, s.heads, s.m, s.n)
        seen = self.mask_case.formula(s, b, h, i, j)
        if seen.dtype == torch.bool:
            return logits.masked_fill(~seen, -INF)
        # What is forbidden stays so, and adds no gradient.
        return (logits + seen.masked_fill(seen == -INF, 0.0)).masked_fill(seen == -INF, -INF)

    def plain(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return logits, weights, log-sum-exp and output from the formulas."""
        s, logits = self.sizes, self.logits()
        top = torch.full((s.batch, s.heads, s.m, 1), -INF, dtype=logits.dtype)
        if self.sink is not None:
            top = self.sink.view(1, -1, 1, 1).expand(s.batch, s.heads, s.m, 1)
        every = torch.cat([logits, top], dim=-1)
        largest = every.detach().amax(dim=-1, keepdim=True)
        largest = torch.where(largest == -INF, 0.0, largest)
        terms = torch.where(every == -INF, 0.0, torch.exp(torch.where(every == -INF, 0.0, every) - largest))
        total = terms.sum(dim=-1, keepdim=True)
        weights = (terms / torch.where(total == 0, 1.0, total))[..., :-1]
        lse = torch.where(total == 0, -INF, largest + torch.log(torch.where(total == 0, 1.0, total))).squeeze(-1)
        v = self.v.repeat_interleave(s.heads // s.value_heads, dim=1)
        return logits, weights, lse, weights @ v


def build(score: str, mask: str, sizes: Sizes, *, sink: bool = False, seed: int = 0) -> Case:
    """Make a problem in float64 whose tensors all want a gradient."""
    case = SCORES[score]
    s = replace(sizes, query_size=case.query_size, key_size=case.key_size)
    q = s.random(s.batch, s.heads, s.m, s.query_size, seed=seed + 100).requires_grad_()
    k = s.random(s.batch, s.key_heads, s.n, s.key_size, seed=seed + 101).requires_grad_()
    v = s.random(s.batch, s.value_heads, s.n, s.value_size, seed=seed + 102).requires_grad_()
    extra = s.random(s.heads, seed=seed + 103).requires_grad_() if sink else None
    return Case(s, case.make(s), case, MASKS[mask].make(s), MASKS[mask], extra, q, k, v)


def pairwise(first: Sequence[str], second: Sequence[str], *others: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield every pair of the first two factors, the others balanced so that their pairs come up as often."""
    seen: Counter[tuple[int, str, int, str]] = Counter()
    for row in itertools.product(first, second):
        chosen = list(row)
        for number, values in enumerate(others, start=2):
            cost = {x: sum(seen[place, y, number, x] for place, y in enumerate(chosen)) for x in values}
            chosen.append(min(values, key=lambda x: (cost[x], values.index(x))))
            for place, y in enumerate(chosen[:-1]):
                seen[place, y, number, chosen[-1]] += 1
        yield tuple(chosen)


def assert_same(found: Tensor, wanted: Tensor, what: str, tolerance: float = 1e-9) -> None:
    assert found.shape == wanted.shape, f"{what}: shape {tuple(found.shape)}, expected {tuple(wanted.shape)}"
    close = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
    torch.testing.assert_close(found, wanted, **close, msg=lambda m: f"{what}: {m}")


ROWS = list(pairwise(list(SCORES), list(MASKS), list(PLANS), list(SHAPES), list(GROUPS), ["", "sink"]))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Give a test that asks for a name of the tables every line of that table."""
    names = metafunc.fixturenames
    for name, lines in (("score_name", SCORES), ("mask_name", MASKS), ("plan_name", PLANS)):
        if name in names:
            metafunc.parametrize(name, list(lines))
    if "row" in names:
        metafunc.parametrize("row", ROWS, ids=[" | ".join(filter(None, row)) for row in ROWS])


@pytest.fixture
def make() -> Callable[..., Case]:
    return build


@pytest.fixture
def same() -> Callable[..., None]:
    return assert_same


@pytest.fixture
def plans() -> dict[str, Plan]:
    return PLANS


@pytest.fixture
def tables() -> dict[str, list[Any]]:
    named = {"score": SCORES, "mask": MASKS, "plan": PLANS, "shape": SHAPES, "group": GROUPS}
    return {name: list(table) for name, table in named.items()} | {"rows": ROWS}


@pytest.fixture
def sizes_of() -> Callable[[str, str], Sizes]:
    def of(shape: str, group: str) -> Sizes:
        heads, key_heads, value_heads = GROUPS[group]
        return Sizes(*SHAPES[shape], heads=heads, key_heads=key_heads, value_heads=value_heads)

    return of


@pytest.fixture
def sizes() -> type[Sizes]:
    return Sizes
