"""The exact cross entropy over all classes, by several interchangeable ways, and the choice among them.

Every way returns the same losses [B] and gradients, up to rounding; `eager` is the reference.

- `closed_form` keeps the probabilities [B, C] of the forward pass;
- `chunked` computes them again in the backward pass, a run of classes at a time, in bounded memory;
- `eager` is F.linear and F.cross_entropy: the only one that torch.compile and torch.func can trace;
- `linear_cross_entropy` is torch's own, in chunks of examples, where torch has it;
- `liger` is Liger's kernel for the loss of given scores (its fused linear one has wrong gradients in some releases if
  losses are weighted), `cut` is cut-cross-entropy without its filter: on a GPU, where they are installed. Both
  synchronise with the device.
"""

import functools
import importlib.util
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyclass import _check
from manyclass._context import is_transformed
from manyclass.kernels.all_classes import closed_form_cross_entropy, product_dtype
from manyclass.kernels.eager import eager_cross_entropy, mask_columns

MAX_KEPT_SCORES = {"cpu": 1 << 26, "cuda": 1 << 28}  # of the closed form, where a way is chosen without measurement

_FULL = (torch.float32, torch.float64)
_HALF = (torch.float16, torch.bfloat16)


def exact_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    *,
    target: Tensor,
    bias: Tensor | None = None,
    exclude: Tensor | None = None,
    way: str | None = None,
) -> Tensor:
    """Return the cross entropy [B] over all classes that are not excluded, in float32 or better.

    Under autocast products are computed in its dtype, their sums in float32.

    Args:
        hidden: [B, D].
        weight: the table [C, D].
        target: int64 [B], none of them excluded.
        bias: [C], or None.
        exclude: int64 [B, E], padded with -1, or None.
        way: one of `available_ways` for these operands. None: the one of `default_way`, which depends on shapes, dtypes
            and the device alone. What torch.compile and torch.func trace is "eager" in any case.

    Raises:
        ValueError: the way does not exist, or does not support these operands.

    Example:
        >>> hidden, weight, target = torch.randn(2, 4), torch.randn(9, 4), torch.tensor([3, 8])
        >>> loss = exact_cross_entropy(hidden, weight, target=target)
        >>> torch.allclose(loss, F.cross_entropy(hidden @ weight.T, target, reduction="none"), atol=1e-6)
        True
    """
    if is_transformed():
        way = "eager"
    elif way is None:
        way = default_way(hidden, weight)
    else:
        _check.choice("way", way, available_ways(hidden, weight, exclude=exclude))
    return _WAYS[way](hidden, weight, bias, target, exclude)


def default_way(hidden: Tensor, weight: Tensor) -> str:
    """Return the way for these operands without measurement: the same for the same shapes, dtypes and device."""
    if not _is_plain(hidden, weight):
        return "eager"
    scores = hidden.shape[0] * weight.shape[0]
    return "closed_form" if scores <= MAX_KEPT_SCORES[hidden.device.type] else "chunked"


def available_ways(hidden: Tensor, weight: Tensor, *, exclude: Tensor | None = None) -> tuple[str, ...]:
    """Return the names of the ways that support these operands on this machine."""
    ways = ["eager"]
    if _is_plain(hidden, weight):
        ways += ["closed_form", "chunked"]
        excludes = exclude is not None and exclude.shape[1] > 0
        dtype = product_dtype(hidden)
        full, half = dtype == weight.dtype == hidden.dtype and dtype in _FULL, dtype in _HALF
        # In 16 bits its losses have 16 bits too.
        if full and not excludes and hasattr(F, "linear_cross_entropy"):
            ways.append("linear_cross_entropy")
        if hidden.is_cuda:
            # The same holds for Liger's.
            if dtype == torch.float32 and _is_installed("liger_kernel"):
                ways.append("liger")
            # Its gradients are in 16 bits alone.
            if half and not excludes and _is_installed("cut_cross_entropy"):
                ways.append("cut")
    return tuple(ways)


def is_bounded(way: str) -> bool:
    """Return True if a way needs less memory than the scores [B, C] take."""
    return way in ("chunked", "linear_cross_entropy", "cut")


def _is_plain(*tensors: Tensor) -> bool:
    """Return True if no tensor is of a subclass, and all are on a device that the closed form knows."""
    return all(type(x) in (Tensor, nn.Parameter) and x.device.type in MAX_KEPT_SCORES for x in tensors)


@functools.cache
def _is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, exclude: Tensor | None
) -> Tensor:
    options = nn.LinearCrossEntropyOptions()
    loss: Tensor = F.linear_cross_entropy(hidden, weight, target, linear_bias=bias, reduction="none", options=options)
    return loss


def _liger(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, exclude: Tensor | None) -> Tensor:
    from liger_kernel.transformers.functional import liger_cross_entropy

    scores = F.linear(hidden, weight, bias)
    if exclude is not None and exclude.shape[1]:
        scores = mask_columns(scores, exclude)
    loss: Tensor = liger_cross_entropy(scores, target, reduction="none")
    return loss


def _cut(hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, exclude: Tensor | None) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    dtype = product_dtype(hidden)
    # Gradients are summed over blocks of the batch, in 16 bits unless told otherwise.
    exact = {"filter_eps": None, "accum_e_fp32": True, "accum_c_fp32": True}
    loss: Tensor = linear_cross_entropy(
        hidden.to(dtype), weight.to(dtype), target, bias=bias, reduction="none", impl="cce", **exact
    )
    return loss


# In an order that saved trainings rely on.
EXACT_WAYS = ("eager", "closed_form", "chunked", "linear_cross_entropy", "liger", "cut")
_Way = Callable[[Tensor, Tensor, Tensor | None, Tensor, Tensor | None], Tensor]
_WAYS: dict[str, _Way] = {
    "eager": eager_cross_entropy,
    "closed_form": lambda *operands: closed_form_cross_entropy(*operands, keep=True),
    "chunked": lambda *operands: closed_form_cross_entropy(*operands, keep=False),
    "linear_cross_entropy": _linear_cross_entropy,
    "liger": _liger,
    "cut": _cut,
}
