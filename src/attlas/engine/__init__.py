"""The only place where softmax(score) is computed."""

import os

import torch

# The threads of torch's pool do not live on in a process that was made by fork, such as a worker of a DataLoader: an
# operation that shares work out would wait for them for ever, where torch was built with GNU's OpenMP.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(1))
