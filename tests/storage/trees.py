"""Things to save, and how to see that they came back."""

import torch

from manyclass import storage

CONTENT = {
    "table": torch.arange(12.0).reshape(3, 4),
    "names": ["the", "of", "naïve 😀"],
    "groups": [{"params": (0, 1), "lr": 0.1, "fused": None}],
    "state": {0: {"step": torch.tensor(3)}, -7: {"on": True, "off": False}},
}


def saved(folder, content=None, *, kind="thing"):
    path = folder / "it.safetensors"
    storage.save(path, CONTENT if content is None else content, kind=kind)
    return path


def round_trip(folder, content):
    return storage.load(saved(folder, content), kind="thing")


def difference(one, other, place="content"):
    """Where two trees are not equal, bit for bit and type for type; "" if nowhere."""
    if type(one) is not type(other):
        return place
    if isinstance(one, torch.Tensor):
        return "" if one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other) else place
    if isinstance(one, dict):
        if list(one) != list(other):
            return place
        return next(filter(None, (difference(one[key], other[key], f"{place}[{key!r}]") for key in one)), "")
    if isinstance(one, list | tuple):
        if len(one) != len(other):
            return place
        parts = enumerate(zip(one, other, strict=True))
        return next(filter(None, (difference(*pair, f"{place}[{position}]") for position, pair in parts)), "")
    return "" if one == other or (one != one and other != other) else place


def same(one, other):
    return not difference(one, other)
