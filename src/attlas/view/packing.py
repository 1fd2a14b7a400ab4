"""What a page that works offline holds: some heads in detail and overviews of the others, as JSON."""

from __future__ import annotations

import base64
import json
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import Tensor

from attlas import stats
from attlas.errors import RecordingError, public
from attlas.recording.atlas import Entry
from attlas.stats.pooled import block_edges
from attlas.view import codes
from attlas.view.codes import Array
from attlas.view.exact import Head
from attlas.view.patches import marked_cells, patch_about, pinned_cells
from attlas.view.pyramid import TILE, TRACKS, levels_of, pad
from attlas.view.source import Place
from attlas.view.why_packing import Answers, ReasonPacker

_TILE_BYTES = 2 * TILE**2  # bytes of a tile of 16-bit codes
DETAIL = 3 << 20  # bytes before compression, for the pictures of the heads in detail
_EXACT_WEIGHT_BYTES = 4 << 20  # of the weights of a matrix that is kept exactly
_OVERVIEW_BYTES = 6 << 20  # for those of the other heads,
_TILES_BYTES = 1 << 20  # and up to which they are tiles where a coarser picture was recorded
_MOST_ROW_WEIGHTS = 900_000  # of single queries, of all heads together, about
_PER_QUERY = 3, 8  # at least and at most
_OVERVIEW_TRACKS = ("entropy", "column_mass")  # of heads that are not in detail
_SIGNED_TRACKS = ("max_weight", "column_mass")  # of weights that are no shares of a row, and have no entropy
_PATCH_BYTES = 2 << 20  # bytes before compression of the cells about pins and bookmarks
_MOST_THUMBNAILS = 256
_PAUSE_SECONDS = 0.05  # seconds between two looks at a pass


@dataclass
class Packer:
    """Gather what a page holds; parts that are not known yet are computed.

    Parameters
    ----------
    service : Service
        What answers.
    heads : sequence of (int, int)
        Entry and head of those in detail.
    order : sequence of (int, int)
        All heads, the most telling first: the overviews that fit are of the first ones.
    limit : int
        Bytes of the pictures in detail, before compression.
    batch, variant, pool : int, str, str
        As in the questions of the page.
    pin : (int, int), optional
        A cell whose row and column are kept exactly of the heads in detail, and the cells about it of all heads.
    centre : (int, int), optional
        A further cell with the cells about it, of the heads in detail: the middle of the map.
    report : callable
        Called with the share that is done, from 0 to 1.
    overviews : bool
        Whether heads that are not in detail have a picture, tracks and their largest weights too.
    """

    service: Answers
    heads: Sequence[tuple[int, int]]
    order: Sequence[tuple[int, int]]
    limit: int = DETAIL
    batch: int = 0
    variant: str = "plain"
    pool: str = "max"
    pin: tuple[int, int] | None = None
    centre: tuple[int, int] | None = None
    report: Callable[[float], object] = lambda share: None
    overviews: bool = True

    def pack(self) -> dict[str, Any]:
        """Return the contents of the page, without the state that it begins with.

        Raises
        ------
        RecordingError
            If a part cannot be computed.
        """
        self._parts: dict[str, Any] = {}
        self._share = (0.0, 1.0)
        self._info = json.loads(self._complete_answer("info").body)
        answer = self._complete_answer if self.overviews else self.service.answer  # a page may not wait for all heads
        self._steps = (
            json.loads(answer("story", {}).body)["steps"] if (self.batch, self.variant) == (0, "plain") else []
        )
        others = [place for place in self.order if place not in self.heads and self._has_variant(place)]
        others = others if self.overviews else []
        places = [*self.heads, *others]
        # What is left of the bytes of overviews, of the largest weights, and of the bytes of patches.
        packed_heads, room, weights, self._patch_room = [], _OVERVIEW_BYTES, 2 * _MOST_ROW_WEIGHTS, _PATCH_BYTES
        steps = len(places) + 1  # the last one is why weights are where they are
        for done, place in enumerate(places):
            self.report(done / steps)
            self._share = done / steps, 1 / steps  # of the work: what is done, and what this head takes
            entry = self._entry_of_head(place)
            if place in self.heads and entry.matrix is not None:
                record: dict[str, Any] | None = self._put_detail(place)
            else:
                record = self._put_overview(place, len(places), room)
                room -= _TILE_BYTES
            if record is None:
                continue
            # A head whose cells are all in the page needs no further numbers.
            every_cell = record["finest"] == 0 and not record["block"]
            kept = 0 if record["exact"] or every_cell else self._put_largest(place, len(places), weights)
            weights -= kept * entry.shape[2]
            patches = [] if every_cell else self._put_patches(place)
            self._put_cells_of_steps(place)
            packed_heads.append({"entry": place[0], "head": place[1], **record, "kept": kept, "patches": patches})
        self._put_thumbnails()
        self._put_reasons(packed_heads, len(places) / steps)
        source = self.service.source
        # Numbers of the texts that the heads of this sequence are about.
        told = {number for shown in source.entries for number in chain(*shown.texts[self.batch : self.batch + 1])}
        texts = {number: text for number, text in enumerate(source.texts) if number in told}
        return {
            "format": 1,
            "info": self._info,
            "packed": packed_heads,
            "heads": json.loads(answer("heads", {}).body),
            "story": self._steps,
            "texts": {number: {"tokens": text.shown, "joined": text.joined} for number, text in texts.items()},
            **self._outlines_of_entries(),
            "parts": self._parts,
        }

    def _outlines_of_entries(self) -> dict[str, Any]:
        """Return the outlines of the sequence, each once, and which of them each entry has."""
        entries, found = self.service.source.entries, [""]  # "" for entries of fewer sequences
        numbers = []
        for entry, shown in enumerate(entries):
            has = self.batch < shown.entry.shape[0]
            body = self._complete_answer("outline", entry=entry, batch=self.batch).body.decode() if has else ""
            found += [] if body in found else [body]
            numbers.append(found.index(body))
        return {"outlines": [json.loads(body or '{"query": [], "key": null}') for body in found], "outline_of": numbers}

    def _entry_of_head(self, place: tuple[int, int]) -> Entry:
        """Return the entry of a head."""
        return self.service.source.entries[place[0]].entry

    def _matrix_of_head(self, place: tuple[int, int]) -> Head | None:
        """Return the matrix of a head, in the variant of the page; None where its q and k were not kept."""
        return self.service.source.head(Place(place[0], self.batch, place[1], self.variant))  # type: ignore[arg-type]

    def _has_variant(self, place: tuple[int, int]) -> bool:
        """Return whether a head has the numbers that the page shows, or nothing but statistics."""
        return self._entry_of_head(place).matrix is None or self._matrix_of_head(place) is not None

    def _parameters_of_head(self, place: tuple[int, int]) -> dict[str, Any]:
        """Return the parameters by which the page asks for a head."""
        return {"entry": place[0], "head": place[1], "batch": self.batch, "variant": self.variant}

    def _complete_answer(self, question: str, asked: Mapping[str, Any] | None = None, /, **params: Any) -> Any:
        """Return a complete answer."""
        while True:
            answer = self.service.answer(question, {name: str(value) for name, value in (asked or params).items()})
            if answer.status != 200:
                found = json.loads(answer.body)["error"]
                raise RecordingError("every head of the page must be computed.", found, "other heads", where="export")
            if answer.progress >= 1:
                return answer
            self.report(self._share[0])
            time.sleep(_PAUSE_SECONDS)

    def _put_numbers(self, key: str, values: bytes | Array, width: int) -> None:
        """Add numbers of `width` bytes each to the parts of the page, under a name that its script knows."""
        self._parts[key] = packed(values if isinstance(values, bytes) else values.tobytes(), width)

    # ------------------------------------------------------------------------------------------------ one head

    @public("export")
    def _put_detail(self, place: tuple[int, int]) -> dict[str, Any]:
        """Put the pictures of a head, down to the finest level that fits, its tracks, and all of a small head."""
        name, question, entry = (
            f"{place[0]}:{place[1]}",
            self._parameters_of_head(place),
            self._info["entries"][place[0]],
        )
        # Raises where the entry keeps no q and k.
        self._entry_of_head(place).need_matrix()
        limit, (m, n) = self.limit // len(self.heads), (entry["m"], entry["n"])
        levels = levels_that_fit(entry, limit)
        tiles = [(level, *place) for level in levels for place in _tiles_of_level(entry, level)]
        for at, (level, y, x) in enumerate(tiles):
            self.report(self._share[0] + self._share[1] * at / len(tiles))
            answer = self._complete_answer("tile", **question, pool=self.pool, level=level, y=y, x=x)
            self._put_numbers(f"tile:{name}:{level}:{y}:{x}", answer.body, 2)
        for track in TRACKS if entry["shares"] else _SIGNED_TRACKS:
            self._put_numbers(f"track:{name}:{track}", self._complete_answer("track", **question, name=track).body, 4)
        exact = 4 * m * n <= min(limit, _EXACT_WEIGHT_BYTES)
        head = self._matrix_of_head(place)
        if exact and head is not None:
            self._put_numbers(f"exact:{name}", head.cells(range(m), range(n)).astype("<f4"), 4)
        if self.pin is not None and self.pin[0] < m and self.pin[1] < n:
            self._put_cell(place, *self.pin)
        return {"finest": levels[-1], "block": None, "exact": exact}

    def _put_cell(self, place: tuple[int, int], i: int, j: int) -> None:
        """Put what is known of a cell, and its row and its column exactly, once."""
        name, question = f"{place[0]}:{place[1]}", self._parameters_of_head(place)
        if f"cell:{name}:{i}:{j}" in self._parts:
            return
        self._put_numbers(f"row:{name}:{i}", self._complete_answer("row", **question, i=i).body, 4)
        self._put_numbers(f"column:{name}:{j}", self._complete_answer("column", **question, j=j).body, 4)
        self._parts[f"cell:{name}:{i}:{j}"] = json.loads(self._complete_answer("cell", **question, i=i, j=j).body)

    def _put_cells_of_steps(self, place: tuple[int, int]) -> None:
        """Put the cells of a head at which the tour stops."""
        for i, j in self._cells_of_steps(place):
            self._put_cell(place, i, j)

    def _cells_of_steps(self, place: tuple[int, int]) -> list[tuple[int, int]]:
        """Return the cells of a head at which the tour stops."""
        return [(step["i"], step["j"]) for step in self._steps if (step["entry"], step["head"]) == place]

    def _put_overview(self, place: tuple[int, int], heads: int, room: int) -> dict[str, Any] | None:
        """Put one picture of a head and two tracks; None where there is no room, or nothing to draw.

        `heads` is the number of heads of the page, `room` the bytes that are left for overviews.
        """
        entry, info, name = self._entry_of_head(place), self._info["entries"][place[0]], f"{place[0]}:{place[1]}"
        level, (batch, _, m, n) = info["levels"] - 1, entry.shape
        if 0 in (m, n) or self.batch >= batch:
            return None
        plain, size = self.variant == "plain", 2 * -(-m // (1 << level)) * -(-n // (1 << level))
        found = None
        if plain and self.pool == "max" and (entry.matrix is None or heads * size > _TILES_BYTES):
            found = self._recorded_maxima(place, level)
        if found is None and (entry.matrix is None or room < _TILE_BYTES):
            return None
        question = self._parameters_of_head(place)
        tile = (
            found[1].tobytes()
            if found
            else self._complete_answer("tile", **question, pool=self.pool, level=level, y=0, x=0).body
        )
        self._put_numbers(f"tile:{name}:{level}:0:0", tile, 2)
        for track in _OVERVIEW_TRACKS if info["shares"] else _SIGNED_TRACKS:
            values = entry.statistics.get(track) if plain else None
            if isinstance(values, Tensor):
                self._put_numbers(f"track:{name}:{track}", values[self.batch, place[1]].float().cpu().numpy(), 4)
            elif entry.matrix is not None:
                self._put_numbers(
                    f"track:{name}:{track}", self._complete_answer("track", **question, name=track).body, 4
                )
        if entry.matrix is None and found:
            info.update(readable=True, causal=_looks_causal(entry, found[1]))
        block = found and found[0]  # cells of a side of a recorded block
        return {"finest": level, "block": block, "exact": False}

    def _put_largest(self, place: tuple[int, int], heads: int, room: int) -> int:
        """Put the largest weights of each query of a head, and return how many of each; 0 where there is no room.

        `heads` is the number of heads of the page, `room` how many weights it may still take.
        """
        entry, name = self._entry_of_head(place), f"{place[0]}:{place[1]}"
        m, n = entry.shape[2:]
        count = min(n, max(_PER_QUERY[0], min(_MOST_ROW_WEIGHTS // max(heads * m, 1), _PER_QUERY[1])))
        plain = self.variant == "plain"
        # Recorded ones are largest by value: of weights that may be negative, those of largest size are kept here.
        is_signed = self.service.source.entries[place[0]].are_signed
        found = entry.statistics.get("top_k") if plain and not is_signed else None
        if self.variant == "nosink" or count * m > room or (found is None and entry.matrix is None):
            return 0
        if found is None or found.values.shape[-1] < count:
            head = self._matrix_of_head(place)
            if head is None:
                return 0
            if is_signed:
                values, keys = _largest_by_size(head, count)
            else:
                largest = head.A.collect(stats.TopK(count))[0]
                values, keys = largest.values[0, 0], largest.indices[0, 0]
        else:
            values, keys = (t[self.batch, place[1], :, :count] for t in (found.values, found.indices))
        weights = values.cpu().double().numpy()
        # Keys are stored as distances behind their query.
        gaps = torch.arange(m)[:, None] - keys.cpu()
        self._put_numbers(f"kept:{name}", self._codes_of_weights(place, weights, np.ones_like(weights, dtype=bool)), 2)
        self._put_numbers(f"gaps:{name}", gaps.numpy().astype("<i4"), 4)
        return count

    def _codes_of_weights(self, place: tuple[int, int], weights: Array, allowed: Array) -> Array:
        """Return the codes of some weights of a head, as its pictures have them."""
        source = self.service.source
        encode = codes.encode if source.entries[place[0]].are_shares else codes.encode_signed
        unit = source.unit(Place(place[0], self.batch, place[1], self.variant))  # type: ignore[arg-type]
        return encode(weights / unit, allowed)

    def _recorded_maxima(self, place: tuple[int, int], level: int) -> tuple[int, Array] | None:
        """Return the cells of a block of the recorded picture of maxima, and the picture as a tile of a level.

        A pixel is the block in which its middle lies. None where there is no such picture, or a finer one.
        """
        found = _recorded_tile(self._entry_of_head(place), self.batch, place[1], level)
        if found is None:
            return None
        side, whole = found
        return side, pad(self._codes_of_weights(place, np.nan_to_num(whole), ~np.isnan(whole)))

    def _put_patches(self, place: tuple[int, int]) -> list[dict[str, int]]:
        """Put the cells about the pinned one, the middle of the map and bookmarks, NaN where masked; say which."""
        head, (m, n) = self._matrix_of_head(place), self._entry_of_head(place).shape[2:]
        own = [self.pin, *([self.centre] if place in self.heads else []), *self._cells_of_steps(place)]
        cells = [cell for cell in own if cell is not None] + marked_cells(self.service.source.atlas.bookmarks, place)
        found = []
        for rows, columns in dict.fromkeys(patch_about(i, j, m, n) for i, j in cells if i < m and j < n):
            size = 4 * len(rows) * len(columns)
            if head is None or size > self._patch_room:
                break
            self._patch_room -= size
            weights = np.where(head.allowed(rows, columns), head.cells(rows, columns), np.nan)
            self._put_numbers(f"patch:{place[0]}:{place[1]}:{rows.start}:{columns.start}", weights.astype("<f4"), 4)
            found.append({"r0": rows.start, "r1": rows.stop, "c0": columns.start, "c1": columns.stop})
        return found

    def _put_thumbnails(self) -> None:
        """Put the small pictures of the first heads that have a matrix."""
        readable = [place for place in self.order if self._matrix_of_head(place) is not None]
        for place in readable[:_MOST_THUMBNAILS]:
            question = self._parameters_of_head(place)
            question["batch"] = min(self.batch, self._entry_of_head(place).shape[0] - 1)
            answer = self._complete_answer("thumbnail", **question, pool="suited", size=64)
            self._put_numbers(f"thumbnail:{place[0]}:{place[1]}", answer.body, 2)

    def _put_reasons(self, heads: list[dict[str, Any]], done: float) -> None:
        """Put why pinned cells and those of steps and bookmarks are where they are, and maps; say so at the heads."""

        def put(name: str, body: bytes) -> int:
            """Add the bytes of an answer, and return how many the page has for it."""
            self._put_numbers(name, body, 1)
            return len(self._parts[name]["text"])

        def cells(place: tuple[int, Any]) -> list[tuple[int, int]]:
            """Return the cells of a head."""
            own = [] if self.pin is None or place not in self.heads else [self.pin]
            steps = self._cells_of_steps(place)
            return [*own, *steps, *pinned_cells(self.service.source.atlas.bookmarks, place, self.batch)]

        packer = ReasonPacker(
            self.service, heads, self.batch, put, lambda share: self.report(done + (1 - done) * share)
        )
        packer.pack(cells)


def levels_that_fit(entry: Mapping[str, Any], limit: int) -> list[int]:
    """Return the levels whose tiles take at most `limit` bytes, from the coarsest on, which is always there.

    `entry` has the facts of an entry, as `Shown.info`.
    """
    chosen: list[int] = []
    for level in reversed(range(entry["levels"])):
        limit -= _TILE_BYTES * len(_tiles_of_level(entry, level))
        if chosen and limit < 0:
            break
        chosen.append(level)
    return chosen


def _tiles_of_level(entry: Mapping[str, Any], level: int) -> list[tuple[int, int]]:
    """Return row and column of the tiles of a level; those above the diagonal of a causal matrix are left out.

    `entry` has the facts of an entry, as `Shown.info`.
    """
    side, last = TILE << level, entry["first_query"] - 1
    return [
        (y, x)
        for y in range(-(-entry["m"] // side))
        for x in range(-(-entry["n"] // side))
        if not entry["causal"] or entry["first_key"] + x * side <= last + min(entry["m"], (y + 1) * side)
    ]


def _largest_by_size(head: Head, count: int) -> tuple[Tensor, Tensor]:
    """Return the weights of largest size of each query, with their signs, and their keys."""
    found = []
    for _, weights, _ in head.parts(range(head.m), range(head.n)):
        keys = torch.from_numpy(np.abs(weights)).topk(count, dim=-1).indices
        found.append((torch.from_numpy(weights).gather(-1, keys), keys))
    return torch.cat([values for values, _ in found]), torch.cat([keys for _, keys in found])


def _recorded_tile(entry: Entry, batch: int, head: int, level: int) -> tuple[int, Array] | None:
    """Return the cells of a block of the recorded picture of maxima, and a number for each pixel of a tile of a level.

    None where there is no such picture, or it is finer than the tile.
    """
    picture, largest = entry.statistics.get("picture"), entry.statistics.get("top_k")
    m, n = entry.shape[2:]
    if not isinstance(picture, Tensor) or largest is None:
        return None
    blocks, top = picture[batch, head].cpu().double(), float(largest.values[batch, head].max())
    # Means are no maxima. Nor is there a picture where a negative weight of larger size hides the largest.
    if max(blocks.shape) > TILE or abs(float(blocks.nan_to_num().max()) - top) > 1e-3 * abs(top):
        return None
    pixels = []
    for size, count in ((m, blocks.shape[0]), (n, blocks.shape[1])):
        middle = ((torch.arange(-(-size // (1 << level))) + 0.5) * (1 << level)).clamp(max=size - 1)
        edges = torch.tensor(block_edges(range(size), count))
        pixels.append(torch.searchsorted(edges, middle.long(), right=True) - 1)
    whole = blocks[pixels[0]][:, pixels[1]].numpy()
    side = max(-(-m // blocks.shape[0]), -(-n // blocks.shape[1]))
    return side, whole


def _looks_causal(entry: Entry, tile: Array) -> bool:
    """Tell from the upper right corner of a picture and from the largest weights whether queries see no later key."""
    found, (m, n) = entry.statistics.get("top_k"), entry.shape[2:]
    width = -(-n // (1 << levels_of(m, n) - 1))
    ahead = found is not None and bool(((found.indices > torch.arange(m)[:, None]) & (found.values > 0)).any())
    return m == n and not ahead and int(tile[0, width - 1]) == codes.MASKED


def packed(values: bytes, width: int) -> dict[str, Any]:
    """Return numbers of `width` bytes as text: their high and low bytes apart, which compresses better."""
    split = np.frombuffer(values, np.uint8).reshape(-1, width).T.tobytes()
    deflate = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    text = base64.b64encode(deflate.compress(split) + deflate.flush()).decode("ascii")
    return {"text": text, "width": width}
