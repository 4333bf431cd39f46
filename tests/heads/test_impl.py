"""The implementation of a head's loss."""

import pytest
import torch

from manyclass import ClassHead
from manyclass.optim import RowAdagrad
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


@pytest.fixture
def launched(monkeypatch, interpreted):
    """The kernels that have been launched, by name; values of arguments are not read, as on a GPU."""
    pytest.importorskip("triton")
    from manyclass.kernels.triton import closed_form, comb, rows, targets

    names = []

    def watch(module, name):
        run = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *given, **options: names.append(name) or run(*given, **options))

    watch(comb, "comb")
    watch(targets, "present_targets")
    watch(closed_form, "closed_form_loss")
    watch(rows, "adagrad_")
    monkeypatch.setattr("manyclass._check.reads_values", lambda _: False)
    return names


def train_a_step(impl):
    torch.manual_seed(0)
    head = ClassHead(D, C, sampler=Systematic(torch.ones(C), 40), impl=impl, sparse=True, bias=False)
    optimizer = RowAdagrad(head.parameters(), 0.1, impl=impl)
    head(torch.randn(B, D), torch.randint(C, (B,))).backward()
    optimizer.step()
    return head.weight.detach()


ALL_KERNELS = ["present_targets", "comb", "closed_form_loss", "adagrad_"]


@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning", "ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize(("impl", "expected"), [("auto", ALL_KERNELS), ("eager", []), ("triton", ALL_KERNELS)])
def test_every_part_of_a_step_follows_the_choice(launched, impl, expected):
    train_a_step(impl)
    assert launched == expected
