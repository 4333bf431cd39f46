"""Every kernel refuses sizes, dtypes and ids that would lead it outside its tables, before it writes anything."""

import math
from dataclasses import fields, replace

import pytest
import torch

from manyclass.forms import LogSumExp, PairSum
from manyclass.kernels import cpu
from manyclass.kernels.draw import GatheredDraw, PullBack
from manyclass.samplers._table import MassTable

pytestmark = pytest.mark.skipif(cpu.library() is None, reason="no compiled kernels on this machine")

B, K, D, C = 3, 4, 5, 7


def rows():
    return {
        "weight": torch.randn(C, D),
        "ids": torch.tensor([[1, 6, 1, 0]]),
        "values": torch.randn(4, D),
    }


def adagrad_operands():
    return {**rows(), "total": torch.rand(C, D)}


def adagrad_by_row_operands():
    return {**rows(), "total": torch.rand(C)}


def adam_operands():
    moments = {"first": torch.zeros(C, D), "second": torch.zeros(C, D), "steps": torch.zeros(C)}
    return {**rows(), **moments}


def draw_operands():
    return {
        "scores": torch.randn(B, K),
        "hidden": torch.randn(B, D),
        "rows": torch.randn(B + K, D),
        "bias": torch.randn(C),
        "target": torch.tensor([0, 6, 2]),
        "ids": torch.tensor([1, 1, 6, 0]),
        "log_kappa": torch.zeros(1, K, dtype=torch.float64),
        "excluded": torch.tensor([[-1], [0], [99]]),
    }


def pull_back_operands():
    return {
        "score_gradient": torch.randn(B, K),
        "target_gradient": torch.randn(B),
        "grad": torch.randn(B),
        "hidden": torch.randn(B, D),
        "rows": torch.randn(B + K, D),
        "grad_hidden": torch.randn(B, D),
        "scaled_hidden": torch.randn(B, D),
        "row_values": torch.randn(B + K, D),
        "bias_values": torch.randn(B + K),
    }


def front_operands():
    return {
        "target": torch.tensor([2, 0, 2]),
        "ids": torch.tensor([[1, 2, 6, 6]]),
        "log_kappa": torch.zeros(1, K, dtype=torch.float64),
    }


def table(masses=(1.0, 2.0, 0.0, 4.0, 0.5)):
    return MassTable(torch.tensor(masses, dtype=torch.float64)).cpu_table()


def table_operands():
    made = table()
    return {field.name: getattr(made, field.name) for field in fields(made)}


def likely_operands():
    return {"largest": torch.zeros(C), "scores": torch.randn(B, C), "bias": torch.randn(C)}


def comb_operands():
    return {"offset": torch.rand(1, 1, dtype=torch.float64), "certain": torch.tensor([2, 0])}


def run_draw(kernel):
    def run(scores, **draw):
        return kernel(scores, GatheredDraw(**draw, num_classes=C))

    return run


log_sum_exp = run_draw(lambda scores, draw: cpu.log_sum_exp_(LogSumExp(target=True, kappa=True), scores, draw))
pair_sum = run_draw(lambda scores, draw: cpu.pair_sum_(PairSum(activation="softplus", paired=True), scores, draw))
KERNELS = {
    "adagrad": (adagrad_operands, lambda **x: cpu.adagrad_(**x, lr=0.1, eps=1e-8, by_row=False)),
    "adagrad by row": (adagrad_by_row_operands, lambda **x: cpu.adagrad_(**x, lr=0.1, eps=1e-8, by_row=True)),
    "adam": (adam_operands, lambda **x: cpu.adam_(**x, lr=0.1, betas=(0.9, 0.999), eps=1e-8)),
    "log_sum_exp": (draw_operands, log_sum_exp),
    "pair_sum": (draw_operands, pair_sum),
    "pull_back": (pull_back_operands, lambda **x: cpu.pull_back_(PullBack(**x))),
    "put_in_front": (front_operands, cpu.put_in_front),
    "likely": (likely_operands, lambda **x: cpu.likely_(**x, nearest=2)),
    "comb": (comb_operands, lambda **x: cpu.comb(table(), spacing=2.0, teeth=3, **x)),
    "locate": (
        lambda: {"position": torch.rand(6, dtype=torch.float64)},
        lambda position: cpu.locate(table(), position),
    ),
    "search table": (table_operands, cpu.SearchTable),
}


def half(x):
    return x.half()


def shorter(x):
    return x[..., :-1].contiguous()


def longer(x):
    return torch.cat([x, x], -1)


def strided(x):
    return torch.stack([x, x], -1)[..., 0]


def on_meta(x):
    return x.to("meta")


# The size of these decides the size of the result, or it does not matter.
ANY_SIZE = {"certain", "position", "excluded", "guide"}
ANY_STRIDES = {"put_in_front", "locate"}


def is_valid(kernel, name, change):
    """Return True if a kernel takes an operand that is changed in this way."""
    if change is strided:
        return kernel in ANY_STRIDES or name == "offset"
    if change in (shorter, longer):
        return name in ANY_SIZE or (kernel, name) == ("put_in_front", "target") or (change is longer and name == "bias")
    return False


CASES = [
    pytest.param(kernel, name, change, id=f"{kernel}-{name}-{change.__name__}")
    for kernel, (operands, _) in KERNELS.items()
    for name, value in operands().items()
    for change in (half, shorter, longer, strided, on_meta)
    if isinstance(value, torch.Tensor) and not is_valid(kernel, name, change)
]


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_takes_what_it_should(kernel):
    operands, run = KERNELS[kernel]
    run(**operands())


@pytest.mark.parametrize(("kernel", "name", "change"), CASES)
def test_a_kernel_refuses_an_operand_of_another_kind(kernel, name, change):
    operands, run = KERNELS[kernel]
    given = operands()
    copies = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in given.items()}
    given[name] = changed = change(given[name])
    with pytest.raises((TypeError, ValueError), match="must"):
        run(**given)
    for key, value in given.items():
        if isinstance(value, torch.Tensor) and value is not changed:
            assert torch.equal(value, copies[key]), key


@pytest.mark.parametrize("kernel", ["adagrad", "adagrad by row", "adam"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bad", [-1, C, 2**40, -(2**63), 2**63 - 1])
def test_rows_outside_a_table_are_refused_and_nothing_is_updated(kernel, dtype, bad):
    operands, run = KERNELS[kernel]
    given = {
        name: value.to(dtype) if value.is_floating_point() and name != "steps" else value
        for name, value in operands().items()
    }
    given["ids"][0, 2] = bad
    before = {name: value.clone() for name, value in given.items()}
    with pytest.raises(ValueError, match=rf"`ids` must lie in \[0, {C}\), got {bad} at position 2"):
        run(**given)
    assert all(torch.equal(value, before[name]) for name, value in given.items())


@pytest.mark.parametrize("kernel", ["log_sum_exp", "pair_sum"])
@pytest.mark.parametrize("name", ["ids", "target"])
@pytest.mark.parametrize("bad", [-1, C, -(2**63)])
def test_a_class_without_a_bias_is_refused(kernel, name, bad):
    operands, run = KERNELS[kernel]
    given = operands()
    given[name][1] = bad
    before = given["scores"].clone()
    with pytest.raises(ValueError, match=rf"`{name}` must lie in \[0, {C}\), got {bad} at position 1"):
        run(**given)
    assert torch.equal(given["scores"], before)


@pytest.mark.parametrize("teeth", [-1, -2, -(2**40)])
def test_a_comb_has_no_negative_number_of_teeth(teeth):
    with pytest.raises(ValueError, match=f"`teeth` must be at least 0, got {teeth}"):
        cpu.comb(table(), spacing=2.0, teeth=teeth, **comb_operands())


def test_a_table_without_classes_is_not_searched():
    nothing = MassTable(torch.zeros(3, dtype=torch.float64)).cpu_table()
    ids, log_kappa = cpu.comb(nothing, spacing=1.0, teeth=0, **comb_operands())
    assert (ids.tolist(), log_kappa.tolist()) == ([[2, 0]], [[0.0, 0.0]])
    with pytest.raises(ValueError, match="`position` must be empty for a table without classes, got 2 positions"):
        cpu.comb(nothing, spacing=1.0, teeth=2, **comb_operands())
    with pytest.raises(ValueError, match="`position` must be empty"):
        cpu.locate(nothing, torch.zeros(1, dtype=torch.float64))


def test_positions_outside_the_line_belong_to_its_ends():
    before, behind = [-1e-9, -5.0, -math.inf, math.nan], [7.5, 1e12, 1e300, math.inf]
    ids, mass = cpu.locate(table(), torch.tensor(before + behind, dtype=torch.float64))
    assert ids.tolist() == [0] * len(before) + [4] * len(behind)
    assert mass.tolist() == [1.0] * len(before) + [0.5] * len(behind)


@pytest.mark.parametrize("widest", [-1, 4, 2**40])
def test_a_table_searches_no_more_classes_than_it_has(widest):
    with pytest.raises(ValueError, match=r"`widest` must be in \[0, 3\], got"):
        cpu.SearchTable(**{**table_operands(), "widest": widest})


def test_a_table_of_any_content_reads_its_own_memory_alone():
    """The ids that a search returns show where it has read."""
    generator = torch.Generator().manual_seed(0)
    n = 300
    good = MassTable(torch.rand(n, dtype=torch.float64, generator=generator)).cpu_table()
    assert good.ids is None
    odd = torch.tensor([0.0, -1.0, 1e18, -1e300, math.inf, -math.inf, math.nan], dtype=torch.float64)
    position = torch.cat([odd, torch.rand(100, dtype=torch.float64, generator=generator) * n])
    for _ in range(200):
        garbled = {}
        for name in ("cumulative", "intercept", "slope", "guide"):
            value = getattr(good, name).clone()
            values = value.view(torch.float64) if name != "guide" else value
            where = torch.rand(values.shape, generator=generator) < 0.3
            if name == "guide":
                noise = torch.randint(-(2**31), 2**31 - 1, values.shape, dtype=values.dtype, generator=generator)
            else:
                noise = odd[torch.randint(len(odd), values.shape, generator=generator)]
            values[where] = noise[where]
            garbled[name] = value
        garbled["scale"] = odd[int(torch.randint(len(odd), (), generator=generator))].item()
        found = replace(good, **garbled)
        ids, _ = cpu.locate(found, position)
        assert ids.min() >= 0
        assert ids.max() < n
