"""A generation of transformers that is recorded: its time, and what one recorded step costs after few and many tokens.

Run with ``python benchmarks/generation.py [--new 128] [--rounds 5]``: a random Llama of 4 layers x 8 heads, d 64, on
sdpa, on attlas, and recorded. Goals: at most 1.25 x sdpa with entropy, and what recording adds to a step grows by the
comparison of the keys alone. Times are those of the processor, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import transformers
from torch import nn

import attlas.huggingface
from attlas import stats
from attlas.recording import record
from harness import ratios, save

RECORDED: dict[str, dict[str, Any]] = {
    "recorded": {},
    "recorded, entropy": {"statistics": [stats.Entropy()]},
    "entropy alone": {"statistics": [stats.Entropy()], "keep": "statistics"},
}


def model_of(layers: int = 4) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=4096,
    )
    return transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()


def write(model: Any, name: str, new: int) -> None:
    """Write some tokens after a prompt of 16."""
    model.set_attn_implementation("sdpa" if name == "sdpa" else attlas.huggingface.NAME)
    ids = torch.arange(16).view(1, -1)
    options = {"attention_mask": torch.ones_like(ids), "min_new_tokens": new, "max_new_tokens": new}
    if name in RECORDED:
        with record(model, **RECORDED[name]):
            model.generate(ids, do_sample=False, pad_token_id=0, eos_token_id=None, **options)
    else:
        model.generate(ids, do_sample=False, pad_token_id=0, eos_token_id=None, **options)


@torch.no_grad()
def steps(model: Any, name: str, tokens: tuple[int, ...]) -> dict[int, float]:
    """Return the median milliseconds of 9 steps from some numbers of tokens on, in one text."""
    model.set_attn_implementation(attlas.huggingface.NAME)
    cache = transformers.DynamicCache(config=model.config)
    times: list[float] = []

    def read() -> None:
        model(torch.zeros(1, 16, dtype=torch.int64), past_key_values=cache)
        for number in range(16, max(tokens) + 9):
            begun = time.process_time()
            model(torch.tensor([[number % 1000]]), past_key_values=cache)
            times.append(time.process_time() - begun)

    if name in RECORDED:
        with record(model, **RECORDED[name]):
            read()
    else:
        read()
    return {n: round(statistics.median(times[n - 16 : n - 7]) * 1e3, 2) for n in tokens}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    model = model_of()
    names = ("sdpa", "attlas", *RECORDED)
    total = ratios(
        {name: lambda name=name: write(model, name, args.new) for name in names}, "sdpa", args.rounds, time.process_time
    )
    by_tokens = {name: steps(model, name, (20, 200, 1000)) for name in ("attlas", *RECORDED)}
    for name, found in by_tokens.items():
        print(f"{name:58s} " + "  ".join(f"{n} tokens {ms:.2f} ms" for n, ms in found.items()))
    save(
        "generation",
        {
            "new_tokens": args.new,
            "transformers": transformers.__version__,
            "total": total,
            "step_milliseconds_by_tokens": by_tokens,
        },
    )


if __name__ == "__main__":
    main()
