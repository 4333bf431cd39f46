"""Rows in svmlight's format, with or without the header of the extreme-classification repository.

A separate reader, because scikit-learn's has no string labels, does not read the header, and loads the whole file.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from manyclass.data._pairs import pairs
from manyclass.data.chunks import Chunk, as_schema, check_format
from manyclass.data.files import LineBlock, ReadProgress, blocks, lines, reading, shown
from manyclass.data.names import MAX_LABEL_CHARACTERS, label_fault
from manyclass.data.schema import MAX_FEATURES, Schema
from manyclass.errors import UserError

_HEADER = re.compile(r"\s*(\d{1,30})\s+(\d{1,30})\s+(\d{1,30})\s*")
_COMMENT = re.compile(rb"#[^\n]*")
_QUERY = re.compile(rb"(?<= )qid:[^ \n]*")
_ZERO = re.compile(rb"(?:\A|[ \n])0+:")
_MAX_FLOAT32 = float(np.finfo(np.float32).max)
_SPACES = re.compile(rb"  +")


@dataclass(frozen=True)
class _Parsed:
    """Rows of a block: labels and number of features of each, and all features, concatenated."""

    labels: list[tuple[str, ...]]
    number: list[int]
    index: "np.ndarray[Any, Any]"
    value: "np.ndarray[Any, Any]"


class SvmlightReader:
    """Rows `label[,label…] index:value …`, one a line; `# …` is a comment, `qid:…` is ignored.

    A first line of three whole numbers, `N F L`, is a header: features count from 0, each is below F, and there are N
    rows. Without one, features count from 0 if a first pass finds a feature 0 anywhere, and else from 1. A row without
    labels begins with a space or with a feature. Blank lines are ignored, unless they are needed to make N rows.

    Args:
        path: the file.
        zero_based: True if features count from 0. None: see above.
        schema: schema of a trained model. None: a new one for these rows.
        name: the user's name for the file, for errors.
        progress: called with the bytes read and in total by the first pass.

    Raises:
        UserError: the file cannot be read, or its header is impossible. `chunks` raises it for a line that is not a
            row, and if N or F is wrong.
    """

    labelled = True

    def __init__(
        self,
        path: Path,
        *,
        zero_based: bool | None = None,
        schema: Schema | None = None,
        name: str = "data",
        progress: ReadProgress | None = None,
    ) -> None:
        check_format("svmlight", schema, path, name)
        self.path, self._name, self._given = path, name, schema
        with reading(path, name):
            self.size = path.stat().st_size
        self._rows: int | None = None  # N of the header
        known = 0 if schema is None else schema.num_features
        if header := _HEADER.fullmatch(next(lines(path, name=name), "")):
            self._rows, width, _ = map(int, header.groups())
            if not 1 <= width <= MAX_FEATURES:
                self._fail(f"must have from 1 to {MAX_FEATURES:,} features in its header, got {width:,}", 1)
            if known not in (0, width):
                self._fail(f"must have {known:,} features, as the model has, got {width:,} in its header", 1)
            known, zero_based = width, True
        elif zero_based is None:
            zero_based = self._has_zero(progress) if schema is None else schema.zero_based
        self._base = 0 if zero_based else 1
        self._num_features = known
        self.schema = schema or Schema("svmlight", known, sparse=True, zero_based=zero_based)

    def chunks(self) -> Iterator[Chunk]:
        """Yield all rows, in chunks of about a mebibyte of text."""
        from scipy.sparse import csr_array

        count, widest, bound = 0, 0, self._num_features
        for block in blocks(self.path, name=self._name):
            if self._rows is not None and block.first == 1:
                block = replace(block, data=block.data[block.data.index(b"\n") + 1 :], first=2)
            blanks = 0 if self._rows is None else max(0, self._rows - count)
            parsed, fault = _parsed_fast(block.data, blanks), None
            if parsed is None or not self._is_valid(parsed):
                parsed, fault = self._parsed_carefully(block, blanks)
            if not parsed.labels and fault is None:
                continue
            count += len(parsed.labels)
            column = (parsed.index - self._base).astype(np.int32)
            widest = max(widest, int(column.max(initial=-1)) + 1)
            start = np.concatenate([[0], np.cumsum(parsed.number)]).astype(np.int32)
            shape = (len(parsed.labels), bound or max(widest, 1))
            features = csr_array((parsed.value, column, start), shape=shape)
            if parsed.labels:
                yield Chunk(as_schema(features, self._given), parsed.labels, block.done)
            if fault is not None:
                raise fault
        if self._rows is not None and count != self._rows:
            raise UserError(
                f"`{self._name}` must hold {self._rows:,} rows, as its header says, got {count:,} in {self.path}"
            )
        if not count:
            raise UserError(f"`{self._name}` must hold rows, got none in {self.path}")
        if not (bound or widest):
            raise UserError(f"`{self._name}` must hold features index:value, got none in {self.path}")
        self._num_features = bound or widest
        if self._given is None:
            self.schema = replace(self.schema, num_features=self._num_features)

    def _has_zero(self, progress: ReadProgress | None) -> bool:
        for block in blocks(self.path, name=self._name):
            if progress is not None:
                progress(block.done, self.size)
            data = block.data.replace(b"\t", b" ")
            if _ZERO.search(_COMMENT.sub(b"", data) if b"#" in data else data):
                return True
        return False

    def _is_valid(self, parsed: _Parsed) -> bool:
        top = self._max_index()
        low, high = parsed.index.min(initial=top), parsed.index.max(initial=0)
        return bool(self._base <= low and high <= top and np.isfinite(parsed.value).all())

    def _max_index(self) -> int:
        """Return the highest index a feature may have."""
        return (self._num_features or MAX_FEATURES) - 1 + self._base

    def _parsed_carefully(self, block: LineBlock, blanks: int) -> tuple[_Parsed, UserError | None]:
        """Parse as `_parsed_fast` does, up to the first line with a fault; return that fault too."""
        fault: UserError | None = None
        labels: list[tuple[str, ...]] = []
        number: list[int] = []
        index: list[int] = []
        value: list[float] = []
        for place, line in enumerate(block.data.decode().split("\n")[:-1], block.first):
            text = line.partition("#")[0]
            tokens = text.split()
            if not tokens and len(labels) >= blanks:
                continue
            bare = not tokens or text[0].isspace() or ":" in tokens[0]
            row = () if bare else tuple(dict.fromkeys(tokens.pop(0).split(",")))
            try:
                for label in row:
                    if bad := label_fault(label):
                        self._fail(bad, place)
                pairs = [self._pair(token, place) for token in tokens if not token.startswith("qid:")]
            except UserError as error:
                fault = error
                break
            labels.append(row)
            number.append(len(pairs))
            index.extend(i for i, _ in pairs)
            value.extend(x for _, x in pairs)
        parsed = _Parsed(labels, number, np.array(index, dtype=np.float64), np.array(value, dtype=np.float32))
        return parsed, fault

    def _pair(self, token: str, place: int) -> tuple[int, float]:
        first, colon, second = token.partition(":")
        try:
            if not colon or "_" in token:
                raise ValueError
            index, value = int(first), float(second)
        except ValueError:
            self._fail(f"must hold features index:value, got {shown(token)}", place)
        if index < self._base:
            self._fail(f"must have indices of at least {self._base}, got {index}", place)
        if index > self._max_index():
            known = self._num_features
            whose = "its header says" if self._rows is not None else "the model has"
            why = f" ({known:,} features, as {whose})" if known else ""
            self._fail(f"must have indices of at most {self._max_index():,}{why}, got {index:,}", place)
        if not math.isfinite(value) or abs(value) > _MAX_FLOAT32:
            self._fail(f"must have finite values, in 32 bits, got {shown(second)} for feature {index}", place)
        return index, value

    def _fail(self, fault: str, place: int) -> NoReturn:
        raise UserError(f"`{self._name}` {fault} in line {place} of {self.path}")


def _parsed_fast(data: bytes, blanks: int) -> _Parsed | None:
    """Parse whole lines; blank ones count as rows among the first `blanks`. None if a careful parser is needed."""
    if b"\t" in data:
        data = data.replace(b"\t", b" ")
    if b"#" in data:
        data = _COMMENT.sub(b"", data)
    if b"qid:" in data:
        data = _QUERY.sub(b"", data)
    heads: list[bytes] = []
    bodies: list[bytes] = []
    number: list[int] = []
    for line in data.split(b"\n")[:-1]:
        head, _, body = line.partition(b" ")
        if b":" in head:
            head, body = b"", line
        body = body.strip(b" ")
        if not head and not body and len(heads) >= blanks:
            continue
        if len(head) > MAX_LABEL_CHARACTERS:
            return None
        heads.append(head)
        number.append(body.count(b":"))
        if body:
            bodies.append(body)
    labels: list[tuple[str, ...]] = [
        () if not head else tuple(dict.fromkeys(head.split(","))) if "," in head else (head,)
        for head in b"\n".join(heads).decode().split("\n")[: len(heads)]
    ]
    if any("" in row for row in labels):
        return None
    features = b" ".join(bodies)
    if b"  " in features:
        features = _SPACES.sub(b" ", features)
    n = sum(number)
    if not n:
        return None if features else _Parsed(labels, number, np.empty(0), np.empty(0, dtype=np.float32))
    found = pairs(features, n)
    if found is None:
        return None
    with np.errstate(over="ignore"):
        return _Parsed(labels, number, found[0], found[1].astype(np.float32))
