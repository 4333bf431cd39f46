"""Trees of plain data and tensors as JSON that names the tensors.

JSON's values stand for themselves. A type that JSON lacks is an object with one key: {"dict": [[key, value], ...]},
{"tuple": [...]}, {"tensor": name}, {"float": "inf"}, {"int": "0x..."} (beyond 64 bits, which some readers lack).
"""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

# Keys are the names in the safetensors format.
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "C64": torch.complex64,
}
_MAX_DEPTH = 100
# Limits of what is written and read. Values take up to 20 times the memory of their JSON: a list in 3 bytes takes 64.
MAX_JSON_BYTES = 1 << 26
MAX_VALUES = 1 << 23
_MAX_NAME_CHARACTERS = 200
_TYPES = "a dict, list, tuple, None, bool, int, float, str or Tensor"


class Packing:
    """A tree on its way to JSON and a table of tensors, each tensor once.

    Args:
        taken: names that tensors must not get.
    """

    def __init__(self, taken: set[str]) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._taken = set(taken)
        self._names: dict[object, str] = {}

    def json(self, content: Mapping[str, object]) -> bytes:
        """Return the tree as JSON, and add its tensors to `tensors`.

        Raises:
            TypeError: a value is neither plain data nor a dense tensor, or a key is not a str or int.
            ValueError: the tree is nested too deeply, as one that contains itself is, or too large.
        """
        text = json.dumps(self._node(content, ()), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        # Not as escapes, which would join two lone surrogates into one character.
        data = text.encode("utf-8", "surrogatepass")
        if fault := _size_fault(data):
            raise ValueError(f"`content` must have {fault}: save long lists as tensors, strings by `pack_strings`")
        return data

    def _node(self, value: object, path: tuple[object, ...]) -> Any:
        if value is None or isinstance(value, bool | str):
            return value
        if isinstance(value, int):
            return value if value.bit_length() < 64 else {"int": hex(value)}
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": repr(float(value))}
        if isinstance(value, Tensor):
            return {"tensor": self._name(value, path)}
        if len(path) > _MAX_DEPTH:
            raise ValueError(f"`content` must be nested at most {_MAX_DEPTH} deep, got more at `{place(path[:3])}`")
        if isinstance(value, Mapping):
            return {"dict": [[_key(key, path), self._node(part, (*path, key))] for key, part in value.items()]}
        if isinstance(value, list | tuple):
            parts = [self._node(part, (*path, position)) for position, part in enumerate(value)]
            return parts if isinstance(value, list) else {"tuple": parts}
        raise TypeError(f"`{place(path)}` must be {_TYPES}, got a {type(value).__name__}")

    def _name(self, value: Tensor, path: tuple[object, ...]) -> str:
        if value.layout != torch.strided or value.is_meta or value.is_quantized or value.dtype not in DTYPES.values():
            got = f"{value.dtype} as {value.layout} on {value.device}"
            raise TypeError(f"`{place(path)}` must be a dense tensor of a dtype that safetensors has, got {got}")
        # A state_dict makes a new object for the same tensor each time, so its memory identifies it.
        where = (value.untyped_storage()._cdata, value.storage_offset(), value.shape, value.stride(), value.dtype)
        same = (*where, value.is_conj(), value.is_neg())
        if same not in self._names:
            self._names[same] = self._free(".".join(map(str, path)))
            self.tensors[self._names[same]] = value
        return self._names[same]

    def _free(self, wanted: str) -> str:
        """Return an unused tensor name close to the one wanted, without surrogates: other readers refuse them."""
        wanted = wanted.encode("utf-8", "replace").decode()[:_MAX_NAME_CHARACTERS]
        name, number = wanted, 1
        while name in self._taken:
            number += 1
            name = f"{wanted}#{number}"
        self._taken.add(name)
        return name


def unpack(data: bytes, tensor: Callable[[str], Tensor]) -> dict[str, Any]:
    """Build the tree from the JSON of `Packing`.

    Args:
        data: the JSON.
        tensor: returns the tensor of a name, or raises KeyError.

    Raises:
        ValueError: `Packing` does not write such JSON; the message says why.
    """
    if fault := _size_fault(data):
        raise ValueError(f"its JSON must have {fault}")

    def decode(pairs: list[tuple[str, Any]]) -> Any:
        return _value(pairs, tensor)

    try:
        # Objects become values while they are read, inner ones first, so that there is no second tree.
        content = json.loads(data.decode("utf-8", "surrogatepass"), object_pairs_hook=decode)
    except RecursionError:
        raise ValueError("its JSON is nested too deeply") from None
    except (UnicodeDecodeError, json.JSONDecodeError):
        raise ValueError("its JSON cannot be read") from None
    if not isinstance(content, dict):
        raise ValueError("its JSON does not begin with a dict")
    _check_depth(content)
    return content


def _size_fault(data: bytes) -> str | None:
    """Return the fault of JSON whose values would take too much memory, or None."""
    if len(data) > MAX_JSON_BYTES:
        return f"at most {MAX_JSON_BYTES:,} bytes, got {len(data):,}"
    # Each value begins after one of these marks. Those in strings count too, which no sensible content notices.
    values = sum(data.count(mark) for mark in (b"[", b"{", b","))
    return f"at most {MAX_VALUES:,} values, got {values:,}" if values > MAX_VALUES else None


def _check_depth(content: dict[Any, Any]) -> None:
    level: list[Any] = [content]
    for _ in range(_MAX_DEPTH + 1):
        children = (child for node in level for child in (node.values() if isinstance(node, dict) else node))
        level = [child for child in children if isinstance(child, dict | list | tuple)]
    if level:
        raise ValueError("its JSON is nested too deeply")


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object of JSON, which by default keeps the last of equal keys.

    Raises:
        ValueError: a key occurs twice.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("its JSON has a key twice")
    return found


def _value(pairs: list[tuple[str, Any]], tensor: Callable[[str], Tensor]) -> Any:
    """Return the value that an object of JSON stands for; the values in it are already such values."""
    node = unique_keys(pairs)
    match node:
        case {"dict": list() as items} if len(node) == 1:
            return _items(items)
        case {"tuple": list() as parts} if len(node) == 1:
            return tuple(parts)
        case {"tensor": str() as name} if len(node) == 1:
            try:
                return tensor(name)
            except KeyError:
                raise ValueError(f"its JSON names a tensor {name!r} that is not there") from None
        case {"float": "inf" | "-inf" | "nan" as number} if len(node) == 1:
            return float(number)
        case {"int": str() as number} if len(node) == 1:
            return int(number, 16)
    raise ValueError(f"its JSON has an unknown object {str(node)[:40]}")


def _items(items: list[Any]) -> dict[Any, Any]:
    found = {}
    for item in items:
        if not isinstance(item, list) or len(item) != 2 or type(item[0]) not in (str, int) or item[0] in found:
            raise ValueError(f"its JSON has a malformed dict item, {str(item)[:40]}")
        found[item[0]] = item[1]
    return found


def _key(key: object, path: tuple[object, ...]) -> str | int:
    if isinstance(key, bool) or not isinstance(key, str | int):
        raise TypeError(f"`{place(path)}` must have keys that are str or int, got a {type(key).__name__}")
    return key


def place(path: tuple[object, ...]) -> str:
    """Return a path in the tree as a Python expression."""
    return "content" + "".join(f"[{key!r}]" for key in path)
