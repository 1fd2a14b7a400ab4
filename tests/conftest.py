"""What every test stands on: one thread, fixed seeds, no network, and fresh memory that is full of NaN."""

import gc
import importlib.util
import os
import random
import shutil
import signal
import socket
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

# Before anything imports torch, transformers or matplotlib: they read these once.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")
# torch's compiler would start a process for each core, and compile all headers of torch for later runs.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")

import hypothesis
import pytest

ROOT = Path(__file__).resolve().parent.parent
SEED = 20240607

# No deadline: the first example of a property pays for torch's warm-up. Derandomised: a red run can be repeated.
# Fixtures of a function are made once for all examples of a property: those of the properties here hold no state.
hypothesis.settings.register_profile(
    "attlas",
    deadline=None,
    derandomize=True,
    max_examples=40,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
hypothesis.settings.load_profile("attlas")


def data_folder() -> Path | None:
    """Return the folder with data from outside this repository, or None where there is none."""
    folder = Path(os.environ.get("ATTLAS_DATA", ROOT.parent / "shared" / "data"))
    return folder if folder.is_dir() else None


def has_browser() -> bool:
    """Tell whether Playwright and a Chromium that it can drive are here."""
    if importlib.util.find_spec("playwright") is None:
        return False
    own = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH", Path.home() / ".cache" / "ms-playwright"))
    return any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))) or any(own.glob("chromium*"))


def pytest_configure(config: pytest.Config) -> None:
    """Set what holds for the whole process, doctests of src included."""
    if config.getoption("numprocesses", None):
        return  # this process only hands out tests: it starts sooner without torch
    import torch

    torch.set_num_threads(1)
    from tests.error_law import ErrorLaw

    config.pluginmanager.register(ErrorLaw())
    if sets := config.getoption("--sets", "").split():
        config.pluginmanager.register(InstructionSets(sets))
    # A shell starts what runs in its background deaf to Ctrl-C; a program that a test stops by it would never end.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `make test-sets` name the instruction sets that each test runs with, the widest first."""
    parser.addoption("--sets", default="", help="instruction sets, as 'avx2 baseline none': each test runs with each")


class InstructionSets:
    """Runs each test with each instruction set that was named."""

    def __init__(self, sets: list[str]) -> None:
        self.sets = sets
        # Whether a test called a kernel, by its name without the instruction set.
        self.reaches_kernels: dict[str, bool] = {}

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        metafunc.parametrize("forced_set", self.sets, indirect=True, ids=[f"set {name}" for name in self.sets])

    @pytest.fixture(autouse=True)
    def forced_set(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Force an instruction set; skip where a wider one has called no kernel: a narrower one then calls none."""
        from attlas.engine.backends.native import library

        test = request.node.nodeid.replace(f"set {request.param}", "")
        if not self.reaches_kernels.get(test, True):
            pytest.skip("it reaches no kernel")
        call, calls = library.Kernels.call, []

        def counted(kernels: library.Kernels, entry: str, /, **fields: object) -> int:
            calls.append(entry)
            return call(kernels, entry, **fields)

        monkeypatch.setattr(library.Kernels, "call", counted)
        monkeypatch.setenv("ATTLAS_NATIVE", request.param)
        yield
        self.reaches_kernels[test] = bool(calls)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason and the way out, the tests that need what this machine does not have."""
    import torch

    missing = {}
    if data_folder() is None:
        missing["external"] = "no external data: set ATTLAS_DATA to its folder, or put it in ../shared/data"
    if not torch.cuda.is_available():
        missing["gpu"] = "no CUDA device"
    if not has_browser():
        missing["browser"] = "no Playwright or no Chromium: run `make browser`"
    for item in items:
        for marker, reason in missing.items():
            if item.get_closest_marker(marker):
                item.add_marker(pytest.mark.skip(reason=reason))
    # Long tests first: none is then started when the other workers are about to end.
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while collecting: nearly all of it stays, and looking takes a quarter of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Keep what was imported and collected out of every later search for garbage: it lives until the end."""
    gc.freeze()


@pytest.fixture
def external_data() -> Path:
    """Folder of data from outside this repository; for tests marked `external`."""
    folder = data_folder()
    if folder is None:
        pytest.skip("no external data: set ATTLAS_DATA to its folder, or put it in ../shared/data")
    return folder


@pytest.fixture(autouse=True)
def fixed_seeds() -> None:
    """Start every test from the same random state, whatever ran before it."""
    import numpy as np
    import torch

    random.seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002 - libraries under test may use the global generator
    # torch.manual_seed queues a seed, with the stack printed as a text, for each kind of device that is not here.
    torch.default_generator.manual_seed(SEED)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(SEED)


@pytest.fixture
def fill_disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Return a function from whose call on the disk has no room."""

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    return lambda: monkeypatch.setattr(os, "fsync", full)


@pytest.fixture
def comms(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """All comms that widgets open, in the place of those of a notebook."""
    pytest.importorskip("anywidget", reason="anywidget is in the extra `notebook`")
    from tests.comms import FakeComm

    FakeComm.made = []
    monkeypatch.setattr("comm.create_comm", FakeComm)
    return FakeComm.made


@pytest.fixture(scope="session", autouse=True)
def deterministic() -> None:
    """Switch deterministic mode on once: doing it before and after each test costs more than most tests do."""
    import torch

    torch.use_deterministic_algorithms(True)


@pytest.fixture(autouse=True)
def fresh_memory_is_nan(request: pytest.FixtureRequest, deterministic: None) -> Iterator[None]:
    """Fill what `torch.empty` and its relatives return with NaN, so that a cell nobody wrote cannot pass for a zero.

    torch does the filling itself in deterministic mode. Some CUDA kernels have no deterministic form and raise in that
    mode, so tests on a GPU run without.
    """
    import torch

    if request.node.get_closest_marker("gpu"):
        torch.use_deterministic_algorithms(False)
    yield
    if not torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(True)


@pytest.fixture(autouse=True)
def no_network(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refuse connections to other machines: the tests must pass on a train."""
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: object) -> None:
        host = address[0] if isinstance(address, tuple) else "local socket"
        if self.family in (socket.AF_INET, socket.AF_INET6) and host not in ("127.0.0.1", "::1", "localhost"):
            raise OSError(f"the tests may not use the network, and this one asked for {host}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)
