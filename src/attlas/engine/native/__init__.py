"""The CPU kernels in C++: the output and its statistics in one walk, with the widest vectors of the processor."""
