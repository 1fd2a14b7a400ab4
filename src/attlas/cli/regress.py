"""``attlas regress``: kernel regression on a table, judged beside plainer models, drawn, and used to predict."""

from __future__ import annotations

import argparse
import csv
import importlib.util
import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from attlas import pictures
from attlas.cli import regress_baselines as baselines
from attlas.cli.files import check_target
from attlas.cli.regress_csv import DELIMITERS, Form
from attlas.cli.regress_figures import figure
from attlas.cli.regress_predict import predict
from attlas.cli.regress_saved import check_saved, predict_with_saved
from attlas.cli.regress_table import CsvTable, ParquetTable, Table, open_table, read_table
from attlas.cli.regress_words import Feature, Fit, as_json, many, say
from attlas.cli.terminal import Help, Terminal, UsageError
from attlas.errors import MissingExtraError

if TYPE_CHECKING:
    from argparse import _SubParsersAction

    from attlas.estimators import AttentionRegressor

__all__ = ["add", "run"]

_KERNELS = ("gaussian", "laplace", "epanechnikov", "triangular", "boxcar")
_BOUNDED = ("epanechnikov", "triangular", "boxcar")
_RULES = ("loo", "scott", "silverman")
_DEFAULTS = {"kernel": "gaussian", "bandwidth": "loo", "degree": 0, "outside": "nan"}
_LOOKED_AT, _PAIRS = 2_000, 5e7  # rows whose neighbours are counted; fewer where tables are long

_EXAMPLES = """\
examples:
  attlas regress cars.csv --target price
  attlas regress cars.csv --target price --features age,km --plot price.png
  attlas regress cars.csv --target price --predict new.csv -o prices.csv --std
  attlas regress cars.csv --target price --save price.safetensors
  attlas regress --load price.safetensors --predict new.csv -o prices.csv
  zcat log.csv.gz | attlas regress - --target seconds --bandwidth scott --json
"""


def add(commands: _SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add this command to the command line."""
    command = commands.add_parser(
        "regress",
        help="predict a column of a table by kernel regression",
        description="Predict one column of a table from others as a mean over similar rows (Nadaraya-Watson, or local "
        "lines), with a bandwidth for each feature. Errors are those of rows that were left out, beside a mean and a "
        "linear model.",
        epilog=_EXAMPLES,
        formatter_class=Help,
        allow_abbrev=False,
    )
    command.add_argument("data", type=Path, nargs="?", metavar="FILE", help="CSV or Parquet; - reads CSV from a pipe")
    command.add_argument("--target", metavar="COLUMN", help="what is to be predicted")
    command.add_argument("--features", metavar="A,B,...", help="what it is predicted from (default: all others)")
    command.add_argument(
        "--weights", metavar="COLUMN", help="how much each row counts; only ratios matter (default: all the same)"
    )
    how = command.add_argument_group("the regression")
    how.add_argument(
        "--kernel",
        choices=_KERNELS,
        metavar="NAME",
        help=f"{', '.join(_KERNELS)} (default: the first)",
    )
    how.add_argument(
        "--bandwidth",
        metavar="H",
        help="loo (least leave-one-out error), scott, silverman, a number, or numbers with commas (default: loo)",
    )
    how.add_argument("--degree", type=int, choices=(0, 1), help="0: local mean, 1: local line (default: 0)")
    how.add_argument(
        "--outside",
        choices=("nan", "nearest"),
        help="what a place is given that no row reaches: nothing, or the value of the nearest row (default: nan)",
    )
    form = command.add_argument_group("the table")
    form.add_argument(
        "--delimiter", metavar="SIGN", help="between cells: , ; | tab space, or any other sign (default: found out)"
    )
    form.add_argument(
        "--decimal", choices=(".", ","), default=".", metavar="SIGN", help="decimal sign, . or , (default: .)"
    )
    form.add_argument(
        "--header",
        choices=("auto", "yes", "no"),
        default="auto",
        help="whether the first line has names; columns without are 1, 2, ... (auto: no if it is all numbers)",
    )
    form.add_argument("--drop-missing", action="store_true", help="leave rows with a missing value out")
    out = command.add_argument_group("result")
    out.add_argument("--predict", type=Path, metavar="FILE", help="rows to predict for; needs -o")
    out.add_argument(
        "-o", "--out", type=Path, metavar="FILE", help="those rows with a prediction: .csv, .tsv or .parquet"
    )
    out.add_argument("--std", action="store_true", help="add the standard deviation of the target around it")
    out.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the fit, or what each feature does: .png .svg .pdf"
    )
    out.add_argument("--save", type=Path, metavar="FILE", help="keep the fit, for --load: .safetensors")
    out.add_argument("--load", type=Path, metavar="FILE", help="predict with a fit that was kept, without fitting")
    out.add_argument("--json", action="store_true", help="print all numbers as JSON")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace, terminal: Terminal) -> None:
    """Read the table, fit, say how well, and write what was asked for."""
    _check(arguments)
    form = Form(_delimiter(arguments.delimiter), arguments.header, arguments.decimal)
    if arguments.load is not None:
        predict_with_saved(arguments, form, terminal)
        return
    for option, value in _DEFAULTS.items():
        if getattr(arguments, option) is None:
            setattr(arguments, option, value)
    bandwidth = _bandwidth(arguments.bandwidth)
    label = "the pipe" if str(arguments.data) == "-" else arguments.data.name
    with terminal.step(f"reading {label}"), open_table(arguments.data, form) as table:
        features = _columns(table, arguments)
        wanted = [*features, *([] if arguments.weights is None else [arguments.weights])]
        data = read_table(table, wanted, arguments.target, drop_missing=arguments.drop_missing)
    weights = None
    if arguments.weights is not None:
        data, weights = _weighted(data, arguments.weights)
    if len(data.numbers) < 2:
        raise _error(
            "there must be at least 2 rows.",
            f"{many(len(data.numbers), 'row')} of {data.source}",
            "a table with more rows",
        )
    model, fit = _fit(arguments, bandwidth, features, data, weights, terminal)
    if arguments.json:
        terminal.say(json.dumps(as_json(fit), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        say(fit, terminal)
    _write(arguments, form, model, fit, data, terminal)


def _fit(
    arguments: argparse.Namespace,
    bandwidth: Any,
    features: list[str],
    data: Table,
    weights: NDArray[np.float64] | None,
    terminal: Terminal,
) -> tuple[AttentionRegressor, Fit]:
    from attlas.estimators import AttentionRegressor

    x, y = data.numbers[:, :-1], data.numbers[:, -1]
    if not isinstance(bandwidth, str) and np.size(bandwidth) not in (1, len(features)):
        raise _error(
            "--bandwidth must be one number, or one for each feature.",
            f"{np.size(bandwidth)} numbers, {len(features)} features: {', '.join(features[:12])}",
            "--bandwidth loo",
        )
    model = AttentionRegressor(
        kernel=arguments.kernel,
        bandwidth=bandwidth,
        degree=arguments.degree,
        outside=arguments.outside,
        # A row is left out with all its weight: copies of it that stayed would vote for it.
        weights_are="counts" if weights is None else "importance",
    )
    what = "learning the bandwidths" if bandwidth == "loo" else "fitting"
    start = time.perf_counter()
    with terminal.step(f"{what} on {many(len(y), 'row')}"):
        model.fit(x, y, weights)
    seconds = time.perf_counter() - start
    with terminal.step("leaving each row out"):
        left = y - model.leave_one_out()
        most = int(np.clip(_PAIRS / len(y), 100, _LOOKED_AT))
        few = np.random.default_rng(0).permutation(len(y))[:most]
        neighbours = model.effective_neighbours(x[few])
    own = baselines.judge(left, y, weights)
    found = Fit(
        source=data.source,
        target=arguments.target,
        rows=len(y),
        dropped=data.dropped,
        kernel=arguments.kernel,
        degree=arguments.degree,
        rule=bandwidth if isinstance(bandwidth, str) else "given",
        features=_features(features, x, np.asarray(model.bandwidth_)),
        mean=baselines.judge(baselines.mean(y, weights), y, weights),
        linear=baselines.judge(baselines.linear(x, y, weights), y, weights),
        kernel_regression=own,
        neighbours=(float(np.quantile(neighbours, 0.05)), float(np.median(neighbours))),
        alone=float((neighbours < 1.0 + 1e-9).mean()) if arguments.kernel in _BOUNDED else 0.0,
        seconds=seconds,
        weights=arguments.weights,
    )
    return model, found


def _weighted(data: Table, name: str) -> tuple[Table, NDArray[np.float64]]:
    """Take the column of the weights, the last but one, off a table, and the rows of weight 0 with it."""
    weights = data.numbers[:, -2]
    if (weights < 0).any():
        raise _error("weights must be 0 or more.", f"{weights.min():g} in the column {name}", "another --weights")
    used = weights > 0
    rest = np.delete(data.numbers, -2, axis=1)[used]
    return Table(data.source, rest, data.dropped), weights[used]


def _features(names: list[str], x: NDArray[np.float64], bandwidths: NDArray[np.float64]) -> list[Feature]:
    """Return what is told of each feature; its spread does not overflow."""
    found = []
    for name, column, h in zip(names, x.T, bandwidths, strict=True):
        known = np.unique(column)
        scale = float(np.abs(known).max()) or 1.0
        spread = float((column / scale).std(ddof=1)) * scale if len(known) > 1 else 0.0
        gap = float(np.diff(known).min()) if len(known) > 1 else 0.0
        found.append(Feature(name, float(h), spread, gap))
    return found


def _write(
    arguments: argparse.Namespace,
    form: Form,
    model: AttentionRegressor,
    fit: Fit,
    data: Table,
    terminal: Terminal,
) -> None:
    """Write picture, predictions and the fit where they are asked for."""
    written: list[tuple[Path, str]] = []
    if arguments.plot is not None:
        with terminal.step("drawing"):
            drawn = figure(model, fit, data.numbers[:, :-1], data.numbers[:, -1])
            written.append((pictures.save(drawn, arguments.plot), "the fit as a picture"))
    if arguments.predict is not None:
        told = predict(model, arguments, form, [feature.name for feature in fit.features], terminal)
        written.append((arguments.out, told))
    if arguments.save is not None:
        model.feature_names_in_ = np.array([feature.name for feature in fit.features], dtype=object)
        model.save(arguments.save)
        written.append((arguments.save, "the fit: --load and AttentionRegressor.load() open it"))
    if arguments.json or not written:
        return
    width = max(len(str(path)) for path, _ in written)
    terminal.say()
    for path, what in written:
        terminal.say(f"  {terminal.style(str(path).ljust(width), 'bold')}  {what}")


# ----------------------------------------------------------------------------------------------------------- options


def _check(arguments: argparse.Namespace) -> None:
    """Raise before the work for what would go wrong after it."""
    if arguments.load is None and (arguments.data is None or arguments.target is None):
        missing = "no table" if arguments.data is None else "no --target"
        raise _error("a table and --target say what to learn.", missing, "attlas regress FILE --target COLUMN")
    if arguments.load is not None:
        check_saved(arguments)
    if (arguments.predict is None) != (arguments.out is None):
        given, other = ("--predict", "-o FILE") if arguments.out is None else ("-o", "--predict FILE")
        raise _error("--predict and -o go together.", f"{given} alone", f"{given} ... {other}")
    if arguments.std and arguments.predict is None:
        raise _error("--std goes with --predict.", "--std without --predict", "--predict new.csv -o out.csv --std")
    if arguments.predict is not None and str(arguments.predict) == "-" == str(arguments.data):
        raise _error("only one table can be read from the pipe.", "- twice", "--predict FILE")
    if arguments.out is not None:
        check_target(arguments.out, "-o", (".csv", ".tsv", ".parquet"), "regress")
    if arguments.predict is not None and str(arguments.predict) != "-" and not arguments.predict.is_file():
        raise _error("--predict must be a file.", f"no such file: {arguments.predict}", "--predict FILE")
    if arguments.save is not None:
        check_target(arguments.save, "--save", (".safetensors",), "regress")
    if arguments.plot is not None:
        check_target(arguments.plot, "--plot", (".png", ".svg", ".pdf"), "regress")
        if importlib.util.find_spec("matplotlib") is None:
            raise _missing("matplotlib", "--plot", "plot")
    if importlib.util.find_spec("sklearn") is None:
        raise _missing("scikit-learn", "kernel regression", "sklearn")


def _columns(table: CsvTable | ParquetTable, arguments: argparse.Namespace) -> list[str]:
    """Return the names of the features, after a look at whether they and the target are there."""
    names = table.names
    if arguments.features is None:
        # A column without a name is the index that data frames write before the others.
        features = [name for name in names if name not in (arguments.target, arguments.weights, "")]
    else:
        features = [name.strip() for name in next(csv.reader([arguments.features], skipinitialspace=True))]
    told = "" if table.named else "; its first line is all numbers, so columns are called by their places"
    weights = [] if arguments.weights is None else [arguments.weights]
    for option, wanted in (("--target", [arguments.target]), ("--features", features), ("--weights", weights)):
        for name in wanted:
            if names.count(name) != 1:
                rule = "must be columns of the table" if name not in names else "must be names that occur once"
                has = f"{', '.join(names[:24])}{' …' if len(names) > 24 else ''}{told}"
                found = f"{option} {name}; {table.source} has {has}"
                raise _error(
                    f"--target{', --weights' if weights else ''} and --features {rule}.",
                    found,
                    _nearest(option, name, names),
                )
    every = [arguments.target, *weights, *features]
    if len(set(every)) < len(every):
        twice = next(name for name in every if every.count(name) > 1)
        raise _error("every column can be used once.", f"{twice} twice", "leave it out of --features")
    if not features:
        raise _error(
            "there must be a feature.", f"{table.source} has one column: {arguments.target}", "--delimiter ';'"
        )
    return features


def _nearest(option: str, name: str, names: list[str]) -> str:
    """Return the option with the name that was perhaps meant."""
    import difflib

    if name in names:
        return f"give one of the columns {name} another name"
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5) or [other for other in names if other][:1]
    return f"{option} {''.join(close)}"


def _bandwidth(given: str) -> str | float | list[float]:
    if given in _RULES:
        return given
    try:
        found = [float(word) for word in given.split(",")]
    except ValueError:
        found = []
    if not found or not all(math.isfinite(h) and h > 0 for h in found):
        raise _error(
            "--bandwidth must be loo, scott, silverman, or numbers above 0 with commas between.",
            f"--bandwidth {given}",
            "--bandwidth loo",
        )
    return found[0] if len(found) == 1 else found


def _delimiter(given: str | None) -> str | None:
    if given is None:
        return None
    sign = DELIMITERS.get(given, given)
    if len(sign) != 1 or sign in "\"'\r\n.+-" or sign.isalnum():
        raise _error("--delimiter must be one sign.", f"--delimiter {given!r}", "--delimiter ';'")
    return sign


def _missing(library: str, what: str, extra: str) -> MissingExtraError:
    module = {"scikit-learn": "sklearn"}.get(library, library)
    return MissingExtraError(
        "regress",
        f"{library} must be installed for {what}.",
        found=f"no module named {module}",
        fix=f"pip install 'attlas[{extra}]'",
    )


def _error(rule: str, found: str, fix: str) -> UsageError:
    return UsageError("regress", rule, found=found, fix=fix)
