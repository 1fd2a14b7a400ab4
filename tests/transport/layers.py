"""Arguments of `attlas.transport` for each kind of layer, and the matrix by the plain recurrence of its state."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

KINDS = (
    "linear", "retention", "ssd", "gla", "deltanet", "gated delta", "gated delta, beta < 2", "gated delta, grouped",
    "kda", "pair", "resets", "gated delta, resets", "kda, resets", "one decay", "learned write",
)  # fmt: skip


def arguments(kind: str, n: int, *, d: int = 8, heads: int = 4, batch: int = 1, strong: float = 0.3) -> dict[str, Any]:
    """Return the arguments of a layer, float64."""

    def x(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64)

    def u(*shape: int) -> Tensor:
        return torch.rand(*shape, dtype=torch.float64)

    q, k = x(batch, heads, n, d) / math.sqrt(d), functional.normalize(x(batch, heads, n, d), dim=-1)
    beta = u(batch, heads, n)
    token, channel = -strong * u(batch, heads, n) ** 4, -strong * u(batch, heads, n, d) ** 4
    head = torch.log(1 - 2.0 ** (-5 - torch.arange(heads, dtype=torch.float64)))
    reset = torch.zeros(n, dtype=torch.bool).index_fill(0, torch.tensor([n // 7, n // 2, 3 * n // 4]), True)
    delta = {"write": beta, "erase": beta}
    found: dict[str, dict[str, Any]] = {
        "linear": {},
        "retention": {"decay": head, "scale": 0.5},
        "ssd": {"q": q[:, :2], "k": k[:, :1], "decay": token, "write": 2 * beta, "diagonal": u(heads)},
        "gla": {"decay": channel},
        "deltanet": delta,
        "gated delta": {"decay": token, **delta, "scale": 0.25},
        "gated delta, beta < 2": {"decay": token, "write": 2 * beta, "erase": 2 * beta},
        "gated delta, grouped": {"q": q[:, :2], "k": k[:, :2], "decay": token, **delta},
        "kda": {"decay": channel, **delta},
        "pair": {"decay": channel, "erase": (k * u(batch, heads, n, d), -k * channel.exp()), "diagonal": beta},
        "resets": {"decay": channel.masked_fill(channel > -1e-3 * strong, -math.inf)},
        "gated delta, resets": {"decay": token.masked_fill(reset, -math.inf), **delta},
        "kda, resets": {"decay": channel.masked_fill(reset[:, None], -math.inf), **delta},
        "one decay": {"decay": -0.1, "write": 0.5, "erase": 0.7, "diagonal": 2.0},
        "learned write": {"k": k[:, :1], "decay": channel[:, :, :, :1], "write": beta[:, :1]},
    }
    return {"q": q, "k": k, **found[kind]}


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return an argument with its tensors in a dtype."""
    if isinstance(value, tuple):
        return tuple(cast(t, dtype) for t in value)
    return value.to(dtype) if isinstance(value, Tensor) else value


def dense(q: Tensor, k: Tensor, heads: int = 4, scale: float = 1.0, **gates: Any) -> Tensor:
    """Return the matrix by the recurrence of the state, token by token, of queries with the axes (batch, heads, n, d).

    The values are the columns of the identity, so that the outputs are the rows of the matrix.
    """
    batch, _, n, d = q.shape

    def spread(t: Any, size: int) -> Tensor:
        """Return a gate with the shape (batch, heads, n, size)."""
        t = torch.as_tensor(t, dtype=q.dtype)
        t = t.reshape(1, -1, 1, 1) if t.ndim <= 1 else t.unsqueeze(-1) if t.ndim == 3 else t
        return t.repeat_interleave(heads // t.shape[1], 1).expand(batch, heads, n, size)

    q, k = spread(q, d) * scale, spread(k, d)
    g = spread(gates.get("decay", 0.0), d)
    write = spread(gates.get("write", 1.0), 1)
    erase = gates.get("erase", 0.0)
    p, r = (spread(t, d) for t in erase) if isinstance(erase, tuple) else (-spread(erase, 1) * k, k)
    state = torch.zeros(batch, heads, d, n, dtype=q.dtype)
    values = torch.eye(n, dtype=q.dtype)
    rows = []
    for t in range(n):
        state = state * g[:, :, t, :, None].exp()
        state = state + p[:, :, t, :, None] * (r[:, :, t, None] @ state)
        state = state + (write[:, :, t] * k[:, :, t])[..., None] * values[t]
        rows.append((q[:, :, t, None] @ state)[:, :, 0])
    found = torch.stack(rows, 2)
    return found + torch.diag_embed(spread(gates.get("diagonal", 0.0), 1).squeeze(-1))
