"""FlexAttention inside a program that torch traces: masks and scores that are functions of the user.

The compiler of the program makes one kernel of it. Nothing is compared here, as nothing is computed yet, and no number
can be read: blocks are skipped only where the masks of attlas beside the function say so by arithmetic alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from attlas.engine.backends.flex.backend import DTYPES, Flex, attended
from attlas.engine.backends.flex.blocks import BLOCK
from attlas.engine.backends.flex.masks import on_cpu, pairs_of
from attlas.engine.backends.flex.places import OfPair, Untranslatable, whole
from attlas.engine.backends.flex.programs import flex_attention
from attlas.engine.backends.flex.scores import Values, values_of
from attlas.engine.held import parts_and_tensors
from attlas.engine.plan import BACKENDS, Plan
from attlas.engine.problem import Problem
from attlas.masks.base import And, Mask, Or
from attlas.masks.local import Causal, Dilated, Window
from attlas.masks.runs import Runs


def product(problem: Problem, v: Tensor, plan: Plan) -> Tensor | None:
    """Return ``A @ v`` with its graph, shape (batch, heads, m, e); None where this is not FlexAttention's."""
    found = _translated_problem(problem, plan)
    return None if found is None else attended(problem, *found, v, flex_attention)[0]


def log_sum_exp(problem: Problem, plan: Plan) -> Tensor | None:
    """Return the log-sum-exp of each row with its graph, shape (batch, heads, m); None as `product` does."""
    found = _translated_problem(problem, plan)
    if found is None:
        return None
    # The kernel wants values: one zero for each key.
    v = problem.k.new_zeros(1).expand(*problem.k.shape[:3], 1)
    return attended(problem, *found, v, flex_attention)[1]


def _translated_problem(problem: Problem, plan: Plan) -> tuple[Values, Any] | None:
    """Return the score as a function of one pair, and the BlockMask of the mask; None where there are no such."""
    devices = BACKENDS[Flex.name] or ()
    if problem.device.type not in devices or problem.q.dtype not in DTYPES or plan.backend not in ("auto", Flex.name):
        return None
    if problem.partial or problem.ids is not None or 0 in (*problem.shape, problem.q.shape[-1]):
        return None
    mask = problem.mask
    if mask is not None and any(isinstance(part, Runs) for part in parts_and_tensors(mask)[0]):
        return None  # how many runs a row has is a number that cannot be read
    try:
        with problem.recording():
            values = values_of(problem.score, *problem.project(), problem)
        if mask is None:
            return values, None
        allows = pairs_of(mask, on_cpu(whole(problem)), problem.device).allows
    except Untranslatable:
        return None
    return values, _block_mask(mask, allows, problem)


def _block_mask(mask: Mask, allows: OfPair, problem: Problem) -> Any:
    """Return the BlockMask of a mask without looking at numbers: no block is whole, in each the function is asked."""
    from torch.nn.attention.flex_attention import BlockMask

    m, n = problem.shape[2:]
    rows, columns = (torch.arange(0, size, BLOCK, device=problem.device) for size in (m, n))
    reached = _reachable_blocks(mask, rows.unsqueeze(-1), columns, m, n)
    if reached is None:
        reached = torch.ones(len(rows), len(columns), dtype=torch.bool, device=problem.device)
    of_rows, of_columns = (_reached_columns_first(some) for some in (reached, reached.mT))
    return BlockMask((m, n), *of_rows, None, None, *of_columns, None, None, (BLOCK, BLOCK), allows)


def _reachable_blocks(mask: Mask, rows: Tensor, columns: Tensor, m: int, n: int) -> Tensor | None:
    """Return which blocks may have an allowed pair, by their first rows and columns; None for all of them."""
    if isinstance(mask, (And, Or)) and type(mask) in (And, Or):
        left, right = (_reachable_blocks(part, rows, columns, m, n) for part in (mask.left, mask.right))
        if type(mask) is Or:
            return None if left is None or right is None else left | right
        return right if left is None else left if right is None else left & right
    if not isinstance(mask, (Causal, Window, Dilated)) or type(mask) not in (Causal, Window, Dilated):
        return None
    first = mask.first_query(m, n)  # the position of the first query among the keys
    last_rows, last_columns = (rows + (BLOCK - 1)).clamp(max=m - 1), (columns + (BLOCK - 1)).clamp(max=n - 1)
    found = columns >= 0 * rows  # true for all blocks
    if mask.left is not None:
        found = found & (last_columns >= rows + (first - mask.left))
    if mask.right is not None:
        found = found & (columns <= last_rows + (first + mask.right))
    return found


def _reached_columns_first(reached: Tensor) -> tuple[Tensor, Tensor]:
    """Return, per row of blocks, how many are reached, and all column numbers with those first.

    With axes for batch and head.
    """
    reached = reached.unsqueeze(0).unsqueeze(0)
    order = torch.argsort(reached.to(torch.int8), dim=-1, descending=True, stable=True)
    return reached.sum(-1, dtype=torch.int32), order.to(torch.int32)
