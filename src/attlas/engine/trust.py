"""Which kernels are used on a device: each family is compared once with tiles, and what was found is remembered.

A family is what is compiled alike, such as the row statistics of bfloat16 tokens of size 128. Where a backend of a GPU
would use one, it asks `fault_of`, with a function that compares the family with tiles on a small problem. That function
runs once: its result is kept in this process, and in a file of the user's cache folder for others with the same device,
driver, torch, triton and attlas. A family that differs, or that raises, is used no more: tiles compute in its place.

``attlas doctor`` forgets what is remembered of a device, and lets all families be compared again.
"""

from __future__ import annotations

import json
import math
import re
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

import attlas
from attlas.engine.limits import cache_folder
from attlas.engine.plan import Plan
from attlas.errors import AttlasError, BackendError
from attlas.foundation.files import save_text
from attlas.foundation.reasons import in_one_line

#: How far a result may be from that of tiles, as a part of its largest number; gradients four times as far.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 1e-2, torch.bfloat16: 3e-2, torch.float64: 1e-6}

#: Compares a family with tiles on a small problem: returns where they differ, or None. It may raise anything.
Check: TypeAlias = Callable[[], str | None]

#: Faults by backend and family; None for a family that agreed.
Found: TypeAlias = dict[str, dict[str, str | None]]

_MOST_SETTINGS = 16  # devices with their versions that the file has at most; the oldest go first
_LONGEST_ERROR_TEXT = 300  # characters of an error that are kept


class Family(NamedTuple):
    """Kernels that are compared together.

    Parameters
    ----------
    backend : str
        Name of the backend, as in `Plan`.
    name : str
        What they compute, in words that `attlas doctor` prints. It tells them from all other families of the backend.
    kept : bool
        Whether the name tells them from those of other processes too: False where they run code of the user.
    """

    backend: str
    name: str
    kept: bool = True


_results_lock = threading.RLock()
_faults_of_process: dict[tuple[str, Family], str | None] = {}  # of this process
_write_errors: list[str] = []  # why the file could not be written; the last one counts


def fault_of(family: Family, device: torch.device, check: Check, plan: Plan) -> str | None:
    """Return in one sentence why a family is not used on a device; None where it is.

    Parameters
    ----------
    family : Family
        The kernels.
    device : torch.device
        Where they run.
    check : callable
        Compares them with tiles; called if nothing is known. It may read numbers on the host.
    plan : Plan
        The plan of the user.

    Raises
    ------
    BackendError
        If they are not used, and the plan names their backend.

    Notes
    -----
    The first time that a family fails there is one warning, which says how to report it. While a CUDA graph is captured
    nothing can be compared: a family that is not known is then left out. Where memory runs out, nothing is remembered.
    """
    with _results_lock:
        known, fault = _known_fault(family, device)
        if known:
            return _fault_as_sentence(family, device, fault, plan)
        if device.type == "cuda" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return "its kernels were not compared with tiles before this CUDA graph; run the same once before it"
        try:
            with _may_wait(device):
                fault = check()
        except Exception as error:  # noqa: BLE001 - whatever a compiler or a driver raises, tiles compute the product
            return failed(family, device, error, plan)
        _store_result(family, device, fault)
        return _fault_as_sentence(family, device, fault, plan, warn=True)


def known_fault(family: Family, device: torch.device) -> str | None:
    """Return why a family is not used, as far as that is known; nothing is compared."""
    fault = _known_fault(family, device)[1]
    return None if fault is None else _fault_sentence(family, device, fault)


def faults(backend: str, device: torch.device) -> dict[str, str]:
    """Return the families of a backend that are not used on a device, as far as that is known, and why.

    A family is kernels that are compared together, under one name.
    """
    place, setting = _device_key(device), setting_of(device)
    known = {} if setting is None else dict(_known_checks().get(setting, {}).get(backend, {}))
    known |= {
        family.name: fault
        for (where, family), fault in _faults_of_process.items()
        if (where, family[0]) == (place, backend)
    }
    return {
        name: _fault_sentence(Family(backend, name), device, fault)
        for name, fault in known.items()
        if fault is not None
    }


def is_known(family: Family, device: torch.device) -> bool:
    """Return whether a family has been compared, here or in another process with the same device and versions.

    A family is kernels that are compared together, under one name.
    """
    return _known_fault(family, device)[0]


def failed(family: Family, device: torch.device, error: Exception, plan: Plan) -> str | None:
    """Note that a family has raised, which is then used no more; returns and raises as `fault_of`."""
    fault = in_one_line(error)[:_LONGEST_ERROR_TEXT]
    if not isinstance(error, torch.OutOfMemoryError):
        _store_result(family, device, fault)
    return _fault_as_sentence(family, device, fault, plan, warn=True)


def difference(name: str, found: Tensor, wanted: Tensor, tolerance: float) -> str | None:
    """Return in words by how much a result is wrong, as a part of its largest number; None within a tolerance.

    Where the wanted number is not finite, the result must be the same. The host waits for both.

    Examples
    --------
    >>> import torch
    >>> difference("its output", torch.tensor([1.0, 2.2]), torch.tensor([1.0, 2.0]), 0.01)
    'its output differs by 0.1 of its largest number'
    >>> difference("its output", torch.tensor([-torch.inf, 2.0]), torch.tensor([-torch.inf, 2.0]), 0.01)
    """
    found, wanted = found.detach(), wanted.detach()
    if found.shape != wanted.shape:
        return f"{name} has the shape {tuple(found.shape)}, and not {tuple(wanted.shape)}"
    if not wanted.numel():
        return None
    if found.device.type != "mps":  # which has no float64
        found, wanted = found.double(), wanted.double()
    finite = wanted.isfinite()
    special = finite | (found == wanted) | (found.isnan() & wanted.isnan())
    gap = torch.where(finite, (found - wanted).abs(), 0.0).amax()
    largest = torch.where(finite, wanted.abs(), 0.0).amax()
    error = torch.where(gap == 0, 0.0, gap / largest.clamp(min=1e-30))
    size = float(torch.where(special.all(), error, math.inf))
    return None if size <= tolerance else f"{name} differs by {size:.1g} of its largest number"


def results(device: torch.device) -> Found:
    """Return what this process knows of the families of a device, compared here or before.

    A family is kernels that are compared together, under one name; with each goes its fault, or None.
    """
    place = _device_key(device)
    found: Found = {}
    for (where, family), fault in sorted(_faults_of_process.items(), key=lambda item: item[0]):
        if where == place:
            found.setdefault(family.backend, {})[family.name] = fault
    return found


def forget(device: torch.device) -> None:
    """Forget all families of a device: they are compared again when they are next used.

    A family is kernels that are compared together, under one name.
    """
    with _results_lock:
        for key in [key for key in _faults_of_process if key[0] == _device_key(device)]:
            del _faults_of_process[key]
        if (setting := setting_of(device)) is not None and setting in _known_checks():
            _change_stored_table(lambda table: table.pop(setting, None))


def file() -> Path:
    """Return the file in which the results are remembered; it may not exist.

    Raises
    ------
    RuntimeError
        If the user has no home folder.
    """
    return cache_folder() / "kernels.json"


def trouble() -> str | None:
    """Return in one sentence why nothing can be remembered in the file; None where it can."""
    return _write_errors[-1] if _write_errors else _stored_table()[1]


@cache
def setting_of(device: torch.device) -> str | None:
    """Return what results hold for, in words: device, driver, torch, triton and attlas; None where nobody can tell.

    Nothing is written of such a device: one that is not there, or a CPU.
    """
    if device.type not in ("cuda", "xpu"):
        return None
    module = getattr(torch, device.type)
    if not module.is_available():
        return None
    try:
        name = module.get_device_name(device)
    except (RuntimeError, AssertionError):
        return None
    of_triton = version_of_triton() or "none"
    versions = f"torch {torch.__version__}, triton {of_triton}, attlas {attlas.__version__}"
    return f"{name}, driver {driver_of(device)}, {versions}"


def driver_of(device: torch.device) -> str:
    """Return the version of a device's driver, as the system or torch tells it; "unknown" where neither does."""
    for place, form in (
        ("/proc/driver/nvidia/version", r"Module\D*(\d+(?:\.\d+)+)"),
        ("/sys/module/amdgpu/version", r"(\S+)"),
    ):
        with suppress(OSError):
            if found := re.search(form, Path(place).read_text(encoding="utf-8")):
                return found[1]
    if device.type == "xpu":
        return str(getattr(torch.xpu.get_device_properties(device), "driver_version", "unknown"))
    ask = getattr(torch._C, "_cuda_getDriverVersion", None)  # that of CUDA which the driver has
    return f"for CUDA {ask()}" if ask is not None and torch.cuda.is_available() else "unknown"


@cache
def version_of_triton() -> str | None:
    """Return the version of triton; None where it is not installed."""
    for name in ("triton", "pytorch-triton", "pytorch-triton-rocm", "pytorch-triton-xpu", "triton-windows"):
        with suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


# -------------------------------------------------------------------------------------------------------- the results


def _device_key(device: torch.device) -> str:
    """Return the key of a device in `_faults_of_process`.

    Its name and versions, or ``str(device)`` where nobody can tell these.
    """
    return setting_of(device) or str(device)


def _known_fault(family: Family, device: torch.device) -> tuple[bool, str | None]:
    """Return whether a family is known, and its fault.

    It is known once it was compared, here or by another process; without a fault it is used.
    """
    key = _device_key(device), family
    if key in _faults_of_process:
        return True, _faults_of_process[key]
    if family.kept and (setting := setting_of(device)) is not None:
        known = _known_checks().get(setting, {}).get(family.backend, {})
        if family.name in known:
            _faults_of_process[key] = known[family.name]
            return True, _faults_of_process[key]
    return False, None


def _store_result(family: Family, device: torch.device, fault: str | None) -> None:
    """Keep the result of a comparison, for this process and, if the family is kept, in the file."""
    _faults_of_process[_device_key(device), family] = fault
    setting = setting_of(device)
    if family.kept and setting is not None:
        _change_stored_table(lambda table: _write_to_table(table, setting, family, fault))


def _write_to_table(table: dict[str, Found], setting: str, family: Family, fault: str | None) -> None:
    """Write a result into the table of the file."""
    own = table.pop(setting, {})
    own.setdefault(family.backend, {})[family.name] = fault
    table[setting] = own  # the last one used is the last one to go
    for old in list(table)[:-_MOST_SETTINGS]:
        del table[old]


def _fault_as_sentence(
    family: Family, device: torch.device, fault: str | None, plan: Plan, *, warn: bool = False
) -> str | None:
    """Return a fault as a sentence, after a warning if asked for; raise where the plan names this backend."""
    if fault is None:
        return None
    sentence = _fault_sentence(family, device, fault)
    if plan.backend == family.backend:
        rule, fix = "the plan asks for a backend that fails here.", "leave the plan out, or Plan(backend='tiled')."
        raise BackendError(rule, sentence, fix, arguments={"plan": repr(plan)}, where="A @ v")
    if warn:
        warnings.warn(
            f"{sentence}. attlas computes this in tiles instead: the results are right, and slower. Please open an "
            "issue of attlas with this text and what `attlas doctor` prints.",
            stacklevel=2,
        )
    return sentence


def _fault_sentence(family: Family, device: torch.device, fault: str) -> str:
    """Return a fault with its family and device, as one sentence."""
    return f"{family.backend} ({family.name}) failed on {device}: {fault}"


@contextmanager
def _may_wait(device: torch.device) -> Iterator[None]:
    """Let the host wait for a GPU, whatever `torch.cuda.set_sync_debug_mode` says."""
    if device.type != "cuda" or not torch.cuda.is_available():
        yield
        return
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("default")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(mode)


# ----------------------------------------------------------------------------------------------------------- the file


def _known_checks() -> dict[str, Found]:
    """Return the results of checks that are in the file of the user's cache folder, by device and versions.

    A process reads the file once, or again where the folder changes.
    """
    try:
        return _table_in_file(file())
    except RuntimeError:  # the user has no home folder
        return {}


@cache
def _table_in_file(path: Path) -> dict[str, Found]:
    """Return the table in a file; cached, so that each process reads it once."""
    return _stored_table()[0]


def _stored_table() -> tuple[dict[str, Found], str | None]:
    """Return the table of the file, and why there is none although there should be one."""
    try:
        path = file()
        table = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}, None
    except (ValueError, RecursionError):
        return {}, f"{path} has no results that attlas has written"
    except OSError as error:
        return {}, f"{path} cannot be read: {error.strerror or error}"
    except RuntimeError as error:
        return {}, f"the cache folder of the user cannot be told: {error}"
    return (table, None) if _is_fault_table(table) else ({}, f"{path} has no results that attlas has written")


def _is_fault_table(table: object) -> bool:
    """Return whether what a file has are faults, or None, by setting, backend and family."""
    level = [table]
    for _ in range(3):
        if not all(isinstance(part, dict) for part in level):
            return False
        level = [inner for part in level if isinstance(part, dict) for inner in part.values()]
    return all(part is None or isinstance(part, str) for part in level)


def _change_stored_table(change: Callable[[dict[str, Found]], object]) -> None:
    """Read the table of the file, apply `change` to it, and write it back.

    A file that cannot be written is no error.
    """
    _write_errors.clear()
    table = _stored_table()[0]  # what other processes have found meanwhile
    change(table)
    try:
        path = file()
        path.parent.mkdir(parents=True, exist_ok=True)
        save_text(json.dumps(table, indent=2) + "\n", path)
    except (AttlasError, OSError, RuntimeError) as error:
        _write_errors.append(f"the results of the checks cannot be kept: {str(error).splitlines()[0]}")
    _table_in_file.cache_clear()
