"""Layers inside what torch does with programs: compile, export, vmap, checkpoint, copies, sharding."""

import copy
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import attlas
from attlas.nn import (
    GPT2,
    AdditiveAttention,
    AttentionPooling,
    DotProductAttention,
    GPT2Attention,
    GPT2Config,
    KVCache,
    MultiHeadAttention,
)

SIZES = GPT2Config(vocab_size=31, n_positions=32, n_embd=16, n_layer=1, n_head=4, attn_pdrop=0.0, resid_pdrop=0.0,
                   embd_pdrop=0.0)  # fmt: skip


@pytest.fixture
def compiler():
    """Forget what was compiled before, and after."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


compiles = pytest.mark.usefixtures("compiler")


class OutputOf(nn.Module):
    """The first result of a layer that returns its weights too, for programs that know tensors only."""

    def __init__(self, layer, **kwargs):
        super().__init__()
        self.layer, self.kwargs = layer, kwargs

    def forward(self, *tensors):
        return self.layer(*tensors, **self.kwargs)[0]


def cases():
    torch.manual_seed(0)
    x, y = torch.randn(2, 6, 16), torch.randn(2, 7, 16)
    lens = torch.tensor([3, 7])

    def heads(forward, **options):
        return OutputOf(MultiHeadAttention(16, 4, batch_first=True, **options), need_weights=False, **forward)

    return {
        "pooling": (AttentionPooling([1.0] * 16), (x, y, y, lens)),
        "pooling on few coordinates": (AttentionPooling(1.0), (x[..., :2], y[..., :2], y)),
        "laplace": (AttentionPooling(2.0, kernel=attlas.Laplace), (x, y, y)),
        "dot": (DotProductAttention(), (x, y, y)),
        "dot with lengths": (DotProductAttention(), (x, y, y, lens)),
        "dot with lengths of queries": (DotProductAttention(), (x, y, y, lens[:, None].expand(2, 6))),
        "additive": (AdditiveAttention(16, 16, 5), (x, y, y, lens)),
        "heads": (heads({}, num_kv_heads=2), (x, x, x)),
        "heads, causal": (heads({"is_causal": True}), (x, x, x)),
        "heads, padding": (heads({}, add_zero_attn=True), (x, y, y, torch.arange(7) >= lens[:, None])),
        "heads with a bias": (
            heads({"attn_mask": attlas.Causal()}, score=attlas.ScaledDot() + attlas.Alibi(4)),
            (x, x, x),
        ),
        "gpt2 attention": (OutputOf(GPT2Attention(SIZES)), (x,)),
        "gpt2": (OutputOf(GPT2(SIZES)), (torch.randint(31, (2, 9)),)),
    }


each_case = pytest.mark.parametrize("name", list(cases()))


def gradients(module, out):
    module.zero_grad()
    if out.requires_grad:
        out.square().sum().backward()
    return [p.grad for p in module.parameters()]


@each_case
@compiles
def test_compiles_to_one_graph(name):
    """Without graph breaks, with the same result and gradients."""
    module, tensors = cases()[name]
    want = module(*tensors)
    slopes = gradients(module, want)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    found = compiled(*tensors)
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
    for a, b in zip(gradients(module, found), slopes, strict=True):
        torch.testing.assert_close(a, b, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of what inductor loads
@compiles
def test_compiles_with_inductor(monkeypatch):
    # Plain numbers will do: which vectors the processor has would be found out by ten compilations.
    monkeypatch.setattr("torch._inductor.cpu_vec_isa.valid_vec_isa_list", list)
    for name in ("additive", "heads"):  # one of each kind of operator that a graph holds
        module, tensors = cases()[name]
        with torch.no_grad():
            try:
                found = torch.compile(module)(*tensors)
            except torch._dynamo.exc.BackendCompilerFailed as error:
                pytest.skip(f"no C++ compiler for inductor: {error}")
            torch.testing.assert_close(found, module(*tensors), atol=1e-5, rtol=1e-5)


@pytest.mark.skipif(torch.__version__ < (2, 9), reason="torch 2.8 cannot tell its compiler from its export")
@compiles
def test_weights_come_out_of_a_compiled_layer():
    layer = MultiHeadAttention(16, 4, batch_first=True)
    x = torch.randn(2, 6, 16)
    compiled = torch.compile(layer, backend="aot_eager")
    out, weights = compiled(x, x, x, average_attn_weights=False)
    want, expected = layer(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(out, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(weights.to_dense(), expected.to_dense(), atol=1e-5, rtol=1e-5)


@each_case
def test_exports(name):
    module, tensors = cases()[name]
    module = module.eval()
    program = torch.export.export(module, tensors)
    torch.testing.assert_close(program.module()(*tensors), module(*tensors), atol=1e-5, rtol=1e-5)


def test_exports_without_weights():
    """An export holds tensors only, so the weights are left out, as GPT2Attention's are."""
    layer = MultiHeadAttention(16, 4, batch_first=True).eval()
    x = torch.randn(2, 6, 16)
    program = torch.export.export(layer, (x, x, x)).module()
    out, weights = program(x, x, x)
    assert weights is None
    torch.testing.assert_close(out, layer(x, x, x)[0], atol=1e-5, rtol=1e-5)


def test_exports_for_any_length():
    layer = DotProductAttention()
    q, k = torch.randn(2, 6, 16), torch.randn(2, 7, 16)
    m, n = torch.export.Dim("m", min=2, max=500), torch.export.Dim("n", min=2, max=500)
    program = torch.export.export(layer, (q, k, k), dynamic_shapes=({1: m}, {1: n}, {1: n}))
    q, k = torch.randn(2, 40, 16), torch.randn(2, 90, 16)
    torch.testing.assert_close(program.module()(q, k, k), layer(q, k, k), atol=1e-5, rtol=1e-5)


@compiles
def test_a_compiled_pooling_layer_keeps_nothing():
    layer = DotProductAttention()
    x = torch.randn(2, 5, 4)
    torch.compile(layer, backend="eager")(x, x, x)
    with pytest.raises(attlas.RecordingError, match=r"outside of torch\.compile, torch\.export and torch\.func"):
        _ = layer.weights


@each_case
def test_vmap_over_a_batch(name):
    """One more batch axis in front, mapped over; integer tensors and lengths too."""
    module, tensors = cases()[name]
    many = tuple(torch.stack([t, t.flip(0), t]) for t in tensors)
    found = torch.func.vmap(module)(*many)
    want = torch.stack([module(*(t[i] for t in many)) for i in range(3)])
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)


@each_case
def test_gradients_of_each_sample(name):
    module, tensors = cases()[name]
    parameters = {n: p.detach() for n, p in module.named_parameters()}
    if not parameters:
        pytest.skip("a layer without parameters")

    def loss(p, *one):
        return torch.func.functional_call(module, p, tuple(t.unsqueeze(0) for t in one)).square().sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, *(0 for _ in tensors)))(parameters, *tensors)
    module.zero_grad()
    module(*tensors).square().sum().backward()
    for name_, p in module.named_parameters():
        want = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close(each[name_].sum(0), want, atol=1e-4, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")  # torch's own forward mode
def test_curvature_by_forward_over_reverse():
    layer = AttentionPooling(0.8, learn=False).double()
    k, v = torch.randn(4, 2, dtype=torch.float64), torch.randn(4, 1, dtype=torch.float64)

    def f(q):
        return layer(q.unsqueeze(0), k, v).sum()

    q = torch.randn(2, dtype=torch.float64)
    H = torch.func.hessian(f)(q)
    slope = torch.func.grad(f)
    steps = torch.stack([(slope(q + d) - slope(q - d)) / 2e-5 for d in 1e-5 * torch.eye(2, dtype=torch.float64)])
    torch.testing.assert_close(H, steps, atol=1e-7, rtol=1e-6)


@each_case
def test_checkpoint_computes_again(name):
    module, tensors = cases()[name]
    want = gradients(module, module(*tensors))
    found = gradients(module, checkpoint(module, *tensors, use_reentrant=False))
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b)


def test_checkpoint_draws_the_same_drops():
    torch.manual_seed(0)
    layer = OutputOf(MultiHeadAttention(16, 4, dropout=0.5, batch_first=True))
    x = torch.randn(2, 6, 16)
    torch.manual_seed(1)
    want = gradients(layer, layer(x, x, x))
    torch.manual_seed(1)
    found = gradients(layer, checkpoint(layer, x, x, x, use_reentrant=False))
    for a, b in zip(found, want, strict=True):
        torch.testing.assert_close(a, b)


@each_case
def test_copies_state_and_moves(name):
    module, tensors = cases()[name]
    want = module(*tensors)
    other = copy.deepcopy(module)
    torch.testing.assert_close(other(*tensors), want)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    other.load_state_dict(module.state_dict())
    torch.testing.assert_close(other(*tensors), want)
    double = tuple(t.double() if t.is_floating_point() else t for t in tensors)
    torch.testing.assert_close(other.to("cpu", torch.float64)(*double).float(), want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["heads", "heads, causal", "heads, padding", "gpt2 attention", "gpt2"])
def test_half_precision(name, dtype):
    module, tensors = cases()[name]
    want = module(*tensors)
    found = module.to(dtype)(*(t.to(dtype) if t.is_floating_point() else t for t in tensors))
    assert found.dtype is dtype
    assert (found - want).abs().max() < 0.05
    found.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())


@each_case
def test_autocast(name):
    module, tensors = cases()[name]
    want = module(*tensors)
    with torch.autocast("cpu", torch.bfloat16):
        found = module(*tensors)
    assert (found - want).abs().max() < 0.05
    if found.requires_grad:
        found.float().sum().backward()
    assert all(p.grad is None or p.grad.dtype is p.dtype for p in module.parameters())


@pytest.fixture
def one_process(tmp_path):
    if not torch.distributed.is_available():
        pytest.skip("torch was built without torch.distributed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1)
        yield
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["additive", "heads", "gpt2"])
def test_sharded_parameters(name, one_process):
    """Under fully_shard the parameters of a layer are put together for its forward and its backward."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    module, tensors = cases()[name]
    want = module(*tensors)
    slopes = [None if g is None else g.clone() for g in gradients(module, want)]
    mesh = init_device_mesh("cpu", (1,))
    if name == "gpt2":
        for block in module.layer.h:
            fully_shard(block, mesh=mesh)
    fully_shard(module, mesh=mesh)
    found = module(*tensors)
    torch.testing.assert_close(found, want)
    for a, b in zip(gradients(module, found), slopes, strict=True):
        torch.testing.assert_close(None if a is None else a.full_tensor(), b)


def test_parametrized_projections():
    """What wraps a parameter, as weight norm or an adapter does, is seen."""
    module = MultiHeadAttention(16, 4, batch_first=True)
    x = torch.randn(2, 6, 16)
    before = module(x, x, x)[0]
    nn.utils.parametrizations.weight_norm(module, "in_proj_weight")
    torch.testing.assert_close(module(x, x, x)[0], before)
    module(x, x, x)[0].sum().backward()
    assert module.parametrizations.in_proj_weight.original1.grad is not None


@compiles
def test_a_cache_is_not_traced_wrongly():
    """A step with a cache compiles, with breaks where it must, to the same numbers."""
    model = GPT2(SIZES).eval()
    ids = torch.randint(31, (1, 6))
    with torch.no_grad():
        want = model(ids).logits
        cache, step = KVCache(), torch.compile(model, backend="eager")
        found = torch.cat([step(part, cache=cache).logits for part in ids.split([4, 2], dim=1)], 1)
    torch.testing.assert_close(found, want, atol=1e-5, rtol=1e-5)
