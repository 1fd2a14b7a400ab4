"""Bookmarks of a recording: a small file of its folder, whole or not at all."""

import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict
from pathlib import Path

import pytest
from tests.atlas.conftest import make_atlas

import attlas
from attlas.errors import RecordingError
from attlas.recording.atlas import Bookmark
from attlas.recording.atlas.bookmarks import BOOKMARKS, write_bookmarks
from attlas.recording.atlas.serialization import FormatError
from attlas.view import Service

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


def changed(service: Service, before: list[Bookmark], bookmarks: list[Bookmark]) -> int:
    content = {"before": [asdict(each) for each in before], "bookmarks": [asdict(each) for each in bookmarks]}
    return service.post("bookmarks", content).status


@pytest.mark.parametrize("there", [False, True])
def test_a_link_is_neither_read_nor_written(tmp_path: Path, there: bool) -> None:
    folder, outside = tmp_path / "run.atlas", tmp_path / "outside.json"
    atlas = make_atlas()
    atlas.save(folder)
    if there:
        outside.write_text("mine")
    (folder / BOOKMARKS).symlink_to(outside)
    with pytest.raises(RecordingError, match="symbolic link"):
        attlas.load(folder)
    with pytest.raises(RecordingError, match="symbolic link"):
        write_bookmarks(folder, MARKS)
    with closing(Service(atlas, folder=folder)) as service:
        assert changed(service, [], MARKS) == 500
    assert (outside.read_text() if outside.exists() else None) == ("mine" if there else None)


def test_another_viewer_is_not_overwritten(tmp_path: Path) -> None:
    folder = tmp_path / "run.atlas"
    make_atlas().save(folder)
    first, second = (Service(attlas.load(folder), folder=folder) for _ in range(2))
    with closing(first), closing(second):
        assert changed(first, [], MARKS[:1]) == 200
        assert changed(second, [], MARKS[1:]) == 409
        shown = json.loads(second.answer("info", {}).body)["bookmarks"]  # what a page that reloads gets
        assert shown == [asdict(MARKS[0])]
        assert changed(second, MARKS[:1], MARKS) == 200
    assert attlas.load(folder).bookmarks == MARKS


def test_viewers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    pytest.importorskip("fcntl", reason="the system locks no folder")
    folder = tmp_path / "run.atlas"
    make_atlas().save(folder)
    services = [Service(attlas.load(folder), folder=folder) for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        for number in range(8):
            before = attlas.load(folder).bookmarks
            marks = [[*before, Bookmark(f"{number} of {at}", "e=0")] for at in range(4)]
            found = list(pool.map(changed, services, [before] * 4, marks))
            assert sorted(found) == [200, 409, 409, 409]
            assert attlas.load(folder).bookmarks == marks[found.index(200)]
    for service in services:
        service.close()


def test_what_is_written_can_be_read(tmp_path: Path) -> None:
    folder = tmp_path / "run.atlas"
    make_atlas().save(folder)
    most = [Bookmark("重" * 200, "复" * 4000, "\ud800" + "😀" * 1999)] * 500
    write_bookmarks(folder, most)
    assert attlas.load(folder).bookmarks == most
    with pytest.raises(FormatError, match="bytes"):
        write_bookmarks(folder, [Bookmark("\0" * 200, "\0" * 4000, "\0" * 2000)] * 500)
    assert attlas.load(folder).bookmarks == most
