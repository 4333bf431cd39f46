"""Samplers, objectives and optimisers by name."""

import inspect

import pytest
import torch

from manyclass import ClassCounts, objectives, samplers
from manyclass.registry import LEARNING_RATES, OBJECTIVES, OPTIMIZERS, SAMPLERS, make_budget, make_sampler


def counts(num_classes=3000):
    return ClassCounts(torch.arange(num_classes).double())


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (None, "Learned"),
        ("learned", "Learned"),
        ("systematic", "Systematic"),
        ("clustered", "Clustered"),
        ("tailored", "Tailored"),
        ("importance", "Importance"),
        ("bernoulli", "Bernoulli"),
        ("exact", "Exhaustive"),
    ],
)
def test_a_name_gives_a_sampler_of_k_classes(name, kind):
    made = make_sampler(name, counts(), k=100)
    assert type(made).__name__ == kind
    assert made.num_classes == 3000
    if kind != "Exhaustive":
        assert made.k == 100
        assert make_sampler(name, counts()).k == 1024


@pytest.mark.parametrize("k", [None, "auto"])
def test_without_a_name_and_a_number_the_sampler_decides(k):
    made = make_sampler(None, counts(), k=k)
    assert (type(made), made.num_classes, made.rmse_log_z) == (samplers.Automatic, 3000, 0.15)
    assert make_sampler(None, counts(), k=k, rmse_log_z=0.3).rmse_log_z == 0.3


def test_every_sampler_name_is_tested():
    assert set(SAMPLERS) == {"learned", "systematic", "clustered", "tailored", "importance", "bernoulli", "exact"}


@pytest.mark.parametrize("name", [None, *SAMPLERS])
def test_few_classes_are_all_scored(name):
    assert isinstance(make_sampler(name, counts(100), k=100), samplers.Exhaustive)
    assert isinstance(make_sampler(name, counts(1024)), samplers.Exhaustive)


@pytest.mark.parametrize("name", ["learned", "systematic", "tailored", "importance", "bernoulli"])
def test_k_auto_gives_a_named_sampler_a_budget(name):
    made = make_sampler(name, counts(), k="auto", rmse_log_z=0.2)
    assert isinstance(made, samplers.Budget)
    assert type(made.sampler) is type(make_sampler(name, counts()))
    assert (made.k, made.rmse_log_z) == (1024, 0.2)


@pytest.mark.parametrize(("name", "k"), [(None, 100), ("learned", 100)])
def test_an_error_is_refused_with_a_number(name, k):
    message = r"`rmse_log_z` must come without `k`, or with `k` 'auto', got 0.2 with k = 100"
    with pytest.raises(ValueError, match=message):
        make_sampler(name, counts(), k=k, rmse_log_z=0.2)


def test_an_error_is_refused_with_a_sampler_of_a_fixed_number():
    message = r"`rmse_log_z` must come with `k` 'auto' if a `sampler` is given, got 0.2 with sampler = 'learned'"
    with pytest.raises(ValueError, match=message):
        make_sampler("learned", counts(), rmse_log_z=0.2)


@pytest.mark.parametrize("name", ["clustered", "exact"])
def test_k_auto_is_refused_for_a_sampler_of_fixed_k(name):
    with pytest.raises(ValueError, match=r"`k` must be a number or None for \w+, whose k is fixed, got 'auto'"):
        make_sampler(name, counts(), k="auto")


def test_the_default_error_of_a_budget_is_that_of_the_default_sampler():
    assert make_budget(samplers.Systematic(counts(), 100)).rmse_log_z == 0.15


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"`sampler` must be .*'learned'.*, got 'magic'"):
        make_sampler("magic", counts())


def test_every_objective_has_a_name():
    kinds = {kind for kind in vars(objectives).values() if inspect.isclass(kind)}
    forms = {objectives.Objective, objectives.LogSumExp, objectives.PairSum}
    assert {type(made()) for made in OBJECTIVES.values()} == kinds - forms
    assert {"likelihood", "noise_contrastive", "black_out"} < set(OBJECTIVES)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_has_a_learning_rate_and_takes_sparse_gradients(name):
    table = torch.nn.Embedding(20, 3, sparse=True)
    before = table.weight.detach().clone()
    optimizer = OPTIMIZERS[name]([table.weight], LEARNING_RATES[name])
    assert optimizer.param_groups[0]["lr"] == LEARNING_RATES[name]
    table(torch.tensor([1, 4])).square().sum().backward()
    optimizer.step()
    changed = (table.weight != before).any(1).nonzero().squeeze(1)
    assert changed.tolist() == [1, 4]
