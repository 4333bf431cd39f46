"""Rounding of rows to bfloat16 at random, so that updates far below a unit in the last place count on average."""

import torch
from torch import Tensor


def round_at_random(rows: Tensor) -> Tensor:
    """Return rows in bfloat16, each number rounded down or up with a mean of the number itself.

    Numbers that bfloat16 holds, infinities and NaN stay as they are. The noise is drawn from torch's global generator
    of the device.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> x = torch.full((100_000,), 1 + 2**-10)
        >>> bool((round_at_random(x).double().mean() - x.double().mean()).abs() < 1e-4)
        True
    """
    bits = rows.float().contiguous().view(torch.int32)
    noise = torch.randint(1 << 16, bits.shape, dtype=torch.int32, device=bits.device)
    # The sixteen bits that bfloat16 lacks carry over with the probability of what they are worth.
    up = ((bits + noise) >> 16) << 16
    return torch.where(rows.isfinite(), up, bits).view(torch.float32).bfloat16()
