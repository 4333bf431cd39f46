"""Errors and warnings for the user."""

import sys
import warnings


class UserError(Exception):
    """An error that the user can fix; its message is enough, without a traceback."""


class DiskFullError(UserError):
    """A write that failed because the disk is full."""


class Notice(UserWarning):
    """Something the user should know; the work goes on."""


class NotSavedWarning(Notice):
    """A write that failed; the work goes on, and the write is retried."""


class InaccurateWarning(Notice):
    """An error of log Z̃ so large that probabilities are wrong; the training goes on."""


def notify(message: str, category: type[Notice] = Notice) -> None:
    """Warn at the user's own line: the innermost one outside this package and torch."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("manyclass", "torch"):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)
