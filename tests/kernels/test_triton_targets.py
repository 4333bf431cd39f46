"""Targets of a batch with ignored examples by Triton's kernel are those by torch's operators."""

import pytest
import torch

from manyclass import ClassHead
from manyclass.heads import examples, flatten_examples
from manyclass.kernels import implementation
from manyclass.samplers import Systematic

pytest.importorskip("triton")

from manyclass.kernels.triton import targets as kernel

pytestmark = pytest.mark.usefixtures("interpreted")

C, D = 50, 4


@pytest.fixture(autouse=True)
def _values_unread(monkeypatch):
    """Read no value of an argument, as on a GPU."""
    monkeypatch.setattr("manyclass._check.reads_values", lambda _: False)


def both(target, dtype=torch.float32, **options):
    hidden = torch.zeros(*target.shape, D, dtype=dtype)
    found = []
    for impl in ("eager", "triton"):
        with implementation(impl):
            found.append(flatten_examples(hidden, target, C, **options))
    return found


@pytest.mark.parametrize("ignored", ["none", "all", "some", "all but the last"])
@pytest.mark.parametrize("batch", [1, 7, kernel.EXAMPLES, 2 * kernel.EXAMPLES + 3])
def test_ignored_targets_are_replaced_and_counted(batch, ignored):
    target = torch.randint(C, (batch,), generator=torch.Generator().manual_seed(0))
    if ignored == "some":
        target[::2] = -100
    elif ignored != "none":
        target[: batch if ignored == "all" else batch - 1] = -100
    eager, ours = both(target)
    assert torch.equal(ours.target, eager.target)
    assert torch.equal(ours.valid, eager.valid)
    share = ours.valid / ours.valid.sum().clamp(min=1)
    torch.testing.assert_close(ours.share, share, rtol=1e-6, atol=0.0)


@pytest.mark.parametrize("ignore_index", [-100, -1, 0, 3, 2**40])
def test_any_index_may_be_ignored(ignore_index):
    target = torch.tensor([3, ignore_index, 0, 7])
    eager, ours = both(target, ignore_index=ignore_index)
    assert torch.equal(ours.target, eager.target)
    assert torch.equal(ours.valid, eager.valid)


def test_targets_may_have_several_dimensions_and_gaps_in_memory():
    target = torch.randint(C, (6, 8), generator=torch.Generator().manual_seed(0))
    target[2, 4] = -100
    for part in (target, target[:, ::2], target.T, target[0, ::3]):
        eager, ours = both(part)
        assert torch.equal(ours.target, eager.target)
        assert torch.equal(ours.valid, eager.valid)
        assert ours.shape == part.shape


def test_other_integers_and_large_batches_go_through_torchs_operators(monkeypatch):
    monkeypatch.setattr(examples, "MAX_TARGETS", 4)
    for target in (torch.arange(5), torch.arange(3, dtype=torch.int32)):
        assert both(target)[1].share is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [0, 3, 9])
def test_reductions_of_a_head_are_those_without_the_kernel(ignored, reduction, dtype):
    torch.manual_seed(0)
    hidden, target = torch.randn(9, D, dtype=dtype), torch.randint(C, (9,))
    target[:ignored] = -100
    losses = []
    for impl in ("eager", "triton"):
        torch.manual_seed(1)
        head = ClassHead(D, C, sampler=Systematic(torch.ones(C), 10), impl=impl, dtype=dtype)
        for weight in (None, torch.arange(9, dtype=dtype)):
            generator = torch.Generator().manual_seed(2)
            losses.append(head(hidden, target, weight=weight, reduction=reduction, generator=generator))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(losses[:2], losses[2:], rtol=tolerance, atol=tolerance)
