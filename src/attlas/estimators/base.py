"""What regressor and classifier share: settings, bandwidths, tokens, and what is read from weights."""

from __future__ import annotations

import math
import os
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from attlas import stats
from attlas.errors import ShapeError, public
from attlas.estimators.bandwidth import bandwidth_of_features, check_bandwidth, in_bandwidths, rule_of_thumb, spread_of
from attlas.estimators.frames import naming_text_columns
from attlas.estimators.kernels import check_kernel
from attlas.estimators.loo import LeaveOneOut, LooTask, Loss, Objective, accuracy, factors_with_own, squared_error
from attlas.estimators.observations import Observations, are_copies, average_copies, distinct
from attlas.estimators.partitions import refuse_dask
from attlas.estimators.pooling import Pool
from attlas.estimators.scored import ScoredLeaveOneOut
from attlas.estimators.search import SearchResult, Settings, search
from attlas.estimators.storage import read_fit, write_fit
from attlas.estimators.summed import SummedLeaveOneOut, objective
from attlas.foundation.autocast import without_autocast
from attlas.foundation.checks import usable_device
from attlas.foundation.devices import check_float64
from attlas.foundation.progress import Progress
from attlas.matrix import AttentionMatrix
from attlas.scores import Score

Array = NDArray[Any]

# Pairs up to which the search takes the error over all rows; above, over a sample of rows, each against all keys.
_MOST_PAIRS = 1 << 28
# The search goes from coarse to fine: many starts on few pairs, then from the best of them one search on more pairs, or
# on all in single precision where that is faster, and the last one on all. These are the pairs of the first two.
_COARSE_PAIRS = 1 << 22
_MIDDLE_PAIRS = 1 << 24


@dataclass(eq=False, repr=False)
class AttentionEstimator(BaseEstimator):  # type: ignore[misc]  # scikit-learn ships no types
    """Base of the estimators; not an estimator itself. Its fields are their settings, and what ``fit`` leaves."""

    kernel: str | Score = "gaussian"
    _: KW_ONLY
    bandwidth: str | float | ArrayLike = "loo"
    tolerance: float = 1e-7
    outside: str = "nan"
    max_iter: int = 100
    tol: float = 1e-5
    n_restarts: int = 2
    loo_rows: str | int = "auto"
    weights_are: str = "counts"
    warm_start: bool = False
    random_state: int | np.random.RandomState | None = 0
    verbose: bool | int = False
    dtype: torch.dtype | None = None
    device: str | torch.device | None = None

    degree = 0  # only the regressor lets it be chosen
    _outside_choices: ClassVar[tuple[str, ...]] = ("nan", "nearest")
    _pool: Pool = field(init=False)
    X_: Array = field(init=False)
    y_: Array = field(init=False)
    sample_weight_: Array | None = field(init=False)
    bandwidth_: NDArray[np.float64] = field(init=False)

    @without_autocast
    def weights(self, X: ArrayLike) -> AttentionMatrix:
        """Return who votes for each prediction: the weights of all training points, never stored.

        Parameters
        ----------
        X : array-like, shape (m, d)
            Points.

        Returns
        -------
        AttentionMatrix, shape (m, n)
            Row i sums to 1, or is 0 where point i has no neighbour. Columns are the rows of `X_`.

        See Also
        --------
        top_neighbours : the largest of each row.

        Notes
        -----
        With ``degree=0`` the prediction is ``weights(X) @ y_``. A local line weighs neighbours by more than their
        distance; these are the weights of its least squares. Cost: none until something is read.
        """
        x = self._points_as_queries(X)
        return self._pool.matrix(x)

    @without_autocast
    def top_neighbours(self, X: ArrayLike, k: int = 5) -> tuple[Array, Array]:
        """Return the k training points with the largest weights for each point.

        Parameters
        ----------
        X : array-like, shape (m, d)
            Points.
        k : int, default 5
            How many, at most n.

        Returns
        -------
        weights : ndarray, shape (m, k)
            In descending order.
        indices : ndarray of int64, shape (m, k)
            Rows of `X_` and `y_`.

        Raises
        ------
        ShapeError
            If `k` is not between 1 and n.

        Notes
        -----
        Exact. Cost: one pass over all pairs; memory of the result and a few tiles.
        """
        largest = self.weights(X).topk(k)
        return largest.values.cpu().numpy(), largest.indices.cpu().numpy()

    @without_autocast
    def effective_neighbours(self, X: ArrayLike) -> Array:
        """Return on how many training points each prediction rests, ``1 / Σ_j p_ij²`` (Kish's effective number).

        Parameters
        ----------
        X : array-like, shape (m, d)
            Points.

        Returns
        -------
        ndarray, shape (m,)
            From 1 to n; 0 where there is no neighbour.

        Notes
        -----
        Cost: one pass over all pairs, no memory beyond tiles.
        """
        return stats.effective_keys(self.weights(X)).cpu().numpy()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the fitted estimator to one file that holds numbers and JSON, and nothing that could be run.

        Parameters
        ----------
        path : str or Path
            The file, ``.safetensors`` by custom. One that is there is replaced once the new one is complete.

        Raises
        ------
        CheckpointError
            If the file cannot be written.
        DtypeError
            If something in the estimator cannot be written: labels that are no texts or numbers.

        See Also
        --------
        load : the way back.

        Notes
        -----
        The training data are in the file: kernel regression has no other memory. A kernel that is a Score is not
        stored; give it to `load` again.
        """
        check_is_fitted(self)
        write_fit(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str], *, kernel: Score | None = None) -> Self:
        """Return the estimator that `save` wrote.

        Parameters
        ----------
        path : str or Path
            The file.
        kernel : Score, optional
            The kernel, where it was a score; it is not stored.

        Returns
        -------
        estimator
            Fitted; its predictions are the same numbers.

        Raises
        ------
        CheckpointError
            If the file is not one that `save` wrote, was changed or cut off, or holds another estimator.
        """
        return read_fit(cls, path, kernel)

    @without_autocast
    def resume(self) -> Self:
        """Rebuild what predictions need from `X_`, `y_` and `bandwidth_`, as `load` does.

        Returns
        -------
        estimator
            Itself, ready to predict.
        """
        self._check_settings()
        self._centre = spread_of(self.X_, self.sample_weight_, counts=self.weights_are == "counts").centre
        self._make_pool(self.X_, self._pooled_targets(), self.sample_weight_)
        return self

    # ------------------------------------------------------------------------------------------------------- fitting

    @public()
    def _check_settings(self) -> None:
        """Raise an error where a setting has a wrong type or value."""
        check_kernel(self.kernel)
        check_bandwidth(self.bandwidth)
        check_choice("outside", self.outside, self._outside_choices)
        check_choice("weights_are", self.weights_are, ("counts", "importance"))
        check_choice("degree", self.degree, (0, 1))
        check_choice("dtype", self.dtype, (None, torch.float32, torch.float64))
        if isinstance(self.bandwidth, str) and self.bandwidth == "loo":
            self._check_lines()
        for name, least in (("max_iter", 1), ("n_restarts", 0)):
            _check_number(name, getattr(self, name), least, whole=True)
        _check_number("tol", self.tol, 0, whole=False)
        _check_number("tolerance", self.tolerance, 0, whole=False, below=1)
        check_float64("bandwidths and sums are", usable_device(self.device or "cpu"), 'device="cpu"')
        if not isinstance(self.verbose, bool):
            _check_number("verbose", self.verbose, 0, whole=True)
        if self.loo_rows not in ("auto", "all"):
            _check_number("loo_rows", self.loo_rows, 1, whole=True)

    def _check_lines(self) -> None:
        """Raise if leaving one out is asked of local lines under a score."""
        if not self.degree or isinstance(self.kernel, str):
            return
        found = f"kernel = {type(self.kernel).__name__}(), degree = {self.degree}"
        fix = "kernel='gaussian', degree=0, or for the predictions alone a given bandwidth such as bandwidth='scott'."
        raise ShapeError("the leave-one-out error of local lines needs a kernel that has a name.", found, fix)

    @public("fit()")
    def _fit_pool(self, X: Array, values: NDArray[np.float64], sample_weight: Array | None, loss: Loss) -> None:
        """Choose the bandwidths, and keep the data as tokens; `values` (n, e) are what is predicted."""
        warm = getattr(self, "bandwidth_", None) if self.warm_start else None
        counts = self.weights_are == "counts"
        spread = spread_of(X, sample_weight, counts=counts)
        self._centre = spread.centre
        self.n_iter_ = 1  # scikit-learn asks for one at least of whatever has a max_iter
        data, searched = Observations(X, values, sample_weight), True
        if isinstance(self.bandwidth, str) and self.bandwidth == "loo":
            searched = self._search_bandwidths(data, loss, warm)
        elif isinstance(self.bandwidth, str):
            self.bandwidth_ = rule_of_thumb(self.bandwidth, spread)
        else:
            self.bandwidth_ = bandwidth_of_features(self.bandwidth, X.shape[1])
        # Sets `_pool`, the keys and values that predictions are made from.
        self._make_pool(X, values, sample_weight)
        if not searched:  # there is no choice, and an error all the same
            known = self._loo_predictions_of_data(data).cpu().numpy()
            self._set_loo_scores_of_known(known, data._replace(values=self._prepared_values(values, sample_weight)))

    def _make_pool(self, X: Array, values: NDArray[np.float64], sample_weight: Array | None) -> None:
        """Keep the training data as the tokens and values that predictions pool."""
        single = X.dtype == np.float32 if self.dtype is None else self.dtype is torch.float32
        # Local lines are differences of sums: float32 would leave them four digits.
        self._single = bool(single and not self.degree)
        weights = None if sample_weight is None else self._as_tensor(sample_weight)
        prepared = self._as_tensor(self._prepared_values(values, sample_weight))
        self._pool = Pool(self.kernel, self._in_bandwidths(X), prepared, weights, self.degree, self.tolerance)

    def _pooled_targets(self) -> NDArray[np.float64]:
        """Return the values of the training data that are pooled, before `_prepared_values`, shape (n, e)."""
        raise NotImplementedError

    def _prepared_values(self, values: NDArray[np.float64], weights: Array | None) -> NDArray[np.float64]:
        """Return values as they are pooled; keep what `_restored` needs to undo it."""
        return values

    def _search_bandwidths(self, data: Observations, loss: Loss, warm: Array | None) -> bool:
        """Find the bandwidths of least leave-one-out error, from `warm` on if given; keep path and error too.

        Returns False, and keeps no error, where no feature varies.
        """
        n, rows = len(data.X), self._rows_of_search(data.X)
        counts = self.weights_are == "counts"
        # Observations of equal features that are left out together, as one.
        copies = are_copies(data)
        if rows >= n or copies:
            # Sorted, with equal observations joined: the search must not depend on how the data are listed.
            # Fractions of observations are left out one by one, as leave_one_out() does.
            data = distinct(data, join=counts and (data.weights is None or not (data.weights % 1).any()))
        data = data._replace(values=self._prepared_values(data.values, data.weights))
        spread = spread_of(data.X, data.weights, counts=counts)
        whole, index = data, np.arange(len(data.X))  # `index` has the row of `data` of each observation of `whole`
        if copies:
            data, index = average_copies(data)
        start = rule_of_thumb("scott", spread)
        used = np.isfinite(start)
        # What stays if there is nothing to search; a feature that does not vary has an infinite bandwidth in `start`.
        self.bandwidth_, self.path_ = start, SearchResult.empty(int(used.sum())).as_path(start[used])
        self.loo_rows_ = min(rows, n)
        if len(data.X) < 2 or not used.any():
            return False
        keys = (data.X[:, used].astype(np.float64) - spread.centre[used]) / start[used]
        task = self._loo_task(data._replace(X=keys), loss, repeated=counts and not copies)
        random = check_random_state(self.random_state)
        sample = _sampled_rows(len(data.X), rows, random)
        stages = self._staged_objectives(task, sample, random)
        unusable = warm is None or warm.shape != start.shape or not np.isfinite(warm[used]).all()
        # Where the search starts: logarithms of multiples of `start`, as in all that the search returns.
        first = None if warm is None or unusable else np.log(warm[used] / start[used])
        result = self._least_loss(stages, first, random)
        if loss is squared_error and copies:
            result = _with_error_of_copies(result, whole, data.values[index])
        self.bandwidth_[used] = start[used] * np.exp(result.log_scale)
        self.path_, self.n_iter_ = result.as_path(start[used]), result.iterations
        predicted = np.full(data.values.shape, np.nan)
        searched = slice(None) if sample is None else sample
        predicted[searched] = stages[-1].predictions(torch.from_numpy(result.log_scale)).detach().cpu().numpy()
        self._set_loo_scores_of_known(predicted[index], whole)
        return True

    def _loo_task(self, data: Observations, loss: Loss, *, repeated: bool) -> LooTask:
        """Return the leave-one-out prediction of observations whose features are in units of a first bandwidth."""
        keys, values = (torch.from_numpy(t).to(self._device_of_pool) for t in (data.X, data.values))
        weights = None if data.weights is None else torch.from_numpy(data.weights).to(self._device_of_pool)
        return LooTask.create(self.kernel, keys, values, weights, loss, self.degree, repeated=repeated)

    def _least_loss(self, stages: list[Objective], warm: Array | None, random: Any) -> SearchResult:
        """Search the bandwidths of least loss, with the settings of the user."""
        task = stages[-1].task
        smooth = self.kernel != "boxcar" and task.loss is not accuracy
        with Progress(type(self).__name__, bool(self.verbose)) as report:
            settings = Settings(self.max_iter, self.tol, self.n_restarts, random, smooth, report)
            return search(stages, task.keys.shape[1], settings, warm)

    def _rows_of_search(self, X: Array) -> int:
        """Return the number of rows over which a search takes the error, n or more for all."""
        if self.loo_rows != "auto":
            return len(X) if self.loo_rows == "all" else int(self.loo_rows)
        # On a line all pairs cost no more than sorting does.
        on_a_line = int((X[:1] != X).any(0).sum()) == 1 and self._device_of_pool.type == "cpu"
        fast = on_a_line and not self.degree and isinstance(self.kernel, str)
        return len(X) if fast else max(1, _MOST_PAIRS // len(X))

    def _staged_objectives(self, task: LooTask, sample: Array | None, random: Any) -> list[Objective]:
        """Return the errors that are minimised one after another, from coarse to fine; the last one counts."""
        n, device = len(task.keys), task.keys.device
        # `sample`: numbers of the rows over which the error is taken, None for all.
        rows = None if sample is None else torch.from_numpy(sample).to(device)
        if not isinstance(self.kernel, str):
            return [ScoredLeaveOneOut(self.kernel, task, rows)]
        count = n if rows is None else len(rows)
        last = objective(task, rows)
        # `line`: all rows of one feature, where every pair costs no more than sorting does.
        if count * n <= _COARSE_PAIRS or (isinstance(last, SummedLeaveOneOut) and last.line):
            return [last]

        def sampled(pairs: int) -> Objective:
            """Return the objective in float32 on so many rows, drawn at random, that it has about `pairs` pairs."""
            fewer = _sampled_rows(n, max(1, pairs // n), random)
            part = None if fewer is None else torch.from_numpy(fewer).to(device)
            return objective(task, part, torch.float32)

        if isinstance(last, SummedLeaveOneOut):
            return [sampled(_COARSE_PAIRS), objective(task, rows, torch.float32), last]
        # Here single precision is no faster.
        between = [sampled(_MIDDLE_PAIRS)] if count * n > _MIDDLE_PAIRS else []
        return [sampled(_COARSE_PAIRS), *between, last]

    def _set_loo_scores_of_known(self, predicted: Array, data: Observations) -> None:
        """Keep loss and score of the leave-one-out predictions; NaN stands for a row that was not predicted."""
        known = ~np.isnan(predicted).any(1)
        if not known.any():  # a single row has no others
            self.loo_loss_ = self.loo_score_ = math.nan
            return
        weights = None if data.weights is None else data.weights[known]
        self._set_loo_scores(predicted[known], data.values[known], weights)

    def _set_loo_scores(self, predicted: Array, observed: Array, weights: Array | None) -> None:
        """Keep loss and score of the leave-one-out predictions."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------------- reading

    @public("leave_one_out()")
    def _loo_predictions(self) -> Tensor:
        """Return the leave-one-out prediction of every training point, as pooled values (n, e)."""
        check_is_fitted(self)
        self._check_lines()
        return self._loo_predictions_of_data(Observations(self.X_, self._pooled_targets(), self.sample_weight_))

    def _loo_predictions_of_data(self, data: Observations) -> Tensor:
        """Return the leave-one-out prediction of each row of the data that the pool was made of, (n, e)."""
        if not are_copies(data):
            return self._loo_predictions_of(self._pool, repeated=self.weights_are == "counts")
        # Copies are left out together, as one key.
        joined, index = average_copies(data)
        back = torch.from_numpy(index).to(self._device_of_pool)
        return self._loo_predictions_of(self._pool.merge_keys(self._in_bandwidths(joined.X), back), repeated=False)[
            back
        ]

    def _loo_predictions_of(self, pool: Pool, *, repeated: bool) -> Tensor:
        """Return the leave-one-out prediction of each key of a pool, (n, e)."""
        task = LooTask.create(
            pool.kernel, pool.keys, pool.values, pool.weights, squared_error, self.degree, repeated=repeated
        )
        if pool.degree or isinstance(pool.kernel, Score):
            objective = ScoredLeaveOneOut(pool.kernel, task) if isinstance(pool.kernel, Score) else LeaveOneOut(task)
            # Zeros are logarithms of factors of 1: the keys of a pool are in units of the bandwidth already.
            return objective.predictions(torch.zeros(pool.keys.shape[1])).detach()
        sums = pool.sums(pool.keys, pool.values, leave_one_out=True)
        # An observation that stands for several is left out once: the rest of it still counts, where the kernel is 1.
        others, own = (t.unsqueeze(-1) for t in factors_with_own(sums.log_scale, task.kept))
        mean = (sums.numerator * others + own * pool.values) / (sums.denominator.unsqueeze(-1) * others + own)
        return torch.where(mean.isnan(), task.without_neighbours(torch.arange(len(mean))).to(mean), mean)

    @public("predict()")
    def _points_as_queries(self, X: ArrayLike) -> Tensor:
        """Return points as queries: checked, and scaled as the training data are."""
        check_is_fitted(self)
        refuse_dask(X)
        with naming_text_columns(X):
            checked: Array = validate_data(self, X, dtype=[np.float64, np.float32], reset=False)
        return self._in_bandwidths(checked)

    def _in_bandwidths(self, X: Array) -> Tensor:
        """Return points in units of the bandwidth, from the centre of the training data."""
        return self._as_tensor(in_bandwidths(X, self._centre, self.bandwidth_))

    def _as_tensor(self, values: Array) -> Tensor:
        """Return values as a tensor in the precision and on the device of the estimator."""
        return torch.tensor(values, dtype=torch.float32 if self._single else torch.float64, device=self._device_of_pool)

    @property
    def _device_of_pool(self) -> torch.device:
        """The device that the estimator computes on; it must have float64."""
        device = torch.device(self.device or "cpu")
        check_float64("bandwidths and sums are", device, 'set_params(device="cpu")')
        return device


def _with_error_of_copies(result: SearchResult, data: Observations, joined: NDArray[np.float64]) -> SearchResult:
    """Add the squared error of observations about the mean of their copies, which no bandwidth changes."""
    squares = np.square(data.values - joined).mean(1)
    within = float(np.average(squares, weights=data.weights))
    return replace(result, grid_loss=result.grid_loss + within, visited_loss=result.visited_loss + within)


def _sampled_rows(n: int, rows: int, random: Any) -> Array | None:
    """Return which rows are looked at, in ascending order, or None for all."""
    if rows >= n:
        return None
    return np.sort(random.choice(n, rows, replace=False))


def check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise unless a setting is one of its choices."""
    if any(value is choice or (type(value) is type(choice) and value == choice) for choice in choices):
        return
    known = " or ".join(", ".join(map(repr, choices)).rsplit(", ", 1))
    raise ShapeError(f"{name} must be {known}.", f"{name} = {value!r}", f"{name}={choices[0]!r}")


def _check_number(name: str, value: object, least: int, *, whole: bool, below: float = math.inf) -> None:
    """Raise unless a setting is a number from `least` on and below `below`; with `whole`, a whole number."""
    kinds = (int, np.integer) if whole else (int, float, np.integer, np.floating)
    if isinstance(value, kinds) and not isinstance(value, bool) and least <= value < below:
        return
    limit = "" if below == math.inf else f" and below {below}"
    rule = f"{name} must be a {'whole ' if whole else ''}number, {least} or more{limit}."
    raise ShapeError(rule, f"{name} = {value!r}", f"leave {name} out, for its default.")
