"""What the kernels read of a problem: tokens, mask, scale, cap, and what places add."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from attlas.engine.backend import Request
from attlas.engine.backends.triton import pairs
from attlas.engine.backends.triton.pairs import Pairs
from attlas.engine.backends.triton.runs import MOST as MOST_RUNS
from attlas.engine.backends.triton.runs import Run, runs_of
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
        Tokens, whose last axis has no gaps. Without a dot product those of `pairs`.
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
    pairs : Pairs, optional
        What is read of a score that is no dot product.
    m, n : int
        Queries and keys of `pairs`.
    more : tuple of (Tensor, Tensor)
        Further runs of keys of each query, which share no key.
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
    pairs: Pairs | None = None
    m: int = 0
    n: int = 0
    more: tuple[Run, ...] = ()

    @property
    def kind(self) -> int:
        """What a product is made of, as `attlas.engine.backends.triton.pairs.KINDS` counts; 0 for a dot product."""
        return 0 if self.pairs is None else self.pairs.kind

    @property
    def size(self) -> int:
        """Numbers of a token."""
        return int(self.q.shape[-1]) if self.pairs is None else self.pairs.units

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Sizes of the matrix: batch, heads, m, n."""
        if self.pairs is not None:
            return *self.q.shape[:2], self.m, self.n
        batch, heads, m, _ = self.q.shape
        return batch, heads, m, self.k.shape[2]

    @property
    def changed(self) -> bool:
        """Whether more is done to a dot product than to scale it."""
        return self.cap or self.keys is not None or self.distances is not None

    @property
    def width(self) -> int:
        """Numbers of a token as the kernels read it: a power of 2."""
        return padded(self.size) if self.pairs is None else LEAST

    def takes(self, v: Tensor) -> bool:
        """Whether the kernels multiply values: those of a dot product in the dtype of its tokens."""
        of_tokens = v.dtype is self.q.dtype if self.pairs is None else v.dtype in DTYPES
        return of_tokens and v.shape[-1] <= MOST

    def each(self) -> list[Operands]:
        """Return the same with one run of keys each: the kernels read one."""
        one = replace(self, more=())
        return [one, *(replace(one, first=first, stop=stop) for first, stop in self.more)]

    def arguments(self) -> dict[str, Any]:
        """Return what each kernel takes, by the names of its arguments; see `Operands` for each.

        The strides are ``q_batch``, ``q_head``, ``q_row`` and so on. A stride of 0 reads one number for all.
        """
        names = ("batch", "head", "row")
        strides = {
            f"{t}_{axis}": s for t in ("q", "k") for axis, s in zip(names, getattr(self, t).stride(), strict=False)
        }
        # `FIRST` and `STOP`, the two ends of a run of keys, have the same strides: ``run_batch`` and ``run_head``.
        tables = (("run", self.first), ("key", self.keys), ("distance", self.distances))
        for name, t in tables:
            for axis, place in zip(names[:2], (0, 1), strict=True):
                strides[f"{name}_{axis}"] = 0 if t is None or t.shape[place] == 1 else t.stride(place)
        _, heads, m, n = self.shape
        return {
            "Q": self.q,
            "K": self.k,
            "WEIGHTS": None if self.pairs is None else self.pairs.weights,
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
            "KIND": self.kind,
            "D": self.width,  # numbers of a token, padded to a power of 2
            "SIZE": self.size,  # the same, not padded
            "CAP": self.cap,
            "PTX": in_ptx(self.q),
            **strides,
        }


def in_ptx(t: Tensor) -> bool:
    """Return whether kernels on the device of a tensor are compiled to PTX."""
    return t.device.type == "cuda" and torch.version.hip is None


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
    if 0 in (*problem.shape, problem.q.shape[-1], problem.k.shape[-1]):
        return "there is nothing to compute"
    if runs_of(problem) is None:
        return f"its kernels take masks of attlas with up to {MOST_RUNS} runs of keys for each query"
    if dot is None:
        return pairs.unsupported(request)
    size = dot.q.shape[-1]
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
    return None


def operands_of(request: Request) -> Operands:
    """Return what the kernels read of a problem that they take; it is kept with the request's problem."""
    problem = request.problem
    kept = vars(problem)
    if "triton" not in kept or kept["triton"][0] is not request.dot:
        kept["triton"] = request.dot, _operands_of_request(request)
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
def _operands_of_request(request: Request) -> Operands:
    """Make the operands of a request: scales in base 2, and the mask as one run of keys per query."""
    problem, dot = request.problem, request.dot
    runs = _runs_on_device(problem)
    first, stop = runs[0] if runs else (None, None)
    sink = None if problem.sink is None else problem.sink.detach().to(torch.float64) * LOG2E
    if dot is None:
        q, k = request.tokens
        if not isinstance(q, Tensor) or not isinstance(k, Tensor):
            raise TypeError("the score is neither a dot product nor one of pairs")
        read = pairs.pairs_of(problem.score, q, k)
        mask = {"first": first, "stop": stop, "keys": None, "distances": None, "row": None, "sink": sink}
        _, _, m, n = problem.shape
        return Operands(read.q, read.k, LOG2E, 0.0, cap=False, **mask, pairs=read, m=m, n=n, more=tuple(runs[1:]))
    q, k = dot.q.detach(), dot.k.detach().to(dot.q.dtype)
    q, k = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k))
    scale = dot.scale
    if scale < 0 and not dot.cap:  # the running maximum of products is then that of logits
        q, scale = -q, -scale
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
        sink=sink,
        more=tuple(runs[1:]),
    )


def _runs_on_device(problem: Problem) -> list[Run]:
    """Return the runs of keys of each query on its device."""
    found = [
        (to_device(first, problem.device), to_device(stop, problem.device)) for first, stop in runs_of(problem) or []
    ]
    # Of one number for all, each row gets its own.
    sizes = [(*first.shape[:2], problem.shape[2]) for first, _ in found]
    return [
        (first.expand(size).to(torch.int32).contiguous(), stop.expand(size).to(torch.int32).contiguous())
        for (first, stop), size in zip(found, sizes, strict=True)
    ]


def _in_base_2(t: Tensor, device: torch.device) -> Tensor:
    """Return numbers that are added to logits in base 2, since the kernels compute exp2."""
    return (to_device(t, device).to(torch.float64) * LOG2E).float().contiguous()
