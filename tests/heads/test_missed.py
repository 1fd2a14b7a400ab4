"""How much weight chosen keys leave out, against the dense weights of full attention."""

from __future__ import annotations

import pytest
import torch

import attlas
from attlas import heads
from attlas.errors import DtypeError, ShapeError


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_equals_the_weight_of_the_keys_that_were_left_out(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q, k = (5 * torch.randn(2, 4, 30, 8)).to(dtype), torch.randn(2, 2, 30, 8).to(dtype)
    chosen = attlas.masks.Selected(torch.randint(0, 30, (2, 2, 30, 6)), group=2)
    window = attlas.Causal() & attlas.Padding(torch.tensor([30, 21]))
    near = attlas.Causal() & attlas.Window(20, 0)
    nested = attlas.Causal() & (chosen & attlas.Window(20, 0))
    for mask, others in ((chosen, None), (window & chosen, window), (nested, near)):
        A = attlas.attend(q, k, mask=mask, sink=torch.randn(4).to(dtype))
        full = attlas.attend(q, k, mask=others, sink=A.sink).to_dense().double()
        # The sink takes its part in both: what is left out is a share of all weights, that of the sink included.
        allowed = A.to_dense() > 0
        sink = 1 - full.sum(-1)
        kept = (full * allowed).sum(-1) + sink
        found = heads.missed(A)
        assert found.dtype is A.dtype
        torch.testing.assert_close(found.double(), 1 - kept, atol=1e-6, rtol=1e-5)
    assert (
        heads.missed(
            attlas.attend(q, k, mask=attlas.masks.Selected(torch.full((30, 1), -1)) & attlas.Causal(-31))
        ).max()
        == 0
    )


def test_what_is_refused() -> None:
    q = torch.randn(5, 4)
    with pytest.raises(ShapeError, match="must say which keys were chosen"):
        heads.missed(attlas.attend(q, q, mask=attlas.Causal()))
    with pytest.raises(DtypeError, match="a number of an attention matrix"):
        heads.missed(q)  # type: ignore[arg-type]
    A = attlas.attend(q, q, mask=attlas.masks.Selected([[0]] * 5))
    with pytest.raises(ShapeError, match="it must have all of its keys"):
        heads.missed(A.window(columns=(0, 3)))
    with pytest.raises(DtypeError, match="these weights are none"):
        heads.missed(A - 0.5 * attlas.attend(q, q))
