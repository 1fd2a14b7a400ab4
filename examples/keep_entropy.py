"""Entropy kept up: attention that starts out collapsed learns only where its entropy is part of the loss.

Each token must answer with the mean value of the tokens of its kind. The queries and keys start out much too long, so
that every row is one key: softmax passes hardly any gradient there, and training is stuck. A penalty on the entropy of
the rows, whose gradient attlas computes with that of the output in one pass, lets the rows widen first.

    python examples/keep_entropy.py
"""

import argparse

import torch
from torch import Tensor, nn

import attlas
from attlas import stats

TOKENS, KINDS, SIZE, LEAST = 48, 4, 16, 1.5


def batch(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens (8, n, size), their values (8, n, 1) and the mean value of each token's kind."""
    kind = torch.randint(KINDS, (8, TOKENS), generator=generator)
    tokens = torch.randn(8, TOKENS, SIZE, generator=generator)
    tokens[..., :KINDS] = nn.functional.one_hot(kind, KINDS)
    values = torch.randn(8, TOKENS, 1, generator=generator)
    alike = (kind.unsqueeze(-1) == kind.unsqueeze(-2)).float()
    return tokens, values, alike @ values / alike.sum(-1, keepdim=True)


def train(weight: float, steps: int) -> tuple[float, float]:
    """Train with a weight of the entropy's penalty; return the last error and the last mean entropy."""
    generator = torch.Generator().manual_seed(0)
    W_q, W_k = (nn.Parameter(5 * torch.randn(SIZE, SIZE, generator=generator) / SIZE**0.5) for _ in range(2))
    optimizer = torch.optim.Adam([W_q, W_k], lr=0.05)
    errors = []
    for _ in range(steps):
        tokens, values, wanted = batch(generator)
        A = attlas.attend(tokens @ W_q, tokens @ W_k)
        out, entropy = A.collect(stats.Pooled(values), stats.Entropy())  # one pass, and one pass back
        error = (out - wanted).square().mean()
        loss = error + weight * (LEAST - entropy).clamp(min=0.0).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        errors.append(float(error.detach()))
    return sum(errors[-10:]) / 10, float(entropy.detach().mean())


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="steps of each training (default: %(default)s)")
    parser.add_argument("--weight", type=float, default=1.0, help="weight of the penalty (default: %(default)s)")
    options = parser.parse_args(argv)
    found = {}
    for name, weight in (("without", 0.0), ("with", options.weight)):
        found[f"error {name}"], found[f"entropy {name}"] = train(weight, options.steps)
        print(f"{name:>8} the penalty: error {found[f'error {name}']:.3f}, entropy {found[f'entropy {name}']:.2f} nats")
    return found


if __name__ == "__main__":
    main()
