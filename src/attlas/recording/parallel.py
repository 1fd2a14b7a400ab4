"""Models that are spread over several processes: which heads are here, and what cannot be attended to at all."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import torch
from torch import nn

from attlas.errors import BackendError, RecordingError
from attlas.foundation.blocks import BlockValue
from attlas.foundation.compat import local_part
from attlas.matrix import AttentionMatrix

_DTENSOR_MODULE = "torch.distributed.tensor"
_ULYSSES_MODULE = "deepspeed.runtime.sequence_parallel.ulysses_sp"
# What `attlas.distributed.context_parallel` has open in this thread; the attention function and the mask ask it.
sharded_text: BlockValue[Any] = BlockValue("sharded_text", None)


def text_of_ranks() -> Any:
    """Return the open `attlas.distributed.context_parallel` of this thread; it refuses the compiler by itself."""
    return None if torch.compiler.is_compiling() else sharded_text.get()


def refuse_sharded_text() -> None:
    """Raise a BackendError: a recording or an intervention would see the tokens of one rank."""
    rule = "recordings and interventions follow whole texts, and each rank has a part of this one."
    fix = "record on one process, or collect from outputs.attentions, whose matrices are divided."
    raise BackendError(rule, "attlas.distributed.context_parallel", fix)


def runs_ulysses() -> bool:
    """Return whether DeepSpeed's sequence parallelism for transformers is loaded."""
    return _ULYSSES_MODULE in sys.modules


def heads_here(module: nn.Module, matrix: AttentionMatrix) -> tuple[int, int]:
    """Return the number of the first head of a matrix in its layer, and how many heads the layer has.

    Parameters
    ----------
    module : nn.Module
        The attention layer. Under tensor parallelism its projections are DTensors, sharded by rows.
    matrix : AttentionMatrix, shape (batch, heads, m, n)
        The weights of the heads that this process has.

    Raises
    ------
    RecordingError
        If the layer is sharded and no projection says which heads are here, as under DeepSpeed's Ulysses.
    """
    heads, size = matrix.weights.shape[1], matrix.problem.q.shape[-1]
    dtensor_module = sys.modules.get(_DTENSOR_MODULE)  # not loaded: no parameter is a DTensor
    sharded = [] if dtensor_module is None else _sharded_by_rows(module, dtensor_module)
    if not sharded:
        whole = getattr(getattr(module, "config", None), "num_attention_heads", heads)
        if runs_ulysses() and heads != whole:
            raise _unknown_heads(module, heads, f"{heads} of {whole} heads, as under DeepSpeed's Ulysses")
        return 0, heads
    for local, all_rows, first in sharded:
        if local == heads * size:
            return first // size, all_rows // size
    # The projections are divided, and the attention has as many heads as all their rows: they were gathered between.
    gathered = {heads * size, matrix.weights.key_heads * size}
    if gathered <= {all_rows for _, all_rows, _ in sharded}:
        return 0, heads
    raise _unknown_heads(module, heads, f"tensor parallelism, and no projection with {heads * size} rows here")


def _unknown_heads(module: nn.Module, heads: int, found: str) -> RecordingError:
    """Return the error of a layer of which it is not known which heads this process has."""
    rule = "it must be known which heads of a layer this process has."
    fix = "record the model on one process, or shard q_proj and k_proj apart."
    return RecordingError(
        rule, found, fix, arguments={"layer": type(module).__name__, "heads here": heads}, where="record()"
    )


def _sharded_by_rows(module: nn.Module, dtensor_module: ModuleType) -> list[tuple[int, int, int]]:
    """Return rows here, rows of all, and the first row here, of each matrix whose rows are sharded.

    `dtensor_module` is the module of torch that defines DTensor.
    """
    sharded = []
    for parameter in module.parameters():
        if not isinstance(parameter, dtensor_module.DTensor) or parameter.ndim != 2:
            continue
        if any(placement.is_shard(0) for placement in parameter.placements):
            sizes, starts = local_part(tuple(parameter.shape), parameter.device_mesh, parameter.placements)
            sharded.append((sizes[0], parameter.shape[0], starts[0]))
    return sharded
