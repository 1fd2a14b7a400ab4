"""Kernel regression for scikit-learn."""

from __future__ import annotations

import math
import warnings
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import MultiOutputMixin, RegressorMixin
from sklearn.metrics import r2_score
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from attlas.errors import ShapeError, public
from attlas.estimators.bandwidth import spread_of
from attlas.estimators.base import AttentionEstimator
from attlas.estimators.frames import naming_text_columns
from attlas.estimators.halo import predicted_in_boxes
from attlas.estimators.loo import squared_error
from attlas.estimators.observations import used_weights
from attlas.estimators.partitions import (
    Partition,
    features_of,
    is_dask,
    merged_partitions,
    names_of,
    predicted_partitions,
    refuse_dask,
)
from attlas.estimators.sums import Sums
from attlas.foundation.autocast import without_autocast

Array = NDArray[Any]


@dataclass(eq=False, repr=False)
class AttentionRegressor(RegressorMixin, MultiOutputMixin, AttentionEstimator):  # type: ignore[misc]  # untyped bases
    """Nadaraya-Watson regression, which is attention pooling: the weighted mean of the training outputs.

    ``ŷ(x) = Σ_j w_j K((x - x_j) / h) y_j / Σ_j w_j K((x - x_j) / h)``, or with ``degree=1`` the value at x of the line
    that fits the outputs best under these weights.

    Parameters
    ----------
    kernel : str or Score, default "gaussian"
        ``"gaussian"``, ``"laplace"``, ``"epanechnikov"``, ``"boxcar"`` or ``"triangular"``, as `attlas.Gaussian` and
        its neighbours define them, or any score of attlas, which gets points divided by the bandwidth.
    bandwidth : str, float or array-like of shape (d,), default "loo"
        h of each feature, in its units. ``"loo"`` finds those of least leave-one-out error; ``"scott"`` is
        ``σ_c n^(-1 / (d + 4))`` and ``"silverman"`` that times ``(4 / (d + 2))^(1 / (d + 4))``, with σ_c the unbiased
        standard deviation, as in ``scipy.stats.gaussian_kde``.
    degree : int, default 0
        0 for a local mean (statsmodels' ``"lc"``), 1 for a local line (``"ll"``). Local lines under a Score need a
        bandwidth that is given, or a rule.
    tolerance : float, default 1e-7
        Error of a prediction that skipping far neighbours may cause, in units of the largest output's distance from
        the mean output; 0 leaves out no pair that has a weight.
    outside : str, default "nan"
        What a point without any neighbour within the reach of a bounded kernel is predicted to be: ``"nan"``, with
        one warning, or ``"nearest"``, the output of the nearest training point in bandwidths. Choose the latter in a
        search such as GridSearchCV: a fold with a point that is NaN has no score.
    max_iter : int, default 100
        Iterations of L-BFGS from each start.
    tol : float, default 1e-5
        Relative decrease of the leave-one-out error at which the search stops.
    n_restarts : int, default 2
        Random starts of the search beside the best of the grid.
    loo_rows : str or int, default "auto"
        Over how many training points the leave-one-out error is averaged, each predicted from all others. ``"all"``
        is every one; ``"auto"`` is every one of a single feature on the CPU, where sums are those of sorted points, and
        of several features up to 16,384, with a random sample above, so that the search looks at 2.7e8 pairs at a
        time at most.
    weights_are : str, default "counts"
        ``"counts"``: a sample weight of 3 stands for three equal observations, which are left out as copies are.
        ``"importance"``: only ratios of weights matter, and a point is left out with all its weight.
    warm_start : bool, default False
        Whether a further ``fit`` searches from the bandwidths of the last one, without grid and restarts.
    random_state : int, RandomState or None, default 0
        Where restarts and samples come from.
    verbose : bool or int, default False
        Whether a search tells on the standard error where it is.
    dtype : torch.dtype, optional
        ``torch.float32`` or ``torch.float64``; the default is float32 for float32 data, and float64 else. Local
        lines and the last search are always in float64.
    device : str or torch.device, optional
        Where to compute; the default is the CPU. It must have float64, which ``"mps"`` has not.

    Attributes
    ----------
    bandwidth_ : ndarray of float64, shape (d,)
        Bandwidth of each feature; ``inf`` for a constant feature, which tells nothing, under a rule or a search.
    X_, y_ : ndarray, shape (n, d), and (n,) or (n, e)
        Training data; points of weight 0 are left out.
    support_ : ndarray of int64, shape (n,)
        Which of the points given to ``fit`` these are.
    sample_weight_ : ndarray, shape (n,), or None
        Their weights.
    loo_loss_ : float
        Mean squared leave-one-out error, averaged over outputs: statsmodels' ``cv_ls``. Only after a search; NaN of
        a single row, which has no others.
    loo_score_ : float
        Leave-one-out R², averaged over outputs. Only after a search.
    loo_rows_ : int
        Over how many points both were averaged.
    path_ : dict of ndarray
        Of the grid: "scale" (multiples of Scott's bandwidths) and "loss". Of the last search: "bandwidth" (k, d) and
        "bandwidth_loss" (k,). Losses are 1 - R², outputs averaged, against the mean of all outputs.
    n_iter_ : int
        Iterations of all searches; 1 where no search was asked for.
    n_features_in_, feature_names_in_
        As everywhere in scikit-learn.

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        From ``fit``, if a parameter has a value that it cannot have, or ``bandwidth="loo"`` is asked of local lines
        under a Score.
    ValueError
        If data are not finite, empty, or do not fit together, in scikit-learn's words.

    See Also
    --------
    AttentionClassifier : the same for classes.
    attlas.attend : the weights as a matrix, without scikit-learn.

    Notes
    -----
    **Search.** The leave-one-out error ``L(h) = Σ_i w_i ‖y_i - ŷ_{-i}(x_i)‖² / Σ_i w_i`` is computed for 26 multiples
    of Scott's bandwidths; then L-BFGS moves the logarithm of each bandwidth along the exact gradient, for the
    Gaussian ``∂ŷ_i/∂log h_c = Σ_j p_ij u_ijc² (y_j - ŷ_i)``, from several starts. Of several features above 2,048
    points the starts are compared in float32 on a sample of rows, and the best is refined on all of them, in the end
    in float64. A kernel of one feature is summed to 1e-10. A feature that tells nothing gets a bandwidth far beyond
    its range, which leaves it out [4]_. The loss of the boxcar has no gradient: Nelder and Mead search there. The
    same data and `random_state` give the same bandwidths, whatever the order of the points.

    **Copies.** Points of equal features are left out together: a copy of a point (of a table written twice, of a
    bootstrap) would give its output away. They are left out one by one where half of all points or more share their
    features with one of another output: such data (categories, whole numbers) repeat measurements.

    **Local lines** are fitted without a ridge. In a direction in which the weighted neighbours do not vary the line
    is level, as a local mean is; statsmodels' pseudo-inverse shrinks the prediction towards 0 there. Which directions
    vary is judged on the correlations of the features (an eigenvalue above 1e-13 of the largest), with no more than
    four points for each feature on singular values (above 2e-13), and depends on no unit. With fewer distinct points
    than features many lines fit equally well, and the least steep one in bandwidths is taken: integer weights and
    repeats agree to 1e-6 of the outputs' spread there, to 1e-9 where the points determine the line. A search may end
    at bandwidths so narrow there that the weights of the neighbours differ by many powers of ten: the lightest alone
    then decide on some slopes, with the few digits that are left of them.

    **Cost.** Fitting without a search: a copy of the data. Searching: some 10 passes over ``loo_rows × n`` pairs, after
    many over a sample of some 4 · 10^6 pairs, and memory linear in n: 10,000 points with 5 features took 1.8 s of one
    core, 0.33 s of it for each pass over all pairs in float64; of one feature some 30 sortings, 100,000 points in 3.0 s
    of one core. Predicting: `plan_sums` says which method runs; at most m n pairs, memory linear in m + n.

    References
    ----------
    .. [1] Nadaraya, "On estimating regression", 1964. Watson, "Smooth regression analysis", 1964.
    .. [2] Fan and Gijbels, "Local polynomial modelling and its applications", 1996.
    .. [3] Racine and Li, "Nonparametric estimation of regression functions with both categorical and continuous
       data", 2004. Li and Racine, "Cross-validated local linear nonparametric regression", 2004.
    .. [4] Hall, Li and Racine, "Nonparametric estimation of regression functions in the presence of irrelevant
       regressors", 2007.

    Examples
    --------
    >>> import numpy as np
    >>> from attlas.estimators import AttentionRegressor
    >>> X = np.linspace(0.0, 6.0, 100)[:, None]
    >>> y = np.sin(X[:, 0])
    >>> model = AttentionRegressor().fit(X, y)
    >>> model.predict([[1.5]]).round(2)
    array([1.])
    >>> bool(model.loo_score_ > 0.99)
    True
    """

    _: KW_ONLY
    degree: int = 0

    @without_autocast
    @public("fit()")
    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Keep the data and choose the bandwidths.

        Parameters
        ----------
        X : array-like or data frame, shape (n, d)
            Features, finite.
        y : array-like, shape (n,) or (n, e)
            Outputs, finite.
        sample_weight : array-like, shape (n,), optional
            Weights, 0 or more; see `weights_are`.

        Returns
        -------
        AttentionRegressor
            Itself.
        """
        self._check_settings()
        refuse_dask(X, y, sample_weight)
        with naming_text_columns(X, y):
            data, target = validate_data(self, X, y, dtype=[np.float64, np.float32], multi_output=True, y_numeric=True)
            target.astype(np.float64)  # texts are an error here, and not further down
        self.X_, self.y_, self.sample_weight_, self.support_ = used_weights(data, target, sample_weight)
        # Chooses `bandwidth_`, and keeps the data for predict().
        self._fit_pool(self.X_, self._pooled_targets(), self.sample_weight_, squared_error)
        return self

    @without_autocast
    def predict(self, X: ArrayLike, return_std: bool = False, *, memory: Any = None) -> Any:
        """Return the prediction for each point.

        Parameters
        ----------
        X : array-like, shape (m, d), or Dask data frame
            Points. Of a Dask frame each partition is predicted where it is.
        return_std : bool, default False
            Whether the local standard deviation of the outputs is returned too,
            ``sqrt(Σ_j p_ij (y_j - ŷ(x_i))²)``: how far the neighbours' outputs lie from the prediction (with
            ``degree=1`` from the local line), noise and bias together. It is not the standard error of the
            prediction, which is smaller by about the square root of `effective_neighbours`.
        memory : Dask data frame, optional
            Training points in place of those of ``fit``, which chose the bandwidths: the columns of the features by
            name, and one more for each output. Its partitions are summed where they are, and the sums merged. If `X` is
            a Dask frame too, both are shuffled into boxes of space, and each box gets its own training points and those
            within reach of it.

        Returns
        -------
        mean : ndarray, shape (m,) or (m, e)
            Predictions; of a Dask frame a Dask series or data frame, with the index of `X`.
        std : ndarray of the same shape
            With ``return_std=True``. NaN, with a warning, where the data say nothing about it: fewer than two
            effective neighbours (as in data without noise, where narrow bandwidths are best), or so far from all data
            that the kernels at the point sum to less than 0.01. ``sqrt(loo_loss_)`` is the error over all points.

        Notes
        -----
        Variances come from first and second moments where these have the digits, and from the residuals
        themselves where they have not. With `memory`, merging rounds like adding; the approximation of each
        partition is `tolerance`.

        **Two Dask frames.** A box needs the training points within one bandwidth if the kernel has bounds; predictions
        are then those of one process. The Gaussian and the Laplace kernel are cut off where all points beyond weigh
        less than half of `tolerance`. This is certain for a point within 8 bandwidths of a training point; where it is
        not, the prediction is NaN. Samples of both frames are read at once, everything else when the result is
        computed. Cost: a shuffle of both frames, and for each point the pairs of its neighbourhood; a worker holds one
        box and its halo.

        Raises
        ------
        ShapeError
            If `memory` has other columns, or is asked of local lines, a Score, `return_std` or ``outside="nearest"``.
            If both are Dask frames, and ``tolerance=0`` for a kernel without bounds, or boxes overlap too much:
            training points are on the mean within reach of more than 8 boxes.
        DtypeError
            If a Dask collection is no data frame of known columns.
        """
        if memory is not None or is_dask(X):
            return self._predict_partitions(X, memory, return_std)
        x = self._points_as_queries(X)
        mean = self._pool.mean(x)
        isolated = self._fill_outside(mean, x)
        predicted = self._in_output_units(mean) + self._shift
        if not return_std:
            return self._in_shape_of_outputs(predicted)
        variance = self._pool.variance(x, mean).clamp(min=0.0)
        variance[isolated] = torch.nan
        variance[self._without_support(x, isolated, "standard deviations")] = torch.nan
        return self._in_shape_of_outputs(predicted), self._in_shape_of_outputs(self._in_output_units(variance.sqrt()))

    def score(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> float:
        """Return the coefficient of determination R² of the predictions.

        Parameters
        ----------
        X : array-like, shape (m, d)
            Points.
        y : array-like, shape (m,) or (m, outputs)
            Their targets.
        sample_weight : array-like, shape (m,), optional
            Weights.

        Returns
        -------
        float
            1 for perfect predictions, 0 for those of the mean; the mean over outputs.

        Raises
        ------
        ShapeError
            If a point has no training point within reach, so that it is predicted to be NaN: ``outside="nearest"``
            gives it a prediction, which a search over bounded kernels needs.
        """
        predicted = self.predict(X)
        unknown = int(np.isnan(predicted).reshape(len(predicted), -1).any(1).sum())
        if unknown:
            rule = "every point that is scored must have a prediction."
            found = f"{unknown} of {len(predicted)} points without a training point within one bandwidth"
            fix = f"AttentionRegressor(kernel={self.kernel!r}, outside='nearest'), in a search too."
            raise ShapeError(rule, found, fix, outside="'nan'", where="score()")
        return float(r2_score(y, predicted, sample_weight=sample_weight))

    @without_autocast
    def predict_quantile(self, X: ArrayLike, quantiles: float | ArrayLike) -> Array:
        """Return weighted quantiles of the neighbours' outputs: bands, and medians that outliers do not move.

        Parameters
        ----------
        X : array-like, shape (m, d)
            Points.
        quantiles : float or array-like, shape (q,)
            Levels from 0 to 1.

        Returns
        -------
        ndarray, shape (m,) or (m, e), with a last axis q where several levels are given
            The least output at which the weights of all outputs up to it reach the level
            (``numpy.quantile(..., method="inverted_cdf", weights=...)``). NaN where the standard deviation is NaN.

        Raises
        ------
        ShapeError
            If a level is not between 0 and 1.

        Notes
        -----
        Exact; no tolerance. With ``degree=1`` the outputs are moved along the local line to the point first.
        Cost: m n weights, and cumulative sums along the sorted outputs; memory of a block of whole rows.
        """
        levels = np.asarray(quantiles, dtype=np.float64)
        if levels.ndim > 1 or not ((levels >= 0) & (levels <= 1)).all():
            rule = "quantiles must be one level from 0 to 1, or a vector of them."
            fix = "predict_quantile(X, [0.1, 0.5, 0.9])"
            raise ShapeError(rule, f"quantiles = {quantiles!r}", fix, where="predict_quantile()")
        x = self._points_as_queries(X)
        device = x.device
        bands = self._pool.quantiles(x, torch.as_tensor(levels.reshape(-1), dtype=torch.float64, device=device))
        isolated = bands.isnan().flatten(1).any(-1).nonzero().squeeze(-1)
        bands[self._without_support(x, isolated, "quantiles")] = torch.nan
        columns = bands.flatten(1).cpu().numpy().astype(np.float64).reshape(bands.shape) * self._unit[:, None]
        columns = (columns + self._shift[:, None]).astype(self._output_dtype)
        columns = columns if self.y_.ndim > 1 else columns[:, 0]
        return columns[..., 0] if levels.ndim == 0 else columns

    @without_autocast
    def leave_one_out(self) -> Array:
        """Return the prediction of every training point from all others, exact.

        Returns
        -------
        ndarray, shape (n,) or (n, e)
            A point without neighbours but itself is predicted to be the mean of all others, as in the search.

        Raises
        ------
        ShapeError
            If local lines were fitted under a Score.

        Notes
        -----
        Works for every bandwidth, not only for those that a search found. Cost: n² pairs at most.
        """
        return self._in_shape_of_outputs(self._in_output_units(self._loo_predictions()) + self._shift)

    def partial_sums(self, X: ArrayLike) -> Sums:
        """Return numerators and denominators, which add up over estimators that were fitted to parts of the data.

        Parameters
        ----------
        X : array-like, shape (m, d)
            Points.

        Returns
        -------
        Sums
            ``a.partial_sums(X).merge(b.partial_sums(X)).mean()`` is the prediction of one estimator for the data of
            both. Sums of different kernels or bandwidths, such as a search finds on each part, cannot be merged.

        Raises
        ------
        ShapeError
            If the estimator is one of local lines, or its kernel is a Score.
        """
        if self.degree or not isinstance(self.kernel, str):
            found = f"degree = {self.degree}" if self.degree else f"kernel = {type(self.kernel).__name__}()"
            rule = "sums that add up belong to local means with a kernel that has a name."
            raise ShapeError(rule, found, "AttentionRegressor('gaussian')", where="partial_sums()")
        x = self._points_as_queries(X)
        sums = self._pool.sums(x, self._as_tensor(self.y_.reshape(len(self.y_), -1)))
        return replace(sums, bandwidth=torch.from_numpy(self.bandwidth_))  # the pool counts in bandwidths

    # ------------------------------------------------------------------------------------------------------ internal

    def _predict_partitions(self, X: Any, memory: Any, return_std: bool) -> Any:
        """Return `predict` where the points, the training points or both are a Dask frame."""
        check_is_fitted(self)
        outputs = self.y_.reshape(len(self.y_), -1).shape[1]
        # Without `memory` the training points are those of fit(): each partition of queries is predicted by itself.
        if memory is None:
            if return_std:
                rule, fix = "standard deviations are those of data in memory.", "predict(X.compute(), return_std=True)"
                raise ShapeError(rule, "return_std=True and a Dask frame", fix, where="predict()")
            return predicted_partitions(self, X, outputs)
        if self.degree or not isinstance(self.kernel, str) or return_std or self.outside == "nearest":
            rule = "partitions of memory are merged for the means of a kernel that has a name, with outside='nan'."
            settings = f"degree = {self.degree}, kernel = {self.kernel!r}, outside = {self.outside!r}"
            found = f"{settings}, return_std = {return_std}"
            raise ShapeError(rule, found, "AttentionRegressor('gaussian').fit(...).predict(X)", where="predict()")
        names = features_of(self, memory, outputs)
        x = self._in_bandwidths(self.X_[:0]) if is_dask(X) else self._points_as_queries(X)
        scale = (self._centre, self.bandwidth_, self._shift, self._unit)
        part = Partition(self.kernel, x, *scale, self.tolerance, names)
        if is_dask(X):
            return predicted_in_boxes(X[list(names_of(self, X))], memory, part, self.y_.shape[1:])
        mean = merged_partitions(memory, part).mean()
        self._fill_outside(mean, x)  # in place
        return self._in_shape_of_outputs(self._in_output_units(mean) + self._shift)

    def _pooled_targets(self) -> NDArray[np.float64]:
        """Return the outputs of the training data, shape (n, e)."""
        return self.y_.astype(np.float64).reshape(len(self.y_), -1)

    def _prepared_values(self, values: NDArray[np.float64], weights: Array | None) -> NDArray[np.float64]:
        """Return the outputs with mean 0 and deviation 1, and keep shift and unit to undo it."""
        spread = spread_of(values, weights, counts=self.weights_are == "counts")
        self._shift = spread.centre
        self._unit = np.where(spread.deviation > 0, spread.deviation, 1.0)
        return (values - self._shift) / self._unit

    def _set_loo_scores(self, predicted: Array, observed: Array, weights: Array | None) -> None:
        """Set the leave-one-out mean squared error and R² from prepared outputs."""
        with np.errstate(over="ignore"):  # of outputs like 1e300 the error is infinite, and the score is not
            gap = np.square((predicted - observed) * self._unit)
        self.loo_loss_ = float(np.average(gap, axis=0, weights=weights).mean())
        self.loo_score_ = float(r2_score(observed, predicted, sample_weight=weights)) if len(observed) > 1 else np.nan

    def _without_support(self, x: Tensor, isolated: Tensor, what: str) -> Tensor:
        """Return where neighbours do not determine a spread; warn unless these are the `isolated` points alone."""
        unknown = ~self._pool.supported(x, counts=self.weights_are == "counts")
        # `isolated` has the numbers of the points without a neighbour.
        unknown[isolated] = True
        # Of isolated points `_fill_outside` has warned; with outside="nearest" and for quantiles nothing has.
        if int(unknown.sum()) > (0 if self.outside == "nearest" or what == "quantiles" else len(isolated)):
            searched = isinstance(self.bandwidth, str) and self.bandwidth == "loo" and hasattr(self, "loo_loss_")
            over_all = f" Over all points, sqrt(loo_loss_) is {math.sqrt(self.loo_loss_):.4g}." if searched else ""
            warnings.warn(
                f"the {what} of {int(unknown.sum())} of {len(x)} points are NaN: they have fewer than two "
                "effective_neighbours, or lie far from all training points, which say nothing about the spread there."
                f"{over_all}",
                UserWarning,
                stacklevel=4,  # behind `without_autocast`
            )
        return unknown

    def _fill_outside(self, mean: Tensor, x: Tensor) -> Tensor:
        """Predict the points without a neighbour as `outside` says, in place, and return which they are."""
        isolated = mean.isnan().any(-1).nonzero().squeeze(-1)
        if not len(isolated):
            return isolated
        if self.outside == "nearest":
            mean[isolated] = self._pool.values[self._pool.nearest(x[isolated])].to(mean)
        else:
            warnings.warn(
                f"{len(isolated)} of {len(x)} points have no training point within one bandwidth: they are predicted "
                "to be NaN. outside='nearest' takes the nearest point's output, which searches such as GridSearchCV "
                "need; a larger bandwidth reaches further.",
                UserWarning,
                stacklevel=4,  # behind `without_autocast`
            )
        return isolated

    @property
    def _output_dtype(self) -> Any:
        """The dtype of predictions."""
        # `fit` decides whether everything is computed in single precision.
        return np.float32 if self._single else np.float64

    def _in_output_units(self, values: Tensor) -> Array:
        """Return pooled values, or their deviations, in the units of the outputs."""
        return values.detach().cpu().numpy().astype(np.float64) * self._unit

    def _in_shape_of_outputs(self, values: Array) -> Array:
        """Return predictions (n, e) with the axes and the dtype that the user sees."""
        shaped = values if self.y_.ndim > 1 else values[:, 0]
        return shaped.astype(self._output_dtype)
