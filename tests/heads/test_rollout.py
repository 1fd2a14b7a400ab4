"""Rollout and flow are rows and columns of the product of all layers."""

from typing import Any

import pytest
import torch
from torch import Tensor

import attlas
from attlas import heads
from attlas.recording.atlas import Atlas, Entry

close = torch.testing.assert_close


def layers(n: int = 19, count: int = 4, dtype: torch.dtype = torch.float64, **options: object) -> list:
    return [
        attlas.attend(2 * torch.randn(2, 4, n, 8).to(dtype), torch.randn(2, 2, n, 8).to(dtype), **options)
        for _ in range(count)
    ]


def product(matrices: list, residual: float = 0.5, weights: Tensor | None = None) -> list[Tensor]:
    """Return the rollout matrix after each depth, built as the paper builds it."""
    out = []
    R = torch.eye(matrices[0].shape[-1], dtype=torch.float64)
    for layer, A in enumerate(matrices):
        dense = A.to_dense().double()
        if weights is None:
            mean = dense.mean(-3)
        else:
            own = weights if weights.ndim == 1 else weights[layer]
            mean = (dense * (own / own.sum()).view(-1, 1, 1)).sum(-3)
        R = ((1 - residual) * mean + residual * torch.eye(R.shape[-1], dtype=torch.float64)) @ R
        out.append(R)
    return out


OPTIONS = {
    "bidirectional": {},
    "causal": {"mask": attlas.Causal()},
    "left padding": {"mask": attlas.Causal() & attlas.Padding([19, 11], side="left")},
    "sinks": {"mask": attlas.Causal(), "sink": torch.arange(4.0).double()},
    "capped, small tiles": {
        "score": attlas.SoftCap(attlas.ScaledDot(), 2.0),
        "plan": attlas.Plan("tiled", rows=5, columns=6),
    },
}


@pytest.mark.parametrize("residual", [0.0, 0.5, 0.8])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_rollout_and_flow_are_the_product_of_all_layers(options: dict, residual: float) -> None:
    matrices = layers(**options)
    R = product(matrices, residual)[-1]
    starts = torch.tensor([0, 0])
    if options is OPTIONS["left padding"]:  # padding gives and receives nothing
        starts = torch.tensor([0, 8])
        R[1, :8], R[1, :, :8] = 0.0, 0.0
    close(heads.rollout(matrices, rows=[0, 7, -1], residual=residual), R[:, [0, 7, 18]])
    close(heads.flow(matrices, columns=[0, 7, -1], residual=residual), R[..., [0, 7, 18]])
    close(heads.rollout(iter(matrices), residual=residual), R[:, 18:])
    close(heads.flow(iter(matrices), residual=residual), R[torch.arange(2), :, starts].unsqueeze(-1))


def test_rows_sum_to_one_and_masked_tokens_get_nothing() -> None:
    matrices = layers(mask=attlas.Causal())
    R = heads.rollout(matrices, rows=range(19))
    close(R.sum(-1), torch.ones(2, 19, dtype=torch.float64))
    assert float(R.triu(1).abs().max()) == 0


def test_more_tokens_than_one_product_carries() -> None:
    matrices = layers(n=150, count=2)
    R = product(matrices)[-1]
    close(heads.rollout(matrices, rows=torch.arange(150)), R)
    close(heads.flow(matrices, columns=torch.arange(150)), R)


def test_heads_are_weighed_for_all_layers_or_for_each() -> None:
    matrices = layers()
    for weights in (torch.tensor([1.0, 0, 2, 0]).double(), torch.rand(4, 4).double()):
        R = product(matrices, weights=weights)[-1]
        close(heads.rollout(matrices, [3, 12], heads=weights), R[:, [3, 12]])
        close(heads.flow(matrices, [3, 12], heads=weights), R[..., [3, 12]])


def test_every_depth_is_there_where_it_is_asked_for() -> None:
    matrices = layers()
    forward = heads.flow(matrices, [2, 5], layers=True)
    back = heads.rollout(matrices, [2, 5], layers=True)
    assert forward.shape == (4, 2, 19, 2)
    assert back.shape == (4, 2, 2, 19)
    for depth, R in enumerate(product(matrices)):
        close(forward[depth], R[..., [2, 5]])
    for depth in range(4):
        close(back[depth], product(matrices[3 - depth :])[-1][:, [2, 5]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_low_precision_is_not_rounded_at_each_layer(dtype: torch.dtype) -> None:
    matrices = layers(dtype=dtype, count=6, mask=attlas.Causal())
    R = product(matrices)[-1]
    for found, expected in ((heads.rollout(matrices, [9]), R[:, [9]]), (heads.flow(matrices, [9]), R[..., [9]])):
        assert found.dtype == torch.float32
        close(found.double(), expected, atol=2e-6, rtol=1e-4)


def test_one_text_and_axes_of_other_numbers() -> None:
    matrices = layers()
    R = product(matrices)[-1]
    close(heads.rollout([A[1] for A in matrices], [4]), R[1, [4]])
    close(heads.flow([A[1] for A in matrices], [4]), R[1][..., [4]])
    plain = [attlas.attend(torch.randn(3, 7, 4).double(), torch.randn(3, 7, 4).double()) for _ in range(2)]
    close(heads.rollout(plain, [4]), product(plain)[-1][[4]])
    close(heads.flow(plain, [4]), product(plain)[-1][..., [4]])


def test_no_graph_is_kept() -> None:
    q = torch.randn(1, 2, 6, 4, requires_grad=True)
    A = attlas.attend(q, q)
    assert not heads.rollout([A, A]).requires_grad
    assert not heads.flow([A, A]).requires_grad


class Layer(torch.nn.Module):
    """A layer of transformers, which knows its number."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_idx = number


def atlas_of(matrices: list, numbers: list[int], count: int | None) -> Atlas:
    """Return a recording of these layers of a model that has so many."""
    entries = [
        Entry(f"layers.{layer}", layer, "self", 0, (0, 1, 2, 3), (0, 19), 0, (2, 4, 19, 19), A)
        for layer, A in zip(numbers, matrices, strict=True)
    ]
    return Atlas(entries, details={} if count is None else {"layer_counts": {"self": count}})


@pytest.mark.parametrize("product_of", [heads.rollout, heads.flow])
@pytest.mark.parametrize(("numbers", "count", "found"), [([3, 7], 8, "0 to 2, 4 to 6"), ([0, 1], 3, "2")])
def test_layers_that_are_missing_are_refused(product_of: Any, numbers: list[int], count: int, found: str) -> None:
    """A rollout over some layers is not that of the model."""
    matrices = layers(count=2)
    atlas = atlas_of(matrices, numbers, count)
    with pytest.raises(attlas.ShapeError, match=f"no weights of layers? {found}"):
        product_of(atlas)
    close(product_of(atlas, missing="identity"), product_of(matrices))
    close(product_of(atlas_of(matrices, numbers, None)), product_of(matrices))  # nothing is known of the model
    with pytest.raises(attlas.ShapeError, match="missing = 'zero'"):
        product_of(atlas, missing="zero")


@pytest.mark.parametrize("cut", [lambda A: A, lambda A: A[0], lambda A: A.detach()[1:]])
def test_outputs_of_transformers_know_their_layers(cut: Any) -> None:
    """Of a model of eight layers two of which have weights, transformers returns two matrices."""
    attention_forward = pytest.importorskip("attlas.huggingface").attention_forward
    q, k, v = torch.randn(2, 4, 19, 8), torch.randn(2, 2, 19, 8), torch.randn(2, 2, 19, 8)
    some, every = (
        [cut(attention_forward(Layer(number), q, k, v, None)[1]) for number in numbers] for numbers in ([3, 7], [0, 1])
    )
    with pytest.raises(attlas.ShapeError, match="layers 0 to 2, 4 to 6"):
        heads.rollout(some)
    close(heads.rollout(some, missing="identity"), heads.rollout(every))
    close(heads.rollout(every[:1] * 2), heads.rollout(every))  # of one layer twice nothing can be told
