"""Which layers, heads and queries of a model are recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from attlas.errors import DtypeError, OutOfRangeError, ShapeError, kind, listed
from attlas.foundation.checks import is_integer
from attlas.recording.discovery import AttentionSite, ModelAttentions


class Selection:
    """Layers, heads and queries that are asked for; None is all of them.

    Parameters
    ----------
    layers : sequence of int or str, optional
        Numbers of the model's layers, negative ones from its end; paths of modules, for all attentions of a module, or
        with a number, ``"blocks.0.attn#1"``, for one of them; ``"cross.3"``, ``"cross"``.
    heads : sequence of int, or mapping, optional
        Heads of every layer, or layer to heads.
    queries : slice or range, optional
        Places in the text; negative ends of a slice count from the end of each call.
    channels : slice, range, sequence of int or int, optional
        Channels of layers that have one matrix for each; the default is none.
    """

    def __init__(
        self, layers: Any, heads: Any, queries: Any = None, where: str = "record()", channels: Any = None
    ) -> None:
        self.where = where
        self.layers = None if layers is None else _layer_list(layers)
        self.by_layer: dict[int | str, tuple[int, ...]] = {}
        self.heads: tuple[int, ...] | None = None
        if isinstance(heads, Mapping):
            keys = _layer_list(heads.keys())
            self.by_layer = {key: _head_list(heads[key]) for key in keys}
            self.layers = keys if layers is None else self.layers
        elif heads is not None:
            self.heads = _head_list(heads)
        if queries is not None:
            _check_queries(queries)
        self.queries: slice | range | None = queries
        self.channels: slice | range | tuple[int, ...] = () if channels is None else _checked_channels(channels)

    @property
    def named(self) -> tuple[int | str, ...]:
        """Numbers and names of layers, in `layers` or as keys of `heads`."""
        return tuple(dict.fromkeys((*(self.layers or ()), *self.by_layer)))

    @property
    def counts_from_the_end(self) -> bool:
        """Whether a layer is counted from the end."""
        return any(isinstance(name, int) and name < 0 for name in self.named)

    def check(self, attentions: ModelAttentions, reused: Iterable[AttentionSite] = (), *, ended: bool = True) -> None:
        """Raise an OutOfRangeError if a name fits none of a model's attentions.

        Parameters
        ----------
        attentions : ModelAttentions
            The attentions of the model.
        reused : iterable of AttentionSite
            Further layers, which modules that are used again gave.
        ended : bool
            Whether the model has run, so that every module that attends is known.
        """
        sites = [*attentions.sites.values(), *reused]
        counts = _layer_counts(attentions, sites)
        for name in self.unmatched(attentions, sites):
            may_attend = not ended and isinstance(name, str) and attentions.has_module(name)
            if not may_attend:
                modules, last = listed(site.path for site in sites), sites[-1]
                rule = "each layer must be one of the model's attentions."
                given = {"attentions": _layers_in_words(sites, counts), "modules": modules}
                fix = f"layers=[{last.layer}], layers=[{last.path!r}] or layers=[{last.key!r}]"
                found = f"layer {name!r}{_in_its_place(name, attentions)}"
                raise OutOfRangeError(rule, found, fix, arguments=given, where=self.where)

    def unmatched(self, attentions: ModelAttentions, sites: Sequence[AttentionSite]) -> list[int | str]:
        """Return which numbers and names of layers mean none of some attentions of a model."""
        counts = _layer_counts(attentions, sites)
        return [name for name in self.named if not any(_names_site(name, site, counts) for site in sites)]

    def matching(self, site: AttentionSite, attentions: ModelAttentions) -> tuple[int | str, ...]:
        """Return which numbers and names of layers mean an attention of a model."""
        return tuple(name for name in self.named if _names_site(name, site, attentions.counts))

    def includes(self, site: AttentionSite, attentions: ModelAttentions) -> bool:
        """Return whether an attention of a model is recorded."""
        return self.layers is None or any(_names_site(name, site, attentions.counts) for name in self.layers)

    def heads_of(self, site: AttentionSite, attentions: ModelAttentions, count: int) -> tuple[int, ...]:
        """Return which of the `count` heads of an attention are recorded.

        Raises
        ------
        OutOfRangeError
            If it has no such head.
        """
        chosen = self.heads
        for name, heads in self.by_layer.items():
            if _names_site(name, site, attentions.counts):
                chosen = heads
        if chosen is None:
            return tuple(range(count))
        wrong = [head for head in chosen if not -count <= head < count]
        if wrong:
            rule, found = "each head must be one of the layer's.", f"head {wrong[0]}, the layer has {count}"
            fix = f"use heads from 0 to {count - 1}, or from {-count} to -1."
            raise OutOfRangeError(rule, found, fix, layer=f"{site.key} ({site.path})", where=self.where)
        return tuple(sorted({head % count for head in chosen}))

    def channels_of(self, count: int, *, ended: bool = True, site: AttentionSite | None = None) -> list[int]:
        """Return the chosen channels of the first `count` of a layer, ascending; `ended` says that it has no more.

        Raises
        ------
        OutOfRangeError
            If a layer that has no more has no such channel, or none that was chosen.
        """
        asked = self.channels
        if isinstance(asked, slice):
            chosen = list(range(count)[asked])
            wrong: list[int | slice] = [] if chosen else [asked]
        else:
            chosen = sorted({channel for channel in asked if channel < count})
            wrong = [channel for channel in asked if channel >= count]
        if ended and wrong and site is not None:
            rule, found = "each channel must be one of the layer's.", f"channels = {wrong[0]!r}, the layer has {count}"
            fix = f"channels=range(0, {min(count, 8)}), or numbers from 0 to {count - 1}."
            raise OutOfRangeError(rule, found, fix, layer=f"{site.key} ({site.path})", where=self.where)
        return chosen

    def rows(self, first_query: int, m: int) -> range:
        """Return which of the m queries of a call are recorded; the first stands at `first_query` in the text."""
        asked, stop_all = self.queries, first_query + m
        if asked is None:
            return range(m)
        start = first_query if asked.start is None else asked.start
        stop = stop_all if asked.stop is None else asked.stop
        if isinstance(asked, slice):
            start, stop = (end + stop_all if end < 0 else end for end in (start, stop))
        start, stop = max(start, first_query) - first_query, min(stop, stop_all) - first_query
        return range(start, max(start, stop))


def _layer_counts(attentions: ModelAttentions, sites: Iterable[AttentionSite]) -> dict[str, int]:
    """Return the number of layers of each kind, also where modules that are used again give further ones."""
    counts = dict(attentions.counts)
    for site in sites:
        counts[site.kind] = max(counts[site.kind], site.layer + 1)
    return counts


def _layers_in_words(sites: Iterable[AttentionSite], counts: dict[str, int]) -> str:
    """Return the layers of each kind in words.

    "self.0 to self.3", or "self.3, self.7 of 8 layers" where some do not attend.
    """
    words = []
    for name, count in counts.items():
        own = sorted({site.layer for site in sites if site.kind == name})
        if own == list(range(count)):
            words += [f"{name}.0 to {name}.{count - 1}"] if count else []
        elif own:
            words.append(f"{listed(f'{name}.{layer}' for layer in own)} of {count} layers")
    return ", ".join(words)


def _in_its_place(name: int | str, attentions: ModelAttentions) -> str:
    """Return the words that say what a layer without attention has in its place; empty for other layers."""
    for family, layers in attentions.without_attention().items():
        number = name + attentions.counts[family] if isinstance(name, int) and name < 0 else name
        for layer, what in layers.items():
            if number in (layer, f"{family}.{layer}"):
                return f", {what} without attention weights"
    return ""


def _names_site(name: int | str, site: AttentionSite, counts: dict[str, int]) -> bool:
    """Return whether a number or name of `layers` means an attention; `counts` has the number of layers per kind."""
    if isinstance(name, int):
        return site.layer == (name if name >= 0 else counts[site.kind] + name)
    names = (site.module, f"{site.module}#{site.number}", site.key, site.kind)
    return name in names or site.module.startswith(name + ".")


def _layer_list(layers: Any) -> tuple[int | str, ...]:
    """Return `layers` as a tuple, or raise a DtypeError."""
    items = tuple(layers) if isinstance(layers, Iterable) and not isinstance(layers, str) else (layers,)
    wrong = [item for item in items if not (is_integer(item) or isinstance(item, str))]
    if wrong:
        rule = "layers must be numbers or names of attentions."
        fix = 'layers=[0, -1], layers=["cross.3"] or layers=["model.layers.3.self_attn"]'
        raise DtypeError(rule, kind(wrong[0]), fix, layers=repr(layers)[:80])
    return items


def _head_list(heads: Any) -> tuple[int, ...]:
    """Return `heads` as a tuple, or raise a DtypeError."""
    items = tuple(heads) if isinstance(heads, Iterable) else (heads,)
    if not items or not all(map(is_integer, items)):
        found, fix = kind(heads) if items else "no head", "heads=[0, 3], or heads={layer: [0, 3]} for some layers."
        raise DtypeError("heads must be whole numbers, at least one.", found, fix, heads=repr(heads)[:80])
    return items


def _checked_channels(channels: Any) -> slice | range | tuple[int, ...]:
    """Return channels as a slice, a range or a tuple, or raise a DtypeError."""
    fix = "channels=[0, 5], channels=range(8), or channels=slice(None) for all."
    if isinstance(channels, slice):
        ends = (channels.start, channels.stop, channels.step)
        if all(end is None or (is_integer(end) and end >= 0) for end in ends) and channels.step != 0:
            return channels
        raise DtypeError("a slice of channels must have ends from 0 on.", repr(channels), fix, where="record()")
    items = tuple(channels) if isinstance(channels, Iterable) and not isinstance(channels, str) else (channels,)
    wrong = [item for item in items if not is_integer(item) or item < 0]
    if wrong or not items:
        found = f"{wrong[0]!r}" if wrong else "no channel"
        raise DtypeError("channels must be whole numbers from 0 on, at least one.", found, fix, where="record()")
    return channels if isinstance(channels, range) else items


def _check_queries(queries: Any) -> None:
    """Raise a ShapeError unless `queries` is a slice or a range of whole numbers without a step."""
    fits = isinstance(queries, slice | range) and queries.step in (None, 1)
    if not (fits and all(end is None or is_integer(end) for end in (queries.start, queries.stop))):
        rule = "queries must be a slice or a range of whole numbers, without a step."
        raise ShapeError(rule, f"queries = {queries!r}", "queries=slice(-32, None)", where="record()")
