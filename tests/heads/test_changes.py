"""Which heads attend differently in two recordings, beside the same numbers of dense weights."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

import attlas
from attlas import heads
from attlas.errors import DtypeError, OutOfRangeError, RecordingError, ShapeError
from attlas.heads.differences import aligned
from attlas.recording.atlas import Atlas, Entry


def recording(
    ids: list[int] | None, n: int = 0, *, seed: int = 0, mask: Any = None, sink: bool = False, batch: int = 1
) -> Atlas:
    """Two layers of two heads; equal tokens have equal queries and keys."""
    places = torch.arange(n) if ids is None else torch.tensor(ids)
    entries = []
    for layer in range(2):
        generator = torch.Generator().manual_seed(100 * seed + layer)
        q, k = (torch.randn(2, 50, 8, generator=generator)[:, places].expand(batch, -1, -1, -1) for _ in range(2))
        sinks = torch.randn(2, generator=generator) if sink else None
        A = attlas.attend(q.double(), k.double(), mask=mask, sink=None if sinks is None else sinks.double())
        shape = (batch, 2, len(places), len(places))
        entries.append(Entry(f"layers.{layer}", layer, "self", 0, (0, 1), (0, len(places)), 0, shape, A))
    return Atlas(entries, ids=None if ids is None else torch.tensor([ids] * batch))


def by_definition(first: Tensor, second: Tensor, pairs: list[tuple[int, int]]) -> tuple[float, Tensor]:
    """Return the share that moved of one head, and all changes of its cells; keys of one text alone come last."""
    rows, columns = torch.tensor([i for i, _ in pairs]), torch.tensor([j for _, j in pairs])
    P, Q = first[rows], second[columns]
    alone = [torch.tensor([x for x in range(W.shape[1]) if x not in set(t.tolist())], dtype=torch.int64)
             for W, t in ((P, rows), (Q, columns))]  # fmt: skip
    change = torch.cat([(P[:, rows] - Q[:, columns]).abs(), P[:, alone[0]], Q[:, alone[1]]], dim=1)
    return float(change.sum() / (P.sum() + Q.sum())), change


TEXT = [5, 6, 7, 8, 9, 5, 6, 11, 12, 13, 14, 15]
EDITS = {
    "inserted": [*TEXT[:4], 30, 31, *TEXT[4:]],
    "deleted": [*TEXT[:3], *TEXT[5:]],
    "replaced": [*TEXT[:6], 40, *TEXT[7:]],
    "replaced by more": [*TEXT[:6], 40, 41, *TEXT[7:]],
    "the same": TEXT,
}


@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("mask", [None, attlas.Causal()], ids=["all", "causal"])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("sink", [False, True])
def test_numbers_are_those_of_dense_weights(name: str, mask: Any, every: int, sink: bool) -> None:
    ids = EDITS[name]
    first, second = recording(TEXT, mask=mask, sink=sink), recording(ids, mask=mask, sink=sink)
    found = heads.changes(first, second, every=every)
    pairs = aligned(TEXT, ids)
    assert found.tokens.tolist() == [list(pair) for pair in pairs]
    assert len(found) == 4
    records = found.records()
    assert [record["moved"] for record in records] == sorted((r["moved"] for r in records), reverse=True)
    for record in records:
        layer, head = record["layer"], record["head"]
        P, Q = (atlas.entries[layer].need_matrix().to_dense()[0, head] for atlas in (first, second))
        # Queries are a sample of the aligned ones, and keys are all.
        rows = torch.tensor(pairs)[::every]
        moved, change = by_definition(P, Q, pairs)
        if every > 1:
            chosen = torch.arange(len(pairs))[::every]
            moved = float(change[chosen].sum() / (P[rows[:, 0]].sum() + Q[rows[:, 1]].sum()))
            change = change[chosen]
        assert record["moved"] == pytest.approx(moved, abs=1e-12)
        cells = found.cells(layer, head, 5)
        sizes = torch.tensor([abs(cell.first - cell.second) for cell in cells], dtype=torch.float64)
        most = change.flatten().topk(5).values
        torch.testing.assert_close(sizes, most[most > 0][: len(sizes)])
        assert len(sizes) == int((most > 0).sum())
        for cell in cells:
            (i, j), (x, y) = cell.query, cell.key
            assert [i, j] in rows.tolist()
            assert cell.first == pytest.approx(0.0 if x is None else float(P[i, x]))
            assert cell.second == pytest.approx(0.0 if y is None else float(Q[j, y]))
            assert x is None or y is None or (x, y) in pairs


def test_an_inserted_word_shifts_nothing() -> None:
    """What a causal head gives to a first word that was inserted is all that moves: the other weights shrink by it."""
    first, second = recording(TEXT, mask=attlas.Causal()), recording([30, *TEXT], mask=attlas.Causal())
    for record in heads.changes(first, second).records():
        given = second.entries[record["layer"]].need_matrix()[0, record["head"], 1:, 0]
        assert record["moved"] == pytest.approx(float(given.mean()))


def test_a_long_matrix_is_compared_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = recording(None, 50, seed=1, mask=attlas.Causal()), recording(None, 50, seed=2, mask=attlas.Causal())
    whole, told = heads.changes(first, second).records(), []
    monkeypatch.setitem(inspect.unwrap(heads.changes).__globals__, "_CELLS", 700)
    blocks = heads.changes(first, second, progress=told.append).records()
    assert len(told) > 8
    assert told == sorted(told)
    assert told[-1] == 1.0
    for a, b in zip(whole, blocks, strict=True):
        assert a["moved"] == pytest.approx(b["moved"], abs=1e-12)


def test_equal_layers_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("computed")

    monkeypatch.setitem(inspect.unwrap(heads.changes).__globals__, "_differences", refuse)
    assert {record["moved"] for record in heads.changes(recording(TEXT), recording(TEXT)).records()} == {0.0}
    with pytest.raises(AssertionError):
        heads.changes(recording(TEXT), recording(TEXT, mask=attlas.Causal()))


def test_signed_weights_are_compared_by_size() -> None:
    def signed(factor: float) -> Atlas:
        q, k, v = (torch.randn(1, 1, 9, 4, generator=torch.Generator().manual_seed(i)).double() for i in range(3))
        A = attlas.attend(q, k) - factor * attlas.attend(k, v)
        return Atlas([Entry("a", 0, "self", 0, (0,), (0, 9), 0, (1, 1, 9, 9), A)])

    first, second = signed(0.3), signed(0.9)
    P, Q = (atlas.entries[0].need_matrix().to_dense() for atlas in (first, second))
    wanted = float((P - Q).abs().sum() / (P.abs().sum() + Q.abs().sum()))
    assert heads.changes(first, second).records()[0]["moved"] == pytest.approx(wanted)


def test_what_stops_the_comparison_is_raised() -> None:
    def stop(share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        heads.changes(recording(TEXT), recording(EDITS["replaced"]), progress=stop)


def test_bad_input_is_refused_by_name() -> None:
    atlas = recording(TEXT)
    with pytest.raises(DtypeError, match="second must be a recording"):
        heads.changes(atlas, atlas.entries[0])  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match="one text"):
        heads.changes(recording(TEXT, batch=2), recording(TEXT, batch=2))
    with pytest.raises(ShapeError, match="same length"):
        heads.changes(recording(None, 7), recording(None, 8))
    with pytest.raises(ShapeError, match="every"):
        heads.changes(atlas, atlas, every=0)
    with pytest.raises(RecordingError, match="same name"):
        heads.changes(atlas, Atlas([]))
    found = heads.changes(atlas, atlas)
    with pytest.raises(OutOfRangeError, match="compared"):
        found.cells(7, 0)
    with pytest.raises(ShapeError, match="count"):
        found.cells(0, 0, 0)
    with pytest.raises(ShapeError, match="data"):
        found.records("csv")
