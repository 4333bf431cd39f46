"""Variance of Z̃ and of γ̃ for each sampler, simulated and by theory, and a correction of the paper's footnote."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from manyclass.lab.experiment import Claim, Findings, Lab
from manyclass.lab.paper import rates
from manyclass.lab.problem import BATCH_SIZE, paper_problem
from manyclass.lab.softmax_regression import EXACT, Method, probabilities, sampler_of, train_method
from manyclass.lab.spread import Spread, band
from manyclass.report import Curve, Figure, Panel, ReportTable, Section
from manyclass.samplers import Bernoulli, Importance, Sampler, Systematic

ITERATION = 50  # early, because the normaliser matters most while the model is uncertain
KS = (5, 10, 20, 50, 100, 200, 500)
SAMPLERS = {
    "importance": Method(),
    "importance, uniform": Method(power=0.0),
    "Bernoulli": Method(sampler="Bernoulli"),
    "Bernoulli, uniform": Method(sampler="Bernoulli", power=0.0),
    "systematic": Method(sampler="systematic"),
}
POPULATION, DRAWN = 2000, 100  # numbers in the footnote, all and sampled
RATIOS = (0.2, 0.5, 1.0, 2.0, 3.0, 4.4, 6.0, 9.0)  # of standard deviation to mean, σ/μ


def run(lab: Lab) -> Findings:
    """Simulate each sampler's variance and compare it with theory."""
    rate = rates.normalisation_sweep(lab).best
    cells = [
        {"seed": seed, "exact_rate": rate, "label": label, "k": k, "draws": lab.scale.draws}
        for seed in lab.seeds
        for label in SAMPLERS
        for k in KS
    ]
    found = lab.map(variances, cells)
    table = {(cell["label"], cell["k"], cell["seed"]): result for cell, result in zip(cells, found, strict=True)}
    panels = []
    for quantity, title in (("z", "Z̃"), ("gamma", "the target's γ̃")):
        curves = []
        for label in SAMPLERS:
            for kind in ("simulated", "theory"):
                runs = [[table[label, k, seed][f"{quantity}_{kind}"] for k in KS] for seed in lab.seeds]
                name = label if kind == "simulated" else f"{label}, theory"
                curves.append(
                    band(name, KS, runs, dashed=kind == "theory", points=kind == "simulated", colour_of=label)
                )
        y_label = "variance / Z²" if quantity == "z" else "variance"
        panels.append(Panel(f"Variance of {title}", "K", y_label, curves, log_x=True, log_y=True))

    keys = [(spread, seed) for seed in lab.seeds for spread in RATIOS]
    cells = [{"seed": seed, "spread": spread, "vectors": lab.scale.draws // 20} for spread, seed in keys]
    notes = lab.map(footnote, cells)
    note = dict(zip(keys, notes, strict=True))
    simulated = {
        label: band(label, RATIOS, [[note[s, seed][label] for s in RATIOS] for seed in lab.seeds], points=True)
        for label in ("importance, uniform", "Bernoulli, uniform", "systematic")
    }
    theory = [
        Curve(f"{label}, {source}", RATIOS, [formula(s) for s in RATIOS], dashed=True, colour_of=colour_of)
        for (label, source, colour_of), formula in FORMULAS.items()
    ]
    section = Section(
        "Variance of the estimators",
        [
            f"Repeated estimates for one minibatch of {BATCH_SIZE} after {ITERATION} iterations of exact training, "
            "with separate draws for each example. The theory is the paper's variance for importance and Bernoulli "
            "sampling, and for systematic sampling the integral over its one random number. To first order the "
            "variance of γ̃ = 1 − u/Z̃ is p² Var(Z̃)/Z², a good approximation while it is small.",
            Figure("estimators", "Variance, mean over the minibatch. Points: simulation. Dashes: theory.", panels),
            f"The paper's footnote compares importance and Bernoulli sampling of {DRAWN} out of {POPULATION:,} "
            "numbers with mean μ and standard deviation σ, drawn uniformly. It drops a term: E[Z²] is Cσ² + C²μ², so "
            "the variance of importance sampling is σ²C(C−1)/S and not (σ²+μ²)C²/S. Bernoulli sampling, which has a "
            "random sample size, then has the larger variance wherever σ/μ < √((C−S)/(S−1)) = 4.4.",
            Figure(
                "variance-footnote",
                "Expected variance of Z̃ at equal cost, μ = 1. Points: simulation. Dashes: formulas.",
                [
                    Panel(
                        "The footnote's comparison",
                        "σ/μ",
                        "variance",
                        [*simulated.values(), *theory],
                        log_x=True,
                        log_y=True,
                    )
                ],
            ),
            _table(lab, note),
        ],
    )
    rows = [{**cell, **result} for cell, result in zip(cells, notes, strict=True)]
    variance_rows = [{"k": k, "sampler": label, "seed": seed, **result} for (label, k, seed), result in table.items()]
    return Findings(section, (_claim(lab, note),), [*variance_rows, *({"sampler": "footnote", **row} for row in rows)])


def _trained(seed: int, rate: float) -> tuple[Tensor, Tensor]:
    """Return the probabilities [B, C] of the first examples during exact training, and their targets."""
    problem = paper_problem(seed)
    head = train_method(problem, EXACT, seed=seed, rate=rate, points=[ITERATION])
    return probabilities(head, problem.inputs[:BATCH_SIZE]).double(), problem.target[:BATCH_SIZE]


def variances(*, seed: int, exact_rate: float, label: str, k: int, draws: int) -> dict[str, float]:
    """Compute a cell: variance of Z̃/Z and of γ̃(target), mean over the minibatch, by simulation and by theory."""
    p, target = _trained(seed, exact_rate)
    method = SAMPLERS[label]
    problem = paper_problem(seed)
    sampler = sampler_of(Method(sampler=method.sampler, power=method.power, k=k), problem)
    ratio = relative_z(sampler, p, target, draws, torch.Generator().manual_seed(seed))
    own = p.gather(1, target.unsqueeze(1)).squeeze(1)
    theory = THEORY[method.sampler](inclusion(sampler), p.scatter(1, target.unsqueeze(1), 0.0), target, k)
    return {
        "z_simulated": float(ratio.var(0).mean()),
        "z_theory": float(theory.mean()),
        "gamma_simulated": float((own / ratio).var(0).mean()),
        "gamma_theory": float((own.square() * theory).mean()),
    }


def relative_z(sampler: Sampler, p: Tensor, target: Tensor, draws: int, generator: torch.Generator) -> Tensor:
    """Return Z̃/Z [draws, B] for probabilities p [B, C]: p(target) plus κ times p of the classes drawn."""
    own = p.gather(1, target.unsqueeze(1)).squeeze(1)
    found = []
    # A call costs more than its draws, so several draws share one.
    for part in torch.arange(draws).split(20):
        repeated = target.repeat(len(part))
        candidates = sampler(repeated, exclude=repeated.unsqueeze(1), generator=generator)
        kappa = candidates.log_kappa().exp().masked_fill(candidates.empty(), 0.0)
        drawn = p.repeat(len(part), 1).gather(1, candidates.ids())
        found.append(own + (kappa * drawn).sum(1).unflatten(0, (len(part), -1)))
    return torch.cat(found)


def inclusion(sampler: Sampler) -> Tensor:
    """Return the expected number of times [C] that each class is drawn."""
    every = torch.arange(sampler.num_classes)
    log_kappa = sampler(every).target_log_kappa
    assert log_kappa is not None
    return (-log_kappa()).exp()


def _importance(expected: Tensor, rest: Tensor, target: Tensor, k: int) -> Tensor:
    """Return 1/K (Σ p²/q - (Σ p)²), with q renormalised over all classes but the target."""
    q = expected / expected.sum()
    left = 1 - q[target]
    return (left * (rest.square() / q).sum(1) - rest.sum(1).square()) / k


def _bernoulli(expected: Tensor, rest: Tensor, target: Tensor, k: int) -> Tensor:
    """Return Σ (1/b - 1) p²."""
    return ((1 / expected - 1) * rest.square()).sum(1)


def _systematic(expected: Tensor, rest: Tensor, target: Tensor, k: int) -> Tensor:
    """Integrate over the random offset; the estimate changes only where a grid point passes the end of a class."""
    drawn = expected < 1 - 1e-12
    ends = expected[drawn].cumsum(0)
    edges = torch.cat([torch.zeros(1, dtype=ends.dtype), (ends % 1).sort().values, torch.ones(1, dtype=ends.dtype)])
    offset, share = (edges[1:] + edges[:-1]) / 2, edges.diff()
    # Count the grid points before the end of each class; a class is drawn once for each grid point within it.
    before = torch.ceil(ends - offset.unsqueeze(1))
    chosen = before.diff(dim=1, prepend=torch.zeros(len(offset), 1, dtype=ends.dtype))
    estimate = chosen @ (rest[:, drawn] / expected[drawn]).T
    mean = share @ estimate
    return share @ (estimate - mean).square()


THEORY: dict[str, Callable[[Tensor, Tensor, Tensor, int], Tensor]] = {
    "importance": _importance,
    "Bernoulli": _bernoulli,
    "systematic": _systematic,
}


def footnote(*, seed: int, spread: float, vectors: int) -> dict[str, float]:
    """Compute a cell: the expected variance of three estimates of a sum of numbers with mean 1 and this deviation."""
    torch.manual_seed(seed)
    ones = torch.ones(POPULATION, dtype=torch.float64)
    samplers = {
        "importance, uniform": Importance(ones, DRAWN, group_size=1),
        "Bernoulli, uniform": Bernoulli.from_probabilities(ones * DRAWN / POPULATION, group_size=1),
        "systematic": Systematic(ones, DRAWN, group_size=1),
    }
    # A Gamma distribution is positive, like the terms of Z, and allows any σ/μ.
    shape = torch.tensor(1 / spread**2, dtype=torch.float64)
    gamma = torch.distributions.Gamma(shape, shape)
    total = dict.fromkeys(samplers, 0.0)
    repeats = torch.zeros(400, dtype=torch.long)
    for _ in range(vectors):
        z = gamma.sample((POPULATION,))
        for label, sampler in samplers.items():
            candidates = sampler(repeats)
            total[label] += float((candidates.log_kappa().exp() * z[candidates.ids()]).sum(1).var()) / vectors
    return total


FORMULAS: dict[tuple[str, str, str], Callable[[float], float]] = {
    ("importance", "the footnote", "the footnote"): lambda s: (s**2 + 1) * POPULATION**2 / DRAWN - 1 / DRAWN,
    ("importance", "corrected", "importance, uniform"): lambda s: s**2 * POPULATION * (POPULATION - 1) / DRAWN,
    ("Bernoulli", "theory", "Bernoulli, uniform"): lambda s: (s**2 + 1) * POPULATION * (POPULATION / DRAWN - 1),
    ("systematic", "theory", "systematic"): lambda s: s**2 * POPULATION**2 / DRAWN * (1 - DRAWN / POPULATION),
}


def _table(lab: Lab, note: dict[tuple[float, int], dict[str, float]]) -> ReportTable:
    rows = []
    for s in RATIOS:
        simulated = {
            label: Spread.of([note[s, seed][label] for seed in lab.seeds]).text(".3g")
            for label in ("importance, uniform", "Bernoulli, uniform", "systematic")
        }
        paper, corrected, bernoulli, systematic = (formula(s) for formula in FORMULAS.values())
        rows.append(
            [
                f"{s:g}",
                simulated["importance, uniform"],
                f"{paper:.3g}",
                f"{corrected:.3g}",
                simulated["Bernoulli, uniform"],
                f"{bernoulli:.3g}",
                simulated["systematic"],
                f"{systematic:.3g}",
            ]
        )
    columns = ["σ/μ", "importance", "footnote's formula", "corrected", "Bernoulli", "formula", "systematic", "formula"]
    return ReportTable(
        columns, rows, "Variance of Z̃: simulated (median, minimum and maximum over seeds) and by formula."
    )


def _claim(lab: Lab, note: dict[tuple[float, int], dict[str, float]]) -> Claim:
    ratio = {
        s: Spread.of([note[s, seed]["Bernoulli, uniform"] / note[s, seed]["importance, uniform"] for seed in lab.seeds])
        for s in RATIOS
    }
    lower = sum(spread.median < 1 for spread in ratio.values())
    named = (0.2, 1.0, 3.0, 9.0)
    holds = lower == len(RATIOS)
    return Claim(
        "variance-footnote",
        "At the same cost Bernoulli sampling typically has a lower variance than importance sampling.",
        "variance of Bernoulli sampling divided by that of importance sampling: "
        + "; ".join(f"{ratio[s].text('.2f')} at σ/μ = {s:g}" for s in named)
        + f"; lower at {lower} of {len(RATIOS)} values of σ/μ",
        holds,
        ""
        if holds
        else f"The footnote drops C²μ² from E[Z²]. With it, Bernoulli sampling has the larger variance below σ/μ = "
        f"{math.sqrt((POPULATION - DRAWN) / (DRAWN - 1)):.1f}, which the simulation confirms.",
    )
