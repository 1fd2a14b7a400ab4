"""Where a recording comes from, and what it took: lines for a person who opens the page."""

from __future__ import annotations

import math
from importlib.metadata import PackageNotFoundError, metadata

import torch

import attlas
from attlas.recording.atlas import Atlas
from attlas.recording.atlas.layers import ranges, unrecorded_of

_READ_SENTENCE = "{0}, reading {1} tokens."
_READ_SOURCE = "{0}, reading {1} tokens of {2}."
_UNSEEN_SENTENCE = "It never saw this text in training."
_MISSING_LAYERS = "Of the model's {0} layers, {1} are here."
_UNRECORDED_LAYERS = "Without attention weights: {0} ({1})."
_SIZE_IN_FULL = "Stored in float32, the matrices of its {0} heads would take {1}; the recording keeps {2} of "
_KEPT_MATRICES = _SIZE_IN_FULL + "queries, keys and statistics."
_KEPT_STATISTICS = _SIZE_IN_FULL + "statistics."
_TIME_SENTENCE = "To run and read it took {0} s."
#: What the page translates.
SENTENCES = (
    _READ_SENTENCE,
    _READ_SOURCE,
    _UNSEEN_SENTENCE,
    _MISSING_LAYERS,
    _UNRECORDED_LAYERS,
    _KEPT_MATRICES,
    _KEPT_STATISTICS,
    _TIME_SENTENCE,
)


def about(atlas: Atlas) -> list[tuple[str, list[list[str]]]]:
    """Return the facts of a recording: titles, and sentences with {0}, {1}, ... before their values.

    Parameters
    ----------
    atlas : Atlas
        The recording; `attlas record` and `attlas demo` note source, time and command in its details.
    """
    details, tokens = atlas.details, len(atlas.tokens or ())
    source, seconds = details.get("source"), details.get("seconds")
    lines = []
    recorded = []
    if atlas.model and tokens:
        values = [atlas.model, f"{tokens:,}"]
        recorded.append([_READ_SOURCE, *values, str(source)] if source else [_READ_SENTENCE, *values])
        if details.get("unseen") is True:
            recorded.append([_UNSEEN_SENTENCE])
    recorded += _sentences_on_layers(atlas)
    if recorded:
        lines.append(("Recorded", recorded))
    cells = sum(math.prod(entry.shape) for entry in atlas.entries)
    if cells:
        text = _KEPT_MATRICES if any(entry.matrix is not None for entry in atlas.entries) else _KEPT_STATISTICS
        heads = sum(len(entry.heads) for entry in atlas.entries)
        size = sum(entry.nbytes for entry in atlas.entries)
        memory = [[text, f"{heads:,}", bytes_in_words(4 * cells), bytes_in_words(size)]]
        if isinstance(seconds, int | float):
            memory.append([_TIME_SENTENCE, f"{seconds:.1f}"])
        lines.append(("Memory", memory))
    if isinstance(details.get("command"), str):
        lines.append(("Again", [["{0}", str(details["command"])]]))
    return [*lines, ("Made with", [["{0}", _versions_and_address()]])]


def _sentences_on_layers(atlas: Atlas) -> list[list[str]]:
    """Return sentences about layers of the model that the recording does not have."""
    here, missing = len(atlas.layers()), len(atlas.missing_layers())
    sentences = [[_MISSING_LAYERS, str(here + missing), str(here)]] if missing else []
    unrecorded = unrecorded_of(atlas.details, (*atlas.kinds, "self")[0])
    return sentences + [[_UNRECORDED_LAYERS, ranges(places, "–"), name] for name, places in unrecorded]


def bytes_in_words(size: float) -> str:
    """Return a size in words: 980 bytes, 1.5 KiB, 12 MiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1023.5:
            return f"{size:,.0f} {unit}" if size >= 9.95 or unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} TiB"


def project_address() -> str | None:
    """Return the address of the project; None where the installed package knows none.

    Examples
    --------
    >>> from attlas.view.about import project_address
    >>> address = project_address()
    >>> address is None or address.startswith("https://")
    True
    """
    try:
        links = [link.split(",", 1)[-1].strip() for link in metadata("attlas").get_all("Project-URL") or []]
    except PackageNotFoundError:  # run from a checkout that is not installed
        links = []
    return next((link for link in links if link.startswith("https://")), None)


def _versions_and_address() -> str:
    """Return versions, and the address of the project where it is known."""
    address = project_address()
    return ", ".join([f"attlas {attlas.__version__}", f"torch {torch.__version__}", *([address] if address else [])])
