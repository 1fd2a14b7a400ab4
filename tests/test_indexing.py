"""What stands in the square brackets: the same as on the dense tensor, for any rank and any index, also one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import attlas
from attlas.foundation.indexing import Axes, parse

LEADING = [(), (3,), (2, 4), (3, 2, 2), (2, 1, 3, 2)]
M, N = 6, 9


def make(leading: tuple[int, ...], key_heads: int | None = None) -> attlas.AttentionMatrix:
    key_leading = leading if key_heads is None else (*leading[:-1], key_heads)
    q, k = torch.randn(*leading, M, 4), torch.randn(*key_leading, N, 4)
    # A score and a mask of places: they must still know which head and row they are asked about.
    score = attlas.ScaledDot() + attlas.Alibi(leading[-1] if len(leading) > 1 else 1)
    mask = attlas.from_function(lambda b, h, i, j: (i + j + h + b) % 5 != 0)
    return attlas.attend(q, k, score=score, mask=mask, sink=torch.randn(leading[-1] if len(leading) > 1 else 1))


def apply(dense: np.ndarray, key: tuple[Any, ...]) -> np.ndarray:
    """Index axis by axis, the last first, so that an index of one axis does not move the others."""
    axes = len(dense.shape)
    full = list(key)
    if Ellipsis in [k if k is Ellipsis else None for k in full]:
        place = next(i for i, k in enumerate(full) if k is Ellipsis)
        full[place : place + 1] = [slice(None)] * (axes - len(full) + 1)
    full += [slice(None)] * (axes - len(full))
    if isinstance(full[-1], list) and isinstance(full[-2], list):
        dense = dense[..., full[-2], full[-1]]
        full = full[:-2]
    for axis in reversed(range(len(full))):
        dense = dense[(slice(None),) * axis + (full[axis],)]
    return dense


def dense_of(found: Any) -> Tensor:
    return found.to_dense() if isinstance(found, attlas.AttentionMatrix) else found


def one_axis(size: int, lists: bool = True) -> st.SearchStrategy[Any]:
    places = st.integers(-size, max(size - 1, -size))
    bound = st.one_of(st.none(), st.integers(-size - 2, size + 2))
    step = st.one_of(st.none(), st.integers(-3, 3).filter(bool))
    choices = [st.builds(slice, bound, bound, step), st.builds(slice, bound, bound)]
    if size:
        choices.append(places)
    if size and lists:
        choices.append(st.lists(places, max_size=4))
    return st.one_of(choices)


@st.composite
def keys(draw: Any, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """Draw an index with at most one list, as long as it likes, with or without an Ellipsis."""
    count = draw(st.integers(0, len(shape)))
    listed = draw(st.integers(-1, len(shape) - 1))
    entries = [draw(one_axis(size, lists=axis == listed)) for axis, size in enumerate(shape)]
    if count == len(shape):
        return tuple(entries)
    front = draw(st.integers(0, count))
    if front == count and draw(st.booleans()):
        return tuple(entries[:count])
    return (*entries[:front], Ellipsis, *entries[len(shape) - (count - front) :])


@pytest.mark.parametrize("leading", LEADING, ids=str)
def test_any_index_equals_the_dense_one(leading: tuple[int, ...]) -> None:
    A = make(leading)
    dense, logits = A.to_dense().numpy(), A.logits.to_dense().numpy()

    @settings(max_examples=30)
    @given(keys((*leading, M, N)))
    def check(key: tuple[Any, ...]) -> None:
        found, wanted = dense_of(A[key]), apply(dense, key)
        assert tuple(found.shape) == wanted.shape
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5, atol=1e-6)
        raw = A.logits[key]
        raw = raw if isinstance(raw, Tensor) else raw.to_dense()
        np.testing.assert_allclose(raw.numpy(), apply(logits, key), rtol=1e-5, atol=1e-5)

    check()


@pytest.mark.parametrize("leading", [(3,), (2, 4), (3, 2, 4)], ids=str)
def test_index_after_index(leading: tuple[int, ...]) -> None:
    """Leading axes first, then any index of the smaller matrix; and the product with it."""
    A = make(leading, key_heads=2 if len(leading) > 1 else None)
    dense = A.to_dense().numpy()
    v = torch.randn(N, 3)

    @settings(max_examples=20)
    @given(st.data())
    def check(data: Any) -> None:
        part, wanted = A, dense
        for _ in range(2):
            sizes = tuple(part.shape[:-2])
            if not sizes:
                break
            axis = data.draw(st.integers(0, len(sizes) - 1))
            key = (slice(None),) * axis + (data.draw(one_axis(sizes[axis])),)
            part, wanted = part[key], apply(wanted, key)
            assert isinstance(part, attlas.AttentionMatrix)
            assert tuple(part.shape) == wanted.shape
        np.testing.assert_allclose(part.to_dense().numpy(), wanted, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose((part @ v).numpy(), wanted @ v.numpy(), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(part.lse.numpy().shape, wanted.shape[:-1])
        key = data.draw(keys(wanted.shape))
        np.testing.assert_allclose(dense_of(part[key]).numpy(), apply(wanted, key), rtol=1e-5, atol=1e-6)

    check()


def test_leading_axes_alone_stay_lazy() -> None:
    A = make((3, 2, 2))
    for key in (0, (0, 1), (slice(1, 3),), (Ellipsis, slice(None), slice(None))):
        part = A[key]
        assert isinstance(part, attlas.AttentionMatrix) == (key != (Ellipsis, slice(None), slice(None)))
    assert isinstance(A[0, 1, 1], attlas.AttentionMatrix)
    assert A[0, 1, 1].shape == (M, N)
    assert A[...].shape == A.shape
    assert [tuple(part.shape) for part in A] == [(2, 2, M, N)] * 3
    assert len(A) == 3


def test_a_head_keeps_its_number() -> None:
    """Score, mask and sink of head 3 are those of head 3 after A[0, 3], A[:, 2:][:, 1] and A[:, [1, 3]][:, 1]."""
    A = make((2, 4), key_heads=2)
    wanted = A.to_dense()[1, 3]
    for part in (A[1, 3], A[1][3], A[:, 2:][1, 1], A[:, [1, 3]][1, 1], A[[1]][0, -1], A[:, ::-1][1, 0]):
        torch.testing.assert_close(part.to_dense(), wanted)
        torch.testing.assert_close(part.mT @ torch.ones(M), wanted.sum(0))


def test_values_of_a_part() -> None:
    A = make((2, 4), key_heads=2)
    dense = A.to_dense()
    v = torch.randn(2, 4, N, 3)
    torch.testing.assert_close(A[:, 3] @ v[:, 3], dense[:, 3] @ v[:, 3])
    torch.testing.assert_close(A[1] @ v[1], dense[1] @ v[1])
    torch.testing.assert_close(A[1, 2] @ v[1, 2], dense[1, 2] @ v[1, 2])
    torch.testing.assert_close(A[1, 2] @ v[1, 2, :, 0], dense[1, 2] @ v[1, 2, :, 0])
    torch.testing.assert_close(A[:, [3, 0]] @ v[:, [3, 0]], dense[:, [3, 0]] @ v[:, [3, 0]])
    torch.testing.assert_close(A[:, 3].mT @ v[:, 3, :M], dense[:, 3].mT @ v[:, 3, :M])


@pytest.mark.parametrize(
    "heads", [[0], [0, 1, 2], [1, 2], [3, 2, 1, 0], [0, 2], [1, 1, 1], [], [0, 0, 3], [2, 3, 0, 1]]
)
def test_any_heads_of_grouped_ones(heads: list[int]) -> None:
    A = make((2, 4), key_heads=2)
    dense = A.to_dense()
    v = torch.randn(2, len(heads), N, 3)
    part = A[:, heads]
    torch.testing.assert_close(part.to_dense(), dense[:, heads])
    if heads:
        torch.testing.assert_close(part @ v, dense[:, heads] @ v)
        torch.testing.assert_close(part.mT @ v[:, :, :M], dense[:, heads].mT @ v[:, :, :M])


@pytest.mark.parametrize("m", [0, 5])
@pytest.mark.parametrize("n", [0, 4])
def test_empty_matrices(m: int, n: int) -> None:
    A = attlas.attend(torch.randn(2, 3, m, 4), torch.randn(2, 3, n, 4))
    dense = A.to_dense()
    assert dense.shape == (2, 3, m, n)
    for key in ((0,), (0, 1), (slice(None), [2, 0], slice(None)), (Ellipsis, slice(0, 0), slice(None)), (0, 1, [], [])):
        assert dense_of(A[key]).shape == dense[key].shape
    assert A.lse.shape == (2, 3, m)
    assert (A @ torch.randn(n, 2)).shape == (2, 3, m, 2)
    assert (A.mT @ torch.randn(m, 2)).shape == (2, 3, n, 2)


def test_empty_selections() -> None:
    A = make((2, 4))
    for key in ([], slice(0, 0), (slice(None), []), (slice(None), slice(2, 2))):
        part = A[key]
        assert part.to_dense().shape == A.to_dense()[key].shape
        assert part.lse.shape == A.to_dense()[key].shape[:-1]
        assert (part @ torch.randn(N, 3)).shape == (*part.shape[:-1], 3)


def test_parse_gives_views_where_it_can() -> None:
    axes = Axes((2, 3, 4), (True, True, True))
    where = parse((1, slice(None), slice(1, 3)), axes, M, N)
    assert where.leading is not None
    assert where.leading[0] == slice(3, 6)
    assert where.leading[1] == slice(1, 3)
    assert where.leading[2] == Axes((1, 3, 2), (False, True, True))
    assert where.rows is None
    assert not where.pairs
    strided = parse((slice(None), 1), axes, M, N)
    assert strided.leading is not None
    assert torch.equal(strided.leading[0], torch.tensor([1, 4]))
