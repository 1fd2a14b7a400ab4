"""Finds the grids of the images that a model of transformers was given: one function for each family of models."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from itertools import pairwise
from typing import Any, TypeAlias

from torch import Tensor, nn

from attlas.recording.atlas.images.grids import IMAGES, Box, ImageGrid, ImageGrids, Tile
from attlas.recording.atlas.images.pictures import pictures_of

# Tokens before the patches, by the type of the vision encoder: a number, or a function of its configuration.
_PREFIX_TOKENS: dict[str, int | Callable[[Any], int]] = {
    "beit": 1,
    "chinese_clip_vision_model": 1,
    "clip_vision_model": 1,
    "data2vec-vision": 1,
    "deit": 2,
    "dinov2": 1,
    "dinov2_with_registers": lambda config: 1 + config.num_register_tokens,
    "dinov3_vit": lambda config: 1 + config.num_register_tokens,
    "ijepa": 0,
    "internvl_vision": 1,
    "metaclip_2_vision_model": 1,
    "siglip_vision_model": 0,
    "vit": 1,
    "vit_msn": 1,
}
_TWO_TOWERS = ("chinese_clip", "clip", "metaclip_2", "siglip")  # a text and a picture, each for itself
Size: TypeAlias = tuple[int, int]
_SIZE_ARGUMENTS = ("image_grid_thw", "image_sizes")
FEATURES = "get_image_features"
PIXELS = frozenset(("pixel_values", "pixel_values_images", "pixel_values_videos"))


class UnknownGridError(ValueError):
    """The grids of the images cannot be told; the text says why."""


@dataclass(frozen=True)
class ImageInputs:
    """What one pass of a model was given of images: sizes, and no pixels."""

    pixels: tuple[int, ...]  # the shape of the pixel values
    tensors: Mapping[str, Tensor]  # copies of small tensors, on their device
    strategy: str | None  # of LLaVA: which tokens of the vision encoder the text gets
    run: int  # passes with images before this one

    def numbers(self, name: str) -> list[list[int]]:
        """Return the rows of a tensor; raise where it was not given."""
        if name not in self.tensors:
            raise UnknownGridError(f"the model was given no {name}")
        return [[int(number) for number in row] for row in self.tensors[name].tolist()]


class RecordedImages:
    """Follows which images a text has, pass by pass."""

    def __init__(self) -> None:
        self._sizes: Sequence[Size | None] = ()  # height and width of each picture, where it is known
        self._runs = 0
        self._pending: ImageInputs | None = None
        self._kept: list[ImageInputs] = []

    def shown(self, images: Any) -> list[Tensor | None]:
        """Note the sizes of the pictures that the model is shown, and return them as `pictures_of` does."""
        pictures = pictures_of(images)
        self._sizes = [None if each is None else (each.shape[0], each.shape[1]) for each in pictures]
        return pictures

    @contextmanager
    def heard(self, model: nn.Module, active: Callable[[], bool]) -> Iterator[None]:
        """Hear what a model encodes before its passes, as `generate` does; `active` says whether a call counts."""
        owner = getattr(model, "base_model", model)
        encode = getattr(owner, FEATURES, None)
        if not callable(encode) or FEATURES in vars(owner):
            yield
            return

        @wraps(encode)
        def hearing(*args: Any, **kwargs: Any) -> Any:
            if active():
                self.hear(inspect.signature(encode).bind_partial(*args, **kwargs).arguments)
            return encode(*args, **kwargs)

        setattr(owner, FEATURES, hearing)
        try:
            yield
        finally:
            delattr(owner, FEATURES)

    def hear(self, arguments: Mapping[str, Any]) -> None:
        """Note images that the running pass, or the next one, is given."""
        pixels = next((arguments[name] for name in sorted(PIXELS) if isinstance(arguments.get(name), Tensor)), None)
        if pixels is None:
            return
        tensors = {
            name: arguments[name].detach().clone()
            for name in _SIZE_ARGUMENTS
            if isinstance(arguments.get(name), Tensor)
        }
        strategy = arguments.get("vision_feature_select_strategy")
        self._pending = ImageInputs(tuple(pixels.shape), tensors, strategy, self._runs)

    def end(self, new_text: bool) -> None:
        """End a pass; `new_text` says whether it did not go on from the text of the passes before."""
        if new_text:
            self._kept = []
        if self._pending is not None:
            self._kept, self._runs, self._pending = [*self._kept, self._pending], self._runs + 1, None

    def details(self, model: nn.Module, ids: Tensor | None) -> dict[str, Any]:
        """Return the `grids` as the details of an atlas have them; nothing where the model was given no image."""
        grids = self.grids(model, ids)
        return {} if grids is None else {IMAGES: grids.to_dict()}

    def grids(self, model: nn.Module, ids: Tensor | None) -> ImageGrids | None:
        """Return the grids of the images of the text; None where the model was given none.

        Parameters
        ----------
        model : nn.Module
            The model.
        ids : Tensor, optional, shape (batch, tokens)
            The text.
        """
        if not self._kept:
            return None
        try:
            return _grids_of_inputs(model, self._kept, ids, self._sizes)
        except UnknownGridError as error:
            return ImageGrids(why=str(error))
        except (AttributeError, TypeError, ValueError, ZeroDivisionError) as error:  # a configuration of another form
            return ImageGrids(why=f"the configuration of the model does not say them: {error}")


def _grids_of_inputs(
    model: nn.Module, inputs: list[ImageInputs], ids: Tensor | None, sizes: Sequence[Size | None]
) -> ImageGrids:
    """Return the grids of the images in the inputs of a model, found by the family of the model."""
    config = getattr(model, "config", None)
    family = str(getattr(config, "model_type", "") or type(model).__name__)
    vision = getattr(config, "vision_config", None)
    if family in _PREFIX_TOKENS:
        return _grids_of_encoder(model, config, inputs[-1])
    if family in _TWO_TOWERS and vision is not None:
        return _grids_of_encoder(model, vision, inputs[-1])
    if family not in _GRIDS_OF_FAMILY:
        raise UnknownGridError(f"attlas does not know how a model of type {family} lays out its patches")
    token = next((t for name in ("image_token_id", "image_token_index") if (t := getattr(config, name, None))), None)
    if ids is None or token is None:
        raise UnknownGridError("the token ids of the text are not known")
    # Where a text was repeated for beams or samples, its images are those of the first of them.
    errors = []
    for beams in (count for count in range(1, len(ids) + 1) if len(ids) % count == 0):
        text = _ImageTokens(ids[::beams], int(token))
        try:
            found = _GRIDS_OF_FAMILY[family](config, inputs, text, sizes)
            text.check_all_taken()
        except UnknownGridError as error:
            errors.append(error)
            continue
        images = [
            replace(image, text=tuple(replace(tile, sequence=beams * tile.sequence) for tile in image.text))
            for image in found.images
        ]
        return replace(found, images=tuple(images), tower=_path_of_configured(model, vision))
    raise errors[0]


class _ImageTokens:
    """The positions of the image tokens of a text, which images take one after the other."""

    def __init__(self, ids: Tensor, token: int) -> None:
        self._places = [(row == token).nonzero().flatten().tolist() for row in ids.cpu()]
        self._sequence = self._taken = 0

    def _take_next_sequence(self) -> list[int]:
        """Return the positions that are left in the first sequence that has some."""
        while self._sequence < len(self._places) and self._taken == len(self._places[self._sequence]):
            self._sequence, self._taken = self._sequence + 1, 0
        return self._places[self._sequence][self._taken :] if self._sequence < len(self._places) else []

    def take(self, count: int) -> tuple[int, int]:
        """Return sequence and position of the first of the next tokens, which stand side by side."""
        left = self._take_next_sequence()
        if len(left) < count or left[count - 1] - left[0] != count - 1:
            raise UnknownGridError(f"an image of {count} tokens does not fit the image tokens of the text")
        self._taken += count
        return self._sequence, left[0]

    def run(self) -> int:
        """Return how many of the next tokens stand side by side."""
        left = self._take_next_sequence()
        return next((n for n, (a, b) in enumerate(pairwise(left), 1) if b != a + 1), len(left))

    def check_all_taken(self) -> None:
        """Raise where the text has image tokens of no image."""
        if self._take_next_sequence():
            raise UnknownGridError(
                f"the text has {len(self._take_next_sequence())} image tokens more than its images have"
            )


def _patch_size(config: Any) -> tuple[int, int]:
    """Return height and width of a patch in pixels."""
    size = config.patch_size
    return (int(size), int(size)) if isinstance(size, int) else (int(size[0]), int(size[1]))


def _prefix_tokens(config: Any) -> int:
    """Return the number of tokens of a vision encoder before its patches."""
    kind = getattr(config, "model_type", "")
    if kind not in _PREFIX_TOKENS:
        raise UnknownGridError(f"attlas does not know how a vision encoder of type {kind} lays out its patches")
    count = _PREFIX_TOKENS[kind]
    return count if isinstance(count, int) else int(count(config))


def _path_of_configured(model: nn.Module, config: Any) -> str | None:
    """Return the path of the outermost module that has a configuration, or one of its type; None if there is none."""
    kind = getattr(config, "model_type", None)
    for path, module in model.named_modules():
        own = getattr(module, "config", None)
        if own is not None and (own is config or getattr(own, "model_type", None) == kind):
            return str(path)
    return None


def _grids_of_encoder(model: nn.Module, config: Any, inputs: ImageInputs) -> ImageGrids:
    """Return the grids of a vision encoder that is given whole pictures, and has no text or another one."""
    if len(inputs.pixels) != 4:
        raise UnknownGridError(f"pixel values of shape {inputs.pixels}, not (images, channels, height, width)")
    (rows, columns), prefix = _patch_rows_and_columns(inputs.pixels[-2:], config), _prefix_tokens(config)
    tile = Tile(rows, columns, start=prefix, call=inputs.run)
    images = tuple(ImageGrid(tower=(replace(tile, sequence=number),)) for number in range(inputs.pixels[0]))
    return ImageGrids(images, tower=_path_of_configured(model, config), prefix=prefix)


def _patch_rows_and_columns(pixels: tuple[int, ...], config: Any) -> tuple[int, int]:
    """Return how many rows and columns of patches a picture has."""
    height, width = _patch_size(config)
    return pixels[-2] // height, pixels[-1] // width


def _kept_tokens(config: Any, inputs: ImageInputs) -> int:
    """Return how many tokens before the patches LLaVA gives to the text."""
    strategy = inputs.strategy or config.vision_feature_select_strategy
    left = _prefix_tokens(config.vision_config) - (strategy == "default")
    if left < 0:
        raise UnknownGridError("the text does not get the first patch of the vision encoder")
    return left


def _grids_of_llava(config: Any, inputs: list[ImageInputs], text: _ImageTokens, sizes: Any) -> ImageGrids:
    """LLaVA: each image is one grid."""
    images: list[ImageGrid] = []
    prefix = _prefix_tokens(config.vision_config)
    for own in inputs:
        (rows, columns), before = _patch_rows_and_columns(own.pixels, config.vision_config), _kept_tokens(config, own)
        for number in range(math.prod(own.pixels[:-3])):
            sequence, start = text.take(before + rows * columns)
            of_text = Tile(rows, columns, sequence, start + before)
            of_tower = Tile(rows, columns, number, prefix, call=own.run)
            images.append(ImageGrid((of_text,), (of_tower,)))
    return ImageGrids(tuple(images), prefix=prefix)


def _llava_next(config: Any, inputs: list[ImageInputs], text: _ImageTokens, sizes: Any) -> ImageGrids:
    """LLaVA-Next: a thumbnail, then tiles side by side without their padding, with a token at the end of each row."""
    images: list[ImageGrid] = []
    vision, prefix = config.vision_config, _prefix_tokens(config.vision_config)
    side, patch = int(vision.image_size), _patch_size(vision)[0]
    n = side // patch
    for own in inputs:
        before, batch = _kept_tokens(config, own), 0
        for size in own.numbers("image_sizes"):
            height, width = (length // side for length in _best_resolution(size, config.image_grid_pinpoints))
            top, left, box = _unpadded_grid((size[0], size[1]), height * n, width * n)
            rows, columns = height * n - 2 * top, width * n - 2 * left
            if before and height * width:  # class tokens of tiles stand among the patches, which are no grid then
                raise UnknownGridError("the text has the class token of each tile")
            sequence, start = text.take(n * n + rows * (columns + 1))
            thumbnail = Tile(n, n, sequence, start, thumbnail=True)
            tiles = Tile(
                rows,
                columns,
                sequence,
                start + n * n,
                step=columns + 1,
                box=_box_of_patches(box, top, left, rows, columns),
            )
            of_tower = [Tile(n, n, batch, prefix, call=own.run, thumbnail=True)]
            for number in range(height * width):
                i, j = divmod(number, width)
                part = _box_of_patches(box, i * n, j * n, n, n)
                of_tower.append(Tile(n, n, batch + 1 + number, prefix, call=own.run, box=part, at=(i, j)))
            images.append(ImageGrid((tiles, thumbnail), (*of_tower[1:], of_tower[0])))
            batch += 1 + height * width
    return ImageGrids(tuple(images), prefix=prefix)


def _best_resolution(size: Sequence[int], choices: Sequence[Sequence[int]]) -> tuple[int, int]:
    """Return the resolution in which an image keeps most of its pixels, and of these the one that wastes least."""
    best, found = (-1, 0), (0, 0)
    for height, width in choices:
        scale = min(width / size[1], height / size[0])
        kept = min(int(size[1] * scale) * int(size[0] * scale), size[0] * size[1])
        best, found = max((best, found), ((kept, kept - height * width), (height, width)), key=lambda each: each[0])
    return found


def _unpadded_grid(size: tuple[int, int], rows: int, columns: int) -> tuple[int, int, tuple[float, ...]]:
    """Return the rows and columns that are cut off at each side, and the edges of the picture in patches.

    The edges are top, left, height and width of the picture on the padded canvas.
    """
    height, width = size
    if width / height > columns / rows:
        long = int(round(height * columns / width, 7))
        top, real = (rows - long) // 2, height * columns / width
        return top, 0, ((rows - real) / 2, 0.0, real, float(columns))
    long = int(round(width * rows / height, 7))
    left, real = (columns - long) // 2, width * rows / height
    return 0, left, (0.0, (columns - real) / 2, float(rows), real)


def _box_of_patches(picture: tuple[float, ...], top: int, left: int, rows: int, columns: int) -> Box:
    """Return the box of some patches of a canvas, of which the picture fills a part."""
    y, x, height, width = picture
    return (top - y) / height, (left - x) / width, (top + rows - y) / height, (left + columns - x) / width


def _grids_of_internvl(
    config: Any, inputs: list[ImageInputs], text: _ImageTokens, sizes: Sequence[Size | None]
) -> ImageGrids:
    """InternVL: tiles of one size, then a thumbnail where there are several; the text gets merged patches."""
    images: list[ImageGrid] = []
    vision, prefix = config.vision_config, _prefix_tokens(config.vision_config)
    merge = round(1 / config.downsample_ratio)
    for own in inputs:
        rows, columns = _patch_rows_and_columns(own.pixels, vision)
        tokens, batch = (rows // merge) * (columns // merge), 0
        while batch < own.pixels[0]:
            count, left = divmod(text.run(), tokens)
            if left or not count or batch + count > own.pixels[0]:
                raise UnknownGridError(f"{text.run()} image tokens side by side, and {tokens} for each tile")
            sequence, start = text.take(count * tokens)
            shape = _tile_arrangement(count, sizes[len(images)] if len(images) < len(sizes) else None)
            if shape is None:
                why = f"an image of {count} tiles, whose arrangement the model is not told: record(model, images=[...])"
                images.append(ImageGrid(why=why))
            else:
                places = [_tile_of(shape, number) for number in range(count)]
                of_text = [
                    Tile(rows // merge, columns // merge, sequence, start + number * tokens, **place)
                    for number, place in enumerate(places)
                ]
                of_tower = [
                    Tile(rows, columns, batch + number, prefix, call=own.run, **place)
                    for number, place in enumerate(places)
                ]
                images.append(ImageGrid(tuple(of_text), tuple(of_tower)))
            batch += count
    return ImageGrids(tuple(images), prefix=prefix)


def _tile_arrangement(count: int, size: Size | None) -> Size | None:
    """Return rows and columns of the tiles of an image, without its thumbnail; None where they cannot be told."""
    if count == 1:
        return 1, 1
    if size is None or count == 2:
        return None
    shapes = [(rows, (count - 1) // rows) for rows in range(1, count) if (count - 1) % rows == 0]
    off = sorted((abs(columns / rows - size[1] / size[0]), (rows, columns)) for rows, columns in shapes)
    return off[0][1] if off[0][0] < off[1][0] else None


def _tile_of(shape: tuple[int, int], number: int) -> dict[str, Any]:
    """Return box and place of a tile; the one behind the last is the thumbnail."""
    rows, columns = shape
    if number == rows * columns:
        return {"thumbnail": True}
    i, j = divmod(number, columns)
    return {"box": (i / rows, j / columns, (i + 1) / rows, (j + 1) / columns), "at": (i, j)}


def _qwen_vl(config: Any, inputs: list[ImageInputs], text: _ImageTokens, sizes: Any) -> ImageGrids:
    """Qwen-VL: images of any size, whose patches stand in blocks; each block is one token of the text."""
    images: list[ImageGrid] = []
    vision, start_of_tower = config.vision_config, 0
    merge = int(vision.spatial_merge_size)
    for own in inputs:
        for frames, rows, columns in own.numbers("image_grid_thw"):
            if frames != 1:
                raise UnknownGridError(f"an image of {frames} frames")
            sequence, start = text.take(rows * columns // merge**2)
            of_text = Tile(rows // merge, columns // merge, sequence, start)
            of_tower = Tile(rows, columns, start=start_of_tower, merge=merge, call=own.run)
            start_of_tower += rows * columns
            images.append(ImageGrid((of_text,), (of_tower,)))
    window = int(getattr(vision, "window_size", 0) or 0) // merge // _patch_size(vision)[0]
    return ImageGrids(tuple(images), window=window, chunks=True)


_GRIDS_OF_FAMILY: dict[str, Callable[[Any, list[ImageInputs], _ImageTokens, Sequence[Size | None]], ImageGrids]] = {
    "internvl": _grids_of_internvl,
    "llava": _grids_of_llava,
    "llava_next": _llava_next,
    "qwen2_5_vl": _qwen_vl,
    "qwen2_vl": _qwen_vl,
    "qwen3_vl": _qwen_vl,
    "qwen3_vl_moe": _qwen_vl,
}
