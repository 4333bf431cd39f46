"""What footnotes and the Discussion name: other ways to 1/Z, a bound, subsets, a tree; and who is concave."""

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
from manyclass.lab.problem import BATCH, K, paper_problem
from manyclass.lab.softmax_regression import EXACT, Head, Method, follow, head_of
from manyclass.lab.spread import Spread, band
from manyclass.objectives import Likelihood, LogisticRanking, Objective, PlainImportance, SubsetSoftmax
from manyclass.report import Figure, Panel, Section, Table
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
POINTS = (1, 10, 25, 50, 100, 200, 400)
QUANTILES = (0.5, 0.9, 0.99, 0.999)


def run(lab: Lab) -> Findings:
    rate = rates.shared(lab).best
    own = {
        label: rates.sweep(lab, {label: method}, iterations=lab.scale.short, seeds=lab.seeds[:1])
        for label, method in VARIANTS.items()
    }
    methods = {"exact": EXACT, "importance": Method(), **VARIANTS}
    chosen = {"exact": rate, "importance": rate} | {label: sweep.best for label, sweep in own.items()}
    curves = train(lab, methods, chosen, iterations=lab.scale.short)
    points = [point for point in POINTS if point <= lab.scale.iterations]
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
    largest = {label: Spread.of([result[label] for result in hessians]) for label in OBJECTIVES}
    section = Section(
        "Variants",
        [
            f"Each at the best rate of the same grid, on one problem, for {lab.scale.short} iterations. The Taylor "
            f"expansion of 1/Z takes {TAYLOR_DRAWS} independent draws of {K} classes a step, the upper bound one "
            "sample of half of all classes a minibatch: with few, v/b overflows. Hierarchical softmax is a model of "
            "its own, with C − 1 inner nodes and so no more parameters than the flat one.",
            Figure(
                "variants",
                "Median and quartiles over seeds.",
                curves.panels(list(MEASURES)),
            ),
            curves.table(),
            "Plain importance sampling leaves the target to chance: where Z̃ misses it, the plug-in γ(target) = 1 − "
            "u/Z̃ has no lower bound. Autograd of −log(u/Z̃) normalises the weights by themselves, so training "
            "survives; the loss goes below zero. The Taylor expansion's γ is unbounded even with the target explicit.",
            Figure(
                "variants-gamma",
                "p̃ = 1 − γ of the target, in size: its quantiles over examples and draws. Above 1 the gradient "
                "pushes the target's score down.",
                gamma_panels,
            ),
            Table(
                ["objective", "largest eigenvalue of the Hessian", "concave"],
                [
                    [label, spread.text(".2g"), "yes" if spread.high <= TOLERANCE else "no"]
                    for label, spread in largest.items()
                ],
                "Hessian with regard to all class vectors at random points of a small problem, for one draw held "
                "fixed. The smallest eigenvalues in size are 0: shifts of all class vectors change nothing, so that "
                "the Hessians are negative semidefinite, not definite.",
            ),
        ],
    )
    return Findings(section, _claims(ranges, largest, equal), curves.rows())


def plug_in_gamma(*, seed: int, exact_rate: float, points: list[int], draws: int) -> dict[str, list[float]]:
    """A cell: quantiles of the target's |1 - γ| along exact training, by plain importance and the expansion."""
    problem = paper_problem(seed)
    hidden, target = problem.inputs[:BATCH], problem.target[:BATCH]
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, list[float]] = {f"{name}_{q}": [] for name in ("plain", "taylor") for q in QUANTILES}
    plain, taylor = (head_of(VARIANTS[label], problem) for label in ("plain importance", "Taylor 1/Z"))
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
            # The loss is log Z̃ - s(target).
            values["plain"].append((-plain.objective(own, scores, candidates).double()).exp())
            candidates = taylor.sampler(target, exclude=target.unsqueeze(1), generator=generator)
            gamma, _ = expansion.gamma(*taylor.candidate_scores(hidden, target, candidates), candidates)
            values["taylor"].append((1 - gamma.double()).abs())
        for name, parts in values.items():
            quantiles = torch.cat(parts).double().quantile(torch.tensor(QUANTILES, dtype=torch.float64))
            for q, value in zip(QUANTILES, quantiles.tolist(), strict=True):
                found[f"{name}_{q}"].append(value)

    follow(problem, EXACT, measure, seed=seed, rate=exact_rate, points=points)
    return found


CLASSES, DIMENSIONS, EXAMPLES = 7, 3, 6
TOLERANCE = 1e-10
OBJECTIVES: dict[str, Callable[[], tuple[Sampler, Objective]]] = {
    "likelihood, exact": lambda: (Exhaustive(CLASSES), Likelihood()),
    "likelihood, importance": lambda: (Importance(torch.ones(CLASSES), 3, group_size=1), Likelihood()),
    "likelihood, Bernoulli": lambda: (Bernoulli(torch.arange(1.0, CLASSES + 1), 3, group_size=1), Likelihood()),
    "subset softmax": lambda: (Importance(torch.ones(CLASSES), 3, group_size=1), SubsetSoftmax()),
    "logistic ranking": lambda: (Importance(torch.ones(CLASSES), 3, group_size=1), LogisticRanking()),
    "plain importance": lambda: (Importance(torch.ones(CLASSES), 3, group_size=1), PlainImportance()),
}


def concavity(*, seed: int) -> dict[str, float]:
    """A cell: for each objective the largest eigenvalue of the Hessian of the likelihood, or of what replaces it."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(EXAMPLES, DIMENSIONS, generator=generator, dtype=torch.float64)
    target = torch.randint(CLASSES, (EXAMPLES,), generator=generator)
    found = {}
    for label, make in OBJECTIVES.items():
        sampler, objective = make()
        exclude = None if objective.keeps_hits else target.unsqueeze(1)
        candidates = sampler(target, exclude=exclude, generator=generator)

        def value(weight: Tensor, objective: Objective = objective, candidates: Candidates = candidates) -> Tensor:
            scores = hidden @ weight.reshape(CLASSES, DIMENSIONS).T
            slots = scores.gather(1, candidates.ids()).masked_fill(candidates.empty(), -math.inf)
            own = scores.gather(1, target.unsqueeze(1)).squeeze(1)
            return -objective(own, slots, candidates).sum()

        largest = -math.inf
        for _ in range(5):
            weight = 2 * torch.randn(CLASSES * DIMENSIONS, generator=generator, dtype=torch.float64)
            hessian = torch.autograd.functional.hessian(value, weight)
            largest = max(largest, float(torch.linalg.eigvalsh(hessian)[-1]))
        found[label] = largest
    return found


def one_sample_ranking(*, seed: int) -> dict[str, float]:
    """A cell: the largest difference of ranking with margin log(C-1) and the likelihood, with one uniform negative."""
    problem = paper_problem(seed)
    hidden, target = problem.inputs[:BATCH], problem.target[:BATCH]
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
            "Where the target is left to chance, the approximate γ is no longer bounded between −1 and 1.",
            f"γ(target) = 1 − u/Z̃: the 0.999-quantile of u/Z̃ grows along training to {greatest.text('.2g')}",
            greatest.low > 2,
        ),
        Claim(
            "ranking-is-one-sample",
            "Ranking with margin log(C−1) is the likelihood estimated with a single uniform sample.",
            f"largest difference of the two losses, same draw: {difference.text('.1e')}",
            difference.high < 1e-4,
        ),
        Claim(
            "concave",
            "The exact log likelihood, its sampling approximations and the ranking objective are concave.",
            "largest eigenvalue of the Hessian: "
            + "; ".join(f"{label} {largest[label].text('.1e')}" for label in concave)
            + "; semidefinite, where the paper says definite",
            all(largest[label].high <= TOLERANCE for label in concave),
        ),
    )
