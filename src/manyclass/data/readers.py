"""Opening files of rows in all formats."""

from pathlib import Path

from manyclass.data.arrays import ArrayReader
from manyclass.data.chunks import Reader
from manyclass.data.files import COMPRESSED, ReadProgress, format_ending
from manyclass.data.schema import FORMATS, TABLE_FORMATS, Schema
from manyclass.data.svmlight import SvmlightReader
from manyclass.data.tables import WIDTH, TableReader
from manyclass.errors import UserError

ENDINGS = {
    ".svm": "svmlight",
    ".svmlight": "svmlight",
    ".libsvm": "svmlight",
    ".txt": "svmlight",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".npz": "npz",
    ".npy": "npy",
}
_BINARY = ("parquet", "npz", "npy")


def open_rows(
    path: Path,
    *,
    format: str | None = None,
    label: str | None = None,
    labels: Path | None = None,
    zero_based: bool | None = None,
    width: int = WIDTH,
    schema: Schema | None = None,
    labelled: bool = True,
    name: str = "data",
    progress: ReadProgress | None = None,
) -> Reader:
    r"""Open a file of rows.

    Args:
        path: the file.
        format: svmlight, csv, tsv, parquet, npz or npy. None: by its ending.
        label: for tables: the column that holds the labels.
        labels: for .npy and .npz: a .npy file with the label of each row.
        zero_based: for svmlight: True if features count from 0. None: see `SvmlightReader`.
        width: for tables with text: the number of features that words are hashed into.
        schema: schema of a trained model: features are made in the same way, and a file with an unknown ending has the
            same format. None: a new schema for these rows.
        labelled: for tables, with a schema: True to read labels.
        name: the user's name for the file, for errors.
        progress: called with the bytes read and in total by a first pass, in formats that need one.

    Raises:
        UserError: the file cannot be read in this format, or an option is for another format.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "animals.csv"
        >>> _ = path.write_text("legs,says,label\n4,meow,cat\n2,moo moo,cow\n")
        >>> reader = open_rows(path)
        >>> [column.type for column in reader.schema.columns], reader.schema.num_features
        (['number', 'text'], 262145)
        >>> next(reader.chunks()).labels
        [('cat',), ('cow',)]
    """
    found = format or ENDINGS.get(format_ending(path)) or (None if schema is None else schema.format)
    if found not in FORMATS:
        what = f"ends in one of {', '.join(ENDINGS)}" if format is None else f"is one of {', '.join(FORMATS)}"
        got = f"{path}; or give `format`" if format is None else repr(format)
        raise UserError(f"`{name if format is None else 'format'}` must be of a format that {what}, got {got}")
    if found in _BINARY and path.suffix.lower() in COMPRESSED:
        raise UserError(f"`{name}` must not be compressed a second time: decompress {path}")
    for option, given, formats in (
        ("label", label, TABLE_FORMATS),
        ("labels", labels, ("npy", "npz")),
        ("zero_based", zero_based, ("svmlight",)),
    ):
        if given is not None and found not in formats:
            raise UserError(f"`{option}` must be left out except for {', '.join(formats)}, got {given} for {path}")
    if found == "svmlight":
        return SvmlightReader(path, zero_based=zero_based, schema=schema, name=name, progress=progress)
    if found in TABLE_FORMATS:
        return TableReader(
            path, format=found, label=label, width=width, schema=schema, labelled=labelled, name=name, progress=progress
        )
    return ArrayReader(path, archive=found == "npz", labels=labels, schema=schema, name=name)
