"""Take the induction heads out of a small trained GPT-2, and see that it can no longer copy.

Random tokens that occur twice: on the second copy only the first tells what comes next. The heads with the highest
induction scores are left out one by one, then as many other heads of the same layers. Everything is measured.

    python examples/induction_heads.py                     # writes induction-heads.png
    python examples/induction_heads.py --heads 2 --draws 8
"""

import argparse
import itertools
import random
from collections.abc import Iterable
from contextlib import nullcontext
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import attlas
import attlas.models
from attlas import heads, pictures
from attlas.interventions import Ablate

PERIOD = 100  # tokens of the block that occurs twice
Place = tuple[int, int]  # layer, head


def loss_without(model: torch.nn.Module, ids: Tensor, places: Iterable[Place]) -> float:
    """Return the loss on the second copy, in nats per token, without some heads."""
    chosen: dict[int, list[int]] = {}
    for layer, head in places:
        chosen.setdefault(layer, []).append(head)
    with attlas.intervene(model, Ablate(heads=chosen)) if chosen else nullcontext(), torch.no_grad():
        logits = model(ids).logits[:, PERIOD:-1]
    return float(torch.nn.functional.cross_entropy(logits.mT, ids[:, PERIOD + 1 :]))


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("induction-heads.png"), help="picture (default: %(default)s)")
    parser.add_argument("--heads", type=int, default=3, help="induction heads to leave out (default: %(default)s)")
    parser.add_argument("--draws", type=int, default=6, help="draws of other heads (default: %(default)s)")
    options = parser.parse_args(argv)

    model = AutoModelForCausalLM.from_pretrained(attlas.models.path()).eval()
    ids = heads.repeated_block(model.config.vocab_size, period=PERIOD, blocks=4)
    with attlas.record(model) as atlas, torch.no_grad():
        model(ids)
    scores = {
        (layer, head): float(score)
        for layer in range(len(atlas))
        for head, score in enumerate(heads.induction(atlas[layer], ids).mean(0))
    }
    ranked = sorted(scores, key=lambda place: -scores[place])
    chosen = ranked[: options.heads]
    layers = {layer for layer, _ in chosen}
    others = [place for place in sorted(scores) if place[0] in layers and place not in chosen]

    losses = [loss_without(model, ids, chosen[:count]) for count in range(options.heads + 1)]
    draws = random.Random(0).sample(list(itertools.combinations(others, options.heads)), options.draws)
    controls = [loss_without(model, ids, draw) for draw in draws]
    print("left out          loss on the second copy")
    print(f"nothing           {losses[0]:.2f}")
    for count, place in enumerate(chosen, start=1):
        print(f"and head {place[0]}.{place[1]}      {losses[count]:.2f}   (its induction score: {scores[place]:.2f})")
    print(f"{options.heads} other heads     {sum(controls) / len(controls):.2f}   (mean of {len(controls)} draws)")

    figure = pictures.sheet(6.4, 3.8)
    axes = figure.subplots()
    axes.plot(losses, marker="o", color=pictures.ACCENT, label="induction heads")
    axes.scatter([options.heads] * len(controls), controls, color=pictures.INK, s=14, label="other heads, all at once")
    axes.set(
        xlabel="heads left out", ylabel="loss on the second copy (nats per token)", xticks=range(options.heads + 1)
    )
    axes.legend(frameon=False)
    pictures.save(figure, options.out, dpi=130)
    return {"plain": losses[0], "without": losses[-1], "control": sum(controls) / len(controls), "worst": max(controls)}


if __name__ == "__main__":
    main()
