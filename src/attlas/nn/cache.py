"""The keys and values of the tokens read so far, so that a new token costs one row of attention."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from attlas.errors import RecordingError, ShapeError, public
from attlas.foundation.checks import whole_number
from attlas.foundation.files import whole_file

_LEAST_ROOM = 64  # tokens that are made room for at first


class KVCache:
    """Keys and values of each layer, kept between calls of a model that reads one token after the other.

    Parameters
    ----------
    window : int, optional
        Sliding window: how many tokens a query sees, itself included. Older ones are let go. The default
        keeps all.
    capacity : int
        Tokens that room is made for when a layer is first used. The default is 64; it grows by doubling.

    Raises
    ------
    ShapeError
        If a size is below 1; if keys and values do not continue what is there.

    Notes
    -----
    Room is doubled when it is full, so that n tokens cost O(n) copies in all: a step writes its own tokens,
    moves nothing, and gets views. With a window, room is at least twice the window, and its last tokens move
    to the front each time the end is reached: also O(1) a token. Where autograd records, tokens are joined to
    a new tensor instead, since a graph must not be written over. Layers are numbered from 0 and made on
    their first use. Memory: ``2 · layers · batch · key heads · room · d`` numbers.

    Examples
    --------
    >>> import torch
    >>> from attlas.nn import KVCache
    >>> cache = KVCache()
    >>> keys, values = cache.update(torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8))
    >>> keys, values = cache.update(torch.randn(1, 2, 1, 8), torch.randn(1, 2, 1, 8))
    >>> keys.shape, cache.seen
    (torch.Size([1, 2, 6, 8]), 6)
    """

    @public("KVCache()")
    def __init__(self, window: int | None = None, capacity: int = _LEAST_ROOM) -> None:
        for name, size in (("window", window), ("capacity", capacity)):
            if size is not None:
                whole_number(name, size, f"leave {name} out.")
        self.window = window
        self.capacity = capacity
        self._layers: dict[int, _LayerTokens] = {}
        self._fixed: dict[int, tuple[Tensor, Tensor]] = {}

    @property
    def seen(self) -> int:
        """How many tokens were read: the place of the next one."""
        return next((layer.seen for layer in self._layers.values()), 0)

    def __len__(self) -> int:
        return len(self._layers)

    def __repr__(self) -> str:
        window = "" if self.window is None else f", window={self.window}"
        return f"KVCache({len(self)} layers, {self.seen} tokens seen{window})"

    def update(self, keys: Tensor, values: Tensor, layer_idx: int = 0) -> tuple[Tensor, Tensor]:
        """Append the tokens of one step to a layer, and return all that its queries may see.

        Parameters
        ----------
        keys, values : Tensor, shape (batch, key heads, m, d) and (batch, key heads, m, e)
            Tokens of this step.
        layer_idx : int
            Number of the layer.

        Returns
        -------
        keys, values : Tensor, shape (batch, key heads, n, d) and (batch, key heads, n, e)
            Views of the room, the last m tokens being those of this step. With a window, n is at most
            ``window - 1 + m``, and `Window(window - 1, 0)` is the mask of a step of several tokens.

        Raises
        ------
        ShapeError
            If the tokens do not have the sizes, dtype and device of those before.
        """
        if layer_idx not in self._layers:
            self._layers[layer_idx] = _LayerTokens(keys, values, self.capacity, self.window)
        return self._layers[layer_idx].append(keys, values)

    def once(self, layer_idx: int, make: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return keys and values that stay the same at each step, made at the first: those of an encoder."""
        if layer_idx not in self._fixed:
            self._fixed[layer_idx] = make()
        return self._fixed[layer_idx]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return how many tokens a layer has read."""
        layer = self._layers.get(layer_idx)
        return 0 if layer is None else layer.seen

    def reorder(self, index: Tensor) -> None:
        """Keep the sequences of the batch that `index` names, in that order; one may be named twice (beams).

        Cost: one copy of what is kept; none where nothing changes.
        """
        for layer in self._layers.values():
            layer.reorder(index)
        self._fixed = {i: (k.index_select(0, index), v.index_select(0, index)) for i, (k, v) in self._fixed.items()}

    def crop(self, length: int) -> None:
        """Forget the last tokens, so that `length` are left; a negative length says how many to forget.

        Raises
        ------
        ShapeError
            If there are not that many, or tokens that the window then shows were let go.
        """
        keep = length + self.seen if length < 0 else length
        if not 0 <= keep <= self.seen:
            rule, fix = "length must be at most the number of tokens seen.", f"use a length from 0 to {self.seen}."
            raise ShapeError(rule, f"length = {length}, {self.seen} tokens seen", fix, where="KVCache.crop()")
        for layer in self._layers.values():
            layer.crop(keep)

    @public("KVCache.save()")
    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the cache to a safetensors file; under a temporary name first, so that no half of one is left.

        Raises
        ------
        FileError
            If the file cannot be written.
        """
        tensors: dict[str, Tensor] = {}
        for i, layer in self._layers.items():
            keys, values = layer.tokens()
            tensors[f"{i}.keys"], tensors[f"{i}.values"] = keys.contiguous(), values.contiguous()
        for i, (keys, values) in self._fixed.items():
            tensors[f"fixed.{i}.keys"], tensors[f"fixed.{i}.values"] = keys.contiguous(), values.contiguous()
        about = {"format": _STATE_FORMAT, "window": str(self.window or 0), "seen": str(self.seen)}
        with whole_file(path) as unfinished:
            save_file(tensors, unfinished, about)

    @classmethod
    def load(cls, path: str | os.PathLike[str], device: str | torch.device = "cpu") -> KVCache:
        """Read a cache that `save` wrote.

        Raises
        ------
        RecordingError
            If the file is no such cache.
        """
        try:
            with safe_open(path, "pt", device=str(device)) as file:
                about = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no dict)
        except (SafetensorError, OSError) as error:
            about, tensors, reason = {}, {}, f"{type(error).__name__}: {error}"
        else:
            reason = f"format {about.get('format')!r}"
        if about.get("format") != _STATE_FORMAT:
            rule, fix = "path must be a file that KVCache.save() wrote.", "cache.save(path), then KVCache.load(path)"
            raise RecordingError(rule, reason, fix, path=str(path), where="KVCache.load()")
        cache = cls(int(about["window"]) or None)
        for name in tensors:
            kind, _, part = name.rpartition(".")
            if part != "keys":
                continue
            keys, values = tensors[name], tensors[f"{kind}.values"]
            if kind.startswith("fixed."):
                cache._fixed[int(kind.removeprefix("fixed."))] = keys, values
            else:
                layer = _LayerTokens(keys, values, cache.capacity, cache.window)
                layer.append(keys, values)
                # Position of slot 0: tokens that left the window before are not in the file, and were counted.
                layer.base = int(about["seen"]) - layer.stop
                cache._layers[int(kind)] = layer
        return cache


_STATE_FORMAT = "attlas.nn.KVCache 1"


class _LayerTokens:
    """Room for the tokens of one layer: slot s, below `stop`, holds the token at position ``base + s``."""

    def __init__(self, keys: Tensor, values: Tensor, capacity: int, window: int | None) -> None:
        self.window = window
        self.base = self.stop = 0
        room = max(capacity, keys.shape[2] if window is None else 2 * window)
        self.keys, self.values = (t.new_empty(*t.shape[:2], room, t.shape[3]) for t in (keys, values))

    @property
    def seen(self) -> int:
        """How many tokens the layer has read."""
        return self.base + self.stop

    def append(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store the m tokens of a step, and return the keys and values that its queries may see."""
        m = keys.shape[2]
        self._check_continues(keys, values)
        # With a gradient the buffer must not be written into: what was read from it is needed in the backward.
        if torch.is_grad_enabled() and (keys.requires_grad or self.keys.requires_grad or values.requires_grad):
            self.keys, self.values = (
                torch.cat(pair, dim=2) for pair in zip(self.tokens(), (keys, values), strict=True)
            )
        else:
            if self.stop + m > self.keys.shape[2]:
                self._make_room(m)
            self.keys[:, :, self.stop : self.stop + m] = keys
            self.values[:, :, self.stop : self.stop + m] = values
        self.stop += m
        # All that the first query of the step sees: window - 1 keys before its own.
        return self.tokens(0 if self.window is None else max(0, self.stop - (self.window - 1 + m)))

    def _check_continues(self, keys: Tensor, values: Tensor) -> None:
        """Raise a ShapeError unless new keys and values continue those stored.

        Same batch, heads, size, dtype, device.
        """
        for name, new, old in (("keys", keys, self.keys), ("values", values, self.values)):
            same = new.ndim == 4 and new.shape[:2] == old.shape[:2] and new.shape[3] == old.shape[3]
            if same and new.dtype is old.dtype and new.device == old.device and keys.shape[2] == values.shape[2]:
                continue
            rule = f"{name} must continue those before: batch, heads, size, dtype and device."
            given = {"keys": keys, "values": values, f"{name} before": old[:, :, : self.stop]}
            found = f"shape {tuple(new.shape)}, {new.dtype} after {tuple(old.shape[:2])}, {old.dtype}"
            fix = "use a new KVCache() for another batch; cache.reorder(index) where its sequences change."
            raise ShapeError(rule, found, fix, arguments=given, where="KVCache.update()")

    def _make_room(self, m: int) -> None:
        """Move the tokens that the window still sees to the front, of a larger room where they need one.

        Called where m further tokens do not fit behind `stop`.
        """
        first = 0 if self.window is None else max(0, self.stop - (self.window - 1))
        kept, room = self.stop - first, self.keys.shape[2]
        if kept + m > room:  # always so without a window, as all tokens are kept
            room = max(2 * room, kept + m)
        elif kept > first:
            # The slots they move from and to overlap, so they are copied into a new room. It is a larger one:
            # room < stop + m = first + kept + m < 2 * (kept + m).
            room = 2 * (kept + m)

        def moved(old: Tensor) -> Tensor:
            """Return keys or values with the kept tokens first."""
            new = old if room == old.shape[2] else old.new_empty(*old.shape[:2], room, old.shape[3])
            new[:, :, :kept] = old[:, :, first : self.stop]
            return new

        self.keys, self.values = moved(self.keys), moved(self.values)
        self.base, self.stop = self.base + first, kept

    def tokens(self, first: int = 0) -> tuple[Tensor, Tensor]:
        """Return the stored keys and values from slot `first` on, as views."""
        return self.keys[:, :, first : self.stop], self.values[:, :, first : self.stop]

    def reorder(self, index: Tensor) -> None:
        """Keep the sequences that `index` names, in that order."""
        index = index.to(self.keys.device)
        if torch.equal(index, torch.arange(len(self.keys), device=index.device)):
            return

        def reordered(old: Tensor) -> Tensor:
            """Return keys or values of the named sequences, with as much room as before."""
            new = old.new_empty(len(index), *old.shape[1:])
            new[:, :, : self.stop] = old[:, :, : self.stop].index_select(0, index)
            return new

        self.keys, self.values = reordered(self.keys), reordered(self.values)

    def crop(self, length: int) -> None:
        """Drop all tokens but the first `length` of the text."""
        first = 0 if self.window is None else max(0, length - (self.window - 1))
        if first < self.base:
            found = f"token {first} is needed, the first one kept is {self.base}"
            fix = "read the text again with a new cache."
            raise ShapeError("the window of what is left must still be there.", found, fix, where="KVCache.crop()")
        self.stop = length - self.base
