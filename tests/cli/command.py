"""The command line, in this process."""

import sys

import pytest

from manyclass import cli
from tests.tasks import problems

FLAGS = {"features": [], "text": ["--text"], "sequences": ["--sequences"], "triples": ["--triples"]}
OPTIONS = {"hidden_layers": "hidden"}


def run(*arguments):
    """Run `manyclass ARGUMENTS` and return the exit code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["manyclass", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return ended.value.code


def options(settings):
    """Return settings as command-line options."""
    found = []
    for name, value in settings.to_json().items():
        if value is not None and name != "seed":
            found += [f"--{OPTIONS.get(name, name.replace('_', '-'))}", value]
    return found


def fit(kind, data, out, *more):
    """Train on small data of a kind, without a report."""
    return run("fit", data, "--out", out, *FLAGS[kind], *options(problems.SETTINGS[kind]), "--no-report", *more)
