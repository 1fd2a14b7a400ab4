"""Every error class of attlas. An error carries its facts as fields; its text is made of them."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec, Self, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class AttlasError(Exception):
    """Base class of every error that attlas raises on purpose.

    Parameters
    ----------
    rule : str
        What must hold, one sentence that ends in a full stop.
    found : str
        The two numbers, or the value, that break the rule.
    fix : str
        One thing that the user can type to go on.
    where : str, optional
        The public function, as the user typed it: ``"attend()"``. The default is the one that the error leaves: see
        `public`.
    arguments : Mapping[str, object], optional
        Label of each argument concerned and its value; tensors are kept as shape, dtype and device.
    **labels : object
        Further arguments, whose labels are names.

    Attributes
    ----------
    where, rule, arguments, found, fix
        As above; `arguments` holds words, never a tensor.

    Examples
    --------
    >>> error = ShapeError("m must be even.", "m = 3", "use m = 4.", m=3, where="attend()")
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
        rule: str = "",
        found: str = "",
        fix: str = "",
        *,
        where: str = "",
        arguments: Mapping[str, object] | None = None,
        **labels: object,
    ) -> None:
        self.rule, self.found, self.fix = rule, found, fix
        self.arguments = {label: describe(value) for label, value in {**(arguments or {}), **labels}.items()}
        self._set_where(where)

    def _set_where(self, where: str) -> None:
        """Name the public function that the error leaves."""
        self.where = where
        lines = [": ".join(filter(None, (where, self.rule)))]
        lines += [f"  {label}: {value}" for label, value in self.arguments.items()]
        lines += [f"  {label}: {value}" for label, value in (("found", self.found), ("fix", self.fix)) if value]
        self.args = ("\n".join(lines),)  # torch.compile follows this, and no super() outside of __init__

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


class public:  # noqa: N801 - a decorator, and written as one
    """Name the public function in the errors that leave it, or the block, without a name.

    Parameters
    ----------
    where : str, optional
        The function as the user types it: ``"A.topk()"``. The default, for methods, is `where` of the object that has
        one, or else its class: ``"Alibi()"``.

    Notes
    -----
    Checks do not know who asked for them: the public function knows, and its error tells. The error keeps its type, its
    trace and its cause. An error that has a name keeps it: where one public function calls another, the inner one is
    named. A generator needs the block: as a decorated function it would end before it runs.

    Examples
    --------
    >>> @public("halved()")
    ... def halved(m):
    ...     if m % 2:
    ...         raise ShapeError("m must be even.", f"m = {m}", f"halved({m + 1})")
    ...     return m // 2
    >>> halved(3)
    Traceback (most recent call last):
        ...
    attlas.errors.ShapeError: halved(): m must be even.
      found: m = 3
      fix: halved(4)
    """

    def __init__(self, where: str = "") -> None:
        self.where = where

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        where = self.where

        @functools.wraps(function)
        def named(*args: P.args, **kwargs: P.kwargs) -> T:
            # Without a name the first argument, `self`, is named. A function that is called inside has named its error
            # already.
            try:
                return function(*args, **kwargs)
            except AttlasError as error:
                if not error.where:
                    error._set_where(where or getattr(args[0], "where", "") or f"{type(args[0]).__name__}()")
                raise

        return named

    def __enter__(self) -> None:
        """Begin a block."""

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, AttlasError) and not error.where:
            error._set_where(self.where)


def import_extra(module: str, rule: str, fix: str, **labels: object) -> Any:
    """Return an optional module, or raise a MissingExtraError with this rule and fix."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingExtraError(rule, f"no module named {module.partition('.')[0]}", fix, arguments=labels) from error


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
