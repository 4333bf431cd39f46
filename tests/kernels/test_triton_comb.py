"""The comb by Triton's kernel falls on the classes of the eager comb, and marks them with the same log κ."""

import pickle

import pytest
import torch

from manyclass.kernels import implementation
from manyclass.samplers import Learned, Systematic
from manyclass.samplers._comb import Comb

pytest.importorskip("triton")

from manyclass.kernels.triton import comb as kernel

pytestmark = [
    pytest.mark.usefixtures("interpreted"),
    # Triton's interpreter computes masked lanes too, by NumPy, which warns about infinities.
    pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning", "ignore:invalid value:RuntimeWarning"),
]


def weights_of(case, num_classes):
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(num_classes, dtype=torch.float64, generator=generator) + 0.01
    if case == "zero mass":
        weights[::3] = 0.0
    elif case == "certain":
        weights[5], weights[num_classes // 2] = 1e4, 1e5
    elif case == "uneven":
        weights = weights.pow(12)
    return weights


def draws(comb, groups=1, *, stratified=False):
    """Return the blocks of the eager comb and of the kernel, from the same random numbers."""
    found = []
    for impl in ("eager", "triton"):
        with implementation(impl):
            generator = torch.Generator().manual_seed(3)
            found.append(comb.draw(groups, stratified=stratified, generator=generator))
    return found


def check_equal(eager, ours):
    assert len(eager) == len(ours)
    for expected, block in zip(eager, ours, strict=True):
        assert torch.equal(block.ids, expected.ids)
        torch.testing.assert_close(block.log_kappa, expected.log_kappa, rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("stratified", [False, True])
@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("case", ["plain", "zero mass", "certain", "uneven"])
def test_a_comb_has_the_classes_of_the_eager_one(case, ordered, groups, stratified):
    weights = weights_of(case, 3000)
    order = torch.randperm(3000, generator=torch.Generator().manual_seed(1)) if ordered else None
    comb = Comb.of(weights, 150, order=order)
    assert (len(comb.certain) > 0) == (case == "certain")
    check_equal(*draws(comb, groups, stratified=stratified))


@pytest.mark.parametrize("certain", [0, 2])
@pytest.mark.parametrize("k", [3, kernel.TEETH - 1, kernel.TEETH, kernel.TEETH + 1, 2 * kernel.TEETH])
def test_any_number_of_teeth_fills_its_slots(k, certain):
    comb = Comb.of(weights_of("certain" if certain else "plain", 1000), k)
    assert comb.teeth == k - certain
    for groups in (1, 2):
        check_equal(*draws(comb, groups))


# 64 classes make a stretch of the table.
@pytest.mark.parametrize("num_classes", [1, 2, 64, 65])
def test_few_classes_are_found(num_classes):
    for k in {1, num_classes}:
        check_equal(*draws(Comb.of(torch.ones(num_classes, dtype=torch.float64), k)))


def test_a_comb_without_teeth_has_its_certain_classes_alone():
    weights = torch.zeros(9, dtype=torch.float64)
    weights[4] = 2.0
    comb = Comb.of(weights, 1)
    assert comb.teeth == 0
    for groups in (1, 2):
        check_equal(*draws(comb, groups))


def test_a_tooth_at_the_end_of_the_line_finds_the_last_class(monkeypatch):
    """The largest offset below 1 may be rounded to the end."""
    comb = Comb.of(weights_of("plain", 777), 50)
    last = torch.full((1, 1), 1 - 2**-53, dtype=torch.float64)
    monkeypatch.setattr(torch, "rand", lambda *_, **__: last.clone())
    eager, ours = draws(comb)
    check_equal(eager, ours)
    assert int(ours[0].ids.max()) == 776


@pytest.mark.parametrize("make", [Systematic, Learned])
def test_samplers_draw_by_the_kernel_if_the_head_has_chosen_it(monkeypatch, make):
    launched = []
    run = kernel.comb
    monkeypatch.setattr(kernel, "comb", lambda *given: launched.append(given) or run(*given))
    sampler, target = make(torch.ones(500), 20), torch.tensor([3, 7])
    drawn = []
    for impl, expected in (("eager", 0), ("triton", 1), ("auto", 2)):
        with implementation(impl):
            drawn.append(sampler(target, generator=torch.Generator().manual_seed(0)))
        assert len(launched) == expected
    assert torch.equal(drawn[0].ids(), drawn[1].ids())
    assert torch.equal(drawn[0].ids(), drawn[2].ids())


def test_a_sampler_that_drew_by_the_kernel_can_be_loaded_without_triton():
    sampler = Systematic(torch.ones(500), 20)
    with implementation("triton"):
        sampler(torch.tensor([3]))
    assert b"manyclass.kernels.triton" not in pickle.dumps(sampler)
