"""Values of a recording: kept as the model has them, and their norms behind the output projection."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.atlas.conftest import make_entry
from tests.tiny_models import SIZES, lively
from torch import Tensor, nn

import attlas
from attlas import stats
from attlas.errors import RecordingError, ShapeError
from attlas.matrix.value_weighted import value_weighted


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(3, 61, (1, 24), generator=torch.Generator().manual_seed(1))


def recorded(model: nn.Module, ids: Tensor, **settings: Any) -> attlas.Atlas:
    with attlas.record(model, **settings) as atlas, torch.no_grad():
        model(ids)
    return atlas


def test_values_are_those_that_the_model_pools(llama: nn.Module, ids: Tensor) -> None:
    outputs: list[Tensor] = []
    handle = llama.model.layers[1].self_attn.o_proj.register_forward_pre_hook(
        lambda module, arguments: outputs.append(arguments[0])
    )
    entry = recorded(llama, ids, values=True).entry(1)
    handle.remove()
    assert entry.values is not None
    assert entry.values.shape == (1, 2, 24, 8)  # grouped, as they are
    torch.testing.assert_close((entry.need_matrix() @ entry.values).transpose(1, 2).flatten(2), outputs[0])


def test_weights_times_norms_are_the_definition(llama: nn.Module, ids: Tensor) -> None:
    entry = recorded(llama, ids, values=True).entry(2)
    assert entry.values is not None
    weights, values = entry.need_matrix().to_dense().double(), entry.values.double().repeat_interleave(2, dim=1)
    projection = llama.model.layers[2].self_attn.o_proj.weight.double().unflatten(1, (4, 8))
    added = weights.unsqueeze(-1) * values.unsqueeze(2)  # A_ij v_j
    through = torch.einsum("bhmne,ohe->bhmno", added, projection)
    torch.testing.assert_close(entry.value_weighted().to_dense().double(), added.norm(dim=-1), rtol=1e-5, atol=1e-6)
    weighted = entry.value_weighted(output=True)
    torch.testing.assert_close(weighted.to_dense().double(), through.norm(dim=-1), rtol=1e-5, atol=1e-6)
    mass, largest = weighted.collect(stats.ColumnMass(), stats.MaxWeight())
    torch.testing.assert_close(mass.double(), through.norm(dim=-1).sum(2), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(largest.double(), through.norm(dim=-1).amax(-1), rtol=1e-5, atol=1e-6)


def test_the_output_projection_of_modernbert(ids: Tensor) -> None:
    sizes = SIZES | {"cls_token_id": 1, "sep_token_id": 2}
    model = lively(transformers.ModernBertModel(transformers.ModernBertConfig(**sizes)))
    entry = recorded(model, ids, values=True).entry(0)
    assert entry.values is not None
    projection = model.layers[0].attn.Wo.weight.unflatten(1, (4, 8))
    through = torch.einsum("bhne,ohe->bhno", entry.values, projection).norm(dim=-1)
    torch.testing.assert_close(entry.output_norms, through)


@pytest.mark.parametrize("backend", ["tiled", "auto"])
def test_statistics_of_shares_are_refused(backend: Any) -> None:
    torch.manual_seed(2)
    A = attlas.attend(torch.randn(1, 2, 40, 8), torch.randn(1, 2, 50, 8), plan=attlas.Plan(backend))
    weighted = value_weighted(A, 9 * torch.rand(1, 2, 50))
    for part in (weighted, weighted[0, 1], weighted.window((3, 30), (0, 20)), weighted.double()):
        for statistic in (stats.Entropy(), stats.EffectiveKeys()):
            with pytest.raises(ShapeError, match=f"^{type(statistic).__name__}\\(\\): .*shares"):
                part.collect(stats.MaxWeight(), statistic)
    for pair in ((A, weighted), (weighted, A)):
        with pytest.raises(ShapeError, match=r"^divergence\(\): .*shares"):
            attlas.divergence(*pair)
    dense = weighted.to_dense().sort(-1, descending=True).values  # absolute mass, and shares of the row's own mass
    torch.testing.assert_close(stats.TailMass(3)(weighted), dense[..., 3:].sum(-1), rtol=1e-5, atol=1e-5)
    reached = dense.cumsum(-1) < 0.9 * dense.sum(-1, keepdim=True)
    assert torch.equal(stats.Coverage([0.9])(weighted)[..., 0], reached.sum(-1) + 1)


def test_a_value_of_norm_zero_adds_nothing() -> None:
    A = attlas.attend(torch.randn(1, 2, 9, 4), torch.randn(1, 1, 9, 4), sink=torch.zeros(2))
    norms = torch.rand(1, 2, 9)
    norms[..., 3] = 0
    dense = make_entry(A, value_norms=norms).value_weighted().to_dense()
    torch.testing.assert_close(dense, A.to_dense() * norms.unsqueeze(2))
    assert (dense[..., 3] == 0).all()


@pytest.mark.parametrize("score", [attlas.ScaledDot(), attlas.ScaledDot() + attlas.Alibi(2), attlas.Gaussian(1.5)])
def test_a_weighted_matrix_is_saved_and_loaded(score: attlas.Score, tmp_path: Path) -> None:
    torch.manual_seed(4)
    A = attlas.attend(torch.randn(1, 2, 9, 4), torch.randn(1, 2, 9, 4), score=score, mask=attlas.Causal())
    norms = 9 * torch.rand(1, 2, 9)
    norms[0, 1, 3] = 0
    weighted = value_weighted(A, norms)
    attlas.Atlas([make_entry(weighted)]).save(tmp_path / "w.atlas")
    loaded = attlas.load(tmp_path / "w.atlas").entry(0).need_matrix()
    torch.testing.assert_close(loaded.to_dense(), A.to_dense() * norms.unsqueeze(2), rtol=1e-5, atol=1e-6)
    with pytest.raises(ShapeError, match="shares"):
        stats.entropy(loaded)


@pytest.mark.parametrize("keep", ["device", "disk"])
def test_generation_is_one_text(llama: nn.Module, ids: Tensor, keep: Any, tmp_path: Path) -> None:
    folder = tmp_path / "run.atlas" if keep == "disk" else None
    with attlas.record(llama, values=True, keep=keep, heads=[0, 3], folder=folder) as atlas, torch.no_grad():
        text = llama.generate(ids, max_new_tokens=6, do_sample=False, min_new_tokens=6)
    entry, whole = atlas.entry(0), recorded(llama, text[:, :-1], values=True, heads=[0, 3]).entry(0)
    for name, t in whole.values_and_norms.items():
        torch.testing.assert_close(getattr(entry, name), t)


def test_values_are_saved_and_older_folders_load(llama: nn.Module, ids: Tensor, tmp_path: Path) -> None:
    atlas = recorded(llama, ids, values=True)
    atlas.save(tmp_path / "run.atlas")
    loaded = attlas.load(tmp_path / "run.atlas")
    for entry, again in zip(atlas.entries, loaded.entries, strict=True):
        assert again.values_and_norms.keys() == {"values", "value_norms", "output_norms"}
        assert all(torch.equal(t, entry.values_and_norms[name]) for name, t in again.values_and_norms.items())
    assert "q, k and v kept" in repr(loaded)
    assert atlas.entry(0).nbytes - recorded(llama, ids).entry(0).nbytes == 4 * 24 * (2 * 8 + 2 + 4)
    file = tmp_path / "run.atlas" / "0000.safetensors"
    file.write_bytes(file.read_bytes()[:-4] + b"\x00\x01\x02\x03")
    with pytest.raises(RecordingError, match="checksum"):
        attlas.load(tmp_path / "run.atlas", verify=True)


def test_norms_alone_need_no_values(llama: nn.Module, ids: Tensor) -> None:
    entry = recorded(llama, ids, values="norms").entry(0)
    assert entry.values is None
    assert entry.value_weighted(output=True).shape == (1, 4, 24, 24)


def test_what_has_no_values_says_so(llama: nn.Module, ids: Tensor) -> None:
    with pytest.raises(RecordingError, match="values=True"):
        recorded(llama, ids).entry(0).value_weighted()
    with pytest.raises(ShapeError, match="statistics"):
        attlas.record(llama, keep="statistics", statistics=[stats.Entropy()], values=True)

    class Offers(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            attlas.recording.offer(self, attlas.attend(x, x))
            return x

    with pytest.raises(RecordingError, match="pooled"):
        recorded(nn.Sequential(Offers()), torch.randn(1, 2, 5, 8), values=True)


def test_a_model_without_an_output_projection_has_norms_of_values(ids: Tensor) -> None:
    class Pools(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return attlas.recording.pooled(self, attlas.attend(x, x), x)[0]

    entry = recorded(nn.Sequential(Pools()), torch.randn(1, 2, 5, 8), values=True).entry(0)
    assert entry.value_norms is not None
    with pytest.raises(RecordingError, match="output projection"):
        entry.value_weighted(output=True)
