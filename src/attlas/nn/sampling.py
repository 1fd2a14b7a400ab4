"""Choosing the next token from its logits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from attlas.errors import ShapeError


class Sampler:
    """Chooses a token from each row of logits: the likeliest, or one drawn.

    Parameters
    ----------
    temperature : float
        0 takes the likeliest; else logits are divided by it before a draw.
    top_k, top_p : int and float, optional
        Draw among the k likeliest, or the fewest that have probability p together.
    seed : int, optional
        Seed of a generator of its own.
    device : torch.device
        Where the logits are.
    """

    def __init__(
        self, temperature: float, top_k: int | None, top_p: float | None, seed: int | None, device: torch.device
    ) -> None:
        _check("temperature", temperature, 0.0 <= temperature < math.inf, "0 or more", "temperature=0.8")
        _check("top_k", top_k, top_k is None or top_k >= 1, "1 or more", "top_k=50")
        _check("top_p", top_p, top_p is None or 0.0 < top_p <= 1.0, "above 0 and at most 1", "top_p=0.95")
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self.generator = None if seed is None else torch.Generator(device).manual_seed(seed)

    def __call__(self, logits: Tensor) -> Tensor:
        """Return a token for each row, shape (batch,)."""
        if self.temperature == 0.0:
            return logits.argmax(dim=-1)
        logits = logits.float() / self.temperature
        if self.top_k is not None:
            least = logits.topk(min(self.top_k, logits.shape[-1]), dim=-1).values[..., -1:]
            logits = logits.masked_fill(logits < least, -math.inf)
        if self.top_p is not None and self.top_p < 1.0:
            logits = _nucleus(logits, self.top_p)
        return torch.multinomial(logits.softmax(dim=-1), 1, generator=self.generator).squeeze(-1)


def _nucleus(logits: Tensor, p: float) -> Tensor:
    """Keep the likeliest tokens up to the one with which their probability reaches p."""
    ordered, index = logits.sort(dim=-1)
    unlikely = ordered.softmax(dim=-1).cumsum(dim=-1) <= 1 - p
    unlikely[..., -1] = False
    return logits.masked_fill(unlikely.scatter(-1, index, unlikely), -math.inf)


def _check(name: str, value: float | None, fine: bool, rule: str, fix: str) -> None:
    if not fine:
        raise ShapeError("generate()", f"{name} must be {rule}.", found=f"{name} = {value!r}", fix=fix)
