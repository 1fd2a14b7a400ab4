"""Arguments of one kind in a call: found and replaced as torch's own functions for nested arguments do it."""

from collections import namedtuple
from typing import Any

import pytest
import torch

from attlas.foundation.arguments import arguments_of, with_arguments
from attlas.foundation.compat import tree_leaves, tree_map_only

Pair = namedtuple("Pair", "a b")
T = torch.zeros(2)
CALLS: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "single": ((1j, 2, T), {"dim": None, "other": 2j}),
    "none": ((T, "a"), {"dim": 1}),
    "list": (([1j, 2j], T), {}),
    "in keywords": ((T,), {"tensors": (1j, [2j])}),
    "nested": (({"a": [Pair(1j, T)]}, 3j), {"size": torch.Size([1])}),
    "slices": ((1j, (slice(None), 0)), {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_equal_those_of_torch(name: str) -> None:
    args, kwargs = CALLS[name]
    assert arguments_of(complex, args, kwargs) == [
        part for part in tree_leaves((args, kwargs)) if isinstance(part, complex)
    ]
    found = with_arguments(complex, abs, args, kwargs)
    assert found == tree_map_only(complex, abs, (args, kwargs))
    assert type(found[0]) is tuple
