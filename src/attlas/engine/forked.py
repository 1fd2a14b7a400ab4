"""A process that was made by fork computes on one thread, as the workers of a DataLoader do.

The threads of torch's pool do not live on in such a child, and an operation that shares work out would wait for them
for ever, where torch was built with GNU's OpenMP.
"""

import os

import torch

__all__: list[str] = []

if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
