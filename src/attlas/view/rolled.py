"""Attention rollout as one more layer of the page: its heads are the products of the first one, two, ... layers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from attlas.foundation.compat import cached_property
from attlas.foundation.tiles import cut
from attlas.masks import Causal, Mask, Padding
from attlas.matrix import AttentionMatrix
from attlas.matrix.attend import attend
from attlas.matrix.sweep import SweptWeights, each_once, pooled
from attlas.matrix.weights import Weights
from attlas.recording.atlas import Atlas, Entry
from attlas.recording.atlas.layers import ranges
from attlas.recording.atlas.padding import token_queries
from attlas.view.exact import Head

RESIDUAL = 0.5  # share of the residual connection, as of `attlas.heads.rollout`
_MOST_CELLS = 1 << 27  # numbers of all products, which are held in memory: 512 MB
_CELLS_AT_ONCE = 1 << 22  # weights of all heads of a layer that are written out at once
_IMMEDIATE_PRODUCTS = 1 << 33  # multiplications that a question may wait for: some tenths of a second
_TIMED_STEPS = 4  # steps after which their time says how long the rest will take

_CROSS = "Layers {0} attend to another text (cross-attention)."
_LINEAR = "Layers {0} have a linear attention, whose weights are no shares of a row."
_NO_SHARES = "The weights of layers {0} are no shares of a row."
_MISSING = "Layers {0} of the model are not in the recording, and they move information too."
_NO_WEIGHTS = "Of layers {0} only statistics were kept."
_PASSES = "Layers {0} ran several times."
_LENGTHS = "Layers {0} do not have the queries and keys of the whole text."
_TOO_LARGE = "The products of {0} layers of {1} tokens would take {2} MB, and at most {3} are used. Single rows: {4}"
#: What the page translates: why there is no rollout.
REASONS = (_CROSS, _LINEAR, _NO_SHARES, _MISSING, _NO_WEIGHTS, _PASSES, _LENGTHS, _TOO_LARGE)


class RolledEntry(Entry):
    """The products of the first layers of a recording, in the place of heads; its number is that of the last layer."""

    def __post_init__(self) -> None:
        # `Entry` checks what is recorded; this is computed from entries that it has checked.
        return

    def close(self) -> None:
        """Let nothing more be computed."""
        weights = self.need_matrix().weights
        if isinstance(weights, RolloutWeights):
            weights.close()


def rolled_entry(atlas: Atlas, head_of: Callable[[Entry, int], Head]) -> RolledEntry | list[str] | None:
    """Return the rollouts of a recording, a reason why there are none, or None where there are no layers to multiply.

    Parameters
    ----------
    atlas : Atlas
        The recording.
    head_of : callable
        Returns the mean over the heads of an entry, of a sequence.

    Returns
    -------
    RolledEntry, list of str, or None
        A reason is a sentence of `REASONS`, then its values.
    """
    main = [entry for entry in atlas.entries if entry.kind == (*atlas.kinds, "self")[0]]
    if len({entry.layer for entry in main}) < 2:
        return None
    reason = _reason_against(atlas, main)
    if reason is not None:
        return reason
    layers = sorted(main, key=lambda entry: entry.layer)
    first, last = layers[0], layers[-1]
    batch, _, m, n = first.shape
    real = _tokens_of_sequences(layers)
    mask = _mask_of_products(layers, real)
    sequences = [
        Rollout(
            [lambda entry=entry, b=b: head_of(entry, b) for entry in layers],  # type: ignore[misc]
            n,
            causal=mask is not None and mask.is_causal,
            real=None if real is None else real[b],
            heads=sum(entry.shape[1] for entry in layers),
        )
        for b in range(batch)
    ]
    # Tokens without numbers: what the products have of a matrix is its shape and its mask.
    nothing = torch.zeros(1).expand(batch, len(layers), n, 1)
    frame = attend(nothing, nothing, mask=mask).weights
    inputs = each_once(t for entry in layers for t in entry.need_matrix().weights.inputs)
    A = AttentionMatrix(RolloutWeights(sequences, frame, range(m), range(n), inputs))
    heads = tuple(entry.layer for entry in layers)
    shape = (batch, len(layers), m, n)
    return RolledEntry("rollout", last.layer, "rollout", 0, heads, first.queries, first.first_key, shape, A)


def _reason_against(atlas: Atlas, main: Sequence[Entry]) -> list[str] | None:
    """Return why the layers of a recording cannot be multiplied, a sentence and its values; None where they can."""

    def numbers(entries: Sequence[Entry]) -> str:
        return ranges(sorted({entry.layer for entry in entries}), "–")

    first = main[0]
    calls = [entry for entry in main if entry.call != main[0].call]
    n = first.shape[3]
    odd = [e for e in main if (e.shape[0], e.shape[2], e.shape[3], e.first_key) != (first.shape[0], n, n, 0)]
    checks = [
        (_CROSS, [entry for entry in atlas.entries if entry.kind == "cross"]),
        (_LINEAR, [entry for entry in atlas.entries if entry.kind == "linear"]),
        (_PASSES, calls),
        (_NO_WEIGHTS, [entry for entry in main if entry.matrix is None]),
        (_LENGTHS, odd),
        (_NO_SHARES, [e for e in main if e.matrix is not None and not e.matrix.weights.are_shares]),
    ]
    for sentence, entries in checks:
        if entries:
            return [sentence, numbers(entries)]
    missing = atlas.missing_layers()
    if missing:
        return [_MISSING, ranges(missing, "–")]
    cells = first.shape[0] * len(main) * n * n
    if not n or cells > _MOST_CELLS:
        command = 'attlas.heads.rollout(attlas.load("run.atlas"), rows=[-1])'
        sizes = f"{4 * cells / 1e6:,.0f}", f"{4 * _MOST_CELLS / 1e6:,.0f}"
        return [_TOO_LARGE, str(len(main)), f"{n:,}", *sizes, command]
    return None


def _tokens_of_sequences(layers: Sequence[Entry]) -> Tensor | None:
    """Return which queries are tokens and no padding, bool of shape (batch, n); None where all are."""
    for entry in layers:
        found = entry.query_mask
        found = token_queries(entry.need_matrix().weights) if found is None else found
        if found is not None:
            return found.cpu().expand(entry.shape[0], -1)
    return None


def _mask_of_products(layers: Sequence[Entry], real: Tensor | None) -> Mask | None:
    """Return which pairs the products may have a weight of: earlier keys where all layers are causal, and tokens."""
    masks = [entry.need_matrix().weights.mask for entry in layers]
    causal = Causal() if all(mask is not None and mask.is_causal for mask in masks) else None
    if real is None:
        return causal
    padding = Padding(real.sum(dim=1), side="right" if bool(real[:, 0].all()) else "left")
    return padding if causal is None else causal & padding


class Rollout:
    """The rollouts of one sequence: the products of the first one, two, ... layers, made once, in small steps.

    Parameters
    ----------
    layers : sequence of callable
        Each returns the mean over the heads of a layer, the first layer first.
    n : int
        Number of tokens.
    causal : bool
        Whether no query of any layer sees a later key.
    real : Tensor of bool, optional, shape (n,)
        Which tokens are no padding; padding gives and receives nothing.
    heads : int
        Heads of all layers, by which the rows of a step are counted.

    Notes
    -----
    ``R_l = (1 - r) Ā_l R_{l-1} + r R_{l-1}`` with the residual share r = 1/2: the numbers of `attlas.heads.rollout`,
    of all layers for the price of the last one. Cost: each weight of each head once, and a product of two n × n
    matrices for each layer; of causal layers half of it. Memory: 4 bytes a cell and layer.
    """

    def __init__(
        self, layers: Sequence[Callable[[], Head]], n: int, *, causal: bool, real: Tensor | None, heads: int
    ) -> None:
        self._layers, self.n, self._causal, self._real = layers, n, causal, real
        per_layer = max(heads // len(layers), 1)
        self._parts = list(cut(n, max(_CELLS_AT_ONCE // (n * per_layer), 1)))
        self._lock = threading.Lock()
        self._running: Iterator[None] | None = None
        self._done, self._seconds = 0, 0.0
        self.error = ""

    @property
    def _total(self) -> int:
        """The number of steps."""
        return len(self._layers) * len(self._parts)

    @property
    def is_short(self) -> bool:
        """Whether it takes so little time that a question may wait for it."""
        return len(self._layers) * self.n**3 <= _IMMEDIATE_PRODUCTS

    @property
    def share(self) -> float:
        """Share of the steps that are done."""
        return self._done / self._total

    @property
    def told(self) -> dict[str, Any]:
        """How many steps are done, of how many, and how many seconds are left; None while that is not known."""
        left = self._seconds / max(self._done, 1) * (self._total - self._done)
        known = self._done >= min(_TIMED_STEPS, self._total)
        return {"done": self._done, "total": self._total, "seconds_left": left if known else None}

    @cached_property
    def _products(self) -> Tensor:
        """Room for the products, shape (layers, n, n)."""
        return torch.zeros(len(self._layers), self.n, self.n)

    def step(self) -> bool:
        """Compute some rows of one product; return whether there are more."""
        with self._lock:
            if self._done == self._total or self.error:
                return False
            begin = time.monotonic()
            try:
                self._running = self._running or self._steps()
                next(self._running)
            except (RuntimeError, ValueError, MemoryError) as error:
                self.error = str(error).partition("\n")[0] or type(error).__name__
                return False
            self._seconds += time.monotonic() - begin
            self._done += 1
            return self._done < self._total

    def close(self) -> None:
        """Let nothing more be computed."""
        self.error = self.error or "the viewer was closed"

    def products(self) -> Tensor:
        """Return all products, float32 of shape (layers, n, n); what is missing is computed now."""
        while self.step():
            pass
        if self.error and self._done < self._total:
            raise RuntimeError(self.error)
        return self._products

    @torch.no_grad()
    def _steps(self) -> Iterator[None]:
        """Compute the products row by row, and yield after some rows."""
        identity = torch.ones(self.n) if self._real is None else self._real.to(torch.float32)
        below = torch.diag(identity)
        for layer, into in zip(self._layers, self._products, strict=True):
            head = layer()
            for rows in self._parts:
                seen = range(rows.stop) if self._causal else range(self.n)
                weights = torch.from_numpy(head.cells(rows, seen))
                if self._real is not None:
                    weights = weights * identity[rows.start : rows.stop, None]
                own, part = slice(rows.start, rows.stop), slice(seen.stop)
                mixed = weights @ below[part, part]
                into[own, part] = torch.lerp(mixed, below[own, part], RESIDUAL)
                yield
            below = into


class RolloutWeights(SweptWeights):
    """Rollouts in the place of heads: the first one is that of the first layer alone, the last one that of all.

    Parameters
    ----------
    sequences : sequence of Rollout
        The products of each sequence.
    frame : Weights, shape (batch, heads, m, n)
        The same part of a matrix with their shape and mask.
    rows, columns : range
        Which part of the whole this is.
    inputs : list of Tensor
        The tensors of the layers.
    """

    are_shares, are_signed, counts_other_keys = True, False, False
    requires_grad = False  # the products are computed without a graph

    def __init__(
        self, sequences: Sequence[Rollout], frame: Weights, rows: range, columns: range, inputs: list[Tensor]
    ) -> None:
        self._sequences, self._frame, self._rows, self._columns = sequences, frame, rows, columns
        self._inputs = inputs
        self.shape, self.dtype, self.device, self.mask = frame.shape, frame.dtype, frame.device, frame.mask
        self.queries, self.keys, self.key_heads = frame.queries, frame.keys, frame.key_heads
        self.batch_ids, self.head_ids = frame.batch_ids, frame.head_ids

    @property
    def inputs(self) -> list[Tensor]:
        return self._inputs

    @property
    def is_symbolic(self) -> bool:
        return False

    def check_unchanged(self) -> None:
        # The layers are those of a recording, which does not change.
        return

    @property
    def description(self) -> str:
        return f"rollout of {len(self.head_ids)} layers"

    def product(self, v: Tensor, dropout: Any = None) -> Tensor:
        return pooled(self, v, dropout)

    def transposed_product(self, x: Tensor) -> Tensor:
        return pooled(self, x, transposed=True)

    def cells(self, rows: range | Tensor, columns: range | Tensor, *, logits: bool = False) -> Tensor:
        # The products are stored once they are known.
        self.check_no_logits(logits)
        across, down = _places(self._rows, rows), _places(self._columns, columns)
        found = []
        for batch in self.batch_ids.tolist():
            products = self._sequences[batch].products()
            found.append(torch.stack([products[depth][across][:, down] for depth in self.head_ids.tolist()]))
        return torch.stack(found) if found else torch.zeros(0, len(self.head_ids), len(rows), len(columns))

    def defined_cells(self, rows: Tensor) -> Tensor:
        return self.cells(rows, range(self.shape[3])).double()

    def part(
        self,
        batches: Tensor | slice | None = None,
        heads: Tensor | slice | None = None,
        rows: range | None = None,
        columns: range | None = None,
    ) -> RolloutWeights:
        frame = self._frame.part(batches, heads, rows, columns)
        down, across = (
            whole if some is None else whole[some.start : some.stop]
            for whole, some in ((self._rows, rows), (self._columns, columns))
        )
        return RolloutWeights(self._sequences, frame, down, across, self._inputs)

    def preparation(self) -> Rollout:
        """Return what the cells of the first sequence are read from."""
        return self._sequences[int(self.batch_ids[0])]

    def close(self) -> None:
        """Let nothing more be computed."""
        for sequence in self._sequences:
            sequence.close()

    def detach(self) -> RolloutWeights:
        return self

    def full_precision(self) -> RolloutWeights:
        return self

    def moved(self, device: torch.device, dtype: torch.dtype | None) -> RolloutWeights | None:
        return None


def _places(whole: range, some: range | Tensor) -> Any:
    """Return places of a part of an axis as places of the whole: a slice, or a tensor."""
    if isinstance(some, range):
        return slice(whole.start + some.start, whole.start + some.stop)
    return some.cpu() + whole.start
