"""Train a small transformer on texts that repeat, and read its heads at every checkpoint: writes induction.json
and the weights of the first seed, induction.safetensors.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from small import Transformer, save_weights, train, write
from torch import Tensor
from torch.nn import functional

import attlas
from attlas import heads

SYMBOLS, LENGTH = 32, 64
FAR = 65_536  # tokens of the long text
SEEDS = (0, 1, 2)
SHORTEST, LONGEST = 8, 32  # tokens of the block that a text repeats


def texts(count: int, generator: torch.Generator, length: int = LENGTH) -> tuple[Tensor, Tensor]:
    """Return texts (count, length), each a random block again and again, and which tokens a block before tells."""
    block = torch.randint(SYMBOLS, (count, LONGEST), generator=generator)
    period = torch.randint(SHORTEST, LONGEST + 1, (count, 1), generator=generator)
    at = torch.arange(length).expand(count, -1)
    return block.gather(1, at % period), at >= period


@torch.no_grad()
def scores(model: Transformer, ids: Tensor) -> dict[str, Tensor]:
    """Return previous-token and induction scores of each head (layers, heads), a mean over texts."""
    with attlas.record(model) as atlas:
        model(ids)
    found = [A.collect(heads.PreviousToken(), heads.Induction(ids)) for A in atlas]
    previous, induction = (torch.stack([layer[k].mean(0) for layer in found]) for k in range(2))
    return {"previous": previous, "induction": induction}


def near(model: Transformer) -> Transformer:
    """Return a copy whose layer 0 sees as many tokens as in training, and whose layer 1 does not know positions."""
    model = copy.deepcopy(model)
    model.blocks[0].attn.mask = attlas.Window(LENGTH, 0)
    model.blocks[1].attn.rotary = False
    return model


def far_text(length: int = FAR) -> Tensor:
    """Return a long text (1, length) of random tokens, without a block."""
    return torch.randint(SYMBOLS, (1, length), generator=torch.Generator().manual_seed(1001))


@torch.no_grad()
def far_scores(model: Transformer, ids: Tensor, late: int = 256) -> Tensor:
    """Return the induction scores of the heads of layer 1, a mean over the last queries of a long text (1, n)."""
    block = model.blocks[1]
    q, k, _ = block.attn.projected(block.norm(model.blocks[0](model.embed(ids))))
    return heads.induction(attlas.attend(q[:, :, -late:], k, mask=attlas.Causal()), ids)[0]


def measure(
    seed: int, steps: int = 500, every: int = 10, batch: int = 64, length: int = FAR
) -> tuple[Transformer, list[dict[str, Any]]]:
    """Train with this seed, and return the model, and the loss and the scores of the heads at each checkpoint.

    `length` is that of the long text, on which the heads of layer 1 are scored too.
    """
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    model = Transformer(SYMBOLS)
    half = LENGTH // 2
    test = torch.randint(SYMBOLS, (8, half), generator=torch.Generator().manual_seed(1000)).repeat(1, 2)
    text = far_text(length)
    history: list[dict[str, Any]] = []

    def loss(step: int) -> Tensor:
        ids, known = texts(batch, generator)
        if step % every == 0:
            with torch.no_grad():
                second = functional.cross_entropy(model(test)[:, half - 1 : -1].mT, test[:, half:])
            found = {**scores(model, test), "far": far_scores(near(model), text)}
            history.append({"step": step, "loss": second.item(), **found})
        each = functional.cross_entropy(model(ids)[:, :-1].mT, ids[:, 1:], reduction="none")
        return each[known[:, 1:]].mean()

    train(model, loss, steps, rate=2e-3)
    return model, history


def main() -> None:
    """Train each seed, and write what the heads did."""
    torch.set_num_threads(1)
    runs = []
    for seed in SEEDS:
        model, history = measure(seed)
        runs.append({"seed": seed, "history": history})
        if seed == SEEDS[0]:
            save_weights("induction", model)
    write("induction", runs)


if __name__ == "__main__":
    main()
