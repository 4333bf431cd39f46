"""What went wrong on a person's side."""


class UserError(Exception):
    """Something that whoever gave the command can mend: its message is all they need, without a traceback."""


class DiskFullError(UserError):
    """No space is left where something was to be written."""


class Notice(UserWarning):
    """Something that whoever gave the command should know of; work goes on."""


class NotSavedWarning(Notice):
    """Something could not be written now; work goes on, and it is tried again."""
