"""The study as a report."""

from manyclass.lab.spread import band, shown
from manyclass.lab.study.designs import MEANING
from manyclass.lab.study.measures import TIMED_BATCH
from manyclass.lab.study.numbers import Numbers
from manyclass.report import Curve, Figure, Panel, Report, Section, Table


def report_of(numbers: Numbers) -> Report:
    """All figures and tables of a study."""
    text, settings, machine = (numbers.results[name] for name in ("text", "settings", "machine"))
    notes = [
        "manyclass {manyclass}, torch {torch}, Python {python}; ".format(**numbers.results["versions"])
        + f"{machine['device']}, {machine['cores']} cores, {machine['gflops']:,.0f} GFLOP/s in the product of a step, "
        + ("huge pages" if machine["huge_pages"] else "small pages")
        + f"; {numbers.results['date']}, {numbers.results['seconds']:,.0f} s.",
        f"{settings['seeds']} seeds from {settings['seed']}; {settings['jobs']} processes trained at once.",
        "Beside this page lie results.json, errors.csv, times.csv, training.csv and each figure as PNG and SVG.",
    ]
    cut = "all of the text" if settings["tokens"] is None else "the beginning of the text"
    summary = (
        f"{text['source']}: {text['train_tokens']:,} tokens to train on, {cut}; {text['held_out_tokens']:,} held out; "
        f"{text['classes']:,} classes. The model reads five tokens and predicts the next; {settings['epochs']} epochs."
    )
    found = Section("What it says", numbers.summary())
    sections = [found, _overview(numbers), _errors(numbers), _times(numbers), _training(numbers)]
    return Report("Which sampling design", summary, sections, notes)


def _overview(numbers: Numbers) -> Section:
    k = numbers.middle_k
    rows = [
        [
            design,
            f"{numbers.error(design, k):.3f}",
            shown(numbers.error(design, k, "bias_log_z"), "+.4f"),
            f"{numbers.error(design, k, 'gamma_rmse'):.3f}",
            f"{numbers.error(design, k, 'rows_touched'):,.0f}",
            f"{numbers.milliseconds(design, k):.2f}",
            MEANING[design],
        ]
        for design in numbers.designs
    ]
    columns = ["design", "error of log Z̃", "bias", "error of γ̃", "rows a step", "ms a step", "what it is"]
    caption = (
        f"k = {k} classes scored for each example, on the exactly trained model and a held-out batch of "
        f"{TIMED_BATCH:,}: root-mean-square and mean of log Z̃ − log Z, root-mean-square length of γ̃ − γ over all "
        "classes, distinct rows a step touches, and milliseconds of a step with its share of upkeep."
    )
    return Section("The designs", [Table(columns, rows, caption)])


def _errors(numbers: Numbers) -> Section:
    def panel(title: str, measure: str, *, size: bool = False) -> Panel:
        curves = []
        for design in numbers.designs:
            ks = numbers.sizes(design)
            y = [numbers.error(design, k, measure) for k in ks]
            curves.append(Curve(design, ks, [abs(value) for value in y] if size else y, points=True))
        return Panel(title, "classes scored, k", title, curves, log_x=True, log_y=True)

    figure = Figure(
        "error",
        "Errors on the exactly trained model, held-out data, mean over seeds.",
        [
            panel("error of log Z̃ (rms)", "rmse_log_z"),
            panel("bias of log Z̃ (size)", "bias_log_z", size=True),
            panel("error of γ̃ (rms length)", "gamma_rmse"),
            panel("rows touched a step", "rows_touched"),
        ],
    )
    text = (
        "Z̃ is unbiased in every one of these designs; log Z̃ is not quite: to second order its bias is −Var(Z̃)/(2Z²), "
        "so that it falls with the square of the error."
    )
    return Section("Error for the classes scored", [text, figure])


def _times(numbers: Numbers) -> Section:
    curves = [
        Curve(
            design,
            [numbers.milliseconds(design, k) for k in numbers.sizes(design)],
            [numbers.error(design, k) for k in numbers.sizes(design)],
            points=True,
        )
        for design in numbers.designs
    ]
    by_k = [
        Curve(
            design, numbers.sizes(design), [numbers.milliseconds(design, k) for k in numbers.sizes(design)], points=True
        )
        for design in numbers.designs
    ]
    figure = Figure(
        "frontier",
        "Each curve is one design with growing k. Down and to the left is better.",
        [
            Panel("the frontier", "ms a step", "error of log Z̃ (rms)", curves, log_x=True, log_y=True),
            Panel("time of a step", "classes scored, k", "ms a step", by_k, log_x=True, log_y=True),
        ],
    )
    text = (
        f"A step draws, scores, takes gradients and updates the rows it touched: batch {TIMED_BATCH:,}, no encoder, "
        "all designs timed in turn, medians. What a design renews every so many steps (clusters, an index, a learned "
        "table) is in it with its share."
    )
    return Section("Error for the time", [text, figure])


def _training(numbers: Numbers) -> Section:
    def label(design: str, k: int) -> str:
        usual = k == numbers.results["settings"]["k"] or design == "exact"
        return design if usual else f"{design}, k = {k:,}"

    by_step, by_time, rows = [], [], []
    exact = numbers.perplexity("exact", 0)
    for design, k in numbers.trained():
        runs = numbers.curves(design, k)
        losses = [run["loss"] for run in runs]
        by_step.append(band(label(design, k), runs[0]["step"], losses))
        seconds = [sum(column) / len(runs) for column in zip(*(run["train_seconds"] for run in runs), strict=True)]
        by_time.append(band(label(design, k), seconds, losses))
        found = numbers.perplexity(design, k)
        rows.append(
            [
                label(design, k),
                f"{k:,}",
                f"{numbers.results['rates'][design]:g}",
                f"{found:.2f}",
                f"{shown(100 * (found / exact - 1), '+.2f')} %",
                f"{numbers.seconds(design, k):,.1f}",
            ]
        )
    axes = [("against steps", "steps", by_step, False), ("against time", "seconds of training", by_time, True)]
    figure = Figure(
        "training",
        "Exact held-out negative log likelihood: median and quartiles over seeds.",
        [Panel(title, x, "nats a token", curves, log_x=log) for title, x, curves, log in axes],
    )
    columns = ["design", "k", "rate", "perplexity", "from exact", "seconds"]
    table = Table(
        columns,
        rows,
        f"Held-out perplexity after {numbers.results['settings']['epochs']} epochs, of the mean loss over seeds.",
    )
    text = (
        "Every training begins with the same parameters and sees the same batches; Adagrad, with the rate of "
        f"{', '.join(map(str, numbers.results['settings']['rates']))} that is best after one pass over the beginning "
        "of the text, for each design and for exact training by itself."
    )
    return Section("Training", [text, figure, table])
