"""Kernel classification for scikit-learn."""

from __future__ import annotations

import warnings
from dataclasses import KW_ONLY, dataclass
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d, validate_data
from torch import Tensor

from attlas.errors import public
from attlas.estimators.base import AttentionEstimator, check_choice
from attlas.estimators.frames import naming_text_columns
from attlas.estimators.loo import accuracy, log_loss
from attlas.estimators.observations import used_weights
from attlas.estimators.partitions import refuse_dask
from attlas.foundation.autocast import without_autocast

Array = NDArray[Any]

# Neighbours that the class frequencies count as: log losses on iris, wine and breast cancer are least about it.
_PRIOR_NEIGHBOURS = 0.1


@dataclass(eq=False, repr=False)
class AttentionClassifier(ClassifierMixin, AttentionEstimator):  # type: ignore[misc]  # untyped bases
    """Kernel classification: the probability of a class is the attention weight of its training points.

    ``p_c(x) = Σ_{j: y_j = c} w_j K((x - x_j) / h) / Σ_j w_j K((x - x_j) / h)``, to which the frequencies of the
    classes count as a tenth of a neighbour: ``P(c | x) = (m p_c + 0.1 π_c) / (m + 0.1)`` with m the effective number
    of neighbours and π_c the frequency of class c. No finite number of neighbours makes a class impossible.

    Parameters
    ----------
    kernel : str or Score, default "gaussian"
        As in `AttentionRegressor`.
    bandwidth : str, float or array-like of shape (d,), default "loo"
        h of each feature, in its units. ``"loo"`` finds those of least leave-one-out loss; ``"scott"`` and
        ``"silverman"`` as in `AttentionRegressor`.
    criterion : str, default "log_loss"
        Leave-one-out loss that the search minimises: ``"log_loss"``, minus the mean logarithm of the probability of
        the observed class (not below 1e-12), or ``"accuracy"``, the share of points whose class is not the most
        probable one, which has no gradient and is searched with Nelder and Mead.
    tolerance : float, default 1e-7
        Error of a probability that skipping far neighbours may cause; 0 leaves out no pair that
        has a weight.
    outside : str, default "nearest"
        What a point without any neighbour within the reach of a bounded kernel gets: ``"nearest"``, the nearest
        training point in bandwidths as its one neighbour; ``"prior"``, the frequencies of the classes; or ``"nan"``:
        probabilities of NaN and the most frequent class, with one warning.
    max_iter, tol, n_restarts, loo_rows, weights_are, warm_start, random_state, verbose, dtype, device
        As in `AttentionRegressor`.

    Attributes
    ----------
    classes_ : ndarray, shape (c,)
        Classes, sorted.
    bandwidth_ : ndarray of float64, shape (d,)
        Bandwidth of each feature; ``inf`` for a constant feature, under a rule or a search.
    X_, y_ : ndarray, shape (n, d) and (n,)
        Training data; points of weight 0 are left out.
    support_ : ndarray of int64, shape (n,)
        Which of the points given to ``fit`` these are.
    sample_weight_ : ndarray, shape (n,), or None
        Their weights.
    loo_loss_ : float
        Leave-one-out log loss. Only after a search.
    loo_score_ : float
        Leave-one-out accuracy. Only after a search.
    loo_rows_, path_, n_iter_
        As in `AttentionRegressor`; losses are those of `criterion`.
    n_features_in_, feature_names_in_
        As everywhere in scikit-learn.

    Raises
    ------
    ShapeError, DtypeError, DeviceError
        From ``fit``, if a parameter has a value that it cannot have.
    ValueError
        If data are not finite, empty, or do not fit together, in scikit-learn's words.

    See Also
    --------
    AttentionRegressor : the same for numbers; its notes on search and cost hold here too.

    Notes
    -----
    The gradient of the log loss is that of a regression on the indicators of the classes, with
    ``-1 / P(y_i | x_i)`` in the place of twice the residual.

    References
    ----------
    .. [1] Hastie, Tibshirani and Friedman, "The elements of statistical learning", 2009, section 6.6.

    Examples
    --------
    >>> from sklearn.datasets import load_iris
    >>> from attlas.estimators import AttentionClassifier
    >>> X, y = load_iris(return_X_y=True)
    >>> model = AttentionClassifier(bandwidth="scott").fit(X, y)
    >>> model.predict_proba(X[:1]).round(2)
    array([[1., 0., 0.]])
    """

    _outside_choices = ("nearest", "prior", "nan")

    _: KW_ONLY
    criterion: str = "log_loss"
    outside: str = "nearest"

    @without_autocast
    @public("fit()")
    def fit(self, X: ArrayLike, y: ArrayLike, sample_weight: ArrayLike | None = None) -> Self:
        """Keep the data and choose the bandwidths.

        Parameters
        ----------
        X : array-like or data frame, shape (n, d)
            Features, finite.
        y : array-like, shape (n,)
            Classes: texts, whole numbers or True and False.
        sample_weight : array-like, shape (n,), optional
            Weights, 0 or more; see `weights_are`.

        Returns
        -------
        AttentionClassifier
            Itself.
        """
        self._check_settings()
        refuse_dask(X, y, sample_weight)
        with public("AttentionClassifier()"):
            check_choice("criterion", self.criterion, ("log_loss", "accuracy"))
        with naming_text_columns(X):
            data, target = validate_data(self, X, y, dtype=[np.float64, np.float32])
        target = column_or_1d(target, warn=True)
        check_classification_targets(target)
        self.X_, self.y_, self.sample_weight_, self.support_ = used_weights(data, target, sample_weight)
        self.classes_ = np.unique(self.y_)
        loss = log_loss if self.criterion == "log_loss" else accuracy
        # Chooses `bandwidth_`, and keeps the data for predict().
        self._fit_pool(self.X_, self._pooled_targets(), self.sample_weight_, loss)
        return self

    @without_autocast
    def predict_proba(self, X: ArrayLike) -> Array:
        """Return the probability of each class.

        Parameters
        ----------
        X : array-like, shape (m, d)
            Points.

        Returns
        -------
        ndarray, shape (m, classes)
            Rows sum to 1; columns are in the order of `classes_`.
        """
        x = self._points_as_queries(X)
        probabilities = self._class_probabilities(x)
        isolated = probabilities.isnan().any(-1).nonzero().squeeze(-1)
        if len(isolated):
            probabilities[isolated] = self._outside_probabilities(x[isolated], len(x))
        return probabilities.cpu().numpy()

    def predict(self, X: ArrayLike) -> Array:
        """Return the most probable class of each point, the first of several.

        Parameters
        ----------
        X : array-like, shape (m, d)
            Points.

        Returns
        -------
        ndarray, shape (m,)
            Labels of `classes_`.
        """
        probabilities = self.predict_proba(X)
        probabilities[np.isnan(probabilities).any(1)] = self._class_frequencies().cpu().numpy()
        return self.classes_[probabilities.argmax(1)]

    @without_autocast
    def leave_one_out(self) -> Array:
        """Return the probabilities of the classes of every training point from all others, exact.

        Returns
        -------
        ndarray, shape (n, classes)
            A point without neighbours but itself has the frequencies among all others. These are the weights of the
            neighbours alone, as the search judges them, without the frequencies that `predict_proba` counts in.

        Notes
        -----
        Works for every bandwidth, not only for those that a search found. Cost: n² pairs at most.
        """
        return self._loo_predictions().cpu().numpy()

    # ------------------------------------------------------------------------------------------------------ internal

    def _pooled_targets(self) -> NDArray[np.float64]:
        """Return the class of each training point as a row of 0 with one 1, shape (n, classes)."""
        return np.eye(len(self.classes_))[np.searchsorted(self.classes_, self.y_)]

    def _set_loo_scores(self, predicted: Array, observed: Array, weights: Array | None) -> None:
        """Set the leave-one-out log loss and accuracy from the shares predicted for each row, shape (rows, classes)."""
        rows = torch.from_numpy(predicted), torch.from_numpy(observed)
        self.loo_loss_ = float(np.average(log_loss(*rows).loss.numpy(), weights=weights))
        self.loo_score_ = float(np.average(1.0 - accuracy(*rows).loss.numpy(), weights=weights))

    def _class_probabilities(self, x: Tensor) -> Tensor:
        """Return the probabilities (m, classes), NaN where a point has no neighbour."""
        shares = self._pool.mean(x).clamp(min=0.0)  # skipping far neighbours may make them -1e-8
        number = self._pool.neighbours(x, counts=self.weights_are == "counts").unsqueeze(-1)
        return (number * shares / shares.sum(-1, keepdim=True) + _PRIOR_NEIGHBOURS * self._class_frequencies()) / (
            number + _PRIOR_NEIGHBOURS
        )

    def _class_frequencies(self) -> Tensor:
        """Return the frequencies of the classes in the training data."""
        values, weights = self._pool.values, self._pool.weights
        mass = values.sum(0) if weights is None else weights @ values
        return mass / mass.sum()

    def _outside_probabilities(self, x: Tensor, points: int) -> Tensor:
        """Return the probabilities of those of so many points that have no neighbour, as `outside` says."""
        # The nearest point's class (one-hot), mixed with the classes' shares: (class + p · prior) / (1 + p),
        # where p is _PRIOR_NEIGHBOURS.
        if self.outside == "nearest":
            return (self._pool.values[self._pool.nearest(x)] + _PRIOR_NEIGHBOURS * self._class_frequencies()) / (
                1.0 + _PRIOR_NEIGHBOURS
            )
        if self.outside == "prior":
            return self._class_frequencies().expand(len(x), -1)
        warnings.warn(
            f"{len(x)} of {points} points have no training point within one bandwidth: their probabilities are NaN. "
            "outside='nearest' takes the nearest point's class; a larger bandwidth reaches further.",
            UserWarning,
            stacklevel=4,  # behind `without_autocast`
        )
        return torch.full((len(x), len(self.classes_)), torch.nan, dtype=x.dtype, device=x.device)
