"""A scikit-learn classifier over many classes; rows are called X by convention."""
# ruff: noqa: N803, N806

from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import type_of_target
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, column_or_1d, validate_data

from manyclass import _check
from manyclass.counts import ClassCounts
from manyclass.data.rows import Rows
from manyclass.estimator._labels import Array, Labels, check_one_label, check_one_type
from manyclass.estimator._learner import Learner, add_counts
from manyclass.estimator._memory import check_fits
from manyclass.estimator._options import MakeSampler, Options, plain
from manyclass.estimator._sparse import check_sparse
from manyclass.objectives import Objective
from manyclass.training import History, Progress, Record

_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
_PRIVATE = ("_labels", "_learner", "_progress", "_random")  # the fitted attributes that are not public


class ManyClassClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier p(c | x) ∝ exp(w_c · h(x) + b_c) over very many classes, of which a training step scores a sample.

    h(x) is the row itself, a linear projection of it or a network. `X` is dense or sparse (CSR, never made dense as a
    whole); labels are numbers or strings. Training maximises the likelihood by minibatches in float32; predictions are
    exact, over all classes. The same `random_state` gives the same model, bit for bit on the CPU, if `sampler` or k is
    given: the default sampler measures the time of a step, and may decide otherwise another time.

    Args:
        hidden_layers: the widths of a network, each layer followed by a ReLU.
        rank: project rows linearly to this many dimensions first. None: 256 if rows are sparse with more than 2,048
            features and there are no `hidden_layers`, else no projection.
        sampler: chooses the classes that a step scores: "learned", "tailored", "systematic", "clustered", "importance",
            "bernoulli"; "exact" or "exhaustive" for all; or a function from `ClassCounts` and k to a sampler. None:
            the default of a head. All classes are scored if there are at most `k`.
        objective: to maximise, a name in `manyclass.registry.OBJECTIVES` ("negative_sampling", …) or an object. None:
            the likelihood. Objectives of discrimination and ranking do not give calibrated probabilities.
        k: classes drawn per step; "auto": as many as keep the error of log Z̃ below 0.15. None: "auto", or 1024 with
            a `sampler`.
        optimizer: "adagrad", "adam" or "sgd"; updates only the rows that a step touched.
        learning_rate: None: the default of the optimiser, which fits columns of unit variance or rows of unit length.
        batch_size: examples per step.
        max_epochs: passes over the data. None: 50, or as many as make 300 steps.
        early_stopping: hold out a part of the data, stop when its exact likelihood has not improved for
            `n_iter_no_change` epochs, and keep the best model.
        validation_fraction: fraction of the rows to hold out.
        n_iter_no_change: epochs without improvement before stopping.
        random_state: a seed, a RandomState or None.
        device: to train and predict on. None or "auto": a GPU if there is one.
        verbose: above 0: print a line of progress to the standard error.

    Attributes:
        classes_: [C], ascending.
        n_features_in_, feature_names_in_: as in other scikit-learn estimators.
        n_iter_: epochs trained.
        history_: a list of `manyclass.training.Record`.
        loss_: smoothed training loss at the end.

    Example:
        >>> from sklearn.datasets import load_iris
        >>> X, y = load_iris(return_X_y=True)
        >>> model = ManyClassClassifier(random_state=0).fit(X, y)
        >>> bool(model.score(X, y) > 0.9)
        True
        >>> labels, probabilities = model.predict_top(X[:4], 2)
        >>> labels.shape, probabilities.shape
        ((4, 2), (4, 2))
    """

    classes_: Array
    n_iter_: int
    history_: list[Record]
    loss_: float
    _labels: Labels
    _learner: Learner
    _progress: Progress
    _random: np.random.RandomState

    def __init__(
        self,
        *,
        hidden_layers: tuple[int, ...] = (),
        rank: int | None = None,
        sampler: str | MakeSampler | None = None,
        objective: str | Objective | None = None,
        k: int | str | None = None,
        optimizer: str = "adagrad",
        learning_rate: float | None = None,
        batch_size: int = 256,
        max_epochs: int | None = None,
        early_stopping: bool = False,
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 5,
        random_state: int | np.random.RandomState | None = None,
        device: str | torch.device | None = "cpu",
        verbose: int = 0,
    ) -> None:
        self.hidden_layers = hidden_layers
        self.rank = rank
        self.sampler = sampler
        self.objective = objective
        self.k = k
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.batch_size = batch_size
        self.max_epochs = max_epochs
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.random_state = random_state
        self.device = device
        self.verbose = verbose

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train from the beginning.

        Ctrl-C ends the training and leaves the estimator unfitted, even if it was fitted before.

        Args:
            X: [n, F], an array or a sparse matrix.
            y: [n], labels.
            sample_weight: [n], not negative; only ratios matter. Rows of weight 0 are left out.
        """
        try:
            return self._fit(X, y, sample_weight)
        except KeyboardInterrupt:
            # Half a model must not pass for a whole one, nor one of earlier data for one of these.
            for name in [name for name in vars(self) if name in _PRIVATE or name[-1] == "_" != name[0]]:
                delattr(self, name)
            raise

    def _fit(self, X: Any, y: Any, sample_weight: Any) -> Self:
        options = Options.of(self.get_params(deep=False))
        X, y, weight = self._examples(X, y, sample_weight, first=True)
        if weight is not None:
            weight = weight / weight.max()
            weight = weight / weight.mean()
        labels = Labels.of(y)
        rows, chosen = labels.rows_of(y, "y"), _present(len(y), weight)
        if (present := len(np.unique(rows[chosen]))) < 2:
            weighted = "" if weight is None else " of weight above 0"
            raise ValueError(f"`y` must hold at least 2 classes{weighted}, got {present} class")
        random = check_random_state(self.random_state)
        held_out = None
        if options.early_stopping:
            chosen, held_out = _split(chosen, options.validation_fraction, random)
        learner = _new_learner(X, labels, rows, chosen, weight, options, random)
        history = learner.train(
            Rows(X, rows),
            options=options,
            epochs=options.epochs(len(chosen)),
            chosen=chosen,
            held_out=held_out,
            weight=weight,
            seeds=(_seed(random), _seed(random)),
        )
        self._learner, self._random = learner, random
        self.history_, self._progress = [], Progress()
        return self._store(labels, history)

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Train one more epoch on these rows; new classes are added.

        Changes of learning rate, batch size or device by `set_params` take effect; optimiser, sampler, objective and
        layers are those of the first call.

        Args:
            X: [n, F], an array or a sparse matrix.
            y: [n], labels.
            classes: labels to add, even if they do not occur in y. Optional.
            sample_weight: [n], not negative. Rows of weight 0 are left out; without weights each row has weight 1.
        """
        options = Options.of(self.get_params(deep=False))
        first = not hasattr(self, "_learner")
        X, y, weight = self._examples(X, y, sample_weight, first=first)
        labels = Labels.of(y) if first else self._labels
        if classes is not None and len(classes):
            check_one_type(classes, "classes")
            named = column_or_1d(classes)
            labels = Labels.of(named) if first else labels.joined(named, "classes")
        labels = labels.joined(y, "y")
        rows, chosen = labels.rows_of(y, "y"), _present(len(y), weight)
        if first:
            random = check_random_state(self.random_state)
            learner = _new_learner(X, labels, rows, chosen, weight, options, random)
        else:
            learner, random = self._learner, self._random
            learner.to(options.place())
            learner.set_learning_rate(options.used_learning_rate)
            if len(labels) > len(self._labels):
                learner.grow(len(labels), options, _seed(random))
                # The head has the new rows from here on, even if the epoch fails.
                self._labels, self.classes_ = labels, labels.classes
            learner.count(rows[chosen], None if weight is None else weight[chosen])
        history = learner.train(
            Rows(X, rows),
            options=options,
            epochs=1,
            chosen=chosen,
            held_out=None,
            weight=weight,
            seeds=(_seed(random), _seed(random)),
        )
        if first:
            self._learner, self._random = learner, random
            self.history_, self._progress = [], Progress()
        return self._store(labels, history)

    def predict(self, X: Any) -> Array:
        """Return the most probable label [n] of each row."""
        return self.predict_top(X, 1)[0][:, 0]

    def predict_top(self, X: Any, k: int) -> tuple[Array, Array]:
        """Return the k most probable labels [n, k] of each row, best first, and their probabilities [n, k]."""
        X = self._rows(X)
        k = _check.integer("k", plain(k), 1, len(self._labels))
        ids, probabilities = np.empty((X.shape[0], k), dtype=np.int64), np.empty((X.shape[0], k))
        for rows, hidden in self._learner.hidden(X):
            best = self._learner.scores.topk(hidden, k)
            ids[rows], probabilities[rows] = best.ids.cpu().numpy(), best.log_prob.exp().cpu().numpy()
        return self._labels.of_rows(ids), probabilities

    def predict_proba(self, X: Any) -> Array:
        """Return the probability [n, C] of each class, in the order of `classes_`.

        Raises:
            ValueError: n·C is above 2³¹, or the result takes more than a quarter of the free memory.
        """
        log_p = self.predict_log_proba(X)
        return np.exp(log_p, out=log_p)

    def predict_log_proba(self, X: Any) -> Array:
        """Return the log-probability [n, C] of each class, in the order of `classes_`.

        Raises:
            ValueError: n·C is above 2³¹, or the result takes more than a quarter of the free memory.
        """
        X = self._rows(X)
        check_fits(X.shape[0], len(self._labels))
        places = self._labels.places()
        log_p = np.empty((X.shape[0], len(places)))
        for rows, hidden in self._learner.hidden(X):
            for start, part in self._learner.scores.log_probs(hidden):
                log_p[rows, places[start : start + part.shape[1]]] = part.cpu().numpy()
        return log_p

    def log_prob_of(self, X: Any, labels: Any) -> Array:
        """Return the exact log-probability [n] of one label per row.

        Raises:
            ValueError: a label was never seen, or the number of labels is not that of rows.
        """
        check_one_type(labels, "labels")
        X, labels = self._rows(X), column_or_1d(labels)
        if len(labels) != X.shape[0]:
            raise ValueError(f"`labels` must have length {X.shape[0]}, as `X` has rows, got {len(labels)}")
        ids = torch.from_numpy(self._labels.rows_of(labels, "labels")).to(self._learner.device)
        log_p = np.empty(X.shape[0])
        for rows, hidden in self._learner.hidden(X):
            log_p[rows] = self._learner.scores.log_prob(hidden, ids[rows]).cpu().numpy()
        return log_p

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _examples(self, X: Any, y: Any, sample_weight: Any, *, first: bool) -> tuple[Any, Array, Array | None]:
        """Check rows, labels and weights to train on."""
        check_sparse(X)
        check_one_label(y, "y")
        check_one_type(y, "y")
        X, y = validate_data(self, X, y, reset=first, accept_sparse="csr", dtype=[np.float64, np.float32])
        _check_range(X)
        # check_classification_targets is not used, because it takes many classes for a regression target.
        if (found := type_of_target(y, input_name="y")) not in ("binary", "multiclass"):
            raise ValueError(f"Unknown label type: `y` must hold classes, got {found} values")
        if sample_weight is None:
            return X, y, None
        weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        if not weight.max() > 0:
            raise ValueError(f"`sample_weight` must not all be 0, got {len(weight)} zeros")
        return X, y, weight

    def _rows(self, X: Any) -> Any:
        """Check rows to predict."""
        check_is_fitted(self)
        check_sparse(X)
        X = validate_data(self, X, reset=False, accept_sparse="csr", dtype=[np.float64, np.float32])
        _check_range(X)
        return X

    def _store(self, labels: Labels, history: History) -> Self:
        """Store the outcome of a training; records continue those of earlier calls."""
        self._labels, self.classes_ = labels, labels.classes
        before, now = self._progress, history.progress
        for record in history.records:
            self.history_.append(
                replace(
                    record,
                    step=before.step + record.step,
                    epoch=before.epoch + record.epoch,
                    examples=before.examples + record.examples,
                    seconds=before.seconds + record.seconds,
                )
            )
        self._progress = Progress(
            step=before.step + now.step,
            epoch=before.epoch + now.epoch,
            examples=before.examples + now.examples,
            seconds=before.seconds + now.seconds,
        )
        self.n_iter_ = self._progress.epoch
        self.loss_ = self.history_[-1].loss if self.history_ else float("nan")
        if history.stopped == "interrupted":
            raise KeyboardInterrupt
        return self


def _seed(random: np.random.RandomState) -> int:
    return int(random.randint(np.iinfo(np.int32).max))


def _present(num_rows: int, weight: Array | None) -> Array:
    """Return the rows of weight above 0, in ascending order."""
    return np.arange(num_rows) if weight is None else np.flatnonzero(weight > 0)


def _new_learner(
    X: Any,
    labels: Labels,
    rows: Array,
    chosen: Array,
    weight: Array | None,
    options: Options,
    random: np.random.RandomState,
) -> Learner:
    counts = ClassCounts.streaming(len(labels))
    add_counts(counts, rows[chosen], None if weight is None else weight[chosen])
    return Learner(X.shape[1], counts, sparse=not isinstance(X, np.ndarray), options=options, seed=_seed(random))


def _split(chosen: Array, fraction: float, random: np.random.RandomState) -> tuple[Array, Array]:
    """Return rows to train on and rows to hold out, both in ascending order."""
    number = max(1, round(fraction * len(chosen)))
    if number >= len(chosen):
        raise ValueError(f"`validation_fraction` must leave a row to train on, got {fraction} of {len(chosen)} rows")
    order = random.permutation(len(chosen))
    return np.sort(chosen[order[number:]]), np.sort(chosen[order[:number]])


def _check_range(X: Any) -> None:
    """Raise if a number is beyond the range of float32."""
    values = X if isinstance(X, np.ndarray) else X.data
    if values.dtype == np.float64 and values.size:
        least, most = values.min(), values.max()
        if max(-least, most) > _LARGEST_FLOAT32:
            worst = most if most > -least else least
            raise ValueError(f"`X` must lie within float32, at most {_LARGEST_FLOAT32:.3g} in size, got {worst:.3g}")
