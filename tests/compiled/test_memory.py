"""The memory that a compiled program takes beyond the plain one, at 8,192 tokens."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tests.compiled.programs import numbers
from tests.tiny_models import SIZES
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

import attlas
import attlas.huggingface
from attlas import stats

LENGTH, HEADS, D = 8192, 2, 64
BOUND = 64 << 20  # the whole matrix has 512 MiB
C = attlas.Causal()

PROGRAMS: dict[str, Callable[..., Tensor]] = {
    "window": lambda q, k, v: attlas.attention(q, k, v, mask=attlas.Window(256, 0)),
    "soft cap": lambda q, k, v: attlas.attention(q, k, v, attlas.SoftCap(attlas.ScaledDot(), 30.0), mask=C),
    "sink": lambda q, k, v, sink: attlas.attention(q, k, v, mask=C, sink=sink),
    "Gaussian": lambda q, k, v: attlas.attention(q, k, v, attlas.Gaussian(8.0), mask=C),
    "entropy": lambda q, k, v: attlas.attend(q, k, mask=C).collect(stats.Entropy())[0],
    "transposed": lambda q, k, v: attlas.attend(q, k, mask=C).mT.matmul(v),
}


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def peak(run: Callable[[], Any]) -> int:
    """Return the most bytes of tensors that a call holds at a time beyond those that are there before it."""
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as made:
        run()
    held = largest = 0
    events = [event for event in made.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        largest = max(largest, held)
    return largest


def test_the_measure_sees_a_whole_matrix() -> None:
    q = torch.zeros(1, 1, 2048, 4)
    assert peak(lambda: torch.softmax(q @ q.mT, -1).sum()) >= 2 * 4 * 2048 * 2048


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward and backward"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_beyond_the_plain_call(name: str, backward: bool) -> None:
    shape = 1, HEADS, LENGTH, D
    given = [numbers(*shape, seed=i).requires_grad_(backward) for i in range(3)]
    if name == "sink":
        given.append(nn.Parameter(torch.zeros(HEADS), requires_grad=backward))
    compiled = torch.compile(PROGRAMS[name], backend="aot_eager", fullgraph=True)

    def run(program: Callable[..., Tensor]) -> int:
        def once() -> None:
            found = program(*given)
            if backward:
                found.sum().backward()

        taken = peak(once)
        for t in given:
            t.grad = None
        return taken

    taken, plain = run(compiled), run(PROGRAMS[name])
    assert taken - plain <= BOUND


@torch.no_grad()
def test_an_exported_model_takes_what_it_takes_on_sdpa() -> None:
    """Nobody asks for weights, so that none are there: those of one layer have 256 MiB."""
    length, taken = 4096, {}
    ids, given = torch.zeros(1, length, dtype=torch.int64), {"use_cache": False, "logits_to_keep": 1}
    for name in ("sdpa", attlas.huggingface.NAME):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(**SIZES | {"max_position_embeddings": length})
        model = transformers.LlamaForCausalLM._from_config(config, attn_implementation=name).eval()
        program = torch.export.export(model, (ids,), given, strict=False).module()
        logits = program(ids, **given).logits
        taken[name] = peak(lambda program=program: program(ids, **given))
        torch.testing.assert_close(logits, model(ids, **given).logits, rtol=1e-4, atol=1e-4)
    assert taken[attlas.huggingface.NAME] <= 1.2 * taken["sdpa"], taken


@torch.no_grad()
def test_a_model_with_capped_logits_stores_no_matrix() -> None:
    length = 4096
    config = transformers.Gemma2Config(**SIZES | {"max_position_embeddings": length}, attn_logit_softcapping=5.0)
    model = transformers.Gemma2ForCausalLM._from_config(config, attn_implementation=attlas.huggingface.NAME).eval()
    ids = torch.zeros(1, length, dtype=torch.int64)
    given = {"use_cache": False, "logits_to_keep": 1}
    program = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(program(ids, **given).logits, model(ids, **given).logits, rtol=1e-4, atol=1e-4)
    matrix = 4 * config.num_attention_heads * length**2
    assert peak(lambda: program(ids, **given)) < matrix / 2
