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
from attlas.scores.base import Score, Sum
from attlas.scores.dot import ScaledDot

Operation: TypeAlias = Literal["output", "backward", "transposed", "statistics", "cells"]


class Least(NamedTuple):
    """Products from which a kernel is the faster way: from a number of queries on, and for fewer."""

    queries: int
    products: float
    of_fewer: float = math.inf

    def reached(self, queries: int, products: int) -> bool:
        """Return whether a problem is as large."""
        return products >= (self.products if queries >= self.queries else self.of_fewer)


# ----------------------------------------------------------------------------------------- dot products, our kernels

#: Queries below which keys and values are read as they lie, and not packed first.
UNPACKED = 16
#: Products from which threads save more than they cost, where keys and values are packed.
ONE_THREAD = 1 << 23
#: The same where they are read as they lie: reading is limited by memory, and more threads read more of it at a time.
ONE_THREAD_UNPACKED = 1 << 18
#: Queries up to which the kernels that read keys and values as they lie are faster than torch's, from so many products.
FEW_QUERIES = 4
FEW_QUERIES_PRODUCTS = {"avx2": 1 << 21, "avx512": 1 << 18, "amx": 1 << 18}
#: Instruction sets with which they are faster for any number of products where several heads share their keys.
SHARED_KEYS = ("avx512", "amx")

# With the wide vectors, an output of float32 and float16 pays off at much smaller sizes than one of other dtypes.
_WIDE = {
    torch.float32: Least(512, 1 << 24, of_fewer=1 << 30),
    torch.float16: Least(512, 1 << 24, of_fewer=1 << 30),
    torch.bfloat16: Least(UNPACKED, 1 << 30),
    torch.float64: Least(UNPACKED, 1 << 30),
}
#: An output of `UNPACKED` queries and more, by instruction set and dtype; the plain vectors of "baseline" are slower.
OUTPUTS: Mapping[str, Mapping[torch.dtype, Least]] = {
    "avx2": dict.fromkeys(_WIDE, Least(1024, 1 << 28)),
    "avx512": _WIDE,
    "amx": _WIDE,
}
#: Gradients of 16-bit tokens; those of other tokens are faster where outputs are. With AVX-512 torch's own are always
#: faster: the kernels multiply with vectors. With AVX2 torch has no instructions for them and takes five times as long.
#: With AMX they go by the outputs.
GRADIENTS: Mapping[str, Least] = {"avx2": Least(0, 1 << 24), "avx512": Least(0, math.inf)}
#: Output and gradients, where they are the faster way and where not.
FASTER = {"avx2": 0.9, "avx512": 0.6, "amx": 0.6}
SLOWER = 1.2
#: The same from so many cells on where places add to the logits: torch's kernel then reads a dense tensor of them.
BIASED, BIASED_CELLS = 0.3, 1 << 12
#: Statistics, for which tiles are the only other way. Fewer than `UNPACKED` queries read keys as they lie, which is
#: faster with vectors of 256 bits and more. Without them, and of more queries, it is from 4 queries on, and from more
#: where there are many keys, which take longer to pack than to read in a tile: from 10 queries for 1,024 keys, from 37
#: for 16,384 (``12 m² >= n``).
STATISTICS_QUERIES, STATISTICS_KEYS = 4, 12
STATISTICS, STATISTICS_SMALL = 1.0, 5.0

# --------------------------------------------------------------------------------------- pairs of tokens, our kernels

#: Cells from which the kernels are faster than a few tiles.
PAIRS_CELLS = 1 << 14
PAIRS, PAIRS_SMALL = 0.3, 5.0
#: Coordinates up to which differences are faster than any dot product, and up to which there are kernels of them; from
#: there on a matrix product is faster.
DIRECT_COORDINATES, MOST_COORDINATES = 8, 16


def is_faster(problem: Problem, instruction_set: str) -> bool:
    """Return whether the kernels are the faster way for an output of dot products of this size."""
    if instruction_set not in OUTPUTS:
        return False
    q, k = problem.q, problem.k
    queries, products = q.shape[2], q.numel() * k.shape[2]
    if queries >= UNPACKED:
        return OUTPUTS[instruction_set][q.dtype].reached(queries, products)
    shared = instruction_set in SHARED_KEYS and q.shape[1] != k.shape[1]
    return queries <= FEW_QUERIES and (shared or products >= FEW_QUERIES_PRODUCTS[instruction_set])


def backward_is_faster(problem: Problem, instruction_set: str) -> bool:
    """Return whether the kernels are the faster way for the gradients of a dot product of this size.

    The thresholds of the output hold, except for 16-bit tokens, which have their own in `GRADIENTS`.
    """
    if problem.q.dtype.itemsize == 2 and instruction_set in GRADIENTS:
        _, _, m, n = problem.shape
        return GRADIENTS[instruction_set].reached(queries=m, products=problem.q.numel() * n)
    return is_faster(problem, instruction_set)


def threads_for(q: Tensor, n: int) -> int:
    """Return the number of threads with which the kernels multiply queries with `n` keys.

    Few queries are limited by memory, so that threads pay off at smaller sizes than for matrix products.
    """
    alone = ONE_THREAD_UNPACKED if q.shape[2] < UNPACKED else ONE_THREAD
    return torch.get_num_threads() if q.numel() * n > alone else 1


def _of_dot_products(problem: Problem, operation: Operation, instruction_set: str) -> float:
    if operation == "statistics":
        _, _, m, n = problem.shape
        unpacked = m < UNPACKED and instruction_set in OUTPUTS
        small = not unpacked and (m < STATISTICS_QUERIES or STATISTICS_KEYS * m * m < n)
        return STATISTICS_SMALL if small else STATISTICS
    may_have_places = type(problem.score) is not ScaledDot and instruction_set in OUTPUTS
    if may_have_places and problem.shape[2] * problem.shape[3] >= BIASED_CELLS and _adds_places(problem.score):
        return BIASED
    faster = backward_is_faster if operation == "backward" else is_faster
    return FASTER[instruction_set] if faster(problem, instruction_set) else SLOWER


def _adds_places(score: Score) -> bool:
    """Return whether a score of places is added somewhere in a score."""
    if isinstance(score, Sum):
        return any(part.positional or _adds_places(part) for part in (score.left, score.right))
    inner = getattr(score, "inner", None)
    return isinstance(inner, Score) and _adds_places(inner)


def _of_pairs(problem: Problem, operation: Operation, instruction_set: str) -> float:
    return PAIRS_SMALL if problem.shape[2] * problem.shape[3] < PAIRS_CELLS else PAIRS


# ------------------------------------------------------------------------------------------------------ all backends

Cost: TypeAlias = float | Callable[[Problem, Operation, str], float]

#: The cost of each backend by `Backend.row`: a number, or a function of the problem, the operation and the instruction
#: set of the kernels.
ROWS: Mapping[str, Cost] = {
    "dot products": _of_dot_products,
    "pairs": _of_pairs,
    "sdpa": 1.0,  # the measure of all others
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
