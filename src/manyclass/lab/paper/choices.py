"""What to do with a budget of scored classes: the explicit set, the split, whose draw it is, and which rows learn."""

from typing import Any

import torch

from manyclass.diagnostics import diagnose
from manyclass.heads import ClassHead
from manyclass.lab.experiment import Findings, Lab
from manyclass.lab.paper import rates
from manyclass.lab.paper.curves import MEASURES, train
from manyclass.lab.problem import BATCH, paper_problem
from manyclass.lab.softmax_regression import EXACT, Method, follow, head_of, settings
from manyclass.lab.spread import Spread, band, shown
from manyclass.report import Figure, Panel, Section, Table

BUDGET = 100  # classes scored for an example, its target included
ITERATION = 50
EACH = Method(k=BUDGET - 1)
SHARED = Method(k=BUDGET - 1, group_size=None)
SPLITS = (25, 50, 75, 95)
CHOICES = {
    "target, a draw each": EACH,
    "target, one draw": SHARED,
    # A minibatch of 50 has 48 or so distinct classes.
    "minibatch's classes": Method(k=BUDGET // 2, group_size=None, explicit="batch"),
    **{f"{n} frequent classes": Method(k=BUDGET - n, group_size=None, explicit=n) for n in SPLITS},
    "target, a draw each; observed rows learn": Method(k=BUDGET - 1, update="observed"),
    "minibatch's classes; observed rows learn": Method(
        k=BUDGET // 2, group_size=None, explicit="batch", update="observed"
    ),
}


def run(lab: Lab) -> Findings:
    rate = rates.shared(lab).best
    methods = {"exact": EXACT, **CHOICES}
    curves = train(lab, methods, dict.fromkeys(methods, rate), iterations=lab.scale.short)
    cells = [
        {"seed": seed, "method": settings(method), "exact_rate": rate, "draws": lab.scale.draws // 20}
        for seed in lab.seeds
        for method in CHOICES.values()
    ]
    found = lab.map(diagnosis, cells)
    by_label = {label: found[i :: len(CHOICES)] for i, label in enumerate(CHOICES)}
    errors = Table(
        ["choice", "error of log Z̃", "error of γ̃", "signs right", "classes scored", "rows touched"],
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
        f"After {ITERATION} iterations of exact training, over draws for a minibatch; median over seeds, with "
        "extremes.",
    )
    splits = [0, *SPLITS]
    split_labels = ["target, one draw", *(f"{n} frequent classes" for n in SPLITS)]
    split = [
        band(
            "one draw for the batch",
            splits,
            [[by_label[label][i]["rmse_log_z"] for label in split_labels] for i in range(len(lab.seeds))],
            points=True,
        )
    ]
    best = min(CHOICES, key=lambda label: Spread.of(curves.mean_bias(label)).median)
    each = "target, a draw each"
    learn = [Spread.of(curves.mean_bias(label)).median for label in (each, f"{each}; observed rows learn")]
    section = Section(
        "Choices",
        [
            f"Every choice below scores {BUDGET} classes for an example, by importance sampling from class "
            "frequencies, with exact training's rate. “A draw each” is the paper's way: it touches nearly "
            "every row in a step. “One draw” is shared by the minibatch, and touches about a hundred.",
            Figure(
                "choices",
                "Log likelihood and bias for each choice; median and quartiles over seeds.",
                curves.panels(list(MEASURES)),
            ),
            curves.table(),
            Figure(
                "choices-split",
                "The error of log Z̃ against how many of the most frequent classes are explicit.",
                [Panel("T−K explicit, K drawn", "explicit classes", "rms error of log Z̃", split)],
            ),
            errors,
            f"Least bias against exact training: {best}. Letting only the minibatch's own classes learn changes the "
            f"mean bias from {shown(learn[0], '.2f')} to {shown(learn[1], '.2f')} where each example has its draw: "
            "the section on signs and places shows how little a draw knows of the other classes' gradients.",
        ],
    )
    rows = curves.rows()
    rows += [
        {"method": label, "seed": seed, "iteration": ITERATION, **result}
        for label, results in by_label.items()
        for seed, result in zip(lab.seeds, results, strict=True)
    ]
    return Findings(section, (), rows)


def diagnosis(*, seed: int, method: dict[str, Any], exact_rate: float, draws: int) -> dict[str, float | None]:
    """A cell: the error of an approximation on a minibatch, in the middle of exact training."""
    problem = paper_problem(seed)
    trained = follow(problem, EXACT, lambda step, head: None, seed=seed, rate=exact_rate, points=[ITERATION])
    head = head_of(Method(**method), problem)
    assert isinstance(head, ClassHead)
    with torch.no_grad():
        head.weight.copy_(trained.weight)
    found = diagnose(
        head,
        problem.inputs[:BATCH],
        problem.target[:BATCH],
        draws=draws,
        generator=torch.Generator().manual_seed(seed),
    )
    return {
        "rmse_log_z": found.rmse_log_z,
        "gamma_rmse": found.gamma_rmse,
        "sign_agreement": found.sign_agreement,
        "classes_scored": found.classes_scored,
        "rows_touched": found.rows_touched,
    }
