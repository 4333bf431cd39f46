"""Files of rows, whatever their format."""

from pathlib import Path

from manyclass.data.arrays import ArrayReader
from manyclass.data.chunks import Reader
from manyclass.data.files import PACKED, Watch, kind
from manyclass.data.schema import FORMATS, TABLES, Schema
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
    watch: Watch | None = None,
) -> Reader:
    """A file of rows.

    Args:
        path: the file.
        format: svmlight, csv, tsv, parquet, npz or npy. None: what its ending says.
        label: of tables: the column that holds the labels.
        labels: of .npy and .npz: a .npy file with the label of each row.
        zero_based: of svmlight: whether features count from 0. None: see `SvmlightReader`.
        width: of tables with text: how many features words are hashed into.
        schema: of the rows that a model was trained on: features are made as there, and their format is that of files
            whose ending says nothing. None: as fits these rows.
        labelled: of tables, with a schema: whether labels are read.
        name: what the user knows the path as, for errors.
        watch: told how far a first reading is, where there must be one, in bytes: done, of how many.

    Raises:
        UserError: the file cannot be read as that; an option is for another format.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "animals.csv"
        >>> _ = path.write_text("legs,says,label\\n4,meow,cat\\n2,moo moo,cow\\n")
        >>> reader = open_rows(path)
        >>> [column.kind for column in reader.schema.columns], reader.schema.num_features
        (['number', 'text'], 262145)
        >>> next(reader.chunks()).labels
        [('cat',), ('cow',)]
    """
    found = format or ENDINGS.get(kind(path)) or (None if schema is None else schema.format)
    if found not in FORMATS:
        what = f"ends in one of {', '.join(ENDINGS)}" if format is None else f"is one of {', '.join(FORMATS)}"
        got = f"{path}; `format` says what it is" if format is None else repr(format)
        raise UserError(f"`{name if format is None else 'format'}` must be of a format that {what}, got {got}")
    if found in _BINARY and path.suffix.lower() in PACKED:
        raise UserError(f"`{name}` must not be compressed once more: unpack {path}")
    for option, given, formats in (
        ("label", label, TABLES),
        ("labels", labels, ("npy", "npz")),
        ("zero_based", zero_based, ("svmlight",)),
    ):
        if given is not None and found not in formats:
            raise UserError(f"`{option}` must be left out but for {', '.join(formats)}, got {given} for {path}")
    if found == "svmlight":
        return SvmlightReader(path, zero_based=zero_based, schema=schema, name=name, watch=watch)
    if found in TABLES:
        return TableReader(
            path, format=found, label=label, width=width, schema=schema, labelled=labelled, name=name, watch=watch
        )
    return ArrayReader(path, archive=found == "npz", labels=labels, schema=schema, name=name)
