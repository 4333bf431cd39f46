"""Checks of sparse matrices, whose arrays anyone may have changed since SciPy made them."""

from typing import Any

import numpy as np
from scipy.sparse import issparse


def check_sparse(X: Any, name: str = "X") -> None:  # noqa: N803
    """Check the arrays of a sparse matrix, which SciPy's and our loops trust; other values are left to later checks.

    Raises:
        ValueError: starts do not rise from 0 within the values, lengths differ, or an index is outside the shape.
    """
    if not issparse(X):
        return
    if X.format not in ("coo", "csr", "csc"):
        try:
            X = X.tocsr()  # noqa: N806
        except (IndexError, TypeError, ValueError) as error:
            raise ValueError(f"`{name}` must be a valid sparse matrix, got a damaged one: {error}") from None
    data = np.asarray(X.data)
    if data.ndim != 1 or data.dtype.kind not in "biuf":
        raise ValueError(f"`{name}` must hold a vector of real numbers, got {data.dtype} {list(data.shape)}")
    if X.format == "coo":
        for axis, indices in enumerate(X.coords):
            if len(indices) != len(X.data):
                raise ValueError(f"`{name}` must have as many indices as values, {len(X.data)}, got {len(indices)}")
            _check_range(indices, X.shape[axis], name)
    if X.format == "coo" or X.ndim != 2:
        return
    outer, inner = X.shape if X.format == "csr" else X.shape[::-1]
    line = "row" if X.format == "csr" else "column"
    starts, indices = np.asarray(X.indptr), np.asarray(X.indices)
    if {starts.dtype.kind, indices.dtype.kind} - set("iu"):
        raise ValueError(f"`{name}` must have whole numbers as indptr and indices, got {starts.dtype}, {indices.dtype}")
    if starts.shape != (outer + 1,):
        raise ValueError(f"`{name}` must have an indptr of length {outer + 1}, got shape {list(starts.shape)}")
    if indices.shape != (len(X.data),):
        raise ValueError(
            f"`{name}` must have as many indices as values, {len(X.data)}, got shape {list(indices.shape)}"
        )
    if starts[0] != 0 or starts[-1] > len(indices):
        got = f"{starts[0]} to {starts[-1]}"
        raise ValueError(f"`{name}` must have an indptr from 0 to at most {len(indices)}, got {got}")
    falls = np.flatnonzero(starts[1:] < starts[:-1])
    if len(falls):
        at = int(falls[0])
        got = f"{starts[at + 1]} after {starts[at]} at {line} {at}"
        raise ValueError(f"`{name}` must have an indptr that does not fall, got {got}")
    _check_range(indices[: starts[-1]], inner, name)


def _check_range(indices: "np.ndarray[Any, Any]", size: int, name: str) -> None:
    if len(indices) and (indices.min() < 0 or indices.max() >= size):
        at = int(np.flatnonzero((indices < 0) | (indices >= size))[0])
        raise ValueError(f"`{name}` must have sparse indices in [0, {size}), got {indices[at]} at position {at}")
