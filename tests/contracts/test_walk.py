"""How far a call walks through the package: modules that it visits, entries from file to file, calls of functions.

Budgets are what was measured. They only fall: who makes a walk shorter lowers its line here. They are those of
Python 3.11 and of the instruction set that takes the most; newer versions of Python need fewer calls.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from tests.tiny_models import SIZES, lively
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import attlas
from attlas import stats
from attlas.engine.backends.native import library
from attlas.view import Service

PACKAGE = str(Path(attlas.__file__).parent) + os.sep


class Walk(NamedTuple):
    """Modules visited, entries from one file into another, and calls of functions of the package."""

    modules: int
    entries: int
    calls: int


BUDGETS = {
    "attend": Walk(14, 24, 39),
    "product": Walk(21, 45, 71),
    "product of 16 tokens": Walk(15, 21, 24),
    "backward": Walk(14, 40, 71),
    "collect": Walk(23, 49, 86),
    "tile of the viewer": Walk(37, 93, 164),
    # Five files more since hooks are operators in compiled programs, and since linear layers are heard; two more since
    # blocks share what they replace, and since a recording may go on.
    "recorded pass": Walk(63, 1121, 1979),
}


@pytest.fixture
def kernels() -> None:
    """Skip where outputs of this size do not go to the kernels: without wide vectors they are slower than torch."""
    if not (library.available() and library.current().instruction_set in ("avx2", "avx512", "amx")):
        pytest.skip("outputs of this size go to the kernels only where these have wide vectors")


needs_kernels = pytest.mark.usefixtures("kernels")


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    """Compute on one thread and in full precision: others take other ways, and an earlier test may have left them."""
    before = torch.get_num_threads(), torch.get_float32_matmul_precision()
    torch.set_num_threads(1)
    torch.set_float32_matmul_precision("highest")
    gc.collect()  # what ends an object of an earlier test is no part of a walk
    gc.disable()
    yield
    gc.enable()
    torch.set_num_threads(before[0])
    torch.set_float32_matmul_precision(before[1])


def walked(run: Callable[[], Any]) -> Walk:
    """Run a function and return how far its calls walk through the package, on this thread."""
    files: list[str] = [""]
    modules: set[str] = set()
    entries = calls = 0

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal entries, calls
        if event == "call":
            file = frame.f_code.co_filename
            if file.startswith(PACKAGE):
                modules.add(file)
                calls += 1
                entries += file != files[-1]
                files.append(file)
            else:
                files.append(files[-1])
        elif event == "return" and len(files) > 1:
            files.pop()

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        run()
    finally:
        sys.setprofile(before)
    return Walk(len(modules), entries, calls)


def check(name: str, prepare: Callable[[], Callable[[], Any]]) -> None:
    """Compare a walk with its budget; `prepare` makes what is run. The first time fills caches and loads modules."""
    prepare()()
    found = walked(prepare())
    assert all(f <= b for f, b in zip(found, BUDGETS[name], strict=True)), (found, BUDGETS[name])


def tokens(n: int) -> list[Tensor]:
    """Return queries, keys and values of eight heads."""
    return [torch.randn(1, 8, n, 32, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def test_attend() -> None:
    q, k, _ = tokens(1024)
    check("attend", lambda: lambda: attlas.attend(q, k, mask=attlas.Causal()))


@needs_kernels
def test_product() -> None:
    q, k, v = tokens(1024)

    def prepare() -> Callable[[], Tensor]:
        A = attlas.attend(q, k, mask=attlas.Causal())
        assert attlas.explain(A).backend == "native"
        A = attlas.attend(q, k, mask=attlas.Causal())
        return lambda: A @ v

    check("product", prepare)


def test_product_of_few_tokens() -> None:
    q, k, v = tokens(16)

    def prepare() -> Callable[[], Tensor]:
        A = attlas.attend(q, k)
        return lambda: A @ v

    check("product of 16 tokens", prepare)


class Called(TorchDispatchMode):
    """Counts the operations of torch."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@needs_kernels
@pytest.mark.parametrize(("m", "n"), [(1, 1024), (16, 64)])
def test_operations_of_a_product_and_of_entropy_after_it(m: int, n: int) -> None:
    """A log-sum-exp that torch's kernel has rounded is neither looked at nor converted for numbers of rows."""
    q, k, v = (torch.randn(1, 8, size, 64, generator=torch.Generator().manual_seed(size)) for size in (m, n, n))
    A = attlas.attend(q, k)
    if attlas.explain(A).backend != "sdpa":
        pytest.skip("for this size, another backend is faster on this processor")
    A = attlas.attend(q, k)
    with torch.no_grad(), Called() as product:
        A @ v
    with torch.no_grad(), Called() as entropy:
        stats.entropy(A)
    assert product.count <= 4
    assert entropy.count <= 9


@needs_kernels
def test_backward() -> None:
    q, k, v = tokens(1024)

    def prepare() -> Callable[[], None]:
        out = attlas.attend(q.clone().requires_grad_(), k, mask=attlas.Causal()) @ v
        grad = torch.ones_like(out)
        return lambda: out.backward(grad)

    check("backward", prepare)


@needs_kernels
def test_collect() -> None:
    q, k, _ = tokens(1024)

    def prepare() -> Callable[[], Any]:
        A = attlas.attend(q, k, mask=attlas.Causal())
        return lambda: A.collect(stats.Entropy())

    check("collect", prepare)


@needs_kernels
def test_tile_of_the_viewer() -> None:
    q, k, _ = tokens(512)
    place = {"entry": "0", "head": "1", "level": "0", "y": "1"}
    service = Service(attlas.attend(q, k, mask=attlas.Causal()))
    try:
        columns = iter("01")

        def prepare() -> Callable[[], Any]:
            tile = place | {"x": next(columns)}

            def run() -> None:
                answer = service.answer("tile", tile)
                assert answer.final
                assert answer.progress == 1

            return run

        check("tile of the viewer", prepare)
    finally:
        service.close()


@needs_kernels
def test_recorded_pass() -> None:
    config = transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 4})
    model = lively(transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa"))
    ids = torch.arange(12)[None]

    def prepare() -> Callable[[], None]:
        def run() -> None:
            with torch.no_grad(), attlas.record(model) as atlas:
                model(ids)
            assert len(atlas) == 4

        return run

    check("recorded pass", prepare)
