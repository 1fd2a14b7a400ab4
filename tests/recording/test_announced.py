"""What a recording collects of each matrix comes from the call of a kernel that multiplies with the values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tests.tiny_models import SIZES, lively
from torch import Tensor, nn

import attlas
import attlas.huggingface
from attlas import stats
from attlas.engine.backends.native import library
from attlas.recording import record

STATISTICS = [stats.Entropy(), stats.TopK(2), stats.ColumnMass(), stats.MaxLogit()]


@pytest.fixture
def kernel_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Skip without vectors for which few queries go to the kernels; return the names of the kernels that are called."""
    if library.current().instruction_set not in ("avx2", "avx512", "amx"):
        pytest.skip("statistics of few queries go to the kernels only where these have wide vectors")
    calls: list[str] = []
    kernel = library.Kernels.call

    def call(self: Any, name: str, **fields: Any) -> int:
        calls.append(name)
        return kernel(self, name, **fields)

    monkeypatch.setattr(library.Kernels, "call", call)
    return calls


def generated(model: Any, **recorded: Any) -> tuple[attlas.Atlas, Tensor]:
    """Record 6 tokens that a model writes after 5; return the atlas and the tokens."""
    ids = torch.arange(5)[None]
    with record(model, **recorded) as atlas:
        out = model.generate(
            ids, min_new_tokens=6, max_new_tokens=6, do_sample=False, pad_token_id=0, eos_token_id=None
        )
    return atlas, out


def llama() -> Any:
    config = transformers.LlamaConfig(**SIZES)
    return lively(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"))


@pytest.mark.parametrize("keep", ["device", "statistics"])
def test_a_step_reads_its_keys_once(kernel_calls: list[str], keep: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = llama()
    layers = model.config.num_hidden_layers
    fused: list[int] = []
    torch_product = nn.functional.scaled_dot_product_attention

    def watched(*args: Any, **kwargs: Any) -> Tensor:
        fused.append(1)
        return torch_product(*args, **kwargs)

    monkeypatch.setattr(nn.functional, "scaled_dot_product_attention", watched)
    atlas, tokens = generated(model, statistics=STATISTICS, keep=keep)
    assert kernel_calls == ["dot"] * 6 * layers
    assert not fused
    plain, others = generated(model)
    assert torch.equal(tokens, others)
    for entry, other in zip(atlas.entries, plain.entries, strict=True):
        wanted = other.matrix.collect(*STATISTICS)
        torch.testing.assert_close(list(entry.statistics.values()), list(wanted), rtol=1e-4, atol=1e-5)


class _OfTiles(stats.Entropy):
    """An entropy that no kernel gives, since its step is its own."""

    def step(self, carry: Any, part: Any, at: Any) -> Any:
        return super().step(carry, part, at)


class _Layer(nn.Module):
    """An attention of a user: one product."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attlas.attend(q, k, mask=attlas.Causal()) @ v


@pytest.mark.parametrize("heads", [None, [1, 2]])
@pytest.mark.parametrize("statistic", [stats.Entropy(), _OfTiles(), stats.TopK(3), stats.Offsets()])
def test_announced_statistics_are_those_that_are_collected(statistic: stats.Statistic, heads: Any) -> None:
    q, k, v = (torch.randn(1, 4, size, 8) for size in (7, 9, 9))
    A, layer = attlas.attend(q, k, mask=attlas.Causal()), _Layer()
    with record(layer, statistics=[statistic, stats.MaxLogit()], heads=heads) as atlas:
        out = layer(q, k, v)
    torch.testing.assert_close(out, A @ v)
    expected = A if heads is None else A[:, heads]
    found = tuple(atlas.entries[0].statistics.values())
    torch.testing.assert_close(found, expected.collect(statistic, stats.MaxLogit()), rtol=1e-4, atol=1e-5)


def test_a_gradient_is_recorded_as_before() -> None:
    q, k, v = (torch.randn(1, 4, size, 8) for size in (7, 9, 9))
    q.requires_grad_()
    layer = _Layer()
    with record(layer, statistics=STATISTICS) as atlas:
        layer(q, k, v).sum().backward()
    grad, q.grad = q.grad, None
    layer(q, k, v).sum().backward()
    torch.testing.assert_close(grad, q.grad)
    entropy = attlas.attend(q, k, mask=attlas.Causal()).detach().collect(stats.Entropy())[0]
    torch.testing.assert_close(atlas.entries[0].statistics["entropy"], entropy)


def test_what_was_kept_is_given_once(kernel_calls: list[str]) -> None:
    q, k, v = (torch.randn(1, 4, size, 8) for size in (7, 9, 9))
    A = attlas.attend(q, k)
    A.weights.announced = (STATISTICS[0],)
    A @ v
    assert kernel_calls == ["dot"]
    first = A.collect(STATISTICS[0])[0].zero_()
    assert kernel_calls == ["dot"]
    second = A.collect(STATISTICS[0])[0]
    assert not bool((first == second).all())
    k[0, 0, 0, 0] = 1.0
    with pytest.raises(attlas.ModifiedError):
        A.collect(STATISTICS[0])


def test_outputs_stay_where_no_statistic_is_recorded() -> None:
    model, ids, steps = llama(), torch.arange(5)[None], torch.arange(5, 8)
    model.set_attn_implementation(attlas.huggingface.NAME)

    def written() -> list[Tensor]:
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            return [model(step, past_key_values=cache).logits for step in (ids, *steps.view(3, 1, 1))]

    plain = written()
    with record(model):
        recorded = written()
    assert all(map(torch.equal, plain, recorded))


def test_what_was_not_announced_is_collected_beside_it() -> None:
    q, k, v = (torch.randn(1, 4, size, 8) for size in (7, 9, 9))
    A = attlas.attend(q, k)
    A.weights.announced = (stats.Entropy(), stats.MaxLogit())
    A @ v
    weights = torch.softmax(q @ k.mT / 8**0.5, dim=-1)
    torch.testing.assert_close(A.collect(stats.ColumnMass())[0], weights.sum(-2))
    mass, entropy = A.collect(stats.ColumnMass(), stats.Entropy())
    torch.testing.assert_close(mass, weights.sum(-2))
    torch.testing.assert_close(entropy, torch.special.entr(weights).sum(-1))
