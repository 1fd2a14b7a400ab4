"""The answer to why a weight is where it is: the numbers of `heads.explain`, the earlier head's place, refusals."""

from __future__ import annotations

import base64
import json
import re
import zlib
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.atlases import atlas_of
from tests.pages import data_of, heads_in

import attlas
import attlas.models
from attlas import heads, pictures
from attlas.cli.command import main
from attlas.errors import ShapeError
from attlas.heads.explanation.summary import map_summary, summary
from attlas.recording.atlas import Atlas, Bookmark
from attlas.view import Service, export

N = 60


@pytest.fixture(scope="module")
def recorded() -> Atlas:
    model = attlas.nn.GPT2.from_pretrained(attlas.models.path()).eval()
    ids = heads.repeated_block(4096, period=N // 2, blocks=1)
    with torch.no_grad(), attlas.record(model, parts=True, tokens=[f"w{i}" for i in range(N)]) as atlas:
        model(ids)
    return atlas


def cell_of(atlas: Atlas) -> tuple[int, int]:
    """Return the cell of largest weight of head 2·4 whose key follows the earlier copy of the query's token."""
    row = max(range(N // 2, N), key=lambda i: float(atlas[2][0, 4, i, i - N // 2 + 1]))
    return row, row - N // 2 + 1


def asked(service: Service, **parameters: Any) -> tuple[int, dict[str, Any]]:
    answer = service.answer("why", {name: str(value) for name, value in parameters.items()})
    return answer.status, json.loads(answer.body)


def test_has_the_numbers_of_the_explanation(recorded: Atlas) -> None:
    i, j = cell_of(recorded)
    why = heads.explain(recorded, 2, 4, cell=(i, j))
    service = Service(recorded)
    try:
        status, told = asked(service, entry=2, head=4, i=i, j=j)
        assert status == 200
        assert told["logit"] == pytest.approx(why.logit)
        assert sum(part["logit"] for part in told["keys"]) == pytest.approx(told["above"], abs=1e-4)
        assert sum(part["logit"] for part in told["queries"]) == pytest.approx(told["above"], abs=1e-4)
        assert told["above"] + told["mean"] == pytest.approx(told["logit"], abs=1e-4)
        writer = told["writer"]
        assert writer["name"] == "head 0·0"
        assert writer["place"] == {"entry": 0, "head": 0}
        assert writer["sources"][0]["at"] == j - 1
        given = sum(source["logit"] for source in writer["sources"]) + writer["others"]
        assert given == pytest.approx(float(why.sources("head 0·0").sum()), abs=1e-4)
        assert writer["without"]["weight"] == pytest.approx(why.without("head 0·0").weight)
        assert asked(service, entry=2, head="mean", i=i, j=j) == (
            409, {"error": "the mean of heads has no logits; choose one head"}
        )  # fmt: skip
        rollout = len(service.source.entries) - 1
        assert service.source.entries[rollout].entry.kind == "rollout"
        assert asked(service, entry=rollout, head=1, i=i, j=j) == (
            409, {"error": "a product of layers has no logits; choose a head of a layer"}
        )  # fmt: skip
        assert service.answer("why_map", {"entry": str(rollout), "head": "1"}).status == 409
        assert asked(service, entry=2, head=4, i=N, j=0)[0] == 404
        assert service.source.info["entries"][2]["parts"] is True
    finally:
        service.close()


def test_a_recording_without_parts_is_refused_with_the_way_out() -> None:
    q = torch.randn(1, 2, 9, 8)
    service = Service(atlas_of(attlas.attend(q, q, mask=attlas.Causal()), model="tiny"))
    try:
        status, told = asked(service, entry=0, head=1, i=5, j=2)
        assert (status, "attlas record --parts" in told["error"]) == (409, True)
        assert service.source.info["entries"][0]["parts"] is False
    finally:
        service.close()


def test_the_command_says_it_and_draws_it(recorded: Atlas, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorded.save(tmp_path / "run.atlas")
    i, j = cell_of(recorded)
    command = ["why", str(tmp_path / "run.atlas"), "--head", "2.4"]
    assert main([*command, "--at", f"{i},{j}", "-o", str(tmp_path / "why.svg")]) == 0
    told = capsys.readouterr().out
    assert f'Head 2·4 at "w{i}" ({i}) looks at "w{j}" ({j})' in told
    assert "head 0·0" in told
    assert f'It took that from "w{j - 1}" ({j - 1}), the token before.' in told
    assert (tmp_path / "why.svg").stat().st_size > 1000
    for wrong, reason in ((["--at", "5"], "--at must be a query"), (["--at", f"{N},0"], "--at must be a query")):
        assert main([*command, *wrong]) == 2
        assert reason in capsys.readouterr().err
    assert main(["why", str(tmp_path / "run.atlas"), "--head", "2-4", "--at", "5,2"]) == 2
    assert "LAYER.HEAD" in capsys.readouterr().err
    recorded_without = atlas_of(attlas.attend(torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)), model="tiny")
    recorded_without.save(tmp_path / "bare.atlas")
    assert main(["why", str(tmp_path / "bare.atlas"), "--head", "0.1", "--at", "5,2"]) == 2
    assert "attlas record --parts" in capsys.readouterr().err


def test_the_picture_has_the_bars_of_the_parts(recorded: Atlas) -> None:
    i, j = cell_of(recorded)
    told = summary(recorded, 2, 4, cell=(i, j), names={(0, 0): "previous token"})
    figure = pictures.why(told, [f"w{at}" for at in range(N)], query=i, key=j)
    text, bars = figure.axes
    patches: Any = bars.patches
    lengths = [bar.get_width() for bar in patches]
    assert sum(lengths) == pytest.approx(told["above"], abs=1e-3)
    assert bars.get_yticklabels()[0].get_text() == "head 0·0 (previous token)"
    assert len([label for label in text.texts if label.get_text() in {f"w{i}", f"w{j}", f"w{j - 1}"}]) == 3
    with pytest.raises(ShapeError, match=r"pictures\.why\(\): query and key must be places"):
        pictures.why(told, ["w"], query=i, key=j)


def test_a_whole_map_has_the_numbers_of_the_explanation(recorded: Atlas) -> None:
    why = heads.explain(recorded, 2, 4)
    table = why.above_uniform.double()
    told = map_summary(recorded, 2, 4)
    assert sum(map(sum, told["table"])) == pytest.approx(float(table.sum()), abs=1e-6)
    assert told["total"] == pytest.approx(float(table.sum()))
    rows, columns = ([part.name for part in parts] for parts in (why.query_parts, why.key_parts))
    for i, query in enumerate(told["queries"]):
        assert query["logit"] == pytest.approx(float(table[rows.index(query["name"])].sum()))
        for j, key in enumerate(told["keys"]):
            wanted = table[rows.index(query["name"]), columns.index(key["name"])]
            assert told["table"][i][j] == pytest.approx(float(wanted), abs=1e-9)
    assert told["others"] == [len(rows) - 10, len(columns) - 10]
    assert len(told["table"]) == len(told["table"][0]) == 11
    assert (told["queries"][0]["name"], told["keys"][0]["name"]) == ("head 0·2", "head 0·0")
    few = map_summary(recorded, 0, 0)  # of few parts none are joined
    assert few["others"] == [0, 0]
    assert len(few["table"]) == len(few["queries"]) == 3


def test_the_page_answers_for_a_whole_map(recorded: Atlas) -> None:
    service = Service(recorded)
    try:
        answer = service.answer("why_map", {"entry": "2", "head": "4"})
        assert (answer.status, json.loads(answer.body)) == (200, map_summary(recorded, 2, 4))
        refused = service.answer("why_map", {"entry": "2", "head": "mean"})
        assert (refused.status, json.loads(refused.body)) == (
            409, {"error": "the mean of heads has no logits; choose one head"}
        )  # fmt: skip
    finally:
        service.close()


def test_the_command_explains_and_draws_a_whole_map(
    recorded: Atlas, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded.save(tmp_path / "run.atlas")
    assert main(["why", str(tmp_path / "run.atlas"), "--head", "2.4", "-o", str(tmp_path / "map.png")]) == 0
    out = capsys.readouterr().out
    assert re.search(r"\+\d\.\d\d  head 0·2.* -> head 0·0", out)
    parts = len(heads.explain(recorded, 2, 4).query_parts)
    assert f"{parts - 6} other parts" in out
    assert (tmp_path / "map.png").read_bytes().startswith(b"\x89PNG")


def held(data: dict[str, Any]) -> dict[tuple[int, int], dict[str, Any] | None]:
    """Return what a page explains of each of its heads; a rollout has no logits to explain."""
    return {(each["entry"], each["head"]): each.get("why") for each in heads_in(data)}


def unpacked(part: dict[str, Any]) -> Any:
    """Return an answer that a page holds as text."""
    return json.loads(zlib.decompress(base64.b64decode(part["text"]), -zlib.MAX_WBITS))


def test_an_offline_page_explains_pinned_cells_and_maps(recorded: Atlas, tmp_path: Path) -> None:
    i, j = cell_of(recorded)
    marked = copy(recorded)
    marked.bookmarks = [
        Bookmark("pinned", "e=3&h=2&pin=50.21&panel=why"),
        Bookmark("of another sequence", "e=3&h=2&b=1&pin=50.22"),
        Bookmark("masked", "e=3&h=1&pin=5.50"),
        Bookmark("outside", f"e=3&h=1&pin={N}.0"),
        Bookmark("no cell", "e=1&h=1&r=20.5&c=10.5"),
        Bookmark("again", f"e=2&h=4&pin={i}.{j}"),
    ]
    service = Service(marked)
    try:
        answer = service.answer("offline", {"entry": "2", "head": "4", "i": str(i), "j": str(j)})
        data = json.loads(answer.body)["data"]
        assert held(data) == {(2, 4): {"cells": [[i, j]], "map": True}}  # the other heads are not in this page
        assert unpacked(data["parts"][f"why:2:4:{i}:{j}"]) == asked(service, entry=2, head=4, i=i, j=j)[1]
        assert unpacked(data["parts"]["why_map:2:4"]) == map_summary(recorded, 2, 4)
    finally:
        service.close()
    found = data_of(export(marked, tmp_path / "page.html", heads=[(2, 4)]))
    reasons = held(found)
    cells = {head: why["cells"] for head, why in reasons.items() if why and why["cells"]}
    writer = unpacked(found["parts"][f"why:2:4:{i}:{j}"])["writer"]
    assert (writer["place"], writer["sources"][0]["at"]) == ({"entry": 0, "head": 0}, j - 1)
    assert [j, j - 1] in cells[0, 0]  # where head 0·0 read what it wrote
    steps = {(step["entry"], step["head"]): [step["i"], step["j"]] for step in found["story"]}
    assert steps
    assert all(cell in cells[head] for head, cell in steps.items())
    assert [i, j] in cells[2, 4]
    assert cells[3, 2] == [[50, 21]]
    writers = {writer_of(found, f"why:{head[0]}:{head[1]}:{i}:{j}") for head, (i, j) in steps.items()}
    assert set(cells) <= {(0, 0), (2, 4), (3, 2), *steps, *writers, writer_of(found, "why:3:2:50:21")}
    assert all(why is not None and why["map"] for why in reasons.values())
    assert len(reasons) == 24


def writer_of(data: dict[str, Any], name: str) -> tuple[int, int] | None:
    """Return the head that wrote most of the key of a cell that a page explains; None where it was no head."""
    place = (unpacked(data["parts"][name])["writer"] or {}).get("place")
    return None if place is None else (place["entry"], place["head"])


def test_an_offline_page_has_bounds(recorded: Atlas, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marked = copy(recorded)
    marked.bookmarks = [Bookmark(f"{i}", f"e=2&h=4&pin={i}.{i - 5}") for i in range(10, 40)]
    whole = data_of(export(marked, tmp_path / "page.html", heads=[(2, 4)]))
    size = sum(len(part["text"]) for name, part in whole["parts"].items() if name.startswith("why"))
    assert len(held(whole)[2, 4]["cells"]) == 30
    monkeypatch.setattr("attlas.view.why_packing._MOST_BYTES", size // 4)
    less = data_of(export(marked, tmp_path / "page.html", heads=[(2, 4)]))
    kept = [len(part["text"]) for name, part in less["parts"].items() if name.startswith("why")]
    assert sum(kept) - kept[-1] < size // 4 <= sum(kept)
    assert not any(why["map"] for why in held(less).values())  # cells come first
    monkeypatch.setattr("attlas.view.why_packing._MOST_BYTES", 1 << 20)
    monkeypatch.setattr("attlas.view.why_packing._MOST_CELLS", 7)
    monkeypatch.setattr("attlas.view.why_packing._MOST_WORK", 2 * 24 * N**2)
    few = held(data_of(export(marked, tmp_path / "page.html", heads=[(2, 4)])))
    assert sum(len(why["cells"]) for why in few.values()) == 7
    assert [head for head, why in few.items() if why["map"]] == [*few][:2]


def test_an_offline_page_of_a_recording_without_parts_explains_nothing(tmp_path: Path) -> None:
    q = torch.randn(1, 2, 20, 8)
    data = data_of(export(atlas_of(attlas.attend(q, q, mask=attlas.Causal())), tmp_path / "page.html"))
    assert set(held(data).values()) == {None}
    assert not any(name.startswith("why") for name in data["parts"])
