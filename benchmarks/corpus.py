"""What a corpus costs beside the plain forward (sdpa) of the same texts: time as ratios in one run, and memory (Linux).

Run with ``python benchmarks/corpus.py`` (``--quick`` for small sizes, ``--rounds N``). Goals, with all statistics and
the 8 largest keys: the shipped model at 2,048 tokens at most 1.5 x, two layers of a random Llama at 16,384 tokens at
most 1.3 x and less than 1 GB beyond the model.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from attlas import models
from attlas.corpus.reading import ModelReader, model_facts
from attlas.corpus.state import State
from harness import extra_peak_bytes, ratios, save

SHIPPED, LLAMA = "shipped model, 2,048 tokens", "two-layer Llama, 16,384 tokens"


def shipped(quick: bool) -> tuple[nn.Module, np.ndarray]:
    """Return the shipped model, and tokens of a file that it did not see in training."""
    model = transformers.AutoModelForCausalLM.from_pretrained(models.path(), attn_implementation="sdpa").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(models.path())
    text = Path(sysconfig.get_path("stdlib"), "argparse.py").read_text(encoding="utf-8")
    return model, np.array(tokenizer(text)["input_ids"][: 512 if quick else 2048])


def llama(quick: bool) -> tuple[nn.Module, np.ndarray]:
    """Return two random layers with 8 heads of size 64, and tokens as often as words are."""
    torch.manual_seed(0)
    length = 2048 if quick else 16_384
    config = transformers.LlamaConfig(
        vocab_size=4096,
        hidden_size=512,
        intermediate_size=1376,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=length,
    )
    model = transformers.LlamaForCausalLM._from_config(config, attn_implementation="sdpa").eval()
    often = 1.0 / (torch.arange(4096) + 10.0)
    return model, torch.multinomial(often, length, replacement=True).numpy()


def plain(model: nn.Module, batch: np.ndarray) -> None:
    """Run the model as it is; of its logits only the last, as a corpus does."""
    with torch.no_grad():
        model(torch.from_numpy(batch), use_cache=False, logits_to_keep=1)


@contextmanager
def reading(model: nn.Module, batch: np.ndarray) -> Iterator[Callable[[], None]]:
    """Give what a corpus does with one batch of texts, which may be called again and again."""
    reader, facts = ModelReader(copy.deepcopy(model)), model_facts(model)
    with reader.running():
        reader.block(facts["vocabulary"], facts["context"])
        state = State(reader.heads, facts["vocabulary"], 32, 10)

        def read() -> None:
            for text, found in enumerate(reader.read(list(batch))):
                if isinstance(found, str):
                    raise RuntimeError(found)
                state.add(text, 0, found)

        yield read


def time(quick: bool, rounds: int) -> dict[str, Any]:
    """Return the time of both, each as a ratio to the plain forward beside it."""
    out = {}
    for name, make, texts in ((SHIPPED, shipped, 1), (f"{SHIPPED}, batches of 2", shipped, 2), (LLAMA, llama, 1)):
        print(name)
        model, ids = make(quick)
        batch = np.stack([ids] * texts)
        with reading(model, batch) as read:
            cases = {"plain forward, sdpa": lambda m=model, b=batch: plain(m, b), "corpus": read}
            out[name] = {"tokens": batch.size, **ratios(cases, "plain forward, sdpa", rounds)}
    return out


def memory(quick: bool) -> int:
    """Return the peak beyond the model of one text of the Llama, in this process."""
    model, ids = llama(quick)
    with reading(model, ids[None]) as read:
        return extra_peak_bytes(read)


def main() -> None:
    """Measure, in a fresh process for memory, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only-memory", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.only_memory:
        print(json.dumps(memory(arguments.quick)))
        return
    command = [sys.executable, __file__, "--only-memory", *(["--quick"] if arguments.quick else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    peak = int(done.stdout.splitlines()[-1])
    print(f"{LLAMA}: {peak / 1e6:.0f} MB beyond the model")
    results = {**time(arguments.quick, arguments.rounds), "bytes beyond the model": peak}
    if not arguments.quick:
        save("corpus", results)


if __name__ == "__main__":
    main()
