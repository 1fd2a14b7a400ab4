"""Where does a diffusion model look for each word? Maps of words, summed over the steps while the pipeline runs.

No dense matrix is kept: each attention adds the weights of its places on two words to a sum, and forgets its queries
and keys. The pipeline is Stable Diffusion's own architecture, tiny and with random weights: nothing is downloaded.

    python examples/words_in_pictures.py
"""

import argparse
import warnings
from typing import Any

import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from torch.nn import functional as F

import attlas
from attlas import stats

WORDS, WIDTH, SIDE = 7, 24, 16


def pipeline() -> StableDiffusionPipeline:
    """Return a pipeline of 16 x 16 latents with random weights."""
    blocks: Any = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
                   "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}  # fmt: skip
    unet = UNet2DConditionModel(
        sample_size=SIDE, block_out_channels=(16, 32), layers_per_block=1, cross_attention_dim=WIDTH,
        attention_head_dim=2, norm_num_groups=4, **blocks,
    )  # fmt: skip
    vae = AutoencoderKL(
        block_out_channels=(8,), norm_num_groups=4, down_block_types=("DownEncoderBlock2D",),
        up_block_types=("UpDecoderBlock2D",), latent_channels=4,
    )  # fmt: skip
    none: Any = dict.fromkeys(("text_encoder", "tokenizer", "safety_checker", "feature_extractor"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # about settings of the schedule
        pipe = StableDiffusionPipeline(
            vae=vae, unet=unet, scheduler=DDIMScheduler(), requires_safety_checker=False, **none
        )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=3, help="steps of denoising (default: %(default)s)")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    pipe, words = pipeline(), [2, 5]
    cross = [name for name, _ in pipe.unet.named_modules() if name.endswith("attn2")]
    settings: Any = {"layers": cross, "statistics": [stats.KeyMaps(words)], "keep": "statistics", "sum_passes": 1}
    with attlas.record(pipe, **settings) as atlas:
        pipe(
            prompt_embeds=4 * torch.randn(1, WORDS, WIDTH), negative_prompt_embeds=torch.randn(1, WORDS, WIDTH),
            height=SIDE, width=SIDE, num_inference_steps=options.steps, output_type="latent",
        )  # fmt: skip
    total = torch.zeros(len(words), SIDE, SIDE)
    for entry in atlas.entries:
        maps = entry.statistics["key_maps"][1].mean(dim=0).T  # of the prompt, and not of the empty one
        side = round(maps.shape[-1] ** 0.5)
        total += F.interpolate(maps.view(1, len(words), side, side), SIDE, mode="bilinear")[0]
        print(f"  {entry.name}: {side} x {side} places")
    places = total.flatten(1).argmax(dim=1).tolist()
    for word, place in zip(words, places, strict=True):
        print(f"  word {word}: most at row {place // SIDE}, column {place % SIDE}")
    return {"modules": float(len(atlas.entries)), "mass": float(total.mean()), "steps": float(options.steps)}


if __name__ == "__main__":
    main()
