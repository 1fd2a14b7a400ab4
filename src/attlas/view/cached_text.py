"""A text that a model goes on with: a further token is one pass over it alone, with the cache of those before."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from attlas.recording import Recording
from attlas.recording.atlas import Atlas, Entry
from attlas.recording.atlas.layers import UNRECORDED

_CHANGING_ROPE = {"dynamic", "longrope"}  # kinds of RoPE that turn earlier keys anew as the text grows
_COMPARED_ROWS = 4  # of each head, of which the weights are compared, beside the last one


class CachedText:
    """A text that was read with a cache, and its recording, which goes on with each further token.

    Parameters
    ----------
    model : nn.Module
        A language model of transformers.
    recording : Recording
        The recording of the text, whose block has ended.
    output : ModelOutput
        What the model gave for the text.
    ids : list of int
        Its tokens.
    """

    def __init__(self, model: Any, recording: Recording, output: Any, ids: list[int]) -> None:
        self._model, self.recording, self.ids = model, recording, list(ids)
        self.atlas = recording.atlas  # of these tokens, but for those that a block that runs has added
        self._take(output)

    def _take(self, output: Any) -> None:
        """Keep the cache of an output, and of its logits, which may be larger, those of the next token."""
        self._cache, self.next_token = getattr(output, "past_key_values", None), likeliest_token(output)
        self.logits = None if self.next_token is None else output.logits[:, -1:].clone()

    @property
    def nbytes(self) -> int:
        """About the bytes of the cache: keys and values, of which the recording has a copy of the keys."""
        return sum(2 * k.nbytes for k in map(_keys, self.atlas.entries) if k is not None)

    @torch.no_grad()
    def write(self, goes_on: Callable[[], bool]) -> bool:
        """Write the likeliest next token while `goes_on`, in one block of the recording.

        Returns
        -------
        bool
            Whether `atlas` is now one recording of all tokens. Calls that do not fit together, and a cache that has
            dropped what was not recorded, give further passes or other sizes: then this text is of no more use.
        """
        with self.recording.resumed() as atlas:
            while goes_on():
                token = cast(int, self.next_token)
                step = torch.tensor([[token]], device=self._model.device)
                self._take(self._model(step, past_key_values=self._cache, use_cache=True))
                self.ids.append(token)
        grown = len(self.ids) - (0 if self.atlas.ids is None else self.atlas.ids.shape[-1])
        fits = (
            atlas.ids is not None
            and atlas.ids.tolist() == [self.ids]
            and [_place(entry) for entry in atlas.entries] == [_place(entry, grown) for entry in self.atlas.entries]
            and atlas.details.get(UNRECORDED) == self.atlas.details.get(UNRECORDED)
            and self._cache is not None
        )
        self.atlas = atlas
        return fits


def keeps_cache(model: Any) -> bool:
    """Return whether a model may read a text with a cache, as far as its class and its configuration say.

    An encoder-decoder has two texts; where places are turned anew as the text grows, the keys of a cache are others.
    """
    if not model.can_generate() or model.config.is_encoder_decoder:
        return False
    config = model.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = {one.get("rope_type", one.get("type")) for one in (rope, *rope.values()) if isinstance(one, dict)}
    taken = inspect.signature(model.forward).parameters.keys()
    return {"use_cache", "past_key_values"} <= taken and kinds.isdisjoint(_CHANGING_ROPE)


def likeliest_token(output: Any) -> int | None:
    """Return the id of the likeliest next token by an output of the model; None where that has no logits."""
    logits = getattr(output, "logits", None)
    return int(logits[0, -1].argmax()) if isinstance(logits, Tensor) and logits.ndim == 3 else None


@torch.no_grad()
def is_same_reading(cached: CachedText, whole: Atlas, output: Any) -> bool:
    """Return whether a text that was read with a cache is the same, to rounding, as `whole`, read in one pass.

    The layers, their keys, some rows of their weights, and the logits of the next token are compared.
    """
    if [_place(entry) for entry in cached.atlas.entries] != [_place(entry) for entry in whole.entries]:
        return False
    if cached.logits is None:
        return False
    pairs = [(cached.logits[0], output.logits[0, -1:])]
    for entry, other in zip(cached.atlas.entries, whole.entries, strict=True):
        if entry.matrix is None or other.matrix is None:
            return False
        keys, others = _keys(entry), _keys(other)
        if keys is not None and others is not None:
            pairs.append((keys, others))
        rows = torch.linspace(0, entry.shape[2] - 1, _COMPARED_ROWS + 1).long().unique().tolist()
        pairs += [tuple(e.matrix.window(range(i, i + 1)).to_dense() for e in (entry, other)) for i in rows]  # type: ignore[misc, union-attr]
        norms = other.values_and_norms
        pairs += [(t, norms[name]) for name, t in entry.values_and_norms.items() if name in norms]
    return all(_are_close(one, two) for one, two in pairs)


def _are_close(one: Tensor, two: Tensor) -> bool:
    """Return whether two tensors are equal to the rounding of a model in their dtype, which adds up over its layers."""
    if one.shape != two.shape or one.dtype != two.dtype:
        return False
    tolerance = torch.finfo(one.dtype).eps ** 0.6  # 7e-5 in float32
    one, two = one.float(), two.float()
    return bool((one - two).norm() <= tolerance * two.norm().clamp(min=tolerance))


def _keys(entry: Entry) -> Tensor | None:
    """Return the keys of an entry; None where they were not kept, or its weights are no softmax."""
    weights = None if entry.matrix is None else entry.matrix.weights.softmax
    return None if weights is None else weights.problem.k


def _place(entry: Entry, grown: int = 0) -> tuple[Any, ...]:
    """Return which attention an entry is of, and its sizes when the text has grown."""
    batch, heads, m, n = entry.shape
    queries = entry.queries[0], entry.queries[1] + grown
    attention = (entry.name, entry.layer, entry.kind, entry.call, entry.heads)
    return *attention, queries, entry.first_key, (batch, heads, m + grown, n + grown)
