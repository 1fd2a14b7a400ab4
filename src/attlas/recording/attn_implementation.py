"""Sets `attn_implementation` of transformers models to attlas during a recording, and restores it afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

import attlas
from attlas.foundation.blocks import BlockValue, SharedBlocks
from attlas.foundation.compat import ATTENTION_STORED, CAN_SWITCH
from attlas.recording.discovery import INTERFACE, mentions

_IMPLEMENTATION_NAME = "attlas"
# Whether a mask that hides nothing is None, as on eager: true where no part of a model calls the attention function.
NONE_FOR_ALL: BlockValue[bool] = BlockValue("no_mask", False)


@dataclass
class _Configuration:
    """A configuration of a model that blocks change.

    Parameters
    ----------
    config : PretrainedConfig
        The configuration.
    for_masks : bool
        Whether attlas is stored only so that code that attends by itself is given lazy masks.
    """

    config: Any
    for_masks: bool = False


_changes = SharedBlocks()  # of configurations by identity: they have no hash


@contextmanager
def attending_with_attlas(model: nn.Module) -> Iterator[None]:
    """Set the attention of every transformers model in `model` to attlas, for the time of a ``with`` block.

    Parameters
    ----------
    model : nn.Module
        Any module; where no part of it is a model of transformers that can be switched, nothing happens.
    """
    with _attention_put_back(model) as held:
        with _changes.lock:
            if any(getattr(one.config, ATTENTION_STORED) != _IMPLEMENTATION_NAME for one in held):
                for part in _switchable_models(model):
                    # transformers is imported here, for its own models only.
                    part.set_attn_implementation(attlas.huggingface.NAME)
                _switch_old(model)
        # By the names of classes: most models have no layer that attends in chunks.
        kinds = {kind.__name__ for layer in {*map(type, model.modules())} for kind in layer.__mro__} if held else set()
        is_chunked = not attlas.huggingface.chunked.METHODS.keys().isdisjoint(kinds)
        with attlas.huggingface.chunked.attending_in_one_matrix(model) if is_chunked else nullcontext():
            yield


@contextmanager
def masked_by_attlas(model: nn.Module) -> Iterator[None]:
    """Let models of transformers that write attention out by hand be given lazy masks, for the time of a block.

    They choose how they attend when they are made, and read nothing but the mask function from then on.

    Parameters
    ----------
    model : nn.Module
        Any module; of the models in it, those that call the attention function attend with attlas already.
    """
    with _attention_put_back(model) as held:
        with _changes.lock:
            none_for_all = True
            for one in held:
                stored = getattr(one.config, ATTENTION_STORED)
                if stored == _IMPLEMENTATION_NAME and not one.for_masks:
                    none_for_all = False
                elif stored in (None, "eager", "sdpa"):
                    # transformers is imported here, for its own models only.
                    setattr(one.config, ATTENTION_STORED, attlas.huggingface.NAME)
                    one.for_masks = True
        with NONE_FOR_ALL.held(none_for_all):
            yield


@contextmanager
def _attention_put_back(model: nn.Module) -> Iterator[list[_Configuration]]:
    """Let each configuration of a model have its attention function again when the last block ends that is open for it.

    Blocks may end in any order, and in other threads.
    """
    with ExitStack() as stack:
        changes = [_changes.shared(id(config), partial(_put_back, config)) for config in configurations(model)]
        yield [stack.enter_context(change) for change in changes]


@contextmanager
def _put_back(config: Any) -> Iterator[_Configuration]:
    """Let a configuration have its attention function again at the end of a ``with`` block."""
    before = getattr(config, ATTENTION_STORED)
    try:
        yield _Configuration(config)
    finally:
        setattr(config, ATTENTION_STORED, before)


def _switchable_models(model: nn.Module) -> list[Any]:
    """Return the outermost models that can choose how they attend."""
    outermost: list[Any] = []
    inside: set[int] = set()
    for module in model.modules():
        if id(module) in inside or not hasattr(module, "set_attn_implementation"):
            continue
        # Models within this one are switched with it.
        inside.update(map(id, module.modules()))
        # A model that cannot says so in a log only; who records it is told by an error that names the module.
        if any(getattr(part, CAN_SWITCH, bool)() for part in module.modules()):
            outermost.append(module)
    return outermost


def _switch_old(model: nn.Module) -> None:
    """Switch layers whose models have no method for it, before transformers 4.54: they ask at each call."""
    owners = [(module, config) for module in model.modules() if (config := getattr(module, "config", None)) is not None]
    switched = {id(config) for module, config in owners if hasattr(module, CAN_SWITCH)}
    for module, config in owners:
        if id(config) not in switched and hasattr(config, ATTENTION_STORED) and mentions(module, INTERFACE):
            setattr(config, ATTENTION_STORED, attlas.huggingface.NAME)


def configurations(model: nn.Module) -> Iterator[Any]:
    """Yield each configuration of a model and of its parts that stores an attention function, once."""
    seen: set[int] = set()
    waiting = [config for module in model.modules() if (config := getattr(module, "config", None)) is not None]
    while waiting:
        config = waiting.pop()
        if id(config) in seen or not hasattr(config, ATTENTION_STORED):
            continue
        seen.add(id(config))
        waiting += [part for name in getattr(config, "sub_configs", ()) if (part := getattr(config, name, None))]
        yield config
