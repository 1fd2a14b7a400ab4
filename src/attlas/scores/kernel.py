"""Scores made of distances: the kernels of kernel regression, as log-weights."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from attlas.errors import DtypeError, ShapeError, kind, public
from attlas.foundation.checks import as_floats, as_plain
from attlas.foundation.compat import tracing
from attlas.foundation.devices import DeviceCopies, answer_of
from attlas.foundation.tiles import Tile, cut
from attlas.foundation.trees import recorded_gradients
from attlas.scores.base import Dot, Score, Tokens, check_same_size, with_parameters

__all__ = ["Boxcar", "Epanechnikov", "Gaussian", "Laplace", "Triangular"]

# Cells that the loop over coordinates holds at once: three tensors of this size stay in a core's cache.
_CELLS_AT_ONCE = 1 << 16


class Distance(torch.autograd.Function):
    """``Σ_c |scale_c (q_ic - k_jc)|^power`` without a (rows, columns, d) tensor, forward or backward."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, scale: Tensor, power: int) -> Tensor:
        """Return the sum of ``|scale (q - k)| ** power`` over the coordinates of each pair, shape (..., m, n)."""
        ctx.save_for_backward(q, k, scale)
        ctx.power = power
        # One coordinate of all tokens lies together.
        return distances(q.mT.contiguous(), k.mT.contiguous(), power, scale)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # Gradients of q, k and scale, one coordinate at a time. Where they are to be differentiated again, autograd
        # records the formula instead.
        q, k, scale = ctx.saved_tensors
        if torch.is_grad_enabled():
            gaps = (q.unsqueeze(-2) - k.unsqueeze(-3)) * scale
            powers = gaps.square() if ctx.power == 2 else gaps.abs()
            return *recorded_gradients(powers.sum(-1), (q, k, scale), grad), None
        q, k = q.mT.contiguous(), k.mT.contiguous()
        grad_q, grad_k, grad_scale = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(scale)
        for rows in _bands_of_rows(q, k):
            grad_rows = grad[..., rows.start : rows.stop, :]
            for c in range(q.shape[-2]):
                gap = _scaled_difference(q, k, scale, rows, c)
                # Without the factors that are the same for all pairs, which are multiplied once at the end.
                slope = grad_rows * gap if ctx.power == 2 else grad_rows * gap.sign()
                grad_q[..., c, rows.start : rows.stop] = slope.sum(-1)
                grad_k[..., c, :] -= slope.sum(-2)
                if ctx.needs_input_grad[2]:
                    grad_scale[c] += torch.dot(slope.flatten(), gap.flatten())
        factor = scale * ctx.power
        return grad_q.mT * factor, grad_k.mT * factor, grad_scale * (ctx.power / scale), None


def distances(q: Tensor, k: Tensor, power: int, scale: Tensor | None = None) -> Tensor:
    """Return ``Σ_c |scale_c (q_ci - k_cj)|^power``, shape (..., m, n), of tokens (..., d, m) and (..., d, n)."""
    total = q.new_zeros(*q.shape[:-2], q.shape[-1], k.shape[-1])
    for rows in _bands_of_rows(q, k):
        part = total[..., rows.start : rows.stop, :]
        for c in range(q.shape[-2]):
            gap = _scaled_difference(q, k, scale, rows, c)
            if power == 2:
                part.addcmul_(gap, gap)
            else:
                part.add_(gap.abs_())
    return total


def _bands_of_rows(q: Tensor, k: Tensor) -> list[range]:
    """Return ranges of queries that each have about `_CELLS_AT_ONCE` pairs with all keys; off the CPU one range."""
    # On an accelerator a launch costs more than a cache miss: one band.
    cells = _CELLS_AT_ONCE if q.device.type == "cpu" else 1 << 62
    columns = max(1, k.shape[:-2].numel() * k.shape[-1])
    return list(cut(q.shape[-1], max(1, cells // columns)))


def _scaled_difference(q: Tensor, k: Tensor, scale: Tensor | None, rows: range, c: int) -> Tensor:
    """Return the differences ``scale_c (q_c - k_c)`` of a coordinate c, shape (..., rows, n).

    `rows` are the queries that are taken; the keys are taken all.
    """
    gap = q[..., c, rows.start : rows.stop].unsqueeze(-1) - k[..., c, :].unsqueeze(-2)
    return gap if scale is None else gap.mul_(scale[c])


def checked_bandwidth(bandwidth: object) -> Tensor:
    """Return the bandwidth as a floating-point tensor, shape () or (d,); raise where one is not finite and above 0."""
    value = as_plain("bandwidth", as_floats(bandwidth))
    if not value.is_floating_point():
        rule = "bandwidth must be a number, a sequence of numbers or a floating-point tensor."
        found = f"a {str(value.dtype).removeprefix('torch.')} tensor" if value is bandwidth else kind(bandwidth)
        raise DtypeError(rule, found, "give a float, such as bandwidth=1.0, or tensor.float().", bandwidth=bandwidth)
    if value.ndim > 1 or not value.numel():
        rule = "bandwidth must be one number, or one for each coordinate of q and k."
        fix = "give a scalar, or a tensor of shape (d,)."
        raise ShapeError(rule, f"{value.ndim} axes, {value.numel()} numbers", fix, bandwidth=value)
    if tracing():  # a program that torch traces can look at Python's numbers alone
        wrong = [] if isinstance(bandwidth, Tensor) else [h for h in _as_list(bandwidth) if not 0 < h < math.inf]
    else:
        wrong = value.detach()[~(value.detach().isfinite() & (value.detach() > 0))].tolist()
    if wrong:
        rule = "every bandwidth must be a finite number above 0."
        fix = "give the distance at which a weight should have fallen, such as bandwidth=1.0."
        raise ShapeError(rule, f"bandwidth = {wrong[0]!r}", fix)
    return value


def _as_list(numbers: Any) -> list[float]:
    """Return a single number, or a sequence of numbers, as a list."""
    return list(numbers) if isinstance(numbers, Sequence) else [numbers]


# From this size of token on, one matrix product beats a loop over coordinates by 5 times and more.
_DOT_SIZE = 8
# Largest error of a log-weight that the dot-product form may cause; see Gaussian, Notes.
_LOG_WEIGHT_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


class _DistanceKernel(Score):
    """A function of the distance between query and key, in units of the bandwidth."""

    scratch = 4
    position_free = True
    power = 2

    @public()
    def __init__(self, bandwidth: float | Sequence[float] | Tensor = 1.0, learn: bool = False) -> None:
        super().__init__()
        value = checked_bandwidth(bandwidth)
        self.size = value.shape[0] if value.ndim else None
        self._copies = DeviceCopies()
        self.log_bandwidth: Tensor | None
        if not learn:
            self.register_parameter("log_bandwidth", None)
            self.given = value  # no buffer: it stays exact, whatever the module is cast to
            return
        if value.requires_grad:
            rule = "learn=True makes a parameter of its own, so bandwidth must not require a gradient."
            fix = "leave learn out; the tensor is learned as it is."
            raise ShapeError(rule, "requires_grad = True", fix, bandwidth=bandwidth)
        start = value if isinstance(bandwidth, Tensor) else value.to(torch.get_default_dtype())
        # The logarithm is learned, so that the bandwidth stays above 0.
        self.log_bandwidth = nn.Parameter(start.log())

    def to_dict(self) -> dict[str, Any]:
        # Under "bandwidth" stands the logarithm where that is learned, so that it comes back with the same bits.
        learn = self.log_bandwidth is not None
        return {"learn": learn, "bandwidth": self.log_bandwidth if learn else self.given}

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> Self:
        # The score of settings that `to_dict` gave.
        if not settings["learn"]:
            return cls(settings["bandwidth"])
        log = settings["bandwidth"].detach()
        return with_parameters(lambda: cls(log.exp(), learn=True), {"log_bandwidth": log})  # log(exp(x)) need not be x

    @property
    def bandwidth(self) -> Tensor:
        """Bandwidth of every coordinate, shape () or (d,), above 0."""
        if self.log_bandwidth is not None:
            return self.log_bandwidth.exp()
        return self.given

    def forward(self, q: Tokens, k: Tokens, at: Tile) -> Tensor:
        # Differences of the tokens as given are exact; those of scaled tokens, made in `project`, would have a
        # rounding error that grows with spread / bandwidth.
        # 1 / bandwidth for each coordinate.
        scale = q.new_ones(q.shape[-1])  # type: ignore[union-attr]  # these tokens are one tensor
        scale = scale / self._bandwidth_like(scale)
        if tracing():  # a program that torch records is made of torch's own operations
            gap = (q.unsqueeze(-2) - k.unsqueeze(-3)) * scale  # type: ignore[union-attr]  # one tensor each
            return self.log_weight((gap.square() if self.power == 2 else gap.abs()).sum(-1))
        distance: Tensor = Distance.apply(q, k, scale, self.power)  # type: ignore[no-untyped-call]
        return self.log_weight(distance)

    @abstractmethod
    def log_weight(self, distance: Tensor) -> Tensor:
        """Return the log of the kernel, given the distance of each pair in bandwidths, squared where `power` is 2."""

    def check(self, q: Tensor, k: Tensor, heads: int) -> None:
        # Raise a ShapeError where tokens of these sizes cannot be scored.
        name = f"{type(self).__name__}()"
        check_same_size(name, q, k, "give both the same coordinates, or project them to one size.")
        if self.size is not None and self.size != q.shape[-1]:
            rule = f"bandwidth of {name} must be one number, or one for each coordinate of q and k."
            found = f"d = {q.shape[-1]} in q and k, {self.size} bandwidths"
            fix = f"give {q.shape[-1]} bandwidths, or one number for all coordinates."
            raise ShapeError(rule, found, fix, arguments={"q (..., m, d)": q, "k (..., n, d)": k}, where="attend()")

    def extra_repr(self) -> str:
        h = self.bandwidth.detach()
        shown = f"{h.item():.6g}" if h.ndim == 0 else f"<{h.shape[0]} numbers>"
        return f"bandwidth={shown}" + (", learn=True" if self.log_bandwidth is not None else "")

    def _bandwidth_like(self, like: Tensor) -> Tensor:
        """Return the bandwidth with the dtype and device of `like`, shape () or (d,)."""
        h = self.bandwidth
        return (
            self._copies.of(h, like.device, like.dtype) if h.ndim else h
        )  # one number works with every dtype and device, and needs no copy


class Gaussian(_DistanceKernel):
    """Gaussian kernel, ``s_ij = -½ ‖(q_i - k_j) / h‖²``; with softmax it is Nadaraya-Watson regression.

    Parameters
    ----------
    bandwidth : float, sequence of float, or Tensor of shape () or (d,)
        h, for all coordinates or for each; the default is 1. A tensor that requires a gradient is learned
        as it is (nothing then keeps it above 0).
    learn : bool
        Whether h becomes a parameter, stored as its logarithm so that it stays above 0. The learned ``w``
        of parametric attention pooling is ``1 / h``.

    Raises
    ------
    ShapeError
        If a bandwidth is not a finite number above 0.
    DtypeError
        If `bandwidth` is neither numbers nor a floating-point tensor.

    See Also
    --------
    Laplace : heavier tails.
    Epanechnikov : the same near 0, and no weight beyond one bandwidth.

    Notes
    -----
    Below 8 coordinates the tile computes differences, ``3 d`` operations a pair. From 8 on the score is the
    dot product of ``(q', -½‖q'‖², 1)`` and ``(k', 1, -½‖k'‖²)``, with ``q' = (q - c) / h``, ``k' = (k - c) / h``
    and c the mean of the keys, which changes no distance. Its rounding error, measured, is about
    ``u (1 + d / 64) (max ‖q'‖² + max ‖k'‖²)``, with u the unit round-off. Where that exceeds 1e-5 in float32,
    tiles compute the dot product in float64 (error below 1e-7); where it exceeds that too, or 1e-12 for float64
    tokens, differences again. Memory: ``(m + n) (d + 2)`` numbers, and the tile. On an accelerator the choice
    waits for the device, once for each matrix: it decides which kernels run.

    References
    ----------
    .. [1] Nadaraya, "On estimating regression", 1964. Watson, "Smooth regression analysis", 1964.

    Examples
    --------
    >>> import torch, attlas
    >>> q, k = torch.zeros(1, 1), torch.tensor([[0.0], [1.0], [2.0]])
    >>> attlas.attend(q, k, score=attlas.Gaussian(0.5)).logits[:, :]
    tensor([[-0., -2., -8.]])
    """

    finite = True
    position_free = True

    def project(self, q: Tensor, k: Tensor) -> tuple[Tokens, Tokens]:
        """Return tokens for the cheapest way to compute squared distances that is precise enough for these numbers."""
        d = q.shape[-1]
        if d < _DOT_SIZE or not (q.numel() and k.numel()) or tracing():
            return q, k
        centre, h = _mean_of_keys(k), self._bandwidth_like(q)
        # Query heads that share a key head have its centre.
        q_long, k_long = _augmented_tokens(
            (q - centre.repeat_interleave(q.shape[-3] // k.shape[-3], -3)) / h, (k - centre) / h
        )
        with torch.no_grad():
            # `spread` times the unit round-off estimates the rounding error of the dot product (Notes of the class).
            # The last two coordinates of each hold -½ of the squared norms.
            spread = -2.0 * answer_of((q_long[..., d].min() + k_long[..., d + 1].min()).item) * (1 + d / 64)
        # The form of the tokens tells `forward` what they are: a tuple of one for a dot product, of two for one
        # in float64, a tensor for differences. NaN takes the last way.
        if spread * torch.finfo(q.dtype).eps / 2 <= _LOG_WEIGHT_TOLERANCE.get(q.dtype, 1e-5):
            return (q_long,), (k_long,)
        if q.dtype is torch.float32 and q.device.type != "mps" and spread * 2.0**-53 <= 1e-7:  # u of float64
            return (q, q[..., :0]), (k, k[..., :0])
        return q, k

    def forward(self, q: Tokens, k: Tokens, at: Tile) -> Tensor:
        # In the way that `project` has chosen: differences, one dot product, or one in float64 of tokens as given.
        if not isinstance(q, tuple):
            return super().forward(q, k, at)
        q_one: Tensor = q[0]  # type: ignore[assignment]
        k_one: Tensor = k[0]  # type: ignore[assignment]
        if len(q) == 1:
            return torch.matmul(q_one, k_one.mT)
        q_one, k_one = q_one.double(), k_one.double()
        h, centre = self._bandwidth_like(q_one), _mean_of_keys(k_one)
        q_long, k_long = _augmented_tokens((q_one - centre) / h, (k_one - centre) / h)
        return torch.matmul(q_long, k_long.mT).clamp(max=0.0).to(at.dtype)

    def log_weight(self, distance: Tensor) -> Tensor:
        return distance * -0.5

    def as_dot(self, q: Tokens, k: Tokens) -> Dot | None:
        # `project` gives a tuple of one tensor where the score is a dot product.
        return Dot(q[0], k[0], 1.0) if isinstance(q, tuple) and len(q) == 1 else None  # type: ignore[arg-type]


def _mean_of_keys(k: Tensor) -> Tensor:
    """Return the mean of the keys, shape (..., 1, d).

    Shifting q and k by it changes no distance, so it needs no gradient.
    """
    centre = k.detach().mean(-2, keepdim=True)
    return torch.where(centre.isfinite(), centre, 0.0)  # a key that a mask hides may hold anything


def _augmented_tokens(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens with two more coordinates, and some zeros, so that ``q · k = -½ ‖q - k‖²`` of those given."""
    q_half, k_half = q.square().sum(-1, keepdim=True) * -0.5, k.square().sum(-1, keepdim=True) * -0.5
    # Fused kernels want a size that is a multiple of 8; the zeros cost 2 %.
    pad = (0, -(q.shape[-1] + 2) % 8)
    q_long = functional.pad(torch.cat([q, q_half, torch.ones_like(q_half)], -1), pad)
    return q_long, functional.pad(torch.cat([k, torch.ones_like(k_half), k_half], -1), pad)


class Laplace(_DistanceKernel):
    """Product Laplace kernel, ``s_ij = -‖(q_i - k_j) / h‖₁``, the sum of the absolute differences (L1).

    Parameters
    ----------
    bandwidth : float, sequence of float, or Tensor of shape () or (d,)
        h, for all coordinates or for each; the default is 1.
    learn : bool
        Whether h becomes a parameter, stored as its logarithm.

    Raises
    ------
    ShapeError
        If a bandwidth is not a finite number above 0.
    DtypeError
        If `bandwidth` is neither numbers nor a floating-point tensor.

    See Also
    --------
    Gaussian : the squared distance.

    Notes
    -----
    The gradient of a coordinate in which query and key are equal is 0. Cost: ``3 d`` operations a pair, no
    memory beyond the tile.

    Examples
    --------
    >>> import torch, attlas
    >>> q, k = torch.zeros(1, 2), torch.tensor([[0.0, 0.0], [1.0, -2.0]])
    >>> attlas.attend(q, k, score=attlas.Laplace(0.5)).logits[:, :]
    tensor([[-0., -6.]])
    """

    finite = True
    power = 1

    def log_weight(self, distance: Tensor) -> Tensor:
        return -distance


class _BoundedKernel(_DistanceKernel):
    """A kernel of ``u = ‖(q - k) / h‖`` that is 0, a log-weight of -inf, where ``u >= 1``."""

    def log_weight(self, distance: Tensor) -> Tensor:
        outside = distance >= 1.0  # False for NaN, which must not hide as a weight of 0
        # The formula sees 0 outside, so that its gradient there is 0 and not NaN.
        inside = self.log_kernel(distance.masked_fill(outside, 0.0))
        return inside.masked_fill(outside, -math.inf)

    @abstractmethod
    def log_kernel(self, square: Tensor) -> Tensor:
        """Return the log of the kernel at ``u²`` in [0, 1)."""


class Boxcar(_BoundedKernel):
    """Boxcar kernel: log-weight 0 where ``u = ‖(q_i - k_j) / h‖ < 1``, -inf elsewhere.

    Parameters
    ----------
    bandwidth : float, sequence of float, or Tensor of shape () or (d,)
        h, for all coordinates or for each; the default is 1.

    Raises
    ------
    ShapeError
        If a bandwidth is not a finite number above 0.
    DtypeError
        If `bandwidth` is neither numbers nor a floating-point tensor.

    See Also
    --------
    Epanechnikov, Triangular : fall to 0 smoothly.

    Notes
    -----
    A key at exactly one bandwidth is outside, and a query with no key inside has weights 0. Every gradient
    is 0, so this bandwidth cannot be learned. Cost: ``3 d`` operations a pair, no memory beyond the tile.

    Examples
    --------
    >>> import torch, attlas
    >>> q, k = torch.zeros(1, 1), torch.tensor([[0.5], [1.0]])
    >>> attlas.attend(q, k, score=attlas.Boxcar()).logits[:, :]
    tensor([[0., -inf]])
    """

    def __init__(self, bandwidth: float | Sequence[float] | Tensor = 1.0) -> None:
        super().__init__(bandwidth)

    def log_kernel(self, square: Tensor) -> Tensor:
        return square * 0.0  # not a constant: NaN stays NaN, and the gradient is 0 and not missing


class Epanechnikov(_BoundedKernel):
    """Epanechnikov kernel, ``s_ij = log(1 - u²)`` with ``u = ‖(q_i - k_j) / h‖``, -inf where ``u >= 1``.

    Parameters
    ----------
    bandwidth : float, sequence of float, or Tensor of shape () or (d,)
        h, for all coordinates or for each; the default is 1.
    learn : bool
        Whether h becomes a parameter, stored as its logarithm.

    Raises
    ------
    ShapeError
        If a bandwidth is not a finite number above 0.
    DtypeError
        If `bandwidth` is neither numbers nor a floating-point tensor.

    See Also
    --------
    Triangular : a kernel that falls in proportion to u.

    Notes
    -----
    A key at exactly one bandwidth is outside, and a query with no key inside has weights 0. Gradients are 0
    outside. Cost: ``3 d`` operations and a logarithm a pair, no memory beyond the tile.

    References
    ----------
    .. [1] Epanechnikov, "Non-parametric estimation of a multivariate probability density", 1969.

    Examples
    --------
    >>> import torch, attlas
    >>> q, k = torch.zeros(1, 1), torch.tensor([[0.0], [0.5], [1.0]])
    >>> attlas.attend(q, k, score=attlas.Epanechnikov())[:, :]
    tensor([[0.5714, 0.4286, 0.0000]])
    """

    def log_kernel(self, square: Tensor) -> Tensor:
        return torch.log1p(-square)


class Triangular(_BoundedKernel):
    """Triangular kernel, ``s_ij = log(1 - u)`` with ``u = ‖(q_i - k_j) / h‖``, -inf where ``u >= 1``.

    Parameters
    ----------
    bandwidth : float, sequence of float, or Tensor of shape () or (d,)
        h, for all coordinates or for each; the default is 1.
    learn : bool
        Whether h becomes a parameter, stored as its logarithm.

    Raises
    ------
    ShapeError
        If a bandwidth is not a finite number above 0.
    DtypeError
        If `bandwidth` is neither numbers nor a floating-point tensor.

    See Also
    --------
    Epanechnikov : smooth at 0.

    Notes
    -----
    A key at exactly one bandwidth is outside, and a query with no key inside has weights 0. Gradients are 0
    outside, and 0 where query and key are equal. Cost: ``3 d`` operations, a root and a logarithm a pair.

    Examples
    --------
    >>> import torch, attlas
    >>> q, k = torch.zeros(1, 1), torch.tensor([[0.0], [0.5], [1.0]])
    >>> attlas.attend(q, k, score=attlas.Triangular())[:, :]
    tensor([[0.6667, 0.3333, 0.0000]])
    """

    def log_kernel(self, square: Tensor) -> Tensor:
        zero = square == 0.0  # the root has no derivative there; the weight's is taken as 0
        return torch.log1p(-square.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0))
