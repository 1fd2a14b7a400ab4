"""The small transformer that the findings train: by default attention alone, causal and on rotary positions."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import attlas

HERE = Path(__file__).resolve().parent


def rotated(x: Tensor, base: float = 10_000.0) -> Tensor:
    """Return queries or keys (..., n, d) turned by their positions: pair c by the angle ``i · base^(-2c/d)``."""
    n, half = x.shape[-2], x.shape[-1] // 2
    rates = base ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.arange(n)[:, None] * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Attention(nn.Module):
    """Heads of softmax attention: causal and on rotary queries and keys, unless told otherwise.

    With `gated`, what each head read is multiplied by a number between 0 and 1 that its query decides.
    """

    def __init__(
        self, width: int, heads: int, *, causal: bool = True, rotary: bool = True, gated: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.rotary = heads, rotary
        self.mask = attlas.Causal() if causal else None
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, heads) if gated else None

    def projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values (batch, heads, n, size)."""
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        return (rotated(q), rotated(k), v) if self.rotary else (q, k, v)

    def forward(self, x: Tensor, known: int | None = None) -> Tensor:
        """Return what the heads read, of the first `known` tokens alone where that is given."""
        q, k, v = self.projected(x)
        read = attlas.attention(q, k[:, :, :known], v[:, :, :known], mask=self.mask).transpose(1, 2)
        if self.gate is not None:
            read = read * self.gate(x).sigmoid().unsqueeze(-1)
        return self.out(read.flatten(2))


class Block(nn.Module):
    """Attention, and with `mlp` a layer of four times the width behind it, each added to its input."""

    def __init__(self, width: int, heads: int, mlp: bool = False, **kind: bool) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(width), Attention(width, heads, **kind)
        self.mlp = None
        if mlp:
            wide = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
            self.mlp = nn.Sequential(nn.LayerNorm(width), *wide)

    def forward(self, x: Tensor, known: int | None = None) -> Tensor:
        """Return the tokens after this block."""
        x = x + self.attn(self.norm(x), known)
        return x if self.mlp is None else x + self.mlp(x)


class Transformer(nn.Module):
    """Tokens in, logits out; between them attention, and with `mlp` more. `kind` is that of `Attention`."""

    def __init__(
        self, symbols: int, width: int = 64, heads: int = 4, layers: int = 2, mlp: bool = False, places: int = 0,
        **kind: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        self.places = nn.Embedding(places, width) if places else None
        self.blocks = nn.ModuleList(Block(width, heads, mlp, **kind) for _ in range(layers))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, symbols, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return logits (batch, n, symbols)."""
        x = self.embed(ids)
        if self.places is not None:
            x = x + self.places.weight[: ids.shape[-1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


def train(model: nn.Module, loss: Callable[[int], Tensor], steps: int, rate: float, warmup: int = 50) -> None:
    """Take steps of AdamW on ``loss(step)``: the rate rises over `warmup` steps, then falls to a tenth as a cosine."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    for step in range(steps):
        fall = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / steps))
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / warmup) * fall
        value = loss(step)
        optimizer.zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def rounded(found: Any, digits: int = 4) -> Any:
    """Return results with numbers of a few digits, as they are written."""
    if isinstance(found, dict):
        return {str(name): rounded(value, digits) for name, value in found.items()}
    if isinstance(found, Tensor):
        return rounded(found.tolist(), digits)
    if isinstance(found, list | tuple):
        return [rounded(value, digits) for value in found]
    return float(f"{found:.{digits}g}") if isinstance(found, float) else found


def write(name: str, found: Any) -> None:
    """Write the results that the page of this name draws, NAME.json beside this file."""
    path = HERE / f"{name}.json"
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps(rounded(found)) + "\n", encoding="utf-8")
    unfinished.replace(path)


def save_weights(name: str, model: nn.Module) -> None:
    """Write the weights that the page of this name reads, NAME.safetensors beside this file, in half precision."""
    path = HERE / f"{name}.safetensors"
    unfinished = path.with_suffix(".tmp")
    save_file({key: t.half().contiguous() for key, t in model.state_dict().items()}, unfinished)
    unfinished.replace(path)
