"""The same in processes of their own that talk through gloo."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from tests.contracts.conftest import Sizes, build
from tests.distributed.test_equality import LINE, STATISTICS, differences, gap, shard, tensors
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh

import attlas
from attlas.errors import ShapeError

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(not distributed.is_gloo_available(), reason="torch has no gloo here"),
]


def _process(rank: int, folder: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    try:
        mesh, case = init_device_mesh("cpu", (2,)), build("Gaussian(learn)", "Causal", Sizes(19, 23), sink=True)
        for pair in LINE:
            errors = differences(mesh, case, *pair)
            assert max(errors.values()) < 1e-11, (pair, errors)
            q, k = shard(case.q, mesh, pair[0]).detach(), shard(case.k, mesh, pair[1]).detach()
            with torch.no_grad():
                A = attlas.attend(case.q, case.k, mask=case.mask).collect(
                    *STATISTICS[:8], STATISTICS[10], *STATISTICS[13:14], *STATISTICS[15:20]
                )
                B = attlas.attend(q, k, mask=case.mask).collect(
                    *STATISTICS[:8], STATISTICS[10], *STATISTICS[13:14], *STATISTICS[15:20]
                )
            for found, wanted in zip(B, A, strict=True):
                for one, true in zip(tensors(found), tensors(wanted), strict=True):
                    assert gap(one, true) < 1e-11, pair
        with pytest.raises(ShapeError, match="mask"):
            attlas.attend(q, shard(case.k, mesh, LINE[0][0]), mask=torch.ones(3, 3) > 0 if rank else case.mask)
    finally:
        distributed.destroy_process_group()


def test_two_processes(tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(_process, (str(tmp_path),), nprocs=2, start_method="fork")
