"""Signs and errors of the approximate gradient, inside and outside the minibatch's classes, and bounds of γ̃."""

import math
from collections.abc import Mapping
from dataclasses import asdict
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from manyclass.heads import ClassHead
from manyclass.lab.experiment import Claim, Findings, Lab
from manyclass.lab.paper import rates
from manyclass.lab.problem import BATCH_SIZE, Minibatches, Problem, paper_problem
from manyclass.lab.softmax_regression import EXACT, Head, Method, build_head, train_method
from manyclass.lab.spread import Spread, band, format_number
from manyclass.report import Figure, Panel, ReportTable, Section

METHODS = {
    "importance": Method(),
    "Bernoulli": Method(sampler="Bernoulli"),
    "systematic": Method(sampler="systematic"),
    "BlackOut": Method("BlackOut", power=0.5),
    "ranking": Method("ranking", power=0.0),
    "negative sampling": Method("negative sampling", power=0.75),
    "NCE, z = 1": Method("NCE"),
    "plain importance": Method("plain importance"),
}
NORMALISATION = ("importance", "Bernoulli", "systematic")
BOUNDED = ("importance", "Bernoulli", "systematic", "ranking", "negative sampling")
MEASURES = {
    "sign_inside": ("Correct signs, classes in the minibatch", "fraction of components"),
    "sign_outside": ("Correct signs, other classes drawn", "fraction of components"),
    "error_inside": ("Relative error, classes in the minibatch", "‖g̃ − g‖ / ‖g‖"),
    "error_outside": ("Relative error, all other classes", "‖g̃ − g‖ / ‖g‖"),
}
GAMMA_EXTREMES = ("least_target", "most_target", "least_negative", "most_negative")


def run(lab: Lab) -> Findings:
    """Compare approximate with exact minibatch gradients during exact training."""
    rate = rates.normalisation_sweep(lab).best
    points = [p for p in (1, 10, 25, 50, 100, 200, 400, 800) if p <= lab.scale.iterations]
    cells = [
        {
            "seed": seed,
            "exact_rate": rate,
            "points": points,
            "methods": {label: asdict(method) for label, method in METHODS.items()},
            "draws": max(4, lab.scale.draws // 50),
        }
        for seed in lab.seeds
    ]
    found = lab.map(gradients, cells)
    panels = [
        Panel(
            title,
            "iteration of exact training",
            y_label,
            [band(label, points, [result[label][measure] for result in found], points=True) for label in NORMALISATION],
            log_x=True,
            log_y=measure.startswith("error"),
        )
        for measure, (title, y_label) in MEASURES.items()
    ]
    ranges = {
        label: [Spread.of([_extreme(result[label][side], side) for result in found]) for side in GAMMA_EXTREMES]
        for label in METHODS
    }
    table = ReportTable(
        ["method", "γ(target), minimum", "γ(target), maximum", "γ(negative), minimum", "γ(negative), maximum"],
        [[label, *(spread.text(".3g") for spread in spreads)] for label, spreads in ranges.items()],
        "Extremes of γ̃ over all iterations above: median over seeds, with minimum and maximum.",
    )
    section = Section(
        "Accuracy of the gradient",
        [
            f"The approximate gradient of a minibatch of {BATCH_SIZE} is compared with the exact one at several "
            "iterations of exact training, over many draws. Signs are compared in the rows that a draw updates.",
            Figure(
                "signs",
                "Fraction of correct signs and relative error of the gradient. A comment in the paper's source asks "
                "whether gradients are more accurate for classes inside the minibatch than outside.",
                panels,
            ),
            table,
        ],
    )
    rows = [
        {
            "seed": seed,
            "method": label,
            "iteration": point,
            **{name: values[i] for name, values in result[label].items()},
        }
        for seed, result in zip(lab.seeds, found, strict=True)
        for label in METHODS
        for i, point in enumerate(points)
    ]
    return Findings(section, _claims(found, ranges), rows)


def _extreme(values: list[float], side: str) -> float:
    return min(values) if side.startswith("least") else max(values)


def gradients(
    *, seed: int, exact_rate: float, points: list[int], methods: Mapping[str, Mapping[str, Any]], draws: int
) -> dict[str, Any]:
    """Compute a cell: for each method and point, the mean of each measure over draws, and the extremes of γ̃."""
    problem = paper_problem(seed)
    found: dict[str, dict[str, list[float]]] = {label: {} for label in methods}
    generator = torch.Generator().manual_seed(seed)

    def measure(step: int, trained: Head) -> None:
        minibatch = next(iter(Minibatches(problem, seed=seed + step)))
        for label, method in methods.items():
            head = build_head(Method(**method), problem)
            assert isinstance(head, ClassHead)
            with torch.no_grad():
                head.weight.copy_(trained.weight)
            compared = _compare(head, problem, minibatch, draws, generator)
            for name, value in compared.items():
                found[label].setdefault(name, []).append(value)

    train_method(problem, EXACT, seed=seed, rate=exact_rate, points=points, measure=measure)
    return dict(found)


def _compare(
    head: ClassHead, problem: Problem, minibatch: tuple[object, ...], draws: int, generator: torch.Generator
) -> dict[str, float]:
    hidden, target = minibatch[:2]
    assert isinstance(hidden, Tensor)
    assert isinstance(target, Tensor)
    (exact,) = torch.autograd.grad(head.exact_loss(hidden, target), head.weight)
    inside = torch.zeros(problem.num_classes, dtype=torch.bool)
    inside[target] = True
    total: dict[str, float] = dict.fromkeys(MEASURES, 0.0)
    extremes = {side: math.inf if side.startswith("least") else -math.inf for side in GAMMA_EXTREMES}
    for _ in range(draws):
        state = generator.get_state()
        (approximate,) = torch.autograd.grad(head(hidden, target, generator=generator), head.weight)
        # Repeat the same draw to read its γ̃.
        generator.set_state(state)
        gamma_target, gamma = _gamma(head, hidden, target, generator)
        right = approximate.sign() == exact.sign()
        touched = approximate.abs().sum(1) > 0
        difference = (approximate - exact).square().sum(1)
        size = exact.square().sum(1)
        total["sign_inside"] += float(right[inside].double().mean())
        total["sign_outside"] += float(right[touched & ~inside].double().mean())
        total["error_inside"] += float((difference[inside].sum() / size[inside].sum()).sqrt())
        total["error_outside"] += float((difference[~inside].sum() / size[~inside].sum()).sqrt())
        for side in GAMMA_EXTREMES:
            values = gamma_target if side.endswith("target") else gamma
            pick = min if side.startswith("least") else max
            extremes[side] = pick(extremes[side], float(values.min() if pick is min else values.max()))
    return {**{name: value / draws for name, value in total.items()}, **extremes}


def _gamma(head: ClassHead, hidden: Tensor, target: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return γ̃ = -∂loss/∂score of the targets and of the slots that are not empty."""
    exclude = None if head.objective.keeps_hits else target.unsqueeze(1)
    candidates = head.sampler(target, exclude=exclude, generator=generator)
    with torch.no_grad():
        scores = head.candidate_scores(hidden, target, candidates)
    own, slots = (score.requires_grad_() for score in scores)
    own, slots = torch.autograd.grad(head.objective(own, slots, candidates).sum(), (own, slots))
    return -own, -slots[~candidates.empty()]


def _claims(found: list[dict[str, Any]], ranges: dict[str, list[Spread]]) -> tuple[Claim, ...]:
    inside, outside, errors_in, errors_out = (
        {
            label: Spread.of([min(r[label][m]) if m.startswith("sign") else fmean(r[label][m]) for r in found])
            for label in NORMALISATION
        }
        for m in MEASURES
    )
    right = all(spread.median > 0.5 for spread in (*inside.values(), *outside.values()))
    widest = {label: (min(s.low for s in ranges[label]), max(s.high for s in ranges[label])) for label in METHODS}
    between = {
        label: f"[{format_number(low, '.3f')}, {format_number(high, '.3f')}]" for label, (low, high) in widest.items()
    }
    # Allow one part in a million for float32 rounding.
    bounded = all(low >= -1 - 1e-6 and high <= 1 + 1e-6 for low, high in (widest[label] for label in BOUNDED))
    signed = all(ranges[label][0].low >= -1e-6 and ranges[label][3].high <= 1e-6 for label in BOUNDED)
    nearer = all(errors_in[label].high < errors_out[label].low for label in NORMALISATION)
    return (
        Claim(
            "signs-mostly-right",
            "The sign of the approximate minibatch gradient is right for the majority of its components.",
            "lowest fraction of correct signs during training, in the minibatch's classes: "
            + "; ".join(f"{label} {spread.text('.2f')}" for label, spread in inside.items())
            + "; in other classes drawn: "
            + "; ".join(f"{label} {spread.text('.2f')}" for label, spread in outside.items()),
            right,
        ),
        Claim(
            "gamma-bounded",
            "γ̃ lies in [−1, 1] with the right sign for likelihood, ranking and negative sampling.",
            "; ".join(f"{label} {between[label]}" for label in BOUNDED)
            + f"; γ̃ of a target is never negative and of a negative never positive: {'yes' if signed else 'no'}"
            + f". For BlackOut {between['BlackOut']}",
            bounded and signed,
        ),
        Claim(
            "minibatch-more-accurate",
            "The authors' open question: are gradients more accurate for classes inside the minibatch than outside?",
            "mean of ‖g̃ − g‖/‖g‖ during training, inside and outside: "
            + "; ".join(
                f"{label} {errors_in[label].text('.2f')} and {errors_out[label].text('.2f')}" for label in NORMALISATION
            ),
            nearer,
            "" if nearer else "Not for every seed and every sampler.",
        ),
    )
