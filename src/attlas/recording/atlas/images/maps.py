"""Where in a picture a head looks: the weights of queries on the patch grid of an image."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

import attlas
from attlas.errors import DtypeError, OutOfRangeError, RecordingError, ShapeError, kind
from attlas.foundation.checks import check_sequence, is_integer
from attlas.recording.atlas.entry import Entry
from attlas.recording.atlas.images.grids import WHOLE, Box, ImageGrids, Tile, grids_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Query: TypeAlias = "int | slice | range | Sequence[int] | tuple[int, int] | Tensor | Literal['class']"
Relative: TypeAlias = Literal["ratio", "difference"]
_CELLS_AT_ONCE = 1 << 22  # of the matrix that are read at a time


@dataclass(frozen=True, eq=False)
class MapPart:
    """The weights on one copy of a picture, where a model is given several: its tiles, or its thumbnail.

    Parameters
    ----------
    name : {"picture", "thumbnail"}
        Which copy.
    weights : Tensor, shape (rows, columns)
        The weights on its patches.
    box : tuple of float
        Top, left, bottom and right of the grid on the picture, as shares of its height and width.

    Examples
    --------
    >>> import torch
    >>> from attlas.recording.atlas.images import MapPart
    >>> MapPart("picture", torch.zeros(2, 3)).box
    (0.0, 0.0, 1.0, 1.0)
    """

    name: str
    weights: Tensor
    box: Box = WHOLE


@dataclass(frozen=True, eq=False)
class ImageMap:
    """The weights of some queries on the patches of an image; made by `Atlas.image_map`.

    Attributes
    ----------
    weights : Tensor, shape (rows, columns)
        The weights; of an image that the model has in tiles and as a thumbnail, those of both.
    parts : tuple of MapPart
        The same for each copy of the picture.
    box : tuple of float
        Top, left, bottom and right of the grid on the picture, as shares of its height and width.
    share : float
        Which share of the weight of the queries lies on the picture.
    left_out : Tensor of bool, shape (rows, columns)
        True for a patch that was left out as a sink, which has the weight 0.
    picture : Tensor of uint8, optional, shape (height, width, 3)
        The picture, where the recording has it.
    relative : {"", "ratio", "difference"}
        What the numbers are, where they were set in relation to a second recording.

    Examples
    --------
    >>> import torch
    >>> from attlas.recording.atlas.images import ImageMap, MapPart
    >>> weights = torch.tensor([[0.1, 0.4], [0.0, 0.2]])
    >>> found = ImageMap(
    ...     weights, (MapPart("picture", weights),), share=0.7, left_out=torch.zeros(2, 2, dtype=bool)
    ... )
    >>> found.largest
    (0, 1)
    """

    weights: Tensor
    parts: tuple[MapPart, ...]
    box: Box = WHOLE
    share: float = 0.0
    left_out: Tensor | None = None
    picture: Tensor | None = None
    relative: str = ""

    @property
    def largest(self) -> tuple[int, int]:
        """Row and column of the patch with the largest number."""
        row, column = divmod(int(self.weights.nan_to_num(-torch.inf).argmax()), self.weights.shape[1])
        return row, column

    def plot(self, picture: Any = None, *, title: str | None = None) -> Figure:
        """Draw the weights over the picture.

        Parameters
        ----------
        picture : array or PIL image, optional
            The picture as the model sees it; the default is that of the recording. Without one the grid alone is drawn.
        title : str, optional
            Title of the figure.

        Returns
        -------
        matplotlib.figure.Figure

        Raises
        ------
        MissingExtraError
            If matplotlib is not installed.
        ShapeError
            If `picture` is none.
        """
        shown = self.picture if picture is None else picture
        left_out, words = self.left_out, {"ratio": "ratio", "difference": "difference"}.get(self.relative, "weight")
        return attlas.pictures.over_image(
            self.weights, shown, box=self.box, left_out=left_out, words=words, title=title, ratio=words == "ratio"
        )

    def save(
        self, path: str | os.PathLike[str], picture: Any = None, *, title: str | None = None, dpi: int = 150
    ) -> Path:
        """Write the weights over the picture to a file: png, svg or pdf.

        Parameters
        ----------
        path : str or PathLike
            The file.
        picture, title
            As of `plot`.
        dpi : int
            Points an inch of a png.

        Returns
        -------
        Path
            The file.

        Raises
        ------
        MissingExtraError
            If matplotlib is not installed.
        ShapeError
            If `picture` is none.
        FileError
            If the file cannot be written.
        """
        return attlas.pictures.save(self.plot(picture, title=title), path, dpi)


class _TilePlace(NamedTuple):
    """A tile of an image in one entry: its queries, and the key of each patch; -1 for one that is no key there."""

    entry: Entry
    sequence: int
    rows: Tensor
    keys: Tensor
    tile: Tile


def image_map(
    atlas: attlas.Atlas,
    layer: Any,
    head: int | None,
    *,
    query: Query,
    image: int = 0,
    without_sinks: bool | float = False,
    relative_to: attlas.Atlas | None = None,
    relative: Relative = "ratio",
    relative_query: Query | None = None,
    grid: tuple[int, int] | None = None,
    tokens: Any = None,
    sequence: int = 0,
) -> ImageMap:
    """Return the weights of some queries on the patches of an image, as `Atlas.image_map` describes it."""
    entry = atlas.entry(layer)
    entry.need_matrix()
    if relative not in ("ratio", "difference"):
        raise ShapeError('relative must be "ratio" or "difference".', f"relative = {relative!r}", 'relative="ratio"')
    grids = grids_of(atlas.details)
    if grid is not None or tokens is not None:
        places = [_place_given_by_user(entry, query, grid, tokens, sequence)]
    else:
        tiles = _tiles_of_image(atlas, entry, grids, image)
        in_tower = grids.in_tower(entry.name)
        places = (_places_of_tower if in_tower else _places_of_text)(atlas, entry, grids, tiles, query)
    heads = range(len(entry.heads)) if head is None else [_head_index(entry, head)]
    found = _map_of_tiles(places, heads, _sink_threshold(without_sinks))
    pictures = atlas.images
    if grid is None and tokens is None and image < len(pictures):
        found = replace(found, picture=pictures[image])
    if relative_to is None:
        return found
    other = image_map(
        relative_to,
        layer,
        head,
        query=query if relative_query is None else relative_query,
        image=image,
        without_sinks=without_sinks,
        grid=grid,
        tokens=tokens,
        sequence=sequence,
    )
    return _relative_map(found, other, relative)


def _sink_threshold(without_sinks: bool | float) -> float | None:
    """Return the mean weight from which a key is a sink; None where sinks stay."""
    usual = attlas.heads.SinkKeys().threshold
    if isinstance(without_sinks, bool):
        return usual if without_sinks else None
    if not isinstance(without_sinks, float) or not 0 < without_sinks < 1:
        rule = "without_sinks must be True, False, or the mean weight from which a key is a sink."
        raise ShapeError(rule, f"without_sinks = {without_sinks!r}", f"without_sinks={usual}")
    return without_sinks


def _head_index(entry: Entry, head: int) -> int:
    """Return the place of a head among those of an entry; raise where it was not recorded."""
    if head not in entry.heads:
        fix = f"head {entry.heads[0]}, or None for the mean over the heads."
        raise OutOfRangeError("the head must be one that was recorded.", f"heads {entry.heads}", fix, head=head)
    return entry.heads.index(head)


# ----------------------------------------------------------------------------------------------------- places


def _tiles_of_image(atlas: attlas.Atlas, entry: Entry, grids: ImageGrids, image: int) -> tuple[Tile, ...]:
    """Return the tiles of an image whose tokens an entry has; raise where they are not known."""
    why = grids.why
    if not why and not grids.images:
        why = "a recording of no image"
    if not why and not (is_integer(image) and 0 <= image < len(grids.images)):
        count = len(grids.images)
        rule, fix = "the image must be one of the recording.", f"image={count - 1} for the last."
        raise OutOfRangeError(rule, f"{count} images", fix, image=image)
    tiles: tuple[Tile, ...] = ()
    if not why:
        why = grids.images[image].why
        tiles = grids.images[image].tower if grids.in_tower(entry.name) else grids.images[image].text
    if not why and not grids.in_tower(entry.name) and not atlas.has_text(entry):
        why = f"{entry.path} is not about the text of the recording"
    if not why and not tiles:
        why = f"no patch is a token of {entry.path} ({entry.name})"
    if why:
        raise _unknown_tokens_error(entry, why)
    return tiles


def _unknown_tokens_error(entry: Entry, why: str) -> RecordingError:
    """Return the error of an entry whose image tokens are not known."""
    rule = "the recording must know which tokens are the patches of the image."
    fix = f'atlas.image_map("{entry.path}", {entry.heads[0]}, query=..., grid=(rows, columns), tokens=(start, stop))'
    return RecordingError(rule, why, fix, entry=f"{entry.path} ({entry.name})")


def _place_given_by_user(entry: Entry, query: Query, grid: Any, tokens: Any, sequence: int) -> _TilePlace:
    """Return the place of an image whose grid and tokens the user gives."""
    fix = "grid=(24, 24), tokens=(5, 581)"
    if grid is None or tokens is None:
        rule, found = "grid and tokens belong together.", f"grid = {grid!r}, tokens = {tokens!r:.40}"
        raise ShapeError(rule, found, fix)
    if not (isinstance(grid, Sequence) and len(grid) == 2 and all(is_integer(n) and n > 0 for n in grid)):
        raise ShapeError("grid must be the rows and columns of the patches.", f"grid = {grid!r:.60}", fix)
    stop = entry.first_key + entry.shape[3]
    pair = isinstance(tokens, tuple) and len(tokens) == 2
    keys = _whole_numbers("tokens", range(*tokens) if pair else tokens, stop)
    if len(keys) != grid[0] * grid[1]:
        rule, found = "there must be one token for each patch.", f"{len(keys)} tokens, {grid[0]} × {grid[1]} patches"
        raise ShapeError(rule, found, "tokens=(start, start + rows * columns), or a list of positions.")
    check_sequence(sequence, entry.shape[0])
    positions = keys.view(*grid)
    rows = _rows_of_positions(entry, sequence, _query_positions(query, [(positions, (0, 0))], entry.queries[1], 0))
    return _TilePlace(entry, sequence, rows, _keys_of_positions(entry, positions), Tile(grid[0], grid[1], sequence))


def _places_of_text(
    atlas: attlas.Atlas, entry: Entry, grids: ImageGrids, tiles: Sequence[Tile], query: Query
) -> list[_TilePlace]:
    """Return the places of the tiles of an image among the tokens of a text; the queries are those of its sequence."""
    patches = [(tile.positions(), _corner_of_tile(tiles, tile)) for tile in tiles if not tile.thumbnail]
    sequence = tiles[0].sequence
    if max(int(tile.positions()[-1, -1]) for tile in tiles) >= entry.first_key + entry.shape[3]:
        raise _unknown_tokens_error(entry, f"{entry.shape[3]} keys, which are not those of the whole text")
    rows = _rows_of_positions(entry, sequence, _query_positions(query, patches, entry.queries[1], None))
    return [_TilePlace(entry, sequence, rows, _keys_of_positions(entry, tile.positions()), tile) for tile in tiles]


def _places_of_tower(
    atlas: attlas.Atlas, entry: Entry, grids: ImageGrids, tiles: Sequence[Tile], query: Query
) -> list[_TilePlace]:
    """Return the places of the tiles of an image in a vision encoder, each with the queries of its own sequence."""
    if grids.chunks:
        return _places_of_chunks(atlas, entry, grids, tiles[0], query)
    found = []
    for tile in tiles:
        own = atlas.entry((entry.name, tile.call))
        own.need_matrix()
        if tile.sequence >= own.shape[0] or own.shape[3] != grids.prefix + tile.rows * tile.columns:
            raise _unknown_tokens_error(
                entry, f"{own.shape[3]} keys, {grids.prefix} + {tile.rows} × {tile.columns} tokens of the image"
            )
        positions = tile.positions()
        patches = [(positions, _corner_of_tile(tiles, tile))] if not tile.thumbnail or len(tiles) == 1 else []
        asked = _query_positions(query, patches, own.queries[1], 0 if grids.prefix else None, several=len(tiles) > 1)
        found.append(
            _TilePlace(
                own,
                tile.sequence,
                _rows_of_positions(own, tile.sequence, asked),
                _keys_of_positions(own, positions),
                tile,
            )
        )
    if not any(len(place.rows) for place in found):
        raise _no_patch(query, tiles)
    return found


def _places_of_chunks(
    atlas: attlas.Atlas, entry: Entry, grids: ImageGrids, tile: Tile, query: Query
) -> list[_TilePlace]:
    """Return the place of an image in an encoder that reads one image, or one window, after the other."""
    if not (isinstance(query, tuple) and len(query) == 2):
        rule = "a query of this vision encoder is a patch, by its row and column."
        raise ShapeError(rule, f"query = {query!r:.60}", "query=(0, 0)")
    passes = [own for own in atlas.entries if own.name == entry.name]
    lengths = [own.shape[3] for own in passes]
    windows = grids.passes(lengths)
    if windows is None:
        raise _unknown_tokens_error(entry, f"passes of {lengths[:8]} tokens, which are not those of the images")
    positions = tile.positions()
    asked = int(_query_positions(query, [(positions, (0, 0))], 0, None)[0])
    number, token = windows.of_token[asked], windows.place[asked]
    own = passes[number]
    own.need_matrix()
    return [
        _TilePlace(own, 0, _rows_of_positions(own, 0, torch.tensor([token])), windows.keys(positions, number), tile)
    ]


def _corner_of_tile(tiles: Iterable[Tile], tile: Tile) -> tuple[int, int]:
    """Return row and column of the first patch of a tile among the patches of the picture."""
    return tile.at[0] * tile.rows, tile.at[1] * tile.columns


def _keys_of_positions(entry: Entry, positions: Tensor) -> Tensor:
    """Return the key of each position; -1 where a sliding cache has dropped it."""
    return (positions - entry.first_key).clamp(min=-1)


# ---------------------------------------------------------------------------------------------------- queries


def _query_positions(
    query: Query,
    patches: Sequence[tuple[Tensor, tuple[int, int]]],
    length: int,
    class_token: int | None,
    *,
    several: bool = False,
) -> Tensor:
    """Return the positions of the queries.

    Parameters
    ----------
    query : int, slice, range, sequence of int, (row, column) or "class"
        What the user asks for.
    patches : sequence of (Tensor, (int, int))
        Positions of the patches of each tile, and where its corner is among those of the picture.
    length : int
        Length of the sequence, from whose end negative numbers count.
    class_token : int, optional
        Position of the class token, where there is one.
    several : bool
        Whether the patch may be in another tile: none is then returned.
    """
    if isinstance(query, str):
        if query != "class" or class_token is None:
            fix = "query=-1 for the last token, or query=(0, 0) for a patch."
            raise ShapeError("only a vision encoder may have a class token.", f"query = {query!r}", fix)
        return torch.tensor([class_token])
    if isinstance(query, tuple):
        if len(query) != 2 or not all(map(is_integer, query)):
            rule, fix = "a tuple is the row and column of a patch.", "query=[5, 6] for two tokens."
            raise ShapeError(rule, f"query = {query!r:.60}", fix)
        for positions, (top, left) in patches:
            row, column = query[0] - top, query[1] - left
            if 0 <= row < positions.shape[0] and 0 <= column < positions.shape[1]:
                return positions[row, column].view(1)
        if several:
            return torch.zeros(0, dtype=torch.int64)
        raise _no_patch(query, [Tile(*positions.shape) for positions, _ in patches])
    if isinstance(query, slice):
        query = range(*query.indices(length))
    numbers = _whole_numbers("query", [query] if is_integer(query) else query, length)
    if not len(numbers):
        raise ShapeError("there must be a query.", f"query = {query!r:.60}", "query=-1 for the last token.")
    return numbers


def _no_patch(query: Any, tiles: Sequence[Tile]) -> OutOfRangeError:
    """Return the error of a query patch that lies outside of its image."""
    rows, columns = (max((tile.at[i] + 1) * (tile.rows, tile.columns)[i] for tile in tiles) for i in (0, 1))
    rule, found = "the patch must be one of the picture.", f"{rows} × {columns} patches"
    return OutOfRangeError(rule, found, "query=(0, 0) for the first.", query=repr(query))


def _whole_numbers(name: str, value: Any, stop: int) -> Tensor:
    """Return positions below `stop`; negative ones count from it."""
    if isinstance(value, slice):
        value = range(*value.indices(stop))
    numbers = value.tolist() if isinstance(value, Tensor) else value
    if not isinstance(numbers, Sequence) or isinstance(numbers, str) or not all(map(is_integer, numbers)):
        fix = f"{name}=slice(5, 9), or a list of whole numbers."
        raise DtypeError(f"{name} must be whole numbers.", f"{name} = {value!r:.60} ({kind(value)})", fix)
    found = torch.tensor([number + stop if number < 0 else number for number in numbers], dtype=torch.int64)
    if len(found) and (int(found.min()) < 0 or int(found.max()) >= stop):
        rule, fix = f"{name} must be positions of the sequence.", f"positions below {stop}, or negative ones."
        raise OutOfRangeError(rule, f"{stop} positions", fix, arguments={name: f"{value!r:.60}"})
    return found


def _rows_of_positions(entry: Entry, sequence: int, positions: Tensor) -> Tensor:
    """Return the rows of the matrix that some positions have."""
    first, stop = entry.queries
    if len(positions) and (int(positions.min()) < first or int(positions.max()) >= stop):
        rule, fix = "the queries must have been recorded.", f"query={stop - 1} for the last one."
        found = f"queries {first} to {stop - 1} of {entry.path}"
        raise OutOfRangeError(rule, found, fix, query=str(positions[:8].tolist()))
    rows = positions - first
    if entry.query_mask is not None and not bool(entry.query_mask[sequence].cpu()[rows].all()):
        rule = "the queries must be tokens, and no padding."
        last = int(entry.query_mask[sequence].nonzero()[-1]) + first if bool(entry.query_mask[sequence].any()) else 0
        raise OutOfRangeError(rule, f"padding among {positions[:8].tolist()}", f"query={last} for the last token.")
    return rows


# ---------------------------------------------------------------------------------------------------- weights


def _map_of_tiles(places: Sequence[_TilePlace], heads: Sequence[int], threshold: float | None) -> ImageMap:
    """Return the map of some tiles: means over the queries and heads, read row by row."""
    read: dict[tuple[int, int], tuple[Tensor, Tensor | None]] = {}
    for place in places:
        key = (id(place.entry), place.sequence)
        if key not in read and len(place.rows):
            read[key] = _mean_row(place, heads, threshold)
    share = 1.0 / max(len(read), 1)
    parts, marks = [], []
    for place in places:
        row, sinks = read.get((id(place.entry), place.sequence), (None, None))
        inside, keys = place.keys >= 0, place.keys.clamp(min=0)
        weights = torch.zeros(place.keys.shape, dtype=torch.float64) if row is None else row[keys] * share * inside
        parts.append((place.tile, weights))
        marks.append(torch.zeros_like(inside) if sinks is None else sinks[keys] & inside)
    whole, box = _joined_tiles([part for part in parts if not part[0].thumbnail])
    left_out, _ = _joined_tiles(
        [(tile, mark.double()) for (tile, _), mark in zip(parts, marks, strict=True) if not tile.thumbnail]
    )
    dtype = places[0].entry.need_matrix().dtype
    found = [MapPart("picture", whole.to(dtype), box)]
    for tile, weights in parts:
        if tile.thumbnail:
            found.append(MapPart("thumbnail", weights.to(dtype), tile.box))
            whole = whole + _on_finer_grid(weights, tile.box, whole.shape, box)
    return ImageMap(whole.to(dtype), tuple(found), box, float(whole.sum()), left_out > 0)


def _mean_row(place: _TilePlace, heads: Sequence[int], threshold: float | None) -> tuple[Tensor, Tensor | None]:
    """Return the mean of some rows over queries and heads, in float64, and which keys were left out of all of them."""
    matrix, total, all_sinks = place.entry.need_matrix().detach(), None, None
    for head in heads:
        sinks = None
        if threshold is not None:
            own = matrix[place.sequence : place.sequence + 1, head : head + 1]
            sinks = attlas.heads.sink_keys(own, threshold)[0, 0].cpu()
            all_sinks = sinks if all_sinks is None else all_sinks & sinks
        for rows in place.rows.split(max(_CELLS_AT_ONCE // max(place.entry.shape[3], 1), 1)):
            weights = matrix[place.sequence, head, rows.to(matrix.device)].double().cpu()
            if sinks is not None:
                removed = weights[:, sinks].sum(-1, keepdim=True)
                weights = weights.masked_fill(sinks, 0.0)
                softmax = matrix.weights.softmax
                if softmax is not None and matrix.weights.are_shares:  # the weights of a softmax over the other keys
                    rest = weights.sum(-1, keepdim=True) if softmax.problem.sink is None else 1.0 - removed
                    weights = weights / torch.where(rest > 0, rest, 1.0)
            sums = weights.sum(0)
            total = sums if total is None else total + sums
    mean = torch.zeros(place.entry.shape[3], dtype=torch.float64) if total is None else total
    return mean / (len(heads) * len(place.rows)), all_sinks


def _joined_tiles(parts: Sequence[tuple[Tile, Tensor]]) -> tuple[Tensor, Box]:
    """Return the grid of tiles side by side, and its box on the picture."""
    tile = parts[0][0]
    down, across = (1 + max(part.at[i] for part, _ in parts) for i in (0, 1))
    whole = torch.zeros(down * tile.rows, across * tile.columns, dtype=torch.float64)
    for part, weights in parts:
        top, left = part.at[0] * tile.rows, part.at[1] * tile.columns
        whole[top : top + tile.rows, left : left + tile.columns] = weights
    edges = list(zip(*(part.box for part, _ in parts), strict=True))
    return whole, (min(edges[0]), min(edges[1]), max(edges[2]), max(edges[3]))


def _on_finer_grid(weights: Tensor, box: Box, shape: torch.Size, onto: Box) -> Tensor:
    """Return weights of a coarse grid on a finer one: each cell gives its weight to the cells that it covers."""
    down = _share_of_cells(weights.shape[0], box[0], box[2], shape[0], onto[0], onto[2])
    across = _share_of_cells(weights.shape[1], box[1], box[3], shape[1], onto[1], onto[3])
    return down.T @ weights @ across


def _share_of_cells(count: int, first: float, last: float, cells: int, start: float, stop: float) -> Tensor:
    """Return which share of each of `count` intervals lies in each cell, shape (count, cells): rows sum to 1."""
    edges = torch.linspace(first, last, count + 1, dtype=torch.float64)
    onto = torch.linspace(start, stop, cells + 1, dtype=torch.float64)
    shared = torch.minimum(edges[1:, None], onto[1:]) - torch.maximum(edges[:-1, None], onto[:-1])
    # An interval beside all cells goes to the nearest one.
    nearest = torch.nn.functional.one_hot(shared.argmax(1), cells).double()
    shared = shared.clamp(min=0.0)
    total = shared.sum(1, keepdim=True)
    return torch.where(total > 1e-12, shared / total.clamp(min=1e-300), nearest)


def _relative_map(found: ImageMap, other: ImageMap, relative: Relative) -> ImageMap:
    """Return a map in relation to another one."""
    if found.weights.shape != other.weights.shape:
        rule, fix = "both recordings must have the picture on the same grid.", "record both with the same picture."
        raise ShapeError(rule, f"{tuple(found.weights.shape)} and {tuple(other.weights.shape)} patches", fix)

    def related(a: Tensor, b: Tensor) -> Tensor:
        a, b = a.double(), b.double().to(a.device)
        return (a - b if relative == "difference" else torch.where((a == 0) & (b == 0), 1.0, a / b)).to(
            found.weights.dtype
        )

    parts = tuple(
        replace(part, weights=related(part.weights, own.weights))
        for part, own in zip(found.parts, other.parts, strict=True)
    )
    return replace(found, weights=related(found.weights, other.weights), parts=parts, relative=relative)
