"""Trees of plain data with one value replaced by a wrong one."""

import copy
import json
import random
from typing import Any

import torch

from manyclass.tasks.manifest import with_digest

_STRANGE: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    10**30,
    1e308,
    float("nan"),
    float("-inf"),
    "",
    "x",
    "\ud800",
    "../../etc/passwd",
    [],
    {},
    [[1]],
    {"a": {"b": 1}},
)
_TENSORS = (
    lambda: torch.empty(0),
    lambda: torch.zeros(3, 2, dtype=torch.complex64),
    lambda: torch.full((5,), -1),
    lambda: torch.tensor(float("nan")),
    lambda: torch.zeros(2, dtype=torch.bool),
)


def tampered(content: dict[str, Any], draw: random.Random, *, tensors: bool = True) -> tuple[str, dict[str, Any]]:
    """Return the change made and the tree with one place changed."""
    content = copy.deepcopy(content)
    path = draw.choice(list(_places(content)))
    *keys, last = path
    parent: Any = content
    for key in keys:
        parent = parent[key]
    value = parent[last] if not isinstance(parent, tuple) else None
    chance = draw.random()
    where = "".join(f"[{key!r}]" for key in path)
    if isinstance(parent, tuple):
        # A tuple cannot be changed in place, so another place is drawn.
        return tampered(content, draw, tensors=tensors)
    if chance < 0.15 and isinstance(parent, dict):
        del parent[last]
        return f"without {where}", content
    if isinstance(value, torch.Tensor) and chance < 0.6:
        parent[last] = _other(value, draw)
    else:
        parent[last] = draw.choice([*_STRANGE, *(make() for make in _TENSORS if tensors)])
    return f"{where} is {str(parent[last])[:40]!r}", content


def tampered_json(data: bytes, draw: random.Random) -> tuple[str, bytes]:
    """Return the change made and the JSON file of a training with one place changed and the right digest."""
    what, content = tampered(json.loads(data), draw, tensors=False)
    return what, json.dumps(with_digest(content)).encode()


def _other(value: torch.Tensor, draw: random.Random) -> torch.Tensor:
    """Return the tensor with another shape, dtype or values."""
    choices = [
        value.reshape(-1),
        value.unsqueeze(0),
        value[:-1] if value.dim() and len(value) else value.new_empty(2),
        value.to(torch.float64 if value.dtype != torch.float64 else torch.int16),
        torch.zeros_like(value),
        value.roll(1) if value.numel() else value.new_ones(3),
        -value if value.dtype not in (torch.uint8, torch.bool) else value + 1,
        torch.full_like(value, float("nan")) if value.is_floating_point() else torch.full_like(value, 127),
    ]
    return draw.choice(choices)


def _places(node: Any, path: tuple[Any, ...] = ()) -> Any:
    """Yield the paths to all values of a tree."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list | tuple) else ()
    for key, value in items:
        yield (*path, key)
        yield from _places(value, (*path, key))
