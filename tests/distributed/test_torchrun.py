"""A model under transformers' tensor parallelism, started by torchrun, recorded and saved as one atlas."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from tests.distributed.test_saving import recorded, same
from tests.recording.conftest import SIZES, causal_model
from torch import distributed

import attlas

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not distributed.is_gloo_available(), reason="torch has no gloo here"),
]
WORKER = """
import sys, torch, transformers
from torch import distributed
from torch.distributed.tensor import Shard
from tests.distributed.test_saving import IDS, PADDING, recorded
import attlas
from attlas.distributed import save
distributed.init_process_group("gloo")
mesh = distributed.init_device_mesh("cpu", (2,))
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], tp_plan="auto", device_mesh=mesh).eval()
atlas = recorded(model)
assert atlas.entries[0].heads == ((0, 1), (2, 3))[distributed.get_rank()], atlas.entries[0].heads
save(atlas, sys.argv[2], mesh, [Shard(1)])
distributed.barrier()
distributed.destroy_process_group()
"""


def test_tensor_parallelism_of_transformers(tmp_path: Path) -> None:
    model = causal_model(transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 2}))
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "worker.py").write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    paths = [tmp_path / name for name in ("worker.py", "model", "run.atlas")]
    root = str(Path(__file__).parents[2])
    where = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    more = {"PYTHONPATH": where, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    command += map(str, paths)
    done = subprocess.run(command, env=os.environ | more, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    same(attlas.load(paths[2]), recorded(model))
