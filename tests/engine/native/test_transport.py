"""Rows of linear attention by the kernel: every kind, dtype and instruction set gives the definition in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.engine.native.conftest import each_set, needs_kernels
from tests.transport.layers import KINDS, arguments, cast, dense
from torch import Tensor

import attlas
from attlas.engine import given
from attlas.engine.backends.native import library

pytestmark = needs_kernels

CLOSE = {torch.float64: 1e-13, torch.float32: 5e-7}


def matrix(kind: str, dtype: torch.dtype, n: int, **sizes: int) -> tuple[attlas.AttentionMatrix, Tensor]:
    """Return a matrix and its dense definition in float64, of the numbers that it has."""
    some = {name: cast(value, dtype) for name, value in arguments(kind, n, **sizes).items()}
    return attlas.transport(**some), dense(**{name: cast(value, torch.float64) for name, value in some.items()})


@each_set
@pytest.mark.parametrize("dtype", list(CLOSE), ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_equal_the_definition(kind: str, dtype: torch.dtype, name: str, use: Callable[[str], None]) -> None:
    use(name)
    A, full = matrix(kind, dtype, 140, d=11)
    size, rows = float(full.abs().max()), [139, 0, 77, 138, 70, 70]
    places = torch.tensor(rows)
    for found, expected in (
        (A[..., 139, :], full[..., 139, :]),
        (A[..., rows, :], full[..., rows, :]),
        (A[..., rows, 20:90], full[..., rows, 20:90]),
        (A.window((100, 140), (3, 120))[..., -1, :], full[..., 139, 3:120]),
        (A.weights.cells(places, torch.tensor([5, 139, 60])), full[:, :, rows][..., [5, 139, 60]]),
        (A[:, 1:3, 77], full[:, 1:3, 77]),
    ):
        assert found.dtype == dtype
        assert float((found.double() - expected).abs().max()) <= CLOSE[dtype] * size


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_tokens_of_16_bits_are_read_as_they_are(dtype: torch.dtype) -> None:
    some = arguments("gated delta, grouped", 90, d=19)
    some = {name: cast(value, dtype if name in ("q", "k") else torch.float32) for name, value in some.items()}
    full = dense(**{name: cast(value, torch.float64) for name, value in some.items()})
    found = attlas.transport(**some)[..., [89, 40], :]
    assert found.dtype is torch.float32
    torch.testing.assert_close(found.double(), full[..., [89, 40], :], atol=5e-7 * float(full.abs().max()), rtol=0)


def test_rounding_does_not_add_up() -> None:
    """Weak decays over many tokens: the vector of a row is carried in float64."""
    n = 20_000
    k = torch.nn.functional.normalize(torch.randn(n, 4), dim=-1)
    decay, beta = -1e-4 * torch.rand(n), 1e-3 * torch.rand(n)
    A = attlas.transport(k, k, decay, beta, beta)
    expected = attlas.transport(k.double(), k.double(), decay.double(), beta.double(), beta.double())[n - 1]
    assert float((A[n - 1].double() - expected).abs().max()) <= 1e-7 * float(expected.abs().max())


def test_columns_may_lie_in_any_order_of_memory() -> None:
    some = arguments("kda", 60)
    moved = {name: t.mT.contiguous().mT if t.ndim == 4 else t for name, t in some.items()}
    close = {"atol": 1e-13, "rtol": 0}
    torch.testing.assert_close(attlas.transport(**moved)[..., 59, :], dense(**some)[..., 59, :], **close)


def test_the_kernel_takes_few_rows_and_no_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    rows = given.transport_rows

    def spy(*wanted: Any) -> Tensor | None:
        calls.append(len(wanted[4]))
        return rows(*wanted)

    monkeypatch.setattr(given, "transport_rows", spy)
    some = {name: cast(value, torch.float32) for name, value in arguments("gated delta", 3000).items()}
    A = attlas.transport(**some)
    A[0, 0, 2999]
    A[0, 0, 2999, 3]
    A[0, 0, -40:, -1000:]
    assert calls == [1, 1, 40]
    A[0, 0]  # as many rows as there are: the factors are made once for all
    some["k"].requires_grad_()
    row = attlas.transport(**some)[0, 0, 2999]
    assert row.requires_grad
    assert calls == [1, 1, 40]
    monkeypatch.setenv("ATTLAS_NATIVE", "none")
    torch.testing.assert_close(A[0, 0, 2999], row.detach(), atol=1e-5, rtol=0)
    assert library.current().why_not is not None
