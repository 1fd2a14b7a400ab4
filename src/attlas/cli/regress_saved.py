"""``attlas regress --load``: predictions of a fit that was kept, without its table."""

from __future__ import annotations

import argparse
import csv
from typing import TYPE_CHECKING

from attlas.cli.regress_csv import Form
from attlas.cli.regress_predict import predict
from attlas.cli.regress_table import open_table
from attlas.cli.terminal import Terminal, UsageError

if TYPE_CHECKING:
    from attlas.estimators import AttentionRegressor

__all__ = ["check_saved", "predict_with_saved"]

# What a fit has decided already, or what needs the table that it came from.
_OF_A_FIT = ("weights", "kernel", "bandwidth", "degree", "outside", "plot", "save")


def check_saved(arguments: argparse.Namespace) -> None:
    """Raise for options that a fit that was kept leaves no room for."""
    if arguments.data is not None:
        raise _error(
            "--load takes the place of a table to learn from.",
            f"{arguments.data} and --load {arguments.load}",
            f"--load {arguments.load} --predict {arguments.data} -o out.csv",
        )
    given = [f"--{name}" for name in _OF_A_FIT if getattr(arguments, name) is not None]
    given += ["--json"] if arguments.json else []
    if given:
        raise _error(
            "a fit that was kept only predicts.",
            f"{' and '.join(given)} with --load",
            f"leave {' and '.join(given)} out",
        )
    if arguments.predict is None:
        raise _error("--load needs rows to predict for.", "no --predict", "--load FILE --predict new.csv -o out.csv")


def predict_with_saved(arguments: argparse.Namespace, form: Form, terminal: Terminal) -> None:
    """Open the fit, and write the rows with its predictions.

    Raises
    ------
    UsageError
        If the fit has several targets, or it cannot be said which columns are its features.
    CheckpointError
        If the file is no fit that can be opened.
    """
    from attlas.estimators import AttentionRegressor

    model = AttentionRegressor.load(arguments.load)
    if model.y_.ndim > 1:
        rule = "a fit that was kept must have one target here."
        raise _error(rule, f"{model.y_.shape[1]} targets", "attlas.estimators.stream.predict_file(model, ...)")
    told = predict(model, arguments, form, _features(model, arguments, form), terminal)
    terminal.say(f"{terminal.style(str(arguments.out), 'bold')}  {told}")


def _features(model: AttentionRegressor, arguments: argparse.Namespace, form: Form) -> list[str]:
    """Return the columns that a fit takes: those that it knows, those that are given, or all where the number fits."""
    count = model.n_features_in_
    names = getattr(model, "feature_names_in_", None)
    if arguments.features is not None:
        found = [name.strip() for name in next(csv.reader([arguments.features], skipinitialspace=True))]
    elif names is not None:
        return [str(name) for name in names]
    else:
        if str(arguments.predict) == "-":
            raise _error("the features must be named.", "a fit without names, and a pipe", "--features A,B,...")
        with open_table(arguments.predict, form) as table:
            found = list(table.names)
    if len(found) != count:
        rule = "there must be a column for each feature of the fit."
        raise _error(rule, f"{len(found)} columns, {count} features", "--features A,B,..., in the order of the fit")
    return found


def _error(rule: str, found: str, fix: str) -> UsageError:
    return UsageError("regress", rule, found=found, fix=fix)
