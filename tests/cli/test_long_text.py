"""A hundred thousand tokens of a novel through the smallest Llama: recorded, and read in a report that stays small."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

import attlas
from attlas import models
from attlas.cli import main

pytestmark = [pytest.mark.external, pytest.mark.slow]


@pytest.mark.skipif(not os.environ.get("ATTLAS_LONG"), reason="minutes of all cores: ATTLAS_LONG=1 runs it")
def test_a_novel(external_data: Path, tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(models.path())
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=131_072,
    )
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    tokenizer.save_pretrained(tmp_path / "llama")
    text, out = external_data / "text" / "war_and_peace_2600-0.txt", tmp_path / "run.atlas"
    given = ["--model", str(tmp_path / "llama"), "--text", str(text), "--tokens", "100000", "--keep", "statistics"]
    command = [sys.executable, "-m", "attlas", "record", *given, "-o", str(out)]
    subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": str(os.cpu_count())}, check=True)
    atlas = attlas.load(out)
    for layer in range(2):
        found = atlas.entry(layer).statistics
        assert found["entropy"].shape == (1, 2, 100_000)
        torch.testing.assert_close(
            found["column_mass"].double().sum(-1), torch.full((1, 2), 1e5).double(), rtol=1e-4, atol=0
        )
    assert main(["report", str(out), "-o", str(tmp_path / "report.html")]) == 0
    page = (tmp_path / "report.html").read_text("utf-8")
    assert len(page) < 12_000_000
    assert '"text_length":100000' in page
