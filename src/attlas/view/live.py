"""The page that opens other pages and recordings, as one HTML file for any static host."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

from attlas.errors import RecordingError, ShapeError, public
from attlas.view.about import project_address
from attlas.view.offline import write_page

_TITLE = "Attention, opened in the browser"
_WORDS = "Every cell of a recording of attention, from the whole matrix down to two words, without an installation."

_HELD = '<script type="application/json" id="attlas-data">'  # behind it stands what a page holds, up to the next "<"
_HOLDING = {"packed", "answers"}  # what a page of a recording holds, and that of a corpus
_MADE_BY = "attlas report run.atlas -o page.html writes one."


@public("export_live")
def export_live(
    path: str | os.PathLike[str],
    *,
    opens: str = "",
    holds: str | os.PathLike[str] | None = None,
    title: str = _TITLE,
    address: str | None = None,
    image: str | None = None,
) -> Path:
    """Write the page that opens what is dropped on it: exported pages, and recordings of short texts.

    The file needs no server but one that hands out files. ``live.html?run=run.html#e=2&h=4`` opens a page that lies
    beside it, or anywhere on the web where its host allows that (CORS), at the place of a link;
    ``live.html?run=run.atlas`` opens the folder of a recording.

    Parameters
    ----------
    path : str or Path
        The file; one that is there is replaced.
    opens : str
        The address of what it opens where its own address names nothing, relative to the page. By default it asks.
    holds : str or Path, optional
        A page that attlas has exported: the file holds what this page holds, and shows it first.
    title : str
        What the page is called, also where a link to it is shown as a card.
    address : str, optional
        Where the page will be: an address that begins with https://. It is told to those who show a link as a card.
    image : str, optional
        The picture of that card, 1200 × 630 pixels, as ``attlas picture --card`` writes it: its address, which may be
        relative to `address`.

    Returns
    -------
    Path

    Raises
    ------
    ShapeError
        If `address` is no address, or `image` is relative and there is no `address`.
    RecordingError
        If `holds` is no exported page.

    See Also
    --------
    attlas.view.export : a page of one recording, which is opened by this one or by itself.

    Notes
    -----
    Of a folder the page computes the exact weights of the first text from its queries, keys and log-sum-exp, as they
    are looked at: up to 2,048 tokens, scores of class ``ScaledDot``, no mask or a causal one. Anything else is refused
    with what to do. Nothing that is opened is run as a program, and nothing is sent anywhere. A page that was opened
    from a disk cannot fetch its neighbours; what is dropped on it opens there too.

    Examples
    --------
    >>> import tempfile
    >>> from attlas.view import export_live
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = export_live(
    ...         f"{folder}/live.html", address="https://example.org/live.html", image="card.png"
    ...     )
    ...     'property="og:image" content="https://example.org/card.png"' in page.read_text("utf-8")
    True
    """
    facts = {"og:title": title, "og:description": _WORDS, "og:type": "website"}
    if address is not None:
        if not address.startswith("https://") or not urlsplit(address).hostname:
            raise ShapeError("address must begin with https://.", address, 'address="https://..."', address=address)
        facts["og:url"] = address
    if image is not None:
        place = urljoin(address or "", image)
        if not place.startswith("https://"):
            fix = 'address="https://..." with it, or a whole address.'
            raise ShapeError("the picture of a card needs a whole address.", image, fix, image=image)
        facts |= {
            "og:image": place,
            "og:image:width": "1200",
            "og:image:height": "630",
            "twitter:card": "summary_large_image",
        }
    data: dict[str, Any] = {"project": project_address()} | ({"opens": opens} if opens else {})
    if holds is not None:
        data |= _contents_of_page(Path(holds))
    return write_page(data, path, title, "live/page", facts)


def _contents_of_page(page: Path) -> dict[str, Any]:
    """Return what an exported page holds."""
    try:
        _, mark, rest = page.read_text(encoding="utf-8").partition(_HELD)
        data = json.loads(rest.partition("<")[0]) if mark else None
    except (OSError, ValueError) as error:
        raise RecordingError("the page must be one that can be read.", str(error), _MADE_BY, path=str(page)) from error
    if not isinstance(data, dict) or not _HOLDING & data.keys():
        raise RecordingError("the page must be one that attlas has exported.", str(page), _MADE_BY, path=str(page))
    return data
