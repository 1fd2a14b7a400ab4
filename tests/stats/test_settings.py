"""Texts of what is refused, statistics of a user's own, and the gradient of every setting."""

import pytest
import torch
from tests.messages import refusal

import attlas
from attlas import stats
from attlas.errors import AttlasError, ShapeError


def small():
    return attlas.attend(torch.zeros(4, 4), torch.zeros(8, 4))


MESSAGES = {
    "k below 1": (lambda: stats.TopK(0), "TopK(): k = 0"),
    "k not whole": (lambda: stats.topk(small(), 2.0), "TopK(): k = 2.0"),
    "k a bool": (lambda: stats.tail_mass(small(), True), "TailMass(): k = True"),
    "k above n": (lambda: stats.topk(small(), 9), "TopK(): k = 9, n = 8"),
    "tail above n": (lambda: stats.tail_mass(small(), 9), "TailMass(): k = 9, n = 8"),
    "no keys": (
        lambda: attlas.attend(torch.zeros(4, 4), torch.zeros(0, 4)).collect(stats.ArgMax()),
        "ArgMax(): k = 1, n = 0",
    ),
    "no queries": (
        lambda: attlas.attend(torch.zeros(0, 4), torch.zeros(4, 4)).collect(stats.ColumnArgMax()),
        "ColumnArgMax(): m = 0 queries",
    ),
    "no level": (lambda: stats.Coverage(()), "Coverage(): levels = ()"),
    "level in per cent": (lambda: stats.Coverage((0.9, 95)), "Coverage(): levels = (0.9, 95)"),
    "level 0": (lambda: stats.Coverage((0.0,)), "Coverage(): levels = (0.0,)"),
    "rows with a step": (lambda: stats.ColumnMass(rows=slice(0, 4, 2)), "ColumnMass(): rows = slice(0, 4, 2)"),
    "rows no slice": (lambda: stats.ColumnMax(rows=3), "ColumnMax(): rows = 3"),
    "rows out of range": (
        lambda: stats.column_mass(small(), rows=slice(0, 5)),
        "ColumnMass(): rows = slice(0, 5, None)",
    ),
    "heads unknown": (lambda: stats.column_mass(small(), heads="max"), "column_mass(): heads = 'max'"),
    "no heads": (
        lambda: stats.column_max(small(), heads="mean"),
        "column_max(): heads = 'mean', and A has no leading axis",
    ),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_messages(name):
    make, text = MESSAGES[name]
    assert refusal(ShapeError, make) == text


def all_statistics(m, n):
    return {
        "entropy": stats.Entropy(),
        "effective_keys": stats.EffectiveKeys(),
        "row_mass": stats.RowMass(),
        "max_weight": stats.MaxWeight(),
        "max_logit": stats.MaxLogit(),
        "moments": stats.LogitMoments(),
        "argmax": stats.ArgMax(),
        "topk": stats.TopK(5),
        "tail": stats.TailMass(5),
        "coverage": stats.Coverage(),
        "column_mass": stats.ColumnMass(rows=slice(3, -1), mean=True),
        "column_max": stats.ColumnMax(),
        "column_argmax": stats.ColumnArgMax(),
        "offsets": stats.Offsets(mean=True),
        "spans": stats.Spans([range(m), (1, m // 2)], [range(n // 2), (n // 3, n)]),
        "maps": stats.KeyMaps([0, -1, 1], queries=slice(1, None)),
        "picture": stats.Picture(9, 11),
        "picture max": stats.Picture(9, 11, "max"),
    }


def test_alone_or_together_is_the_same():
    q, k = torch.randn(2, 2, 61, 8), torch.randn(2, 1, 67, 8)

    def collected(names):
        A = attlas.attend(q, k, mask=attlas.Causal())
        return dict(zip(names, A.collect(*(wanted[name] for name in names)), strict=True))

    wanted = all_statistics(61, 67)
    together, backwards = collected([*wanted]), collected([*reversed(wanted)])
    for name, result in together.items():
        for other in (backwards[name], collected([name])[name]):
            torch.testing.assert_close(other, result, equal_nan=True, rtol=1e-5, atol=1e-6)


def test_a_statistic_can_be_used_again():
    statistic = stats.TopK(3)
    A, B = (attlas.attend(torch.randn(5, 4), torch.randn(9, 4)) for _ in range(2))
    first = A.collect(statistic)[0]
    kept = first.values.clone()
    B.collect(statistic)
    assert torch.equal(first.values, kept)


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 2, 3)])
def test_results_have_the_leading_axes_of_the_matrix(leading):
    A = attlas.attend(torch.randn(*leading, 61, 8), torch.randn(*leading, 67, 8))
    for result in A.collect(*all_statistics(61, 67).values()):
        for t in result if isinstance(result, tuple) else (result,):
            assert t.shape[: len(leading)] == leading


def test_dense_tensors_and_tuples_of_layers():
    """A statistic of a dense tensor is that of its matrix, with the same gradient; of layers, a tuple."""
    q = torch.randn(2, 3, 31, 8, dtype=torch.float64, requires_grad=True)
    A = attlas.attend(q, q[:, :, :17], sink=torch.randn(3, dtype=torch.float64))
    dense = A.to_dense()
    for name, s in all_statistics(31, 17).items():
        if s.of_logits or isinstance(s, stats.Pooled):
            continue
        made = s((A, dense, dense.detach()))
        for t, wanted, plain in zip(
            *(r if isinstance(r, tuple) else (r,) for r in (made[1], made[0], made[2])), strict=True
        ):
            torch.testing.assert_close(t, wanted, equal_nan=True, msg=name)
            torch.testing.assert_close(plain, wanted.detach(), equal_nan=True, msg=name)
            if t.is_floating_point():
                slopes = [
                    torch.autograd.grad(r.nan_to_num().square().sum(), q, retain_graph=True)[0] for r in (t, wanted)
                ]
                torch.testing.assert_close(*slopes, msg=name)
    assert [t.shape for t in stats.column_mass([A, dense], heads="mean")] == [(2, 17)] * 2


NO_WEIGHTS = {
    "negative": torch.full((3, 4), -0.1),
    "sum of 4": torch.ones(3, 4),
    "integers": torch.ones(3, 4).long(),
    "one axis": torch.ones(4),
    "a list": [torch.full((3, 4), -0.1)],
    "a number": 3,
    "a text": "A",
    "nothing": None,
}


@pytest.mark.parametrize("name", NO_WEIGHTS)
def test_what_is_no_matrix_of_weights_is_refused(name):
    with pytest.raises(AttlasError):
        stats.entropy(NO_WEIGHTS[name])


def test_a_dense_tensor_does_not_tell_log_weights():
    with pytest.raises(AttlasError, match="log-weights"):
        stats.max_logit(torch.full((3, 4), 0.25))
