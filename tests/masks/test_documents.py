"""Padding, Prefix and Documents against their definitions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.masks.conftest import check_coverage, draw_part
from tests.messages import refusal

from attlas.errors import DtypeError, ShapeError
from attlas.masks import BlockState, Documents, Mask, Padding, Prefix

SIZES = [(1, 1), (8, 8), (3, 11), (11, 3), (1, 9), (9, 1), (0, 4)]


@pytest.mark.parametrize(("m", "n"), SIZES)
@pytest.mark.parametrize("length", [0, 2, 100])
def test_prefix(m, n, length, dense):
    expected = np.broadcast_to(np.arange(n) < length, (2, 2, m, n))
    assert np.array_equal(dense(Prefix(length), m, n, batches=2, heads=2), expected)
    assert np.array_equal(dense(Prefix([length, length]), m, n, batches=2, heads=2), expected)


def test_lengths_of_chosen_sequences(tile, cells):
    mask = Padding(torch.tensor([[1, 2], [3, 4]]))  # two batch axes, flattened
    mask.check((2, 2), 1, 5, 5)
    at = tile(5, 5, batch_ids=[3, 1])
    assert cells(mask, at).sum(-1)[:, 0, 0].tolist() == [4, 2]
    packed = Documents(torch.tensor([[0, 0, 1], [0, 1, 1], [2, 2, 2]]))
    assert cells(packed, tile(3, 3, [1], batch_ids=[1, 0]))[:, 0, 0].tolist() == [
        [False, True, True],
        [True, True, False],
    ]


@settings(max_examples=100)
@given(data=st.data())
def test_coverage_of_lengths_is_exact(data, tile):
    n = data.draw(st.integers(1, 20))
    lengths = data.draw(st.lists(st.integers(0, n), min_size=1, max_size=3))
    mask = data.draw(
        st.sampled_from([Padding(lengths), Padding(lengths, side="left"), Prefix(lengths), Padding(lengths[0])])
    )
    _, columns = draw_part(data, 4, n)
    check_coverage(mask, tile(4, n, range(1, 3), columns, batch_ids=range(len(lengths))), exact=True)


@pytest.mark.parametrize(("m", "n"), [(8, 8), (3, 8), (1, 8), (1, 1), (0, 8)])
def test_documents_take_the_last_tokens_as_queries(m, n, dense):
    ids = np.random.default_rng(0).integers(0, 3, (2, n))
    expected = ids[:, None, n - m :, None] == ids[:, None, None]
    mask = Documents(torch.tensor(ids))
    mask.check((2,), 3, m, n)
    assert np.array_equal(dense(mask, m, n, batches=2), expected)


def test_documents_with_ids_of_queries(dense):
    rng = np.random.default_rng(1)
    ids, query_ids = rng.integers(0, 3, (1, 4)), rng.integers(0, 3, (1, 9))
    mask = Documents(ids[0].tolist(), query_ids=torch.tensor(query_ids[0], dtype=torch.uint8))
    mask.check((5,), 3, 9, 4)
    assert np.array_equal(dense(mask, 9, 4)[0, 0], query_ids[0][:, None] == ids[0])


@settings(max_examples=100)
@given(data=st.data())
def test_coverage_of_documents_is_never_wrong(data, tile, cells):
    n = data.draw(st.integers(1, 12))
    m = data.draw(st.integers(1, n))
    batches = data.draw(st.integers(1, 2))
    ids = data.draw(st.lists(st.lists(st.integers(-1, 3), min_size=n, max_size=n), min_size=batches, max_size=batches))
    packed = data.draw(st.booleans())
    mask = Documents(torch.tensor([sorted(row) for row in ids] if packed else ids))
    if data.draw(st.booleans()):
        places = st.lists(st.integers(0, m - 1), min_size=1, max_size=4)
        at = tile(m, n, data.draw(places), data.draw(places), batch_ids=range(batches))
    else:
        at = tile(m, n, *draw_part(data, m, n), batch_ids=range(batches))
    check_coverage(mask, at)
    assert mask.coverage(at) is BlockState.FULL or not cells(mask, at).all()


def test_documents_one_after_the_other_are_computed_on_the_diagonal_only(tile):
    mask = Documents(torch.arange(4).repeat_interleave(10))
    found = [
        [mask.coverage(tile(40, 40, range(i, i + 10), range(j, j + 10))).name for j in range(0, 40, 10)]
        for i in range(0, 40, 10)
    ]
    assert found == [["FULL" if i == j else "EMPTY" for j in range(4)] for i in range(4)]


def test_masks_do_not_follow_later_changes_of_what_they_were_made_from(dense):
    lengths, ids = torch.tensor([2]), torch.tensor([0, 0, 1])
    padding, packed = Padding(lengths), Documents(ids)
    lengths[0], ids[0] = 3, 1
    assert dense(padding, 1, 3)[0, 0, 0].tolist() == [True, True, False]
    assert dense(packed, 3, 3)[0, 0, 0].tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("mask", "name"),
    [
        (Padding([3, 4]), "Padding([3, 4])"),
        (Padding(3, side="left"), "Padding(3, side='left')"),
        (Padding(range(6)), "Padding([0, 1, 2, 3, ...])"),
        (Prefix(torch.tensor(5)), "Prefix(5)"),
        (Documents([0, 1]), "Documents((2,))"),
        (Documents([0, 1], [1]), "Documents((2,), query_ids=(1,))"),
    ],
)
def test_name(mask, name):
    assert mask.name() == name


@pytest.mark.parametrize(
    ("make", "kind", "text"),
    [
        (lambda: Padding(torch.ones(2)), DtypeError, "Padding(): float32"),
        (lambda: Padding(torch.ones(2, 5, dtype=torch.bool)), DtypeError, "Padding(): bool"),
        (lambda: Padding([3, -2]), ShapeError, "Padding(): lengths = -2"),
        (lambda: Padding([3], side="top"), ShapeError, "Padding(): side = 'top'"),
        (lambda: Prefix("four"), DtypeError, "Prefix(): str"),
        (lambda: Documents(torch.zeros(4)), DtypeError, "Documents(): float32"),
        (lambda: Documents(3), ShapeError, "Documents(): a single number"),
    ],
)
def test_bad_input(make, kind, text):
    assert refusal(kind, make) == text


@pytest.mark.parametrize(
    ("mask", "sizes", "text"),
    [
        (Padding([3, 4]), ((3,), 2, 8, 8), "attend(): 2 entries, 3 sequences"),
        (Padding(torch.ones(2, 8, dtype=torch.int64)), ((2,), 2, 8, 8), "attend(): 16 entries, 2 sequences"),
        (Padding([3, 9]), ((2,), 2, 8, 8), "attend(): a length of 9, n = 8"),
        (Documents([0, 0, 1]), ((2,), 2, 4, 3), "attend(): 3 ids for n = 3 keys and m = 4 queries"),
        (Documents(torch.zeros(3, 5, dtype=torch.int64)), ((2,), 2, 5, 5), "attend(): 3 entries, 2 sequences"),
    ],
)
def test_wrong_size(mask: Mask, sizes, text):
    assert refusal(ShapeError, lambda: mask.check(*sizes)) == text


def test_right_sizes_pass():
    Padding(3).check((2, 3), 2, 8, 8)
    Padding([1, 2, 3, 4, 5, 6]).check((2, 3), 2, 8, 8)
    Prefix(100).check((), 2, 8, 8)
    with pytest.raises(ShapeError):
        Padding(torch.ones(3, 2, dtype=torch.int64)).check((2, 3), 2, 8, 8)
