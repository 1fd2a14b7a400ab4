"""Triton kernels of attlas: statistics, outputs and cells of dot products on a GPU."""

from attlas.engine.backends.triton.backend import DotGradients, Triton

BACKENDS = (Triton(), DotGradients())
