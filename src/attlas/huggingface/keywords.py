"""The keywords that models of transformers pass to their attention: which attlas uses, and which change nothing."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterator, Mapping
from types import CodeType
from typing import Any

from torch import Tensor, nn

from attlas.errors import BackendError, describe, kind
from attlas.foundation.compat import constant_to_compiler

# What changes nothing, as in eager attention, and why.
_IN_THE_MASK = "the mask of the model has it already"
_IN_THE_TOKENS = "queries and keys have it already"
_OF_KERNELS = "a hint for flash attention, which takes no mask"
_OF_THE_MODEL = "it says what the model returns"
_OF_OTHER_LAYERS = "other layers read it"
WITHOUT_EFFECT: Mapping[str, str] = {
    "sliding_window": _IN_THE_MASK,
    "seq_idx": _IN_THE_MASK,
    "position_ids": _IN_THE_TOKENS,
    "use_cache": _IN_THE_TOKENS,
    "cu_seq_lens_q": _OF_KERNELS,
    "cu_seq_lens_k": _OF_KERNELS,
    "max_length_q": _OF_KERNELS,
    "max_length_k": _OF_KERNELS,
    "deterministic": _OF_KERNELS,
    "output_attentions": _OF_THE_MODEL,
    "output_hidden_states": _OF_THE_MODEL,
    "return_dict": _OF_THE_MODEL,
    "num_items_in_batch": _OF_THE_MODEL,
    "output_router_logits": _OF_OTHER_LAYERS,
}

# What would change the result in a way that attlas does not know, wherever it comes from.
_REFUSED_KEYWORDS = {"cache": "the pages of a cache, as in continuous batching"}


def check_keywords(module: nn.Module, keywords: Mapping[str, object]) -> None:
    """Refuse a keyword that says something about the weights, and that attlas does not know.

    Parameters
    ----------
    module : nn.Module
        The attention layer that calls.
    keywords : mapping of str to object
        What it passes, beside what attlas uses.

    Raises
    ------
    BackendError
        If a keyword has a value, and the layer or its eager attention names it.

    Notes
    -----
    Models hand on whatever their users pass to them (a column of a data set, an option of another layer). No layer
    names such a keyword, so it changes nothing. None stands for a thing that is not there.
    """
    for name, value in keywords.items():
        if value is None or name in WITHOUT_EFFECT:
            continue
        if name in _REFUSED_KEYWORDS or _is_named(type(module), name):
            raise _unknown_keyword_error(module, name, value)


def _unknown_keyword_error(module: nn.Module, name: str, value: object) -> BackendError:
    """Return the error of a keyword that says something about the weights and that attlas does not know."""
    rule = "attlas must know every keyword by which a layer says what its weights are."
    found = f"{name} = {describe(value) if isinstance(value, Tensor) else kind(value)}"
    found += f" ({_REFUSED_KEYWORDS[name]})" if name in _REFUSED_KEYWORDS else ""
    fix = 'model.set_attn_implementation("eager") for this model, or a version of attlas that knows the keyword; '
    fix += "leave the keyword out, if your own code passes it to the model."
    return BackendError(rule, found, fix, layer=f"{type(module).__name__} of {type(module).__module__}")


@constant_to_compiler
def _is_named(owner: type, name: str) -> bool:
    """Return whether the code of an attention layer mentions a keyword, or the eager attention in its file does.

    The code of the layer has the name among its constants where it passes the keyword on or reads it; eager attention
    has it there or in its signature. This is a function of its own because torch.compile traces `check_keywords`, and
    takes the answer of this function as a constant in place of tracing the search.
    """
    return _search_for_name(owner, name)


@functools.lru_cache(maxsize=256)
def _search_for_name(owner: Any, name: str) -> bool:
    """Return what `_is_named` does, found once for each class and keyword."""
    return any(name in words for words in _words_of(owner))


def _words_of(owner: type) -> Iterator[set[str]]:
    """Yield the words in the code of a class and of the eager attention in its files."""
    own = [base for base in owner.__mro__ if not base.__module__.startswith(("torch.", "builtins"))]
    for base in own:
        for method in vars(base).values():
            code = getattr(inspect.unwrap(method), "__code__", None) if callable(method) else None
            if isinstance(code, CodeType):
                yield _texts_in(code)
    for file in {base.__module__ for base in own}:
        for label, function in vars(sys.modules[file]).items():
            if "eager" in label and inspect.isfunction(inspect.unwrap(function)):
                function = inspect.unwrap(function)
                yield _texts_in(function.__code__) | set(inspect.signature(function).parameters)


def _texts_in(code: CodeType) -> set[str]:
    """Return the texts among the constants of code, and of functions in it: keywords of calls are among them."""
    texts: set[str] = set()
    waiting: list[Any] = list(code.co_consts)
    while waiting:
        constant = waiting.pop()
        if isinstance(constant, str):
            texts.add(constant)
        elif isinstance(constant, tuple):
            waiting += constant
        elif isinstance(constant, CodeType):
            waiting += constant.co_consts
    return texts
