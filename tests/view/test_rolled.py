"""Rollout as one more layer of the page: its numbers, its pictures, where it is refused and how it waits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.view.cases import ask, facts, numbers, wait

import attlas
from attlas import heads
from attlas.recording.atlas import Atlas, Entry
from attlas.view import Service, rolled
from attlas.view.codes import decode


def layer(number: int, n: int = 70, *, kind: str = "self", seed: int = 0, call: int = 0, **given: Any) -> Entry:
    """Return an entry of two heads of random tokens; `given` are arguments of `attend`."""
    generator = torch.Generator().manual_seed(100 * number + seed)
    batch, m = given.pop("batch", 1), given.pop("m", n)
    q, k = (2 * torch.randn(batch, 2, length, 8, generator=generator) for length in (m, n))
    A = attlas.attend(q, k, **{"mask": attlas.Causal(), **given})
    return Entry(f"layers.{number}", number, kind, call, (0, 1), (0, m), 0, (batch, 2, m, n), A)


def atlas_of_layers(entries: Sequence[Entry], **details: Any) -> Atlas:
    return Atlas(list(entries), details=details)


def rollout_in_float64(layers: Sequence[np.ndarray]) -> np.ndarray:
    """Return the product of all layers by its definition; layers of shape (heads, n, n)."""
    n = layers[0].shape[-1]
    total = np.eye(n)
    for weights in layers:
        total = (0.5 * weights.astype(np.float64).mean(0) + 0.5 * np.eye(n)) @ total
    return total


def row(service: Service, entry: int, head: int, i: int, batch: int = 0) -> np.ndarray:
    return numbers(service, "row", entry=entry, head=head, i=i, batch=batch)


@pytest.mark.parametrize("mask", [attlas.Causal(), attlas.Window(9, 0) & attlas.Causal(), None], ids=repr)
def test_rows_are_those_of_the_definition(mask: Any) -> None:
    entries = [layer(number, mask=mask) for number in range(3)]
    service = Service(atlas_of_layers(entries))
    told = facts(service, "info")
    *layers, own = told["entries"]
    assert [each["kind"] for each in layers] == ["self"] * 3
    assert (own["kind"], own["heads"], own["shares"], own["readable"]) == ("rollout", [0, 1, 2], True, True)
    assert own["causal"] == (mask is not None)
    dense = [entry.matrix.to_dense()[0].double().numpy() for entry in entries]
    for depth in range(3):
        wanted = rollout_in_float64(dense[: depth + 1])
        found = np.stack([row(service, 3, depth, i) for i in range(70)])
        np.testing.assert_allclose(found, wanted, atol=1e-6)
        np.testing.assert_allclose(found.sum(1), 1.0, atol=1e-5)
    service.close()


def test_numbers_are_those_of_the_function() -> None:
    entries = [
        layer(number, mask=attlas.Causal() & attlas.Padding([70, 41], side=side), batch=2)
        for number, side in ((0, "right"), (1, "right"))
    ]
    atlas = atlas_of_layers(entries)
    service = Service(atlas)
    wanted = heads.rollout(atlas, rows=range(70))
    for batch in (0, 1):
        found = np.stack([row(service, 2, 1, i, batch) for i in range(70)])
        np.testing.assert_allclose(found, wanted[batch].numpy(), atol=1e-6)
    assert not row(service, 2, 1, 60, 1).any()  # a query that is padding
    service.close()


def test_every_question_answers() -> None:
    service = Service(atlas_of_layers([layer(0, 300), layer(1, 300)]))
    place = {"entry": 2, "head": 1}
    dense = np.stack([row(service, 2, 1, i) for i in range(300)])
    tile = numbers(service, "tile", **place, level=0, y=0, x=0).reshape(256, 256)
    np.testing.assert_allclose(decode(tile)[np.tril_indices(256)], dense[:256, :256][np.tril_indices(256)], rtol=4e-4)
    assert not tile[np.triu_indices(256, 1)].any()  # masked
    entropy = numbers(service, "track", **place, name="entropy")
    np.testing.assert_allclose(entropy, -(dense * np.log(np.maximum(dense, 1e-30))).sum(1), atol=1e-4)
    mass = numbers(service, "track", **place, name="column_mass")
    np.testing.assert_allclose(mass, dense.sum(0), rtol=1e-4)
    cell = facts(service, "cell", **place, i=200, j=10)
    assert cell["weight"] == pytest.approx(dense[200, 10], abs=1e-7)
    assert (cell["logit"], cell["allowed"]) == (None, True)
    (best,) = facts(service, "top", **place, k=1, r0=100, r1=200)["cells"]
    assert best[2] == pytest.approx(dense[100:200].max(), abs=1e-6)
    assert ask(service, "thumbnail", **place, pool="suited").status == 200
    assert service.answer("cell", {"entry": "2", "head": "1", "variant": "value", "i": "0", "j": "0"}).status == 409
    service.measure()
    table = facts(service, "heads")
    own = [each for each in table["rows"] if each["entry"] == 2]
    assert own[1]["values"]["entropy"] == pytest.approx(entropy.mean(), abs=1e-3)
    assert all(not each["kinds"] for each in own)
    assert table["telling"] is None or table["telling"]["entry"] < 2
    service.close()


def test_a_page_that_works_offline_has_it(tmp_path: Any) -> None:
    atlas = atlas_of_layers([layer(0), layer(1)])
    page = atlas.export(tmp_path / "page.html").read_text("utf-8")
    assert '"kind":"rollout"' in page
    assert '"tile:2:1:0:0:0"' in page
    service = Service(atlas)
    data = facts(service, "offline", entry=2, head=1, pool="max")["data"]
    assert [(each["entry"], each["head"], each["exact"]) for each in data["packed"]] == [(2, 1, True)]
    service.close()


def linear(number: int) -> Entry:
    q, k = torch.randn(1, 2, 70, 4), torch.randn(1, 2, 70, 4)
    A = attlas.transport(q, k, scale=1.0)
    return Entry(f"layers.{number}", number, "self", 0, (0, 1), (0, 70), 0, (1, 2, 70, 70), A)


@pytest.mark.parametrize(
    ("entries", "details", "reason"),
    [
        ([layer(0), layer(1), layer(0, kind="cross", mask=None)], {}, [rolled._CROSS, "0"]),
        ([layer(0), layer(1, 60)], {}, [rolled._LENGTHS, "1"]),
        ([layer(0), layer(1, m=30)], {}, [rolled._LENGTHS, "1"]),
        ([layer(0), linear(1)], {}, [rolled._NO_SHARES, "1"]),
        ([layer(0), layer(2)], {"layer_counts": {"self": 4}}, [rolled._MISSING, "1, 3"]),
        ([layer(0), layer(1), layer(1, call=1)], {}, [rolled._PASSES, "1"]),
    ],
    ids=["cross", "lengths", "cached", "signed", "missing", "passes"],
)
def test_what_cannot_be_rolled_out_is_named(entries: list[Entry], details: dict[str, Any], reason: list[str]) -> None:
    service = Service(atlas_of_layers(entries, **details))
    told = facts(service, "info")
    assert told["no_rollout"] == reason
    assert all(each["kind"] != "rollout" for each in told["entries"])
    service.close()


def test_layers_of_which_statistics_were_kept() -> None:
    entries = [layer(0), layer(1)]
    bare = Entry("layers.1", 1, "self", 0, (0, 1), (0, 70), 0, (1, 2, 70, 70))
    service = Service(atlas_of_layers([entries[0], bare]))
    assert facts(service, "info")["no_rollout"] == [rolled._NO_WEIGHTS, "1"]
    service.close()


def test_one_layer_and_one_matrix_have_none_and_need_no_reason() -> None:
    for shown in (atlas_of_layers([layer(0)]), layer(0).matrix):
        service = Service(shown)
        assert len(facts(service, "info")["entries"]) == 1
        assert facts(service, "info")["no_rollout"] is None
        service.close()


def test_long_texts_are_refused_with_their_size_and_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rolled, "_MOST_CELLS", 2 * 70 * 70 - 1)
    service = Service(atlas_of_layers([layer(0), layer(1)]))
    reason = facts(service, "info")["no_rollout"]
    assert reason[0] == rolled._TOO_LARGE
    assert reason[1:3] == ["2", "70"]
    assert "heads.rollout" in reason[-1]
    service.close()


def test_a_long_one_is_computed_in_the_background_with_its_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rolled, "_IMMEDIATE_PRODUCTS", 0)
    monkeypatch.setattr(rolled, "_CELLS_AT_ONCE", 4 * 300)
    service = Service(atlas_of_layers([layer(0, 300), layer(1, 300)]))
    asked = {"entry": 2, "head": 1, "level": 0, "y": 0, "x": 0}
    first = ask(service, "tile", **asked)
    assert first.progress < 1
    assert not first.final
    assert set(np.frombuffer(first.body, "<u2")) == {65535}
    thumbnail = ask(service, "thumbnail", entry=2, head=0)
    assert thumbnail.sampled or thumbnail.progress == 1
    wait(lambda: ask(service, "tile", **asked).progress == 1)
    wanted = np.stack([row(service, 2, 1, i) for i in range(256)])[:, :256]
    found = decode(numbers(service, "tile", **asked).reshape(256, 256))
    np.testing.assert_allclose(found[np.tril_indices(256)], wanted[np.tril_indices(256)], rtol=4e-4)
    service.close()


def test_a_closed_viewer_computes_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rolled, "_IMMEDIATE_PRODUCTS", 0)
    service = Service(atlas_of_layers([layer(0, 300), layer(1, 300)]))
    head = service.source.entries[2].entry.matrix[:, 1:]
    service.close()
    with pytest.raises(RuntimeError, match="the viewer was closed"):
        head.to_dense()
