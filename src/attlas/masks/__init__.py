"""Which pairs of query and key may attend: asked tile by tile, never stored whole."""

from attlas.masks import custom, documents, heads, local, runs, selected
from attlas.masks.base import And, BlockState, Mask, Not, Or
from attlas.masks.custom import *
from attlas.masks.documents import *
from attlas.masks.drawing import picture
from attlas.masks.heads import *
from attlas.masks.local import *
from attlas.masks.runs import *
from attlas.masks.selected import *

__all__ = ["And", "BlockState", "Mask", "Not", "Or", "picture"]
__all__ += custom.__all__
__all__ += documents.__all__
__all__ += heads.__all__
__all__ += local.__all__
__all__ += runs.__all__
__all__ += selected.__all__
