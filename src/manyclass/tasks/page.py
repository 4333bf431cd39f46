"""The report of a training."""

from collections.abc import Sequence

from manyclass.report import Curve, Figure, Panel, Report, ReportTable, Section
from manyclass.tasks.accuracy import error_figure, error_summary
from manyclass.tasks.measure import Measured
from manyclass.tasks.model import Model
from manyclass.training import History, Record

_PHASES = {
    "batches": "reading batches",
    "forward": "encoder, draws and scores",
    "update": "gradients and optimisers",
    "evaluation": "evaluations",
    "callbacks": "logs and checkpoints",
}


def report_of(model: Model, history: History, measured: Measured, summary: Sequence[str]) -> Report:
    """Return a report: learning curves, error of the approximation, accuracy by class frequency, and time by phase."""
    from manyclass import __version__

    progress, settings = history.progress, model.spec.settings
    sections = [
        Section("Result", [_outcome(model, history, measured)]),
        _learning(history.records),
        _error(model, history),
        _frequency(measured),
        _time(history),
    ]
    notes = [
        f"manyclass {__version__}; {progress.step:,} steps, {progress.seconds:,.0f} s of training, stopped by "
        f"{history.stopped}.",
        f"Settings: {settings.shown()}.",
        "The folder also has log.csv, best.safetensors (the model), and each figure as PNG and SVG.",
    ]
    return Report(f"A model of {model.spec.task.kind}", f"{'; '.join(summary)}.", sections, notes)


def _outcome(model: Model, history: History, measured: Measured) -> ReportTable:
    by = "" if history.best_by == "loss" else f" {history.best_by}"
    rows = [
        ["held-out loss, exact", f"{measured.loss:.4f}"],
        ["perplexity", f"{measured.perplexity:,.2f}"],
        *([name, f"{value:.4f}"] for name, value in measured.metrics.items()),
        ["examples", f"{measured.examples:,.0f}"],
        ["classes", f"{len(model.names):,}"],
        [f"best{by} at step", "–" if history.best_step is None else f"{history.best_step:,}"],
    ]
    return ReportTable(
        ["measure", "value"], rows, "The best model on all held-out examples; loss in nats, over all classes."
    )


def _learning(records: Sequence[Record]) -> Section:
    evaluated = [record for record in records if record.held_out_loss is not None]
    axes = [("against steps", "steps", "step"), ("against time", "seconds of training", "seconds")]
    panels = [
        Panel(
            title,
            label,
            "loss, nats",
            [
                Curve(
                    "training, by the sampled objective", [getattr(r, at) for r in records], [r.loss for r in records]
                ),
                Curve(
                    "held out, exact",
                    [getattr(r, at) for r in evaluated],
                    [r.held_out_loss for r in evaluated if r.held_out_loss is not None],
                    points=True,
                ),
            ],
        )
        for title, label, at in axes
    ]
    names = list(evaluated[-1].metrics) if evaluated else []
    measured = Panel(
        "metrics",
        "steps",
        "mean",
        [Curve(name, [r.step for r in evaluated], [r.metrics[name] for r in evaluated], points=True) for name in names],
    )
    figure = Figure(
        "learning", "Evaluations during training may use a part of the held-out examples.", [*panels, measured]
    )
    return Section("Learning curves", [figure])


def _error(model: Model, history: History) -> Section:
    records, settings = history.records, model.spec.settings
    summary = error_summary(history, settings)
    sampler = f"The sampler is {type(model.head.sampler).__name__}."
    decisions = [record.decision for record in records if record.decision is not None]
    if summary is None:
        return Section("Error of the approximation", [f"No probe was recorded. {sampler}", *decisions])
    return Section("Error of the approximation", [summary, sampler, error_figure(records, settings), *decisions])


def _frequency(measured: Measured) -> Section:
    names = list(measured.metrics)
    rows = [
        [band.name, f"{band.examples:,.0f}", f"{band.loss:.3f}", *(f"{band.metrics[name]:.4f}" for name in names)]
        for band in measured.bands
    ]
    table = ReportTable(
        ["times in training", "held-out examples", "loss", *names],
        rows,
        "By the number of training examples of the class.",
    )
    middle = [max(0.5, (band.low * band.high) ** 0.5) for band in measured.bands]
    panels = [
        Panel(
            "accuracy by class frequency",
            "times in training",
            "mean",
            [Curve(name, middle, [band.metrics[name] for band in measured.bands], points=True) for name in names],
            log_x=True,
        ),
        Panel(
            "loss by class frequency",
            "times in training",
            "nats",
            [Curve("held out, exact", middle, [band.loss for band in measured.bands], points=True)],
            log_x=True,
        ),
    ]
    figure = Figure("frequency", "Rare classes are harder. A class without training examples is drawn at 0.5.", panels)
    return Section("Rare and frequent classes", [figure, table])


def _time(history: History) -> Section:
    whole = sum(history.spent.values()) or 1.0
    rows = [
        [_PHASES.get(name, name), f"{seconds:,.1f}", f"{seconds / whole:.0%}"]
        for name, seconds in sorted(history.spent.items(), key=lambda pair: -pair[1])
    ]
    note = "A GPU runs asynchronously: its time is charged to the phase that syncs with it."
    return Section("Time by phase", [ReportTable(["phase", "seconds", "share"], rows, note)])
