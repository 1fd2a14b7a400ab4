"""Which pairs of query and key may attend: asked tile by tile, never stored whole."""

from attlas.mask_picture import picture
from attlas.masks.base import And, BlockState, Mask, Not, Or
from attlas.masks.custom import AdditiveMask, FunctionMask, TensorMask, from_function, from_tensor
from attlas.masks.documents import Documents, Padding, Prefix
from attlas.masks.heads import Heads
from attlas.masks.local import Causal, Dilated, Window
from attlas.masks.runs import Bits, Runs, runs_of

__all__ = [
    "AdditiveMask", "And", "Bits", "BlockState", "Causal", "Dilated", "Documents", "FunctionMask", "Heads", "Mask",
    "Not", "Or", "Padding", "Prefix", "Runs", "TensorMask", "Window", "from_function", "from_tensor", "picture",
    "runs_of",
]  # fmt: skip
