"""Measure the exported model and write results.json and the model's card from it.

Everything in the card that is a number comes from here. The model is the one that users get: the Hugging Face
folder, float32, loaded by transformers.

Usage: python training/evaluate.py [--work DIR] [--folder src/attlas/models/python-gpt2]
"""

import argparse
import itertools
import json
import math
import os
import platform
import string
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel

import corpus
import train
from export import FOLDER
from prepare import END

HERE = Path(__file__).parent
PLACES = (0, 64, 256, 512, 1024, 2048)  # borders of the groups "tokens read so far"
REPEATS = (50, 100, 200, 1000)  # lengths of the random blocks that occur twice
FOUND = 0.5  # a head is named after a pattern that gets more than this share of its mass


@torch.no_grad()
def token_losses(model: GPT2LMHeadModel, ids: Tensor, window: int) -> Tensor:
    """Loss in nats of each token of a document after the first.

    Windows overlap by half, so that every token but the document's first ones is judged with at least half a window
    before it.
    """
    losses = []
    scored = 0  # targets done so far
    for start in range(0, len(ids) - 1, window // 2):
        piece = ids[start : start + window + 1]
        logits = model(piece[None, :-1]).logits[0]
        fresh = F.cross_entropy(logits, piece[1:], reduction="none")[scored - start :]
        losses.append(fresh)
        scored += len(fresh)
        if scored == len(ids) - 1:
            break
    return torch.cat(losses)


def split_documents(stream: np.ndarray, end: int) -> list[np.ndarray]:
    """Documents of a stream, each with the end-of-text token that comes before it."""
    starts = np.flatnonzero(stream == end)
    return [stream[a:b] for a, b in itertools.pairwise(starts)]


class Counts:
    """Unigram and bigram models of a stream, smoothed."""

    def __init__(self, documents: list[np.ndarray], vocabulary: int) -> None:
        self.vocabulary = vocabulary
        pairs = np.concatenate([d[:-1].astype(np.int64) * vocabulary + d[1:] for d in documents])
        self.pairs = np.bincount(pairs, minlength=vocabulary**2)
        table = self.pairs.reshape(vocabulary, vocabulary)
        self.first, self.second = table.sum(1), table.sum(0)

    def unigram(self, documents: list[np.ndarray], alpha: float) -> float:
        """Mean nats of ``(count + alpha) / (total + alpha V)``."""
        targets = np.concatenate([d[1:] for d in documents])
        return -float(np.log(self._unigram(alpha)[targets]).mean())

    def bigram(self, documents: list[np.ndarray], alpha: float, beta: float) -> float:
        """Mean nats of ``(pair count + beta * unigram) / (first count + beta)``: a bigram that leans on the unigram."""
        before = np.concatenate([d[:-1] for d in documents]).astype(np.int64)
        targets = np.concatenate([d[1:] for d in documents])
        seen = self.pairs[before * self.vocabulary + targets]
        return -float(np.log((seen + beta * self._unigram(alpha)[targets]) / (self.first[before] + beta)).mean())

    def _unigram(self, alpha: float) -> np.ndarray:
        return (self.second + alpha) / (self.second.sum() + alpha * self.vocabulary)


def baselines(training: list[np.ndarray], judged: list[np.ndarray], vocabulary: int) -> dict[str, float]:
    """Losses on the held-out part; alpha and beta are chosen on every tenth training document, then all are counted."""
    tuning = training[::10]
    rest = [d for i, d in enumerate(training) if i % 10]
    part = Counts(rest, vocabulary)
    alpha = min((0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0), key=lambda a: part.unigram(tuning, a))
    beta = min((2.0**k for k in range(-2, 12)), key=lambda b: part.bigram(tuning, alpha, b))
    whole = Counts(training, vocabulary)
    return {
        "alpha": alpha,
        "beta": beta,
        "unigram": whole.unigram(judged, alpha),
        "bigram": whole.bigram(judged, alpha, beta),
    }


@torch.no_grad()
def repeated_block(model: GPT2LMHeadModel, length: int, blocks: int) -> tuple[dict[str, Tensor], float, float]:
    """Mass (layers, heads) of some patterns, and the loss on each copy, on random tokens that occur twice.

    For the query at place i of the second copy: previous token is key i - 1, duplicate is key i - length (the same
    token earlier), induction is key i - length + 1 (the token after it). Previous is averaged over both copies.
    """
    generator = torch.Generator().manual_seed(length)
    sums: dict[str, Tensor] = {}
    first, second = 0.0, 0.0
    for _ in range(blocks):  # one at a time: the full matrices of every head are in memory here
        once = torch.randint(model.config.vocab_size, (1, length), generator=generator)
        ids = torch.cat([once, once], dim=1)
        out = model(ids, output_attentions=True)
        weights = torch.cat(out.attentions)  # layers, heads, query, key
        repeated = weights[..., length:, :]
        masses = {
            "previous_token": weights.diagonal(-1, -2, -1).mean(-1),
            "induction": repeated.diagonal(1, -2, -1).mean(-1),
            "duplicate_token": repeated.diagonal(0, -2, -1).mean(-1),
            "first_token": weights[..., 1:, 0].mean(-1),
        }
        for name, mass in masses.items():
            sums[name] = sums.get(name, 0.0) + mass / blocks
        losses = F.cross_entropy(out.logits[0, :-1], ids[0, 1:], reduction="none")
        first += losses[: length - 1].mean().item() / blocks
        # the first token of the second copy is as random as any
        second += losses[length:].mean().item() / blocks
    return sums, first, second


@torch.no_grad()
def on_real_text(model: GPT2LMHeadModel, documents: list[np.ndarray], length: int) -> dict[str, Tensor]:
    """The same kind of table (layers, heads) on the beginnings of the held-out documents that are long enough."""
    chosen = [d[:length] for d in documents if len(d) >= length]
    far = (torch.arange(length)[:, None] - torch.arange(length)).clamp(min=0).float()
    sums: dict[str, Tensor] = {}
    for document in chosen:
        ids = torch.from_numpy(document.astype(np.int64))[None]
        weights = torch.cat(model(ids, output_attentions=True).attentions)
        values = {
            "text_first_token": weights[..., 1:, 0].mean(-1),
            "text_previous_token": weights.diagonal(-1, -2, -1).mean(-1),
            "text_same_token": weights.diagonal(0, -2, -1)[..., 1:].mean(-1),
            "text_entropy": torch.special.entr(weights).sum(-1).mean(-1),
            "text_distance": (weights * far).sum(-1).mean(-1),
        }
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + value / len(chosen)
    return sums


def name_of(head: dict[str, float]) -> str:
    """What a head is, by the pattern that holds more than half of its mass."""
    named = {
        "previous token": head["previous_token"],
        "induction": head["induction"],
        "same token earlier": head["duplicate_token"],
        "first token (rests)": head["text_first_token"],
    }
    name, mass = max(named.items(), key=lambda item: item[1])
    return name if mass > FOUND else ""


def measure(work: Path, checkpoint: str, folder: Path) -> dict[str, object]:
    """Everything that the card says."""
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    end = tokenizer.convert_tokens_to_ids(END)
    training, judged = (split_documents(np.load(work / f"{part}.npy"), end) for part in ("train", "held_out"))
    vocabulary = model.config.vocab_size
    size = {
        name: sum(len(t.encode()) for t in corpus.documents(part))
        for name, part in (("train", False), ("held_out", True))
    }

    nats = baselines(training, judged, vocabulary)
    long = [token_losses(model, torch.from_numpy(d.astype(np.int64)), model.config.n_positions) for d in judged]
    short = [token_losses(model, torch.from_numpy(d.astype(np.int64)), 256) for d in judged]
    nats |= {"model_context_2048": torch.cat(long).mean().item(), "model_context_256": torch.cat(short).mean().item()}
    targets = sum(len(losses) for losses in long)
    per_byte = targets / size["held_out"] / math.log(2)

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    columns = on_real_text(model, judged, 1024)
    repeats = []
    for length in REPEATS:
        masses, first, second = repeated_block(model, length, blocks=8 if length < 1000 else 2)
        repeats.append({"length": length, "loss_first_copy": first, "loss_second_copy": second})
        columns |= {f"{name}_{length}": mass for name, mass in masses.items()}
    for name in masses:  # the score of a head: the mean over the sizes that the definition names
        columns[name] = torch.stack([columns[f"{name}_{length}"] for length in REPEATS[:3]]).mean(0)
    heads = [
        {"head": f"{layer}.{head}"} | {name: round(column[layer, head].item(), 4) for name, column in columns.items()}
        for layer in range(model.config.n_layer)
        for head in range(model.config.n_head)
    ]
    for head in heads:
        head["is"] = name_of(head)

    state = torch.load(work / f"{checkpoint}.pt", weights_only=True)
    return {
        "data": {
            "python": platform.python_version(),
            "train_documents": len(training),
            "train_tokens": sum(map(len, training)),
            "train_bytes": size["train"],
            "held_out_modules": corpus.held_out_modules(),
            "held_out_documents": len(judged),
            "held_out_tokens": targets,
            "held_out_bytes": size["held_out"],
        },
        "model": {
            "layers": model.config.n_layer,
            "heads": model.config.n_head,
            "width": model.config.n_embd,
            "context": model.config.n_positions,
            "vocabulary": vocabulary,
            "parameters": model.num_parameters(),
        },
        "training": {
            "steps": state["step"],
            "tokens": state["tokens"],
            "seconds": round(state["seconds"]),
            "planned_seconds": round(state["planned_seconds"]),
            "finished": state["seconds"] >= state["planned_seconds"],
            "tokens_per_second": round(state["tokens"] / state["seconds"]),
            "machine": f"{platform.machine()}, {os.cpu_count()} CPU cores, no GPU; one core was used",
            "torch": torch.__version__,
            "muon_rate": train.MUON_RATE,
            "adam_rate": train.ADAM_RATE,
            "position_rate": train.POSITION_RATE,
            "weight_decay": train.WEIGHT_DECAY,
            "average": train.AVERAGE,
            "curriculum": [list(stage) for stage in train.CURRICULUM],
            "warmup": train.WARMUP,
            "decay_from": train.DECAY_FROM,
        },
        "nats_per_token": nats,
        "bits_per_byte": {name: value * per_byte for name, value in nats.items() if name not in ("alpha", "beta")},
        "loss_by_tokens_read": [
            {
                "from": a,
                "to": b,
                "nats": torch.cat([losses[a:b] for losses in long]).mean().item(),
                "tokens": sum(len(losses[a:b]) for losses in long),
            }
            for a, b in itertools.pairwise(PLACES)
        ],
        "repeats": repeats,
        "heads": heads,
    }


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *rows])


def card(results: dict) -> str:
    """The model's card: the template with the measured figures in it."""
    nats, bits, made = results["nats_per_token"], results["bits_per_byte"], results["training"]
    labels = {
        "unigram": f"unigram, add-alpha ({nats['alpha']:g})",
        "bigram": f"bigram, leaning on the unigram with weight {nats['beta']:g}",
        "model_context_256": "this model, context 256",
        "model_context_2048": "this model, context 2,048",
    }
    best = {name: max(results["heads"], key=lambda h: h[name]) for name in ("previous_token", "induction")}
    stages = [
        f"{length:,} tokens until {until:.0%} of the time ({step:,} tokens a step)"
        for until, length, step in made["curriculum"]
    ]
    fields = results["data"] | results["model"] | made
    fields = {name: f"{value:,}" if isinstance(value, int) else value for name, value in fields.items()}
    return string.Template((HERE / "card.md").read_text("utf-8")).substitute(
        fields,
        modules=", ".join(f"`{module}`" for module in results["data"]["held_out_modules"]),
        minutes=f"{made['seconds'] / 60:.0f}",
        epochs=f"{made['tokens'] / results['data']['train_tokens']:.1f}",
        stages="; ".join(stages),
        state="" if made["finished"] else "\n**A first version: training had not finished.**\n",
        losses=table(
            ["", "nats per token", "bits per byte"],
            [[t, f"{nats[n]:.3f}", f"{bits[n]:.3f}"] for n, t in labels.items()],
        ),
        places=table(
            ["tokens read before", "nats per token"],
            [[f"{p['from']:,} to {p['to'] - 1:,}", f"{p['nats']:.3f}"] for p in results["loss_by_tokens_read"]],
        ),
        repeats=table(
            ["length of the block", "loss, first copy", "loss, second copy"],
            [
                [f"{r['length']:,}", f"{r['loss_first_copy']:.2f}", f"{r['loss_second_copy']:.2f}"]
                for r in results["repeats"]
            ],
        ),
        uniform=f"{math.log(results['model']['vocabulary']):.2f}",
        best_previous=f"{best['previous_token']['head']} ({best['previous_token']['previous_token']:.2f})",
        best_induction=f"{best['induction']['head']} ({best['induction']['induction']:.2f})",
        heads_table=table(
            [
                "head",
                "previous token",
                "induction",
                "induction, block of 1,000",
                "same token earlier",
                "first token, real code",
                "mean distance, real code",
                "is",
            ],
            [
                [
                    h["head"],
                    *(
                        f"{h[n]:.2f}"
                        for n in (
                            "previous_token",
                            "induction",
                            "induction_1000",
                            "duplicate_token",
                            "text_first_token",
                        )
                    ),
                    f"{h['text_distance']:.0f}",
                    h["is"],
                ]
                for h in results["heads"]
            ],
        ),
    )


def write(path: Path, text: str) -> None:
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=HERE / "work")
    parser.add_argument("--name", default="checkpoint")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--results", type=Path, default=HERE / "results.json")
    options = parser.parse_args()

    results = measure(options.work, options.name, options.folder)
    write(options.results, json.dumps(results, indent=1) + "\n")
    write(options.folder / "README.md", card(results))
    for name, value in results["nats_per_token"].items():
        print(f"{name:20} {value:.3f}")
    for head in results["heads"]:
        print(head["head"], f"previous {head['previous_token']:.2f} induction {head['induction']:.2f} {head['is']}")


if __name__ == "__main__":
    main()
