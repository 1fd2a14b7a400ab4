"""A compiled layer of a transformer on attlas against the same on torch's own function, as ratios inside one run.

Run with ``python benchmarks/compiled.py [--rounds 40]``. Goal: at most 1.03, forward, and forward with backward.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import nn

import attlas.huggingface
from harness import ratios, save

SIZES = {"vocab_size": 64, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 1}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 8192}


def layer(name: str) -> nn.Module:
    """Return a Llama model of one layer on an attention function."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, **HEADS)
    return transformers.LlamaModel._from_config(config, attn_implementation=name)


def forward(model: Any, given: torch.Tensor) -> Callable[[], Any]:
    """Return a run without a graph."""

    def run() -> None:
        with torch.no_grad():
            model(inputs_embeds=given, use_cache=False)

    return run


def backward(model: Any, given: torch.Tensor) -> Callable[[], Any]:
    """Return a run with gradients in the parameters and in what is given."""

    def run() -> None:
        model.zero_grad(set_to_none=True)
        given.grad = None
        model(inputs_embeds=given, use_cache=False).last_hidden_state.sum().backward()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    warnings.simplefilter("ignore")
    results: dict[str, Any] = {}
    for tokens in (128, 1024, 4096):
        given = torch.randn(1, tokens, SIZES["hidden_size"], requires_grad=True)
        for kind, make in (("forward", forward), ("forward and backward", backward)):
            torch._dynamo.reset()
            cases = {}
            for name in ("sdpa", attlas.huggingface.NAME):
                cases[name] = make(torch.compile(layer(name), fullgraph=True), given)
                cases[name]()  # compile
            print(f"{tokens} tokens, {kind}")
            results[f"{tokens} tokens, {kind}"] = ratios(cases, "sdpa", max(rounds * 128 // tokens, 5))
    save("compiled", results)


if __name__ == "__main__":
    main()
