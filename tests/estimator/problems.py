"""Data to fit."""

import numpy as np
from scipy.sparse import csr_array


def gaussian(num_classes, n, *, features=16, noise=0.7, seed=0):
    """Return rows around a centre for each class; every class occurs."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((num_classes, features))
    y = np.concatenate([np.arange(num_classes), rng.integers(num_classes, size=n - num_classes)])
    return centres[y] + noise * rng.standard_normal((n, features)), y


def words(num_classes, n, *, features, length=8, seed=0):
    """Return sparse rows of unit length; half of their words are among the three of their class."""
    rng = np.random.default_rng(seed)
    own = rng.integers(features, size=(num_classes, 3))
    y = np.concatenate([np.arange(num_classes), rng.integers(num_classes, size=n - num_classes)])
    drawn = rng.integers(features, size=(n, length))
    columns = np.where(rng.random((n, length)) < 0.5, own[y[:, None], rng.integers(3, size=(n, length))], drawn)
    values = np.full(n * length, length**-0.5)
    matrix = csr_array((values, columns.ravel(), np.arange(0, n * length + 1, length)), shape=(n, features))
    matrix.sum_duplicates()
    return matrix, y
