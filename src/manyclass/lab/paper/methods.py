"""The paper's figure of methods: log likelihood and bias of each, and of those it left out as too poor."""

import math

import torch

from manyclass.counts import ClassCounts, exponent
from manyclass.lab.experiment import Claim, Findings, Lab
from manyclass.lab.paper import rates
from manyclass.lab.paper.curves import MEASURES, NEAR, Curves, iterations_text, train
from manyclass.lab.problem import BATCH, NUM_CLASSES, K, Minibatches, paper_problem
from manyclass.lab.softmax_regression import Method, sampler_of
from manyclass.lab.spread import Spread, shown
from manyclass.report import Figure, Section

BLACKOUT = {f"BlackOut, α = {power:g}": Method("BlackOut", power=power) for power in (0.0, 0.5, 1.0)}
RANKING = Method("ranking", power=0.0)
POOR = {
    "NCE, z = 1": Method("NCE"),
    "NCE, z learned": Method("NCE", learn_z=True),
    "negative sampling": Method("negative sampling", power=0.75),
}
NORMALISATION = ("importance", "Bernoulli")


def run(lab: Lab) -> Findings:
    normalisation = rates.shared(lab)
    others = {**BLACKOUT, "ranking": RANKING, **POOR}
    sweeps = {label: rates.sweep(lab, {label: method}) for label, method in others.items()}
    # BlackOut's exponent is a choice like its rate, made in the same way.
    blackout = max(BLACKOUT, key=lambda label: _best(sweeps[label].log_likelihood[label]))
    methods = {
        **rates.NORMALISATION,
        "BlackOut": BLACKOUT[blackout],
        "ranking": RANKING,
        **POOR,
    }
    chosen = dict.fromkeys(rates.NORMALISATION, normalisation.best)
    chosen |= {
        label: sweeps[blackout if label == "BlackOut" else label].best for label in methods if label not in chosen
    }
    curves = train(lab, methods, chosen, iterations=lab.scale.iterations)
    main = [label for label in methods if label not in POOR]
    facts = lab.map(facts_of, [{"seed": seed} for seed in lab.seeds])
    section = Section(
        "Methods",
        [
            f"Every method trains on the same minibatches of {BATCH}, from class vectors of zero, by gradient "
            f"descent with momentum 0.99. Each example draws its own {K} negative classes. Bias is the log of the "
            "mean absolute difference of class probabilities: against exact training at the same iteration, against "
            "the model that made the data, and against that model on inputs never trained on.",
            Figure(
                "methods",
                "All methods that the paper plots, and systematic sampling. Median and quartiles over seeds.",
                curves.panels(list(MEASURES), main),
            ),
            curves.table(),
            Figure(
                "methods-left-out",
                "What the paper left out as too poor, beside exact training and importance sampling.",
                curves.panels(list(MEASURES), ["exact", "importance", *POOR]),
            ),
            "Rates come from a grid of factors of 2, by the exact log likelihood at the last step: "
            f"{normalisation.best:g} for exact training and the approximations of the normaliser together, and one "
            "for each other method. BlackOut's exponent comes from 0, ½ and 1 in the same way; "
            f"{blackout.split(' = ')[1]} is best.",
            Figure(
                "methods-rates",
                "The sweep that chose the rates, mean over its seeds; a gap where training diverged.",
                [
                    rates.panel("Methods", normalisation, *(sweeps[label] for label in (*BLACKOUT, "ranking"))),
                    rates.panel("Left out", *(sweeps[label] for label in POOR)),
                ],
            ),
        ],
    )
    return Findings(section, claims(curves, facts), curves.rows())


def facts_of(*, seed: int) -> dict[str, float]:
    """A cell: the Bernoulli exponent over the classes that occur, and the scores a minibatch takes."""
    problem = paper_problem(seed)
    counts = ClassCounts.from_targets(problem.target, problem.num_classes, smoothing=0)
    _, target = next(iter(Minibatches(problem, seed=seed)))
    assert isinstance(target, torch.Tensor)
    scored = {}
    generator = torch.Generator().manual_seed(seed)
    for label, method in {"importance": Method(), "Bernoulli": Method(sampler="Bernoulli")}.items():
        sampler = sampler_of(method, problem)
        drawn = [
            (~sampler(target, exclude=target.unsqueeze(1), generator=generator).empty()).sum() + len(target)
            for _ in range(20)
        ]
        scored[label] = float(torch.stack(drawn).double().mean())
    return {
        "alpha": exponent(counts.frequency(), K),
        "occur": float((problem.counts.raw > 0).sum()),
        "scored_importance": scored["importance"],
        "scored_bernoulli": scored["Bernoulli"],
        "scored_exact": float(len(target) * NUM_CLASSES),
    }


def claims(curves: Curves, facts: list[dict[str, float]]) -> tuple[Claim, ...]:
    alpha = Spread.of([fact["alpha"] for fact in facts])
    fold = Spread.of([fact["scored_exact"] / fact["scored_importance"] for fact in facts])
    scored = Spread.of([fact["scored_bernoulli"] for fact in facts])
    return (
        Claim(
            "bernoulli-exponent",
            "K = 20 results in Bernoulli probabilities b = f^0.54.",
            f"α = {alpha.text('.3f')} over the classes that occur",
            abs(alpha.median - 0.54) <= 0.02,
        ),
        Claim(
            "cost-fifty-fold",
            "All approximations take about 1,050 scores a minibatch against 50,000: roughly 50-fold less.",
            f"{facts[0]['scored_importance']:,.0f} scores by importance, {scored.text('.0f')} by Bernoulli sampling, "
            f"against {facts[0]['scored_exact']:,.0f}: {fold.text('.1f')}-fold",
            45 <= fold.median <= 55,
        ),
        _least_bias(curves),
        _alike(curves),
        _poor(
            curves, "nce-fixed-z-poor", "NCE, z = 1", "Noise contrastive estimation with z = 1 performs very poorly."
        ),
        _poor(curves, "negative-sampling-poor", "negative sampling", "Negative sampling performs significantly worse."),
    )


def _least_bias(curves: Curves) -> Claim:
    """The approximations of the normaliser against the methods that the paper plots beside them."""
    others = ("BlackOut", "ranking")
    bias = {label: Spread.of(curves.mean_bias(label)) for label in (*NORMALISATION, *others)}
    time = {label: Spread.of(curves.iterations(label)) for label in bias}
    least = max(bias[label].median for label in NORMALISATION) < min(bias[label].median for label in others)
    soonest = max(time[label].median for label in NORMALISATION) <= min(time[label].median for label in others)
    return Claim(
        "normalisation-least-bias",
        "The normalisation approximations are the most rapidly convergent in terms of bias.",
        "mean bias against exact training, and iterations to exact's bias: "
        + "; ".join(f"{label} {bias[label].text('.2f')}, {iterations_text(time[label])}" for label in bias),
        least and soonest,
        _which(least, soonest),
    )


def _which(least: bool, soonest: bool) -> str:
    if least and not soonest:
        return (
            "They stay nearest to exact training, yet another method comes to the true model's neighbourhood as "
            "soon: its own rate is not tied to exact training's."
        )
    if soonest and not least:
        return "They are soonest near the true model, yet another method's predictions are nearer to exact training's."
    return "" if least else "Another method stays nearer to exact training and is sooner near the true model."


def _alike(curves: Curves) -> Claim:
    importance, bernoulli = (curves.mean_bias(label) for label in NORMALISATION)
    gap = Spread.of([b - i for i, b in zip(importance, bernoulli, strict=True)])
    nearest = min(Spread.of(curves.mean_bias(label)).median for label in ("BlackOut", "ranking"))
    distance = nearest - max(Spread.of(importance).median, Spread.of(bernoulli).median)
    first, second = (Spread.of(curves.iterations(label)) for label in NORMALISATION)
    # Little is little beside what tells methods apart: less than half the way to the next one, and a tenth of the time.
    little = abs(gap.median) < distance / 2 and abs(second.median - first.median) <= 0.1 * first.median
    return Claim(
        "importance-like-bernoulli",
        "There is little difference between Bernoulli and importance sampling.",
        f"mean bias of Bernoulli less that of importance, seed by seed: {gap.text('.2f')}, where the nearest other "
        f"method is {distance:.2f} away; iterations to exact's bias {iterations_text(second)} and "
        f"{iterations_text(first)}",
        little,
        "" if little else "Bernoulli's sample size is random, which multiplies its noise by the mean score.",
    )


def _poor(curves: Curves, claim: str, label: str, statement: str) -> Claim:
    main = ("importance", "Bernoulli", "BlackOut", "ranking")
    bias, time = Spread.of(curves.mean_bias(label)), curves.iterations(label)
    worst = max(Spread.of(curves.mean_bias(other)).median for other in main)
    slowest = max(Spread.of(curves.iterations(other)).median for other in main)
    never = sum(map(math.isinf, time))
    ends = Spread.of(curves.last(label, "log_likelihood"))
    held = not bias.median <= worst and not Spread.of(time).median <= slowest
    return Claim(
        claim,
        statement,
        f"mean bias {bias.text('.2f')} where the worst of the others has {shown(worst, '.2f')}; within {NEAR} of "
        "exact's bias "
        + (
            f"never on {never} of {len(time)} seeds"
            if never
            else f"after {iterations_text(Spread.of(time))} iterations"
        )
        + f"; log likelihood at the end {ends.text('.2f')}",
        held,
        "" if held else "With a rate of its own it comes as near as the others.",
    )


def _best(values: list[float]) -> float:
    return max(-math.inf if math.isnan(value) else value for value in values)
