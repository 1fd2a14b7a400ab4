"""Eight heads into two: a layer learns the mean weights of a larger one, and no matrix of weights is ever stored.

This is how the index of a sparse attention is trained: its weights are drawn towards those that all heads of the layer
give together, by the KL divergence of each row.

    python examples/distill_heads.py
"""

import argparse

import torch
from torch import Tensor, nn

import attlas


class Layer(nn.Module):
    """Queries and keys of some heads."""

    def __init__(self, heads: int, size: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k = (nn.Linear(width, heads * size, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> attlas.AttentionMatrix:
        q, k = (part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in (self.q, self.k))
        return attlas.attend(q, k, mask=attlas.Causal())


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=150, help="steps of training (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=96, help="tokens of a text (default: %(default)s)")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    width = 24
    teacher, student = Layer(8, 8, width), Layer(2, 16, width)
    for weight in teacher.parameters():
        nn.init.normal_(weight, std=1.5 / width**0.5)
    optimizer = torch.optim.Adam(student.parameters(), lr=0.01)
    losses = []
    for step in range(options.steps):
        x = torch.randn(4, options.tokens, width)
        with torch.no_grad():
            target = teacher(x)
        loss = attlas.divergence(target, student(x), heads="mean").mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if step % 50 == 49:
            print(f"  step {step + 1:4}: KL divergence {losses[-1]:.3f} nats per row, {losses[0]:.3f} at first")
    return {"first": losses[0], "last": sum(losses[-5:]) / 5}


if __name__ == "__main__":
    main()
