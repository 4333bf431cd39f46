"""A classifier over many classes to scikit-learn's conventions, of which one is that rows are called X."""
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
from manyclass.estimator._labels import Array, Labels
from manyclass.estimator._learner import Learner, add_counts
from manyclass.estimator._memory import check_fits
from manyclass.estimator._options import MakeSampler, Options, plain
from manyclass.objectives import Objective
from manyclass.training import History, Progress, Record

_LARGEST = float(np.finfo(np.float32).max)


class ManyClassClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """p(c | x) ∝ exp(w_c · h(x) + b_c) over any number of classes, by maximum likelihood; a step scores some of them.

    h(x) is the row itself, a linear projection of it or a network. `X` is dense or sparse (CSR; never made dense as a
    whole), labels are numbers or strings. Training is in float32, by minibatches; predictions are exact, over all
    classes. The same `random_state` gives the same model, bit for bit on the CPU.

    Args:
        hidden_layers: the widths of a network, each layer followed by a ReLU.
        rank: project rows to so many dimensions, linearly, first. None: only where rows are sparse, of more than 2,048
            features and without `hidden_layers`, to 256.
        sampler: which classes a step scores. None: "learned"; "systematic", "clustered", "importance", "bernoulli";
            "exhaustive" or "exact": all; or a function of `ClassCounts` and k to a sampler. All classes are scored
            where there are no more than `k`.
        objective: what is maximised, by its name in `manyclass.objectives` ("negative_sampling", …) or as an object.
            None: the likelihood. Under objectives of discrimination or ranking, probabilities are not calibrated.
        k: classes that a step draws; None: 1024; "auto": as many as keep the error of log Z̃ at 0.1.
        optimizer: "adagrad", "adam" or "sgd", on the rows that a step touched.
        learning_rate: None: by the optimiser, for columns of about unit variance or rows of about unit length.
        batch_size: examples of a step.
        max_epochs: passes over the data. None: 50, or as many as make 300 steps.
        early_stopping: whether to hold a part of the data out, stop when its exact likelihood has not risen for
            `n_iter_no_change` epochs, and keep the best model.
        validation_fraction: what part of the rows that is.
        n_iter_no_change: epochs.
        random_state: a seed, a RandomState or None.
        device: where to train and to predict. None or "auto": on a GPU where there is one.
        verbose: above 0: a line of progress on the standard error.

    Attributes:
        classes_: [C], ascending.
        n_features_in_, feature_names_in_: as everywhere in scikit-learn.
        n_iter_: epochs.
        history_: a list of `manyclass.training.Record`.
        loss_: of training, smoothed, at the end.

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
        """Train anew.

        Ctrl-C ends it after the step under way: the model is as far as it came, and KeyboardInterrupt is raised.

        Args:
            X: [n, F], an array or a sparse matrix.
            y: [n], labels.
            sample_weight: [n], not negative. Rows of weight 0 are left out; only ratios matter.
        """
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
        return self._take(labels, history)

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """One more epoch, over these rows. Classes that have not been seen are added.

        A learning rate, batch size or device that `set_params` has changed counts from now on; optimiser, sampler,
        objective and layers are those of the first call.

        Args:
            X: [n, F], an array or a sparse matrix.
            y: [n], labels.
            classes: labels that are to be known from now on, whether they occur or not. May be left out.
            sample_weight: [n], not negative. Rows of weight 0 are left out; 1 is that of a row in a call without
                weights.
        """
        options = Options.of(self.get_params(deep=False))
        first = not hasattr(self, "_learner")
        X, y, weight = self._examples(X, y, sample_weight, first=first)
        labels = Labels.of(y) if first else self._labels
        if classes is not None and len(classes):
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
                # What the model has is known from here on, whatever becomes of the epoch.
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
        return self._take(labels, history)

    def predict(self, X: Any) -> Array:
        """[n]: the most probable label of each row."""
        return self.predict_top(X, 1)[0][:, 0]

    def predict_top(self, X: Any, k: int) -> tuple[Array, Array]:
        """The k most probable labels [n, k] of each row, best first, and their probabilities [n, k]."""
        X = self._rows(X)
        k = _check.whole("k", plain(k), 1, len(self._labels))
        ids, probabilities = np.empty((X.shape[0], k), dtype=np.int64), np.empty((X.shape[0], k))
        for rows, hidden in self._learner.hidden(X):
            best = self._learner.scores.topk(hidden, k)
            ids[rows], probabilities[rows] = best.ids.cpu().numpy(), best.log_prob.exp().cpu().numpy()
        return self._labels.of_rows(ids), probabilities

    def predict_proba(self, X: Any) -> Array:
        """[n, C]: the probability of each class, in the order of `classes_`.

        Raises:
            ValueError: they would take more than 2³¹ numbers or a quarter of the memory that is free.
        """
        log_p = self.predict_log_proba(X)
        return np.exp(log_p, out=log_p)

    def predict_log_proba(self, X: Any) -> Array:
        """[n, C]: the log-probability of each class, in the order of `classes_`.

        Raises:
            ValueError: they would take more than 2³¹ numbers or a quarter of the memory that is free.
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
        """[n]: the exact log-probability of one label for each row.

        Raises:
            ValueError: a label that was never seen, or not as many labels as rows.
        """
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
        """All that is trained on, checked."""
        X, y = validate_data(self, X, y, reset=first, accept_sparse="csr", dtype=[np.float64, np.float32])
        _check_range(X)
        # Not check_classification_targets: it takes many classes for a sign of numbers to regress on.
        if (kind := type_of_target(y, input_name="y")) not in ("binary", "multiclass"):
            raise ValueError(f"Unknown label type: `y` must hold classes, got {kind} values")
        if sample_weight is None:
            return X, y, None
        weight = _check_sample_weight(sample_weight, X, dtype=np.float64, ensure_non_negative=True)
        if not weight.max() > 0:
            raise ValueError(f"`sample_weight` must not all be 0, got {len(weight)} zeros")
        return X, y, weight

    def _rows(self, X: Any) -> Any:
        """Rows to predict, checked."""
        check_is_fitted(self)
        X = validate_data(self, X, reset=False, accept_sparse="csr", dtype=[np.float64, np.float32])
        _check_range(X)
        return X

    def _take(self, labels: Labels, history: History) -> Self:
        """Be fitted, as far as it came; records go on where those of earlier calls ended."""
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
    """The rows of weight above 0, in ascending order."""
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
    """Rows to train on and rows to hold out, both in ascending order."""
    number = max(1, round(fraction * len(chosen)))
    if number >= len(chosen):
        raise ValueError(f"`validation_fraction` must leave a row to train on, got {fraction} of {len(chosen)} rows")
    order = random.permutation(len(chosen))
    return np.sort(chosen[order[number:]]), np.sort(chosen[order[:number]])


def _check_range(X: Any) -> None:
    """Raise where a number is beyond float32."""
    values = X if isinstance(X, np.ndarray) else X.data
    if values.dtype == np.float64 and values.size:
        least, most = values.min(), values.max()
        if max(-least, most) > _LARGEST:
            worst = most if most > -least else least
            raise ValueError(f"`X` must lie within float32, at most {_LARGEST:.3g} in size, got {worst:.3g}")
