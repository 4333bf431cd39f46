"""`top` is exact without an index, and has an error bar with an index and estimated probabilities."""

import pytest
import torch

from manyclass.inference import Index, estimate_log_z, top
from manyclass.samplers import Exhaustive, Systematic
from tests.inference.model import C, D, frequencies, trained


def seed(value=0):
    return torch.Generator().manual_seed(value)


@pytest.fixture(scope="module")
def built():
    pytest.importorskip("faiss")
    head, hidden = trained()
    return head, hidden, Index.build(head, hidden[:200], recall=0.98)


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_without_an_index_it_is_exact(similarity):
    head, hidden = trained(similarity=similarity)
    log_p = head.log_prob(hidden, torch.arange(C)).detach()
    exclude = log_p.topk(2, 1).indices
    found = top(head, hidden, 4, exclude=exclude)
    log_prob, ids = log_p.scatter(1, exclude, -torch.inf).topk(4, 1)
    assert torch.equal(found.ids, ids)
    # Probabilities are normalised over all classes, excluded ones too.
    torch.testing.assert_close(found.log_prob, log_prob)
    assert found.error is None
    assert not found.log_prob.requires_grad
    plain = top(head, hidden, 4, exclude=exclude, probabilities="none")
    assert torch.equal(plain.ids, ids)
    assert (plain.log_prob, plain.error) == (None, None)


def test_too_few_classes_are_padded():
    head, hidden = trained(5, 4, sampler=Exhaustive(5))
    found = top(head, hidden[:2], 4, exclude=torch.tensor([[0, 1, 2], [4, -1, -1]]))
    assert found.ids[0, 2:].tolist() == [-1, -1]
    assert found.log_prob[0, 2:].tolist() == [-torch.inf] * 2
    assert (found.ids[1] >= 0).all()


def test_an_index_gives_exact_estimated_or_no_probabilities(built):
    head, hidden, index = built
    plain = top(head, hidden, 5, index=index, probabilities="none")
    assert (plain.log_prob, plain.error) == (None, None)
    assert torch.equal(plain.ids, index.search(hidden, 5))
    exact = top(head, hidden, 5, index=index)
    assert torch.equal(exact.ids, plain.ids)
    assert exact.error is None
    torch.testing.assert_close(exact.log_prob, head.log_prob(hidden, exact.ids).detach())
    near = top(head, hidden, 5, index=index, probabilities="estimated", generator=seed())
    assert near.error.shape == (len(hidden),)
    assert (near.log_prob.diff(dim=1) <= 0).all()


@pytest.mark.parametrize("draws", [4, 8])
def test_the_interval_covers_the_exact_probability_as_often_as_promised(built, draws):
    head, hidden, index = built
    hidden, generator, held = hidden[200:264], seed(), []
    for _ in range(40):
        found = top(head, hidden, 3, index=index, probabilities="estimated", draws=draws, generator=generator)
        exact = head.log_prob(hidden, found.ids).detach()
        held.append(((found.log_prob - exact).abs() <= found.error.unsqueeze(1)).double().mean())
    assert 0.90 <= torch.stack(held).mean() <= 0.99


def test_excluded_classes_are_explicit_in_z(built):
    head, hidden, index = built
    exclude = head.topk(hidden, 3).ids
    found = top(head, hidden, 5, index=index, exclude=exclude, probabilities="estimated", generator=seed())
    assert not (found.ids.unsqueeze(2) == exclude.unsqueeze(1)).any()
    unrestricted = top(head, hidden, 5, index=index, probabilities="estimated", generator=seed())
    assert float((found.error / unrestricted.error).median()) < 1.1
    exact = head.log_prob(hidden, found.ids).detach()
    assert float(((found.log_prob - exact).abs() <= 3 * found.error.unsqueeze(1)).double().mean()) > 0.97


def test_options_reach_the_estimate(built):
    head, hidden, index = built
    sampler = Systematic(frequencies(), 2000)
    few = top(head, hidden, 2, index=index, probabilities="estimated", generator=seed())
    many = top(head, hidden, 2, index=index, probabilities="estimated", draws=32, sampler=sampler, generator=seed())
    assert float((many.error / few.error).median()) < 0.3
    _, explicit = index.nearest(hidden[:9], 128, probe_factor=8)
    once = top(head, hidden[:9], 2, index=index, probabilities="estimated", generator=seed())
    torch.testing.assert_close(once.error, estimate_log_z(head, hidden[:9], explicit=explicit, generator=seed()).error)


@pytest.mark.parametrize("probabilities", ["exact", "estimated", "none"])
def test_any_shape_and_number_of_examples_is_accepted(built, probabilities):
    head, hidden, index = built
    shaped = top(head, hidden.reshape(2, 200, D), 3, index=index, probabilities=probabilities)
    assert shaped.ids.shape == (2, 200, 3)
    assert shaped.log_prob is None or shaped.log_prob.shape == (2, 200, 3)
    assert shaped.error is None or shaped.error.shape == (2, 200)
    many = top(head, hidden.repeat(6, 1), 3, index=index, probabilities=probabilities)
    assert torch.equal(many.ids, shaped.ids.reshape(-1, 3).repeat(6, 1))
    none = top(head, hidden[:0], 3, index=index, probabilities=probabilities)
    assert none.ids.shape == (0, 3)


def test_invalid_arguments_are_refused(built):
    head, hidden, index = built
    with pytest.raises(ValueError, match=r"`probabilities` must be 'exact' or 'none' without an `index`, got 'estim"):
        top(head, hidden, 3, probabilities="estimated")
    with pytest.raises(ValueError, match=r"`probabilities` must be one of 'exact', 'estimated', 'none', got 'fast'"):
        top(head, hidden, 3, probabilities="fast")
    with pytest.raises(ValueError, match=r"`index` must be of this `head`, got one of another"):
        top(trained()[0], hidden, 3, index=index)
    with pytest.raises(ValueError, match=r"`k` must be in \[1, 3000\], got 3001"):
        top(head, hidden, C + 1)
    with pytest.raises(ValueError, match=r"`exclude` must have shape \[400, 'E'\], got \[3, 1\]"):
        top(head, hidden, 3, exclude=torch.zeros(3, 1, dtype=torch.int64))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_results_as_the_cpu():
    head, hidden = trained()
    on_cpu = top(head, hidden, 5)
    head, hidden = head.cuda(), hidden.cuda()
    on_gpu = top(head, hidden, 5)
    torch.testing.assert_close(on_gpu.log_prob.cpu(), on_cpu.log_prob, rtol=0, atol=1e-4)
    generator = torch.Generator("cuda").manual_seed(0)
    found = estimate_log_z(head, hidden, explicit=head.topk(hidden, 100).ids, generator=generator)
    exact = head.log_z(hidden).detach()
    assert float(((found.log_z - exact).abs() <= 2 * found.error).double().mean()) > 0.9


def test_no_exact_probability_of_an_index_is_above_1(built):
    head, hidden, index = built
    assert (top(head, 100 * hidden, 5, index=index).log_prob <= 0).all()
