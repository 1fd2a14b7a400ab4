"""Train a small hybrid model, three layers of the gated delta rule to one of softmax attention, to copy and to recall.

A text is a list of tokens that occur once, a separator, and the list again: in the same order (copy), or as pairs of a
key and a value in another order (recall). The model predicts the second half; for this it must find the token before
again and read what followed it. Nothing tells positions: order comes from the decay of the gated delta rule and, as in
Qwen3-Next, from a short convolution in front of its queries, keys and values.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from attlas.nn import GatedDelta, MultiHeadAttention
from attlas.recording.atlas import Atlas, Entry

SYMBOLS = 24
SEPARATOR = SYMBOLS
LENGTH = 12  # tokens of the list; the text has twice as many and the separator
WIDTH, HEADS = 64, 2
TAPS = 3  # of the short convolution: the token and two before it
KINDS = ("delta", "delta", "delta", "softmax")  # 3 : 1
STEPS, BATCH, RATE = 600, 32, 4e-3
SEED = 0
WEIGHTS = Path(__file__).with_suffix(".pt")


class DeltaLayer(nn.Module):
    """Heads of the gated delta rule behind a short convolution, with learned rates of writing and learned decays."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.tokens = nn.Linear(width, 3 * width, bias=False)
        self.convolution = nn.Parameter(torch.zeros(TAPS, 3 * width))
        self.gates = nn.Linear(width, 2 * heads)
        self.attention = GatedDelta(scale=1.0)
        self.out = nn.Linear(width, width, bias=False)
        with torch.no_grad():  # the convolution begins as the token alone; decay from short to long, by heads
            self.convolution[0] = 1.0
            self.gates.bias[heads:] = torch.linspace(1.0, -4.0, heads)

    def convolved(self, x: Tensor) -> Tensor:
        """Return queries, keys and values, each a sum over its token and those before it."""
        tokens = functional.pad(self.tokens(x), (0, 0, TAPS - 1, 0))
        return sum(tokens[:, TAPS - 1 - tap :][:, : x.shape[1]] * self.convolution[tap] for tap in range(TAPS))

    def forward(self, x: Tensor) -> Tensor:
        """Return what the heads read."""
        q, k, v = self.convolved(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        beta, decay = self.gates(x).unflatten(-1, (2, self.heads)).permute(2, 0, 3, 1)
        out = self.attention(q, k, v, beta.sigmoid(), -functional.softplus(decay))
        return self.out(out.transpose(1, 2).flatten(2))


class SoftmaxLayer(nn.Module):
    """Heads of causal softmax attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention = MultiHeadAttention(width, heads, bias=False, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the heads read."""
        out, self.weights = self.attention(x, x, x, is_causal=True, average_attn_weights=False)
        return out


class Hybrid(nn.Module):
    """Blocks of a layer that mixes tokens and one that does not, each added to its input."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS, symbols: int = SYMBOLS) -> None:
        super().__init__()
        kinds = {"delta": DeltaLayer, "softmax": SoftmaxLayer}
        self.embed = nn.Embedding(symbols + 1, width)
        self.mixers = nn.ModuleList(kinds[kind](width, heads) for kind in KINDS)
        self.maps = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
            for _ in KINDS
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in KINDS)
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, symbols, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the logits of the next token."""
        x = self.embed(ids)
        for norm, mixer, feed in zip(self.norms, self.mixers, self.maps, strict=True):
            x = x + mixer(norm(x))
            x = x + feed(x)
        return self.head(self.last(x))


def texts(
    count: int, generator: torch.Generator, length: int = LENGTH, symbols: int = SYMBOLS
) -> tuple[Tensor, Tensor]:
    """Return texts, shape (count, 2 length + 1), and which tokens the model must predict: half copy, half recall."""
    first = torch.stack([torch.randperm(symbols, generator=generator)[:length] for _ in range(count)])
    second = first.clone()
    wanted = torch.zeros(count, 2 * length + 1, dtype=torch.bool)
    wanted[: count // 2, length + 2 :] = True  # of the copy all but the first, which the separator does not tell
    for row in range(count // 2, count):
        pairs = first[row].view(-1, 2)
        second[row] = pairs[torch.randperm(len(pairs), generator=generator)].flatten()
        wanted[row, length + 2 :: 2] = True  # the value of each key
    separator = torch.full((count, 1), symbols)
    return torch.cat([first, separator, second], dim=1), wanted


def loss_and_accuracy(model: Hybrid, ids: Tensor, wanted: Tensor) -> tuple[Tensor, float]:
    """Return the mean loss of the tokens that are to be predicted, and which share of them is right."""
    logits = model(ids[:, :-1])[wanted[:, 1:]]
    answers = ids[wanted]
    return functional.cross_entropy(logits, answers), float((logits.argmax(-1) == answers).float().mean())


def train(steps: int = STEPS, *, length: int = LENGTH, symbols: int = SYMBOLS, seconds: float = math.inf) -> Hybrid:
    """Return a model that was trained for some steps, or for some seconds."""
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    model = Hybrid(symbols=symbols)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    begin = time.perf_counter()
    for step in range(steps):
        rate = min(1.0, (step + 1) / 50) * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        optimiser.param_groups[0]["lr"] = RATE * rate
        loss, accuracy = loss_and_accuracy(model, *texts(BATCH, generator, length, symbols))
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        if step % 100 == 0 or step == steps - 1:
            print(
                f"step {step:5d}  loss {loss.item():.3f}  right {accuracy:.3f}  {time.perf_counter() - begin:.0f} s",
                flush=True,
            )
        if time.perf_counter() - begin > seconds:
            break
    return model.eval()


@torch.no_grad()
def record(model: Hybrid, ids: Tensor) -> Atlas:
    """Return the matrices of all layers, lazy, for one text."""
    model(ids[None])
    n = len(ids)
    entries = []
    for layer, mixer in enumerate(model.mixers):
        A = mixer.attention.weights if isinstance(mixer, DeltaLayer) else mixer.weights
        heads = tuple(range(A.shape[1]))
        entries.append(Entry(f"mixers.{layer}", layer, "self", 0, heads, (0, n), 0, tuple(A.shape), A, {}))
    tokens = ["|" if int(token) == len(model.head.weight) else f"·{int(token)}" for token in ids]
    return Atlas(entries, model="hybrid 3:1", tokens=tokens, ids=ids[None])


def places(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Return the queries whose token occurred before, and the place of the token that followed it: the answer."""
    equal = (ids[:, None] == ids[None]) & torch.ones(len(ids), len(ids), dtype=torch.bool).tril(-1)
    queries = equal.any(-1).nonzero().flatten()
    return queries, equal[queries].float().argmax(-1) + 1


def what_heads_do(atlas: Atlas, ids: Tensor) -> list[dict[str, Any]]:
    """Return, for each head, the share of the sizes of its weights on the answer, the token before and itself.

    Over the queries whose token occurred before. A head retrieves where it reads the answer, and copies where it
    carries the token before, or the token itself, along.
    """
    queries, answers = places(ids)
    rows = []
    for entry in atlas.entries:
        dense = entry.need_matrix().to_dense()[0].abs()
        share = dense[:, queries] / dense[:, queries].sum(-1, keepdim=True)
        at = torch.arange(len(queries))
        found = {
            name: share[:, at, keys].mean(-1)
            for name, keys in {"answer": answers, "before": queries - 1, "itself": queries}.items()
        }
        for head in range(share.shape[0]):
            rows.append(
                {
                    "layer": entry.layer,
                    "kind": KINDS[entry.layer],
                    "head": head,
                    **{name: float(t[head]) for name, t in found.items()},
                }
            )
    return rows


def evaluate(model: Hybrid, *, length: int = LENGTH, symbols: int = SYMBOLS) -> dict[str, Any]:
    """Return how much is right on new texts, and what the heads do on 16 of them, on average."""
    generator = torch.Generator().manual_seed(SEED + 1)
    ids, wanted = texts(256, generator, length, symbols)
    with torch.no_grad():
        right = [loss_and_accuracy(model, ids[some], wanted[some])[1] for some in (slice(0, 128), slice(128, 256))]
    tables = [what_heads_do(record(model, ids[row]), ids[row]) for row in range(0, 256, 16)]
    heads = [
        first
        | {name: sum(table[place][name] for table in tables) / len(tables) for name in ("answer", "before", "itself")}
        for place, first in enumerate(tables[0])
    ]
    return {"copy": right[0], "recall": right[1], "heads": heads}


def recorded(weights: Path = WEIGHTS) -> Atlas:
    """Return the matrices of the trained model for a text that is copied."""
    model = Hybrid().eval()
    model.load_state_dict(torch.load(weights, weights_only=True))
    ids, _ = texts(2, torch.Generator().manual_seed(SEED + 2))
    return record(model, ids[0])


def main() -> None:
    """Train, say what the layers do, and write the weights and these figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument(
        "--weights", type=Path, default=WEIGHTS, help="file for the weights; the figures stand beside it"
    )
    arguments = parser.parse_args()
    model = train(arguments.steps)
    found = evaluate(model)
    torch.save(model.state_dict(), arguments.weights)
    arguments.weights.with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    print(f"copy: {found['copy']:.3f} right, recall: {found['recall']:.3f} right")
    for head in found["heads"]:
        shares = ", ".join(f"{100 * head[name]:.0f} % on {name}" for name in ("answer", "before", "itself"))
        print(f"layer {head['layer']} ({head['kind']}), head {head['head']}: {shares}")


if __name__ == "__main__":
    main()
