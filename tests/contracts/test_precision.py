"""Low precision is judged by a budget: at most twice the error of the plain formula in that precision, and rounding."""

from __future__ import annotations

import copy
import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

import attlas
from attlas import Plan, stats
from attlas.engine.backends.native import library

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
NAMES = ["ScaledDot", "SoftCap", "Cosine", "Gaussian", "Gaussian(wide)", "Laplace", "Epanechnikov", "Additive",
         "Bilinear(up)", "Alibi", "RelativeBias", "own"]  # fmt: skip
SIZES = {"batch": 1, "heads": 4, "key_heads": 2, "value_heads": 2, "value_size": 8}


def within_budget(
    found: Tensor, plain: Tensor, exact: Tensor, dtype: torch.dtype, what: str, steps: float = 1.0
) -> None:
    """Compare the largest errors of whole tensors: single cells of a plain sum may be right by luck."""
    assert found.shape == exact.shape
    assert bool(found.isfinite().all()), what
    error, allowed = ((t.double() - exact).abs().max().item() for t in (found, plain))
    rounding = steps * torch.finfo(dtype).eps * exact.abs().max().item()
    assert error <= 2 * allowed + rounding, f"{what}: error {error:.3g}, plain {allowed:.3g}, rounding {rounding:.3g}"


LEARNED = {
    "bandwidth": attlas.Gaussian,
    "bandwidth of a distance": attlas.Laplace,
    "temperature of each head": lambda t: t.reshape(1).expand(2) * attlas.ScaledDot(),
    "score_mod": lambda t: lambda s, b, h, i, j: s * t + 5.0 * t,
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [3, 16])
@pytest.mark.parametrize("name", LEARNED)
def test_a_parameter_of_16_bit_tokens_is_as_exact_as_its_tokens(name: str, size: int, dtype: torch.dtype) -> None:
    """Queries far from all keys: what all scores of a row have in common must cancel."""
    random = torch.Generator().manual_seed(1)
    tokens = [(torch.randn(1, 2, 400, size, generator=random) + far).to(dtype) for far in (8, 0, 0)]
    slope = torch.randn(1, 2, 400, size, generator=random).to(dtype)

    def gradient(kind: torch.dtype) -> Tensor:
        t = torch.tensor(3.0 if "bandwidth" in name else 0.5, requires_grad=True)
        q, k, v = (x.to(kind) for x in tokens)
        out = attlas.attend(q, k, score=LEARNED[name](t), mask=attlas.Causal()) @ v
        return torch.autograd.grad(out, t, slope.to(kind))[0]

    error = (gradient(dtype) / gradient(torch.float64) - 1).abs().item()
    assert error < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("plan", ["auto", "tiled"])
def test_budget(dtype: str, name: str, plan: str, make: Any, sizes: Any) -> None:
    low = DTYPES[dtype]
    case = make(name, "Causal", sizes(96, 128, **SIZES), sink=True)
    tensors = [t.detach().to(low) for t in (case.q, case.k, case.v, case.sink)]
    fast = [t.clone().requires_grad_() for t in tensors]
    slow = [t.double().requires_grad_() for t in tensors]
    naive = [t.clone().requires_grad_() for t in tensors]
    chosen = Plan() if plan == "auto" else Plan("tiled", rows=40, columns=50)

    def attend(given: list[Tensor], score: attlas.Score, plan: Plan) -> tuple[attlas.AttentionMatrix, Tensor]:
        A = attlas.attend(given[0], given[1], score=score, mask=attlas.Causal(), sink=given[3], plan=plan)
        return A, A @ given[2]

    def plain(given: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the formula with every step rounded to the low precision."""
        q, k, v, sink = given
        k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        i, j = torch.arange(96).view(-1, 1), torch.arange(128).view(1, -1)
        score = copy.deepcopy(case.score).to(low)
        logits = case.score_case.formula(score, q, k, j - i - 32, case.sizes).to(low)
        logits = logits.masked_fill(j > i + 32, -torch.inf)
        logits = torch.cat([logits, sink.view(1, -1, 1, 1).expand(1, 4, 96, 1)], -1)
        weights = torch.softmax(logits, -1)[..., :-1]
        return weights @ v, weights, torch.logsumexp(logits, -1)

    A, found = attend(fast, copy.deepcopy(case.score).to(low), chosen)
    B, exact = attend(slow, copy.deepcopy(case.score).to(low).double(), Plan("reference"))
    rough, rough_weights, rough_lse = plain(naive)
    assert found.dtype is low
    within_budget(found, rough, exact, low, "output")
    assert A.lse.dtype is A[:, :, :, :].dtype is torch.float32
    within_budget(A.lse, rough_lse, B.lse, low, "lse")
    # A weight is exp(logit - lse): the rounding of both comes on top, in units of their size.
    steps = 1 + B.lse.abs().max().item()
    within_budget(A[:, :, :, :], rough_weights, B[:, :, :, :], low, "weights", steps)

    slope = torch.randn(exact.shape, dtype=low)
    gradients = [
        torch.autograd.grad(out, given, slope.to(out.dtype))
        for out, given in ((found, fast), (rough, naive), (exact, slow))
    ]
    for label, a, b, c in zip(("q", "k", "v", "sink"), *gradients, strict=True):
        assert a.dtype is low
        # The backward computes weights again in float32, as above: in half precision that is no error at all.
        within_budget(a, b, c, low, f"gradient of {label}", steps if low is torch.float32 else 1.0)


@pytest.mark.parametrize("dtype", list(DTYPES))
def test_budget_of_the_transposed_product(dtype: str) -> None:
    low = DTYPES[dtype]
    q, k, x = (torch.randn(1, 2, 200, 16).to(low) for _ in range(3))
    exact = torch.softmax(q.double() @ k.double().mT / 4, -1).mT @ x.double()
    plain = torch.softmax(q @ k.mT / 4, -1).mT @ x
    found = attlas.attend(q, k).mT @ x
    assert found.dtype is low
    within_budget(found, plain, exact, low, "A.mT @ x")


@pytest.mark.parametrize("dtype", list(DTYPES))
@pytest.mark.parametrize("plan", [Plan(), Plan("tiled", columns=64)], ids=["auto", "tiled"])
def test_long_rows_add_up(dtype: str, plan: Plan) -> None:
    """Sums of 20,000 small weights: half precision would stop at 2,048 equal terms."""
    low = DTYPES[dtype]
    q, k, v = torch.zeros(1, 1, 2, 4).to(low), torch.randn(1, 1, 20_000, 4).to(low), torch.ones(1, 1, 20_000, 1).to(low)
    A = attlas.attend(q, k, plan=plan)
    torch.testing.assert_close((A @ v).float(), torch.ones(1, 1, 2, 1))
    torch.testing.assert_close(A.lse, torch.full((1, 1, 2), 20_000.0).log(), rtol=1e-5, atol=0)


def test_reads_are_exact_whatever_the_dtype() -> None:
    q, k = (torch.randn(1, 2, 50, 16).bfloat16() for _ in range(2))
    for score in (attlas.ScaledDot(), attlas.Gaussian(4.0), attlas.Laplace(8.0)):
        assert attlas.attend(q, k, score=score).check() < 1e-6


def test_a_far_cloud_keeps_its_digits() -> None:
    """A Gaussian of points far from 0: the dot-product form would lose all digits, and must not be taken."""
    q, k, v = torch.randn(1, 1, 30, 16) + 1e4, torch.randn(1, 1, 40, 16) + 1e4, torch.randn(1, 1, 40, 3)
    distance = (q.double().unsqueeze(-2) - k.double().unsqueeze(-3)).square().sum(-1)
    for h in (0.5, 1.0, 3.0):
        wanted = torch.softmax(-0.5 * distance / h**2, -1)
        A = attlas.attend(q, k, score=attlas.Gaussian(h))
        torch.testing.assert_close(A[:, :, :, :].double(), wanted, rtol=0, atol=2e-5)
        torch.testing.assert_close((A @ v).double(), wanted @ v.double(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "name", ["ScaledDot", "Additive", "Bilinear(up)", "Gaussian(wide, learn)", "RelativeBias", "own"]
)
@pytest.mark.parametrize("plan", [Plan(), Plan("tiled", rows=5, columns=7)], ids=["auto", "tiled"])
def test_autocast_casts_the_arguments_and_nothing_else(name: str, plan: Plan, make: Any, sizes: Any, same: Any) -> None:
    """Inside, torch.autocast would make every matrix product one in half precision, and rows would sum to 1.01."""
    case = make(name, "Causal", sizes(11, 14), sink=True)
    q, k, v, sink = (t.detach().float().requires_grad_() for t in (case.q, case.k, case.v, case.sink))
    score = copy.deepcopy(case.score).float()
    dtype = torch.bfloat16 if score.rounds_tokens else torch.float32

    def run(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> list[Tensor]:
        A = attlas.attend(q, k, score=score, mask=attlas.Causal(), sink=sink, plan=plan)
        attlas.explain(A)
        reads = attlas.attend(q, k, score=score, mask=attlas.Causal(), plan=plan)
        return [A @ v, A.mT @ x, A[0, 1, 3, :], reads.lse, reads.to_dense(), reads.sum(-2)]

    x = torch.randn(11, 2)
    out, down, *others = run(*(t.to(dtype) for t in (q, k, v, x)))
    wanted = [out.bfloat16(), down.bfloat16(), *others]
    with torch.autocast("cpu", torch.bfloat16):
        found = run(q, k, v, x)
    # Backward outside of autocast, as torch asks for.
    for results in (found, wanted):
        results += torch.autograd.grad(results[0].sum() + results[1].sum(), (q, k, v, sink))
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype is b.dtype
        torch.testing.assert_close(a, b)


MIXED = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16])
def test_autocast_casts_as_it_does_for_torchs_attention(to: torch.dtype) -> None:
    """Of all mixtures of dtypes, attlas takes and refuses those that torch's function does, with its dtypes."""
    q, k, v = torch.randn(3, 1, 2, 9, 8).unbind()
    bias = torch.randn(9, 9)
    for dtypes in itertools.product(MIXED, repeat=3):
        leaves = [t.to(dtype).requires_grad_() for t, dtype in zip((q, k, v), dtypes, strict=True)]
        results: list[Any] = []
        for attention in (functional.scaled_dot_product_attention, attlas.attention):
            mask = {"attn_mask": bias} if attention is functional.scaled_dot_product_attention else {"mask": bias}
            mask = {} if torch.float64 in dtypes else mask  # torch rounds the mask of float64 tokens, and refuses it
            try:
                with torch.autocast("cpu", dtype=to):
                    out = attention(*leaves, **mask)
                results.append([out, *torch.autograd.grad(out.float().sum(), leaves)])
            except (RuntimeError, attlas.DtypeError):
                results.append("refused")
        wanted, found = results
        assert (wanted == "refused") == (found == "refused"), dtypes
        if found == "refused":
            continue
        for a, b in zip(found, wanted, strict=True):
            assert a.dtype is b.dtype, dtypes
            torch.testing.assert_close(a, b, atol=0.06, rtol=0.05)


def test_autocast_of_a_matrix_that_was_made_outside() -> None:
    """The tokens stay as they were; values follow them, and a product has the dtype that torch's would have."""
    q, k, v = torch.randn(3, 2, 9, 8).unbind()
    A = attlas.attend(q, k)
    wanted = A @ v
    with torch.autocast("cpu", torch.bfloat16):
        for values in (v, v.half()):
            out = A @ values
            assert out.dtype is torch.matmul(A.to_dense(), values).dtype is torch.bfloat16
            torch.testing.assert_close(out, wanted.bfloat16(), atol=0.01, rtol=0.01)
        assert torch.einsum("hij,hjd->hid", A, v).dtype is torch.bfloat16
        inside = attlas.attend(q, k)
        with torch.autocast("cpu", enabled=False):
            assert torch.equal(A @ v, wanted)
            with pytest.raises(attlas.DtypeError, match="same dtype"):
                inside @ v
    assert inside.q.dtype is torch.bfloat16


class Near(attlas.Score):
    """A score of one's own, of which torch.autocast knows nothing."""

    def forward(self, q: Tensor, k: Tensor, at: Any) -> Tensor:
        return -(q.unsqueeze(-2) - k.unsqueeze(-3)).abs().sum(-1)


def test_autocast_rounds_the_tokens_of_products_only() -> None:
    half = [
        None, attlas.ScaledDot(), attlas.SoftCap(attlas.ScaledDot(), 5.0), attlas.ScaledDot() + attlas.Alibi(2),
        attlas.Additive(8, 8, 4), 0.5 * attlas.Bilinear(8, 8), lambda s, b, h, i, j: s - i,
    ]  # fmt: skip
    full = [
        attlas.Gaussian(1.0), attlas.Laplace(1.0), attlas.Boxcar(4.0), attlas.Cosine(), Near(), -1.0 * Near(),
        attlas.ScaledDot() + attlas.Gaussian(1.0), type("Own", (attlas.ScaledDot,), {"forward": Near.forward})(),
    ]  # fmt: skip
    q, k, v = torch.randn(3, 1, 2, 9, 8).unbind()
    with torch.autocast("cpu", torch.bfloat16):
        for dtype, scores in ((torch.bfloat16, half), (torch.float32, full)):
            for score in scores:
                A = attlas.attend(q, k.bfloat16(), score=score)
                assert A.q.dtype is A.k.dtype is dtype, score
                assert (A @ v).dtype is (A @ v.bfloat16()).dtype is torch.bfloat16


def test_autocast_in_a_compiled_program() -> None:
    q, k, v = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8).bfloat16(), torch.randn(1, 2, 9, 8)
    compiled = torch.compile(attlas.attention, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found, wanted = compiled(q, k, v), attlas.attention(q, k, v)
    assert found.dtype is wanted.dtype is torch.bfloat16
    torch.testing.assert_close(found, wanted, atol=0.02, rtol=0.02)


def test_the_default_device_and_dtype_change_nothing() -> None:
    """Tensors that the library makes for itself follow q, not what torch makes by default."""
    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 12, 8), torch.randn(2, 2, 12, 3)
    long = torch.randn(1, 2, 150, 4), torch.randn(1, 1, 160, 4), torch.randn(1, 1, 160, 3)
    up = torch.randn(1, 2, 150, 3)
    masks = [None, attlas.Causal(), attlas.from_function(lambda b, h, i, j: (i + 2 * j) % 5 > 0)]
    scores = [attlas.ScaledDot(), attlas.SoftCap(attlas.ScaledDot(), 3.0), attlas.Laplace(1.0), attlas.Boxcar(2.0)]

    def large() -> list[Tensor]:
        """Return what the compiled kernels are asked for."""
        found = []
        for mask, score in itertools.product(masks, scores):
            leaf = [t.detach().requires_grad_() for t in long]
            A = attlas.attend(leaf[0], leaf[1], score=score, mask=mask, sink=None)
            found += torch.autograd.grad(A @ leaf[2], leaf, up)
            wanted = stats.Entropy(), stats.EffectiveKeys(), stats.MaxWeight(), stats.ColumnMass(mean=True)
            blocks = stats.Picture(7, 9), stats.Spans([(0, 9)], [(3, 20), (20, 150)]), stats.Offsets(mean=True)
            found += attlas.attend(*long[:2], score=score, mask=mask).collect(*wanted, *blocks, stats.Coverage())
            found.append(attlas.attend(long[0][:, :, :1], long[1], score=score) @ long[2])
        return found

    def run() -> list[Tensor]:
        found = []
        for mask in (None, attlas.Causal()):
            A = attlas.attend(q, k, score=attlas.Gaussian(2.0), mask=mask)
            found += [A @ v, A.mT @ q, A.lse, A[:, [2, 0]].to_dense(), A[..., ::2, [1, 3]], A[..., [1, 2], [3, 4]]]
            found += [A.sum(-1), A.sum(-2), A.topk(2).values, A[0, 1, 3, :], torch.tensor(A.check(), device="cpu")]
        return large() + found

    wanted = run()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = run()
    finally:
        torch.set_default_dtype(torch.float32)
    for a, b in zip(found[:-1], wanted[:-1], strict=True):
        assert a.device.type == "cpu"
        torch.testing.assert_close(a, b, check_dtype=False, equal_nan=True)  # blocks that see nothing


@pytest.mark.parametrize("largest", [18.0, 928.0, 1e4, 1e6])
@pytest.mark.parametrize("before", ["nothing", "lse", "product", "statistic"])
def test_confident_heads_are_as_exact_as_softmax(before: str, largest: float) -> None:
    """However large logits are, weights are as near to the definition as torch's softmax of the same logits."""
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, t, 16, generator=random) for t in (90, 130, 130))
    size = (largest / (q @ k.mT / 4).abs().max()).sqrt()
    q, k = q * size, k * size
    exact = torch.softmax(q.double() @ k.double().mT / 4, -1)
    slack = 4 * float((torch.softmax(q @ k.mT / 4, -1).double() - exact).abs().max()) + 3e-7
    A = attlas.attend(q, k, mask=attlas.Padding([130]))
    uses = {"lse": lambda: A.lse, "product": lambda: A @ v, "statistic": lambda: stats.entropy(A)}
    uses.get(before, lambda: None)()
    close = partial(torch.testing.assert_close, rtol=0, atol=slack, check_dtype=False)
    close(A.to_dense(), exact)
    close(A[..., 3:40], exact[..., 3:40])
    close(A.sum(-1), torch.ones(1, 2, 90))
    close(A.sum(-2), exact.sum(-2), atol=90 * slack)
    close(A.amax(-1), exact.amax(-1))
    close(A.topk(3).values, exact.topk(3).values)
    close(A @ v, exact @ v.double(), atol=4 * slack)
    for plan in ("auto", "tiled", "native"):
        if plan == "native" and not library.available():
            continue
        weights = attlas.attend(q.clone().requires_grad_(), k, plan=attlas.Plan(plan))
        leaf = v.clone().requires_grad_()
        (found,) = torch.autograd.grad((weights @ leaf).sum(), leaf)
        close(found, exact.sum(-2).unsqueeze(-1).expand(found.shape), atol=90 * slack)


def test_numbers_of_rows_are_the_same_after_a_product() -> None:
    """The log-sum-exp of torch's kernel is rounded to float32: the kernels' numbers of rows do not take it from there.

    Tiles of plain torch do: below 8, where they do, it is rounded by at most 2.4e-7.
    """
    rtol = 0.0 if library.available() else 1e-6
    q, k, v = (torch.randn(2, 4, 50, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    A, B = (attlas.attend(q, k, mask=attlas.Causal()) for _ in range(2))
    B @ v
    asked = stats.EffectiveKeys(), stats.Entropy(), stats.TopK(4)
    for found, wanted in zip(B.collect(*asked), A.collect(*asked), strict=True):
        torch.testing.assert_close(found, wanted, rtol=rtol, atol=0)


def test_statistics_of_tiles_beside_those_of_kernels() -> None:
    """Two backends round a logit of 20 differently: tiles do not take the log-sum-exp of the kernels for it."""
    q, k = (torch.randn(2, 4, 50, 16, generator=torch.Generator().manual_seed(i)) for i in range(2))
    asked = stats.Entropy(), stats.ColumnMass(rows=slice(5, 40)), stats.ColumnMax(rows=slice(5, 40))
    found = attlas.attend(4 * q, k, mask=attlas.Causal()).collect(*asked)
    exact = attlas.attend(4 * q.double(), k.double(), mask=attlas.Causal()).collect(*asked)
    for one, true in zip(found, exact, strict=True):
        assert ((one - true).abs() / true.abs().clamp(min=1.0)).max() < 1e-6
