"""Train a small encoder on sequences of a Potts model whose contacts are known: writes contacts.json (how well its
attention finds the contacts at each checkpoint, and without couplings) and its weights, contacts.safetensors.
"""

from __future__ import annotations

from typing import Any

import torch
from small import Transformer, save_weights, train, write
from torch import Tensor
from torch.nn import functional

import attlas
from attlas import heads

SITES, LETTERS, CONTACTS = 32, 6, 32
APART = 4  # sites between which contacts are sought are at least this far from each other
START, END, HIDDEN = LETTERS, LETTERS + 1, LETTERS + 2  # tokens beside the letters
SEED = 0
SHARE = 0.15  # of the letters are hidden in training
TESTED = 128  # sequences that are held out


def far_pairs() -> Tensor:
    """Return all pairs of sites (2, pairs), the first before the second, that are far enough from each other."""
    return torch.triu_indices(SITES, SITES, APART)


def potts(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Return fields (sites, letters), contacts (sites, sites) of bool, and couplings (sites, sites, letters, letters).

    Contacts are pairs drawn at random among those that are far enough from each other, at most 4 at a site.
    """
    fields = 0.5 * torch.randn(SITES, LETTERS, generator=generator)
    touch = torch.zeros(SITES, SITES, dtype=torch.bool)
    pairs = far_pairs().T
    for i, j in pairs[torch.randperm(len(pairs), generator=generator)].tolist():
        if touch.sum() < 2 * CONTACTS and touch[i].sum() < 4 and touch[j].sum() < 4:
            touch[i, j] = touch[j, i] = True
    couplings = torch.randn(SITES, SITES, LETTERS, LETTERS, generator=generator)
    couplings = couplings - couplings.mean(-1, keepdim=True)
    couplings = (couplings - couplings.mean(-2, keepdim=True)) * touch[..., None, None]
    upper = couplings * torch.ones(SITES, SITES).triu(1)[..., None, None]
    return fields, touch, upper + upper.permute(1, 0, 3, 2)


def sampled(fields: Tensor, couplings: Tensor, count: int, generator: torch.Generator, sweeps: int = 20) -> Tensor:
    """Return sequences (count, sites) of the Potts model: one Gibbs chain each, all sites once in a sweep."""
    x = torch.randint(LETTERS, (count, SITES), generator=generator)
    for _ in range(sweeps):
        for i in torch.randperm(SITES, generator=generator).tolist():
            logits = fields[i].expand(count, -1).clone()
            for j in couplings[i].flatten(1).any(-1).nonzero().flatten().tolist():
                logits += couplings[i, j][:, x[:, j]].T
            x[:, i] = logits.softmax(-1).multinomial(1, generator=generator).squeeze(-1)
    return x


def without_couplings(x: Tensor, generator: torch.Generator) -> Tensor:
    """Return sequences with the same letters at each site, dealt out anew among the sequences."""
    return torch.stack([x[torch.randperm(len(x), generator=generator), i] for i in range(x.shape[1])], dim=1)


def tokens(x: Tensor) -> Tensor:
    """Return sequences between a start and an end token."""
    return functional.pad(functional.pad(x, (1, 0), value=START), (0, 1), value=END)


def encoder() -> Transformer:
    """Return the model before training."""
    model = Transformer(LETTERS + 3, layers=2, mlp=True, places=SITES + 2, causal=False, rotary=False)
    for block in model.blocks:  # attention alone; the seed has drawn these weights too
        block.mlp = None
    return model


@torch.no_grad()
def contact_map(model: Transformer, ids: Tensor) -> Tensor:
    """Return how much each pair of sites (sites, sites) attends to each other: the mean of all heads and sequences.

    It is the logit of `heads.contacts` with the same weight for each head: symmetrised, less the average product.
    """
    with attlas.record(model) as atlas:
        model(ids)
    count = sum(A.shape[1] for A in atlas)
    return heads.contacts(atlas, torch.full((count,), 1 / count)).to_dense().logit().mean(0)


def precision(scores: Tensor, touch: Tensor, count: int = SITES) -> float:
    """Return which share of the pairs with the largest scores, far enough from each other, are contacts."""
    i, j = far_pairs()
    return touch[i, j][scores[i, j].topk(count).indices].float().mean().item()


def information(x: Tensor) -> Tensor:
    """Return the mutual information of each pair of sites, less the average product: what needs no model."""
    one = functional.one_hot(x, LETTERS).to(torch.float64)
    both = torch.einsum("nia,njb->ijab", one, one) / len(x)
    alone = one.mean(0)
    apart = alone[:, None, :, None] * alone[None, :, None, :]
    mutual = (both * (both.clamp(min=1e-12) / apart.clamp(min=1e-12)).log()).sum((-1, -2)).fill_diagonal_(0)
    return mutual - mutual.sum(0) * mutual.sum(1, keepdim=True) / mutual.sum()


def hide(ids: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return sequences with some letters hidden, and which."""
    hidden = (torch.rand(ids.shape, generator=generator) < SHARE) & (ids < LETTERS)
    return ids.masked_fill(hidden, HIDDEN), hidden


def measure(
    seed: int, coupled: bool = True, steps: int = 500, every: int = 50, batch: int = 64, count: int = 10_000
) -> tuple[Transformer, dict[str, Any]]:
    """Train with this seed, and return the model, and the loss and the precision of its map at each checkpoint."""
    generator = torch.Generator().manual_seed(seed)
    fields, touch, couplings = potts(generator)
    x = sampled(fields, couplings, count, generator)
    x = x if coupled else without_couplings(x, generator)
    torch.manual_seed(seed)
    model, history = encoder(), []
    test = tokens(x[:TESTED])  # not in training
    asked, wanted = hide(test, generator)

    def checkpoint(step: int) -> None:
        """Measure the model after this many steps."""
        with torch.no_grad():
            value = functional.cross_entropy(model(asked)[wanted], test[wanted]).item()
        history.append({"step": step, "loss": value, "precision": precision(contact_map(model, test), touch)})

    def loss(step: int) -> Tensor:
        if step % every == 0:
            checkpoint(step)
        ids = tokens(x[torch.randint(TESTED, count, (batch,), generator=generator)])
        shown, hidden = hide(ids, generator)
        return functional.cross_entropy(model(shown)[hidden], ids[hidden])

    train(model, loss, steps, rate=3e-3)
    checkpoint(steps)
    return model, {
        "seed": seed,
        "coupled": coupled,
        "history": history,
        "one sequence": precision(contact_map(model, test[:1]), touch),
        "mutual information": precision(information(x[TESTED:]), touch),
    }


def main() -> None:
    """Train with couplings and without, and write what the heads found."""
    torch.set_num_threads(1)
    runs = []
    for coupled in (True, False):
        model, found = measure(SEED, coupled)
        print(found, flush=True)
        runs.append(found)
        if coupled:
            save_weights("contacts", model)
    write("contacts", runs)


if __name__ == "__main__":
    main()
