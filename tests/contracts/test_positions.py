"""What a score or a mask says about positions is what it does."""

import pytest
import torch
from tests.atlas.conftest import make_entry
from tests.contracts.conftest import MASKS, SCORES, Sizes, build

import attlas
from attlas import ShapeError, stats
from attlas.engine.backends.native import library
from attlas.matrix import softmax_matrix

SIZES = Sizes(m=9, n=11, heads=2, key_heads=1)


def cut_differs(case, rows: slice, columns: slice) -> bool:
    """Return whether some log-weights change when the tokens stand elsewhere."""
    q, k = case.q.detach(), case.k.detach()
    whole = attlas.attend(q, k, score=case.score).logits.to_dense().detach()
    try:
        part = attlas.attend(q[:, :, rows], k[:, :, columns], score=case.score).logits.to_dense().detach()
    except (ShapeError, IndexError):
        return True
    return not torch.allclose(part, whole[:, :, rows, columns], atol=1e-9)


@pytest.mark.parametrize("score", SCORES)
def test_position_free_scores_do_not_look_at_positions(score: str) -> None:
    case = build(score, next(iter(MASKS)), SIZES)
    cuts = [(slice(2, None), slice(1, None)), (slice(0, -2), slice(0, -1)), (slice(3, None), slice(0, None))]
    moved = any(cut_differs(case, *cut) for cut in cuts)
    if type(case.score).__module__.startswith("attlas."):
        assert case.score.position_free is not moved
    assert not (case.score.position_free and moved)


@pytest.mark.parametrize("mask", MASKS)
def test_masks_follow_their_rows_and_columns(mask: str) -> None:
    case = build("ScaledDot", mask, SIZES)
    q, k = case.q.detach(), case.k.detach()
    A = attlas.attend(q, k, mask=case.mask)
    whole = A.to_dense()
    for rows, columns in ((range(4), range(11)), (range(3, 8), range(11)), (range(2, 9), range(3, 10))):
        part = A.window(rows, columns)
        torch.testing.assert_close(part.to_dense(), whole[:, :, rows.start : rows.stop, columns.start : columns.stop])
        masks = A.problem.mask, part.problem.mask
        if masks[0] is not None:
            everywhere = [one.problem.tile(*map(range, one.problem.shape)) for one in (A, part)]
            rule, moved = (m.allows(at).expand(at.shape) for m, at in zip(masks, everywhere, strict=True))
            assert torch.equal(moved, rule[:, :, rows.start : rows.stop, columns.start : columns.stop])


def test_a_class_of_your_own_says_so_itself() -> None:
    class Looks(attlas.ScaledDot):
        def forward(self, q, k, at):
            return super().forward(q, k, at) + at.j

    class Says(attlas.Score):
        position_free = True

        def forward(self, q, k, at):
            return -(q @ k.mT).abs()

    assert not Looks().position_free
    assert Says().position_free
    assert (2.0 * Says() + attlas.Boxcar(1.0)).position_free
    assert not (Says() + attlas.Alibi(2)).position_free
    assert (torch.tensor(0.5) * attlas.Additive(4, 4, 3)).position_free
    kept = Says()
    assert kept.translate(range(2, 5), range(1, 4), 6, 6) is kept
    assert Looks().translate(range(2, 5), range(1, 4), 6, 6) is None

    class Even(attlas.Mask):
        def allows(self, at):
            return at.j % 2 == 0

        def translate(self, rows, columns, m, n):
            return self if columns.start % 2 == 0 else None

    both = (Even() & attlas.Causal(0)).translate(range(2, 5), range(6), 6, 6)
    assert both.name() == "Even() & Causal(offset=2)"


@pytest.mark.parametrize("score", SCORES)
def test_a_stored_score_is_the_same_again(score: str, tmp_path) -> None:
    case = build(score, next(iter(MASKS)), SIZES)
    A = attlas.attend(case.q.detach(), case.k.detach(), score=case.score)
    A = softmax_matrix(A.problem, A.plan, A.axes, A.softmax_weights.lse().detach())
    attlas.Atlas([make_entry(A)]).save(tmp_path / "run.atlas")
    own = case.score if type(case.score).__name__ in ("Cauchy", "ScoreMod") else None
    again = attlas.load(tmp_path / "run.atlas", score=own)[0]
    assert type(again.problem.score) is type(case.score)
    torch.testing.assert_close(again.to_dense().detach(), A.to_dense().detach(), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("score", SCORES)
def test_a_score_is_made_again_of_its_settings(score: str) -> None:
    case = build(score, next(iter(MASKS)), SIZES)
    settings = case.score.to_dict()
    assert (settings is None) is (type(case.score).__name__ in ("Cauchy", "ScoreMod"))
    if settings is not None:
        again = type(case.score).from_dict(settings)
        assert again is not case.score
        weights = [attlas.attend(case.q, case.k, score=one).to_dense().detach() for one in (case.score, again)]
        assert torch.equal(*weights)


@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_is_made_again_of_its_settings(mask: str) -> None:
    case = build("ScaledDot", mask, SIZES)
    A = attlas.attend(case.q, case.k, mask=case.mask)
    given = A.problem.mask
    settings = None if given is None else given.to_dict()
    assert (settings is None) is (mask in ("none", "function", "own"))
    if given is not None and settings is not None:
        again = type(given).from_dict(settings)
        assert again is not given
        assert again.name() == given.name()
        assert torch.equal(attlas.attend(case.q, case.k, mask=again).to_dense(), A.to_dense())


def test_a_class_made_of_one_of_attlas_is_stored_by_its_name(tmp_path) -> None:
    """What `to_dict` of the class below says is not all that the class above is made of."""

    class Steeper(attlas.Gaussian):
        def __init__(self, bandwidth, slope):
            super().__init__(bandwidth)
            self.slope = slope

        def log_weight(self, distance):
            return self.slope * super().log_weight(distance)

    class Every(attlas.Window):
        def allows(self, at):
            return super().allows(at) | (at.j % 2 == 0)

    q, score = torch.randn(1, 1, 6, 2), Steeper(1.0, 3.0)
    A = attlas.attend(q, q, score=score, mask=Every(1, 0))
    attlas.Atlas([make_entry(A)]).save(tmp_path / "x")
    with pytest.raises(attlas.RecordingError, match="a score of your own is not stored"):
        attlas.load(tmp_path / "x", score=Steeper)
    again = attlas.load(tmp_path / "x", score=score)[0]
    assert isinstance(again.problem.mask, attlas.masks.Runs)
    torch.testing.assert_close(again.to_dense(), A.to_dense())


class Tempered(attlas.Score):
    """A score of a user's own with a number, a parameter and a score inside."""

    def __init__(self, inner, power, shift):
        super().__init__()
        self.inner, self.power, self.shift = inner, power, shift

    def forward(self, q, k, at):
        return self.inner(q, k, at) * self.power + self.shift

    def to_dict(self):
        return {"inner": self.inner, "power": self.power, "shift": self.shift}


def saved(score, folder, rows=None):
    A = attlas.attend(torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4), score=score, mask=attlas.Causal())
    A = softmax_matrix(A.problem, A.plan, A.axes, A.softmax_weights.lse().detach())
    A = A if rows is None else A.window(rows)
    attlas.Atlas([make_entry(A)]).save(folder)
    return A.to_dense().detach()


def test_a_class_of_your_own_is_stored_by_its_settings(tmp_path) -> None:
    score = Tempered(attlas.ScaledDot(2.0), 0.5, torch.nn.Parameter(torch.tensor(0.25)))
    dense = saved(score, tmp_path / "run.atlas")
    again = attlas.load(tmp_path / "run.atlas", score=Tempered)[0]
    torch.testing.assert_close(again.to_dense().detach(), dense)
    assert isinstance(again.problem.score.shift, torch.nn.Parameter)
    with pytest.raises(attlas.RecordingError, match=r"fix: attlas\.load\(folder, score=Tempered\)"):
        attlas.load(tmp_path / "run.atlas")


def test_scores_of_attlas_are_not_called_your_own(tmp_path) -> None:
    dense = saved(attlas.ScaledDot() + attlas.Alibi(2), tmp_path / "rows.atlas", range(1, 4))
    torch.testing.assert_close(attlas.load(tmp_path / "rows.atlas")[0].to_dense(), dense)
    factor = torch.nn.Parameter(torch.tensor([0.5, 2.0]))
    dense = saved(factor * attlas.ScaledDot(), tmp_path / "factor.atlas")
    torch.testing.assert_close(attlas.load(tmp_path / "factor.atlas")[0].to_dense().detach(), dense)
    saved(lambda score, b, h, i, j: score - (i - j), tmp_path / "function.atlas")
    with pytest.raises(attlas.RecordingError, match="the function of a score is code, which is not stored"):
        attlas.load(tmp_path / "function.atlas")


@pytest.mark.parametrize("backend", ["auto", "native", "sdpa", "tiled", "reference"])
@pytest.mark.parametrize("mask", [None, attlas.Causal(-2), attlas.Window(3, 1)], ids=["all", "causal", "window"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_products_of_some_keys_are_those_of_the_weights_as_they_are(
    backend: str, mask: attlas.Mask | None, dtype: torch.dtype
) -> None:
    """Rows of a window sum to the mass of its keys: no product norms them again, nor does a gradient."""
    if backend == "native" and not library.available():
        pytest.skip("the kernels are not compiled here, or turned off")
    q, k = torch.randn(1, 4, 30, 8).to(dtype), torch.randn(1, 2, 40, 8).to(dtype)
    sink = torch.randn(4).to(dtype)
    part = attlas.attend(q, k, mask=mask, sink=sink, plan=attlas.Plan(backend)).window(slice(4, 30), slice(3, 25))
    weights = part.to_dense()
    v, x = torch.randn(1, 2, 22, 5).to(dtype), torch.randn(1, 4, 26, 5).to(dtype)
    slack = {"rtol": 0.02, "atol": 0.02} if dtype is torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    wide = v.repeat_interleave(2, 1).to(weights)
    torch.testing.assert_close((part @ v).to(weights), weights @ wide, **slack)
    torch.testing.assert_close((part.mT @ x).to(weights), weights.mT @ x.to(weights), **slack)
    torch.testing.assert_close(part.collect(stats.Pooled(v))[0].to(weights), weights @ wide, **slack)
    for product, leaf, exact in (
        (part, v, lambda t: weights @ t.repeat_interleave(2, 1)),
        (part.mT, x, lambda t: weights.mT @ t),
    ):
        mine, plain = leaf.clone().requires_grad_(), leaf.to(weights).requires_grad_()
        out, wanted = product @ mine, exact(plain)
        slope = torch.randn_like(wanted)
        for graph in (False, True):
            (found,) = torch.autograd.grad(out, mine, slope.to(out), retain_graph=True, create_graph=graph)
            (right,) = torch.autograd.grad(wanted, plain, slope, retain_graph=True)
            torch.testing.assert_close(found.to(right), right, **slack)


def test_a_window_that_sees_nothing_keeps_the_log_sum_exp_of_its_rows() -> None:
    A = attlas.attend(torch.randn(8, 4), torch.randn(20, 4), mask=attlas.Window(1, 0, offset=0))
    part = A.window((0, 8), (9, 20))
    torch.testing.assert_close(part.collect(stats.LogitMoments(), stats.ColumnArgMax())[1], torch.zeros(11).long())
    torch.testing.assert_close(part.lse, A.lse)
