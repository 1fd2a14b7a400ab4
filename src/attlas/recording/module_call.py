"""One call of a module that runs: which attentions it has computed so far, by number."""

from __future__ import annotations

import weakref
from typing import NamedTuple

from torch import nn

from attlas.matrix import AttentionMatrix


class Place(NamedTuple):
    """Which attention of which module a product belongs to.

    Parameters
    ----------
    module : nn.Module
        The module.
    number : int
        Its number among the attentions of one call of the module, from 0 on.
    heard : bool
        Whether a product of the same matrix was heard before in this call.
    """

    module: nn.Module
    number: int = 0
    heard: bool = False


class ModuleCall:
    """One call of a module, from the start of its forward to the end.

    Each matrix that is multiplied with values is an attention of the module, and so they are numbered in the order of
    their first products. All that the module itself passes on by `attlas.recording.pooled` and `offer`, and all calls
    of torch's function, share one number: an image in windows is one layer that is computed several times.

    Parameters
    ----------
    module : nn.Module
        The module.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        # The matrices that were multiplied or passed on in this call, and which attention each is.
        self._heard: list[tuple[weakref.ref[AttentionMatrix], Place]] = []
        self._count = 0  # attentions that have a number so far
        self._offered: int | None = None  # the number of what the module passes on by itself
        self.linear_calls = 0  # how often it has computed linear attention

    def place(self, matrix: AttentionMatrix, *, offered: bool = False) -> Place:
        """Return which attention a matrix is, and remember it.

        Parameters
        ----------
        matrix : AttentionMatrix
            The weights.
        offered : bool
            Whether the module passed them on by itself.
        """
        for before, place in self._heard:
            if before() is matrix:
                return place._replace(heard=True)
        if offered and self._offered is not None:
            number = self._offered
        else:
            number = self._count
            self._count += 1
        if offered:
            self._offered = number
        return self.remember(matrix, Place(self.module, number))

    def remember(self, matrix: AttentionMatrix, place: Place) -> Place:
        """Remember which attention a matrix belongs to, so that `place` finds it again; return that place."""
        self._heard.append((weakref.ref(matrix), place))
        return place
