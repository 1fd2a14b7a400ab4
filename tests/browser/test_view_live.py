"""The page that opens pages of recordings and corpora, and folders: dropped, chosen or named by its address."""

import base64
import functools
import http.server
import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.atlases import atlas_of, random_matrix
from tests.browser.conftest import CUT, READY, number, serious_faults, state, until

import attlas
from attlas.recording.atlas import Atlas, Bookmark, Entry
from attlas.view import export, export_live

pytestmark = pytest.mark.browser
N = 300
# Drops a file, or a folder of files, as a browser hands them on: names, and contents in base64.
DROP = """([name, files, isFolder]) => {
  const decode = (text) => Uint8Array.from(atob(text), (character) => character.charCodeAt(0));
  const made = Object.entries(files).map(([each, text]) => new File([decode(text)], each));
  const getFile = (each, options, resolve, reject) => {
    const found = made.find((file) => file.name === each);
    if (found) resolve({ file: (take) => take(found) });
    else reject(new DOMException("none", "NotFoundError"));
  };
  const items = isFolder ? [{ webkitGetAsEntry: () => ({ isDirectory: true, name, getFile }) }] : [];
  const drop = new Event("drop", { bubbles: true, cancelable: true });
  Object.defineProperty(drop, "dataTransfer", { value: { items, files: isFolder ? [] : made } });
  document.body.dispatchEvent(drop);
}"""


def drop(page: Any, path: Path) -> None:
    """Drop a file or a folder on a page."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    coded = {file.name: base64.b64encode(file.read_bytes()).decode() for file in files}
    page.evaluate(DROP, [path.name, coded, path.is_dir()])


@pytest.fixture(scope="module")
def atlas() -> Atlas:
    A = random_matrix(N, spread=1.5)
    marks = [Bookmark("far back", "e=1&h=1&pin=200.20", "It looks far back.")]
    return atlas_of(A, A, tokens=[f" w{i}" for i in range(N)], model="tiny", bookmarks=marks)


@pytest.fixture(scope="module")
def site(atlas: Atlas, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the live page, an exported page, and recordings."""
    folder = tmp_path_factory.mktemp("site")
    export_live(folder / "live.html")
    export(atlas, folder / "run.html", title="a run")
    atlas.save(folder / "run.atlas")
    return folder


@pytest.fixture(scope="module")
def host(site: Path) -> Iterator[str]:
    """A host that hands out the files of the site, and knows nothing of attlas."""

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: Any) -> None: ...

    handler = functools.partial(Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture
def live(browse: Callable[..., Any], site: Path) -> Callable[..., Any]:
    """Open the live page from the disk."""

    def opened(hash_: str = "", *size: int, **options: Any) -> Any:
        return browse(f"{(site / 'live.html').as_uri()}{hash_}", *size, wait=".live", **options)

    return opened


def numbers(page: Any, cell: str) -> float:
    """Return the weight of the pinned cell, as the text pane says it."""
    until(page, f"document.querySelector('.cell-facts dd')?.textContent === {cell!r}")
    return number(page.locator(".cell-facts dd").nth(1).inner_text())


def test_a_dropped_page_opens_at_the_place_of_the_link(live: Any, site: Path, atlas: Atlas) -> None:
    page = live("#e=1&h=1&pin=200.20")
    assert "This link is of a place" in page.locator(".live").inner_text()
    drop(page, site / "run.html")
    page.wait_for_selector(READY)
    assert numbers(page, "200, 20") == pytest.approx(float(atlas[1][0, 1, 200, 20]), rel=5e-3)  # three digits
    # Another one begins at its own place.
    page.get_by_role("button", name="Open another").click()
    drop(page, site / "run.html")
    page.wait_for_selector(READY)
    assert state(page).get("pin") != "200.20"


def test_a_dropped_folder_is_computed_exactly(live: Any, site: Path, atlas: Atlas) -> None:
    page = live("#e=1&h=1&pin=200.20")
    drop(page, site / "run.atlas")
    page.wait_for_selector(READY)
    note = page.locator(".offline-note").inner_text()
    assert note.startswith("4 of 4 heads are computed here; every cell; weights exact in float32")
    assert numbers(page, "200, 20") == pytest.approx(float(atlas[1][0, 1, 200, 20]), rel=5e-3)
    assert page.get_by_role("button", name="Bookmarks").is_visible()
    page.evaluate("location.hash = 'e=1&h=1&r=200&c=100&z=4'")
    page.wait_for_selector(READY)
    page.get_by_role("button", name="Export").click()
    with page.expect_download() as download:
        page.locator("[data-export=csv]").click()
    table = Path(download.value.path()).read_text("utf-8").splitlines()
    assert table[0].startswith("query,key,query_token,key_token,")
    rows = [line.split(",") for line in table[1:]]
    assert len(rows) > 50
    for i, j, *_, found in rows[:: max(1, len(rows) // 40)]:
        assert float(found) == pytest.approx(float(atlas[1][0, 1, int(i), int(j)]), rel=2e-5, abs=1e-12)


@pytest.mark.parametrize("what", ["run.html", "run.atlas", "run.atlas/"])
def test_an_address_names_what_lies_beside_it(what: str, host: str, browse: Any) -> None:
    page = browse(host, wait="", expected="404")  # all that is asked of the host is its own; it has no bookmarks.json
    page.goto(f"{host}live.html?run={what}#e=1&h=1&pin=200.20")
    page.wait_for_selector(READY)
    assert numbers(page, "200, 20") > 0
    page.keyboard.press("[")
    until(page, "!location.hash.includes('h=1')")
    assert f"?run={what}#" in page.url  # the address names it still


def test_a_typed_address_is_opened(host: str, browse: Any) -> None:
    page = browse(host, wait="", expected="404")
    page.goto(f"{host}live.html")
    page.get_by_label("Address").fill("run.html")
    page.keyboard.press("Enter")
    page.wait_for_selector(READY)
    assert "?run=run.html" in page.url


REFUSED = {
    "notes.html": "notes.html is no page that attlas has exported",
    "half.html": "half.html is cut off or damaged",
    "later.html": "later.html was written by another version of attlas",
    "0000.safetensors": "0000.safetensors is one file of a recording: drop or choose its whole folder",
    "some.corpus": "some.corpus holds no atlas.json, as a recording does; a corpus becomes a page that opens here by: "
    "attlas report some.corpus -o heads.html",
    "later.atlas": "The recording later.atlas has version 99 of the format, and this page reads 2 to 5",
    "alibi.atlas": "The recording alibi.atlas cannot be computed here: its score is Sum. attlas report alibi.atlas",
    "window.atlas": "its mask is Window",
    "long.atlas": "it has 2,049 × 2,049 weights a head, and this page computes up to 2,048 tokens",
    "statistics.atlas": "it holds statistics, and no queries and keys",
    "missing.atlas": "The recording missing.atlas is not whole: 0000.safetensors is missing",
}


@pytest.fixture(scope="module")
def refused(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("refused")
    (folder / "notes.html").write_text("<h1>notes</h1>")
    page = (site / "run.html").read_text("utf-8")
    (folder / "half.html").write_text(page[: page.index('"parts":') + 500], "utf-8")
    (folder / "later.html").write_text(page.replace('{"format":1,', '{"format":2,', 1), "utf-8")
    (folder / "0000.safetensors").write_bytes(b"")
    (folder / "some.corpus").mkdir()
    (folder / "some.corpus" / "config.json").write_text("{}")
    q, k = torch.randn(2, 1, 1, 40, 8)
    alibi = attlas.attend(q, k, score=attlas.ScaledDot() + attlas.Alibi(1), mask=attlas.Causal())
    atlas_of(alibi).save(folder / "alibi.atlas")
    atlas_of(attlas.attend(q, k, mask=attlas.Window(5, 0))).save(folder / "window.atlas")
    q, k = torch.randn(2, 1, 1, 2049, 2)
    atlas_of(attlas.attend(q, k, mask=attlas.Causal())).save(folder / "long.atlas")
    atlas_of(attlas.attend(q[:, :, :9], k[:, :, :9])).save(folder / "later.atlas")
    manifest = (folder / "later.atlas" / "atlas.json").read_text()
    (folder / "later.atlas" / "atlas.json").write_text(re.sub(r'"version":\d+', '"version":99', manifest))
    Atlas([Entry("a", 0, "self", 0, (0,), (0, 9), 0, (1, 1, 9, 9), None, {})]).save(folder / "statistics.atlas")
    atlas_of(attlas.attend(q[:, :, :9], k[:, :, :9])).save(folder / "missing.atlas")
    next((folder / "missing.atlas").glob("*.safetensors")).unlink()
    return folder


def test_what_cannot_be_read_is_named_with_what_to_do(live: Any, refused: Path, site: Path) -> None:
    page = live()
    for name, words in REFUSED.items():
        drop(page, refused / name)
        page.wait_for_function(
            "(words) => document.querySelector('.live-problem')?.textContent.includes(words)", arg=words
        )
    drop(page, site / "run.html")  # a refusal ends nothing
    page.wait_for_selector(READY)


def test_grouped_keys_16_bits_and_no_mask_are_read(live: Any, tmp_path: Path) -> None:
    q, k = torch.randn(2, 4, 60, 16).bfloat16(), torch.randn(2, 2, 60, 16).bfloat16()
    A = attlas.attend(q, k)
    atlas = atlas_of(A, tokens=None)
    atlas.save(tmp_path / "grouped.atlas")
    again = attlas.load(tmp_path / "grouped.atlas")[0]
    page = live("#e=0&h=3&pin=40.50")
    drop(page, tmp_path / "grouped.atlas")
    page.wait_for_selector(READY)
    for head in range(4):
        page.evaluate(f"location.hash = 'e=0&h={head}&pin=40.5{head}'")
        assert numbers(page, f"40, 5{head}") == pytest.approx(float(again[0, head, 40, 50 + head]), rel=6e-3)


def test_a_page_saved_from_it_is_such_a_page(live: Any, site: Path, tmp_path: Path, browse: Any) -> None:
    page = live()
    drop(page, site / "run.html")
    page.wait_for_selector(READY)
    page.get_by_role("button", name="Export").click()
    with page.expect_download(timeout=60_000) as download:
        page.locator("[data-export=html]").click()
    download.value.save_as(tmp_path / "again.html")
    again = browse((tmp_path / "again.html").as_uri())
    drop(again, site / "run.atlas")
    again.wait_for_function("() => /computed here/.test(document.querySelector('.offline-note')?.textContent)")


def test_a_folder_has_no_page_to_save(live: Any, site: Path) -> None:
    page = live()
    drop(page, site / "run.atlas")
    page.wait_for_selector(READY)
    page.get_by_role("button", name="Export").click()
    page.locator("[data-export=html]").click()
    until(page, "/attlas report writes a page/.test(document.querySelector('.export-line').textContent)")


def test_a_page_cannot_bring_a_program(live: Any, site: Path, tmp_path: Path) -> None:
    text = (site / "run.html").read_text("utf-8")
    start = text.index('id="attlas-data">') + len('id="attlas-data">')
    data = json.loads(text[start : text.index("</script>", start)])
    data["info"] |= {"project": "javascript:alert(1)", "title": "<img src=x onerror=alert(1)>"}
    evil = f"<script>window.hit = 1</script>{text[:start]}{json.dumps(data).replace('<', chr(92) + 'u003c')}</script>"
    (tmp_path / "evil.html").write_text(evil, "utf-8")
    page = live()
    drop(page, tmp_path / "evil.html")
    page.wait_for_selector(READY)
    assert page.evaluate("window.hit") is None
    assert page.locator("a[href^=javascript]").count() == 0


def test_the_page_of_a_corpus_opens_and_names_the_project(
    live: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("pyarrow", reason="needs attlas[corpus]")
    transformers = pytest.importorskip("transformers", reason="needs attlas[hf]")
    monkeypatch.setattr("attlas.view.corpus_offline.project_address", lambda: "https://example.org/attlas")
    torch.manual_seed(0)
    size = {"n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 50, "n_positions": 32}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**size))
    corpus = attlas.corpus(model, torch.randint(0, 50, (3, 16)).tolist(), tmp_path / "tiny.corpus", samples=1)
    corpus.export(tmp_path / "heads.html")
    page = live()
    drop(page, tmp_path / "heads.html")
    page.wait_for_selector(".corpus-page.attlas-ready")
    link = page.get_by_role("link", name="Made with attlas: example.org/attlas")
    assert link.get_attribute("href") == "https://example.org/attlas"
    page.get_by_role("button", name="Open another").click()
    page.wait_for_selector(".live")
    assert page.locator(".corpus-page").count() == 0


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("language", ["en-US", "zh-CN"])
def test_it_fits_and_is_translated(width: int, language: str, live: Any) -> None:
    page = live("", width, 844, locale=language)
    assert page.evaluate(CUT) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    if language == "zh-CN":
        left = set(re.findall(r"[A-Za-z]{3,}", page.locator(".live").inner_text()))
        assert left <= {"attlas", "run", "atlas", "CORS", "report", "English"}


def test_nobody_is_left_out(live: Any, axe: str) -> None:
    page = live()
    assert serious_faults(page, axe, [("", (1280, 800), "light"), ("", (390, 844), "dark")]) == {}
