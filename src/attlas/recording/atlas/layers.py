"""Which layers of a model a recording has, and which it does not have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

# Of the details of an atlas: the number of the model's layers of each kind, with and without attention weights;
LAYER_COUNTS = "layer_counts"
# by kind, the layers that have attention of another kind only;
OTHER_KINDS = "layers_of_other_kinds"
# and, by kind and class of module, the layers whose weights could not be recorded, or the paths of such modules.
UNRECORDED = "unrecorded"


def layers_of(details: Mapping[str, Any], kind: str, kinds: Sequence[str]) -> set[int]:
    """Return the numbers of the model's layers that have attention of a kind, or none at all; empty if not known.

    Parameters
    ----------
    details : mapping
        Facts of the model; those of recordings before version 0.1 have its configuration only.
    kind : str
        Kind of the attentions.
    kinds : sequence of str
        All kinds of the recording.
    """
    counts = details.get(LAYER_COUNTS)
    known = counts.get(kind) if isinstance(counts, Mapping) else None
    if known is None and kind == "self" and "encoder" not in kinds:
        known = details.get("num_hidden_layers")
    others = details.get(OTHER_KINDS)
    other = others.get(kind) if isinstance(others, Mapping) else None
    return {*range(known if type(known) is int else 0)} - {*(other if isinstance(other, list) else ())}


def unrecorded_of(details: Mapping[str, Any], kind: str) -> list[tuple[str, list[int | str]]]:
    """Return the classes of the modules whose weights could not be recorded, each with its layers or paths."""
    found = details.get(UNRECORDED)
    own = found.get(kind) if isinstance(found, Mapping) else None
    return [
        (str(name), [place for place in places if isinstance(place, int | str)])
        for name, places in (own.items() if isinstance(own, Mapping) else ())
        if isinstance(places, list) and places
    ]


def ranges(numbers: Iterable[int | str], to: str = " to ") -> str:
    """Return some numbers in words: runs of them as ranges, and names as they are.

    Examples
    --------
    >>> ranges([0, 1, 2, 4, 6, 7])
    '0 to 2, 4, 6 to 7'
    """
    words: list[list[int | str]] = []
    for number in numbers:
        last = words[-1][-1] if words else None
        if isinstance(number, int) and isinstance(last, int) and number == last + 1:
            words[-1].append(number)
        else:
            words.append([number])
    return ", ".join(f"{run[0]}{to}{run[-1]}" if len(run) > 1 else str(run[0]) for run in words)
