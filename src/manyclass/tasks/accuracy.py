"""The error of the approximation in a training: a sentence on its end, and a figure of its course."""

from collections.abc import Sequence

from manyclass import defaults
from manyclass.report import Curve, Figure, Panel
from manyclass.samplers import TOO_HIGH, WARNED_ERROR
from manyclass.tasks.settings import Settings
from manyclass.training import History, Record


def highest_error(settings: Settings) -> float:
    """Return the error of log Z̃, in nats, above which a sampler that decides changes its design."""
    chosen = defaults.RMSE_LOG_Z if settings.rmse_log_z is None else settings.rmse_log_z
    return round(TOO_HIGH * chosen, 6)


def error_summary(history: History, settings: Settings) -> str | None:
    """Return a line on the error of log Z̃ at the end, which says so if it was too high; None if none was recorded."""
    error = next((r.rmse_log_z for r in reversed(history.records) if r.rmse_log_z is not None), None)
    if error is None:
        return None
    if error == 0:
        return "error of log Z̃ at the end: 0, all classes were scored"
    line = f"error of log Z̃ at the end: {error:.2g} nats"
    if error <= highest_error(settings):
        return line
    much = "much too high" if error > WARNED_ERROR else "too high"
    pinned = settings.sampler is not None or isinstance(settings.k, int)
    advice = (
        "Leave --sampler and --k out, or take a larger --k, --sampler tailored or --sampler exact"
        if pinned
        else "Train longer, so that the sampler can adapt, or take --sampler exact"
    )
    return f"{line}, which is {much}: rare classes may be trained wrongly. {advice}"


def error_figure(records: Sequence[Record], settings: Settings) -> Figure:
    """Return the error of log Z̃ by step, with a line above which it is too high."""
    probed = [record for record in records if record.rmse_log_z is not None]
    steps, highest = [record.step for record in probed], highest_error(settings)
    text = (
        "Root mean square difference between log Z̃ of a step and the exact log Z, on 64 examples of its batch, over "
        "the last eight probes; 0 if all classes are scored."
    )
    curves = [
        Curve("error of log Z̃", steps, [record.rmse_log_z or 0.0 for record in probed], points=True),
        Curve(f"too high above {highest:.2g}", steps, [highest] * len(steps), dashed=True),
    ]
    return Figure("error", text, [Panel("error of log Z̃ (rms)", "steps", "nats", curves)])
