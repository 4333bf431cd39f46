"""The paper's figure on margins, for 1,000 classes as its text says and for 500 as its caption implies."""

import math

from manyclass.lab.experiment import Claim, Findings, Lab
from manyclass.lab.paper import rates
from manyclass.lab.paper.curves import MEASURES, Curves, iterations_text, nan_to_inf, train
from manyclass.lab.problem import NUM_CLASSES
from manyclass.lab.softmax_regression import EXACT, Method
from manyclass.lab.spread import Spread, format_number
from manyclass.report import Figure, ReportTable, Section

SUGGESTED = "margin log(C−1)"
MARGINS = {
    "margin 1": Method("ranking", power=0.0, margin=1.0),
    "margin 2": Method("ranking", power=0.0, margin=2.0),
    "margin 4": Method("ranking", power=0.0, margin=4.0),
    SUGGESTED: Method("ranking", power=0.0),
    "margin 9": Method("ranking", power=0.0, margin=9.0),
    "margin 12": Method("ranking", power=0.0, margin=12.0),
    "hinge 1": Method("hinge", power=0.0),
}


def run(lab: Lab) -> Findings:
    """Train ranking with each margin."""
    parts: list[str | Figure | ReportTable] = [
        "Logistic ranking against 20 negative classes drawn uniformly for each example, with one learning rate for "
        "all margins, chosen with 1,000 classes. Exact training has the learning rate that it shares with the "
        "approximations of the normaliser. The paper's caption says log(C−1) = 6.2126, which is the value for 500 "
        "classes, but refers to the setting with 1,000: results for both follow."
    ]
    curves, rows = {}, []
    margins = rates.sweep(lab, MARGINS)
    chosen = {"exact": rates.normalisation_sweep(lab).best} | dict.fromkeys(MARGINS, margins.best)
    for num_classes in (NUM_CLASSES, NUM_CLASSES // 2):
        found = train(
            lab, {"exact": EXACT, **MARGINS}, chosen, iterations=lab.scale.iterations, num_classes=num_classes
        )
        curves[num_classes] = found
        rows += found.rows(num_classes=num_classes)
        panels = found.panels(list(MEASURES))
        parts += [
            Figure(
                f"margins-{num_classes}",
                f"Ranking with {num_classes:,} classes, log(C−1) = {math.log(num_classes - 1):.4f}. Median and "
                "quartiles over seeds.",
                panels,
            ),
            found.table(),
        ]
    caption = f"The sweep that chose the learning rate of all margins, {margins.best:g}."
    parts.append(Figure("margins-rates", caption, [rates.panel("Margins", margins)]))
    return Findings(Section("Ranking margins", parts), _claims(curves), rows)


def _claims(curves: dict[int, Curves]) -> tuple[Claim, ...]:
    labels = ("margin 1", SUGGESTED)
    best, listed, worse, slower = {}, [], {}, {}
    for size, found in curves.items():
        bias = {label: Spread.of(found.mean_bias(label)).median for label in MARGINS}
        best[size] = min(bias, key=lambda label: nan_to_inf(bias[label]))
        values = (f"{label} {format_number(value, '.2f')}" for label, value in bias.items())
        listed.append(f"C = {size:,}: {', '.join(values)}")
        one, suggested = (found.mean_bias(label) for label in labels)
        worse[size] = Spread.of([a - b for a, b in zip(one, suggested, strict=True)])
        slower[size] = [Spread.of(found.iterations(label)) for label in labels]
    suggested_best = all(label == SUGGESTED for label in best.values())
    return (
        Claim(
            "margin-log-c-minus-1",
            "Among margins, log(C−1) tracks exact training most closely and has the lowest bias.",
            f"median of the mean bias against exact training, {'; '.join(listed)}",
            suggested_best,
            ""
            if suggested_best
            else f"Lowest bias: {', '.join(sorted(set(best.values())))}. With margin log(C−1), ranking equals the "
            "likelihood with one negative class, but here 20 are averaged: the mean of the logarithms is below the "
            "logarithm of the mean, and a larger margin compensates for that.",
        ),
        Claim(
            "margin-one-worse",
            "A margin of 1 is significantly less good than log(C−1).",
            "mean bias of margin 1 minus that of log(C−1), per seed: "
            + "; ".join(f"C = {size:,}: {spread.text('.2f')}" for size, spread in worse.items())
            + "; iterations to the exact bias, margin 1 against log(C−1): "
            + "; ".join(
                f"C = {size:,}: {' against '.join(map(iterations_text, spreads))}" for size, spreads in slower.items()
            ),
            all(spread.low > 0 for spread in worse.values())
            and all(one.median > suggested.median for one, suggested in slower.values()),
        ),
    )
