"""What the backends cost: every time and threshold that was measured, in one table.

The cost of an operation is its time; 1 is the output by torch's fused kernel. `attlas.engine.dispatch` takes the
cheapest backend that computes a request, and asks no backend for its price: a new backend adds its row to `ROWS`.

Sizes are numbers of queries, and of *products*: multiplications with addition in ``Q K^T``, batch × heads × m × n × d.
A threshold is the size from which one way was the faster: both were timed at a row of sizes, on processors with the
instruction set that it is for, as ``benchmarks/cpu.py`` does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from attlas.engine.problem import Problem
from attlas.masks.local import Causal
from attlas.scores.base import Score, Sum
from attlas.scores.dot import ScaledDot

Operation: TypeAlias = Literal["output", "backward", "transposed", "statistics", "cells"]


class Least(NamedTuple):
    """Products from which a kernel is the faster way: for up to `FEW_QUERIES`, for fewer than `UNPACKED`, for more.

    `shared` are those for more queries where several heads share their keys; more queries also need a number of `keys`.
    Where torch's kernel would read a tensor for the mask, that number is enough, and for fewer than `UNPACKED` queries
    the products are `masked`. Fewer queries than `rows` leave too little work for each key that is packed; half as many
    suffice for a causal mask, and a quarter where heads share their keys.
    """

    few: float
    some: float
    many: float
    shared: float
    masked: float
    keys: float
    rows: int = 0


# ----------------------------------------------------------------------------------------- dot products, our kernels

#: Queries below which keys and values are read as they lie, and not packed first.
UNPACKED = 16
#: Products from which threads save more than they cost, where keys and values are packed.
ONE_THREAD = 1 << 23
#: The same where they are read as they lie: reading is limited by memory, and more threads read more of it at a time.
ONE_THREAD_UNPACKED = 1 << 18
#: Queries up to which the kernels that read keys and values as they lie are faster than torch's, from so many products.
FEW_QUERIES = 4
#: Instruction sets with which they are faster for any number of products where several heads share their keys.
SHARED_KEYS = ("avx512", "amx")

_TOKEN_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_16_BITS = _TOKEN_DTYPES[2:]
# With AMX torch's own products of bfloat16 are the fastest for all but large problems.
_TORCH_HAS_AMX = {torch.bfloat16: Least(1 << 18, math.inf, 1 << 30, 1 << 30, math.inf, 1 << 15)}
_LEAST_FOR_OUTPUT = dict.fromkeys(_TOKEN_DTYPES, Least(1 << 18, 1 << 22, 1 << 21, 1 << 19, 0, 8))
_LEAST_FOR_GRADIENTS = dict.fromkeys(_TOKEN_DTYPES, Least(1 << 20, 1 << 20, 1 << 20, 1 << 21, 1 << 21, 32))
_OF_16_BITS = dict.fromkeys(_16_BITS, Least(1 << 20, 1 << 18, 1 << 15, 1 << 15, 1 << 15, 16))
# Measured on an AMD EPYC without AVX-512, one thread: for 16, 64 and 128 queries and 512 keys the kernels take 1.25,
# 1.08 and 0.97 of torch's time in float32, and 1.34, 0.95 and 0.84 in bfloat16.
_AVX2_ROWS = {torch.float32: 96, torch.bfloat16: 64, torch.float64: 32, torch.float16: 0}
#: An output, by instruction set and dtype; the plain vectors of "baseline" are slower. `benchmarks/plans.py` compares
#: the choices with the other ways of random problems.
OUTPUTS: Mapping[str, Mapping[torch.dtype, Least]] = {
    "avx2": {dtype: Least(1 << 21, 1 << 21, 1 << 23, 1 << 22, 0, 8, rows) for dtype, rows in _AVX2_ROWS.items()},
    "avx512": _LEAST_FOR_OUTPUT,
    "amx": _LEAST_FOR_OUTPUT | _TORCH_HAS_AMX,
}
#: The gradients of a product.
GRADIENTS: Mapping[str, Mapping[torch.dtype, Least]] = {
    "avx2": dict.fromkeys(_TOKEN_DTYPES, Least(1 << 22, 1 << 22, 1 << 21, 1 << 21, 1 << 22, 32)) | _OF_16_BITS,
    "avx512": _LEAST_FOR_GRADIENTS | _OF_16_BITS,
    "amx": _LEAST_FOR_GRADIENTS | _OF_16_BITS | _TORCH_HAS_AMX,
}
#: Output and gradients, where they are the faster way and where not.
FASTER = {"avx2": 0.9, "avx512": 0.6, "amx": 0.6}
SLOWER = 1.2
#: The same where places add to the logits, since torch's kernel reads a dense tensor of them; gradients from so many
#: cells on.
BIASED, BIASED_CELLS = 0.3, 1 << 12
#: Statistics, for which tiles are the only other way. Fewer than `UNPACKED` queries read keys as they lie, which is
#: faster with vectors of 256 bits and more. Without them, and of more queries, it is from 4 queries on, and from more
#: where there are many keys, which take longer to pack than to read in a tile: from 10 queries for 1,024 keys, from 37
#: for 16,384 (``12 m² >= n``).
STATISTICS_QUERIES, STATISTICS_KEYS = 4, 12
#: Queries for each key from which tiles are the faster way for several statistics: the kernels have work for each row.
STATISTICS_ROWS = 1024
STATISTICS, STATISTICS_SMALL = 1.0, 5.0

# --------------------------------------------------------------------------------------- pairs of tokens, our kernels

#: The kernels are faster at every size, but for statistics of `PAIRS_ROWS` queries for each key.
PAIRS, PAIRS_SMALL = 0.3, 5.0
PAIRS_ROWS = 128
#: Coordinates up to which differences are faster than any dot product, and up to which there are kernels of them; from
#: there on a matrix product is faster.
DIRECT_COORDINATES, MOST_COORDINATES = 8, 16


def is_faster(problem: Problem, instruction_set: str, of: Mapping[str, Mapping[torch.dtype, Least]] = OUTPUTS) -> bool:
    """Return whether the kernels are the faster way for an output of dot products of this size, or for `GRADIENTS`."""
    if instruction_set not in of:
        return False
    q, mask, (_, heads, m, n) = problem.q, problem.mask, problem.shape
    products, least = q.numel() * n, of[instruction_set][q.dtype]
    if not (mask is None or (m == n and isinstance(mask, Causal))):
        return n >= least.keys if m >= UNPACKED else products >= least.masked
    shared = heads != problem.k.shape[1]
    if m >= UNPACKED:
        rows = least.rows // (4 if shared else 1 if mask is None else 2)
        return m >= rows and n >= least.keys and products >= (least.shared if shared else least.many)
    if m > FEW_QUERIES:
        return products >= least.some
    return products >= least.few or (shared and of is OUTPUTS and instruction_set in SHARED_KEYS)


def threads_for(q: Tensor, n: int) -> int:
    """Return the number of threads with which the kernels multiply queries with `n` keys.

    Few queries are limited by memory, so that threads pay off at smaller sizes than for matrix products.
    """
    alone = ONE_THREAD_UNPACKED if q.shape[2] < UNPACKED else ONE_THREAD
    return torch.get_num_threads() if q.numel() * n > alone else 1


def _of_dot_products(problem: Problem, operation: Operation, instruction_set: str) -> float:
    """Return the cost of an operation by the kernels of dot products, by sizes, score, mask and dtype.

    The output by torch's fused kernel costs 1; the thresholds are the measured ones above.
    """
    _, _, m, n = problem.shape
    if operation == "statistics":
        unpacked = m < UNPACKED and instruction_set in OUTPUTS
        small = not unpacked and (m < STATISTICS_QUERIES or STATISTICS_KEYS * m * m < n or m >= STATISTICS_ROWS * n)
        return STATISTICS_SMALL if small else STATISTICS
    may_have_places = type(problem.score) is not ScaledDot and instruction_set in OUTPUTS
    large = operation != "backward" or m * n >= BIASED_CELLS
    if may_have_places and large and _adds_places(problem.score):
        return BIASED
    table = GRADIENTS if operation == "backward" else OUTPUTS
    return FASTER[instruction_set] if is_faster(problem, instruction_set, table) else SLOWER


def _adds_places(score: Score) -> bool:
    """Return whether a score has a position-dependent summand (a positional bias) anywhere inside it."""
    if isinstance(score, Sum):
        return any(part.positional or _adds_places(part) for part in (score.left, score.right))
    inner = getattr(score, "inner", None)
    return isinstance(inner, Score) and _adds_places(inner)


def _cost_of_pairs(problem: Problem, operation: Operation, instruction_set: str) -> float:
    """Return the cost of an operation by the kernels of pairs; plain dot products are not for them."""
    _, _, m, n = problem.shape
    if type(problem.score) is ScaledDot or (operation == "statistics" and m >= PAIRS_ROWS * n):
        return PAIRS_SMALL
    return PAIRS


# ------------------------------------------------------------------------------------------------- FlexAttention

#: No time of it was measured. It is one kernel, where tiles write each score down, so it is set between torch's other
#: kernels and tiles; but for few queries, which tiles compute by two products, and for matrices of few tiles, for which
#: it would take longer to compile it.
FLEX, FLEX_SMALL = 1.5, 5.0
FLEX_CELLS = 1 << 24


def _cost_of_flex(problem: Problem, operation: Operation, instruction_set: str) -> float:
    """Return the cost of an output by FlexAttention; all functions of costs have these parameters."""
    batch, heads, m, n = problem.shape
    return FLEX if m >= UNPACKED and batch * heads * m * n >= FLEX_CELLS else FLEX_SMALL


# -------------------------------------------------------------------------------------------------- our Triton kernels

#: No time of them was measured: these are predictions from their machine code, of ``benchmarks/gpu_model.py``, rounded
#: up. An output is set behind FlexAttention, which gives gradients too, and before tiles. Matrices of few tiles would
#: take longer to compile a kernel.
TRITON, TRITON_SMALL = 1.0, 5.0
TRITON_OUTPUT = 1.6
TRITON_CELLS = 1 << 22


def _cost_of_triton(problem: Problem, operation: Operation, instruction_set: str) -> float:
    """Return the cost of an operation by the Triton kernels."""
    batch, heads, m, n = problem.shape
    if batch * heads * m * n < TRITON_CELLS:
        return TRITON_SMALL
    return TRITON_OUTPUT if operation == "output" else TRITON


# ------------------------------------------------------------------------------------------------------ all backends

Cost: TypeAlias = float | Callable[[Problem, Operation, str], float]

#: The cost of each backend by `Backend.row`: a number, or a function of the problem, the operation and the instruction
#: set of the kernels.
ROWS: Mapping[str, Cost] = {
    "dot products": _of_dot_products,
    "pairs": _cost_of_pairs,
    "sdpa": 1.0,  # the measure of all others
    "flex": _cost_of_flex,
    "triton": _cost_of_triton,
    "tiled": 2.5,  # a round number of the same measurement: two products and three passes over each tile
    "reference": 10.0,  # a round number: whole matrices, several times; never chosen for its speed
}


def costs_of(rows: Sequence[str], problem: Problem, operation: Operation, instruction_set: str) -> tuple[float, ...]:
    """Return the costs of an operation by the backends of some rows."""
    costs = []
    for row in rows:
        cost = ROWS[row]
        costs.append(cost if isinstance(cost, float) else cost(problem, operation, instruction_set))
    return tuple(costs)
