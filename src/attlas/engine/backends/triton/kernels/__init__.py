"""The kernels themselves, in Triton's own language.

These modules import triton: `attlas.engine.backends.triton.launch` imports them when a kernel is first called.
"""
