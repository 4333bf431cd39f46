"""The error of the approximation at the end of a training, in a sentence."""

from manyclass.samplers import WARNED_ERROR
from manyclass.training import History

TRUSTED_ERROR = 0.2  # nats: above, the default design is changed


def last_error(history: History) -> float | None:
    """Return the last pooled error of log Z̃; None if none was recorded."""
    found = [record.rmse_log_z for record in history.records if record.rmse_log_z is not None]
    return found[-1] if found else None


def error_summary(history: History) -> str | None:
    """Return a line on the error of log Z̃ at the end, which says so if it was too high; None if none was recorded."""
    error = last_error(history)
    if error is None:
        return None
    if error == 0:
        return "error of log Z̃ at the end: 0, all classes were scored"
    line = f"error of log Z̃ at the end: {error:.2g} nats"
    if error <= TRUSTED_ERROR:
        return line
    much = "much too high" if error > WARNED_ERROR else "too high"
    return (
        f"{line}, which is {much}: rare classes may be trained wrongly. Leave --sampler and --k out, or take "
        "a larger --k, --sampler tailored or --sampler exact"
    )
