"""Tables of spans are sums of the dense matrix."""

from collections.abc import Callable

import pytest
import torch
from tests.atlas.conftest import make_entry

import attlas
from attlas import heads
from attlas.recording.atlas import Atlas

close = torch.testing.assert_close
SPANS = {"system": (0, 3), "user": slice(3, 9), "document": range(9, 20), "again": (5, 12)}


@pytest.mark.parametrize("kind", ["causal", "bidirectional", "cache", "packed", "left padding, sinks"])
def test_a_table_is_the_mean_mass_between_spans(make: Callable, kind: str) -> None:
    case = make(kind)
    m, n = case.weights.shape[-2:]
    table = heads.span_table(case.A, SPANS)
    assert len(table) == 1
    assert table.names == tuple(SPANS)
    union = torch.zeros(n, dtype=torch.bool)
    union[:20] = True
    for a, span in enumerate([(0, 3), (3, 9), (9, 20), (5, 12)]):
        rows = slice(max(span[0] - (n - m), 0), max(span[1] - (n - m), 0))
        count = len(range(m)[rows])
        assert table.queries[a] == count
        for b, key_span in enumerate([(0, 3), (3, 9), (9, 20), (5, 12)]):
            expected = case.weights[..., rows, slice(*key_span)].sum((-2, -1)) / (count or torch.nan)
            close(table.weight[0, ..., a, b], expected, equal_nan=True)
        close(table.rest[0, ..., a], 1 - case.weights[..., rows, union].sum((-2, -1)) / (count or torch.nan),
              equal_nan=True)  # fmt: skip


def test_records_name_layer_head_and_spans() -> None:
    layers = [attlas.attend(torch.randn(2, 3, 10, 4), torch.randn(2, 3, 10, 4)) for _ in range(2)]
    table = heads.span_table(layers, {"prompt": (0, 7), "generated": (7, 10)})
    records = table.records()
    assert len(records) == 2 * 3 * 2 * 2
    assert records[0].keys() == {"layer", "head", "from", "to", "queries", "weight"}
    (record,) = [r for r in records if (r["layer"], r["head"], r["from"], r["to"]) == (1, 2, "generated", "prompt")]
    assert record["queries"] == 3
    assert record["weight"] == pytest.approx(float(layers[1].to_dense()[:, 2, 7:, :7].sum(-1).mean()), rel=1e-5)
    one = heads.span_table((A for A in [layers[0][0]]), {"all": (0, 10)})
    assert [r["weight"] for r in one.records()] == pytest.approx([1.0, 1.0, 1.0], rel=1e-5)


def test_spans_without_queries_are_left_out_of_the_records() -> None:
    A = attlas.attend(torch.randn(1, 2, 4), torch.randn(1, 6, 4))
    records = heads.span_table(A, {"prompt": (0, 4), "generated": (4, 6)}).records()
    assert {record["from"] for record in records} == {"generated"}
    assert sum(record["weight"] for record in records) == pytest.approx(1.0, rel=1e-5)


def test_an_atlas_is_its_layers() -> None:
    layers = [attlas.attend(torch.randn(1, 2, 6, 4), torch.randn(1, 2, 6, 4), mask=attlas.Causal()) for _ in range(3)]
    entries = [make_entry(A, layer=i) for i, A in enumerate(layers)]
    atlas = Atlas(entries, spans={"user": (0, 4), "answer": (4, 6)})
    close(heads.span_table(atlas, atlas.spans).weight, heads.span_table(layers, atlas.spans).weight)
    close(heads.rollout(atlas, [5]), heads.rollout(layers, [5]))
    close(heads.flow(atlas), heads.flow(layers))
