"""``attlas bench``: the limits of this processor, and attlas beside SDPA, FlexAttention and eager attention."""

from __future__ import annotations

import os
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from attlas.cli import bench_cases
from attlas.cli.checks import check_positive
from attlas.cli.options import DTYPES
from attlas.cli.terminal import Terminal, UsageError
from attlas.engine import limits as processor
from attlas.engine.work import kernels
from attlas.foundation.files import lock

_TIMED_ROUNDS = 20


def run(arguments: Namespace, terminal: Terminal) -> None:
    """Measure, and print the limits and the tables."""
    check_positive(arguments, "tokens", "heads", "size", "seconds")
    file = processor.cache_folder() / "bench.lock"
    try:
        with hold(file, "one run at a time: two would measure each other."):
            _measure_limits_and_cases(arguments, terminal)
    except OSError as error:
        rule = "it keeps its lock and the limits of the processor in the user's cache folder."
        raise UsageError(rule, str(error), "XDG_CACHE_HOME=FOLDER attlas bench", folder=file.parent) from error


def _measure_limits_and_cases(arguments: Namespace, terminal: Terminal) -> None:
    """Measure the limits of the processor, unless they are known, and all cases; print them."""
    instruction_set = kernels()
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    terminal.say("attlas bench", "bold")
    terminal.say(f"  {processor.name()}; threads: {threads}; kernels: {instruction_set}; torch {torch.__version__}")
    known = processor.known(instruction_set)
    if known is None or arguments.again:
        with terminal.step("measuring the limits of the processor", 6) as tick:
            known = bench_cases.limits(tick)
        processor.store(known, instruction_set)
    _say_limits(known, terminal)
    shape = (1, arguments.heads, arguments.tokens, arguments.size)
    q, k, v = (torch.randn(shape).to(getattr(torch, arguments.dtype)) for _ in range(3))
    terminal.say()
    terminal.say(f"  {arguments.heads} heads × {arguments.tokens:,} tokens × {arguments.size}, {arguments.dtype}")
    with torch.no_grad():
        with terminal.step("compiling FlexAttention"):
            flex = bench_cases.flex_attention(q, k, v)
        if isinstance(flex, str):
            terminal.say(f"  FlexAttention does not run here: {flex}")
        for title, cases in bench_cases.output(q, k, v, flex):
            _print_case_ratios(title, cases, arguments.seconds / 3, terminal)
    _print_case_ratios(
        "all pairs, forward and backward", bench_cases.forward_and_backward(q, k, v), arguments.seconds / 3, terminal
    )


def _print_case_ratios(title: str, cases: dict[str, Any], seconds: float, terminal: Terminal) -> None:
    """Measure some cases, and print their ratios to the first."""
    with terminal.step(title) as tick:
        measured = bench_cases.ratios(cases, _TIMED_ROUNDS, tick, seconds)
    wide = max(map(len, measured))
    terminal.say()
    terminal.say(f"  {title}")
    terminal.say(f"  {'':{wide}}  {'time':>9}  {'ratio':>6}  least to most", "dim")
    for name, ratio in measured.items():
        spread = f"{ratio.least:.2f} to {ratio.most:.2f}"
        terminal.say(f"  {name:{wide}}  {1000 * ratio.seconds:6.1f} ms  {ratio.median:6.2f}  {spread}")


def _say_limits(limits: processor.Limits, terminal: Terminal) -> None:
    """Print what the processor does per second."""
    shown = [(f"products in {name}", limits.products[name]) for name in DTYPES]
    shown += [("exponentials", limits.exponentials), ("bytes of memory", limits.bandwidth)]
    terminal.say("  limits per second")
    for name, rate in shown:
        terminal.say(f"    {name:24s}  {rate / 1e9:8.1f} billion")


@contextmanager
def hold(file: Path, rule: str) -> Iterator[None]:
    """Hold the lock of a file, or raise a UsageError with this rule, which names the process that holds it."""
    file.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            lock(handle)
        except OSError:
            holder = file.read_text(encoding="utf-8") or "a process that has just begun"
            raise UsageError(rule, holder, "wait until it has ended.", lock=file) from None
        os.ftruncate(handle, 0)
        os.write(handle, f"process {os.getpid()}, since {time.strftime('%H:%M:%S')}".encode())
        yield
        os.ftruncate(handle, 0)
    finally:
        os.close(handle)  # ends the lock too
