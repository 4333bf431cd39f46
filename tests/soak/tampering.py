"""States and files that are wrong in content and right in form: one place changed, and every digest made again."""

import copy
import hashlib
import json
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from manyclass import storage
from manyclass.registry import OBJECTIVES, OPTIMIZERS, SAMPLERS
from manyclass.tasks import TASKS
from manyclass.tasks.manifest import with_digest

_NUMBERS: tuple[Any, ...] = (
    -1,
    0,
    1,
    2**31,
    -(2**31) - 1,
    2**62,
    2**63 - 1,
    -(2**63),
    10**18,
    10**30,
    -(10**400),
    0.5,
    -0.0,
    1e-320,
    1e308,
    -1e308,
    float("nan"),
    float("inf"),
    float("-inf"),
)
_STRANGE: tuple[Any, ...] = (
    None,
    True,
    *_NUMBERS,
    "",
    "x",
    "3",
    "\ud800",
    "x\ny\x1b[2J\0",
    "x" * 10**6,
    "../../etc/passwd",
    *TASKS,
    *SAMPLERS,
    *OPTIMIZERS,
    *OBJECTIVES,
    [],
    (),
    {},
    [[1]],
    [0] * 10_000,
    {"a": {"b": 1}},
    {0: 1},
)
_TENSORS = (
    lambda: torch.empty(0),
    lambda: torch.empty(0, 2**62),
    lambda: torch.empty(2**62, 0, dtype=torch.int64),
    lambda: torch.zeros(3, 2, dtype=torch.complex64),
    lambda: torch.full((5,), -1),
    lambda: torch.full((2, 2), 2**62),
    lambda: torch.tensor(float("nan")),
    lambda: torch.tensor(10**18),
    lambda: torch.zeros(2, dtype=torch.bool),
    lambda: torch.zeros(10**6, dtype=torch.uint8),
)
_DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.uint64,
    torch.bool,
    torch.complex64,
)
_ARITHMETIC = (*_DTYPES[:4], *_DTYPES[5:10], torch.bool)
_DEEP = 90  # levels; a tree may have 100
_JSON_NUMBERS = (b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"1e-999", b"-0", b'"3"', b"9" * 400)
_JSON_TOKEN = re.compile(rb"-?\d+(?:\.\d+)?(?:e-?\d+)?|true|false|null")
_DIGEST = re.compile(rb'\\"digest\\":\\"([0-9a-f]{64})\\"')


def tampered(content: dict[str, Any], draw: random.Random, *, tensors: bool = True) -> tuple[str, dict[str, Any]]:
    """Return the change made and the tree with one place changed, or in a third of the cases two or three.

    States packed into a tensor are changed inside. No key is known here, so any state dict can be changed.
    """
    content = _opened(copy.deepcopy(content))
    changes = []
    for _ in range(draw.choice((1, 1, 1, 1, 2, 3))):
        changes.append(_change(content, draw, tensors=tensors))
    return "; ".join(changes), _closed(content)


def tampered_json(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    """Return the change made and the JSON file of a training with one place changed and the right digest."""
    if draw.random() < 0.2:
        what, text = _other_text(data, draw)
        try:
            # Digits may be too many for an int, and words may stand where no number may.
            return what, json.dumps(with_digest(json.loads(text))).encode()
        except (ValueError, RecursionError):
            return what, text
    what, content = tampered(json.loads(data), draw, tensors=False)
    return what, json.dumps(with_digest(_plain(content))).encode()


def tampered_file(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    """Return the change made and a saved file whose header or JSON says something that `storage.save` never writes."""
    length = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    names = [name for name in header if name != "__metadata__"]
    begin, end = header["content.json"]["data_offsets"]
    if draw.random() < 0.6:
        # The tree is the last tensor or not; tensors behind it move.
        what, text = _other_text(body[begin:end], draw)
        body = body[:begin] + text + body[end:]
        more = len(text) - (end - begin)
        for name in names:
            entry = header[name]
            entry["data_offsets"] = [x + more if x >= end else x for x in entry["data_offsets"]]
        header["content.json"] |= {"shape": [len(text)], "data_offsets": [begin, end + more]}
    else:
        what = _other_header(header, draw.choice(names), draw)
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "surrogatepass")
    return what, resealed(len(text).to_bytes(8, "little") + text + body)


def resealed(data: bytes) -> bytes:
    """Return a saved file, or one changed by hand, with the digest of its bytes."""
    found = _DIGEST.search(data)
    if found is None:
        return data
    begin, end = found.span(1)
    digest = hashlib.sha256(data[:begin] + b"0" * 64 + data[end:]).hexdigest()
    return data[:begin] + digest.encode() + data[end:]


def _other_text(text: bytes, draw: random.Random) -> tuple[str, bytes]:
    """Return JSON with a number or word replaced, wrapped or repeated, or a part nested deeply."""
    token = draw.choice(list(_JSON_TOKEN.finditer(text)))
    old = token.group()
    deep = draw.choice((50, 101, 1000, 100_000))
    new = draw.choice(
        [
            *_JSON_NUMBERS,
            b"[" + old + b"]",
            b"[" * deep + old + b"]" * deep,
            b'{"dict":[["a",' * deep + old + b"]]}" * deep,
            b'{"tuple":[' + old + b"]}",
            b'{"float":"nan"}',
            b'{"int":"0x' + b"f" * 10_000 + b'"}',
            b'{"tensor":"content.json"}',
            b'{"tensor":"gone"}',
            old + b"," + old,
            b"",
        ]
    )
    what = f"JSON {old[:20]!r} at {token.start()} is {new[:30]!r}"
    return what, text[: token.start()] + new + text[token.end() :]


def _other_header(header: dict[str, Any], name: str, draw: random.Random) -> str:
    """Change the entry of a tensor in a header, and return the change."""
    entry = header[name]
    others = [other for other in header if other not in ("__metadata__", name)]
    changes: list[Callable[[], object]] = [
        lambda: entry.update(dtype=draw.choice(("F64", "I64", "U8", "BOOL", "C64", "F8_E4M3", "F128"))),
        lambda: entry.update(shape=[*entry["shape"], 1]),
        lambda: entry.update(shape=entry["shape"][::-1]),
        lambda: entry.update(shape=[]),
        lambda: entry.update(shape=[2**62, 4], data_offsets=[0, 0]),
        lambda: entry.update(shape=[0, 2**62], data_offsets=[entry["data_offsets"][0]] * 2),
        lambda: entry.update(shape=[1] * 10_000 + entry["shape"]),
        lambda: entry.update(data_offsets=entry["data_offsets"][::-1]),
        lambda: entry.update(data_offsets=[0, 2**63]),
        lambda: header.pop(name),
        lambda: header.update({f"{name}x": header.pop(name)}),
        lambda: header.update({"x" * 10**6: {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}),
    ]
    if others:
        other = draw.choice(others)
        changes.append(lambda: header.update({name: header[other], other: entry}))
    number = draw.randrange(len(changes))
    changes[number]()
    return f"header of {name}, change {number}: {str(header.get(name))[:80]}"


class _Packed(dict[str, Any]):
    """The content of a tensor of `storage.to_tensor`."""


def _opened(node: Any) -> Any:
    """Replace packed tensors by their content, and tuples by lists that remember it."""
    if isinstance(node, dict):
        return {key: _opened(value) for key, value in node.items()}
    if isinstance(node, list | tuple):
        return type(node)(_opened(value) for value in node)
    if isinstance(node, Tensor) and node.dtype == torch.uint8 and node.dim() == 1:
        try:
            return _Packed(_opened(storage.from_tensor(node)))
        except ValueError:
            return node
    return node


def _closed(node: Any) -> Any:
    if isinstance(node, dict):
        content = {key: _closed(value) for key, value in node.items()}
        return storage.to_tensor(content) if isinstance(node, _Packed) else content
    if isinstance(node, list | tuple):
        return type(node)(_closed(value) for value in node)
    return node


def _plain(node: Any) -> Any:
    """Return a tree that `json.dumps` takes."""
    if isinstance(node, dict):
        return {str(key): _plain(value) for key, value in node.items()}
    return [_plain(value) for value in node] if isinstance(node, list | tuple) else node


def _change(content: dict[str, Any], draw: random.Random, *, tensors: bool) -> str:
    """Change one place of a tree, or all tensors of one length, and return the change."""
    if draw.random() < 0.08 and (what := _change_length(content, draw)):
        return what
    path = _place(content, draw)
    parent = _at(content, path[:-1])
    last, where = path[-1], "".join(f"[{key!r}]" for key in path)
    value = parent[last]
    chance = draw.random()
    if isinstance(parent, dict) and chance < 0.08:
        del parent[last]
        return f"without {where}"
    if isinstance(parent, dict) and chance < 0.12:
        name = draw.choice(("", "x", 0, -1, 10**30, f"{last}x", "\ud800"))
        parent[name] = parent.pop(last) if draw.random() < 0.5 else value
        return f"{where} is also, or only, {name!r}"
    if chance < 0.18 and len(parent) > 1:
        other = draw.choice([key for key in _keys(parent) if key != last])
        parent[last], parent[other] = parent[other], parent[last]
        return f"{where} is swapped with {other!r}"
    if chance < 0.2:
        for _ in range(draw.choice((3, _DEEP))):
            value = draw.choice(([value], {"a": value}))
        parent[last] = value
        return f"{where} is nested deeply"
    if chance < 0.26:
        place = _place(content, draw)
        parent[last] = copy.deepcopy(_at(content, place))
        return f"{where} is the value of {place}"
    if chance < 0.34:
        parent[last] = draw.choice([*_STRANGE, *(make() for make in _TENSORS if tensors)])
    else:
        parent[last] = _other(value, draw, tensors=tensors)
    return f"{where} is {_short(parent[last])}"


def _change_length(content: dict[str, Any], draw: random.Random) -> str:
    """Give all tensors of one length another length, which fit each other then, and return the change."""
    found = [(path, value) for path in _places(content) if isinstance(value := _at(content, path), Tensor)]
    lengths = sorted({len(value) for _, value in found if value.dim() and value.numel()})
    if not lengths:
        return ""
    old = draw.choice(lengths)
    new = draw.choice((0, 1, old - 1, old + 1, old + 30, 3 * old))
    for path, value in found:
        if value.dim() and value.numel() and len(value) == old:
            _at(content, path[:-1])[path[-1]] = value.repeat(-(-new // old), *[1] * (value.dim() - 1))[:new]
    return f"all tensors of length {old} are of length {new}"


def _at(content: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        content = content[key]
    return content


def _place(content: dict[str, Any], draw: random.Random) -> tuple[Any, ...]:
    """Return the path to a random place: any, one in a packed state, or one found from key to key, in equal shares.

    Any place would mostly be one of a long list, and from key to key a deep one is seldom reached.
    """
    chance = draw.random()
    if chance < 2 / 3:
        places = list(_places(content))
        packed = [path for path in places if any(isinstance(_at(content, path[:n]), _Packed) for n in range(len(path)))]
        return draw.choice(packed if packed and chance < 1 / 3 else places)
    path: list[Any] = []
    node: Any = content
    while _keys(node) and (not path or draw.random() < 0.95):
        path.append(draw.choice(_keys(node)))
        node = node[path[-1]]
    return tuple(path)


def _keys(node: Any) -> list[Any]:
    if isinstance(node, dict):
        return list(node)
    return list(range(len(node))) if isinstance(node, list) else []


def _places(node: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the paths to all values of a tree that can be replaced: a tuple is replaced as a whole."""
    for key in _keys(node):
        yield (*path, key)
        yield from _places(node[key], (*path, key))


def _other(value: Any, draw: random.Random, *, tensors: bool) -> Any:
    """Return a value that looks like this one: another number for a number, another shape for a tensor."""
    if isinstance(value, Tensor):
        # Torch has hardly any arithmetic for the dtypes that a first change may have left.
        rare = value.dtype not in _ARITHMETIC
        common = () if rare else (_other_values, _other_values, _other_ids, _other_ids)
        return draw.choice((*common, _other_shape, _other_dtype))(value, draw)
    if isinstance(value, bool) or value is None:
        return draw.choice(_STRANGE)
    if isinstance(value, int | float):
        near = [value + 1, value - 1, -value, 2 * value, float(value), str(value)] if abs(value) < 1e300 else []
        return draw.choice([*_NUMBERS, *near])
    if isinstance(value, str):
        return draw.choice([x for x in _STRANGE if isinstance(x, str)] + [value + "x", value[:-1], value.upper()])
    if isinstance(value, tuple):
        return tuple(_other(list(value), draw, tensors=tensors))
    if isinstance(value, list):
        return draw.choice((value[:-1], value * 2, value[::-1], [*value, value], value[1:] + value[:1], value * 300))
    return draw.choice([*_STRANGE, *(make() for make in _TENSORS if tensors)])


def _other_values(value: Tensor, draw: random.Random) -> Tensor:
    """Return the tensor with some or all of its values changed."""
    if not value.numel():
        return value.new_ones(3)
    changed = value.clone().contiguous()
    flat = changed.view(-1)
    at = [draw.randrange(len(flat)) for _ in range(draw.choice((1, 1, 3, len(flat))))]
    numbers = _numbers(value.dtype)
    kind = draw.choice(("number", "number", "one number", "number everywhere", "step", "bits", "order", "sign"))
    if kind == "number everywhere":
        flat.copy_(torch.full_like(flat, draw.choice(numbers)))
    elif kind == "bits":
        raw = flat.view(torch.uint8)
        for _ in at:
            raw[draw.randrange(len(raw))] ^= 1 << draw.randrange(8)
    elif kind == "order":
        flat.copy_(flat[torch.randperm(len(flat), generator=torch.Generator().manual_seed(draw.randrange(2**31)))])
    elif kind == "sign" and value.dtype.is_signed:
        flat.copy_(-flat)
    elif kind == "step" and not (value.dtype in (torch.bool, torch.uint16, torch.uint64) or value.is_complex()):
        flat[at] = flat[at] + draw.choice((-1, 1))
    else:
        same = draw.choice(numbers)
        flat[at] = torch.tensor([same if kind == "one number" else draw.choice(numbers) for _ in at], dtype=value.dtype)
    return changed


def _numbers(dtype: torch.dtype) -> list[Any]:
    if dtype == torch.bool:
        return [False, True]
    if dtype.is_floating_point or dtype.is_complex:
        # An int64 may hold the bits of a float, and the other way round.
        info = torch.finfo(dtype)
        return [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, -1.0, 1.0, info.max, info.min, info.tiny, 1e-3]
    info = torch.iinfo(dtype)
    near = [x for x in (-2, -1, 0, 1, 2, 89, 90, 91, 1000, 2**20) if info.min <= x <= info.max]
    bits = [0x7FF8000000000000, 0x7FF0000000000000, 0x3FF0000000000000] if dtype == torch.int64 else []
    return [info.min, info.max, info.max // 2, *near, *bits]


def _other_shape(value: Tensor, draw: random.Random) -> Tensor:
    size = len(value) if value.dim() else 0
    shapes = [
        value.unsqueeze(0),
        value.unsqueeze(-1),
        value.new_empty(0),
        value.new_empty(0, 2**62),
        value.new_empty(2**40, 0),
        value.new_zeros(()),
    ]
    if value.numel():
        shapes += [value.reshape(-1), value.reshape(-1)[:1].reshape(()), value.new_zeros((*value.shape, 2))]
    if size and value.numel():
        shapes += [value[:-1], value[:1], value[:0], torch.cat([value, value]), torch.cat([value, value[:1]])]
    if value.dim() > 1:
        shapes.append(value.mT.contiguous())
    return draw.choice(shapes)


def _other_ids(value: Tensor, draw: random.Random) -> Tensor:
    """Return different ids in ascending order, or numbers that rise from 0: more, fewer or as many as there were."""
    size = value.numel()
    number = draw.choice((0, max(0, size - 1), size, size + 1, size + 30, size + 30, size + 30, 3 * size))
    if value.is_floating_point() or draw.random() < 0.3:
        rising = torch.linspace(0, draw.choice((1.0, 1e9, 1e-9)), number, dtype=torch.float64)
        return rising.to(value.dtype) if value.is_floating_point() else rising.view(torch.int64).to(value.dtype)
    most = draw.choice((number, 2 * number, int(value.max()) + 1 if size and value.dtype != torch.bool else 1))
    most = max(number, min(most, 2**20))
    return torch.tensor(sorted(draw.sample(range(most), number)), dtype=torch.int64).to(value.dtype)


def _other_dtype(value: Tensor, draw: random.Random) -> Tensor:
    dtype = draw.choice([dtype for dtype in _DTYPES if dtype != value.dtype])
    return (value.real.to(torch.float32) if value.is_complex() else value).to(dtype)


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)} {value.reshape(-1)[:4].tolist()}"[:90]
    return repr(value)[:60]
