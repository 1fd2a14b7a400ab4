"""What makes it hard to know which attention is which: shared modules, windows, checkpoints, missing numbers."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tests.recording.conftest import SIZES, causal_model
from tests.tiny_models import VOCABULARY, lively
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import attlas
from attlas import stats
from attlas.recording import offer, record
from attlas.recording.atlas.entry import KINDS
from attlas.recording.discovery import ModelAttentions

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


def albert(groups: int) -> nn.Module:
    sizes = SIZES | {"num_hidden_layers": 4, "embedding_size": 16}
    config = transformers.AlbertConfig(**sizes, num_hidden_groups=groups)
    return lively(transformers.AlbertModel._from_config(config, attn_implementation="sdpa"))


@pytest.mark.parametrize("groups", [1, 2])
def test_a_module_used_for_several_layers(groups: int, ids: Tensor, eager: Callable[..., Any]) -> None:
    model = albert(groups)
    with record(model, statistics=[stats.Entropy()]) as atlas, torch.no_grad():
        model(ids)
        model(ids[:, :5])
    assert atlas.layers() == [0, 1, 2, 3]
    assert [e.call for e in atlas.entries] == [0, 1] * 4
    assert len({e.name for e in atlas.entries}) == groups
    for given, call in ((ids, 0), (ids[:, :5], 1)):
        for layer, dense in enumerate(eager(model, given).attentions):
            torch.testing.assert_close(atlas[layer, call].to_dense(), dense, atol=1e-5, rtol=1e-4)
    with record(model, layers=[0, 2]) as atlas, torch.no_grad():
        model(ids)
    assert atlas.layers() == [0, 2]


class Windows(nn.Module):
    """An attention that is called once for each window of an image, within one forward."""

    def forward(self, x: Tensor) -> Tensor:
        for window in x.split(4, dim=2):
            offer(self, attlas.attend(window, window))
        return x


def test_windows_of_an_image_are_passes_of_one_layer() -> None:
    model = nn.Sequential(Windows(), Windows())
    with record(model) as atlas:
        model(torch.randn(1, 2, 12, 4))
        model(torch.randn(1, 2, 12, 4))
    assert [(e.layer, e.call) for e in atlas.entries] == [(layer, call) for layer in range(2) for call in range(6)]


def test_windows_of_qwen() -> None:
    config = transformers.Qwen2VLConfig(
        text_config=SIZES | {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}},
        vision_config={"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 2,
                       "spatial_merge_size": 1, "temporal_patch_size": 1},
        image_token_id=7, vision_start_token_id=8, vision_end_token_id=9, video_token_id=10,
    )  # fmt: skip
    model = lively(transformers.Qwen2VLForConditionalGeneration._from_config(config, attn_implementation="sdpa"))
    ids = torch.tensor([[5, 8, 7, 7, 7, 7, 9, 8, 7, 7, 9, 11]])
    with record(model) as atlas, torch.no_grad():
        model(
            input_ids=ids,
            pixel_values=torch.randn(6, 12),
            image_grid_thw=torch.tensor([[1, 2, 2], [1, 1, 2]]),
            mm_token_type_ids=(ids == 7).int(),
        )
    # The text model is the main one; each image is a pass of the layers of the encoder.
    assert atlas.layers() == [0, 1, 2]
    assert [(e.layer, e.call, e.shape[2]) for e in atlas.entries if e.kind == "encoder"] == [
        (0, 0, 4), (0, 1, 2), (1, 0, 4), (1, 1, 2)
    ]  # fmt: skip


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradient_checkpointing_is_recorded_once(llama: nn.Module, ids: Tensor, reentrant: bool) -> None:
    llama.train()
    llama.gradient_checkpointing_enable({"use_reentrant": reentrant})
    with record(llama, statistics=[stats.Entropy()]) as atlas:
        llama(ids, labels=ids).loss.backward()
    assert [(e.layer, e.call) for e in atlas.entries] == [(0, 0), (1, 0), (2, 0)]
    assert all(p.grad is not None for p in llama.parameters())
    assert not any(e.matrix.problem.q.requires_grad for e in atlas.entries)


def test_a_checkpoint_of_one_s_own() -> None:
    model = Windows()
    x = torch.randn(1, 2, 4, 4, requires_grad=True)
    with record(model) as atlas:
        checkpoint(lambda t: model(t) * t, x, use_reentrant=False).sum().backward()
    assert len(atlas.entries) == 1


def test_numbers_do_not_come_from_layer_idx() -> None:
    model = nn.Sequential(Windows(), Windows())
    model[0].layer_idx = model[1].layer_idx = 5
    with record(model) as atlas:
        model(torch.randn(1, 2, 4, 4))
    assert [e.layer for e in atlas.entries] == [0, 1]


def test_layers_that_attend_in_another_order_keep_the_order_of_the_model() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Windows(), Windows()

        def forward(self, x: Tensor) -> Tensor:
            return self.first(self.second(x))

    with record(model := Backwards(), layers=[1]) as atlas:
        model(torch.randn(1, 2, 4, 4))
    assert [(e.name, e.layer) for e in atlas.entries] == [("second", 1)]


def test_kinds_by_where_a_module_stands(t5: nn.Module, bart: nn.Module) -> None:
    def kinds(model: nn.Module) -> set[tuple[str, str]]:
        sites = ModelAttentions(model, patched=False).sites.values()
        return {
            (site.path.split(".")[-3] if "layers" in site.path else site.path.split(".")[-1], site.kind)
            for site in sites
        }

    assert {kind for _, kind in kinds(t5)} == {"self", "encoder", "cross"}
    assert {kind for _, kind in kinds(bart)} == {"self", "encoder", "cross"}
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    decoder = transformers.BertConfig(**config.to_dict())
    both = transformers.EncoderDecoderConfig.from_encoder_decoder_configs(config, decoder)
    assert ModelAttentions(transformers.EncoderDecoderModel(both), patched=False).counts == {
        kind: 0 if kind == "linear" else 2 for kind in KINDS
    }
    sites = ModelAttentions(transformers.BertModel(config), patched=False).sites
    assert {site.key: path for path, site in sites.items()} == {
        "self.0": "encoder.layer.0.attention.self",
        "self.1": "encoder.layer.1.attention.self",
    }


def test_caches_that_are_written_again_do_not_change_what_was_kept(llama: nn.Module, ids: Tensor) -> None:
    cache = transformers.StaticCache(config=llama.config, max_cache_len=11)
    with record(llama) as atlas, torch.no_grad():
        llama(ids, past_key_values=cache)
        cache.reset()
        llama(ids.flip(-1), past_key_values=cache)
    with record(llama) as other, torch.no_grad():
        llama(ids)
    torch.testing.assert_close(atlas[2, 0].to_dense(), other[2].to_dense(), atol=1e-5, rtol=1e-4)


def test_sinks_and_caps(ids: Tensor) -> None:
    for config in (
        transformers.Gemma2Config(**SIZES, sliding_window=6, attn_logit_softcapping=0.5),
        transformers.GptOssConfig(**SIZES | {"intermediate_size": 16}, sliding_window=6, num_local_experts=2,
                                  num_experts_per_tok=1),
    ):  # fmt: skip
        model = causal_model_on_eager(config)
        with record(model) as atlas:
            text = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False)[:, :-1]
        with torch.no_grad():
            weights = model(text, output_attentions=True).attentions
        full = [layer for layer in atlas.layers() if len([e for e in atlas.entries if e.layer == layer]) == 1]
        assert full
        for layer in full:
            torch.testing.assert_close(atlas[layer].to_dense(), weights[layer], atol=1e-5, rtol=1e-4)


def causal_model_on_eager(config: Any) -> nn.Module:
    """gpt-oss has no sdpa: whatever a model was on comes back."""
    model = lively(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager"))
    assert model.config._attn_implementation == "eager"
    return model


def test_inference_mode(ids: Tensor) -> None:
    model = causal_model(transformers.LlamaConfig(**SIZES))
    with torch.inference_mode(), record(model, statistics=[stats.Entropy()]) as atlas:
        model(ids)
    assert atlas[0].check() < 1e-5


def test_dropout_is_not_part_of_the_weights(ids: Tensor) -> None:
    model = causal_model(transformers.LlamaConfig(**SIZES, attention_dropout=0.5)).train()
    with record(model) as atlas:
        model(ids)
    torch.testing.assert_close(atlas[0].sum(-1), torch.ones(2, 4, 11))


def test_configurations_whose_layers_differ(ids: Tensor) -> None:
    """Gemma 4: asking its configuration for the one head_dim raises an error that is no AttributeError."""
    layers = {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0}
    per_layer = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 0}
    config = transformers.Gemma4TextConfig(**SIZES | layers | per_layer, global_head_dim=16, sliding_window=5)
    model = causal_model(config)
    with record(model) as atlas, torch.no_grad():
        model(ids)
    assert [A.problem.q.shape[-1] for A in atlas] == [8, 16]
    assert atlas.details["num_attention_heads"] == 4
    assert "head_dim" not in atlas.details
    model.set_attn_implementation("eager")
    with torch.no_grad():
        theirs = model(ids, output_attentions=True).attentions
    for A, weights in zip(atlas, theirs, strict=True):
        torch.testing.assert_close(A.to_dense(), weights, atol=1e-5, rtol=1e-4)


class Layered(attlas.Score):
    """A score with layers of torch in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def project(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.layers(q), self.layers(k)

    def forward(self, q: Tensor, k: Tensor, at: Any) -> Tensor:
        return q @ k.mT


class Learned(nn.Module):
    """An attention with parameters in its score."""

    def __init__(self, score: attlas.Score) -> None:
        super().__init__()
        self.score = score

    def forward(self, x: Tensor) -> Tensor:
        A = attlas.attend(x[:, None], x[:, None], score=self.score)
        offer(self, A)
        return A @ x[:, None]


SCORES = [attlas.Bilinear(8, 8), attlas.Additive(8, 8, 4), 0.5 * Layered()]


@pytest.mark.parametrize("score", SCORES, ids=lambda score: type(score).__name__)
def test_an_optimizer_does_not_change_what_was_kept(score: attlas.Score) -> None:
    model, x = nn.Sequential(Learned(score)), torch.randn(2, 7, 8)
    with record(model) as atlas:
        model(x).square().sum().backward()
    assert not atlas[0].requires_grad
    before = atlas[0].to_dense()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    torch.testing.assert_close(atlas[0].to_dense(), before)
    torch.testing.assert_close(atlas[0][..., 3, :], before[..., 3, :])
