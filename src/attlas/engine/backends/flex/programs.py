"""FlexAttention, compiled once for each kind of mask and score, and trusted once its first results were compared.

Of the first matrix of a kind, and of the first one of another size, some rows are computed by their definition as well,
and so are their gradients where there are some: see `attlas.engine.trust`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from attlas.engine import trust
from attlas.engine.backend import Request
from attlas.engine.backends.flex.places import Kind
from attlas.engine.problem import spread_heads, tree_flatten, tree_map
from attlas.foundation.trees import rebuilt

_COMPARED_CELLS = 1 << 22  # cells of a comparison
_MOST_COMPARED_ROWS = 64  # most rows of one
#: Computes output and log-sum-exp of tokens, values, a score_mod, a BlockMask, a scale, and whether heads share keys.
Attention = Callable[[Tensor, Tensor, Tensor, Any, Any, float, bool], tuple[Tensor, Tensor]]

#: Computes a request, with values, by a program.
Run = Callable[[Request, Tensor], tuple[Tensor, Tensor]]


class Program:
    """The compiled function of one kind.

    Attributes
    ----------
    sizes : list
        Sizes of the matrices that were compared: the first one, for which it is compiled, and the first other one, with
        which it is compiled for all other sizes.
    """

    def __init__(self, number: int) -> None:
        self.sizes: list[tuple[int, ...]] = []
        self._first = compiled(2 * number, None)
        self._others = compiled(2 * number + 1, True)

    def is_trusted(self, sizes: tuple[int, ...]) -> bool:
        """Return whether results of this size need no comparison."""
        return sizes in self.sizes or len(self.sizes) > 1

    def attention_for(self, sizes: tuple[int, ...]) -> Attention:
        """Return the function for matrices of this size."""
        return self._first if self.sizes[:1] in ([], [sizes]) else self._others


#: The programs of this process, by device and kind.
programs: dict[Kind, Program] = {}


def program_of(kind: Kind) -> Program:
    """Return the program of a kind, which is compiled when it is first called."""
    if kind not in programs:
        programs[kind] = Program(len(programs))
    return programs[kind]


@cache
def families_of(kind: Kind, whole_blocks: bool) -> tuple[trust.Family, trust.Family]:
    """Return the families of a kind: its program for matrices of one size, and that for all sizes.

    Programs for one size are the same for all sizes that have whole blocks, and for all others.

    A family is a name under which `attlas.engine.trust` remembers whether its kernels were right.
    """
    text: list[str] = []
    leaves: list[object] = [kind]
    kept = True
    for part in leaves:  # the list grows meanwhile
        if isinstance(part, tuple):
            text.append(f"({len(part)}")
            leaves += part
        elif isinstance(part, torch.device):
            text.append(part.type)
        else:
            text.append(repr(part))
            kept = kept and isinstance(part, str | int | float | torch.dtype | None)  # else code of the user
    number = hashlib.sha256(" ".join(text).encode()).hexdigest()[:8]
    sizes = "a size of whole blocks" if whole_blocks else "a size with parts of blocks", "all sizes"
    first, others = (trust.Family("flex", f"{_kind_in_words(kind)}, {size}, {number}", kept) for size in sizes)
    return first, others


def _kind_in_words(kind: Kind) -> str:
    """Return a description of a kind for the user: mask, score, dtype, size of a token, gradients."""
    dtype, d, graph = (kind[3][part] for part in (0, 2, 3))  # type: ignore[index]
    words = [f"mask: {_joined_strings(kind[1]) or 'none'}", f"score: {_joined_strings(kind[2]) or 'a dot product'}"]
    return ", ".join([*words, str(dtype).removeprefix("torch."), f"d {d}", *["gradients"] * bool(graph)])


def _joined_strings(part: object) -> str:
    """Return the strings within nested tuples, joined by spaces, without the word "table" that each tensor has."""
    if isinstance(part, tuple):
        return " ".join(filter(None, map(_joined_strings, part)))
    return part if isinstance(part, str) and part != "table" else ""


def flex_attention(
    q: Tensor, k: Tensor, v: Tensor, score_mod: Any, block_mask: Any, scale: float, grouped: bool
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of FlexAttention, called in a program that torch compiles."""
    from torch.nn.attention import flex_attention as module

    request = getattr(module, "AuxRequest", None)  # since torch 2.9
    wanted: dict[str, Any] = {"return_lse": True} if request is None else {"return_aux": request(lse=True)}
    options: Any = {"FLOAT32_PRECISION": "'ieee'"}  # whatever the process has chosen for its products
    out, lse = module.flex_attention(q, k, v, score_mod, block_mask, scale, grouped, kernel_options=options, **wanted)
    return out, lse if isinstance(lse, Tensor) else lse.lse


def compiled(number: int, dynamic: bool | None) -> Attention:
    """Return FlexAttention under torch.compile, with a code object of its own.

    torch counts how often it compiles the code of one function, and gives up after eight times. With `dynamic` it takes
    all sizes, and all numbers of a mask, at once; without, it first takes one size for a constant.
    """

    def attention(
        q: Tensor, k: Tensor, v: Tensor, score_mod: Any, block_mask: Any, scale: float, grouped: bool
    ) -> tuple[Tensor, Tensor]:
        if not torch.compiler.is_compiling():  # the function itself would store the whole matrix
            raise RuntimeError("torch.compile is switched off")
        return flex_attention(q, k, v, score_mod, block_mask, scale, grouped)

    code = attention.__code__.replace(co_name=f"flex_attention_{number}")
    own = FunctionType(code, attention.__globals__, code.co_name, None, attention.__closure__)
    program: Attention = torch.compile(own, fullgraph=True, dynamic=dynamic)
    return program


# ---------------------------------------------------------------------------------------------------------- comparison


def difference(run: Run, request: Request, v: Tensor) -> str | None:
    """Return where some rows of a request differ from their definition; None where they agree.

    Cost: the whole product once more, and its backward where gradients are recorded, besides the rows.
    """
    graph = torch.is_grad_enabled()
    flat = [t.detach().requires_grad_(graph and t.requires_grad) for t in tree_flatten(request.tokens)]
    v = v.detach().requires_grad_(graph and v.requires_grad)
    request = replace(request, tokens=rebuilt(request.tokens, list(flat)))
    again = [replace(request) for _ in _compared_bands(request.problem.shape)]  # each has a graph of its own
    leaves = [t for t in (*flat, v, *(request.parameters() if graph else ())) if t.requires_grad]
    tolerance = trust.TOLERANCE[torch.promote_types(request.problem.q.dtype, v.dtype)]
    out, lse = run(request, v)
    for rows, other in zip(_compared_bands(request.problem.shape), again, strict=True):
        wanted, wanted_lse = defined(request, v, rows)
        some, some_lse = out[:, :, rows.start : rows.stop], lse[:, :, rows.start : rows.stop]
        pairs = [("its output", some, wanted), ("its log-sum-exp", some_lse, wanted_lse)]
        if leaves:
            # Any gradient of the output will do that differs from cell to cell.
            slope = torch.cos(torch.arange(some.numel(), device=some.device)).view(some.shape).to(some.dtype)
            both = [
                torch.autograd.grad(part, leaves, slope.to(part.dtype), allow_unused=True)
                for part in (wanted, run(other, v)[0][:, :, rows.start : rows.stop])
            ]
            pairs += _gradient_pairs(leaves, *both)
        for name, found, true in pairs:
            fault = trust.difference(name, found, true, tolerance * (4 if name == "a gradient" else 1))
            if fault is not None:
                return fault
    return None


def _gradient_pairs(
    leaves: Sequence[Tensor], wanted: Sequence[Tensor | None], found: Sequence[Tensor | None]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the gradients of both ways; one that is missing is 0."""
    for leaf, a, b in zip(leaves, wanted, found, strict=True):
        yield "a gradient", torch.zeros_like(leaf) if b is None else b, torch.zeros_like(leaf) if a is None else a


def _compared_bands(shape: tuple[int, int, int, int]) -> list[range]:
    """Return the two bands of rows to compare: in the middle of the matrix and at its end."""
    batch, heads, m, n = shape
    count = max(min(_COMPARED_CELLS // (batch * heads * n), _MOST_COMPARED_ROWS, m), 1)
    return [range(start, start + count) for start in sorted({(m - count) // 2, m - count})]


def defined(request: Request, v: Tensor, rows: range) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp of some rows as they are defined, in torch's own operations."""
    problem = request.problem
    batch, heads, _, n = problem.shape
    at = problem.tile(range(batch), range(heads), rows, range(n))
    q = tree_map(lambda t: t[:, :, rows.start : rows.stop].to(problem.dtype), request.tokens[0])
    k = tree_map(lambda t: spread_heads(t, heads).to(problem.dtype), request.tokens[1])
    q = tree_map(lambda t: spread_heads(t, heads), q)
    with problem.recording():
        logits = problem.score(q, k, at).expand(at.shape)
    if problem.mask is not None:
        logits = torch.where(problem.mask.allows(at), logits, -math.inf)
    every = logits
    if problem.sink is not None:
        sink = problem.sink.to(logits.dtype).view(1, -1, 1, 1)
        every = torch.cat([logits, sink.expand(*logits.shape[:3], 1)], dim=-1)
    none = (every == -math.inf).all(dim=-1, keepdim=True)
    weights = torch.softmax(every.masked_fill(none, 0.0), dim=-1).masked_fill(none, 0.0)[..., :n]
    return torch.matmul(weights, spread_heads(v, heads).to(weights.dtype)), torch.logsumexp(every, dim=-1)
