"""The problem: the tokens, score, mask and sink of one attention matrix, as data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import InitVar, dataclass, field, fields, replace
from functools import wraps
from typing import Any, ClassVar, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from attlas.engine.held import held_and_read, holds_all, runs_of_rows, tensors_of
from attlas.errors import ModifiedError, public
from attlas.foundation.checks import accumulation_dtype, all_finite, holds_numbers, waits_for
from attlas.foundation.compat import cached_property, tracing
from attlas.foundation.devices import IdCopies, answers_kept, to_device
from attlas.foundation.precision import FULL, FULL_FLOAT32, SETTING_OF, setting
from attlas.foundation.tiles import Tile
from attlas.masks.base import Mask
from attlas.scores.base import Dot, Score, Tokens

_SMALL_LOGIT = 24.0  # exp of it, squared and summed over a million keys, is far from any end of float32
_MANY_QUERIES = 64


F = TypeVar("F", bound=Callable[..., Any])


def full_precision(f: F) -> F:
    """Let a function of a problem or request run on its device, and multiply and sum in the problem's dtype.

    Kernels are launched on the current device, which may be another one of several GPUs. ``torch.autocast`` is switched
    off, and so are settings by which torch rounds the factors of float32 products. A program that torch compiles keeps
    the latter: they are those of the process that runs it.
    """

    @wraps(f)
    def run(problem: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call `f` where device and settings are right; where one is not, change it and call `run` again."""
        kind = problem.device.type
        several = kind == "cuda" and not torch.compiler.is_compiling() and torch.cuda.device_count() > 1
        if several and torch.cuda.current_device() != problem.device.index:
            with torch.cuda.device(problem.device):
                return run(problem, *args, **kwargs)
        if kind != "meta" and torch.is_autocast_enabled(kind):
            with torch.autocast(kind, enabled=False):
                return run(problem, *args, **kwargs)
        has_setting = kind in SETTING_OF and not torch.compiler.is_compiling()
        # Another thread may have switched to full precision, and may switch back while this one multiplies.
        if has_setting and (FULL_FLOAT32.users or setting(*SETTING_OF[kind]) not in FULL):
            with FULL_FLOAT32:
                return f(problem, *args, **kwargs)
        return f(problem, *args, **kwargs)

    return cast(F, run)


class Version(NamedTuple):
    """A tensor with its version counter (torch increases it at each change in place) and its address."""

    name: str
    tensor: Tensor
    changes: int | None
    address: int

    @property
    def is_outdated(self) -> bool:
        """Whether the tensor was changed in place since."""
        return self[2:] != version_of(self.name, self.tensor)[2:]


def version_of(name: str, t: Tensor) -> Version:
    """Return a tensor with its version counter and its address.

    A later version that differs tells of a change in place.
    """
    # Tensors of inference mode do not count their changes.
    return Version(name, t, None if t.is_inference() else t._version, t.data_ptr())


@dataclass(frozen=True, eq=False)
class Problem:
    """One softmax(score(Q, K)): everything that fixes the result, and nothing about how to compute it.

    Parameters
    ----------
    q : Tensor, shape (batch, heads, m, d)
        Queries.
    k : Tensor, shape (batch, key heads, n, dk)
        Keys.
    score : Score
        How alike they are.
    mask : Mask, optional
        Which pairs may attend; None allows all.
    sink : Tensor, optional, shape (heads,)
        One more logit a head in the denominator, without a value.
    ids : tuple of Tensor, shapes (batch,) and (heads,), optional
        Batches and heads as the user counts them, int64 on the CPU; by default all from 0 on.
    partial : bool
        Whether a log-sum-exp that comes with it counts keys, or a sink, that it does not have: then rows sum to less
        than 1.
    detached : bool
        Whether the tensors of the score count as numbers, and get no gradient.
    read : tuple of Tensor
        Tensors that code of the user in the score reads, and that the attributes of the score do not hold.
    versions : tuple of Version
        The tensors as they were when the matrix was made, by default as they are. `check_unchanged` compares with it.
    given : sequence of (str, Tensor)
        Further tensors that must not change, with their names: those that queries and keys were made of.

    Attributes
    ----------
    shape : tuple of int
        Sizes of the matrix: batch, heads, m, n.
    dtype : torch.dtype
        Dtype that scores and sums are computed in.
    device : torch.device
        Device of the tokens.
    has_numbers : bool
        Whether the tokens have numbers in memory; tensors of the meta device do not.
    signed : bool
        Whether weights may be negative: those of a softmax never are.
    """

    signed: ClassVar[bool] = False
    q: Tensor
    k: Tensor
    score: Score
    mask: Mask | None
    sink: Tensor | None
    ids: tuple[Tensor, Tensor] | None = None
    partial: bool = field(default=False, kw_only=True)
    detached: bool = field(default=False, kw_only=True)
    read: tuple[Tensor, ...] = field(default=(), kw_only=True)
    versions: tuple[Version, ...] = field(default=(), kw_only=True)
    given: InitVar[Sequence[tuple[str, Tensor]]] = field(default=(), kw_only=True)
    shape: tuple[int, int, int, int] = field(init=False, repr=False)
    dtype: torch.dtype = field(init=False, repr=False)
    device: torch.device = field(init=False, repr=False)
    has_numbers: bool = field(init=False, repr=False)

    def __post_init__(self, given: Sequence[tuple[str, Tensor]]) -> None:
        q, k = self.q, self.k
        # A frozen object takes them by this way only, and torch.compile follows it.
        object.__setattr__(self, "shape", (*q.shape[:3], k.shape[2]))
        object.__setattr__(self, "dtype", accumulation_dtype(q.dtype))
        object.__setattr__(self, "device", q.device)
        object.__setattr__(self, "has_numbers", holds_numbers(q) and holds_numbers(k))
        if self.versions or tracing() or not self.has_numbers:
            return
        versions = [version_of("q", q), version_of("k", k)]
        for name, t in given:
            if t is not q and t is not k and holds_numbers(t) and t.data_ptr() not in (q.data_ptr(), k.data_ptr()):
                versions.append(version_of(name, t))
        if self.sink is not None:
            versions.append(version_of("sink", self.sink))
        held, read = held_and_read(self.score, self._score_cells, self.shape, self.tile, (q, k))
        of_score = (*held, *read)
        versions += [version_of("score", t) for t in of_score]
        if self.mask is not None:
            held, seen = held_and_read(self.mask, self.mask.allows, self.shape, self.tile)
            versions += [version_of("mask", t) for t in (*held, *seen)]
        vars(self).update(read=read, score_tensors=of_score, versions=tuple(versions))

    @public("a copy of A")
    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy or a pickle holds; an error if a tensor was changed in place since attend()."""
        self.check_unchanged()
        asked_again = ("versions", "read")
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init and f.name not in asked_again}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # After unpickling or a deep copy.
        # A copy has tensors of its own, and is asked about those.
        vars(self).update(state, read=(), versions=())
        self.__post_init__(())

    @full_precision
    def _score_cells(self, at: Tile) -> Tensor:
        """Return the log-weights of a few cells: run to see which tensors the score reads, not for its numbers."""
        rows, columns = (
            torch.arange(span.start, span.stop, device="cpu") if index is None else index
            for span, index in ((at.rows, at.row_index), (at.columns, at.column_index))
        )

        def part(t: Tensor, index: Tensor) -> Tensor:
            return t[:, :, to_device(index, t.device)].to(self.dtype)

        try:
            q, k = self.score.project(part(self.q, rows), part(self.k, columns))
        except Exception:  # noqa: BLE001 - it may need all tokens, and raises again where it is wrong
            q = tree_map(lambda t: part(t, rows), self.tokens[0])
            k = tree_map(lambda t: part(t, columns), self.tokens[1])
        b, h, _ = at.place
        q, k = tree_map(lambda t: spread_heads(t, self.shape[1])[b, h], (q, k))
        logits: Tensor = self.score(q, k, at)
        return logits

    def check_unchanged(self) -> None:
        """Raise a ModifiedError if a tensor was changed in place since the matrix was made.

        What is kept from the first read on, such as the log-sum-exp, would belong to other numbers.
        """
        if tracing():
            return
        for name, t, changes, address in self.versions:
            if t.data_ptr() != address or (changes is not None and t._version != changes):
                rule = "the tensors of a matrix must not change after attend()."
                fix = "call attend() again, or attend(q.clone(), k.clone()) before they change."
                raise ModifiedError(rule, f"{name} was changed in place", fix, arguments={name: t})

    @property
    def leaves(self) -> list[Tensor]:
        """The tensors that can get a gradient: tokens, sink, and the tensors of the score."""
        sink = [] if self.sink is None else [self.sink]
        return [self.q, self.k, *sink, *self.parameters]

    @cached_property
    def score_tensors(self) -> tuple[Tensor, ...]:
        """The tensors that the score holds, and those that code of the user in it reads elsewhere."""
        return (*tensors_of(self.score), *self.read)

    @property
    def parameters(self) -> list[Tensor]:
        """The tensors of the score that get a gradient."""
        return [] if self.detached else [t for t in self.score_tensors if t.requires_grad]

    @property
    def requires_grad(self) -> bool:
        """Whether one of `leaves` gets a gradient."""
        of_tokens = self.q.requires_grad or self.k.requires_grad
        of_sink = self.sink is not None and self.sink.requires_grad
        return of_tokens or of_sink or bool(self.score_tensors and self.parameters)

    def recording(self) -> AbstractContextManager[Any]:
        """Return the context in which the score is evaluated: without a graph if the problem is detached."""
        return torch.no_grad() if self.detached else nullcontext()

    @property
    def is_symbolic(self) -> bool:
        """Whether everything must be computed by torch's own operations.

        True inside torch.compile and the transforms of torch, and for tensors without numbers of their own, such as
        those of the meta device.
        """
        return tracing() or not self.has_numbers

    @property
    def needs_graph(self) -> bool:
        """Whether computations on the matrix must record a graph for a gradient."""
        # The log-sum-exp of a part counts keys that the part does not have: no gradient could reach those.
        return self.is_symbolic or (torch.is_grad_enabled() and not self.partial and self.requires_grad)

    @cached_property
    def runs_own_code(self) -> bool:
        """Whether the score runs code of the user, which may read tensors that its attributes do not hold."""
        return not holds_all(self.score)

    @cached_property
    def batch_ids(self) -> Tensor:
        """Batches as the user counts them, (batch,) int64 on the CPU."""
        return torch.arange(self.q.shape[0], device="cpu") if self.ids is None else self.ids[0]

    @cached_property
    def head_ids(self) -> Tensor:
        """Heads as the user counts them, (heads,) int64 on the CPU."""
        return torch.arange(self.q.shape[1], device="cpu") if self.ids is None else self.ids[1]

    @cached_property
    def id_copies(self) -> IdCopies:
        """Batches and heads on the device of the tokens, for tiles."""
        return IdCopies(self.device, self.batch_ids, self.head_ids, self.ids is None)

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.q.shape[1] // max(self.k.shape[1], 1)

    @full_precision
    def project(self) -> tuple[Tokens, Tokens]:
        """Return queries and keys after `Score.project`, with a graph if autograd records one."""
        if type(self.score).project is Score.project:
            return self.q, self.k  # nothing to do: keep the user's tensors, tiles are cast one by one
        with self.recording(), answers_kept(self):
            return self.score.project(self.q.to(self.dtype), self.k.to(self.dtype))

    @cached_property
    def tokens(self) -> tuple[Tokens, Tokens]:
        """Queries and keys after `Score.project`, without a graph; computed once for all reads."""
        if type(self.score).project is Score.project:
            return self.q.detach(), self.k.detach()
        with torch.no_grad():
            q, k = self.project()
        return tree_map(Tensor.detach, q), tree_map(Tensor.detach, k)

    @cached_property
    def dot(self) -> Dot | None:
        """The score as a dot product, without a graph; None where it is none."""
        with torch.no_grad():
            return self.score.as_dot(*self.tokens)  # type: ignore[arg-type]  # in the score's own form

    @property
    def plain_dot(self) -> Dot | None:
        """The score as a plain dot product, without a graph; None if it has a bias, a cap or a constant per row."""
        dot = self.dot
        return dot if dot is not None and dot.row is None and dot.bias is None and not dot.cap else None

    @cached_property
    def has_small_logits(self) -> bool:
        """Whether all logits are small, by the norms of queries and keys: then exp needs no maximum subtracted.

        That saves two passes over each tile. With few queries, looking at all keys would cost more. False where the
        host would have to wait for the answer.
        """
        dot = self.plain_dot
        if dot is None or 0 in self.shape or self.shape[2] < _MANY_QUERIES or waits_for(self.device):
            return False
        with torch.no_grad():
            q, k = (torch.linalg.vector_norm(t, dim=-1, dtype=self.dtype).amax() for t in (dot.q, dot.k))
            bound = abs(dot.scale) * q * k
            if self.sink is not None:
                bound = torch.maximum(bound, self.sink.to(bound).amax())
            return bool(bound <= _SMALL_LOGIT)  # not so where it is NaN

    @cached_property
    def has_finite_logits(self) -> bool:
        """Whether no logit can be infinite, by the kind of score and a check of the tokens."""
        if not self.score.finite or self.has_small_logits:
            return self.score.finite
        return all_finite(*tree_flatten(self.tokens))

    @property
    def has_surely_finite_logits(self) -> bool:
        """The same, but False where the host would have to wait for the answer."""
        return not waits_for(self.device) and self.has_finite_logits

    @cached_property
    def allowed_runs(self) -> tuple[Tensor, Tensor] | None:
        """The first key that each query may see and the one after its last, (batch or 1, heads or 1, m), int64.

        Both lie within the matrix, and are equal for a query that sees no key. None where a query may see
        more than one run of keys, or where there is no mask.
        """
        mask, at = self.mask, self.tile(*map(range, self.shape))
        found = None if mask is None else mask.allowed_runs(at) if at.device.type == "cpu" else runs_of_rows(mask, at)
        if found is None:
            return None
        first, stop = torch.broadcast_tensors(*found)
        shape = (1,) * (3 - first.ndim) + first.shape[:-1] + (at.m,)
        first, stop = first.expand(shape).clamp(0, at.n), stop.expand(shape).clamp(0, at.n)
        return first, torch.maximum(first, stop)

    @cached_property
    def protected_storages(self) -> frozenset[int]:
        """Addresses of the storages that must not be overwritten: those of the tokens and of the score."""
        tensors = (*tree_flatten(self.tokens), *self.score_tensors)
        return frozenset(t.untyped_storage().data_ptr() for t in tensors)

    def tile(self, batches: range, heads: range, rows: range, columns: range, **index: Tensor | None) -> Tile:
        """Return the tile of some batches, heads, rows and columns of this matrix."""
        batch, all_heads, m, n = self.shape
        copies = None
        if self.ids is None and self.device.type == "cpu":
            b = torch.arange(batches.start, batches.stop, device="cpu")
            h = torch.arange(heads.start, heads.stop, device="cpu")
        else:  # a view takes as long as the rest of a tile
            b, h = self.ids or (self.batch_ids, self.head_ids)
            b = b if len(batches) == batch else b[batches.start : batches.stop]
            h = h if len(heads) == all_heads else h[heads.start : heads.stop]
            copies = self.id_copies if self.device.type != "cpu" and self.has_numbers else None
        return Tile(batches, heads, rows, columns, m, n, b, h, self.device, self.dtype, id_copies=copies, **index)

    def select(self, batches: Tensor | slice, heads: Tensor | slice) -> Problem:
        """Return the problem of some batches and heads; slices of whole key groups are views."""
        span = self._key_heads(heads)
        if span is None:
            key_heads = torch.arange(self.shape[1], device="cpu")[heads] // self.group
            k = self.k[batches][:, to_device(key_heads, self.device)]
        else:
            k = self.k[batches, span]
        q = self.q[batches][:, heads if isinstance(heads, slice) else to_device(heads, self.device)]
        sink = None if self.sink is None else self.sink[heads]
        return replace(self, q=q, k=k, sink=sink, ids=(self.batch_ids[batches], self.head_ids[heads]))

    def _key_heads(self, heads: Tensor | slice) -> slice | None:
        """Return the key heads that serve some query heads as a slice.

        None unless each serves equally many, in order.
        """
        if isinstance(heads, Tensor) and tracing():
            return None
        numbers = heads.tolist() if isinstance(heads, Tensor) else list(range(self.shape[1])[heads])
        owners = [number // self.group for number in numbers]
        first, last = (min(owners), max(owners) + 1) if owners else (0, 0)
        share = max(len(owners) // max(last - first, 1), 1)
        # The key heads of a slice, each with an equal share of the chosen heads in a row.
        owned = [owner for owner in range(first, last) for _ in range(share)]
        return slice(first, last) if owned == owners else None


def tree_map(f: Callable[[Tensor], Tensor], tokens: Any) -> Any:
    """Apply `f` to each tensor of tokens, which are a tensor or nested tuples of tensors, and keep their form."""
    if isinstance(tokens, Tensor):
        return f(tokens)
    return tuple(tree_map(f, part) for part in tokens)


def tree_flatten(tokens: Tokens) -> list[Tensor]:
    """Return the tensors of tokens, which are a tensor or nested tuples of tensors, in order."""
    if isinstance(tokens, Tensor):
        return [tokens]
    return [t for part in tokens for t in tree_flatten(part)]


def spread_heads(t: Tensor, heads: int) -> Tensor:
    """Repeat the key or value heads of a tensor of four axes, one for each of `heads` query heads; a view if it can."""
    own = t.shape[1]
    if own == heads:
        return t
    return t.expand(-1, heads, -1, -1) if own == 1 else t.repeat_interleave(heads // own, dim=1)


def match_heads(k: Tensor, v: Tensor, query_heads: int) -> tuple[Tensor, Tensor]:
    """Repeat the heads of keys or values where one has fewer than the other."""
    if k.shape[1] == v.shape[1]:
        return k, v
    heads = max(k.shape[1], v.shape[1])
    if heads % min(k.shape[1], v.shape[1]):
        heads = query_heads
    return spread_heads(k, heads), spread_heads(v, heads)


def sum_heads(t: Tensor, heads: int) -> Tensor:
    """Sum over the query heads of each group that shares one of `heads` key heads; (batch, query heads, ...)."""
    return t if t.shape[1] == heads else t.unflatten(1, (heads, -1)).sum(dim=2)
