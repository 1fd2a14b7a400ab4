"""Some rows of a matrix, and matrices stacked on each other: every weight and mask as it was."""

from collections.abc import Callable

import pytest
import torch
from tests.messages import refusal
from torch import Tensor

import attlas
from attlas import GradientError, ShapeError, attend, stats
from attlas.masks import Causal, Documents, Mask, Padding, Prefix, Window, from_function, from_tensor
from attlas.masks.placed import Block, Placed, Stacked
from attlas.recording.stacking import same_settings, stack_masks

M, N = 9, 12


def cells(mask: Mask | None, m: int, n: int, batch: int = 2, heads: int = 3) -> Tensor:
    """Return a mask written out, from the weights of equal logits."""
    A = attend(torch.zeros(batch, heads, m, 2), torch.zeros(batch, heads, n, 2), mask=mask)
    return A[:, :, :, :] > 0


BOOLEANS = torch.rand(2, 3, M, N, generator=torch.Generator().manual_seed(1)) < 0.6
NUMBERS = torch.randn(2, 1, M, N, generator=torch.Generator().manual_seed(2)).masked_fill(~BOOLEANS[:, :1], -torch.inf)
MASKS: dict[str, Callable[[], Mask | None]] = {
    "none": lambda: None,
    "causal": Causal,
    "causal, offset": lambda: Causal(2),
    "window": lambda: Window(3, 1),
    "left padding": lambda: Causal() & Padding([12, 7], side="left"),
    "right padding": lambda: Padding([12, 7]),
    "booleans": lambda: from_tensor(BOOLEANS),
    "one row for all": lambda: from_tensor(BOOLEANS[:, :1, :1]),
    "numbers": lambda: from_tensor(NUMBERS),
    "function": lambda: from_function(lambda b, h, i, j: (i + b + h) % 3 != j % 3),
    "documents": lambda: Documents([0] * 5 + [1] * 7) & Causal(),
    "either": lambda: Prefix(2) | Causal(0),
}
SCORES: dict[str, Callable[[], attlas.Score]] = {
    "dot": attlas.ScaledDot,
    "capped": lambda: attlas.SoftCap(attlas.ScaledDot(), 2.0),
    "alibi": lambda: attlas.ScaledDot() + attlas.Alibi(3),
    "table": lambda: attlas.ScaledDot() + attlas.TensorBias(NUMBERS.nan_to_num(neginf=0.5)),
    "scaled": lambda: 0.5 * (attlas.ScaledDot() + attlas.Alibi(3)),
}


@pytest.mark.parametrize("score", SCORES)
def test_rows_keep_their_scores(score: str) -> None:
    q, k = torch.randn(2, 3, M, 4), torch.randn(2, 3, N, 4)
    A = attend(q, k, score=SCORES[score](), mask=Causal())
    part = A.window(range(4, 8))
    torch.testing.assert_close(part.to_dense(), A.to_dense()[:, :, 4:8])
    torch.testing.assert_close(part @ torch.eye(N), A.to_dense()[:, :, 4:8])
    torch.testing.assert_close(part.lse, A.lse[:, :, 4:8])


def test_known_masks_stay_what_they_are() -> None:
    q = torch.zeros(1, 1, 8, 2)
    part = attend(q, q, mask=Causal() & Padding([5], side="left")).window(range(6, 8))
    assert part.problem.mask is not None
    assert part.problem.mask.name() == "Causal(offset=6) & Padding(5, side='left')"
    other = attend(q, q, mask=from_function(lambda b, h, i, j: i != j)).window(slice(0, 2))
    assert isinstance(other.problem.mask, Placed)


def test_the_lse_of_rows_is_not_computed_again() -> None:
    q = torch.randn(1, 1, 8, 2)
    A = attend(q, q)
    assert A.window((0, 2)).softmax_weights.known_lse is None
    known = A.softmax_weights.lse()
    assert A.window((0, 2)).softmax_weights.known_lse.data_ptr() == known.data_ptr()


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (Causal(), 3),
        (Causal(5), 5),
        (Window(2, 0), 3),
        (Padding([4]) & Causal(1), 1),
        (Padding([4]), None),
        (None, None),
    ],
)
def test_masks_tell_where_the_first_query_stands(mask: Mask | None, expected: int | None) -> None:
    assert (None if mask is None else mask.first_query(M, N)) == expected


def block(mask: Mask | None, m: int, n: int, row: int, column: int) -> Block:
    return Block(mask, range(row, row + m), range(column, column + n))


def dense_of(blocks: list[Block], keys: int) -> Tensor:
    parts = []
    for block in blocks:
        part = torch.zeros(2, 3, len(block.rows), keys, dtype=torch.bool)
        part[..., block.columns] = cells(block.mask, len(block.rows), len(block.columns))
        parts.append(part)
    return torch.cat(parts, dim=2)


STACKS = {
    "generation": (
        [block(Causal(0), 5, 5, 0, 0), block(Causal(5), 1, 6, 5, 0), block(None, 1, 7, 6, 0)],
        "Causal(offset=0)",
    ),
    "chunks": ([block(Causal(0), 4, 4, 0, 0), block(Causal(4), 3, 7, 4, 0)], "Causal(offset=0)"),
    "left padding": (
        [
            block(Causal(0) & Padding([4, 2], side="left"), 4, 4, 0, 0),
            block(Causal(4) & Padding([5, 3], side="left"), 1, 5, 4, 0),
        ],
        "Causal(offset=0) & Padding([5, 3], side='left')",
    ),
    "a row without a causal mask": (
        [
            block(Causal(0) & Padding([4, 2], side="left"), 4, 4, 0, 0),
            block(Padding([5, 3], side="left"), 1, 5, 4, 0),
        ],
        "Causal(offset=0) & Padding([5, 3], side='left')",
    ),
    "sliding cache": (
        [block(Window(2, 0, 0), 5, 5, 0, 0), block(Window(2, 0, 2), 1, 3, 5, 3)],
        "Window(2, 0, offset=0)",
    ),
    "dropped keys": ([block(Causal(0), 5, 5, 0, 0), block(Causal(2), 1, 3, 5, 3)], "2 masks stacked"),
    "one sees all": ([block(None, 3, 4, 0, 0), block(None, 2, 6, 3, 0)], "2 masks stacked"),
    "booleans": ([block(from_tensor(BOOLEANS), 9, 12, 0, 0), block(Causal(12), 1, 13, 9, 0)], "2 masks stacked"),
}


@pytest.mark.parametrize("name", STACKS)
def test_stacked_masks_equal_their_parts(name: str) -> None:
    blocks, expected = STACKS[name]
    keys = max(block.columns.stop for block in blocks)
    rows = sum(len(block.rows) for block in blocks)
    mask = stack_masks(blocks, keys)
    assert mask is not None
    assert mask.name() == expected
    allowed = dense_of(blocks, keys)
    assert torch.equal(cells(mask, rows, keys), allowed)
    always = Stacked(blocks)
    assert always.size() == (rows, keys)
    assert torch.equal(cells(always, rows, keys), allowed)
    attlas.testing.check_mask(always)
    # A tile at a time, and rows and columns in any order.
    A = attend(torch.zeros(2, 3, rows, 2), torch.zeros(2, 3, keys, 2), mask=always, plan=attlas.Plan("tiled", 2, 3))
    assert torch.equal((A @ torch.eye(keys)) > 0, allowed)
    order = torch.randperm(rows)
    assert torch.equal(A[:, :, order.tolist(), :] > 0, allowed[:, :, order])
    assert torch.equal(A[0, 0, :, [keys - 1, 0]] > 0, allowed[0, 0][:, [keys - 1, 0]])


def test_a_mask_of_nothing_needs_no_stack() -> None:
    assert stack_masks([block(None, 2, 6, 0, 0), block(None, 1, 6, 2, 0)], 6) is None


def test_single_rows_are_compared_by_their_cells() -> None:
    blocks = [block(Window(2, 0, 0), 5, 5, 0, 0), block(None, 1, 3, 5, 3), block(None, 1, 3, 6, 4)]
    A = attend(torch.zeros(2, 3, 7, 2), torch.zeros(2, 3, 7, 2))
    mask = stack_masks(blocks, 7, lambda rows, columns: A.problem.tile(range(2), range(3), rows, columns))
    assert mask is not None
    assert mask.name() == "Window(2, 0, offset=0)"
    blocks[2] = block(None, 1, 4, 6, 3)
    mask = stack_masks(blocks, 7, lambda rows, columns: A.problem.tile(range(2), range(3), rows, columns))
    assert isinstance(mask, Stacked)


def test_many_blocks_are_judged_in_time() -> None:
    blocks = [block(from_tensor(torch.ones(1, row + 1, dtype=torch.bool)), 1, row + 1, row, 0) for row in range(200)]
    mask = Stacked(blocks)
    assert torch.equal(cells(mask, 200, 200, 1, 1)[0, 0], torch.ones(200, 200).tril().bool())


def test_alike_compares_what_is_held() -> None:
    assert same_settings(Causal(3) & Padding([4, 5]), Causal(3) & Padding([4, 5]))
    assert not same_settings(Causal(3) & Padding([4, 5]), Causal(3) & Padding([4, 6]))
    assert not same_settings(Causal(3), Window(None, 0, 3))
    assert same_settings(attlas.SoftCap(attlas.ScaledDot(2.0), 3.0), attlas.SoftCap(attlas.ScaledDot(2.0), 3.0))
    assert not same_settings(attlas.ScaledDot(2.0), attlas.ScaledDot(2.5))


def test_a_device_of_its_own() -> None:
    A = attend(torch.zeros(1, 1, 4, 2), torch.zeros(1, 1, 4, 2), mask=Placed(Causal(), range(4), range(4)))
    other = Placed(from_function(lambda b, h, i, j: j <= i), range(4), range(4), torch.device("cpu"))
    assert torch.equal(A.to_dense(), attend(A.problem.q, A.problem.k, mask=other).to_dense())


def test_a_moved_mask_knows_its_runs_of_keys() -> None:
    """Runs of keys move with the mask, whatever columns are asked about, and weights are those of the whole."""
    torch.manual_seed(0)
    lengths = torch.tensor([40, 25])
    mask = attlas.Causal() & attlas.Padding(lengths)
    A = attlas.attend(torch.randn(2, 3, 30, 4), torch.randn(2, 3, 40, 4), mask=mask)
    part = A.window(range(5, 22), range(7, 33))
    assert part.problem.allowed_runs is not None
    first, stop = part.problem.allowed_runs
    cells = torch.isfinite(A.logits[:, :, 5:22, :][..., 7:33])
    j = torch.arange(26)
    runs = (j >= first.unsqueeze(-1)) & (j < stop.unsqueeze(-1))
    assert (runs == cells).all()
    assert torch.allclose(part.to_dense(), A[:, :, 5:22, 7:33])
    score = attlas.ScaledDot() + attlas.TensorBias(torch.randn(30, 40))
    bias = attlas.attend(torch.randn(30, 4), torch.randn(40, 4), score=score)
    part = bias.window(range(5, 22), range(7, 33))
    assert torch.allclose(part.to_dense(), bias[5:22, 7:33])
    assert torch.allclose(part.window((2, 9), slice(-4, None)).to_dense(), bias[7:14, 29:33])
    assert torch.allclose(part.sum(-1), bias[5:22, 7:33].sum(-1))


def test_a_class_of_ones_own_stays_one_when_it_moves() -> None:
    class Even(Window):
        def allows(self, at: attlas.Tile) -> Tensor:
            return super().allows(at) & (at.j % 2 == 0)

    A = attend(torch.randn(2, 3, M, 4), torch.randn(2, 3, N, 4), mask=Even(5, 0))
    torch.testing.assert_close(A.window((3, 7)).to_dense(), A.to_dense()[:, :, 3:7])


def test_a_window_says_what_it_cannot_be() -> None:
    A = attend(torch.randn(5, 3, requires_grad=True), torch.randn(7, 3))
    assert refusal(ShapeError, lambda: A.window(slice(0, 5, 2))) == "A.window(): rows = slice(0, 5, 2)"
    with pytest.raises(ShapeError, match=r"columns must lie within the 7 keys of the matrix"):
        A.window(columns=(3, 8))
    assert A.window(slice(-2, None)).to_dense().requires_grad
    assert not A.window(columns=(3, 6)).to_dense().requires_grad
    A.window(slice(-2, None))
    with pytest.raises(GradientError, match="a window was taken"):
        A.retain_grad()


@pytest.mark.parametrize(
    "score", [attlas.ScaledDot(), attlas.Laplace(1.0), attlas.Bilinear(4, 4)], ids=lambda s: type(s).__name__
)
@pytest.mark.parametrize("sink", [False, True])
def test_statistics_of_a_window_know_that_its_rows_sum_to_less(score: attlas.Score, sink: bool) -> None:
    q, k = torch.randn(1, 2, 200, 4), torch.randn(1, 1, 220, 4)
    A = attlas.attend(q, k, score=score, mask=attlas.Causal(), sink=torch.randn(2) if sink else None)
    rows, columns = range(20, 190), range(10, 150)
    weights = A.to_dense()[:, :, rows.start : rows.stop, columns.start : columns.stop]
    part = A.window(rows, columns)
    mass, effective, tail = part.collect(stats.RowMass(), stats.EffectiveKeys(), stats.TailMass(3))
    total, squares = weights.sum(-1), weights.square().sum(-1)
    torch.testing.assert_close(mass, total)
    torch.testing.assert_close(
        effective, torch.where(squares == 0, squares, total.square() / squares), rtol=1e-4, atol=1e-5
    )
    torch.testing.assert_close(tail, total - weights.topk(3).values.sum(-1), rtol=1e-4, atol=1e-5)


def test_padding_that_a_sliding_cache_has_dropped_is_known() -> None:
    prompt = Window(3, 0, 0) & Padding([6, 3], side="left")
    mask = stack_masks([block(prompt, 6, 6, 0, 0), block(Window(3, 0, 4) & Padding([7, 7]), 3, 7, 6, 2)], 9)
    assert isinstance(mask, Stacked)
    padding = mask.padding(
        attend(torch.zeros(2, 1, 9, 2), torch.zeros(2, 1, 9, 2)).problem.tile(range(2), range(1), range(9), range(9))
    )
    assert padding is not None
    assert padding.int().tolist() == [[0] * 9, [1, 1, 1] + [0] * 6]
