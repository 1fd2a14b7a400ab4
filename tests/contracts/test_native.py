"""Every contract again with the kernels: each score that they compute, each mask, output, gradients and reads."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import attlas
from attlas import Plan, explain, stats
from attlas.engine.backend import Request
from attlas.engine.backends.native import library
from attlas.engine.backends.native.backend import FusedKernels
from attlas.engine.backends.sdpa import Sdpa
from attlas.engine.backends.tiled import Tiled
from attlas.engine.held import tensors_of
from attlas.foundation.trees import tensors_in
from attlas.scores.placed import translated_score

NATIVE = Plan("native")
DOTS = (
    "ScaledDot", "ScaledDot(1)", "Cosine", "Gaussian(wide)", "Gaussian(wide, learn)", "Gaussian(wide, leaf)",
    "Bilinear(up)", "Bilinear(down)", "Multiple",
)  # fmt: skip
SIZES = ((1, 1), (19, 23), (23, 19), (33, 130), (128, 5))


@pytest.fixture(params=library.SETS)
def instruction_set(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.delenv("ATTLAS_NATIVE", raising=False)
    if request.param not in library.runnable():
        pytest.skip(f"this processor cannot run {request.param}, or the kernels are not compiled here")
    monkeypatch.setenv("ATTLAS_NATIVE", request.param)
    return request.param


def computes(case: Any) -> bool:
    """Tell whether the kernels compute this problem, as `explain` says it."""
    problem = case.matrix().problem
    return FusedKernels().unsupported(Request(problem, problem.tokens, NATIVE), "output") is None


def test_output_and_gradients(instruction_set: str, mask_name: str, make: Any, sizes: Any, same: Any) -> None:
    for place, (m, n) in enumerate(SIZES):
        for score, sink in (("ScaledDot", place % 2 == 0), ("ScaledDot(1)", place % 2 == 1)):
            case = make(score, mask_name, sizes(m, n), sink=sink)
            if not computes(case):
                assert mask_name.startswith("additive")  # its numbers are a score of their own
                continue
            A = case.matrix(NATIVE)
            assert explain(A).backend == "native"
            _, _, lse, wanted = case.plain()
            out = A @ case.v
            same(out, wanted, "output")
            same(A.lse, lse, "lse")
            leaves = case.leaves()
            slope = case.sizes.random(*out.shape, seed=41)
            found = torch.autograd.grad(out, list(leaves.values()), slope, allow_unused=True)
            exact = torch.autograd.grad(wanted, list(leaves.values()), slope, allow_unused=True)
            for name, one, other in zip(leaves, found, exact, strict=True):
                if one is None or other is None:
                    assert one is None or not one.any()
                    assert other is None or not other.any()
                    continue
                same(one, other, f"gradient of {name}")


@pytest.mark.parametrize("score", DOTS)
def test_every_dot_product(instruction_set: str, score: str, make: Any, sizes: Any, same: Any) -> None:
    for mask in ("none", "Causal(-4)", "bool tensor(heads)", "Window"):
        case = make(score, mask, sizes(23, 37))
        assert computes(case)
        A = case.matrix(NATIVE)
        logits, weights, lse, wanted = (t.detach() for t in case.plain())
        out = A @ case.v
        same(out, wanted, "output")
        same(A.lse, lse, "lse")
        same(A[:, :, 2:9], weights[:, :, 2:9], "weights")
        leaves = case.leaves()
        slope = case.sizes.random(*out.shape, seed=41)
        found = torch.autograd.grad(out, list(leaves.values()), slope)
        exact = torch.autograd.grad(case.plain()[3], list(leaves.values()), slope)
        for name, one, other in zip(leaves, found, exact, strict=True):
            same(one, other, f"gradient of {name}")
        largest, mass, top = case.matrix(NATIVE).collect(stats.MaxLogit(), stats.ColumnMass(), stats.TopK(5))
        same(largest, logits.amax(-1), "largest logit")
        same(mass, weights.sum(-2), "mass of columns")
        same(top.values, weights.topk(5).values, "largest weights")


class Places(attlas.Score):
    """A score of places with a term of each kind; numbers of keys and queries are large, and their sums are not."""

    positional = True

    def __init__(self, s: Any) -> None:
        super().__init__()
        gates = 1e6 - s.random(s.batch, s.heads, max(s.m, s.n), seed=21).abs().cumsum(-1)
        self.queries, self.keys = gates[..., : s.m], -gates[..., : s.n]
        self.steps, self.t = s.random(s.heads, 4 * (s.m + s.n), seed=22), s.random(s.m, 1, seed=23)

    def bias(self, at: attlas.Tile) -> attlas.scores.Bias:
        b, h = at.batch_ids, at.head_ids
        first, middle = at.columns.start - (at.rows.stop - 1), self.steps.shape[-1] // 2
        steps = torch.arange(first, at.columns.stop - at.rows.start)
        rows, columns = slice(at.rows.start, at.rows.stop), slice(at.columns.start, at.columns.stop)
        key, query = (t[b][:, h][..., part] for t, part in ((self.keys, columns), (self.queries, rows)))
        distance = self.steps[h][:, steps + middle].unsqueeze(0).to(at.dtype)
        return attlas.scores.Bias(distance, key, query, self.t[rows].view(1, 1, -1, 1).to(at.dtype))

    def forward(self, q: Tensor, k: Tensor, at: attlas.Tile) -> Tensor:
        b, h, i, j = at.batch_ids.view(-1, 1, 1, 1), at.head_ids.view(1, -1, 1, 1), at.i, at.j
        sums = self.queries[b, h, i] + self.keys[b, h, j]
        return (sums + self.steps[h, j - i + self.steps.shape[-1] // 2] + self.t[i, 0]).to(at.dtype)


def double(score: attlas.Score) -> attlas.Score:
    """Return a score in float64, with parameters that are not at their start and get no gradient."""
    torch.manual_seed(28)
    for p in score.double().requires_grad_(False).parameters():
        p.normal_()
    return score


def random_tensor(s: Any, *shape: int, dtype: torch.dtype = torch.float64) -> attlas.Score:
    return attlas.TensorBias(s.random(*shape, seed=24).to(dtype))


BIASES: dict[str, Callable[[Any], attlas.Score]] = {
    "Alibi": lambda s: attlas.Alibi(s.heads),
    "RelativeBias": lambda s: double(attlas.RelativeBias(s.heads, 9, buckets=8)),
    "RelativeBias(clipped)": lambda s: double(attlas.RelativeBias(s.heads, 5)),
    "TensorBias": lambda s: random_tensor(s, s.m, s.n),
    "TensorBias(heads)": lambda s: random_tensor(s, s.batch, s.heads, s.m, s.n),
    "TensorBias(16 bits)": lambda s: random_tensor(s, s.m, s.n, dtype=torch.bfloat16),
    "TensorBias(half)": lambda s: random_tensor(s, s.m, s.n, dtype=torch.float16),
    "TensorBias(float32)": lambda s: random_tensor(s, s.heads, s.m, s.n, dtype=torch.float32),
    "TensorBias(across)": lambda s: attlas.TensorBias(s.random(s.n, s.m, seed=25).mT),
    "TensorBias(keys)": lambda s: random_tensor(s, s.batch, 1, 1, s.n),
    "TensorBias(queries)": lambda s: random_tensor(s, s.heads, s.m, 1),
    "TensorBias(forbids)": lambda s: attlas.TensorBias(
        s.random(s.m, s.n, seed=26).masked_fill(s.random(s.m, s.n, seed=27) > 0.6, -math.inf)
    ),
    "Forget": lambda s: attlas.Forget(-s.random(s.batch, s.heads, s.n, seed=29).abs()),
    "Forget(one head)": lambda s: attlas.Forget(-s.random(1, s.n, seed=29).abs()),
    "own": Places,
    "sum": lambda s: 2.0 * attlas.Alibi(s.heads) - random_tensor(s, s.m, s.n),
    "factors": lambda s: torch.linspace(0.5, 2, s.heads, dtype=torch.float64) * attlas.Alibi(s.heads),
}


def biased(
    name: str, mask: str, make: Any, s: Any, *, sink: bool = True, cap: bool = False
) -> tuple[Any, attlas.Score]:
    """Return a case with a mask and sink, and a score with a bias."""
    product = attlas.SoftCap(attlas.ScaledDot(), 1.5) if cap else attlas.ScaledDot()
    return make("ScaledDot", mask, s, sink=sink), product + BIASES[name](s)


def every_statistic() -> list[Any]:
    return [
        stats.Entropy(), stats.EffectiveKeys(), stats.MaxWeight(), stats.MaxLogit(), stats.LogitMoments(),
        stats.RowMass(), stats.TopK(4), stats.ColumnMass(), stats.ColumnMax(), stats.Offsets(), stats.Picture(3, 4),
        stats.Coverage(),
    ]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", list(BIASES))
def test_biases(instruction_set: str, name: str, dtype: torch.dtype, make: Any, sizes: Any, same: Any) -> None:
    close = 1e-10 if dtype is torch.float64 else 2e-5
    for place, mask in enumerate(("none", "Causal", "Window", "bool tensor(heads)", "Padding(left) & Causal")):
        for m, n in ((19, 37), (41, 23), (3, 150)):
            case, score = biased(name, mask, make, sizes(m, n), sink=place % 2 == 0, cap=dtype is torch.float32)
            sink = None if case.sink is None else case.sink.detach()
            exact = attlas.attend(case.q, case.k, score=score, mask=case.mask, sink=sink, plan=Plan("reference"))
            q, k, v = (t.detach().to(dtype) for t in (case.q, case.k, case.v))
            sink = None if sink is None else sink.to(dtype)
            A = attlas.attend(q, k, score=score, mask=case.mask, sink=sink, plan=NATIVE)
            with torch.no_grad():
                where = f"{name}, {mask}, {m}x{n}"
                for _ in range(2):  # the second time with a known log-sum-exp
                    found, wanted = (list(map(tensors_in, M.collect(*every_statistic()))) for M in (A, exact))
                    for statistic, one, other in zip(every_statistic(), found, wanted, strict=True):
                        for x, y in zip(one, other, strict=True):
                            if x.is_floating_point():
                                same(x.double(), y.double(), f"{type(statistic).__name__}, {where}", close)
                            elif isinstance(statistic, stats.TopK):
                                seen = other[0] > 0  # a key of weight 0 may be any
                                assert torch.equal(x[seen], y[seen]), where
                            else:  # a share may fall on either side of its level
                                assert int((x - y).abs().max()) <= (0 if dtype is torch.float64 else 1), where
                    same((A @ v).double(), exact @ case.v, f"output, {where}", close)
                same(A.lse.double(), exact.lse, f"lse, {where}", close)


def refuse(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("the kernels were to do this")


def learned(score: attlas.Score) -> list[Tensor]:
    """Let all tensors of a score get a gradient, and return them."""
    return [t.requires_grad_() for t in tensors_of(score) if t.is_floating_point()]


def assert_gradients(
    pairs: Any, where: str, dtype: torch.dtype, same: Any, names: tuple[str, ...] = ("q", "k", "v")
) -> None:
    """Compare gradients, found and exact, by the largest of each."""
    for number, (one, other) in enumerate(pairs):
        assert one.dtype is other.dtype or number < len(names) + 1
        scale = max(float(other.abs().max()), 0.2)
        close = {torch.bfloat16: 1e-2, torch.float16: 1e-3}.get(other.dtype, 1e-10 if dtype is torch.float64 else 2e-5)
        label = names[number] if number < len(names) else f"number {number}"
        same(one.double() / scale, other.double() / scale, f"gradient of {label}, {where}", close)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("name", list(BIASES))
def test_gradients_of_biases(
    instruction_set: str, name: str, dtype: torch.dtype, make: Any, sizes: Any, same: Any, monkeypatch: Any
) -> None:
    """Of tables, slopes, gates and tensors, beside those of tokens, values and a sink, by the kernels alone."""
    for place, mask in enumerate(("none", "Causal", "Window", "bool tensor(heads)", "Padding(left) & Causal")):
        for m, n in ((19, 37), (210, 110)) if place % 2 else ((41, 23), (3, 150)):
            s = sizes(m, n)
            case, score = biased(name, mask, make, s, sink=place % 2 == 0, cap=dtype is torch.float32)
            of_score, sink = learned(score), [] if case.sink is None else [case.sink]
            given, slope = (
                [t.detach() for t in (case.q, case.k, case.v, *sink)],
                s.random(*case.v.shape[:1], s.heads, m, case.v.shape[-1], seed=41),
            )
            found = []
            for own, plan in ((torch.float64, Plan("reference")), (dtype, NATIVE)):
                q, k, v, *sink = leaves = [t.to(own, copy=True).requires_grad_() for t in given]
                A = attlas.attend(q, k, score=score, mask=case.mask, sink=sink[0] if sink else None, plan=plan)
                with monkeypatch.context() as only:
                    for backend in (Sdpa, Tiled) if plan is NATIVE else ():
                        only.setattr(backend, "backward", refuse)
                    found.append(torch.autograd.grad(A @ v, [*leaves, *of_score], slope.to(own)))
            assert_gradients(zip(*reversed(found), strict=True), f"{name}, {mask}, {m}x{n}", dtype, same)


@pytest.mark.parametrize("name", ["RelativeBias", "TensorBias(heads)", "TensorBias(queries)", "Forget", "own"])
def test_gradients_of_biases_in_statistics(
    instruction_set: str, name: str, make: Any, sizes: Any, same: Any, monkeypatch: Any
) -> None:
    for mask in ("none", "Causal"):
        s = sizes(33, 41)
        case, score = biased(name, mask, make, s, sink=False)
        of_score, found = learned(score), []
        for plan in (NATIVE, Plan("reference")):
            q, k, v = leaves = [t.detach().requires_grad_() for t in (case.q, case.k, case.v)]
            A = attlas.attend(q, k, score=score, mask=case.mask, plan=plan)
            asked = [stats.Entropy(), stats.ColumnMass(), stats.Pooled(v), *([stats.LogitMoments()] * score.finite)]
            with monkeypatch.context() as only:
                for backend in (Sdpa, Tiled) if plan is NATIVE else ():
                    only.setattr(backend, "backward", refuse)
                loss = torch.zeros((), dtype=torch.float64)
                for number, t in enumerate(tensors_in(A.collect(*asked))):
                    loss = loss + (t * s.random(*t.shape, seed=50 + number)).sum()
                found.append(torch.autograd.grad(loss, [*leaves, *of_score]))
        assert_gradients(zip(*found, strict=True), f"{name}, {mask}", torch.float64, same)


#: Scores of pairs, and the names of `Tiled` that compute what the kernels do not: gradients of bounded kernels.
PAIRS: dict[str, tuple[str, ...]] = {
    "Additive(bias)": (),
    "Gaussian(leaf)": (),
    "Laplace": (),
    "Boxcar": ("backward",),
    "Epanechnikov": ("backward",),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize(
    "name", ["RelativeBias", "TensorBias(across)", "TensorBias(keys)", "TensorBias(forbids)", "Forget", "own", "sum"]
)
@pytest.mark.parametrize("pair", PAIRS)
def test_biases_of_pairs(
    instruction_set: str, pair: str, name: str, dtype: torch.dtype, make: Any, sizes: Any, same: Any, monkeypatch: Any
) -> None:
    """Output, transposed product, statistics and gradients of a score of pairs and one of places, by the kernels."""
    if instruction_set == "amx":
        pytest.skip("its tiles serve dot products alone")
    for place, (mask, m, n) in enumerate((("none", 41, 23), ("Causal", 19, 37), ("bool tensor(heads)", 5, 550))):
        s = sizes(m, n)
        case, sink = make(pair, mask, s, sink=place == 1), []
        score = BIASES[name](s) + case.score if place else case.score + BIASES[name](s)
        sink = [] if case.sink is None else [case.sink]
        of_score, found = [t for t in tensors_of(case.score) if t.requires_grad], []
        given = [t.detach() for t in (case.q, case.k, case.v, *sink)]
        for own, plan in ((torch.float64, Plan("reference")), (dtype, NATIVE)):
            q, k, v, *sink = leaves = [t.to(own, copy=True).requires_grad_() for t in given]
            A = attlas.attend(q, k, score=score, mask=case.mask, sink=sink[0] if sink else None, plan=plan)
            with monkeypatch.context() as only:
                for method in ("forward", "transposed", "backward", "statistics") if plan is NATIVE else ():
                    if method not in PAIRS[pair]:
                        only.setattr(Tiled, method, refuse)
                out = A @ v
                slope = s.random(*out.shape, seed=41).to(own)
                gradients = torch.autograd.grad(out, [*leaves, *of_score], slope, allow_unused=True)
                with torch.no_grad():
                    asked = (stats.Entropy(), stats.MaxLogit(), stats.ColumnMass(), stats.MaxWeight(), stats.Offsets())
                    numbers = tensors_in(A.collect(*asked))
                    found.append([out.detach(), A.mT @ slope, A.lse, *numbers, *gradients])
        for number, (one, other) in enumerate(zip(*reversed(found), strict=True)):
            if one is None or other is None:
                assert not any(t.any() for t in (one, other) if t is not None)
                continue
            finite = other.isfinite()
            assert torch.equal(one.isfinite(), finite)
            scale = max(float(other[finite].abs().max()), 0.2) if finite.any() else 1.0
            close = 1e-9 if dtype is torch.float64 else 1e-4
            label = f"number {number}, {pair}, {name}, {mask}, {m}x{n}"
            same(one[finite].double() / scale, other[finite] / scale, label, close)


@pytest.mark.parametrize("pair", ["Additive", "Gaussian"])
def test_learned_biases_of_pairs(instruction_set: str, pair: str, make: Any, sizes: Any, same: Any) -> None:
    """The kernels have no gradient of these: tiles compute them."""
    s = sizes(33, 41)
    case, found = make(pair, "Causal", s, sink=True), []
    score = case.score + BIASES["RelativeBias"](s)
    of_score = learned(score)
    for plan in (NATIVE, Plan("reference")):
        A = attlas.attend(case.q, case.k, score=score, mask=case.mask, sink=case.sink, plan=plan)
        out = A @ case.v
        found.append(torch.autograd.grad(out, of_score, s.random(*out.shape, seed=41), allow_unused=True))
    for one, other in zip(*found, strict=True):
        same(one, other, "gradient")


@pytest.mark.parametrize("name", ["Alibi", "RelativeBias", "TensorBias(heads)", "Forget", "own"])
def test_biases_of_windows(instruction_set: str, name: str, make: Any, sizes: Any, same: Any) -> None:
    s = sizes(30, 44)
    case, score = biased(name, "none", make, s, sink=False)
    logits = attlas.attend(case.q, case.k, score=score, plan=Plan("reference")).logits[:, :].detach()
    for rows, columns in ((range(30), range(44)), (range(7, 25), range(5, 44)), (range(29, 30), range(40))):
        q, k, v = case.q[:, :, rows.start : rows.stop], case.k[:, :, columns.start : columns.stop], case.v
        v = v[:, :, columns.start : columns.stop].detach()
        moved = translated_score(score, rows, columns, 30, 44)
        A = attlas.attend(q.detach(), k.detach(), score=moved, plan=NATIVE)
        part = logits[..., rows.start : rows.stop, columns.start : columns.stop]
        same(A.lse, part.logsumexp(-1), f"lse of {rows}, {columns}")
        wanted = part.softmax(-1)
        same(A @ v, wanted @ v.repeat_interleave(wanted.shape[1] // v.shape[1], dim=1), f"output of {rows}, {columns}")
        same(A.collect(stats.MaxLogit())[0], part.amax(-1), f"largest logits of {rows}, {columns}")


@pytest.mark.parametrize("number", [math.nan, math.inf, torch.finfo(torch.float32).min])
def test_numbers_of_places_that_kernels_do_not_sum(instruction_set: str, number: float, same: Any) -> None:
    torch.manual_seed(0)
    q, k, v, t = torch.randn(1, 2, 70, 8), torch.randn(1, 2, 90, 8), torch.randn(1, 2, 90, 3), torch.randn(70, 90)
    t[3, 5:] = number
    t[4] = number
    found, wanted = (
        attlas.attend(q, k, score=attlas.ScaledDot() + attlas.TensorBias(t), plan=Plan(name)) @ v
        for name in ("auto", "reference")
    )
    torch.testing.assert_close(found, wanted, equal_nan=True)


def test_soft_cap_in_float32(instruction_set: str, mask_name: str, make: Any, sizes: Any, same: Any) -> None:
    if mask_name.startswith("additive"):
        pytest.skip("its numbers are a score of their own")
    case = make("SoftCap", mask_name, sizes(23, 37), sink=True)
    _, weights, lse, out = (t.detach() for t in case.plain())
    from attlas import attend

    q, k, v, sink = (t.detach().float() for t in (case.q, case.k, case.v, case.sink))
    A = attend(q, k, score=case.score, mask=case.mask, sink=sink, plan=NATIVE)
    same((A @ v).double(), out, "output", 2e-5)
    same(A.lse.double(), lse, "lse", 2e-5)
    entropy, mass = A.collect(stats.Entropy(), stats.RowMass())
    same(mass.double(), weights.sum(-1), "mass", 2e-5)
    bent = torch.where(weights > 0, weights * weights.clamp(min=math.ulp(0.0)).log(), 0.0)
    same(entropy.double(), -bent.sum(-1), "entropy", 1e-4)


def test_groups_of_heads(instruction_set: str, tables: Any, sizes_of: Any, make: Any, same: Any) -> None:
    for group in tables["group"]:
        case = make("ScaledDot", "Causal", sizes_of("29x29", group), sink=True)
        _, weights, _, out = (t.detach() for t in case.plain())
        A = case.matrix(NATIVE)
        same(A @ case.v, out, f"output, {group}")
        same(A.sum(-2), weights.sum(-2), f"mass of columns, {group}")
