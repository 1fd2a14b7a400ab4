"""What attlas.testing lets pass and what it stops: our own classes, and one wrong class for each law."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import attlas
from attlas import BlockState, stats
from attlas.engine.statistic import Statistic, TensorForm, keep_larger
from attlas.errors import ContractError
from attlas.testing import check_mask, check_score, check_statistic

HEADS = 2


def test_our_scores_keep_the_contract(score_name: str, make: Any, sizes: Any) -> None:
    case = make(score_name, "none", sizes(7, 9, heads=HEADS))
    check_score(case.score, case.sizes.query_size, case.sizes.key_size, HEADS)


def test_a_score_is_left_as_it_is() -> None:
    score = attlas.Additive(8, 8, 4)
    before = {name: p.clone() for name, p in score.named_parameters()}
    check_score(score)
    for name, p in score.named_parameters():
        assert p.dtype is torch.float32
        assert torch.equal(p, before[name])
        assert p.grad is None


def test_our_masks_keep_the_contract(mask_name: str, make: Any, sizes: Any) -> None:
    case = make("ScaledDot", mask_name, sizes(40, 70))
    mask = case.matrix().problem.mask
    if mask is None:
        pytest.skip("no mask")
    check_mask(mask, 40, 70, batch=2, heads=4)


DENSE: dict[str, tuple[Callable[[], Statistic], Callable[[Tensor], Any] | None]] = {
    "RowMass": (stats.RowMass, lambda w: w.sum(-1)),
    "Entropy": (stats.Entropy, lambda w: -torch.special.xlogy(w, w).sum(-1)),
    "MaxWeight": (stats.MaxWeight, lambda w: w.amax(-1)),
    "MaxLogit": (stats.MaxLogit, None),
    "EffectiveKeys": (stats.EffectiveKeys, None),
    "LogitMoments": (stats.LogitMoments, None),
    "ColumnMass": (stats.ColumnMass, lambda w: w.sum(-2)),
    "ColumnMax": (stats.ColumnMax, lambda w: w.amax(-2)),
    "TopK": (lambda: stats.TopK(3), None),
    "Offsets": (stats.Offsets, None),
    "Coverage": (stats.Coverage, None),
    "Picture": (lambda: stats.Picture(4, 5), None),
    "Spans": (lambda: stats.Spans([(0, 5), (5, 13)], [(0, 2), (2, 17)]), None),
    "KeyMaps": (lambda: stats.KeyMaps([0, -1, 3]), lambda w: w[..., [0, -1, 3]]),
    "ArgMax": (stats.ArgMax, lambda w: w.argmax(-1)),
    "TailMass": (lambda: stats.TailMass(2), lambda w: w.sum(-1) - w.topk(2, -1).values.sum(-1)),
    "ColumnArgMax": (stats.ColumnArgMax, lambda w: w.argmax(-2)),
    "ColumnMass(mean)": (lambda: stats.ColumnMass(mean=True), None),
    "ColumnMass(rows)": (lambda: stats.ColumnMass(rows=slice(-8, None)), lambda w: w[:, :, -8:].sum(-2)),
    "ColumnMax(rows)": (lambda: stats.ColumnMax(rows=(2, 9)), lambda w: w[:, :, 2:9].amax(-2)),
    "Offsets(mean)": (lambda: stats.Offsets(mean=True), None),
    "Picture(max)": (lambda: stats.Picture(4, 5, "max", rows=slice(2, 12)), None),
}


@pytest.mark.parametrize("name", list(DENSE))
def test_our_statistics_keep_the_contract(name: str) -> None:
    make, dense = DENSE[name]
    check_statistic(make(), dense)


def test_every_statistic_has_a_line_and_merges() -> None:
    exported = [getattr(stats, name) for name in stats.__all__]
    classes = {one for one in exported if isinstance(one, type) and issubclass(one, Statistic)} - {Statistic}
    assert {type(make()) for make, _ in DENSE.values()} == classes - {stats.Pooled}  # tests/stats/test_values.py
    assert all(one.merge is not Statistic.merge for one in classes)


def test_two_parts_of_a_row_do_not_tell_how_many_keys_cover_it() -> None:
    counts, others = torch.tensor([[[3, 0, 2]]]), torch.tensor([[[0, 4, 0]]])
    assert stats.Coverage((0.5,)).merge(counts, others).tolist() == [[[3, 4, 2]]]
    with pytest.raises(attlas.ShapeError, match="parts must hold whole rows to be merged"):
        stats.Coverage((0.5,)).merge(counts, counts)


class Pairs(attlas.Score):
    """A right score, from which wrong ones are made."""

    def forward(self, q: Tensor, k: Tensor, at: attlas.Tile) -> Tensor:
        return -(q.unsqueeze(-2) - k.unsqueeze(-3)).square().sum(-1)


class LooksBeyond(Pairs):
    def forward(self, q: Tensor, k: Tensor, at: attlas.Tile) -> Tensor:
        return super().forward(q, k, at) - k.sum(-2, keepdim=True).sum(-1, keepdim=True)


class CountsFromTheTile(Pairs):
    def forward(self, q: Tensor, k: Tensor, at: attlas.Tile) -> Tensor:
        return super().forward(q, k, at) + torch.arange(k.shape[-2])


class Transposed(Pairs):
    def forward(self, q: Tensor, k: Tensor, at: attlas.Tile) -> Tensor:
        return super().forward(q, k, at).mT


class Boolean(Pairs):
    def forward(self, q: Tensor, k: Tensor, at: attlas.Tile) -> Tensor:
        return super().forward(q, k, at) > -1


class NotATensor(Pairs):
    def forward(self, q: Tensor, k: Tensor, at: attlas.Tile) -> Any:
        return 1.0


class Writes(Pairs):
    def forward(self, q: Tensor, k: Tensor, at: attlas.Tile) -> Tensor:
        result = super().forward(q, k, at)
        k.data[..., 0] = k.data[..., 0] + (0.0 if at.scattered else 1e-12)
        return result


class NotFinite(Pairs):
    finite = True

    def forward(self, q: Tensor, k: Tensor, at: attlas.Tile) -> Tensor:
        logits = super().forward(q, k, at)
        return logits.masked_fill(logits < -10, -torch.inf)


class NotPositional(Pairs):
    positional = True

    def forward(self, q: Tensor, k: Tensor, at: attlas.Tile) -> Tensor:
        return q @ k.mT


class NotThatDot(Pairs):
    def as_dot(self, q: Tensor, k: Tensor) -> attlas.scores.Dot:
        return attlas.scores.Dot(q, k, 1.0)


class NotThatBias(attlas.Score):
    positional = True

    def forward(self, q: Tensor, k: Tensor, at: attlas.Tile) -> Tensor:
        return 0.1 * (at.j - at.i).to(at.dtype)

    def bias(self, at: attlas.Tile) -> attlas.scores.Bias:
        # It forgets where the tile begins.
        steps = torch.arange(1.0 - at.shape[2], at.shape[3], dtype=at.dtype)
        return attlas.scores.Bias(distance=0.1 * steps.view(1, 1, -1))


class Detached(Pairs):
    def __init__(self) -> None:
        super().__init__()
        self.width = nn.Parameter(torch.tensor(2.0))

    def forward(self, q: Tensor, k: Tensor, at: attlas.Tile) -> Tensor:
        return super().forward(q, k, at) * self.width.detach() + 0 * self.width


class WrongBackward(Pairs):
    def forward(self, q: Tensor, k: Tensor, at: attlas.Tile) -> Tensor:
        return Twice.apply(super().forward(q, k, at))


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 3 * grad


WRONG_SCORES = {
    LooksBeyond: "a tile must equal that part of the whole matrix",
    CountsFromTheTile: "a tile must equal that part of the whole matrix",
    Transposed: "forward() must return floating point log-weights that broadcast",
    Boolean: "forward() must return floating point log-weights that broadcast",
    NotATensor: "forward() must return floating point log-weights that broadcast",
    Writes: "forward() must not write to its tokens",
    NotFinite: "a score that says finite = True must give finite log-weights",
    NotPositional: "a score that says positional = True must not look at the tokens",
    NotThatDot: "as_dot() must be the score that forward() gives",
    NotThatBias: "bias() must be the score that forward() gives",
    Detached: "the gradients of forward() must be those of finite differences",
    WrongBackward: "the gradients of forward() must be those of finite differences",
}


def test_the_right_score_passes() -> None:
    check_score(Pairs())


@pytest.mark.parametrize("wrong", list(WRONG_SCORES))
def test_a_wrong_score_is_stopped(wrong: type[attlas.Score]) -> None:
    with pytest.raises(ContractError) as caught:
        check_score(wrong(), 2 if wrong in (Detached, WrongBackward) else 8)  # torch compares every number that is off
    text = str(caught.value)
    assert text.startswith(f"check_score({wrong.__name__}): {WRONG_SCORES[wrong]}")
    assert "\n  found: " in text
    assert "\n  fix: " in text


class Even(attlas.Mask):
    def allows(self, at: attlas.Tile) -> Tensor:
        return (at.i + at.j) % 2 == 0


class CountsRowsFromTheTile(Even):
    def allows(self, at: attlas.Tile) -> Tensor:
        return torch.arange(at.shape[2]).view(-1, 1) >= at.j


class NoBatch(Even):
    def allows(self, at: attlas.Tile) -> Tensor:
        return (torch.arange(len(at.batches)).view(-1, 1, 1, 1) + at.j) % 2 == 0


class Numbers(Even):
    def allows(self, at: attlas.Tile) -> Tensor:
        return (at.i + at.j) % 2


class Long(Even):
    def allows(self, at: attlas.Tile) -> Tensor:
        return torch.ones(at.m, at.n, dtype=torch.bool)


class SkipsTooMuch(Even):
    def coverage(self, at: attlas.Tile) -> BlockState:
        return BlockState.EMPTY if len(at.rows) < 40 else BlockState.PARTIAL


class AllowsTooMuch(Even):
    def coverage(self, at: attlas.Tile) -> BlockState:
        return BlockState.FULL if len(at.columns) < 10 else BlockState.PARTIAL


class ForOtherSizes(Even):
    def check(self, batch: tuple[int, ...], heads: int, m: int, n: int) -> None:
        if m != 5:
            raise attlas.ShapeError("ForOtherSizes: m must be 5.")


WRONG_MASKS = {
    CountsRowsFromTheTile: "a tile must equal that part of the whole mask",
    NoBatch: "a tile must equal that part of the whole mask",
    Numbers: "allows() must return a bool tensor that broadcasts",
    Long: "allows() must return a bool tensor that broadcasts",
    SkipsTooMuch: "coverage() must be EMPTY only where allows() is False everywhere",
    AllowsTooMuch: "coverage() must be FULL only where allows() is True everywhere",
    ForOtherSizes: "check() must accept the sizes that the mask is made for",
}


def test_the_right_mask_passes() -> None:
    check_mask(Even(), batch=2, heads=2)


@pytest.mark.parametrize("wrong", list(WRONG_MASKS))
def test_a_wrong_mask_is_stopped(wrong: type[attlas.Mask]) -> None:
    with pytest.raises(ContractError) as caught:
        check_mask(wrong(), batch=2, heads=2)
    assert str(caught.value).startswith(f"check_mask({wrong.__name__}): {WRONG_MASKS[wrong]}")


class Mass(Statistic):
    """Mass of each row: a right statistic."""

    def start(self, problem: Any) -> Any:
        return torch.zeros(problem.shape[:3], dtype=problem.dtype)

    def step(self, carry: Any, part: Any, at: attlas.Tile) -> Any:
        carry[at.place] += part.weights.sum(-1)
        return carry

    def finish(self, carry: Any) -> Any:
        return carry


class OfTheLastPart(Mass):
    def step(self, carry: Any, part: Any, at: attlas.Tile) -> Any:
        carry[at.place] = part.weights.sum(-1)
        return carry


class Remembers(Mass):
    def __init__(self) -> None:
        self.carry: Tensor | None = None

    def start(self, problem: Any) -> Any:
        if self.carry is None or self.carry.shape != problem.shape[:3]:
            self.carry = super().start(problem)
        return self.carry


class WritesIntoWeights(Mass):
    def step(self, carry: Any, part: Any, at: attlas.Tile) -> Any:
        carry = super().step(carry, part, at)
        part.weights.zero_()
        return carry


class NoHeads(Mass):
    def finish(self, carry: Any) -> Any:
        return carry.sum(1)


class MixesHeads(Mass):
    def finish(self, carry: Any) -> Any:
        return carry - carry.mean(1, keepdim=True)


class MergesWrongly(Mass):
    merge = keep_larger


class SaysAnotherForm(Mass):
    def forms(self, problem: Any) -> Any:
        return TensorForm(problem.shape[:3], torch.int64)


WRONG_STATISTICS = {
    SaysAnotherForm: "forms() must say shape and dtype of each tensor of the result",
    MergesWrongly: "merge() of two halves of the columns must give the whole",
    OfTheLastPart: "Plan(",
    Remembers: "a second run gives the same result",
    WritesIntoWeights: "",
    NoHeads: "the first axes of a result must be (batch, heads)",
    MixesHeads: "a head must give alone what it gives in the whole matrix",
}


def test_the_right_statistic_passes() -> None:
    check_statistic(Mass(), lambda weights: weights.sum(-1))
    with pytest.raises(TypeError, match=r"Mass must define merge\(self, a, b\)"):
        Mass().merge(None, None)


@pytest.mark.parametrize("wrong", list(WRONG_STATISTICS))
def test_a_wrong_statistic_is_stopped(wrong: type[Statistic]) -> None:
    with pytest.raises(ContractError) as caught:
        check_statistic(wrong())
    assert str(caught.value).startswith(f"check_statistic({wrong.__name__}): {WRONG_STATISTICS[wrong]}")


def test_a_statistic_that_differs_from_its_formula_is_stopped() -> None:
    with pytest.raises(ContractError, match="the result must be that of the dense formula"):
        check_statistic(Mass(), lambda weights: weights.amax(-1))


@pytest.mark.parametrize("check", [check_score, check_mask, check_statistic])
def test_another_kind_of_thing_is_stopped(check: Callable[[Any], None]) -> None:
    with pytest.raises(ContractError):
        check("a word")


def test_contract_error_is_an_assertion_error() -> None:
    assert issubclass(ContractError, AssertionError)
    assert issubclass(ContractError, attlas.AttlasError)


class WrongGradient(stats.RowMass):
    """A statistic whose formula for its gradient is not that of its steps."""

    def of(self, part):
        return part.weights.square().sum(-1)

    def outputs(self, problem):
        return None

    def gradient(self, problem, grad, result):
        return stats.ColumnMass().gradient(problem, grad.new_ones(*problem.shape[:2], problem.shape[3]), result)


def test_a_wrong_gradient_is_found():
    with pytest.raises(attlas.errors.ContractError, match=r"gradient\(\) must give the gradient"):
        attlas.testing.check_statistic(WrongGradient())
