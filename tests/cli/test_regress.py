"""``attlas regress`` end to end: what is printed and written, predictions of the estimator, whole error texts."""

import csv
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("sklearn", reason="kernel regression is an estimator of scikit-learn (attlas[sklearn])")

from sklearn.linear_model import LinearRegression
from sklearn.model_selection import LeaveOneOut, cross_val_predict

from attlas.cli import main, regress
from attlas.cli.regress_baselines import judge, linear, mean
from attlas.cli.regress_words import Feature, number
from attlas.estimators import AttentionRegressor

generator = np.random.default_rng(11)
X = generator.uniform(-1.0, 1.0, (60, 3))
X[:, 2] = generator.integers(0, 2, 60)
Y = np.sin(4.0 * X[:, 0]) + X[:, 2] + 0.1 * generator.normal(size=60)
NEW = generator.uniform(-1.0, 1.0, (9, 3))
H = "0.2,0.9,0.01"


def put(path: Path, names: list[str], rows: np.ndarray, delimiter: str = ",", decimal: str = ".") -> Path:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerow(names)
        writer.writerows([[repr(float(cell)).replace(".", decimal) for cell in row] for row in rows])
    return path


def records(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))


@pytest.fixture
def data(tmp_path: Path) -> str:
    return str(put(tmp_path / "data.csv", ["a", "b", "sex", "y"], np.column_stack([X, Y])))


@pytest.fixture
def new(tmp_path: Path) -> str:
    return str(put(tmp_path / "new.csv", ["sex", "b", "a"], NEW[:, ::-1]))


MODEL = AttentionRegressor(bandwidth=[0.2, 0.9, 0.01]).fit(X, Y)


# ------------------------------------------------------------------------------------------------------------ numbers


def test_prints_bandwidths_and_errors_that_pipes_can_read(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["regress", data, "--target", "y"]) == 0
    out, err = capsys.readouterr()
    assert "\x1b" not in out
    assert "learning the bandwidths on 60 rows" in err
    fit = AttentionRegressor().fit(X, Y)
    lines = out.splitlines()
    assert lines[0] == "y from 3 features, 60 rows of data.csv"
    assert re.fullmatch(
        r"  Gaussian kernel, local mean, bandwidths of least leave-one-out error; fitted in [\d.]+ m?s", lines[1]
    )
    rows = {line.split()[0]: line.split()[1:] for line in lines[4:7]}
    assert set(rows) == {"a", "b", "sex"}
    for name, h, spread in zip(("a", "b", "sex"), fit.bandwidth_, X.std(0, ddof=1), strict=True):
        assert rows[name][:3] == [number(h), number(spread), number(h / spread, 3)]
    # What matters most stands first.
    assert [line.split()[0] for line in lines[4:7]] == [
        name for _, name in sorted(zip(fit.bandwidth_ / X.std(0, ddof=1), ("a", "b", "sex"), strict=True))
    ]
    left = Y - fit.leave_one_out()
    r2 = 1.0 - (left**2).sum() / ((Y - Y.mean()) ** 2).sum()
    assert re.search(rf"kernel regression +{re.escape(number(float(np.sqrt((left**2).mean()))))} +{r2:.3f}\n", out)
    assert r2 == pytest.approx(fit.loo_score_)
    assert "below the linear model's" in out


def test_json_has_all_numbers(data: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["regress", data, "--target", "y", "--bandwidth", H, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    left = Y - MODEL.leave_one_out()
    line = Y - cross_val_predict(LinearRegression(), X, Y, cv=LeaveOneOut())
    flat = Y - [np.delete(Y, i).mean() for i in range(60)]
    for name, residuals in (("mean", flat), ("linear", line), ("kernel_regression", left)):
        told = found["leave_one_out"][name]
        assert told["error"] == pytest.approx(np.sqrt((residuals**2).mean()))
        assert told["r2"] == pytest.approx(1.0 - (residuals**2).sum() / ((Y - Y.mean()) ** 2).sum())
    neighbours = MODEL.effective_neighbours(X)
    assert found["effective_neighbours"]["median"] == pytest.approx(np.median(neighbours))
    assert [feature["bandwidth"] for feature in found["features"]] == [0.2, 0.9, 0.01]
    assert found["features"][2]["gap"] == 1.0
    assert (found["source"], found["rows"], found["dropped"], found["rule"]) == ("data.csv", 60, 0, "given")


@pytest.mark.parametrize("bandwidth", ["scott", "silverman", "0.3"])
@pytest.mark.parametrize("more", [[], ["--degree", "1"], ["--kernel", "epanechnikov"]])
def test_options_reach_the_estimator(
    data: str, bandwidth: str, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = bandwidth if bandwidth.isalpha() else float(bandwidth)
    settings = {"degree": 1} if "--degree" in more else {"kernel": "epanechnikov"} if more else {}
    model = AttentionRegressor(bandwidth=given, **settings).fit(X[:, [0]], Y)
    arguments = ["regress", data, "--target", "y", "--features", "a", "--bandwidth", bandwidth, "--json", *more]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    error = np.sqrt(((Y - model.leave_one_out()) ** 2).mean())
    assert found["leave_one_out"]["kernel_regression"]["error"] == pytest.approx(error)
    assert found["features"][0]["bandwidth"] == pytest.approx(model.bandwidth_[0])


def test_words_say_what_to_make_of_it(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["regress", data, "--target", "y", "--bandwidth", "0.2,90,0.01"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"^  b .* hardly matters$", out, flags=re.M)
    assert re.search(r"^  sex .*━ the same value only$", out, flags=re.M)
    straight = put(tmp_path / "line.csv", ["x", "y"], np.column_stack([X[:, 0], 3.0 * X[:, 0] + 0.01 * X[:, 1]]))
    assert main(["regress", str(straight), "--target", "y", "--bandwidth", "0.5"]) == 0
    assert "A linear model predicts better here; --degree 1 fits lines locally." in capsys.readouterr().out
    noise = put(tmp_path / "noise.csv", ["x", "y"], np.column_stack([X[:, 0], X[:, 1]]))
    assert main(["regress", str(noise), "--target", "y", "--bandwidth", "0.01"]) == 0
    assert "The features say nothing about the target" in capsys.readouterr().out
    assert main(["regress", data, "--target", "y", "--kernel", "boxcar", "--bandwidth", "1e-6"]) == 0
    assert "100 % of the rows reach no other: the mean stands in for them" in capsys.readouterr().out


def test_a_pipe_and_missing_values(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    text = ";x;y\n0;1,5;2\n1;;3\n2;4,5;2\n3;3;5\n"  # an index without a name, as data frames write it
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    assert main(["regress", "-", "--target", "y", "--decimal", ",", "--drop-missing", "--bandwidth", "1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("y from 1 feature, 3 rows of standard input\n")
    assert "  1 row with a missing value is left out\n" in out


# --------------------------------------------------------------------------------------------------------- baselines


@pytest.mark.parametrize("scale", [1.0, 1e-150, 1e150])
def test_baselines_are_those_of_refitting(scale: float) -> None:
    wide = np.column_stack([X, 2.0 * X[:, 0], np.ones(60)]) * scale  # a copy and a constant do no harm
    refitted = Y - cross_val_predict(LinearRegression(), X, Y, cv=LeaveOneOut())
    np.testing.assert_allclose(linear(wide, scale * Y) / scale, refitted, atol=1e-9)
    np.testing.assert_allclose(mean(Y), Y - [np.delete(Y, i).mean() for i in range(60)], atol=1e-12)
    judged = judge(linear(wide, scale * Y), scale * Y)
    assert judged.error == pytest.approx(scale * np.sqrt((refitted**2).mean()))


def test_weighted_baselines_are_those_of_refitting() -> None:
    w = np.random.default_rng(2).uniform(0.2, 3.0, len(Y))
    flat, line = np.empty(len(Y)), np.empty(len(Y))
    for i in range(len(Y)):
        rest = np.arange(len(Y)) != i
        flat[i] = Y[i] - np.average(Y[rest], weights=w[rest])
        fitted = LinearRegression().fit(X[rest], Y[rest], sample_weight=w[rest])
        line[i] = Y[i] - fitted.predict(X[i : i + 1])[0]
    np.testing.assert_allclose(mean(Y, w), flat, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(linear(X, Y, w), line, rtol=1e-9, atol=1e-10)
    assert judge(flat, Y, w).error == pytest.approx(np.sqrt(np.average(flat**2, weights=w)))
    whole = np.repeat(np.arange(len(Y)), np.arange(len(Y)) % 3)
    counts = np.bincount(whole, minlength=len(Y)).astype(float)
    known, found = judge(flat[whole], Y[whole]), judge(flat, Y, counts)
    assert (found.error, found.r2) == pytest.approx((known.error, known.r2))


def test_baselines_without_enough_rows_are_not_defined() -> None:
    assert np.isnan(linear(X[:3], Y[:3])).all()
    assert np.isnan(mean(Y[:1])).all()
    alone = np.zeros((5, 1))
    alone[2] = 1.0  # this row alone decides about the slope
    assert np.isnan(linear(alone, np.arange(5.0))).tolist() == [False, False, True, False, False]
    assert np.isnan(judge(np.full(3, np.nan), Y[:3]).error)


# ------------------------------------------------------------------------------------------------------- predictions


def test_predictions_are_those_of_the_estimator(
    data: str, new: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, kept = tmp_path / "out.csv", tmp_path / "fit.safetensors"
    arguments = ["--bandwidth", H, "--predict", new, "-o", str(out), "--std", "--save", str(kept)]
    assert main(["regress", data, "--target", "y", *arguments]) == 0
    assert f"{out}          9 rows with y_predicted and y_std" in capsys.readouterr().out
    rows = records(out)
    assert list(rows[0]) == ["sex", "b", "a", "y_predicted", "y_std"]
    expected, std = MODEL.predict(NEW, return_std=True)
    np.testing.assert_array_equal([float(row["y_predicted"]) for row in rows], expected)
    np.testing.assert_array_equal([float(row["y_std"]) for row in rows], std)
    np.testing.assert_array_equal([float(row["a"]) for row in rows], NEW[:, 0])
    opened = AttentionRegressor.load(kept)
    assert opened.feature_names_in_.tolist() == ["a", "b", "sex"]
    with pytest.warns(UserWarning, match="feature names"):
        np.testing.assert_array_equal(opened.predict(NEW), expected)


def test_a_kept_fit_predicts_the_same_without_its_table(data: str, new: str, tmp_path: Path) -> None:
    kept, first, again = (str(tmp_path / name) for name in ("fit.safetensors", "first.csv", "again.csv"))
    learn = ["regress", data, "--target", "y", "--features", "b,a,sex", "--bandwidth", "0.9,0.2,0.01", "--save", kept]
    assert main([*learn, "--predict", new, "-o", first, "--std"]) == 0
    assert main(["regress", "--load", kept, "--predict", new, "-o", again, "--std", "--target", "y"]) == 0
    assert Path(again).read_bytes() == Path(first).read_bytes()
    assert main(["regress", "--load", kept, "--predict", new, "-o", again]) == 0
    assert [row["predicted"] for row in records(Path(again))] == [row["y_predicted"] for row in records(Path(first))]


def test_a_fit_without_names_takes_the_columns_as_they_come(new: str, tmp_path: Path) -> None:
    kept, out = tmp_path / "fit.safetensors", tmp_path / "out.csv"
    MODEL.save(kept)
    assert main(["regress", "--load", str(kept), "--predict", new, "-o", str(out), "--features", "a,b,sex"]) == 0
    found = [float(row["predicted"]) for row in records(out)]
    np.testing.assert_array_equal(found, MODEL.predict(NEW))
    bare = put(tmp_path / "bare.csv", ["k", "l", "m"], NEW)
    assert main(["regress", "--load", str(kept), "--predict", str(bare), "-o", str(out)]) == 0
    np.testing.assert_array_equal([float(row["predicted"]) for row in records(out)], found)


def test_weights_reach_the_estimator(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    w = np.random.default_rng(4).integers(0, 3, len(Y)).astype(float)
    table = str(put(tmp_path / "weighted.csv", ["a", "w", "b", "sex", "y"], np.column_stack([X[:, 0], w, X[:, 1:], Y])))
    assert main(["regress", table, "--target", "y", "--weights", "w", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    model = AttentionRegressor(weights_are="importance").fit(X, Y, w)
    assert [feature["name"] for feature in told["features"]] == ["a", "b", "sex"]
    np.testing.assert_allclose([feature["bandwidth"] for feature in told["features"]], model.bandwidth_)
    assert told["weights"] == "w"
    assert told["rows"] == int((w > 0).sum())
    assert told["leave_one_out"]["kernel_regression"]["error"] == pytest.approx(np.sqrt(model.loo_loss_), rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "found", "fix"),
    [
        (["--load", "f", "--target", "y", "--kernel", "laplace"], "--kernel with --load", "leave --kernel out"),
        (["t.csv", "--load", "f"], "t.csv and --load f", "--load f --predict t.csv -o out.csv"),
        (["--load", "f"], "no --predict", "--load FILE --predict new.csv -o out.csv"),
        (["t.csv"], "no --target", "attlas regress FILE --target COLUMN"),
        (["--target", "y"], "no table", "attlas regress FILE --target COLUMN"),
    ],
)
def test_options_that_do_not_go_together_are_named(
    arguments: list[str], found: str, fix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["regress", *arguments]) == 2
    assert capsys.readouterr().err.splitlines()[1:] == [f"  found: {found}", f"  fix: {fix}"]


def test_negative_weights_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = str(put(tmp_path / "t.csv", ["a", "w", "y"], np.column_stack([X[:, 0], -np.ones(len(Y)), Y])))
    assert main(["regress", table, "--target", "y", "--weights", "w"]) == 2
    assert "found: -1 in the column w" in capsys.readouterr().err


def test_other_columns_stay_as_they_were(data: str, tmp_path: Path) -> None:
    asked, out = tmp_path / "new.csv", tmp_path / "out.csv"
    asked.write_text('note;a;b;sex\n"one; ""two""\nthree";0,5;0;1\nplain;;1;1\n')
    arguments = ["--bandwidth", H, "--decimal", ",", "--drop-missing", "--predict", str(asked), "-o", str(out)]
    comma = put(tmp_path / "comma.csv", ["a", "b", "sex", "y"], np.column_stack([X, Y]), ";", ",")
    assert main(["regress", str(comma), "--target", "y", *arguments]) == 0
    expected = repr(float(MODEL.predict([[0.5, 0.0, 1.0]])[0])).replace(".", ",")
    assert out.read_text() == (f'note;a;b;sex;y_predicted\n"one; ""two""\nthree";0,5;0;1;{expected}\nplain;;1;1;\n')


def test_places_out_of_reach_have_no_prediction(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked, out = put(tmp_path / "far.csv", ["a"], np.array([[0.0], [50.0]])), tmp_path / "out.csv"
    arguments = ["regress", data, "--target", "y", "--features", "a", "--kernel", "boxcar", "--bandwidth", "0.3"]
    arguments += ["--predict", str(asked), "-o", str(out)]
    assert main(arguments) == 0
    assert "2 rows with y_predicted; 1 has no prediction" in capsys.readouterr().out
    assert out.read_text().splitlines()[2] == "50.0,"
    assert main([*arguments, "--outside", "nearest"]) == 0
    assert float(out.read_text().splitlines()[2].split(",")[1]) == pytest.approx(Y[X[:, 0].argmax()])


def test_long_tables_are_predicted_in_parts(
    data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("attlas.cli.regress_table.ROWS", 256)
    many = generator.uniform(-1.0, 1.0, (1000, 3))
    asked = put(tmp_path / "many.csv", ["a", "b", "sex"], many)
    out = tmp_path / "out.csv"
    assert main(["regress", data, "--target", "y", "--bandwidth", H, "--predict", str(asked), "-o", str(out)]) == 0
    found = [float(row["y_predicted"]) for row in records(out)]
    np.testing.assert_allclose(found, MODEL.predict(many), rtol=1e-12, atol=1e-14)


def test_parquet_in_and_out(data: str, tmp_path: Path) -> None:
    polars = pytest.importorskip("polars", reason="Parquet is read through polars or pyarrow")
    table, asked, out = (tmp_path / name for name in ("data.parquet", "new.parquet", "out.parquet"))
    polars.read_csv(data).write_parquet(table)
    polars.DataFrame(NEW, schema=["a", "b", "sex"]).write_parquet(asked)
    arguments = ["regress", str(table), "--target", "y", "--bandwidth", H, "--predict", str(asked), "-o"]
    assert main([*arguments, str(out)]) == 0
    frame = polars.read_parquet(out)
    assert frame.columns == ["a", "b", "sex", "y_predicted"]
    np.testing.assert_array_equal(frame["y_predicted"].to_numpy(), MODEL.predict(NEW))
    assert main([*arguments, str(tmp_path / "out.csv")]) == 0
    rows = records(tmp_path / "out.csv")
    assert [float(row["y_predicted"]) for row in rows] == MODEL.predict(NEW).tolist()


def test_a_wrong_row_leaves_no_half_file(data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked, out = put(tmp_path / "new.csv", ["a", "b", "sex"], NEW), tmp_path / "out.csv"
    out.write_text("before")
    with asked.open("a") as file:
        file.write("1,high,0\n")
    before = sorted(tmp_path.iterdir())
    assert main(["regress", data, "--target", "y", "--bandwidth", H, "--predict", str(asked), "-o", str(out)]) == 2
    assert "new.csv: line 11, column b\n  found: 'high'\n" in capsys.readouterr().err
    assert out.read_text() == "before"
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
def test_ctrl_c_leaves_no_half_file(data: str, tmp_path: Path) -> None:
    """A pipe that never ends is predicted row by row, until the signal."""
    out = tmp_path / "out.csv"
    command = [sys.executable, "-m", "attlas.cli", "regress", data, "--target", "y", "--bandwidth", H]
    with subprocess.Popen(
        [*command, "--predict", "-", "-o", str(out)], stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stderr is not None
        process.stdin.write("a,b,sex\n" + "0,0,0\n" * 400)
        process.stdin.flush()
        while "leaving each row out" not in process.stderr.readline():
            pass
        while not list(tmp_path.glob(".out-*")):
            assert process.poll() is None
        time.sleep(1.0)  # the file is there a moment before anybody would remove it
        process.send_signal(signal.SIGINT)
        assert process.wait() == 130
        assert process.stderr.read().endswith("attlas: stopped.\n")
    assert not list(tmp_path.glob("*out*"))


# ----------------------------------------------------------------------------------------------------------- pictures


@pytest.mark.parametrize("features", ["a", "a,sex", "a,b,sex"])
@pytest.mark.parametrize("kernel", ["gaussian", "boxcar"])
def test_draws_the_fit(
    data: str, tmp_path: Path, features: str, kernel: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib", reason="pictures are drawn with matplotlib")
    plot = tmp_path / "fit.svg"
    arguments = ["--features", features, "--kernel", kernel, "--bandwidth", "0.1", "--plot", str(plot)]
    assert main(["regress", data, "--target", "y", *arguments]) == 0
    text = plot.read_text("utf-8")
    assert f"{'y over a' if features == 'a' else 'What y does with each feature'}" in text or "<path" in text
    assert str(plot) in capsys.readouterr().out


def test_features_that_say_nothing_are_not_drawn() -> None:
    flat, steep = Feature("flat", 100.0, 1.0, 0.0), Feature("steep", 0.1, 1.0, 0.0)
    assert (flat.flat, steep.flat) == (True, False)
    assert Feature("constant", 1.0, 0.0, 0.0).flat


# ------------------------------------------------------------------------------------------------------------- errors

ERRORS = [
    (["--target", "z"], "regress: --target and --features must be columns of the table.\n"
     "  found: --target z; data.csv has a, b, sex, y\n  fix: --target a\n"),
    (["--target", "y", "--features", "a,sexx"], "regress: --target and --features must be columns of the table.\n"
     "  found: --features sexx; data.csv has a, b, sex, y\n  fix: --features sex\n"),
    (["--target", "y", "--features", "a,y"], "regress: every column can be used once.\n"
     "  found: y twice\n  fix: leave it out of --features\n"),
    (["--target", "y", "--bandwidth", "wide"],
     "regress: --bandwidth must be loo, scott, silverman, or numbers above 0 with commas between.\n"
     "  found: --bandwidth wide\n  fix: --bandwidth loo\n"),
    (["--target", "y", "--bandwidth", "1,2"], "regress: --bandwidth must be one number, or one for each feature.\n"
     "  found: 2 numbers, 3 features: a, b, sex\n  fix: --bandwidth loo\n"),
    (["--target", "y", "--predict", "new.csv"], "regress: --predict and -o go together.\n"
     "  found: --predict alone\n  fix: --predict ... -o FILE\n"),
    (["--target", "y", "-o", "out.csv"], "regress: --predict and -o go together.\n"
     "  found: -o alone\n  fix: -o ... --predict FILE\n"),
    (["--target", "y", "--std"], "regress: --std goes with --predict.\n"
     "  found: --std without --predict\n  fix: --predict new.csv -o out.csv --std\n"),
    (["--target", "y", "--predict", "none.csv", "-o", "out.csv"], "regress: --predict must be a file.\n"
     "  found: no such file: none.csv\n  fix: --predict FILE\n"),
    (["--target", "y", "--predict", "new.csv", "-o", "out.xls"],
     "regress: -o must be a file that ends in .csv, .tsv, .parquet.\n"
     "  found: -o out.xls\n  fix: -o out.csv\n"),
    (["--target", "y", "--plot", "fit.gif"], "regress: --plot must be a file that ends in .png, .svg, .pdf.\n"
     "  found: --plot fit.gif\n  fix: --plot fit.png\n"),
    (["--target", "y", "--delimiter", "ab"], "regress: --delimiter must be one sign.\n"
     "  found: --delimiter 'ab'\n  fix: --delimiter ';'\n"),
    (["--target", "y", "--bandwidth", "1", "--predict", "short.csv", "-o", "out.csv"],
     "regress: every feature must be a column of the rows to predict for.\n"
     "  found: no column sex in short.csv, which has a, b\n"
     "  fix: rename the column, or leave it out with --features\n"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "told"), ERRORS)
def test_errors_are_whole_and_leave_nothing(
    data: str, new: str, tmp_path: Path, arguments: list[str], told: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    put(tmp_path / "short.csv", ["a", "b"], NEW[:, :2])
    before = sorted(tmp_path.iterdir())
    assert main(["regress", "data.csv", *arguments]) == 2
    err = capsys.readouterr().err
    assert err[err.index("attlas: ") :] == f"attlas: {told}"
    assert sorted(tmp_path.iterdir()) == before


SMALL = [
    ("a,y\n", "regress: there must be at least 2 rows.\n  found: 0 rows of t.csv\n  fix: a table with more rows\n"),
    ("a,y\n1,2\n", "regress: there must be at least 2 rows.\n  found: 1 row of t.csv\n  fix: a table with more rows\n"),
    ("y\n1\n2\n", "regress: there must be a feature.\n  found: t.csv has one column: y\n  fix: --delimiter ';'\n"),
    ("a,a,y\n1,2,3\n", "regress: --target and --features must be names that occur once.\n"
     "  found: --features a; t.csv has a, a, y\n  fix: give one of the columns a another name\n"),
    ("1,2\n3,4\n", "regress: --target and --features must be columns of the table.\n"
     "  found: --target y; t.csv has 1, 2; its first line is all numbers, so columns are called by their places\n"
     "  fix: --target 1\n"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "told"), SMALL)
def test_tables_that_cannot_do_are_refused(
    tmp_path: Path, text: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t.csv").write_text(text)
    assert main(["regress", str(tmp_path / "t.csv"), "--target", "y"]) == 2
    err = capsys.readouterr().err
    assert err[err.index("attlas: ") :] == f"attlas: {told}"


@pytest.mark.parametrize(("module", "arguments", "told"), [
    ("sklearn", [], "regress: scikit-learn must be installed for kernel regression.\n"
     "  found: no module named sklearn\n  fix: pip install 'attlas[sklearn]'\n"),
    ("matplotlib", ["--plot", "fit.png"], "regress: matplotlib must be installed for --plot.\n"
     "  found: no module named matplotlib\n  fix: pip install 'attlas[plot]'\n"),
])  # fmt: skip
def test_extras_are_named(
    data: str, module: str, arguments: list[str], told: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    find = regress.importlib.util.find_spec
    monkeypatch.setattr(regress.importlib.util, "find_spec", lambda name: None if name == module else find(name))
    assert main(["regress", data, "--target", "y", *arguments]) == 2
    assert capsys.readouterr().err == f"attlas: {told}"


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["regress", "--help"])
    assert caught.value.code == 0
    assert "  attlas regress cars.csv --target price --features age,km --plot price.png\n" in capsys.readouterr().out


def test_the_command_line_starts_without_scikit_learn() -> None:
    code = "import sys, attlas.cli; print(sorted({'sklearn', 'polars', 'pandas', 'matplotlib'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
