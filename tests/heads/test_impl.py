"""The implementation of a head's loss."""

import pytest
import torch

from manyclass import ClassHead
from manyclass.samplers import Exhaustive, Systematic

C, D, B = 300, 6, 20


@pytest.mark.parametrize("sampler", [Systematic(torch.ones(C), 40), Exhaustive(C)], ids=["draw", "all classes"])
def test_torch_s_operators_give_the_loss_of_the_kernels(sampler):
    losses = []
    for impl in ("auto", "eager"):
        torch.manual_seed(0)
        head = ClassHead(D, C, sampler=sampler, impl=impl)
        hidden, target = torch.randn(B, D), torch.randint(C, (B,))
        losses.append(head(hidden, target, generator=torch.Generator().manual_seed(1)))
    torch.testing.assert_close(*losses)


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")
def test_without_a_gpu_triton_is_refused_by_name():
    head = ClassHead(D, C, sampler=Systematic(torch.ones(C), 40), impl="triton")
    with pytest.raises(ValueError, match="`impl` must be 'auto' or 'eager' on cpu"):
        head(torch.randn(B, D), torch.randint(C, (B,)))


def test_a_head_pickled_without_an_implementation_works():
    head = ClassHead(D, C, sampler=Systematic(torch.ones(C), 40))
    del head.__dict__["impl"]
    assert head(torch.randn(B, D), torch.randint(C, (B,))).isfinite()
