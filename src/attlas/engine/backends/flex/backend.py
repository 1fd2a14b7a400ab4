"""FlexAttention as a backend: dot products with masks and scores that torch's other fused kernels do not have.

The kernel is compiled by torch for the mask and the score, and gives output, log-sum-exp and gradients. It exists off
the CPU only: on a CPU it has no log-sum-exp and no gradient. Values that are NaN or infinite are summed as torch's
kernels do it: they may reach a row of the same block whose mask hides them.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import attlas.engine.backends.flex.programs as kinds
from attlas.engine import trust
from attlas.engine.backend import Backend, Request
from attlas.engine.backends.flex.blocks import BLOCK, block_mask_of
from attlas.engine.backends.flex.graph import recorded
from attlas.engine.backends.flex.places import Kind, Untranslatable
from attlas.engine.backends.flex.scores import Values, values_of
from attlas.engine.costs import Operation
from attlas.engine.held import parts_and_tensors
from attlas.engine.problem import Problem, match_heads
from attlas.foundation.checks import all_finite
from attlas.masks.documents import Documents

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LEAST_TOKEN_SIZE = 16  # numbers of a token that the kernel wants
_TOKEN_SIZE_MULTIPLE = 8  # and what their number is a multiple of


class Flex(Backend):
    """FlexAttention: outputs of dot products, with gradients that autograd records."""

    name = row = "flex"
    computes = frozenset({"output"})
    measured = False

    def unsupported(self, request: Request, operation: Operation) -> str | None:
        # The reason why torch's flex_attention does not compute this request; None where it does.
        problem = request.problem
        if request.dropout is not None:
            return "dropout has to be the same when it is recomputed"
        if 0 in (*problem.shape, problem.q.shape[-1]):
            return "there is nothing to compute"
        if problem.q.dtype not in DTYPES:
            return "torch compiles it for float32 and 16 bits only"
        if not can_compile():
            return "torch compiles it by Triton, which is not installed"
        if reason := _reads_elsewhere(problem):
            return reason
        try:
            translated = _translated_request(request)
        except Untranslatable as reason:
            return str(reason)
        # The two programs of this kind, for one size and for all, may have been found wrong before: see
        # `attlas.engine.trust`.
        families = kinds.families_of(_program_key(request, translated), _has_whole_blocks(problem))
        faults = (trust.known_fault(family, request.device) for family in families)
        return next((fault for fault in faults if fault is not None), None)

    def recorded(self, request: Request, v: Tensor) -> tuple[Tensor, Tensor | None] | None:
        """Run the compiled program of this kind of mask and score.

        Compare it with the definition when it is first used.

        A kind is the key of a program: device, mask, score, dtypes and sizes (`_program_key`).
        """
        kind, device = _program_key(request, _translated_request(request), v), request.device
        program = kinds.program_of(kind)
        sizes = (*request.problem.shape, v.shape[1])
        attention = program.attention_for(sizes)
        # The first family is the program for the first size that was seen, the second that for all others.
        family = kinds.families_of(kind, _has_whole_blocks(request.problem))[program.sizes[:1] not in ([], [sizes])]

        def run(request: Request, v: Tensor) -> tuple[Tensor, Tensor]:
            return computed(request, v, attention)

        known = trust.is_known(family, device)
        if not (known and program.is_trusted(sizes)):
            if not known and not all_finite(request.problem.q, request.problem.k, v):
                return None  # nothing can be compared: tiles sum these numbers
            if trust.fault_of(family, device, lambda: kinds.difference(run, request, v), request.plan) is not None:
                return None
            program.sizes.append(sizes)
        try:
            graph = torch.is_grad_enabled() and (v.requires_grad or request.problem.requires_grad)
            return recorded(request, v, run) if graph else run(request, v)
        except Exception as error:  # noqa: BLE001 - whatever torch's compiler raises, tiles compute the product
            trust.failed(family, device, error, request.plan)
            return None

    def forward(self, request: Request, v: Tensor) -> tuple[Tensor, Tensor] | None:
        return None  # `recorded` has failed, or found numbers that it leaves to tiles


@cache
def can_compile() -> bool:
    """Return whether the compiler of kernels is there."""
    return find_spec("triton") is not None


def computed(request: Request, v: Tensor, attention: kinds.Attention) -> tuple[Tensor, Tensor]:
    """Return the output with its graph, and the log-sum-exp without.

    Parameters
    ----------
    request : Request
        The matrix.
    v : Tensor, shape (batch, value heads, n, e)
        Values.
    attention : callable
        FlexAttention, compiled or not.

    Raises
    ------
    Untranslatable
        If mask or score have no form of one pair.
    """
    problem = request.problem
    block_mask = None if problem.mask is None else block_mask_of(problem)[1]
    out, lse = attended(problem, _translated_request(request)[0], block_mask, v, attention)
    return out, lse.detach()


def attended(
    problem: Problem, values: Values, block_mask: Any, v: Tensor, attention: kinds.Attention
) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp, both with their graph.

    Parameters
    ----------
    problem : Problem
        The matrix.
    values : Values
        Its score.
    block_mask : BlockMask or None
        Its mask.
    v : Tensor, shape (batch, value heads, n, e)
        Values.
    attention : callable
        FlexAttention, compiled or not.
    """
    heads, dtype = problem.shape[1], torch.promote_types(values.q.dtype, v.dtype)
    k, own = match_heads(values.k.to(dtype), v.to(dtype), heads)
    q, k, own = _zero_padded(values.q.to(dtype)), _zero_padded(k), _zero_padded(own)
    out, lse = attention(q, k, own, values.change, block_mask, values.scale, k.shape[1] != heads)
    out = out.narrow(-1, 0, v.shape[-1])
    if values.row is not None:
        lse = lse + values.row
    if problem.sink is not None:
        # The output times e^lse / (e^lse + e^sink), and log(e^lse + e^sink).
        sink = problem.sink.to(lse.dtype).view(1, -1, 1)
        nothing = lse == -torch.inf  # such a row has an output of 0
        finite = torch.where(nothing, 0.0, lse)
        out = out * torch.where(nothing, 0.0, torch.sigmoid(finite - sink)).unsqueeze(-1)
        lse = torch.where(nothing, sink, torch.logaddexp(finite, sink))
    return out.to(v.dtype), lse


def _translated_request(request: Request) -> tuple[Values, Kind]:
    """Return the score of a request as a function of one pair, and the kind of its mask; kept with the request.

    A kind is a key: programs are compiled once for each.
    """
    kept = vars(request)
    if "pairs" not in kept:
        problem = request.problem
        with problem.recording():
            values = values_of(problem.score, *request.tokens, problem)
        kept["pairs"] = values, () if problem.mask is None else block_mask_of(problem)[0].kind
    found: tuple[Values, Kind] = kept["pairs"]
    return found


def _program_key(request: Request, translated: tuple[Values, Kind], v: Tensor | None = None) -> Kind:
    """Return the key of a compiled program: device, mask, score, dtypes and sizes.

    Without v, as if values were like keys.
    """
    problem, (values, mask) = request.problem, translated
    graph = torch.is_grad_enabled() and (problem.requires_grad or (v is not None and v.requires_grad))
    sizes: tuple[Any, ...] = (problem.q.dtype, values.q.dtype, values.q.shape[-1], graph)
    of_values = (problem.q.dtype, problem.q.shape[-1]) if v is None else (v.dtype, v.shape[-1])
    few = problem.shape[2] < 128  # for which torch has another kernel
    return problem.device, mask, values.kind, sizes, of_values, problem.group, few, problem.sink is not None


def _has_whole_blocks(problem: Problem) -> bool:
    """Return whether no block of the matrix is cut off at its end."""
    return not any(size % BLOCK for size in problem.shape[2:])


def _reads_elsewhere(problem: Problem) -> str | None:
    """Return why functions of the user cannot be compiled; None where they can."""
    if problem.detached and problem.runs_own_code and any(t.requires_grad for t in problem.score_tensors):
        return "a function of a score would give its tensors a gradient that is not wanted"
    read = list(problem.read)
    if problem.mask is not None:
        parts, held = parts_and_tensors(problem.mask)
        if not held and not any(isinstance(part, Documents) for part in parts):  # else some may be those of attlas
            read += [version.tensor for version in problem.versions if version.name == "mask"]
    ids = {problem.batch_ids.data_ptr(), problem.head_ids.data_ptr()}  # which tiles copy
    if any(t.device != problem.device and t.data_ptr() not in ids for t in read):
        return "a function of the user reads a tensor that is on another device"
    return None


def _zero_padded(t: Tensor) -> Tensor:
    """Return vectors filled up with zeros to a size that the kernel takes."""
    size = t.shape[-1]
    width = max(-(-size // _TOKEN_SIZE_MULTIPLE) * _TOKEN_SIZE_MULTIPLE, _LEAST_TOKEN_SIZE)
    t = t if width == size else functional.pad(t, (0, width - size))
    return t if t.stride(-1) == 1 else t.contiguous()
