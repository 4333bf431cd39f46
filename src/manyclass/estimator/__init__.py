"""The scikit-learn classifier."""

from manyclass.estimator.classifier import ManyClassClassifier as ManyClassClassifier
