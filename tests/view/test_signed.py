"""Weights that may be negative: tiles, lists, cells, tracks and pages, against the dense weights in float64."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.atlases import atlas_of

import attlas
from attlas.view import Service, export, preview, still
from attlas.view.codes import FIRST, LAST_POSITIVE, MASKED, PENDING, ZERO, decode_signed, encode_signed
from attlas.view.exact import Head
from attlas.view.pyramid import Pass, layout

N, HEADS = 300, 2


def matrices() -> dict[str, attlas.AttentionMatrix]:
    torch.manual_seed(0)
    q, k, q2, k2 = (torch.randn(1, HEADS, N, 8) for _ in range(4))
    A, B = (attlas.attend(*pair, mask=attlas.Causal()) for pair in ((q, k), (q2, k2)))
    units = [torch.nn.functional.normalize(t, dim=-1) for t in (q, k)]
    delta = attlas.transport(*units, -0.1 * torch.rand(1, HEADS, N), torch.rand(1, HEADS, N))
    return {"difference": A - 0.7 * B, "delta": 30.0 * delta, "symmetric": A + A.mT, "softmax": A}


MATRICES = matrices()
SIGNED = ("difference", "delta")


@pytest.fixture(scope="module", params=["difference", "delta", "symmetric"])
def case(request: pytest.FixtureRequest) -> Iterator[tuple[str, Service, np.ndarray]]:
    A = MATRICES[request.param]
    service = Service(A)
    yield request.param, service, A.to_dense()[0].double().numpy()
    service.close()


def ask(service: Service, name: str, /, **params: Any) -> Any:
    answer = service.answer(name, {field: str(value) for field, value in params.items()})
    assert answer.status == 200, answer.body
    if answer.kind == "json":
        return json.loads(answer.body)
    return np.frombuffer(answer.body, "<f4" if name in ("row", "column", "region", "track") else "<u2")


def by_size(values: np.ndarray, axis: int = -1) -> np.ndarray:
    places = np.expand_dims(np.abs(values).argmax(axis), axis)
    return np.take_along_axis(values, places, axis).squeeze(axis)


def test_codes_have_a_sign_and_a_size() -> None:
    weights = np.array([*np.geomspace(2.0**-47.9, 2.0**16, 500), *-np.geomspace(2.0**-47.9, 2.0**16, 500)])
    codes = encode_signed(weights, np.ones(1000, dtype=bool))
    assert codes.min() >= FIRST
    assert codes.max() < PENDING
    np.testing.assert_allclose(decode_signed(codes), weights, rtol=6.8e-4)
    assert ((codes > LAST_POSITIVE) == (weights < 0)).all()
    odd = encode_signed(np.array([0.0, -0.0, 1e-20, np.nan, 1e9, -1e9, 5.0]), np.array([True] * 6 + [False]))
    assert odd.tolist() == [ZERO] * 4 + [LAST_POSITIVE, 2 * LAST_POSITIVE, MASKED]
    assert np.isnan(decode_signed(np.array([PENDING], dtype=np.uint16)))


def test_what_is_shown_is_said(case: Any) -> None:
    name, service, dense = case
    (entry,) = ask(service, "info")["entries"]
    assert (entry["shares"], entry["softmax"], entry["signed"]) == (False, False, name in SIGNED)
    assert entry["largest"] == {"plain": pytest.approx(np.abs(dense).max())}
    assert ask(service, "pooling", entry=0, head=0) == {"pool": "max"}


@pytest.mark.parametrize("pool", ["max", "mean"])
def test_tiles_and_thumbnails_keep_signs(case: Any, pool: str) -> None:
    _, service, dense = case
    unit, count = np.abs(dense).max(), N // 2
    blocks = dense[:, : 2 * count, : 2 * count].reshape(HEADS, count, 2, count, 2).swapaxes(2, 3)
    allowed = np.ones((N, N)) if service.source.entries[0].entry.matrix.mask is None else np.tril(np.ones((N, N)))
    cells = allowed.reshape(count, 2, count, 2).swapaxes(1, 2).sum((-2, -1))
    flat = blocks.reshape(HEADS, count, count, 4)
    wanted = by_size(flat) if pool == "max" else flat.sum(-1) / np.maximum(cells, 1)
    for head in range(HEADS):
        codes = ask(service, "tile", entry=0, head=head, level=1, y=0, x=0, pool=pool).reshape(256, 256)
        found = unit * decode_signed(codes[:count, :count])
        np.testing.assert_allclose(found, wanted[head], atol=1e-6 * unit, rtol=2e-3)
        assert ((codes[:count, :count] == MASKED) == (cells == 0)).all()
        small = ask(service, "thumbnail", entry=0, head=head, size=64, pool=pool)
        assert (decode_signed(small) < 0).any() == (dense[head].min() < 0)
    mean = ask(service, "tile", entry=0, head="mean", level=0, y=0, x=0, pool=pool).reshape(256, 256)
    np.testing.assert_allclose(unit * decode_signed(mean), dense.mean(0)[:256, :256], atol=1e-6 * unit, rtol=2e-3)


def test_passes_and_samples_are_largest_by_size() -> None:
    A = MATRICES["difference"]
    dense = A.to_dense()[0, 1].double().numpy()
    for skipped, head in ((False, Head(A[:, 1:2], shares=False)), (True, Head(A, shares=False))):
        whole = dense if not skipped else A.to_dense()[0].double().mean(0).numpy()
        arrays = {name: np.zeros(*form) for name, form in layout(N, N).items()}
        result = Pass(N, N, arrays, 128)
        for band in range(len(result.done)):
            result.add(band, head.band(result.rows_of(band), 32))
        for track, axis in (("max_weight", 1), ("column_max", 0)):
            np.testing.assert_allclose(result.track(track), by_size(whole, axis), atol=1e-6)
        np.testing.assert_allclose(result.track("column_mass"), whole.sum(0), atol=1e-5)
        assert np.isnan(result.track("entropy")).all()
        codes, progress = result.tile(6, 0, 0, "max", head.codes)
        assert progress == 1
        corner = whole[192:256, :64].ravel()
        assert decode_signed(codes)[3, 0] == pytest.approx(by_size(corner), rel=1e-3)
    rows = torch.tensor([3, 30])
    table = Head(A[:, 1:2]).sampled(rows, [0, 18, N], "max")
    wanted = np.stack([by_size(dense[rows, :18]), by_size(dense[rows, 18:])], axis=-1)
    np.testing.assert_allclose(table.max, wanted, atol=1e-6)


def test_numbers_are_by_size_and_say_nothing_of_shares(case: Any) -> None:
    _, service, dense = case
    i, j, here = 200, 150, {"entry": 0, "head": 1}
    np.testing.assert_allclose(ask(service, "row", **here, i=i), dense[1, i], atol=1e-5)
    cell = ask(service, "cell", **here, i=i, j=j)
    assert cell["weight"] == pytest.approx(dense[1, i, j], abs=1e-6)
    assert cell["rank"] == 1 + (np.abs(dense[1, i]) > abs(dense[1, i, j])).sum()
    assert (cell["row_entropy"], cell["lse"], cell["logit"]) == (None, None, None)
    assert cell["row_mass"] == pytest.approx(dense[1, i].sum(), abs=1e-4)
    assert cell["column_mass"] == pytest.approx(dense[1, :, j].sum(), abs=1e-4)
    largest = ask(service, "top", **here, k=5)["cells"]
    order = np.argsort(-np.abs(dense[1]), axis=None)[:5]
    np.testing.assert_allclose([weight for _, _, weight in largest], dense[1].ravel()[order], atol=1e-5)
    np.testing.assert_allclose(ask(service, "track", **here, name="max_weight"), by_size(dense[1]), atol=1e-5)
    for question, params in (("track", {"name": "entropy"}), ("row", {"i": 3, "variant": "nosink"})):
        refused = service.answer(question, {key: str(value) for key, value in (here | params).items()})
        assert refused.status == 409
        assert b"shares of a row" in refused.body or b"no softmax" in refused.body
    pair = ask(service, "pair", entry=0, head="mean", i=i, j0=j, j1=j + 2, with_entry=0, with_head=0)
    assert pair["weights"] == pytest.approx(dense[:, i, j : j + 2].sum(-1), abs=1e-5)
    assert pair["agreement"] is None
    service.measure()
    table = ask(service, "heads")
    assert {column["name"] for column in table["columns"]} == {"max_weight", "row_mass"}
    assert all(not row["kinds"] for row in table["rows"])
    sums = [row["values"]["row_mass"] for row in table["rows"]]
    assert sums == pytest.approx(dense.sum(-1).mean(-1), abs=1e-4)


def test_a_page_of_both_kinds_of_layers(tmp_path: Path) -> None:
    atlas = atlas_of(MATRICES["delta"], MATRICES["softmax"])
    page = export(atlas, tmp_path / "page.html", heads=[(0, 1)], query=200).read_text("utf-8")
    data = json.loads(page.split('id="attlas-data"', 1)[1].split(">", 1)[1].split("</script>", 1)[0])
    assert [entry["shares"] for entry in data["info"]["entries"]] == [False, True]
    assert {(each["entry"], each["head"]) for each in data["packed"]} == {
        (layer, head) for layer in (0, 1) for head in (0, 1)
    }
    assert "track:0:0:max_weight" in data["parts"]
    assert "track:0:0:entropy" not in data["parts"]
    assert "track:1:0:entropy" in data["parts"]
    dense = MATRICES["delta"].to_dense()[0, 1, 200, 1:]
    assert f"cell:0:1:200:{1 + int(dense.abs().argmax())}" in data["parts"]


@pytest.mark.parametrize("picture", [still._sampled_codes, still._pooled_codes], ids=["sampled", "pooled"])
def test_a_preview_shows_sizes_and_says_so(picture: Any) -> None:
    A = MATRICES["softmax"][:, :1]
    above, below = (picture(each, 50).astype(int) for each in (A, -1.0 * A))
    assert np.abs(above - below).max() <= 1  # a code, of rounding
    assert above.max() > FIRST
    assert "sizes of weights, some of which are negative · .view() has their signs" in preview(-1.0 * A)
