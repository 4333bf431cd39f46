"""Ways to spend a budget of scored classes: explicit set, split, shared or separate draws, rows updated."""

from dataclasses import asdict
from typing import Any

import torch

from manyclass.diagnostics import diagnose
from manyclass.heads import ClassHead
from manyclass.lab.experiment import Findings, Lab
from manyclass.lab.paper import rates
from manyclass.lab.paper.curves import MEASURES, train
from manyclass.lab.problem import BATCH_SIZE, paper_problem
from manyclass.lab.softmax_regression import EXACT, Method, build_head, train_method
from manyclass.lab.spread import Spread, band, format_number
from manyclass.report import Figure, Panel, ReportTable, Section

BUDGET = 100  # classes scored for an example, its target included
ITERATION = 50
SPLITS = (25, 50, 75, 95)  # explicit classes
SEPARATE, SHARED = "target, separate draws", "target, shared draw"
OBSERVED = "observed rows only"
CHOICES = {
    SEPARATE: Method(k=BUDGET - 1),
    SHARED: Method(k=BUDGET - 1, group_size=None),
    # A minibatch of 50 has about 48 distinct classes.
    "minibatch's classes": Method(k=BUDGET // 2, group_size=None, explicit="batch"),
    **{f"{n} frequent classes": Method(k=BUDGET - n, group_size=None, explicit=n) for n in SPLITS},
    f"{SEPARATE}; {OBSERVED}": Method(k=BUDGET - 1, update="observed"),
    f"minibatch's classes; {OBSERVED}": Method(k=BUDGET // 2, group_size=None, explicit="batch", update="observed"),
}


def run(lab: Lab) -> Findings:
    """Train with each choice, and measure its error on one minibatch."""
    rate = rates.normalisation_sweep(lab).best
    methods = {"exact": EXACT, **CHOICES}
    curves = train(lab, methods, dict.fromkeys(methods, rate), iterations=lab.scale.short)
    cells = [
        {"seed": seed, "method": asdict(method), "exact_rate": rate, "draws": lab.scale.draws // 20}
        for seed in lab.seeds
        for method in CHOICES.values()
    ]
    found = lab.map(approximation_error, cells)
    by_label = {label: found[i :: len(CHOICES)] for i, label in enumerate(CHOICES)}
    errors = ReportTable(
        ["choice", "RMS error of log Z̃", "RMS error of γ̃", "correct signs", "classes scored", "rows updated"],
        [
            [
                label,
                *(
                    Spread.of([result[name] for result in results]).text(form)
                    for name, form in (
                        ("rmse_log_z", ".3f"),
                        ("gamma_rmse", ".3f"),
                        ("sign_agreement", ".3f"),
                        ("classes_scored", ".0f"),
                        ("rows_touched", ".0f"),
                    )
                ),
            ]
            for label, results in by_label.items()
        ],
        f"Errors on one minibatch after {ITERATION} iterations of exact training, over repeated draws. Median over "
        "seeds, with minimum and maximum.",
    )
    splits = [0, *SPLITS]
    split_labels = [SHARED, *(f"{n} frequent classes" for n in SPLITS)]
    split = [
        band(
            "draw shared by the batch",
            splits,
            [[by_label[label][i]["rmse_log_z"] for label in split_labels] for i in range(len(lab.seeds))],
            points=True,
        )
    ]
    best = min(CHOICES, key=lambda label: Spread.of(curves.mean_bias(label)).median)
    every, observed = (Spread.of(curves.mean_bias(label)).median for label in (SEPARATE, f"{SEPARATE}; {OBSERVED}"))
    section = Section(
        "Spending a budget of scored classes",
        [
            f"Each choice below scores {BUDGET} classes per example, by importance sampling from class frequencies, at "
            "the learning rate of exact training. “Separate draws”, one per example as in the paper, update nearly "
            "every row in a step. A “shared draw” for the whole minibatch updates about a hundred rows. “Observed "
            "rows only” updates the vectors of the minibatch's classes and no others.",
            Figure(
                "choices",
                "Log likelihood and bias for each choice. Median and quartiles over seeds.",
                curves.panels(list(MEASURES)),
            ),
            curves.table(),
            Figure(
                "choices-split",
                f"RMS error of log Z̃ by the number of explicit classes, of {BUDGET} scored in total. The explicit "
                "classes are the most frequent ones.",
                [Panel("Explicit and sampled classes", "explicit classes", "RMS error of log Z̃", split)],
            ),
            errors,
            f"The choice with the lowest bias against exact training is “{best}”. With separate draws, updating only "
            f"the minibatch's classes changes the mean bias from {format_number(every, '.2f')} to "
            f"{format_number(observed, '.2f')}: the section on gradients shows how little one draw says about the "
            "gradients of all other classes.",
        ],
    )
    rows = curves.rows()
    rows += [
        {"method": label, "seed": seed, "iteration": ITERATION, **result}
        for label, results in by_label.items()
        for seed, result in zip(lab.seeds, results, strict=True)
    ]
    return Findings(section, (), rows)


def approximation_error(*, seed: int, method: dict[str, Any], exact_rate: float, draws: int) -> dict[str, float | None]:
    """Compute a cell: the error of an approximation on a minibatch, in the middle of exact training."""
    problem = paper_problem(seed)
    trained = train_method(problem, EXACT, seed=seed, rate=exact_rate, points=[ITERATION])
    head = build_head(Method(**method), problem)
    assert isinstance(head, ClassHead)
    with torch.no_grad():
        head.weight.copy_(trained.weight)
    found = diagnose(
        head,
        problem.inputs[:BATCH_SIZE],
        problem.target[:BATCH_SIZE],
        draws=draws,
        generator=torch.Generator().manual_seed(seed),
    )
    names = ("rmse_log_z", "gamma_rmse", "sign_agreement", "classes_scored", "rows_touched")
    return {name: getattr(found, name) for name in names}
