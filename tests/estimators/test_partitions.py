"""Regression over the partitions of a Dask frame is that of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.estimators.frames import FEATURES, dask, frames, table

from attlas import Gaussian
from attlas.errors import DtypeError, ShapeError
from attlas.estimators import AttentionClassifier, AttentionRegressor, kernel_sums

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]  # those of Dask


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("kernel", ["gaussian", "laplace", "epanechnikov", "boxcar", "triangular"])
def test_memory_in_partitions(tmp_path: Path, kernel: str, outputs: int) -> None:
    whole, queries = table(outputs=outputs), table(50)[FEATURES]
    names: Any = [f"y{i}" for i in range(outputs)] if outputs > 1 else "y0"
    settings = {"kernel": kernel, "bandwidth": [0.4, 30.0], "tolerance": 0}
    wanted = AttentionRegressor(**settings).fit(whole[FEATURES], whole[names]).predict(queries)
    frames.from_pandas(whole, npartitions=11).to_parquet(tmp_path / "memory")
    memory = frames.read_parquet(tmp_path / "memory")
    assert memory.npartitions == 11
    # The estimator that asks has the bandwidths, and few points of its own, which count nowhere.
    few = AttentionRegressor(**settings).fit(whole[FEATURES][:7], whole[names][:7])
    np.testing.assert_allclose(few.predict(queries, memory=memory), wanted, rtol=1e-12)


def test_the_tolerance_is_that_of_each_partition() -> None:
    whole, queries = table(2000), table(50)[FEATURES]
    model = AttentionRegressor(bandwidth="scott").fit(whole[FEATURES], whole.y0)
    found = model.predict(queries, memory=frames.from_pandas(whole, npartitions=4))
    np.testing.assert_allclose(found, model.predict(queries), rtol=1e-7)


@pytest.mark.parametrize("names", ["y0", ["y0", "y1"]])
def test_queries_in_partitions(names: Any) -> None:
    whole, queries = table(outputs=2), table(60)
    model = AttentionRegressor(bandwidth="scott").fit(whole[FEATURES], whole[names])
    found = model.predict(frames.from_pandas(queries, npartitions=5))
    assert hasattr(found, "__dask_graph__")  # nothing is computed yet
    result = found.compute()
    assert result.index.equals(queries.index)
    np.testing.assert_array_equal(result.to_numpy(), model.predict(queries[FEATURES]))


def test_empty_partitions() -> None:
    whole, queries = table().sort_values("north", ignore_index=True), table(30)
    model = AttentionRegressor(bandwidth="scott", tolerance=0).fit(whole[FEATURES], whole.y0)
    memory, south = frames.from_pandas(whole, npartitions=4), whole[whole.north < -1]
    found = model.predict(queries[FEATURES], memory=memory[memory.north < -1])
    few = AttentionRegressor(bandwidth=model.bandwidth_, tolerance=0).fit(south[FEATURES], south.y0)
    np.testing.assert_allclose(found, few.predict(queries[FEATURES]), rtol=1e-12)
    with pytest.raises(ShapeError, match="memory must have rows"):
        model.predict(queries[FEATURES], memory=memory[memory.north < -100])
    points = memory[memory.north > 1]
    assert (memory.map_partitions(len).compute() > 0).all()
    some = model.predict(points).compute()
    np.testing.assert_array_equal(some.to_numpy(), model.predict(whole[FEATURES][whole.north > 1]))


def test_what_a_worker_gets_has_no_training_data() -> None:
    whole = table(2000)
    model = AttentionRegressor(bandwidth="scott").fit(whole[FEATURES], whole.y0)
    memory, sizes, delayed = frames.from_pandas(whole[:20], npartitions=1), [], dask.delayed

    def seen(thing: Any, **more: Any) -> Any:
        if type(thing).__name__ == "Partition":
            sizes.append(sum(t.nbytes for t in vars(thing).values() if hasattr(t, "nbytes")))
        return delayed(thing, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dask, "delayed", seen)
        model.predict(whole[FEATURES][:5], memory=memory)
    assert sizes[0] < 500


def cases() -> dict[str, tuple[Any, type[Exception], str]]:
    whole = table(40)
    frame, X, y = frames.from_pandas(whole, npartitions=2), whole[FEATURES], whole.y0
    model = AttentionRegressor(bandwidth="scott").fit(X, y)
    unnamed = AttentionRegressor(bandwidth="scott").fit(X.to_numpy(), y)
    local = AttentionRegressor(bandwidth="scott", degree=1).fit(X, y)
    scored = AttentionRegressor(Gaussian(1.0), bandwidth="scott").fit(X, y)
    nearest = AttentionRegressor(bandwidth="scott", outside="nearest").fit(X, y)
    labels = AttentionClassifier(bandwidth="scott").fit(X, y > y.mean())
    return {
        "fit": (lambda: AttentionRegressor().fit(frame[FEATURES], frame.y0), DtypeError, "data must be in memory"),
        "fit y": (lambda: AttentionRegressor().fit(X, frame.y0), DtypeError, "data must be in memory"),
        "classes": (lambda: AttentionClassifier().fit(frame[FEATURES], y), DtypeError, "data must be in memory"),
        "predict classes": (lambda: labels.predict(frame[FEATURES]), DtypeError, "data must be in memory"),
        "weights": (lambda: model.weights(frame[FEATURES]), DtypeError, "data must be in memory"),
        "array": (lambda: model.predict(frame[FEATURES].to_dask_array()), DtypeError, "must be data frames"),
        "pandas": (lambda: model.predict(X, memory=whole), DtypeError, "must be data frames"),
        "names": (lambda: unnamed.predict(X.to_numpy(), memory=frame), DtypeError, "told by their names"),
        "columns": (lambda: model.predict(X, memory=frame[FEATURES]), ShapeError, "one more for each output"),
        "absent": (lambda: model.predict(X, memory=frame[["north", "y0"]]), ShapeError, "the columns of the features"),
        "lines": (lambda: local.predict(X, memory=frame), ShapeError, "a kernel that has a name"),
        "score": (lambda: scored.predict(X, memory=frame), ShapeError, "a kernel that has a name"),
        "nearest": (lambda: nearest.predict(X, memory=frame), ShapeError, "outside='nan'"),
        "std": (lambda: model.predict(X, True, memory=frame), ShapeError, "a kernel that has a name"),
        "std of queries": (lambda: model.predict(frame, True), ShapeError, "standard deviations"),
        "nan": (lambda: model.predict(X, memory=frame.assign(y0=np.nan)), ShapeError, "Dask frames must be finite"),
    }


def test_what_is_refused() -> None:
    for name, (work, error, text) in cases().items():
        with pytest.raises(error, match=text):
            pytest.fail(f"{name} gave {work()}")


def test_sums_of_other_kernels_or_bandwidths_do_not_merge() -> None:
    X = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    one = kernel_sums("gaussian", X, X, X, 1.0)
    assert one.merge(one.rows(slice(None))).kernel == "gaussian"
    for kernel, bandwidth in (("laplace", 1.0), ("gaussian", 1.1)):
        with pytest.raises(ShapeError, match="one kernel and one bandwidth"):
            one.merge(kernel_sums(kernel, X, X, X, bandwidth))
    whole = table(60)
    halves = [AttentionRegressor().fit(whole[FEATURES][i::2], whole.y0[i::2]) for i in range(2)]
    with pytest.raises(ShapeError, match="one kernel and one bandwidth"):  # each has searched for its own
        halves[0].partial_sums(whole[FEATURES]).merge(halves[1].partial_sums(whole[FEATURES]))
