"""Queries or keys of a running attention without one part: the norms are computed again."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from attlas.errors import OutOfRangeError, RecordingError, listed
from attlas.recording.parts.reading import Reading
from attlas.recording.parts.stream import Scaling, Write
from attlas.recording.parts.walk import Walk


def names_of(writes: Sequence[Write]) -> list[str]:
    """Return the names of the parts that some writes make."""
    return [name for w in writes if w.x is not None for name in ([f"{w.name}·{h}" for h in range(w.heads)] or [w.name])]


def added_by(writes: Sequence[Write], source: str) -> Tensor:
    """Return what one part has added to a stream, shape (batch, n, size).

    Raises
    ------
    OutOfRangeError
        If there is no such part.
    RecordingError
        If the whole stream has passed a norm since: what of it is left depends on all else.
    """
    for place, write in enumerate(writes):
        names = names_of([write])
        if source not in names:
            continue
        if any(later.x is None for later in writes[place + 1 :]):
            rule = "a part is taken out of a stream that no norm as a whole has changed since."
            fix = 'heads.explain(atlas, layer, head, cell=(i, j)).without("MLP 0"), with scales as they are.'
            raise RecordingError(rule, f"{source}, and a norm behind it", fix)
        x = write.x
        if write.heads and write.weight is not None and x is not None:
            own = slice(names.index(source) * (x.shape[-1] // write.heads), (names.index(source) + 1) * (x.shape[-1] // write.heads))
            x = x[..., own] @ write.weight[:, own].mT.to(x)
        if write.norm is not None:
            x = _scaled(write.norm, torch.as_tensor(x))
        return torch.as_tensor(x) * write.scale
    known = listed(names_of(writes))
    raise OutOfRangeError("there must be a part of this name in front of the layer.", f"{source!r}; {known}", "source='token'")


def _scaled(norm: Scaling, x: Tensor) -> Tensor:
    """Return what a part is behind a norm with the scale that it had; the norm's bias is not in it."""
    x = x - x.mean(-1, keepdim=True) if norm.centered else x
    x = x * norm.factors.unsqueeze(-1).to(x)
    return x if norm.gain is None else x * norm.gain.to(x)


def made_without(walk: Walk, writes: Sequence[Write], source: str, *, keys: bool) -> Tensor:
    """Return the queries (or keys) of an attention that runs, made again without a part, (batch, heads, n, d).

    Parameters
    ----------
    walk : Walk
        The walk through its block, up to it.
    writes : sequence of Write
        What was added to the stream that it reads.
    source : str
        Name of the part.
    keys : bool
        Whether the keys are made, and not the queries.
    """
    reading, norm = walk.reading, walk.reading_norm
    if reading is None or walk.stream is None:
        rule = "the attention must be one whose queries and keys are linear in its stream."
        raise RecordingError(rule, walk.path, "attlas.interventions.Ablate, which leaves out a head.")
    stream = walk.stream if norm is None else torch.as_tensor(walk.rows(norm.inputs[0]))
    changed = stream - added_by(writes, source).to(stream)
    changed = changed if norm is None else norm.module.forward(changed)
    return _projected(reading, changed, keys=keys)


def _projected(reading: Reading, x: Tensor, *, keys: bool) -> Tensor:
    """Return queries or keys (batch, heads, n, d) of what an attention reads, (batch, n, size)."""
    projection, norm = (reading.k, reading.k_norm) if keys else (reading.q, reading.q_norm)
    heads, d = projection.channels.shape
    out = x @ projection.weight.mT.to(x)
    out = out if projection.bias is None else out + projection.bias.to(out)
    made = out[..., projection.channels]
    if norm is not None:
        whole = projection.norm is not None and projection.norm.factors.shape[-1] == 1 and heads > 1
        made = norm.forward(made.flatten(-2)).unflatten(-1, (heads, d)) if whole else norm.forward(made)
    made = made.transpose(1, 2) * projection.scale
    rotation = reading.rotation
    return made if rotation is None else rotation.turned(made, rotation.turns.unsqueeze(1).to(made)).to(made.dtype)
