"""Attention over several processes: DTensors in, DTensors out."""

from attlas.distributed.attend import attend
from attlas.distributed.context import context_parallel
from attlas.distributed.layout import head_tail_order
from attlas.distributed.matrix import DistributedMatrix
from attlas.distributed.saving import save

__all__ = ["DistributedMatrix", "attend", "context_parallel", "head_tail_order", "save"]
