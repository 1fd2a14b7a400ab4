"""Lets transformers' configurations set `output_attentions` for the attention function of attlas."""

from __future__ import annotations

import functools
from typing import Any

from transformers import PreTrainedConfig

from attlas.foundation.compat import ATTENTION, OUTPUT_ATTENTIONS_STORED, VALIDATORS


def accept_output_attentions(name: str) -> None:
    """Let configurations ask for attentions with one more attention function.

    ``from_pretrained(..., output_attentions=True, attn_implementation=name)`` and ``config.output_attentions = True``
    then work. transformers refuses both, by a setter and by a validator, where the function is not ``eager``.

    Parameters
    ----------
    name : str
        What the attention function is registered as.
    """
    base: Any = PreTrainedConfig
    refusing, setting = base.validate_output_attentions, base.output_attentions

    @functools.wraps(refusing)
    def validate(self: Any) -> None:
        """Check as transformers does, unless the attention function is `name`, which returns weights."""
        if getattr(self, ATTENTION) != name:
            refusing(self)

    def set_value(self: Any, value: bool) -> None:
        """Store the value without the check of transformers if the attention function is `name`."""
        if getattr(self, ATTENTION) == name:
            setattr(self, OUTPUT_ATTENTIONS_STORED, value)
        else:
            setting.fset(self, value)

    base.validate_output_attentions = validate
    base.output_attentions = property(setting.fget, set_value, doc=setting.__doc__)
    # Classes list their validators when they are made, and some are made already.
    waiting: list[type] = [base]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        listed = vars(kind).get(VALIDATORS, [])
        listed[:] = [validate if one is refusing else one for one in listed]
