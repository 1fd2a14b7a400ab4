"""torch's fused attention kernels off the CPU: which one takes some tokens, and its call with the log-sum-exp.

Where no fused kernel takes its tokens, ``scaled_dot_product_attention`` computes the whole matrix, several times over,
and says nothing. Here the kernels are asked first. They answer from sizes, dtypes and the kind of GPU, so that no
number is read on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.backends import cuda
from torch.nn import functional
from torch.nn.attention import SDPBackend

from attlas.engine.costs import Operation
from attlas.engine.problem import Problem, match_heads, spread_heads
from attlas.masks.local import Causal
from attlas.scores.base import Dot

#: Bytes of a float32 matrix up to which a kernel that stores it may be taken, on a device without fused ones.
DENSE_BYTES = 64 << 20

_SIZE_MULTIPLE = 8  # off the CPU kernels read 16 bytes at a time: 8 numbers of 16 bits


class Kernel(NamedTuple):
    """A fused kernel of CUDA.

    Parameters
    ----------
    choice : SDPBackend
        What torch calls it.
    takes : callable
        Returns whether it computes an attention of these `SDPAParams`; torch's own answer, which also minds the
        switches ``torch.backends.cuda.enable_...``.
    run : callable
        Returns output and log-sum-exp, given q, k, v, whether the mask is causal, and the scale.
    """

    choice: SDPBackend
    takes: Callable[[Any], bool]
    run: Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]


def _flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp by the flash-attention kernel of CUDA."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention.default(q, k, v, 0.0, causal, scale=scale)
    return out, lse


def _memory_efficient_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp by the memory-efficient kernel of CUDA."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention.default(
        q, k, v, None, True, 0.0, causal, scale=scale
    )
    return out, lse[..., : q.shape[2]]  # its rows are filled up to a multiple of 32


def _cudnn_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp by the kernel of cuDNN."""
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention.default(
        q, k, v, None, True, 0.0, causal, False, scale=scale
    )
    return out, lse.reshape(q.shape[:3])  # with one more axis of size 1


#: In the order in which torch tries them, but for GPUs on which it prefers cuDNN.
KERNELS = (
    Kernel(SDPBackend.FLASH_ATTENTION, cuda.can_use_flash_attention, _flash_attention),
    Kernel(SDPBackend.EFFICIENT_ATTENTION, cuda.can_use_efficient_attention, _memory_efficient_attention),
    Kernel(SDPBackend.CUDNN_ATTENTION, cuda.can_use_cudnn_attention, _cudnn_attention),
)


def unsupported(problem: Problem, dot: Dot, operation: Operation) -> str | None:
    """Return why torch's kernels of another device than a CPU do not compute an operation; None where one does."""
    square = is_square_causal(problem)
    if not (problem.mask is None or square) or dot.bias is not None or problem.sink is not None:
        return "off the CPU only whole matrices and square causal masks without a sink are handed on"
    if operation == "backward":
        return "off the CPU autograd records its gradients, or tiles compute them"
    q, k = _stand_in_for_tokens(dot.q), _stand_in_for_tokens(dot.k.to(dot.q.dtype))
    if find_call(q, k, k, square) is None:  # as if values were like keys
        return "torch would store the whole matrix: no fused kernel takes these tokens on this device"
    return None


def is_square_causal(problem: Problem) -> bool:
    """Return whether the mask is that of the causal flag of torch's function: key j <= query i, with m = n."""
    mask = problem.mask
    return isinstance(mask, Causal) and not mask.offset and problem.shape[2] == problem.shape[3]


class Call(NamedTuple):
    """A kernel, and queries, keys and values in the form that it takes."""

    kernel: Kernel | None  # None: torch's own function, which chooses a kernel itself
    q: Tensor
    k: Tensor
    v: Tensor


def find_call(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Call | None:
    """Return how torch computes an attention without storing its matrix; None where it cannot.

    Parameters
    ----------
    q, k, v : Tensor, shapes (batch, heads, m, d), (batch, key heads, n, d) and (batch, value heads, n, e)
        Tokens and values.
    causal : bool
        Whether key j is hidden from query i < j.

    Notes
    -----
    Cost: where d or e is not a multiple of 8, or where they differ, a copy of the tokens; where no kernel takes key
    heads that several query heads share, a copy of keys and values for each query head.
    """
    if q.device.type == "cuda":
        if q.dtype is torch.float64:
            return None
        for tokens in _layouts_of_tokens(q, k, v):
            kernel = _kernel_of_torch(*tokens, causal)
            if kernel is not None:
                return Call(kernel, *tokens)
        return None
    batch, heads, m, _ = q.shape
    small = 4 * batch * heads * m * k.shape[2] <= DENSE_BYTES
    k, v = match_heads(k, v, heads)
    return Call(None, q, k, v) if small or _chooses_fused(q, k, v, causal) else None


def run(call: Call, e: int, causal: bool, scale: float) -> tuple[Tensor, Tensor | None]:
    """Return the output, shape (batch, heads, m, e), with its graph, and the log-sum-exp without; None if not known."""
    kernel, q, k, v = call
    if kernel is None:
        grouped = k.shape[1] != q.shape[1]
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)
        return out, None
    out, lse = kernel.run(q, k, v, causal, scale)
    return out[..., :e], lse.detach()


def of_one_size(*tensors: Tensor) -> list[Tensor]:
    """Return vectors filled up with zeros to one size, off the CPU a multiple of 8, their last axis without gaps."""
    width = max(t.shape[-1] for t in tensors)
    if tensors[0].device.type != "cpu":
        width = -(-width // _SIZE_MULTIPLE) * _SIZE_MULTIPLE
    wide = (functional.pad(t, (0, width - t.shape[-1])) if t.shape[-1] != width else t for t in tensors)
    return [t if t.stride(-1) == 1 else t.contiguous() for t in wide]


def _stand_in_for_tokens(t: Tensor) -> Tensor:
    """Return a stand-in for tokens, which kernels are asked about.

    The sizes of the copy that `of_one_size` would make, uncopied.
    """
    width = -(-t.shape[-1] // _SIZE_MULTIPLE) * _SIZE_MULTIPLE
    if t.device.type != "cuda" or width == t.shape[-1]:
        return t
    return t.new_empty(width, requires_grad=t.requires_grad).expand(*t.shape[:-1], width)


def _layouts_of_tokens(q: Tensor, k: Tensor, v: Tensor) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield the tokens in the two forms that a kernel may take.

    Keys shared by groups of query heads, then repeated for each.
    """
    heads = q.shape[1]
    q, k, v = of_one_size(q, k, v)
    k, v = match_heads(k, v, heads)
    yield q, k, v
    if k.shape[1] != heads:
        yield q, spread_heads(k, heads), spread_heads(v, heads)


def _kernel_of_torch(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Kernel | None:
    """Return the kernel that torch would take for tokens on a GPU; None where it would store the matrix."""
    # Where several kernels take the tokens, torch says which one it prefers.
    grouped = k.shape[1] != q.shape[1]
    given = cuda.SDPAParams(q, k, v, None, 0.0, causal, grouped)
    kernels = [kernel for kernel in KERNELS if kernel.takes(given)]
    if len(kernels) < 2:
        return kernels[0] if kernels else None
    choice = torch._fused_sdp_choice(q, k, v, None, 0.0, causal, enable_gqa=grouped)
    return next((kernel for kernel in kernels if kernel.choice.value == choice), kernels[0])


def _chooses_fused(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> bool:
    """Return whether torch chooses a fused kernel on a device other than a CPU or CUDA; mps has no such choice."""
    if q.device.type == "mps":
        return False
    grouped = k.shape[1] != q.shape[1]
    try:
        choice = torch._fused_sdp_choice(q, k, v, None, 0.0, causal, enable_gqa=grouped)
    except RuntimeError:  # the device has none, or all are switched off
        return False
    return choice not in (SDPBackend.MATH.value, SDPBackend.ERROR.value)
