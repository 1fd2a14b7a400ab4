"""``attlas regress``: kernel regression on a table, judged beside plainer models, drawn, and used to predict."""

from __future__ import annotations

import math
import shlex
import time
import warnings
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from attlas import pictures
from attlas.cli.checks import check_target, need
from attlas.cli.formatting import json_text, plural
from attlas.cli.regress_columns import Column, Floats
from attlas.cli.regress_report import print_report
from attlas.cli.regress_table import DELIMITERS, Table, choose_features, number, read, split
from attlas.cli.terminal import Terminal, UsageError
from attlas.errors import CheckpointError
from attlas.foundation.files import whole_file
from attlas.foundation.installation import install_command

if TYPE_CHECKING:
    from attlas.estimators import AttentionRegressor

_BANDWIDTH_RULES = ("loo", "scott", "silverman")
_DEFAULT_OPTIONS = {"kernel": "gaussian", "bandwidth": "loo", "degree": 0, "outside": "nan"}
_OF_A_FIT = ("weights", "kernel", "bandwidth", "degree", "outside", "plot", "save")  # --load decides these
_COUNTED_ROWS = 2_000  # rows whose neighbours are counted


def run(arguments: Namespace, terminal: Terminal) -> None:
    """Read the table, fit, say how well, and write what was asked for."""
    _check_arguments(arguments)
    if arguments.load is not None:
        model = _load_fit(arguments.load)
        text = _write_predictions(model, arguments, terminal)
        terminal.say(f"{terminal.style(str(arguments.out), 'bold')}  {text}")
        return
    for name, value in _DEFAULT_OPTIONS.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    bandwidth = _parsed_bandwidth(arguments.bandwidth)
    with terminal.step(f"reading {'the pipe' if str(arguments.data) == '-' else arguments.data.name}"):
        table = read(arguments.data, arguments)
        features = choose_features(table, arguments)
        weighted = [] if arguments.weights is None else [arguments.weights]
        columns = table.columns(features, arguments)
        values = table.numbers([*columns, Column(arguments.target), *map(Column, weighted)], arguments)
        full = ~np.isnan(values).any(1)
        dropped, values = int((~full).sum()), values[full]
    x, y, weights = values[:, : len(features)], values[:, len(features)], None
    if weighted:
        weights = values[:, -1]
        if len(weights) and weights.min() < 0:
            found = f"{weights.min():g} in the column {arguments.weights}"
            raise UsageError("weights must be 0 or more.", found, "another --weights")
        x, y, weights = (part[weights > 0] for part in (x, y, weights))
    if len(y) < 2:
        found = f"{plural(len(y), 'row')} of {table.source}"
        found += f", without {plural(dropped, 'row')} with a missing value" if dropped else ""
        raise UsageError("there must be at least 2 rows.", found, "a longer table, or fewer --features")
    if not isinstance(bandwidth, str) and np.size(bandwidth) not in (1, len(features)):
        found = f"{np.size(bandwidth)} numbers, {len(features)} features: {', '.join(features[:12])}"
        raise UsageError("--bandwidth must be one number, or one for each feature.", found, "--bandwidth loo")
    columns, x, bandwidth = _expand_levels(columns, x, bandwidth)
    model, report = _fitted_model(arguments, bandwidth, columns, (x, y, weights), terminal)
    report = {"source": table.source, "target": arguments.target, "dropped": dropped, **report}
    if arguments.json:
        terminal.data(json_text(report))
    else:
        print_report(report, terminal)
    _write_outputs(arguments, model, report, (x, y), terminal)


def _expand_levels(columns: list[Column], numbers: Floats, bandwidth: Any) -> tuple[list[Column], Floats, Any]:
    """Return the columns with the levels that there are, their features, and a bandwidth for each of these."""
    learned = [column.learn(part) for column, part in zip(columns, numbers.T, strict=True)]
    if np.size(bandwidth) > 1:  # the levels of a category share what was given for it
        bandwidth = np.repeat(bandwidth, [part.shape[1] for _, part in learned]).tolist()
    return [column for column, _ in learned], np.column_stack([part for _, part in learned]), bandwidth


def _fitted_model(
    arguments: Namespace,
    bandwidth: Any,
    columns: Sequence[Column],
    data: tuple[Floats, Floats, Floats | None],
    terminal: Terminal,
) -> tuple[AttentionRegressor, dict[str, Any]]:
    """Return the fitted model, and everything that is said about it."""
    from attlas.estimators import AttentionRegressor
    from attlas.estimators.sums.task import BOUNDED

    x, y, weights = data
    settings = {name: getattr(arguments, name) for name in ("kernel", "degree", "outside")}
    model = AttentionRegressor(
        bandwidth=bandwidth,
        weights_are="counts" if weights is None else "importance",
        verbose=terminal.err.isatty(),
        **settings,
    )
    start = time.perf_counter()
    with terminal.step(f"{'learning the bandwidths' if bandwidth == 'loo' else 'fitting'} on {plural(len(y), 'row')}"):
        model.fit(x, y, weights)
    model.verbose = False  # a saved fit does not depend on the terminal
    seconds = time.perf_counter() - start
    features = [(name, column) for column in columns for name in column.features]
    model.feature_names_in_ = np.array([name for name, _ in features], dtype=object)
    model.target_name_ = arguments.target
    if any(column.kind != "number" for column in columns):
        model.table_columns_ = [[column.name, column.kind, [*column.levels]] for column in columns]
    with terminal.step("computing leave-one-out errors"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # x has no names here
        own = _error_and_r2(y - model.leave_one_out(), y, weights)
        linear, alone = (
            _error_and_r2(_linear_residuals(x, y, weights), y, weights),
            _error_and_r2(_linear_residuals(x[:, :0], y, weights), y, weights),
        )
        # So many rows that the pairs of them with all others stay below 5e7.
        sample = np.random.default_rng(0).permutation(len(y))[: int(np.clip(5e7 / len(y), 100, _COUNTED_ROWS))]
        neighbours = model.effective_neighbours(x[sample])
    # What the report prints, and --json writes.
    return model, {
        "rows": len(y),
        "copies": len(y) - len(np.unique(np.column_stack([x, y]), axis=0)),
        "kernel": arguments.kernel,
        "degree": arguments.degree,
        "rule": bandwidth if isinstance(bandwidth, str) else "given",
        "weights": arguments.weights,
        "seconds": seconds,
        "columns": [{"name": c.name, "kind": c.kind, "levels": [*c.levels], "told": c.describe()} for c in columns],
        "features": [
            {**_record_of_feature(name, part, width), "column": column.name, "kind": column.kind}
            for (name, column), part, width in zip(features, x.T, model.bandwidth_.tolist(), strict=True)
        ],
        "leave_one_out": {"mean": alone, "linear": linear, "kernel_regression": own},
        "effective_neighbours": dict(
            zip(("percentile_5", "median"), np.quantile(neighbours, [0.05, 0.5]), strict=True)
        ),
        "alone": float((neighbours < 1.0 + 1e-9).mean()) if arguments.kernel in BOUNDED else 0.0,
    }


def _record_of_feature(name: str, column: Floats, bandwidth: float) -> dict[str, Any]:
    """Return what is said of a feature: bandwidth, standard deviation, least distance of two values, and reach.

    The reach is the bandwidth in standard deviations; infinite for a constant feature.
    """
    known = np.unique(column)
    scale = float(np.abs(known).max()) or 1.0  # squares of 1e200 would overflow
    spread = float((column / scale).std(ddof=1)) * scale if len(known) > 1 else 0.0
    gap = float(np.diff(known).min()) if len(known) > 1 else 0.0
    reach = bandwidth / spread if spread > 0 else math.inf
    return {"name": name, "bandwidth": bandwidth, "spread": spread, "gap": gap, "reach": reach}


def _linear_residuals(x: Floats, y: Floats, weights: Floats | None) -> Floats:
    """Return the leave-one-out residuals of weighted least squares with an intercept; of no feature those of the mean.

    NaN for a row that alone decides about a coefficient. Copies are left out together, as the estimator leaves them
    out. Least squares are linear in y: the residual of a row that is left out is ``(y - ŷ) / (1 - H_ii)``, with H the
    hat matrix of all rows. Time: O(n d²).
    """
    from attlas.estimators.observations import Observations, are_copies, average_copies

    data, rows = Observations(x, y[:, None], weights), np.arange(len(y))
    if x.shape[1] and are_copies(data):
        data, rows = average_copies(data)
    n, w = len(data.X), np.ones(len(data.X)) if data.weights is None else data.weights
    varied = data.X[:, data.X.max(0) > data.X.min(0)]  # rounding of a constant would look like a feature
    centred = varied - np.average(varied, axis=0, weights=w)
    columns = centred / np.abs(centred).max(0) * np.sqrt(w)[:, None]
    columns /= np.sqrt(np.square(columns).sum(0))
    u, s, _ = np.linalg.svd(columns, full_matrices=False)
    u = u[:, s > max(n, x.shape[1]) * np.finfo(np.float64).eps * s.max(initial=0.0)]
    target = data.values[:, 0]
    left = (target - np.average(target, weights=w)) * np.sqrt(w)
    left = (left - u @ (u.T @ left)) / np.sqrt(w)
    free = 1.0 - w / w.sum() - np.square(u).sum(1)
    predicted = target - np.where(free > 1e-10, left / np.where(free > 1e-10, free, 1.0), math.nan)
    return y - predicted[rows]


def _error_and_r2(residuals: Floats, y: Floats, weights: Floats | None) -> dict[str, float]:
    """Return the root of the mean square of residuals, and R²; NaN are left out of both."""
    known = np.isfinite(residuals)
    if not known.any():
        return {"error": math.nan, "r2": math.nan}
    w = np.ones(len(y)) if weights is None else weights
    gap = y - np.average(y, weights=w)
    gap = np.zeros_like(y) if np.ptp(y) == 0 else gap
    scale = max(float(np.abs(residuals[known]).max()), float(np.abs(gap).max())) or 1.0  # squares would overflow
    total, spread = (float(w[known] @ np.square(part[known] / scale)) for part in (residuals, gap))
    return {
        "error": scale * math.sqrt(total / float(w[known].sum())),
        "r2": 1.0 - total / spread if spread else math.nan,
    }


def _write_outputs(
    arguments: Namespace,
    model: AttentionRegressor,
    report: dict[str, Any],
    data: tuple[Floats, Floats],
    terminal: Terminal,
) -> None:
    """Write picture, predictions and the fit where they are asked for."""
    written: list[tuple[Path, str]] = []
    if arguments.save is not None:  # first: the rows to predict for may have an error
        model.save(arguments.save)
        written.append((arguments.save, "the fit: --load and AttentionRegressor.load() open it"))
    if arguments.plot is not None:
        from attlas.cli.regress_figures import figure

        with terminal.step("drawing"):
            errors = {name: number(one["error"]) for name, one in report["leave_one_out"].items()}
            caption = f"{report['rows']:,} rows of {report['source']}; {report['kernel']} kernel; leave-one-out error "
            caption += f"{errors['kernel_regression']} (mean {errors['mean']}, linear {errors['linear']})"
            drawn = figure(model, *data, report["features"], report["target"], caption)
            written.append((pictures.save(drawn, arguments.plot), "the fit as a picture"))
    if arguments.predict is not None:
        written.append((arguments.out, _write_predictions(model, arguments, terminal)))
    if written and not arguments.json:
        terminal.say()
        terminal.files(written)


def _load_fit(path: Path) -> AttentionRegressor:
    """Return a fit that was saved; raise a UsageError for another file."""
    from attlas.estimators import AttentionRegressor

    try:
        model = AttentionRegressor.load(path)
    except CheckpointError as error:
        rule, file = "--load must be a file that attlas regress --save wrote.", shlex.quote(f"{path.stem}.safetensors")
        fix = f"attlas regress TABLE --target COLUMN --save {file}"
        raise UsageError(rule, f"{path}: {error.found}", fix) from error
    if model.y_.ndim > 1:
        found = f"{model.y_.shape[1]} targets"
        raise UsageError("the fit must have one target.", found, "attlas.estimators.stream.predict_file(model, ...)")
    return model


def _columns_of_fit(model: AttentionRegressor, table: Table, arguments: Namespace) -> list[Column]:
    """Return the columns that a fit asks for, under the names that they have in the rows to predict for."""
    names = [*getattr(model, "feature_names_in_", [])]
    kept = getattr(model, "table_columns_", None) or [[name, "number", []] for name in names]
    if arguments.load is None or (names and arguments.features is None):
        return [Column(name, kind, tuple(levels)) for name, kind, levels in kept]
    kept = kept or [["", "number", []]] * model.n_features_in_
    names = split(arguments.features) if arguments.features is not None else table.names
    if len(names) != len(kept):
        found = f"{len(names)} columns, {plural(len(kept), 'feature')}"
        raise UsageError("there must be a column for each feature of the fit.", found, "--features A,B,...")
    return [Column(name, kind, tuple(levels)) for name, (_, kind, levels) in zip(names, kept, strict=True)]


def _write_predictions(model: AttentionRegressor, arguments: Namespace, terminal: Terminal) -> str:
    """Write the rows with their predictions; a cell is empty where there is none. Return what was written, in words."""
    out, target = arguments.out, arguments.target or getattr(model, "target_name_", None)
    names = [
        f"{target}_{kind}" if target else kind for kind in (("predicted", "std") if arguments.std else ("predicted",))
    ]
    with terminal.step("predicting"):
        table = read(arguments.predict, arguments)
        columns = _columns_of_fit(model, table, arguments)
        names_of = [column.name for column in columns]
        absent = [name for name in names_of if table.names.count(name) != 1]
        if absent:
            rule = "every feature must be one column of the rows to predict for."
            found = f"no column {absent[0]} in {table.source}, which has {', '.join(table.names[:24])}"
            raise UsageError(rule, found, "rename the column, or leave it out with --features")
        values = table.numbers(columns, arguments)
        x = np.column_stack([column.expand(part) for column, part in zip(columns, values.T, strict=True)])
        x[np.isnan(values).any(1)] = np.nan  # no level is not one of them
        full, found_values = ~np.isnan(x).any(1), np.full((len(x), len(names)), np.nan)
        if full.any():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # rows without a neighbour are counted below
                parts = model.predict(x[full], return_std=True) if arguments.std else (model.predict(x[full]),)
            found_values[full] = np.column_stack([np.asarray(part) for part in parts])
        with whole_file(out) as unfinished:
            table.write(unfinished, out.suffix.lower(), names, found_values, arguments.decimal)
    text = f"{plural(len(x), 'row')} with {' and '.join(names)}"
    for name, column in zip(names, np.isnan(found_values).T, strict=True):
        text += f"; {int(column.sum()):,} without {name}" if column.any() else ""
    return text


# ----------------------------------------------------------------------------------------------------------- options


def _check_arguments(arguments: Namespace) -> None:
    """Raise before the work for what would go wrong after it."""
    data, load, predict, out = arguments.data, arguments.load, arguments.predict, arguments.out
    if load is not None:
        options = [f"--{name}" for name in _OF_A_FIT if getattr(arguments, name) is not None]
        options += ["--json"] if arguments.json else []
        if data is not None:
            fix = f"--load {shlex.quote(str(load))} --predict {shlex.quote(str(data))} -o out.csv"
            raise UsageError("--load takes the place of a table to learn from.", f"{data} and --load {load}", fix)
        if options:
            named = " and ".join(options)
            raise UsageError("a saved fit only predicts.", f"{named} with --load", f"leave {named} out")
        if predict is None:
            fix = "--load FILE --predict new.csv -o out.csv"
            raise UsageError("--load needs rows to predict for.", "no --predict", fix)
    elif data is None or arguments.target is None:
        missing = "no table" if data is None else "no --target"
        raise UsageError("a table and --target say what to learn.", missing, "attlas regress FILE --target COLUMN")
    if (predict is None) != (out is None):
        one, other = ("--predict", "-o FILE") if out is None else ("-o", "--predict FILE")
        raise UsageError("--predict and -o go together.", f"{one} alone", f"{one} ... {other}")
    if arguments.std and predict is None:
        raise UsageError("--std goes with --predict.", "--std without --predict", "--predict new.csv -o out.csv --std")
    if predict is not None and str(predict) == "-" == str(data):
        raise UsageError("only one table can be read from the pipe.", "- twice", "--predict FILE")
    if predict is not None and str(predict) != "-" and not predict.is_file():
        raise UsageError("--predict must be a file.", f"no such file: {predict}", "--predict FILE")
    _check_outputs(arguments)
    delimiter = DELIMITERS.get(arguments.delimiter, arguments.delimiter)
    if delimiter is not None and (len(delimiter) != 1 or delimiter in "\"'\r\n.+-" or delimiter.isalnum()):
        raise UsageError("--delimiter must be one sign.", f"--delimiter {arguments.delimiter!r}", "--delimiter ';'")
    if arguments.thousands == arguments.decimal:
        raise UsageError("--decimal and --thousands must differ.", "one sign for both", "leave --thousands out")
    need("sklearn", "attlas regress", install_command("sklearn"), "scikit-learn")
    need("pandas", "attlas regress", install_command("sklearn"))
    if arguments.plot is not None:
        need("matplotlib", "--plot", install_command("plot"))


def _check_outputs(arguments: Namespace) -> None:
    """Raise unless every file can be written, and is none of those that are read."""
    outputs = ((arguments.out, "-o", (".csv", ".tsv", ".parquet")), (arguments.save, "--save", (".safetensors",)),
               (arguments.plot, "--plot", (".png", ".svg", ".pdf")))  # fmt: skip
    for path, option, suffixes in outputs:
        if path is None:
            continue
        check_target(path, option, suffixes)
        for source in (arguments.data, arguments.predict, arguments.load):
            if source is not None and path.exists() and source.exists() and path.samefile(source):
                fix = f"{option} {path.with_stem(path.stem + '-new').name}"
                raise UsageError(f"{option} must not be a file that is read.", f"{option} {path} is {source}", fix)


def _parsed_bandwidth(text: str) -> str | float | list[float]:
    """Return what --bandwidth says: the name of a rule, one number, or a list with one for each feature."""
    if text in _BANDWIDTH_RULES:
        return text
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(math.isfinite(h) and h > 0 for h in numbers):
        rule = "--bandwidth must be loo, scott, silverman, or numbers above 0 with commas between."
        raise UsageError(rule, f"--bandwidth {text}", "--bandwidth loo")
    return numbers[0] if len(numbers) == 1 else numbers
