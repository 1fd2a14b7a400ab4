"""Train small transformers in which most queries need nothing, with and without output gates, on texts of three
lengths, and measure how much weight the first token gets: writes sinks.json, and the weights of two of them,
sinks.safetensors and sinks-gated.safetensors.

The task is Bigram-Backcopy of Guo et al., "Active-dormant attention heads", 2024: a text is a Markov chain, except that
behind a trigger token the token before the trigger comes again.
"""

from __future__ import annotations

from typing import Any

import torch
from small import Transformer, save_weights, train, write
from torch import Tensor
from torch.nn import functional

import attlas
from attlas import heads

SYMBOLS, TRIGGERS = 32, 3  # tokens of the chain, of which the first are triggers
START = SYMBOLS  # the token in front of every text
LENGTHS = (16, 64, 256)  # tokens of a text
TOKENS = 1024  # of a step of training
TESTED = 8192  # tokens that are measured, of texts that are held out
SEEDS = (0, 1, 2)
SAVED = (64, 0)  # tokens of a text, and seed, of the two models whose weights are written


def chain() -> Tensor:
    """Return the probabilities (symbols, symbols) of the next token, the same for every training."""
    return torch.softmax(2 * torch.randn(SYMBOLS, SYMBOLS, generator=torch.Generator().manual_seed(0)), dim=-1)


def texts(count: int, length: int, generator: torch.Generator) -> Tensor:
    """Return texts (count, length): the start token, then the chain, with a copy behind each trigger."""
    ids, following = torch.full((count, length), START), chain()
    ids[:, 1] = torch.randint(SYMBOLS, (count,), generator=generator)
    for i in range(2, length):
        before, last = ids[:, i - 2], ids[:, i - 1]
        drawn = following[last].multinomial(1, generator=generator).squeeze(-1)
        ids[:, i] = torch.where((last < TRIGGERS) & (before != START), before, drawn)
    return ids


def equal_weight(length: int) -> float:
    """Return the mean weight on the first token, of the queries in the second half, if all weights were equal."""
    return (1 / torch.arange(length // 2 + 1, length + 1)).mean().item()


@torch.no_grad()
def first_weights(model: Transformer, ids: Tensor) -> dict[str, Tensor]:
    """Return the mean weight of each head (heads,) on the first token, of the queries in the second half.

    It is that of the queries at triggers, and that of the others.
    """
    with attlas.record(model) as atlas:
        model(ids)
    (A,) = atlas
    late = torch.arange(ids.shape[1]) >= ids.shape[1] // 2
    found = {}
    for name, queries in (("others", late & (ids >= TRIGGERS)), ("triggers", late & (ids < TRIGGERS))):
        (weights,) = A.collect(heads.FirstToken(query_mask=queries))  # (texts, heads)
        counts = queries.sum(-1, keepdim=True)
        found[name] = (weights * counts).sum(0) / counts.sum()
    return found


def measure(length: int, gated: bool, seed: int, steps: int = 400) -> tuple[Transformer, dict[str, Any]]:
    """Train with texts of this length, and return the model, and its losses and weights on the first token.

    The losses are the mean cross-entropy of tokens behind a trigger ("copies") and of the others ("chain").
    """
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    model = Transformer(SYMBOLS + 1, layers=1, gated=gated)
    test = texts(TESTED // length, length, torch.Generator().manual_seed(1000))

    def loss(step: int) -> Tensor:
        ids = texts(TOKENS // length, length, generator)
        return functional.cross_entropy(model(ids)[:, :-1].mT, ids[:, 1:])

    train(model, loss, steps, rate=1e-2)
    with torch.no_grad():
        each = functional.cross_entropy(model(test)[:, :-1].mT, test[:, 1:], reduction="none")[:, 1:]
    copied = (test[:, 1:-1] < TRIGGERS) & (test[:, :-2] != START)
    losses = {"copies": each[copied].mean().item(), "chain": each[~copied].mean().item()}
    found = {"length": length, "gated": gated, "seed": seed, "loss": losses, "first": first_weights(model, test)}
    return model, found


def main() -> None:
    """Train each kind, and write the weights on the first token."""
    torch.set_num_threads(1)
    runs = []
    for length in LENGTHS:
        for gated in (False, True):
            for seed in SEEDS:
                model, found = measure(length, gated, seed)
                print(found, flush=True)
                runs.append(found)
                if (length, seed) == SAVED:
                    save_weights("sinks-gated" if gated else "sinks", model)
    write("sinks", runs)


if __name__ == "__main__":
    main()
