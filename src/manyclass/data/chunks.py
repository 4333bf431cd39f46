"""Rows as they leave a file, whatever its format."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from manyclass.data.schema import TABLES, Schema
from manyclass.errors import UserError

if TYPE_CHECKING:
    from scipy.sparse import csr_array


@dataclass(frozen=True)
class Chunk:
    """Some rows, in the file's order.

    Args:
        features: float32 [n, F], dense or CSR; F may grow from one chunk to the next where it is not known before.
        labels: of each row, as the file has them. None: the file has none.
        done: bytes of the file read so far.
    """

    features: "np.ndarray[Any, Any] | csr_array"
    labels: list[tuple[str, ...]] | None
    done: int

    def __len__(self) -> int:
        return int(self.features.shape[0])


class Reader(Protocol):
    """A file of rows that can be read as often as wanted.

    Attributes:
        path: of the file.
        size: of the file, in bytes.
        schema: how features are made. F may be 0 before all rows were read once.
        labelled: whether the file has labels.
    """

    path: Path
    size: int

    @property
    def schema(self) -> Schema: ...

    @property
    def labelled(self) -> bool: ...

    def chunks(self) -> Iterator[Chunk]:
        """All rows, in chunks of a few thousand."""
        ...


def as_schema(
    features: "np.ndarray[Any, Any] | csr_array", schema: Schema | None
) -> "np.ndarray[Any, Any] | csr_array":
    """Dense rows as sparse ones, or the other way round, where those of the schema are."""
    from scipy.sparse import csr_array

    if schema is None:
        return features
    if isinstance(features, np.ndarray):
        return csr_array(features) if schema.sparse else features
    return features if schema.sparse else features.toarray()


def same_kind(format: str, schema: Schema | None, path: Path, name: str) -> None:
    """Raise where a table was learned from and this is none, or the other way round."""
    if schema is not None and schema.table != (format in TABLES):
        wanted = "a table (CSV, TSV or Parquet)" if schema.table else "rows of numbers (svmlight, .npz or .npy)"
        raise UserError(f"`{name}` must be {wanted}, as the model's was ({schema.format}), got {format}: {path}")


def width_fault(num_features: int, schema: Schema | None) -> str | None:
    """What is wrong with F, as the second half of a sentence; None: nothing."""
    if schema is None or schema.num_features in (0, num_features):
        return None
    return f"must have {schema.num_features:,} features, as the model has, got {num_features:,}"
