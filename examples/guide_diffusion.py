"""Attend-and-Excite at 64 x 64: a picture model's latents follow the gradient of its cross-attention.

Guidance asks that each word of a prompt is looked at by some place of the picture: the largest weight in the word's
column. With stored maps this is done at 16 x 16; here the maps of the widest layers, 4,096 places by 77 words, are
never stored, and their gradient comes from tiles. The model is diffusers' own, tiny and with random weights: nothing is
downloaded.

    python examples/guide_diffusion.py
"""

import argparse
from typing import Any

import torch
from diffusers import DDIMScheduler, UNet2DConditionModel
from torch import Tensor

import attlas
from attlas import stats

WORDS, WIDTH = 77, 16


class Cross:
    """An attention processor of diffusers that pools by attlas and keeps the lazy matrices of cross-attention."""

    def __init__(self) -> None:
        self.matrices: list[attlas.AttentionMatrix] = []

    def __call__(
        self, attn: Any, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None, *_: Any, **__: Any
    ) -> Tensor:
        words = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        tokens = attn.to_q(hidden_states), attn.to_k(words), attn.to_v(words)
        q, k, v = (t.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for t in tokens)
        A = attlas.attend(q, k)
        if encoder_hidden_states is not None:
            self.matrices.append(A)
        out = (A @ v).transpose(1, 2).flatten(-2)
        return attn.to_out[1](attn.to_out[0](out))


def model() -> UNet2DConditionModel:
    """Return a denoiser of 64 x 64 latents with random weights."""
    blocks: Any = {"down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"),
                   "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D")}  # fmt: skip
    unet = UNet2DConditionModel(
        sample_size=64, block_out_channels=(16, 16), layers_per_block=1, cross_attention_dim=WIDTH,
        attention_head_dim=8, norm_num_groups=4, mid_block_type=None, **blocks,
    )  # fmt: skip
    return unet.eval().requires_grad_(False)


def neglect(matrices: list[attlas.AttentionMatrix], words: list[int]) -> Tensor:
    """Return how far the most neglected word is from being looked at with a weight of 1."""
    heads = [stats.column_max(A, heads="mean")[0, words] for A in matrices if A.shape[-2] == 64 * 64]
    return 1.0 - torch.stack(heads).mean(dim=0).min()


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=2, help="steps of denoising (default: %(default)s)")
    parser.add_argument("--guidance", type=float, default=1.0, help="length of a step (default: %(default)s)")
    options = parser.parse_args(argv)
    torch.manual_seed(0)
    unet, scheduler, seen = model(), DDIMScheduler(), Cross()
    unet.set_attn_processor(seen)
    prompt, latents, words = 4 * torch.randn(1, WORDS, WIDTH), torch.randn(1, 4, 64, 64), [2, 5]
    scheduler.set_timesteps(options.steps)
    before, after = 0.0, 0.0
    for time in scheduler.timesteps:
        latents = latents.detach().requires_grad_()
        seen.matrices.clear()
        unet(latents, time, prompt)
        loss = neglect(seen.matrices, words)
        (slope,) = torch.autograd.grad(loss, latents)
        before = float(loss.detach())
        with torch.no_grad():
            latents = latents - options.guidance * slope / slope.norm()
            seen.matrices.clear()
            noise = unet(latents, time, prompt).sample
            after = float(neglect(seen.matrices, words))
            latents = scheduler.step(noise, time, latents).prev_sample
        print(f"  step {int(time):4}: neglect of the words {before:.4f}, after guidance {after:.4f}")
    return {"before": before, "after": after, "cells": float(seen.matrices[0].shape[-2] * WORDS)}


if __name__ == "__main__":
    main()
