"""Answers every question of the page, in the same way for HTTP, the notebook and the file that works offline."""

from __future__ import annotations

import contextlib
import json
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from attlas.errors import AttlasError, RecordingError, public
from attlas.foundation.files import lock_folder
from attlas.matrix import AttentionMatrix
from attlas.pictures.pooling import POOLING_SIDE, is_dark
from attlas.recording.atlas import Atlas
from attlas.recording.atlas.bookmarks import bookmarks_from, read_bookmarks, write_bookmarks
from attlas.recording.atlas.serialization import FormatError
from attlas.view import bundle, codes
from attlas.view.about import project_address
from attlas.view.codes import Array, finite_or_none
from attlas.view.exact import Head, UnwantedError, Wanted, check_wanted
from attlas.view.known_heads import KnownHeads
from attlas.view.largest import largest
from attlas.view.outline import Outlines
from attlas.view.packing import Packer
from attlas.view.parameters import Parameters, QuestionError
from attlas.view.passes import Passes, PassJob, PassKey
from attlas.view.pictures import Picture, Pictures
from attlas.view.pyramid import ON_DEMAND, ROW_TRACKS, TILE, TRACKS
from attlas.view.rolled import Rollout
from attlas.view.source import WEIGHTED, Place, Source
from attlas.view.statistics import HeadTable
from attlas.view.store import Store
from attlas.view.story import story
from attlas.view.tokens import Text
from attlas.view.why import why, why_map
from attlas.view.worker import Worker

# Each is answered by the method `_answer_` with this name.
_QUESTION_NAMES = (
    "info", "tokens", "search", "tile", "thumbnail", "row", "column", "region", "cell", "pair", "top", "track",
    "pooling", "heads", "focus", "status", "offline", "why",
    "why_map", "outline", "story",
)  # fmt: skip
_POOL_NAMES = ("mean", "max")
_PLAIN_TRACKS = ("entropy", "effective_keys")  # defined for plain weights alone, whose rows sum to 1
# The most of each in one answer.
_MOST_TOKENS = 16_384
_MOST_CELLS = 65_536
_MOST_MATCHES = 1000
_MOST_LARGEST = 100
_PAGE_BYTES = 24 << 20  # bytes of pictures of a page that works offline, before compression
_SMALL_HEAD = 1 << 22  # cells of a head up to which a question may take a pass over it
_TINY_SUM = 1e-300  # instead of a sum of 0, by which weights are divided
_MOST_CHARACTERS = 1000  # of a text to search for


@dataclass(frozen=True)
class Answer:
    """An answer to one question, which HTTP, a notebook or a file passes on.

    Parameters
    ----------
    kind : {"json", "binary"}
        What the body is.
    body : bytes
        JSON in UTF-8, or numbers, little-endian and row by row.
    progress : float
        Share of the answer that is computed; 1 where it is complete.
    final : bool
        Whether the same question will always get the same answer, so that it may be cached.
    status : int
        As HTTP counts: 200; 400 for wrong parameters, 404 for what does not exist, 409 for weights that were not
        recorded, 499 when nobody waits any more, 500 when the computation failed, 503 when the service is closed.
    sampled : bool
        Whether a picture shows a sample of the rows.

    Examples
    --------
    >>> from attlas.view import Answer
    >>> Answer("json", b"{}").status
    200
    """

    kind: Literal["json", "binary"]
    body: bytes
    progress: float = 1.0
    final: bool = True
    status: int = 200
    sampled: bool = False


class Service:
    """Answers everything that the viewer asks about an atlas or a matrix.

    Parameters
    ----------
    shown : Atlas or AttentionMatrix
        A recording, or one matrix; its leading axes are batch and heads as `attend` reads them, one alone is the
        batch.
    tokens : sequence of str, or of such, optional
        Text of each token of sequence 0, or a list for each sequence; by default those of the atlas. A pair, of the
        queries and of the keys, for a matrix of two texts.
    title : str
        Name of the whole; by default that of the model.
    compare : Atlas or AttentionMatrix, optional
        A second recording of as many tokens, whose heads are compared with those of the first, cell by cell.
    compare_title : str
        Name of the second recording; by default that of its model.
    folder : str or Path, optional
        Where the recording is: bookmarks are saved there, and the Python code that the page offers loads it.
    store : str or Path, optional
        Folder for the results of passes over whole heads, ``run.atlas.view`` by custom. It is made where it is
        missing; without it, or where it cannot be written, they go to a temporary folder.
    known : KnownHeads, optional
        What the heads are, where that was measured on something else than the text that is shown
        (`attlas.view.known_heads`); the default is what the recording says of them.
    waits : callable, optional
        Returns whether the statistics of heads that the page asks for wait, as for those of a text that is still
        written; a page asks again until it has them.

    Raises
    ------
    DtypeError
        If there is nothing to show.
    ShapeError
        If no matrix of `compare` has the size of one that is shown.

    See Also
    --------
    attlas.load : an atlas from a folder.

    Notes
    -----
    Any number of threads may ask. Pictures of blocks of up to 16 × 16 cells, and all numbers, are computed
    exactly when they are asked for: a tile costs at most 4096 × 4096 scores, a row n, given the log-sum-exp of
    its rows, which recordings keep. Coarser pictures and the tracks come from one pass over a head, in the
    background: about what the product with the values costs. Memory: 96 MB of pictures, 128 MB of log-sum-exp,
    and passes of 10 bytes a block of 32 × 32 cells, in files that are mapped.

    Examples
    --------
    >>> import json, torch, attlas
    >>> from attlas.view import Service
    >>> service = Service(attlas.attend(torch.zeros(5, 8), torch.zeros(5, 8), mask=attlas.Causal()))
    >>> answer = service.answer("cell", {"entry": "0", "head": "0", "i": "3", "j": "1"})
    >>> answer.status, json.loads(answer.body)["weight"]
    (200, 0.25)
    >>> service.answer("cell", {"entry": "7"}).status
    404
    >>> service.close()
    """

    def __init__(
        self,
        shown: Atlas | AttentionMatrix,
        *,
        tokens: Sequence[str] | Sequence[Sequence[str]] | None = None,
        title: str = "",
        compare: Atlas | AttentionMatrix | None = None,
        compare_title: str = "",
        folder: str | os.PathLike[str] | None = None,
        store: str | os.PathLike[str] | None = None,
        known: KnownHeads | None = None,
        waits: Callable[[], bool] | None = None,
    ) -> None:
        self._source = Source(shown, tokens=tokens, title=title, other=compare, other_title=compare_title)
        self._folder = None if folder is None else os.fspath(folder)
        self._bookmarks_lock, self._packing_progress = threading.Lock(), 0.0
        self._store = Store(store)
        self._worker = Worker()
        self._passes = Passes(self._source, self._store, self._worker)
        self._pictures = Pictures(self._passes)
        self._outlines = Outlines(self._source)
        self._table = HeadTable(self._source, self._worker, known, waits)
        self._story: list[dict[str, Any]] | None = None  # once the kinds of all heads are known

    @property
    def source(self) -> Source:
        """What is shown."""
        return self._source

    def measure(self) -> None:
        """Compute the statistics of all heads in this thread."""
        while self._table.step():
            pass
        while self.answer("heads", {}).progress < 1:
            pass

    def rest(self) -> None:
        """Give up what is computed in the background until somebody asks for it again."""
        self._worker.rest()

    def order(self) -> list[tuple[int, int]]:
        """Return (entry, head) of all heads, the most telling first; this computes their statistics in this thread."""
        self.measure()
        return self._table.order()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the questions that `answer` knows."""
        return _QUESTION_NAMES

    def answer(self, name: str, parameters: Mapping[str, str], wanted: Wanted = None) -> Answer:
        """Answer one question.

        Parameters
        ----------
        name : str
            What is asked, one of `names`.
        parameters : mapping of str to str
            Its parameters, as texts.
        wanted : callable, optional
            Returns whether somebody still waits; it is asked between two steps of a long computation.

        Returns
        -------
        Answer
            With the reason and its status where the question is wrong or the computation fails: nothing is raised.
        """
        if name not in _QUESTION_NAMES:
            return refusal(404, f"no such question: {name[:40]!a}")
        if self._worker.closed:
            return refusal(503, "the viewer was closed")
        if wanted is not None and not wanted():
            return refusal(499, "nobody waits for the answer")
        question = getattr(self, f"_answer_{name}")
        # A page is packed beside the passes that it waits for; all other questions go before them.
        with contextlib.nullcontext() if name == "offline" else self._worker.question():
            return answered(lambda: question(Parameters(parameters), wanted))

    def close(self) -> None:
        """End the work in the background and remove temporary files. Later questions are refused."""
        self._source.close()
        self._worker.close()
        self._passes.close()
        self._store.close()

    # --------------------------------------------------------------------------------------------- what there is

    def _answer_info(self, params: Parameters, wanted: Wanted) -> Answer:
        """Answer what is shown, how the numbers of pictures are coded, and the bookmarks."""
        special = {"masked": codes.MASKED, "zero": codes.ZERO, "pending": codes.PENDING}
        weights = {"first": codes.FIRST, "last": codes.LAST, "log2_min": int(codes.LOG2_MIN), "log2_max": 0}
        pictures = {"tile": TILE, "on_demand_level": ON_DEMAND, "tracks": TRACKS, "pools": _POOL_NAMES}
        low, high = map(int, codes.SIGNED_LOG2)  # of weights that are no shares
        signed = {"last_positive": codes.LAST_POSITIVE, "log2_min": low, "log2_max": high}
        pictures["codes"] = special | weights | {"signed": signed}
        bookmarks = {"bookmarks": self._stored_bookmarks(), "keeps": self._folder is not None}
        project = {"project": project_address()}
        content = {"format": 1, **self._source.info, "folder": self._folder, **pictures, **bookmarks, **project}
        return json_answer(content, final=False)  # bookmarks change

    def _stored_bookmarks(self) -> list[dict[str, str]]:
        return [asdict(bookmark) for bookmark in self._source.atlas.bookmarks]

    @public("view")
    def post(self, name: str, content: Any) -> Answer:
        """Save something that the page sends.

        Parameters
        ----------
        name : str
            What to save: only "bookmarks", named views, which are saved with the recording where it has a folder.
        content : object
            ``{"bookmarks": [...], "before": [...]}``: all bookmarks, and those that the page knew before.

        Returns
        -------
        Answer
            409 where another page, of this viewer or of another one, has changed them since.
        """
        if name != "bookmarks":
            return refusal(404, f"nothing of this name is kept: {name[:40]!a}")
        sent = content if isinstance(content, dict) else {}
        folder = None if self._folder is None else Path(self._folder)
        with self._bookmarks_lock, contextlib.nullcontext() if folder is None else lock_folder(folder):
            try:
                if folder is not None:  # another viewer may have written the file; a page that reloads shows it
                    self._source.atlas.bookmarks = read_bookmarks(folder)
                if sent.get("before") != self._stored_bookmarks():
                    return refusal(409, "the bookmarks were changed on another page; reload this one")
                bookmarks = bookmarks_from(sent.get("bookmarks"))
                if folder is not None:
                    write_bookmarks(folder, bookmarks)
            except FormatError as error:
                return refusal(400, str(error))
            except RecordingError as error:
                return refusal(500, f"the bookmarks cannot be kept: {error.found}")
            self._source.atlas.bookmarks = bookmarks
            return json_answer({"bookmarks": self._stored_bookmarks()}, final=False)

    def _answer_tokens(self, params: Parameters, wanted: Wanted) -> Answer:
        """Answer with the tokens from `start` to `stop`."""
        text = self._text_of_question(params)
        span = params.span("start", "stop", self._source.length)
        if len(span) > _MOST_TOKENS:
            raise QuestionError(400, f"at most {_MOST_TOKENS} tokens at a time: {len(span)}")
        shown = text.shown[span.start : span.stop]
        return json_answer({"start": span.start, "tokens": shown, "joined": text.joined_in(span)})

    def _answer_outline(self, params: Parameters, wanted: Wanted) -> Answer:
        """Answer with the named stretches of the texts of a sequence: documents, functions, sentences."""
        entry = params.whole("entry", 0, len(self._source.entries))
        batch = params.whole("batch", 0, self._source.entries[entry].entry.shape[0], default=0)
        return json_answer(self._outlines.of(entry, batch))

    def _text_of_question(self, params: Parameters) -> Text:
        """Return the text that a question names in its parameter `of`."""
        texts = self._source.texts or [Text([])]
        return texts[params.whole("of", 0, len(texts), default=0)]

    def _answer_offline(self, params: Parameters, wanted: Wanted) -> Answer:
        """Answer a page that works offline, with the data of one head, or of all that are shown together."""
        named = (prefix for prefix in ("second_", "third_", "fourth_") if params.has(f"{prefix}entry"))
        places = [self._head_of_question(params, prefix)[0] for prefix in ("", *named)]
        pin, centre = (
            (params.whole(i, 0, 1 << 40), params.whole(j, 0, 1 << 40)) if params.has(i) else None
            for i, j in (("i", "j"), ("r", "c"))
        )

        def report(share: float) -> None:
            """Note the share that is done; raise where nobody waits any more."""
            check_wanted(wanted)
            self._packing_progress = share

        first, shapes = places[0], [shown.entry.shape for shown in self._source.entries]
        all_heads = [(entry, head) for entry, shape in enumerate(shapes) for head in range(shape[1])]
        packer = Packer(
            self,
            [(place.entry, place.head) for place in places],  # type: ignore[misc]  # a mean of heads is packed, too
            all_heads,
            limit=_PAGE_BYTES,
            batch=first.batch,
            variant=first.variant,
            pool=params.word("pool", _POOL_NAMES, "max"),
            pin=pin,
            centre=centre,
            report=report,
            overviews=False,
        )
        try:
            return json_answer({"page": bundle.offline_page(), "data": packer.pack()}, final=False)
        except RecordingError as error:
            raise QuestionError(409, error.found or str(error)) from error
        finally:
            self._packing_progress = 0.0

    def _answer_search(self, params: Parameters, wanted: Wanted) -> Answer:
        """Answer with the places of a text among the tokens."""
        limit = params.whole("limit", 1, _MOST_MATCHES + 1, default=100)
        matches, total = self._text_of_question(params).search(params.text("text", _MOST_CHARACTERS), limit)
        return json_answer({"matches": matches, "total": total})

    def _answer_heads(self, params: Parameters, wanted: Wanted) -> Answer:
        """Answer with the table of heads."""
        table = self._table.answer()
        return json_answer(table, progress=table["progress"])

    def _answer_story(self, params: Parameters, wanted: Wanted) -> Answer:
        """Answer with the steps of the tour; none before the statistics of all heads are known."""
        table = self._table.answer()
        if self._story is None and table["progress"] >= 1:
            self._story = story(table["rows"], self._source)
        return json_answer({"steps": self._story or []}, progress=table["progress"])

    def _answer_pooling(self, params: Parameters, wanted: Wanted) -> Answer:
        """Answer which pooling suits the overview of a head: "max", or "mean" where a picture of maxima is dark."""
        return json_answer({"pool": self._suited_pool(*self._head_of_question(params), wanted)})

    def _suited_pool(self, place: Place, head: Head, wanted: Wanted) -> Literal["mean", "max"]:
        """Return which pooling suits the overview of a head."""
        if not self._source.entries[place.entry].are_shares:  # means of weights of both signs are near 0
            return "max"
        picture = self._pictures.thumbnail(place, head, "max", POOLING_SIDE, wanted).codes
        shown = torch.from_numpy(codes.decode(picture[picture > codes.ZERO]))
        return "mean" if is_dark(shown, head.n) else "max"

    def _answer_focus(self, params: Parameters, wanted: Wanted) -> Answer:
        """Let the passes of a head continue near the rows that the page shows."""
        place, head = self._head_of_question(params)
        # Checked, as a wrong question is answered by an error; rows are all that counts here.
        params.whole("level", 0, self._source.entries[place.entry].levels)
        rows, _ = params.span("r0", "r1", head.m), params.span("c0", "c1", head.n)
        self._passes.move_to(place, (rows.start + rows.stop) / 2)
        return json_answer({}, final=False)

    def _answer_status(self, params: Parameters, wanted: Wanted) -> Answer:
        """Answer what is computed in the background, and how much memory and disk is used."""
        jobs = [
            {**key.place._asdict(), **job.told}
            for key, job in self._worker.jobs.items()
            if isinstance(key, PassKey) and isinstance(job, PassJob | Rollout)
        ]
        used = self._pictures.nbytes + self._passes.nbytes
        return json_answer({"packing": self._packing_progress, "jobs": jobs, "bytes": used}, final=False)

    # ------------------------------------------------------------------------------------------------- pictures

    def _answer_tile(self, params: Parameters, wanted: Wanted) -> Answer:
        """Answer with one tile of the map of a head; `level` halves its resolution each time."""
        place, head = self._head_of_question(params)
        pool = params.word("pool", _POOL_NAMES, "mean")
        level = params.whole("level", 0, self._source.entries[place.entry].levels)
        size = TILE << level
        y = params.whole("y", 0, max(-(-head.m // size), 1))
        x = params.whole("x", 0, max(-(-head.n // size), 1))
        return self._picture_answer(self._pictures.tile(place, head, pool, level, y, x, wanted))

    def _answer_thumbnail(self, params: Parameters, wanted: Wanted) -> Answer:
        """Answer with a small picture of a whole head."""
        place, head = self._head_of_question(params)
        pool, size = (
            params.word("pool", (*_POOL_NAMES, "suited"), "mean"),
            params.whole("size", 16, TILE + 1, default=64),
        )
        pool = self._suited_pool(place, head, wanted) if pool == "suited" else pool
        return self._picture_answer(self._pictures.thumbnail(place, head, pool, size, wanted))

    def _answer_track(self, params: Parameters, wanted: Wanted) -> Answer:
        """Answer one number for each row or column of a head, such as the entropy of rows."""
        place, head = self._head_of_question(params)
        name = params.word("name", TRACKS)
        if name in _PLAIN_TRACKS and not self._source.entries[place.entry].are_shares:
            raise QuestionError(409, f"{name} is defined for weights that are shares of a row")
        if place.variant in WEIGHTED and name in _PLAIN_TRACKS:
            place, head = self._place_and_head(place.plain)
        prepared = 1.0 if head.preparation is None else self._passes.prepare(place, head.preparation, wanted)
        if prepared < 1:
            unknown = np.full(head.m if name in ROW_TRACKS else head.n, np.nan, dtype="<f4")
            return self._picture_answer(Picture(unknown, 0.0))
        job = self._passes.get(place, head, sums=name == "column_mass", wanted=wanted)
        progress = job.result.progress  # read before the numbers, which may only get more complete
        if job.error and progress < 1:
            raise RuntimeError(job.error)
        return self._picture_answer(Picture(job.result.track(name), progress))

    # -------------------------------------------------------------------------------------------------- numbers

    def _answer_row(self, params: Parameters, wanted: Wanted) -> Answer:
        """Answer with the weights of one query."""
        _, head = self._head_of_question(params)
        i = params.whole("i", 0, head.m)
        return _binary_answer(head.cells(range(i, i + 1), range(head.n), wanted))

    def _answer_column(self, params: Parameters, wanted: Wanted) -> Answer:
        """Answer with the weights that one key gets."""
        _, head = self._head_of_question(params)
        return _binary_answer(_column_cells(head, params.whole("j", 0, head.n), wanted))

    def _answer_region(self, params: Parameters, wanted: Wanted) -> Answer:
        """Answer with the weights of a window."""
        _, head = self._head_of_question(params)
        rows, columns = params.span("r0", "r1", head.m), params.span("c0", "c1", head.n)
        if len(rows) * len(columns) > _MOST_CELLS:
            raise QuestionError(400, f"a region has at most {_MOST_CELLS} cells: {len(rows) * len(columns)}")
        return _binary_answer(head.cells(rows, columns, wanted))

    def _answer_cell(self, params: Parameters, wanted: Wanted) -> Answer:
        """Answer what is known of one cell; of value-weighted weights, also the plain weight, as "share"."""
        place, head = self._head_of_question(params)
        i, j = params.whole("i", 0, head.m), params.whole("j", 0, head.n)
        window = range(i, i + 1), range(head.n)  # the row of the cell
        shown, allowed = head.cells(*window, wanted)[0], head.allowed(*window)[0]
        plain, weights, is_weighted = head, shown, self._source.norms(place) is not None
        if is_weighted:
            plain = self._place_and_head(place.plain)[1]
            weights = plain.cells(*window, wanted)[0]
        shares, seen = self._source.entries[place.entry].are_shares, allowed.any()
        positive = weights[weights > 0].astype(np.float64)
        lse = float(head.lse(window[0], wanted)[0, 0, 0]) if head.has_lse else math.nan
        return json_answer(
            {
                "weight": finite_or_none(shown[j]),
                "share": finite_or_none(weights[j]) if is_weighted else None,
                "logit": finite_or_none(plain.logit(i, j)),
                "lse": finite_or_none(lse),
                "allowed": bool(allowed[j]),
                "rank": int((np.abs(shown) > abs(shown[j])).sum()) + 1 if allowed[j] else None,
                "row_entropy": finite_or_none(-(positive * np.log(positive)).sum()) if shares and seen else None,
                "row_mass": finite_or_none(shown.sum(dtype=np.float64)) if seen and not shares else None,
                "column_mass": self._column_mass(place, head, j, wanted),
            }
        )

    def _answer_why(self, params: Parameters, wanted: Wanted) -> Answer:
        """Answer why one weight is where it is: its logit as a sum over parts of query and key."""
        place, head = self._head_of_question(params)
        cell = params.whole("i", 0, head.m), params.whole("j", 0, head.n)
        return json_answer(why(self._source.entries[place.entry], self._source.entries, place, cell, wanted))

    def _answer_why_map(self, params: Parameters, wanted: Wanted) -> Answer:
        """Answer what pairs of parts add where a head looks, above the mean of the keys."""
        place, _ = self._head_of_question(params)
        return json_answer(why_map(self._source.entries[place.entry], place, wanted))

    def _answer_pair(self, params: Parameters, wanted: Wanted) -> Answer:
        """Answer the weight of each head from one query on some keys, and how much its row overlaps a row elsewhere."""
        place, heads = self._head_of_question(params)
        rows = heads.rows(params.whole("i", 0, heads.m))
        keys = params.span("j0", "j1", heads.n)
        content: dict[str, Any] = {"weights": rows[:, keys.start : keys.stop].sum(axis=1).tolist(), "agreement": None}
        if params.has("with_entry"):
            other_place, other = self._head_of_question(params, "with_")
            if (other.m, other.n) != (heads.m, heads.n):
                raise QuestionError(400, f"heads of {heads.n} and {other.n} keys cannot be compared")
            if not all(self._source.entries[each.entry].are_shares for each in (place, other_place)):
                return json_answer(content)  # what two rows have in common is defined for shares
            other_row = other.rows(params.whole("i", 0, other.m)).mean(axis=0)
            if place.variant in WEIGHTED:  # rows of plain weights sum to 1 already
                rows = rows / np.maximum(rows.sum(axis=1, keepdims=True), _TINY_SUM)
                other_row = other_row / max(other_row.sum(), _TINY_SUM)
            content["agreement"] = np.minimum(rows, other_row).sum(axis=1).tolist()
        return json_answer(content)

    def _column_mass(self, place: Place, head: Head, j: int, wanted: Wanted) -> float | None:
        """Return the mass of a column; None where that would take a pass over the head, and the head is large."""
        complete = self._passes.complete_pass(place, sums=True)
        if complete is not None:
            return finite_or_none(complete.track("column_mass")[j])
        if not (head.knows_lse or head.m * head.n <= _SMALL_HEAD):
            return None
        return finite_or_none(_column_cells(head, j, wanted).sum(dtype=np.float64))

    def _answer_top(self, params: Parameters, wanted: Wanted) -> Answer:
        """Answer the cells of largest weight, by size, in a region of a head."""
        place, head = self._head_of_question(params)
        count = params.whole("k", 1, _MOST_LARGEST + 1, default=10)
        rows = params.span("r0", "r1", head.m) if params.has("r0", "r1") else range(head.m)
        columns = params.span("c0", "c1", head.n) if params.has("c0", "c1") else range(head.n)
        return json_answer({"cells": largest(head, rows, columns, count, self._passes.complete_pass(place), wanted)})

    # ---------------------------------------------------------------------------------------------------- parts

    def _head_of_question(self, params: Parameters, prefix: str = "") -> tuple[Place, Head]:
        """Return the head that a question names in its parameters `entry` and `head`, whose names have a prefix."""
        entry = params.whole(f"{prefix}entry", 0, len(self._source.entries))
        batches, heads, _, _ = self._source.entries[entry].entry.shape
        batch = params.whole("batch", 0, batches, default=0)
        mean = params.equals(f"{prefix}head", "mean")
        number: int | Literal["mean"] = "mean" if mean else params.whole(f"{prefix}head", 0, heads)
        variant: Any = params.word("variant", ("plain", "nosink", *WEIGHTED), "plain")
        return self._place_and_head(Place(entry, batch, number, variant))

    def _place_and_head(self, place: Place) -> tuple[Place, Head]:
        """Return a place and its head; raise a QuestionError where its weights were not recorded."""
        head = self._source.head(place)
        if head is not None:
            return place, head
        if self._source.head(place.plain) is None:
            raise QuestionError(409, "only statistics of this layer were recorded, and no weights")
        matrix = self._source.entries[place.entry].entry.matrix
        if matrix is not None and matrix.weights.softmax is None:
            raise QuestionError(409, "the weights of this layer are no softmax, and are shown as they are")
        if place.variant == "value" or self._source.norms(place._replace(variant="value")) is None:
            raise QuestionError(409, "this recording has no values; attlas record --values all keeps them")
        raise QuestionError(409, "the output projection of this layer is not known")

    def _picture_answer(self, picture: Picture) -> Answer:
        return _binary_answer(picture.codes, progress=picture.progress, sampled=picture.sampled)


def _column_cells(head: Head, j: int, wanted: Wanted) -> Array:
    """Return all weights of one column."""
    parts = [weights for _, weights, _ in head.parts(range(head.m), range(j, j + 1), 1024, wanted)]
    return np.concatenate(parts)[:, 0] if parts else np.zeros(0, dtype=np.float32)


def _binary_answer(values: Array, *, progress: float = 1.0, sampled: bool = False) -> Answer:
    """Return numbers as an answer: float32, or uint16 for the codes of pictures; `sampled` ones are not final."""
    values = values.astype("<f4") if values.dtype.kind == "f" else values.astype("<u2")
    body = values.tobytes()
    return Answer("binary", body, progress, progress >= 1 and not sampled, 200, sampled)


def json_answer(content: Mapping[str, Any], *, final: bool = True, progress: float = 1.0, status: int = 200) -> Answer:
    """Return plain data as an answer; one that is `final` may be kept by the browser when `progress` is 1."""
    # A text may hold half of a surrogate pair, which JSON can only hold escaped.
    body = json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")
    return Answer("json", body, progress, final and progress >= 1, status)


def refusal(status: int, text: str, **more: Any) -> Answer:
    """Return an answer with an error status and its reason."""
    return json_answer({"error": text, **more}, final=False, status=status)


def answered(answer: Callable[[], Answer]) -> Answer:
    """Return the answer of a function, or its error as an answer."""
    try:
        return answer()
    except QuestionError as error:
        return refusal(error.status, error.text, **error.more)
    except UnwantedError:
        return refusal(499, "nobody waits for the answer")
    except (AttlasError, RuntimeError, ValueError, MemoryError, OSError) as error:
        return refusal(500, str(error).partition("\n")[0] or type(error).__name__)
