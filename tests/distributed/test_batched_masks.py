"""Masks and scores that ranks tell each other, joined: the whole says of each part what the part says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.contracts.conftest import MASKS, Sizes, build
from torch import Tensor, nn

import attlas
from attlas import RecordingError
from attlas.distributed.batched_masks import joined_mask, joined_score
from attlas.distributed.recordings import described, joined
from attlas.foundation.tiles import Tile
from attlas.masks import Causal, Documents, Heads, Mask, Padding, Prefix, Selected, Window, from_tensor, runs_of
from attlas.matrix import softmax_matrix
from attlas.recording.atlas.serialization import class_named, mask_from, mask_spec, score_from, score_spec

SIZES = Sizes(m=6, n=9, heads=2, batch=3)


def put(name: str, t: Tensor) -> dict[str, Any]:
    return {"t": t}


def take(ref: Any) -> Tensor:
    return ref["t"]


def spec_of(mask: Mask, shape: tuple[int, int, int, int]) -> Any:
    return mask_spec(mask, put, lambda mask: runs_of(mask, *shape))


def cells(mask: Mask | None, shape: tuple[int, int, int, int]) -> Tensor:
    batch, heads, m, n = shape
    ids = torch.arange(batch), torch.arange(heads)
    at = Tile(*map(range, shape), m, n, *ids, torch.device("cpu"))
    return torch.ones(shape, dtype=torch.bool) if mask is None else mask.allows(at).expand(shape)


def of_sequence(spec: Any, number: int, owner: Any = None) -> Any:
    """Return plain data of a mask as a rank has it that has one sequence of the batch."""
    if not isinstance(spec, dict):
        return spec
    if isinstance(t := spec.get("t"), Tensor):
        axis = owner.batch_axis(t)
        return spec if axis is None or t.shape[axis] == 1 else {"t": t.narrow(axis, number, 1)}
    owner = class_named(spec["class"]) if "class" in spec else owner
    return {name: of_sequence(value, number, owner) for name, value in spec.items()}


@pytest.mark.parametrize("name", [name for name in MASKS if name not in ("none", "function", "own")])
def test_a_mask_says_which_axis_is_the_batch(name: str) -> None:
    """Its tensors, cut along the axis that it names, are the mask of one sequence; joined, they are the mask again."""
    mask, shape = build("ScaledDot", name, SIZES), (SIZES.batch, SIZES.heads, SIZES.m, SIZES.n)
    mask = attlas.attend(mask.q, mask.k, mask=mask.mask).problem.mask
    whole, spec = cells(mask, shape), spec_of(mask, shape)
    if "function" in name:
        parts = [spec_of(from_tensor(whole[b : b + 1]), (1, *shape[1:])) for b in range(SIZES.batch)]
    else:
        parts = [of_sequence(spec, b) for b in range(SIZES.batch)]
    for b, part in enumerate(parts):
        assert torch.equal(cells(mask_from(part, take), (1, *shape[1:])), whole[b : b + 1])
    joined = mask_from(joined_mask(parts, [1] * SIZES.batch, 0, shape), take)
    assert torch.equal(cells(joined, shape), whole)
    assert [type(score) for score in joined.log_weights()] == [type(score) for score in mask.log_weights()]
    if "function" not in name:
        assert joined.name() == mask.name()


@pytest.mark.parametrize("name", [name for name in MASKS if "additive" not in name])
@pytest.mark.parametrize("axis", [0, 1])
def test_runs_of_parts_are_joined(name: str, axis: int) -> None:
    """What parts allow is joined, whatever form each has."""
    shape = (3, 2, 6, 9)
    case = build("ScaledDot", name, SIZES)
    whole = cells(attlas.attend(case.q, case.k, mask=case.mask).problem.mask, shape)
    parts, part = [], [*shape]
    part[axis] = 1
    for number in range(shape[axis]):
        own = from_tensor(whole.narrow(axis, number, 1))
        parts.append(spec_of(own if number else runs_of(own, *part), tuple(part)))
    joined = joined_mask(parts, [1] * shape[axis], axis, shape)
    assert torch.equal(cells(mask_from(joined, take), shape), whole)


def test_lengths_are_told_for_parts_without_padding() -> None:
    parts = [spec_of(Causal() & Padding([4, 9]), (2, 1, 9, 9)), spec_of(Causal(), (1, 1, 9, 9))]
    joined = mask_from(joined_mask(parts, [2, 1], 0, (3, 1, 9, 9)), take)
    assert joined.name() == "Causal() & Padding([4, 9, 9])"


@pytest.mark.parametrize(
    "mask",
    [
        Documents(torch.arange(18).view(3, 6) // 4, torch.arange(12).view(3, 4) // 3),
        Documents(torch.arange(6) // 2, torch.arange(12).view(3, 4) // 3),
        Prefix([1, 4, 0]),
        from_tensor(torch.rand(3, 4, 6, generator=torch.Generator().manual_seed(0)) < 0.5),
        Selected(torch.arange(24).view(3, 4, 2) % 5),
    ],
    ids=lambda mask: mask.name(),
)
def test_masks_of_sequences_are_joined_in_their_form(mask: Mask) -> None:
    whole = cells(mask, (3, 2, 4, 6))
    parts = [of_sequence(spec_of(mask, whole.shape), b) for b in range(3)]
    assert torch.equal(torch.cat([cells(mask_from(part, take), (1, 2, 4, 6)) for part in parts]), whole)
    joined = joined_mask(parts, [1, 1, 1], 0, (3, 2, 4, 6))
    assert joined["class"] == type(mask).__name__
    assert torch.equal(cells(mask_from(joined, take), (3, 2, 4, 6)), whole)


def test_numbers_of_texts_are_joined() -> None:
    """Numbers that are added have the axes (batch, m, n), as booleans may have."""
    numbers = torch.randn(3, 4, 5)
    parts = [spec_of(from_tensor(part), (len(part), 2, 4, 5)) for part in numbers.split([2, 1])]
    joined = mask_from(joined_mask(parts, [2, 1], 0, (3, 2, 4, 5)), take)
    q, k = torch.randn(3, 2, 4, 3), torch.randn(3, 2, 5, 3)
    dense = [attlas.attend(q, k, mask=mask).to_dense() for mask in (joined, from_tensor(numbers))]
    assert torch.equal(*dense)


def test_parts_where_one_has_fewer_settings() -> None:
    one, other = Documents([0, 0, 1]), Documents([0, 0, 1], [0, 1, 1])
    shape = (1, 1, 3, 3)
    for masks in ((one, other), (other, one)):
        joined = joined_mask([spec_of(mask, shape) for mask in masks], [1, 1], 0, (2, 1, 3, 3))
        wanted = torch.cat([cells(mask, shape) for mask in masks])
        assert torch.equal(cells(mask_from(joined, take), (2, 1, 3, 3)), wanted)


def test_each_part_counts_its_own_heads() -> None:
    own = Heads({0: Window(0, 0)}, Causal())
    parts = [spec_of(own, (1, 2, 5, 5))] * 2
    joined = mask_from(joined_mask(parts, [2, 2], 1, (1, 4, 5, 5)), take)
    wanted = torch.cat([cells(own, (1, 2, 5, 5))] * 2, dim=1)
    assert torch.equal(cells(joined, (1, 4, 5, 5)), wanted)
    # Parts of a batch have all heads.
    assert mask_from(joined_mask(parts, [1, 1], 0, (2, 2, 5, 5)), take).name() == own.name()


def test_numbers_of_different_masks_are_refused() -> None:
    shape = (1, 1, 3, 3)
    parts = [spec_of(mask, shape) for mask in (from_tensor(torch.randn(3, 3)), Causal())]
    with pytest.raises(RecordingError, match="must be of one form on all ranks"):
        joined_mask(parts, [1, 1], 0, (2, 1, 3, 3))


@pytest.mark.parametrize("learned", [False, True])
def test_a_score_with_a_temperature_is_joined(learned: bool) -> None:
    factor = torch.tensor(0.5)
    score = (nn.Parameter(factor) if learned else factor) * attlas.ScaledDot()
    spec = score_spec(score, put)
    again = score_from(joined_score([spec, spec], [1, 2], 0), take)
    q = torch.randn(3, 1, 4, 2)
    assert torch.equal(attlas.attend(q, q, score=again).to_dense(), attlas.attend(q, q, score=score).to_dense())
    assert isinstance(again.factor, nn.Parameter) is learned
    per_head = score_spec(torch.tensor([0.5, 2.0]) * attlas.ScaledDot(), put)
    assert joined_score([per_head, per_head], [1, 1], 1) is None


def test_tables_of_a_bias_are_joined() -> None:
    table = torch.randn(3, 2, 4, 5)
    parts = [score_spec(attlas.TensorBias(part), put) for part in table.split([1, 2])]
    joined = score_from(joined_score(parts, [1, 2], 0), take)
    assert torch.equal(joined.t, table)
    parts = [score_spec(attlas.TensorBias(part), put) for part in table.split([1, 1], dim=1)]
    assert torch.equal(score_from(joined_score(parts, [1, 1], 1), take).t, table)


def test_masks_of_your_own_name_no_axis() -> None:
    class Even(Mask):
        def allows(self, at: Tile) -> Tensor:
            return at.j % 2 == 0

    assert Even.batch_axis(torch.zeros(3)) is None
    assert attlas.Score.batch_axis(torch.zeros(3, 1, 2, 2)) is None


def table(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1))


def choices() -> Tensor:
    return table(2, 2, 6, 6).argsort(-1)[..., :3].sort(-1).values


OF_RANKS: dict[str, tuple[int, dict[str, Any]]] = {
    "function": (2, {"mask": attlas.from_function(lambda b, h, i, j: j + 2 * h <= i + 2)}),
    "function of batches": (2, {"mask": attlas.from_function(lambda b, h, i, j: (j + 2 * h <= i + 2) | (j == b))}),
    "tensor": (2, {"mask": from_tensor((table(2, 2, 6, 6) > 0.3) | torch.eye(6, dtype=torch.bool))}),
    "runs": (2, {"mask": runs_of(from_tensor(table(2, 2, 6, 6) > 0.3), 2, 2, 6, 6)}),
    "both": (2, {"mask": Causal() & attlas.from_function(lambda b, h, i, j: (j >= 2 * h) | (j == i))}),
    "bias": (2, {"score": attlas.ScaledDot() + attlas.TensorBias(table(2, 2, 6, 6))}),
    "bias of heads": (2, {"score": attlas.ScaledDot() + attlas.TensorBias(table(2, 6, 6))}),
    "bias of all": (2, {"score": attlas.ScaledDot() + attlas.TensorBias(table(6, 6))}),
    "heads": (2, {"mask": Heads({0: Window(0, 0)}, Causal())}),
    "another head": (2, {"mask": Heads({1: Window(0, 0)}, Causal())}),
    "tables of heads": (2, {"mask": Heads({1: from_tensor(table(2, 2, 6, 6) > 0.3)}, Causal())}),
    "groups": (4, {"mask": Selected(choices(), 1, 2)}),
    "one group": (2, {"mask": Selected(choices()[:, :1], 1, 2)}),
}


def of_two_ranks(local: int, heads: list[int], batch: int = 2, **options: Any) -> tuple[Tensor, Tensor]:
    """Return the weights that two ranks recorded of some of their heads, and those of the atlas of both."""
    parts = []
    for rank in (0, 1):
        generator = torch.Generator().manual_seed(rank)
        q, k = (torch.randn(batch, local, 6, 3, generator=generator) for _ in range(2))
        parts.append(attlas.attend(q, k, **options)[:, heads])
    told = {}
    for rank, A in enumerate(parts):
        numbers = tuple(local * rank + head for head in heads)
        atlas = attlas.Atlas([attlas.Entry("attn", 0, "self", 0, numbers, (0, 6), 0, tuple(A.shape), A)])
        told[rank] = described(atlas)
    found = joined(atlas, told, [[0, 1]])[0].entries[0].need_matrix()
    q, k = (torch.cat([getattr(A.problem, name) for A in parts], dim=1) for name in ("q", "k"))
    whole = softmax_matrix(replace(found.problem, q=q, k=k, versions=()), found.plan)
    return whole.to_dense(), torch.cat([A.to_dense() for A in parts], dim=1)


@pytest.mark.parametrize("name", OF_RANKS)
@pytest.mark.parametrize("chosen", ["all", "first", "last", "ends"])
def test_masks_of_the_heads_that_were_recorded(name: str, chosen: str) -> None:
    """Ranks share the heads, and record some of them: the tables of the others are left out."""
    local, options = OF_RANKS[name]
    heads = {"all": [*range(local)], "first": [0], "last": [local - 1], "ends": [0, local - 1]}[chosen]
    found, expected = of_two_ranks(local, heads, **options)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("score", [attlas.Alibi([0.5]), attlas.RelativeBias(1)])
def test_scores_with_numbers_of_heads_are_refused(score: Any) -> None:
    """Also where each rank has one head: its numbers are not those of the whole."""
    with pytest.raises(RecordingError, match="the same on all ranks"):
        of_two_ranks(1, [0], score=attlas.ScaledDot() + score)
