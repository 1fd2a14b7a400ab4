"""Numbers of steps joined to those of the whole, and tensors that are kept."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import attlas
from attlas import stats
from attlas.masks import Causal, Window, from_function, from_tensor
from attlas.matrix import softmax_matrix
from attlas.recording.merging import MergedStatistics, can_merge, with_keys
from attlas.recording.snapshot import detached, detached_tensor, fingerprint, snapshot
from attlas.stats import Part, Statistic

JOINABLE = [
    stats.ArgMax(),
    stats.ColumnMass(),
    stats.ColumnMax(),
    stats.Coverage((0.5, 0.9)),
    stats.EffectiveKeys(),
    stats.Entropy(),
    stats.LogitMoments(),
    stats.MaxLogit(),
    stats.MaxWeight(),
    stats.Offsets(),
    stats.RowMass(),
    stats.TailMass(2),
    stats.TopK(2),
]
OTHERS = [
    stats.ColumnArgMax(),
    stats.ColumnMass(mean=True),
    stats.ColumnMass(rows=slice(-1, None)),
    stats.ColumnMax(rows=(0, 1)),
    stats.Offsets(mean=True),
    stats.Picture(2, 2),
    stats.Spans([(0, 1)], [(0, 1)]),
]


def name_of(statistic: Statistic) -> str:
    return type(statistic).__name__


def test_which_can_be_joined() -> None:
    assert all(map(can_merge, JOINABLE))
    assert not any(map(can_merge, OTHERS))

    class Same(stats.Entropy):
        """The same numbers under another name."""

    class Own(stats.Entropy):
        """Of which nothing is known."""

        def of(self, part: Part) -> Tensor:
            return super().of(part) * 2

    class Says(Own):
        axis = "rows"

    assert can_merge(Same())
    assert not can_merge(Own())
    assert can_merge(Says())


def test_a_subclass_without_k_of_its_own_takes_fewer_keys() -> None:
    class Five(stats.TopK):
        def __init__(self) -> None:
            super().__init__(5)

    few = with_keys(Five(), 2)
    assert (type(few), few.k, Five().k) == (Five, 2, 5)
    assert attlas.attend(torch.ones(3, 2), torch.ones(2, 2)).collect(few)[0].values.shape == (3, 2)


@pytest.mark.parametrize("statistic", JOINABLE, ids=name_of)
@pytest.mark.parametrize("window", [False, True], ids=["growing", "sliding"])
def test_steps_equal_the_whole(statistic: Statistic, window: bool) -> None:
    q, k = torch.randn(2, 3, 8, 4), torch.randn(2, 3, 8, 4)
    mask = Window(2, 0) if window else Causal()
    (whole,) = attlas.attend(q, k, mask=mask).collect(statistic)
    joined = MergedStatistics([statistic])
    for start, stop in ((0, 5), (5, 6), (6, 8)):
        first = max(start - 2, 0) if window else 0
        part = (Window(2, 0, start - first)) if window else Causal(start)
        A = attlas.attend(q[:, :, start:stop], k[:, :, first:stop], mask=part)
        joined.add(A.collect(statistic), stop - start, stop - first, first)
    (found,) = joined.finish(8)
    assert type(found) is type(whole)
    if isinstance(whole, stats.Largest):  # which keys of weight 0 are named is open
        found, whole = (stats.Largest(t.values, t.indices.masked_fill(t.values == 0, -1)) for t in (found, whole))
    for a, b in zip(*((t if isinstance(t, tuple) else (t,)) for t in (found, whole)), strict=True):
        torch.testing.assert_close(a, b)


def test_room_of_a_static_cache_is_cut_off() -> None:
    q, k = torch.randn(1, 1, 4, 4), torch.randn(1, 1, 9, 4)
    numbers = [stats.ColumnMass(), stats.Offsets()]
    joined = MergedStatistics(numbers)
    joined.add(attlas.attend(q[:, :, :3], k, mask=Causal(0)).collect(*numbers), 3, 9, 0)
    joined.add(attlas.attend(q[:, :, 3:], k, mask=Causal(3)).collect(*numbers), 1, 9, 0)
    whole = attlas.attend(q, k[:, :, :4], mask=Causal(0)).collect(*numbers)
    for found, expected in zip(joined.finish(4), whole, strict=True):
        torch.testing.assert_close(found, expected)


def test_tensors_that_others_write_to_are_copied() -> None:
    fresh = torch.randn(1, 2, 4, 8)
    assert detached_tensor(fresh).data_ptr() == fresh.data_ptr()
    part = fresh[:, :1]
    assert detached_tensor(part).untyped_storage().nbytes() == part.nbytes
    written = torch.zeros(4)
    written[2] = 1.0
    assert detached_tensor(written).data_ptr() != written.data_ptr()
    with torch.inference_mode():
        inference = torch.zeros(4)
    assert detached_tensor(inference).data_ptr() != inference.data_ptr()
    graph = torch.randn(4, requires_grad=True) * 2
    assert not detached_tensor(graph).requires_grad
    turned = torch.randn(1, 4, 2, 8).transpose(1, 2)
    assert detached_tensor(turned).data_ptr() == turned.data_ptr()


def test_no_graph_is_kept_by_score_or_mask() -> None:
    bias = torch.randn(1, 1, 3, 3, requires_grad=True)
    score = attlas.SoftCap(attlas.ScaledDot(), 3.0) + attlas.RelativeBias(2, 4)
    q = torch.randn(1, 2, 3, 4, requires_grad=True)
    A = attlas.attend(q, q, score=score, mask=from_tensor(bias * 2), sink=torch.zeros(2, requires_grad=True))
    before = A.to_dense()
    problem = replace(snapshot(A.problem), k=A.problem.k.detach())
    held = [problem.q, problem.k, problem.sink, problem.mask.cells, *problem.score.parameters()]
    held += [part.t for part in problem.score.modules() if isinstance(part, attlas.TensorBias)]
    assert len(held) == 6
    assert not any(t.requires_grad for t in held)
    torch.testing.assert_close(softmax_matrix(problem, A.plan, A.axes).to_dense(), before)
    assert all(p.requires_grad for p in score.parameters())  # the model's own is as it was
    assert detached(Causal(3)).offset == 3


def test_masks_that_ask_functions_stay_where_they_are() -> None:
    q = torch.randn(1, 1, 3, 4)
    A = attlas.attend(q, q, mask=from_function(lambda b, h, i, j: j <= i) & Causal())
    problem = replace(snapshot(A.problem, torch.device("cpu")), k=q)
    assert torch.equal(softmax_matrix(problem, A.plan, A.axes).to_dense(), A.to_dense())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_fingerprints_know_keys_again(dtype: torch.dtype) -> None:
    k = torch.randn(2, 3, 1500, 4).to(dtype)
    prints = fingerprint(k)
    assert prints.shape == (2, 1500)
    assert torch.equal(fingerprint(k[:, :, 700:1400]), prints[:, 700:1400])
    other = k.clone()
    other[1, 2, 77, 3] += 1
    assert (fingerprint(other) != prints).nonzero().tolist() == [[1, 77]]
    assert fingerprint(k.flip(1)).ne(prints).all()
    assert prints.unique().numel() == prints.numel()
    assert fingerprint(k[:, :, :0]).shape == (2, 0)


def test_keys_of_a_static_cache_that_never_came_are_not_among_the_largest() -> None:
    """A query of padding sees no key: the keys of weight 0 that fill up its row are keys of the text."""
    mask = attlas.Padding([1], side="left") & Causal(0)
    joined = MergedStatistics([stats.TopK(2)])
    joined.add(
        attlas.attend(torch.zeros(1, 1, 3, 4), torch.zeros(1, 1, 9, 4), mask=mask).collect(stats.TopK(2)), 3, 9, 0
    )
    joined.add((stats.Largest(torch.tensor([[[[1.0, 0.0]]]]), torch.tensor([[[[2, 7]]]])),), 1, 9, 0)
    (found,) = joined.finish(4)
    assert int(found.indices.max()) < 4
    assert bool((found.indices[..., 0] != found.indices[..., 1]).all())
    assert found.indices[0, 0, 3].tolist() == [2, 0]
