"""Small matrices of every kind, each beside the same weights by their definition, in float64 and numpy alone."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import attlas
from attlas.view import Answer, Service


@dataclass(frozen=True)
class Case:
    """A matrix, its weights and what its mask allows: arrays of shape (batch, heads, m, n)."""

    A: attlas.AttentionMatrix
    weights: np.ndarray
    allowed: np.ndarray
    logits: np.ndarray

    def head(self, batch: int, head: Any, variant: str) -> tuple[np.ndarray, np.ndarray]:
        """Return weights and allowed cells of one picture, shape (m, n)."""
        weights, allowed = self.weights[batch], self.allowed[batch]
        if variant == "nosink":
            allowed = allowed.copy()
            allowed[..., :1] = False
            weights = softmax(np.where(allowed, self.logits[batch], -np.inf), self.sink)
        if head == "mean":
            return weights.mean(0), allowed.any(0)
        return weights[head], allowed[head]

    @property
    def sink(self) -> np.ndarray | None:
        sink = self.A.problem.sink
        return None if sink is None else sink.double().numpy()


def softmax(logits: np.ndarray, sink: np.ndarray | None = None) -> np.ndarray:
    """Return softmax over the last axis; zeros for a row of -inf."""
    top = logits.max(-1, keepdims=True, initial=-np.inf)
    if sink is not None:
        top = np.maximum(top, sink[:, None, None])
    top = np.where(np.isfinite(top), top, 0.0)
    raw = np.exp(logits - top)
    total = raw.sum(-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink[:, None, None] - top)
    return np.divide(raw, total, out=np.zeros_like(raw), where=total > 0)


def make(
    m: int = 70,
    n: int = 70,
    *,
    batch: int = 1,
    heads: int = 2,
    key_heads: int | None = None,
    mask: Any = None,
    allowed: Callable[..., Any] | None = None,
    sink: bool = False,
    dtype: torch.dtype = torch.float32,
    d: int = 8,
    spread: float = 1.0,
) -> Case:
    """Return a matrix of random tokens; `allowed` says of places b, h, i, j what the mask allows."""
    generator = torch.Generator().manual_seed(m * 1009 + n)
    q = (spread * torch.randn(batch, heads, m, d, generator=generator)).to(dtype)
    k = torch.randn(batch, key_heads or heads, n, d, generator=generator).to(dtype)
    s = torch.randn(heads, generator=generator) if sink else None
    A = attlas.attend(q, k, mask=mask, sink=s)
    keys = k.double().repeat_interleave(heads // (key_heads or heads), dim=1)
    logits = (q.double() @ keys.mT / d**0.5).numpy()
    places = np.ix_(np.arange(batch), np.arange(heads), np.arange(m), np.arange(n))
    cells = np.broadcast_to(True if allowed is None else allowed(*places), logits.shape)
    return Case(A, softmax(np.where(cells, logits, -np.inf), None if s is None else s.double().numpy()), cells, logits)


def causal(m: int, n: int) -> dict[str, Any]:
    """Return a causal mask and what it allows."""
    return {"mask": attlas.Causal(), "allowed": lambda b, h, i, j: j <= i + n - m}


_BLOCKS = torch.arange(70) // 13
_TABLE = torch.rand(2, 70, 70, generator=torch.Generator().manual_seed(1)) < 0.4

CASES: dict[str, Callable[[], Case]] = {
    "all": make,
    "causal": lambda: make(300, 300, **causal(300, 300)),
    "cached": lambda: make(40, 300, **causal(40, 300)),
    "cross": lambda: make(90, 33),
    "no keys": lambda: make(33, 20, mask=attlas.Causal(), allowed=lambda b, h, i, j: j <= i - 13),
    "window": lambda: make(
        300, 300, mask=attlas.Window(20, 0), allowed=lambda b, h, i, j: (j <= i) & (j >= i - 20), spread=4.0
    ),
    "padding": lambda: make(
        batch=2, mask=attlas.Padding(torch.tensor([70, 31])), allowed=lambda b, h, i, j: j < np.where(b == 0, 70, 31)
    ),
    "documents": lambda: make(
        mask=attlas.Documents(_BLOCKS) & attlas.Causal(),
        allowed=lambda b, h, i, j: (j <= i) & (_BLOCKS.numpy()[i] == _BLOCKS.numpy()[j]),
    ),
    "table of heads": lambda: make(
        mask=attlas.from_tensor(_TABLE[None]), allowed=lambda b, h, i, j: _TABLE.numpy()[h, i, j]
    ),
    "function": lambda: make(
        mask=attlas.from_function(lambda b, h, i, j: (j + i) % 3 != 0), allowed=lambda b, h, i, j: (j + i) % 3 != 0
    ),
    "sink": lambda: make(sink=True, heads=4, key_heads=2, **causal(70, 70)),
    "grouped": lambda: make(batch=2, heads=4, key_heads=2, **causal(70, 70)),
    "bfloat16": lambda: make(300, 300, dtype=torch.bfloat16, **causal(300, 300)),
    "float16": lambda: make(dtype=torch.float16, **causal(70, 70)),
    "float64": lambda: make(dtype=torch.float64, **causal(70, 70)),
    "sharp": lambda: make(300, 300, spread=40.0, **causal(300, 300)),
    "one cell": lambda: make(1, 1),
    "one row": lambda: make(1, 600),
    "one key": lambda: make(600, 1),
    "no rows": lambda: make(0, 5),
    "nothing": lambda: make(5, 0),
}


def wait(until: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait until something holds."""
    end = time.monotonic() + seconds
    while not until():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.005)


def ask(service: Service, question: str, /, **parameters: Any) -> Answer:
    """Ask a question that has an answer."""
    answer = service.answer(question, {key: str(value) for key, value in parameters.items()})
    assert answer.status == 200, answer.body
    return answer


def numbers(service: Service, question: str, /, **parameters: Any) -> np.ndarray:
    """Return the numbers of a binary answer."""
    answer = ask(service, question, **parameters)
    assert answer.kind == "binary"
    return np.frombuffer(answer.body, "<u2" if question in ("tile", "thumbnail") else "<f4")


def facts(service: Service, question: str, /, **parameters: Any) -> Any:
    """Return the content of an answer in JSON."""
    answer = ask(service, question, **parameters)
    assert answer.kind == "json"
    return json.loads(answer.body)
