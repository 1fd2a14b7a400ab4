"""What a score or a mask says about positions is what it does."""

import pytest
import torch
from tests.contracts.conftest import MASKS, SCORES, Sizes, build

import attlas
from attlas import ShapeError
from attlas.recording.places import rows_of

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
def test_masks_follow_their_rows(mask: str) -> None:
    case = build("ScaledDot", mask, SIZES)
    q, k = case.q.detach(), case.k.detach()
    A = attlas.attend(q, k, mask=case.mask)
    for rows in (range(0, 4), range(3, 8)):
        part = rows_of(attlas.AttentionMatrix(A.problem, A.plan, A._axes, A._lse), rows)
        torch.testing.assert_close(part.to_dense(), A.to_dense()[:, :, rows.start : rows.stop])


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

    both = (Even() & attlas.Causal(0)).translate(range(2, 5), range(0, 6), 6, 6)
    assert both.name() == "Even() & Causal(offset=2)"
