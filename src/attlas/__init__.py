"""Exact attention whose weights you can look at, at any length.

``A = attlas.attend(q, k)`` is softmax(score(q, k)) as a lazy matrix that is never stored: ``A @ v`` runs at
the speed of a fused kernel, and any cell, row, tile, statistic or picture of A is computed on demand.
"""

# The public names stand in `__init__.pyi`, and each is imported when it is first asked for (PEP 562): ``attlas --help``
# starts without torch.

import functools
import importlib
import pkgutil
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "0.1.0"

# Packages that stood elsewhere before: their old names import the same modules.
_FORMER_NAMES = {"attlas.atlas": "attlas.recording.atlas"}
# A function whose package has the same name: the name means the function.
_NAMES_OF_FUNCTIONS = {"corpus"}


class _CallablePackage(ModuleType):
    """The type of the package: an import of the package `attlas.corpus` leaves the function `corpus` in its place."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in _NAMES_OF_FUNCTIONS or not isinstance(value, ModuleType):
            super().__setattr__(name, value)


class _FormerName:
    """Finds and loads modules by the names that they had before (the protocols of `importlib.abc`)."""

    @staticmethod
    def _present_name(name: str) -> str | None:
        """Return the name that a module has now, or its part in a renamed package; None if it was not renamed."""
        for former, present in _FORMER_NAMES.items():
            if name == former or name.startswith(f"{former}."):
                return present + name.removeprefix(former)
        return None

    @classmethod
    def find_spec(cls, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return a spec for a former name; None for all other names."""
        return ModuleSpec(name, cls, is_package=True) if cls._present_name(name) else None

    @classmethod
    def create_module(cls, spec: ModuleSpec) -> ModuleType:
        """Return the module of the present name."""
        module = importlib.import_module(cls._present_name(spec.name))
        spec.loader_state = module.__spec__
        return module

    @staticmethod
    def exec_module(module: ModuleType) -> None:
        """Give the module its own spec back; it has run already."""
        module.__spec__ = module.__spec__.loader_state


_this_package = sys.modules[__name__]
_this_package.__class__ = _CallablePackage
_SUBMODULES = {module.name for module in pkgutil.iter_modules(__path__)} - _NAMES_OF_FUNCTIONS
if _FormerName not in sys.meta_path:
    sys.meta_path.insert(0, _FormerName)


@functools.cache
def _public_names() -> tuple[list[str], dict[str, str]]:
    """Read `__init__.pyi`: the list of public names, and the module that each is imported from."""
    import ast

    tree = ast.parse(pkgutil.get_data(__name__, "__init__.pyi"))
    listed, modules = [], {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and node.module != __name__:
            modules |= {alias.name: node.module for alias in node.names}
        elif isinstance(node, ast.Assign):
            listed = ast.literal_eval(node.value)
    return listed, modules


def __getattr__(name: str) -> object:
    """Return a name that the package does not hold yet: a module of it, or a public name."""
    if name in _SUBMODULES or f"{__name__}.{name}" in _FORMER_NAMES:
        return importlib.import_module(f"{__name__}.{name}")
    if name == "__all__" or not name.startswith("__"):
        listed, modules = _public_names()
        if name == "__all__":
            return vars(_this_package).setdefault(name, listed)
        if name in modules:
            return vars(_this_package).setdefault(name, getattr(importlib.import_module(modules[name]), name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}", name=name, obj=_this_package)


def __dir__() -> list[str]:
    """List what the package holds, with what is still to be imported."""
    return sorted({*vars(_this_package), *_SUBMODULES, *_public_names()[0]})
