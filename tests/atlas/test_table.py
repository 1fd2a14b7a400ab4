"""One record a head: each statistic as one number, the same as computed from the dense weights."""

import importlib.util
import sys
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from tests.atlas.conftest import make_atlas, make_entry
from tests.messages import refusal

import attlas
from attlas import DtypeError, RecordingError, ShapeError, stats
from attlas.errors import MissingExtraError
from attlas.recording.atlas import Atlas

STATISTICS = (
    stats.Entropy(),
    stats.EffectiveKeys(),
    stats.MaxWeight(),
    stats.MaxLogit(),
    stats.Coverage((0.5, 0.9)),
    stats.ColumnMass(),
    stats.ColumnMax(),
    stats.LogitMoments(),
    stats.TopK(2),
    stats.TopK(3),
    stats.TailMass(2),
    stats.ArgMax(),
    stats.Picture(2, 2),
    stats.Offsets(),
    stats.ColumnMass(rows=slice(-2, None)),
)


class Nothing(stats.Statistic):
    """A statistic of a user's own, one number a row."""

    def start(self, problem):
        return torch.full(problem.shape[:3], 7.0)

    def step(self, carry, part, at):
        return carry

    def finish(self, carry):
        return carry


@pytest.fixture
def square() -> attlas.AttentionMatrix:
    return attlas.attend(torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4), mask=attlas.Causal())


def test_columns_are_those_of_dense_weights(square) -> None:
    atlas = Atlas([make_entry(square, layer=4, heads=(1, 5, 7))])
    atlas.collect(*STATISTICS, Nothing())
    table = atlas.table()
    assert [(record["layer"], record["head"]) for record in table] == [(4, 1), (4, 5), (4, 7)]
    weights, logits = square.to_dense().double(), square.logits.to_dense().double()
    allowed = logits.isfinite()
    mean = logits.masked_fill(~allowed, 0).sum(-1) / allowed.sum(-1)
    variance = (logits - mean.unsqueeze(-1)).masked_fill(~allowed, 0).square().sum(-1) / allowed.sum(-1)
    ordered = weights.sort(-1, descending=True).values
    wanted = {
        "entropy": torch.special.entr(weights).sum(-1).mean((0, 2)),
        "effective_keys": (1 / weights.square().sum(-1)).mean((0, 2)),
        "max_weight": weights.amax(-1).mean((0, 2)),
        "max_logit": logits.amax((0, 2, 3)),
        "coverage_1": (1 + (ordered.cumsum(-1) < 0.5).sum(-1)).double().mean((0, 2)),
        "coverage_2": (1 + (ordered.cumsum(-1) < 0.9).sum(-1)).double().mean((0, 2)),
        "first_key_mass": weights[..., 0].mean((0, 2)),
        "logit_mean": mean.mean((0, 2)),
        "logit_variance": variance.mean((0, 2)),
        "top_k_mass": ordered[..., :2].sum(-1).mean((0, 2)),
        "top_k_2_mass": ordered[..., :3].sum(-1).mean((0, 2)),
        "tail_mass": ordered[..., 2:].sum(-1).mean((0, 2)),
        "first_key_mass_2": weights[..., -2:, 0].mean((0, 2)),
        "nothing": torch.full((3,), 7.0, dtype=torch.float64),
    }
    assert list(table[0]) == ["layer", "head", "kind", "name", "call", "queries", "keys", *wanted]
    for name, numbers in wanted.items():
        found = torch.tensor([record[name] for record in table], dtype=torch.float64)
        torch.testing.assert_close(found, numbers, atol=1e-5, rtol=1e-5, msg=name)
    assert all(type(record["entropy"]) is float for record in table)


def test_every_record_has_all_columns() -> None:
    table = make_atlas().table()
    assert len(table) == 4 * 4 + 2 + 4
    assert len({tuple(record) for record in table}) == 1
    assert table[0]["logit_mean"] is not None
    assert table[-1]["logit_mean"] is None
    assert table[-1]["entropy"] > 0
    assert [record["kind"] for record in table[12:16]] == ["cross"] * 4
    assert table[-3]["queries"] == table[-3]["keys"] - 3 == 6


def test_nothing_to_average() -> None:
    entry = make_entry(attlas.attend(torch.zeros(1, 2, 0, 4), torch.zeros(1, 2, 5, 4)))
    atlas = Atlas([entry])
    atlas.collect(stats.Entropy(), stats.MaxLogit())
    assert [(record["head"], record["queries"], "entropy" in record) for record in atlas.table()] == [
        (0, 0, False),
        (1, 0, False),
    ]
    assert Atlas().table() == []
    unseen = attlas.attend(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4), mask=~attlas.Window(None, None))
    atlas = Atlas([make_entry(unseen)])
    atlas.collect(stats.ColumnMass(), stats.MaxLogit())
    assert atlas.table()[0]["first_key_mass"] == 0.0
    assert atlas.table()[0]["max_logit"] == -float("inf")


@pytest.mark.parametrize("side", ["left", "right"])
def test_tokens_are_those_of_each_text_alone(side: str) -> None:
    q, k = torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4)
    mask = attlas.Causal() & attlas.Padding([7, 4], side=side)
    tokens = [list("abcdefg"), list("...wxyz") if side == "left" else list("wxyz...")]
    entry = make_entry(attlas.attend(q, k, mask=mask), heads=(1, 4, 6))
    table = Atlas([entry], tokens=tokens).token_table(0, head=4, sequence=1)
    first = 3 if side == "left" else 0
    part = slice(first, first + 4)
    alone = attlas.attend(q[1, 1, part], k[1, 1, part], mask=attlas.Causal()).to_dense().double()
    assert [(record["position"], record["token"]) for record in table] == list(
        zip(range(first, first + 4), "wxyz", strict=True)
    )
    assert [record["top_key"] - first for record in table] == alone.argmax(-1).tolist()
    assert [record["top_token"] for record in table] == ["wxyz"[j] for j in alone.argmax(-1)]
    wanted = {
        "entropy": -torch.special.xlogy(alone, alone).sum(-1),
        "effective_keys": 1 / alone.square().sum(-1),
        "top_weight": alone.amax(-1),
        "mass_received": alone.sum(0),
    }
    for name, numbers in wanted.items():
        found = torch.tensor([record[name] for record in table], dtype=torch.float64)
        torch.testing.assert_close(found, numbers, atol=1e-6, rtol=1e-6, msg=name)


def test_tokens_of_a_later_part_and_of_other_texts() -> None:
    A = attlas.attend(torch.randn(1, 2, 3, 4), torch.randn(1, 2, 6, 4), mask=attlas.Causal())
    text = list("abcdefghij")
    later = make_entry(A, queries=(7, 10), first_key=4)
    cross = make_entry(A, kind="cross", queries=(0, 3))
    encoder = make_entry(A, kind="encoder", queries=(3, 6))
    atlas = Atlas([later, cross, encoder], tokens=text)
    dense = A.to_dense()[0, 1]
    table = atlas.token_table(0, 1)
    assert [record["token"] for record in table] == ["h", "i", "j"]
    assert [record["top_token"] for record in table] == [text[4 + j] for j in dense.argmax(-1)]
    torch.testing.assert_close(torch.tensor([record["mass_received"] for record in table]), dense.sum(0)[3:])
    assert [(r["token"], r["top_token"], r["mass_received"]) for r in atlas.token_table("cross.0", 1)] == [
        (token, None, None) for token in "abc"
    ]
    other = atlas.token_table("encoder.0", 1)
    assert [(record["token"], record["top_token"]) for record in other] == [(None, None)] * 3
    assert other[0]["mass_received"] == pytest.approx(float(dense.sum(0)[3]))
    empty = attlas.attend(torch.zeros(1, 1, 0, 4), torch.zeros(1, 1, 5, 4))
    assert Atlas([make_entry(empty)]).token_table(0, 0) == []


def test_token_table_names_what_is_missing(atlas) -> None:
    with pytest.raises(attlas.OutOfRangeError, match=r"found: heads 0, 2, 5, 7 of self\.1"):
        atlas.token_table((1, 0), head=1)
    with pytest.raises(attlas.OutOfRangeError, match="found: 2 sequences"):
        atlas.token_table(0, head=1, sequence=2)
    with pytest.raises(RecordingError, match=r"^atlas\.token_table\(\): the weights of a layer are made from"):
        atlas.token_table(3, head=0)
    with pytest.raises(ShapeError, match=r"^atlas\.token_table\(\): data must be"):
        atlas.token_table(0, head=0, data="csv")


def test_collect_reports_progress_and_replaces(atlas) -> None:
    steps = []
    before = atlas.entries[0].statistics["top_k"]
    atlas.collect(stats.TopK(3), stats.MaxWeight(), progress=lambda done, total: steps.append((done, total)))
    assert steps == [(done, 5) for done in range(1, 6)]
    assert atlas.entries[0].statistics["top_k"].values.shape[-1] == 3 != before.values.shape[-1]
    assert "max_weight" not in atlas.entries[-1].statistics


def test_collect_needs_tokens_and_objects(atlas) -> None:
    few = Atlas([replace(entry, matrix=None) for entry in atlas.entries[:2]])
    with pytest.raises(RecordingError, match=r"^atlas\.collect\(\): the weights of a layer are made from its q and k"):
        few.collect(stats.Entropy())
    assert refusal(DtypeError, lambda: atlas.collect(stats.Entropy)) == "statistics: the class Entropy"


def test_data_frames(atlas, monkeypatch) -> None:
    library = ModuleType("polars")
    library.DataFrame = lambda records: ("frame", records)
    monkeypatch.setitem(sys.modules, "polars", library)
    assert atlas.table("polars") == ("frame", atlas.table())
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert refusal(MissingExtraError, lambda: atlas.table("pandas")) == "atlas.table(): no module named pandas"
    assert refusal(ShapeError, lambda: atlas.table("csv")) == "atlas.table(): data = 'csv'"


@pytest.mark.skipif(importlib.util.find_spec("pandas") is None, reason="pandas is not installed")
def test_pandas_itself(atlas) -> None:
    assert atlas.table("pandas").groupby("layer").entropy.mean().shape == (4,)
    assert list(atlas.token_table(2, head=0, data="pandas").query("position >= 10").top_weight <= 1) == [True, True]


# ------------------------------------------------------------------------------------------------------ steps of a text


ROW_STATISTICS = (stats.Entropy(), stats.MaxLogit(), stats.ColumnMass(), stats.LogitMoments(), stats.TopK(2))
STEPS = [range(5), range(5, 6), range(6, 9)]


def steps_of(A: attlas.AttentionMatrix, padded: torch.Tensor | None = None) -> Atlas:
    """A recording of a text in three steps, each an entry, as of a T5."""
    entries = [
        make_entry(A.window(rows, range(rows.stop)), layer=2, call=call, queries=(rows.start, rows.stop))
        for call, rows in enumerate(STEPS)
    ]
    if padded is not None:
        entries = [
            replace(entry, query_mask=padded[:, rows.start : rows.stop])
            for entry, rows in zip(entries, STEPS, strict=True)
        ]
    atlas = Atlas(entries)
    atlas.collect(*ROW_STATISTICS)
    return atlas


@pytest.mark.parametrize("padding", [False, True])
def test_steps_are_joined_to_the_row_of_the_whole_text(padding: bool) -> None:
    q, k = torch.randn(2, 4, 9, 3), torch.randn(2, 4, 9, 3)
    keep = torch.ones(2, 9, dtype=torch.bool)
    mask = attlas.Causal()
    if padding:
        keep[1, :3] = False
        mask = mask & attlas.Padding([9, 6], side="left")
    A = attlas.attend(q, k, mask=mask)
    whole = Atlas([replace(make_entry(A, layer=2), query_mask=keep if padding else None)])
    whole.collect(*ROW_STATISTICS)
    steps = steps_of(A, keep if padding else None)
    assert len(steps.table()) == 12
    for joined, wanted in zip(steps.table(join_steps=True), whole.table(join_steps=True), strict=True):
        assert joined.keys() == wanted.keys()
        for name, number in wanted.items():
            assert joined[name] == (pytest.approx(number, abs=1e-6) if isinstance(number, float) else number), name


def test_only_steps_of_one_text_are_joined() -> None:
    A = attlas.attend(torch.randn(2, 4, 9, 3), torch.randn(2, 4, 9, 3), mask=attlas.Causal())
    steps = steps_of(A).entries
    for change in ({"queries": (0, 1)}, {"call": 7}, {"layer": 3}, {"heads": (0, 1, 2, 5)}, {"kind": "cross"}):
        entries = [steps[0], replace(steps[1], **change), steps[2]]
        assert len(Atlas(entries).table(join_steps=True)) == 12, change
    few = replace(steps[1], statistics={"entropy": steps[1].statistics["entropy"]})
    table = Atlas([steps[0], few, steps[2]]).table(join_steps=True)
    assert len(table) == 4
    assert "max_logit" not in table[0]
    assert table[0]["queries"] == table[0]["keys"] == 9
