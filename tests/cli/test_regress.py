"""``attlas regress`` end to end: what is read, printed and written, and what is refused."""

import csv
import gzip
import importlib.util
import io
import itertools
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="kernel regression is an estimator of scikit-learn (attlas[sklearn])")
pytest.importorskip("pandas", reason="attlas regress reads tables with pandas (attlas[sklearn])")

from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import LeaveOneOut, cross_val_predict
from tests.cli.conftest import Run

from attlas.cli import main, regress
from attlas.cli.options import parser
from attlas.estimators import AttentionRegressor
from attlas.foundation.installation import install_command

generator = np.random.default_rng(11)
X = generator.uniform(-1.0, 1.0, (60, 3))
X[:, 2] = generator.integers(0, 2, 60)
Y = np.sin(4.0 * X[:, 0]) + X[:, 2] + 0.1 * generator.normal(size=60)
NEW = generator.uniform(-1.0, 1.0, (9, 3))
NEW[:, 2] = np.arange(9) % 2
H = "0.2,0.9,0.01"
MODEL = AttentionRegressor(bandwidth=[0.2, 0.9, 0.01]).fit(X, Y)
finite = st.floats(-1e100, 1e100, allow_nan=False)
words = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "Cc", "Zl", "Zp")), max_size=8)


def put(path: Path, names: list[str], rows: np.ndarray, delimiter: str = ",", decimal: str = ".") -> str:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(names)
        writer.writerows([[repr(float(cell)).replace(".", decimal) for cell in row] for row in rows])
    return str(path)


def records(path: Path | str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(Path(path).read_text(encoding="utf-8"))))


@pytest.fixture
def data(tmp_path: Path) -> str:
    return put(tmp_path / "data.csv", ["a", "b", "sex", "y"], np.column_stack([X, Y]))


@pytest.fixture
def new(tmp_path: Path) -> str:
    return put(tmp_path / "new.csv", ["sex", "b", "a"], NEW[:, ::-1])


@pytest.fixture
def report(said: Run) -> Callable[..., Any]:
    return lambda *words: json.loads(said("regress", *words, "--json"))


# ------------------------------------------------------------------------------------------------------------ numbers


@pytest.mark.parametrize("more", [[], ["--degree", "1"], ["--kernel", "epanechnikov"]])
def test_errors_are_those_of_refitting(data: str, more: list[str], report: Callable[..., Any]) -> None:
    found = report(data, "--target", "y", "--bandwidth", "0.3,0.9,0.4", *more)
    options = {"degree": 1} if "--degree" in more else {"kernel": "epanechnikov"} if more else {}
    model = AttentionRegressor(bandwidth=[0.3, 0.9, 0.4], **options).fit(X, Y)
    line = Y - cross_val_predict(LinearRegression(), X, Y, cv=LeaveOneOut())
    flat = Y - [np.delete(Y, i).mean() for i in range(60)]
    for name, residuals in (("mean", flat), ("linear", line), ("kernel_regression", Y - model.leave_one_out())):
        judged = found["leave_one_out"][name]
        assert judged["error"] == pytest.approx(np.sqrt((residuals**2).mean()))
        assert judged["r2"] == pytest.approx(1.0 - (residuals**2).sum() / ((Y - Y.mean()) ** 2).sum())
    assert found["effective_neighbours"]["median"] == pytest.approx(np.median(model.effective_neighbours(X)))
    assert [feature["bandwidth"] for feature in found["features"]] == [0.3, 0.9, 0.4]
    assert (found["source"], found["rows"], found["dropped"], found["rule"]) == ("data.csv", 60, 0, "given")


def test_copied_rows_change_no_error(data: str, tmp_path: Path, report: Callable[..., Any], said: Run) -> None:
    twice = put(tmp_path / "twice.csv", ["a", "b", "sex", "y"], np.repeat(np.column_stack([X, Y]), 2, 0))
    once, copied = (report(path, "--target", "y") for path in (data, twice))
    assert (once["copies"], copied["copies"]) == (0, 60)
    for name in ("linear", "kernel_regression"):
        expected = once["leave_one_out"][name]
        assert copied["leave_one_out"][name] == pytest.approx(expected, rel=1e-3)
    assert "copies of other rows: 60 rows" in said("regress", twice, "--target", "y", "--bandwidth", H)


def test_weights_reach_the_estimator_and_the_linear_model(
    tmp_path: Path, report: Callable[..., Any], refusal: Run
) -> None:
    w = np.random.default_rng(4).integers(0, 3, len(Y)).astype(float)
    path = put(tmp_path / "weighted.csv", ["a", "w", "b", "sex", "y"], np.column_stack([X[:, 0], w, X[:, 1:], Y]))
    found = report(path, "--target", "y", "--weights", "w")
    model = AttentionRegressor(weights_are="importance").fit(X, Y, w)
    np.testing.assert_allclose([feature["bandwidth"] for feature in found["features"]], model.bandwidth_)
    assert found["rows"] == int((w > 0).sum())
    assert found["leave_one_out"]["kernel_regression"]["error"] == pytest.approx(np.sqrt(model.loo_loss_), rel=1e-6)
    used = np.flatnonzero(w)
    left = []
    for i in used:
        rest = used[used != i]
        left.append(Y[i] - LinearRegression().fit(X[rest], Y[rest], sample_weight=w[rest]).predict(X[[i]])[0])
    assert found["leave_one_out"]["linear"]["error"] == pytest.approx(
        np.sqrt(np.average(np.square(left), weights=w[used]))
    )
    negative = put(tmp_path / "t.csv", ["a", "w", "y"], np.column_stack([X[:, 0], -w, Y]))
    assert "found: -2 in the column w" in refusal("regress", negative, "--target", "y", "--weights", "w")


@pytest.mark.parametrize(
    ("column", "target", "more", "verdict"),
    [
        (X[:, 0], np.sin(6.0 * X[:, 0]), ["--bandwidth", "0.1"], "the relation is not linear."),
        (X[:, 0], 3.0 * X[:, 0] + 0.01 * X[:, 1], ["--bandwidth", "0.5"], "model predicts better here; --degree"),
        (X[:, 0], X[:, 1], ["--bandwidth", "0.01"], "predicts no better than the mean, nor does the linear model."),
        (X[:, 0], 3.0 * X[:, 0] + 0.01 * X[:, 1], ["--bandwidth", "1e6"], "mean; the linear model does."),
        (X[:, 0], np.full(60, 2.5), [], "The target is constant: there is nothing to predict."),
        (np.arange(4.0), np.array([3.0, -1.0, 2.5, -2.0]), ["--bandwidth", "0.8"], "no better than the mean"),
        (X[:, 0], Y, ["--kernel", "boxcar", "--bandwidth", "1e-6"], "100 % of the rows reach no other"),
    ],
)  # fmt: skip
def test_verdicts(
    column: np.ndarray, target: np.ndarray, more: list[str], verdict: str, tmp_path: Path, said: Run
) -> None:
    path = put(tmp_path / "t.csv", ["x", "y"], np.column_stack([column, target]))
    assert verdict in said("regress", path, "--target", "y", *more)


# ------------------------------------------------------------------------------------------------------- predictions


def test_predictions_are_those_of_the_estimator_and_of_the_saved_fit(data: str, new: str, tmp_path: Path) -> None:
    kept, first, again = (str(tmp_path / name) for name in ("fit.safetensors", "first.csv", "again.csv"))
    model = AttentionRegressor(bandwidth=[0.5, 0.9, 0.1]).fit(X, Y)
    learn = ["regress", data, "--target", "y", "--bandwidth", "0.5,0.9,0.1", "--save", kept]
    learn += ["--predict", new, "-o", first, "--std"]
    assert main(learn) == 0
    rows = records(first)
    assert list(rows[0]) == ["sex", "b", "a", "y_predicted", "y_std"]
    mean, std = model.predict(NEW, return_std=True)
    np.testing.assert_array_equal([float(row["y_predicted"]) for row in rows], mean)
    np.testing.assert_array_equal([float(row["y_std"]) for row in rows], std)
    assert main(["regress", "--load", kept, "--predict", new, "-o", again, "--std"]) == 0
    assert Path(again).read_bytes() == Path(first).read_bytes()
    model.save(kept)  # without names
    assert main(["regress", "--load", kept, "--predict", new, "-o", again, "--features", "a,b,sex"]) == 0
    np.testing.assert_array_equal([float(row["predicted"]) for row in records(again)], mean)


def test_other_cells_stay_as_they_were(tmp_path: Path) -> None:
    asked, out = tmp_path / "new.csv", tmp_path / "out.csv"
    asked.write_text('note;a;b;sex\n"one; ""two""\nthree";0,5;0;True\nplain;;1;1\n')
    path = put(tmp_path / "comma.csv", ["a", "b", "sex", "y"], np.column_stack([X, Y]), ";", ",")
    arguments = ["--bandwidth", H, "--decimal", ",", "--drop-missing", "--predict", str(asked), "-o", str(out)]
    assert main(["regress", path, "--target", "y", *arguments]) == 0
    expected = repr(float(MODEL.predict([[0.5, 0.0, 1.0]])[0])).replace(".", ",")
    assert out.read_text() == f'note;a;b;sex;y_predicted\n"one; ""two""\nthree";0,5;0;True;{expected}\nplain;;1;1;\n'


def test_no_file_that_is_read_is_written(
    data: str, new: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: Run
) -> None:
    (tmp_path / "link.csv").symlink_to(data)
    (tmp_path / "hard.csv").hardlink_to(new)
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    before = Path(data).read_bytes(), Path(new).read_bytes()
    for out in (data, "../data.csv", str(tmp_path / "link.csv"), new, "../new.csv", str(tmp_path / "hard.csv")):
        text = refusal("regress", data, "--target", "y", "--bandwidth", H, "--predict", new, "-o", out)
        assert text.startswith("regress: -o must not be a file that is read.\n")
        assert (Path(data).read_bytes(), Path(new).read_bytes()) == before


def test_plot_has_all_of_its_text_and_no_labels_that_collide() -> None:
    pytest.importorskip("matplotlib")
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from attlas.cli.regress_figures import figure

    wide = np.column_stack([X[:, 0], 1e5 + 1e5 * X[:, 1], X[:, 2]])
    model = AttentionRegressor(bandwidth=[0.2, 9e4, 0.01]).fit(wide, Y)
    names = [
        {"name": name, "column": name, "kind": "number", "bandwidth": 1.0, "reach": reach}
        for name, reach in (("a", 1.0), ("km", 2.0), ("far", 9.0))
    ]
    drawn = figure(model, wide, Y, names, "y", "x" * 30 + " words" * 30)
    canvas = FigureCanvasAgg(drawn)
    canvas.draw()
    renderer = canvas.get_renderer()
    for text in drawn.texts:
        box = text.get_window_extent(renderer)
        assert box.x0 >= 0
        assert box.x1 <= drawn.bbox.x1
    for ax in drawn.axes:
        boxes = [label.get_window_extent(renderer) for label in ax.get_xticklabels() if label.get_text()]
        boxes = sorted(boxes, key=lambda box: box.x0)
        assert all(left.x1 < right.x0 for left, right in itertools.pairwise(boxes))
    assert "not drawn: 1 feature of wider bandwidth" in drawn.texts[-1].get_text().replace("\n", " ")


# ------------------------------------------------------------------------------------------------------------- tables


@settings(max_examples=25)
@given(
    rows=st.lists(st.tuples(finite, words, finite), min_size=2, max_size=8),
    delimiter=st.sampled_from([",", ";", "\t", "|"]),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]),
)
def test_what_csv_writes_is_read(
    tmp_path: Path, rows: list[tuple[float, str, float]], delimiter: str, quoting: int, encoding: str
) -> None:
    text, path = io.StringIO(), tmp_path / "data.csv"
    writer = csv.writer(text, delimiter=delimiter, quoting=quoting, lineterminator="\r\n")
    writer.writerows([("a", "note, or; not", "y"), *rows])
    path.write_bytes(text.getvalue().encode(encoding))
    for option in ([], ["--delimiter", delimiter]):
        arguments = parse([str(path), "--target", "y", "--features", "a", *option])
        table = regress.read(path, arguments)
        np.testing.assert_array_equal(
            table.numbers(table.columns(["a", "y"], arguments), arguments), [[a, y] for a, _, y in rows]
        )


def parse(arguments: list[str]):
    return parser().parse_args(["regress", *arguments])


@pytest.mark.parametrize(
    ("text", "options", "values"),
    [
        (";a;y\n0;1,5;2\n1;4,5;-3\n", ["--decimal", ","], [[1.5, 2], [4.5, -3]]),  # the index of a data frame
        ("a;y\n1.234,5;2\n7;3\n", ["--decimal", ",", "--thousands", "."], [[1234.5, 2], [7, 3]]),
        ('a,y\n"1,234",2\n"1,234,567.5",3\n', ["--thousands", ","], [[1234, 2], [1234567.5, 3]]),
        ("a,y\nTrue,2\nFalse,3\n", [], [[1, 2], [0, 3]]),
        ("a   y\n  1  2\n3 4  \n\n 7   8\n", [], [[1, 2], [3, 4], [7, 8]]),
        ("a,y\n1,2\nNA,3\n5,\n6,7\n", ["--drop-missing"], [[1, 2], [6, 7]]),
        ('a "B C" y\n1 "x y" 2\n3\t"z" 4\n', ["--features", "a", "--delimiter", "space"], [[1, 2], [3, 4]]),
    ],
)
def test_forms_of_tables(text: str, options: list[str], values: list[list[float]], tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    arguments = parse([str(path), "--target", "y", *options])
    table = regress.read(path, arguments)
    assert regress.choose_features(table, arguments) == ["a"]
    found = table.numbers(table.columns(["a", "y"], arguments), arguments)
    np.testing.assert_array_equal(found[~np.isnan(found).any(1)], values)


CARS = """fuel,since,sold,used,price
gas,2019-03-01,2024-01-01T06:00:00Z,True,5
diesel,2020-01-01,2024-01-02 00:00:00+00:00,False,7
gas,2020-01-31,2024-01-01T12:00Z,True,6
electric,2020-02-01,2024-01-03T12:00:00+01:00,False,11
diesel,2021-06-01,2024-01-04T00:00:00.5Z,True,8
electric,2022-01-01,2024-01-05T00:00Z,False,12
"""


def test_texts_dates_and_booleans_become_features(tmp_path: Path, said: Run, refusal: Run) -> None:
    (tmp_path / "cars.csv").write_text(CARS)
    kept, out = str(tmp_path / "fit.safetensors"), str(tmp_path / "out.csv")
    asked = tmp_path / "new.csv"
    asked.write_text("used,sold,since,fuel\nFalse,2024-01-02T00:00Z,2020-01-01,gas\n")
    learn = [str(tmp_path / "cars.csv"), "--target", "price", "--bandwidth", "0.5,100,1,0.5", "--save", kept]
    told = " ".join(said("regress", *learn).split())
    assert "price from 4 features, 6 rows" in told
    assert "fuel: 3 levels, one feature of 0 and 1 for each (diesel, electric, gas)" in told
    assert "since: dates, as days since 1970-01-01 " in told
    assert "sold: dates, as days since 1970-01-01 in UTC" in told
    kind = [[0, 0, 1], [1, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 0], [0, 1, 0]]
    since = np.array(["2019-03-01", "2020-01-01", "2020-01-31", "2020-02-01", "2021-06-01", "2022-01-01"], "M8[D]")
    sold = np.array([0.25, 1.0, 0.5, 2.0 + 11.0 / 24.0, 3.0 + 0.5 / 86400.0, 4.0]) + 19723.0
    x = np.column_stack([kind, since.astype(int), sold, [1, 0, 1, 0, 1, 0]])
    model = AttentionRegressor.load(kept)
    np.testing.assert_array_equal(model.X_, x)
    assert [*model.feature_names_in_] == ["fuel=diesel", "fuel=electric", "fuel=gas", "since", "sold", "used"]
    np.testing.assert_array_equal(model.bandwidth_, [0.5, 0.5, 0.5, 100, 1, 0.5])
    expected = AttentionRegressor(bandwidth=[0.5, 0.5, 0.5, 100, 1, 0.5]).fit(x, [5, 7, 6, 11, 8, 12])
    for options in (["--load", kept], learn[:5]):
        assert main(["regress", *options, "--predict", str(asked), "-o", out]) == 0
        (row,) = records(out)
        new = expected.predict([[0, 0, 1, 18262, 19724, 0]])[0]
        assert float(row["price_predicted"]) == pytest.approx(new, rel=1e-9)
        assert (row["fuel"], row["since"]) == ("gas", "2020-01-01")
    for cells, found in (
        ("False,2024-01-02T00:00Z,2020-01-01,coal", "'coal', which no row of the fit had (diesel, electric, gas)"),
        ("False,2024-01-02T00:00,2020-01-01,gas", "'2024-01-02T00:00', a time without a zone, unlike the fit"),
        ("False,2024-01-02T00:00Z,18262,gas", "'18262' among dates"),
    ):
        asked.write_text(f"used,sold,since,fuel\n{cells}\n")
        assert found in refusal("regress", "--load", kept, "--predict", str(asked), "-o", out)
    asked.write_text("used,sold,since,fuel\nFalse,2024-01-02T00:00Z,2020-01-01,coal\n")
    assert main(["regress", "--load", kept, "--predict", str(asked), "-o", out, "--drop-missing"]) == 0
    assert records(out)[0]["price_predicted"] == ""


@pytest.mark.parametrize("degree", ["0", "1"])
def test_categories_are_learned_and_drawn(degree: str, tmp_path: Path, report: Callable[..., Any]) -> None:
    rows = np.random.default_rng(5)
    city, day = rows.integers(0, 3, 90), rows.integers(0, 400, 90)
    target = np.array([0.0, 3.0, -2.0])[city] + np.sin(day / 40.0) + 0.05 * rows.normal(size=90)
    dates = np.datetime64("2023-01-01") + day
    table = zip(np.array(["Oslo", "Rome", "Lima"])[city], dates, target, strict=True)
    text = "".join(f"{a},{b},{c}\n" for a, b, c in table)
    (tmp_path / "t.csv").write_text("city,day,y\n" + text)
    path, drawn = str(tmp_path / "t.csv"), tmp_path / "t.svg"
    found = report(path, "--target", "y", "--degree", degree)
    assert found["leave_one_out"]["kernel_regression"]["r2"] > 0.95
    assert found["columns"][0] | {"told": ""} == {
        "name": "city", "kind": "category", "levels": ["Lima", "Oslo", "Rome"], "told": "",
    }  # fmt: skip
    pytest.importorskip("matplotlib")
    assert main(["regress", path, "--target", "y", "--degree", degree, "--plot", str(drawn)]) == 0
    svg = drawn.read_text()
    assert all(f"<!-- {text} -->" in svg for text in ("city", "Lima", "Oslo", "Rome", "day"))
    assert main(["regress", path, "--target", "y", "--features", "day", "--plot", str(drawn)]) == 0
    assert "<!-- 2023-Jul -->" in drawn.read_text() or "<!-- Jul -->" in drawn.read_text()


def test_no_line_of_a_picture_begins_with_a_dot() -> None:
    pytest.importorskip("matplotlib")
    from attlas import pictures
    from attlas.cli.regress_figures import _write_titles

    for length in range(20, 60):
        figure = pictures.sheet(4.0, 3.0)
        words = f"{'word ' * 10}{'x' * (length % 12 + 1)} · {'thin lines ' * (length // 10)}· ticks: deciles"
        _write_titles(figure, "y over x", words, words)
        lines = [line for text in figure.texts for line in text.get_text().split("\n")]
        assert len(lines) > 3
        assert [line for line in lines if line.lstrip().startswith("·")] == []


def test_levels_of_dropped_rows_are_no_features(tmp_path: Path, report: Callable[..., Any]) -> None:
    (tmp_path / "t.csv").write_text("a,b,y\nx,1,1\nz,2,2\nx,3,3\nz,4,4\nw,,5\nw,,6\n")
    found = report(str(tmp_path / "t.csv"), "--target", "y", "--bandwidth", "1", "--drop-missing")
    assert [feature["name"] for feature in found["features"]] == ["a=x", "a=z", "b"]


@pytest.mark.parametrize(
    "cells", [[[1.0, 2.0], [3.0, 4.0]], [[[1.0]], [[2.0], [3.0]]], [{"a": 1}, {"a": 2}], [None, [1]]]
)
@pytest.mark.parametrize("use", [["--target", "y"], ["--target", "many"]])
def test_parquet_columns_of_lists_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cells: list[object], use: list[str]
) -> None:
    pytest.importorskip("pyarrow")
    import pandas as pd

    frame = pd.DataFrame({"x": np.arange(20.0), "many": cells * 10, "y": np.arange(20.0)})
    frame.to_parquet(tmp_path / "t.parquet")
    table = [str(tmp_path / "t.parquet"), "--bandwidth", "1"]
    assert main(["regress", *table, *use]) == 2
    assert "lists or records in column many" in capsys.readouterr().err
    assert main(["regress", *table, "--target", "y", "--features", "x"]) == 0


def test_parquet_columns_of_other_types(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    import pandas as pd

    frame = pd.DataFrame({
        "kind": pd.Categorical(["a", "b", "a", "b"]),
        "flag": pd.array([True, False, True, False], dtype="boolean"),
        "day": pd.to_datetime(["1970-01-02", "1970-01-03", "1970-01-04 12:00", "1970-01-11"], format="ISO8601"),
        "zoned": pd.to_datetime(["1970-01-02", "1970-01-03", "1970-01-04", "1970-01-11"], utc=True),
        "date": [pd.Timestamp("1970-01-02").date()] * 4,
        "y": pd.array([1, 2, 3, 4], dtype="Int64"),
    })  # fmt: skip
    frame.to_parquet(tmp_path / "t.parquet")
    kept = str(tmp_path / "fit.safetensors")
    learn = ["regress", str(tmp_path / "t.parquet"), "--target", "y", "--bandwidth", "1", "--save", kept]
    assert main([*learn, "--predict", str(tmp_path / "t.parquet"), "-o", str(tmp_path / "out.parquet")]) == 0
    expected = [[1, 0, 1, 1, 1, 1], [0, 1, 0, 2, 2, 1], [1, 0, 1, 3.5, 3, 1], [0, 1, 0, 10, 10, 1]]
    np.testing.assert_array_equal(AttentionRegressor.load(kept).X_, expected)
    written = pd.read_parquet(tmp_path / "out.parquet")
    assert [*written.columns] == [*frame.columns, "y_predicted"]
    assert written["y_predicted"].notna().all()


def test_columns_without_names_are_called_by_their_positions(tmp_path: Path, report: Callable[..., Any]) -> None:
    path = tmp_path / "t.csv"
    path.write_text("2019,2020\n1,2\n3,4\n")
    assert report(str(path), "--target", "2", "--bandwidth", "1")["rows"] == 3
    assert report(str(path), "--target", "2020", "--header", "yes", "--bandwidth", "1")["rows"] == 2


REFUSED = [
    ("a,y\n1,2\n,4\n", [], "line 3, column a", "an empty cell", "--drop-missing, which leaves out such rows"),
    ("a;y\n1;2\n3,5;4\n", [], "line 3, column a", "'3,5', which has a comma", "--decimal , if"),
    ("a;y\n1,5;2\n1.234;4\n", ["--decimal", ","], "line 3, column a", "'1.234', which has a point", "--decimal ."),
    ('a,y\n"1,000",2\n"2,000",4\n', [], "line 2, column a", "'1,000', which has separators", "--thousands ,"),
    ('a;y\n1,234,567;2\n3;4\n', [], "line 2, column a", "'1,234,567', which has separators", "--thousands ,"),
    ('a;y\n1,000;2\n3;4\n', [], "line 2, column a", "'1,000', which has a comma", "--thousands , if"),
    ('a,y\n"1,234",2\n"1.234,5",4\n', [], "line 2, column a", "separators of thousands", "--thousands ,"),
    ("n;a;y\n1_0;1,5;2\n2_0;2,5;4\n", ["--thousands", ","], "column n", "'1_0'", "a file whose columns hold numbers"),
    ("a;y\n1e400;2\n1;2\n", ["--decimal", ","], "line 2, column a", "beyond the range of float64", "a file whose"),
    ('a,y\n"0,125",2\n"0,250",4\n', [], "line 2, column a", "'0,125', which has a comma", "--decimal ,"),
    ("a,b,y\n1,2,3\n4,Rome,5\n", [], "line 3, column b", "'Rome'", "--features a"),
    ("a,y\n01/02/2024,2\n01/03/2024,3\n01/02/2024,4\n01/03/2024,4\n", [], "line 2", "may be a date", "2024-12-31"),
    ("a,y\n2024-02-30,2\n2024-03-01,3\n", [], "line 2", "'2024-02-30', which no calendar has", "a day that there is"),
    ("a,y\n2024-02-01,2\nsoon,3\n2024-02-01,2\nsoon,3\n", [], "line 2", "a date in a column of numbers or", "a file"),
    ("a,y\n2024-02-01 10:00,2\n2024-02-01 10:00Z,3\n", [], "line 2", "a time zone in some rows only", "a file"),
    ("n,b,y\nAnn,1,2\nBob,2,3\nCid,3,1\n", [], "column n", "one of 3 different texts in 3 rows", "--features b"),
    ("b,y\n1,no\n2,yes\n3,no\n4,yes\n", [], "line 2, column y", "'no', a text", "AttentionClassifier"),
    ("a,y\n1e400,2\n1,2\n", [], "line 2, column a", "beyond the range of float64", "a file whose columns hold numbers"),
    ('n,a,y\n"one\ntwo",1,2\n"three\n\nfour",x,3\n', ["--features", "a"], "line 4, column a", "'x'", "a file whose"),
    ("a,y\n1,2\n3\n", [], "line 3", "1 cell, 2 columns (the delimiter is ',')", "mend that row"),
    ("\n\na,y\n1,2\n3,4,5\n", [], "line 5", "3 cells, 2 columns", "mend that row"),
    ('a,y\n1,2\n"3,4\n5,6\n', [], "t.csv", "unexpected end of data", "write a quote within quotes twice"),
    ("\n \n", [], "", "t.csv has no text", "a file with a header and some rows"),
    ("a,y\n1,2\n", [], "", "1 row of t.csv", "a longer table"),
    ("a,y\n,1\n,2\n", ["--drop-missing"], "", "0 rows of t.csv, without 2 rows with a miss", "fewer --features"),
    ("a,b,y\n1,,1\n2,,2\n", [], "line 2, column b", "as in every row: the column is empty", "--features without b"),
    ("a,,y\n1,5,1\n2,6,2\n", [], "", "column 2 of t.csv has none", "--features A,B,... leaves it out"),
    ("y\n1\n2\n", [], "", "t.csv has y", "another --delimiter"),
    ("a,a,y\n1,2,3\n", [], "names that occur once", "--features a; t.csv has a, a, y", "rename one of the columns a"),
    ('x 1,n,"B, C",y\n1,Ann,2,3\n2,Bob,1,2\n3,Cid,4,5\n', [], "column n", "one of 3", """--features 'x 1,"B, C"'"""),
    ('"B, C",y\n1,2\n3,4\n', ["--features", '"B, D"'], "", "--features B, D", """--features '"B, C"'"""),
    ("x 1,y\n1,2\n3,4\n", ["--features", "x1"], "", "--features x1", "--features 'x 1'"),
    ("n;a (m);y\nAnn;1,5;2,5\nBob;2,25;1,5\nCid;3;0,5\n", [], "column n", "one of 3", "--decimal , --features 'a (m)'"),
    ("n;b;y\nAnn;1;2,5\nBob;2;1,5\nCid;3;0,5\n", [], "column n", "one of 3", "--decimal , --features b"),
    ("n;a;b;y\nAnn;1,500;1;2\nBob;2,000;2;3\nCid;3;1;4\n", [], "column n", "one of 3", "--features b\n"),
    ("1,2\n3,4\n", [], "", "all numbers, so columns are called by their positions", "--target 1"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "options", "place", "found", "fix"), REFUSED)
def test_what_would_be_a_guess_is_refused(
    text: str, options: list[str], place: str, found: str, fix: str, tmp_path: Path, refusal: Run
) -> None:
    (tmp_path / "t.csv").write_text(text)
    told = refusal("regress", str(tmp_path / "t.csv"), "--target", "y", *options)
    assert place in told
    assert found in told.partition("found: ")[2].partition("fix: ")[0]
    assert fix in told.partition("fix: ")[2]


def test_first_fix_can_be_pasted_into_a_shell_and_works(tmp_path: Path, refusal: Run) -> None:
    """Names with blanks, commas and quotes, and decimal commas: the command with the fix reads the table."""
    rows = ["Name;'x 1';\"B, C\";it's;y", *(f"name {i};1,5;{i};{i},25;{i % 3},5" for i in range(9))]
    (tmp_path / "t.csv").write_text("\n".join(rows))
    command = ["regress", str(tmp_path / "t.csv"), "--target", "y", "--bandwidth", "1"]
    told = refusal(*command)
    fix = shlex.split(told.partition("fix: ")[2])
    assert fix == ["--decimal", ",", "--features", "'x 1',\"B, C\",it's"]
    assert main([*command, *fix]) == 0


def test_files_that_are_no_text(data: str, tmp_path: Path, refusal: Run) -> None:
    packed, latin = tmp_path / "data.csv.gz", tmp_path / "latin.csv"
    packed.write_bytes(gzip.compress(Path(data).read_bytes()))
    latin.write_bytes("größe,y\n1,2\n".encode("latin1"))
    assert f"fix: zcat {packed} > unpacked-{packed.stem}" in refusal("regress", str(packed), "--target", "y")
    assert f"fix: iconv -f latin1 -t utf-8 {latin} > utf-8-latin.csv" in refusal("regress", str(latin), "--target", "y")
    assert "No such file or directory" in refusal("regress", str(tmp_path / "none.csv"), "--target", "y")
    told = refusal("regress", "--load", data, "--predict", data, "-o", str(tmp_path / "out.csv"))
    assert told.startswith("regress: --load must be a file that attlas regress --save wrote.\n")
    assert "fix: attlas regress TABLE --target COLUMN --save data.safetensors" in told


@pytest.mark.parametrize(
    ("arguments", "found", "fix"),
    [
        (["--load", "f", "--kernel", "laplace"], "--kernel with --load", "leave --kernel out"),
        (["t.csv", "--load", "f"], "t.csv and --load f", "--load f --predict t.csv -o out.csv"),
        (["--load", "f"], "no --predict", "--load FILE --predict new.csv -o out.csv"),
        (["t.csv"], "no --target", "attlas regress FILE --target COLUMN"),
        (["--target", "y"], "no table", "attlas regress FILE --target COLUMN"),
        (["t.csv", "--target", "y", "-o", "o.csv"], "-o alone", "-o ... --predict FILE"),
        (["t.csv", "--target", "y", "--std"], "--std without --predict", "--predict new.csv -o out.csv --std"),
        (["t.csv", "--target", "y", "--plot", "fit.gif"], "--plot fit.gif", "--plot fit.png"),
        (["t.csv", "--target", "y", "--delimiter", "ab"], "--delimiter 'ab'", "--delimiter ';'"),
        (["t.csv", "--target", "y", "--thousands", "."], "one sign for both", "leave --thousands out"),
        (["-", "--target", "y", "--bandwidth", "-1"], "--bandwidth -1", "--bandwidth loo"),
    ],
)
def test_options_that_do_not_go_together_are_named(arguments: list[str], found: str, fix: str, refusal: Run) -> None:
    assert refusal("regress", *arguments).splitlines()[1:] == [f"  found: {found}", f"  fix: {fix}"]


@pytest.mark.parametrize(("module", "extra"), [("sklearn", "sklearn"), ("pandas", "sklearn"), ("matplotlib", "plot")])
def test_extras_are_named(data: str, module: str, extra: str, monkeypatch: pytest.MonkeyPatch, refusal: Run) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == module else find(name))
    told = refusal("regress", data, "--target", "y", "--plot", "fit.png")
    assert told.endswith(f"  found: no module named {module}\n  fix: {install_command(extra)}\n")


def test_the_fit_is_saved_before_the_rows_to_predict_are_read(data: str, tmp_path: Path, refusal: Run) -> None:
    (tmp_path / "new.csv").write_text("a,b,sex\n1,oops,0\n")
    files = [
        "--predict",
        str(tmp_path / "new.csv"),
        "-o",
        str(tmp_path / "out.csv"),
        "--save",
        str(tmp_path / "m.safetensors"),
    ]
    assert "oops" in refusal("regress", data, "--target", "y", "--bandwidth", H, *files)
    np.testing.assert_array_equal(AttentionRegressor.load(tmp_path / "m.safetensors").bandwidth_, MODEL.bandwidth_)


def test_an_index_with_a_name_is_a_column(tmp_path: Path, report: Callable[..., Any]) -> None:
    pytest.importorskip("pyarrow", reason="Parquet files need pyarrow")
    import pandas as pd

    frame = pd.DataFrame({"a": X[:, 0], "y": Y}).set_index("a")
    frame.to_parquet(tmp_path / "t.parquet")
    found = report(str(tmp_path / "t.parquet"), "--target", "y", "--bandwidth", "0.2")
    assert [feature["name"] for feature in found["features"]] == ["a"]


def test_json_is_utf_8_where_the_terminal_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.csv").write_text("größe,y\n1,1\n2,3\n4,2\n", encoding="utf-8")
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["regress", str(tmp_path / "t.csv"), "--target", "y", "--bandwidth", "1", "--json"]) == 0
    assert json.loads(raw.getvalue().decode("utf-8"))["features"][0]["name"] == "größe"
