"""Sizes of grids and tiles.

Triton's own functions of these names also run in kernels, which makes a call from Python slow.
"""


def cdiv(number: int, size: int) -> int:
    """Return the number of tiles of a size that hold a number of elements."""
    return -(-number // size)


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is not below a number of at least 1."""
    return 1 << (number - 1).bit_length()
