"""The mask function: what it recognises, what it costs, and that it equals transformers' own."""

from itertools import product
from typing import Any

import pytest
import torch
from tests.masks.conftest import make_tile
from torch import Tensor
from transformers import masking_utils

from attlas.huggingface import LazyMask, attention_mask, masks
from attlas.huggingface.masks import mask_of
from attlas.masks import BlockState, Mask

BLOCKS = torch.tensor([[-1, 0, 0, 0, -1, -1, 1, 1, 1, -1, -1, -1], [-1] * 4 + [0] * 4 + [-1] * 4])
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 0, 1]])


def packed(rule: Any, positions: Tensor = POSITIONS) -> Any:
    """Return the rule inside several texts in one row, as transformers builds it from positions."""
    ids = masking_utils.find_packed_sequence_indices(positions)
    if not hasattr(masking_utils, "packed_sequence_compatibility_function"):  # its name since transformers 5.23
        return masking_utils.and_masks(masking_utils.packed_sequence_mask_function(ids), rule)
    return masking_utils.packed_sequence_compatibility_function(rule, positions, ids)


RULES = {
    "causal": masking_utils.causal_mask_function,
    "everything": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(3),
    "both sides": masking_utils.sliding_window_bidirectional_mask_function(2),
    "chunks": masking_utils.chunked_causal_mask_function(4, torch.tensor([0, 2])),
    "prefix": masking_utils.or_masks(masking_utils.causal_mask_function, lambda b, h, q, k: (q < 4) & (k < 4)),
    "blocks of images": masking_utils.or_masks(
        masking_utils.causal_mask_function, masking_utils.blockwise_overlay(BLOCKS)
    ),
    "blocks in a window": masking_utils.and_masks(
        masking_utils.or_masks(masking_utils.causal_mask_function, masking_utils.blockwise_overlay(BLOCKS)),
        masking_utils.sliding_window_overlay(3),
    ),
    "real keys": masking_utils.and_masks(
        masking_utils.causal_mask_function,
        masking_utils.padding_mask_function(torch.arange(24).reshape(2, 12) % 5 > 0),
    ),
    "displaced": masking_utils.add_offsets_to_mask_function(masking_utils.causal_mask_function, 2, 1),
    "no window": masking_utils.sliding_window_causal_mask_function(0),
    "all or nothing": masking_utils.or_masks(
        masking_utils.bidirectional_mask_function, masking_utils.causal_mask_function
    ),
    "everything of everything": masking_utils.and_masks(
        masking_utils.bidirectional_mask_function, masking_utils.bidirectional_mask_function
    ),
}
PACKED = {
    "packed": packed(masking_utils.causal_mask_function),
    "packed, everything": packed(masking_utils.bidirectional_mask_function),
    "packed, window": packed(masking_utils.sliding_window_causal_mask_function(2)),
    "packed, both sides": packed(masking_utils.sliding_window_bidirectional_mask_function(1)),
    "packed, chunks": packed(masking_utils.chunked_causal_mask_function(2, torch.zeros(2, dtype=torch.int64))),
    "packed, own rule": packed(lambda b, h, q, k: (q - k) % 2 == 0),
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


@pytest.mark.parametrize("rule", PACKED)
def test_packed_texts_equal_the_mask_of_transformers(rule: str) -> None:
    given = {"batch_size": 2, "q_length": 9, "kv_length": 9, "mask_function": PACKED[rule]}
    ours = attention_mask(**given)
    assert torch.equal(ours.allowed(), theirs(**given, q_offset=0, kv_offset=0, attention_mask=None))


def test_positions_that_do_not_grow_by_one_are_asked_as_they_are() -> None:
    positions = torch.tensor([[0, 2, 1, 0, 1]])
    ids = torch.tensor([[0, 0, 0, 1, 1]])
    if not hasattr(masking_utils, "packed_sequence_compatibility_function"):
        pytest.skip("this transformers never asks a rule for the positions of a packed text")
    rule = masking_utils.packed_sequence_compatibility_function(masking_utils.causal_mask_function, positions, ids)
    given = {"batch_size": 1, "q_length": 5, "kv_length": 5, "mask_function": rule}
    ours = attention_mask(**given)
    assert "from_function" in ours.mask.name()
    assert torch.equal(ours.allowed(), theirs(**given, q_offset=0, kv_offset=0, attention_mask=None))


NAMES = {
    "causal": "Causal(offset=0)",
    "window": "Window(2, 0, offset=0)",
    "both sides": "Window(2, 2, offset=0)",
    "chunks": "Documents((2, 9), query_ids=(2, 9)) & Causal(offset=0)",
    "prefix": "(Causal(offset=0) | from_function(<lambda>))",
    "blocks of images": "(Causal(offset=0) | Documents((2, 9), query_ids=(2, 9)))",
    "blocks in a window": "(Causal(offset=0) | Documents((2, 9), query_ids=(2, 9))) & Window(2, None, offset=0)",
    "real keys": "Causal(offset=0) & from_tensor(bool (2, 1, 1, 9))",
    "displaced": "Causal(offset=1)",
    "no window": "from_function(<lambda>) & Causal(offset=0)",
}
PACKED_NAMES = {
    "packed": "Documents((2, 9)) & Causal(offset=0)",
    "packed, everything": "Documents((2, 9))",
    "packed, window": "Documents((2, 9)) & Window(1, 0, offset=0)",
    "packed, both sides": "Documents((2, 9)) & Window(1, 1, offset=0)",
    "packed, chunks": "Documents((2, 9)) & from_function(<lambda>)",
}


@pytest.mark.parametrize("rule", NAMES | PACKED_NAMES)
def test_known_rules_skip_whole_tiles(rule: str) -> None:
    if rule == "packed, chunks" and not hasattr(masking_utils, "packed_sequence_compatibility_function"):
        pytest.skip("this transformers counts chunks from the start of the row")
    given = {"batch_size": 2, "q_length": 9, "kv_length": 9, "mask_function": (RULES | PACKED)[rule]}
    assert attention_mask(**given).mask.name() == (NAMES | PACKED_NAMES)[rule]
    # Where transformers would vectorise a rule because it does not know it, a known one is known all the same.
    assert attention_mask(**given, use_vmap=True).mask.name() == (NAMES | PACKED_NAMES)[rule]


@pytest.mark.parametrize("rule", ["chunks", "blocks of images", "blocks in a window", "packed"])
def test_known_rules_compute_less(rule: str) -> None:
    n, blocks = 4096, torch.full((1, 4096), -1)
    blocks[:, :64] = 0
    rules = {
        "chunks": masking_utils.chunked_causal_mask_function(256, torch.zeros(1, dtype=torch.int64)),
        "blocks of images": masking_utils.or_masks(
            masking_utils.causal_mask_function, masking_utils.blockwise_overlay(blocks)
        ),
        "blocks in a window": masking_utils.and_masks(
            masking_utils.or_masks(masking_utils.causal_mask_function, masking_utils.blockwise_overlay(blocks)),
            masking_utils.sliding_window_overlay(256),
        ),
        "packed": packed(masking_utils.causal_mask_function, torch.arange(n)[None] % 256),
    }
    mask = attention_mask(batch_size=1, q_length=n, kv_length=n, mask_function=rules[rule]).mask
    tiles = {BlockState.EMPTY: 0, BlockState.PARTIAL: 0, BlockState.FULL: 0}
    for i, j in product(range(0, n, 256), repeat=2):
        tiles[mask.coverage(make_tile(n, n, range(i, i + 256), range(j, j + 256)))] += 1
    assert tiles[BlockState.EMPTY] >= (120 if rule == "blocks of images" else 225)


def test_parts_that_have_changed_inside_are_functions_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(masks.MASK_PARTS, "sliding_window_overlay", {"another_name"})
    rule = masking_utils.sliding_window_causal_mask_function(3)
    given = {"batch_size": 1, "q_length": 9, "kv_length": 9, "mask_function": rule}
    ours = attention_mask(**given)
    assert ours.mask.name() == "from_function(<lambda>) & Causal(offset=0)"
    assert torch.equal(ours.allowed(), theirs(**given, q_offset=0, kv_offset=0, attention_mask=None))


def test_offsets_and_padding_in_names() -> None:
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


@pytest.mark.parametrize("use_vmap", [False, True])
@pytest.mark.parametrize("queries", [1, 3])
def test_each_layer_adds_the_same_numbers(queries: int, use_vmap: bool) -> None:
    """The row of one query is kept for the next layer, and no layer can change it for another."""
    padding = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
    given = {"batch_size": 2, "q_length": queries, "kv_length": 6, "q_offset": 6 - queries, "attention_mask": padding}

    def rule(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.stack([i - j, j - 1]).min() >= 0  # reduces: only right for one pair at a time

    mask = attention_mask(**given, mask_function=rule, use_vmap=use_vmap)
    i, j = torch.arange(6 - queries, 6)[:, None], torch.arange(6)
    seen = (j <= i) & (j >= 1) & padding[:, None, None].bool()
    wanted = torch.zeros(2, 1, queries, 6).masked_fill(~seen, torch.finfo(torch.float32).min)
    x = torch.randn(2, 4, queries, 6)
    for _ in range(3):
        torch.testing.assert_close(x + mask, x + wanted, rtol=0, atol=0)
        numbers = mask + 0.0
        numbers[:] = 7.0
        mask[0].fill_(7.0)  # a view of numbers that nothing else sees


def test_a_mask_that_allows_all_adds_zeros() -> None:
    mask = attention_mask(batch_size=1, q_length=1, kv_length=5, q_offset=4)
    assert mask.mask is None
    x = torch.randn(1, 2, 1, 5, requires_grad=True)
    out = x + mask
    assert torch.equal(out, x)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.ones_like(x))
    assert torch.equal(torch.cat([mask, mask], dim=-1), torch.zeros(1, 1, 1, 10))


def test_own_masks_of_numbers() -> None:
    lowest = torch.finfo(torch.float32).min
    plain = torch.tensor([[0.0, lowest, lowest], [lowest, lowest, lowest]]).view(1, 1, 2, 3)
    mask = mask_of(plain, 2)
    assert isinstance(mask, Mask)
    assert not mask.log_weights()
    bias = plain.clone()
    bias[0, 0, 0, 0] = -1.5
    assert mask_of(bias, 3).log_weights()
