# ruff: noqa: N806
import numpy as np
import pytest
import torch

from manyclass import samplers
from manyclass.estimator import ManyClassClassifier
from tests.estimator.problems import gaussian, words


def test_classes_may_appear_later_and_stay_sorted():
    X, y = gaussian(30, 900)
    names = np.array([f"{(17 * i) % 30:02}" for i in range(30)])[y]
    model = ManyClassClassifier(random_state=0)
    for last in (10, 11, 20, 30):
        model.partial_fit(X[y < last], names[y < last])
        assert model.classes_.tolist() == sorted(set(names[y < last]))
    for _ in range(30):
        model.partial_fit(X, names)
    assert model.score(X, names) > 0.9
    p = model.predict_proba(X)
    np.testing.assert_array_equal(model.classes_[p.argmax(1)], model.predict(X))
    own = p[np.arange(len(X)), np.searchsorted(model.classes_, names)]
    np.testing.assert_allclose(model.log_prob_of(X, names), np.log(own), rtol=1e-9)


def test_optimiser_state_of_old_classes_is_kept():
    X, y = gaussian(20, 600)
    model = ManyClassClassifier(random_state=0).fit(X[y < 10], y[y < 10])
    sums = model._learner.optimizer.state[model._learner.head.weight]["sum"].clone()
    before = model.predict_top(X[y < 10], 1)[0]
    model.partial_fit(X[y >= 10], y[y >= 10])
    after = model._learner.optimizer.state[model._learner.head.weight]["sum"]
    assert after.shape[0] == 20
    assert (after[:10] >= sums).all()
    assert np.mean(model.predict_top(X[y < 10], 1)[0] == before) > 0.9


@pytest.mark.parametrize("sampler", [None, "learned", "systematic", "clustered", "tailored", "importance", "bernoulli"])
def test_a_sampler_is_made_once_there_are_more_than_k_classes(sampler):
    X, y = gaussian(40, 800)
    model = ManyClassClassifier(sampler=sampler, k=15, random_state=0)
    # With 10 classes all are scored; with 30 some are drawn; then the sampler grows.
    for last in (10, 30, 40):
        model.partial_fit(X[y < last], y[y < last])
        assert isinstance(model._learner.head.sampler, samplers.Exhaustive) == (last == 10)
        assert model._learner.head.sampler.num_classes == model._learner.counts.num_classes == last
    for _ in range(20):
        model.partial_fit(X, y)
    assert model.score(X, y) > 0.8
    assert model._learner.counts.raw.sum() == sum(np.sum(y < last) for last in (10, 30, 40)) + 20 * 800


def test_a_custom_sampler_is_made_again():
    X, y = gaussian(40, 800)
    model = ManyClassClassifier(sampler=lambda counts, k: samplers.Systematic(counts.weights(0.5), k), k=15)
    model.partial_fit(X[y < 20], y[y < 20]).partial_fit(X, y)
    assert model._learner.head.sampler.num_classes == 40


def test_a_sampler_that_cannot_be_made_leaves_the_model_as_it_was():
    X, y = gaussian(40, 800)

    def make(counts, k):
        if counts.num_classes > 20:
            raise RuntimeError("no more")
        return samplers.Systematic(counts, k)

    model = ManyClassClassifier(sampler=make, k=15).partial_fit(X[y < 20], y[y < 20])
    before = model.predict_proba(X)
    with pytest.raises(RuntimeError, match="no more"):
        model.partial_fit(X, y)
    np.testing.assert_array_equal(model.predict_proba(X), before)
    assert len(model.classes_) == 20
    model.partial_fit(X[y < 20], y[y < 20])


def test_classes_may_be_named_before_they_occur():
    X, y = gaussian(4, 100)
    model = ManyClassClassifier(random_state=0).partial_fit(X[y < 2], y[y < 2], classes=[5, 0, 1, 3, 2])
    assert model.classes_.tolist() == [0, 1, 2, 3, 5]
    model.partial_fit(X, y, classes=[7])
    assert model.classes_.tolist() == [0, 1, 2, 3, 5, 7]
    assert model.predict_proba(X).shape == (100, 6)
    assert model.log_prob_of(X[:1], [7]) < model.log_prob_of(X[:1], [y[0]])


def test_one_class_is_enough_to_start_with():
    X, y = gaussian(3, 60)
    model = ManyClassClassifier(random_state=0).partial_fit(X[y == 1], y[y == 1])
    assert set(model.predict(X)) == {1}
    np.testing.assert_array_equal(model.predict_proba(X), 1)
    for _ in range(60):
        model.partial_fit(X, y)
    assert model.score(X, y) > 0.9


def test_steps_of_one_random_state_are_the_same():
    X, y = gaussian(30, 300)
    state = torch.get_rng_state()

    def run():
        model = ManyClassClassifier(k=10, random_state=3)
        for last in (12, 20, 30):
            model.partial_fit(X[y < last], y[y < last])
        return model.predict_proba(X)

    np.testing.assert_array_equal(run(), run())
    assert torch.equal(torch.get_rng_state(), state)


def test_dense_rows_may_follow_sparse_ones():
    X, y = words(10, 400, features=3000)
    model = ManyClassClassifier(random_state=0).partial_fit(X, y)
    for _ in range(10):
        model.partial_fit(X.toarray(), y).partial_fit(X, y)
    assert model.score(X, y) > 0.9
    other = ManyClassClassifier(random_state=0, rank=16).partial_fit(X.toarray(), y)
    for _ in range(20):
        other.partial_fit(X, y)
    assert other.score(X, y) > 0.9


def test_weights_count():
    X, y = gaussian(2, 100, noise=4.0)
    weight = np.where(y == 1, 9.0, 1.0)
    model = ManyClassClassifier(random_state=0)
    for _ in range(30):
        model.partial_fit(X, y, sample_weight=weight)
    assert model.predict_proba(X)[:, 1].mean() > 0.75


@pytest.mark.parametrize(
    ("labels", "others"),
    [
        (["a", "b"], [1, 2]),
        ([1, 2], ["a", "b"]),
        (np.array([1, 2], dtype=np.int64), np.array([1, 2], dtype=np.uint64)),
        (np.array(["a", "b"], dtype=object), [1, 2]),
    ],
)
def test_labels_of_two_kinds_are_refused_and_nothing_is_lost(labels, others):
    X = np.eye(2)
    model = ManyClassClassifier(random_state=0).partial_fit(X, labels)
    before = model.predict_proba(X)
    with pytest.raises(ValueError, match="`y` must hold labels of the same type as before"):
        model.partial_fit(X, others)
    with pytest.raises(ValueError, match="`classes` must hold labels of the same type as before"):
        model.partial_fit(X, labels, classes=others)
    np.testing.assert_array_equal(model.predict_proba(X), before)


@pytest.mark.parametrize(
    ("labels", "others"),
    [
        (["a", "b"], ["a", "much longer"]),
        (["a", "b"], np.array(["a", "much longer"], dtype=object)),
        ([1, 2], [1.0, 7.0]),
        ([True, False], [True, False]),
    ],
)
def test_labels_of_one_kind_are_joined(labels, others):
    X = np.eye(2)
    model = ManyClassClassifier(random_state=0).partial_fit(X, labels).partial_fit(X, others)
    assert model.classes_.tolist() == sorted({*labels, *others})
    assert set(model.predict(X)) <= set(model.classes_.tolist())


def test_rows_of_other_features_are_refused():
    X, y = gaussian(3, 60)
    model = ManyClassClassifier().partial_fit(X, y)
    with pytest.raises(ValueError, match="X has 15 features"):
        model.partial_fit(X[:, 1:], y)


def test_a_weight_is_worth_the_same_in_every_call():
    X = np.zeros((64, 2))
    chances = []
    for weight in (1.0, 9.0):
        model = ManyClassClassifier(optimizer="sgd", learning_rate=0.5, batch_size=64, random_state=0)
        for _ in range(60):
            model.partial_fit(X, np.zeros(64, int), classes=[0, 1], sample_weight=np.full(64, weight))
            model.partial_fit(X, np.ones(64, int))
        chances.append(model.predict_proba(X[:1])[0, 0])
    assert chances[0] < 0.6
    assert chances[1] > 0.75


def test_another_learning_rate_counts_from_the_next_call():
    X, y = gaussian(10, 300)
    model = ManyClassClassifier(random_state=0).partial_fit(X, y)
    before = model.predict_proba(X)
    assert np.allclose(model.set_params(learning_rate=1e-12).partial_fit(X, y).predict_proba(X), before, atol=1e-5)
    assert not np.allclose(model.set_params(learning_rate=0.1).partial_fit(X, y).predict_proba(X), before, atol=1e-2)


def test_large_integers_are_not_taken_for_floats():
    X, y = gaussian(10, 300)
    model = ManyClassClassifier(random_state=0, max_epochs=1).fit(X, y + 2**60)
    with pytest.raises(ValueError, match="`y` must hold labels of the same type as before, int64, got float64"):
        model.partial_fit(X, y.astype(float))
    with pytest.raises(ValueError, match="`labels` must hold labels of the same type as before"):
        model.log_prob_of(X, (y + 2**60).astype(float))
    small = ManyClassClassifier(random_state=0, max_epochs=1).fit(X, y)
    assert np.array_equal(small.log_prob_of(X, y.astype(float)), small.log_prob_of(X, y))
