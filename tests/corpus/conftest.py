"""A tiny model and texts for it."""

import os

import pytest
import torch

from attlas.corpus import store

pytest.importorskip("pyarrow", reason="pyarrow is not installed: pip install 'attlas[corpus]'")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")


@pytest.fixture(scope="session")
def model() -> torch.nn.Module:
    """Give a model of two layers with two heads each, and 12 tokens."""
    torch.manual_seed(1)
    config = transformers.GPT2Config(
        vocab_size=12, n_positions=32, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    found = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.mul_(6.0 if parameter.ndim > 1 else 1.0)
    return found


@pytest.fixture(scope="session")
def texts() -> list[list[int]]:
    """Give 20 texts of 2 to 20 tokens."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(12, (2 + i % 19,), generator=generator).tolist() for i in range(20)]


@pytest.fixture(autouse=True)
def quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for no disk: a process that is killed loses nothing that the system has, a machine would."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)
    monkeypatch.setattr(store, "_SYNCHRONOUS_MODE", "OFF")
