"""Weights from a Hugging Face folder: safetensors only, every name and shape checked."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from attlas.errors import CheckpointError, listed, public
from attlas.foundation.files import save_text, whole_file

_ERROR_WHERE = "GPT2.from_pretrained()"
_SINGLE_FILE, _INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
# Buffers of old checkpoints: the causal mask and the number that it was filled with.
_OLD_BUFFERS = re.compile(r"h\.\d+\.(attn|crossattention)\.(bias|masked_bias)")
_MOST_NAMES_SHOWN = 4  # names that an error lists
_LONGEST_COMPLAINT = 200  # characters of a complaint of torch that it shows


def read_config(folder: Path) -> dict[str, Any]:
    """Return the settings in ``config.json``.

    Raises
    ------
    CheckpointError
        If there is none, or it is not that of a GPT-2.
    """
    settings = _json_object(folder, folder / "config.json")
    if settings.get("model_type", "gpt2") != "gpt2":
        fix = "import attlas.huggingface; AutoModelForCausalLM.from_pretrained(folder, attn_implementation='attlas')"
        raise _checkpoint_error(
            folder, "config.json must be that of a GPT-2.", f"model_type = {settings['model_type']!r}", fix
        )
    return settings


def dtype_of(settings: Mapping[str, Any]) -> torch.dtype | None:
    """Return the dtype that a configuration names, under its new or its old name; None where it does not."""
    name = settings.get("dtype", settings.get("torch_dtype"))
    found = getattr(torch, name, None) if isinstance(name, str) else None
    return found if isinstance(found, torch.dtype) else None


def read_weights(folder: Path, device: str) -> dict[str, Tensor]:
    """Return the tensors of ``model.safetensors``, or of the files that its index names.

    Raises
    ------
    CheckpointError
        If there are none, or one cannot be read.
    """
    if (folder / _SINGLE_FILE).is_file():
        return _tensors_of_file(folder, folder / _SINGLE_FILE, device)
    if not (folder / _INDEX_FILE).is_file():
        pickled = sorted(path.name for path in folder.glob("*.bin"))
        rule = "the folder must hold safetensors; a pickle can run any code, and is never read."
        fix = "once, where you trust it: AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder)"
        raise _checkpoint_error(
            folder, rule, f"{', '.join(pickled[:_MOST_NAMES_SHOWN])} only" if pickled else f"no {_SINGLE_FILE}", fix
        )
    places: dict[str, str] = _json_object(folder, folder / _INDEX_FILE).get("weight_map", {})
    found: dict[str, Tensor] = {}
    for name in sorted(set(places.values())):
        if Path(name).name != name:
            raise _checkpoint_error(
                folder, "the index must name files of this folder.", name, "download the folder again."
            )
        found.update(_tensors_of_file(folder, folder / name, device))
    absent = sorted(places.keys() - found.keys())
    if absent:
        fix = "download it again."
        raise _checkpoint_error(
            folder, "the files must hold what their index says.", listed(absent, most=_MOST_NAMES_SHOWN), fix
        )
    return found


def fill(model: nn.Module, found: Mapping[str, Tensor], folder: Path, *, tied: bool) -> None:
    """Put tensors in the place of the parameters of a model.

    Parameters
    ----------
    model : nn.Module
        The model; its parameters may be on the meta device.
    found : mapping
        Tensors under the names of the file, with or without ``transformer.``.
    folder : Path
        For the error text.
    tied : bool
        Whether the head is the embedding, so that a second copy is left out.

    Raises
    ------
    CheckpointError
        If a name is missing or not known, or a shape is another.
    """
    # Names of Hugging Face's files may begin with "transformer.", and old files hold buffers too.
    state = {name.removeprefix("transformer."): t for name, t in found.items()}
    state = {name: t for name, t in state.items() if not _OLD_BUFFERS.fullmatch(name)}
    if tied and "lm_head.weight" in state:
        head = state.pop("lm_head.weight")
        state.setdefault("wte.weight", head)
    try:
        model.load_state_dict(state, assign=True)
    except RuntimeError as error:
        rule = "the weights must be those of the model that config.json describes."
        complaints = [shorten(line, _LONGEST_COMPLAINT) for line in str(error).splitlines()[1:]]
        fix = "take config.json and the weights from one model."
        raise _checkpoint_error(folder, rule, listed(complaints, most=_MOST_NAMES_SHOWN), fix) from error


@public("save_pretrained()")
def write(folder: Path, settings: str, state: Mapping[str, Tensor]) -> None:
    """Write configuration and weights, each under a temporary name first."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().contiguous() for name, t in state.items()}
    with whole_file(folder / _SINGLE_FILE, CheckpointError) as unfinished:
        save_file(tensors, unfinished, {"format": "pt"})
    save_text(settings, folder / "config.json", CheckpointError)


def _json_object(folder: Path, path: Path) -> dict[str, Any]:
    """Return the object that a JSON file holds, {} where it holds another value.

    Raise a CheckpointError if unreadable.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        rule = "folder must be one that a Hugging Face model was saved in."
        raise _checkpoint_error(folder, rule, f"no {path.name}", "model.save_pretrained(folder)") from None
    except (OSError, ValueError) as error:
        raise _checkpoint_error(
            folder, f"{path.name} must be JSON.", str(error), "download the folder again."
        ) from error
    return content if isinstance(content, dict) else {}


def _tensors_of_file(folder: Path, path: Path, device: str) -> dict[str, Tensor]:
    """Return the tensors of a safetensors file by name, on a device."""
    try:
        return load_file(path, device)
    except (OSError, SafetensorError) as error:
        raise _checkpoint_error(
            folder, f"{path.name} must be a safetensors file.", str(error), "download it again."
        ) from error


def _checkpoint_error(folder: Path, rule: str, found: str, fix: str) -> CheckpointError:
    """Return an error about a folder of weights."""
    return CheckpointError(rule, found, fix, folder=str(folder), where=_ERROR_WHERE)
