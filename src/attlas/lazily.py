"""The package attlas imports what it is asked for: torch with the first public name, others with their own.

So ``attlas --help`` and ``attlas --version`` start without torch.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from attlas.errors import MissingExtraError

_FUNCTIONS = {"attend", "corpus"}


class _Package(ModuleType):
    """The package: its names `attend` and `corpus` are functions, although modules of it are called so, too."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _FUNCTIONS or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


_package = sys.modules["attlas"]
_package.__class__ = _Package
_MODULES = {module.name for module in pkgutil.iter_modules(_package.__path__)} - _FUNCTIONS


def __getattr__(name: str) -> Any:
    """Return a name that the package attlas does not hold yet: a module of it, or one of `attlas.public`."""
    if name in _MODULES:
        return importlib.import_module(f"attlas.{name}")
    if name == "__all__" or not name.startswith("__"):
        public = importlib.import_module("attlas.public")
        if name in ("__all__", *public.__all__):
            vars(_package).update({one: getattr(public, one) for one in ("__all__", *public.__all__)})
            return getattr(public, name)
    raise AttributeError(f"module 'attlas' has no attribute {name!r}", name=name, obj=_package)


def __dir__() -> list[str]:
    """List what the package attlas holds, with what is still to be imported."""
    return sorted({*vars(_package), *_MODULES, *importlib.import_module("attlas.public").__all__})


def import_extra(module: str, where: str, rule: str, fix: str, arguments: Mapping[str, object] | None = None) -> Any:
    """Return an optional module, or raise a MissingExtraError with this rule and fix."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        found = f"no module named {module.partition('.')[0]}"
        raise MissingExtraError(where, rule, arguments, found=found, fix=fix) from error
