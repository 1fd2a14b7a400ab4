"""Train the model for a given time on one CPU core.

The learning rate and the length of the context follow the clock, so that the decay comes in time on any machine.
A checkpoint is written every few minutes; run the same command again to go on from it.

Usage: python training/train.py [--work DIR] [--seconds 3600]
"""

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from model import Gpt2, Shape

# (until this share of the time, length of a sequence, tokens in a step): short sequences are cheap and small steps
# learn fastest at first; long sequences come once heads exist that can use them.
CURRICULUM = ((0.30, 256, 4096), (0.60, 1024, 8192), (1.00, 2048, 8192))
WARMUP, DECAY_FROM = 0.01, 0.60
MUON_RATE, ADAM_RATE = 0.02, 0.003
# A position is seen seldom, and Adam's steps do not get smaller with that: at the other embeddings' rate the noise
# would cover the order of the positions, and no head could tell its neighbour from the others.
POSITION_RATE = 0.0005
WEIGHT_DECAY = 0.1  # of Muon's matrices; keeps the logits of queries and keys from growing until a softmax saturates
AVERAGE = 0.99  # moving average of the weights: what is exported
SEED = 0


def learning_rate(progress: float) -> float:
    """Warm up, hold, decay linearly to zero: a factor between 0 and 1."""
    return max(0.0, min(progress / WARMUP, 1.0, (1 - progress) / (1 - DECAY_FROM)))


def stage(progress: float) -> tuple[int, int]:
    """Length of a sequence and tokens in a step at this share of the time."""
    return next((length, tokens) for until, length, tokens in CURRICULUM if progress < until)


def batch(
    stream: np.ndarray, count: int, length: int, positions: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random windows of the stream. Short ones begin at a random position, so that every position is trained."""
    starts = torch.randint(len(stream) - length - 1, (count,), generator=generator)
    ids = torch.from_numpy(np.stack([stream[s : s + length + 1] for s in starts.tolist()]).astype(np.int64))
    offsets = torch.randint(positions - length + 1, (count,), generator=generator)
    offsets[: count // 4] = 0  # position 0 is where reading begins: it deserves more than its even share
    places = (offsets[:, None] + torch.arange(length + 1)).clamp(max=positions - 1)
    return ids, places


@torch.no_grad()
def head_scores(model: Gpt2, generator: torch.Generator, length: int = 100, blocks: int = 4) -> tuple[Tensor, Tensor]:
    """Previous-token and induction mass of each head (layers, heads) on random blocks that occur twice."""
    once = torch.randint(model.shape.vocabulary, (blocks, length), generator=generator)
    ids = torch.cat([once, once], dim=1)
    size = 2 * length
    causal = torch.ones(size, size, dtype=torch.bool).tril()
    x = model.tokens(ids) + model.positions(torch.arange(size))
    previous, induction = [], []
    for block in model.blocks:
        a, y = block.attention, block.ln_1(x)
        q, k = (f(y).unflatten(-1, (a.heads, -1)).transpose(1, 2) for f in (a.query, a.key))
        logits = q @ k.mT / q.shape[-1] ** 0.5
        weights = logits.masked_fill(~causal, -torch.inf).softmax(-1)
        previous.append(weights.diagonal(-1, -2, -1).mean((0, 2)))
        induction.append(weights[..., length:, :].diagonal(1, -2, -1).mean((0, 2)))
        x = block(x)
    return torch.stack(previous), torch.stack(induction)


@torch.no_grad()
def held_out_loss(model: Gpt2, stream: np.ndarray, length: int, tokens: int = 16_384) -> float:
    """Loss on evenly spaced windows: a quick figure to watch; evaluate.py measures the whole held-out part."""
    starts = np.linspace(0, len(stream) - length - 1, tokens // length).astype(int)
    ids = torch.from_numpy(np.stack([stream[s : s + length + 1] for s in starts]).astype(np.int64))
    places = torch.arange(length + 1).clamp(max=model.shape.context - 1).expand_as(ids)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model.loss(ids, places).item()


def optimizers(model: Gpt2) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, Adam for embeddings, biases and norms."""
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    apart = {id(p) for p in (*matrices, model.positions.weight)}
    rest = [p for p in model.parameters() if id(p) not in apart]
    return [
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=WEIGHT_DECAY, momentum=0.95),
        torch.optim.AdamW(rest, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        torch.optim.AdamW([model.positions.weight], lr=POSITION_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def save(path: Path, state: dict[str, object]) -> None:
    unfinished = path.with_suffix(".tmp")
    torch.save(state, unfinished)
    unfinished.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path(__file__).parent / "work")
    parser.add_argument("--seconds", type=float, default=3600, help="training time, checks not counted")
    parser.add_argument("--every", type=float, default=120, help="seconds between checkpoints")
    parser.add_argument("--name", default="checkpoint")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.set_flush_denormal(True)
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    train, held_out = (np.load(options.work / f"{part}.npy") for part in ("train", "held_out"))
    shape = Shape()
    model = Gpt2(shape)
    average = torch.optim.swa_utils.AveragedModel(
        model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(AVERAGE)
    )
    steppers = optimizers(model)
    rates = [stepper.param_groups[0]["lr"] for stepper in steppers]
    step, seen, elapsed = 0, 0, 0.0

    path = options.work / f"{options.name}.pt"
    if path.exists():
        state = torch.load(path, weights_only=True)
        model.load_state_dict(state["model"])
        average.load_state_dict(state["average"])
        for stepper, saved in zip(steppers, state["optimizers"], strict=True):
            stepper.load_state_dict(saved)
        generator.set_state(state["generator"])
        step, seen, elapsed = state["step"], state["tokens"], state["seconds"]
        print(f"going on from step {step}", flush=True)

    recent, since, next_check = [], (seen, elapsed), elapsed + options.every
    while elapsed < options.seconds:
        begin = time.perf_counter()
        progress = elapsed / options.seconds
        length, tokens = stage(progress)
        for stepper, rate in zip(steppers, rates, strict=True):
            stepper.param_groups[0]["lr"] = rate * learning_rate(progress)
        ids, places = batch(train, tokens // length, length, shape.context, generator)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model.loss(ids, places)
        loss.backward()
        for stepper in steppers:
            stepper.step()
            stepper.zero_grad()
        average.update_parameters(model)
        step, seen = step + 1, seen + tokens
        recent.append(loss.item())
        elapsed += time.perf_counter() - begin

        if elapsed >= next_check or elapsed >= options.seconds:
            next_check = elapsed + options.every
            judged = average.module
            previous, induction = head_scores(judged, torch.Generator().manual_seed(SEED))
            line = {
                "step": step,
                "seconds": round(elapsed),
                "tokens": seen,
                "tokens_per_second": round((seen - since[0]) / (elapsed - since[1])),
                "context": length,
                "train_loss": round(float(np.mean(recent)), 4),
                "held_out_loss_256": round(held_out_loss(judged, held_out, 256), 4),
                "held_out_loss_2048": round(held_out_loss(judged, held_out, 2048), 4),
                "previous_token": round(previous.max().item(), 3),
                "induction": round(induction.max().item(), 3),
            }
            print(json.dumps(line), flush=True)
            recent, since = [], (seen, elapsed)
            save(
                path,
                {
                    "model": model.state_dict(),
                    "average": average.state_dict(),
                    "optimizers": [stepper.state_dict() for stepper in steppers],
                    "generator": generator.get_state(),
                    "step": step,
                    "tokens": seen,
                    "seconds": elapsed,
                    "planned_seconds": options.seconds,
                },
            )


if __name__ == "__main__":
    main()
