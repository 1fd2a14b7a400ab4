"""GPT-2, written for training: the same function as transformers' GPT2LMHeadModel, on one screen.

Queries, keys and values have a matrix each here (Muon orthogonalises a matrix as a whole, so three maps that
do different work should not share one); export.py joins them into GPT-2's ``c_attn``.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """Sizes of the model."""

    vocabulary: int = 4096
    context: int = 2048
    layers: int = 4
    heads: int = 6
    width: int = 192


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.query = nn.Linear(shape.width, shape.width)
        self.key = nn.Linear(shape.width, shape.width)
        self.value = nn.Linear(shape.width, shape.width)
        self.out = nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.query, self.key, self.value))
        y = plain_attention(q, k, v) if x.shape[1] <= 256 else F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.ln_2 = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)
        # GPT-2's own form of GELU is "tanh". The exact form is within 0.0005 of it and takes half the time to
        # train with; export.py switches to "tanh", and everything that is reported is measured on that.
        self.gelu = "none"

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln_1(x))
        return x + self.down(F.gelu(self.up(self.ln_2(x)), approximate=self.gelu))


class Gpt2(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.ln_f = nn.LayerNorm(shape.width)
        self.apply(self._initialise)
        nn.init.normal_(self.tokens.weight, std=0.05)
        for block in self.blocks:
            for last in (block.attention.out, block.down):
                nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * shape.layers))
        # Learned like every other weight, but from sinusoids: neighbours start out related by one rotation,
        # which a short training run on 2,048 separate random vectors would have to discover first.
        self.positions.weight.data = 0.1 * math.sqrt(2) * sinusoids(shape.context, shape.width)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear):
            nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor, places: Tensor) -> Tensor:
        """Final hidden states (batch, length, width) of token ids at the given positions."""
        x = self.tokens(ids) + self.positions(places)
        if torch.is_autocast_enabled("cpu"):
            x = x.to(torch.bfloat16)  # or autocast would convert the residual stream again in front of each matrix
        for block in self.blocks:
            x = block(x)
        return self.ln_f(x)

    def loss(self, ids: Tensor, places: Tensor) -> Tensor:
        """Mean cross entropy in nats of each token after the first."""
        hidden = self(ids[:, :-1], places[:, :-1])
        return TiedCrossEntropy.apply(hidden.flatten(0, 1), self.tokens.weight, ids[:, 1:].flatten())


def plain_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The formula itself: with short sequences its backward pass is faster than the fused kernel's on a CPU."""
    above = torch.full((q.shape[-2], q.shape[-2]), -torch.inf, dtype=q.dtype).triu(1)
    return (q / math.sqrt(q.shape[-1]) @ k.mT + above).softmax(-1) @ v


class TiedCrossEntropy(torch.autograd.Function):
    """Cross entropy through the tied head, a few rows at a time.

    The gradient is taken while the rows' logits are still in the cache, and the (tokens, vocabulary) matrix is
    never whole in memory: half the time of ``F.cross_entropy`` here.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, rows: int = 256) -> Tensor:
        hidden = hidden.to(torch.bfloat16)
        head = weight.to(torch.bfloat16)
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        total, count = hidden.new_zeros((), dtype=torch.float32), len(hidden)
        for start in range(0, count, rows):
            h, y = hidden[start : start + rows], targets[start : start + rows, None]
            z = (h @ head.T).float()
            top = z.amax(1, keepdim=True)
            total -= (z.gather(1, y) - top).sum()
            z.sub_(top).exp_()
            mass = z.sum(1, keepdim=True)
            total += mass.log().sum()
            z.div_(mass).scatter_add_(1, y, torch.full_like(y, -1, dtype=z.dtype))
            grad = z.to(torch.bfloat16)
            torch.mm(grad, head, out=grad_hidden[start : start + rows])
            grad_weight += grad.T @ h
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.count = count
        return total / count

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad / ctx.count * grad_hidden.float(), grad / ctx.count * grad_weight, None, None


def sinusoids(length: int, width: int) -> Tensor:
    """Sines and cosines (length, width) with wavelengths from 2 pi to about twice the length."""
    rates = torch.logspace(0, -math.log10(2 * length / (2 * math.pi)), width // 2)
    angles = torch.arange(length)[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)
