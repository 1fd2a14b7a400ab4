"""The measured limits of this processor, kept in the user's cache folder by ``attlas bench``."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import torch

from attlas.errors import public
from attlas.foundation.files import save_text

_TOKEN_DTYPES = ("float32", "float64", "bfloat16", "float16")  # of tokens


@dataclass(frozen=True)
class Limits:
    """What this processor does per second, on all threads together.

    Parameters
    ----------
    products : Mapping of str to float
        Multiplications with addition, by the name of the dtype.
    exponentials : float
        Exponentials in float32.
    bandwidth : float
        Bytes of memory, read and written.
    """

    products: Mapping[str, float]
    exponentials: float
    bandwidth: float

    def seconds(self, dtype: torch.dtype, products: float, exponentials: float, size: float) -> dict[str, float]:
        """Return the least time of each kind of work: the matrix products, the exponentials and the memory traffic."""
        rate = self.products[str(dtype).removeprefix("torch.")]
        return {
            "products": products / rate,
            "exponentials": exponentials / self.exponentials,
            "memory": size / self.bandwidth,
        }


def cache_folder() -> Path:
    """Return the folder in which attlas keeps what it measured; it may not exist yet."""
    if chosen := os.environ.get("XDG_CACHE_HOME"):
        return Path(chosen) / "attlas"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "attlas" / "cache"
    return Path.home() / ("Library/Caches" if sys.platform == "darwin" else ".cache") / "attlas"


@cache
def name() -> str:
    """Return the name of the processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux
        lines = []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return model or platform.processor() or platform.machine()


def known(instruction_set: str) -> Limits | None:
    """Return the limits that `store` wrote for this processor, its threads and an instruction set; None without."""
    found = _stored_limits().get(_setting_in_words(instruction_set))
    try:
        limits = Limits(**found)  # type: ignore[arg-type]  # a file of another version raises
        numbers = [*(limits.products[name] for name in _TOKEN_DTYPES), limits.exponentials, limits.bandwidth]
        return limits if all(isinstance(x, int | float) and 0 < x < math.inf for x in numbers) else None
    except (TypeError, KeyError):
        return None


@public("save()")
def store(limits: Limits, instruction_set: str) -> Path:
    """Keep the measured speeds of this processor in the cache folder, beside those of others; return the file."""
    cache_folder().mkdir(parents=True, exist_ok=True)
    measured = {**_stored_limits(), _setting_in_words(instruction_set): asdict(limits)}
    return save_text(json.dumps(measured, indent=2) + "\n", _limits_file())


def _limits_file() -> Path:
    """Return the path of the file with the limits of this machine."""
    return cache_folder() / "processor.json"


def _stored_limits() -> dict[str, object]:
    """Return the stored limits by `_setting_in_words` of their setting; none where the file cannot be read."""
    try:
        found = json.loads(_limits_file().read_text(encoding="utf-8"))
    except (OSError, ValueError):  # not measured yet, or not by attlas
        return {}
    return found if isinstance(found, dict) else {}


def _setting_in_words(instruction_set: str) -> str:
    """Return the setting that limits belong to, in words: processor, threads, kernels, torch."""
    return f"{name()}, threads: {torch.get_num_threads()}, kernels: {instruction_set}, torch {torch.__version__}"
