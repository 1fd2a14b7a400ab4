"""Tokens and gates of a linear attention layer, as data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from attlas.engine.problem import spread_heads
from attlas.foundation.checks import accumulation_dtype, holds_numbers
from attlas.foundation.compat import cached_property
from attlas.foundation.devices import to_device
from attlas.foundation.tiles import cut

# Tokens whose cells are computed at once, powers of 2: measured on a CPU, without and with a rank one part. Elsewhere
# the larger one, for fewer steps.
CHUNK, TURNING_CHUNK = 64, 32
# Numbers of one factor of the chunks that are computed at once: measured on a CPU, where they stay in its cache.
# Elsewhere more, for fewer calls.
_SLICE_NUMBERS, _FACTOR_OFF_CPU = 1 << 18, 16

#: The tensors of `GatedTokens`.
NAMES = ("q", "k", "decay", "write", "erase", "p", "r", "diagonal")


@dataclass(frozen=True, eq=False)
class GatedTokens:
    """Queries, keys and gates of a linear attention layer, with the axes (batch, heads, tokens, size).

    Each tensor has heads of its own, whose number divides `heads`. Gates of size 1 along the batch, the heads or the
    tokens stand for all.

    Parameters
    ----------
    q, k : Tensor, shape (batch, own heads, n, d)
        Queries and keys.
    heads : int
        Heads of the matrix.
    decay : Tensor, shape (batch or 1, own heads, n or 1, d or 1), optional
        Logarithms of the factors by which the state shrinks before each token, at most 0.
    write : Tensor, shape (batch or 1, own heads, n or 1, 1), optional
        Factor of each key.
    erase : Tensor, shape (batch or 1, own heads, n or 1, 1), optional
        How much of what the state holds at a key is taken out before that key is written.
    p, r : Tensor, shape (batch or 1, own heads, n or 1, d), optional
        The vectors of another rank one part, in place of `erase`.
    diagonal : Tensor, shape (batch or 1, own heads, n or 1, 1), optional
        What is added to the cell of each token with itself.
    scale : float
        Factor of the queries.
    """

    q: Tensor
    k: Tensor
    heads: int
    decay: Tensor | None = None
    write: Tensor | None = None
    erase: Tensor | None = None
    p: Tensor | None = None
    r: Tensor | None = None
    diagonal: Tensor | None = None
    scale: float = 1.0

    @property
    def batch(self) -> int:
        """Number of batches."""
        return self.k.shape[0]

    @property
    def n(self) -> int:
        """Number of tokens."""
        return self.k.shape[2]

    @property
    def size(self) -> int:
        """Size of queries and keys."""
        return self.k.shape[3]

    @property
    def device(self) -> torch.device:
        """Where everything is computed."""
        return self.k.device

    @cached_property
    def dtype(self) -> torch.dtype:
        """Dtype that cells and sums are computed in."""
        return accumulation_dtype(self.k.dtype)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The tensors by their names, without those that are None."""
        return {name: t for name in NAMES if (t := getattr(self, name)) is not None}

    @property
    def turns(self) -> bool:
        """Whether tokens change the state by a rank one part, so that its coordinates mix."""
        return self.erase is not None or self.p is not None

    @property
    def has_numbers(self) -> bool:
        """Whether all tensors have numbers in memory."""
        return all(map(holds_numbers, self.tensors.values()))

    def check_sizes(self) -> None:
        """Raise a ValueError where a tensor does not fit the others, as one from a file may not."""
        batch, n, d = self.batch, self.n, self.size
        for name, t in self.tensors.items():
            own = (d,) if name in ("q", "k", "p", "r") else (1, d) if name == "decay" else (1,)
            tokens = (n,) if name in ("q", "k") else (1, n)
            fits = t.ndim == 4 and t.shape[0] in (1, batch) and t.shape[2] in tokens and t.shape[3] in own
            if not fits or not t.is_floating_point() or not t.shape[1] or self.heads % t.shape[1]:
                raise ValueError(f"{name} {tuple(t.shape)} {t.dtype} of {batch} × {self.heads} matrices of {n} tokens")

    # ----------------------------------------------------------------------------------------------------- other tokens

    def mapped(self, f: Callable[[Tensor], Tensor], **fields: Any) -> GatedTokens:
        """Return the tokens with a function of each tensor in its place, and other fields."""
        changed: dict[str, Any] = {name: f(t) for name, t in self.tensors.items()}
        return replace(self, **changed, **fields)

    def narrow(self, start: int, stop: int) -> GatedTokens:
        """Return the tokens from `start` to before `stop`, as views."""
        if (start, stop) == (0, self.n):
            return self
        return self.mapped(lambda t: t if self.is_constant(t) else t[:, :, start:stop])

    def select(self, batches: Tensor | slice, heads: Tensor | slice) -> GatedTokens:
        """Return the tokens of some batches and heads."""
        numbers = torch.arange(self.heads, device="cpu")[heads]

        def part(t: Tensor) -> Tensor:
            """Return the chosen batches and heads of a tensor, whose size may be 1 for all of them."""
            t = t if t.shape[0] == 1 and self.batch != 1 else t[batches]
            own = t.shape[1]
            if own == 1:
                return t
            group = self.heads // own
            if group == 1 and isinstance(heads, slice):
                return t[:, heads]
            return t[:, to_device(numbers // group, t.device)]

        return self.mapped(part, heads=len(numbers))

    def is_constant(self, t: Tensor) -> bool:
        """Return whether a tensor has one vector for all tokens."""
        return t.shape[2] == 1 != self.n

    # ----------------------------------------------------------------------------------------------------------- chunks

    @cached_property
    def chunk(self) -> int:
        """Tokens of a chunk: a power of 2."""
        most = TURNING_CHUNK if self.turns and self.device.type == "cpu" else CHUNK
        return min(most, 1 << max(self.n - 1, 0).bit_length())

    @cached_property
    def chunks(self) -> int:
        """Number of chunks; the last one may have fewer tokens."""
        return -(-self.n // self.chunk)

    @cached_property
    def chunks_at_once(self) -> int:
        """Number of chunks whose factors are computed at once."""
        numbers = self.batch * self.heads * self.chunk * max(self.size, self.chunk)
        most = _SLICE_NUMBERS if self.device.type == "cpu" else _FACTOR_OFF_CPU * _SLICE_NUMBERS
        return max(most // max(numbers, 1), 1)

    def slices(self) -> Iterator[range]:
        """Yield runs of chunks that are computed at once."""
        yield from cut(self.chunks, self.chunks_at_once)

    def cut(self, t: Tensor, chunks: range) -> Tensor:
        """Return a tensor of tokens in chunks, shape (batch or 1, heads or 1, chunks or 1, tokens of a chunk, size).

        It has the dtype of cells; zeros stand for the tokens that the last chunk lacks.
        """
        size = self.chunk
        if self.is_constant(t):
            return self._repeat_heads(t.to(self.dtype)).unsqueeze(2).expand(-1, -1, 1, size, -1)
        t = t[:, :, chunks.start * size : chunks.stop * size].to(self.dtype)
        missing = len(chunks) * size - t.shape[2]
        if missing:
            t = functional.pad(t, (0, 0, 0, missing))
        found: Tensor = self._repeat_heads(t).unflatten(2, (len(chunks), size))
        return found

    def cut_whole(self, t: Tensor, chunks: range) -> Tensor:
        """Return `cut` of queries or keys with all batches and heads."""
        return self.cut(t, chunks).expand(self.batch, self.heads, -1, -1, -1)

    def _repeat_heads(self, t: Tensor) -> Tensor:
        """Repeat the heads of a tensor, one for each of the matrix; a single one broadcasts."""
        return t if t.shape[1] == 1 else spread_heads(t, self.heads)
