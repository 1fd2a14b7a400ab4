"""A score seen from another matrix equals the cells of its own, and is stored as it always was."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch

import attlas
from attlas.recording.atlas.serialization import score_from, score_spec
from attlas.scores import Score
from attlas.scores.placed import PlacedScore, translated_score

M, N, HEADS = 6, 8, 2


class Far(Score):
    """A score of a user's own that looks at tokens and at places."""

    def forward(self, q, k, at):
        return q @ k.mT + at.i / (1 + at.j) + at.m - at.n


SCORES: dict[str, Callable[[], Score]] = {
    "alibi": lambda: attlas.Alibi(HEADS),
    "table": lambda: attlas.TensorBias(torch.arange(float(HEADS * M * N)).view(HEADS, M, N)),
    "relative": lambda: attlas.RelativeBias(HEADS, 4),
    "function": lambda: attlas.scores.ScoreMod(lambda score, b, h, i, j: score + i * h - j),
    "own": Far,
    "dot": attlas.ScaledDot,
    "sum": lambda: 0.5 * attlas.ScaledDot() + attlas.Alibi(HEADS) + Far(),
    "scaled sum": lambda: 0.5 * (attlas.ScaledDot() + attlas.Alibi(HEADS)),
}


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("part", [(range(M), range(N)), (range(2, 5), range(N)), (range(1, 4), range(3, 8))], ids=str)
def test_equals_the_cells_of_the_whole(name: str, part: tuple[range, range]) -> None:
    rows, columns = part
    q, k = torch.randn(1, HEADS, M, 4), torch.randn(1, HEADS, N, 4)
    whole = attlas.attend(q, k, score=SCORES[name]()).logits.to_dense()[:, :, rows.start : rows.stop, columns]
    own = SCORES[name]()
    own.load_state_dict(SCORES[name]().state_dict())
    placed = PlacedScore(own, range(-rows.start, M - rows.start), range(-columns.start, N - columns.start))
    for score in (placed, translated_score(own, rows, columns, M, N)):
        A = attlas.attend(q[:, :, rows.start : rows.stop], k[:, :, columns.start : columns.stop], score=score)
        torch.testing.assert_close(A.logits.to_dense(), whole)


def test_scores_without_positions_stay_as_they_are() -> None:
    score = attlas.ScaledDot(2.0)
    assert translated_score(score, range(1, 3), range(2, 4), M, N) is score
    both = translated_score(score + attlas.Alibi(HEADS), range(1, 3), range(2, 4), M, N)
    assert both.left is score
    assert isinstance(both.right, PlacedScore)


# As every recording of some rows holds it; a file of an earlier version has these keys.
WRITTEN = {
    "class": "MovedScore",
    "settings": {
        "inner": {"score": {"class": "Alibi", "slopes": {"t": torch.tensor([0.5, 0.25])}}},
        "m": {"plain": 6},
        "n": {"plain": 8},
        "row": {"plain": -2},
        "column": {"plain": -1},
    },
}


def test_its_name_and_its_keys_in_files_stay() -> None:
    again = score_from(WRITTEN, lambda ref: ref["t"])
    score = PlacedScore(again.inner, range(-2, 4), range(-1, 7))
    written = score_spec(score, lambda name, t: {"t": t})
    assert [*written] == [*WRITTEN]
    assert written["class"] == "MovedScore"
    assert [*written["settings"]] == [*WRITTEN["settings"]]
    inner, before = (settings["settings"].pop("inner") for settings in (written, copy.deepcopy(WRITTEN)))
    assert torch.equal(inner["score"]["slopes"]["t"], before["score"]["slopes"]["t"])
    assert written["settings"] == {name: WRITTEN["settings"][name] for name in ("m", "n", "row", "column")}
    assert isinstance(again, PlacedScore)
    assert (again.rows, again.columns) == (range(-2, 4), range(-1, 7))
    q, k = torch.randn(1, 2, 4, 3), torch.randn(1, 2, 7, 3)
    cells = [attlas.attend(q, k, score=one).logits.to_dense() for one in (score, again)]
    assert torch.equal(*cells)


@pytest.mark.parametrize("key", ["m", "row"])
@pytest.mark.parametrize("value", ["6", 6.5, None])
def test_what_is_no_place_is_refused(key: str, value: object) -> None:
    spec = {"class": "MovedScore", "settings": WRITTEN["settings"] | {key: {"plain": value}}}
    with pytest.raises(TypeError):
        score_from(spec, lambda ref: ref["t"])
