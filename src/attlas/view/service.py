"""Every question that the page asks, answered: the same for HTTP, the notebook and the file that works offline."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from attlas.atlas import Atlas
from attlas.errors import AttlasError
from attlas.matrix import AttentionMatrix
from attlas.view import bundle, codes
from attlas.view.cache import Cache
from attlas.view.exact import Head, Unwanted
from attlas.view.parameters import Complaint, Parameters
from attlas.view.pyramid import BASE, ON_DEMAND, TILE, TRACKS, Pass, pad, place_of
from attlas.view.source import Shown, Source

__all__ = ["Answer", "Service"]

POOLS = ("mean", "max")
VARIANTS = ("plain", "nosink")

_TILES = 128 << 20  # bytes of tiles that are kept
_HEADS = 64 << 20  # bytes of log-sum-exp that are kept
_TOKENS = 16_384
_REGION = 65_536
_MATCHES = 1000
_LARGEST = 100


@dataclass(frozen=True)
class Answer:
    """What a carrier hands back.

    Attributes
    ----------
    kind : {"json", "binary"}
        What the body is.
    body : bytes
        JSON in UTF-8, or numbers, little-endian and row-major.
    progress : float
        Share of the answer that is computed already; 1 where it is complete.
    final : bool
        Whether the same question gets the same answer from now on.
    etag : str
        Key of the content.
    status : int
        As HTTP counts: 200, 400 (wrong parameters), 404 (no such thing), 409 (not in this recording), 499 (nobody
        waits any more), 500.
    sampled : bool
        Whether the picture shows a sample of the rows.
    """

    kind: Literal["json", "binary"]
    body: bytes
    progress: float = 1.0
    final: bool = True
    etag: str = ""
    status: int = 200
    sampled: bool = False


class Service:
    """Answers of the viewer.

    Parameters
    ----------
    shown : Atlas or AttentionMatrix
        A recording, or one matrix.
    tokens : sequence of str, optional
        Text of each token; by default that of the atlas.
    title : str
        Name of the whole; by default that of the model.
    store : str or Path, optional
        Folder for what passes over a head find, so that it need not be found again.
    """

    def __init__(
        self,
        shown: Atlas | AttentionMatrix,
        *,
        tokens: Sequence[str] | None = None,
        title: str = "",
        store: str | Path | None = None,
    ) -> None:
        self.source = Source(shown, tokens=tokens, title=title)
        self.store = store
        self._tiles: Cache[Answer] = Cache(_TILES)
        self._matrices: Cache[Head] = Cache(_HEADS)
        self._passes: dict[Any, Pass] = {}
        self._names: dict[str, Callable[[Parameters, Callable[[], bool] | None], Answer]] = {
            name: getattr(self, f"_{name}")
            for name in ("info", "tokens", "search", "tile", "thumbnail", "row", "column", "region", "cell", "top",
                         "track", "heads", "focus", "status", "offline")
        }  # fmt: skip

    def answer(self, name: str, parameters: Mapping[str, str], wanted: Callable[[], bool] | None = None) -> Answer:
        """Answer one question; never raises."""
        ask = self._names.get(name)
        try:
            if ask is None:
                raise Complaint(404, f"no question has the name {ascii(name[:40])}")
            return ask(Parameters(parameters), wanted)
        except Complaint as complaint:
            return _json({"error": complaint.text}, final=False, status=complaint.status)
        except Unwanted:
            return _json({"error": "nobody waits for the answer"}, final=False, status=499)
        except (AttlasError, RuntimeError, ValueError, MemoryError) as error:
            return _json({"error": str(error).partition("\n")[0]}, final=False, status=500)

    def close(self) -> None:
        """End the background pass."""

    # ------------------------------------------------------------------------------------------------- what is there

    def _info(self, given: Parameters, wanted: Callable[[], bool] | None) -> Answer:
        return _json(
            {
                "format": 1,
                **self.source.info,
                "tile": TILE,
                "on_demand_level": ON_DEMAND,
                "codes": {
                    "masked": codes.MASKED,
                    "zero": codes.ZERO,
                    "first": codes.FIRST,
                    "last": codes.LAST,
                    "pending": codes.PENDING,
                    "log2_min": int(codes.LOG2_MIN),
                    "log2_max": 0,
                },
                "tracks": list(TRACKS),
                "pools": list(POOLS),
            }
        )

    def _tokens(self, given: Parameters, wanted: Callable[[], bool] | None) -> Answer:
        span = given.span("start", "stop", self.source.length)
        if len(span) > _TOKENS:
            raise Complaint(400, f"at most {_TOKENS} tokens at a time: {len(span)}")
        tokens = self.source.text.tokens[span.start : span.stop]
        return _json({"start": span.start, "tokens": list(tokens), "joined": []})

    def _search(self, given: Parameters, wanted: Callable[[], bool] | None) -> Answer:
        matches, total = self.source.text.search(
            given.text("text", 1000), given.whole("limit", 1, _MATCHES + 1, default=100)
        )
        return _json({"matches": matches, "total": total})

    def _heads(self, given: Parameters, wanted: Callable[[], bool] | None) -> Answer:
        rows = [
            {"entry": e, "head": h, "kinds": [], "values": {}}
            for e, shown in enumerate(self.source.entries)
            for h in range(shown.entry.shape[1])
        ]
        return _json({"progress": 1.0, "columns": [], "rows": rows})

    def _focus(self, given: Parameters, wanted: Callable[[], bool] | None) -> Answer:
        return _json({}, final=False)

    def _offline(self, given: Parameters, wanted: Callable[[], bool] | None) -> Answer:
        return _json({"page": bundle.offline_page()})

    def _status(self, given: Parameters, wanted: Callable[[], bool] | None) -> Answer:
        return _json({"jobs": [], "bytes": self._tiles.nbytes}, final=False)

    # ----------------------------------------------------------------------------------------------------- pictures

    def _tile(self, given: Parameters, wanted: Callable[[], bool] | None) -> Answer:
        key, head = self._head_of(given)
        pool = given.word("pool", POOLS, "mean")
        shown = self.source.entries[key[0]].info
        level = given.whole("level", 0, shown["levels"])
        y = given.whole("y", 0, max(-(-head.m // (TILE << level)), 1))
        x = given.whole("x", 0, max(-(-head.n // (TILE << level)), 1))
        place = ("tile", *key, pool, level, y, x)
        found = self._tiles.get(place)
        if found is not None:
            return found
        if level <= ON_DEMAND:
            rows, columns = place_of(level, y, head.m), place_of(level, x, head.n)
            table = head.blocks(rows, columns, 1 << level, pool, wanted)
            values = codes.encode(table.mean if pool == "mean" else table.max, table.cells > 0)
            answer = self._binary(pad(values), place)
        else:
            values, known = self._pass(key, head, wanted).tile(level, y, x, pool)
            answer = self._binary(values, place, known)
        if answer.final:
            self._tiles.put(place, answer, len(answer.body))
        return answer

    def _thumbnail(self, given: Parameters, wanted: Callable[[], bool] | None) -> Answer:
        key, head = self._head_of(given)
        pool, size = given.word("pool", POOLS, "mean"), given.whole("size", 16, 257)
        if 0 in (head.m, head.n):
            return self._binary(np.zeros((size, size), dtype="<u2"), ("thumbnail", *key, pool, size))
        rows = torch.tensor([((p * head.m // size) + max((p + 1) * head.m // size, p * head.m // size + 1) - 1) // 2
                             for p in range(size)])  # fmt: skip
        weights, allowed = head.sampled(rows)
        starts = np.arange(size) * head.n // size
        if pool == "mean":
            counts = np.add.reduceat(allowed, starts, axis=1, dtype=np.int64)
            values = np.add.reduceat(weights, starts, axis=1, dtype=np.float64) / np.maximum(counts, 1)
        else:
            counts = np.add.reduceat(allowed, starts, axis=1, dtype=np.int64)
            values = np.maximum.reduceat(weights, starts, axis=1).astype(np.float64)
        answer = self._binary(codes.encode(values, counts > 0).astype("<u2"), ("thumbnail", *key, pool, size))
        return Answer(answer.kind, answer.body, 1.0, head.m <= size, answer.etag, 200, head.m > size)

    # -------------------------------------------------------------------------------------------------------- numbers

    def _row(self, given: Parameters, wanted: Callable[[], bool] | None) -> Answer:
        key, head = self._head_of(given)
        i = given.whole("i", 0, head.m)
        return self._binary(head.cells(range(i, i + 1), range(head.n), wanted).astype("<f4"), ("row", *key, i))

    def _column(self, given: Parameters, wanted: Callable[[], bool] | None) -> Answer:
        key, head = self._head_of(given)
        j = given.whole("j", 0, head.n)
        parts = [weights for _, weights, _ in head.parts(range(head.m), range(j, j + 1), 1024, wanted)]
        column = np.concatenate(parts) if parts else np.zeros(0)
        return self._binary(column.astype("<f4"), ("column", *key, j))

    def _region(self, given: Parameters, wanted: Callable[[], bool] | None) -> Answer:
        key, head = self._head_of(given)
        rows, columns = given.span("r0", "r1", head.m), given.span("c0", "c1", head.n)
        if len(rows) * len(columns) > _REGION:
            raise Complaint(400, f"a region has at most {_REGION} cells: {len(rows) * len(columns)}")
        weights = head.cells(rows, columns, wanted) if len(rows) and len(columns) else np.zeros(0)
        return self._binary(weights.astype("<f4"), ("region", *key, rows, columns))

    def _cell(self, given: Parameters, wanted: Callable[[], bool] | None) -> Answer:
        key, head = self._head_of(given)
        i, j = given.whole("i", 0, head.m), given.whole("j", 0, head.n)
        rows, place = range(i, i + 1), range(j, j + 1)
        weights = head.cells(rows, range(head.n), wanted)[0].astype(np.float64)
        allowed = head.allowed(rows, range(head.n))[0]
        lse = float(head.lse(rows, wanted)[0, 0, 0]) if head.heads == 1 else math.nan
        logit = float(head.window(rows, place, wanted).logits[..., :, :].flatten()[0]) if head.heads == 1 else math.nan
        seen = weights[weights > 0]
        return _json(
            {
                "weight": _number(weights[j]),
                "logit": _number(logit),
                "lse": _number(lse),
                "allowed": bool(allowed[j]),
                "rank": int((weights > weights[j]).sum()) + 1 if allowed[j] else None,
                "row_entropy": _number(-(seen * np.log(seen)).sum()) if allowed.any() else None,
                "column_mass": None,
            }
        )

    def _top(self, given: Parameters, wanted: Callable[[], bool] | None) -> Answer:
        key, head = self._head_of(given)
        count = given.whole("k", 1, _LARGEST + 1)
        rows = given.span("r0", "r1", head.m) if given.is_given("r0") else range(head.m)
        columns = given.span("c0", "c1", head.n) if given.is_given("c0") else range(head.n)
        best: list[tuple[float, int, int]] = []
        for part, weights, allowed in head.parts(rows, columns, 1, wanted):
            flat = np.where(allowed, weights, -1.0).ravel()
            some = np.argpartition(flat, -min(count, len(flat)))[-count:] if len(flat) else []
            width = max(len(columns), 1)
            best += [(-float(flat[c]), part.start + int(c) // width, columns.start + int(c) % width) for c in some]
            best = sorted(best)[:count]
        return _json({"cells": [[i, j, -weight] for weight, i, j in best if weight <= 0]})

    def _track(self, given: Parameters, wanted: Callable[[], bool] | None) -> Answer:
        key, head = self._head_of(given)
        name = given.word("name", TRACKS)
        found = self._pass(key, head, wanted)
        return self._binary(found.track(name), ("track", *key, name), found.progress)

    # ----------------------------------------------------------------------------------------------------------- parts

    def _head_of(self, given: Parameters) -> tuple[tuple[Any, ...], Head]:
        """Return the key of a head and the head."""
        number = given.whole("entry", 0, len(self.source.entries))
        shown = self.source.entries[number]
        batches, heads = shown.entry.shape[:2]
        batch = given.whole("batch", 0, batches, default=0)
        mean = self._is_mean(given)
        head: int | str = "mean" if mean else given.whole("head", 0, heads)
        variant = given.word("variant", VARIANTS, "plain")
        if shown.matrix is None:
            raise Complaint(409, "only statistics of this layer were kept, and no weights")
        key = (number, batch, head, variant)
        found = self._matrices.get(key)
        if found is None:
            some = slice(0, heads) if isinstance(head, str) else slice(head, head + 1)
            found = Head(shown.matrix[batch : batch + 1, some], skip_first=variant == "nosink")
            self._matrices.put(key, found, 8 * found.m * found.heads)
        return key, found

    def _is_mean(self, given: Parameters) -> bool:
        try:
            return given.word("head", ("mean",)) == "mean"
        except Complaint:
            return False

    def _pass(self, key: tuple[Any, ...], head: Head, wanted: Callable[[], bool] | None) -> Pass:
        found = self._passes.get(key)
        if found is None:
            found = Pass(head.m, head.n)
            for band in range(len(found.done)):
                found.take(band, head.band(found.rows_of(band), 1 << BASE, wanted))
            self._passes[key] = found
        return found

    def _binary(self, values: NDArray[np.generic], place: tuple[Any, ...], progress: float = 1.0) -> Answer:
        etag = hashlib.sha256(f"{self.source.key} {place} {progress}".encode()).hexdigest()[:32]
        return Answer("binary", np.ascontiguousarray(values).tobytes(), progress, progress >= 1.0, etag)


def _json(content: Mapping[str, Any], *, final: bool = True, status: int = 200) -> Answer:
    body = json.dumps(content, ensure_ascii=False, allow_nan=False).encode("utf-8", "surrogatepass")
    etag = hashlib.sha256(body).hexdigest()[:32]
    return Answer("json", body, 1.0, final, etag, status)


def _number(value: float) -> float | None:
    """Return a number as JSON knows it: None where it is infinite or unknown."""
    return float(value) if math.isfinite(value) else None
