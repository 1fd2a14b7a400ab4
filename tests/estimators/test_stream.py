"""Chunk by chunk gives what a whole gives: arrays on disk, Parquet, keys in parts; and no half file is ever seen."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("sklearn", reason="the estimators need scikit-learn (attlas[sklearn])")

from sklearn.linear_model import LinearRegression
from tests.messages import refusal, said

from attlas import errors
from attlas.estimators.chunks import Chunks
from attlas.estimators.parquet import ParquetFile
from attlas.estimators.stream import predict_chunks, predict_file, sum_chunks
from attlas.estimators.sums import kernel_sums

generator = np.random.default_rng(5)
X = generator.normal(size=(1000, 3))
Y = X @ [1.0, -2.0, 0.5] + generator.normal(size=1000)
MODEL = LinearRegression().fit(X, Y)
WHOLE = MODEL.predict(X)


class Sure(LinearRegression):
    """A model that says how sure it is."""

    def predict(self, X, return_std=False):
        mean = super().predict(X)
        return (mean, np.abs(mean)) if return_std else mean


# -------------------------------------------------------------------------------------------------------------- chunks


@pytest.mark.parametrize("rows", [1, 7, 999, 1000, 5000])
def test_a_mapped_file_is_read_in_chunks(tmp_path: Path, rows: int) -> None:
    np.save(tmp_path / "x.npy", X.astype(np.float32))
    chunks = Chunks(tmp_path / "x.npy", rows=rows)
    assert chunks.total == 1000
    for _ in range(2):  # twice: a file can be walked over again
        found = list(chunks)
        assert len(found) == -(-1000 // rows)
        assert max(map(len, found)) <= rows
        np.testing.assert_array_equal(np.concatenate(found), X.astype(np.float32))
    assert isinstance(chunks.source, np.memmap)


def test_arrays_one_after_another_are_cut_where_they_are_long() -> None:
    chunks = Chunks((part for part in (X[:3], X[3:600], X[600:])), rows=256)
    assert chunks.total is None
    found = list(chunks)
    assert [len(part) for part in found] == [3, 256, 256, 85, 256, 144]
    np.testing.assert_array_equal(np.concatenate(found), X)


def test_an_array_of_one_axis_is_one_column() -> None:
    assert [part.shape for part in Chunks(X[:5, 0], rows=4)] == [(4, 1), (1, 1)]


REFUSED = [
    (lambda: Chunks(X, rows=0), "Chunks(): rows = 0"),
    (lambda: Chunks("x.csv"), "Chunks(): x.csv"),
    (lambda: Chunks(X[None]), "Chunks(): shape (1, 1000, 3)"),
    (lambda: Chunks(3), "Chunks(): int"),
    (lambda: Chunks(X, columns=["a"]), "Chunks(): columns = ['a']"),
    (lambda: predict_file(MODEL, X, "out.txt"), "predict_file(): out = 'out.txt'"),
    (lambda: Chunks(torch.zeros(1, 2, 3)), "Chunks(): shape (1, 2, 3)"),
    (lambda: sum_chunks(torch.zeros(1, 1), [], 1.0), "sum_chunks(): no chunk"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "text"), REFUSED)
def test_what_cannot_be_read_is_refused(call, text: str) -> None:
    assert refusal(errors.ShapeError, call) == text


def test_a_tensor_is_one_array() -> None:
    chunks = Chunks(torch.from_numpy(X), rows=300)
    assert chunks.total == 1000
    np.testing.assert_array_equal(np.concatenate(list(chunks)), X)


def test_columns_of_data_frames_are_told_by_their_names(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="data frames are pandas'")
    frame = pandas.DataFrame(X, columns=["a", "b", "c"], index=np.arange(1000.0)[::-1])
    model = LinearRegression().fit(frame, Y)
    for source in (frame, [frame.iloc[:400], frame.iloc[400:]]):
        np.testing.assert_array_equal(
            np.concatenate(list(predict_chunks(model, source, rows=300))), model.predict(frame)
        )
        assert Chunks(frame).total == 1000
    for source in (frame[["b", "a", "c"]], [frame[["b", "a", "c"]]]):
        with pytest.raises(ValueError, match="feature names"):  # in scikit-learn's words
            list(predict_chunks(model, source))


def test_the_file_that_is_read_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "x.npy"
    np.save(path, X)
    with pytest.raises(errors.ShapeError) as caught:
        predict_file(MODEL, path, tmp_path / "." / "x.npy")
    assert said(caught.value).startswith("predict_file(): out = ")
    np.testing.assert_array_equal(np.load(path), X)


class Labels:
    """A model whose predictions are the first column of what it gets."""

    def predict(self, X):
        return X[:, 0]


@pytest.mark.parametrize(
    ("chunks", "suffix", "text"),
    [
        ([np.array([["n"]]), np.array([["yes"]])], "npy", "predict_file(): <U3 after <U1"),
        ([np.array([[1]]), np.array([[1.5]])], "npy", "predict_file(): float64 after int64"),
        ([np.array([["n"]], dtype=object)], "npy", "predict_file(): object"),
        ([np.array([["n"]])], "parquet", "predict_file(): <U1"),
    ],
)
def test_predictions_that_a_file_cannot_hold_are_refused(tmp_path: Path, chunks, suffix: str, text: str) -> None:
    if suffix == "parquet":
        pytest.importorskip("pyarrow", reason="Parquet files need pyarrow")
    assert refusal(errors.DtypeError, lambda: predict_file(Labels(), chunks, tmp_path / f"out.{suffix}")) == text
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------------------------------------- Parquet


def write(path: Path, groups: int = 128) -> Path:
    pandas = pytest.importorskip("pandas", reason="pandas writes the Parquet file of the test")
    pytest.importorskip("pyarrow", reason="Parquet files need pyarrow")
    columns = {"c": X[:, 2], "odd": [str(i) for i in range(1000)], "a": X[:, 0], "b": X[:, 1], "flag": X[:, 0] > 0}
    pandas.DataFrame(columns).to_parquet(path, row_group_size=groups)
    return path


@pytest.mark.parametrize("rows", [50, 128, 300, 4096])
def test_parquet_is_read_in_chunks(tmp_path: Path, rows: int) -> None:
    path = write(tmp_path / "x.parquet")
    chunks = Chunks(path, columns=["a", "b", "c", "flag"], rows=rows)
    assert chunks.total == 1000
    found = list(chunks)
    assert max(map(len, found)) <= rows
    assert {part.dtype for part in found} == {np.dtype(np.float64)}
    np.testing.assert_array_equal(np.concatenate(found), np.column_stack([X, X[:, 0] > 0]))


def test_missing_values_of_every_kind_of_number_are_nan(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow", reason="Parquet files need pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet", reason="Parquet files need pyarrow")
    decimal = arrow.array(["1.5", None]).cast(arrow.decimal128(4, 2))
    table = arrow.table({"whole": [3, None], "flag": [True, None], "real": [0.5, None], "decimal": decimal})
    parquet.write_table(table, tmp_path / "x.parquet")
    (found,) = Chunks(tmp_path / "x.parquet")
    np.testing.assert_array_equal(found, [[3.0, 1.0, 0.5, 1.5], [np.nan] * 4])


def test_a_column_that_is_the_index_of_a_frame_is_read(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas writes the Parquet file of the test")
    pytest.importorskip("pyarrow", reason="Parquet files need pyarrow")
    pandas.DataFrame({"a": X[:, 0], "b": X[:, 1]}).set_index("a").to_parquet(tmp_path / "x.parquet")
    (found,) = Chunks(tmp_path / "x.parquet", columns=["a", "b"])
    np.testing.assert_array_equal(found, X[:, :2])


def test_parquet_says_what_it_holds(tmp_path: Path) -> None:
    file = ParquetFile(write(tmp_path / "x.parquet"))
    assert (file.names, file.rows) == (["c", "odd", "a", "b", "flag"], 1000)
    assert (
        refusal(errors.ShapeError, lambda: Chunks(file.path, columns=["a", "z"]))
        == "Chunks(): no column 'z' in x.parquet"
    )


def test_parquet_is_written_in_chunks(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="pandas reads the Parquet file of the test")
    pytest.importorskip("pyarrow", reason="Parquet files need pyarrow")
    out = predict_file(Sure().fit(X, Y), X, tmp_path / "out.parquet", rows=300, return_std=True, names=["y"])
    frame = pandas.read_parquet(out)
    np.testing.assert_array_equal(frame["y"].to_numpy(), WHOLE)
    np.testing.assert_array_equal(frame["y_std"].to_numpy(), np.abs(WHOLE))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert (
        refusal(errors.MissingExtraError, lambda: Chunks(tmp_path / "x.parquet")) == "Chunks(): no module named pyarrow"
    )
    with pytest.raises(errors.MissingExtraError, match="pyarrow must be installed"):
        predict_file(MODEL, X, tmp_path / "out.parquet")
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_knows_names_reads_its_columns(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="a data frame gives a model names")
    model = LinearRegression().fit(pandas.DataFrame(X, columns=["a", "b", "c"]), Y)
    found = np.concatenate(list(predict_chunks(model, write(tmp_path / "x.parquet"), rows=99)))
    np.testing.assert_allclose(found, WHOLE, rtol=1e-12)


# --------------------------------------------------------------------------------------------------------- predictions


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_arrays_are_written_in_chunks(tmp_path: Path, outputs: int, dtype: type) -> None:
    target = np.column_stack([Y, 2 * Y])[:, :outputs].squeeze()
    model = LinearRegression().fit(X.astype(dtype), target.astype(dtype))
    seen: list[tuple[int, int]] = []
    out = predict_file(model, X.astype(dtype), tmp_path / "out.npy", rows=300, progress=lambda *done: seen.append(done))
    found = np.load(out)
    assert found.dtype == dtype
    np.testing.assert_allclose(found, model.predict(X.astype(dtype)), rtol=1e-5 if dtype is np.float32 else 1e-12)
    assert seen == [(300, 1000), (600, 1000), (900, 1000), (1000, 1000)]
    assert np.load(out, mmap_mode="r").shape == ((1000,) if outputs == 1 else (1000, 2))


def test_text_is_written_in_chunks(tmp_path: Path) -> None:
    out = predict_file(MODEL, X, tmp_path / "out.csv", rows=300, names=["price"])
    lines = out.read_text().splitlines()
    assert lines[0] == "price"
    np.testing.assert_array_equal([float(line) for line in lines[1:]], MODEL.predict(X))
    assert (
        refusal(
            errors.ShapeError,
            lambda: predict_file(LinearRegression().fit(X, np.column_stack([Y, Y])), X, tmp_path / "out.csv"),
        )
        == "predict_file(): 1 names, 2 columns"
    )
    assert out.read_text().splitlines() == lines
    assert list(tmp_path.iterdir()) == [out]


def test_no_chunk_is_an_empty_file(tmp_path: Path) -> None:
    assert np.load(predict_file(MODEL, iter(()), tmp_path / "out.npy")).shape == (0,)


# ---------------------------------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize("kernel", ["gaussian", "laplace", "epanechnikov", "triangular", "boxcar"])
def test_keys_may_come_in_chunks(kernel: str) -> None:
    x = torch.as_tensor(np.concatenate([X[:50], X[:5] + 40.0]))  # the last five are far from every key
    keys, values = torch.as_tensor(X), torch.as_tensor(np.column_stack([Y, Y**2]))
    seen: list[int] = []
    whole = kernel_sums(kernel, x, keys, values, 0.7, tolerance=0.0)
    pairs = zip(Chunks(X, rows=170), values.split(170), strict=True)
    parts = sum_chunks(x, pairs, 0.7, kernel=kernel, tolerance=0.0, progress=seen.append)
    torch.testing.assert_close(parts.mean(), whole.mean(), rtol=1e-11, atol=1e-11, equal_nan=True)
    torch.testing.assert_close(parts.log_denominator(), whole.log_denominator(), rtol=1e-12, atol=1e-12)
    assert seen == [170, 340, 510, 680, 850, 1000]
    reverse = sum_chunks(x, [(keys[a:b], Y[a:b]) for a, b in ((600, 1000), (0, 600))], 0.7, kernel=kernel)
    torch.testing.assert_close(reverse.mean(), whole.mean()[:, :1], rtol=1e-6, atol=1e-6, equal_nan=True)


class Sum:
    """A model that adds up what it gets."""

    def predict(self, X):
        return X.sum(1)


def anonymous() -> int:
    """Return the bytes of memory that this process has for itself."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("RssAnon")).split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak of memory is read from /proc")
def test_memory_does_not_grow_with_the_rows(tmp_path: Path) -> None:
    """A file of 64 MiB is predicted, and the process itself grows by less than 48 MiB."""
    rows = 2_000_000
    mapped = np.lib.format.open_memmap(tmp_path / "x.npy", "w+", np.float64, (rows, 4))
    mapped[:: rows // 100] = 1.0
    mapped.flush()
    del mapped
    before, seen = anonymous(), []
    out = predict_file(Sum(), tmp_path / "x.npy", tmp_path / "y.npy", progress=lambda *_: seen.append(anonymous()))
    assert max(seen) - before < 48 * 2**20
    assert float(np.load(out, mmap_mode="r").sum()) == 400.0
