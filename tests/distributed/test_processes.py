"""The same in processes of their own that talk through gloo."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.contracts.conftest import Case, Sizes, build
from tests.distributed.test_equality import LINE, STATISTICS, Whole, differences, gap, shard, tensors
from tests.distributed.test_saving import atlas_of, recorded, same
from tests.processes import join, needs_gloo, on_two
from tests.recording.conftest import SIZES, causal_model
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import attlas
from attlas.distributed import save, saving
from attlas.errors import RecordingError, ShapeError

pytestmark = [pytest.mark.filterwarnings("ignore"), needs_gloo]
NCCL = pytest.mark.skipif(
    torch.cuda.device_count() < 2 or not distributed.is_nccl_available(), reason="NCCL needs two GPUs"
)
# Statistics whose results do not depend on the order of equal numbers.
ASKED = [*STATISTICS[:8], STATISTICS[10], STATISTICS[13], *STATISTICS[15:20]]


def _on(case: Case, device: str) -> Case:
    """Return a problem on a device, with leaves of its own."""
    tensors = {name: getattr(case, name) for name in ("q", "k", "v", "sink")}
    moved = {name: t.detach().to(device).requires_grad_() for name, t in tensors.items() if t is not None}
    return replace(case, score=case.score.to(device), **moved)


def check_rank(rank: int, device: str) -> None:
    mesh = init_device_mesh(device, (2,))
    for score, mask in (("Gaussian(learn)", "Causal"), ("ScaledDot", "Window")):
        case = _on(build(score, mask, Sizes(19, 23), sink=True), device)
        known = Whole(case)
        for pair in LINE:
            for plan in (None, attlas.Plan(gathered_bytes=1)):
                errors = differences(mesh, known, *pair, plan)
                assert max(errors.values()) < 1e-12, (pair, plan, errors)
            q, k = shard(case.q, mesh, pair[0]).detach(), shard(case.k, mesh, pair[1]).detach()
            with torch.no_grad():
                one = attlas.attend(case.q, case.k, mask=case.mask)
                many = attlas.attend(q, k, mask=case.mask)
                assert gap(many[..., 3:9, 5], one[..., 3:9, 5]) < 1e-12
                for found, wanted in zip(many.collect(*ASKED), one.collect(*ASKED), strict=True):
                    for a, b in zip(tensors(found), tensors(wanted), strict=True):
                        assert gap(a, b) < 1e-12, pair
    with pytest.raises(ShapeError, match="mask"):
        attlas.attend(q, shard(case.k, mesh, LINE[0][0]), mask=torch.ones(3, 3) > 0 if rank else case.mask)


@pytest.mark.parametrize(
    ("backend", "device", "start"),
    [("gloo", "cpu", "fork"), pytest.param("nccl", "cuda", "spawn", marks=[NCCL, pytest.mark.gpu])],
)
def test_two_processes(tmp_path: Path, backend: str, device: str, start: str) -> None:
    on_two(check_rank, tmp_path, device, backend=backend, start=start)


def exit_codes(work: Callable[[int, Path], None], folder: Path) -> list[int | None]:
    """Run a function in two forked processes, by rank; return how they ended."""
    context = torch.multiprocessing.get_context("fork")
    ranks = [context.Process(target=work, args=(rank, folder)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    return [process.exitcode for process in ranks]


def _killed(rank: int, folder: Path) -> None:
    join(rank, folder)
    written = saving._SharedWriter._write_parts_of_rank

    def killed(*given: Any) -> Any:
        done = written(*given)
        os.kill(os.getpid(), signal.SIGKILL)
        return done

    if rank == 1:
        saving._SharedWriter._write_parts_of_rank = killed
    try:
        save(atlas_of(rank), folder / "run.atlas", init_device_mesh("cpu", (2,)), [Shard(1)])
    except RuntimeError as error:
        (folder / "error").write_text(str(error))
    os._exit(0)  # the group is broken, and cannot be left in good order


def test_a_killed_rank(tmp_path: Path) -> None:
    assert exit_codes(_killed, tmp_path) == [0, -signal.SIGKILL]
    assert (tmp_path / "error").read_text()
    assert not (tmp_path / "run.atlas").exists()
    with pytest.raises(RecordingError):
        attlas.load(tmp_path / "run.atlas")
    atlas_of(0).save(tmp_path / "run.atlas")
    assert attlas.load(tmp_path / "run.atlas").entries
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".")]


def _failing_backward(rank: int, folder: Path) -> None:
    join(rank, folder)
    mesh, tokens = init_device_mesh("cpu", (2,)), torch.randn(1, 2, 8, 4)
    q, k, v = (shard(tokens, mesh, [Shard(2)]).requires_grad_() for _ in range(3))
    out = attlas.attend(q, k) @ v

    def fail(gradient: Any) -> None:
        raise MemoryError("none is left")

    if rank == 1:
        out.register_hook(fail)
    try:
        torch.autograd.grad(out, [q, k, v], out.detach())
    except Exception as error:  # noqa: BLE001 - gloo has errors of several classes
        (folder / f"error{rank}").write_text(str(error))
    os._exit(0)  # a script that ends by its error leaves, too


def test_an_error_in_the_backward_ends_the_other_rank(tmp_path: Path) -> None:
    assert exit_codes(_failing_backward, tmp_path) == [0, 0]
    assert (tmp_path / "error1").read_text() == "none is left"
    assert "onnection" in (tmp_path / "error0").read_text()  # that of the other rank was closed


def record_rank(rank: int, folder: Path) -> None:
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}  # as torchrun says them
    mesh, load = init_device_mesh("cpu", (2,)), transformers.AutoModelForCausalLM.from_pretrained
    atlas = recorded(load(folder / "model", tp_plan="auto", device_mesh=mesh).eval())
    assert atlas.entries[0].heads == ((0, 1), (2, 3))[rank]
    save(atlas, folder / "run.atlas", mesh, [Shard(1)])


def test_tensor_parallelism_of_transformers(tmp_path: Path) -> None:
    """A model under transformers' tensor parallelism is recorded and saved as one atlas."""
    model = causal_model(transformers.LlamaConfig(**SIZES | {"num_hidden_layers": 2, "vocab_size": 62}))
    model.save_pretrained(tmp_path / "model")
    on_two(record_rank, tmp_path, tmp_path)
    same(attlas.load(tmp_path / "run.atlas"), recorded(model))
