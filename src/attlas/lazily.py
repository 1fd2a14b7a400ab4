"""Packages that `import attlas` leaves out: each is imported when it is first asked for.

They need an extra, or few programs use them.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

__all__ = ["__dir__", "__getattr__"]

_PACKAGES = ("distributed", "estimators", "heads", "huggingface", "models", "nn", "pictures", "scaling", "view")


def __getattr__(name: str) -> ModuleType:
    """Import `attlas.NAME` for a name that the package attlas does not hold yet."""
    if name in _PACKAGES:
        return importlib.import_module(f"attlas.{name}")
    raise AttributeError(f"module 'attlas' has no attribute {name!r}")


def __dir__() -> list[str]:
    """List what the package attlas holds, with the packages that are still to be imported."""
    return sorted({*vars(sys.modules["attlas"]), *_PACKAGES})
