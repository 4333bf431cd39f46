"""Fast parsing of `index:value index:value …`, many pairs at a time."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_DIGITS = b"0123456789"
_MAX_DIGITS = 18  # any number of 18 digits fits into 63 bits
_CHUNK_NUMBERS = 1 << 18  # numbers whose digits are in memory at once


def pairs(text: bytes, n: int) -> tuple[Array, Array] | None:
    """Return the n indices and the n values, float64, or None if the text needs a careful parser.

    The text without its digits shows that each pair is digits, a colon and a value without spaces.

    Args:
        text: pairs with one space between them.
        n: the number of colons in it.

    Example:
        >>> pairs(b"3:0.5 10:-2", 2)
        (array([ 3., 10.]), array([ 0.5, -2. ]))
        >>> pairs(b"3: 0.5", 1)
    """
    marks = text.translate(None, _DIGITS)
    if not marks.startswith(b":") or not marks.count(b" :") == marks.count(b" ") == n - 1:
        return None
    if text.startswith(b":") or text.endswith(b":") or b" :" in text or b": " in text:
        return None
    if (plain := _plain(text, marks, n)) is not None:
        return plain
    try:
        numbers = np.fromstring(text.replace(b":", b" "), sep=" ")
    except ValueError:
        return None
    return (numbers[0::2], numbers[1::2]) if len(numbers) == 2 * n else None


def _plain(text: bytes, marks: bytes, n: int) -> tuple[Array, Array] | None:
    """Parse values of digits with at most a point and a minus sign, four times as fast; None if there are others."""
    minus, points = marks.count(b"-"), marks.count(b".")
    if text.count(b":-") != minus or len(marks) != 2 * n - 1 + minus + points:
        return None
    if points != marks.count(b":.") + marks.count(b":-."):
        return None
    whole = text.translate(None, b".-") + b" "
    code = np.frombuffer(whole, dtype=np.uint8)
    end = np.flatnonzero((code == ord(":")) | (code == ord(" ")))
    length = np.diff(end, prepend=-1) - 1
    longest = int(length.max())
    if longest > _MAX_DIGITS or length.min() == 0:
        return None
    code = np.frombuffer(b"0" * longest + whole, dtype=np.uint8)
    last = np.lib.stride_tricks.sliding_window_view(code, longest)
    exact = np.float64 if longest <= 15 else np.int64
    powers = exact(10) ** np.arange(longest - 1, -1, -1)
    number = np.empty(2 * n)
    for begin in range(0, 2 * n, _CHUNK_NUMBERS):
        # Take the last digits of each number, with zeros before its first digit.
        part = slice(begin, begin + _CHUNK_NUMBERS)
        digit = last[end[part]] - ord("0")
        digit *= np.arange(longest) >= longest - length[part, None]
        number[part] = digit.astype(exact) @ powers
    index, value = number[0::2], number[1::2]
    code = np.frombuffer(text, dtype=np.uint8)
    end = np.append(np.flatnonzero(code == ord(" ")), len(text))
    if points:
        point = np.flatnonzero(code == ord("."))
        owner = slice(None) if points == n else np.searchsorted(end, point)
        value[owner] /= 10.0 ** (end[owner] - point - 1)
    if minus:
        value[np.searchsorted(end, np.flatnonzero(code == ord("-")))] *= -1
    return index, value
