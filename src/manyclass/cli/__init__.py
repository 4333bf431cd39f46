"""The command line."""

from manyclass.cli.main import app as app
from manyclass.cli.main import main as main
