"""What attlas costs on a GPU, beside the goals of its kernels: one run of less than 8 minutes.

Run with ``python benchmarks/gpu.py``; it writes ``benchmarks/results/gpu.json``. Each row stands alone: one that fails
is written with its error, and the others go on. A ratio is a time divided by that of cuDNN's attention on the same
tokens, in the same round: bfloat16, 32 heads, causal. The goals are for an H100 or H200.
``--tiny --device cpu`` runs all of it small, to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa

import attlas
from attlas import stats
from attlas.cli.doctor import about, versions
from attlas.cli.doctor_cases import synchronize
from attlas.engine import trust
from attlas.engine.backend import Request
from attlas.engine.costs import Operation
from attlas.engine.dispatch import candidates
from attlas.foundation.files import whole_file
from harness import RESULTS, machine

CAUSAL = attlas.Causal()


class Sizes(NamedTuple):
    """How large the problems are."""

    heads: int = 32
    tokens: tuple[int, ...] = (16_384, 65_536)
    d: tuple[int, ...] = (64, 128)
    long: int = 1_000_000
    tile: int = 256
    additive: int = 8_192
    hidden: int = 128
    window: int = 4_096
    layers: int = 4
    new: int = 64


TINY = Sizes(2, (64, 96), (16,), 500, 16, 48, 8, 16, 1, 3)


class Row(NamedTuple):
    """One line of the results.

    Parameters
    ----------
    name : str
        What is measured.
    goal : float or None
        What the figure must not exceed, and its unit.
    unit : str
        "ratio", "ms" or "share".
    measure : callable
        Returns the figure, and what else is written.
    """

    name: str
    goal: float | None
    unit: str
    measure: Callable[[], dict[str, Any]]


# -------------------------------------------------------------------------------------------------------------- timing


class Clock:
    """Times calls on a device, a few rounds each, at most some seconds."""

    def __init__(self, device: torch.device, rounds: int = 10, seconds: float = 3.0) -> None:
        self.device, self.rounds, self.seconds = device, rounds, seconds

    def once(self, run: Callable[[], object]) -> float:
        synchronize(self.device)
        start = time.perf_counter()
        run()
        synchronize(self.device)
        return time.perf_counter() - start

    def median(self, run: Callable[[], object]) -> float:
        """Return the median seconds of a call."""
        return statistics.median(self.many(run)[0])

    def many(self, *runs: Callable[[], object]) -> list[list[float]]:
        """Return the seconds of several calls, which take turns, after one or two rounds that are not counted."""
        first = [self.once(run) for run in runs]  # which may compile
        again = [self.once(run) for run in runs]
        if sum(again) > self.seconds / 2:
            return [[seconds] for seconds in again]  # nothing was compiled that late
        seconds: list[list[float]] = [[] for _ in first]
        begun = time.perf_counter()
        for number in range(self.rounds):
            if number > 1 and time.perf_counter() - begun > self.seconds:
                break
            for own, run in zip(seconds, runs, strict=True):
                own.append(self.once(run))
        return seconds

    def ratio(self, run: Callable[[], object], base: Callable[[], object]) -> dict[str, Any]:
        """Return the median quotient of two times, taken in the same round."""
        own, other = self.many(run, base)
        quotients = [a / b for a, b in zip(own, other, strict=True)]
        return {
            "figure": statistics.median(quotients),
            "least": min(quotients),
            "most": max(quotients),
            "ms": 1e3 * statistics.median(own),
            "base_ms": 1e3 * statistics.median(other),
        }


def fastest_torch(q: Tensor, k: Tensor, v: Tensor) -> tuple[str, Callable[[], Tensor]]:
    """Return torch's causal attention by cuDNN; where that does not run, by flash attention, or as torch chooses."""
    kinds: list[tuple[str, Callable[[], AbstractContextManager[Any]]]] = [
        ("cuDNN", lambda: sdpa_kernel(SDPBackend.CUDNN_ATTENTION)),
        ("flash", lambda: sdpa_kernel(SDPBackend.FLASH_ATTENTION)),
        ("torch's choice", nullcontext),
    ]
    for name, choice in kinds:

        def run(choice: Callable[[], AbstractContextManager[Any]] = choice) -> Tensor:
            with choice():
                return sdpa(q, k, v, is_causal=True)

        try:
            run()
        except RuntimeError:
            continue
        return name, run
    raise RuntimeError("no kernel of torch computes this attention")


# ---------------------------------------------------------------------------------------------------------------- rows


def row_statistics() -> list[stats.Statistic]:
    return [
        stats.Entropy(),
        stats.EffectiveKeys(),
        stats.MaxWeight(),
        stats.MaxLogit(),
        stats.LogitMoments(),
        stats.RowMass(),
    ]


def all_but_top(n: int) -> list[stats.Statistic]:
    half, side = n // 2, min(256, n)
    parts = [slice(0, half), slice(half, n)]
    columns = [
        stats.ColumnMass(),
        stats.ColumnMax(),
        stats.Offsets(),
        stats.Spans(parts, parts),
        stats.Picture(side, side),
    ]
    return [*row_statistics(), *columns]


class Benchmark:
    """All rows, on one device."""

    def __init__(self, device: torch.device, sizes: Sizes, clock: Clock) -> None:
        self.device, self.sizes, self.clock = device, sizes, clock
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

    def random(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=dtype or self.dtype)

    def tokens(self, n: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (self.random(1, self.sizes.heads, n, d) for _ in range(3))
        return q, k, v

    def rows(self) -> list[Row]:
        first, *others = self.sizes.tokens
        found = [row for d in self.sizes.d for row in self.of_size(first, d)]
        for d in self.sizes.d:
            size = f"{self.sizes.tile} x {self.sizes.tile} tile of a {self.sizes.long:,}-token map, d {d}"
            found.append(Row(f"{size}, log-sum-exp known", 1.0, "ms", lambda d=d: self.tile(d, known=True)))
            found.append(Row(f"{size}, of its rows computed", 1.0, "ms", lambda d=d: self.tile(d, known=False)))
            n, near = self.sizes.tokens[-1], self.sizes.window
            found.append(
                Row(f"window of {near:,} by causal, {n:,} tokens, d {d}", 0.2, "ratio", lambda d=d: self.window(d))
            )
        side = f"Additive, {self.sizes.additive:,} x {self.sizes.additive:,}, hidden {self.sizes.hidden}"
        for dtype in (torch.bfloat16, torch.float32):
            words = f"{side}, {str(dtype).removeprefix('torch.')}"
            found.append(Row(words, 2.0, "ms", lambda dtype=dtype: self.additive(dtype)))
            found.append(Row(f"{words}, gradients", None, "ms", lambda dtype=dtype: self.additive_gradients(dtype)))
        found.append(Row(f"Laplace, {self.sizes.additive:,} x {self.sizes.additive:,}, d 8", None, "ms", self.laplace))
        found.append(Row("recorded generation by unrecorded", 1.3, "ratio", lambda: self.generation({})))
        entropy = {"statistics": [stats.Entropy()]}
        found.append(
            Row("recorded generation with entropy by unrecorded", 1.3, "ratio", lambda: self.generation(entropy))
        )
        return found + [row for n in others for d in self.sizes.d for row in self.of_size(n, d)]

    def of_size(self, n: int, d: int) -> list[Row]:
        words = f"{n:,} tokens, d {d}"
        cases: list[tuple[str, float | None, list[stats.Statistic] | None]] = [
            ("output", None, None),
            ("output + row statistics", 1.15, row_statistics()),
            ("output + all but top-8", 1.65, all_but_top(n)),
            ("output + all with top-8 and keys", 2.2, [*all_but_top(n), stats.TopK(8)]),
        ]
        found = [
            Row(f"{name}, {words}", goal, "ratio", lambda own=own: self.output(n, d, own)) for name, goal, own in cases
        ]
        one_call = f"output + row statistics in one call, {words}"
        found.append(Row(one_call, 1.15, "ratio", lambda: self.output(n, d, row_statistics(), one_call=True)))
        one_pass = f"one pass of row statistics, {words}"
        found.append(Row(one_pass, 0.75, "ratio", lambda: self.one_pass(n, d, row_statistics())))
        columns = [stats.ColumnMass()]
        found.append(Row(f"one pass of column mass, {words}", 0.75, "ratio", lambda: self.one_pass(n, d, columns)))
        found.append(Row(f"gradients of entropy, {words}", None, "ratio", lambda: self.entropy_gradients(n, d)))
        found.append(Row(f"memory beyond inputs and outputs, {words}", 0.01, "share", lambda: self.memory(n, d)))
        return found

    @torch.no_grad()
    def output(self, n: int, d: int, own: list[stats.Statistic] | None, *, one_call: bool = False) -> dict[str, Any]:
        q, k, v = self.tokens(n, d)
        base, sdpa_run = fastest_torch(q, k, v)

        def run() -> object:
            A = attlas.attend(q, k, mask=CAUSAL)
            if one_call:
                return A.collect(stats.Pooled(v), *(own or ()))
            return A @ v, A.collect(*own) if own else None

        A = attlas.attend(q, k, mask=CAUSAL)
        names = {"backend": backend_of(A)} | ({"statistics": backend_of(A, "statistics")} if own else {})
        return {**self.clock.ratio(run, sdpa_run), "base": base, **names}

    @torch.no_grad()
    def one_pass(self, n: int, d: int, statistics_: list[stats.Statistic]) -> dict[str, Any]:
        q, k, v = self.tokens(n, d)
        base, sdpa_run = fastest_torch(q, k, v)
        A = attlas.attend(q, k, mask=CAUSAL)
        _ = A @ v, A.lse
        found = self.clock.ratio(lambda: A.collect(*statistics_), sdpa_run)
        return {**found, "base": base, "statistics": backend_of(A, "statistics")}

    @torch.no_grad()
    def memory(self, n: int, d: int) -> dict[str, Any]:
        if self.device.type != "cuda":
            raise RuntimeError("memory is counted on CUDA only")
        q, k, v = self.tokens(n, d)
        cells = self.sizes.heads * n * n * q.element_size()
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        found = attlas.attend(q, k, mask=CAUSAL).collect(stats.Pooled(v), *all_but_top(n), stats.TopK(8))
        torch.cuda.synchronize(self.device)
        own = sum(
            t.nbytes
            for result in found
            for t in (result if isinstance(result, tuple) else (result,))
            if isinstance(t, Tensor)
        )
        extra = torch.cuda.max_memory_allocated(self.device) - before - own
        return {"figure": extra / cells, "bytes": extra, "matrix_bytes": cells}

    @torch.no_grad()
    def tile(self, d: int, *, known: bool) -> dict[str, Any]:
        q, k = (self.random(1, 1, self.sizes.long, d) for _ in range(2))
        rows, columns = (
            slice(start, start + self.sizes.tile) for start in (self.sizes.long * 3 // 4, self.sizes.long // 3)
        )
        A = attlas.attend(q, k, mask=CAUSAL)
        if known:
            _ = A @ k, A.lse
        make = (lambda: A) if known else (lambda: attlas.attend(q, k, mask=CAUSAL))
        return {"figure": 1e3 * self.clock.median(lambda: make()[0, 0, rows, columns])}

    @torch.no_grad()
    def window(self, d: int) -> dict[str, Any]:
        q, k, v = self.tokens(self.sizes.tokens[-1], d)
        near = attlas.Window(self.sizes.window - 1, 0)
        A = attlas.attend(q, k, mask=near)
        found = self.clock.ratio(
            lambda: attlas.attend(q, k, mask=near) @ v, lambda: attlas.attend(q, k, mask=CAUSAL) @ v
        )
        return {**found, "base": "attlas, causal", "backend": backend_of(A)}

    @torch.no_grad()
    def additive(self, dtype: torch.dtype) -> dict[str, Any]:
        score = attlas.Additive(64, 64, self.sizes.hidden).to(self.device, dtype)
        q, k, v = (self.random(1, 1, self.sizes.additive, 64, dtype=dtype) for _ in range(3))
        A = attlas.attend(q, k, score=score)
        return {
            "figure": 1e3 * self.clock.median(lambda: attlas.attend(q, k, score=score) @ v),
            "backend": backend_of(A),
        }

    def additive_gradients(self, dtype: torch.dtype) -> dict[str, Any]:
        score = attlas.Additive(64, 64, self.sizes.hidden).to(self.device, dtype)
        leaves = [self.random(1, 1, self.sizes.additive, 64, dtype=dtype).requires_grad_() for _ in range(3)]
        every = [*leaves, *score.parameters()]

        def run() -> object:
            return torch.autograd.grad((attlas.attend(leaves[0], leaves[1], score=score) @ leaves[2]).sum(), every)

        A = attlas.attend(leaves[0], leaves[1], score=score)
        return {"figure": 1e3 * self.clock.median(run), "backend": backend_of(A, "backward")}

    @torch.no_grad()
    def laplace(self) -> dict[str, Any]:
        q, k, v = (self.random(1, 1, self.sizes.additive, 8, dtype=torch.float32) for _ in range(3))
        A = attlas.attend(q, k, score=attlas.Laplace(2.0))
        run = lambda: attlas.attend(q, k, score=attlas.Laplace(2.0)) @ v  # noqa: E731
        return {"figure": 1e3 * self.clock.median(run), "backend": backend_of(A)}

    def entropy_gradients(self, n: int, d: int) -> dict[str, Any]:
        q, k, v = self.tokens(n, d)
        base, sdpa_run = fastest_torch(q, k, v)
        leaves = [t.requires_grad_() for t in (q, k)]

        def run() -> object:
            return torch.autograd.grad(stats.entropy(attlas.attend(*leaves, mask=CAUSAL)).sum(), leaves)

        return {**self.clock.ratio(run, sdpa_run), "base": base}

    @torch.no_grad()
    def generation(self, settings: dict[str, Any]) -> dict[str, Any]:
        import transformers

        import attlas.huggingface
        from attlas.recording import record

        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=1000,
            hidden_size=512,
            intermediate_size=1376,
            num_hidden_layers=self.sizes.layers,
            num_attention_heads=8,
            num_key_value_heads=8,
            max_position_embeddings=4096,
        )
        model: Any = transformers.LlamaForCausalLM._from_config(config, attn_implementation=attlas.huggingface.NAME)
        model = model.eval().to(self.device, self.dtype)
        ids = torch.arange(16, device=self.device).view(1, -1)
        options = {
            "attention_mask": torch.ones_like(ids),
            "min_new_tokens": self.sizes.new,
            "max_new_tokens": self.sizes.new,
        }

        def write() -> None:
            model.generate(ids, do_sample=False, pad_token_id=0, eos_token_id=None, **options)

        def recorded() -> None:
            with record(model, **settings):
                write()

        return {**self.clock.ratio(recorded, write), "base": "attlas, not recorded", "new_tokens": self.sizes.new}


def backend_of(A: attlas.AttentionMatrix, operation: Operation = "output") -> str:
    """Return the backend that an operation is given to first."""
    return next(candidates(Request(A.problem, A.problem.tokens, A.plan), operation)).name


# ------------------------------------------------------------------------------------------------------------- results


def measured(row: Row, device: torch.device) -> dict[str, Any]:
    """Measure one row; its error is a part of the results."""
    begun = time.perf_counter()
    try:
        found = row.measure()
    except Exception as error:  # noqa: BLE001 - whatever it is, the other rows go on
        lines = str(error).strip().splitlines() or [""]
        place = traceback.extract_tb(error.__traceback__)[-1]
        found = {"error": f"{type(error).__name__}: {lines[0]}", "where": f"{Path(place.filename).name}:{place.lineno}"}
    if device.type == "cuda" and torch.cuda.is_available():
        torch.cuda.empty_cache()
    if (figure := found.get("figure")) is not None and row.goal is not None:
        found["holds"] = figure <= row.goal
    rounded = {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in found.items()}
    return {"goal": row.goal, "unit": row.unit, **rounded, "took_seconds": round(time.perf_counter() - begun, 1)}


def line(name: str, found: dict[str, Any]) -> str:
    """Return one line for people: the figure beside its goal."""
    unit = {"ratio": "x", "ms": "ms", "share": "of the matrix"}[found["unit"]]
    goal = "" if found["goal"] is None else f"goal {found['goal']:g}"
    if "figure" not in found:
        return f"{name:74s}  {found.get('error', 'not reached in the time')}"
    backends = ", ".join(found[key] for key in ("backend", "statistics") if key in found)
    holds = {True: "holds", False: "MISSED", None: ""}[found.get("holds")]
    return f"{name:74s}  {found['figure']:8.4g} {unit:13s} {goal:10s} {holds:7s} {backends}".rstrip()


def save(file: Path, record: dict[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(file) as unfinished:
        unfinished.write_text(json.dumps(record, indent=2) + "\n")


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=450.0, help="no row begins after these (default: 450)")
    parser.add_argument("--tiny", action="store_true", help="small problems, to see that all of it runs")
    parser.add_argument("--rows", default="", help="only rows whose name has this in it")
    parser.add_argument("--out", type=Path, default=RESULTS / "gpu.json")
    args = parser.parse_args(argv)
    device, begun = torch.device(args.device), time.perf_counter()
    if device.type == "cuda" and not (torch.cuda.is_available() or args.tiny):
        print("no CUDA device: nothing is measured")  # as `make bench` runs it on each machine
        return {}
    torch.manual_seed(0)
    clock = Clock(device, 2, 0.0) if args.tiny else Clock(device)
    record: dict[str, Any] = {"card": about(device), "versions": versions(), "machine": machine(), "results": {}}
    if device.type == "cuda" and torch.cuda.is_available():
        record["versions"]["cudnn"] = torch.backends.cudnn.version()
    print(json.dumps(record["card"]))
    for row in Benchmark(device, TINY if args.tiny else Sizes(), clock).rows():
        if args.rows not in row.name:
            continue
        late = time.perf_counter() - begun > args.seconds
        found = (
            {"goal": row.goal, "unit": row.unit, "error": "not reached in the time"} if late else measured(row, device)
        )
        record["results"][row.name] = found
        print(line(row.name, found), flush=True)
        record |= {"families": trust.results(device), "seconds": round(time.perf_counter() - begun, 1)}
        save(args.out, record)  # after each row: a run that is cut off has told what it knows
    print(f"written: {args.out}, {record.get('seconds', 0)} s")
    return record


if __name__ == "__main__":
    main()
