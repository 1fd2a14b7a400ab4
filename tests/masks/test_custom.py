"""Masks of functions: FlexAttention's predicates as they are, whether or not they broadcast."""

import numpy as np
import pytest
import torch

from attlas.errors import DeviceError, DtypeError, ShapeError
from attlas.masks import BlockState, Causal, from_function

M, N, BATCHES, HEADS = 7, 9, 2, 3
DOCUMENTS = torch.tensor([0, 0, 1, 1, 1, 2, 2, 3, 3])
BATCHED = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 3, 3], [0, 1, 1, 1, 2, 2, 2, 2, 2]])


def expected(rule) -> np.ndarray:
    """Ask for each pair alone, in Python numbers."""
    places = np.ndindex(BATCHES, HEADS, M, N)
    return np.array([bool(rule(*place)) for place in places]).reshape(BATCHES, HEADS, M, N)


BROADCASTING = {
    "causal": (lambda b, h, i, j: j <= i, lambda b, h, i, j: j <= i),
    "window a head": (lambda b, h, i, j: (i - j).abs() <= h, lambda b, h, i, j: abs(i - j) <= h),
    "batch only": (lambda b, h, i, j: b == 1, lambda b, h, i, j: b == 1),
    "documents": (
        lambda b, h, i, j: DOCUMENTS[i] == DOCUMENTS[j],
        lambda b, h, i, j: DOCUMENTS[i].item() == DOCUMENTS[j].item(),
    ),
    "documents of each batch": (
        lambda b, h, i, j: (BATCHED[b, i] == BATCHED[b, j]) & (i >= j),
        lambda b, h, i, j: BATCHED[b, i].item() == BATCHED[b, j].item() and i >= j,
    ),
    "where": (
        lambda b, h, i, j: torch.where(h == 0, i >= j, i <= j),
        lambda b, h, i, j: i >= j if h == 0 else i <= j,
    ),
    "integers": (lambda b, h, i, j: (i + j) % 2, lambda b, h, i, j: (i + j) % 2 == 1),
    "a constant": (lambda b, h, i, j: True, lambda b, h, i, j: True),
}

ONE_PAIR_ONLY = {
    # `.any()` over one pair is the pair; over a tile it would be the whole tile.
    "any": (
        lambda b, h, i, j: torch.stack([i == j, i == j + 2]).any(),
        lambda b, h, i, j: i == j or i == j + 2,
    ),
    "stack along the last axis": (
        lambda b, h, i, j: torch.stack([i - j, j - i], dim=-1).amax(-1) <= 1,
        lambda b, h, i, j: abs(i - j) <= 1,
    ),
    "a row of a table": (
        lambda b, h, i, j: (BATCHED[b] == BATCHED[b, i]).sum() > 2,
        lambda b, h, i, j: (BATCHED[b] == BATCHED[b, i]).sum().item() > 2,
    ),
    "one index": (lambda b, h, i, j: BATCHED[b][i] == 1, lambda b, h, i, j: BATCHED[b, i].item() == 1),
    "reshape": (lambda b, h, i, j: (i.reshape(1) >= j.reshape(1))[0], lambda b, h, i, j: i >= j),
}


@pytest.mark.parametrize("name", [*BROADCASTING, *ONE_PAIR_ONLY])
def test_function(name, tile, cells, dense):
    """Asked for whole tiles, for a part of one, and for single pairs."""
    mask_mod, rule = {**BROADCASTING, **ONE_PAIR_ONLY}[name]
    whole = expected(rule)
    assert np.array_equal(dense(from_function(mask_mod), M, N, BATCHES, HEADS), whole)
    at = tile(M, N, [6, 0, 3, 3], range(2, 5), batch_ids=[1], head_ids=[2, 0])
    assert np.array_equal(cells(from_function(mask_mod), at), whole[np.ix_([1], [2, 0], [6, 0, 3, 3], [2, 3, 4])])
    if name != "a constant":
        assert np.array_equal(dense(from_function(mask_mod, broadcasts=False), M, N, BATCHES, HEADS), whole)


def test_predicates_that_broadcast_are_called_with_whole_tiles(tile, cells):
    shapes = []

    def mask_mod(b, h, i, j):
        shapes.append(tuple(torch.broadcast_shapes(b.shape, h.shape, i.shape, j.shape)))
        return i >= j

    mask = from_function(mask_mod)
    for start in range(0, 100, 10):
        cells(mask, tile(100, 100, range(start, start + 10)))
    assert shapes.count((1, 1, 10, 100)) == 10
    assert len(shapes) <= 12  # and one comparison with single pairs
    shapes.clear()
    cells(from_function(mask_mod, broadcasts=False), tile(100, 100, range(10)))
    assert set(shapes) == {()}


def test_a_predicate_that_vmap_cannot_ask_is_called_with_whole_tiles(dense):
    def mask_mod(b, h, i, j):
        return torch.from_numpy(i.numpy() >= j.numpy())

    assert np.array_equal(dense(from_function(mask_mod), 5, 5)[0, 0], np.tri(5, dtype=bool))


def test_any_object_that_can_be_called(dense):
    class Near:
        def __call__(self, b, h, i, j):
            return i == j

    mask = from_function(Near())
    assert mask.name() == "from_function(Near)"
    assert np.array_equal(dense(mask, 3, 3)[0, 0], np.eye(3, dtype=bool))


def test_empty_tile_and_no_rule_for_whole_tiles(tile, cells):
    mask = from_function(lambda b, h, i, j: j <= i)
    assert mask.coverage(tile(4, 4)) is BlockState.PARTIAL
    assert cells(mask, tile(4, 4, range(2, 2))).shape == (1, 1, 0, 4)
    assert (mask & Causal()).coverage(tile(4, 4, range(1), range(2, 4))) is BlockState.EMPTY


def branches(b, h, i, j):
    if i >= j:
        return i - j < 3
    return i == j


def additive(b, h, i, j):
    return (i - j) * 0.5


def nothing(b, h, i, j):
    pass


def outside(b, h, i, j):
    return torch.zeros(2, dtype=torch.bool)[i] | (j > 0)


@pytest.mark.parametrize(
    ("make", "kind", "found"),
    [
        (lambda tile: from_function(torch.ones(3, 3)), DtypeError, "a Tensor, which cannot be called"),
        (
            lambda tile: from_function(branches).allows(tile(4, 4)),
            ShapeError,
            "RuntimeError: Boolean value of Tensor with more than one value is ambiguous",
        ),
        (lambda tile: from_function(additive).allows(tile(4, 4)), DtypeError, "numbers"),
        (lambda tile: from_function(nothing).allows(tile(4, 4)), DtypeError, "a NoneType"),
        (
            lambda tile: from_function(outside).allows(tile(4, 4)),
            ShapeError,
            "IndexError: index 2 is out of bounds for dimension 0 with size 2",
        ),
        (
            lambda tile: from_function(lambda b, h, i, j: torch.ones(3, dtype=torch.bool)).allows(tile(4, 4)),
            ShapeError,
            "ValueError: it returned shape (3,) for one pair",
        ),
    ],
)
def test_bad_input(make, kind, found, tile):
    with pytest.raises(kind) as error:
        make(tile)
    assert f"found: {found}\n" in str(error.value)


def test_errors_of_the_users_own_pass_as_they_are(tile):
    with pytest.raises(ZeroDivisionError):
        from_function(lambda b, h, i, j: 1 // 0).allows(tile(4, 4))


def test_tensors_of_another_device_are_refused_before_they_are_indexed(tile):
    elsewhere = torch.zeros(4, dtype=torch.int64, device="meta")

    def packed(b, h, i, j):
        return elsewhere[i] == elsewhere[j]

    with pytest.raises(DeviceError) as error:
        from_function(packed).allows(tile(4, 4))
    assert "found: it holds a tensor on meta, the matrix is on cpu\n" in str(error.value)
    assert "no picture at 8 queries × 8 keys: DeviceError: " in repr(from_function(packed))


def test_a_name_that_gets_its_value_later_does_no_harm(dense):
    def make():
        mask = from_function(lambda b, h, i, j: i >= later)
        later = 2
        return mask

    assert dense(make(), 3, 1)[0, 0, :, 0].tolist() == [False, False, True]
