"""Functions of other packages that are replaced in every loaded module that holds them, for the time of a block."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any


@contextmanager
def replaced_everywhere(replacements: Mapping[Any, Callable[..., Any]]) -> Iterator[None]:
    """Replace functions under any name that a loaded module has for them; those of attlas keep theirs.

    Parameters
    ----------
    replacements : mapping of callable to callable
        Functions, and what stands for each of them.

    Notes
    -----
    What holds a function elsewhere (a default argument, a closure) keeps it. A name that was set anew meanwhile stays
    as it is at the end. All threads see the replacements.
    """
    by_id = {id(own): (own, ours) for own, ours in replacements.items()}
    modules = [module for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    found = [
        (module, name, *by_id[id(value)])
        for module in modules
        if not module.__name__.startswith("attlas.")
        for name, value in list(vars(module).items())
        if id(value) in by_id
    ]
    try:
        for module, name, _, ours in found:
            setattr(module, name, ours)
        yield
    finally:
        for module, name, own, ours in found:
            if getattr(module, name, None) is ours:
                setattr(module, name, own)
