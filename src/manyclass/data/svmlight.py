"""Rows in svmlight's format, with or without the header of the extreme-classification repository."""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from manyclass.data._pairs import pairs
from manyclass.data.chunks import Chunk, as_schema, same_kind
from manyclass.data.files import Block, Watch, blocks, lines, reading, shown
from manyclass.data.names import LABEL_LIMIT, label_fault
from manyclass.data.schema import MAX_FEATURES, Schema
from manyclass.errors import UserError

_HEADER = re.compile(r"\s*(\d{1,30})\s+(\d{1,30})\s+(\d{1,30})\s*")
_COMMENT = re.compile(rb"#[^\n]*")
_QUERY = re.compile(rb"(?<= )qid:[^ \n]*")
_ZERO = re.compile(rb"(?:\A|[ \n])0+:")
_LARGEST = float(np.finfo(np.float32).max)
_SPACES = re.compile(rb"  +")


@dataclass(frozen=True)
class _Parsed:
    """Rows of a block: their labels, how many features each has, and all features one after the other."""

    labels: list[tuple[str, ...]]
    number: list[int]
    index: "np.ndarray[Any, Any]"
    value: "np.ndarray[Any, Any]"


class SvmlightReader:
    """Rows `label[,label…] index:value …`, one a line; `# …` is a comment, `qid:…` is passed over.

    A first line of three whole numbers, `N F L`, is a header: features count from 0, each is below F, and there are N
    rows. Without one, features count from 0 if the file has a feature 0 anywhere, and else from 1: the file is looked
    through before. A row may have no labels: it begins with a space or with a feature. Blank lines are no rows, but
    those that N counts.

    Args:
        path: the file.
        zero_based: whether features count from 0. None: see above.
        schema: of the rows that a model was trained on. None: these are those.
        name: what the user knows the path as, for errors.
        watch: told how far the file is looked through.

    Raises:
        UserError: the file cannot be read, or its header cannot be true. While it is read: a line that is no row, or
            N, or F, that is not so.
    """

    def __init__(
        self,
        path: Path,
        *,
        zero_based: bool | None = None,
        schema: Schema | None = None,
        name: str = "data",
        watch: Watch | None = None,
    ) -> None:
        same_kind("svmlight", schema, path, name)
        self.path, self._name, self._given = path, name, schema
        with reading(path, name):
            self.size = path.stat().st_size
        self._rows: int | None = None  # that the header promises
        known = 0 if schema is None else schema.num_features
        if header := _HEADER.fullmatch(next(lines(path, name=name), "")):
            self._rows, width, _ = map(int, header.groups())
            if not 1 <= width <= MAX_FEATURES:
                self._fail(f"must have from 1 to {MAX_FEATURES:,} features in its header, got {width:,}", 1)
            if known not in (0, width):
                self._fail(f"must have {known:,} features, as the model has, got {width:,} in its header", 1)
            known, zero_based = width, True
        elif zero_based is None:
            zero_based = self._has_zero(watch) if schema is None else schema.zero_based
        self._base = 0 if zero_based else 1
        self._schema = Schema("svmlight", known, sparse=True, zero_based=zero_based)

    @property
    def schema(self) -> Schema:
        return self._schema if self._given is None else self._given

    @property
    def labelled(self) -> bool:
        return True

    def chunks(self) -> Iterator[Chunk]:
        from scipy.sparse import csr_array

        count, widest, bound = 0, 0, self._schema.num_features
        for block in blocks(self.path, name=self._name):
            if self._rows is not None and block.first == 1:
                block = replace(block, data=block.data[block.data.index(b"\n") + 1 :], first=2)
            blanks = 0 if self._rows is None else max(0, self._rows - count)
            parsed = _quickly(block.data, blanks)
            if parsed is None or not self._sound(parsed):
                parsed = self._carefully(block, blanks)
            if not parsed.labels:
                continue
            count += len(parsed.labels)
            column = (parsed.index - self._base).astype(np.int32)
            widest = max(widest, int(column.max(initial=-1)) + 1)
            start = np.concatenate([[0], np.cumsum(parsed.number)]).astype(np.int32)
            shape = (len(parsed.labels), bound or max(widest, 1))
            features = csr_array((parsed.value, column, start), shape=shape)
            yield Chunk(as_schema(features, self._given), parsed.labels, block.done)
        if self._rows is not None and count != self._rows:
            raise UserError(
                f"`{self._name}` must hold {self._rows:,} rows, as its header says, got {count:,} in {self.path}"
            )
        if not count:
            raise UserError(f"`{self._name}` must hold rows, got none in {self.path}")
        if not (bound or widest):
            raise UserError(f"`{self._name}` must hold features index:value, got none in {self.path}")
        self._schema = replace(self._schema, num_features=bound or widest)

    def _has_zero(self, watch: Watch | None) -> bool:
        for block in blocks(self.path, name=self._name):
            if watch is not None:
                watch(block.done, self.size)
            data = block.data.replace(b"\t", b" ")
            if _ZERO.search(_COMMENT.sub(b"", data) if b"#" in data else data):
                return True
        return False

    def _sound(self, parsed: _Parsed) -> bool:
        top = self._top()
        low, high = parsed.index.min(initial=top), parsed.index.max(initial=0)
        return bool(self._base <= low and high <= top and np.isfinite(parsed.value).all())

    def _top(self) -> int:
        """The highest index a feature may have."""
        return (self._schema.num_features or MAX_FEATURES) - 1 + self._base

    def _carefully(self, block: Block, blanks: int) -> _Parsed:
        """As `_quickly`, and name the line of the first fault."""
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
            for label in row:
                if fault := label_fault(label):
                    self._fail(fault, place)
            pairs = [self._pair(token, place) for token in tokens if not token.startswith("qid:")]
            labels.append(row)
            number.append(len(pairs))
            index.extend(i for i, _ in pairs)
            value.extend(x for _, x in pairs)
        return _Parsed(labels, number, np.array(index, dtype=np.float64), np.array(value, dtype=np.float32))

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
        if index > self._top():
            known = self._schema.num_features
            whose = "its header says" if self._rows is not None else "the model has"
            why = f" ({known:,} features, as {whose})" if known else ""
            self._fail(f"must have indices of at most {self._top():,}{why}, got {index:,}", place)
        if not math.isfinite(value) or abs(value) > _LARGEST:
            self._fail(f"must have finite values, in 32 bits, got {shown(second)} for feature {index}", place)
        return index, value

    def _fail(self, fault: str, place: int) -> NoReturn:
        raise UserError(f"`{self._name}` {fault} in line {place} of {self.path}")


def _quickly(data: bytes, blanks: int) -> _Parsed | None:
    """The rows of whole lines, the first `blanks` of which may be blank; None: look more closely."""
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
        if len(head) > LABEL_LIMIT:
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
