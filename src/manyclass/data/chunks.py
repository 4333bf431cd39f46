"""Rows of a file in any format, a chunk at a time."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from manyclass.data.schema import TABLE_FORMATS, Schema
from manyclass.errors import UserError

if TYPE_CHECKING:
    from scipy.sparse import csr_array


@dataclass(frozen=True)
class Chunk:
    """Some rows, in the file's order.

    Args:
        features: float32 [n, F], dense or CSR; F may grow from one chunk to the next until all rows are read.
        labels: labels of each row, as in the file. None: the file has no labels.
        done: bytes of the file read so far.
    """

    features: "np.ndarray[Any, Any] | csr_array"
    labels: list[tuple[str, ...]] | None
    done: int

    def __len__(self) -> int:
        return int(self.features.shape[0])


class RowError(UserError):
    """A fault of a row.

    Args:
        message: the message.
        row: the number of rows before it in its chunk.
    """

    def __init__(self, message: str, row: int) -> None:
        super().__init__(message)
        self.row = row


def until_fault(number: int, made: Callable[[int], Chunk]) -> Iterator[Chunk]:
    """Yield the chunk of the rows before the first fault, then raise that fault.

    Args:
        number: rows at hand.
        made: makes a chunk of the first n rows, or raises RowError.
    """
    fault: RowError | None = None
    while number:
        try:
            chunk = made(number)
        except RowError as error:
            number, fault = error.row, error
            continue
        yield chunk
        break
    if fault is not None:
        raise fault


class Reader(Protocol):
    """A file of rows that can be read any number of times.

    Attributes:
        path: path of the file.
        size: bytes of the file.
        schema: description of the features; F may be 0 until all rows have been read once.
        labelled: True if the file has labels.
    """

    path: Path
    size: int
    schema: Schema
    labelled: bool

    def chunks(self) -> Iterator[Chunk]:
        """Yield all rows, in chunks of a few thousand.

        Raises:
            UserError: a row cannot be read; all rows before it have been yielded.
        """
        ...


def as_schema(
    features: "np.ndarray[Any, Any] | csr_array", schema: Schema | None
) -> "np.ndarray[Any, Any] | csr_array":
    """Convert rows to sparse or dense, as the schema says; without a schema they stay as they are."""
    from scipy.sparse import csr_array

    if schema is None:
        return features
    if isinstance(features, np.ndarray):
        return csr_array(features) if schema.sparse else features
    return features if schema.sparse else features.toarray()


def check_format(format: str, schema: Schema | None, path: Path, name: str) -> None:
    """Raise UserError if only one of this file and the training data is a table."""
    if schema is not None and schema.is_table != (format in TABLE_FORMATS):
        wanted = "a table (CSV, TSV or Parquet)" if schema.is_table else "rows of numbers (svmlight, .npz or .npy)"
        raise UserError(f"`{name}` must be {wanted}, as the model's was ({schema.format}), got {format}: {path}")


def width_fault(num_features: int, schema: Schema | None) -> str | None:
    """Return the fault of F as the second half of a sentence, or None."""
    if schema is None or schema.num_features in (0, num_features):
        return None
    return f"must have {schema.num_features:,} features, as the model has, got {num_features:,}"
