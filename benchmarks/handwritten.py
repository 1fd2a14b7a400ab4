"""BLOOM and GPT-J, which write their attention out by hand: as they are, lazily, and with attlas called directly.

Run with ``python benchmarks/handwritten.py`` (16,384 tokens), or ``--tokens 2048 --eager`` for a short text on the
model as it is as well. Two random layers of each. Measured are the CPU time of a forward pass and the largest memory
beyond that of the model. "direct" is what the model would be on the attention interface: the same layers, whose
attention is one call of `attlas.attention` with the mask and the bias as attlas has them. Small decoders take one step
each with 20 and 100 keys.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import resource
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BloomConfig, BloomModel, GPTJConfig, GPTJModel
from transformers.models.bloom.modeling_bloom import BloomAttention
from transformers.models.gptj.modeling_gptj import GPTJAttention

import attlas
from attlas.huggingface import LazyMask
from harness import save

HEADS, SIZE, LAYERS, VOCABULARY = 8, 64, 2, 128


def bloom(tokens: int) -> nn.Module:
    """Return a random BLOOM."""
    return BloomModel(BloomConfig(vocab_size=VOCABULARY, hidden_size=HEADS * SIZE, n_layer=LAYERS, n_head=HEADS)).eval()


def gptj(tokens: int) -> nn.Module:
    """Return a random GPT-J."""
    sizes = {"n_positions": tokens, "n_embd": HEADS * SIZE, "n_layer": LAYERS, "n_head": HEADS, "rotary_dim": 32}
    sizes |= {"bos_token_id": 1, "eos_token_id": 2}
    return GPTJModel(GPTJConfig(vocab_size=VOCABULARY, **sizes)).eval()


def mask_of(mask: Tensor | None) -> attlas.Mask | None:
    return mask.mask if isinstance(mask, LazyMask) else mask  # type: ignore[return-value]  # a mask of attlas


def direct_gptj(self: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None) -> Any:
    """GPT-J's attention as one call of attlas."""
    scale = 1 / float(self.scale_attn)
    return attlas.attention(query, key, value, mask=mask_of(attention_mask), scale=scale), None


def direct_bloom(
    self: Any, hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Any, **_: Any
) -> Any:
    """BLOOM's attention as one call of attlas."""
    q, k, v = self._reshape(self.query_key_value(hidden_states))
    score = attlas.ScaledDot(self.inv_norm_factor) + attlas.TensorBias(alibi.view(len(q), HEADS, 1, -1))
    out = attlas.attention(q, k, v, score=score, mask=mask_of(attention_mask))
    out = out.transpose(1, 2).flatten(2)
    return self.dense(out) + residual, None


MODELS: dict[str, Callable[[int], nn.Module]] = {"bloom": bloom, "gptj": gptj}


def peak() -> int:
    """Return the largest memory of this process so far in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(name: str, way: str, tokens: int, repeats: int, answer: Any) -> None:
    """Send time and memory of a forward pass; in a process of its own, so that memory is that of one way."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = MODELS[name](tokens)
    ids = torch.randint(VOCABULARY, (1, tokens))
    if way == "direct":
        GPTJAttention._attn, BloomAttention.forward = direct_gptj, direct_bloom
    block = nullcontext() if way == "eager" else attlas.lazily(model)
    with torch.no_grad(), block:
        model(ids[:, :64])
        gc.collect()
        before, times = peak(), []
        for _ in range(repeats):
            start = time.process_time()
            out = model(ids).last_hidden_state
            times.append(time.process_time() - start)
    answer.send({"model": name, "way": way, "tokens": tokens, "seconds": min(times), "bytes": peak() - before,
                 "sum": float(out.double().abs().sum())})  # fmt: skip


def steps(keys: int) -> dict[str, Any]:
    """Return the time of one step of a small decoder, as it is and lazily; both in turn, the least of many."""
    torch.manual_seed(0)
    model, before = gptj(256), torch.randint(VOCABULARY, (1, keys - 1))
    best = {"eager": float("inf"), "lazily": float("inf")}
    with torch.no_grad():
        for _ in range(30):
            for way in best:
                with nullcontext() if way == "eager" else attlas.lazily(model):
                    cache = model(before, use_cache=True).past_key_values
                    for _ in range(4):
                        start = time.process_time()
                        cache = model(before[:, :1], past_key_values=cache, use_cache=True).past_key_values
                        best[way] = min(best[way], time.process_time() - start)
    return {"model": "gptj step", "keys": keys, **best, "ratio": best["lazily"] / best["eager"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument(
        "--eager", action="store_true", help="the model as it is, too: 8 matrices of all tokens a layer"
    )
    options = parser.parse_args()
    rows, context = [], multiprocessing.get_context("fork")
    for name in MODELS:
        for way in ("eager", "lazily", "direct") if options.eager else ("lazily", "direct"):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=measure, args=(name, way, options.tokens, options.repeats, there))
            process.start()
            there.close()
            rows.append(here.recv())
            process.join()
            print(json.dumps(rows[-1]), flush=True)
    rows += [steps(keys) for keys in (20, 100)]
    print(json.dumps(rows[-2:]))
    save("handwritten", rows)


if __name__ == "__main__":
    main()
