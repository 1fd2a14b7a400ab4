"""The actor for Ray Data: by itself, and in a local Ray where it is installed."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import attlas
from attlas.corpus.actor import CorpusActor, finish


def numbers_of(corpus: Any) -> list[dict[str, Any]]:
    return corpus.table("arrow").to_pylist()


def test_batches_in_any_order_and_twice(model: torch.nn.Module, texts: list[list[int]], tmp_path: Path) -> None:
    """A batch that runs again takes the place of what it left."""
    whole = attlas.corpus(model, texts, tmp_path / "whole", samples=3)
    assert whole is not None
    actors = [CorpusActor(lambda: (model, None), tmp_path / "run", samples=3) for _ in range(2)]
    batches = [{"number": list(range(i, i + 5)), "ids": texts[i : i + 5]} for i in (10, 0, 15, 5)]
    for at, batch in enumerate((*batches, batches[1])):
        read = actors[at % 2](batch)
        assert read["tokens"].tolist() == [len(ids) for ids in batch["ids"]]
    found = finish(tmp_path / "run")
    assert numbers_of(found) == numbers_of(whole)
    assert [row["text"] for row in found.texts().to_pylist()] == [i << 16 for i in range(20)]
    for place in whole.heads:
        assert [s.ids for s in found.samples(*place)] == [s.ids for s in whole.samples(*place)]
    with pytest.raises(attlas.RecordingError, match="two parts"):
        overlapping = tmp_path / "overlapping"
        for batch in batches[1], {"number": [3, 9], "ids": texts[3:5]}:
            CorpusActor(lambda: (model, None), overlapping)(batch)
        # Numbers 3 and 9 begin a part of their own, and 3 is in the first one too.
        finish(overlapping)


SCRIPT = """
import sys
import ray, torch
from transformers import GPT2Config, GPT2LMHeadModel
from attlas.corpus.actor import CorpusActor, finish

def make():
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=12, n_positions=32, n_embd=8, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(config), None

if __name__ == "__main__":
    folder = sys.argv[1]
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    rows = [{"number": i, "ids": [(i * j) % 12 for j in range(3 + i)]} for i in range(12)]
    options = {"fn_constructor_args": (make, folder), "batch_size": 4, "concurrency": 1}
    read = ray.data.from_items(rows).map_batches(CorpusActor, **options).take_all()
    assert sum(row["tokens"] for row in read) == sum(3 + i for i in range(12)), read
    print(finish(folder))
    ray.shutdown()
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed: pip install 'attlas[ray]'")
def test_a_local_ray(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "4 heads, 12 texts, 102 tokens" in done.stdout
    assert not (tmp_path / "run" / "parts").exists()
    shutil.rmtree(tmp_path / "run")
