"""Makes Triton's interpreter honest about bfloat16, and faster. For tests only.

Import this module before any kernel is decorated; it sets TRITON_INTERPRET=1 itself. What it mends in Triton 3.7.1,
which says no word about it:

- The interpreter keeps bfloat16 as the 16 bits of a ``uint16``, and multiplies these. Here ``tl.dot`` widens its
  operands first, and arithmetic on bfloat16 raises, so that a kernel has to widen what it loads.
- float32 to bfloat16 truncates; a GPU rounds to nearest even. Here it rounds.
- At each call of a function in a kernel it looks at all names of ``triton.language``. Here it looks once a launch.

The interpreter reads and writes through the pointers of CPU tensors.
"""

import dataclasses
import functools
import os
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


def _widened(handle: Any) -> Any:
    """Return a bfloat16 handle as float32; any other as it is."""
    if handle.get_element_ty() != tl.bfloat16:
        return handle
    return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _rounded(data: Any) -> Any:
    """Return float32 numbers as the uint16 bits of bfloat16, rounded to nearest even; NaN stays NaN."""
    bits = np.ascontiguousarray(data, dtype=np.float32).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(data), np.uint32(0x7FC0), rounded).astype(np.uint16).reshape(np.shape(data))


def _install() -> None:
    builder: Any = interpreter.InterpreterBuilder
    dot, cast, binary = builder.create_dot, builder.cast_impl, builder.binary_op

    def create_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return dot(self, _widened(a), _widened(b), d, *rest)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if target.scalar == tl.bfloat16 and source.get_element_ty() == tl.float32:
            return interpreter.TensorHandle(_rounded(source.data), tl.bfloat16)
        return cast(self, source, target)

    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        kinds = (left.get_element_ty(), right.get_element_ty())
        if tl.bfloat16 in kinds and not isinstance(left.dtype, tl.pointer_type):
            raise NotImplementedError("the interpreter computes with the bits of bfloat16: widen to float32 first")
        return binary(self, left, right, op)

    builder.create_dot, builder.cast_impl, builder.binary_op = create_dot, cast_impl, binary_op
    builder.create_fp_trunc = builder.create_fp_ext = cast_impl

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    seen: set[int] = set()

    def patch_once(fn: Any) -> Any:
        if id(fn.__globals__) in seen:
            return None
        seen.add(id(fn.__globals__))
        return patch(fn)

    def launch_once(self: Any, *args: Any, **kwargs: Any) -> Any:
        seen.clear()
        try:
            return launch(self, *args, **kwargs)
        finally:
            seen.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_once
    # Sums of int32 that overflow raise in it, at the cost of two further operations each; no kernel here has one.
    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=False
    )
    uncached = interpreter._get_np_dtype
    cached = functools.cache(uncached)
    interpreter._get_np_dtype = lambda kind: (cached if type(kind) is tl.dtype else uncached)(kind)


_install()
