"""Masks of tensors: booleans, and numbers that are added to the scores."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.masks.conftest import check_coverage, draw_part
from tests.messages import refusal, said

from attlas.errors import DtypeError, ShapeError
from attlas.masks import AdditiveMask, BlockState, TensorMask, from_tensor
from attlas.scores.position import TensorBias

SHAPES = [(7, 9), (2, 7, 9), (2, 3, 7, 9), (1, 1, 1, 9), (2, 1, 1, 9), (2, 1, 7, 1), (1, 3, 7, 9), (1, 1), (1, 9)]


DTYPES = [torch.bool, torch.float32, torch.float64, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lowest", ["inf", "finfo"])
def test_pairs_that_a_tensor_allows(shape, dtype, lowest, dense):
    t = allowed = torch.rand(shape) > 0.5
    if dtype is not torch.bool:
        bottom = -torch.inf if lowest == "inf" else torch.finfo(dtype).min
        t = torch.where(allowed, torch.randn(shape, dtype=dtype), torch.tensor(bottom, dtype=dtype))
    mask = from_tensor(t)
    assert isinstance(mask, TensorMask if dtype is torch.bool else AdditiveMask)
    mask.check((2,), 3, 7, 9)
    expected = np.broadcast_to(allowed[:, None] if allowed.ndim == 3 else allowed, (2, 3, 7, 9))
    assert np.array_equal(dense(mask, 7, 9, 2, 3), expected)
    assert dtype is not torch.bool or mask.log_weights() == ()


def test_several_axes_of_the_batch(dense):
    t = torch.rand(2, 3, 1, 4, 4) > 0.5
    mask = from_tensor(t)
    mask.check((2, 3), 5, 4, 4)
    assert np.array_equal(dense(mask, 4, 4, 6, 5), np.broadcast_to(t.reshape(6, 1, 4, 4), (6, 5, 4, 4)))


@pytest.mark.parametrize("t", [torch.rand(4, 3, 10, 12) > 0.5, torch.randn(4, 3, 10, 12).relu().log()])
def test_part_of_a_tensor(t, tile, cells):
    allowed = t if t.dtype == torch.bool else t > -torch.inf
    for batch_ids, head_ids in [([1, 2], [2]), ([3, 0], [2, 0])]:
        for rows, columns in [(range(2, 5), range(7, 12)), ([9, 0, 0], range(3)), (range(10), [5])]:
            expected = allowed.numpy()[np.ix_(batch_ids, head_ids, list(rows), list(columns))]
            at = tile(10, 12, rows, columns, batch_ids, head_ids)
            assert np.array_equal(cells(from_tensor(t), at), expected)


def test_numbers_go_to_the_scores():
    mask = from_tensor(torch.randn(7, 9))
    (bias,) = mask.log_weights()
    assert isinstance(bias, TensorBias)
    assert mask.log_weights()[0] is bias


@pytest.mark.parametrize("bottom", [-torch.inf, torch.finfo(torch.float32).min])
def test_zeros_and_forbidden_pairs_alone_are_boolean(bottom):
    t = torch.zeros(2, 1, 200, 9)
    t[:, :, :, 5:] = bottom
    assert from_tensor(t).log_weights() == ()
    assert from_tensor(t.expand(2, 4, 200, 9)).log_weights() == ()
    (~from_tensor(t)).name()
    t[1, 0, 199, 0] = 0.5
    assert len(from_tensor(t).log_weights()) == 1


def test_a_tensor_that_learns_is_always_added():
    t = torch.zeros(4, 4, requires_grad=True)
    mask = from_tensor(t)
    assert len(mask.log_weights()) == 1
    assert refusal(ShapeError, lambda: ~mask) == "~ of masks: an additive mask beside ~"


def test_nan_is_allowed_and_reaches_the_scores(dense):
    assert dense(from_tensor(torch.tensor([[float("nan"), -torch.inf]])), 1, 2).tolist() == [[[[True, False]]]]


@given(data=st.data())
def test_coverage_is_never_wrong(data, tile):
    m, n = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 300))
    batches, heads = data.draw(st.sampled_from([(1, 1), (2, 1), (2, 3)]))
    t = torch.zeros(batches, heads, data.draw(st.sampled_from([1, m])), n, dtype=torch.bool)
    for _ in range(data.draw(st.integers(0, 3))):
        top, left = data.draw(st.integers(0, m)), data.draw(st.integers(0, n))
        t[data.draw(st.integers(0, batches - 1)) :, :, top:, left:] ^= True
    mask = from_tensor(t if data.draw(st.booleans()) else torch.where(t, 0.0, -torch.inf))
    check_coverage(mask, tile(m, n, *draw_part(data, m, n), range(batches), range(heads)))


def test_whole_blocks_are_known(tile):
    mask = from_tensor(torch.ones(500, 500).tril().bool())
    at = [range(128), range(128, 256), range(256, 384), range(384, 500)]
    found = [[mask.coverage(tile(500, 500, rows, columns)).name for columns in at] for rows in at]
    names = [["FULL" if j < i else "EMPTY" if j > i else "PARTIAL" for j in range(4)] for i in range(4)]
    assert found == names


def test_one_row_is_read_without_reading_the_rest(tile):
    class Counted(TensorMask):
        def rule(self, t):
            sizes.append(t.numel())
            return t

    sizes: list[int] = []
    mask = Counted(torch.ones(1000, 1000, dtype=torch.bool))
    assert mask.coverage(tile(1000, 1000, range(5, 6))) is BlockState.PARTIAL
    assert sizes == []
    for columns in (range(500), range(500, 1000)):
        assert mask.coverage(tile(1000, 1000, range(64, 128), columns)) is BlockState.FULL
    assert sizes == [64 * 1000]


@pytest.mark.parametrize(
    ("t", "kind", "text"),
    [
        (torch.ones(4, 4, dtype=torch.int64), DtypeError, "from_tensor(): int64"),
        ([[True, False]], DtypeError, "from_tensor(): list"),
        (torch.ones(4, dtype=torch.bool), ShapeError, "from_tensor(): 1 axes"),
    ],
)
def test_bad_input(t, kind, text):
    assert refusal(kind, lambda: from_tensor(t)) == text


@pytest.mark.parametrize(
    ("shape", "found", "fix"),
    [
        ((8, 10), "m = 8 in mask, 7 in matrix, n = 10 in mask, 9 in matrix", "use a mask of shape (m, n)"),
        ((2, 9), "m = 2 in mask, 7 in matrix", "for a padding mask of shape (batch, n)"),
        ((3, 7, 9), "batch = 3 in mask, 2 in matrix", "for one mask a head"),
    ],
)
def test_wrong_size(shape, found, fix):
    with pytest.raises(ShapeError) as error:
        from_tensor(torch.zeros(shape)).check((2,), 3, 7, 9)
    assert said(error.value) == f"attend(): {found}"
    assert error.value.fix.startswith(fix)
