"""Regression of one Dask frame on another, in boxes with a halo, is that of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tests.estimators.frames import FEATURES, UNIT, frames, table

from attlas.errors import ShapeError
from attlas.estimators import AttentionRegressor, kernel_sums, plan_sums
from attlas.estimators.halo import Boxes, boxes_of
from attlas.estimators.sums.direct import direct_sums
from attlas.estimators.sums.task import Task, checked_task

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # those of Dask


def fitted(kernel: str, width: float, tolerance: float, names: Any, whole: pd.DataFrame) -> AttentionRegressor:
    model = AttentionRegressor(kernel, bandwidth=width * UNIT, tolerance=tolerance)
    return model.fit(whole[FEATURES], whole[names])


@pytest.mark.parametrize(
    ("kernel", "names"), [("epanechnikov", "y0"), ("boxcar", ["y0", "y1"]), ("triangular", ["y0"])], ids=str
)
def test_a_kernel_with_bounds_is_exact(tmp_path: Path, kernel: str, names: Any) -> None:
    whole, queries = table(2000, 2, 0), table(400, 2, 1)
    queries.index = pd.Index([f"place {i // 2}" for i in range(len(queries))], name="where")  # each label twice
    wanted = fitted(kernel, 0.1, 0.0, names, whole).predict(queries[FEATURES])
    few = fitted(kernel, 0.1, 0.0, names, whole[:20])  # its own points count nowhere
    columns = [*FEATURES, *([names] if isinstance(names, str) else names)]
    frames.from_pandas(whole[columns], npartitions=5).to_parquet(tmp_path / "memory")
    points = frames.from_pandas(queries, npartitions=2, sort=False)
    found = few.predict(points, memory=frames.read_parquet(tmp_path / "memory"))
    assert found.npartitions == points.npartitions
    result = found.compute()
    assert list(result.index) == list(queries.index)  # Dask may make strings of another type
    np.testing.assert_allclose(result.to_numpy(), wanted, rtol=1e-12)
    assert np.isnan(wanted).any()
    assert not np.isnan(wanted).all()
    joined = frames.concat([points, found], axis=1).compute()  # rows stay together
    np.testing.assert_array_equal(joined[FEATURES].to_numpy(), queries[FEATURES].to_numpy())
    np.testing.assert_allclose(joined[0], wanted if wanted.ndim == 1 else wanted[:, 0], rtol=1e-12)


@pytest.mark.parametrize("tolerance", [1e-3, 1e-8])
@pytest.mark.parametrize("kernel", ["gaussian", "laplace"])
def test_a_truncated_kernel_keeps_its_tolerance(kernel: str, tolerance: float) -> None:
    whole, queries = table(3000, 2, 0), table(900, 2, 1)
    width = 0.03 if kernel == "gaussian" else 0.005
    wanted = fitted(kernel, width, 0.0, "y0", whole).predict(queries[FEATURES])
    few = fitted(kernel, width, tolerance, "y0", whole[:500])
    memory = frames.from_pandas(whole[[*FEATURES, "y0"]], npartitions=16)
    found = few.predict(frames.from_pandas(queries, npartitions=2), memory=memory).compute().to_numpy()
    lost = np.isnan(found)
    gap = np.abs((queries[FEATURES].to_numpy()[:, None] - whole[FEATURES].to_numpy()) / (width * UNIT))
    nearest = np.sqrt((gap**2).sum(-1).min(-1)) if kernel == "gaussian" else gap.sum(-1).min(-1)
    assert lost.any()
    assert (nearest[lost] > 8).all()
    most = np.abs(whole.y0 - few._shift).max()
    assert np.abs(found - wanted)[~lost].max() <= 2 * tolerance * most + 1e-11


@pytest.mark.parametrize("reach", [0.0, 0.3])
def test_a_box_has_every_point_within_reach(reach: float) -> None:
    random = np.random.default_rng(2)
    points, others = random.normal(size=(2000, 3)), random.normal(size=(500, 3))
    boxes = boxes_of(points, 10)
    assert len(boxes.cut) + 1 == 16
    rows, own = boxes.holding(points)
    assert np.array_equal(np.sort(rows), np.arange(2000))  # each once
    assert np.bincount(own).max() < 2 * 2000 / 16
    sent, to = boxes.holding(others, reach)
    known = set(zip(sent.tolist(), to.tolist(), strict=True))
    near = np.abs(points[rows][:, None] - others).max(-1) < reach
    assert all((j, own[i]) in known for i, j in np.argwhere(near))
    assert len(known) == len(sent) < 500 * (2.5 if reach else 1.001)


def test_points_in_one_place_and_empty_partitions() -> None:
    whole, queries = table(600, 2, 0), table(300, 2, 1)
    whole.loc[:300, FEATURES] = [0.0, 1e3]
    whole, queries = whole.sort_values("north", ignore_index=True), queries.sort_values("north", ignore_index=True)
    model = fitted("epanechnikov", 0.2, 0.0, "y0", whole)
    memory = frames.from_pandas(whole[[*FEATURES, "y0"]], npartitions=4)
    points = frames.from_pandas(queries, npartitions=6)
    found = model.predict(points[points.north > 0], memory=memory)
    np.testing.assert_allclose(found.compute(), model.predict(queries[queries.north > 0][FEATURES]), rtol=1e-12)
    with pytest.raises(ShapeError, match="memory must have rows"):
        model.predict(points, memory=memory[memory.north < -100])
    nobody = model.predict(points, memory=memory[memory.north < -1]).compute()[queries.north > 0]
    assert nobody.isna().all()
    assert len(model.predict(points[points.north > 100], memory=memory).compute()) == 0


def test_no_box_has_the_whole_memory(monkeypatch: Any) -> None:
    whole, sizes = table(4000, 2, 0), []
    holding = Boxes.holding
    model = fitted("epanechnikov", 0.05, 0.0, "y0", whole)
    memory = frames.from_pandas(whole[[*FEATURES, "y0"]], npartitions=16)

    def counted(self: Boxes, points: Any, reach: float = 0.0) -> Any:
        rows, boxes = holding(self, points, reach)
        if reach and len(points):
            sizes.append(np.bincount(boxes, minlength=len(self.cut) + 1))
        return rows, boxes

    found = model.predict(frames.from_pandas(whole, npartitions=16), memory=memory)
    monkeypatch.setattr(Boxes, "holding", counted)
    found.compute()
    sent = np.sum(sizes, 0)
    assert 4000 < sent.sum() < 1.8 * 4000
    assert sent.max() < 3 * 4000 / 16


def test_what_is_refused() -> None:
    whole = table(400, 2, 0)[[*FEATURES, "y0"]]
    memory, points = frames.from_pandas(whole, npartitions=16), frames.from_pandas(whole, npartitions=2)
    model = fitted("epanechnikov", 0.1, 0.0, "y0", whole)
    cases: dict[str, tuple[Any, Any, str]] = {
        "tolerance": (fitted("gaussian", 0.1, 0.0, "y0", whole), {}, "a kernel without bounds must be truncated"),
        "bandwidth": (fitted("gaussian", 0.3, 1e-7, "y0", whole), {}, "16 of 16 boxes within .* of a key"),
        "std": (model, {"return_std": True}, "a kernel that has a name"),
        "memory": (model, {"memory": memory.assign(y0=np.nan)}, "Dask frames must be finite"),
        "keys": (model, {"memory": memory.assign(north=np.inf)}, "Dask frames must be finite"),
        "queries": (model, {"X": points.assign(east=np.nan)}, "Dask frames must be finite"),
        "columns": (model, {"memory": memory[FEATURES]}, "one more for each output"),
    }
    for name, (asked, more, text) in cases.items():
        with pytest.raises(ShapeError, match=text):
            asked.predict(**{"X": points, "memory": memory} | more).compute()
            pytest.fail(name)


@pytest.mark.parametrize(
    ("kernel", "d"), [("epanechnikov", 1), ("boxcar", 1), ("triangular", 1), ("boxcar", 2), ("epanechnikov", 3)]
)
def test_one_process_leaves_out_what_has_no_weight(kernel: str, d: int) -> None:
    random = torch.Generator().manual_seed(0)
    keys, x = (torch.rand(60_000, d, generator=random).double() for _ in range(2))
    h, values = (0.001, 0.01, 0.05)[d - 1], torch.randn(60_000, 2, generator=random).double()
    assert plan_sums(kernel, x, keys, values, h, tolerance=0).method == "boxes"
    found = kernel_sums(kernel, x, keys, values, h, tolerance=0)
    some = slice(0, 2000)
    one = torch.ones((), dtype=torch.float64)
    wanted = direct_sums(checked_task(Task(kernel, x[some] / h, keys / h, values, one)))
    torch.testing.assert_close(found.mean()[some], wanted.mean(), rtol=1e-12, atol=1e-12, equal_nan=True)
    torch.testing.assert_close(found.log_denominator()[some], wanted.log_denominator(), rtol=0, atol=1e-12)
