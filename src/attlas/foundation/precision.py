"""Matrix products in full precision, whatever the process has chosen for speed; and of 16 bits without rounding.

``torch.set_float32_matmul_precision("high")``, and the newer settings of each device, let torch round the factors of a
product to 11 bits (TF32) or 8 (bfloat16). A weight would then be wrong in its third digit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from attlas.foundation.compat import FP32_PRECISION, SET_FP32_PRECISION

__all__ = ["FULL", "FULL_FLOAT32", "SETTING_OF", "products_in_float32", "setting", "sums_in_float32"]

#: The settings of matrix products by the kind of device, as torch since 2.9 names them.
_NEWER_SETTINGS: dict[str, tuple[str, ...]] = {
    "cpu": ("mkldnn", "matmul"),
    "xpu": ("mkldnn", "matmul"),
    "cuda": ("cuda", "matmul"),
}

#: Returns how a kind of device multiplies float32, given its `SETTING_OF`. torch 2.8 has one setting for all.
setting: Callable[..., str] = FP32_PRECISION or torch.get_float32_matmul_precision
SETTING_OF: dict[str, tuple[str, ...]] = _NEWER_SETTINGS if FP32_PRECISION else dict.fromkeys(_NEWER_SETTINGS, ())
#: Its answers that mean full precision.
FULL = frozenset({"ieee", "none", "highest"})


class FullFloat32:
    """Context in which torch multiplies float32 in full precision.

    The settings are those of the process. They are changed when the first thread enters, and put back when the last one
    leaves, so that no thread changes them under another.

    Attributes
    ----------
    users : int
        Threads that are inside, each as often as it has entered.
    """

    def __init__(self) -> None:
        self.users = 0
        self._lock = threading.Lock()
        self._before: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        # The first thread in changes the settings.
        with self._lock:
            if not self.users:
                self._before = _set_full()
            self.users += 1

    def __exit__(self, *_: object) -> None:
        # The last thread out restores them.
        with self._lock:
            self.users -= 1
            if not self.users:
                for put_back in self._before:
                    put_back()


#: The one context of the process.
FULL_FLOAT32 = FullFloat32()


def _set_full() -> list[Callable[[], None]]:
    """Switch all settings to full precision, and return functions that restore them, to be called in this order."""
    put_back: list[Callable[[], None]] = []
    newer = sorted(set(_NEWER_SETTINGS.values())) if FP32_PRECISION else []
    before = [(name, setting(*name)) for name in newer]
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:  # the program has used the newer settings, and torch answers by these alone
        older = "highest"
    if older != "highest":
        torch.set_float32_matmul_precision("highest")
        put_back.append(lambda: torch.set_float32_matmul_precision(older))
    for name, value in before:
        _set_precision(name, "ieee")
        put_back.append(partial(_set_precision, name, value))
    return put_back


def _set_precision(name: tuple[str, ...], value: str) -> None:
    """Change one of the newer settings to a value, unless it inherits that value already."""
    if SET_FP32_PRECISION is not None:
        SET_FP32_PRECISION(*name, "none")  # "none" inherits the setting of the device, or that of all devices
        if setting(*name) != value:
            SET_FP32_PRECISION(*name, value)


def sums_in_float32(x: Tensor, y: Tensor) -> bool:
    """Return whether `products_in_float32` can be used: both tensors of 16 bits, on a GPU of CUDA that supports it.

    CPUs round such a product to 16 bits, so that its factors have to become float32 first.
    """
    kind = x.device.type
    if kind != "cuda" or x.dtype is not y.dtype or x.dtype not in (torch.float16, torch.bfloat16):
        return False
    # A setting of the process lets float16 be summed in float16.
    return _has_wide_sums(x.device) and not getattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", False)


@cache
def _has_wide_sums(device: torch.device) -> bool:
    """Return whether torch can multiply 16-bit factors on this GPU into a float32 result; not on AMD's.

    Compute capability 8.0 is the first that multiplies bfloat16.
    """
    if torch.version.hip is not None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


def products_in_float32(x: Tensor, y: Tensor, out: Tensor) -> Tensor:
    """Write ``x @ y.mT`` into `out` and return it: factors of 16 bits, whose products are exact, summed in float32.

    Parameters
    ----------
    x, y : Tensor, shapes (batch, heads, r, d) and (batch, heads, c, d)
        Factors of one dtype.
    out : Tensor of float32, shape (batch, heads, r, c), contiguous
    """
    torch.bmm(x.flatten(0, 1), y.flatten(0, 1).mT, torch.float32, out=out.flatten(0, 1))
    return out
