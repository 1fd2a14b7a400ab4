"""Every answer against the same weights by their definition, for masks, sizes and dtypes of every kind."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.view.cases import CASES, Case, ask, causal, facts, make, numbers

import attlas
from attlas.view import Service
from attlas.view.codes import LOG2_MIN, decode
from attlas.view.pyramid import TRACKS, levels_of

RELATIVE = 5e-4  # of a code
PICTURES = [(head, variant) for head in (0, "mean") for variant in ("plain", "nosink")]


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]()


@pytest.fixture
def service(case: Case) -> Iterator[Service]:
    opened = Service(case.A)
    yield opened
    opened.close()


def tolerance(case: Case) -> float:
    """Return how far float32 weights may be from exact ones, relative: exp doubles the error of a large logit."""
    return 3e-7 * (10 + float(np.abs(case.logits).max(initial=0)))


def blocks(weights: np.ndarray, allowed: np.ndarray, size: int, pool: str) -> tuple[np.ndarray, np.ndarray]:
    """Pool whole matrices by the definition, block by block."""
    m, n = weights.shape
    high, wide = -(-m // size), -(-n // size)
    pad = ((0, high * size - m), (0, wide * size - n))
    cells = np.pad(allowed, pad).reshape(high, size, wide, size)
    values = np.pad(weights, pad).reshape(high, size, wide, size)
    counts = cells.sum((1, 3))
    pooled = values.max((1, 3), initial=0.0) if pool == "max" else values.sum((1, 3)) / np.maximum(counts, 1)
    return pooled, counts > 0


def assert_codes(codes: np.ndarray, weights: np.ndarray, allowed: np.ndarray, slack: float = 0.0) -> None:
    """Check codes: masked, zero and not, and each weight within half a thousandth."""
    assert ((codes == 0) == ~allowed).all()
    large = weights >= 2.0**LOG2_MIN * 1.001
    assert (codes[allowed & (weights < 2.0**LOG2_MIN * 0.999)] == 1).all()
    assert (codes[allowed & large] >= 2).all()
    assert (codes < 65535).all()
    np.testing.assert_allclose(decode(codes)[large], weights[large], rtol=RELATIVE + slack)


def whole_level(service: Service, m: int, n: int, level: int, **parameters: Any) -> np.ndarray:
    """Put the tiles of a level together, and check that nothing is outside of the matrix."""
    size = 256 << level
    high, wide = -(-m // (1 << level)), -(-n // (1 << level))
    out = np.full((max(-(-m // size), 1) * 256, max(-(-n // size), 1) * 256), 65535, dtype=np.uint16)
    for y in range(out.shape[0] // 256):
        for x in range(out.shape[1] // 256):
            answer = ask(service, "tile", level=level, y=y, x=x, **parameters)
            assert answer.final
            assert answer.progress == 1
            tile = np.frombuffer(answer.body, "<u2").reshape(256, 256)
            out[y * 256 : (y + 1) * 256, x * 256 : (x + 1) * 256] = tile
    assert not out[high:].any()
    assert not out[:, wide:].any()
    return out[:high, :wide]


@pytest.mark.parametrize(("head", "variant"), PICTURES)
@pytest.mark.parametrize("pool", ["mean", "max"])
def test_tiles(case: Case, service: Service, head: Any, variant: str, pool: str) -> None:
    m, n = case.A.shape[2:]
    batch = case.A.shape[0] - 1
    weights, allowed = case.head(batch, head, variant)
    for level in range(levels_of(m, n)):
        codes = whole_level(service, m, n, level, entry=0, batch=batch, head=head, variant=variant, pool=pool)
        assert_codes(codes, *blocks(weights, allowed, 1 << level, pool), tolerance(case))


@pytest.mark.parametrize(("head", "variant"), PICTURES)
def test_rows_columns_and_regions(case: Case, service: Service, head: Any, variant: str) -> None:
    m, n = case.A.shape[2:]
    weights, _ = case.head(0, head, variant)
    slack = {"rtol": tolerance(case), "atol": 1e-37}
    place = {"entry": 0, "head": head, "variant": variant}
    for i in {0, m // 2, m - 1} if m else ():
        np.testing.assert_allclose(numbers(service, "row", i=i, **place), weights[i], **slack)
    for j in {0, n // 2, n - 1} if n else ():
        np.testing.assert_allclose(numbers(service, "column", j=j, **place), weights[:, j], **slack)
    r0, r1, c0, c1 = m // 3, m - m // 5, n // 4, n - n // 6
    region = numbers(service, "region", r0=r0, r1=r1, c0=c0, c1=c1, **place)
    np.testing.assert_allclose(region.reshape(r1 - r0, c1 - c0), weights[r0:r1, c0:c1], **slack)


def entropy(weights: np.ndarray) -> np.ndarray:
    return -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)


@pytest.mark.parametrize(("head", "variant"), PICTURES)
def test_tracks(case: Case, service: Service, head: Any, variant: str) -> None:
    weights, allowed = case.head(0, head, variant)
    seen = allowed.any(-1)
    squares = np.square(weights).sum(-1)
    expected = {
        "entropy": entropy(weights),
        "effective_keys": np.divide(weights.sum(-1) ** 2, squares, out=np.zeros_like(squares), where=squares > 0),
        "max_weight": weights.max(-1, initial=0),
        "column_mass": weights.sum(0),
        "column_max": weights.max(0, initial=0),
    }
    assert tuple(expected) == TRACKS
    for name, values in expected.items():
        answer = ask(service, "track", entry=0, head=head, variant=variant, name=name)
        assert answer.final
        found = np.frombuffer(answer.body, "<f4")
        if not name.startswith("column"):
            assert (np.isnan(found) == ~seen).all()
            found, values = found[seen], values[seen]
        np.testing.assert_allclose(found, values, rtol=10 * tolerance(case), atol=3e-5)


@pytest.mark.parametrize(("head", "variant"), PICTURES)
def test_cells(case: Case, service: Service, head: Any, variant: str) -> None:
    m, n = case.A.shape[2:]
    weights, allowed = case.head(0, head, variant)
    for i, j in {(0, 0), (m - 1, n - 1), (m // 2, n // 3), (m - 1, 0)} if m and n else ():
        found = facts(service, "cell", entry=0, head=head, variant=variant, i=i, j=j)
        assert found["weight"] == pytest.approx(weights[i, j], rel=tolerance(case), abs=1e-37)
        assert found["allowed"] == bool(allowed[i, j])
        if allowed[i].any():
            assert found["row_entropy"] == pytest.approx(entropy(weights[i]), rel=1e-4, abs=1e-5)
        else:
            assert found["row_entropy"] is None
        assert found["column_mass"] == pytest.approx(weights[:, j].sum(), rel=1e-4, abs=1e-7)
        # Weights that float32 cannot tell apart may have either rank; below 1e-37 they are all 0.
        clear = np.abs(weights[i] - weights[i, j]) > 2 * tolerance(case) * weights[i, j] + 1e-37
        above = (weights[i] > weights[i, j]) & clear
        if allowed[i, j]:
            assert above.sum() + 1 <= found["rank"] <= n - ((weights[i] < weights[i, j]) & clear).sum()
        else:
            assert found["rank"] is None
        if head == "mean":
            assert found["logit"] is None
            assert found["lse"] is None
        elif allowed[i, j]:
            assert found["logit"] == pytest.approx(case.logits[0, head, i, j], rel=1e-5, abs=1e-5)
            if case.sink is None or variant == "plain":
                log = np.log(weights[i, j])
                assert np.isinf(log) or found["logit"] - found["lse"] == pytest.approx(log, rel=1e-4, abs=1e-4)
        else:
            assert found["logit"] is None


@pytest.mark.parametrize("variant", ["plain", "nosink"])
def test_pairs(case: Case, service: Service, variant: str) -> None:
    batch, heads, m, n = case.weights.shape
    if 0 in (m, n):
        return
    weights = np.stack([case.head(batch - 1, head, variant)[0] for head in range(heads)])
    place = {"entry": 0, "head": "mean", "batch": batch - 1, "variant": variant}
    for i, j0, j1 in ((0, 0, 1), (m - 1, 0, n), (m // 2, n // 3, n // 2)):
        found = facts(service, "pair", **place, i=i, j0=j0, j1=j1, with_entry=0, with_head=0)
        rows = weights[:, i]
        np.testing.assert_allclose(found["weights"], rows[:, j0:j1].sum(1), rtol=n * tolerance(case), atol=1e-12)
        expected = np.minimum(rows, rows[0]).sum(1)
        np.testing.assert_allclose(found["agreement"], expected, rtol=n * tolerance(case), atol=1e-12)
    assert facts(service, "pair", **place, i=0, j0=0, j1=0)["agreement"] is None


@pytest.mark.parametrize(("head", "variant"), PICTURES)
def test_largest(case: Case, service: Service, head: Any, variant: str) -> None:
    m, n = case.A.shape[2:]
    weights, allowed = case.head(0, head, variant)
    for rows, columns in (((0, m), (0, n)), ((m // 3, m), (0, n // 2)), ((m // 2, m // 2), (0, n))):
        window = dict(zip(("r0", "r1", "c0", "c1"), (*rows, *columns), strict=True))
        found = facts(service, "top", entry=0, head=head, variant=variant, k=7, **window)["cells"]
        inside = np.where(allowed, weights, -1.0)[slice(*rows), slice(*columns)]
        expected = np.sort(inside[inside >= 0].ravel())[::-1][:7]
        np.testing.assert_allclose([w for *_, w in found], expected, rtol=tolerance(case), atol=1e-37)
        assert len({(i, j) for i, j, _ in found}) == len(found)
        for i, j, w in found:
            assert allowed[i, j]
            assert rows[0] <= i < rows[1]
            assert columns[0] <= j < columns[1]
            assert w == pytest.approx(weights[i, j], rel=tolerance(case), abs=1e-37)


@pytest.mark.parametrize("pool", ["mean", "max"])
@pytest.mark.parametrize(("head", "variant"), PICTURES)
def test_thumbnails_of_small_matrices_are_exact(
    case: Case, service: Service, head: Any, variant: str, pool: str
) -> None:
    m, n = case.A.shape[2:]
    answer = ask(service, "thumbnail", entry=0, head=head, variant=variant, pool=pool, size=16)
    assert not answer.sampled
    assert answer.final
    codes = np.frombuffer(answer.body, "<u2").reshape(16, 16)
    weights, allowed = case.head(0, head, variant)
    high, wide = (np.arange(17) * size // 16 for size in (m, n))
    pooled, seen = np.zeros((16, 16)), np.zeros((16, 16), dtype=bool)
    for y in range(16):
        for x in range(16):
            # A matrix smaller than the picture shows each of its cells more than once.
            rows = slice(high[y], max(next((e for e in high[y:] if e > high[y]), m), high[y]))
            columns = slice(wide[x], max(next((e for e in wide[x:] if e > wide[x]), n), wide[x]))
            part, cells = weights[rows, columns], allowed[rows, columns]
            pooled[y, x] = part.max(initial=0) if pool == "max" else part.sum() / max(cells.sum(), 1)
            seen[y, x] = cells.any()
    assert_codes(codes, pooled, seen, tolerance(case))


def test_info(case: Case, service: Service) -> None:
    found = facts(service, "info")
    (entry,) = found["entries"]
    batch, heads, m, n = case.A.shape
    assert (entry["batch"], len(entry["heads"]), entry["m"], entry["n"]) == (batch, heads, m, n)
    assert entry["levels"] == levels_of(m, n)
    assert entry["readable"]
    assert entry["sink"] == (case.sink is not None)
    assert found["codes"] == {
        "masked": 0, "zero": 1, "first": 2, "last": 65534, "pending": 65535, "log2_min": -64, "log2_max": 0,
        "signed": {"last_positive": 32767, "log2_min": -48, "log2_max": 16},
    }  # fmt: skip
    assert (found["format"], found["tile"], found["on_demand_level"]) == (1, 256, 4)
    assert found["text_length"] >= max(m + entry["first_query"], n)
    assert facts(service, "status") == {"jobs": [], "bytes": 0, "packing": 0.0}


def test_heads_and_focus(case: Case, service: Service) -> None:
    _, heads, m, n = case.A.shape
    assert [(row["entry"], row["head"]) for row in facts(service, "heads")["rows"]] == [(0, h) for h in range(heads)]
    level = levels_of(m, n) - 1
    assert facts(service, "focus", entry=0, head=0, level=level, r0=0, r1=m, c0=0, c1=n) == {}


def test_nosink_says_what_is_left_of_a_row() -> None:
    """A head that gives all but 1e-12 to key 0: what remains is found from the logits, not from 1 - w."""
    q, k = torch.ones(1, 1, 4, 1), torch.tensor([27.6, 0.0, 1.0, 2.0]).view(1, 1, 4, 1)
    service = Service(attlas.attend(q, k, scale=1.0))
    row = numbers(service, "row", entry=0, head=0, variant="nosink", i=2)
    expected = np.exp([0.0, 1.0, 2.0]) / np.exp([0.0, 1.0, 2.0]).sum()
    np.testing.assert_allclose(row, [0, *expected], rtol=1e-6)
    service.close()


def test_nosink_of_a_part_keeps_what_the_rest_of_a_row_has() -> None:
    torch.manual_seed(0)
    whole = attlas.attend(torch.randn(1, 2, 40, 8), torch.randn(1, 2, 40, 8), mask=attlas.Causal())
    part = whole.window((5, 40), (3, 20))
    expected = part.to_dense()[0, 1] / (1 - part.to_dense()[0, 1, :, :1])
    expected[:, 0] = 0
    service = Service(part)
    rows = [numbers(service, "row", entry=0, head=1, variant="nosink", i=i) for i in range(35)]
    np.testing.assert_allclose(rows, expected.numpy(), rtol=1e-5, atol=1e-7)
    assert expected[20].sum() < 0.9, "the rest of this row stands outside of the part"
    service.close()


@pytest.mark.parametrize(
    "score",
    [
        lambda: attlas.Gaussian(2.0),
        lambda: attlas.SoftCap(attlas.ScaledDot(), 3.0),
        lambda: attlas.Additive(8, 8, hidden_size=4),
        lambda: attlas.ScaledDot() + attlas.TensorBias(torch.randn(2, 300, 300)),
        lambda: attlas.ScaledDot() + attlas.Alibi(2),
    ],
    ids=["gaussian", "soft cap", "additive", "bias", "alibi"],
)
def test_scores_that_are_more_than_a_dot_product(score: Any) -> None:
    """Windows, bands and sampled rows ask a score about places of the whole matrix."""
    torch.manual_seed(0)
    q, k = torch.randn(1, 2, 300, 8), torch.randn(1, 2, 300, 8)
    with torch.no_grad():
        A = attlas.attend(q, k, score=score(), mask=attlas.Causal())
        dense = A.to_dense().double().numpy()
    service = Service(A)
    allowed = np.tri(300, dtype=bool)
    for head in (0, 1, "mean"):
        weights = dense[0].mean(0) if head == "mean" else dense[0, head]
        for level in (0, 1):
            codes = whole_level(service, 300, 300, level, entry=0, head=head)
            assert_codes(codes, *blocks(weights, allowed, 1 << level, "mean"), 1e-4)
        found = numbers(service, "track", entry=0, head=head, name="column_mass")
        np.testing.assert_allclose(found, weights.sum(0), rtol=1e-4)
        np.testing.assert_allclose(numbers(service, "row", entry=0, head=head, i=299), weights[299], rtol=1e-4)
    service.close()


def test_one_matrix_of_two_axes() -> None:
    A = make(40, 40, **causal(40, 40)).A
    service = Service(A[0, 1], title="one head")
    info = facts(service, "info")
    assert info["title"] == "one head"
    assert info["entries"][0]["heads"] == [1]
    assert info["entries"][0]["causal"]
    row = numbers(service, "row", entry=0, head=0, i=30)
    np.testing.assert_allclose(row, A[0, 1, 30, :].numpy(), rtol=1e-6)
    service.close()
