"""Heads whose logits are large: what is recorded, saved and loaded gives weights as exact as eager's."""

import pytest
import torch
import transformers
from tests.recording.conftest import SIZES, causal_model

import attlas
from attlas.engine.backends import reference
from attlas.recording.atlas import deserialization, storage


@pytest.fixture
def sharp():
    """Return a model whose logits reach 1,600 and more."""
    model = causal_model(transformers.LlamaConfig(**SIZES))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj" in name or "k_proj" in name:
                weight.mul_(12)
    return model


def check(atlas) -> None:
    largest = 0.0
    for A in atlas:
        exact = reference.dense(reference.in_float64(A.problem))
        largest = max(largest, float(exact.logits[exact.logits.isfinite()].abs().max()))
        rows = torch.stack([A[:, :, i, :] for i in range(A.shape[2])], dim=2)
        for found in (rows, A.to_dense()):
            assert float((found.sum(-1) - 1).abs().max()) < 1e-6
            # float32 rounds a logit of 2,000 by 6e-5 at most: eager has this error too.
            assert float((found - exact.weights).abs().max()) < 5e-4
        assert A.softmax_weights.lse().dtype is torch.float64
    assert largest > 1600


@pytest.mark.parametrize("keep", ["device", "cpu", "disk"])
def test_recorded_saved_and_loaded(sharp, ids, keep, tmp_path) -> None:
    folder = tmp_path / "disk.atlas" if keep == "disk" else None
    with attlas.record(sharp, keep=keep, folder=folder) as atlas, torch.no_grad():
        sharp(ids)
    check(atlas)
    atlas.save(tmp_path / "run.atlas")
    again = attlas.load(tmp_path / "run.atlas")
    check(again)
    assert all(torch.equal(A.softmax_weights.lse(), B.softmax_weights.lse()) for A, B in zip(atlas, again, strict=True))


@pytest.mark.parametrize("keep", ["device", "disk"])
def test_steps_of_a_generation(sharp, ids, keep, tmp_path) -> None:
    folder = tmp_path / "disk.atlas" if keep == "disk" else None
    with attlas.record(sharp, keep=keep, folder=folder) as atlas:
        sharp.generate(ids, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert atlas[0].shape == (2, 4, 16, 16)
    check(atlas)


def test_files_of_before_still_load(sharp, ids, tmp_path, monkeypatch) -> None:
    with attlas.record(sharp) as atlas, torch.no_grad():
        sharp(ids)
    put = storage.Writer.put

    def older(self, name, t):
        return put(self, name, t.float() if name == "lse" else t)

    monkeypatch.setattr(storage.Writer, "put", older)
    monkeypatch.setattr("attlas.recording.atlas.manifest._FORMAT_VERSION", 1)
    atlas.save(tmp_path / "run.atlas")
    monkeypatch.undo()
    (entry, *_) = deserialization.read(tmp_path / "run.atlas", verify=True, score=None)["entries"]
    assert entry.matrix.softmax_weights._lse.dtype is torch.float32
    check(attlas.load(tmp_path / "run.atlas"))
