# ruff: noqa: N806
import inspect
import os
import re
import signal

import numpy as np
import pytest
import torch
from scipy.sparse import coo_array, csc_array, csr_array
from sklearn.datasets import load_digits, load_iris
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler

from manyclass import objectives, samplers
from manyclass.estimator import ManyClassClassifier
from manyclass.registry import OBJECTIVES, SAMPLERS
from tests.estimator.problems import gaussian, words


def parameters(model):
    return [p.detach().clone() for module in (model._learner.encoder, model._learner.head) for p in module.parameters()]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(parameters(a), parameters(b), strict=True))


def test_digits_are_classified_as_by_logistic_regression():
    X, y = load_digits(return_X_y=True)
    train_X, test_X, train_y, test_y = train_test_split(X, y, random_state=0)
    scaler = StandardScaler().fit(train_X)
    train_X, test_X = scaler.transform(train_X), scaler.transform(test_X)
    ours = ManyClassClassifier(random_state=0).fit(train_X, train_y)
    theirs = LogisticRegression(max_iter=300).fit(train_X, train_y)
    assert ours.score(test_X, test_y) > theirs.score(test_X, test_y) - 0.015
    likelihood = -ours.log_prob_of(test_X, test_y).mean()
    assert likelihood < log_loss(test_y, theirs.predict_proba(test_X)) + 0.06


def test_a_tenth_of_500_classes_a_step_does_nearly_what_all_of_them_do():
    X, y = gaussian(500, 6000)
    train_X, test_X, train_y, test_y = X[:4500], X[4500:], y[:4500], y[4500:]
    theirs = LogisticRegression(max_iter=60).fit(train_X, train_y)
    for options in ({"sampler": "exact"}, {"k": 50}):
        ours = ManyClassClassifier(**options, random_state=0).fit(train_X, train_y)
        assert ours.score(test_X, test_y) > theirs.score(test_X, test_y) - 0.02
        assert (
            -ours.log_prob_of(test_X, test_y).mean()
            < log_loss(test_y, theirs.predict_proba(test_X), labels=theirs.classes_) + 0.08
        )


def test_a_network_learns_what_no_linear_model_can():
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, (600, 2))
    y = np.where(X[:, 0] * X[:, 1] > 0, "same", "other")
    assert ManyClassClassifier(random_state=0).fit(X, y).score(X, y) < 0.7
    assert ManyClassClassifier(hidden_layers=(32,), random_state=0, optimizer="adam").fit(X, y).score(X, y) > 0.95


@pytest.mark.parametrize("sampler", [*SAMPLERS, "exhaustive", None])
def test_every_sampler_has_a_name_and_learns(sampler):
    X, y = gaussian(60, 900)
    model = ManyClassClassifier(sampler=sampler, k=20, max_epochs=10, random_state=0).fit(X, y)
    assert model.score(X, y) > 0.8


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_objective_has_a_name_and_learns(objective):
    X, y = gaussian(40, 900)
    model = ManyClassClassifier(objective=objective, k=20, max_epochs=10, random_state=0).fit(X, y)
    assert model.score(X, y) > 0.6


def test_the_names_of_objectives_are_those_of_their_classes():
    forms = {"LogSumExp", "PairSum", "Objective"}
    classes = {name for name, value in vars(objectives).items() if inspect.isclass(value)} - forms
    assert set(OBJECTIVES) == {re.sub(r"(?<!^)([A-Z])", r"_\1", name).lower() for name in classes}


@pytest.mark.parametrize("optimizer", ["adagrad", "adam", "sgd"])
def test_every_optimiser_learns(optimizer):
    X, y = gaussian(60, 900)
    assert ManyClassClassifier(optimizer=optimizer, k=20, random_state=0).fit(X, y).score(X, y) > 0.8


def test_all_classes_are_scored_if_there_are_at_most_k():
    X, y = gaussian(30, 200)
    for options in ({}, {"k": 30}, {"k": 30, "sampler": "importance"}, {"k": "auto", "sampler": "clustered"}):
        model = ManyClassClassifier(**options, max_epochs=1).fit(X, y)
        assert isinstance(model._learner.head.sampler, samplers.Exhaustive)
    drawn = ManyClassClassifier(k=29, max_epochs=1).fit(X, y)._learner.head.sampler
    assert isinstance(drawn, samplers.Learned)
    assert drawn.k == 29


def test_k_may_follow_the_error():
    X, y = gaussian(1200, 1300)
    for options, kind in (
        ({}, samplers.Automatic),
        ({"k": "auto"}, samplers.Automatic),
        ({"k": "auto", "sampler": "learned"}, samplers.Budget),
    ):
        model = ManyClassClassifier(**options, max_epochs=1).fit(X, y)
        assert type(model._learner.head.sampler) is kind


def test_custom_samplers_and_objectives_are_used_and_not_changed():
    X, y = gaussian(30, 200)
    objective = objectives.NoiseContrastive(learn=True)
    model = ManyClassClassifier(
        sampler=lambda counts, k: samplers.Importance(counts, k, power=0.5), objective=objective, k=9, max_epochs=2
    ).fit(X, y)
    assert isinstance(model._learner.head.sampler, samplers.Importance)
    assert model._learner.head.sampler.k == 9
    assert model.objective is objective
    assert objective.log_z.item() == 0
    assert model._learner.head.objective.log_z.item() != 0


def test_the_same_random_state_gives_the_same_model_and_leaves_torch_alone():
    X, y = gaussian(60, 500)
    options = {"k": 20, "max_epochs": 3, "hidden_layers": (8,), "early_stopping": True}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = ManyClassClassifier(**options, random_state=1).fit(X, y)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(3)
    assert same(first, ManyClassClassifier(**options, random_state=1).fit(X, y))
    assert not same(first, ManyClassClassifier(**options, random_state=2).fit(X, y))
    again = ManyClassClassifier(**options, random_state=np.random.RandomState(1))
    assert same(first, again.fit(X, y))
    # A RandomState advances, as in other scikit-learn estimators.
    assert not same(first, again.fit(X, y))


def test_sparse_and_dense_rows_give_the_same_model():
    X, y = words(20, 400, features=50)
    dense = ManyClassClassifier(random_state=0, max_epochs=5).fit(X.toarray(), y)
    for matrix in (X, coo_array(X), csr_array(X.astype(np.float32))):
        sparse = ManyClassClassifier(random_state=0, max_epochs=5).fit(matrix, y)
        np.testing.assert_allclose(sparse.predict_proba(X), dense.predict_proba(X.toarray()), atol=1e-5)
        np.testing.assert_allclose(sparse.predict_proba(X.toarray()), sparse.predict_proba(X), atol=1e-5)


def test_early_stopping_keeps_the_model_of_the_best_held_out_likelihood():
    X, y = gaussian(20, 200, noise=1.5)
    options = {"early_stopping": True, "validation_fraction": 0.25, "learning_rate": 0.3, "random_state": 0}
    model = ManyClassClassifier(**options, max_epochs=200, n_iter_no_change=3).fit(X, y)
    held_out = [record.held_out_loss for record in model.history_ if record.held_out_loss is not None]
    best = int(np.argmin(held_out))
    assert model.n_iter_ == len(held_out) == best + 1 + 3 < 200
    # Training for the epochs of the best model, without restoring, gives the same model.
    stopped_there = ManyClassClassifier(**options, max_epochs=best + 1, n_iter_no_change=300).fit(X, y)
    assert same(model, stopped_there)


def test_rows_of_weight_zero_are_as_good_as_absent():
    X, y = gaussian(5, 100)
    weight = np.arange(100) % 3 > 0
    present = ManyClassClassifier(random_state=0, max_epochs=5).fit(X[weight], y[weight])
    weighted = ManyClassClassifier(random_state=0, max_epochs=5).fit(X, y, sample_weight=weight)
    np.testing.assert_allclose(weighted.predict_proba(X), present.predict_proba(X), atol=1e-5)


def test_the_scale_of_weights_does_not_matter_and_their_ratio_does():
    X, y = gaussian(3, 60, noise=3.0)
    weight = np.where(y == 1, 20.0, 1.0)
    model = ManyClassClassifier(random_state=0).fit(X, y, sample_weight=weight)
    scaled = ManyClassClassifier(random_state=0).fit(X, y, sample_weight=1e-30 * weight)
    np.testing.assert_allclose(model.predict_proba(X), scaled.predict_proba(X), atol=1e-4)
    plain = ManyClassClassifier(random_state=0).fit(X, y)
    assert model.predict_proba(X)[:, 1].mean() > plain.predict_proba(X)[:, 1].mean() + 0.1


def test_history_holds_the_records():
    X, y = gaussian(20, 600)
    model = ManyClassClassifier(batch_size=100, max_epochs=4).fit(X, y)
    assert model.n_iter_ == 4
    assert [record.step for record in model.history_ if record.rmse_log_z is None] == [6, 12, 18, 24]
    # All classes are scored.
    assert [record.step for record in model.history_ if record.rmse_log_z == 0] == [4, 8, 16]
    assert model.loss_ == model.history_[-1].loss < model.history_[0].loss
    model.partial_fit(X, y)
    assert model.n_iter_ == 5
    assert [record.step for record in model.history_][-2:] == [24, 30]


def test_few_rows_get_more_epochs():
    X, y = load_iris(return_X_y=True)
    assert ManyClassClassifier().fit(X, y).n_iter_ == 300
    assert ManyClassClassifier(batch_size=20).fit(X, y).n_iter_ == 50


def test_verbose_shows_progress(capsys):
    X, y = gaussian(3, 30)
    ManyClassClassifier(max_epochs=2, verbose=1).fit(X, y)
    assert "stopped (epochs) after 2 steps" in capsys.readouterr().err
    ManyClassClassifier(max_epochs=2).fit(X, y)
    assert capsys.readouterr().err == ""


class Interrupting:
    """The likelihood, with Ctrl-C in one of the steps."""

    form, keeps_hits, normalised = None, False, False

    def __init__(self, steps):
        self.left = steps

    def __call__(self, target_score, scores, candidates):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGINT)
        return objectives.Likelihood()(target_score, scores, candidates)


def test_an_interrupted_fit_leaves_the_estimator_unfitted():
    X, y = gaussian(5, 100)
    new = ManyClassClassifier(objective=Interrupting(9), max_epochs=1000, random_state=0)
    fitted = ManyClassClassifier(max_epochs=2, random_state=0).fit(X[:, :2], y)
    fitted.set_params(objective=Interrupting(9), max_epochs=1000)
    for model in (new, fitted):
        with pytest.raises(KeyboardInterrupt):
            model.fit(X, y)
        with pytest.raises(NotFittedError):
            model.predict(X)
        assert not any(name.endswith("_") for name in vars(model))
        model.set_params(objective=None).partial_fit(X, y)
        assert model.history_[-1].step == 1


@pytest.mark.parametrize(
    "y",
    [[1, "a"] * 3, np.array([1, "a"] * 3, dtype=object), np.array(["a", None] * 3, dtype=object), ["a", 2.5] * 3],
)
def test_labels_of_mixed_types_are_refused(y):
    X = np.ones((6, 2))
    message = "`y` must hold labels of one type, all strings or all numbers, got .* at position 0 and .* at position 1"
    with pytest.raises(TypeError, match=message):
        ManyClassClassifier().fit(X, y)
    model = ManyClassClassifier(max_epochs=1)
    with pytest.raises(TypeError, match="`classes` must hold labels of one type"):
        model.partial_fit(X, ["a", "b"] * 3, classes=y)
    model.fit(X, ["a", "b"] * 3)
    with pytest.raises(TypeError, match="`labels` must hold labels of one type"):
        model.log_prob_of(X, y)
    with pytest.raises(TypeError, match="`y` must hold labels of one type"):
        model.partial_fit(X, y)


@pytest.mark.parametrize(
    "y", [csr_array(np.eye(3)), np.eye(3), [[0, 1], [2], [1]]], ids=["sparse matrix", "matrix", "lists"]
)
def test_several_labels_of_a_row_are_refused_with_the_way_to_give_them(y):
    with pytest.raises(
        ValueError, match=r"`y` must be a 1d array with one label for each row, got shape .3, .*nonzero"
    ):
        ManyClassClassifier().fit(np.ones((3, 2)), y)


def test_the_way_to_give_several_labels_works():
    X, Y = csr_array(np.eye(4)), csr_array(np.array([[1, 1, 0], [0, 0, 1], [1, 0, 0], [0, 1, 1]]))
    rows, labels = Y.nonzero()
    model = ManyClassClassifier(max_epochs=50).fit(X[rows], labels, sample_weight=1 / np.bincount(rows)[rows])
    probability = model.predict_proba(X)
    assert (np.argsort(-probability, axis=1)[0, :2].tolist()) in ([0, 1], [1, 0])
    assert probability.argmax(1)[1:3].tolist() == [2, 0]


@pytest.mark.parametrize("layout", [csr_array, csc_array])
@pytest.mark.parametrize(
    ("data", "indices", "indptr", "message"),
    [
        ([1, 2], [0, 7], [0, 1, 2, 2, 2], "`X` must have sparse indices in \\[0, 4\\), got 7 at position 1"),
        ([1, 2], [0, -1], [0, 1, 2, 2, 2], "`X` must have sparse indices in \\[0, 4\\), got -1 at position 1"),
        (
            [1, 2],
            [0, 1],
            [0, 2, 1, 2, 2],
            "`X` must have an indptr that does not fall, got 1 after 2 at (row|column) 1",
        ),
        ([1, 2], [0, 1], [0, 1, 2], "`X` must have an indptr of length 5, got shape \\[3\\]"),
        ([1], [0, 1], [0, 1, 2, 2, 2], "`X` must have as many indices as values, 1, got shape \\[2\\]"),
        ([1, 2], [0, 1], [0, 1, 2, 2, 9], "`X` must have an indptr from 0 to at most 2, got 0 to 9"),
        ([1, 2], [0, 1], [1, 1, 2, 2, 2], "`X` must have an indptr from 0 to at most 2, got 1 to 2"),
    ],
)
def test_a_corrupt_sparse_matrix_is_refused(layout, data, indices, indptr, message):
    X = layout((4, 4), dtype=np.float64)
    X.data, X.indices, X.indptr = np.array(data, dtype=float), np.array(indices), np.array(indptr)
    y = ["a", "b", "a", "b"]
    with pytest.raises(ValueError, match=message):
        ManyClassClassifier().fit(X, y)
    model = ManyClassClassifier(max_epochs=1).fit(csr_array(np.eye(4)), y)
    for use in (model.predict, model.predict_proba, lambda rows: model.partial_fit(rows, y)):
        with pytest.raises(ValueError, match=message):
            use(X)


def test_a_fit_that_fails_keeps_the_model_there_was():
    X, y = gaussian(5, 100)
    model = ManyClassClassifier(max_epochs=20).fit(X, y)
    before = model.predict_proba(X)
    with pytest.raises(ValueError, match="at least 2 classes, got 1 class"):
        model.fit(X, np.zeros(100))
    with pytest.raises(ValueError, match="The loss"):
        model.set_params(learning_rate=1e38, optimizer="sgd").fit(X, y)
    np.testing.assert_array_equal(model.predict_proba(X), before)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"hidden_layers": 8}, TypeError, "`hidden_layers` must be a sequence of ints, got 8"),
        ({"hidden_layers": (8, 0)}, ValueError, "`hidden_layers` must be at least 1, got 0"),
        ({"rank": 0}, ValueError, "`rank` must be at least 1, got 0"),
        ({"sampler": "lerned"}, ValueError, "`sampler` must be one of 'learned', .* got 'lerned'"),
        (
            {"sampler": lambda counts, k: samplers.Exhaustive(7)},
            ValueError,
            "`sampler` must give a sampler of 3 classes",
        ),
        ({"objective": "likelyhood"}, ValueError, "`objective` must be one of 'likelihood', .* got 'likelyhood'"),
        (
            {"objective": objectives.Likelihood},
            TypeError,
            "`objective` must be a name, an objective or None, got <class",
        ),
        ({"objective": 3}, TypeError, "`objective` must be a name, an objective or None, got 3"),
        ({"k": 0}, ValueError, "`k` must be at least 1, got 0"),
        ({"k": 2.5}, TypeError, r"`k` must be an int, got 2\.5"),
        ({"k": "many"}, ValueError, "`k` must be one of 'auto', got 'many'"),
        ({"optimizer": "lbfgs"}, ValueError, "`optimizer` must be one of 'adagrad', 'adam', 'sgd', got 'lbfgs'"),
        ({"learning_rate": 0}, ValueError, "`learning_rate` must be finite and above 0, got 0"),
        ({"learning_rate": "fast"}, TypeError, "`learning_rate` must be a number, got 'fast'"),
        ({"batch_size": 0}, ValueError, "`batch_size` must be at least 1, got 0"),
        ({"max_epochs": -1}, ValueError, "`max_epochs` must be at least 1, got -1"),
        ({"early_stopping": "yes"}, TypeError, "`early_stopping` must be True or False, got 'yes'"),
        ({"validation_fraction": 1.0}, ValueError, r"`validation_fraction` must lie in \[0, 1\), got 1\.0"),
        ({"validation_fraction": 0}, ValueError, "`validation_fraction` must be above 0, got 0"),
        ({"early_stopping": True, "validation_fraction": 0.99}, ValueError, "`validation_fraction` must leave a row"),
        ({"n_iter_no_change": 0}, ValueError, "`n_iter_no_change` must be at least 1, got 0"),
        ({"device": "abacus"}, ValueError, "`device` must be one that torch finds here, got 'abacus'"),
        ({"verbose": "yes"}, TypeError, "`verbose` must be an int, got 'yes'"),
    ],
)
def test_a_bad_parameter_is_named(options, error, message):
    X, y = gaussian(3, 12)
    model = ManyClassClassifier(**options)
    with pytest.raises(error, match=message):
        model.fit(X, y)
    assert not hasattr(model, "classes_")


def test_a_sampler_whose_number_of_classes_is_fixed_does_not_follow_the_error():
    X, y = gaussian(1100, 1200)
    with pytest.raises(ValueError, match="`k` must be a number or None for Clustered"):
        ManyClassClassifier(sampler="clustered", k="auto").fit(X, y)


def test_numbers_may_be_those_of_numpy():
    X, y = gaussian(30, 100)
    model = ManyClassClassifier(
        k=np.int64(10), hidden_layers=np.array([8]), learning_rate=np.float32(0.1), max_epochs=np.int32(1)
    )
    assert model.fit(X, y)._learner.encoder.dim == 8


def test_values_beyond_float32_are_refused():
    X, y = gaussian(3, 12)
    X[4, 2] = -1e40
    with pytest.raises(ValueError, match=r"`X` must lie within float32, at most 3\.4e\+38 in size, got -1e\+40"):
        ManyClassClassifier().fit(X, y)
    with pytest.raises(ValueError, match="`X` must lie within float32"):
        ManyClassClassifier().fit(csr_array(X), y)


def test_weights_must_not_be_negative_nor_all_zero():
    X, y = gaussian(3, 12)
    with pytest.raises(ValueError, match="Negative values in data passed to `sample_weight`"):
        ManyClassClassifier().fit(X, y, sample_weight=-np.ones(12))
    with pytest.raises(ValueError, match="zero"):
        ManyClassClassifier().fit(X, y, sample_weight=np.zeros(12))
    with pytest.raises(ValueError, match="at least 2 classes of weight above 0, got 1 class"):
        ManyClassClassifier().fit(X, y, sample_weight=y == 1)
