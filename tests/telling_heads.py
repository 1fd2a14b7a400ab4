"""A recording of heads that do one plain thing each, made by hand: what they look at is known without a model."""

from typing import Any

import torch

import attlas
from attlas import stats
from attlas.heads import repeated_block
from attlas.recording.atlas import Atlas, Entry

__all__ = ["KINDS", "telling_atlas"]

VOCABULARY, PERIOD = 60, 45
KINDS = ("induction", "previous token", "first-token sink", "fixed distance", "duplicate token", "mixed", "liar")


def telling_atlas(*layers: tuple[str, ...], top_k: bool = False, **options: Any) -> Atlas:
    """Return a recording with one layer for each tuple of kinds, on random tokens that occur three times.

    A "liar" was an induction head on random tokens by what the recording says, and rests on the first key of its text.
    """
    ids = repeated_block(VOCABULARY, PERIOD, blocks=1)
    ids = torch.cat([ids, ids[:, :PERIOD]], 1)
    n = ids.shape[1]
    places, words = torch.eye(n), torch.eye(VOCABULARY)[ids[0]]
    first, nothing = torch.zeros(n, n), torch.zeros(n, n)
    first[:, 0] = 1.0
    before = torch.cat([torch.zeros(1, VOCABULARY), words[:-1]])
    made = {  # what the queries ask for, and what the keys have: of the place, and of the token
        "induction": (nothing, words, nothing, before),
        "previous token": (places.roll(-1, 1), 0 * words, places, 0 * words),
        "first-token sink": (first, 0 * words, places, 0 * words),
        "fixed distance": (places.roll(-5, 1), 0 * words, places, 0 * words),
        "duplicate token": (nothing, words, nothing, words),
        "mixed": (nothing, torch.randn(n, VOCABULARY, generator=torch.Generator().manual_seed(0)), nothing, words),
        "liar": (first, 0 * words, places, 0 * words),
    }
    entries, block = [], {"period": PERIOD, "induction": [], "duplicate": []}
    for layer, kinds in enumerate(layers):
        q = torch.stack([8.0 * torch.cat(made[kind][:2], 1) for kind in kinds])[None]
        k = torch.stack([torch.cat(made[kind][2:], 1) for kind in kinds])[None]
        A = attlas.attend(q, k, score=attlas.ScaledDot(1.0), mask=attlas.Causal())
        found = {"top_k": A.collect(stats.TopK(4))[0]} if top_k else {}
        heads = tuple(range(len(kinds)))
        entries.append(
            Entry(f"layers.{layer}", layer, "self", 0, heads, (0, n), 0, tuple(A.shape), A, statistics=found)
        )
        block["induction"].append([{"induction": 0.8, "liar": 0.9}.get(kind, 0.0) for kind in kinds])
        block["duplicate"].append([0.9 if kind == "duplicate token" else 0.0 for kind in kinds])
    tokens = [f" w{token}" for token in ids[0].tolist()]
    return Atlas(entries, tokens=tokens, ids=ids, details={"block": block}, **options)
