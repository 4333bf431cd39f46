"""Words of text hashed into sparse features."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from scipy.sparse import csr_array

_WORDS = re.compile(r"\w+(?:['’]\w+)*")


def words(text: str) -> list[str]:
    """Return the words of a text in lower case; of a text without letters and digits, its parts between spaces.

    Example:
        >>> words("Don't panic, 42!"), words(" + "), words("")
        (["don't", 'panic', '42'], ['+'], [])
    """
    text = text.lower()
    return _WORDS.findall(text) or text.split()


def hashed(columns: Sequence[tuple[str, Sequence[str]]], width: int) -> "csr_array":
    """Return features [n, width] of n rows: word counts, scaled to length 1 for each column, and summed over columns.

    The hash is MurmurHash3 with signs: it is the same on every machine, and collisions cancel on average.

    Args:
        columns: name and n cells of each column; the name is hashed with each word.
        width: the number of features.

    Example:
        >>> one, other = (hashed([("colour", [text])], 16) for text in ("red RED", "red"))
        >>> one.nnz, float(abs(one - other).max())
        (1, 0.0)
    """
    from scipy.sparse import csr_array
    from sklearn.feature_extraction import FeatureHasher

    hasher = FeatureHasher(width, input_type="string", dtype=np.float32)
    # All columns at once: a sum of sparse matrices, one by one, takes quadratic time in their number.
    parts = ([f"{name}={word}" for word in words(cell)] for name, cells in columns for cell in cells)
    found = csr_array(hasher.transform(parts))
    number = np.diff(found.indptr)
    part = np.repeat(np.arange(len(number)), number)
    length = np.sqrt(np.bincount(part, weights=found.data.astype(np.float64) ** 2, minlength=len(number)))
    # Hashes of opposite sign can cancel and leave a row of length 0.
    found.data /= np.where(length > 0, length, 1)[part].astype(np.float32)
    rows, each = len(columns[0][1]), len(columns)
    order = np.arange(rows * each).reshape(each, rows).T.reshape(-1)
    ones = np.ones(rows * each, dtype=np.float32)
    total = csr_array((ones, order, np.arange(0, rows * each + 1, each)), shape=(rows, rows * each)) @ found
    total.eliminate_zeros()
    total.sort_indices()
    return csr_array(total, dtype=np.float32)
