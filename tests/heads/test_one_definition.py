"""The same matrix gives the same numbers through the table, the report, the viewer and `heads.scores`."""

import csv
import io

import pytest
import torch
import transformers
from tests.atlas.conftest import make_entry

import attlas
import attlas.models
from attlas import heads
from attlas.cli import head_statistics, main, stats
from attlas.cli.terminal import Terminal
from attlas.heads.classification import detectable, measure_entry
from attlas.recording.atlas import Atlas
from attlas.view.service import Service

# Name in `heads.scores`, and field of a Head.
NAMES = {
    "previous_token": "previous",
    "current_token": "current",
    "fixed_distance": "fixed",
    "first_token": "first",
    "local": "near",
    "broad": "breadth",
    "duplicate_token": "duplicate_text",
    "induction": "induction_text",
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    model = transformers.AutoModelForCausalLM.from_pretrained(attlas.models.path()).eval()
    ids = torch.randint(5, 40, (1, 300), generator=torch.Generator().manual_seed(1))
    folder = tmp_path_factory.mktemp("one") / "run.atlas"
    with attlas.record(model, tokens=[str(token) for token in ids[0].tolist()]) as atlas, torch.no_grad():
        model(ids)
    atlas.collect(*head_statistics.missing(atlas, ids))
    atlas.save(folder)
    return folder


def test_every_way_gives_the_same_number(saved, capsys) -> None:
    atlas = attlas.load(saved)
    wanted = {name: [] for name in NAMES}
    for A in atlas:
        for name, score in heads.scores(A, atlas.ids).items():
            if name in NAMES:
                wanted[name] += score[0].tolist()
    assert main(["stats", str(saved), "--csv"]) == 0
    table = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    report = [head for layer in atlas.layers() for head in measure_entry(atlas, atlas.entry(layer))]
    service = Service(atlas)
    seen = rows_of(service)
    measured = [
        head
        for layer in range(len(atlas))
        for head in heads.measure(atlas[layer], atlas.ids[0], attlas.attend(*[torch.zeros(1, 6, 8, 4)] * 2), 4)
    ]
    for name, field in NAMES.items():
        for i, number in enumerate(wanted[name]):
            assert float(table[i][field]) == pytest.approx(number, abs=1e-6), name
            assert getattr(report[i], field) == pytest.approx(number, abs=1e-6), name
            assert getattr(measured[i], field) == pytest.approx(number, abs=1e-6), name
            assert seen[i]["values"][field] == pytest.approx(number, abs=1e-6), name
    assert [row["what"].split(", ")[0] for row in table] == [head.patterns[0].name for head in report]


def rows_of(service):
    while service._table.step():
        pass
    return service._table.answer()["rows"]


def test_a_batch_is_the_mean_of_its_texts() -> None:
    q, k = torch.randn(2, 3, 40, 8), torch.randn(2, 3, 40, 8)
    ids = torch.randint(9, (2, 40))
    R = attlas.attend(torch.zeros(1, 3, 8, 4), torch.zeros(1, 3, 8, 4), mask=attlas.Causal())
    lengths = [40, 23]
    A = attlas.attend(q, k, mask=attlas.Causal() & attlas.Padding(lengths))
    both = heads.measure(A, ids, R, 4)
    alone = [
        heads.measure(attlas.attend(q[b : b + 1, :, :n], k[b : b + 1, :, :n], mask=attlas.Causal()), ids[b, :n], R, 4)
        for b, n in enumerate(lengths)
    ]
    for head in range(3):
        for field in (*NAMES.values(), "favourite", "distance"):
            wanted = sum(getattr(one[head], field) for one in alone) / 2
            assert getattr(both[head], field) == pytest.approx(wanted, abs=1e-5), field
        wanted = sum(one[head].entropy * n for one, n in zip(alone, lengths, strict=True)) / 63
        assert both[head].entropy == pytest.approx(wanted, abs=1e-5)
        assert both[head].tokens == 32


def test_short_texts_name_nothing_that_chance_reaches(tmp_path, capsys) -> None:
    torch.manual_seed(0)
    ids = torch.arange(11)[None]
    sharp = torch.eye(11)[None, None]
    A = attlas.attend(torch.cat([sharp.roll(1, 2) * 30, sharp * 0], 1), sharp.expand(1, 2, 11, 11),
                      attlas.ScaledDot(1.0), attlas.Causal())  # fmt: skip
    Atlas([make_entry(A)], ids=ids).save(tmp_path / "run.atlas")
    assert main(["stats", str(tmp_path / "run.atlas")]) == 0
    said = capsys.readouterr().out
    assert said.count("too short a text (11 tokens) to name heads local, broad") == 1
    rows = stats._records_of_heads(stats.open_atlas(tmp_path / "run.atlas", Terminal()))
    assert [row["what"] for row in rows] == ["previous token", "mixed"]


@pytest.mark.parametrize("tokens", [11, 40, 200])
def test_chance_is_what_uniform_weights_reach(tokens: int) -> None:
    zeros = torch.zeros(1, 1, tokens, 4)
    A = attlas.attend(zeros, zeros, mask=attlas.Causal())
    R = attlas.attend(torch.zeros(1, 1, 8, 4), torch.zeros(1, 1, 8, 4), mask=attlas.Causal())
    (head,) = heads.measure(A, torch.arange(tokens), R, 4)
    for kind in heads.PATTERNS:
        if kind.measure == "near" and tokens <= heads.NEAR:
            assert (kind.chance(tokens), head.near) == (1.0, 0.0)
        elif kind.measure not in ("induction", "duplicate", "breadth"):
            assert kind.chance(tokens) == pytest.approx(head.of(kind), abs=1e-5), kind.name
    assert detectable(0) == heads.PATTERNS
    assert set(detectable(200)) == set(heads.PATTERNS)
