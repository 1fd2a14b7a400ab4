"""The mask function: what it recognises, what it costs, and that it equals transformers' own."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import masking_utils

from attlas.huggingface import LazyMask, attention_mask
from attlas.huggingface.masks import mask_of
from attlas.masks import Causal, Mask

RULES = {
    "causal": masking_utils.causal_mask_function,
    "everything": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(3),
    "both sides": masking_utils.sliding_window_bidirectional_mask_function(2),
    "chunks": masking_utils.chunked_causal_mask_function(4, torch.tensor([0, 2])),
    "prefix": masking_utils.or_masks(masking_utils.causal_mask_function, lambda b, h, q, k: (q < 4) & (k < 4)),
}
PLACES = [(9, 9, 0, 0), (1, 9, 8, 0), (3, 9, 6, 0), (2, 5, 8, 5), (4, 12, 3, 0)]
PADDING = {
    "none": None,
    "left": [[1] * 12, [0, 0, 0] + [1] * 9],
    "right": [[1] * 12, [1] * 5 + [0] * 7],
    "holes": [[1, 0] * 6, [1] * 12],
    "nothing": [[0] * 12, [1] * 12],
    "short": [[1] * 7, [1] * 7],
}


def theirs(**given: Any) -> Tensor:
    """Return the mask that transformers makes for eager attention, True where a pair may attend."""
    mask = masking_utils.sdpa_mask(**given, allow_is_causal_skip=False)
    assert mask is not None
    return mask


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("places", PLACES, ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_equals_the_mask_of_transformers(rule: str, places: tuple[int, int, int, int], padding: str) -> None:
    m, n, first_query, first_key = places
    given = {
        "batch_size": 2,
        "q_length": m,
        "kv_length": n,
        "q_offset": first_query,
        "kv_offset": first_key,
        "mask_function": RULES[rule],
        "attention_mask": None if PADDING[padding] is None else torch.tensor(PADDING[padding]).bool(),
    }
    ours = attention_mask(**given)
    assert ours.shape == (2, 1, m, n)
    assert torch.equal(ours.allowed(), theirs(**given).expand(2, 1, m, n))
    # A model that computes with it gets the numbers of eager attention.
    assert torch.equal(ours + 0.0, masking_utils.eager_mask(**given).expand(2, 1, m, n))


def test_known_rules_skip_whole_tiles() -> None:
    common = {"batch_size": 1, "q_length": 2, "kv_length": 9, "q_offset": 7}
    assert attention_mask(**common).mask.name() == "Causal(offset=7)"
    window = attention_mask(**common, mask_function=masking_utils.sliding_window_causal_mask_function(4))
    assert window.mask.name() == "Window(3, 0, offset=7)"
    assert attention_mask(**common, mask_function=masking_utils.bidirectional_mask_function).mask is None
    left = attention_mask(**common, attention_mask=torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1]]))
    assert left.mask.name() == "Causal(offset=7) & Padding(7, side='left')"


def test_rules_of_single_numbers_are_vectorised() -> None:
    def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.stack([i, j]).max() < 5  # reduces: only right for one pair at a time

    mask = attention_mask(batch_size=1, q_length=8, kv_length=8, mask_function=rule, use_vmap=True)
    expected = torch.zeros(8, 8, dtype=torch.bool)
    expected[:5, :5] = True
    assert torch.equal(mask.allowed()[0, 0], expected)
    assert torch.equal((mask == 0)[0, 0], expected)


def test_a_static_cache_passes_its_length_as_a_tensor() -> None:
    mask = attention_mask(batch_size=1, q_length=1, kv_length=6, q_offset=torch.tensor(3))
    assert mask.allowed().tolist() == [[[[True] * 4 + [False] * 2]]]


def test_holds_no_numbers_until_someone_computes() -> None:
    mask = attention_mask(batch_size=64, q_length=100_000, kv_length=100_000)  # 640 GB, if it were stored
    for same in (
        mask.contiguous(),
        mask.detach(),
        mask.to(torch.float16),
        mask[:, :, :, :50_000],
        mask[:2],
        mask.clone(),
    ):
        assert isinstance(same, LazyMask)
        assert same is not mask or same.is_contiguous()
    assert mask[:, :, :, :50_000].shape == (64, 1, 100_000, 50_000)
    assert mask.to(torch.float16).dtype is torch.float16
    assert repr(mask) == "LazyMask(Causal(offset=0), shape=(64, 1, 100000, 100000), dtype=torch.float32)"
    assert not torch.is_nonzero(torch.tensor(mask.requires_grad))


def test_other_slices_are_written_out() -> None:
    mask = attention_mask(batch_size=1, q_length=4, kv_length=4)
    part = mask[:, :, 2:]
    assert not isinstance(part, LazyMask)
    assert (part == 0).tolist() == [[[[True, True, True, False], [True] * 4]]]


def test_feeding_it_back_keeps_the_mask() -> None:
    mask = attention_mask(batch_size=1, q_length=4, kv_length=4)
    assert isinstance(mask_of(mask, 4), Causal)
    assert isinstance(mask_of(mask.contiguous(), 4), Causal)


def test_own_masks_of_numbers() -> None:
    lowest = torch.finfo(torch.float32).min
    plain = torch.tensor([[0.0, lowest, lowest], [lowest, lowest, lowest]]).view(1, 1, 2, 3)
    mask = mask_of(plain, 2)
    assert isinstance(mask, Mask)
    assert not mask.log_weights()
    bias = plain.clone()
    bias[0, 0, 0, 0] = -1.5
    assert mask_of(bias, 3).log_weights()
