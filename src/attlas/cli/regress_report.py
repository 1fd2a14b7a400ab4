"""The printed report of ``attlas regress``: the fit, its errors beside those of simpler models, and a verdict."""

from __future__ import annotations

import math
from typing import Any

from attlas.cli.formatting import percent, plural
from attlas.cli.regress_table import number
from attlas.cli.terminal import Terminal

FLAT = 8.0  # bandwidths of so many standard deviations leave a feature without influence: weights differ by 1 %
_FEATURES_SHOWN = 24  # features that are listed


def print_report(report: dict[str, Any], terminal: Terminal) -> None:
    """Print a fit: bandwidths, errors beside those of plainer models, and a verdict."""
    features, rule = report["features"], report["rule"]
    title = f"{report['target']} from {plural(len(report['columns']), 'feature')}, {plural(report['rows'], 'row')}"
    terminal.say(f"{title} of {report['source']}", "bold")
    rules = {"loo": "bandwidths of least leave-one-out error", "given": "bandwidths as given"}
    how = f"{report['kernel'].capitalize()} kernel, {('local mean', 'local line')[report['degree']]}, "
    how += rules.get(rule, f"bandwidths by {rule.capitalize()}'s rule")
    how += f", rows weighted by {report['weights']}" if report["weights"] else ""
    terminal.say(f"  {how}; fitted in {report['seconds']:.1f} s")
    for text in filter(None, (column["told"] for column in report["columns"])):
        terminal.prose(text)
    for reason, name in (("left out for a missing value", "dropped"), ("copies of other rows", "copies")):
        if report[name]:
            terminal.say(f"  {reason}: {plural(report[name], 'row')}")
    ordered = sorted(features, key=lambda feature: float(feature["reach"]))
    names = [feature["name"] for feature in ordered[:_FEATURES_SHOWN]]
    width = min(max(map(len, ["feature", *names])), max(12, terminal.width - 55))
    terminal.say()
    terminal.say(f"  {'feature'.ljust(width)}  bandwidth     spread  bandwidth / spread", "dim")
    for feature in ordered[:_FEATURES_SHOWN]:
        name = feature["name"] if len(feature["name"]) <= width else feature["name"][: width - 1] + "…"
        line = f"  {name.ljust(width)}  {number(feature['bandwidth']):>9}  {number(feature['spread']):>9}"
        reach = feature["reach"]
        note = "  constant" if feature["spread"] == 0 else "  hardly matters" if reach >= FLAT else ""
        note = "  rows of the same value only" if 0 < feature["bandwidth"] < feature["gap"] / 6.0 else note
        terminal.say(f"{line}  {'–' if math.isinf(reach) else number(reach, 3):>18}{note}")
    if len(ordered) > _FEATURES_SHOWN:
        terminal.say(f"  and {len(ordered) - _FEATURES_SHOWN:,} of wider bandwidth; --json has all", "dim")
    terminal.say()
    errors = report["leave_one_out"]
    texts = {name: number(errors[name]["error"]) for name in errors}
    width = max(map(len, ["error", *texts.values()]))
    terminal.say(f"  leave-one-out      {'error'.rjust(width)}      R²", "dim")
    for name, label in (("mean", "mean"), ("linear", "linear model"), ("kernel_regression", "kernel regression")):
        r2 = errors[name]["r2"]
        terminal.say(f"  {label:<17}  {texts[name].rjust(width)}  {'–' if math.isnan(r2) else f'{r2:.3f}':>6}")
    terminal.say("  error: root mean square, in units of the target", "dim")
    terminal.say()
    for line in _verdict_in_words(report):
        terminal.say(f"  {line}")


def _verdict_in_words(report: dict[str, Any]) -> list[str]:
    """Say in words how the kernel compares, and over how many rows it takes its means."""
    errors = report["leave_one_out"]
    own, linear, mean = (errors[name]["error"] for name in ("kernel_regression", "linear", "mean"))
    if mean == 0:
        return ["The target is constant: there is nothing to predict."]
    # Differences below 2 % (of the mean 0.5 %) are called none.
    if own > 0.995 * mean or errors["kernel_regression"]["r2"] <= 0:
        line = "Kernel regression predicts no better than the mean"
        line += "; the linear model does." if linear < 0.98 * mean else ", nor does the linear model."
        line = line if not math.isnan(linear) else "Kernel regression predicts no better than the mean."
    elif math.isnan(linear):
        line = "There are too few rows for a linear model."
    elif own < 0.98 * linear and linear > 0:
        line = f"The error is {percent(1.0 - own / linear)} below the linear model's: the relation is not linear."
    elif own < 1.02 * linear:
        line = "A linear model predicts as well, and is easier to explain."
    else:
        line = (
            f"A linear model predicts better here{'; --degree 1 fits lines locally' if not report['degree'] else ''}."
        )
    low, median = (number(report["effective_neighbours"][name], 3) for name in ("percentile_5", "median"))
    lines = [line, f"Effective neighbours of a prediction: median {median}, 5th percentile {low}."]
    if report["alone"]:
        lines.append(f"{percent(report['alone'])} of the rows reach no other; the mean predicts them in these errors.")
    return lines
