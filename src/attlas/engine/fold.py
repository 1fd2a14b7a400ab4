"""A statistic over the matrix: the protocol, and what each step of it is handed."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from attlas.engine.cover import Strip
from attlas.engine.problem import Problem
from attlas.engine.workspace import Workspace
from attlas.masks.base import Coverage
from attlas.tiles import Tile

__all__ = ["Part", "Statistic", "allowed_cells", "lowest"]


def lowest(dtype: torch.dtype) -> float:
    """Return the finite number that stands for -inf inside the engine, so that 0 times it is 0, not NaN."""
    return torch.finfo(dtype).min / 4


def allowed_cells(problem: Problem, at: Tile, strip: Strip) -> Tensor | None:
    """Return True where a cell of the strip is allowed, or None where all are."""
    if problem.mask is None or strip.whole:
        return None
    if len(strip.segments) == 1 and strip.segments[0][1] is Coverage.SOME:
        return problem.mask.allows(at.narrow(strip.columns)).expand(*at.shape[:3], len(strip.columns))
    out = torch.empty(*at.shape[:3], len(strip.columns), dtype=torch.bool, device=at.device)
    for columns, coverage in strip.segments:
        span = out[..., columns.start - strip.columns.start : columns.stop - strip.columns.start]
        if coverage is Coverage.SOME:
            span.copy_(problem.mask.allows(at.narrow(columns)))
        else:
            span.fill_(coverage is Coverage.ALL)
    return out


@dataclass(eq=False)
class Part:
    """Some rows of the matrix and some of their columns, with their numbers.

    Everything is computed when it is first asked for, and shared by all statistics of one pass. A step must
    not write into these tensors, nor keep them: their memory is used again for the next part. Shapes: B batches, H heads, r rows, c columns of the tile.

    Parameters
    ----------
    problem : Problem
        The matrix.
    at : Tile
        The place of the part.
    strip : Strip
        Its columns and what the mask says of them.
    shifted : Tensor, shape (B, H, r, c)
        Logits less `shift`, finite: a very low number where a key may not be seen.
    shift : Tensor, shape (B, H, r)
        What was subtracted from each row.
    raw, inverse : Tensor, optional, shape (B, H, r, c) and (B, H, r)
        ``exp(shifted)`` and the factor of each row that makes weights of it.
    lse : Tensor, shape (B, H, r)
        Log-sum-exp of the whole rows.
    space : Workspace
        Buffers that all parts of one pass share.
    first, last : bool
        Whether this is the first, the last part of its rows.
    """

    problem: Problem
    at: Tile
    strip: Strip
    shifted: Tensor
    shift: Tensor
    lse: Tensor
    space: Workspace
    raw: Tensor | None = None
    inverse: Tensor | None = None
    first: bool = True
    last: bool = True

    @cached_property
    def weights(self) -> Tensor:
        """Weights, 0 where masked, shape (B, H, r, c)."""
        raw = torch.exp(self.shifted, out=self.scratch("raw")) if self.raw is None else self.raw
        return raw if self.inverse is None else raw.mul_(self.inverse.unsqueeze(-1))

    def scratch(self, name: str = "scratch") -> Tensor:
        """Return a buffer of the part's shape to compute in; it is overwritten by the next who asks for it."""
        return self.space.take(name, tuple(self.shifted.shape))

    @cached_property
    def allowed(self) -> Tensor | None:
        """True where the mask lets the query see the key; None where it does everywhere."""
        return allowed_cells(self.problem, self.at, self.strip)

    @cached_property
    def seen(self) -> tuple[tuple[range, Tensor | None], ...]:
        """Columns in which something may attend, counted from the part's first, and the cells that may.

        The cells are None where all may, else bool and broadcastable to (B, H, r, columns): a mask that
        is the same for all heads is asked and counted once.
        """
        start, r = self.strip.columns.start, self.shifted.shape[-2]
        out: list[tuple[range, Tensor | None]] = []
        for columns, coverage in self.strip.segments:
            if coverage is Coverage.NONE:
                continue
            cells = None
            if coverage is Coverage.SOME and self.problem.mask is not None:
                cells = self.problem.mask.allows(self.at.narrow(columns))
                cells = cells.expand(torch.broadcast_shapes(cells.shape, (r, len(columns))))
            out.append((range(columns.start - start, columns.stop - start), cells))
        return tuple(out)

    @cached_property
    def keys(self) -> Tensor:
        """How many keys of this part each query may see, shape (B, H, r), in the dtype of the scores."""
        total = torch.zeros_like(self.shift)
        for columns, cells in self.seen:
            total += float(len(columns)) if cells is None else cells.sum(dim=-1)
        return total

    @cached_property
    def mass(self) -> Tensor:
        """Sum of each row's weights in this part, shape (B, H, r)."""
        return self.weights.sum(dim=-1)

    @cached_property
    def column_sums(self) -> Tensor:
        """Sum of each column's weights in this part, shape (B, H, c)."""
        return self.weights.sum(dim=-2)

    @cached_property
    def logits(self) -> Tensor:
        """Log-weights before softmax, -inf where masked, shape (B, H, r, c). Costs a tile of memory."""
        logits = self.shifted + self.shift.unsqueeze(-1)
        return logits.masked_fill_(self.shifted <= lowest(logits.dtype) / 2, -math.inf)

    @cached_property
    def largest(self) -> Tensor:
        """Largest shifted logit of each row in this part, shape (B, H, r)."""
        return self.shifted.amax(dim=-1)

    def as_weights(self, shifted: Tensor) -> Tensor:
        """Return the weights of some shifted logits of each row, shape (B, H, r, any number)."""
        raw = torch.exp(shifted)
        return raw if self.inverse is None else raw * self.inverse.unsqueeze(-1)


class Statistic(ABC):
    """A number, a row or a small table drawn from the matrix in one pass over its tiles.

    Parts come panel by panel (some rows of some heads), and within a panel from left to right. Cells that
    nothing may see are left out and never visited: `start` sets what they mean.

    Attributes
    ----------
    whole_rows : bool
        Whether `step` needs all columns of a row in one part. Costs speed beyond some 100,000 keys.
    """

    whole_rows: bool = False

    @abstractmethod
    def start(self, problem: Problem) -> Any:
        """Return the carry before any part was seen; also the door for checks against the sizes."""

    @abstractmethod
    def step(self, carry: Any, part: Part, at: Tile) -> Any:
        """Return the carry after one part."""

    @abstractmethod
    def finish(self, carry: Any) -> Any:
        """Return the result: tensors whose first two axes are (batch, heads), or a named tuple of them."""
