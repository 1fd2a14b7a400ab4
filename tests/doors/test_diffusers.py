"""Maps of words over pictures: attlas.record(pipe) beside dense attention of tiny random pipelines of diffusers."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.doors.pages import example, run_page
from torch import Tensor, nn
from torch.nn import functional as F

import attlas
from attlas import stats

diffusers = pytest.importorskip("diffusers", reason="diffusers is not installed; `make test-doors` has it")
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

WORDS, WIDTH, STEPS = 7, 24, 2
UNET = {"sample_size": 16, "block_out_channels": (16, 32), "layers_per_block": 1, "cross_attention_dim": WIDTH,
        "norm_num_groups": 4}  # fmt: skip


def vae(channels: int) -> Any:
    """Return an autoencoder that does nothing: the pipelines return latents."""
    return diffusers.AutoencoderKL(
        block_out_channels=(8,), norm_num_groups=4, down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",), latent_channels=channels, shift_factor=0.06,
    )  # fmt: skip


def without(*names: str) -> dict[str, Any]:
    """Return parts of a pipeline that are not there."""
    return dict.fromkeys(names)


def stable_diffusion() -> tuple[Any, dict[str, Any]]:
    """Return a pipeline of the kind of Stable Diffusion 1.5, and what it is called with."""
    blocks = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
              "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}  # fmt: skip
    unet = diffusers.UNet2DConditionModel(**UNET, **blocks, attention_head_dim=2)
    none = without("text_encoder", "tokenizer", "safety_checker", "feature_extractor")
    pipe = diffusers.StableDiffusionPipeline(
        vae=vae(4), unet=unet, scheduler=diffusers.DDIMScheduler(), requires_safety_checker=False, **none
    )
    return pipe, {"negative_prompt_embeds": torch.randn(1, WORDS, WIDTH), "height": 16, "width": 16}


def stable_diffusion_xl() -> tuple[Any, dict[str, Any]]:
    """Return a pipeline of the kind of Stable Diffusion XL."""
    unet = diffusers.UNet2DConditionModel(
        **UNET, attention_head_dim=(2, 4), use_linear_projection=True, addition_embed_type="text_time",
        addition_time_embed_dim=8, transformer_layers_per_block=(1, 2), projection_class_embeddings_input_dim=58,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    none = without("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    pipe = diffusers.StableDiffusionXLPipeline(
        vae=vae(4), unet=unet, scheduler=diffusers.DDIMScheduler(), add_watermarker=False, **none
    )
    pooled = {"pooled_prompt_embeds": torch.randn(1, 10), "negative_pooled_prompt_embeds": torch.randn(1, 10)}
    return pipe, {"negative_prompt_embeds": torch.randn(1, WORDS, WIDTH), "height": 16, "width": 16, **pooled}


def stable_diffusion_3() -> tuple[Any, dict[str, Any]]:
    """Return a pipeline of the kind of Stable Diffusion 3.5: joint attention, the picture first."""
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=1, in_channels=4, out_channels=4, num_layers=2, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=WIDTH, caption_projection_dim=16, pooled_projection_dim=12,
        pos_embed_max_size=16, dual_attention_layers=(0,),
    )  # fmt: skip
    none = without(*(f"{part}{n}" for part in ("text_encoder", "tokenizer") for n in ("", "_2", "_3")))
    pipe = diffusers.StableDiffusion3Pipeline(
        transformer=transformer, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), vae=vae(4), **none
    )
    pooled = {"pooled_prompt_embeds": torch.randn(1, 12), "negative_pooled_prompt_embeds": torch.randn(1, 12)}
    return pipe, {"negative_prompt_embeds": torch.randn(1, WORDS, WIDTH), "height": 8, "width": 8, **pooled}


def flux() -> tuple[Any, dict[str, Any]]:
    """Return a pipeline of the kind of Flux: joint attention, the text first, in double and single blocks."""
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=WIDTH, pooled_projection_dim=12, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    none = without("text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2")
    pipe = diffusers.FluxPipeline(
        transformer=transformer, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), vae=vae(1), **none
    )
    return pipe, {"pooled_prompt_embeds": torch.randn(1, 12), "height": 16, "width": 16}


def wan(both: bool = False) -> tuple[Any, dict[str, Any]]:
    """Return a pipeline of films of the kind of Wan, with one transformer or with two."""

    def transformer() -> Any:
        return diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4,
            text_dim=WIDTH, freq_dim=16, ffn_dim=32, num_layers=2, rope_max_seq_len=32,
        )  # fmt: skip

    codec = diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    )  # fmt: skip
    second = {"transformer_2": transformer(), "boundary_ratio": 0.5} if both else {}
    pipe = diffusers.WanPipeline(
        vae=codec, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(), transformer=transformer(), **second,
        **without("tokenizer", "text_encoder"),
    )  # fmt: skip
    return pipe, {"negative_prompt_embeds": torch.randn(1, WORDS, WIDTH), "height": 32, "width": 48, "num_frames": 5}


def made(make: Callable[..., tuple[Any, dict[str, Any]]], **options: Any) -> tuple[Any, Callable[[], Tensor]]:
    """Return a pipeline with attention far from uniform, and a function that runs it from the same noise."""
    torch.manual_seed(0)
    pipe, given = make(**options)
    pipe.set_progress_bar_config(disable=True)
    words = torch.randn(1, WORDS, WIDTH)
    with torch.no_grad():
        for model in pipe.components.values():
            for name, weights in model.named_parameters() if isinstance(model, nn.Module) else ():
                if any(part in name for part in ("to_q.", "to_k.", "add_q_proj.", "add_k_proj.")):
                    weights *= 5

    def run() -> Tensor:
        noise = torch.Generator().manual_seed(1)
        settings = {"num_inference_steps": STEPS, "output_type": "latent", "return_dict": False}
        return torch.as_tensor(pipe(prompt_embeds=words, generator=noise, **settings, **given)[0])

    return pipe, run


@contextmanager
def dense_attention(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[Tensor]]]:
    """Collect the dense weights of each pass by the path of the module that computes them."""
    found: dict[str, list[Tensor]] = {}
    running: list[str] = []
    names = [name for name, _ in model.named_modules() if "attn" in name.rpartition(".")[2]]
    modules = {name: model.get_submodule(name) for name in names}
    hooks = [one.register_forward_pre_hook(lambda *_, n=name: running.append(n)) for name, one in modules.items()]
    real = F.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        assert options.get("attn_mask") is None
        module = modules[running[-1]]
        if isinstance(module, diffusers.models.attention_processor.Attention):  # dense attention of diffusers itself
            weights = module.get_attention_scores(query.flatten(0, 1), key.flatten(0, 1)).view(*query.shape[:3], -1)
        else:
            weights = (query.double() @ key.double().mT / query.shape[-1] ** 0.5).softmax(dim=-1)
        found.setdefault(running[-1], []).append(weights)
        return real(query, key, value, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    yield found
    monkeypatch.undo()
    for hook in hooks:
        hook.remove()


@pytest.mark.parametrize(
    ("make", "ending", "keys", "queries", "passes"),
    [
        (stable_diffusion, "attn2", (2, 5), slice(None), 1),
        (stable_diffusion_xl, "attn2", (2, 5), slice(None), 1),
        (stable_diffusion_3, ".attn", (2 - WORDS, 5 - WORDS), slice(0, -WORDS), 1),
        (flux, "attn", (2, 5), slice(WORDS, None), 1),
        (wan, "attn2", (2, 5), slice(None), 2),
    ],
)
def test_maps_of_words_summed_over_steps(
    make: Any, ending: str, keys: tuple[int, ...], queries: slice, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, run = made(make)
    model = pipe.unet if "unet" in pipe.components else pipe.transformer
    layers = [name for name, _ in model.named_modules() if name.endswith(ending)]
    expected = run()
    with attlas.record(
        pipe, layers=layers, keep="statistics", statistics=[stats.KeyMaps(keys, queries)], sum_passes=passes
    ) as atlas:
        out = run()
    assert torch.equal(out, expected)
    assert sorted(entry.name for entry in atlas.entries) == sorted(layers * passes)
    assert all(entry.matrix is None for entry in atlas.entries)
    with dense_attention(model, monkeypatch) as dense:
        run()
    for entry in atlas.entries:
        steps = dense[entry.name][entry.call :: passes]
        assert len(steps) == STEPS
        wanted = torch.stack(steps).sum(dim=0)[:, :, queries][..., list(keys)].float()
        assert float(wanted.std()) > 0.01
        torch.testing.assert_close(entry.statistics["key_maps"], wanted, rtol=0, atol=2e-5)


def test_a_pipeline_with_two_transformers_is_recorded_by_their_names() -> None:
    pipe, run = made(wan, both=True)
    with attlas.record(pipe, layers=["transformer.blocks.0.attn2", "transformer_2.blocks.0.attn2"]) as atlas:
        run()
    assert {entry.name for entry in atlas.entries} == {f"transformer{n}.blocks.0.attn2" for n in ("", "_2")}
    assert atlas.entries[0].shape[-1] == WORDS


def test_a_pipeline_without_a_denoiser_is_refused() -> None:
    pipe, _ = made(stable_diffusion)
    pipe.unet = None
    with pytest.raises(attlas.errors.AttlasError, match="model must be an nn"):
        attlas.record(pipe)


def test_the_example_and_the_page_run() -> None:
    found = example("words_in_pictures")
    assert found["modules"] == 4
    assert found["mass"] == pytest.approx(found["modules"] * found["steps"] / WORDS, rel=0.5)
    run_page("diffusers")
