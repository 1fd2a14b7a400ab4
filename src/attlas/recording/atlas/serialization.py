"""Scores, masks and results of statistics as plain data: of the classes that attlas exports, and no others."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any, TypeAlias

from torch import Tensor, nn

from attlas import masks as m
from attlas import scores as s
from attlas.errors import DtypeError, RecordingError, kind
from attlas.matrix.handwritten.steps import StepScore
from attlas.matrix.value_weighted import KeyWeighted
from attlas.scores.placed import PlacedScore
from attlas.scores.side import SideBias
from attlas.stats import Largest, Moments

Spec: TypeAlias = "dict[str, Any]"
# Stores a tensor under a name and returns the plain data that finds it again; and the way back.
StoreTensor: TypeAlias = Callable[[str, Tensor], Spec]
LoadTensor: TypeAlias = Callable[[Any], Tensor]
# What `load` is given for scores of the user's own: one, or several by name; an object, or a class with `from_dict`.
UserScores: TypeAlias = "s.Score | type[s.Score] | Mapping[str, s.Score | type[s.Score]] | None"

_LARGEST_INT = 2**53
_MOST_NESTED = 200  # scores in scores, masks in masks


class FormatError(ValueError):
    """Plain data that describes no score, mask or result; the reader says in which file."""


def _exported_classes(module: ModuleType, base: Any) -> dict[str, Any]:
    """Return the classes that a module exports, by name: only these are created when a folder is read."""
    every = {name: getattr(module, name) for name in module.__all__}
    return {name: make for name, make in every.items() if isinstance(make, type) and issubclass(make, base)}


_SCORE_CLASSES: dict[str, type[s.Score]] = {
    **_exported_classes(s, s.Score),
    "MovedScore": PlacedScore,
    "KeyWeighted": KeyWeighted,
    "StepScore": StepScore,
    "SideBias": SideBias,
}
_MASK_CLASSES: dict[str, type[m.Mask]] = _exported_classes(m, m.Mask)
# Version 2 writes these as it writes a score of the user's own.
_STORED_LIKE_USER_SCORES = ("ScaledByTensor", "MovedScore", "StepScore", "SideBias")
_TUPLE_CLASSES: dict[str, type[Any]] = {"Largest": Largest, "Moments": Moments}


def class_named(name: Any) -> type[s.Score | m.Mask] | None:
    """Return the class of a score or a mask of attlas by its name in files; None for classes of the user's own."""
    return _SCORE_CLASSES.get(name) or _MASK_CLASSES.get(name)


# --------------------------------------------------------------------------------------------------- scores and masks


def score_spec(score: s.Score, put: StoreTensor) -> Spec:
    """Return a score as plain data; its tensors go to `put`.

    A class of the user's own is stored by its name and what its `to_dict` gives, and must be given again when it is
    read.
    """
    name, settings = _file_name(score), settings_of(score)
    is_ours = type(score) is _SCORE_CLASSES.get(name)
    if settings is None:
        return {"class": "own", "name": name}
    data = {key: _plain_data(name, key, value, put, score_spec) for key, value in settings.items()}
    if is_ours and name not in _STORED_LIKE_USER_SCORES:
        return {"class": name} | data
    spec = {"class": name} if is_ours else {"class": "own", "name": name}
    return spec | {"settings": {key: _tagged_setting(settings[key], data) for key, data in data.items()}}


def _file_name(score: s.Score) -> str:
    """Return the name of a score's class in files."""
    return "MovedScore" if type(score) is PlacedScore else type(score).__name__


def settings_of(score: s.Score) -> dict[str, Any] | None:
    """Return the settings of a score that are stored: of one of attlas, or of a class with `to_dict` of its own.

    None where there are none. A user's class that only inherits `to_dict` or `stored` from a class of attlas has none.
    """
    if type(score) is _SCORE_CLASSES.get(_file_name(score)):
        return score.to_dict()
    own = [kind for kind in type(score).__mro__ if not kind.__module__.startswith("attlas.")]
    return score.to_dict() if any(vars(kind).keys() & {"to_dict", "stored"} for kind in own) else None


def mask_spec(mask: m.Mask, put: StoreTensor, runs: Callable[[m.Mask], m.Mask]) -> Spec:
    """Return a mask as plain data; its tensors go to `put`.

    Parameters
    ----------
    mask : Mask
        The mask. A function, or a class of the user's own, is stored as what it allows.
    put : callable
        Stores a tensor.
    runs : callable
        Finds the runs of a mask for the matrix that it belongs to.
    """
    name = type(mask).__name__
    settings = mask.to_dict() if type(mask) is _MASK_CLASSES.get(name) else None
    if settings is not None:
        inner = partial(mask_spec, runs=runs)
        return {"class": name} | {key: _plain_data(name, key, value, put, inner) for key, value in settings.items()}
    if mask.log_weights():
        rule = "an additive mask must be one of attlas to be stored."
        fix = "use attlas.from_tensor(t), or keep statistics and not q and k."
        raise DtypeError(rule, kind(mask), fix, mask=mask.name(), where="save()")
    return mask_spec(runs(mask), put, runs)


def _plain_data(name: str, key: str, value: Any, put: StoreTensor, inner: Callable[[Any, StoreTensor], Spec]) -> Any:
    """Return one setting of a score or mask as plain data."""
    if isinstance(value, s.Score | m.Mask):
        return inner(value, put)
    if isinstance(value, Tensor):
        return put(key, value.detach())
    if value is None or isinstance(value, bool | int | float | str):
        return value
    rule = "to_dict() of a score must give numbers, texts, tensors and scores."
    fix = "give what the class is made of, by the names of its arguments."
    raise DtypeError(rule, kind(value), fix, score=name, setting=key, where="save()")


def _tagged_setting(original: Any, data: Any) -> Spec:
    """Return the plain data of one setting of a user's own score under a key that says what the setting was.

    The key is "t" for a tensor ("learn": whether it is a parameter), "score" for a score, and "plain" for all else.
    """
    if isinstance(original, Tensor):
        return {"t": data, "learn": isinstance(original, nn.Parameter)}
    return {"score" if isinstance(original, s.Score) else "plain": data}


def _untagged_setting(tagged: Any) -> Any:
    """Return the plain data that `_tagged_setting` has put under a key."""
    return _required_value(
        tagged, next((key for key in ("score", "t") if isinstance(tagged, dict) and key in tagged), "plain")
    )


def score_from(spec: Any, take: LoadTensor, user_scores: UserScores = None, depth: int = 0) -> s.Score:
    """Return the score that plain data describes.

    Raises
    ------
    FormatError
        If it describes none.
    """
    name = _class_named(spec, depth)
    inner = partial(score_from, take=take, user_scores=user_scores, depth=depth + 1)
    if name == "own":
        return _user_score(spec, take, user_scores, inner)
    if name not in _SCORE_CLASSES:
        raise FormatError(f"an unknown score, {name[:60]!r}")
    return _SCORE_CLASSES[name].from_dict(_settings_from_spec(spec, take, inner))


def mask_from(spec: Any, take: LoadTensor, depth: int = 0) -> m.Mask:
    """Return the mask that plain data describes.

    Raises
    ------
    FormatError
        If it describes none.
    """
    name = _class_named(spec, depth)
    if name not in _MASK_CLASSES:
        raise FormatError(f"an unknown mask, {name[:60]!r}")
    return _MASK_CLASSES[name].from_dict(
        _settings_from_spec(spec, take, partial(mask_from, take=take, depth=depth + 1))
    )


def _settings_from_spec(spec: Spec, take: LoadTensor, inner: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the settings that `to_dict` of a score or mask has returned."""
    wrapped = spec.get("settings")
    if not isinstance(wrapped, dict | None):
        raise FormatError(f"settings = {str(wrapped)[:60]}, not an object")
    settings: dict[str, Any] = {}
    for key, data in (spec if wrapped is None else wrapped).items():
        value = data if wrapped is None else _untagged_setting(data)
        if isinstance(value, dict):
            value = inner(value) if "class" in value else take(value)
        elif isinstance(value, int) and abs(value) > _LARGEST_INT:
            raise FormatError(f"{key[:60]} = {str(value)[:60]}, not a whole number")
        elif isinstance(value, list) or (isinstance(value, float) and not math.isfinite(value)):
            raise FormatError(f"{key[:60]} = {str(value)[:60]}, not a finite number or a text")
        # "t" marks a tensor, and "learn" whether it was an nn.Parameter.
        is_parameter = wrapped is not None and "t" in data and check_type(_required_value(data, "learn"), "learn", bool)
        settings[key] = nn.Parameter(value) if is_parameter else value
    if wrapped is None:
        del settings["class"]
    return settings


def _user_score(spec: Spec, take: LoadTensor, user_scores: UserScores, inner: Callable[[Any], s.Score]) -> s.Score:
    """Return the score that the user has given for a class of their own; raise a RecordingError where none was."""
    name = check_type(_required_value(spec, "name"), "name", str)
    match = user_scores.get(name) if isinstance(user_scores, Mapping) else user_scores
    if isinstance(match, s.Score) and type(match).__name__ == name:
        return match
    if isinstance(match, type) and match.__name__ == name and "settings" in spec:
        return match.from_dict(_settings_from_spec(spec, take, inner))
    rule = "a score of your own is not stored, and must be given when it is read."
    fix = f"attlas.load(folder, score={name[:60]}()), with the parameters that it had."
    if name == "ScoreMod":
        rule = "the function of a score is code, which is not stored, and must be given when it is read."
        fix = "attlas.load(folder, score=attlas.scores.ScoreMod(function)), with the function that was recorded."
    elif "settings" in spec:
        rule = "only the settings of a score of your own are stored; its class must be given when it is read."
        fix = f"attlas.load(folder, score={name[:60]})"
    shown = match if isinstance(match, type) else type(match or user_scores)
    found = "no score" if user_scores is None else f"score = {shown.__name__}"
    raise RecordingError(rule, found, fix, score=name[:60], where="load()")


# --------------------------------------------------------------------------------------------- results of statistics


def result_spec(name: str, result: Any, put: StoreTensor) -> Spec:
    """Return the result of a statistic as plain data: a tensor, or tuples of tensors."""
    if isinstance(result, Tensor):
        return {"class": "Tensor", "t": put(name, result)}
    if isinstance(result, tuple):
        named_tuple = _TUPLE_CLASSES.get(type(result).__name__)
        label = type(result).__name__ if named_tuple is type(result) else "tuple"
        return {"class": label, "parts": [result_spec(f"{name}.{i}", part, put) for i, part in enumerate(result)]}
    rule = "what a statistic gives must be a Tensor, or a tuple of Tensors, to be stored."
    fix = f"let finish() of {name} return Tensors, or take it out of entry.statistics."
    raise DtypeError(rule, kind(result), fix, statistic=name, where="save()")


def result_from(spec: Any, take: LoadTensor, depth: int = 0) -> Any:
    """Return the result of a statistic that plain data describes; an unknown named tuple comes back as a tuple."""
    name = _class_named(spec, depth)
    if name == "Tensor":
        return take(_required_value(spec, "t"))
    parts = _required_value(spec, "parts")
    if name not in (*_TUPLE_CLASSES, "tuple") or not isinstance(parts, list):
        raise FormatError(f"an unknown result, {name[:60]!r}")
    results = tuple(result_from(part, take, depth + 1) for part in parts)
    if name == "tuple":
        return results
    if len(results) != len(_TUPLE_CLASSES[name]._fields):
        raise FormatError(f"{len(results)} parts of {name}")
    return _TUPLE_CLASSES[name](*results)


# --------------------------------------------------------------------------------------------------------- plain data


def check_type(value: Any, name: str, kind: type) -> Any:
    """Return a value of plain data that is exactly of a type, or raise a FormatError."""
    if type(value) is kind:
        return value
    raise FormatError(f"{name} = {str(value)[:60]}, not {'an' if kind is int else 'a'} {kind.__name__}")


def _class_named(spec: Any, depth: int) -> str:
    """Return the class that plain data names; `depth` is the number of scores, masks or results around it."""
    if depth > _MOST_NESTED:
        raise FormatError(f"more than {_MOST_NESTED} parts within parts")
    return str(check_type(_required_value(spec, "class"), "class", str))


def _required_value(spec: Any, key: str) -> Any:
    """Return a value of plain data by its key, or raise a FormatError."""
    if not isinstance(spec, dict) or key not in spec:
        raise FormatError(f"no {key!r} where there must be one")
    return spec[key]
