"""What a run is about: the model, the source and all settings that change a result; and the file that says so."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from torch import nn

from attlas.corpus.journal import PARTS
from attlas.corpus.reading import model_facts
from attlas.errors import RecordingError, ShapeError, public
from attlas.foundation.checks import whole_number
from attlas.foundation.files import save_text

LENGTH, SAMPLES, TOP = 4096, 32, 10
_RUN_FILE = "run.json"
_FACTS_OF_RUN = ("checksum", "extended")  # what the file says of the run, and no result does


@public("corpus()")
def about_run(
    model: nn.Module,
    source: str,
    tokenizer: Any = None,
    *,
    length: int | None = None,
    stride: int | None = None,
    limit: int | None = None,
    batch: int = 1,
    seed: int = 0,
    samples: int = SAMPLES,
    column: str | None = None,
) -> dict[str, Any]:
    """Return the model, the source and the settings of a run: a dictionary for JSON."""
    facts = model_facts(model)
    length, stride = _length_and_stride(length, stride, facts["context"])
    for name, value in (("batch", batch), ("samples", samples), *([] if limit is None else [("limit", limit)])):
        whole_number(name, value, f"{name}=1")
    settings = {"length": length, "stride": stride, "texts": limit, "batch": batch, "seed": seed, "samples": samples}
    return {
        "model": facts,
        "tokenizer": None if tokenizer is None else _tokenizer_facts(tokenizer),
        "source": source,
        "settings": settings | {"top": TOP, "column": column},
    }


def _length_and_stride(length: int | None, stride: int | None, context: int | None) -> tuple[int, int]:
    """Return length and stride: by default a length that fits into the context, and the length as stride."""
    chosen = min(LENGTH, context or LENGTH) if length is None else length
    whole_number("length", chosen, "length=512")
    whole_number("stride", chosen if stride is None else stride, "stride=512")
    if chosen < 2 or (context is not None and chosen > context):
        rule = "length must be 2 or more, and fit into the context of the model."
        raise ShapeError(rule, f"length = {chosen}, context = {context}", f"length={context}")
    return chosen, chosen if stride is None else stride


def _tokenizer_facts(tokenizer: Any) -> dict[str, Any]:
    """Return the class of a tokenizer, and where it came from."""
    path = str(getattr(tokenizer, "name_or_path", "") or "")
    return {"name": type(tokenizer).__name__, "path": path or None}


def check_same(folder: Path, about: dict[str, Any], other: dict[str, Any], *, extended: bool = False) -> None:
    """Raise an error where two corpora are not one.

    Parameters
    ----------
    folder : Path
        That of `other`.
    about, other : dict
        What they are about.
    extended : bool
        Whether `other` may have been made with a smaller number of texts at most.
    """
    difference = _differing_facts(about, other, extended=extended)
    if difference:
        fix = "another folder, or the same settings as before."
        raise RecordingError("a folder holds one corpus.", difference, fix, folder=str(folder), where="corpus()")


def _differing_facts(about: dict[str, Any], other: dict[str, Any], *, extended: bool) -> str:
    """Return in what two corpora differ, "" where they are one; arguments as of `check_same`."""
    model, known = about["model"], other.get("model", {})
    if model["fingerprint"] != known.get("fingerprint"):
        return f"one of another model, {known.get('name')}"
    settings, before = about["settings"], other.get("settings", {})
    different = [name for name in settings if settings[name] != before.get(name)]
    most, most_before = settings.get("texts"), before.get("texts")
    # A finished corpus may be extended by a larger `limit`, which "texts" holds.
    if extended and "texts" in different and most_before is not None and (most is None or most > most_before):
        different.remove("texts")
    words = [f"{name} = {before.get(name)}" for name in different]
    if about["source"] != other.get("source"):
        words.append(f"source = {other.get('source')}")
    return f"one with {', '.join(words)}" if words else ""


def has_run(folder: Path) -> bool:
    """Tell whether a corpus is unfinished, or a finished one is being extended."""
    return (folder / PARTS / _RUN_FILE).exists()


@public("corpus()")
def save_run(folder: Path, facts: dict[str, Any], extended: str | None) -> None:
    """Write what all processes of a run agree on.

    Parameters
    ----------
    folder : Path
        The corpus.
    facts : dict
        `about_run`, with ``vocabulary`` and ``modules``.
    extended : str or None
        Checksum of the finished corpus that the run extends.
    """
    known = facts | {"extended": extended}
    save_text(json.dumps(known | {"checksum": _checksum_of_facts(known)}), folder / PARTS / _RUN_FILE)


def load_run(folder: Path) -> tuple[dict[str, Any], str, str | None]:
    """Return the facts that the processes of a run agree on, their checksum, and that of the corpus that it extends.

    Raises
    ------
    RecordingError
        If the file is damaged, or of the format of an older attlas.
    """
    path = folder / PARTS / _RUN_FILE
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        found = getattr(error, "strerror", None) or (str(error).splitlines() or ["no JSON"])[0]
        raise _damaged_file_error(path, found) from error
    if not isinstance(known, dict):
        raise _damaged_file_error(path, "no JSON object")
    checksum = known.pop("checksum", None)
    if checksum is None and any(path.parent.glob("[0-9]*.safetensors")):
        rule, fix = (
            "an unfinished corpus must be one that this attlas can go on with.",
            "another folder, or finish it there.",
        )
        raise RecordingError(rule, "the format of an older attlas", fix, file=str(path), where="corpus()")
    if checksum != _checksum_of_facts(known):
        raise _damaged_file_error(path, "other bytes than were written")
    return {name: value for name, value in known.items() if name not in _FACTS_OF_RUN}, checksum, known["extended"]


def _checksum_of_facts(known: dict[str, Any]) -> str:
    """Return the SHA-256 of facts as JSON."""
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()


def _damaged_file_error(path: Path, found: str) -> RecordingError:
    """Return the error of a file of an unfinished corpus that attlas did not write so."""
    rule = "each file of an unfinished corpus must be as attlas wrote it."
    fix = "remove this file, and run the same attlas corpus again: it is written anew."
    return RecordingError(rule, found, fix, file=str(path), where="corpus()")
