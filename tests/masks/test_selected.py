"""Chosen keys against sets of Python."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.masks.conftest import check_coverage, draw_part

import attlas
from attlas.distributed.batched_masks import joined_mask
from attlas.errors import DtypeError, ShapeError
from attlas.masks import BlockState, Selected
from attlas.recording.atlas.serialization import mask_spec


def expected(indices, n, block, group, batches, heads):
    """The pairs by the definition: a set of keys per row."""
    axes = indices[None, None] if indices.ndim == 2 else indices[:, None] if indices.ndim == 3 else indices
    out = np.zeros((batches, heads, axes.shape[2], n), dtype=bool)
    for b, h, i in np.ndindex(out.shape[:3]):
        row = axes[b % axes.shape[0], h // group % axes.shape[1], i].tolist()
        chosen = {entry * block + step for entry in row for step in range(block) if entry >= 0}
        out[b, h, i, sorted(key for key in chosen if key < n)] = True
    return out


SHAPES = [((7, 4), 1), ((2, 7, 4), 1), ((1, 1, 7, 1), 1), ((2, 3, 7, 4), 1), ((2, 2, 7, 9), 3), ((1, 3, 7, 0), 2)]


@pytest.mark.parametrize(("shape", "group"), SHAPES)
@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8])
def test_pairs_that_were_chosen(shape, group, block, dtype, dense):
    indices = torch.randint(-2, 12 // block + 2, shape, dtype=dtype)
    heads = group * (shape[1] if len(shape) == 4 else 1)
    mask = Selected(indices, block, group)
    mask.check((2,), heads, 7, 11)
    assert np.array_equal(dense(mask, 7, 11, 2, heads), expected(indices, 11, block, group, 2, heads))


@settings(max_examples=150)
@given(data=st.data())
def test_parts_and_their_coverage(data, tile, cells):
    m, n, k = (data.draw(st.integers(1, top)) for top in (6, 20, 8))
    block, group, groups = (data.draw(st.integers(1, 3)) for _ in range(3))
    numbers = st.integers(-1, n // block + 1)
    rows = st.lists(numbers, min_size=k, max_size=k)
    indices = torch.tensor(
        data.draw(st.lists(st.lists(rows, min_size=m, max_size=m), min_size=groups, max_size=groups))
    )[None]
    mask, heads = Selected(indices, block, group), groups * group
    whole = expected(indices, n, block, group, 1, heads)
    part = draw_part(data, m, n)
    head_ids = data.draw(st.lists(st.integers(0, heads - 1), min_size=1, max_size=4))
    at = tile(m, n, *part, batch_ids=[0], head_ids=head_ids)
    assert np.array_equal(cells(mask, at), whole[np.ix_([0], head_ids, list(part[0]), list(part[1]))])
    check_coverage(mask, at, exact=not at.scattered)


def test_rows_without_a_choice_see_nothing():
    A = attlas.attend(torch.randn(3, 4), torch.randn(5, 4), mask=Selected([[-1, -1], [7, -3], [2, 2]]))
    assert A.to_dense().tolist() == [[0.0] * 5, [0.0] * 5, [0.0, 0.0, 1.0, 0.0, 0.0]]


def test_what_was_given_may_change_afterwards():
    indices = torch.tensor([[0, 1]])
    mask = Selected(indices)
    indices[:] = 3
    assert mask.indices.tolist() == [[0, 1]]


def test_windows_are_cut_out_of_the_entries():
    """A window at the start of a block is a choice of its own; another one is asked at its original positions."""
    mask = Selected(torch.tensor([[0, 2], [1, 3], [2, -1]]), block=2)
    moved = mask.translate(range(1, 3), range(2, 7), 3, 8)
    assert moved.indices.tolist() == [[[[0, 2], [-2, 1]]]]
    assert mask.translate(range(3), range(1, 8), 3, 8) is None
    assert mask.translate(range(-1, 3), range(8), 3, 8) is None


def test_memory_is_that_of_the_entries():
    """One hundred million pairs of 10,000 tokens, and 16 entries of each row."""
    mask = Selected(torch.randint(0, 10_000, (1, 10_000, 16)))
    assert mask.indices.untyped_storage().nbytes() == 4 * 10_000 * 16
    A = attlas.attend(torch.randn(1, 1, 10_000, 4), torch.randn(1, 1, 10_000, 4), mask=mask)
    assert int((A[0, 0, 9_000] > 0).sum()) == mask.indices[0, 9_000].unique().lt(10_000).sum()


def test_a_choice_of_all_keys_is_whole(tile):
    mask = Selected(torch.arange(8).expand(5, 8))
    assert mask.coverage(tile(5, 8)) is BlockState.FULL
    assert Selected(torch.zeros(5, 8, dtype=torch.int64)).coverage(tile(5, 8)) is BlockState.PARTIAL


def test_compiled_as_one_graph():
    def run(q, indices):
        return attlas.attention(q, q, q, mask=Selected(indices, 2, 2) & attlas.Causal())

    q, indices = torch.randn(1, 4, 12, 8), torch.randint(-1, 6, (1, 2, 12, 3))
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, indices), run(q, indices))


def told(kind, call):
    """The whole text of the error that a call raises."""
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


WRONG = {
    "floating": (lambda: Selected(torch.rand(3, 2)), DtypeError, "float32"),
    "bool": (lambda: Selected(torch.ones(3, 2, dtype=torch.bool)), DtypeError, "from_tensor"),
    "ragged": (lambda: Selected([[0], [0, 1]]), DtypeError, "filled with -1"),
    "one axis": (lambda: Selected([0, 1]), ShapeError, "indices[None, :]"),
    "block": (lambda: Selected([[0]], block=0), ShapeError, "block = 0"),
    "group": (lambda: Selected([[0]], group=0.5), ShapeError, "group = 0.5"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_refused(name):
    make, error, words = WRONG[name]
    assert words in told(error, make)


SIZES = {
    "m": ((6, 2), 1, "m = 6 in mask, 5 in matrix"),
    "batch": ((3, 5, 2), 1, "batch = 3 in mask, 2 in matrix"),
    "per head": ((4, 5, 2), 1, "indices[None]"),
    "groups": ((2, 2, 5, 2), 1, "group=2"),
    "group": ((2, 4, 5, 2), 2, "heads = 8 in mask, 4 in matrix"),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_do_not_fit(name):
    shape, group, words = SIZES[name]
    q = torch.randn(2, 4, 5, 3)
    mask = Selected(torch.zeros(shape).int(), 1, group)
    assert words in told(ShapeError, lambda: attlas.attend(q, q, mask=mask))


def test_batch_or_heads_is_said():
    q = torch.randn(3, 3, 5, 4)
    mask = Selected(torch.zeros(3, 5, 2).int())
    assert "indices[:, None]" in told(ShapeError, lambda: attlas.attend(q, q, mask=mask))


def test_choices_of_several_processes_are_joined():
    """What the processes of a data-parallel recording chose is saved as one choice."""
    parts = [torch.tensor([[[0, 1], [1, 2]]]), torch.tensor([[[1, 1], [-1, 0]]])]
    specs = [mask_spec(Selected(part, 2), lambda name, t: {"t": t}, lambda mask: mask) for part in parts]
    whole = joined_mask(specs, [1, 1], 0, (2, 1, 2, 6))
    assert whole["class"] == "Selected"
    assert torch.equal(whole["indices"]["t"][:, 0], Selected(torch.cat(parts)).indices)
