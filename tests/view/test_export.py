"""The page that is written without a browser: what it holds is what the matrices say."""

import base64
import re
import zlib
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.atlases import atlas_of, random_matrix
from tests.pages import data_of
from tests.view.cases import facts

import attlas
from attlas import stats
from attlas.errors import RecordingError, ShapeError
from attlas.recording.atlas import Atlas, Bookmark
from attlas.view import Service, codes, export, offline, packing

N, HEADS = 700, 3
TOKENS = [f" t{i}" for i in range(N - 2)] + ["</script><b>", "🦊"]
CODE_ERROR = 2.0 ** (32 / 65532) - 1 + 1e-5


def recording(*matrices: attlas.AttentionMatrix, keep: bool = True, collect: bool = True) -> Atlas:
    side = min(matrices[0].shape[-1], 100)
    wanted = {"entropy": stats.Entropy(), "column_mass": stats.ColumnMass(), "top_k": stats.TopK(8)}
    wanted["picture"] = stats.Picture(side, side, pool="max")
    atlas = atlas_of(*matrices)
    entries = [
        replace(
            entry,
            matrix=A if keep else None,
            statistics=dict(zip(wanted, A.collect(*wanted.values()), strict=True)) if collect else {},
        )
        for entry, A in zip(atlas.entries, matrices, strict=True)
    ]
    tokens, details = TOKENS[: matrices[0].shape[-1]], {"source": "a & b.py", "seconds": 1.5}
    return Atlas(entries, model="tiny <model>", tokens=tokens, details=details)


def matrix(n: int = N, seed: int = 0) -> attlas.AttentionMatrix:
    return random_matrix(n, HEADS, seed, 3.0)


def numbers(data: dict[str, Any], key: str, dtype: str) -> np.ndarray:
    part = data["parts"][key]
    raw = np.frombuffer(zlib.decompress(base64.b64decode(part["text"]), -15), np.uint8)
    return np.frombuffer(raw.reshape(part["width"], -1).T.tobytes(), dtype)


def pooled(dense: np.ndarray, side: int) -> np.ndarray:
    """Return the largest weight of each block, -1 where nothing is allowed."""
    n = len(dense)
    whole = np.full([-(-n // side) * side] * 2, -1.0)
    whole[:n, :n] = np.where(np.tri(n, dtype=bool), dense, -1.0)
    return whole.reshape(len(whole) // side, side, -1, side).max((1, 3))


def check_rows(data: dict[str, Any], name: str, dense: np.ndarray, kept: int) -> None:
    n = len(dense)
    keys = np.arange(n)[:, None] - numbers(data, f"gaps:{name}", "<i4").reshape(n, kept)
    weights = codes.decode(numbers(data, f"kept:{name}", "<u2")).reshape(n, kept)
    np.testing.assert_allclose(weights, -np.sort(-dense, axis=-1)[:, :kept], rtol=CODE_ERROR, atol=1e-18)
    seen = weights > 0
    np.testing.assert_allclose(np.take_along_axis(dense, keys.clip(0, n - 1), -1)[seen], weights[seen], rtol=CODE_ERROR)


@pytest.mark.parametrize("collect", [True, False])
def test_heads_in_detail_and_overviews_equal_the_dense_matrix(tmp_path: Path, collect: bool) -> None:
    first, second = matrix(), matrix(seed=1)
    told: list[float] = []
    path = export(
        recording(first, second, collect=collect), tmp_path / "page.html", heads=[(1, 2)], progress=told.append
    )
    data = data_of(path)
    assert data["texts"]["0"]["tokens"] == TOKENS
    assert data["state"] | {"entry": 1, "head": 2} == data["state"]
    assert (data["packed"][0]["entry"], data["packed"][0]["head"]) == (1, 2)
    assert [each["entry"] for each in data["packed"][6:]] == [2, 2]  # rollouts come behind all heads
    assert told == sorted(told)
    dense = second.to_dense()[0, 2].double().numpy()
    assert data["packed"][0] | {"finest": 0, "exact": True, "kept": 0} == data["packed"][0]
    np.testing.assert_allclose(numbers(data, "exact:1:2", "<f4").reshape(N, N), dense, rtol=1e-4, atol=1e-9)
    tile = numbers(data, "tile:1:2:1:0:0", "<u2").reshape(256, 256)
    np.testing.assert_array_equal(tile == codes.MASKED, pooled(dense, 2)[:256, :256] < 0)
    np.testing.assert_allclose(codes.decode(tile), pooled(dense, 2)[:256, :256].clip(0), rtol=CODE_ERROR, atol=1e-18)
    for each in data["packed"][1:6]:
        name, A = f"{each['entry']}:{each['head']}", (first, second)[each["entry"]]
        dense = A.to_dense()[0, each["head"]].double().numpy()
        assert (each["finest"], each["block"], each["kept"]) == (2, None, 8)
        tile = numbers(data, f"tile:{name}:2:0:0", "<u2").reshape(256, 256)[:175, :175]
        np.testing.assert_allclose(codes.decode(tile), pooled(dense, 4).clip(0), rtol=CODE_ERROR, atol=1e-18)
        check_rows(data, name, dense, 8)
        np.testing.assert_allclose(numbers(data, f"track:{name}:column_mass", "<f4"), dense.sum(0), rtol=1e-3)


def test_many_heads_are_shown_by_the_pictures_that_were_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing, "_TILES_BYTES", 0)
    A = matrix()
    data = data_of(export(recording(A), tmp_path / "page.html", heads=[(0, 0)]))
    assert [(each["finest"], each["block"]) for each in data["packed"][1:]] == [(2, 7)] * 2
    tile = numbers(data, "tile:0:1:2:0:0", "<u2").reshape(256, 256)[:175, :175]
    picture = A.collect(stats.Picture(100, 100, pool="max"))[0][0, 1].double().nan_to_num(0.0).numpy()
    block = ((np.arange(175) + 0.5) * 4 // 7).astype(int)  # the block in which the middle of a pixel lies
    np.testing.assert_allclose(codes.decode(tile), picture[block][:, block], rtol=CODE_ERROR, atol=1e-18)


def test_a_picture_of_means_is_not_taken_for_one_of_maxima(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_TILES_BYTES", 0)
    atlas = recording(matrix())
    for entry in atlas.entries:
        entry.statistics["picture"] = entry.need_matrix().collect(stats.Picture(100, 100))[0]
    data = data_of(export(atlas, tmp_path / "page.html", heads=[(0, 0)]))
    assert [each["block"] for each in data["packed"]] == [None] * 3


def test_statistics_alone_make_a_page(tmp_path: Path) -> None:
    A = matrix()
    data = data_of(export(recording(A, keep=False), tmp_path / "page.html"))
    (entry,) = data["info"]["entries"]
    assert (entry["readable"], entry["causal"]) == (True, True)
    assert [(each["finest"], each["block"], each["kept"]) for each in data["packed"]] == [(2, 7, 8)] * 3
    for head in range(HEADS):
        check_rows(data, f"0:{head}", A.to_dense()[0, head].double().numpy(), 8)
    both = attlas.attend(*(torch.randn(1, HEADS, 300, 8) for _ in range(2)))
    (entry,) = data_of(export(recording(both, keep=False), tmp_path / "page.html"))["info"]["entries"]
    assert entry["causal"] is False


def test_a_matrix_makes_a_page_that_asks_for_nothing(tmp_path: Path) -> None:
    path = export(matrix(), tmp_path / "page.html", tokens=TOKENS, title="a <b> title", query=3)
    text = path.read_text("utf-8")
    assert text.count("</script>") == 2
    assert "<title>a &lt;b&gt; title · attlas</title>" in text
    assert "default-src 'none'" in text
    assert not re.findall(r"""(?:src|href)=["'](?!data:|#|\$\{canvas\.toDataURL\(\)\})""", text)
    data = data_of(path)
    assert data["texts"]["0"]["tokens"] == TOKENS
    assert data["state"]["pointed"] == {"i": 3, "j": 3}


def test_what_the_page_says_of_the_recording(tmp_path: Path) -> None:
    titles = data_of(export(recording(matrix()), tmp_path / "page.html"))["info"]["about"]
    about = {title: " ".join(text.format(*values) for text, *values in found) for title, found in titles}
    assert about["Recorded"] == "tiny <model>, reading 700 tokens of a & b.py."
    assert about["Memory"].startswith("Stored in float32, the matrices of its 3 heads would take 5.6 MiB; ")
    assert about["Memory"].endswith(" of queries, keys and statistics. To run and read it took 1.5 s.")


def test_heads_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ShapeError, match=r"(?s)layer 0, head 3.*fix: heads from 0\.0 to 0\.2"):
        export(matrix(), tmp_path / "page.html", heads=[(0, 3)])
    with pytest.raises(RecordingError, match="a page needs weights"):
        export(recording(matrix(), keep=False, collect=False), tmp_path / "page.html")
    assert not list(tmp_path.iterdir())


def test_the_atlas_has_it_as_a_method(tmp_path: Path) -> None:
    assert recording(matrix(60)).export(tmp_path / "page.html") == tmp_path / "page.html"


@pytest.mark.parametrize(("title", "shown"), [("/*data*/", "/*data*/"), ("a\ud800b", "a?b")])
def test_any_title_leaves_the_data_where_they_belong(title: str, shown: str, tmp_path: Path) -> None:
    text = export(matrix(60), tmp_path / "page.html", title=title).read_text(encoding="utf-8")
    assert f"<title>{shown} · attlas</title>" in text
    assert data_of(tmp_path / "page.html")["packed"]


def check_patch(data: dict[str, Any], place: tuple[int, int], cell: tuple[int, int], dense: np.ndarray) -> None:
    """Check that a patch holds the cells about one, at least 16 on each side as far as the matrix goes."""
    (head,) = (each for each in data["packed"] if (each["entry"], each["head"]) == place)
    m, n = dense.shape
    (box,) = (box for box in head["patches"] if box["r0"] <= cell[0] < box["r1"] and box["c0"] <= cell[1] < box["c1"])
    for at, (low, high), size in zip(cell, (("r0", "r1"), ("c0", "c1")), (m, n), strict=True):
        assert box[low] <= max(0, at - 16)
        assert box[high] >= min(size, at + 16)
        assert box[low] % 32 == 0
        assert box[high] - box[low] <= 64
    found = numbers(data, f"patch:{place[0]}:{place[1]}:{box['r0']}:{box['c0']}", "<f4")
    rows, columns = slice(box["r0"], box["r1"]), slice(box["c0"], box["c1"])
    allowed = np.tri(m, n, dtype=bool)[rows, columns]
    wanted = np.where(allowed, dense[rows, columns], np.nan)
    np.testing.assert_allclose(found.reshape(wanted.shape), wanted, rtol=2e-5, atol=1e-12)


@pytest.mark.parametrize("query", [0, 15, 16, 147, N - 1])
def test_cells_about_the_query_and_the_bookmarks_are_exact(
    query: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offline, "Packer", partial(packing.Packer, limit=1 << 19))  # blocks in detail too
    atlas = recording(matrix(), matrix(seed=1))
    atlas.bookmarks = [
        Bookmark("a pair", "e=1&h=2&pin=500.33"),
        Bookmark("a place", "#h=1&r=299.5&c=20.25&z=3"),
        Bookmark("all", "e=1&h=2"),
        Bookmark("beyond", "e=1&h=2&pin=5000.33"),
        Bookmark("nonsense", "e=1&h=2&pin=a.b"),
    ]
    data = data_of(export(atlas, tmp_path / "page.html", heads=[(0, 1)], query=query))
    dense = {(layer, head): atlas[layer][0, head].to_dense().numpy() for layer in (0, 1) for head in range(HEADS)}
    key = 1 + int(dense[0, 1][query, 1:].argmax())
    for place, weights in dense.items():
        check_patch(data, place, (query, key), weights)
    check_patch(data, (1, 2), (500, 33), dense[1, 2])
    check_patch(data, (0, 1), (299, 20), dense[0, 1])
    counts = {(each["entry"], each["head"]): len(each["patches"]) for each in data["packed"]}
    assert sum(counts.values()) == len(dense) + 2 + 2  # two places of bookmarks, and two rollouts


def test_cells_about_the_query_take_a_bounded_part_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_PATCH_BYTES", 3 * 4 * 64 * 64)
    monkeypatch.setattr(offline, "Packer", partial(packing.Packer, limit=1 << 19))
    data = data_of(export(recording(matrix(), matrix(seed=1)), tmp_path / "page.html", query=147))
    assert [len(each["patches"]) for each in data["packed"]] == [1, 1, 1, *5 * [0]]  # the most telling heads first


def test_a_page_of_the_viewer_has_the_cells_that_were_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attlas.view.service._PAGE_BYTES", 1 << 19)
    A = matrix()
    service = Service(A)
    try:
        asked = {"entry": 0, "head": 1, "i": 500, "j": 33, "r": 310, "c": 290}
        data = facts(service, "offline", **asked)["data"]
    finally:
        service.close()
    dense = A[0, 1].to_dense().numpy()
    check_patch(data, (0, 1), (500, 33), dense)
    check_patch(data, (0, 1), (310, 290), dense)
