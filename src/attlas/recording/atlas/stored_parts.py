"""Residual streams of a recording as plain data, whose tensors stand in files; what is read is checked."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from attlas.recording.atlas.serialization import FormatError, LoadTensor, Spec, StoreTensor, check_type
from attlas.recording.parts.stream import Projection, Reader, Rotation, Scaling, Stream, Write

# By class and field: what a file may hold there. The number of axes of a tensor; a class; a plain type.
_FIELDS: dict[type, dict[str, Any]] = {
    Scaling: {"factors": (2, 3), "gain": (1,), "bias": (1,), "centered": bool},
    Write: {
        "name": str, "kind": str, "layer": int, "x": (3,), "weight": (2,), "bias": (1,), "heads": int, "scale": float,
        "norm": Scaling,
    },
    Projection: {"weight": (2,), "channels": (2,), "bias": (1,), "scale": float, "norm": Scaling},
    Rotation: {"turns": (4,), "interleaved": bool},
    Reader: {
        "name": str, "layer": int, "count": int, "norm": Scaling, "q": Projection, "k": Projection, "rotation": Rotation,
    },
    Stream: {"writes": Write, "readers": Reader, "first": int, "count": int, "rows": (1,)},
}  # fmt: skip
_OPTIONAL = {("Scaling", "gain"), ("Scaling", "bias"), ("Write", "x"), ("Write", "weight"), ("Write", "bias"),
             ("Write", "norm"), ("Projection", "bias"), ("Projection", "norm"), ("Reader", "norm"),
             ("Reader", "rotation"), ("Stream", "rows")}  # fmt: skip


def parts_spec(thing: Any, put: StoreTensor) -> Any:
    """Return a stream, or a part of one, as plain data; its tensors go to `put`, each once."""
    if isinstance(thing, list):
        return [parts_spec(part, put) for part in thing]
    if not hasattr(thing, "__dataclass_fields__"):
        return thing
    spec: Spec = {}
    for field in fields(thing):
        value = getattr(thing, field.name)
        spec[field.name] = put(f"part_{field.name}", value) if isinstance(value, Tensor) else parts_spec(value, put)
    return spec


def streams_from(spec: Any, take: LoadTensor) -> list[Stream]:
    """Return the streams that plain data describes.

    Raises
    ------
    FormatError
        If it describes none.
    """
    streams = [_made(Stream, one, take) for one in check_type(spec, "parts", list)]
    for stream in streams:
        _check(stream)
    return streams


def _made(kind: type, spec: Any, take: LoadTensor) -> Any:
    """Return an object of a class that plain data describes."""
    check_type(spec, f"a {kind.__name__} of parts", dict)
    values: dict[str, Any] = {}
    for name, form in _FIELDS[kind].items():
        value = spec.get(name)
        if value is None and (kind.__name__, name) in _OPTIONAL:
            values[name] = None
        elif isinstance(form, tuple):
            t = take(value)
            if t.ndim not in form or t.is_floating_point() == (name in ("channels", "rows")):
                raise FormatError(f"{name} of parts of shape {tuple(t.shape)} and {t.dtype}")
            values[name] = t
        elif isinstance(value, list) and kind is Stream:
            values[name] = [_made(form, one, take) for one in value]
        else:
            values[name] = _made(form, value, take) if form in _FIELDS else check_type(value, name, form)
    return kind(**values)


def _check(stream: Stream) -> None:
    """Raise a FormatError where the sizes of a stream do not fit together."""
    sizes = {w.x.shape[:2] for w in stream.writes if w.x is not None}
    kept = stream.count if stream.rows is None else len(stream.rows)
    if len(sizes) > 1 or any(size[1] != kept for size in sizes):
        raise FormatError(f"parts of {stream.count} rows in tensors of {sorted(map(tuple, sizes))}")
    for write in stream.writes:
        wrong = write.heads < 0 or (write.x is None and write.norm is None)
        if write.weight is not None and write.x is not None:
            wrong = wrong or write.weight.shape[1] != write.x.shape[2] or write.x.shape[2] % max(write.heads, 1) != 0
        if wrong:
            raise FormatError(f"a part {write.name[:60]!r} whose sizes do not fit")
    for reader in stream.readers:
        if not 0 <= reader.count <= len(stream.writes):
            raise FormatError(f"{reader.name[:60]!r} reads {reader.count} of {len(stream.writes)} parts")
        for made in (reader.q, reader.k):
            place = made.channels
            fits = place.numel() > 0 and int(place.min()) >= 0 and int(place.max()) < len(made.weight)
            if not fits or place.dtype is not torch.int64:
                raise FormatError(f"{reader.name[:60]!r} with channels that its projection does not have")
        if len(reader.q.channels) % len(reader.k.channels):
            raise FormatError(f"{reader.name[:60]!r} with heads that its key heads do not divide")
