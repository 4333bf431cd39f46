"""The study as a report."""

from manyclass.lab.spread import band, format_number
from manyclass.lab.study.analysis import Analysis
from manyclass.lab.study.designs import DESIGN_DESCRIPTIONS
from manyclass.lab.study.measures import TIMED_BATCH_SIZE
from manyclass.report import Curve, Figure, Panel, Report, ReportTable, Section


def report_of(analysis: Analysis) -> Report:
    """Build the report with all figures and tables of a study."""
    text, settings, machine = (analysis.results[name] for name in ("text", "settings", "machine"))
    notes = [
        "manyclass {manyclass}, torch {torch}, Python {python}; ".format(**analysis.results["versions"])
        + f"{machine['device']}, {machine['cores']} cores, {machine['gflops']:,.0f} GFLOP/s in the matrix product of a "
        + ("step, huge pages" if machine["huge_pages"] else "step, small pages")
        + f"; {analysis.results['date']}, {analysis.results['seconds']:,.0f} s.",
        f"{settings['seeds']} seeds from {settings['seed']}; {settings['jobs']} trainings in parallel.",
        "The folder of this page also holds results.json, errors.csv, times.csv, training.csv, and every figure as PNG "
        "and SVG.",
    ]
    part = "all of the text" if settings["tokens"] is None else "the start of the text"
    summary = (
        f"{text['source']}: {text['train_tokens']:,} training tokens ({part}), {text['held_out_tokens']:,} held-out "
        f"tokens, {text['classes']:,} classes. The model predicts the next token from the last five. "
        f"{settings['epochs']} epochs."
    )
    found = Section("Summary", analysis.summary())
    sections = [found, _overview(analysis), _errors(analysis), _times(analysis), _training(analysis)]
    return Report("Comparison of sampling designs", summary, sections, notes)


def _overview(analysis: Analysis) -> Section:
    k = analysis.middle_k
    rows = [
        [
            design,
            f"{analysis.error(design, k):.3f}",
            format_number(analysis.error(design, k, "bias_log_z"), "+.4f"),
            f"{analysis.error(design, k, 'gamma_rmse'):.3f}",
            f"{analysis.error(design, k, 'rows_touched'):,.0f}",
            f"{analysis.milliseconds(design, k):.2f}",
            DESIGN_DESCRIPTIONS[design],
        ]
        for design in analysis.designs
    ]
    columns = [
        "design",
        "RMS error of log Z̃",
        "bias of log Z̃",
        "RMS error of γ̃",
        "rows per step",
        "ms per step",
        "description",
    ]
    caption = (
        f"k = {k} classes scored per example, on the exactly trained model and a held-out batch of "
        f"{TIMED_BATCH_SIZE:,}: root mean square and mean of log Z̃ − log Z, root-mean-square norm of γ̃ − γ over all "
        "classes, distinct rows updated per step, and milliseconds per step, periodic rebuilds included."
    )
    return Section("Designs", [ReportTable(columns, rows, caption)])


def _errors(analysis: Analysis) -> Section:
    def panel(title: str, measure: str) -> Panel:
        curves = []
        for design in analysis.designs:
            ks = analysis.measured_ks(design)
            # Of the measures only the bias can be negative, which a logarithmic axis cannot show.
            curves.append(Curve(design, ks, [abs(analysis.error(design, k, measure)) for k in ks], points=True))
        return Panel(title, "classes scored, k", title, curves, log_x=True, log_y=True)

    figure = Figure(
        "error",
        "Errors on the exactly trained model and held-out data, mean over seeds.",
        [
            panel("RMS error of log Z̃", "rmse_log_z"),
            panel("|bias of log Z̃|", "bias_log_z"),
            panel("RMS error of γ̃", "gamma_rmse"),
            panel("rows updated per step", "rows_touched"),
        ],
    )
    text = (
        "Z̃ is unbiased in every design. log Z̃ has a small bias, to second order −Var(Z̃)/(2Z²), which falls with the "
        "square of the error."
    )
    return Section("Error by classes scored", [text, figure])


def _times(analysis: Analysis) -> Section:
    by_time, by_k = [], []
    for design in analysis.designs:
        ks = analysis.measured_ks(design)
        times = [analysis.milliseconds(design, k) for k in ks]
        by_time.append(Curve(design, times, [analysis.error(design, k) for k in ks], points=True))
        by_k.append(Curve(design, ks, times, points=True))
    figure = Figure(
        "frontier",
        "Each curve is one design with growing k. Lower left is better.",
        [
            Panel("error by step time", "ms per step", "RMS error of log Z̃", by_time, log_x=True, log_y=True),
            Panel("step time by k", "classes scored, k", "ms per step", by_k, log_x=True, log_y=True),
        ],
    )
    text = (
        f"A step draws, scores, computes gradients and updates rows, for a batch of {TIMED_BATCH_SIZE:,} without an "
        "encoder. Times are medians, with all designs timed in turn. Periodic rebuilds (clusters, an index, a learned "
        "table) are included in proportion."
    )
    return Section("Error by step time", [text, figure])


def _training(analysis: Analysis) -> Section:
    def label(design: str, k: int) -> str:
        is_main = k == analysis.results["settings"]["k"] or design == "exact"
        return design if is_main else f"{design}, k = {k:,}"

    by_step, by_time, rows = [], [], []
    exact = analysis.perplexity("exact", 0)
    for design, k in analysis.trained():
        runs = analysis.curves(design, k)
        losses = [run["loss"] for run in runs]
        by_step.append(band(label(design, k), runs[0]["step"], losses))
        seconds = [sum(column) / len(runs) for column in zip(*(run["train_seconds"] for run in runs), strict=True)]
        by_time.append(band(label(design, k), seconds, losses))
        found = analysis.perplexity(design, k)
        rows.append(
            [
                label(design, k),
                f"{k:,}",
                f"{analysis.results['rates'][design]:g}",
                f"{found:.2f}",
                f"{format_number(100 * (found / exact - 1), '+.2f')} %",
                f"{analysis.seconds(design, k):,.1f}",
            ]
        )
    axes = [("loss by step", "step", by_step, False), ("loss by time", "seconds of training", by_time, True)]
    figure = Figure(
        "training",
        "Exact held-out negative log likelihood. Median and quartiles over seeds.",
        [Panel(title, x, "nats per token", curves, log_x=log) for title, x, curves, log in axes],
    )
    columns = ["design", "k", "learning rate", "perplexity", "difference from exact", "seconds"]
    table = ReportTable(
        columns,
        rows,
        f"Held-out perplexity after {analysis.results['settings']['epochs']} epochs, from the mean loss over seeds.",
    )
    text = (
        "All trainings start from the same parameters, see the same batches and use Adagrad. The learning rate is "
        f"chosen from {', '.join(map(str, analysis.results['settings']['rates']))} for each design and for exact "
        "training, by the loss after one pass over the start of the text."
    )
    return Section("Training", [text, figure, table])
