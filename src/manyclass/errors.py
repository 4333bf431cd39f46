"""Errors and warnings for the user."""


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
