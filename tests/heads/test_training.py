"""QK-clip brings the largest logit to the threshold; the alarm sees collapsed heads and no others."""

from collections.abc import Callable

import pytest
import torch
from tests.messages import refusal
from torch import Tensor

import attlas
from attlas import heads, stats

close = torch.testing.assert_close


def project(x: Tensor, weight: Tensor, count: int) -> Tensor:
    return (x @ weight.T).unflatten(-1, (count, -1)).transpose(1, 2)


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("alpha", [0.5, 0.2])
def test_clipped_projections_have_logits_within_bounds(key_heads: int, alpha: float) -> None:
    x = torch.randn(2, 30, 16).double()
    w_q, w_k = torch.randn(4 * 8, 16).double(), torch.randn(key_heads * 8, 16).double()
    w_q[8:16] *= 6
    A = attlas.attend(project(x, w_q, 4), project(x, w_k, key_heads), mask=attlas.Causal())
    exact = A.logits.to_dense()
    largest = exact.amax((0, 2, 3))
    threshold = float(largest.sort().values[1:3].mean())
    factors = heads.qk_clip(A, threshold, alpha=alpha)
    close(factors.max_logit, largest)
    close(factors.gamma, (threshold / largest).clamp(max=1.0))
    assert 0 < int((factors.gamma < 1).sum()) < 4
    if key_heads == 4:
        close(factors.query, factors.gamma**alpha)
        close(factors.query * factors.key, factors.gamma)
    else:
        close(factors.query, factors.gamma)
        close(factors.key, torch.ones(key_heads).double())
    factors.apply_(w_q, w_k)
    after = attlas.attend(project(x, w_q, 4), project(x, w_k, key_heads), mask=attlas.Causal()).logits.to_dense()
    finite = exact > -torch.inf
    scaled = exact * factors.gamma.view(-1, 1, 1)
    close(after[finite], scaled[finite])
    close(after.amax((0, 2, 3)), largest.clamp(max=threshold))
    rows = heads.qk_clip(stats.max_logit(A), threshold, key_heads, alpha)
    alone = heads.qk_clip(largest, threshold, key_heads, alpha)
    for a, b, c in zip(factors, rows, alone, strict=True):
        close(a, b)
        close(a, c)


def test_biases_are_scaled_too_and_parameters_keep_their_graphs_apart() -> None:
    layer = torch.nn.Linear(3, 8)
    before = layer.weight.detach().clone(), layer.bias.detach().clone()
    factors = heads.qk_clip(torch.tensor([400.0, 1.0]), 100.0)
    factors.apply_(layer.weight, layer.bias)
    scale = torch.tensor([0.5] * 4 + [1.0] * 4)
    close(layer.weight.detach(), before[0] * scale[:, None])
    close(layer.bias.detach(), before[1] * scale)


def test_heads_without_a_large_logit_are_left_alone() -> None:
    found = heads.qk_clip(torch.tensor([-torch.inf, -3.0, 0.0, 100.0, 100.5]), 100.0)
    assert found.gamma[:4].tolist() == [1, 1, 1, 1]
    assert float(found.gamma[4]) == pytest.approx(100 / 100.5)
    empty = attlas.attend(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4), mask=attlas.Padding([0]))
    assert heads.qk_clip(empty).gamma.tolist() == [1, 1]
    assert heads.qk_clip(attlas.attend(torch.zeros(1, 2, 0, 4), torch.zeros(1, 2, 3, 4))).gamma.tolist() == [1, 1]


def level(case: object, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean entropy and mean share of uniform entropy of each head, from the dense matrix."""
    weights, keys = case.weights[..., rows, :], case.allowed[..., rows, :].sum(-1).double()
    entropy = -torch.special.xlogy(weights, weights).sum(-1)
    choice = keys > 1
    means = []
    for x in (entropy, entropy / keys.clamp(min=2).log()):
        means.append(
            torch.stack([x[:, h][choice[:, h]].mean() if choice[:, h].any() else x.new_zeros(()) for h in range(4)])
        )
    return means[0], means[1]  # fmt: skip


ROWS = {"all": None, "5": 5, "window": slice(-4, None), "list": torch.tensor([0, 3])}


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
def test_entropy_is_that_of_the_dense_rows(make: Callable, kind: str, rows: object) -> None:
    case = make(kind)
    m = case.weights.shape[-2]
    rows = rows[rows < m] if isinstance(rows, Tensor) else rows
    if not isinstance(rows, int):
        places = torch.arange(m)[slice(None) if rows is None else rows]
    else:
        places = heads.EntropyAlarm(rows=rows)._sampled_queries(m)
        assert len(places) == min(m, 5)
        assert int(places[-1]) == m - 1
    found = heads.EntropyAlarm(rows=rows).check(case.A)
    entropy, share = level(case, places)
    close(found.entropy, entropy, atol=1e-9, rtol=1e-9)
    close(found.share, share, atol=1e-9, rtol=1e-9)


def test_the_alarm_names_collapsed_heads_alone() -> None:
    sharpness = torch.tensor([0.0, 1.0, 300.0, 2.0]).view(4, 1, 1)
    x = torch.randn(2, 4, 64, 8)
    for mask in (None, attlas.Causal(), attlas.Causal() & attlas.Padding([64, 20], side="left")):
        A = attlas.attend(x * sharpness, x, mask=mask)
        for rows in (None, 16):
            found = heads.EntropyAlarm(rows=rows).check(A)
            assert found.heads == [2]
            assert float(found.share[0]) == pytest.approx(1.0, abs=1e-5)
        assert heads.EntropyAlarm(rows=16).check(A[0]).heads == [2]


def test_a_fall_raises_the_alarm_where_a_level_would_not() -> None:
    x = torch.randn(2, 4, 64, 8)
    calm = attlas.attend(0.1 * x, x)
    fallen = attlas.attend(x * torch.tensor([0.1, 6.0, 0.1, 0.1]).view(4, 1, 1), x)
    alarm = heads.EntropyAlarm(drop=0.3, rows=32)
    before = alarm.check(calm)
    assert before.heads == []
    assert alarm.check(fallen, before).heads == [1]
    assert alarm.check(fallen).heads == []
    assert heads.EntropyAlarm(rows=32).check(fallen, before).heads == []


def test_a_text_without_choice_raises_no_alarm() -> None:
    A = attlas.attend(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4), mask=attlas.Causal())
    assert heads.EntropyAlarm().check(A).heads == []
    assert heads.EntropyAlarm(rows=3).check(A).heads == []


def test_the_alarm_reads_the_rows_it_says_and_no_others() -> None:
    seen = []

    class Counting(attlas.ScaledDot):
        def forward(self, q: Tensor, k: Tensor, at: attlas.Tile) -> Tensor:
            seen.append(at.shape[2] * at.shape[3])
            return super().forward(q, k, at)

        def as_dot(self, q: object, k: object) -> None:
            return None

    q = torch.randn(1, 1, 400, 8)
    A = attlas.attend(q, q, Counting())
    seen.clear()  # a class of the user's is run on a few cells, to find the tensors that it reads
    heads.EntropyAlarm(rows=8).check(A)
    assert sum(seen) == 3 * 8 * 400


def test_qk_clip_wants_a_matrix_or_a_tensor() -> None:
    assert refusal(attlas.DtypeError, lambda: heads.qk_clip(attlas.Atlas())) == "qk_clip(): an Atlas"


def test_clipping_reads_numbers_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs beside a training, at lengths where no read could carry a gradient."""
    monkeypatch.setattr("attlas.engine.autodiff.graph.DENSE_LIMIT", 40)
    q = torch.randn(1, 2, 6, 4, requires_grad=True)
    factors = heads.qk_clip(attlas.attend(q, q), threshold=0.1)
    assert not factors.query.requires_grad
