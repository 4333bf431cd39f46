"""The command line: parses, calls, prints."""

from manyclass.cli.main import app as app
from manyclass.cli.main import main as main
