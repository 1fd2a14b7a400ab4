"""Models of transformers whose text is divided over ranks give what one process gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tests.distributed.conftest import check_same_error
from tests.recording.conftest import SIZES, causal_model, two_layers
from tests.tiny_models import lively
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

import attlas
import attlas.huggingface
from attlas import stats
from attlas.distributed import DistributedMatrix, context_parallel, head_tail_order
from attlas.errors import BackendError, DtypeError, ShapeError

pytestmark = pytest.mark.filterwarnings("ignore")
OnRanks = Callable[..., list[Any]]

N = 50
IDS = torch.randint(3, 60, (2, N), generator=torch.Generator().manual_seed(1))
LEFT = torch.ones(2, N, dtype=torch.int64)
LEFT[1, :19] = 0
RIGHT = LEFT.flip(1)
PACKED = torch.cat([torch.arange(17), torch.arange(8), torch.arange(25)])[None]  # 25 is an edge of two ranks


def llama4() -> nn.Module:
    sizes = {**SIZES, "num_hidden_layers": 2, "intermediate_size_mlp": 48, "num_local_experts": 2}
    config = transformers.Llama4TextConfig(**sizes, attention_chunk_size=9, attn_temperature_tuning=False)
    config.layer_types = ["chunked_attention", "full_attention"]
    return causal_model(config)


def gpt_oss() -> nn.Module:
    sizes = {**SIZES, "num_hidden_layers": 2, "num_local_experts": 2, "num_experts_per_tok": 1}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    config = transformers.GptOssConfig(**sizes, sliding_window=13, rope_parameters=rope)
    return lively(transformers.GptOssForCausalLM._from_config(config, attn_implementation="eager"))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": two_layers, "mistral": lambda: two_layers(window=13), "llama4": llama4, "gpt_oss": gpt_oss,
}  # fmt: skip
TEXTS: dict[str, dict[str, Tensor]] = {
    "plain": {}, "left": {"attention_mask": LEFT}, "right": {"attention_mask": RIGHT},
    "packed": {"position_ids": PACKED},
}  # fmt: skip


def part(t: Tensor, rank: int, world: int, order: Tensor | None = None) -> Tensor:
    t = t if order is None else t[:, order]
    return t.chunk(world, dim=1)[rank]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum")


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for name in MODELS for text in TEXTS if (name, text) != ("gpt_oss", "packed")]
)
def test_logits_and_gradients(on_ranks: OnRanks, name: str, text: str) -> None:
    model, more = MODELS[name](), TEXTS[text]
    # Experts of gpt-oss are computed in float32 at most, and so are the routers of Llama 4.
    model = model if name == "gpt_oss" else model.double()
    limit = {"gpt_oss": 2e-5, "llama4": 1e-5}.get(name, 1e-11)
    model.set_attn_implementation("attlas")
    targets = functional.pad(IDS, (0, 1), value=-100)[:, 1:]
    mask = more.get("attention_mask")
    targets = targets if mask is None else targets.masked_fill(mask == 0, -100)
    wanted = model(IDS, use_cache=False, **more).logits
    loss_of(wanted, targets).backward()
    true = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for p in model.parameters():
        p.grad = None
    before = "eager" if name == "gpt_oss" else "sdpa"
    model.set_attn_implementation(before)
    known = torch.ones(2, N) if mask is None else mask

    def job(rank: int, world: int) -> dict[str, Tensor]:
        mine = copy.deepcopy(model)
        with context_parallel(init_device_mesh("cpu", (world,)), mine):
            logits = mine(part(IDS, rank, world), **{key: part(t, rank, world) for key, t in more.items()}).logits
            seen = part(known, rank, world) > 0
            torch.testing.assert_close(logits[seen], part(wanted, rank, world)[seen], atol=limit, rtol=limit)
            loss_of(logits, part(targets, rank, world)).backward()
        assert mine.config._attn_implementation == before
        return {name: p.grad for name, p in mine.named_parameters() if p.grad is not None}

    found = on_ranks(2, job)
    for key, gradient in true.items():
        total = sum(one[key] for one in found)
        torch.testing.assert_close(total, gradient, atol=10 * limit * float(gradient.abs().max()), rtol=0)
    assert name != "gpt_oss" or any("sink" in key for key in true)


@pytest.mark.parametrize("window", [None, 13])
@pytest.mark.parametrize("ranks", [3, 4])
def test_float32_and_uneven_parts(on_ranks: OnRanks, ranks: int, window: int | None) -> None:
    model = two_layers(window)
    with torch.no_grad():
        wanted = model(IDS).logits

    @torch.no_grad()
    def job(rank: int, world: int) -> float:
        mine = copy.deepcopy(model)
        with context_parallel(init_device_mesh("cpu", (world,)), mine):
            output = mine(part(IDS, rank, world), output_attentions=True)
            assert output.past_key_values is None
            assert all(isinstance(A, DistributedMatrix) and A.shape == (2, 4, N, N) for A in output.attentions)
            assert stats.entropy(output.attentions[0]).shape == (2, 4, N)
        return float((output.logits - part(wanted, rank, world)).abs().max() / wanted.abs().max())

    # 1.5e-6 with torch 2.8, whose products add in another order: 13 roundings of float32 in two layers.
    assert max(on_ranks(ranks, job)) < 2e-6


@pytest.mark.parametrize("text", ["plain", "left", "packed"])
def test_shards_of_equal_work(on_ranks: OnRanks, text: str) -> None:
    model, more, order = two_layers(window=13), TEXTS[text], head_tail_order(N - 2, 2)
    ids, more = IDS[:, : N - 2], {key: t[:, : N - 2] for key, t in more.items()}
    model.set_attn_implementation("attlas")
    with torch.no_grad():
        wanted = model(ids, use_cache=False, **more).logits

    @torch.no_grad()
    def job(rank: int, world: int) -> None:
        mine, own = copy.deepcopy(model), {key: part(t, rank, world, order) for key, t in more.items()}
        with context_parallel(init_device_mesh("cpu", (world,)), mine, order=order):
            logits = mine(part(ids, rank, world, order), **own).logits
        torch.testing.assert_close(logits, part(wanted, rank, world, order), atol=1e-5, rtol=1e-5)

    on_ranks(2, job)


def cached(model: nn.Module, rank: int) -> None:
    model.generate(part(IDS, rank, 2), max_new_tokens=2)


def labelled(model: nn.Module, rank: int) -> None:
    model(part(IDS, rank, 2), labels=part(IDS, rank, 2))


def uneven(model: nn.Module, rank: int) -> None:
    model(IDS[:, :20] if rank == 0 else IDS[:, 20:])


def whole_mask(model: nn.Module, rank: int) -> None:
    model(part(IDS, rank, 2), attention_mask=LEFT)


def one_rank_only(model: nn.Module, rank: int) -> None:
    model(part(IDS, rank, 2), **({"attention_mask": part(LEFT, rank, 2)} if rank else {}))


def recorded(model: nn.Module, rank: int) -> None:
    with attlas.record(model):
        model(part(IDS, rank, 2))


def other_mask(model: nn.Module, rank: int) -> None:
    masking = transformers.masking_utils.create_causal_mask
    embeds, positions = model.get_input_embeddings()(part(IDS, rank, 2)), torch.arange(25)[None]
    model(part(IDS, rank, 2))
    masking(model.config, embeds, None, None, position_ids=positions, or_mask_function=lambda b, h, i, j: i == j)


REFUSED = {
    cached: (BackendError, "a cache would have the keys of one rank only"),
    labelled: (BackendError, "the target of the last token of a rank is on the next rank"),
    uneven: (ShapeError, "each rank must have the tokens of torch.chunk"),
    whole_mask: (BackendError, "attention_mask must be that of this rank's 25 tokens"),
    one_rank_only: (ShapeError, "all ranks must have the same number of attention_mask"),
    recorded: (BackendError, "recordings and interventions follow whole texts"),
    other_mask: (BackendError, "are known at positions of the whole text"),
}


@pytest.mark.parametrize("work", REFUSED, ids=lambda work: work.__name__)
def test_what_would_be_wrong_is_refused_on_all_ranks(work: Callable[..., None]) -> None:
    (error, text), model = REFUSED[work], two_layers()

    def refused(rank: int) -> None:
        mine = copy.deepcopy(model)
        try:
            with context_parallel(init_device_mesh("cpu", (2,)), mine):
                work(mine, rank)
        finally:
            with torch.no_grad():
                mine(IDS)  # all is well again outside

    check_same_error(refused, error, text)


def test_a_model_that_does_not_look_for_documents(on_ranks: OnRanks) -> None:
    model = gpt_oss()  # transformers hands its positions to no mask

    def job(rank: int, world: int) -> None:
        mine = copy.deepcopy(model)
        with (
            context_parallel(init_device_mesh("cpu", (world,)), mine),
            pytest.raises(BackendError, match="does not take that for another document"),
        ):
            mine(part(IDS, rank, world), position_ids=part(PACKED, rank, world))

    on_ranks(4, job, 20)


def mamba() -> nn.Module:
    return transformers.MambaForCausalLM(transformers.MambaConfig(vocab_size=61, hidden_size=16, num_hidden_layers=1))


def t5() -> nn.Module:
    config = transformers.T5Config(vocab_size=61, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    return transformers.T5EncoderModel(config)


def dynamic() -> nn.Module:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    return causal_model(transformers.LlamaConfig(**SIZES, rope_parameters=rope))


def falcon() -> nn.Module:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 61}
    return transformers.FalconForCausalLM(transformers.FalconConfig(**sizes))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (mamba, "must take position_ids"),
        (t5, r"must take position_ids"),
        (dynamic, "must not depend on the largest position"),
        (falcon, r"must ask transformers for their function"),
    ],
)
def test_models_that_mix_tokens_otherwise(on_ranks: OnRanks, make: Callable[[], nn.Module], text: str) -> None:
    model = make()

    def job(rank: int, world: int) -> None:
        with (
            pytest.raises(BackendError, match=text),
            context_parallel(init_device_mesh("cpu", (2,)), mine := copy.deepcopy(model)),
        ):
            mine(part(IDS, rank, 2))

    on_ranks(2, job, 20)


def test_arguments(on_ranks: OnRanks) -> None:
    def job(rank: int, world: int) -> None:
        with (
            pytest.raises(ShapeError, match="the mesh must have one dimension"),
            context_parallel(init_device_mesh("cpu", (2, 1)), nn.Identity()),
        ):
            pass
        with (
            pytest.raises(DtypeError, match="model must be an nn"),
            context_parallel(init_device_mesh("cpu", (2,)), "model"),
        ):
            pass

    on_ranks(2, job, 20)
