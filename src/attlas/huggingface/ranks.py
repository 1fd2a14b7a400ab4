"""Numbers of heads that are looked at on several ranks, joined by one all-reduce a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor, distributed


class Sums(NamedTuple):
    """What is kept of each head of a layer: four numbers, shape (4, heads), in float64 on the CPU."""

    max_logit: Tensor
    entropy: Tensor
    effective_keys: Tensor
    rows: Tensor

    def join(self, other: Sums) -> Sums:
        """Return the numbers of both, head by head."""
        return Sums(torch.maximum(self.max_logit, other.max_logit), *map(torch.add, self[1:], other[1:]))

    def of_head(self, head: int) -> Sums:
        """Return the numbers of one head."""
        return Sums(*(t[head : head + 1] for t in self))


# By layer: the numbers of its heads in the whole layer, and what is kept of them.
Layers: TypeAlias = "dict[str, tuple[tuple[int, ...], Sums]]"


def world() -> int:
    """Return how many ranks there are; 1 without a process group."""
    return distributed.get_world_size() if distributed.is_available() and distributed.is_initialized() else 1


class Ranks:
    """Joins what the ranks have of each head, and raises on all ranks the error of one.

    Notes
    -----
    One all-reduce of ``2 + (ranks + 3) * heads`` numbers a step: a sum has no maximum, so each rank has a place of its
    own for the largest logit. The heads of all ranks are exchanged once, and again after they have changed.
    """

    def __init__(self) -> None:
        self._own: dict[str, tuple[int, ...]] | None = None
        self._all: dict[str, tuple[int, ...]] = {}

    def joined(self, compute: Callable[[], Layers]) -> Layers:
        """Return the numbers of all ranks.

        Parameters
        ----------
        compute : callable
            Returns those of this rank. If it fails on one, all ranks raise the error.
        """
        if world() == 1:
            return compute()
        layers, error = {}, None
        try:
            layers = compute()
        except Exception as caught:  # noqa: BLE001 - any error leaves the other ranks waiting
            error = caught
        own = {name: heads for name, (heads, _) in layers.items()}
        changed = own != self._own
        # Sums over all ranks: how many failed, how many have other heads than before, then the numbers.
        packed = self._summed_over_ranks(layers, failed=error is not None, changed=changed)
        if packed[0]:
            from attlas.distributed.agree import raise_first  # it loads torch's DTensors

            raise_first(error, [None])
        if packed[1]:
            self._exchange_heads(own)
            packed = self._summed_over_ranks(layers)
        return self._numbers_of_heads(packed[2:])

    def _exchange_heads(self, own: dict[str, tuple[int, ...]]) -> None:
        """Let every rank know which heads of which layers there are on all ranks."""
        everywhere: list[dict[str, tuple[int, ...]]] = [{}] * world()
        distributed.all_gather_object(everywhere, own)
        names = dict.fromkeys(name for one in everywhere for name in one)
        self._all = {name: tuple(sorted({head for one in everywhere for head in one.get(name, ())})) for name in names}
        self._own = own

    def _summed_over_ranks(self, layers: Layers, *, failed: bool = False, changed: bool = False) -> Tensor:
        """Return what all ranks have, summed over them by one exchange, on the CPU.

        Two counts come first: of ranks that failed, and of ranks whose heads have changed, which send no numbers. Then
        a table, flattened, of shape (ranks + 3, heads): the largest logits, a row for each rank, since maxima are no
        sums; and the sums of entropies, effective keys and rows.
        """
        rank, count = distributed.get_rank(), sum(map(len, self._all.values()))
        table = torch.zeros(world() + 3, count, dtype=torch.float64)
        table[rank] = -math.inf
        start = 0
        for name, heads in self._all.items():
            if name in layers and not changed:
                here, sums = layers[name]
                places = [start + heads.index(head) for head in here]
                table[rank, places] = sums.max_logit
                table[-3:, places] = torch.stack(sums[1:])
            start += len(heads)
        packed = torch.cat([torch.tensor([failed, changed], dtype=torch.float64), table.flatten()])
        if distributed.get_backend() == "nccl":
            packed = packed.cuda()
        distributed.all_reduce(packed)
        return packed.cpu()

    def _numbers_of_heads(self, packed: Tensor) -> Layers:
        """Return the numbers of all heads from the sum over the ranks."""
        table = packed.view(world() + 3, -1)
        numbers = torch.cat([table[:-3].amax(0, keepdim=True), table[-3:]])
        parts = numbers.split([len(heads) for heads in self._all.values()], dim=1)
        return {name: (heads, Sums(*part)) for (name, heads), part in zip(self._all.items(), parts, strict=True)}
