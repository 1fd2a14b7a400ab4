"""What a score or a mask is made of, so that it can be stored and made again."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor


class Stored:
    """A score or a mask that says what it is made of.

    Attributes
    ----------
    stored : tuple of str, optional
        Names of the attributes that `to_dict` gives and the class takes; None for a class that is not stored.
    """

    stored: tuple[str, ...] | None = None

    def to_dict(self) -> dict[str, Any] | None:
        """Return the settings from which `from_dict` makes this object again, or None if it is not stored.

        The values are numbers, texts, tensors, and scores or masks. The default is what `stored` names. A recording
        keeps it; ``attlas.load(folder, score=YourClass)`` makes a score of a class of your own from it. A mask of
        your own, and one that gives None, is recorded as the runs of keys that it allows.
        """
        return None if self.stored is None else {name: getattr(self, name) for name in self.stored}

    @classmethod
    def from_dict(cls, settings: dict[str, Any]) -> Self:
        """Return the object of which `to_dict` gave these settings; by default its class is called with them."""
        return cls(**settings)

    @classmethod
    def batch_axis(cls, t: Tensor) -> int | None:
        """Return the axis of a tensor of `to_dict` that counts the sequences of the batch; by default, None.

        Parameters
        ----------
        t : Tensor
            A tensor that `to_dict` gives.

        Returns
        -------
        int or None
            None where the tensor is the same for all sequences. Recordings of several processes with a part of the
            batch each are joined along this axis; with a part of the heads each, along the axis after it of a tensor
            with four axes. A mask of your own is recorded as runs of keys, and needs none.
        """
        return None
