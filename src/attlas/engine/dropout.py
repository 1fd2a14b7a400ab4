"""Dropout of weights that is the same each time it is computed: a hash of seed, batch, head, i and j."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from attlas.foundation.compat import tracing
from attlas.foundation.tiles import Tile


@dataclass(frozen=True)
class Dropout:
    """Which weights are dropped, as a function of their place: no state, no stored mask.

    Parameters
    ----------
    p : float
        Probability that a weight is dropped, 0 <= p <= 1.
    seed : int
        Which of the possible drops; drawn from torch's default generator, so ``torch.manual_seed`` fixes it.
    """

    p: float
    seed: int

    @classmethod
    def draw(cls, p: float) -> Dropout:
        """Return a dropout with a fresh seed from torch's default generator."""
        # Where torch records the program, its own dropout draws the drops: there is no number to look at yet.
        return cls(p, 0 if tracing() else int(torch.randint(2**31 - 1, ()).item()))

    def keep(self, at: Tile) -> Tensor:
        """Return the factor of each weight, 0 or ``1 / (1 - p)``, shape (batches, heads, rows, columns)."""
        if self.p >= 1.0:
            return torch.zeros(at.shape, dtype=at.dtype, device=at.device)
        # The hash of a row is made once; each cell then costs one round. int32 wraps around by itself.
        row = _mix_bits(at.b.int() * _ODD_FACTORS[0] + self.seed)
        row = _mix_bits(row ^ _mix_bits(at.h.int() * _ODD_FACTORS[1] + 1))
        row = _mix_bits(row ^ _mix_bits(at.i.int() * _ODD_FACTORS[2] + 2))
        bits = _mix_bits(row + at.j.int() * _ODD_FACTORS[3]) & 0xFFFFFF  # 24 bits: a uniform number below 2**24
        return (bits >= round(self.p * 2**24)).to(at.dtype).mul_(1 / (1 - self.p))


# Odd factors for batch, head, i and j, so that equal numbers of two axes give different bits.
_ODD_FACTORS = (0x27D4EB2F, 0x165667B1, 0x2C1B3C6D, 0x1B873593)


def _mix_bits(x: Tensor) -> Tensor:
    """Mix the bits of int32 numbers (the finaliser of MurmurHash3; its two factors as negative int32)."""
    x = x ^ ((x >> 16) & 0xFFFF)
    x = x * -0x7A143595
    x = x ^ ((x >> 13) & 0x7FFFF)
    x = x * -0x3D4D51CB
    return x ^ ((x >> 16) & 0xFFFF)
