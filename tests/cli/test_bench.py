"""``attlas bench``: its tables, the limits that it keeps, the lock, and the light start of the command."""

import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.cli.conftest import Run

import attlas
from attlas.cli import bench_cases, main
from attlas.cli.bench import hold
from attlas.cli.terminal import UsageError
from attlas.engine import limits as processor
from attlas.engine.work import kernels

SMALL = ["bench", "--tokens", "64", "--heads", "2", "--size", "8", "--seconds", "0.01"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "attlas"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Limits without their measurement, and FlexAttention without its compiler; returns the calls."""
    calls: list[int] = []

    def limits(tick: object) -> processor.Limits:
        calls.append(1)
        return processor.Limits(dict.fromkeys(("float64", "float32", "float16", "bfloat16"), 2e9), 1e9, 4e9)

    monkeypatch.setattr(bench_cases, "limits", limits)
    monkeypatch.setattr(bench_cases, "flex_attention", lambda q, k, v: "NoCompiler")
    return calls


def test_prints_ratios_with_their_spread(quick: list[int], said: Run) -> None:
    out = said(*SMALL)
    rows = re.findall(r"^  (.+?)  +[\d.]+ ms +([\d.]+)  ([\d.]+) to ([\d.]+)$", out, flags=re.M)
    names = [name for name, *_ in rows]
    assert names[:5] == [
        "SDPA",
        "eager (stores the matrix)",
        "attlas: A @ v",
        "attlas: A @ v and row statistics",
        "attlas: A @ v and all statistics",
    ]
    assert len(rows) == 5 + 5 + 3
    for name, median, least, most in rows:
        assert float(least) <= float(median) <= float(most)
        assert name != "SDPA" or (least, median, most) == ("1.00",) * 3
    assert "FlexAttention does not run here: NoCompiler" in out
    assert "2 heads × 64 tokens × 8, float32" in out


def test_limits_are_measured_once(quick: list[int], folder: Path) -> None:
    assert main(SMALL) == main(SMALL) == 0
    assert len(quick) == 1
    assert main([*SMALL, "--again"]) == 0
    assert len(quick) == 2
    assert sorted(file.name for file in folder.iterdir()) == ["bench.lock", "processor.json"]


def test_limits_are_rates_of_this_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_cases, "_BEST_OF", 1)
    ticks: list[int] = []
    found = bench_cases.limits(lambda: ticks.append(1))
    assert len(ticks) == 6
    assert set(found.products) == {"float64", "float32", "float16", "bfloat16"}
    assert all(1e7 < rate < 1e15 for rate in (*found.products.values(), found.exponentials, found.bandwidth))
    processor.store(found, "some set")
    assert processor.known("some set") == found
    assert processor.known("another set") is None
    for products, bandwidth in (({}, 1.0), (found.products, 0.0), (found.products, "fast")):
        processor.store(processor.Limits(products, 1.0, bandwidth), "some set")
        assert processor.known("some set") is None


def test_a_second_run_names_the_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys; from pathlib import Path; from attlas.cli.bench import hold\n"
        f"with hold(Path({str(folder / 'bench.lock')!r}), 'rule'): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        assert main(SMALL) == 2
        err = capsys.readouterr().err
        assert "attlas: bench: one run at a time: two would measure each other." in err
        assert re.search(rf"  found: process {first.pid}, since \d\d:\d\d:\d\d\n", err)
        first.kill()
    with hold(folder / "bench.lock", "one at a time."):  # a process that was killed holds nothing
        assert f"process {os.getpid()}, since " in (folder / "bench.lock").read_text("utf-8")
        with pytest.raises(UsageError), hold(folder / "bench.lock", "one at a time."):
            pass


@pytest.mark.parametrize(
    ("arguments", "found"),
    [(["--tokens", "0"], "--tokens 0"), (["--heads", "-1"], "--heads -1"), (["--seconds", "nan"], "--seconds nan")],
)
def test_wrong_arguments(arguments: list[str], found: str, complaint: Run) -> None:
    assert complaint("bench", *arguments) == f"bench: {found}"


def test_a_cache_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Run) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert refusal(*SMALL).endswith("  fix: XDG_CACHE_HOME=FOLDER attlas bench\n")


def test_a_ratio_is_of_one_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that slows down from round to round changes no ratio."""
    clock = [0.0]
    monkeypatch.setattr("attlas.cli.bench_cases.time.perf_counter", lambda: clock[0])
    speed = [1.0]

    def case(seconds: float) -> None:
        clock[0] += seconds * speed[0]

    def slower() -> None:
        speed[0] *= 3

    found = bench_cases.ratios({"base": lambda: case(1), "twice": lambda: case(2)}, 4, slower, math.inf)
    assert (found["twice"].median, found["twice"].least, found["twice"].most) == pytest.approx((2, 2, 2))
    assert found["base"].seconds == pytest.approx((9 + 27) / 2)


def test_peers_agree() -> None:
    """What is timed computes the same, gradients too."""
    q, k, v = (torch.randn(1, 2, 40, 8) for _ in range(3))
    for title, cases in bench_cases.output(q, k, v, "none"):
        wanted = cases["SDPA"]()
        for name, run in cases.items():
            found = run()
            torch.testing.assert_close(found if torch.is_tensor(found) else found[0], wanted, msg=f"{title}, {name}")
    cases = bench_cases.forward_and_backward(q, k, v)
    for run in cases.values():
        torch.testing.assert_close(run(), cases["SDPA"]())


# ------------------------------------------------------------------------------------------------------- explain()


def test_explain_counts_the_work() -> None:
    q, k = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 11, 16)
    work = attlas.explain(attlas.attend(q, k)).work
    assert work is not None
    pairs = 2 * 4 * 9 * 11
    assert (work.size, work.products, work.exponentials) == (16, pairs * 32, pairs)
    assert work.bytes == 4 * (2 * q.numel() + 2 * k.numel())
    assert (work.limits, work.seconds, work.reached) == (None, None, None)
    assert "not measured yet; run `attlas bench`" in repr(work)


MASKS = {
    "causal": attlas.Causal(),
    "window": attlas.Window(3, 2),
    "padding": attlas.Padding(torch.tensor([700, 5])),
    "beyond the edges": attlas.Window(5000, 5000),
    "stripes": attlas.from_function(lambda b, h, i, j: (i - j) % 2 == 0),
    "not causal": ~attlas.Causal(),
}


@pytest.mark.parametrize("name", MASKS)
def test_explain_counts_the_pairs_of_a_mask(name: str) -> None:
    A = attlas.attend(torch.randn(2, 3, 700, 4), torch.randn(2, 3, 700, 4), mask=MASKS[name])
    work = attlas.explain(A).work
    assert work is not None
    allowed = int((A.to_dense() > 0).sum())
    if name == "stripes":  # it forbids no whole tile
        assert work.exponentials == 2 * 3 * 700 * 700
    else:
        assert allowed <= work.exponentials <= 1.4 * allowed
    if name in ("causal", "window", "padding", "beyond the edges"):
        assert work.exponentials == allowed


def test_explain_compares_with_the_limit() -> None:
    A = attlas.attend(torch.randn(8, 512, 32), torch.randn(8, 512, 32))
    limits = processor.Limits(dict.fromkeys(("float64", "float32", "float16", "bfloat16"), 2e9), 1e9, 4e9)
    processor.store(limits, kernels())
    work = attlas.explain(A, measure=True).work
    assert work is not None
    pairs = 8 * 512**2
    assert work.limits == pytest.approx(
        {"products": pairs * 64 / 2e9, "exponentials": pairs / 1e9, "memory": 4 * 8 * 512 * 32 * 4 / 4e9}
    )
    assert work.limit == work.limits["products"]
    assert work.seconds is not None
    assert work.seconds > 0
    assert work.reached == pytest.approx(work.limit / work.seconds)
    assert f"{work.reached:.0%} of the limit's speed" in repr(work)
    assert "limit on this processor: 67.1 ms (products 67.1 ms, exponentials 2.1 ms, memory 524 µs)" in repr(work)
    assert attlas.explain(attlas.attend(A.problem.q[0], A.problem.k[0], score=attlas.Laplace())).work.limits is None


def test_explain_of_tensors_without_numbers() -> None:
    q = torch.randn(5, 8, device="meta")
    assert attlas.explain(attlas.attend(q, q)).work is None
