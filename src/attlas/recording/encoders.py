"""What an encoder gives to a decoder, and for how many beams."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def hidden_state(output: Any) -> Tensor | None:
    """Return the tensor in the output of an encoder that a decoder reads."""
    return output[0] if isinstance(output, tuple) else getattr(output, "lasthidden_state", None)


def count_beams(encoded: Tensor | None, given: Tensor | None) -> tuple[int, Tensor]:
    """Return how often `given` may have each sequence of `encoded`, and a boolean on its device: whether it has."""
    if encoded is None or given is None or not len(encoded):
        return 0, torch.tensor(False)
    beams = len(given) // len(encoded)
    repeated = encoded.repeat_interleave(beams, dim=0)
    if not beams or repeated.shape != given.shape or repeated.device != given.device:
        return 0, torch.tensor(False)
    return beams, (repeated == given).all()
