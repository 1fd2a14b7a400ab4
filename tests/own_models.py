"""A language model of plain modules that computes its attention with attlas, as a user writes it, and its oracle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import attlas

VOCABULARY, SIZE, HEADS = 50, 32, 4
# Weights of a layer, given its path; changed weights, or the same.
Edit = Callable[[str, Tensor], Tensor]


def heads_of(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


class Attention(nn.Module):
    """Causal attention; `how` says by which of the ways that attlas has."""

    def __init__(self, how: str = "attention", dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(SIZE, 3 * SIZE), nn.Linear(SIZE, SIZE)
        self.how, self.dropout = how, dropout
        self.path, self.edit = "", None  # of the oracle

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = map(heads_of, self.qkv(x).chunk(3, dim=-1))
        return self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask, dropout_p = attlas.Causal(), self.dropout if self.training else 0.0
        if self.how == "attention":
            return attlas.attention(q, k, v, mask=mask, dropout_p=dropout_p)
        if self.how == "dense":
            logits = q @ k.mT / q.shape[-1] ** 0.5
            weights = logits.masked_fill(torch.ones_like(logits).tril() == 0, -torch.inf).softmax(-1)
            return (weights if self.edit is None else self.edit(self.path, weights)) @ v
        A = attlas.attend(q, k, mask=mask)
        if self.how == "matmul":
            return torch.matmul(A, v)
        if self.how == "einsum":
            return torch.einsum("bhij,bhjd->bhid", A, v)
        if self.how == "pooled":
            return attlas.recording.pooled(self, A, v, dropout_p=dropout_p)[0]
        if self.how == "offer":
            attlas.recording.offer(self, A)
        out = A @ v
        if self.how == "offer after":
            attlas.recording.offer(self, A)
        return out


class Twice(Attention):
    """Differential attention: two matrices of one module, each multiplied with the values."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        A, B = attlas.attend(q, k, mask=attlas.Causal()), attlas.attend(k, q, mask=attlas.Causal())
        return A @ v - 0.3 * (B @ v) + A @ v.abs()


class Block(nn.Module):
    def __init__(self, attn: nn.Module) -> None:
        super().__init__()
        self.norm, self.attn, self.mlp = nn.LayerNorm(SIZE), attn, nn.Linear(SIZE, SIZE)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm(x))
        return x + self.mlp(x).relu()


class LanguageModel(nn.Module):
    def __init__(self, layers: int = 2, kind: Callable[..., nn.Module] = Attention, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, SIZE)
        self.blocks = nn.ModuleList(Block(kind(**options)) for _ in range(layers))
        self.head = nn.Linear(SIZE, VOCABULARY)
        with torch.no_grad():  # random weights of the usual size attend to everything alike
            for block in self.blocks:
                for name, p in block.attn.named_parameters():
                    p.mul_(4.0 if name == "qkv.weight" else 1.0)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def twin(model: LanguageModel, edit: Edit | None = None) -> LanguageModel:
    """Return the same model with dense weights, which `edit` may change."""
    other = LanguageModel(len(model.blocks), how="dense").to(model.head.weight.dtype).train(model.training)
    other.load_state_dict(model.state_dict())
    for path, module in other.named_modules():
        if isinstance(module, Attention):
            module.path, module.edit = path, edit
    return other


def some_ids(n: int = 12, batch: int = 2) -> Tensor:
    return torch.randint(VOCABULARY, (batch, n), generator=torch.Generator().manual_seed(1))
