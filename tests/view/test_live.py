"""The file of the page that opens others: what it holds, what it says of itself, and what is refused."""

import json
from pathlib import Path

import pytest

from attlas.errors import RecordingError, ShapeError
from attlas.view import export_live


def contents(page: str) -> dict[str, object]:
    return json.loads(page.split('id="attlas-data">', 1)[1].split("</script>", 1)[0])


def test_it_holds_a_page_and_has_a_card(tmp_path: Path) -> None:
    (tmp_path / "run.html").write_text(
        '<script type="application/json" id="attlas-data">{"packed":[1],"a":"\\u003c"}</script>', "utf-8"
    )
    options = {"address": "https://example.org/a/live.html", "image": "card.png", "title": "<a> & b"}
    page = export_live(tmp_path / "live.html", holds=tmp_path / "run.html", **options).read_text("utf-8")
    assert {"packed": [1], "a": "<"}.items() <= contents(page).items()
    assert '<meta property="og:title" content="&lt;a&gt; &amp; b">' in page
    assert '<meta property="og:image" content="https://example.org/a/card.png">' in page
    assert "connect-src 'self' https:;" in page
    plain = export_live(tmp_path / "live.html", opens="run.html").read_text("utf-8")
    assert contents(plain)["opens"] == "run.html"
    assert "og:image" not in plain.split("<style>")[0]


def test_what_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "live.html"
    for address in ("http://example.org/", "https:///a"):
        with pytest.raises(ShapeError, match="address must begin with https://"):
            export_live(file, address=address)
    with pytest.raises(ShapeError, match="the picture of a card needs a whole address"):
        export_live(file, image="card.png")
    (tmp_path / "a.html").write_text("<p>hello", "utf-8")
    (tmp_path / "half.html").write_text('<script type="application/json" id="attlas-data">{"packed":', "utf-8")
    export_live(tmp_path / "empty.html")
    for name, words in (
        ("a.html", "exported"),
        ("empty.html", "exported"),
        ("half.html", "can be read"),
        ("none.html", "can be read"),
    ):
        with pytest.raises(RecordingError, match=words):
            export_live(file, holds=tmp_path / name)
    assert not file.exists()
