"""MassTable: every position finds its class, for any distribution of the masses."""

import pytest
import torch

from manyclass.samplers._table import MassTable

DISTRIBUTIONS = {
    "equal": lambda n: torch.ones(n),
    "random": lambda n: torch.rand(n) + 1e-3,
    "very uneven": lambda n: torch.rand(n) ** 20 + 1e-9,
    "Zipf": lambda n: 1 / torch.arange(1, n + 1),
    "Zipf in random order": lambda n: 1 / (torch.randperm(n) + 1.0) ** 1.5,
    "half of them 0": lambda n: (torch.rand(n) > 0.5) * 1.0 + (torch.arange(n) == 0),
    "0 at the start": lambda n: (torch.arange(n) >= n // 2) * 1.0,
    "0 at the end": lambda n: (torch.arange(n) <= n // 2) * 1.0,
    "one has nearly all": lambda n: torch.where(torch.arange(n) == n // 2, 1e9, 1.0),
}


@pytest.mark.parametrize("n", [1, 2, 3, 16, 17, 100, 4000])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS.values(), ids=DISTRIBUTIONS)
def test_every_position_finds_the_class_that_owns_it(distribution, n, kernels):
    torch.manual_seed(n)
    given = distribution(n).double()
    table = MassTable(given)
    mass = table.masses()
    # Rounding changes a mass by at most 2⁻⁵² of the total.
    assert ((mass - given).abs() <= given.sum() * 2.0**-51).all()
    edges = torch.cat([torch.zeros(1, dtype=torch.float64), mass.cumsum(0)])
    assert table.total == edges[-1]
    below = edges.nextafter(torch.zeros(1, dtype=torch.float64))
    position = torch.cat([torch.rand(3000, dtype=torch.float64) * table.total, edges, below])
    ids, found = table.locate(position)
    # The end of the line belongs to the last class that has any mass.
    inside = position.clamp(max=below[-1].item())
    assert (ids == torch.searchsorted(edges, inside, right=True) - 1).all()
    assert (found == table.mass(ids)).all()
    assert (found > 0).all()
    start, end = table.interval(torch.arange(n))
    assert (start[mass > 0] == edges[:-1][mass > 0]).all()
    assert (end[mass > 0] == edges[1:][mass > 0]).all()
    assert (table.mass(torch.arange(n))[mass == 0] == 0).all()


def test_positions_keep_their_shape(kernels):
    ids, mass = MassTable(torch.ones(5, dtype=torch.float64)).locate(torch.full((2, 3), 4.5, dtype=torch.float64))
    assert ids.tolist() == [[4, 4, 4], [4, 4, 4]]
    assert mass.tolist() == [[1, 1, 1], [1, 1, 1]]


def test_a_search_takes_few_steps_under_a_power_law():
    mass = (1 / torch.arange(1, 1_000_001, dtype=torch.float64)) ** 1.1
    assert len(MassTable(mass)._steps) <= 3


def test_a_tiny_mass_is_not_lost(kernels):
    table = MassTable(torch.tensor([1.0, 1e-20, 1.0], dtype=torch.float64))
    start, end = table.interval(torch.arange(3))
    assert (end > start).all()
    assert table.locate(start)[0].tolist() == [0, 1, 2]


def test_a_table_built_from_its_masses_is_the_same():
    torch.manual_seed(0)
    table = MassTable(torch.rand(10_000, dtype=torch.float64) ** 9)
    again = MassTable(table.masses(), order=torch.randperm(10_000))
    assert torch.equal(again.masses(), table.masses())
    assert again.total == table.total


def test_sums_of_masses_do_not_depend_on_how_classes_are_split():
    torch.manual_seed(0)
    mass = MassTable(torch.rand(100_000, dtype=torch.float64) ** 9).masses()
    total = mass.sum()
    for parts in (3, 7, 64):
        assert sum(part.sum() for part in mass[torch.randperm(len(mass))].chunk(parts)) == total


@pytest.mark.parametrize("total", [1e-300, 1e305])
def test_a_total_out_of_range_is_an_error(total):
    with pytest.raises(ValueError, match="`weights` must have a sum between 1e-280 and 1e"):
        MassTable(torch.full((3,), total, dtype=torch.float64))


def test_a_table_without_mass_locates_no_positions(kernels):
    table = MassTable(torch.zeros(3, dtype=torch.float64))
    ids, mass = table.locate(torch.empty(0, dtype=torch.float64))
    assert len(ids) == len(mass) == 0
    assert table.mass(torch.arange(3)).tolist() == [0, 0, 0]
