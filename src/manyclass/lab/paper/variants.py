"""Variants from the paper's footnotes and Discussion: other estimates of 1/Z, a bound, subsets, a tree; concavity."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from manyclass.candidates import Candidates
from manyclass.heads import ClassHead
from manyclass.lab.experiment import Claim, Findings, Lab
from manyclass.lab.objectives import TaylorInverse
from manyclass.lab.paper import rates
from manyclass.lab.paper.curves import MEASURES, train
from manyclass.lab.problem import BATCH_SIZE, K, paper_problem
from manyclass.lab.softmax_regression import EXACT, Head, Method, build_head, train_method
from manyclass.lab.spread import Spread, band
from manyclass.objectives import Likelihood, LogisticRanking, Objective, PlainImportance, SubsetSoftmax
from manyclass.report import Figure, Panel, ReportTable, Section
from manyclass.samplers import Bernoulli, Exhaustive, Importance, Sampler

TAYLOR_DRAWS = 5
VARIANTS = {
    "subset softmax": Method("subset softmax", power=0.0),
    "plain importance": Method("plain importance"),
    "adapted importance": Method("adapted importance"),
    "Taylor 1/Z": Method("Taylor 1/Z", draws=TAYLOR_DRAWS),
    "upper bound, K = 500": Method("bound", sampler="Bernoulli", k=500, group_size=None),
    "hierarchical softmax": Method("hierarchical"),
}
MEASURED_ITERATIONS = (1, 10, 25, 50, 100, 200, 400)
QUANTILES = (0.5, 0.9, 0.99, 0.999)


def run(lab: Lab) -> Findings:
    """Train the variants, and test the paper's remarks on γ, concavity and ranking."""
    rate = rates.normalisation_sweep(lab).best
    sweeps = {
        label: rates.sweep(lab, {label: method}, iterations=lab.scale.short, seeds=lab.seeds[:1])
        for label, method in VARIANTS.items()
    }
    methods = {"exact": EXACT, "importance": Method(), **VARIANTS}
    chosen = {"exact": rate, "importance": rate} | {label: sweep.best for label, sweep in sweeps.items()}
    curves = train(lab, methods, chosen, iterations=lab.scale.short)
    points = [point for point in MEASURED_ITERATIONS if point <= lab.scale.iterations]
    draws = max(20, lab.scale.draws // 20)
    cells = [{"seed": seed, "exact_rate": rate, "points": points, "draws": draws} for seed in lab.seeds]
    ranges = lab.map(plug_in_gamma, cells)
    hessians = lab.map(concavity, [{"seed": seed} for seed in lab.seeds])
    equal = lab.map(one_sample_ranking, [{"seed": seed} for seed in lab.seeds])
    gamma_panels = [
        Panel(
            title,
            "iteration of exact training",
            "|p̃(target)|",
            [band(f"quantile {q:g}", points, [r[f"{name}_{q}"] for r in ranges], points=True) for q in QUANTILES],
            log_x=True,
            log_y=True,
        )
        for name, title in (("plain", "Plain importance, u/Z̃"), ("taylor", "Taylor expansion, u · (1/Z)"))
    ]
    largest = {label: Spread.of([result[label] for result in hessians]) for label in HESSIAN_OBJECTIVES}
    section = Section(
        "Variants",
        [
            f"Each variant trains for {lab.scale.short} iterations at the best learning rate of the grid, chosen on "
            f"one problem. The Taylor expansion of 1/Z takes {TAYLOR_DRAWS} independent draws of {K} classes per step. "
            "The upper bound takes one sample of half of all classes per minibatch, because v/b overflows with fewer. "
            "Hierarchical softmax is a different model, with C − 1 inner nodes and so no more parameters than the flat "
            "one.",
            Figure("variants", "Variants in training. Median and quartiles over seeds.", curves.panels(list(MEASURES))),
            curves.table(),
            "Plain importance sampling does not always draw the target: if Z̃ misses it, the plug-in γ(target) = 1 − "
            "u/Z̃ has no lower bound. Autograd through −log(u/Z̃) self-normalises the weights, so training survives, "
            "but the loss can be negative. The Taylor expansion's γ is unbounded even with the target explicit.",
            Figure(
                "variants-gamma",
                "Quantiles of |p̃| = |1 − γ| of the target over examples and draws. Above 1 the gradient pushes the "
                "target's score down.",
                gamma_panels,
            ),
            ReportTable(
                ["objective", "largest eigenvalue of the Hessian", "concave"],
                [
                    [label, spread.text(".2g"), "yes" if spread.high <= EIGENVALUE_TOLERANCE else "no"]
                    for label, spread in largest.items()
                ],
                "Hessian with respect to all class vectors at random points of a small problem, for one fixed draw. "
                "The eigenvalues of smallest magnitude are 0, because shifting all class vectors changes nothing: the "
                "Hessians are negative semidefinite, not definite.",
            ),
        ],
    )
    return Findings(section, _claims(ranges, largest, equal), curves.rows())


def plug_in_gamma(*, seed: int, exact_rate: float, points: list[int], draws: int) -> dict[str, list[float]]:
    """Compute a cell: quantiles of the target's |1 - γ| during exact training, plain importance and expansion."""
    problem = paper_problem(seed)
    hidden, target = problem.inputs[:BATCH_SIZE], problem.target[:BATCH_SIZE]
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, list[float]] = {f"{name}_{q}": [] for name in ("plain", "taylor") for q in QUANTILES}
    plain, taylor = (build_head(VARIANTS[label], problem) for label in ("plain importance", "Taylor 1/Z"))
    assert isinstance(plain, ClassHead)
    assert isinstance(taylor, ClassHead)
    assert isinstance(taylor.objective, TaylorInverse)
    expansion = taylor.objective

    @torch.no_grad()
    def measure(step: int, trained: Head) -> None:
        plain.weight.copy_(trained.weight)
        taylor.weight.copy_(trained.weight)
        values: dict[str, list[Tensor]] = {"plain": [], "taylor": []}
        for _ in range(draws):
            candidates = plain.sampler(target, generator=generator)
            own, scores = plain.candidate_scores(hidden, target, candidates)
            # The loss is log Z̃ - s(target), so exp(-loss) is u/Z̃.
            values["plain"].append((-plain.objective(own, scores, candidates).double()).exp())
            candidates = taylor.sampler(target, exclude=target.unsqueeze(1), generator=generator)
            gamma, _ = expansion.gamma(*taylor.candidate_scores(hidden, target, candidates), candidates)
            values["taylor"].append((1 - gamma.double()).abs())
        for name, parts in values.items():
            quantiles = torch.cat(parts).double().quantile(torch.tensor(QUANTILES, dtype=torch.float64))
            for q, value in zip(QUANTILES, quantiles.tolist(), strict=True):
                found[f"{name}_{q}"].append(value)

    train_method(problem, EXACT, seed=seed, rate=exact_rate, points=points, measure=measure)
    return found


HESSIAN_CLASSES, HESSIAN_DIM, HESSIAN_EXAMPLES = 7, 3, 6
EIGENVALUE_TOLERANCE = 1e-10
HESSIAN_OBJECTIVES: dict[str, Callable[[], tuple[Sampler, Objective]]] = {
    "likelihood, exact": lambda: (Exhaustive(HESSIAN_CLASSES), Likelihood()),
    "likelihood, importance": lambda: (Importance(torch.ones(HESSIAN_CLASSES), 3, group_size=1), Likelihood()),
    "likelihood, Bernoulli": lambda: (Bernoulli(torch.arange(1.0, HESSIAN_CLASSES + 1), 3, group_size=1), Likelihood()),
    "subset softmax": lambda: (Importance(torch.ones(HESSIAN_CLASSES), 3, group_size=1), SubsetSoftmax()),
    "logistic ranking": lambda: (Importance(torch.ones(HESSIAN_CLASSES), 3, group_size=1), LogisticRanking()),
    "plain importance": lambda: (Importance(torch.ones(HESSIAN_CLASSES), 3, group_size=1), PlainImportance()),
}


def concavity(*, seed: int) -> dict[str, float]:
    """Compute a cell: the largest eigenvalue of each objective's Hessian."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(HESSIAN_EXAMPLES, HESSIAN_DIM, generator=generator, dtype=torch.float64)
    target = torch.randint(HESSIAN_CLASSES, (HESSIAN_EXAMPLES,), generator=generator)
    found = {}
    for label, make in HESSIAN_OBJECTIVES.items():
        sampler, objective = make()
        exclude = None if objective.keeps_hits else target.unsqueeze(1)
        candidates = sampler(target, exclude=exclude, generator=generator)

        def value(weight: Tensor, objective: Objective = objective, candidates: Candidates = candidates) -> Tensor:
            scores = hidden @ weight.reshape(HESSIAN_CLASSES, HESSIAN_DIM).T
            slots = scores.gather(1, candidates.ids()).masked_fill(candidates.empty(), -math.inf)
            own = scores.gather(1, target.unsqueeze(1)).squeeze(1)
            return -objective(own, slots, candidates).sum()

        largest = -math.inf
        for _ in range(5):
            weight = 2 * torch.randn(HESSIAN_CLASSES * HESSIAN_DIM, generator=generator, dtype=torch.float64)
            hessian = torch.autograd.functional.hessian(value, weight)
            largest = max(largest, float(torch.linalg.eigvalsh(hessian)[-1]))
        found[label] = largest
    return found


def one_sample_ranking(*, seed: int) -> dict[str, float]:
    """Compute a cell: the largest difference between ranking with margin log(C-1) and the one-sample likelihood."""
    problem = paper_problem(seed)
    hidden, target = problem.inputs[:BATCH_SIZE], problem.target[:BATCH_SIZE]
    sampler = Importance(torch.ones(problem.num_classes), 1, group_size=1)
    losses = []
    for objective in (Likelihood(), LogisticRanking()):
        head = ClassHead(hidden.shape[1], problem.num_classes, sampler=sampler, objective=objective, bias=False)
        with torch.no_grad():
            head.weight.copy_(problem.weight / 10)
        generator = torch.Generator().manual_seed(seed)
        losses.append(head(hidden, target, reduction="none", generator=generator))
    return {"difference": float((losses[0] - losses[1]).detach().abs().max())}


def _claims(
    ranges: list[dict[str, list[float]]], largest: dict[str, Spread], equal: list[dict[str, float]]
) -> tuple[Claim, ...]:
    greatest = Spread.of([max(result[f"plain_{QUANTILES[-1]}"]) for result in ranges])
    difference = Spread.of([result["difference"] for result in equal])
    concave = ("likelihood, exact", "likelihood, importance", "likelihood, Bernoulli", "logistic ranking")
    return (
        Claim(
            "plain-importance-unbounded",
            "If the target is not always among the classes drawn, the approximate γ is not bounded by −1 and 1.",
            f"γ(target) = 1 − u/Z̃: the 0.999-quantile of u/Z̃ grows during training to {greatest.text('.2g')}",
            greatest.low > 2,
        ),
        Claim(
            "ranking-is-one-sample",
            "Ranking with margin log(C−1) is the likelihood estimated with a single uniform sample.",
            f"largest difference of the two losses for the same draw: {difference.text('.1e')}",
            difference.high < 1e-4,
        ),
        Claim(
            "concave",
            "The exact log likelihood, its sampling approximations and the ranking objective are concave.",
            "largest eigenvalue of the Hessian: "
            + "; ".join(f"{label} {largest[label].text('.1e')}" for label in concave)
            + "; negative semidefinite, while the paper says definite",
            all(largest[label].high <= EIGENVALUE_TOLERANCE for label in concave),
        ),
    )
