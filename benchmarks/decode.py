"""Decoding with a cache: `attlas.nn.GPT2.generate` against transformers' `generate` with sdpa.

Run with ``make bench`` or ``python benchmarks/decode.py [--new 2048] [--rounds 3]``. The model is the one that ships
with the package; both write the same text. Goal: at most 0.8 of transformers' time for 2,048 new tokens. Also what one
step costs when few and when many tokens are cached: it should grow only with the one row that attends to them.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import transformers

import attlas.models
from attlas.nn import GPT2, KVCache
from harness import ratios, save


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--new", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    folder = attlas.models.path()
    ours = GPT2.from_pretrained(folder)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    start = torch.tensor([[0]])
    save(
        "decode",
        {
            "new_tokens": args.new,
            "transformers": transformers.__version__,
            "same_text": torch.equal(write(ours, start, 256), write_there(theirs, start, 256)),
            "total": ratios(
                {
                    "transformers, sdpa": lambda: write_there(theirs, start, args.new),
                    "attlas.nn.GPT2": lambda: write(ours, start, args.new),
                },
                "transformers, sdpa",
                args.rounds,
            ),
            "step_milliseconds_by_cached_tokens": {
                n: step_milliseconds(ours, n) for n in (16, 512, 1024, ours.config.n_positions - 64)
            },
        },
    )


def write(model: GPT2, start: torch.Tensor, new: int) -> torch.Tensor:
    return model.generate(start, new, stop=())


def write_there(model: transformers.PreTrainedModel, start: torch.Tensor, new: int) -> torch.Tensor:
    settings = {"min_new_tokens": new, "max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
    return model.generate(start, attention_mask=torch.ones_like(start), eos_token_id=None, **settings)


@torch.no_grad()
def step_milliseconds(model: GPT2, cached: int, steps: int = 48) -> float:
    """Return the median time of a step after `cached` tokens."""
    cache = KVCache()
    model(torch.zeros(1, cached, dtype=torch.int64), cache=cache, last_only=True)
    times = []
    for _ in range(steps):
        begun = time.perf_counter()
        model(torch.tensor([[1]]), cache=cache, last_only=True)
        times.append(time.perf_counter() - begun)
    found = round(statistics.median(times) * 1e3, 3)
    print(f"step after {cached:5d} tokens {found:47.3f} ms")
    return found


if __name__ == "__main__":
    main()
