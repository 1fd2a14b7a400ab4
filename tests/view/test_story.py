"""The tour through a recording: every step is what the dense weights of its head say, or it is not there."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.pages import data_of
from tests.telling_heads import telling_atlas

from attlas.recording.atlas import Atlas
from attlas.view import Service, export


def steps_of(atlas: Atlas) -> list[dict[str, Any]]:
    service = Service(atlas)
    service.measure()
    found: list[dict[str, Any]] = json.loads(service.answer("story", {}).body)["steps"]
    service.close()
    return found


def check(step: dict[str, Any], atlas: Atlas) -> None:
    """Compare a step with the weights of its head, by their definition in float64."""
    problem = atlas.entries[step["entry"]].need_matrix().problem
    logits = (problem.q.double() @ problem.k.double().mT)[0, step["head"]]
    n, ids = len(logits), atlas.ids[0].tolist()
    weights = logits.masked_fill(~logits.new_ones(n, n).tril().bool(), -float("inf")).softmax(-1)
    i, j = step["i"], step["j"]
    assert int(weights[i].argmax()) == j
    assert step["weight"] == pytest.approx(float(weights[i, j]), rel=1e-5)
    assert step["tokens"] == [atlas.tokens[i], atlas.tokens[j]]
    assert {
        "induction": 0 < j < i and ids[j - 1] == ids[i],
        "duplicate token": j < i and ids[j] == ids[i],
        "previous token": j == i - 1,
        "first-token sink": j == 0 < i,
        "fixed distance": j == i - 5,
    }[step["kind"]]


@pytest.mark.parametrize("top_k", [True, False])
@pytest.mark.parametrize(
    ("layers", "wanted"),
    [
        (
            [("mixed", "first-token sink"), ("previous token", "mixed"), ("fixed distance", "induction")],
            [("induction", 2, 1), ("previous token", 1, 0), ("first-token sink", 0, 1)],
        ),
        # Another kind stands in for one that is not there; a head that shows nothing of its kind is left out.
        (
            [("previous token", "liar"), ("fixed distance", "induction")],
            [("induction", 1, 1), ("previous token", 0, 0), ("fixed distance", 1, 0)],
        ),
        (
            [("previous token", "liar"), ("fixed distance", "duplicate token")],
            [("previous token", 0, 0), ("duplicate token", 1, 1), ("fixed distance", 1, 0)],
        ),
        ([("previous token", "liar", "mixed")], []),  # one head alone is no tour
        ([("mixed", "mixed")], []),
    ],
)
def test_every_step_is_what_the_weights_say(
    layers: list[tuple[str, ...]], wanted: list[tuple[str, int, int]], top_k: bool
) -> None:
    atlas = telling_atlas(*layers, top_k=top_k)
    steps = steps_of(atlas)
    assert [(step["kind"], step["entry"], step["head"]) for step in steps] == wanted
    for step in steps:
        check(step, atlas)
    # The step after that of an induction head stays at one of its tokens.
    if steps and steps[0]["kind"] == "induction":
        assert steps[1]["i"] in (steps[0]["i"], steps[0]["j"])


def test_a_recording_without_text_or_kinds_has_no_tour() -> None:
    atlas = telling_atlas(("induction", "previous token"))
    assert len(steps_of(atlas)) == 2
    atlas.ids = None
    assert steps_of(atlas) == []
    service = Service(atlas.entries[0].need_matrix())
    assert json.loads(service.answer("story", {}).body)["steps"] == []
    service.close()


def test_a_recording_that_is_compared_has_no_step() -> None:
    first, second = telling_atlas(("mixed", "previous token")), telling_atlas(("induction", "previous token"))
    service = Service(first, compare=second)
    service.measure()
    assert json.loads(service.answer("story", {}).body)["steps"] == []
    service.close()


def test_a_page_opens_with_the_tour_and_holds_its_cells(tmp_path: Path) -> None:
    atlas = telling_atlas(("mixed", "first-token sink"), ("previous token", "induction"), top_k=True)
    data = data_of(export(atlas, tmp_path / "page.html"))
    steps = data["story"]
    assert [step["kind"] for step in steps] == ["induction", "previous token", "first-token sink"]
    assert data["state"] | {"entry": 1, "head": 1, "story": 0} == data["state"]
    for step in steps:
        cell = data["parts"][f"cell:{step['entry']}:{step['head']}:{step['i']}:{step['j']}"]
        assert cell["weight"] == pytest.approx(step["weight"], rel=1e-5)
        assert cell["rank"] == 1
    # Heads or a query that are asked for come first; the tour is there.
    data = data_of(export(atlas, tmp_path / "page.html", heads=[(0, 0)], query=9))
    assert "story" not in data["state"]
    assert data["state"]["pointed"] == {"i": 9, "j": 9}
    assert len(data["story"]) == 3
