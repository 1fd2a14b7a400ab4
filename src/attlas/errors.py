"""Every error class of attlas. An error carries its facts as fields; its text is made of them."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Self


class AttlasError(Exception):
    """Base class of every error that attlas raises on purpose.

    Parameters
    ----------
    where : str
        The public function, as the user typed it: ``"attend()"``.
    rule : str
        What must hold, one sentence that ends in a full stop.
    arguments : Mapping[str, object], optional
        Label of each argument concerned and its value; tensors are kept as shape, dtype and device.
    found : str, optional
        The two numbers, or the value, that break the rule.
    fix : str, optional
        One thing that the user can type to go on.

    Attributes
    ----------
    where, rule, arguments, found, fix
        As above; `arguments` holds words, never a tensor.

    Examples
    --------
    >>> error = ShapeError("attend()", "m must be even.", {"m": 3}, found="m = 3", fix="use m = 4.")
    >>> print(error)
    attend(): m must be even.
      m: 3
      found: m = 3
      fix: use m = 4.
    >>> error.found
    'm = 3'
    """

    def __init__(
        self,
        where: str = "",
        rule: str = "",
        arguments: Mapping[str, object] | None = None,
        *,
        found: str = "",
        fix: str = "",
    ) -> None:
        self.where, self.rule, self.found, self.fix = where, rule, found, fix
        self.arguments = {label: describe(value) for label, value in (arguments or {}).items()}
        lines = [": ".join(filter(None, (where, rule)))]
        lines += [f"  {label}: {value}" for label, value in self.arguments.items()]
        lines += [f"  {label}: {value}" for label, value in (("found", found), ("fix", fix)) if value]
        super().__init__("\n".join(lines))

    def replaced(self, **fields: str) -> Self:
        """Return this error with other fields."""
        names = ("where", "rule", "arguments", "found", "fix")
        return type(self)(**{name: fields.get(name, getattr(self, name)) for name in names})


class ShapeError(AttlasError, ValueError):
    """Sizes, indices or settings that do not fit together, or an option with a value that it does not take."""


class OutOfRangeError(ShapeError, IndexError):
    """An index that lies outside the matrix."""


class DtypeError(AttlasError, TypeError):
    """A dtype or a type of argument that cannot be used here."""


class DeviceError(AttlasError, ValueError):
    """Tensors that live on different devices, or a device that torch does not have here."""


class ModifiedError(AttlasError, RuntimeError):
    """Tensors that were changed in place after the matrix was made of them."""


class GradientError(AttlasError, RuntimeError):
    """A result that cannot carry the gradient that is being recorded."""


class StoredOnlyError(AttlasError, TypeError, AttributeError):
    """An operation of stored tensors, asked of a matrix whose numbers are not stored."""


class BackendError(AttlasError, RuntimeError):
    """The backend asked for by a plan cannot run this problem."""


class TooLargeError(AttlasError, MemoryError):
    """A result that would take more memory than the stated limit."""


class RecordingError(AttlasError, RuntimeError):
    """A model, or the folder of a recording, that cannot be recorded or read."""


class RecordingWarning(UserWarning):
    """Attention that ran and is not in the recording; the first of `args` is the RecordingError that says which."""


class CheckpointError(AttlasError, RuntimeError):
    """A folder whose weights cannot be read, or are not those of the model."""


class ContractError(AttlasError, AssertionError):
    """A class of the user's own that breaks the contract which `attlas.testing` checks."""


class MissingExtraError(AttlasError, ImportError):
    """An optional package that is needed here and not installed."""


class FileError(AttlasError, OSError):
    """A file that cannot be written; one that was there is as it was."""


class PortError(AttlasError, OSError):
    """A port of this machine that cannot be listened on."""


def import_extra(module: str, where: str, rule: str, fix: str, arguments: Mapping[str, object] | None = None) -> Any:
    """Return an optional module, or raise a MissingExtraError with this rule and fix."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        found = f"no module named {module.partition('.')[0]}"
        raise MissingExtraError(where, rule, arguments, found=found, fix=fix) from error


def describe(value: object) -> str:
    """Word one argument: shape, dtype and device for a tensor, else its value."""
    torch = sys.modules.get("torch")  # without it there is no tensor, and the command line starts at once
    if torch is not None and isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')} {value.device}"
    if isinstance(value, str):
        return value
    return repr(value)


def kind(value: object) -> str:
    """Word what an argument is, where it is of a wrong type.

    Examples
    --------
    >>> kind(3), kind([1.0]), kind(int)
    ('an int', 'a list', 'the class int')
    """
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeioAEIO" or name.startswith("nd") else f"a {name}"


def counted(number: int, noun: str) -> str:
    """Word a count.

    Examples
    --------
    >>> counted(1, "head"), counted(4, "head")
    ('1 head', '4 heads')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


def listed(names: Iterable[object], most: int = 12) -> str:
    """Word the first of some names, and how many more there are.

    Examples
    --------
    >>> listed(range(5), most=3)
    '0, 1, 2 and 2 more'
    """
    words = [str(name) for name in names]
    more = f" and {len(words) - most} more" if len(words) > most else ""
    return ", ".join(words[:most]) + more
