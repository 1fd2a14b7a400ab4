"""What is summed: the arguments of kernel_sums, checked once. Pure data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from attlas.errors import DeviceError, DtypeError, ShapeError, public
from attlas.foundation.checks import one_of
from attlas.foundation.devices import check_float64
from attlas.scores import Boxcar, Epanechnikov, Gaussian, Laplace, Score, Triangular

KERNELS: dict[str, type[Score]] = {
    "gaussian": Gaussian,
    "laplace": Laplace,
    "epanechnikov": Epanechnikov,
    "boxcar": Boxcar,
    "triangular": Triangular,
}
BOUNDED = frozenset({"epanechnikov", "boxcar", "triangular"})  # 0 from one bandwidth on
_ERROR_WHERE = "kernel_sums()"


@dataclass(frozen=True, eq=False)
class Task:
    """Arguments of one call of `kernel_sums`.

    Parameters
    ----------
    kernel : str
        Name of the kernel.
    x, keys, values : Tensor, shape (m, d), (n, d) and (n, e)
        Queries, keys and their values, in one dtype, on one device, without a graph.
    bandwidth : Tensor of float64, shape (d,)
        Above 0, on the CPU.
    weights : Tensor, optional, shape (n,)
        Weight of each key; None for 1.
    tolerance : float
        Relative error that a row may have.
    leave_one_out : bool
        Whether query i does not see key i.
    moments : int
        1 where the sums of the offsets are wanted too.
    progress : callable, optional
        Told ``(queries done, queries)`` now and then.
    """

    kernel: str
    x: Tensor
    keys: Tensor
    values: Tensor
    bandwidth: Tensor
    weights: Tensor | None = None
    tolerance: float = 0.0
    leave_one_out: bool = False
    moments: int = 0
    progress: Callable[[int, int], None] | None = None

    @property
    def bounded(self) -> bool:
        """Whether the kernel is 0 from one bandwidth on."""
        return self.kernel in BOUNDED

    def score(self) -> Score:
        """Return the kernel as a score of attlas."""
        if self.kernel != "boxcar":
            return KERNELS[self.kernel](self.bandwidth)
        # The reciprocal of a bandwidth is rounded: a key at exactly one bandwidth must not come inside by that.
        return Boxcar(self.bandwidth * (1 - 4 * torch.finfo(self.x.dtype).eps))

    def of_keys(self, index: Tensor | slice) -> Task:
        """Return the task with some of its keys."""
        weights = None if self.weights is None else self.weights[index]
        return replace(self, keys=self.keys[index], values=self.values[index], weights=weights)

    def report(self, done: int) -> None:
        """Report how many queries are done."""
        if self.progress is not None:
            self.progress(done, self.x.shape[0])


@public(_ERROR_WHERE)
def checked_task(task: Task) -> Task:
    """Check the arguments of `kernel_sums` against each other.

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        If they do not fit together.
    """
    x, keys, values, weights, h = task.x, task.keys, task.values, task.weights, task.bandwidth.detach().cpu()
    given = {"x (m, d)": x, "keys (n, d)": keys, "values (n, e)": values}
    if weights is not None:
        given["weights (n,)"] = weights
    _check_settings(task.kernel, task.tolerance, task.moments)
    fault, fix = _size_mismatch(x, keys, values, weights, task.leave_one_out)
    if fault:
        raise ShapeError("queries, keys, values and weights must fit.", fault, fix, arguments=given)
    if x.dtype not in (torch.float32, torch.float64) or any(t.dtype is not x.dtype for t in given.values()):
        found = ", ".join(sorted({str(t.dtype) for t in given.values()}))
        raise DtypeError("all tensors must be float32, or all float64.", found, "x.double(), ...", arguments=given)
    if any(t.device != x.device for t in given.values()):
        found = ", ".join(sorted({str(t.device) for t in given.values()}))
        raise DeviceError("all tensors must be on one device.", found, "x.cpu(), ...", arguments=given)
    check_float64("kernel sums are", x.device, "kernel_sums(kernel, x.cpu(), keys.cpu(), values.cpu(), bandwidth)")
    if weights is not None and not bool((weights >= 0).all()):
        least = weights.min().item()
        raise ShapeError("weights must be 0 or more.", f"{least}", "weights.abs()", arguments=given)
    if h.ndim > 1 or (h.ndim == 1 and h.shape[0] != x.shape[1]) or not bool(((h > 0) & h.isfinite()).all()):
        found = f"bandwidth = {h.tolist()}"
        raise ShapeError("bandwidth must be one number above 0, or d.", found, "bandwidth=1.0", arguments=given)
    x, keys, values = (t.detach() for t in (x, keys, values))
    weights = None if weights is None else weights.detach()
    h = h.expand(x.shape[1]).contiguous()
    return replace(task, x=x, keys=keys, values=values, bandwidth=h, weights=weights, tolerance=float(task.tolerance))


def _check_settings(kernel: str, tolerance: float, moments: int) -> None:
    """Raise an error where kernel, tolerance or moments have an unknown value."""
    if kernel not in KERNELS:
        names = ", ".join(sorted(KERNELS))
        raise ShapeError(f"kernel must be one of {names}.", f"{kernel!r}", '"gaussian"')
    if not 0 <= tolerance < 1:
        raise ShapeError("tolerance must lie in [0, 1).", f"tolerance = {tolerance!r}", "tolerance=1e-7")
    one_of("moments", moments, (0, 1), "moments=1")


def _size_mismatch(
    x: Tensor, keys: Tensor, values: Tensor, weights: Tensor | None, leave_one_out: bool
) -> tuple[str, str]:
    """Return which sizes disagree and what to do, or two empty texts."""
    if x.ndim != 2 or keys.ndim != 2 or values.ndim != 2:
        return f"{x.ndim}, {keys.ndim} and {values.ndim} axes", "give matrices: x.unsqueeze(-1) makes one of a vector."
    if x.shape[1] != keys.shape[1] or x.shape[1] == 0:
        return f"d = {x.shape[1]} in x, d = {keys.shape[1]} in keys", "give both the same coordinates."
    if keys.shape[0] != values.shape[0]:
        return f"{keys.shape[0]} keys, {values.shape[0]} values", "give one row of values for each key."
    if weights is not None and weights.shape != keys.shape[:1]:
        return f"weights of shape {tuple(weights.shape)}", f"give {keys.shape[0]} weights."
    if leave_one_out and x.shape != keys.shape:
        return f"leave_one_out, {x.shape[0]} queries, {keys.shape[0]} keys", "give the keys as x."
    return "", ""
