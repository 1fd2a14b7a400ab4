"""Which backend runs, why the others do not, and that a plan is kept or refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import attlas
from attlas import BackendError, Plan
from attlas.engine.choose import Choice

q, k, v = torch.randn(2, 4, 9, 16), torch.randn(2, 2, 11, 16), torch.randn(2, 2, 11, 3)
FAR = 1e4 * torch.ones(16)

SDPA: dict[str, Callable[[], attlas.AttentionMatrix]] = {
    "plain": lambda: attlas.attend(q, k),
    "causal": lambda: attlas.attend(q, k, mask=attlas.Causal()),
    "mask": lambda: attlas.attend(q, k, mask=attlas.Window(3, 3)),
    "additive": lambda: attlas.attend(q, k, mask=torch.randn(9, 11)),
    "sink": lambda: attlas.attend(q, k, sink=torch.zeros(4)),
    "cosine": lambda: attlas.attend(q, k, score=attlas.Cosine()),
    "bilinear": lambda: attlas.attend(q, k, score=attlas.Bilinear(16, 16)),
    "alibi": lambda: attlas.attend(q, k, score=attlas.ScaledDot() + attlas.Alibi(4)),
    "multiple": lambda: attlas.attend(q, k, score=-2 * attlas.ScaledDot()),
    "gaussian": lambda: attlas.attend(q, k, score=attlas.Gaussian(3.0)),
}
TILED: dict[str, Callable[[], attlas.AttentionMatrix]] = {
    "softcap": lambda: attlas.attend(q, k, score=attlas.SoftCap(attlas.ScaledDot(), 5.0)),
    "additive score": lambda: attlas.attend(q, k, score=attlas.Additive(16, 16, 8)),
    "laplace": lambda: attlas.attend(q, k, score=attlas.Laplace()),
    "gaussian of few coordinates": lambda: attlas.attend(q[..., :3], k[..., :3], score=attlas.Gaussian()),
    "gaussian of a small bandwidth": lambda: attlas.attend(q, k, score=attlas.Gaussian(1e-3)),
    "no queries": lambda: attlas.attend(q[:, :, :0], k),
    "no keys": lambda: attlas.attend(q, k[:, :, :0]),
    "positional": lambda: attlas.attend(q, k, score=attlas.Alibi(4)),
}


@pytest.mark.parametrize("name", list(SDPA))
def test_sdpa_is_chosen(name: str) -> None:
    choice = attlas.explain(SDPA[name]())
    assert choice.backend == "sdpa"
    assert set(choice.others) == {"reference", "tiled"}


@pytest.mark.parametrize("name", list(TILED))
def test_tiled_is_chosen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTLAS_NATIVE", "none")
    choice = attlas.explain(TILED[name]())
    assert choice.backend == "tiled"
    assert set(choice.others) == {"native", "reference", "sdpa"}
    A = TILED[name]()
    with pytest.raises(BackendError, match="sdpa does not run: " + choice.others["sdpa"].split("'")[0]):
        attlas.AttentionMatrix(A.problem, Plan("sdpa"), A._axes) @ torch.randn(A.shape[-1], 2)


@pytest.mark.parametrize("backend", ["sdpa", "tiled", "reference"])
def test_a_named_backend_is_kept(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from attlas.engine import reference, sdpa, tiled

    calls = []
    for module, name in ((sdpa, "forward"), (tiled, "forward"), (reference, "dense")):
        original = getattr(module, name)

        def watched(*args: object, _module: object = module, _original: object = original, **kwargs: object) -> object:
            calls.append(_module.__name__.rsplit(".", 1)[-1])
            return _original(*args, **kwargs)

        monkeypatch.setattr(module, name, watched)
    plan = Plan(backend)
    assert attlas.explain(attlas.attend(q, k, plan=plan)).backend == backend
    attlas.attend(q, k, plan=plan) @ v
    assert calls == [backend]


def test_the_choice_is_printed_line_by_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTLAS_NATIVE", "none")
    text = str(attlas.explain(attlas.attend(q, k, score=attlas.Laplace())))
    assert text.splitlines()[0].startswith("backend: tiled, since ")
    assert all(line.startswith("  not ") for line in text.splitlines()[1:])


def test_a_choice_is_data() -> None:
    assert Choice("a", "b", {}) == Choice("a", "b", {})


def test_numbers_that_are_not_finite_go_to_the_tiled_backend() -> None:
    """torch's kernel gives 0 for a query that is NaN where there are fewer than 16 keys: ours says NaN."""
    bad = q.clone()
    bad[0, 0, 3, 1] = torch.nan
    out = attlas.attend(bad, k) @ v
    assert bool(out[0, 0, 3].isnan().all())
    assert bool(out[1].isfinite().all())


def test_a_plan_does_not_change_with_the_default() -> None:
    assert Plan() == Plan("auto", None, None, None)
    assert Plan(rows=3).budget("cpu") == 16 << 20
    assert Plan(cells=7).budget("cuda") == 7
    assert len({Plan(), Plan("auto"), Plan("tiled")}) == 2
