"""A kernel that rounds numbers by given noise, for tests; it needs names of a module, so it is not in a function."""

import triton
import triton.language as tl

from manyclass.kernels.triton.rows import rounded


@triton.jit
def round_all(x, noise, out, N: tl.constexpr):  # noqa: N803
    place = tl.arange(0, N)
    tl.store(out + place, rounded(tl.load(x + place), tl.load(noise + place)))
