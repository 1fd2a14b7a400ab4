"""Lets transformers' configurations set `output_attentions` for the attention function of attlas."""

from __future__ import annotations

import functools
from typing import Any

import transformers

from attlas.foundation.compat import ATTENTION, OUTPUT_ATTENTIONS_STORED, VALIDATORS, base_of_configurations


def accept_output_attentions(name: str) -> None:
    """Let configurations ask for attentions with one more attention function.

    ``from_pretrained(..., output_attentions=True, attn_implementation=name)`` and ``config.output_attentions = True``
    then work. transformers refuses both, by a setter and by a validator, where the function is not ``eager``.

    Parameters
    ----------
    name : str
        What the attention function is registered as.
    """
    base: Any = base_of_configurations(transformers)
    setting = getattr(base, "output_attentions", None)
    if not isinstance(setting, property):
        return  # old versions refuse nothing

    def set_value(self: Any, value: bool) -> None:
        """Store the value without the check of transformers if the attention function is `name`."""
        if getattr(self, ATTENTION) == name:
            setattr(self, OUTPUT_ATTENTIONS_STORED, value)
        else:
            setting.fset(self, value)  # type: ignore[misc]  # transformers' own has a setter

    base.output_attentions = property(setting.fget, set_value, doc=setting.__doc__)
    refusing = getattr(base, "validate_output_attentions", None)
    if refusing is not None:
        _accept_in_validators(base, refusing, name)


def _accept_in_validators(base: Any, refusing: Any, name: str) -> None:
    """Let the checks of configurations pass for one more attention function."""

    @functools.wraps(refusing)
    def validate(self: Any) -> None:
        if getattr(self, ATTENTION) != name:
            refusing(self)

    base.validate_output_attentions = validate
    # Classes list their validators when they are made, and some are made already.
    waiting: list[type] = [base]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        listed = vars(kind).get(VALIDATORS, [])
        listed[:] = [validate if one is refusing else one for one in listed]
