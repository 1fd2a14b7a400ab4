"""Walks through the calls of a block and finds what each of them adds to the residual stream, by numbers."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from attlas.recording.parts.calls import Call, is_norm, same_tensor
from attlas.recording.parts.fits import factors_of_sum, linear_weight, same, sampled, scaling_of
from attlas.recording.parts.reading import Reading, reading_of
from attlas.recording.parts.stream import Reader, Rotation, Scaling, Write


class UnknownLayoutError(Exception):
    """A block whose additions to the stream do not sum to what it returns; the text says where."""


@dataclass(frozen=True, eq=False)
class Pending:
    """An addition that no sum has contained yet.

    Parameters
    ----------
    write : Write
        What is added.
    out : Tensor
        The tensor that is added.
    holds_stream : bool
        Whether the stream in front of it is in that tensor, too.
    """

    write: Write
    out: Tensor
    holds_stream: bool = False


@dataclass(frozen=True)
class Attending:
    """What is known of an attention of a block.

    Parameters
    ----------
    path, layer, kind
        As of its `AttentionSite`.
    heads : int
        Number of its heads.
    """

    path: str
    layer: int
    kind: str
    heads: int


@dataclass(eq=False)
class Walk:
    """The stream within one block, as far as its calls have ended.

    Parameters
    ----------
    path : str
        Path of the block, for errors.
    number : int
        Number of its layer; -1 in front of all layers.
    stream : Tensor, optional, shape (batch, n, size)
        What it was given; None in front of all layers, where the stream is empty.
    shape : tuple of int
        Shape of the stream.
    before : int
        How many writes the stream has had.
    projections : mapping of int to str
        By the id of an output projection, the path of its attention.
    """

    path: str
    number: int
    stream: Tensor | None
    shape: tuple[int, int, int]
    before: int
    projections: Mapping[int, str]
    at: Tensor
    attending: dict[str, Attending] = field(default_factory=dict)
    writes: list[Write] = field(default_factory=list)
    readers: list[Reader] = field(default_factory=list)
    pending: list[Pending] = field(default_factory=list)
    norm: Call | None = None  # the last norm that read the stream
    norms: list[tuple[Call, int]] = field(default_factory=list)  # each of them, with the number of writes before it
    streams: list[Tensor] = field(default_factory=list)  # tensors that were the stream
    reading: Reading | None = None  # of the last attention that read it,
    reading_norm: Call | None = None  # and the norm in front of that

    @classmethod
    def begin(
        cls, path: str, number: int, stream: Tensor | None, like: Tensor, before: int, projections: Mapping[int, str]
    ) -> Walk:
        """Return the walk of a block that begins; `like` has the shape (batch, n, size) of the stream."""
        batch, count, size = like.shape
        at = sampled(count, like.device)
        streams = [] if stream is None else [stream]
        return cls(path, number, stream, (batch, count, size), before, projections, at, streams=streams)

    @property
    def count(self) -> int:
        """How many writes the stream holds."""
        return self.before + len(self.writes)

    # ------------------------------------------------------------------------------------------------------- calls

    def go_on(self, calls: Sequence[Call]) -> None:
        """Walk through some calls that have ended, in their order."""
        for call in calls:
            self._take(call)

    def _take(self, call: Call) -> None:
        """Walk through one call: a norm, an output projection, an attention, or something else that may be added."""
        if call.path in self.attending:
            self._attention(call)
        elif id(call.module) in self.projections:
            self._heads(call, self.projections[id(call.module)])
        elif is_norm(call.module) and call.inputs and self.rows(call.output) is not None:
            self._norm(call)
        elif (call.inner and not self._opened(call)) or not call.inner:
            self._branch(call)

    def _opened(self, call: Call) -> bool:
        """Walk through what is within a call, and return True, if that is a part of the stream and not apart from it."""
        attends = any(path.startswith(f"{call.path}.") for path in self.attending)
        trial = self._copied()
        trial.go_on(call.rest() if attends else call.inner)
        if not attends and len(trial.norms) == len(self.norms):
            return False
        vars(self).update(vars(trial))
        return True

    def _copied(self) -> Walk:
        """Return a walk that goes on from here."""
        other = copy.copy(self)
        other.writes, other.pending, other.norms = [*self.writes], [*self.pending], [*self.norms]
        other.streams = [*self.streams]
        return other

    def rows(self, t: Tensor | None) -> Tensor | None:
        """Return a tensor of the stream's size as (batch, n, size); None where it has another size."""
        batch, count, size = self.shape
        if t is None or t.shape[-1:] != (size,):
            return None
        if t.numel() == batch * count * size:
            return t.reshape(self.shape)
        if self.stream is None and t.numel() in (count * size, size) and t.ndim <= 3:  # positions, for all sequences
            return t.reshape(1, -1, size).expand(self.shape)
        return None

    def _norm(self, call: Call) -> None:
        """Walk through a norm: of the stream, or of something that is added to it."""
        given = self.rows(call.inputs[0])
        origin = self._origin(call.inputs[0])
        if given is not None and self._reaches(given):
            self.norm = call
            self.norms.append((call, self.count))
        elif origin is not None and (norm := self.scaling(call)) is not None:
            one = self.pending[origin]
            if one.write.norm is not None:
                norm = None
            write = replace(one.write, norm=norm) if norm is not None else self._unsplit(one.write, call)
            self.pending[origin] = Pending(write, self._need(call.output))

    def _heads(self, call: Call, site: str) -> None:
        """Walk through the output projection of an attention: what its heads add."""
        attending, linear = self.attending.get(site), linear_weight(call.module)
        out, given = self.rows(call.output), call.inputs[0] if call.inputs else None
        if attending is None or out is None or given is None:
            return
        cross = "cross " if attending.kind == "cross" else ""
        layer = attending.layer
        x = given.reshape(*self.shape[:2], -1) if given.numel() % (self.shape[0] * self.shape[1]) == 0 else None
        if linear is None or x is None or x.shape[-1] % attending.heads or x.shape[-1] != linear[0].shape[1]:
            write = Write(f"{cross}attention {layer}", f"{cross}attention", layer, out)
        else:
            write = Write(f"{cross}head {layer}", f"{cross}head", layer, x, *linear, attending.heads)
            some = x[:, self.at].to(linear[0].dtype) @ linear[0].mT
            some = some if linear[1] is None else some + linear[1]
            if not same(some.to(out.dtype), out[:, self.at]):  # an adapter adds to the map
                write = Write(f"{cross}attention {layer}", f"{cross}attention", layer, out)
        self.pending.append(Pending(write, out))

    def _attention(self, call: Call) -> None:
        """Walk through an attention: what its output projection gives is added, if it has one within it."""
        before = len(self.pending)
        for inner in call.inner:
            if id(inner.module) in self.projections:
                self._heads(inner, call.path)
        out = self.rows(call.output)
        if len(self.pending) > before and out is not None and same(out[:, self.at], self.pending[-1].out[:, self.at]):
            self.pending[-1] = replace(self.pending[-1], out=out)
        elif len(self.pending) == before and out is not None and call.path not in self.projections.values():
            one = self.attending[call.path]
            self.pending.append(Pending(Write(f"attention {one.layer}", "attention", one.layer, out), out))

    def _branch(self, call: Call) -> None:
        """Walk through any other module: what it returns may be added to the stream."""
        out = self.rows(call.output)
        if out is None:
            return
        origin = self._origin(*call.inputs)
        if origin is not None and not (self.stream is None and len(self.pending) > 1):
            one = self.pending[origin]
            if not same(out[:, self.at], one.out[:, self.at]):
                self.pending[origin] = Pending(self._unsplit(one.write, call), out)
            else:
                self.pending[origin] = replace(one, out=out)
            return
        holds = any(same_tensor(t, stream) for t in call.inputs[1:] for stream in self.streams)
        name, kind = self._name(call)
        self.pending.append(Pending(Write(name, kind, self.number, out), out, holds))

    def _name(self, call: Call) -> tuple[str, str]:
        """Return name and kind of what a module adds."""
        if self.number >= 0:
            return f"MLP {self.number}", "MLP"
        last = call.path.rpartition(".")[2]
        if "pos" in last or last == "wpe":
            return "position", "position"
        if isinstance(call.module, nn.Embedding) and not any(p.write.kind == "token" for p in self.pending):
            return "token", "token"
        return last.replace("_", " "), "embedding"

    def _origin(self, *tensors: Tensor) -> int | None:
        """Return which pending addition one of some tensors is."""
        for place, one in enumerate(self.pending):
            if any(same_tensor(one.out, t) for t in tensors):
                return place
        return None

    def _unsplit(self, write: Write, call: Call) -> Write:
        """Return an addition that was changed by a module: it is one part from here on."""
        name = write.name.replace("head", "attention")
        return Write(name, write.kind.replace("head", "attention"), write.layer, self._need(self.rows(call.output)))

    def _need(self, t: Tensor | None) -> Tensor:
        """Return a tensor of the stream's size."""
        rows = self.rows(t)
        if rows is None:
            raise UnknownLayoutError(f"{self.path}: a part of another size")
        return rows

    def scaling(self, call: Call) -> Scaling | None:
        """Return the norm that a call was, with the factors of its rows."""
        given, out = self.rows(call.inputs[0]), self.rows(call.output)
        return None if given is None or out is None else scaling_of(call.module, given, out, self.at)

    # -------------------------------------------------------------------------------------------------------- sums

    def _reaches(self, target: Tensor, *, any_factors: bool = True) -> bool:
        """Return whether a tensor is the stream, with what is pending or without, and note it as the stream if so."""
        goal = target[:, self.at]
        normed = None if self.norm is None else self._need(self.norm.output)
        bases = [(None, self.stream)] + ([(self.norm, normed)] if self.norm is not None else [])
        for pending in [self.pending, []] if self.pending else [[]]:
            for norm, base in bases:
                parts = [p.out for p in pending]
                total = sum((t[:, self.at] for t in parts), 0 if base is None else base[:, self.at])
                if isinstance(total, Tensor) and same(total, goal):
                    self._join(pending, [1.0] * len(pending), norm, target)
                    return True
        if self.pending and any_factors:
            for norm, base in bases:
                rest = goal if base is None else goal - base[:, self.at]
                factors = factors_of_sum(rest, [p.out[:, self.at] for p in self.pending])
                if factors is not None and any(factors):
                    self._join(self.pending, factors, norm, target)
                    return True
        return False

    def _join(self, pending: list[Pending], factors: list[float], norm: Call | None, target: Tensor) -> None:
        """Note that the stream is now a tensor: behind a norm, if one is named, and with what was pending."""
        if norm is not None:
            self._pass(norm)
        for one, factor in zip(pending, factors, strict=True):
            if factor:
                self.writes.append(replace(one.write, scale=one.write.scale * factor))
        self.pending = [] if pending else self.pending
        self.stream = target
        self.streams.append(target)

    def _pass(self, call: Call) -> None:
        """Note that the whole stream passes a norm."""
        norm = self.scaling(call)
        if norm is None:
            raise UnknownLayoutError(f"{call.path}: a norm that is none by its numbers")
        self.writes.append(Write(f"norm {call.path}", "norm", self.number, None, norm=norm))
        self.norm = None

    def end(self, out: Tensor) -> None:
        """End the block, which returned a tensor.

        Raises
        ------
        UnknownLayoutError
            If that is not the sum of what was added.
        """
        target = self._need(out)
        held = [p for p in self.pending if p.holds_stream]
        if held and same(held[-1].out[:, self.at], target[:, self.at]) and self.stream is not None:
            one, others = held[-1], [p for p in self.pending if p is not held[-1]]
            x = one.out - self.stream - sum(p.out for p in others)
            self._join([*others, Pending(replace(one.write, x=x), x)], [1.0] * len(self.pending), None, target)
        elif (
            self.norm is not None
            and not self.pending
            and same(self._need(self.norm.output)[:, self.at], target[:, self.at])
        ):
            self._pass(self.norm)
            self.stream = target
        elif not self._reaches(target):
            names = ", ".join(dict.fromkeys(p.write.name for p in self.pending)) or "nothing"
            raise UnknownLayoutError(f"{self.path} returns another sum than what it was given and {names}")
        self._rename()

    def _rename(self) -> None:
        """Number the additions of one block that have one name; without an attention the first of two is its mixer."""
        others = [place for place, write in enumerate(self.writes) if write.kind == "MLP"]
        if not self.attending and len(others) > 1:
            first = self.writes[others[0]]
            self.writes[others[0]] = replace(first, name=f"mixer {self.number}", kind="mixer")
            others = others[1:]
        for number, place in enumerate(others[1:]):
            self.writes[place] = replace(self.writes[place], name=f"MLP {self.number} ({number + 2})")

    # ------------------------------------------------------------------------------------------------------ reading

    def read(
        self, attending: Attending, calls: Sequence[Call], q: Tensor, k: Tensor, known: Sequence[Rotation]
    ) -> Reader | None:
        """Return how an attention that runs reads the stream; None where its modules do not show it.

        `calls` are those within it so far; q (batch, heads, n, d) and k (batch, key heads, n, d) are of the same tokens.
        """
        found: Reading | None = reading_of(calls, q, k, self.at, known)
        given = None if found is None else self.rows(found.given)
        if found is None or given is None:
            return None
        norm, count = None, self.count
        normed = [(call, before) for call, before in self.norms if self._gives(call, given)]
        if normed:
            call, count = normed[-1]
            norm = self.scaling(call)
            if norm is None:
                return None
        elif self.stream is None or not same(self.stream[:, self.at], given[:, self.at]):
            return None
        self.reading, self.reading_norm = found, normed[-1][0] if normed else None
        return Reader(attending.path, attending.layer, count, norm, found.q, found.k, found.rotation)

    def _gives(self, call: Call, given: Tensor) -> bool:
        """Return whether a call returned a tensor."""
        out = self.rows(call.output)
        return out is not None and (same_tensor(out, given) or same(out[:, self.at], given[:, self.at]))
