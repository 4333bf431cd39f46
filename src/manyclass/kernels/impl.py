"""The names of implementations that users can choose, and the check that Triton's can run."""

from torch import Tensor

from manyclass.kernels import triton

IMPLS = ("auto", "eager", "triton")


def check_triton(tensor: Tensor) -> None:
    """Raise ValueError if Triton's kernels, which the user has chosen, cannot work on a tensor."""
    if not triton.is_available(tensor.detach()):
        raise ValueError(
            f"`impl` must be 'auto' or 'eager' on {tensor.device}, where Triton's kernels cannot run, got 'triton'"
        )
