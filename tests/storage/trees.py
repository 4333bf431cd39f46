"""Content to save, and a comparison of two trees."""

import torch

from manyclass import storage

CONTENT = {
    "table": torch.arange(12.0).reshape(3, 4),
    "names": ["the", "of", "naïve 😀"],
    "groups": [{"params": (0, 1), "lr": 0.1, "fused": None}],
    "state": {0: {"step": torch.tensor(3)}, -7: {"on": True, "off": False}},
}


def saved(folder, content=None, *, content_type="thing"):
    path = folder / "it.safetensors"
    storage.save(path, CONTENT if content is None else content, content_type=content_type)
    return path


def round_trip(folder, content):
    return storage.load(saved(folder, content), content_type="thing")


def difference(one, other, place="content"):
    """Return the first place where two trees differ in a bit or a type; "" if none does."""
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
