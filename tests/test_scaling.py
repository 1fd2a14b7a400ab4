"""Predictions against measurement, within stated standard errors; the Jacobian against autograd; whole error texts."""

import math

import pytest
import torch
from tests.messages import refusal

import attlas
from attlas import scaling, stats
from attlas.scaling.heads import look_up

KEYS = (1, 2, 16, 512)
VARIANCES = (0.25, 1.0, 8.0, 64.0)


def measures(logits: torch.Tensor) -> dict[str, torch.Tensor]:
    log_p = logits.log_softmax(-1)
    p = log_p.exp()
    return {"entropy": -(p * log_p).sum(-1), "largest": p.amax(-1), "trace": 1 - p.square().sum(-1)}


def jacobian(logits: torch.Tensor) -> torch.Tensor:
    return torch.autograd.functional.jacobian(lambda s: s.softmax(-1), logits)


# ------------------------------------------------------------------------------------------- Gaussian logits, in theory


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("variance", VARIANCES)
def test_expected_is_the_mean_over_gaussian_logits(keys: int, variance: float) -> None:
    generator = torch.Generator().manual_seed(keys + int(100 * variance))
    rows = 4000 if keys == 512 else 40_000
    logits = math.sqrt(variance) * torch.randn(rows, keys, generator=generator, dtype=torch.float64)
    predicted = scaling.expected(keys, variance)
    for name, found in measures(logits).items():
        error = float(found.std()) / math.sqrt(rows)
        assert abs(float(found.mean()) - getattr(predicted, name)) <= 4 * error + 1e-9, name


def test_expected_does_not_depend_on_its_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    from attlas.scaling import gaussian

    coarse = [scaling.expected(100, variance) for variance in (0.3, 3.0, 90.0)]
    monkeypatch.setattr(gaussian, "_GRID_STEP", gaussian._GRID_STEP / 2)
    monkeypatch.setattr(gaussian, "_STEP_DEVIATIONS", gaussian._STEP_DEVIATIONS / 2)
    gaussian._expected_quantities.cache_clear()
    for before in coarse:
        after = scaling.expected(100, before.variance)
        assert after.entropy == pytest.approx(before.entropy, abs=2e-7)
        assert after.trace == pytest.approx(before.trace, abs=2e-7)
        assert after.largest == pytest.approx(before.largest, rel=1e-3)
    gaussian._expected_quantities.cache_clear()


def test_expected_goes_on_without_a_step_beyond_its_table() -> None:
    below, above = scaling.expected(64, 32.0**2), scaling.expected(64, 32.001**2)
    assert above.entropy == pytest.approx(below.entropy, rel=1e-3)
    assert above.trace == pytest.approx(below.trace, rel=1e-3)
    assert scaling.expected(64, 1e12).largest == pytest.approx(1.0, abs=1e-4)


def test_expected_tends_to_the_limit() -> None:
    gaps = [abs(scaling.expected(n, 1.0).entropy - scaling.limit(n, 1.0).entropy) for n in (64, 1024, 16384)]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 1e-3
    frozen = scaling.limit(512, 512.0)
    assert frozen.entropy == 0.0
    assert frozen.trace == pytest.approx(math.sqrt(2 * math.log(512) / 512))
    assert math.isnan(frozen.largest)


def test_expected_of_uniform_weights() -> None:
    assert scaling.expected(8, 0.0) == scaling.Expected(0.0, math.log(8), 1 / 8, 7 / 8)
    assert scaling.expected(1, 5.0) == scaling.Expected(5.0, 0.0, 1.0, 0.0)


# ---------------------------------------------------------------------------------------------------- random vectors


@pytest.mark.parametrize("distribution", sorted(scaling.DISTRIBUTIONS))
def test_variance_is_d_for_every_distribution(distribution: str) -> None:
    found = scaling.study([4, 32, 128], keys=64, queries=128, distribution=distribution, seed=3)
    for row in found.rows:
        assert abs(row.variance.deviations(row.expected.variance)) < 4.5
        assert row.expected.variance == pytest.approx(row.d * row.scale**2)
    for plain, scaled in zip(found.rows[::2], found.rows[1::2], strict=True):
        assert scaled.variance.value == pytest.approx(plain.variance.value / plain.d)
        assert scaled.entropy.value > plain.entropy.value
        assert scaled.largest.value < plain.largest.value
        assert scaled.trace.value > plain.trace.value


def test_entropy_largest_and_trace_are_the_predicted_ones() -> None:
    found = scaling.study([128], keys=256, queries=400, seed=1)
    for row in found.rows:
        for name in ("entropy", "largest", "trace"):
            assert abs(getattr(row, name).deviations(getattr(row.expected, name))) < 4, name


def test_study_is_the_same_again_and_whatever_other_sizes_are_asked() -> None:
    one = scaling.study([16], keys=8, queries=4, seed=5)
    both = scaling.study([4, 16], keys=8, queries=4, seed=5)
    assert one.rows == both.rows[2:]
    assert one.rows != scaling.study([16], keys=8, queries=4, seed=6).rows


def test_study_in_pieces_is_the_study(monkeypatch: pytest.MonkeyPatch) -> None:
    from attlas.scaling import vectors

    monkeypatch.setattr(vectors, "_AT_ONCE", 1)
    found = scaling.study([16], keys=32, queries=100)
    assert abs(found.rows[0].variance.deviations(16.0)) < 4


def test_study_takes_a_sampler() -> None:
    def triangular(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
        return (torch.rand(shape, generator=generator) + torch.rand(shape, generator=generator) - 1) * math.sqrt(6)

    found = scaling.study([32], keys=32, queries=64, distribution=triangular)
    assert found.distribution == "triangular"
    assert abs(found.rows[0].variance.deviations(32.0)) < 4
    assert set(found.table()[0]) == {
        "d", "scale", "variance", "variance_error", "variance_predicted", "entropy", "entropy_error",
        "entropy_predicted", "largest", "largest_error", "largest_predicted", "trace", "trace_error",
        "trace_predicted", "frobenius", "frobenius_error", "frobenius_predicted",
    }  # fmt: skip


# ------------------------------------------------------------------------------------------------------ the Jacobian


@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
def test_jacobian_is_the_one_of_autograd(scale: float) -> None:
    q, k = torch.randn(2, 5, 8, dtype=torch.float64), torch.randn(2, 7, 8, dtype=torch.float64)
    A = attlas.attend(q, k, scale=scale, mask=attlas.Causal())
    trace, frobenius = scaling.jacobian(A)
    logits = A.logits[:, :, :]
    for b in range(2):
        for i in range(5):
            J = jacobian(logits[b, i])
            assert float(trace[b, i]) == pytest.approx(float(J.trace()), abs=1e-6)
            assert float(frobenius[b, i]) == pytest.approx(float(torch.linalg.matrix_norm(J)), abs=1e-6)


def test_jacobian_with_a_sink_is_the_block_of_the_keys() -> None:
    q, k, sink = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 5, 4), torch.tensor([0.7])
    A = attlas.attend(q, k, sink=sink)
    trace, frobenius = scaling.jacobian(A)
    for i in range(3):
        J = jacobian(torch.cat([A.logits[0, 0, i, :], sink]))[:5, :5]
        assert float(trace[0, 0, i]) == pytest.approx(float(J.trace()), abs=1e-6)
        assert float(frobenius[0, 0, i]) == pytest.approx(float(torch.linalg.matrix_norm(J)), abs=1e-6)


def test_jacobian_of_one_key_and_of_none_is_0() -> None:
    A = attlas.attend(torch.randn(3, 4), torch.randn(2, 4), mask=attlas.Causal())  # row 0 sees nothing, row 1 one key
    trace, frobenius = scaling.jacobian(A)
    assert trace[:2].tolist() == frobenius[:2].tolist() == [0.0, 0.0]
    assert float(trace[2]) > 0


def test_jacobian_does_not_depend_on_tiles() -> None:
    q, k = torch.randn(70, 8), torch.randn(90, 8)
    whole = scaling.jacobian(attlas.attend(q, k))
    tiles = scaling.jacobian(attlas.attend(q, k, plan=attlas.Plan(backend="tiled", rows=16, columns=16)))
    torch.testing.assert_close(tuple(tiles), tuple(whole))


# ------------------------------------------------------------------------------------------------------------- heads


def test_without_a_mask_independence_predicts_the_variance_itself() -> None:
    q, k = torch.randn(1, 4, 50, 16) + 1.0, 2.0 * torch.randn(1, 2, 60, 16) - 0.5  # grouped heads
    A = attlas.attend(q, k)
    for head in scaling.heads(A).heads:
        assert head.expected is not None
        assert head.variance == pytest.approx(head.expected.variance, rel=1e-4)
        assert head.variance == pytest.approx(
            float(A.logits[0, head.head, :, :].var(-1, correction=0).mean()), rel=1e-4
        )
        assert head.factor == pytest.approx(head.variance**-0.5)


def test_heads_are_measured_as_the_dense_matrix_is() -> None:
    A = attlas.attend(torch.randn(2, 3, 40, 8), torch.randn(2, 3, 40, 8), mask=attlas.Causal(), scale=1.0)
    found = scaling.heads([A, A])
    assert [(head.layer, head.head) for head in found.heads] == [(la, h) for la in range(2) for h in range(3)]
    for h in range(3):
        dense = measures(A.logits[:, h, :, :].double())
        p = A[:, h, :, :].double()
        entropy = -(p * p.clamp(min=1e-300).log()).sum(-1).mean()
        assert found.heads[h].entropy == pytest.approx(float(entropy), rel=1e-5)
        for name in ("largest", "trace"):
            assert getattr(found.heads[h], name) == pytest.approx(float(dense[name].mean()), rel=1e-5)


def test_independent_heads_are_as_independence_predicts() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 600, 64, generator=generator) for _ in range(2))
    for scale in (None, 0.5):
        head = scaling.heads(attlas.attend(q, k, mask=attlas.Causal(), scale=scale)).heads[0]
        assert head.expected is not None
        assert head.variance == pytest.approx(head.expected.variance, rel=0.02)
        assert head.entropy == pytest.approx(head.expected.entropy, abs=0.06)
        assert head.largest == pytest.approx(head.expected.largest, abs=0.02)
        assert head.trace == pytest.approx(head.expected.trace, abs=0.02)


def test_padding_counts_neither_in_measurement_nor_in_prediction() -> None:
    q, k = torch.randn(1, 2, 30, 8), torch.randn(1, 2, 30, 8)
    k[:, :, 20:] = 100.0
    padded = scaling.heads(attlas.attend(q, k, mask=attlas.Padding(torch.tensor([20])))).heads
    short = scaling.heads(attlas.attend(q, k[:, :, :20])).heads
    for one, other in zip(padded, short, strict=True):
        assert one.variance == pytest.approx(other.variance, rel=1e-4)
        assert one.expected is not None
        assert other.expected is not None
        assert one.expected.variance == pytest.approx(other.expected.variance, rel=1e-4)


def test_scores_that_are_no_dot_product_have_no_prediction() -> None:
    q, k = torch.randn(1, 1, 9, 4), torch.randn(1, 1, 9, 4)
    for score in (attlas.Additive(4, 4, 8), attlas.ScaledDot() + attlas.Alibi([0.5])):
        found = scaling.heads(attlas.attend(q, k, score=score))
        assert found.heads[0].expected is None
        assert found.table()[0]["entropy_predicted"] is None


def test_table_of_predictions_is_close_to_the_integral() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randint(1, 2000, (60,), generator=generator).double()
    variance = torch.exp(8 * torch.rand(60, generator=generator).double() - 4)
    found = look_up(keys, variance)
    for i in range(60):
        exact = scaling.expected(int(keys[i]), float(variance[i]))
        for got, name, close in zip(found, ("entropy", "largest", "trace"), (0.02, 0.005, 0.005), strict=True):
            assert float(got[i]) == pytest.approx(getattr(exact, name), abs=close)


# ------------------------------------------------------------------------------------------------------- temperature


@pytest.mark.parametrize("entropy", [0.3, 1.5, 3.0])
def test_temperature_meets_the_entropy(entropy: float) -> None:
    q, k = torch.randn(2, 4, 40, 8), 3 * torch.randn(2, 2, 40, 8)
    found = scaling.temperature(attlas.attend(q, k), entropy=entropy)
    assert found.factor.shape == (2, 4)
    after = stats.entropy(attlas.attend(q * found.factor[:, :, None, None], k)).mean(-1)
    torch.testing.assert_close(after, torch.full((2, 4), entropy), atol=1e-4, rtol=0)
    torch.testing.assert_close(found.reached, after, atol=1e-4, rtol=0)
    torch.testing.assert_close(found.temperature * found.factor, torch.ones(2, 4))


def test_temperature_leaves_masked_keys_masked() -> None:
    mask = torch.zeros(30, 30).masked_fill(torch.ones(30, 30).triu(1).bool(), -math.inf)  # additive
    q, k = torch.randn(30, 8), torch.randn(30, 8)
    A, B = attlas.attend(q, k, mask=mask), attlas.attend(q, k, mask=attlas.Causal())
    found, same = scaling.temperature(A, variance=2.0), scaling.temperature(B, variance=2.0)
    torch.testing.assert_close(found.factor, same.factor)
    after = attlas.attend(q * scaling.temperature(B, entropy=1.0).factor, k, mask=attlas.Causal())
    assert float(stats.entropy(after).mean()) == pytest.approx(1.0, abs=1e-4)


def test_temperature_meets_the_variance() -> None:
    q, k = torch.randn(3, 50, 16), torch.randn(3, 60, 16)
    found = scaling.temperature(attlas.attend(q, k, scale=1.0))
    after = attlas.attend(q * found.factor[:, None, None], k, scale=1.0).logits.var().mean(-1)
    torch.testing.assert_close(after, torch.ones(3), atol=1e-4, rtol=0)
    assert found.target == "variance"
    assert found.wanted == 1.0


# ------------------------------------------------------------------------------------------------------------ errors


def ones(shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, generator=generator)


A = attlas.attend(torch.zeros(4, 8), torch.ones(4, 8))
SINK = attlas.attend(torch.ones(1, 1, 4, 8), torch.ones(1, 1, 4, 8), sink=torch.zeros(1))
ERRORS = [
    (attlas.ShapeError, lambda: scaling.expected(0, 1.0), "expected(): keys = 0"),
    (attlas.ShapeError, lambda: scaling.expected(2, -1.0), "expected(): variance = -1.0"),
    (attlas.ShapeError, lambda: scaling.study([]), "study(): no size"),
    (attlas.ShapeError, lambda: scaling.study([0]), "study(): sizes has 0"),
    (attlas.ShapeError, lambda: scaling.study([8], keys=1), "study(): keys = 1"),
    (attlas.ShapeError, lambda: scaling.study([8], distribution="cauchy"), "study(): distribution = 'cauchy'"),
    (
        attlas.ShapeError,
        lambda: scaling.study([8], distribution=ones),
        "study(): mean 0.5, variance 0.0829 of 65,536 numbers",
    ),
    (attlas.DtypeError, lambda: scaling.study([8], distribution=3), "study(): an int"),
    (attlas.DtypeError, lambda: scaling.heads([torch.ones(3, 3)]), "heads(): a Tensor"),
    (attlas.DtypeError, lambda: scaling.temperature(torch.ones(3, 3)), "temperature(): a Tensor"),
    (
        attlas.ShapeError,
        lambda: scaling.temperature(A, variance=1.0, entropy=1.0),
        "temperature(): variance = 1.0 and entropy = 1.0",
    ),
    (attlas.ShapeError, lambda: scaling.temperature(A), "temperature(): variance 0 of the logits of one"),
    (
        attlas.ShapeError,
        lambda: scaling.temperature(A, entropy=1.0),
        "temperature(): 1.386 at the best; logits that are equal keep their weights equal",
    ),
    (
        attlas.ShapeError,
        lambda: scaling.temperature(A, entropy=2.0),
        "temperature(): entropy = 2.0, and the mean of ln(allowed keys) is 1.386",
    ),
    (attlas.ShapeError, lambda: scaling.temperature(A, variance=0.0), "temperature(): variance = 0.0"),
    (attlas.ShapeError, lambda: scaling.temperature(SINK, entropy=1.0), "temperature(): a matrix with a sink"),
]


@pytest.mark.parametrize(("error", "call", "text"), ERRORS, ids=[text.split("\n")[0] for _, _, text in ERRORS])
def test_errors_say_what_to_type(error: type[Exception], call: object, text: str) -> None:
    assert refusal(error, call) == text
