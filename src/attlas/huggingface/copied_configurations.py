"""Lets layers whose configuration is a copy follow their model when its attention function is switched."""

from __future__ import annotations

import functools
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from attlas.foundation.compat import ATTENTION, ATTENTION_STORED
from attlas.recording.discovery import INTERFACE, mentions


def follow_copied_configurations(name: str) -> None:
    """Let ``model.set_attn_implementation()`` reach every layer of a model when it is switched to or from a function.

    Some layers hold a copy of a configuration that the model does not know as a part of its own: those of X-CLIP over
    the frames of a video. transformers does not switch these.

    Parameters
    ----------
    name : str
        What the attention function is registered as; copies that neither have it nor get it are left as they are.
    """
    base: Any = PreTrainedModel
    switching = getattr(base, "set_attn_implementation", None)
    if switching is None:
        return  # in old versions nothing is switched but by `record`, which reaches each configuration

    @functools.wraps(switching)
    def set_attn_implementation(self: Any, *args: Any, **kwargs: Any) -> None:
        """Switch the model as transformers does, then the copies that it does not know."""
        switching(self, *args, **kwargs)
        _switch_copies(self, name)

    base.set_attn_implementation = set_attn_implementation


def _switch_copies(model: nn.Module, name: str) -> None:
    """Switch the copied configurations of a model to what the configuration of their class was switched to."""
    known = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    for config in known:  # it grows by the configurations inside
        known += [part for part in _parts_of_config(config) if not any(part is one for one in known)]
    # The first configuration of each class; a copy of an unknown class follows the model's own.
    own = {type(config): config for config in reversed(known)}
    for module in model.modules():
        copied: Any = getattr(module, "config", None)
        if not hasattr(copied, ATTENTION_STORED) or any(copied is one for one in known):
            continue
        wanted = getattr(own.get(type(copied), known[0]), ATTENTION)
        if name in (wanted, getattr(copied, ATTENTION)) and mentions(module, INTERFACE):
            setattr(copied, ATTENTION_STORED, wanted)


def _parts_of_config(config: Any) -> list[Any]:
    """Return the configurations that a configuration is made of, such as that of its text model."""
    return [part for name in config.sub_configs if (part := getattr(config, name, None)) is not None]
