"""Refuses torch's context parallelism, in which a process holds a part of the keys and says so nowhere."""

from __future__ import annotations

import torch
from torch.nn import functional

from attlas._compat import replaced_by_context_parallel
from attlas.errors import BackendError


def refuse_context_parallel(where: str) -> None:
    """Raise a BackendError inside torch's ``context_parallel``, where a process holds a part of the keys.

    Parameters
    ----------
    where : str
        The function that was called.
    """
    if not torch.compiler.is_compiling() and functional.scaled_dot_product_attention in replaced_by_context_parallel():
        found = "torch's context_parallel, where each process holds a part of the sequence"
        fix = "attlas.distributed.context_parallel(mesh, model), or DTensors."
        raise BackendError(where, "every process must hold all keys of its queries.", found=found, fix=fix)
