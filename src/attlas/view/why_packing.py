"""What a page that works offline holds of why weights are where they are: some cells, and the maps of small heads."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from attlas.view.source import Source

_MOST_BYTES = 1 << 20  # of all answers in the page, compressed and as base64, about
_MOST_CELLS = 256  # cells that are explained
_MOST_WORK = 1 << 34  # cells of the maps times heads of the recording: some seconds for one head of 16,384 tokens

HeadKey = tuple[int, Any]  # entry and head
Cell = tuple[int, int]


class Answers(Protocol):
    """What answers the questions of the page."""

    @property
    def source(self) -> Source:
        """What is shown."""

    def answer(self, name: str, parameters: Mapping[str, str], /) -> Any:
        """Answer one question."""


class ReasonPacker:
    """Put why cells of some heads are where they are, and whole maps as far as they are small, into a page.

    Parameters
    ----------
    service : Service
        What answers.
    heads : sequence of dict
        The heads of the page, with their "entry" and "head", the most telling first. A head whose recording has parts
        gets ``"why"``: the ``"cells"`` that are explained, and whether its ``"map"`` is.
    batch : int
        The sequence.
    put : callable
        Adds the bytes of an answer under a name, and returns how many bytes the page has for it.
    report : callable
        Called with the share that is done, from 0 to 1.
    """

    def __init__(
        self,
        service: Answers,
        heads: Sequence[dict[str, Any]],
        batch: int,
        put: Callable[[str, bytes], int],
        report: Callable[[float], object],
    ) -> None:
        self._service, self._batch, self._put, self._report = service, batch, put, report
        self._entries = service.source.entries
        self._held: dict[HeadKey, dict[str, Any]] = {}
        for head in heads:
            if self._entries[head["entry"]].has_parts:
                head["why"] = {"cells": [], "map": False}
                self._held[head["entry"], head["head"]] = head["why"]
        self._room = _MOST_BYTES

    def pack(self, cells: Callable[[HeadKey], Sequence[Cell]]) -> None:
        """Put cells, those that the writers of their keys read, and then maps; what cannot be explained is left out.

        `cells` returns those of a head.
        """
        asked = [(key, cell) for key in self._held for cell in cells(key)]
        read = []
        for done, (key, cell) in enumerate(asked):
            self._report(0.5 * done / len(asked))
            body = self._put_cell(key, cell)
            read += [] if body is None else _read_by_writer(body, self._service.source)
        for key, cell in read:
            self._put_cell(key, cell)
        self._put_maps()

    def _put_cell(self, key: HeadKey, cell: Cell) -> bytes | None:
        """Put one cell, and return its answer; None where it is here already, cannot be explained, or has no room."""
        known = self._held[key]["cells"] if key in self._held else None
        explained = sum(len(held["cells"]) for held in self._held.values())
        if known is None or list(cell) in known or self._room <= 0 or explained >= _MOST_CELLS:
            return None
        body = self._put_answer("why", key, cell)
        if body is not None:
            known.append(list(cell))
        return body

    def _put_maps(self) -> None:
        """Put the tables of whole maps, as many as there is room and time for."""
        heads = sum(len(entry.heads) for entry in self._service.source.atlas.entries)
        work = _MOST_WORK
        for done, (key, held) in enumerate(self._held.items()):
            self._report(0.5 + 0.5 * done / len(self._held))
            _, _, m, n = self._entries[key[0]].entry.shape
            work -= m * n * heads
            if self._room <= 0 or work < 0:
                return
            held["map"] = self._put_answer("why_map", key) is not None

    def _put_answer(self, question: str, key: HeadKey, cell: Cell | tuple[()] = ()) -> bytes | None:
        """Put an answer under the name that the script of the page knows, and return it; None where it is refused."""
        asked = {"entry": key[0], "head": key[1], "batch": self._batch, **dict(zip("ij", cell, strict=False))}
        answer = self._service.answer(question, {name: str(value) for name, value in asked.items()})
        if answer.status != 200:
            return None
        self._room -= self._put(":".join(map(str, (question, *key, *cell))), answer.body)
        return bytes(answer.body)


def _read_by_writer(body: bytes, source: Source) -> list[tuple[HeadKey, Cell]]:
    """Return the head that wrote most of the key of an explained cell, with the cell where it read that; else none."""
    writer = json.loads(body)["writer"]
    if writer is None or "place" not in writer or not writer["sources"]:
        return []
    place = writer["place"]["entry"], writer["place"]["head"]
    entry = source.entries[place[0]].entry
    return [(place, (writer["row"] - entry.queries[0], writer["sources"][0]["at"] - entry.first_key))]
