"""Seconds of one core that kernel regression of one Dask frame on another takes, in boxes with a halo.

python benchmarks/regression_boxes.py --points 1000000 --partitions 8
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from typing import Any

import dask
import dask.dataframe
import numpy as np
import pandas as pd
import torch

from attlas.estimators import AttentionRegressor, kernel_sums

NEIGHBOURS = 30  # within the reach of the Epanechnikov kernel


def frame_of(points: int) -> pd.DataFrame:
    """Return points of the unit square with an output."""
    random = np.random.default_rng(0)
    found = pd.DataFrame(random.random((points, 2)), columns=["a", "b"])
    return found.assign(y=np.sin(9 * found.a) + found.b)


def seconds(work: Any) -> float:
    """Return the processor time of a call."""
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--points", type=int, default=1_000_000)
    parser.add_argument("--partitions", type=int, default=8)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    whole, reach = frame_of(asked.points), math.sqrt(NEIGHBOURS / asked.points / math.pi)
    frame = dask.dataframe.from_pandas(whole, npartitions=asked.partitions)
    for kernel, width, tolerance in (("epanechnikov", reach, 0.0), ("gaussian", reach / 2, 1e-7)):
        model = AttentionRegressor(kernel, bandwidth=width, tolerance=tolerance).fit(
            whole[["a", "b"]][:50], whole.y[:50]
        )
        with dask.config.set(scheduler="synchronous"):
            taken = seconds(lambda model=model: model.predict(frame, memory=frame).compute())
        print(f"{kernel:13} {taken:8.1f} s, {taken / asked.points * 1e6:.1f} µs for each query")
        keys = torch.rand(20_000, 2, dtype=torch.float64)
        pairs = seconds(lambda kernel=kernel, keys=keys: kernel_sums(kernel, keys, keys, keys[:, :1], 1.0, tolerance=0))
        print(f"{'every pair':13} {pairs / 4e8 * asked.points**2:8.0f} s, extrapolated from 4e8 pairs")


if __name__ == "__main__":
    main()
