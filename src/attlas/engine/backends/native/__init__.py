"""The CPU kernels in C++: the output and its statistics in one pass, with the widest vectors of the processor."""

from attlas.engine.backends.native.backend import FusedKernels, PairwiseKernels

BACKENDS = (FusedKernels(), PairwiseKernels())
