"""The library of kernels: how it is found, which instruction set it uses, and what each set computes."""

import ctypes
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from tests.engine.native.conftest import each_set, needs_kernels
from tests.messages import refusal

from attlas.engine.backends.native import library
from attlas.errors import BackendError

FOLDER = Path(library.__file__).parent


def elementary(function: str, x: np.ndarray) -> np.ndarray:
    """Map exp, tanh or log2 over an array with the kernels."""
    out = np.full_like(x, 7)
    kind = {"float32": "FLOAT32", "float64": "FLOAT64"}[str(x.dtype)]
    fields = {"in": x.ctypes.data, "out": out.ctypes.data, "count": x.size}
    status = library.current().call(
        "elementary", **fields, function=library.current().codes[function], type=library.current().codes[kind]
    )
    assert status == library.current().codes["DONE"]
    return out


def all_floats(step: int) -> np.ndarray:
    """Every step-th float32 there is: both signs, subnormal numbers, infinities and NaN among them."""
    x = np.arange(0, 2**32, step, dtype=np.uint32).view(np.float32)
    return np.where(np.isnan(x), np.float32(np.nan), x)  # numpy warns at signalling NaNs


def errors(found: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Distance to the exact result, in units in the last place of the result's dtype."""
    return np.abs(found - exact) / np.spacing(np.abs(exact).astype(found.dtype)).astype(exact.dtype)


# --------------------------------------------------------------------------------------------------------- functions


@needs_kernels
@each_set
@pytest.mark.parametrize(
    ("dtype", "low", "high", "infinite"),
    [(np.float32, -87.3365, 88.7228, 88.72284), (np.float64, -708.39, 709.78, 709.79)],
)
def test_exp_over_all_numbers(name: str, dtype: type, low: float, high: float, infinite: float, use) -> None:
    use(name)
    ends = [np.inf, -np.inf, np.nan, 0.0, -0.0, 5e-324, 1e-310, low, low - 1e-4, high, infinite]
    x = np.concatenate([all_floats(4801), np.linspace(1.2 * low, 1.2 * high, 200_001), ends]).astype(dtype)
    found = elementary("EXP", x)
    with np.errstate(over="ignore"):
        exact = np.exp(x.astype(np.longdouble))
    normal = (x >= dtype(low)) & (x <= dtype(high))
    assert errors(found[normal], exact[normal]).max() <= 2.0
    np.testing.assert_array_equal(np.isnan(found), np.isnan(x))
    assert np.all(found[x < dtype(low)] == 0)  # never a subnormal number
    assert np.all(found[x > dtype(infinite)] == np.inf)


@needs_kernels
@each_set
def test_log2_over_all_numbers(name: str, use) -> None:
    use(name)
    numbers = all_floats(4801)
    for dtype, units in ((np.float32, 2.5), (np.float64, 4.0)):
        x = numbers[np.isfinite(numbers) & (numbers >= 0)].astype(dtype)
        x = np.concatenate([x, np.linspace(0, 2, 200_001, dtype=dtype), 2.0 ** np.arange(-126, 127, dtype=dtype)])
        found = elementary("LOG2", x)
        normal = x >= np.finfo(dtype).tiny
        exact = np.log2(x[normal].astype(np.longdouble))
        # Units of the result, or near 1, where it is as small as what x is rounded to, of x itself.
        scale = np.maximum(np.abs(exact), np.abs(x[normal].astype(np.longdouble) - 1) * 1.4)
        away = scale > 0
        assert np.max(np.abs(found[normal][away] - exact[away]) / scale[away]) <= units * np.finfo(dtype).eps
        assert np.all(found[x == 1] == 0)
        assert np.all(found[~normal] == -np.inf)


@needs_kernels
@each_set
def test_tanh_over_all_numbers(name: str, use) -> None:
    use(name)
    x = np.concatenate([all_floats(4801), np.linspace(-10, 10, 200_001, dtype=np.float32)])
    x = np.append(x, np.float32([np.inf, -np.inf, np.nan, 0.0, -0.0]))
    found = elementary("TANH", x)
    exact = np.tanh(x.astype(np.float64))
    assert np.nanmax(np.abs(found - exact)) <= 4e-7
    ordinary = np.abs(x) > 1e-30
    assert np.max(np.abs(found[ordinary] / exact[ordinary] - 1)) <= 5e-7
    np.testing.assert_array_equal(np.isnan(found), np.isnan(x))
    assert np.nanmax(np.abs(found)) <= 1.0


@needs_kernels
@each_set
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_any_length_and_alignment(name: str, dtype: type, use) -> None:
    use(name)
    rng = np.random.default_rng(0)
    for count in [*range(36), 100]:
        for start in range(3):
            x = rng.normal(size=count + start + 4).astype(dtype)
            out = np.full_like(x, 7)
            fields = {"in": x[start:].ctypes.data, "out": out[start:].ctypes.data, "count": count}
            kind = library.current().codes["FLOAT32" if dtype is np.float32 else "FLOAT64"]
            library.current().call("elementary", **fields, function=library.current().codes["EXP"], type=kind)
            np.testing.assert_allclose(out[start : start + count], np.exp(x[start : start + count]), rtol=3e-7)
            assert np.all(out[:start] == 7)
            assert np.all(out[start + count :] == 7)


@needs_kernels
def test_several_python_threads_may_call() -> None:
    arrays = [np.random.default_rng(i).normal(size=50_000).astype(np.float32) for i in range(8)]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda x: elementary("EXP", x), arrays))
    for x, y in zip(arrays, found, strict=True):
        np.testing.assert_array_equal(y, elementary("EXP", x))


# ---------------------------------------------------------------------------------------------------------- loading


@needs_kernels
def test_sets_are_a_ladder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATTLAS_NATIVE", raising=False)
    assert library.runnable() == library.SETS[: len(library.runnable())]
    assert library.current().instruction_set == library.runnable()[-1]
    assert library.current().why_not is None


@needs_kernels
def test_no_set_runs_that_the_processor_lacks() -> None:
    entry, _, kind, _ = library._library_or_reason(library._LIBRARY_FILE).function("elementary")
    for number in (-1, len(library.runnable()), 99):
        assert entry(ctypes.byref(kind()), number) == library.current().codes["UNSUPPORTED"]


def test_environment_turns_the_kernels_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTLAS_NATIVE", "none")
    reason = "ATTLAS_NATIVE=none turns the kernels off"
    assert not library.available()
    assert library.current().why_not == reason
    said = refusal(BackendError, lambda: library.current().call("elementary", count=0))
    assert said == f"attlas.engine.backends.native: {reason}"


@needs_kernels
def test_environment_names_a_set_or_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTLAS_NATIVE", "avx1024")
    assert refusal(BackendError, library.available) == "ATTLAS_NATIVE: ATTLAS_NATIVE=avx1024"


def test_missing_library_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ATTLAS_NATIVE", raising=False)
    monkeypatch.setattr(library, "_LIBRARY_FILE", tmp_path / "_kernels.so")
    reason = "the kernels were not compiled when attlas was installed"
    assert library.current().why_not == reason
    assert library.runnable() == ()
    assert library.current().structures == library.current().codes == {}
    said = refusal(BackendError, lambda: library.current().call("dot"))
    assert said == f"attlas.engine.backends.native: {reason}"


def test_broken_library_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("ATTLAS_NATIVE", raising=False)
    broken = tmp_path / "_kernels.so"
    broken.write_bytes(b"no library")
    monkeypatch.setattr(library, "_LIBRARY_FILE", broken)
    assert re.match(r"the library of kernels cannot be loaded \(.*_kernels\.so: ", library.current().why_not)
    assert not library.available()


def test_attlas_imports_without_a_library() -> None:
    # Nothing of the kernels is loaded before something asks for them.
    code = "import sys, attlas; sys.exit('_kernels.so' in open('/proc/self/maps').read())"
    if sys.platform != "linux":
        pytest.skip("/proc says on Linux what a process has loaded")
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -------------------------------------------------------------------------------------------------------- structures


@needs_kernels
def test_structures_are_those_of_the_header() -> None:
    text = (FOLDER / "kernels" / "abi.h").read_text(encoding="utf-8")
    declared = re.findall(r"^struct (\w+)", text, flags=re.M)
    assert {"Tensor4", "AttentionParams", "Elementary"} <= set(declared)
    for name in declared:
        fields = [field for field, *_ in library.current().structures[name]._fields_]
        body = re.sub(r"//.*", "", re.search(rf"^struct {name} {{(.*?)^}};", text, flags=re.M | re.S)[1])
        rows = "".join(f"void* {statistic};" for statistic in library.current().row_statistics)
        assert fields == re.findall(r"(\w+)(?=[,;])", body.replace("ATTLAS_ROW_STATISTICS(ATTLAS_POINTER)", rows))
    assert library.current().structures["Tensor4"].row.offset == 24
    assert [library.current().codes[name] for name in ("DONE", "NOT_FINITE", "NO_MEMORY", "UNSUPPORTED")] == [
        0,
        1,
        2,
        3,
    ]


@needs_kernels
def test_declarations_of_every_form() -> None:
    text = """
    enum Colour : int32_t { RED = 0, BLUE = 12 };
    struct Point { double x, y;  // x = 3
      float z; };
    struct Line {
      Point from, to;
      const void* data; int64_t* places;
      uint8_t flag;
    };
    #define ATTLAS_ROW_STATISTICS(X) X(first) X(second)
    struct Rows { ATTLAS_ROW_STATISTICS(ATTLAS_POINTER) int64_t size; };
    """
    structures, codes, statistics = library._read_declarations(text)
    assert statistics == ("first", "second")
    assert [name for name, _ in structures["Rows"]._fields_] == ["first", "second", "size"]
    assert codes == {"RED": 0, "BLUE": 12}
    assert structures["Point"]._fields_ == [("x", ctypes.c_double), ("y", ctypes.c_double), ("z", ctypes.c_float)]
    assert [kind for _, kind in structures["Line"]._fields_][:2] == [structures["Point"]] * 2
    assert ctypes.sizeof(structures["Line"]) == 24 + 24 + 8 + 8 + 8
    with pytest.raises(KeyError):
        library._read_declarations("struct Wrong { short x; };")


@needs_kernels
def test_unknown_names_raise() -> None:
    misspelt = refusal(BackendError, lambda: library.current().call("elementary", count=0, cuont=3))
    assert misspelt == "attlas.engine.backends.native: no cuont"
    with pytest.raises(AttributeError):
        library.current().structures["Tensor4"](rwo=3)
    with pytest.raises(AttributeError):
        library.current().call("nothing")


@needs_kernels
def test_where_no_pool_can_be_told(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    assert library._openmp_entry(maps) is None
    maps.write_text("7f00-7f01 r-xp 00000000 fe:00 1    /lib/libc.so.6\n")
    assert library._openmp_entry(maps) is None
    maps.write_text("7f00-7f01 r-xp 0 fe:00 1    /a/libgomp.so.1\n7f00-7f01 r-xp 0 fe:00 1    /b/libgomp.so.1\n")
    assert library._openmp_entry(maps) is None


@needs_kernels
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_process_and_several_threads() -> None:
    """A pool does not live on in a child, and each Python thread has one of its own."""
    script = """
import os, signal, threading, torch, attlas
torch.set_num_threads(2)
q = torch.randn(1, 2, 600, 32)
def mass():
    return attlas.attend(q, q, plan=attlas.Plan("native")).sum(-2)
known = mass()
same = []
threads = [threading.Thread(target=lambda: same.append(torch.equal(mass(), known))) for _ in range(4)]
[t.start() for t in threads], [t.join() for t in threads]
assert same == [True] * 4
torch.set_num_threads(3)
assert torch.equal(mass(), known)
child = os.fork()
if child == 0:
    signal.alarm(60)
    from attlas.engine.backends.native import library
    n, d = q.shape[2:]
    held = torch.zeros(1, 2, n, dtype=torch.float64), q.contiguous()
    kernels = library.current()
    place = kernels.structures["Tensor4"](held[1].data_ptr(), *q.stride()[:3])
    status = kernels.call("dot", batch=1, heads=2, key_heads=2, m=n, n=n, d=d, q=place, k=place, threads=3, scale=1.0,
                          lse=held[0].data_ptr())
    os._exit(int(status != 0 or not bool(held[0].all())))
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
