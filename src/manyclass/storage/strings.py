"""Millions of strings, packed into two tensors."""

from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from manyclass import _check


def pack_strings(strings: Sequence[str]) -> dict[str, Tensor]:
    """Pack strings into their bytes, uint8 [N], and the end of each, int64 [S]: the saved form of class names.

    Args:
        strings: any strings; lone surrogates are kept.

    Raises:
        TypeError: an element is not a str.

    Example:
        >>> pack_strings(["the", "", "of"])["ends"]
        tensor([3, 3, 5])
        >>> unpack_strings(pack_strings(["the", "", "of"]))
        ['the', '', 'of']
    """
    if isinstance(strings, str):
        raise TypeError("`strings` must be a sequence of str, got a str")
    for position, string in enumerate(strings):
        if not isinstance(string, str):
            raise TypeError(f"`strings` must hold str, got {type(string).__name__} at position {position}")
    encoded = [string.encode("utf-8", "surrogatepass") for string in strings]
    data = bytearray().join(encoded)
    ends = torch.tensor([len(part) for part in encoded], dtype=torch.int64).cumsum(0)
    return {"bytes": torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0).byte(), "ends": ends}


def unpack_strings(packed: Mapping[str, Tensor]) -> list[str]:
    """Return the strings given to `pack_strings`.

    Raises:
        TypeError: an entry is missing or not a tensor.
        ValueError: dtypes, shapes or ends cannot come from `pack_strings`, or the bytes are not UTF-8.
    """
    data, ends = (_check.tensor(f"packed[{name!r}]", packed.get(name)) for name in ("bytes", "ends"))
    if (data.dtype, data.dim(), ends.dtype, ends.dim()) != (torch.uint8, 1, torch.int64, 1):
        got = f"{list(data.shape)} of {data.dtype} and {list(ends.shape)} of {ends.dtype}"
        raise ValueError(f"`packed` must be bytes [N] of uint8 and ends [S] of int64, got {got}")
    begins = torch.nn.functional.pad(ends, (1, 0))
    if bool((begins.diff() < 0).any()) or int(begins[-1]) != len(data):
        raise ValueError(f"`packed` must have ends that rise to the {len(data)} bytes there are, got others")
    whole = data.cpu().numpy().tobytes()
    try:
        return [whole[begin:end].decode("utf-8", "surrogatepass") for begin, end in pairwise(begins.tolist())]
    except UnicodeDecodeError as error:
        raise ValueError(f"`packed` must hold UTF-8, got {error}") from None
