"""A problem as a text and tensors, and back: the text is a constant of a compiled program, the tensors are its inputs.

`problem_text` runs while torch.compile traces, so it is plain recursion and no call of a library.
"""

from __future__ import annotations

import inspect
import json
import operator
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

from torch import Tensor, nn

from attlas import masks, scores, stats
from attlas.engine.dropout import Dropout
from attlas.engine.plan import Plan
from attlas.engine.problem import Problem
from attlas.engine.statistic import Statistic
from attlas.masks import Mask
from attlas.masks.runs import RunPerRow
from attlas.matrix.reads import LogSumExp
from attlas.scores import Score
from attlas.scores.placed import PlacedScore


def _exported_classes(module: ModuleType, base: type) -> dict[str, Any]:
    """Return the classes of a module's exported names that are subclasses of `base`."""
    every = ((name, getattr(module, name)) for name in module.__all__)
    return {name: kind for name, kind in every if isinstance(kind, type) and issubclass(kind, base)}


# What a statistic is made of, by its class: the arguments of the class are its attributes.
_SETTINGS_OF_STATISTIC: dict[type[Statistic], tuple[str, ...]] = {
    kind: tuple(inspect.signature(kind).parameters)
    for kind in (LogSumExp, *_exported_classes(stats, Statistic).values())
    if kind is not Statistic
}

# Only these are made again from a text.
_CLASSES_BY_NAME: dict[str, Any] = {
    **_exported_classes(scores, Score),
    "PlacedScore": PlacedScore,
    **_exported_classes(masks, Mask),
    "RunPerRow": RunPerRow,
    **{kind.__name__: kind for kind in _SETTINGS_OF_STATISTIC},
}


class NoTextError(TypeError):
    """What no text describes: a score, a mask or a statistic of the user's own, or one made of a function."""


# ------------------------------------------------------------------------------------------------------- to a text


def problem_text(
    problem: Problem,
    plan: Plan,
    tensors: list[Tensor],
    *,
    asked: Sequence[Statistic] = (),
    dropout: tuple[float, Tensor] | None = None,
    learned: bool = False,
) -> str:
    """Return a text that describes a problem but for its tokens; tensors of it are appended to `tensors`.

    Parameters
    ----------
    problem : Problem
        The matrix.
    plan : Plan
        How it is computed.
    tensors : list of Tensor
        Takes the tensors of score, mask and statistics, and the sink; the text says where each stands.
    asked : sequence of Statistic
        Statistics that are asked of it.
    dropout : tuple of float and Tensor, optional
        Probability that a weight is dropped, and the seed.
    learned : bool
        Whether the tokens were made with parameters that get a gradient.

    Raises
    ------
    NoTextError
        If no text describes one of them.
    """
    if problem.partial:
        raise NoTextError("part of a matrix, whose log-sum-exp counts other keys")
    first = len(tensors)
    parts = {
        "score": problem.score,
        "mask": problem.mask,
        "sink": problem.sink,
        "ids": problem.ids,
        "plan": (plan.backend, plan.rows, plan.columns, plan.cells, plan.gathered_bytes),
        "asked": tuple(asked),
        "dropout": dropout,
        "learned": learned,
    }
    text = "{" + ", ".join([f'"{name}": {_as_json(part, tensors)}' for name, part in parts.items()]) + "}"
    if problem.detached:
        tensors[first:] = [t.detach() for t in tensors[first:]]
    return text


def _as_json(value: Any, tensors: list[Tensor]) -> str:
    """Return a setting, or what is made of settings, as JSON; a tensor is its place in the list."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return '{"tensor": ' + str(len(tensors) - 1) + "}"
    if value is None or isinstance(value, bool):
        return "null" if value is None else "true" if value else "false"
    if isinstance(value, str):
        return '"' + value + '"'
    if isinstance(value, float):
        return '{"float": "' + value.hex() + '"}'  # the one form that torch.compile takes for a constant
    if isinstance(value, int):
        return str(operator.index(value))  # a constant, also where torch.compile lets numbers vary
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join([_as_json(part, tensors) for part in value]) + "]"
    if isinstance(value, (range, slice)):
        name = "range" if isinstance(value, range) else "slice"
        return '{"' + name + '": ' + _as_json((value.start, value.stop, value.step), tensors) + "}"
    name, settings = _class_and_settings(value)
    parts = [f'"{key}": {_as_json(setting, tensors)}' for key, setting in settings.items()]
    return '{"class": "' + name + '", "settings": {' + ", ".join(parts) + "}}"


def _class_and_settings(value: Any) -> tuple[str, dict[str, Any]]:
    """Return the class name of a score, mask or statistic, and the settings that it is made of."""
    name = type(value).__name__
    if isinstance(value, RunPerRow):  # whatever it was made of, its runs are all that it says
        return "RunPerRow", {"first": value.first, "stop": value.stop}
    if _CLASSES_BY_NAME.get(name) is not type(value):
        raise NoTextError(name)
    if isinstance(value, Statistic):
        return name, {key: getattr(value, key) for key in _SETTINGS_OF_STATISTIC[type(value)]}
    settings = value.to_dict()
    if settings is None:
        raise NoTextError(name)
    return name, settings


# ------------------------------------------------------------------------------------------------------ from a text


class Described:
    """What a text and tensors describe.

    Parameters
    ----------
    text : str
        The text that `problem_text` has returned.
    q, k : Tensor, shape (batch, heads, m, d) and (batch, key heads, n, d)
        Queries and keys.
    tensors : sequence of Tensor
        The tensors that the text names.

    Attributes
    ----------
    problem : Problem
        The matrix.
    plan : Plan
        How it is computed.
    asked : tuple of Statistic
        What is asked of it.
    dropout : Dropout or None
        Which of its weights are dropped.
    learned : bool
        Whether the tokens were made with parameters that get a gradient.
    """

    def __init__(self, text: str, q: Tensor, k: Tensor, tensors: Sequence[Tensor]) -> None:
        data = _parsed_text(text)
        take = tensors.__getitem__
        sink = None if data["sink"] is None else take(data["sink"]["tensor"])
        ids = None if data["ids"] is None else tuple(take(t["tensor"]) for t in data["ids"])
        score, mask = _object_from_text(data["score"], take), _object_from_text(data["mask"], take)
        self.problem = Problem(q, k, score, mask, sink, ids)
        self.plan = Plan(*data["plan"])
        self.asked: tuple[Statistic, ...] = _object_from_text(data["asked"], take)
        self.learned: bool = data["learned"]
        self.dropout: Dropout | None = None
        if data["dropout"] is not None:
            p, seed = _object_from_text(data["dropout"], take)
            self.dropout = Dropout(p, int(seed))


def statistics_in(text: str, tensors: Sequence[Tensor]) -> tuple[Statistic, ...]:
    """Return the statistics that a text asks for; the tensors may have no numbers."""
    asked: tuple[Statistic, ...] = _object_from_text(_parsed_text(text)["asked"], tensors.__getitem__)
    return asked


@lru_cache(maxsize=1024)
def _parsed_text(text: str) -> dict[str, Any]:
    """Return the text as plain data; one that was parsed before is not parsed again."""
    parsed: dict[str, Any] = json.loads(text)
    return parsed


def _object_from_text(value: Any, take: Callable[[int], Tensor]) -> Any:
    """Return what a part of a text describes; `take` returns the tensor of a number."""
    if isinstance(value, list):
        return tuple(_object_from_text(part, take) for part in value)
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return take(value["tensor"])
    if "float" in value:
        return float.fromhex(value["float"])
    if "range" in value:
        return range(*value["range"])
    if "slice" in value:
        return slice(*value["slice"])
    kind = _CLASSES_BY_NAME[value["class"]]
    settings = {key: _object_from_text(part, take) for key, part in value["settings"].items()}
    if not issubclass(kind, (Score, Mask)) or kind is RunPerRow:
        return kind(**settings)
    given = [t for t in settings.values() if isinstance(t, Tensor)]
    made = kind.from_dict(settings)
    if isinstance(made, nn.Module):
        _put_back(made, given)
    return made


def _put_back(score: nn.Module, given: list[Tensor]) -> None:
    """Let a score that was made anew have the tensors that it was made of, so that gradients reach these.

    `from_dict` makes parameters of tensors: they share the numbers, and are leaves of their own.
    """
    for module in (score, *(part for part in score.children() if not isinstance(part, Score))):
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            own = next((t for t in given if t.data_ptr() == parameter.data_ptr() and t.shape == parameter.shape), None)
            if own is None:
                raise NoTextError(f"{type(score).__name__}.{name} does not hold the tensor that it was made of")
            del module._parameters[name]
            setattr(module, name, own)
