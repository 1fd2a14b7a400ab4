"""Named views of a recording, in a small file of its folder; in their order they are a tour."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from attlas.errors import RecordingError, public
from attlas.foundation.files import whole_file
from attlas.recording.atlas.manifest import errors_name_file, plain_file_size
from attlas.recording.atlas.serialization import FormatError

BOOKMARKS = "bookmarks.json"
_FORMAT_NAME, _FORMAT_VERSION = "attlas-bookmarks", 1
_MOST_BOOKMARKS = 500
_LONGEST_TEXTS = {"name": 200, "at": 4000, "says": 2000}  # characters
_MOST_FILE_BYTES = 1 << 24  # bytes of the file


@dataclass(frozen=True)
class Bookmark:
    """A view of a recording that has a name.

    Parameters
    ----------
    name : str
        What it is called.
    at : str
        Where it is, as an address of the viewer has it behind its ``#``: ``"e=2&h=4&pin=100.50"``.
    says : str
        A sentence that a tour shows there.

    Examples
    --------
    >>> from attlas.recording.atlas import Bookmark
    >>> Bookmark("induction", "e=2&h=4", "This head repeats what followed before.").at
    'e=2&h=4'
    """

    name: str
    at: str
    says: str = ""


def bookmarks_from(data: Any) -> list[Bookmark]:
    """Return the bookmarks that plain data describes.

    Raises
    ------
    FormatError
        If it describes none.
    """
    if not isinstance(data, list) or len(data) > _MOST_BOOKMARKS:
        raise FormatError(f"not a list of at most {_MOST_BOOKMARKS} bookmarks")
    for each in data:
        if not isinstance(each, dict) or not {"name", "at"} <= each.keys() <= _LONGEST_TEXTS.keys():
            raise FormatError(f"a bookmark has a name, an address (at) and a sentence (says): {str(each)[:60]}")
        for field, value in each.items():
            if not isinstance(value, str) or len(value) > _LONGEST_TEXTS[field]:
                raise FormatError(f"{field} of a bookmark is a text of at most {_LONGEST_TEXTS[field]:,} characters")
    return [Bookmark(**each) for each in data]


def read_bookmarks(folder: Path) -> list[Bookmark]:
    """Return the bookmarks of a recording; none where there is no such file.

    Raises
    ------
    RecordingError
        If the file is not as attlas writes it.
    """
    path = folder / BOOKMARKS
    with errors_name_file(folder, BOOKMARKS):
        if not os.path.lexists(path):
            return []
        size = plain_file_size(path)
        if size > _MOST_FILE_BYTES:
            raise FormatError(f"{size:,} bytes, more than {_MOST_FILE_BYTES:,}")
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict) or (content.get("format"), content.get("version")) != (
            _FORMAT_NAME,
            _FORMAT_VERSION,
        ):
            raise FormatError(f"JSON, but not of the format {_FORMAT_NAME!r}, version {_FORMAT_VERSION}")
        return bookmarks_from(content.get("bookmarks"))


@public("save()")
def write_bookmarks(folder: Path, bookmarks: Iterable[Bookmark]) -> None:
    """Write the bookmarks of a recording, whole or not at all.

    Raises
    ------
    FormatError
        If `read_bookmarks` would refuse them.
    RecordingError
        If the file cannot be written, or is a symbolic link: whoever made the recording chose where that leads.
    """
    listed = [asdict(bookmark) for bookmark in bookmarks]
    # Raises where reading them would.
    bookmarks_from(listed)
    path = folder / BOOKMARKS
    if path.is_symlink():
        rule = "the bookmarks must be a plain file of the folder."
        raise RecordingError(rule, "a symbolic link", f"remove {path}.", path=str(path))
    if not listed and not path.exists():
        return
    content = {"format": _FORMAT_NAME, "version": _FORMAT_VERSION, "bookmarks": listed}
    # Half of a surrogate pair, which UTF-8 does not have, becomes \udXXX: an escape of JSON as well.
    text = json.dumps(content, indent=1, allow_nan=False, ensure_ascii=False).encode("utf-8", "backslashreplace")
    if len(text) > _MOST_FILE_BYTES:
        raise FormatError(f"the bookmarks take {len(text):,} bytes, more than {_MOST_FILE_BYTES:,}")
    with whole_file(path, RecordingError) as unfinished:
        unfinished.write_bytes(text)
