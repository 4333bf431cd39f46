"""The description of how a file becomes features, so that other files become the same features."""

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

import torch

from manyclass.data.files import shown
from manyclass.errors import UserError
from manyclass.storage import pack_strings, unpack_strings

TABLE_FORMATS = ("csv", "tsv", "parquet")
FORMATS = ("svmlight", "npz", "npy", *TABLE_FORMATS)
COLUMN_TYPES = ("number", "text")
MAX_FEATURES = 2**31 - 1  # columns of sparse rows are int32


@dataclass(frozen=True)
class Column:
    """A column of a table that makes features.

    Args:
        name: name in the header.
        type: "number": one feature, (x − mean) / scale; "text": its words, hashed.
        mean, scale: for a number; a missing number counts as the mean.
    """

    name: str
    type: str
    mean: float = 0.0
    scale: float = 1.0


@dataclass(frozen=True)
class Schema:
    """A description of how a file becomes features.

    Args:
        format: format of the file, one of `FORMATS`.
        num_features: F. 0: unknown until all rows are read.
        sparse: True if rows are sparse.
        zero_based: for svmlight: True if the first feature is 0, False if it is 1.
        label: for tables: the column that holds the labels.
        columns: for tables: the columns that make features.
        width: for tables with text: the number of features that words are hashed into, after those of the numbers.

    Example:
        >>> schema = Schema("svmlight", 10, sparse=True, zero_based=False)
        >>> Schema.from_json(schema.to_json()) == schema
        True
    """

    format: str
    num_features: int
    sparse: bool
    zero_based: bool = True
    label: str | None = None
    columns: tuple[Column, ...] = ()
    width: int = 0

    @property
    def is_table(self) -> bool:
        """True if features come from named columns."""
        return self.format in TABLE_FORMATS

    def to_json(self) -> dict[str, Any]:
        """Return plain data for `json.dumps`."""
        # Not by `asdict`, which copies each value recursively and takes a minute for a million columns.
        return {**vars(self), "columns": [dict(vars(column)) for column in self.columns]}

    def packed(self) -> dict[str, Any]:
        """Return content for `storage.save`, which holds a million columns as a few tensors."""
        columns = {
            "names": pack_strings([column.name for column in self.columns]),
            "number": torch.tensor([column.type == "number" for column in self.columns], dtype=torch.bool),
            "mean": torch.tensor([column.mean for column in self.columns], dtype=torch.float64),
            "scale": torch.tensor([column.scale for column in self.columns], dtype=torch.float64),
        }
        return {**vars(self), "columns": columns}

    @classmethod
    def from_json(cls, data: object, *, name: str = "schema") -> "Schema":
        """Build a schema from the result of `to_json` or `packed`.

        Raises:
            UserError: the data is not the JSON of a schema.
        """
        known = _parts(cls, data, name)
        columns = known.get("columns", [])
        if isinstance(columns, Mapping):
            columns = _unpacked(columns, name)
        if not isinstance(columns, list | tuple):
            raise UserError(f"`{name}` must have a list of columns, got {type(columns).__name__}")
        made = tuple(Column(**_parts(Column, column, name)) for column in columns)
        schema = cls(**{**known, "columns": made})
        _check(schema, name)
        return schema


def _unpacked(packed: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """Return the columns in the result of `packed` as `to_json` has them."""
    try:
        names = unpack_strings(packed["names"])
        number, mean, scale = (packed[key] for key in ("number", "mean", "scale"))
        if (number.dtype, mean.dtype, scale.dtype) != (torch.bool, torch.float64, torch.float64):
            raise TypeError
        rows = zip(names, number.tolist(), mean.tolist(), scale.tolist(), strict=True)
        return [
            {"name": column, "type": "number" if is_number else "text", "mean": middle, "scale": width}
            for column, is_number, middle, width in rows
        ]
    except (AttributeError, KeyError, TypeError, ValueError):
        raise UserError(f"`{name}` must have columns of a name, a type, a mean and a scale each, got others") from None


# Names of the fields of each class, and whether they must be given.
_KEYS: dict[type[Schema | Column], dict[str, bool]] = {
    cls: {field.name: field.default is MISSING for field in fields(cls)} for cls in (Schema, Column)
}


def _parts(cls: type[Schema | Column], data: object, name: str) -> dict[str, Any]:
    if not isinstance(data, Mapping):
        raise UserError(f"`{name}` must be a JSON object, got {type(data).__name__}")
    names = _KEYS[cls]
    for key in data:
        if key not in names:
            raise UserError(f"`{name}` must have the keys {', '.join(names)}, got {shown(str(key))}")
    for key, needed in names.items():
        if needed and key not in data:
            raise UserError(f"`{name}` must have the key {key!r}, got {', '.join(map(repr, data)) or 'none'}")
    return dict(data)


def _check(schema: Schema, name: str) -> None:
    def needs(good: bool, what: str, got: object) -> None:
        if not good:
            raise UserError(f"`{name}` must have {what}, got {shown(str(got))}")

    needs(schema.format in FORMATS, f"a format among {', '.join(FORMATS)}", schema.format)
    for key in ("num_features", "width"):
        value = getattr(schema, key)
        good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_FEATURES
        needs(good, f"a whole number as {key}", value)
    for key in ("sparse", "zero_based"):
        needs(isinstance(getattr(schema, key), bool), f"true or false as {key}", getattr(schema, key))
    needs(schema.label is None or isinstance(schema.label, str), "a string or null as label", schema.label)
    for column in schema.columns:
        needs(isinstance(column.name, str), "strings as names of columns", column.name)
        needs(column.type in COLUMN_TYPES, f"columns of the types {', '.join(COLUMN_TYPES)}", column.type)
        for value in (column.mean, column.scale):
            good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            needs(good, "finite numbers as mean and scale of columns", value)
        needs(column.scale > 0, "positive scales of columns", column.scale)
    if schema.is_table:
        numbers = sum(column.type == "number" for column in schema.columns)
        words = schema.width if len(schema.columns) > numbers else 0
        needs(schema.num_features == numbers + words, f"{numbers + words} features", schema.num_features)
        needs(len({column.name for column in schema.columns}) == len(schema.columns), "different columns", "one twice")
