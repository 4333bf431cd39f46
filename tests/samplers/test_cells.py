"""Cells: each example probes the most probable ones, and draws stay unbiased however poor they are."""

import itertools
import math
from unittest.mock import patch

import pytest
import torch

from manyclass import ClassCounts, ClassHead, diagnose
from manyclass.kernels import cpu
from manyclass.samplers import Systematic, Tailored, WithExplicit, _halving
from manyclass.samplers import _cells as cells_module
from manyclass.samplers._cell_search import CellSearch, _largest
from manyclass.samplers._cells import CLASSES_PER_CELL, Cells, cell_bounds, num_cells

C, D, B = 37, 4, 5
COUNTS = torch.rand(C, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.05
TARGET = torch.tensor([1, 3, 0, 3, 36])
EXCLUDE = torch.tensor([[1, -1], [3, 4], [0, -1], [3, 3], [36, 0]])


def rows(num_classes=C, seed=0, groups=7):
    """Return class vectors near a few centres, and biases."""
    generator = torch.Generator().manual_seed(seed)
    centres = 2 * torch.randn(groups, D, generator=generator)
    vectors = centres[torch.arange(num_classes) % groups] + 0.3 * torch.randn(num_classes, D, generator=generator)
    return vectors, 0.5 * torch.randn(num_classes, generator=generator)


def queries(number=B, seed=1):
    return torch.randn(number, D, generator=torch.Generator().manual_seed(seed))


def innermost(sampler):
    return innermost(sampler.sampler) if isinstance(sampler, WithExplicit) else sampler


def sums(sampler, hidden, g):
    """Return the expectation of Σ κ g [B], over all outcomes of the random offsets."""
    inner = innermost(sampler)
    weight, bias = inner._vectors()
    found = inner.search.find(hidden, weight, bias, -(-B // (inner.group_size or B)), inner.nearest)
    pi, table = inner.parts.inclusion(found), inner.parts.comb.table
    others = table.masses().cumsum(0) / max(table.total, 1e-9)
    line = pi.sum(1, keepdim=True) + inner.parts.teeth_of_others(pi) * others
    # The classes that are drawn change where a tooth passes the end of a class, in either part.
    ends = torch.cat([pi.cumsum(1), line], 1).flatten() % 1
    total = torch.zeros(B, dtype=torch.float64)
    for low, high in itertools.pairwise(sorted({0.0, 1.0, *ends.tolist()})):

        def uniform(*size, dtype, value=(low + high) / 2, **_):
            return torch.full(size, value, dtype=dtype)

        with patch("torch.rand", uniform):
            candidates = sampler(TARGET, hidden=hidden, exclude=EXCLUDE)
        kappa = candidates.log_kappa().exp().masked_fill(candidates.empty(), 0.0)
        total += (high - low) * (kappa * g[candidates.ids()]).sum(1)
    return total


def check_unbiased(sampler, hidden):
    # A first draw makes the cells.
    sampler(TARGET, hidden=hidden, exclude=EXCLUDE)
    g = torch.randn(C, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    kept = torch.ones(B, C + 1, dtype=torch.float64).scatter_(1, EXCLUDE % (C + 1), 0.0)[:, :C]
    torch.testing.assert_close(sums(sampler, hidden, g), kept @ g, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("nearest", [0, 3])
@pytest.mark.parametrize("group_size", [None, 1, 2])
@pytest.mark.parametrize(("k", "probes"), [(2, 1), (9, 2), (12, 8), (C, 1)])
def test_sums_over_all_outcomes_are_unbiased(k, probes, group_size, nearest):
    sampler = Tailored(COUNTS, k, group_size=group_size, nearest=nearest, probes=probes)
    sampler.attach(*rows())
    check_unbiased(sampler, queries())


@pytest.mark.parametrize("explicit", ["batch", torch.tensor([4, 6, 30])])
def test_sums_are_unbiased_beside_an_explicit_set(explicit):
    sampler = WithExplicit(Tailored(COUNTS, 8, group_size=2, probes=2), explicit)
    sampler.attach(*rows())
    check_unbiased(sampler, queries())


@pytest.mark.parametrize("cells", ["stale", "random", "by id"])
def test_sums_are_unbiased_with_any_cells(cells):
    sampler = Tailored(COUNTS, 9, group_size=2, probes=2)
    vectors, bias = rows()
    sampler.attach(vectors, bias)
    sampler(TARGET, hidden=queries())
    if cells == "stale":
        vectors.copy_(rows(seed=5)[0])
    elif cells == "random":
        order = torch.randperm(C, generator=torch.Generator().manual_seed(3)).int()
        number = num_cells(C)
        sampler.search.cells = Cells(order, queries(number, seed=4), torch.zeros(number))
    else:
        sampler.search.cells = Cells.by_id(C, D, torch.device("cpu"))
    check_unbiased(sampler, queries())


@pytest.mark.parametrize("nearest", [0, 2])
def test_targets_know_their_inclusion_probability(nearest):
    sampler = Tailored(COUNTS, 9, group_size=2, probes=2, nearest=nearest)
    sampler.attach(*rows())
    hidden, generator, draws = queries(), torch.Generator().manual_seed(0), 600
    count = torch.zeros(B)
    for _ in range(draws):
        candidates = sampler(TARGET, hidden=hidden, generator=generator)
        count += ((candidates.ids() == TARGET.unsqueeze(1)) & ~candidates.empty()).sum(1)
    expected = (-candidates.target_log_kappa()).exp().float()
    assert (expected < 1).any()
    torch.testing.assert_close(count / draws, expected, atol=0.1, rtol=0)


@pytest.mark.parametrize("number", [1, 2, 8, 9, C, 500])
def test_cells_hold_every_class_once(number):
    cells = Cells.of(*rows(number), torch.eye(D))
    members = cells.members(torch.arange(cells.number))
    assert members.shape == (cells.number, cells.capacity)
    assert cells.capacity <= CLASSES_PER_CELL
    assert sorted(members[members >= 0].tolist()) == list(range(number))


def test_cells_are_the_same_for_the_same_vectors_and_as_good_in_any_chunks(monkeypatch):
    vectors, bias = rows(4000)
    whole = Cells.of(vectors, bias, torch.eye(D))
    assert torch.equal(whole.order, Cells.of(vectors.clone(), bias, torch.eye(D)).order)
    monkeypatch.setattr(_halving, "ROWS_AT_ONCE", 100)
    parts = Cells.of(vectors, bias, torch.eye(D))
    assert sorted(parts.order.tolist()) == list(range(4000))
    cell = torch.arange(4000) * whole.number // 4000
    errors = [(vectors[x.order.long()] - x.centroids[cell]).square().sum().item() for x in (parts, whole)]
    assert errors[0] == pytest.approx(errors[1], rel=0.03)


def test_runs_that_fit_into_the_cache_are_halved_together(monkeypatch):
    calls = []
    halved = _halving._halved
    monkeypatch.setattr(_halving, "_halved", lambda *operands: calls.append(1) or halved(*operands))
    monkeypatch.setattr(_halving, "ROWS_AT_ONCE", 500)
    vectors, bias = rows(4000)
    Cells.of(vectors, bias, torch.eye(D))
    # Three levels of all 512 cells, then six in each of eight runs.
    assert len(calls) == 3 + 8 * 6


def test_a_search_in_parts_finds_the_same(monkeypatch):
    vectors, bias = rows(3000, groups=50)
    hidden, cells = queries(20), Cells.of(vectors, bias, torch.eye(D))
    monkeypatch.setattr(cpu, "can_probe", lambda *operands: False)
    whole = cells.search(hidden, vectors, bias, 6)
    monkeypatch.setattr("manyclass.samplers._cells.MAX_GATHERED", 7 * 512 * D)
    for part, expected in zip(cells.search(hidden, vectors, bias, 6), whole, strict=True):
        torch.testing.assert_close(part, expected)


def test_cells_hold_classes_of_similar_scores():
    vectors, bias = rows(2000, groups=100)
    hidden = queries(64)
    spread = []
    for cells in (Cells.of(vectors, bias, torch.eye(D)), Cells.by_id(2000, D, torch.device("cpu"))):
        label = torch.empty(2000, dtype=torch.int64)
        label[cells.order.long()] = torch.arange(2000) * cells.number // 2000
        scores = hidden @ vectors.T + bias
        mean = torch.zeros(64, cells.number).index_add_(1, label, scores) / torch.bincount(label)
        spread.append((scores - mean[:, label]).square().mean())
    assert spread[0] < 0.1 * spread[1]


def test_directions_without_energy_do_not_shape_the_cells():
    generator = torch.Generator().manual_seed(0)
    vectors = torch.randn(1000, 2, generator=generator) * torch.tensor([1.0, 10.0])
    moment = torch.diag(torch.tensor([1.0, 0.0]))
    cells = Cells.of(vectors, None, moment)
    spread = vectors[cells.order.long(), 0].reshape(-1, 8)[:100].std(1).mean()
    assert spread < 0.3


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("number", [C, 3000])
def test_the_compiled_search_finds_the_same_as_the_eager_one(number, bias):
    vectors, biases = rows(number, groups=50)
    biases = biases if bias else None
    hidden, cells = queries(20), Cells.of(vectors, biases, torch.eye(D))
    if not cpu.can_probe(hidden, vectors, biases, cells.order):
        pytest.skip("there is no C++ compiler")
    found, log_p = cells.search(hidden, vectors, biases, 6)
    with patch.object(cpu, "can_probe", return_value=False):
        expected, expected_log_p = cells.search(hidden, vectors, biases, 6)
    expected, order = expected.sort(1)
    assert torch.equal(found, expected)
    torch.testing.assert_close(log_p, expected_log_p.gather(1, order.unsqueeze(2).expand_as(log_p)))


def test_a_search_of_all_cells_gives_the_probabilities_of_the_model():
    vectors, bias = rows()
    hidden, cells = queries(), Cells.of(vectors, bias, torch.eye(D))
    found, log_p = cells.search(hidden, vectors, bias, cells.number)
    ids = cells.members(found).flatten(1)
    expected = (hidden @ vectors.T + bias).log_softmax(1)
    kept = ids >= 0
    torch.testing.assert_close(log_p.flatten(1)[kept], expected.gather(1, ids.clamp(min=0))[kept])


def test_cells_that_are_not_probed_count_in_the_normaliser():
    vectors, bias = torch.zeros(64, D), torch.zeros(64)
    cells = Cells.of(vectors, bias, torch.eye(D))
    _, log_p = cells.search(queries(), vectors, bias, 1)
    torch.testing.assert_close(log_p, torch.full_like(log_p, -math.log(64)))


@pytest.mark.parametrize("native", [True, False])
def test_nan_in_hidden_draws_by_frequency(native):
    sampler = Tailored(COUNTS, 9, probes=2)
    sampler.attach(*rows())
    hidden = torch.full((B, D), torch.nan)
    if native:
        candidates = sampler(TARGET, hidden=hidden)
    else:
        with patch.object(cpu, "can_probe", return_value=False):
            candidates = sampler(TARGET, hidden=hidden)
    assert not candidates.log_kappa().isnan().any()


def test_each_example_finds_its_own_classes():
    """Every example is sure of another class among many: draws by frequency miss it."""
    number = 3000
    generator = torch.Generator().manual_seed(0)
    vectors = torch.nn.functional.normalize(torch.randn(number, 16, generator=generator), dim=1)
    head = ClassHead(16, number, bias=False, sampler=Systematic(torch.ones(number), 256))
    with torch.no_grad():
        head.weight.copy_(vectors)
    chosen = torch.randint(number, (64,), generator=generator)
    hidden, target = 14 * vectors[chosen], (chosen + 1) % number
    errors = []
    for sampler in (head.sampler, Tailored(torch.ones(number), 256, probes=24)):
        head.use(sampler)
        errors.append(diagnose(head, hidden, target, generator=torch.Generator().manual_seed(0)).rmse_log_z)
    assert errors[1] < 0.3 * errors[0]


def test_cells_follow_training_and_a_resumed_run_draws_the_same(monkeypatch):
    monkeypatch.setattr("manyclass.samplers._cell_search.default_interval", lambda num_classes: 8)
    heads = [ClassHead(D, C, sampler=Tailored(ClassCounts(COUNTS), 9, group_size=2, probes=2)) for _ in range(2)]
    optimizer = torch.optim.SGD(heads[0].parameters(), lr=2.0)
    hidden, first = queries(), None
    for step in range(13):
        optimizer.zero_grad()
        heads[0](hidden, TARGET).backward()
        optimizer.step()
        first = heads[0].sampler.search.centroids.clone() if step == 0 else first
        if step == 8:
            # A build is in progress.
            assert heads[0].sampler.search.schedule.pending() is not None
            heads[1].load_state_dict(heads[0].state_dict())
            saved = [x.clone() for x in heads[0].parameters()]
            torch.manual_seed(3)
    assert not torch.equal(heads[0].sampler.search.centroids, first)
    with torch.no_grad():
        for own, copied in zip(heads[1].parameters(), saved, strict=True):
            own.copy_(copied)
    optimizer = torch.optim.SGD(heads[1].parameters(), lr=2.0)
    torch.manual_seed(3)
    for _ in range(4):
        optimizer.zero_grad()
        heads[1](hidden, TARGET).backward()
        optimizer.step()
    assert torch.equal(heads[0].weight, heads[1].weight)
    assert torch.equal(heads[0].sampler.search.line, heads[1].sampler.search.line)


def test_the_largest_probability_of_each_class_found_is_kept():
    ids = torch.tensor([[4, 9, 2, 4, 2, 9], [9, 9, 9, 9, 9, 9], [7, 6, 7, 6, 7, 6]])
    p = torch.tensor([[0.1, 0.0, 0.3, 0.5, 0.2, 0.0], [0.0] * 6, [0.2, 0.4, 0.1, 0.3, 0.6, 0.5]])
    found, largest = _largest(ids, p, 9)
    assert found.tolist() == [[2, 4, 9, 9, 9, 9], [9] * 6, [6, 7, 9, 9, 9, 9]]
    expected = torch.tensor([[0.3, 0.5, 0, 0, 0, 0], [0] * 6, [0.5, 0.6, 0, 0, 0, 0]])
    torch.testing.assert_close(largest, expected)


def test_examples_that_find_different_classes_leave_less_to_the_others():
    number, k = 4000, 400
    generator = torch.Generator().manual_seed(0)
    vectors = torch.nn.functional.normalize(torch.randn(number, 16, generator=generator), dim=1)
    sampler = Tailored(torch.rand(number, generator=generator) + 0.1, k, probes=16)
    sampler.attach(vectors)
    sampler.search.refresh(torch.eye(16))
    left = []
    for chosen in (torch.arange(64), torch.zeros(64, dtype=torch.int64)):
        pi = sampler.parts.inclusion(sampler.search.find(20 * vectors[chosen], vectors, None, 1, 0))
        left.append(float(sampler.parts.teeth_of_others(pi)))
        assert left[-1] + float(pi.sum()) <= k
    # The same classes for all are fewer than half of k, and no more than that is left to the others.
    assert 0.25 * k < left[0] < 0.4 * k
    assert left[1] == k / 2


def test_cells_are_rebuilt_often_at_first_and_each_build_is_used(monkeypatch):
    monkeypatch.setattr("manyclass.samplers._cell_search.default_interval", lambda num_classes: 512)
    search, built, used = CellSearch(C, 2), [], []
    search.attach(*rows())
    make = search._snapshot
    monkeypatch.setattr(search, "_snapshot", lambda moment: built.append(search.schedule.steps) or make(moment))
    for step in range(1, 2200):
        before = search.cells
        search.advance(torch.eye(D))
        if search.cells is not before:
            used.append(step)
    # The first cells are made at once.
    assert built == [0, 16, 32, 64, 128, 256, 512, 1024, 1536, 2048]
    assert used == [1, 20, 40, 80, 160, 320, 640, 1152, 1664, 2176]


@pytest.mark.parametrize("nearest", [4, 6, C])
def test_examples_whose_nearest_classes_are_all_they_find_leave_the_others_to_frequency(nearest):
    sampler = Tailored(COUNTS, 9, group_size=2, nearest=nearest, probes=1)
    sampler.attach(*rows())
    check_unbiased(sampler, queries())


def test_few_classes_that_have_nearly_all_counts_leave_a_tooth_to_the_others():
    counts = torch.ones(C, dtype=torch.float64)
    counts[:2] = 1e15
    sampler = Tailored(counts, 4, probes=1)
    sampler.attach(*rows())
    log_kappa = sampler(torch.arange(5, 10), hidden=queries()).target_log_kappa()
    # Sums over outcomes as rare as these are beyond the resolution of the line.
    assert sampler.parts.comb.teeth == 1
    assert ((log_kappa > 30) & (log_kappa < 40)).any()


def test_many_classes_are_probed_by_default_and_few_are_scanned():
    assert Tailored(torch.ones(1000), 8).probing is None
    large = Tailored(torch.ones((1 << 15) + 1), 8)
    assert large.probing is not None
    assert Tailored(torch.ones((1 << 15) + 1), 8, probes=0).probing is None
    # One tooth cannot be shared by two parts.
    large.set_k(1)
    assert large.probing is None


def test_the_number_of_classes_can_change():
    head = ClassHead(D, C, sampler=Tailored(ClassCounts(COUNTS), 9, probes=2))
    head(queries(), TARGET)
    for number in (C + 20, C):
        head.resize(number)
        assert len(head.sampler.search.line) == number
        assert head(queries(), TARGET).isfinite()


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("line", lambda x: x * 0, "line"),
        ("centroids", lambda x: x * torch.nan, "centroids"),
        ("centroids", lambda x: x[:, 1:], "centroids"),
        ("levels", lambda x: x + torch.inf, "levels"),
    ],
)
def test_a_damaged_state_is_refused(name, change, message):
    search = CellSearch(C, 2)
    search.attach(*rows())
    search.refresh(torch.eye(D))
    state = search.state_dict()
    state[name] = change(state[name])
    with pytest.raises(RuntimeError, match=f"`{message}` must"):
        search.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"k": 1, "probes": 2}, "`k` must be at least 2"), ({"k": 8, "probes": -1}, "`probes` must be at least 0")],
)
def test_bad_arguments_are_named(options, message):
    k = options.pop("k")
    with pytest.raises(ValueError, match=message):
        Tailored(COUNTS, k, **options)


def test_the_kernel_refuses_impossible_probes():
    vectors, bias = rows()
    cells = Cells.of(vectors, bias, torch.eye(D))
    if not cpu.can_probe(vectors, vectors, bias, cells.order):
        pytest.skip("there is no C++ compiler")
    tables = (cells.centroids, cells.levels, cells.order, vectors, bias)
    with pytest.raises(ValueError, match="`probes` must"):
        cpu.probe(queries(), torch.zeros(B, cells.number), *tables, nodes=2, probes=3)


def test_bounds_of_cells_are_nested():
    assert cell_bounds(C, 4).tolist() == cell_bounds(C, 8)[::2].tolist()
    assert cells_module.num_cells(CLASSES_PER_CELL) == 1
    assert cells_module.num_cells(CLASSES_PER_CELL + 1) == 2


def test_cosines_are_scanned():
    head = ClassHead(D, C, sampler=Tailored(COUNTS, 9, probes=2), similarity="cosine")
    assert head.sampler.probing is None
    assert head(queries(), TARGET).isfinite()


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1e30])
def test_a_bad_class_vector_spoils_no_cell_and_no_state(bad):
    weight, bias = rows()
    weight[7, 1] = bias[9] = bad
    sampler = Tailored(COUNTS, 6, probes=2)
    sampler.attach(weight, bias)
    sampler(TARGET, hidden=queries())
    sampler.load_state_dict(sampler.state_dict())
    cells = sampler.search.cells
    assert sorted(cells.order.tolist()) == list(range(C))
    assert cells.centroids.isfinite().all()
    assert cells.levels.isfinite().all()


def test_a_k_too_small_for_both_parts_of_a_draw_is_refused_later_too():
    sampler = Tailored(torch.ones(100), 8, probes=4)
    with pytest.raises(ValueError, match=r"`k` must be in \[2, 100\], got 1"):
        sampler.set_k(1)
    assert sampler.k == 8
