"""Scores, masks and results of statistics as plain data: a closed list of classes, nothing imported by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from attlas import masks as m
from attlas import scores as s
from attlas.atlas.moved import MovedScore
from attlas.errors import DtypeError, RecordingError, kind
from attlas.stats import Largest, Moments
from attlas.tiles import Tile

__all__ = [
    "Own",
    "Put",
    "SpecError",
    "Take",
    "mask_from",
    "mask_spec",
    "result_from",
    "result_spec",
    "score_from",
    "score_spec",
]

Spec: TypeAlias = "dict[str, Any]"
# Stores a tensor under a name and returns the plain data that finds it again; and the way back.
Put: TypeAlias = Callable[[str, Tensor], Spec]
Take: TypeAlias = Callable[[Any], Tensor]
# What `load` is given for scores of the user's own: one, or several by name; an object, or a class with `from_dict`.
Own: TypeAlias = "s.Score | type[s.Score] | Mapping[str, s.Score | type[s.Score]] | None"

_LARGEST_INT = 2**53
_DEPTH = 200  # scores in scores, masks in masks


class SpecError(ValueError):
    """Plain data that describes no score, mask or result; the reader says in which file."""


@dataclass(frozen=True)
class _Form:
    """How one class is stored: its settings, its tensors, the parts that are of its own family."""

    make: type[Any]
    settings: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()


_SCORES: dict[str, _Form] = {
    form.make.__name__: form
    for form in (
        _Form(s.ScaledDot, ("scale",)),
        _Form(s.Cosine, ("scale",)),
        _Form(s.SoftCap, ("cap",), ("score",)),
        _Form(s.Sum, (), ("left", "right")),
        _Form(s.Scaled, ("factor",), ("inner",)),
    )
}
_KERNELS = {make.__name__: make for make in (s.Gaussian, s.Laplace, s.Boxcar, s.Epanechnikov, s.Triangular)}
# Scores with parameters: the word in a file for each of them, and its name in the module.
_LEARNED = {
    "RelativeBias": {"weight": "weight"},
    "Bilinear": {"weight": "weight"},
    "Additive": {"W_q": "W_q.weight", "W_k": "W_k.weight", "w_v": "w_v", "b": "W_q.bias"},
}
_EXACT = set(_KERNELS.values())
_MASKS: dict[str, _Form] = {
    form.make.__name__: form
    for form in (
        _Form(m.Causal, ("offset",)),
        _Form(m.Window, ("left", "right", "offset")),
        _Form(m.Dilated, ("left", "right", "step", "offset")),
        _Form(m.And, (), ("left", "right")),
        _Form(m.Or, (), ("left", "right")),
        _Form(m.Not, (), ("inner",)),
    )
}
# Scores that say themselves what they are made of.
_BY_DICT: dict[str, type[s.Score]] = {make.__name__: make for make in (s.ScaledByTensor, MovedScore)}
_TUPLES: dict[str, type[Any]] = {"Largest": Largest, "Moments": Moments}


# ------------------------------------------------------------------------------------------------------------- scores


def score_spec(score: s.Score, put: Put) -> Spec:
    """Return a score as plain data; its tensors go to `put`.

    A class of the user's own is stored by its name alone, and must be given again when it is read.
    """

    def whole(key: str, t: Tensor) -> Spec:
        return put(key, t.detach().contiguous())

    name = type(score).__name__
    spec: Spec = {"class": name}
    form = _SCORES.get(name)
    if form is not None and type(score) is form.make:
        spec |= {key: getattr(score, key) for key in form.settings}
        return spec | {key: score_spec(getattr(score, key), put) for key in form.parts}
    match score:
        case s.Gaussian() | s.Laplace() | s.Boxcar() | s.Epanechnikov() | s.Triangular() if type(score) in _EXACT:
            learned = score.log_bandwidth is not None
            value = score.log_bandwidth if score.log_bandwidth is not None else score.given
            spec |= {"learn": learned, "bandwidth": whole("bandwidth", value)}
        case s.Alibi() if type(score) is s.Alibi:
            spec["slopes"] = None if score.slopes is None else whole("slopes", score.slopes)
        case s.TensorBias() if type(score) is s.TensorBias:
            spec |= {"t": put("bias", score.t), "learn": isinstance(score.t, nn.Parameter)}
        case s.RelativeBias() if type(score) is s.RelativeBias:
            spec |= {"max_distance": score.max_distance, "bidirectional": score.bidirectional}
            spec |= {"buckets": score.buckets, "weight": whole("weight", score.weight)}
        case s.Bilinear() if type(score) is s.Bilinear:
            spec |= {"scale": score.scale, "weight": whole("weight", score.weight)}
        case s.Additive() if type(score) is s.Additive:
            bias = score.W_q.bias
            spec |= {"W_q": whole("W_q", score.W_q.weight), "W_k": whole("W_k", score.W_k.weight)}
            spec |= {"w_v": whole("w_v", score.w_v), "b": None if bias is None else whole("b", bias)}
        case _:
            settings = score.to_dict()
            known = type(score) is _BY_DICT.get(name)
            spec = spec if known else {"class": "own", "name": name}
            return spec if settings is None else spec | {"settings": _settings_spec(name, settings, put)}
    return spec


def _settings_spec(name: str, settings: Mapping[str, Any], put: Put) -> Spec:
    """Return what `to_dict` of a score gave, with its tensors and scores as plain data."""
    spec: Spec = {}
    for key, value in settings.items():
        if isinstance(value, s.Score):
            spec[key] = {"score": score_spec(value, put)}
        elif isinstance(value, Tensor):
            spec[key] = {"t": put(key, value.detach().contiguous()), "learn": isinstance(value, nn.Parameter)}
        elif value is None or isinstance(value, bool | int | float | str):
            spec[key] = {"plain": value}
        else:
            raise DtypeError(
                "save()",
                "to_dict() of a score must give numbers, texts, tensors and scores.",
                {"score": name, "setting": key},
                found=kind(value),
                fix="give what the class is made of, by the names of its arguments.",
            )
    return spec


def _settings_from(spec: Any, take: Take, own: Own, depth: int) -> dict[str, Any]:
    """Return what `to_dict` of a score gave."""
    if not isinstance(spec, dict):
        raise SpecError(f"settings = {str(spec)[:60]}, not an object")
    found: dict[str, Any] = {}
    for key, value in spec.items():
        if isinstance(value, dict) and "score" in value:
            found[key] = score_from(value["score"], take, own, depth + 1)
        elif isinstance(value, dict) and "t" in value:
            t = take(value["t"])
            found[key] = nn.Parameter(t) if _flag(value, "learn") else t
        else:
            plain = _get(value, "plain")
            if not (plain is None or isinstance(plain, bool | int | float | str)):
                raise SpecError(f"{key[:60]} = {str(plain)[:60]}, not a number or a text")
            found[key] = plain
    return found


def score_from(spec: Any, take: Take, own: Own = None, depth: int = 0) -> s.Score:
    """Return the score that plain data describes.

    Raises
    ------
    SpecError
        If it describes none.
    """
    name = _class_of(spec, depth)
    if name in _SCORES:
        form = _SCORES[name]
        settings = [_setting(spec, key, none=name == "ScaledDot") for key in form.settings]
        parts = [score_from(_get(spec, key), take, own, depth + 1) for key in form.parts]
        score: s.Score = form.make(*parts, *settings)
        return score
    match name:
        case "own":
            return _own(spec, take, own, depth)
        case _ if name in _BY_DICT:
            return _BY_DICT[name].from_dict(_settings_from(_get(spec, "settings"), take, own, depth))
        case "Alibi":
            return s.Alibi(None if _get(spec, "slopes") is None else _whole_tensor(take, spec, "slopes"))
        case "TensorBias":
            t = take(_get(spec, "t"))
            return s.TensorBias(nn.Parameter(t) if _flag(spec, "learn") else t)
        case _ if name in _KERNELS:
            return _kernel(_KERNELS[name], _whole_tensor(take, spec, "bandwidth"), _flag(spec, "learn"))
    keys = _LEARNED.get(name)
    if keys is None:
        raise SpecError(f"an unknown score, {name[:60]!r}")
    state = {place: _whole_tensor(take, spec, key) for key, place in keys.items() if _get(spec, key) is not None}
    # What torch makes on the device "meta" has no numbers: sizes come from the file, and the random state stays.
    with torch.device("meta"):
        score = _unset(name, spec, state)
    score.load_state_dict(state, assign=True)
    return score


def _unset(name: str, spec: Spec, state: Mapping[str, Tensor]) -> s.Score:
    """Return a score with parameters of the sizes of its tensors."""
    first = next(iter(state.values()), torch.empty(0))
    rows, columns = _axes(first, 2)
    if name == "RelativeBias":
        buckets = None if _get(spec, "buckets") is None else _whole(spec, "buckets")
        return s.RelativeBias(columns, _whole(spec, "max_distance"), buckets, _flag(spec, "bidirectional"))
    if name == "Bilinear":
        return s.Bilinear(rows, columns, _number(spec, "scale"))
    return s.Additive(columns, _axes(state.get("W_k.weight", first), 2)[1], rows, "W_q.bias" in state)


def _kernel(make: type[Any], value: Tensor, learn: bool) -> s.Score:
    """Return a kernel whose bandwidth is exactly that tensor."""
    if learn and make is s.Boxcar:
        raise SpecError("a learned bandwidth of Boxcar")
    score: s.Score = make(value.exp() if learn else value, **({"learn": True} if learn else {}))
    if learn:
        score.log_bandwidth = nn.Parameter(value)  # log(exp(x)) need not be x
    return score


def _own(spec: Spec, take: Take, own: Own, depth: int) -> s.Score:
    name = _text(spec, "name")
    given = own.get(name) if isinstance(own, Mapping) else own
    if isinstance(given, s.Score) and type(given).__name__ == name:
        return given
    if isinstance(given, type) and given.__name__ == name and "settings" in spec:
        return given.from_dict(_settings_from(spec["settings"], take, own, depth))
    rule = "a score of your own is not stored, and must be given when it is read."
    fix = f"attlas.load(folder, score={name[:60]}()), with the parameters that it had."
    if name == "ScoreMod":
        rule = "the function of a score is code, which is not stored, and must be given when it is read."
        fix = "attlas.load(folder, score=attlas.scores.ScoreMod(function)), with the function that was recorded."
    elif "settings" in spec:
        rule = "only the settings of a score of your own are stored; its class must be given when it is read."
        fix = f"attlas.load(folder, score={name[:60]})"
    shown = given if isinstance(given, type) else type(given or own)
    found = "no score" if own is None else f"score = {shown.__name__}"
    raise RecordingError("load()", rule, {"score": name[:60]}, found=found, fix=fix)


# -------------------------------------------------------------------------------------------------------------- masks


def mask_spec(mask: m.Mask, put: Put, runs: Callable[[m.Mask], m.Mask]) -> Spec:
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
    form = _MASKS.get(name)
    if form is not None and type(mask) is form.make:
        spec: Spec = {"class": name} | {key: getattr(mask, key) for key in form.settings}
        return spec | {key: mask_spec(getattr(mask, key), put, runs) for key in form.parts}
    match mask:
        case m.Padding() if type(mask) is m.Padding:
            return {"class": name, "lengths": put("lengths", mask.lengths.view(mask.axes)), "side": mask.side}
        case m.Prefix() if type(mask) is m.Prefix:
            return {"class": name, "length": put("length", mask.lengths.view(mask.axes))}
        case m.Documents() if type(mask) is m.Documents:
            same = mask.queries is mask.keys
            queries = None if same else put("query_ids", _ids(mask.queries))
            return {"class": name, "ids": put("ids", _ids(mask.keys)), "query_ids": queries}
        case m.TensorMask() | m.AdditiveMask() if type(mask) in (m.TensorMask, m.AdditiveMask):
            return {"class": name, "t": put("mask", mask.tensor)}
        case m.Runs():
            tables = {"first": mask.first, "starts": mask.starts, "stops": mask.stops}
            return {"class": name, "n": mask.n} | {key: put(key, t) for key, t in tables.items()}
        case m.Bits():
            return {"class": name, "n": mask.n, "packed": put("bits", mask.packed)}
    if mask.log_weights():
        raise DtypeError(
            "save()",
            "an additive mask must be one of attlas to be stored.",
            {"mask": mask.name()},
            found=kind(mask),
            fix="use attlas.from_tensor(t), or keep statistics and not q and k.",
        )
    return mask_spec(runs(mask), put, runs)


def _ids(ids: Any) -> Tensor:
    """Return the ids of all tokens, as they were given to `Documents`."""
    cpu, batch = torch.device("cpu"), math.prod(ids.axes[:-1])
    at = Tile(range(batch), range(1), range(0), range(0), 0, 0, torch.arange(batch), torch.zeros(1).long(), cpu)
    found: Tensor = ids.tile(at, range(ids.count), None, 0, cpu)
    return found.view(ids.axes)


def mask_from(spec: Any, take: Take, depth: int = 0) -> m.Mask:
    """Return the mask that plain data describes.

    Raises
    ------
    SpecError
        If it describes none.
    """
    name = _class_of(spec, depth)
    if name in _MASKS:
        form = _MASKS[name]
        settings = [
            None if _get(spec, key) is None and key != "step" else _whole(spec, key, negative=key == "offset")
            for key in form.settings
        ]
        mask: m.Mask = form.make(*(mask_from(_get(spec, key), take, depth + 1) for key in form.parts), *settings)
        return mask
    match name:
        case "Padding":
            return m.Padding(take(_get(spec, "lengths")), _text(spec, "side"))
        case "Prefix":
            return m.Prefix(take(_get(spec, "length")))
        case "Documents":
            queries = _get(spec, "query_ids")
            return m.Documents(take(_get(spec, "ids")), None if queries is None else take(queries))
        case "TensorMask" | "AdditiveMask":
            t = take(_get(spec, "t"))
            if (t.dtype is torch.bool) is not (name == "TensorMask") or t.is_complex():
                raise SpecError(f"{name} of {t.dtype}")
            return m.TensorMask(t) if name == "TensorMask" else m.AdditiveMask(t)
        case "Runs":
            first, starts, stops = (take(_get(spec, key)) for key in ("first", "starts", "stops"))
            return m.Runs(first, starts, stops, _whole(spec, "n"))
        case "Bits":
            return m.Bits(take(_get(spec, "packed")), _whole(spec, "n"))
    raise SpecError(f"an unknown mask, {name[:60]!r}")


# --------------------------------------------------------------------------------------------- results of statistics


def result_spec(name: str, result: Any, put: Put) -> Spec:
    """Return the result of a statistic as plain data: a tensor, or tuples of tensors."""
    if isinstance(result, Tensor):
        return {"class": "Tensor", "t": put(name, result)}
    if isinstance(result, tuple):
        known = _TUPLES.get(type(result).__name__)
        label = type(result).__name__ if known is type(result) else "tuple"
        return {"class": label, "parts": [result_spec(f"{name}.{i}", part, put) for i, part in enumerate(result)]}
    raise DtypeError(
        "save()",
        "what a statistic gives must be a Tensor, or a tuple of Tensors, to be stored.",
        {"statistic": name},
        found=kind(result),
        fix=f"let finish() of {name} return Tensors, or take it out of entry.statistics.",
    )


def result_from(spec: Any, take: Take, depth: int = 0) -> Any:
    """Return the result of a statistic that plain data describes; an unknown named tuple comes back as a tuple."""
    name = _class_of(spec, depth)
    if name == "Tensor":
        return take(_get(spec, "t"))
    parts = _get(spec, "parts")
    if name not in (*_TUPLES, "tuple") or not isinstance(parts, list):
        raise SpecError(f"an unknown result, {name[:60]!r}")
    found = tuple(result_from(part, take, depth + 1) for part in parts)
    if name == "tuple":
        return found
    if len(found) != len(_TUPLES[name]._fields):
        raise SpecError(f"{len(found)} parts of {name}")
    return _TUPLES[name](*found)


# --------------------------------------------------------------------------------------------------------- plain data


def _class_of(spec: Any, depth: int) -> str:
    if depth > _DEPTH:
        raise SpecError(f"more than {_DEPTH} parts within parts")
    return _text(spec, "class")


def _get(spec: Any, key: str) -> Any:
    if not isinstance(spec, dict) or key not in spec:
        raise SpecError(f"no {key!r} where there must be one")
    return spec[key]


def _text(spec: Any, key: str) -> str:
    value = _get(spec, key)
    if not isinstance(value, str):
        raise SpecError(f"{key} = {str(value)[:60]}, not a text")
    return value


def _flag(spec: Any, key: str) -> bool:
    value = _get(spec, key)
    if not isinstance(value, bool):
        raise SpecError(f"{key} = {str(value)[:60]}, not true or false")
    return value


def _number(spec: Any, key: str) -> float:
    value = _get(spec, key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise SpecError(f"{key} = {str(value)[:60]}, not a finite number")
    return float(value)


def _setting(spec: Any, key: str, *, none: bool) -> float | None:
    return None if none and _get(spec, key) is None else _number(spec, key)


def _whole(spec: Any, key: str, *, negative: bool = False) -> int:
    value = _get(spec, key)
    if type(value) is not int or abs(value) > _LARGEST_INT or (value < 0 and not negative):
        raise SpecError(f"{key} = {str(value)[:60]}, not a whole number")
    return value


def _whole_tensor(take: Take, spec: Any, key: str) -> Tensor:
    """Return a tensor of floating point numbers that are all in the file."""
    t = take(_get(spec, key))
    if not t.is_floating_point() or not t.is_contiguous():
        raise SpecError(f"{key} is {tuple(t.shape)} {t.dtype}, not floating point numbers of its own")
    return t


def _axes(t: Tensor, count: int) -> tuple[int, ...]:
    if t.ndim != count:
        raise SpecError(f"a tensor of {t.ndim} axes, not {count}")
    return tuple(t.shape)
