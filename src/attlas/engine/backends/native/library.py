"""Loading the library of kernels, and calling it.

The library is plain C to Python: `ctypes` calls it without holding Python's lock. What a call takes is declared once,
in `kernels/abi.h`; the library carries that text, and the structures here are made from it.

A call from the main thread looks at signals while it runs (`kernels/interrupt.h`): Ctrl-C ends it within a fraction of
a second, as a KeyboardInterrupt that is raised here.

``ATTLAS_NATIVE`` names the instruction set to use (``baseline``, ``avx2``, ``avx512``, ``amx``), or ``none`` for a
computation without the kernels. It is read whenever `current` is called.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import threading
from pathlib import Path
from typing import Any, NamedTuple

import torch

from attlas.errors import BackendError, TooLargeError, listed

#: Instruction sets that kernels are compiled for, from the plainest; on other processors than x86-64 only the first.
SETS = ("baseline", "avx2", "avx512", "amx")

_LIBRARY_FILE = Path(__file__).with_name("_kernels.so")
_ERROR_WHERE, _REBUILD_FIX = "attlas.engine.backends.native", "build the kernels again: make native."
# Structures that do not have the name of their function.
_PARAMS_STRUCTS = {"dot": "AttentionParams", "dot_backward": "AttentionBackwardParams"}
_C_NUMBER_TYPES: dict[str, Any] = {
    "int32_t": ctypes.c_int32,
    "int64_t": ctypes.c_int64,
    "uint8_t": ctypes.c_uint8,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
}


class _CFunction(NamedTuple):
    """A C function, its address, the structure that it takes, and the names of its fields."""

    call: Any
    address: int | None
    structure: type[ctypes.Structure]
    fields: frozenset[str]


class _LoadedLibrary:
    """The loaded library: its functions, its structures and the codes of its enumerations."""

    def __init__(self, file: Path) -> None:
        self._c = ctypes.CDLL(str(file))
        self._c.attlas_abi.restype = ctypes.c_char_p
        self.structures, self.codes, self.row_statistics = _read_declarations(self._c.attlas_abi().decode())
        self.best = int(self._c.attlas_best())
        self._c.attlas_pool.argtypes, self._c.attlas_pool.restype = [ctypes.c_void_p], None
        self._c.attlas_pool(_openmp_entry())  # the kernels run on torch's threads; without an address, on their own
        # It is called with Python's lock, which it releases, and raises what a signal handler has raised.
        self._from_main_thread = ctypes.PyDLL(str(file)).attlas_from_main_thread
        self._from_main_thread.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32]
        self._from_main_thread.restype = ctypes.c_int32
        self._c.attlas_python.argtypes, self._c.attlas_python.restype = [ctypes.c_void_p] * 3, None
        names = ("PyEval_SaveThread", "PyEval_RestoreThread", "PyErr_CheckSignals")
        self._c.attlas_python(*(ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p) for name in names))
        self._c.attlas_look_every.argtypes, self._c.attlas_look_every.restype = [ctypes.c_int64], None
        self.function = functools.cache(self._declared_function)  # each is looked up once

    def _declared_function(self, name: str) -> _CFunction:
        """Return a C function, its address, the structure that it takes, and the names of its fields."""
        function = getattr(self._c, f"attlas_{name}")
        kind = self.structures[_PARAMS_STRUCTS.get(name) or "".join(part.capitalize() for part in name.split("_"))]
        size = ctypes.c_int32.in_dll(self._c, f"attlas_{name}_size").value
        if size != ctypes.sizeof(kind):
            rule = f"{kind.__name__} must lie in memory as the compiler laid it out."
            found = f"{ctypes.sizeof(kind)} bytes in Python and {size} in the library"
            raise BackendError(rule, found, _REBUILD_FIX, where=_ERROR_WHERE)
        function.argtypes = [ctypes.c_void_p, ctypes.c_int32]
        function.restype = ctypes.c_int32
        address = ctypes.cast(function, ctypes.c_void_p).value
        return _CFunction(function, address, kind, frozenset(field for field, *_ in kind._fields_))

    def run(self, function: _CFunction, work: ctypes.Structure, number: int) -> int:
        """Call a C function; `number` is that of the instruction set. A signal handler that raises ends the call."""
        # Python runs signal handlers on the main thread alone, so only a call from there looks at signals.
        if threading.get_ident() == threading.main_thread().ident:
            return int(self._from_main_thread(function.address, ctypes.byref(work), number))
        return int(function.call(ctypes.byref(work), number))

    def look_every(self, seconds: float) -> None:
        """Set how often calls from the main thread look at signals, for tests; the default is 0.1 seconds."""
        self._c.attlas_look_every(int(seconds * 1e9))


def _read_declarations(text: str) -> tuple[dict[str, type[ctypes.Structure]], dict[str, int], tuple[str, ...]]:
    """Make the structures, and list the codes and the statistics of rows, that abi.h declares."""
    text = re.sub(r"//.*", "", text)
    listed = re.search(r"#define ATTLAS_ROW_STATISTICS\(X\) (.*)", text)
    statistics = tuple(re.findall(r"X\((\w+)\)", listed[1])) if listed else ()
    text = text.replace("ATTLAS_ROW_STATISTICS(ATTLAS_POINTER)", "".join(f"void* {name};" for name in statistics))
    structures: dict[str, type[ctypes.Structure]] = {}
    for name, body in re.findall(r"struct (\w+) \{(.*?)\};", text, flags=re.DOTALL):
        fields: list[tuple[str, Any]] = []
        for line in filter(None, (part.strip() for part in body.split(";"))):
            base, pointer, names = re.fullmatch(r"(?:const )?(\w+)(\*?) (.+)", line, flags=re.DOTALL).groups()  # type: ignore[union-attr]
            kind = ctypes.c_void_p if pointer else _C_NUMBER_TYPES.get(base) or structures[base]
            fields += [(field.strip(), kind) for field in names.split(",")]
        # Without a __dict__, so that a misspelled field raises.
        structures[name] = type(name, (ctypes.Structure,), {"_fields_": fields, "__slots__": ()})
    codes = {name: int(value) for name, value in re.findall(r"\b([A-Z][A-Z0-9_]*) = (\d+)", text)}
    return structures, codes, statistics


def _openmp_entry(maps: Path = Path("/proc/self/maps")) -> int | None:
    """Return the address of ``GOMP_parallel`` in the OpenMP that torch runs on; None where it cannot be told.

    Threads of our own would start beside torch's pool, which spins for a while after each of its calls.
    """
    try:
        lines = maps.read_text().splitlines()
    except OSError:  # no Linux
        return None
    files = {line.split(maxsplit=5)[-1] for line in lines if re.search(r"/lib(gomp|omp|iomp5)\b[^/]*$", line)}
    own = {file for file in files if Path(torch.__file__).parent in Path(file).parents}
    files = own or files
    if len(files) != 1 or torch.__config__.parallel_info().find("ATen parallel backend: OpenMP") < 0:
        return None
    try:
        runtime = ctypes.CDLL(files.pop(), mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        return ctypes.cast(runtime.GOMP_parallel, ctypes.c_void_p).value
    except (OSError, AttributeError):
        return None


@functools.cache
def _library_or_reason(file: Path) -> _LoadedLibrary | str:
    """Load the library once, or say in one sentence why that cannot be."""
    if not file.exists():
        return "the kernels were not compiled when attlas was installed"
    try:
        return _LoadedLibrary(file)
    except (OSError, AttributeError, KeyError) as error:
        return f"the library of kernels cannot be loaded ({error})"


class Kernels:
    """The kernels as a call finds them: the library and an instruction set, or the reason why they cannot be used.

    Attributes
    ----------
    why_not : str or None
        Why they cannot be used here, in one sentence without a full stop; None where they can.
    instruction_set : str
        The one of :data:`SETS` that a call uses; ``"none"`` where they cannot be used.
    fast : bool
        Whether they can be used and have vectors with which large outputs are faster than torch's: those of ``avx2``,
        ``avx512`` and ``amx``.
    wide : bool
        Whether they can be used and have the wide vectors that they are fastest with: those of ``avx512`` and ``amx``.
    codes : dict of str to int
        The enumerators of abi.h, such as ``"FLOAT32"`` and ``"NOT_FINITE"``; none where there is no library.
    structures : dict of str to type
        The structures of abi.h as ctypes classes, such as ``"Tensor4"``, whose fields have the names of abi.h.
    row_statistics : tuple of str
        The statistics of each row that the kernels compute, in the order of abi.h.

    Examples
    --------
    >>> kernels = current()
    >>> kernels.fast == (kernels.instruction_set in ("avx2", "avx512", "amx"))
    True
    >>> kernels.why_not is not None or "entropy" in kernels.row_statistics
    True
    """

    def __init__(self, library: _LoadedLibrary | None, instruction_set: str, why_not: str | None) -> None:
        self.why_not = why_not
        self.instruction_set = instruction_set
        self.fast = instruction_set in ("avx2", "avx512", "amx")
        self.wide = instruction_set in ("avx512", "amx")
        self.codes: dict[str, int] = {} if library is None else library.codes
        self.structures: dict[str, type[ctypes.Structure]] = {} if library is None else library.structures
        self.row_statistics: tuple[str, ...] = () if library is None else library.row_statistics
        self._library = library
        self._number = SETS.index(instruction_set) if why_not is None else -1

    def tensors4(self, **tensors: torch.Tensor) -> dict[str, ctypes.Structure]:
        """Return tensors of four axes as the kernels see them, by the same names; the caller keeps them alive."""
        kind, found = self.structures["Tensor4"], {}
        for name, t in tensors.items():
            found[name] = kind(t.data_ptr(), *t.stride()[:3])
        return found

    def call(self, entry: str, /, **fields: Any) -> int:
        """Run a kernel, without Python's lock.

        Parameters
        ----------
        entry : str
            Name of the C function: ``"dot"`` for ``attlas_dot``, which takes ``AttentionParams``.
        **fields
            The fields of its structure by name; what is not given is zero, or a null pointer. Addresses are integers,
            as ``Tensor.data_ptr()`` gives them.

        Returns
        -------
        int
            The status, one of the codes ``"DONE"``, ``"NOT_FINITE"`` and ``"UNSUPPORTED"``.

        Raises
        ------
        BackendError
            If there is no library, or it was built from other sources and lacks a field.
        TooLargeError
            If the kernel got no memory.
        KeyboardInterrupt
            If Ctrl-C was pressed, or whatever else the handler of a signal raises; the results are then not complete.

        Notes
        -----
        The memory behind the addresses must stay alive until the call returns: the caller holds the tensors.

        Examples
        --------
        >>> kernels = current()
        >>> x = torch.zeros(3)
        >>> y = torch.full((3,), 7.0)
        >>> if kernels.why_not is None:
        ...     done = kernels.call("elementary", **{"in": x.data_ptr(), "out": y.data_ptr()}, count=3)
        """
        library, why_not = self._library, self.why_not
        if library is None or why_not is not None:
            remedy = "install a C++ compiler and attlas again" if library is None else "unset ATTLAS_NATIVE"
            rule, fix = "the native kernels must be there to be called.", f"{remedy}, or use Plan(backend='tiled')."
            raise BackendError(rule, why_not or "", fix, where=_ERROR_WHERE)
        function = library.function(entry)
        if not fields.keys() <= function.fields:
            rule = f"{function.structure.__name__} must have every field that is set."
            absent = listed(sorted(fields.keys() - function.fields))
            raise BackendError(rule, f"no {absent}", _REBUILD_FIX, where=_ERROR_WHERE)
        status = library.run(function, function.structure(**fields), self._number)
        if status == library.codes["NO_MEMORY"]:
            rule, fix = "the scratch memory of the kernels must fit.", "use fewer threads: torch.set_num_threads(1)."
            raise TooLargeError(rule, f"no memory left for {entry}", fix, where=_ERROR_WHERE)
        return status


def current() -> Kernels:
    """Return the kernels for the environment as it is; a computation asks once, and hands them on.

    Raises
    ------
    BackendError
        If ``ATTLAS_NATIVE`` names no instruction set that this processor can run.

    Examples
    --------
    >>> current() is current()
    True
    """
    return _kernels_for_setting(_LIBRARY_FILE, os.environ.get("ATTLAS_NATIVE", ""))


def available() -> bool:
    """Tell whether the native kernels can be used here.

    Returns
    -------
    bool
        True where the library is there and ``ATTLAS_NATIVE`` is not ``none``.

    Examples
    --------
    >>> available() == (current().why_not is None)
    True
    """
    return current().why_not is None


def runnable() -> tuple[str, ...]:
    """List the instruction sets that were compiled and that this processor can run, from the plainest.

    Returns
    -------
    tuple of str
        Names of :data:`SETS`; none where the library is not there.

    Examples
    --------
    >>> set(runnable()) <= set(SETS)
    True
    """
    found = _library_or_reason(_LIBRARY_FILE)
    return () if isinstance(found, str) else SETS[: found.best + 1]


@functools.cache
def _kernels_for_setting(file: Path, setting: str) -> Kernels:
    """Return the kernels of a library with the instruction set of a setting, the widest one if it is empty."""
    found = _library_or_reason(file)
    library = None if isinstance(found, str) else found
    if setting == "none":
        return Kernels(library, "none", "ATTLAS_NATIVE=none turns the kernels off")
    if isinstance(found, str):
        return Kernels(None, "none", found)
    able = SETS[: found.best + 1]
    if setting and setting not in able:
        rule = "it must name an instruction set that was compiled and that this processor can run."
        fix = f"set it to {', '.join(('none', *able))}, or leave it unset."
        raise BackendError(rule, f"ATTLAS_NATIVE={setting}", fix, where="ATTLAS_NATIVE")
    return Kernels(found, setting or able[-1], None)
