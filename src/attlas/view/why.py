"""Why a weight, or a whole map, is where it is: the answers for the page, from a recording with parts."""

from __future__ import annotations

from typing import Any

from attlas.heads.explanation.summary import map_summary, summary
from attlas.view.exact import Wanted, check_wanted
from attlas.view.parameters import QuestionError
from attlas.view.source import Place, Shown

NO_PARTS = "this recording has no parts; attlas record --parts, or record(model, parts=True), keeps them"


def why(
    shown: Shown, shown_entries: list[Shown], place: Place, cell: tuple[int, int], wanted: Wanted
) -> dict[str, Any]:
    """Return the summary of a cell of one head, with the places of earlier heads on the page.

    Parameters
    ----------
    shown : Shown
        The entry.
    shown_entries : list of Shown
        All entries of the page, to name that of the earlier head.
    place : Place
        The head, by its places.
    cell : tuple of int
        Query and key.
    wanted : callable, optional
        Whether somebody still waits.

    Raises
    ------
    QuestionError
        If the recording has no parts, or it is the mean of several heads or a rollout.
    """
    head = _explained_head(shown, place, wanted)
    entry = shown.entry
    found = summary(shown.atlas, (entry.name, entry.call), head, cell=cell, sequence=place.batch)
    writer = found["writer"]
    if writer is not None and writer["row"] is not None:
        for number, other in enumerate(shown_entries):
            same = other.atlas is shown.atlas and (other.entry.kind, other.entry.call) == (entry.kind, entry.call)
            if same and other.entry.layer == writer["layer"] and writer["head"] in other.entry.heads:
                writer["place"] = {"entry": number, "head": other.entry.heads.index(writer["head"])}
    return found


def why_map(shown: Shown, place: Place, wanted: Wanted) -> dict[str, Any]:
    """Return the summary of a whole map of one head; refused as `why` is."""
    head = _explained_head(shown, place, wanted)
    return map_summary(shown.atlas, (shown.entry.name, shown.entry.call), head, sequence=place.batch)


def _explained_head(shown: Shown, place: Place, wanted: Wanted) -> int:
    """Return the number of a head, as the model counts it, whose logits have parts.

    Raises
    ------
    QuestionError
        If the recording has no parts, or it is the mean of several heads or a rollout.
    """
    if not isinstance(place.head, int):
        raise QuestionError(409, "the mean of heads has no logits; choose one head")
    if shown.entry.kind == "rollout":
        raise QuestionError(409, "a product of layers has no logits; choose a head of a layer")
    if not shown.atlas.parts:
        raise QuestionError(409, NO_PARTS)
    check_wanted(wanted)
    return shown.entry.heads[place.head]
