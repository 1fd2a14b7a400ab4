"""Metadata of a recorded model and of its text: name, configuration, token ids, padding, token texts."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from types import MethodType
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor, nn

from attlas.errors import DtypeError, kind
from attlas.recording.snapshot import answers_later

Tensors: TypeAlias = dict[str, Tensor]

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")

_DECODER_ARGUMENTS = ("decoder_input_ids", "decoder_inputs_embeds")  # what only a model with a decoder takes
_CONFIG_FIELDS = (
    "model_type",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_size",
    "vocab_size",
    "max_position_embeddings",
    "sliding_window",
)


def model_name(model: nn.Module) -> str:
    """Return the name that a model was loaded by, or that of its class."""
    config = getattr(model, "config", None)
    return str(getattr(config, "name_or_path", "") or type(model).__name__)


def model_details(model: nn.Module, keep: str = "") -> dict[str, Any]:
    """Return the metadata of a model, as JSON can hold it."""
    config = getattr(model, "config", None)
    text = getattr(config, "text_config", config)
    fields = {name: _config_field(text, name) for name in _CONFIG_FIELDS}
    plain = {name: value for name, value in fields.items() if isinstance(value, int | str)}
    return {"class": type(model).__name__, "keep": keep, "torch": str(torch.__version__), **plain}


def _config_field(config: Any, name: str) -> Any:
    """Return a field of a configuration; None where it is missing, or differs between the layers."""
    try:
        return getattr(config, name, None)
    except RuntimeError:  # transformers: the layers differ in it (head_dim of Gemma 4)
        return None


def encoder_of(model: nn.Module) -> nn.Module | None:
    """Return the encoder of a model of transformers that has one beside a decoder."""
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False) and hasattr(model, "get_encoder"):
        encoder = model.get_encoder()  # type: ignore[operator]  # a method of transformers' models
        return encoder if isinstance(encoder, nn.Module) and encoder is not model else None
    return None


def text_inputs(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensors, Tensors, dict[str, Any]]:
    """Return the token ids and the 2-D attention masks that a model was called with, by the kind of attention.

    Parameters
    ----------
    model : nn.Module
        The model, for the names of the arguments that have none in the call.
    args, kwargs
        The arguments of the call.

    Returns
    -------
    ids : dict of str to Tensor, shape (batch, tokens)
        Of "self", the text that is read or written, and of "encoder" where there is another one; a decoder that
        makes its ids by itself (of labels) has none.
    masks : dict of str to Tensor of bool, shape (batch, tokens)
        Nothing where no sequence is padded. Ids and masks of a device are copies on it, which nobody has looked at.
    arguments : dict of str to object
        All arguments of the call, by their names.
    """
    try:
        signature = _forward_signature(model.forward)
        names, arguments = signature.parameters.keys(), signature.bind_partial(*args, **kwargs).arguments
    except (TypeError, ValueError):
        names, arguments = {}.keys(), {}
    arguments = {**arguments, **kwargs}
    # A wrapper passes all arguments on, so that its signature does not name those of a decoder.
    wraps = names <= {"args", "kwargs"} and getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    decoder = "decoder_" if wraps or not {*names, *arguments}.isdisjoint(_DECODER_ARGUMENTS) else ""
    # The token ids of a plain model may be its first argument without a name.
    first = None if decoder or "input_ids" in arguments else next(iter(args), None)
    ids = {"self": arguments.get(f"{decoder}input_ids", first)}
    masks = dict.fromkeys(("self", "cross"), arguments.get(f"{decoder}attention_mask"))
    if decoder:
        ids["encoder"], masks["encoder"] = arguments.get("input_ids"), arguments.get("attention_mask")
    return (
        {name: t.detach().clone() for name, t in ids.items() if _are_token_ids(t)},
        {
            name: t.detach().to(torch.bool, copy=True)
            for name, t in masks.items()
            if isinstance(t, Tensor) and t.ndim == 2 and (answers_later(t) or not bool(t.bool().all()))
        },
        arguments,
    )


def _forward_signature(forward: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a model's forward; that of a method is read once, and not in each pass."""
    function = getattr(forward, "__func__", None)
    return inspect.signature(forward) if function is None else _signature_of_method(function)


@lru_cache(maxsize=64)
def _signature_of_method(function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a method without `self`: the function is bound to an object that is never used."""
    return inspect.signature(MethodType(function, function))


def _are_token_ids(t: Any) -> TypeGuard[Tensor]:
    """Return whether an argument is token ids: whole numbers of two axes."""
    return isinstance(t, Tensor) and t.ndim == 2 and not t.is_floating_point() and t.dtype is not torch.bool


def check_tokens(tokens: Any) -> None:
    """Raise a DtypeError unless tokens are a list, a tokenizer or None."""
    if not (tokens is None or isinstance(tokens, list | tuple) or callable(getattr(tokens, "decode", None))):
        raise DtypeError("tokens must be a list of str, or a tokenizer.", kind(tokens), "tokens=tokenizer")


def token_texts(tokens: Any, ids: Tensor | None) -> list[list[str]] | None:
    """Return the text of each token of every sequence: as the user gave them, or as a tokenizer decodes the ids."""
    if isinstance(tokens, list | tuple):
        texts = tokens if tokens and all(isinstance(text, list | tuple) for text in tokens) else [tokens]
        return [[str(token) for token in text] for text in texts]
    if tokens is None or ids is None or not len(ids):
        return None
    known = {number: str(tokens.decode([number])) for number in set(ids.flatten().tolist())}
    return [[known[number] for number in text] for text in ids.tolist()]


def token_bytes(tokenizer: Any, ids: Sequence[int]) -> dict[str, str]:
    """Return the bytes of the tokens that are a part of a character, in hexadecimal digits by their place.

    Parameters
    ----------
    tokenizer : tokenizer of transformers
        One that works on bytes (GPT-2, Llama 3, Qwen) or falls back on them (Llama 2, Gemma); of others nothing
        is known.
    ids : sequence of int
        Tokens of the text.

    Returns
    -------
    dict of str to str
        Plain data, as JSON can hold: ``{"17": "e697"}``. Tokens that are text on their own are not in it.
    """
    if not (hasattr(tokenizer, "decode") and hasattr(tokenizer, "convert_ids_to_tokens")):
        return {}
    known = {number: _bytes_of_token(tokenizer, number) for number in set(ids)}
    return {str(place): known[number].hex() for place, number in enumerate(ids) if known[number]}


def _bytes_of_token(tokenizer: Any, number: int) -> bytes:
    """Return the bytes of a token that is no text on its own; nothing for any other."""
    if "\N{REPLACEMENT CHARACTER}" not in str(tokenizer.decode([number])):
        return b""
    name = str(tokenizer.convert_ids_to_tokens(number))
    match = _BYTE_TOKEN.fullmatch(name)
    if match is not None:
        return bytes.fromhex(match[1])
    alphabet = _byte_alphabet()
    if not all(letter in alphabet for letter in name):
        return b""
    piece = bytes(alphabet[letter] for letter in name)
    return piece if "\N{REPLACEMENT CHARACTER}" in piece.decode(errors="replace") else b""


@cache
def _byte_alphabet() -> dict[str, int]:
    """Return the byte that each letter stands for in the vocabularies that work on bytes, as GPT-2 chose them."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + place): byte for place, byte in enumerate(others)}
