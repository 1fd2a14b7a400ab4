"""What the kernels read of a problem: tokens, mask, scale, cap, and what places add."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from attlas.engine.backend import Request
from attlas.engine.problem import Problem
from attlas.foundation.devices import to_device
from attlas.scores.base import Dot
from attlas.scores.bias import Bias

LOG2E = 1.4426950408889634
LN2 = math.log(2.0)

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Numbers of a token that the kernels take; fewer are filled up with zeros where they are read.
MOST, LEAST = 256, 16


@dataclass(frozen=True, eq=False)
class Operands:
    """The tensors and numbers that each kernel gets.

    Parameters
    ----------
    q, k : Tensor, shape (batch, heads, m, d) and (batch, key heads, n, d)
        Tokens, whose last axis has no gaps.
    scale2, rate : float
        The base-2 logit is ``q·k scale2``, and `rate` 0. With a cap it is ``scale2 tanh(q·k rate ln 2 / 2)``:
        `scale2` is the cap of base 2, and ``2^(q·k rate)`` is ``exp(2 x)``, where x is the argument of the tangent.
    cap : bool
        Whether there is a cap.
    first, stop : Tensor or None, shape (batch or 1, heads or 1, m)
        The run of keys of each query, int32; None where all see all keys.
    keys, distances : Tensor or None, shape (batch or 1, heads or 1, n) and (..., m + n - 1)
        What is added to the base-2 logits.
    row : Tensor or None, shape (batch or 1, heads or 1, m)
        What is added to the logits of each query, in nats, which softmax does not see.
    sink : Tensor or None, shape (heads,)
        The sink in base 2, float64.
    """

    q: Tensor
    k: Tensor
    scale2: float
    rate: float
    cap: bool
    first: Tensor | None
    stop: Tensor | None
    keys: Tensor | None
    distances: Tensor | None
    row: Tensor | None
    sink: Tensor | None

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes of the matrix: batch, heads, m, n."""
        batch, heads, m, _ = self.q.shape
        return batch, heads, m, self.k.shape[2]

    @property
    def changed(self) -> bool:
        """Whether more is done to a dot product than to scale it."""
        return self.cap or self.keys is not None or self.distances is not None

    @property
    def width(self) -> int:
        """Numbers of a token as the kernels read it: a power of 2."""
        return padded(self.q.shape[-1])

    def arguments(self) -> dict[str, Any]:
        """Return what each kernel takes, by the names of its arguments."""
        names = ("batch", "head", "row")
        strides = {
            f"{t}_{axis}": s for t in ("q", "k") for axis, s in zip(names, getattr(self, t).stride(), strict=False)
        }
        tables = (("run", self.first), ("key", self.keys), ("distance", self.distances))
        for name, t in tables:
            for axis, place in zip(names[:2], (0, 1), strict=True):
                strides[f"{name}_{axis}"] = 0 if t is None or t.shape[place] == 1 else t.stride(place)
        _, heads, m, n = self.shape
        return {
            "Q": self.q,
            "K": self.k,
            "FIRST": self.first,
            "STOP": self.stop,
            "KEYS": self.keys,
            "DISTANCES": self.distances,
            "m": m,
            "n": n,
            "heads": heads,
            "group": heads // self.k.shape[1],
            "scale2": self.scale2,
            "rate": self.rate,
            "D": self.width,
            "SIZE": self.q.shape[-1],
            "CAP": self.cap,
            **strides,
        }


def padded(size: int) -> int:
    """Return the numbers that a kernel reads of a vector: a power of 2 from 16 on.

    Examples
    --------
    >>> [padded(size) for size in (1, 16, 80)]
    [16, 16, 128]
    """
    return max(1 << (size - 1).bit_length(), LEAST)


def unsupported(request: Request) -> str | None:
    """Return why the kernels do not read a problem, as a part of a sentence; None where they do."""
    problem, dot = request.problem, request.dot
    if dot is None:
        return "the score is not a dot product"
    size = dot.q.shape[-1]
    if 0 in (*problem.shape, size):
        return "there is nothing to compute"
    if dot.q.dtype not in DTYPES:
        return "its kernels are for float32 and 16 bits"
    if size > MOST:
        return f"its kernels take vectors of up to {MOST} numbers"
    if not dot.scale or not math.isfinite(dot.scale):
        return "the factor of the dot product is 0"
    if dot.bias is not None:
        bias = bias_of(problem, dot)
        if bias is None or bias.cell is not None:
            return "its kernels read numbers of keys, queries and distances, and no tensor of pairs"
    if problem.sink is not None and (dot.row is not None or _has_query_terms(problem, dot)):
        return "the sink needs the constant of each row"
    if problem.mask is not None and problem.allowed_runs is None:
        return "its kernels take masks with one run of keys for each query"
    return None


def operands_of(request: Request) -> Operands:
    """Return what the kernels read of a problem that they take; it is kept with the request's problem."""
    problem = request.problem
    kept = vars(problem)
    if "triton" not in kept or kept["triton"][0] is not request.dot:
        kept["triton"] = request.dot, _made(request)
    found: Operands = kept["triton"][1]
    return found


def bias_of(problem: Problem, dot: Dot) -> Bias | None:
    """Return the positional terms that the score adds, without a graph.

    None where they have no form that kernels read.
    """
    kept = vars(problem)  # computed once for each problem, which keeps it
    if "triton bias" not in kept:
        with torch.no_grad():
            own = None if dot.bias is None else dot.bias.bias(problem.tile(*map(range, problem.shape)))
        kept["triton bias"] = own
    found: Bias | None = kept["triton bias"]
    return found


def _has_query_terms(problem: Problem, dot: Dot) -> bool:
    """Return whether the score adds a number per query."""
    bias = None if dot.bias is None else bias_of(problem, dot)
    return bias is not None and bias.query is not None


@torch.no_grad()
def _made(request: Request) -> Operands:
    """Make the operands of a request: scales in base 2, and the mask as one run of keys per query."""
    problem, dot = request.problem, request.dot
    if dot is None:
        raise TypeError("the score is no dot product")
    q, k = dot.q.detach(), dot.k.detach().to(dot.q.dtype)
    q, k = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k))
    scale = dot.scale
    if scale < 0 and not dot.cap:  # the running maximum of products is then that of logits
        q, scale = -q, -scale
    first = stop = None
    if problem.allowed_runs is not None:
        # Of one number for all, each row gets its own.
        first, stop = (
            t.expand(*t.shape[:2], problem.shape[2]).to(torch.int32).contiguous() for t in problem.allowed_runs
        )
    bias = None if dot.bias is None else bias_of(problem, dot)
    row = dot.row
    keys = distances = None
    if bias is not None:
        keys, distances = (None if t is None else _in_base_2(t, problem.device) for t in (bias.key, bias.distance))
        if bias.query is not None:
            own = to_device(bias.query, problem.device).to(torch.float64)
            row = own if row is None else row + own
    return Operands(
        q,
        k,
        scale2=(dot.cap or scale) * LOG2E,  # see `Operands` for the equation
        rate=2.0 * scale / dot.cap * LOG2E if dot.cap else 0.0,
        cap=bool(dot.cap),
        first=first,
        stop=stop,
        keys=keys,
        distances=distances,
        row=row,
        sink=None if problem.sink is None else problem.sink.detach().to(torch.float64) * LOG2E,
    )


def _in_base_2(t: Tensor, device: torch.device) -> Tensor:
    """Return numbers that are added to logits in base 2, since the kernels compute exp2."""
    return (to_device(t, device).to(torch.float64) * LOG2E).float().contiguous()
