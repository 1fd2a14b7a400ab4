"""Predictions of ``attlas regress`` for a table of any length: read, predicted and written some rows at a time."""

from __future__ import annotations

import argparse
import csv
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from attlas.cli.regress_csv import Form
from attlas.cli.regress_table import Batch, CsvTable, ParquetTable, open_table
from attlas.cli.regress_words import many
from attlas.cli.terminal import Terminal, UsageError
from attlas.cli.words import count
from attlas.files import whole_file

if TYPE_CHECKING:
    from attlas.estimators import AttentionRegressor

__all__ = ["predict"]


@dataclass
class _Told:
    """How many rows there were, and how many got no prediction."""

    rows: int = 0
    without: int = 0


def predict(
    model: AttentionRegressor, arguments: argparse.Namespace, form: Form, features: Sequence[str], terminal: Terminal
) -> str:
    """Write the rows of a table with their predictions; a cell is empty where there is none.

    Parameters
    ----------
    model : AttentionRegressor
        The fit.
    arguments : argparse.Namespace
        With the names of both files, of the target if it has one, and what to do with missing values.
    form : Form
        How text is to be read.
    features : sequence of str
        Columns that the model takes, in its order.
    terminal : Terminal
        Where progress is shown.

    Returns
    -------
    str
        What was written, in words.

    Raises
    ------
    UsageError
        If a feature is not in the table, or a cell is no number.
    """
    from attlas.estimators.writing import write_chunks

    out: Path = arguments.out
    told = _Told()
    before = "" if arguments.target is None else f"{arguments.target}_"
    names = [f"{before}predicted", *([f"{before}std"] if arguments.std else [])]
    with open_table(arguments.predict, form) as table, whole_file(out, "regress") as unfinished:
        absent = [name for name in features if name not in table.names]
        if absent:
            raise UsageError(
                "regress",
                "every feature must be a column of the rows to predict for.",
                found=f"no column {absent[0]} in {table.source}, which has {', '.join(table.names[:24])}",
                fix="rename the column, or leave it out with --features",
            )
        with terminal.step("predicting", table.parts()) as tick:
            rows = _predicted(model, table, features, arguments, told, tick)
            if out.suffix.lower() == ".parquet":
                whole = (np.column_stack([batch.numbers, found]) for batch, found in rows)
                write_chunks(unfinished, [*features, *names], whole, "regress")
            else:
                _write_text(unfinished, table, features, names, rows)
    lost = f"; {count(told.without)} {'has' if told.without == 1 else 'have'} no prediction" if told.without else ""
    return f"{many(told.rows, 'row')} with {' and '.join(names)}{lost}"


def _predicted(
    model: AttentionRegressor,
    table: CsvTable | ParquetTable,
    features: Sequence[str],
    arguments: argparse.Namespace,
    told: _Told,
    tick: Callable[[], None],
) -> Iterator[tuple[Batch, NDArray[np.float64]]]:
    for batch in table.batches(features, drop_missing=arguments.drop_missing):
        full = np.atleast_1d(np.isfinite(batch.numbers).all(axis=1))
        found = np.full((len(batch.numbers), 2 if arguments.std else 1), np.nan)
        if full.any():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # rows without a neighbour are counted, and told of at the end
                given = batch.numbers if full.all() else batch.numbers[full]
                parts = model.predict(given, return_std=True) if arguments.std else (model.predict(given),)
            found[full] = np.column_stack([np.asarray(part) for part in parts])
        told.rows += len(found)
        told.without += int(np.isnan(found[:, 0]).sum())
        yield batch, found
        tick()


def _write_text(
    path: Path,
    table: CsvTable | ParquetTable,
    features: Sequence[str],
    names: Sequence[str],
    rows: Iterator[tuple[Batch, NDArray[np.float64]]],
) -> None:
    """Write the rows as they were, with the predictions behind them."""
    of_text = isinstance(table, CsvTable)
    delimiter = "\t" if path.suffix.lower() == ".tsv" else table.delimiter
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter=delimiter, lineterminator="\n")
        if table.named:
            writer.writerow([*(table.names if of_text else features), *names])
        for batch, found in rows:
            before = batch.cells if of_text else batch.numbers.tolist()
            writer.writerows(
                [*row, *(_cell(value, table.decimal) for value in new)]
                for row, new in zip(before, found.tolist(), strict=True)
            )


def _cell(value: float, decimal: str) -> str:
    """Return a prediction as the shortest text that is read back as the same number."""
    text = "" if np.isnan(value) else repr(value)
    return text if decimal == "." else text.replace(".", decimal)
