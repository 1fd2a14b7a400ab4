"""Follows the residual streams of a running model, and keeps what the parts of queries and keys are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from attlas.errors import DtypeError, RecordingError, ShapeError, kind
from attlas.foundation.checks import is_integer
from attlas.foundation.compat import in_backward
from attlas.recording.atlas.streams import Reader, Rotation, Stream, Write, mapped_rows
from attlas.recording.discovery import AttentionSite, ModelAttentions
from attlas.recording.hooks import AttentionCall, is_recording
from attlas.recording.parts.calls import Call, Calls, is_norm, same_tensor, watched_in
from attlas.recording.parts.fits import same
from attlas.recording.parts.removal import made_without
from attlas.recording.parts.walk import Attending, UnknownLayoutError, Walk
from attlas.recording.passes import Passes
from attlas.recording.sequence import RetentionPolicy
from attlas.recording.snapshot import detached_tensor
from attlas.recording.traced import Hooks
from attlas.recording.values import output_projection

KeptRows: TypeAlias = "Tensor | slice"  # positions in the text: these, or a stretch; slice(None) for all
_LOOSE = (nn.Embedding, nn.Linear)  # what may make the stream in front of all layers


@dataclass(eq=False)
class _Running:
    """The stream of one list of layers in the pass that runs."""

    writes: list[Write] = field(default_factory=list)
    readers: list[Reader] = field(default_factory=list)
    value: Tensor | None = None  # what the last block returned
    blocks: int = 0
    first: int = 0
    count: int = 0
    kept: int = 0  # how many writes are kept, without the rows that are not


class PartsRecorder:
    """The residual streams of a model, pass by pass.

    Parameters
    ----------
    model : nn.Module
        The model.
    attentions : ModelAttentions
        Its attentions.
    keep : callable
        Returns a tensor (batch, n, ...) as it is kept: on another device, on disk.
    rows : Tensor of int, or slice
        Positions of the rows to keep.
    """

    def __init__(
        self, model: nn.Module, attentions: ModelAttentions, keep: Callable[[Tensor], Tensor], rows: KeptRows
    ) -> None:
        self._model, self._keep, self._rows = model, keep, rows
        sites, lists = attentions.blocks()
        self._blocks, watched = _blocks_of(model, sites, lists)
        for path, module in model.named_modules():
            if not any(path.startswith(f"{name}.") for name in lists) and (
                isinstance(module, _LOOSE) or is_norm(module)
            ):
                watched[id(module)] = path, module
        self._projections: dict[int, str] = {}
        for path in sites:
            projection = output_projection(model, path)
            if projection is not None:
                self._projections[id(projection)] = path
        self._modules = [module for _, module in watched.values()]
        self._calls = Calls({key: path for key, (path, _) in watched.items()}, self._ended)
        self._walks: dict[int, Walk] = {}  # by the id of a running call of a block
        self._loose: list[Call] = []  # calls outside of blocks, since the last block
        self._running: dict[str, _Running] = {}
        self._rotations: list[Rotation] = []  # of the running pass
        self._turns: dict[int, Tensor] = {}  # by the id of their turns: these as they are kept
        self._texts: dict[str, list[Stream]] = {}  # by list: the streams of each text
        self._problem: UnknownLayoutError | None = None

    # ------------------------------------------------------------------------------------------------------- hooks

    def add_hooks(self, hooks: Hooks) -> None:
        """Add the hooks "begin part" and "end part" of the modules that are followed."""
        hooks.add(self._modules, "begin part", "before")
        hooks.add(self._modules, "end part", "after", always=True)

    def begin_pass(self) -> None:
        """Begin a pass of the model."""
        self._calls.clear()
        self._walks.clear()
        self._loose, self._running, self._rotations, self._turns, self._problem = [], {}, [], {}, None

    def end_pass(self) -> None:
        """End a pass: keep its streams.

        Raises
        ------
        RecordingError
            If the layout of the model is not known.
        """
        if self._problem is not None:
            raise self._unknown_layout(str(self._problem))
        for name, one in self._running.items():
            if one.readers:
                writes = one.writes[: max(reader.count for reader in one.readers)]
                self._add(
                    name, Stream(writes, one.readers, one.first, one.count, self._kept_rows(one.first, one.count))
                )
        self.begin_pass()

    def _unknown_layout(self, found: str) -> RecordingError:
        """Return the error of a model whose parts cannot be told apart."""
        rule = (
            "parts need a model whose stream is a sum of what layers add, and whose queries and keys are linear in it."
        )
        fix = "attlas.record(model) without parts; a module that adds to the stream must return what it adds."
        return RecordingError(rule, found, fix, model=type(self._model).__name__)

    def _kept_rows(self, first: int, count: int) -> Tensor | None:
        """Return the positions of the rows that are kept of some rows; None for all."""
        if self._rows == slice(None):
            return None
        if isinstance(self._rows, slice):
            return torch.arange(first, first + count)[_clipped(self._rows, first)]
        return self._rows[(self._rows >= first) & (self._rows < first + count)]

    def _add(self, name: str, stream: Stream) -> None:
        """Add the stream of a pass: it goes on with the text before, or begins another."""
        texts = self._texts.setdefault(name, [])
        last = texts[-1] if texts else None
        if last is None or last.first + last.count != stream.first:
            texts.append(stream)
            return
        if [w.name for w in last.writes] != [w.name for w in stream.writes]:
            raise self._unknown_layout("what is added to the stream differs between two passes of one text")
        joined: dict[tuple[int, ...], Tensor] = {}

        def join(*parts: Tensor) -> Tensor:
            """Return rows of two passes as one tensor; those of several layers once."""
            key = tuple(map(id, parts))
            if key not in joined:
                joined[key] = self._keep(torch.cat(parts, dim=1))
            return joined[key]

        whole = mapped_rows(join, last, stream)
        rows = None if last.rows is None or stream.rows is None else torch.cat([last.rows, stream.rows])
        texts[-1] = replace(whole, count=last.count + stream.count, rows=rows)

    def streams(self) -> list[Stream]:
        """Return the streams of all texts.

        Raises
        ------
        RecordingError
            If none was recorded.
        """
        found = [stream for texts in self._texts.values() for stream in texts]
        if not found:
            raise self._unknown_layout("no block of layers with a self-attention of a softmax ran outside of a program")
        return found

    def _kept(self, thing: Any, first: int) -> Any:
        """Return a write or a reader whose rows are as they are kept."""

        def keep(t: Tensor) -> Tensor:
            """Return a tensor as it is kept; turns that several layers have are kept once."""
            if id(t) in self._turns:
                return self._turns[id(t)]
            rows = self._kept_rows(first, t.shape[1])
            kept = self._keep(t if rows is None else t.index_select(1, (rows - first).to(t.device)))
            if any(t is rotation.turns for rotation in self._rotations):
                self._turns[id(t)] = kept
            return kept

        return mapped_rows(keep, thing)

    def begin(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """Note that a call of a module begins; that of a block is a stretch of its stream."""
        call = self._calls.begin(module, args, kwargs)
        block = self._blocks.get(id(module))
        if block is not None:
            self._guarded(lambda: self._begin_block(call, block))

    def end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note that a call of a module has ended."""
        self._calls.end(module, args, output)

    def _guarded(self, step: Callable[[], None]) -> None:
        """Take a step; note where the layout of the model is not known, which is told when the pass has ended."""
        if self._problem is None:
            try:
                with torch.no_grad():
                    step()
            except UnknownLayoutError as problem:
                self._problem = problem

    def _begin_block(self, call: Call, block: tuple[str, str, int]) -> None:
        """Begin the walk through a block; in front of the first one, walk through what made the stream."""
        name, path, number = block
        given = next((t for t in call.inputs if t.ndim == 3), None)
        if given is None:
            raise UnknownLayoutError(f"{call.path} is given no tensor of three axes")
        one = self._running.setdefault(name, _Running())
        if one.value is None:
            one.writes += self._embeddings(given, path)
        elif not same_tensor(one.value, given) and not same(one.value, given):
            one.writes.append(Write(f"between layers, before {number}", "other", number, given - one.value))
        self._loose = []
        if one.blocks >= sum(own == name for own, _, _ in self._blocks.values()):
            number = one.blocks  # a block that is used again is another layer
        one.blocks += 1
        self._walks[id(call)] = Walk.begin(path, number, given, given, len(one.writes), self._projections)

    def _embeddings(self, given: Tensor, path: str) -> list[Write]:
        """Return what the stream in front of the first block is made of; one part where that is not found."""
        walk = Walk.begin(path, -1, None, given, 0, {})
        try:
            walk.go_on(self._loose)
            walk.end(given)
        except UnknownLayoutError:
            return [Write("embeddings", "embedding", -1, given)]
        return walk.writes

    def _ended(self, call: Call) -> None:
        """Take a call that has ended: that of a block is complete, one outside of all blocks may be an embedding."""
        if id(call) in self._walks:
            self._guarded(lambda: self._end_block(call))
        elif call.around is None:
            self._loose.append(call)

    def _end_block(self, call: Call) -> None:
        """End the walk through a block, and keep what was added in it."""
        walk = self._walks.pop(id(call))
        if call.output is None:
            return
        walk.go_on(call.rest())
        walk.end(call.output)
        one = self._running[self._blocks[id(call.module)][0]]
        one.writes += walk.writes
        one.readers += [self._kept(reader, one.first) for reader in walk.readers]
        one.value = walk.rows(call.output)
        if one.readers:  # the position of the first row is known
            one.writes[one.kept :] = [self._kept(write, one.first) for write in one.writes[one.kept :]]
            one.kept = len(one.writes)

    # --------------------------------------------------------------------------------------------------- attentions

    def attend(self, call: AttentionCall, site: AttentionSite, first_query: int) -> None:
        """Take an attention that has its weights: how it reads the stream."""
        self._guarded(lambda: self._attend(call, site, first_query))

    def _attend(self, call: AttentionCall, site: AttentionSite, first_query: int) -> None:
        """Find how an attention reads the stream."""
        around = self._calls.running(self._blocks)
        if around is None or id(around) not in self._walks:
            return
        walk, weights = self._walks[id(around)], call.matrix.weights
        own = Attending(site.path, site.layer, site.kind, weights.shape[1])
        walk.attending[site.module] = own
        if site.kind in ("cross", "linear") or weights.softmax is None:
            return
        path = self._calls.within(around)
        for outer in path:
            if outer.module is not call.module:  # what has ended within the modules around the attention
                walk.go_on(outer.rest())
        q, k = weights.softmax.problem.q, weights.softmax.problem.k
        one = self._running[self._blocks[id(around.module)][0]]
        one.first, one.count = first_query, q.shape[2]
        inner = next((one.inner for one in path if one.module is call.module), [])
        reader = walk.read(own, inner, q, k[:, :, k.shape[2] - q.shape[2] :], self._rotations)
        if reader is None:
            raise UnknownLayoutError(f"{site.path} does not show how its queries and keys are made of the stream")
        if reader.rotation is not None and all(reader.rotation is not known for known in self._rotations):
            self._rotations.append(reader.rotation)
        walk.readers.append(reader)

    # ------------------------------------------------------------------------------------------------ interventions

    def made_without(self, path: str, source: str, *, keys: bool) -> Tensor:
        """Return queries (or keys) of the attention that runs, made again without a part, (batch, heads, n, d).

        Raises
        ------
        RecordingError
            If the layout of the model is not known.
        """
        around = self._calls.running(self._blocks)
        if self._problem is not None or around is None or id(around) not in self._walks:
            raise self._unknown_layout(str(self._problem or f"{path} is in no list of layers"))
        walk = self._walks[id(around)]
        writes = [*self._running[self._blocks[id(around.module)][0]].writes, *walk.writes]
        reader = next((reader for reader in walk.readers if reader.name == path), None)
        return made_without(walk, writes[: len(writes) if reader is None else reader.count], source, keys=keys)


def checked_parts(
    parts: Any, values: bool | Literal["norms"], keep: str, queries: slice | range | None
) -> tuple[KeptRows, Literal[True]]:
    """Return the rows of which parts are kept, and which values are: those of heads whose parts are.

    Raises
    ------
    ShapeError
        If other settings keep no queries and keys of whole texts.
    """
    rows = rows_of_parts(parts)
    if keep == "statistics" or queries is not None:
        rule, found = (
            "parts belong to recorded queries and keys of whole texts.",
            f"keep = {keep!r}, queries = {queries!r}",
        )
        raise ShapeError(rule, found, 'parts=True, keep="cpu", without queries')
    return rows, True


def stored_rows(t: Tensor, policy: RetentionPolicy) -> Tensor:
    """Return a tensor of rows where a recording keeps its tensors."""
    t = detached_tensor(t, policy.device)
    return t if policy.disk is None else policy.disk.mapped(t)


class PartsHearing:
    """Base of what follows a model and its residual stream: the hooks of the modules that write to it."""

    _passes: Passes
    _parts: PartsRecorder | None = None

    @property
    def _hears_parts(self) -> bool:
        """Whether a module that runs is one of a pass that is followed."""
        return self._passes.inside and is_recording(self) and not in_backward()  # type: ignore[arg-type]  # a Listener

    def _begin_part(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """Note that a module of the residual stream begins."""
        if self._parts is not None and self._hears_parts:
            self._parts.begin(module, args, kwargs)

    def _end_part(self, module: nn.Module, args: Any, output: Any) -> None:
        """Note that a module of the residual stream has ended; `output` is None after an error."""
        if self._parts is not None and self._hears_parts:
            self._parts.end(module, args, output)


def rows_of_parts(rows: Any) -> KeptRows:
    """Return the rows to keep as positions, or a slice.

    Raises
    ------
    DtypeError
        If they are neither.
    ShapeError
        If a position is negative, or there is none.
    """
    if rows is True or (isinstance(rows, slice) and rows == slice(None)):
        return slice(None)
    rule, fix = "parts must be True, a slice, or positions in the text.", "parts=True, or parts=[1051, 1058]"
    if isinstance(rows, slice):
        if rows.step not in (None, 1) or any(
            end is not None and not (is_integer(end) and end >= 0) for end in (rows.start, rows.stop)
        ):
            raise ShapeError(rule, f"parts = {rows}", "parts=slice(100, 200)")
        return rows
    try:
        places = torch.as_tensor(rows if isinstance(rows, Tensor) else list(rows), device="cpu")
    except (TypeError, ValueError, RuntimeError):
        raise DtypeError(rule, kind(rows), fix) from None
    if (places.is_floating_point() and places.numel()) or places.dtype is torch.bool or places.ndim > 1:
        raise DtypeError(rule, f"{places.dtype} of shape {tuple(places.shape)}", fix)
    if not places.numel() or int(places.min()) < 0:
        raise ShapeError("parts must name rows, counted from the first token.", f"parts = {places.tolist()}", fix)
    found: Tensor = places.long().flatten().unique()
    return found


def _clipped(rows: slice, first: int) -> slice:
    """Return a slice of positions as one of rows that begin at a position."""
    start = max((rows.start or 0) - first, 0)
    return slice(start, None if rows.stop is None else max(rows.stop - first, 0))


def _blocks_of(
    model: nn.Module, sites: Sequence[str], lists: Mapping[str, int]
) -> tuple[dict[int, tuple[str, str, int]], dict[int, tuple[str, nn.Module]]]:
    """Return the blocks of a model by id, with list, path and number; and the modules to watch by id, with paths."""
    blocks: dict[int, tuple[str, str, int]] = {}
    watched: dict[int, tuple[str, nn.Module]] = {}
    for name, first in lists.items():
        for place, (part, block) in enumerate(model.get_submodule(name).named_children()):
            path = f"{name}.{part}" if name else part
            blocks[id(block)] = name, path, first + place
            watched[id(block)] = path, block
            watched |= {id(module): (own, module) for own, module in watched_in(block, path, sites)}
    return blocks, watched
