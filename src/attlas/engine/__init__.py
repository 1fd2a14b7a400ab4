"""The only place where softmax(score) is computed."""

from attlas.engine import forked

__all__ = ["forked"]
