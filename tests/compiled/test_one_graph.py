"""Every mask, score, product, statistic and read compiled as one graph: values and gradients of the plain program."""

from __future__ import annotations

import pytest
import torch
from tests.compiled.programs import HEADS, MASKS, Program, compare, numbers, scores, tokens

import attlas
from attlas import stats

pytestmark = pytest.mark.filterwarnings("ignore:.*in_place=False.*")
C = attlas.Causal()


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str) -> None:
    graphs = compare(Program(lambda q, k, v: attlas.attention(q, k, v, mask=MASKS[name])), tokens())
    assert bool(graphs.of_attlas) == (not graphs.dense), graphs.names


@pytest.mark.parametrize("name", scores())
def test_scores(name: str) -> None:
    program = Program(lambda q, k, v, score: attlas.attention(q, k, v, score, mask=attlas.Window(9, 2)), scores()[name])
    graphs = compare(program, tokens())
    assert graphs.of_attlas == {"pool"}
    assert not graphs.dense


STATISTICS = {
    "RowMass": stats.RowMass(),
    "Entropy": stats.Entropy(),
    "EffectiveKeys": stats.EffectiveKeys(),
    "MaxWeight": stats.MaxWeight(),
    "MaxLogit": stats.MaxLogit(),
    "LogitMoments": stats.LogitMoments(),
    "ColumnMass": stats.ColumnMass(),
    "ColumnMass of some queries": stats.ColumnMass(slice(3, 20), mean=True),
    "ColumnMax": stats.ColumnMax(range(2, 9)),
    "ColumnArgMax": stats.ColumnArgMax(),
    "TopK": stats.TopK(3),
    "ArgMax": stats.ArgMax(),
    "TailMass": stats.TailMass(2),
    "Coverage": stats.Coverage((0.5, 0.9)),
    "Picture": stats.Picture(3, 4, "mean", (2, 20), None),
    "Picture of maxima": stats.Picture(3, 4, "max"),
    "KeyMaps": stats.KeyMaps([2, 0, 7], queries=slice(2, 15)),
    "Offsets": stats.Offsets(mean=True),
    "Spans": stats.Spans([(0, 5), slice(4, 9)], [range(3), (1, 20)]),
}


def flat(results):
    """Return the tensors of results in order."""
    return [t for result in results for t in ((result,) if isinstance(result, torch.Tensor) else result)]


def first_rows_mask():
    """Return a mask in which each query sees a few keys, so that no two weights of a row are equal at 0."""
    return attlas.Prefix(5) | attlas.Causal()


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics(name: str) -> None:
    mask = first_rows_mask()
    program = Program(lambda q, k, v: flat(attlas.attend(q, k, mask=mask).collect(STATISTICS[name])))
    graphs = compare(program, tokens())
    assert graphs.of_attlas == {"statistics"}
    assert not graphs.dense


def test_every_statistic_is_tested() -> None:
    exported = {name for name in stats.__all__ if isinstance(getattr(stats, name), type)}
    abstract = {"CellGradient", "Largest", "Moments", "Part", "Statistic"}
    assert exported - abstract == {type(s).__name__ for s in STATISTICS.values()} | {"Pooled"}


def test_several_statistics_are_one_operator() -> None:
    def f(q, k, v, score):
        A = attlas.attend(q, k, score, mask=C)
        return flat(A.collect(stats.Entropy(), stats.ArgMax(), stats.Pooled(v), stats.TopK(2), stats.MaxWeight()))

    for name in ("SoftCap", "buckets", "Bilinear", "Gaussian"):
        graphs = compare(Program(f, scores()[name]), tokens())
        assert graphs.of_attlas == {"statistics"}


@pytest.mark.parametrize("name", scores())
def test_statistics_of_scores(name: str) -> None:
    def f(q, k, v, score):
        A = attlas.attend(q, k, score, mask=attlas.Window(9, 2))
        return [*flat(A.collect(stats.Entropy(), stats.ColumnMass())), A.lse]

    graphs = compare(Program(f, scores()[name]), tokens())
    assert graphs.of_attlas == {"statistics"}
    assert not graphs.dense


@pytest.mark.parametrize("name", ["ScaledDot", "SoftCap", "buckets", "Bilinear", "Additive", "learned width"])
def test_transposed_products(name: str) -> None:
    def f(q, k, v, score):
        return attlas.attend(q, k, score, mask=C).transposed_product(v)

    graphs = compare(Program(f, scores()[name]), tokens())
    assert graphs.of_attlas == {"pool_transposed"}
    assert not graphs.dense


READS = {
    "all": lambda A: A[:, :, :, :],
    "rows": lambda A: A[:, :, 3:7],
    "one row": lambda A: A[:, :, -1],
    "columns": lambda A: A[..., 2:9],
    "list of rows": lambda A: A[:, :, [5, 2, 2]],
    "step": lambda A: A[:, :, ::5, 1::7],
    "pairs": lambda A: A[:, :, [1, 2, 3], [0, 1, 3]],
    "dense": lambda A: A.to_dense(),
    "log-weights": lambda A: A.logits[..., :, 0],
    "lse": lambda A: A.lse,
}


@pytest.mark.parametrize("name", READS)
def test_reads(name: str) -> None:
    for score in ("ScaledDot", "buckets", "Additive", "Cosine"):
        graphs = compare(
            Program(lambda q, k, v, s: READS[name](attlas.attend(q, k, s, mask=C)), scores()[score]), tokens()
        )
        assert len(graphs.of_attlas) == 1
        assert not graphs.dense


@pytest.mark.parametrize("mask", ["Window", "Documents"])
@pytest.mark.parametrize("score", ["ScaledDot", "SoftCap", "RelativeBias", "Bilinear", "Laplace"])
def test_shapes(mask: str, score: str) -> None:
    """Grouped heads, fewer queries than keys, values of another size, a sink: together."""
    sink = torch.nn.Parameter(numbers(HEADS, seed=7))

    def f(q, k, v, sink, score):
        A = attlas.attend(q, k, score, mask=MASKS[mask], sink=sink)
        return [A.pooled(v), A.collect(stats.Entropy())[0], A.transposed_product(q)]

    graphs = compare(Program(f, scores()[score]), [*tokens(m=10, heads=2, e=8), sink])
    assert graphs.of_attlas == {"pool", "statistics", "pool_transposed"}
    assert not graphs.dense


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("score", ["ScaledDot", "RelativeBias", "Bilinear", "Cosine", "Gaussian"])
def test_dtypes(dtype: torch.dtype, score: str) -> None:
    def f(q, k, v, score):
        A = attlas.attend(q, k, score, mask=attlas.Window(9, 2))
        return [A.pooled(v), A.collect(stats.Entropy())[0]]

    own = scores()[score]
    coarse = {"atol": 3e-2, "rtol": 3e-2} if dtype.itemsize < 4 else {}
    graphs = compare(Program(f, own.double() if dtype is torch.float64 else own), tokens(dtype=dtype), **coarse)
    assert graphs.of_attlas == {"pool", "statistics"}


@pytest.mark.parametrize("score", ["ScaledDot", "SoftCap", "RelativeBias", "Gaussian"])
def test_drops_are_those_of_the_plain_call(score: str) -> None:
    def f(q, k, v, score):
        return attlas.attention(q, k, v, score, mask=C, dropout_p=0.3)

    program = Program(f, scores()[score])
    given = tokens()
    torch.manual_seed(3)
    wanted = attlas.attention(*given, program.score, mask=C, dropout_p=0.3)
    torch.manual_seed(3)
    found = torch.compile(program, backend="aot_eager", fullgraph=True)(*given)
    torch.testing.assert_close(found, wanted)
    slopes = torch.autograd.grad(wanted.square().sum(), given)
    for a, b in zip(torch.autograd.grad(found.square().sum(), given), slopes, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)
