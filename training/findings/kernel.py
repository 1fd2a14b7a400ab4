"""Train a transformer to predict the rows of a table from other rows: writes its weights, kernel.safetensors."""

from __future__ import annotations

import torch
from small import Block, save_weights, train
from torch import Tensor, nn
from torch.nn import functional

import attlas

FEATURES, KNOWN, ASKED = 2, 64, 32  # of a table: features, rows with outputs, rows without
SHORTEST, LONGEST = 0.5, 4.0  # length over which a feature changes the output; features are uniform in [-2, 2]
NOISE = 0.2
SEED = 0


class Rows(nn.Module):
    """Predicts the outputs of some rows from others: attention from every row to the rows that have an output."""

    def __init__(self, width: int = 64, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.features, self.output = nn.Linear(FEATURES, width), nn.Linear(1, width)
        self.blocks = nn.ModuleList(Block(width, heads, mlp=True, causal=False, rotary=False) for _ in range(layers))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return predictions (batch, asked) from features (batch, known + asked, f) and outputs (batch, known)."""
        known = y.shape[1]
        rows = self.features(x)
        rows = torch.cat([rows[:, :known] + self.output(y.unsqueeze(-1)), rows[:, known:]], dim=1)
        for block in self.blocks:
            rows = block(rows, known)
        return self.head(self.last(rows[:, known:])).squeeze(-1)


def tables(
    count: int, generator: torch.Generator, known: int = KNOWN, asked: int = ASKED
) -> tuple[Tensor, Tensor, Tensor]:
    """Return features (count, rows, f), outputs (count, rows) with noise, and lengths (count, f), in float64.

    Outputs are draws of a Gaussian process: each table has a length for each feature, over which the output changes.
    """
    n = known + asked
    x = 4 * torch.rand(count, n, FEATURES, generator=generator, dtype=torch.float64) - 2
    share = torch.rand(count, FEATURES, generator=generator, dtype=torch.float64)
    lengths = SHORTEST * (LONGEST / SHORTEST) ** share
    covariance = (-0.5 * torch.cdist(x / lengths[:, None], x / lengths[:, None]).square()).exp()
    factor = torch.linalg.cholesky(covariance + NOISE**2 * torch.eye(n, dtype=torch.float64))
    y = (factor @ torch.randn(count, n, 1, generator=generator, dtype=torch.float64)).squeeze(-1)
    return x, y, lengths


def best(x: Tensor, y: Tensor, lengths: Tensor) -> Tensor:
    """Return the best predictions (count, asked) there are: those of the process that made the tables."""
    known = y.shape[1]
    scaled = x / lengths[:, None]
    covariance = (-0.5 * torch.cdist(scaled, scaled[:, :known]).square()).exp()
    noisy = covariance[:, :known] + NOISE**2 * torch.eye(known, dtype=torch.float64)
    return (covariance[:, known:] @ torch.linalg.solve(noisy, y.unsqueeze(-1))).squeeze(-1)


def kernel(x: Tensor, widths: Tensor, known: int = KNOWN) -> attlas.AttentionMatrix:
    """Return the weights (count, asked, known) of kernel regression with these widths, (f,) or (count, f)."""
    scaled = x / widths.unsqueeze(-2)
    return attlas.attend(scaled[:, known:], scaled[:, :known], score=attlas.Gaussian())


def fitted_widths(x: Tensor, y: Tensor, predicted: Tensor, start: Tensor, steps: int = 150) -> Tensor:
    """Return the widths, of the shape of `start`, with which kernel regression is nearest to predictions."""
    logs = start.double().log().requires_grad_()
    optimizer = torch.optim.Adam([logs], lr=0.05)
    for _ in range(steps):
        error = ((kernel(x, logs.exp(), y.shape[1]) @ y.unsqueeze(-1)).squeeze(-1) - predicted).square().sum()
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
    return logs.detach().exp()


def influence(model: Rows, x: Tensor, y: Tensor) -> Tensor:
    """Return how much each prediction changes with each output (count, asked, known): its derivative."""
    y = y.float().requires_grad_()
    total = model(x.float(), y).sum(0)  # of separate tables
    return torch.stack([torch.autograd.grad(each, y, retain_graph=True)[0] for each in total], dim=1).double()


def share(explained: Tensor, predicted: Tensor) -> float:
    """Return which share of the variance of the predictions is explained: R squared."""
    return (1 - (explained - predicted).square().sum() / (predicted - predicted.mean()).square().sum()).item()


def trained(seed: int, steps: int = 1000, batch: int = 16) -> tuple[Rows, list[float]]:
    """Return the model after training with this seed, and the loss of every 100th step."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model, losses = Rows(), []

    def loss(step: int) -> Tensor:
        x, y, _ = (t.float() for t in tables(batch, generator))
        value = functional.mse_loss(model(x, y[:, :KNOWN]), y[:, KNOWN:])
        if step % 100 == 0:
            losses.append(value.item())
        return value

    train(model, loss, steps, rate=1e-3)
    return model, losses


def main() -> None:
    """Train, and write the weights."""
    torch.set_num_threads(1)
    model, losses = trained(SEED)
    print(losses)
    save_weights("kernel", model)


if __name__ == "__main__":
    main()
