"""scikit-learn's own checks."""

from sklearn.utils.estimator_checks import parametrize_with_checks

from manyclass.estimator import ManyClassClassifier

_WEIGHTS = (
    "a minibatch that holds a row twice is another one than one that holds it with weight 2; and where one minibatch "
    "holds all rows, float32 sums differ in their last digits"
)
EXPECTED = {
    "check_sample_weight_equivalence_on_dense_data": _WEIGHTS,
    "check_sample_weight_equivalence_on_sparse_data": _WEIGHTS,
}


@parametrize_with_checks(
    [
        ManyClassClassifier(),
        ManyClassClassifier(hidden_layers=(16,), optimizer="adam", max_epochs=20),
        ManyClassClassifier(k=1, sampler="systematic", early_stopping=True, max_epochs=50),
    ],
    expected_failed_checks=lambda estimator: EXPECTED,
)
def test_scikit_learn_finds_nothing_wrong(estimator, check):
    check(estimator)
