"""Bookmarks of a recording: a small file of its folder, whole or not at all."""

from pathlib import Path

import pytest
from tests.atlas.conftest import make_atlas

import attlas
from attlas.atlas import Bookmark
from attlas.atlas.bookmarks import BOOKMARKS, write_bookmarks
from attlas.errors import RecordingError

MARKS = [Bookmark("repeats", "e=2&h=4", "It looks at what followed before: 重复."), Bookmark("first", "e=0")]


def test_bookmarks_are_saved_and_loaded(tmp_path: Path) -> None:
    atlas = make_atlas()
    atlas.bookmarks = MARKS
    atlas.save(tmp_path / "run.atlas")
    assert attlas.load(tmp_path / "run.atlas").bookmarks == MARKS
    atlas.bookmarks = []
    atlas.save(tmp_path / "run.atlas", overwrite=True)  # a folder with bookmarks is still one of attlas
    assert attlas.load(tmp_path / "run.atlas").bookmarks == []
    write_bookmarks(tmp_path / "run.atlas", MARKS)
    assert attlas.load(tmp_path / "run.atlas").bookmarks == MARKS


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        '{"format": "attlas-bookmarks", "version": 9, "bookmarks": []}',
        '{"format": "attlas-bookmarks", "version": 1, "bookmarks": [{"name": 1, "at": ""}]}',
        '{"format": "attlas-bookmarks", "version": 1, "bookmarks": [{"name": "a"}]}',
        '{"format": "attlas-bookmarks", "version": 1, "bookmarks": [{"name": "a", "at": "", "more": ""}]}',
        "{",
    ],
)
def test_a_wrong_file_is_named(tmp_path: Path, text: str) -> None:
    make_atlas().save(tmp_path / "run.atlas")
    (tmp_path / "run.atlas" / BOOKMARKS).write_text(text)
    with pytest.raises(RecordingError, match=r"bookmarks\.json"):
        attlas.load(tmp_path / "run.atlas")
