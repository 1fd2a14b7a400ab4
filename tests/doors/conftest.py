"""Tests against libraries that attlas works with; `make test-doors` installs them. What is missing is skipped."""

import importlib.util
from typing import Any

import torch


def _torchvision_without_operators() -> None:
    """Import a torchvision whose compiled operators are for another torch: its models need none of them.

    PyPI's wheel is for a torch with CUDA. Beside another torch it cannot register its operators, and raises an error
    for everybody who imports it, transformers too.
    """
    register = torch.library.register_fake

    def register_known(name: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(name, str) and name.startswith("torchvision::"):
            return lambda function: function
        return register(name, *args, **kwargs)

    torch.library.register_fake = register_known
    try:
        import torchvision  # noqa: F401
    finally:
        torch.library.register_fake = register


if importlib.util.find_spec("torchvision") is not None:
    _torchvision_without_operators()
