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
    total: csr_array | None = None
    for name, cells in columns:
        found = csr_array(hasher.transform([f"{name}={word}" for word in words(cell)] for cell in cells))
        number = np.diff(found.indptr)
        row = np.repeat(np.arange(len(number)), number)
        length = np.sqrt(np.bincount(row, weights=found.data.astype(np.float64) ** 2, minlength=len(number)))
        # Hashes of opposite sign can cancel and leave a row of length 0.
        found.data /= np.where(length > 0, length, 1)[row].astype(np.float32)
        total = found if total is None else total + found
    assert total is not None
    return csr_array(total, dtype=np.float32)
