"""Masks combined with & | ~, and a mask of the user's own."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.masks.conftest import check_coverage, draw_part
from tests.messages import refusal

from attlas.errors import DtypeError, ShapeError
from attlas.masks import (
    BlockState,
    Causal,
    Dilated,
    Documents,
    Mask,
    Padding,
    Prefix,
    Window,
    from_function,
    from_tensor,
)

SIZE = 9

leaves = st.sampled_from(
    [
        Causal(),
        Causal(2),
        Window(2, 1),
        Window(None, 0),
        Dilated(4, 4, 2),
        Prefix([2, 5]),
        Padding([4, 9]),
        Padding([0, 3], side="left"),
        Documents([0, 0, 0, 1, 1, 2, 2, 2, 2]),
        from_function(lambda b, h, i, j: (i + j + h) % 3 > 0),
        from_tensor(torch.arange(SIZE * SIZE).view(SIZE, SIZE) % 5 > 1),
    ]
)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.tuples(st.just("and"), inner, inner),
        st.tuples(st.just("or"), inner, inner),
        st.tuples(st.just("not"), inner),
    ),
    max_leaves=5,
)


def build(tree, dense) -> tuple[Mask, np.ndarray]:
    """Make the mask with attlas, and its cells with numpy."""
    if isinstance(tree, Mask):
        return tree, dense(tree, SIZE, SIZE, 2, 2)
    (mask, cells), *rest = [build(part, dense) for part in tree[1:]]
    if tree[0] == "not":
        return ~mask, ~cells
    ((other, other_cells),) = rest
    return (mask & other, cells & other_cells) if tree[0] == "and" else (mask | other, cells | other_cells)


@given(tree=trees, data=st.data())
def test_combinations(tree, data, tile, cells, dense):
    mask, expected = build(tree, dense)
    assert np.array_equal(dense(mask, SIZE, SIZE, 2, 2, step=4), expected)
    rows, columns = draw_part(data, SIZE, SIZE)
    at = tile(SIZE, SIZE, rows, columns, range(2), range(2))
    assert np.array_equal(cells(mask, at), expected[:, :, rows.start : rows.stop, columns.start : columns.stop])
    check_coverage(mask, at)


def test_a_mask_is_not_asked_where_the_other_decides(tile):
    class Untouched(Mask):
        def allows(self, at):
            raise AssertionError("this mask need not be asked")

    above, below = tile(9, 9, range(3), range(5, 9)), tile(9, 9, range(5, 9), range(3))
    everything = Window(None, None)
    assert (Causal() & Untouched()).coverage(above) is BlockState.EMPTY
    assert (Causal() | Untouched()).coverage(below) is BlockState.FULL
    assert (~Causal()).coverage(above) is BlockState.FULL
    with pytest.raises(AssertionError):
        (everything & Untouched()).allows(below)
    assert bool((Window(0, 0) & everything).allows(tile(9, 9)).sum() == 9)


def test_two_masks_know_of_a_tile_what_both_know(tile):
    class Says(Mask):
        def __init__(self, state):
            self.state = state

        def allows(self, at):
            raise AssertionError("the state of the tile is asked for")

        def coverage(self, at):
            return self.state

    states = [BlockState.EMPTY, BlockState.PARTIAL, BlockState.FULL]
    for left, right in itertools.product(states, repeat=2):
        assert (Says(left) & Says(right)).coverage(tile(9, 9)) is min(left, right, key=states.index)
        assert (Says(left) | Says(right)).coverage(tile(9, 9)) is max(left, right, key=states.index)


def test_names_have_the_brackets_of_python():
    a, b, c = Causal(), Window(2, 0), Prefix(1)
    assert (a & b & c).name() == "Causal() & Window(2, 0) & Prefix(1)"
    assert ((a | b) & c).name() == "(Causal() | Window(2, 0)) & Prefix(1)"
    assert (a & b | c).name() == "(Causal() & Window(2, 0) | Prefix(1))"
    assert (~(a & b)).name() == "~(Causal() & Window(2, 0))"
    assert (~(a | b)).name() == "~(Causal() | Window(2, 0))"
    assert (~~a).name() == "~~Causal()"


def test_sizes_and_checks_reach_every_part():
    packed = Documents([0, 0, 1])
    mask = Causal() & ~(Window(2, 0) | packed)
    assert mask.size() == (3, 3)
    assert mask.reach() == 2
    mask.check((2,), 1, 3, 3)
    with pytest.raises(ShapeError, match="found: 3 ids for n = 4 keys"):
        mask.check((2,), 1, 4, 4)


def test_numbers_of_additive_masks_add_up():
    one, other = from_tensor(torch.randn(3, 3)), from_tensor(torch.randn(3, 3))
    assert len((one & Causal() & other).log_weights()) == 2
    assert (Causal() & Window(2, 0)).log_weights() == ()


def test_only_masks_combine():
    assert refusal(DtypeError, lambda: Causal() & torch.ones(3, 3)) == "mask & other: a Tensor on one side"
    either = refusal(ShapeError, lambda: Causal() | from_tensor(torch.randn(3, 3)))
    assert either == "| of masks: an additive mask beside |"
