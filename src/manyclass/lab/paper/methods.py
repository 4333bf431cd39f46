"""The paper's figure on methods: log likelihood and bias of each, and of those it omits as too poor."""

import math

import torch

from manyclass.counts import ClassCounts, exponent
from manyclass.lab.experiment import Claim, Findings, Lab
from manyclass.lab.paper import rates
from manyclass.lab.paper.curves import BIAS_TOLERANCE, MEASURES, Curves, iterations_text, train
from manyclass.lab.problem import BATCH_SIZE, NUM_CLASSES, K, Minibatches, paper_problem
from manyclass.lab.softmax_regression import Method, sampler_of
from manyclass.lab.spread import Spread, format_number
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
    """Train with each method at its best learning rate."""
    normalisation = rates.normalisation_sweep(lab)
    others = {**BLACKOUT, "ranking": RANKING, **POOR}
    sweeps = {label: rates.sweep(lab, {label: method}) for label, method in others.items()}
    # BlackOut's exponent is chosen like its learning rate.
    blackout = max(BLACKOUT, key=lambda label: _best(sweeps[label].log_likelihood[label]))
    methods = {**rates.NORMALISATION, "BlackOut": BLACKOUT[blackout], "ranking": RANKING, **POOR}
    chosen = dict.fromkeys(rates.NORMALISATION, normalisation.best)
    chosen |= {
        label: sweeps[blackout if label == "BlackOut" else label].best for label in methods if label not in chosen
    }
    curves = train(lab, methods, chosen, iterations=lab.scale.iterations)
    main = [label for label in methods if label not in POOR]
    facts = lab.map(cost_facts, [{"seed": seed} for seed in lab.seeds])
    section = Section(
        "Methods",
        [
            f"Every method trains on the same minibatches of {BATCH_SIZE}, from zero class vectors, by gradient "
            f"descent with momentum 0.99. Each example has a separate draw of {K} negative classes. Bias is the log of "
            "the mean absolute difference of class probabilities: against exact training at the same iteration, "
            "against the true model, and against the true model on inputs that were not trained on.",
            Figure(
                "methods",
                "The methods that the paper plots, and systematic sampling. Median and quartiles over seeds.",
                curves.panels(list(MEASURES), main),
            ),
            curves.table(),
            Figure(
                "methods-left-out",
                "Methods that the paper omits as too poor, next to exact training and importance sampling.",
                curves.panels(list(MEASURES), ["exact", "importance", *POOR]),
            ),
            "Learning rates come from a grid of powers of 2, and maximise the exact log likelihood at the last step: "
            f"{normalisation.best:g} is shared by exact training and the approximations of the normaliser; each other "
            "method has a separate one. BlackOut's exponent is chosen from 0, ½ and 1 in the same way; "
            f"{blackout.split(' = ')[1]} is best.",
            Figure(
                "methods-rates",
                "The sweep that chose the learning rates, mean over its seeds. A gap marks diverged training.",
                [
                    rates.panel("Methods", normalisation, *(sweeps[label] for label in (*BLACKOUT, "ranking"))),
                    rates.panel("Methods that the paper omits", *(sweeps[label] for label in POOR)),
                ],
            ),
        ],
    )
    return Findings(section, _claims(curves, facts), curves.rows())


def cost_facts(*, seed: int) -> dict[str, float]:
    """Compute a cell: the Bernoulli exponent over the classes that occur, and the scores computed per minibatch."""
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


def _claims(curves: Curves, facts: list[dict[str, float]]) -> tuple[Claim, ...]:
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
        _least_bias_claim(curves),
        _similarity_claim(curves),
        _poor_claim(
            curves, "nce-fixed-z-poor", "NCE, z = 1", "Noise contrastive estimation with z = 1 performs very poorly."
        ),
        _poor_claim(
            curves, "negative-sampling-poor", "negative sampling", "Negative sampling performs significantly worse."
        ),
    )


def _least_bias_claim(curves: Curves) -> Claim:
    """Compare the approximations of the normaliser with the other methods that the paper plots."""
    others = ("BlackOut", "ranking")
    bias = {label: Spread.of(curves.mean_bias(label)) for label in (*NORMALISATION, *others)}
    time = {label: Spread.of(curves.iterations(label)) for label in bias}
    least = max(bias[label].median for label in NORMALISATION) < min(bias[label].median for label in others)
    soonest = max(time[label].median for label in NORMALISATION) <= min(time[label].median for label in others)
    return Claim(
        "normalisation-least-bias",
        "The normalisation approximations are the most rapidly convergent in terms of bias.",
        "mean bias against exact training, and iterations to the exact bias: "
        + "; ".join(f"{label} {bias[label].text('.2f')}, {iterations_text(time[label])}" for label in bias),
        least and soonest,
        _convergence_reason(least, soonest),
    )


def _convergence_reason(least: bool, soonest: bool) -> str:
    if least and not soonest:
        return (
            "They stay closest to exact training, but another method approaches the true model as early: its learning "
            "rate is not tied to that of exact training."
        )
    if soonest and not least:
        return "They approach the true model first, but another method's predictions are closer to exact training's."
    return "" if least else "Another method stays closer to exact training and approaches the true model earlier."


def _similarity_claim(curves: Curves) -> Claim:
    importance, bernoulli = (curves.mean_bias(label) for label in NORMALISATION)
    gap = Spread.of([b - i for i, b in zip(importance, bernoulli, strict=True)])
    nearest = min(Spread.of(curves.mean_bias(label)).median for label in ("BlackOut", "ranking"))
    distance = nearest - max(Spread.of(importance).median, Spread.of(bernoulli).median)
    first, second = (Spread.of(curves.iterations(label)) for label in NORMALISATION)
    # "Little difference" means less than half the distance to the next method, and at most a tenth of the iterations.
    little = abs(gap.median) < distance / 2 and abs(second.median - first.median) <= 0.1 * first.median
    return Claim(
        "importance-like-bernoulli",
        "There is little difference between Bernoulli and importance sampling.",
        f"mean bias of Bernoulli minus that of importance sampling, per seed: {gap.text('.2f')}; the nearest other "
        f"method is {distance:.2f} away; iterations to the exact bias {iterations_text(second)} and "
        f"{iterations_text(first)}",
        little,
        "" if little else "Bernoulli's sample size is random, which adds noise in proportion to the mean score.",
    )


def _poor_claim(curves: Curves, claim: str, label: str, statement: str) -> Claim:
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
        f"mean bias {bias.text('.2f')}, worst of the other methods {format_number(worst, '.2f')}; within "
        f"{BIAS_TOLERANCE} of the exact bias "
        + (
            f"never on {never} of {len(time)} seeds"
            if never
            else f"after {iterations_text(Spread.of(time))} iterations"
        )
        + f"; final log likelihood {ends.text('.2f')}",
        held,
        "" if held else "With a separate learning rate it performs as well as the others.",
    )


def _best(values: list[float]) -> float:
    return max(-math.inf if math.isnan(value) else value for value in values)
