"""The notebook widget with a comm that is played, A.view(), and the still pictures."""

import base64
import json
import re
import struct
import sys
import threading
import time
import types
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.atlases import atlas_of, random_matrix
from tests.comms import FakeComm
from tests.view.cases import wait

import attlas
from attlas.errors import MissingExtraError
from attlas.foundation.installation import install_command
from attlas.recording.atlas import Atlas, Entry
from attlas.view import Service, preview, show
from attlas.view.notebook import in_notebook

anywidget = pytest.importorskip("anywidget", reason="anywidget is in the extra `notebook`")

SHARED = {"entry": "0", "head": "1"}


@pytest.fixture
def small() -> attlas.AttentionMatrix:
    return random_matrix(40)


@pytest.fixture
def viewer(small: attlas.AttentionMatrix, comms: list[FakeComm]) -> Iterator[Any]:
    from attlas.view.widget import Viewer

    viewer = Viewer(Service(small), height=500, state={"head": 1})
    viewer.played = viewer.comm
    yield viewer
    viewer.close()


def test_answers_come_as_messages_with_a_buffer(viewer: Any, small: attlas.AttentionMatrix) -> None:
    viewer.played.page_says({"type": "get", "id": "p:1", "name": "row", "params": {**SHARED, "i": "17"}})
    content, body = viewer.played.answer_to("p:1")
    told = {"status": 200, "kind": "binary", "progress": 1.0, "final": True, "sampled": False}
    assert content == {"type": "answer", "id": "p:1", **told}
    np.testing.assert_allclose(np.frombuffer(body, "<f4"), small[0, 1, 17].numpy(), rtol=1e-6)
    viewer.played.page_says({"type": "get", "id": "p:2", "name": "info", "params": {}})
    content, body = viewer.played.answer_to("p:2")
    assert content["kind"] == "json"
    assert json.loads(body)["entries"][0]["heads"] == [0, 1]


def test_what_is_wrong_is_said_in_one_line(viewer: Any) -> None:
    for name, question, status in [
        ("p:1", {"name": "row", "params": {**SHARED, "i": "40"}}, 404),
        ("p:2", {"name": "row", "params": {**SHARED, "i": "x"}}, 400),
        ("p:3", {"name": "secrets", "params": {}}, 404),
        ("p:4", {"name": "row", "params": {"i": 3}}, 400),
        ("p:5", {"name": 3, "params": {}}, 400),
        ("p:6", {"name": "row", "params": "i=3"}, 400),
    ]:
        viewer.played.page_says({"type": "get", "id": name, **question})
        content, _ = viewer.played.answer_to(name)
        assert content["status"] == status
        assert content["error"]
        assert "\n" not in content["error"]
    for nonsense in (
        None,
        3,
        [],
        {},
        {"type": "get"},
        {"type": "get", "id": 3},
        {"type": "get", "id": "x" * 300},
        {"type": "?", "id": "a"},
    ):
        viewer.played.page_says(nonsense)
    assert len(viewer.played.answers()) == 6


class SlowService:
    """A service whose answers wait until they are let go, or are no longer wanted."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.dropped: list[str] = []
        self.free, self.closed = threading.Event(), False

    def answer(self, name: str, given: Any, wanted: Any = None) -> Any:
        from attlas.view import Answer

        self.begun.append(name)
        while not self.free.is_set():
            if not wanted():
                self.dropped.append(name)
                return Answer("json", b'{"error": "gone"}', status=499)
            time.sleep(0.005)
        return Answer("json", b"{}")

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def slow(comms: list[FakeComm]) -> Iterator[tuple[SlowService, FakeComm, Any]]:
    from attlas.view.widget import Viewer

    service = SlowService()
    viewer = Viewer(service)
    yield service, viewer.comm, viewer
    service.free.set()
    viewer.close()


def test_questions_taken_back_are_dropped(slow: Any) -> None:
    service, played, _ = slow
    for name in ("a", "b", "c", "d"):
        played.page_says({"type": "get", "id": name, "name": name, "params": {}})
    wait(lambda: len(service.begun) == 2)  # two threads
    played.page_says({"type": "cancel", "id": "a"})  # runs
    played.page_says({"type": "cancel", "id": "d"})  # has not begun
    wait(lambda: service.dropped == ["a"] and "c" in service.begun)
    service.free.set()
    wait(lambda: len(played.answers()) == 2)
    time.sleep(0.05)
    assert {content["id"] for content, _ in played.answers()} == {"b", "c"}
    assert sorted(service.begun) == ["a", "b", "c"]


@pytest.mark.parametrize("who", ["python", "page"])
def test_closing_ends_the_service(slow: Any, who: str) -> None:
    service, played, viewer = slow
    played.page_says({"type": "get", "id": "a", "name": "a", "params": {}})
    wait(lambda: service.begun == ["a"])
    if who == "python":
        viewer.close()
    else:
        played.gone({})
    assert service.closed
    wait(lambda: service.dropped == ["a"])
    viewer.close()
    viewer._take_message(None, {"type": "get", "id": "b", "name": "b", "params": {}}, [])
    assert service.begun == ["a"]
    assert played.answers() == []


def test_height_and_state_reach_the_page(viewer: Any, small: attlas.AttentionMatrix) -> None:
    state = viewer.get_state()
    assert (state["height"], state["initial"]) == (500, {"head": 1})
    assert "export default" in state["_esm"]
    assert ".attlas" in state["_css"]
    from attlas.view.widget import Viewer

    for given, kept in ((10, 240), (10**6, 4000)):
        other = Viewer(Service(small), height=given)
        assert other.height == kept
        other.close()


# ------------------------------------------------------------------------------------------------------- A.view()


def in_kernel(monkeypatch: pytest.MonkeyPatch, kernel: object) -> None:
    shell = types.SimpleNamespace(kernel=kernel)
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))


def test_a_notebook_gets_the_widget(
    small: attlas.AttentionMatrix, comms: list[FakeComm], monkeypatch: pytest.MonkeyPatch
) -> None:
    in_kernel(monkeypatch, object())
    assert in_notebook()
    viewer = small.view(title="one matrix", tokens=[f"t{i}" for i in range(40)], height=300)
    assert viewer.height == 300
    viewer.comm.page_says({"type": "get", "id": "a", "name": "info", "params": {}})
    info = json.loads(viewer.comm.answer_to("a")[1])
    assert (info["title"], info["text_length"]) == ("one matrix", 40)
    viewer.close()


@pytest.mark.parametrize("kernel", [None, "no IPython"])
def test_a_script_gets_the_browser(kernel: object, monkeypatch: pytest.MonkeyPatch) -> None:
    from attlas.view import notebook

    served = {}
    monkeypatch.setattr(notebook, "serve", lambda shown, **options: served.update(options, shown=shown))
    if kernel is None:
        in_kernel(monkeypatch, None)  # IPython at a terminal
    else:
        monkeypatch.delitem(sys.modules, "IPython", raising=False)
    atlas = Atlas()
    assert atlas.view(port=0, browser=False) is None
    assert served == {"shown": atlas, "tokens": None, "title": None, "port": 0, "browser": False}


def test_a_notebook_without_the_extra_is_told_so(
    small: attlas.AttentionMatrix, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_kernel(monkeypatch, object())
    monkeypatch.setitem(sys.modules, "anywidget", None)
    monkeypatch.delitem(sys.modules, "attlas.view.widget", raising=False)
    with pytest.raises(MissingExtraError) as caught:
        show(small)
    assert str(caught.value).splitlines() == [
        "view(): anywidget must be installed to show the viewer in a notebook.",
        "  found: no module named anywidget",
        f"  fix: {install_command('notebook')}, or attlas.view.serve(...) for a page in the browser.",
    ]


# ------------------------------------------------------------------------------------------------ the still pictures


def pictures(html: str) -> list[np.ndarray]:
    """Decode the indexed PNGs of a page to RGBA."""
    found = []
    for data in re.findall(r"data:image/png;base64,([A-Za-z0-9+/=]+)", html):
        raw = base64.b64decode(data)
        assert raw[:8] == b"\x89PNG\r\n\x1a\n"
        at, chunks = 8, {}
        while at < len(raw):
            (size,), name = struct.unpack(">I", raw[at : at + 4]), raw[at + 4 : at + 8]
            body = raw[at + 8 : at + 8 + size]
            assert struct.unpack(">I", raw[at + 8 + size : at + 12 + size])[0] == zlib.crc32(name + body)
            chunks[name] = body
            at += 12 + size
        width, height, depth, colour = struct.unpack(">IIBB", chunks[b"IHDR"][:10])
        assert (depth, colour) == (8, 3)
        lines = np.frombuffer(zlib.decompress(chunks[b"IDAT"]), np.uint8).reshape(height, width + 1)
        palette = np.frombuffer(chunks[b"PLTE"], np.uint8).reshape(-1, 3)
        alpha = np.full(len(palette), 255, np.uint8)
        alpha[: len(chunks[b"tRNS"])] = np.frombuffer(chunks[b"tRNS"], np.uint8)
        assert lines[:, 1:].max() < len(palette)
        found.append(np.dstack([palette[lines[:, 1:]], alpha[lines[:, 1:]]]))
    return found


def test_a_small_matrix_is_pictured_cell_by_cell(small: attlas.AttentionMatrix) -> None:
    shown = pictures(small._repr_html_())
    assert [picture.shape for picture in shown] == [(40, 40, 4)] * 2
    allowed = np.tril(np.ones((40, 40), bool))
    for picture, weights in zip(shown, small.to_dense()[0].numpy(), strict=True):
        assert ((picture[..., 3] == 255) == allowed).all()
        light = picture[..., :3].astype(float) @ (0.2126, 0.7152, 0.0722)
        order = np.argsort(weights[allowed])
        assert (np.diff(light[allowed][order]) <= 1.5).all()  # larger weights are darker, up to rounding


def test_large_ones_are_sampled_and_say_so() -> None:
    A = attlas.attend(torch.randn(5000, 4), torch.randn(5000, 4), mask=attlas.Causal())
    html = A._repr_html_()
    assert "125 of 5,000 queries" in html
    (picture,) = pictures(html)
    assert picture.shape == (125, 125, 4)  # 40 × 40 cells each
    assert (picture[:, :, 3] == 255)[np.tril(np.ones((125, 125), bool), -1)].all()
    assert len(html) < 60_000


def test_an_atlas_shows_some_heads_of_some_layers() -> None:
    html = atlas_of(*[random_matrix(30, heads=9)] * 6, model="<script>alert(1)</script>")._repr_html_()
    assert len(pictures(html)) == 24
    assert "24 of 54 heads" in html
    assert "layer 5, head 8" in html
    assert "<script" not in html
    assert "&lt;script&gt;" in html


def test_a_batch_says_which_sequence_is_pictured(small: attlas.AttentionMatrix) -> None:
    A = attlas.attend(torch.randn(3, 2, 9, 4), torch.randn(3, 2, 9, 4))
    assert "2 of 6 heads · sequence 0 of 3 · " in A._repr_html_()
    assert "sequence" not in small._repr_html_()


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_picture(shape: tuple[int, int]) -> None:
    html = preview(attlas.attend(torch.randn(shape[0], 4), torch.randn(shape[1], 4)))
    assert pictures(html) == []
    assert "AttentionMatrix(shape=" in html
    assert preview(Atlas()).count("<img") == 0


def test_statistics_alone_have_no_picture() -> None:
    kept = Entry("attn", 0, "self", 0, (0,), (0, 30), 0, (1, 1, 30, 30), None)
    assert pictures(preview(Atlas([kept]))) == []


def test_a_saved_notebook_keeps_a_picture(small: attlas.AttentionMatrix, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("attlas.view.notebook.in_notebook", lambda: True)
    viewer = show(small)
    data, _ = viewer._repr_mimebundle_()
    assert WIDGET in data
    assert len(pictures(data["text/html"])) == 2
    viewer.close()


WIDGET = "application/vnd.jupyter.widget-view+json"


def test_an_exported_notebook_shows_the_picture(
    small: attlas.AttentionMatrix, monkeypatch: pytest.MonkeyPatch, comms: list[FakeComm]
) -> None:
    display = pytest.importorskip("IPython.display", reason="IPython comes with anywidget")
    outputs: list[dict[str, str]] = []
    monkeypatch.setattr(display, "publish_display_data", lambda data, metadata=None: outputs.append(data))
    monkeypatch.setattr("attlas.view.notebook.in_notebook", lambda: True)
    viewer = show(small)
    viewer._ipython_display_()
    # An exporter takes the widget of an output that has one, and shows nothing without a kernel and the web.
    (page,) = (output for output in outputs if WIDGET in output)
    assert "text/html" not in page  # else programs that know no widgets show the picture twice
    (still,) = (output for output in outputs if WIDGET not in output)
    assert len(pictures(still["text/html"])) == 2
    assert f"<div class='{viewer.still_class}'>" in still["text/html"]  # by which the page hides it
    assert show(small).still_class != viewer.still_class
    viewer.close()
