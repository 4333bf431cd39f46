"""Convergence as K goes to C, bias at finite K, and how much the approximate likelihood overestimates."""

import torch

from manyclass.lab.experiment import Claim, Findings, Lab
from manyclass.lab.paper import rates
from manyclass.lab.paper.curves import train
from manyclass.lab.paper.estimators import relative_z
from manyclass.lab.problem import BATCH_SIZE, NUM_CLASSES, paper_problem
from manyclass.lab.softmax_regression import EXACT, Head, Method, probabilities, sampler_of, train_method
from manyclass.lab.spread import Spread, band
from manyclass.report import Curve, Figure, Panel, Section
from manyclass.samplers import Bernoulli

KS = (5, 20, 80, 320, NUM_CLASSES)
B_VALUES = (0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.95)  # inclusion probabilities
ITERATION = 10  # early, because a second-order expansion needs a Z without dominant terms
SAMPLERS = ("importance", "Bernoulli", "systematic")
MONITOR_ITERATIONS = (1, 10, 25, 50, 100, 200, 400)


def run(lab: Lab) -> Findings:
    """Train with growing K, and compare the measured bias with the paper's formula."""
    rate = rates.normalisation_sweep(lab).best
    methods = {(name, k): Method(sampler=name, k=k, group_size=None) for name in SAMPLERS for k in KS}
    named = {"exact": EXACT} | {f"{name}, K = {k}": method for (name, k), method in methods.items()}
    curves = train(lab, named, dict.fromkeys(named, rate), iterations=lab.scale.short)

    def at_k(measure: str) -> list[Curve]:
        return [
            band(
                name,
                KS,
                [[curves.runs[f"{name}, K = {k}"][i][measure][-1] for k in KS] for i in range(len(lab.seeds))],
                points=True,
            )
            for name in SAMPLERS
        ]

    cells = [{"seed": seed, "exact_rate": rate, "draws": lab.scale.draws} for seed in lab.seeds]
    taylor = lab.map(taylor_bias, cells)
    points = [point for point in MONITOR_ITERATIONS if point <= lab.scale.iterations]
    monitor = lab.map(likelihood_overestimate, [{**cell, "points": points} for cell in cells])
    section = Section(
        "Consistency",
        [
            "As K goes to C every estimate becomes exact, except importance sampling: it draws with replacement, so "
            "1,000 draws from 1,000 classes still miss a third of them. Here the minibatch shares one draw.",
            Figure(
                "consistency",
                f"Bias and log likelihood after {lab.scale.short} iterations with each K. Median and quartiles over "
                "seeds. A missing point is a difference of exactly 0.",
                [
                    Panel("Bias against exact training", "K", "log mean |difference|", at_k("bias_exact"), log_x=True),
                    Panel("Log likelihood", "K", "mean log likelihood", at_k("log_likelihood"), log_x=True),
                ],
            ),
            "The paper expands p̃(c) in 1 − κ and finds p(c)(1 + (1 − κ) p(N)). It omits the classes that were not "
            "sampled, whose mean cancels this term. To second order E[p̃(c)] = p(c)(1 + Var(Z̃)/Z²) for an explicit "
            "class, and E[log Z̃] = log Z − Var(Z̃)/(2Z²): the approximate likelihood is too high.",
            Figure(
                "taylor",
                f"Left: relative bias of the target's probability when each class is sampled with probability b, after "
                f"{ITERATION} iterations of exact training; absolute values, because the paper's formula is negative. "
                "Right: approximate minus exact log likelihood during exact training, K = 20.",
                [
                    Panel(
                        "E[p̃]/p − 1 of the target",
                        "b",
                        "absolute value",
                        [
                            band("measured", B_VALUES, [_absolute(r["measured"]) for r in taylor], points=True),
                            band("the paper's formula", B_VALUES, [_absolute(r["paper"]) for r in taylor], dashed=True),
                            band("corrected", B_VALUES, [_absolute(r["corrected"]) for r in taylor], dashed=True),
                        ],
                        log_y=True,
                    ),
                    Panel(
                        "Overestimate of the log likelihood",
                        "iteration of exact training",
                        "E[log p̃] − log p",
                        [band(name, points, [r[name] for r in monitor], points=True) for name in SAMPLERS],
                        log_x=True,
                    ),
                ],
            ),
        ],
    )
    rows = curves.rows()
    rows += [
        {
            "method": "sampled with probability b",
            "seed": seed,
            "b": b,
            **{name: r[name][i] for name in ("measured", "paper", "corrected")},
        }
        for seed, r in zip(lab.seeds, taylor, strict=True)
        for i, b in enumerate(B_VALUES)
    ]
    rows += [
        {"method": name, "seed": seed, "iteration": point, "overestimate": r[name][i]}
        for seed, r in zip(lab.seeds, monitor, strict=True)
        for name in SAMPLERS
        for i, point in enumerate(points)
    ]
    return Findings(section, _claims(taylor, monitor), rows)


def _absolute(values: list[float]) -> list[float]:
    return [abs(value) for value in values]


def taylor_bias(*, seed: int, exact_rate: float, draws: int) -> dict[str, list[float]]:
    """Compute a cell: E[p̃(target)]/p(target) - 1, mean over a minibatch, measured and by two formulas."""
    problem = paper_problem(seed)
    head = train_method(problem, EXACT, seed=seed, rate=exact_rate, points=[ITERATION])
    p, target = probabilities(head, problem.inputs[:BATCH_SIZE]).double(), problem.target[:BATCH_SIZE]
    own = p.gather(1, target.unsqueeze(1)).squeeze(1)
    rest = p.scatter(1, target.unsqueeze(1), 0.0)
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, list[float]] = {"measured": [], "paper": [], "corrected": []}
    for b in B_VALUES:
        share = torch.full((problem.num_classes,), b, dtype=torch.float64)
        ratio = relative_z(Bernoulli.from_probabilities(share, group_size=1), p, target, draws, generator)
        found["measured"].append(float((1 / ratio).mean() - 1))
        # This is (1 - κ) p(N); the sampled classes hold b (1 - p) of the probability on average.
        found["paper"].append(float(((1 - 1 / b) * b * (1 - own)).mean()))
        found["corrected"].append(float(((1 / b - 1) * rest.square().sum(1)).mean()))
    return found


def likelihood_overestimate(*, seed: int, exact_rate: float, draws: int, points: list[int]) -> dict[str, list[float]]:
    """Compute a cell: for each sampler E[log p̃(target)] - log p(target) with K = 20, mean over a minibatch."""
    problem = paper_problem(seed)
    target = problem.target[:BATCH_SIZE]
    generator = torch.Generator().manual_seed(seed)
    samplers = {name: sampler_of(Method(sampler=name), problem) for name in SAMPLERS}
    found: dict[str, list[float]] = {name: [] for name in SAMPLERS}

    def measure(step: int, head: Head) -> None:
        p = probabilities(head, problem.inputs[:BATCH_SIZE]).double()
        for name, sampler in samplers.items():
            ratio = relative_z(sampler, p, target, max(50, draws // 10), generator)
            found[name].append(-float(ratio.log().mean()))

    train_method(problem, EXACT, seed=seed, rate=exact_rate, points=points, measure=measure)
    return found


def _claims(taylor: list[dict[str, list[float]]], monitor: list[dict[str, list[float]]]) -> tuple[Claim, ...]:
    half = B_VALUES.index(0.5)
    measured, paper, corrected = (
        Spread.of([result[name][half] for result in taylor]) for name in ("measured", "paper", "corrected")
    )
    near = all(
        abs(result["paper"][i] - result["measured"][i]) <= 0.25 * abs(result["measured"][i])
        for result in taylor
        for i in range(half, len(B_VALUES))
    )
    mean = {name: Spread.of([sum(result[name]) / len(result[name]) for result in monitor]) for name in SAMPLERS}
    most = {name: Spread.of([max(result[name]) for result in monitor]) for name in SAMPLERS}
    return (
        Claim(
            "taylor-bias",
            "The bias of p̃ is p(1 + (1 − κ) p(N)) to first order in 1 − κ.",
            f"relative bias of the target's p̃ at b = ½: {measured.text('.4f')}; the paper's formula "
            f"{paper.text('.3f')}; Var(Z̃)/Z² {corrected.text('.4f')}",
            near,
            ""
            if near
            else "The formula omits the classes that were not sampled, whose mean cancels its term; the remaining bias "
            "is of second order, Var(Z̃)/Z².",
        ),
        Claim(
            "approximate-monitor",
            "It is useful to monitor the approximate likelihood, which scores few classes. (It is a little too high.)",
            "E[log p̃] − log p with K = 20, mean and maximum during training: "
            + "; ".join(f"{name} {mean[name].text('.3f')} and {most[name].text('.3f')}" for name in SAMPLERS),
            # The limit is a tenth of a nat; training gains nearly seven.
            all(spread.high < 0.1 for spread in most.values()),
        ),
    )
