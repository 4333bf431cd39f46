# ruff: noqa: N806
import copy
import os
import pickle
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import numpy as np
import pytest
from scipy.sparse import csr_array
from sklearn.base import clone
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from manyclass.estimator import ManyClassClassifier, _learner, _memory
from tests.estimator.problems import gaussian, words

NAMES = np.array(["pear", "fig", "apple", "quince", "plum"])


@pytest.fixture(scope="module")
def fruit():
    X, y = gaussian(5, 300)
    return ManyClassClassifier(random_state=0).fit(X, NAMES[y]), X, NAMES[y]


def test_probabilities_are_those_of_the_linear_model(fruit):
    model, X, _ = fruit
    head = model._learner.head
    scores = X.astype(np.float32).astype(float) @ head.weight.detach().double().numpy().T
    u = np.exp(scores + head.bias.detach().double().numpy())
    np.testing.assert_allclose(model.predict_proba(X), u / u.sum(1, keepdims=True), rtol=1e-12)
    np.testing.assert_allclose(model.predict_log_proba(X), np.log(model.predict_proba(X)), atol=1e-12)


def test_all_that_is_predicted_agrees(fruit):
    model, X, y = fruit
    p = model.predict_proba(X)
    labels, top = model.predict_top(X, 3)
    order = np.argsort(-p, axis=1)[:, :3]
    np.testing.assert_array_equal(labels, model.classes_[order])
    np.testing.assert_allclose(top, np.take_along_axis(p, order, 1), rtol=1e-12)
    np.testing.assert_array_equal(model.predict(X), labels[:, 0])
    own = p[np.arange(len(y)), np.searchsorted(model.classes_, y)]
    np.testing.assert_allclose(model.log_prob_of(X, y), np.log(own), rtol=1e-9)
    assert model.score(X, y) == np.mean(labels[:, 0] == y)
    assert model.classes_.tolist() == sorted(NAMES)


def test_predictions_do_not_depend_on_the_block_size(fruit, monkeypatch):
    model, X, y = fruit
    whole = model.predict_proba(X), model.predict_top(X, 2)[1], model.log_prob_of(X, y)
    monkeypatch.setattr(_learner, "BATCH_ROWS", 7)
    parts = model.predict_proba(X), model.predict_top(X, 2)[1], model.log_prob_of(X, y)
    for part, all_at_once in zip(parts, whole, strict=True):
        np.testing.assert_allclose(part, all_at_once, rtol=1e-9)


def test_read_only_rows_are_taken_without_a_word(fruit):
    model, X, _ = fruit
    X = X.astype(np.float32)
    X.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model.predict(X)


def test_probabilities_of_all_classes_are_refused_where_they_would_not_fit(fruit, monkeypatch):
    model, X, y = fruit
    monkeypatch.setattr(_memory, "MOST_NUMBERS", 1000)
    message = (
        r"`X` must have at most 200 rows to return each of 5 classes, got 300: "
        r"300 × 5 numbers take 0\.0 GiB\. "
        r"Use predict_top\(X, k\) or log_prob_of\(X, labels\), or at most 200 rows at a time"
    )
    for refused in (model.predict_proba, model.predict_log_proba):
        with pytest.raises(ValueError, match=message):
            refused(X)
    assert model.predict_proba(X[:200]).shape == (200, 5)
    assert model.predict_top(X, 1)[0].shape == (300, 1)
    assert model.log_prob_of(X, y).shape == (300,)


def test_what_fits_depends_on_the_memory_that_is_free(monkeypatch):
    monkeypatch.setattr(_memory, "available", lambda: 8 * 4 * 1000)
    _memory.check_fits(10, 100)
    with pytest.raises(ValueError, match=r"at most 10 rows .* got 11"):
        _memory.check_fits(11, 100)
    with pytest.raises(ValueError, match=r"at most 0 rows .* got 1: 1 × 20,000,000 numbers take 0\.1 GiB"):
        _memory.check_fits(1, 20_000_000)
    monkeypatch.setattr(_memory, "available", lambda: None)
    _memory.check_fits(1 << 11, 1 << 20)
    with pytest.raises(ValueError, match="at most 2,048 rows"):
        _memory.check_fits((1 << 11) + 1, 1 << 20)


def test_free_memory_is_known_here():
    assert _memory.available() > 1 << 20


def test_a_label_that_was_never_seen_is_named(fruit):
    model, X, _ = fruit
    with pytest.raises(ValueError, match=r"`labels` must hold classes .* got 'kiwi' at position 1"):
        model.log_prob_of(X[:3], ["fig", "kiwi", "date"])
    with pytest.raises(ValueError, match="`labels` must hold labels of the same type as before"):
        model.log_prob_of(X[:3], [1, 2, 3])
    with pytest.raises(ValueError, match="`labels` must have length 3, as `X` has rows, got 2"):
        model.log_prob_of(X[:3], ["fig", "fig"])


def test_the_number_of_best_labels_is_checked(fruit):
    model, X, _ = fruit
    with pytest.raises(ValueError, match=r"`k` must be in \[1, 5\], got 6"):
        model.predict_top(X, 6)
    assert model.predict_top(X, np.int64(2))[0].shape == (300, 2)


def test_rows_that_do_not_fit_are_refused(fruit):
    model, X, _ = fruit
    for predict in (model.predict, model.predict_proba, lambda rows: model.predict_top(rows, 1)):
        with pytest.raises(ValueError, match="X has 15 features, but ManyClassClassifier is expecting 16"):
            predict(X[:, 1:])
        with pytest.raises(ValueError, match="NaN"):
            predict(np.full((1, 16), np.nan))
        with pytest.raises(ValueError, match="within float32"):
            predict(np.full((1, 16), 1e39))
    with pytest.raises(NotFittedError):
        ManyClassClassifier().log_prob_of(X, ["fig"])


@pytest.mark.parametrize("how", ["pickle", "deepcopy"])
@pytest.mark.parametrize("options", [{}, {"k": 30, "hidden_layers": (8,)}, {"k": 30, "sampler": "clustered"}])
def test_a_copy_predicts_and_goes_on_as_the_model_does(how, options):
    X, y = words(120, 2000, features=3000)
    # These are enough steps for a background rebuild of the sampler.
    model = ManyClassClassifier(**options, rank=8, batch_size=32, max_epochs=4, random_state=0).fit(X, y)
    twin = pickle.loads(pickle.dumps(model)) if how == "pickle" else copy.deepcopy(model)
    np.testing.assert_array_equal(twin.predict_proba(X[:50]), model.predict_proba(X[:50]))
    model.partial_fit(X, y)
    twin.partial_fit(X, y)
    np.testing.assert_array_equal(twin.predict_proba(X[:50]), model.predict_proba(X[:50]))


def test_another_process_reads_a_pickle(fruit, tmp_path):
    model, X, _ = fruit
    file = tmp_path / "model.pickle"
    file.write_bytes(pickle.dumps((model, X)))
    script = f"import pickle; model, X = pickle.load(open({str(file)!r}, 'rb')); print(*model.predict(X))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, env={**os.environ}
    )
    assert done.stdout.split() == model.predict(X).tolist()


def test_clones_are_unfitted_and_alike(fruit):
    model, X, y = fruit
    fresh = clone(model)
    assert not hasattr(fresh, "classes_")
    np.testing.assert_array_equal(fresh.fit(X, y).predict_proba(X), model.predict_proba(X))


@pytest.mark.parametrize("n_jobs", [1, 2])
def test_pipelines_and_searches_take_it(n_jobs):
    X, y = gaussian(6, 240)
    pipeline = make_pipeline(StandardScaler(), ManyClassClassifier(random_state=0, max_epochs=20))
    grid = {"manyclassclassifier__learning_rate": [1e-6, 0.3], "manyclassclassifier__k": [3, None]}
    search = GridSearchCV(pipeline, grid, cv=2, n_jobs=n_jobs, error_score="raise").fit(X, NAMES[y % 5])
    assert search.best_params_["manyclassclassifier__learning_rate"] == 0.3
    assert search.best_estimator_.predict_proba(X).shape == (240, 5)


def test_fits_on_threads_do_not_interfere():
    X, y = gaussian(40, 400)
    models = [ManyClassClassifier(k=10, max_epochs=5, random_state=i) for i in range(4)]
    threads = [threading.Thread(target=model.fit, args=(X, y)) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for model in models:
        np.testing.assert_array_equal(clone(model).fit(X, y).predict_proba(X), model.predict_proba(X))


@pytest.mark.machine
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not show the memory of a process")
def test_a_sparse_matrix_is_never_made_dense():
    """A new process measures the peak memory of this fit; the dense matrix would take 4 GB."""
    script = """
from pathlib import Path
from manyclass.estimator import ManyClassClassifier
from tests.estimator.problems import words

def held(name):
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)]
    return int(line.split()[1]) * 1024

# Memory for imports and compilation does not count.
X, y = words(50, 500, features=5000)
ManyClassClassifier(k=20, max_epochs=1, rank=4).fit(X, y).predict(X)
X, y = words(2000, 10_000, features=100_000)
before = held("VmRSS")
model = ManyClassClassifier(k=100, max_epochs=1, rank=16, random_state=0).fit(X, y)
model.predict_top(X, 2)
model.log_prob_of(X, y)
print(held("VmHWM") - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    # Parameters and optimiser state take 13 MB, and twice that while they are built.
    assert 13e6 < int(done.stdout) < 200e6


def test_sparse_rows_of_any_format_are_predicted(fruit):
    model, X, _ = fruit
    for kind in ("csr", "csc", "coo", "lil"):
        np.testing.assert_allclose(model.predict_proba(csr_array(X).asformat(kind)), model.predict_proba(X), rtol=1e-12)


def test_no_probability_is_above_1(fruit):
    model, X, y = fruit
    sure = 300 * X
    for rows in (sure, sure[:7], sure[:1]):
        assert (model.predict_log_proba(rows) <= 0).all()
        assert (model.predict_top(rows, 3)[1] <= 1).all()
        assert (model.log_prob_of(rows, y[: len(rows)]) <= 0).all()
