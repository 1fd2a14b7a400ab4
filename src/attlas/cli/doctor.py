"""``attlas doctor``: what is here, which kernels give the right numbers, how often the host waits, and times."""

from __future__ import annotations

import platform
import time
import warnings
from argparse import Namespace
from dataclasses import asdict
from importlib import metadata
from typing import Any

import torch

import attlas
from attlas.cli import doctor_cases as cases
from attlas.cli.checks import check_positive
from attlas.cli.formatting import in_bytes, json_text, plural
from attlas.cli.terminal import Terminal, UsageError
from attlas.engine import limits as processor
from attlas.engine import trust
from attlas.engine.dispatch import backends_of
from attlas.engine.plan import BACKENDS
from attlas.engine.work import instruction_sets, kernels

_NOT_REACHED = "not reached in the time"
_RESULT_MARKS = {
    cases.PASSED: ("✓", "green"),
    "failed": ("✗", "red"),
    "not computed": ("·", "dim"),
    _NOT_REACHED: ("?", "yellow"),
    "": ("–", "dim"),
}


def run(arguments: Namespace, terminal: Terminal) -> None:
    """Examine a device, and print what was found."""
    check_positive(arguments, "tokens", "heads", "size", "seconds")
    begun = time.perf_counter()
    device = device_of(arguments.device)
    torch.manual_seed(0)
    report: dict[str, Any] = {"device": about(device), "versions": versions(), "kernels": _state_of_kernels()}
    if not arguments.json:
        _say_versions(report, terminal)
    # Results of earlier runs are dropped: all is compared anew, in 60 % of the time; the rest is for the timings.
    trust.forget(device)
    report["backends"] = _compared_backends(device, begun + 0.6 * arguments.seconds, terminal)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a family of kernels warns of is told below
        report["waits"] = cases.waits(device)
        report["times"] = _timed_operations(arguments, device, begun + arguments.seconds, terminal)
    report["families"] = trust.results(device)
    report["cache"] = {"file": _file_of_results(), "trouble": trust.trouble()}
    report["seconds"] = round(time.perf_counter() - begun, 1)
    report["passed"] = not _failure_lines(report)
    if arguments.json:
        terminal.data(json_text(report))
        return
    _say_backends(report, terminal)
    _say_waits(report, terminal)
    _say_times(report, terminal)
    _say_end(report, terminal)


def device_of(name: str | None) -> torch.device:
    """Return the device of a name; without one the accelerator that is there, else the processor."""
    if name is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        name = "cpu" if found is None else found.type
    try:
        device = torch.device(name)
        if device.type != "cpu":
            device = torch.device(device.type, device.index or 0)
        torch.empty(1, device=device)  # an error where the device is not there
    except Exception as error:
        rule, fix = "--device must name a device that is here.", "leave --device out"
        raise UsageError(rule, f"--device {name}: {(str(error).splitlines() or [''])[0]}", fix) from error
    return device


def about(device: torch.device) -> dict[str, Any]:
    """Return what a device is."""
    if device.type == "cpu":
        return {"type": "cpu", "name": processor.name(), "threads": torch.get_num_threads()}
    found: dict[str, Any] = {"type": device.type, "index": device.index, "name": "unknown"}
    module = getattr(torch, device.type, None)
    if device.type in ("cuda", "xpu") and module is not None and module.is_available():
        properties = module.get_device_properties(device)
        found |= {"name": properties.name, "memory": properties.total_memory, "driver": trust.driver_of(device)}
    if device.type == "cuda" and torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability(device)
        found |= {"capability": f"{major}.{minor}", "runtime": torch.version.cuda or torch.version.hip}
    return found


def versions() -> dict[str, str | None]:
    """Return the versions of all that results depend on; None for what is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version(), "torch": str(torch.__version__)}
    found["triton"] = trust.version_of_triton()
    try:
        found["transformers"] = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        found["transformers"] = None
    return {**found, "attlas": attlas.__version__}


def _state_of_kernels() -> dict[str, Any]:
    """Return the state of the compiled kernels of the processor."""
    sets, why_not = instruction_sets()
    return {"instruction_set": kernels(), "runnable": list(sets), "why_not": why_not}


def _file_of_results() -> str | None:
    """Return the file in which results are remembered; None where the user has no folder."""
    try:
        return str(trust.file())
    except RuntimeError:
        return None


def _compared_backends(device: torch.device, until: float, terminal: Terminal) -> dict[str, dict[str, dict[str, str]]]:
    """Compare each backend of a device with the definition, in all cases for which there is time."""
    names = [name for name in BACKENDS if name != "reference" and backends_of(name, device.type)]
    found: dict[str, dict[str, dict[str, str]]] = {name: {} for name in names}
    asked = [(name, case) for case in cases.CASES for name in names if case.compiles or name not in cases.COMPILED]
    asked.sort(key=lambda pair: pair[0] in cases.COMPILED)  # what takes long comes last
    with terminal.step("comparing kernels with the definition", len(asked)) as tick:
        for name, case in asked:
            late = time.perf_counter() > until
            found[name][case.name] = {"output": _NOT_REACHED} if late else cases.compare(name, case, device)
            tick()
    return found


def _timed_operations(arguments: Namespace, device: torch.device, until: float, terminal: Terminal) -> dict[str, Any]:
    """Time products and statistics beside torch's kernel."""
    on_gpu = device.type in ("cuda", "xpu")
    shape = (
        1,
        arguments.heads or (16 if on_gpu else 4),
        arguments.tokens or (8192 if on_gpu else 2048),
        arguments.size or (128 if on_gpu else 64),
    )
    dtype = cases.dtype_of(device)
    found: list[cases.Timed] = []
    try:
        q, k, v = (torch.randn(shape, device=device).to(dtype) for _ in range(3))
        with terminal.step("measuring times", 26) as tick, torch.no_grad():
            for group in cases.rows(q, k, v):
                left = max(until - time.perf_counter(), 2.0)
                found += cases.timed(group, device, left / 2, tick)  # half, so that later groups have time too
    except torch.OutOfMemoryError as error:
        found.append(cases.Timed("all", None, None, error=str(error).splitlines()[0]))
    words = f"{shape[1]} heads × {shape[2]:,} tokens × {shape[3]}, {str(dtype).removeprefix('torch.')}, causal"
    return {"shape": list(shape), "words": words, "rows": [asdict(row) for row in found]}


def _failure_lines(report: dict[str, Any]) -> list[str]:
    """Return in one line each what is wrong."""
    told: list[str] = []
    for backend, own in report["backends"].items():
        for case, found in own.items():
            texts = {op: text.removeprefix("failed: ") for op, text in found.items() if text.startswith("failed")}
            for text in dict.fromkeys(texts.values()):  # each once
                which = " and ".join(operation for operation, other in texts.items() if other == text)
                told.append(f"{backend}, {case}, {which}: {text}")
    seen = "\n".join(told)
    for backend, families in report["families"].items():
        wrong = {name: fault for name, fault in families.items() if fault is not None and name not in seen}
        told += [f"{backend}: {name}: {fault}" for name, fault in wrong.items()]
    told += [f"{row['name']}: {row['error']}" for row in report["times"]["rows"] if row["error"]]
    told += [f"{name}: {count}" for name, count in (report["waits"] or {}).items() if isinstance(count, str)]
    return told


# ------------------------------------------------------------------------------------------------------ what is printed


def _say_versions(report: dict[str, Any], terminal: Terminal) -> None:
    """Print the device, the versions of libraries and the state of the CPU kernels."""
    device, native = report["device"], report["kernels"]
    terminal.say("attlas doctor", "bold")
    words = [device["name"]]
    words += [plural(device["threads"], "thread")] if "threads" in device else []
    words += [in_bytes(device["memory"])] if "memory" in device else []
    words += [f"capability {device['capability']}"] if "capability" in device else []
    words += [f"driver {device['driver']}", f"runtime {device.get('runtime')}"] if "driver" in device else []
    _print_line("device", f"{device['type']}: {', '.join(words)}", terminal)
    for name, version in report["versions"].items():
        _print_line(name, version or "not installed", terminal)
    state = f"{native['instruction_set']}, of {', '.join(native['runnable'])}"
    _print_line("CPU kernels", state if native["why_not"] is None else f"not used: {native['why_not']}", terminal)


def _print_line(name: str, text: str, terminal: Terminal) -> None:
    """Print a name and what is said of it."""
    terminal.say(f"  {name:14s}{text}")


def _say_backends(report: dict[str, Any], terminal: Terminal) -> None:
    """Print a table of cases and backends: what each computes, and whether it is right."""
    backends = report["backends"]
    names = [case.name for case in cases.CASES]
    wide = max(map(len, names))
    terminal.say()
    terminal.say("  compared with the definition in float64: output, gradients, statistics", "bold")
    terminal.say(f"  {'':{wide}}  {'  '.join(f'{name:9s}' for name in backends)}".rstrip(), "dim")
    for name in names:
        cells = [_marks_of_backend(own.get(name), terminal) for own in backends.values()]
        terminal.say(f"  {name:{wide}}  {'  '.join(cells)}".rstrip())
    terminal.prose("✓ right   ✗ wrong or an error   · not its work   – not asked   ? no time left", "dim")
    if not report["families"]:
        return
    terminal.say()
    terminal.say("  families of kernels, compared with tiles when they are first used", "bold")
    for backend, own in report["families"].items():
        for family, fault in own.items():
            mark = terminal.style("✓", "green") if fault is None else terminal.style("✗", "red")
            terminal.say(f"  {mark} {backend}: {family}")


def _marks_of_backend(found: dict[str, str] | None, terminal: Terminal) -> str:
    """Return the marks of one backend in one case, nine characters wide."""
    marks = []
    for operation in cases.OPERATIONS:
        text = "" if found is None else _NOT_REACHED if _NOT_REACHED in found.values() else found[operation]
        mark, colour = _RESULT_MARKS[text.partition(":")[0]]
        marks.append(terminal.style(mark, colour))
    return "  ".join(marks) + "  "


def _say_waits(report: dict[str, Any], terminal: Terminal) -> None:
    """Print how often each call made the host wait for the device, or why that is not known."""
    terminal.say()
    terminal.say("  how often the host waits for the device", "bold")
    if report["waits"] is None:
        why = (
            "never: it is the host"
            if report["device"]["type"] == "cpu"
            else "not counted: torch counts it for CUDA only"
        )
        terminal.say(f"  {why}")
        return
    wide = max(map(len, report["waits"]))
    for name, count in report["waits"].items():
        terminal.say(f"  {name:{wide}}  {count if isinstance(count, int) else 'failed'}")


def _say_times(report: dict[str, Any], terminal: Terminal) -> None:
    """Print the time of each row, and its ratio to the row that it is compared with."""
    rows = report["times"]["rows"]
    wide = max(len(row["name"]) for row in rows)
    terminal.say()
    terminal.say(f"  times of {report['times']['words']}", "bold")
    terminal.say(f"  {'':{wide}}  {'time':>10}  {'ratio':>6}  by", "dim")
    for row in rows:
        if row["error"]:
            terminal.say(f"  {row['name']:{wide}}  {'failed':>10}")
            continue
        ratio = "–" if row["ratio"] is None else f"{row['ratio']:.2f}"
        terminal.say(
            f"  {row['name']:{wide}}  {_duration_in_words(row['seconds']):>10}  {ratio:>6}  {row['backend'] or 'torch'}"
        )
    terminal.prose("ratio: divided by the time of torch's fused kernel (SDPA) above it, in the same round", "dim")


def _duration_in_words(seconds: float) -> str:
    """Return seconds in milliseconds or microseconds, in words."""
    return f"{seconds * 1e3:,.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:,.0f} µs"


def _say_end(report: dict[str, Any], terminal: Terminal) -> None:
    """Print what is wrong, or that nothing is."""
    failures, trouble = _failure_lines(report), report["cache"]["trouble"]
    terminal.say()
    if trouble is not None:
        terminal.prose(f"cache folder: {trouble}", "yellow")
    for failure in failures:
        terminal.prose(f"✗ {failure}", "red")
    if failures:
        terminal.prose(
            "Please open an issue of attlas with this text. Tiles compute what these kernels do not.", "bold"
        )
    late = sum(_NOT_REACHED in found.values() for own in report["backends"].values() for found in own.values())
    if late:
        terminal.prose(f"{plural(late, 'comparison')} had no time left; --seconds gives more.", "yellow")
    elif not failures:
        terminal.say(f"  {terminal.style('✓', 'green')} all that ran is right, in {report['seconds']:.0f} s")
