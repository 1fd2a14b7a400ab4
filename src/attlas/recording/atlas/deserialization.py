"""Reads the entries of a saved atlas: every name, size and number is checked, tensors stay on disk."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from attlas.engine.plan import Plan
from attlas.engine.problem import Problem
from attlas.foundation.checks import accumulation_dtype
from attlas.foundation.png import decoded
from attlas.matrix import AttentionMatrix, SoftmaxWeights, Weights
from attlas.matrix.stored import STORED_KINDS
from attlas.recording.atlas.bookmarks import read_bookmarks
from attlas.recording.atlas.entry import VALUES, Entry
from attlas.recording.atlas.manifest import FILE, MANIFEST, PICTURE, check_files, errors_name_file, read_manifest
from attlas.recording.atlas.serialization import FormatError, UserScores, check_type, mask_from, result_from, score_from
from attlas.recording.atlas.stored_parts import streams_from

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
_LARGEST = 1 << 48
_MOST_HEADS = 1 << 24  # batches times heads
_PLAN = Plan()


class Reader:
    """Tensors of the files of a folder, memory-mapped: their numbers are read when they are needed.

    Parameters
    ----------
    folder : Path
        The folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._tensors: dict[str, dict[str, Tensor]] = {}

    def take(self, ref: Any) -> Tensor:
        """Return the tensor that plain data refers to, as a view of its file.

        Raises
        ------
        FormatError
            If there is no such tensor, or not with these sizes.
        """
        check_type(ref, "a tensor", dict)
        name, key = check_type(ref.get("file"), "file", str), check_type(ref.get("tensor"), "tensor", str)
        own, shape = (sizes(ref.get(axes), axes) for axes in ("own", "shape"))
        if FILE.fullmatch(name) is None:
            raise FormatError(f"a file named {name[:60]!r}, not 0000.safetensors")
        if name not in self._tensors:
            with errors_name_file(self.folder, name), safe_open(self.folder / name, "pt") as file:
                self._tensors[name] = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (no dict)
        t = self._tensors[name].get(key)
        if t is None:
            raise FormatError(f"a tensor {key[:60]!r} that {name} does not have")
        # `own` are the sizes in the file; axes of size 1 there may stand for repeated numbers.
        grown = len(own) == len(shape) and all(a in (1, b) for a, b in zip(own, shape, strict=True))
        if math.prod(own) != t.numel() or not grown:
            raise FormatError(f"{key[:60]} of shape {tuple(t.shape)}, said to be {tuple(own)} of {tuple(shape)}")
        return t.view(own).expand(shape)

    def names(self) -> set[str]:
        """Return the files that were opened."""
        return set(self._tensors)


def read(folder: Path, *, verify: bool, score: UserScores) -> dict[str, Any]:
    """Return the contents of a saved folder, by the names of the attributes of `Atlas`.

    Raises
    ------
    RecordingError
        If the folder is not one that attlas wrote, or was changed.
    """
    content = read_manifest(folder)
    check_files(folder, content.get("files"), verify=verify)
    reader = Reader(folder)
    with errors_name_file(folder, MANIFEST):
        fields: dict[str, Any] = {"model": check_type(content.get("model"), "model", str)}
        fields["details"] = check_type(content.get("details"), "details", dict)
        tokens, ids = content.get("tokens"), content.get("ids")
        fields["tokens"] = None if tokens is None else texts(tokens, "tokens")
        for name, field in (("texts", "tokens"), ("encoder_texts", "encoder_texts")):  # of a batch, of an encoder
            if content.get(name) is not None:
                fields[field] = [texts(text, name) for text in check_type(content[name], name, list)]
        fields["ids"] = None if ids is None else reader.take(ids)
        spans = check_type(content.get("spans"), "spans", dict)
        fields["spans"] = {name: _pair(span, f"span {name[:60]!r}") for name, span in spans.items()}
        if content.get("images") is not None:
            names = check_type(content["images"], "images", list)
            fields["images"] = [_picture(folder, name, content["files"]) for name in names]
        if content.get("parts") is not None:
            fields["parts"] = streams_from(content["parts"], reader.take)
        fields["entries"] = []
        seen = set()
        for record in check_type(content.get("entries"), "entries", list):
            entry = entry_from(record, reader, score)
            if (entry.path, entry.call) in seen:
                raise FormatError(f"{entry.path}, call {entry.call}, twice")
            seen.add((entry.path, entry.call))
            fields["entries"].append(entry)
        fields["bookmarks"] = read_bookmarks(folder)
        strange = reader.names() - content["files"].keys()
        if strange:
            raise FormatError(f"tensors of {min(strange)}, which is not among its files")
    return fields


def _picture(folder: Path, name: Any, files: Any) -> Tensor | None:
    """Return a picture of a folder; None where it was not kept."""
    if name is None:
        return None
    if PICTURE.fullmatch(check_type(name, "images", str)) is None or name not in files:
        raise FormatError(f"a picture in {name[:60]!r}, which is not among its files")
    with errors_name_file(folder, name):
        return decoded((folder / name).read_bytes())


def entry_from(record: Any, reader: Reader, user_scores: UserScores) -> Entry:
    """Return the entry that plain data describes.

    Raises
    ------
    FormatError, AttlasError
        If it describes none.
    """
    check_type(record, "an entry", dict)
    name, family = check_type(record.get("name"), "name", str), check_type(record.get("kind"), "kind", str)
    layer, call, first_key = (check_size(record.get(key), key) for key in ("layer", "call", "first_key"))
    heads, shape = sizes(record.get("heads"), "heads"), sizes(record.get("shape"), "shape")
    if len(shape) != 4 or shape[0] * shape[1] > _MOST_HEADS:
        raise FormatError(f"a matrix of shape {tuple(shape)}")
    four = (shape[0], shape[1], shape[2], shape[3])
    weights = None if record.get("matrix") is None else _weights(record["matrix"], four, reader, user_scores)
    matrix = None if weights is None else AttentionMatrix(weights)
    results = check_type(record.get("statistics"), "statistics", dict)
    statistics = {key: result_from(spec, reader.take) for key, spec in results.items()}
    queries = _pair(record.get("queries"), "queries")
    # Older files have neither masks of queries nor values.
    kept = {name: reader.take(record[name]) for name in ("query_mask", *VALUES) if record.get(name) is not None}
    for field in VALUES:
        if field in kept and kept[field].dtype not in _FLOATS:
            raise FormatError(f"{field} {_describe(kept[field])}")
    return Entry(name, layer, family, call, tuple(heads), queries, first_key, four, matrix, statistics, **kept)


def _weights(record: Any, shape: tuple[int, ...], reader: Reader, user_scores: UserScores) -> Weights:
    """Return the weights that plain data describes; sizes and dtypes are checked, numbers stay on disk."""
    check_type(record, "matrix", dict)
    if "weights" not in record:
        return _softmax(record, (shape[0], shape[1], shape[2], shape[3]), reader, user_scores)
    name = check_type(record["weights"], "weights", str)
    kind = STORED_KINDS.get(name)
    if kind is None:
        raise FormatError(f"weights of a kind named {name[:60]!r}, which this version of attlas does not know")

    def setting(value: Any) -> Any:
        """Return a stored setting: tensors are mapped from their files, inner weights made in turn."""
        if isinstance(value, list):
            return list(map(setting, value))
        if not isinstance(value, dict):
            return value
        if "tensor" in value:
            return reader.take(value["tensor"])
        if "matrix" not in value:
            return {name: setting(own) for name, own in value.items()}
        own = sizes(value.get("shape"), "shape")
        if len(own) != 4 or own[0] * own[1] > _MOST_HEADS:
            raise FormatError(f"a matrix of shape {tuple(own)}")
        return _weights(value.get("matrix"), tuple(own), reader, user_scores)

    settings = check_type(record.get("settings"), "settings", dict)
    try:
        weights = kind.from_dict({name: setting(value) for name, value in settings.items()})
    except (IndexError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"settings that are none of a {name}: {str(error)[:200]}") from error
    if tuple(weights.shape) != shape:
        raise FormatError(f"weights of shape {tuple(weights.shape)}, said to be {shape}")
    return weights


def _softmax(
    record: dict[str, Any], shape: tuple[int, int, int, int], reader: Reader, user_scores: UserScores
) -> SoftmaxWeights:
    """Return the softmax weights that plain data describes; sizes and dtypes are checked, numbers stay on disk."""
    q, k, lse = (reader.take(record.get(key)) for key in ("q", "k", "lse"))
    sink = None if record.get("sink") is None else reader.take(record["sink"])
    batch, heads, m, n = shape
    key_heads = k.shape[1] if k.ndim == 4 else 0
    # Several heads of q may share one of k.
    fits = q.ndim == k.ndim == 4 and tuple(q.shape[:3]) == (batch, heads, m) and (k.shape[0], k.shape[2]) == (batch, n)
    fits = fits and q.dtype is k.dtype and q.dtype in _FLOATS and (heads % key_heads == 0 if key_heads else heads == 0)
    fits = fits and all(t.stride(-1) == 1 or t.shape[-1] <= 1 for t in (q, k))
    if not fits:
        raise FormatError(f"q {_describe(q)} and k {_describe(k)} of a matrix of shape {shape}")
    # Files of version 1 have it in the dtype of the weights; where that is too coarse it is computed again.
    if tuple(lse.shape) != (batch, heads, m) or lse.dtype not in (torch.float64, accumulation_dtype(q.dtype)):
        raise FormatError(f"lse {_describe(lse)} of a matrix of shape {shape} and q {_describe(q)}")
    if sink is not None and (tuple(sink.shape) != (heads,) or not sink.is_floating_point()):
        raise FormatError(f"sink {_describe(sink)} of {heads} heads")
    batch_ids, head_ids = (
        torch.tensor(sizes(record.get(key), key), dtype=torch.int64) for key in ("batch_ids", "head_ids")
    )
    if (len(batch_ids), len(head_ids)) != (batch, heads):
        raise FormatError(f"{len(batch_ids)} batch_ids and {len(head_ids)} head_ids of a matrix of shape {shape}")
    mask = None if record.get("mask") is None else mask_from(record["mask"], reader.take)
    score = score_from(record.get("score"), reader.take, user_scores)
    partial, weighted = (check_type(record.get(name, False), name, bool) for name in ("partial", "weighted"))
    problem = Problem(q, k, score, mask, sink, (batch_ids, head_ids), partial=partial)
    _check_corners(problem)
    return SoftmaxWeights(problem, _PLAN, lse, are_shares=not weighted)


@torch.no_grad()
def _check_corners(problem: Problem) -> None:
    """Evaluate score and mask at the corners of the matrix, so that an error is raised here and not in a later read."""
    *_, m, n = problem.shape
    if 0 in problem.shape:
        return
    b, h = (_extremes(ids) for ids in (problem.batch_ids, problem.head_ids))
    rows, columns = (torch.tensor(sorted({0, size - 1})) for size in (m, n))
    at = problem.tile(range(len(b)), range(len(h)), range(len(rows)), range(len(columns)),
                      row_index=rows, column_index=columns)  # fmt: skip
    at = type(at)(**{**vars(at), "batch_ids": problem.batch_ids[b], "head_ids": problem.head_ids[h]})
    # Sizes and places are what may be wrong, so zeros will do: the tokens stay on disk.
    q = torch.zeros(len(b), len(h), len(rows), problem.q.shape[-1], dtype=problem.dtype)
    k = torch.zeros(len(b), len(h), len(columns), problem.k.shape[-1], dtype=problem.dtype)
    logits = problem.score(*problem.score.project(q, k), at)
    if torch.broadcast_shapes(logits.shape, at.shape) != torch.Size(at.shape):
        raise FormatError(f"a score of shape {tuple(logits.shape)} for a tile of {at.shape}")
    if problem.mask is None:
        return
    allowed = problem.mask.allows(at)
    if allowed.dtype is not torch.bool or torch.broadcast_shapes(allowed.shape, at.shape) != torch.Size(at.shape):
        raise FormatError(f"a mask of shape {tuple(allowed.shape)} for a tile of {at.shape}")


def _extremes(ids: Tensor) -> Tensor:
    """Return the indices of the smallest and largest number, and the first and last index; ascending, each once."""
    return torch.tensor(sorted({0, len(ids) - 1, int(ids.argmin()), int(ids.argmax())}))


def _describe(t: Tensor) -> str:
    """Return shape and dtype of a tensor in words, for an error."""
    return f"{tuple(t.shape)} {str(t.dtype).removeprefix('torch.')}"


def check_size(value: Any, name: str) -> int:
    """Return a whole number that is not negative, or raise a FormatError."""
    if check_type(value, name, int) < 0 or value > _LARGEST:
        raise FormatError(f"{name} = {str(value)[:60]}")
    return int(value)


def sizes(value: Any, name: str) -> list[int]:
    """Return a list of whole numbers that are not negative, or raise a FormatError."""
    return [check_size(size, name) for size in check_type(value, name, list)]


def texts(value: Any, name: str) -> list[str]:
    """Return a list of texts, or raise a FormatError."""
    return [check_type(text, name, str) for text in check_type(value, name, list)]


def _pair(value: Any, name: str) -> tuple[int, int]:
    """Return the first position of a range and the one after its last, or raise a FormatError."""
    pair = sizes(value, name)
    if len(pair) != 2 or pair[0] > pair[1]:
        raise FormatError(f"{name} = {str(value)[:60]}, not the first and the last + 1")
    return pair[0], pair[1]
