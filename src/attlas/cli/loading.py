"""Load a model and its tokenizer, and turn a text into tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from attlas import models
from attlas.cli.checks import check_least
from attlas.cli.terminal import UsageError
from attlas.errors import DeviceError, import_extra
from attlas.foundation.checks import usable_device
from attlas.foundation.compat import causal_models
from attlas.foundation.installation import install_command

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_DEFAULT_TOKENS = 2048  # tokens that are read unless more are asked for
_FEWEST_TOKENS = 64  # below that, there is little to see
_CHARACTERS_PER_TOKEN = 64  # of text for each token that is asked for: no tokenizer needs more on the average
# What may be a name on the Hugging Face hub, and no folder: "./model" and "../model" are none.
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
# Files of which a folder with a tokenizer has one; without them some tokenizers are made with an empty vocabulary.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.*",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "*.bpe",
)
_FULL_NAME = "--model DIR, a folder that the model was saved in, or its full name on huggingface.co, owner/name"
_SAVE_FIX = "model.save_pretrained(folder); tokenizer.save_pretrained(folder)"
_MODEL_RULE = "--model must be a causal language model that transformers can load, with its tokenizer."
_LONGEST_ERROR_TEXT = 300  # characters of an error of transformers
_OVERLAP_TOKENS = 4  # tokens that are decoded again before each, so that a tokenizer sees where it stands


@dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model and its tokenizer.

    Parameters
    ----------
    name : str
        Name of the folder.
    model : PreTrainedModel
        The model, with attention by attlas.
    tokenizer : PreTrainedTokenizerBase
        Its tokenizer.
    """

    name: str
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @property
    def context(self) -> int | None:
        """Most tokens that the model can read; None where its configuration does not say."""
        limit = getattr(self.model.config, "max_position_embeddings", None)
        return int(limit) if limit else None


def load(
    source: Path | str, *, attention: str | None = "attlas", dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> LoadedModel:
    """Load a model and its tokenizer: a folder without the network, a name on the hub, or ``shipped``.

    Weights come from safetensors only, and no code that comes with a model is run.

    Raises
    ------
    UsageError
        If there is no model that can be loaded.
    DeviceError
        If torch has no such device here.
    MissingExtraError
        If transformers is not installed.
    """
    try:
        place = usable_device(device)
    except DeviceError as error:
        raise error.replaced(fix="--device cpu") from None
    rule = "transformers must be installed to run a model."
    transformers = import_extra("transformers", rule, install_command("hf"))
    import attlas.huggingface  # noqa: F401 - registers the attention

    transformers.logging.set_verbosity_error()  # its own progress bars would run through ours
    transformers.logging.disable_progress_bar()
    if str(source) == "shipped":
        source = models.path()
    folder, name = Path(source), str(source)
    is_name = isinstance(source, str) and not folder.exists() and _HUB_NAME.fullmatch(source) is not None
    # A name without an owner is a folder that is misspelt, or a model that was downloaded before: the hub is not asked.
    options: dict[str, Any] = {"local_files_only": not (is_name and "/" in name), "trust_remote_code": False}
    chosen = {} if attention is None else {"attn_implementation": attention}
    if not is_name:
        _check_folder(transformers, folder, options)
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name, **options)
        config = transformers.AutoConfig.from_pretrained(name, **options)
        model = _class_of_model(transformers, config).from_pretrained(
            name, dtype=dtype, use_safetensors=True, **chosen, **options
        )
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        rule, found = _MODEL_RULE, f"{type(error).__name__}: {_first_sentence(error)}"
        if is_name and "/" not in name:
            found = f"no folder {name}, and no model of this name in the cache of transformers"
        raise UsageError(rule, found, _FULL_NAME if is_name else _SAVE_FIX) from error
    return LoadedModel(name if is_name else folder.resolve().name, model.to(place).eval(), tokenizer)


def _check_folder(transformers: Any, folder: Path, options: dict[str, Any]) -> None:
    """Raise a UsageError unless a folder has a model that reads text, and a tokenizer."""
    if not (folder / "config.json").is_file():
        found = f"no config.json in {folder}" if folder.is_dir() else f"no folder {folder}"
        raise UsageError("--model must be a folder that a Hugging Face model was saved in.", found, _SAVE_FIX)
    try:
        config = transformers.AutoConfig.from_pretrained(str(folder), **options)
        owner = transformers.MODEL_MAPPING[type(config)]
    except (OSError, ValueError, KeyError, RuntimeError):
        return  # loading the model says what is wrong with it
    reads = getattr(owner, "main_input_name", "input_ids")
    if reads != "input_ids" and _class_of_model(transformers, config) is transformers.AutoModel:
        fix = "attlas.record(model) in Python, around a call of the model: it takes models of any kind."
        raise UsageError(_MODEL_RULE, f"no language model: {owner.__name__} reads {reads}", fix)
    if not any(next(folder.glob(pattern), None) for pattern in _TOKENIZER_FILES):
        raise UsageError(_MODEL_RULE, f"no tokenizer in {folder}", f"tokenizer.save_pretrained({str(folder)!r})")


def _first_sentence(error: Exception) -> str:
    """Return the first line of an error, and the lines after it that a colon at its end promises."""
    lines = str(error).splitlines() or [""]
    whole = " ".join(map(str.strip, lines)) if lines[0].rstrip().endswith(":") else lines[0]
    return whole if len(whole) <= _LONGEST_ERROR_TEXT else f"{whole[:_LONGEST_ERROR_TEXT].rsplit(' ', 1)[0]} ..."


def _class_of_model(transformers: Any, config: Any) -> Any:
    """Return the class that makes the model: a language model, or what a configuration says is none."""
    named = (getattr(config, "architectures", None) or [""])[0]
    causal = causal_models(transformers).get(config.model_type)
    return transformers.AutoModelForCausalLM if causal is not None and named in ("", causal) else transformers.AutoModel


def encode(loaded: LoadedModel, text: str, size: int | None) -> Tensor:
    """Return the first `size` tokens of a text, after the model's token for the beginning where it has one."""
    cut = text if size is None else text[: _CHARACTERS_PER_TOKEN * size]
    ids = loaded.tokenizer(cut, add_special_tokens=False, verbose=False, return_attention_mask=False)["input_ids"]
    first = loaded.tokenizer.bos_token_id
    return torch.tensor(([] if first is None else [first]) + ids)[:size]


def tokenize(
    loaded: LoadedModel,
    text: str,
    tokens: int | None,
    *,
    least: int = _FEWEST_TOKENS,
    whole: bool = False,
    more: int = 0,
) -> Tensor:
    """Return the first tokens of a text, after the model's token for the beginning where it has one.

    Parameters
    ----------
    loaded : LoadedModel
        Model and tokenizer.
    text : str
        The text.
    tokens : int, optional
        How many tokens; the default is as many as the model has room for, up to 2,048.
    least : int
        How many there must be at least.
    whole : bool
        Whether the default is the whole text.
    more : int
        How many tokens the model writes afterwards.

    Raises
    ------
    UsageError
        If there are too few tokens, or more than the model can read.
    """
    limit = loaded.context
    check_least("tokens", tokens, least, _FEWEST_TOKENS)
    size = tokens
    if size is None and not whole:
        room = _DEFAULT_TOKENS if limit is None else min(limit - more, _DEFAULT_TOKENS)
        size = max(room, least)  # where these do not fit, the last error says so
    ids = encode(loaded, text, size)
    if len(ids) < (tokens or least):
        most = len(ids) if limit is None else min(len(ids), limit - more)
        fix = f"--tokens {most}" if most >= least else "--text FILE, with some pages of text"
        raise UsageError(f"the text must have at least {tokens or least:,} tokens.", f"{len(ids):,} tokens", fix)
    if limit is not None and len(ids) + more > limit:
        what = "the text and what is generated" if more else "the text"
        rule = f"{what} must fit into the context of the model, {limit:,} tokens."
        given = f"{len(ids):,} tokens" + (f" and {more:,} to generate" if more else "")
        half = limit // 2
        less = f"--generate {half}" + (f" --tokens {half}" if len(ids) > half else "")
        raise UsageError(rule, given, f"--tokens {limit - more}" if limit - more >= least else less)
    return ids


def texts(tokenizer: PreTrainedTokenizerBase, ids: Tensor) -> tuple[str, ...]:
    """Return the text of each token; a token that ends inside a character has none, the last one has it all."""
    numbers: list[int] = ids.tolist()
    pieces: list[str] = []
    # Tokens are decoded with a few before them, as a tokenizer may decode a token otherwise at a beginning. Those from
    # `start` up to `shown` are written already, and their text is cut off again.
    start, shown = 0, 0
    for i in range(len(numbers)):
        before = _decoded_text(tokenizer, numbers[start:shown])
        now = _decoded_text(tokenizer, numbers[start : i + 1])
        if now.endswith("\N{REPLACEMENT CHARACTER}") and i + 1 < len(numbers) and i - shown < _OVERLAP_TOKENS:
            pieces.append("")
            continue
        pieces.append(now[len(before) :])
        start, shown = max(shown - _OVERLAP_TOKENS, 0) if now.startswith(before) else shown, i + 1
    return tuple(pieces)


def _decoded_text(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Return the text of token ids as it is: the tokenizer removes no blanks."""
    return str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))
