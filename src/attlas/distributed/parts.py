"""The part of a matrix that one rank computes."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from attlas.distributed.layout import Layout
from attlas.engine.held import tensors_of
from attlas.matrix import AttentionMatrix, softmax_matrix
from attlas.matrix.softmax import cut_out


def parts_of(
    layout: Layout, whole: AttentionMatrix, q: DTensor, k: DTensor, scale: Tensor | None
) -> tuple[AttentionMatrix, ...]:
    """Return this rank's part of a matrix: one lazy matrix for each run of its queries.

    Parameters
    ----------
    layout : Layout
        What this rank has.
    whole : AttentionMatrix
        The whole matrix, of tokens without numbers: its mask and score are asked at positions in the text.
    q, k : DTensor
        Queries and keys.
    scale : Tensor, optional
        Factor of the queries, one number or one for each head.
    """
    problem, heads = whole.problem, layout.heads
    score = problem.score
    # A copy of the score whose tensors have the same numbers, and gradients that are summed over the ranks.
    if layout.mesh.size() > 1 and any(t.requires_grad for t in tensors_of(score)):
        score = copy.deepcopy(score, {id(t): layout.replicated(t) for t in tensors_of(score)})
    own_q, own_k = layout.part_of(q, "queries"), layout.part_of(k, "keys")
    own_q = own_q.expand(-1, len(heads), -1, -1)
    if scale is not None:
        factor = layout.replicated(scale).to(own_q).reshape(-1)
        own_q = own_q * (factor if len(factor) == 1 else factor[heads.start : heads.stop]).reshape(1, -1, 1, 1)
    sink = None if problem.sink is None else layout.replicated(problem.sink)[heads.start : heads.stop]
    if sink is not None and any(layout.mesh.get_local_rank(dim) for dim in layout.dims("keys")):
        # The weight of the sink is counted on the first shard of the keys alone; elsewhere its logit is -inf. A sink
        # with a gradient keeps its graph there: all ranks must take part in summing the gradient.
        sink = sink.masked_fill(torch.ones_like(sink, dtype=torch.bool), -torch.inf) if sink.requires_grad else None
    fields: dict[str, Any] = {"k": own_k, "sink": sink, "partial": False, "versions": ()}
    fields["ids"] = problem.batch_ids[layout.batches], problem.head_ids[heads.start : heads.stop]
    parts, start = [], 0  # first query of the run in `own_q`
    for rows in layout.rows:
        own = cut_out(replace(problem, score=score), rows, layout.columns)
        own = replace(own, q=own_q[:, :, start : start + len(rows)], **fields)
        parts.append(softmax_matrix(own, whole.plan))
        start += len(rows)
    return tuple(parts)


def with_graph(t: Tensor, parts: tuple[AttentionMatrix, ...]) -> Tensor:
    """Give a result that has no graph here, but on other ranks, an empty one: all ranks must join in the backward."""
    if t.requires_grad or not any(part.needs_graph for part in parts):
        return t
    return t + sum(leaf.flatten()[:0].sum().to(t.dtype) for part in parts for leaf in part.problem.leaves)
