"""manyclass demo"""

from pathlib import Path

import click

from manyclass.cli.options import as_user_error, check_device
from manyclass.errors import UserError


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path), default="demo-report", show_default=True, help="Folder for all of it."
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=75.0,
    show_default=True,
    help="Of each of the two trainings.",
)
@click.option("--files", type=click.IntRange(min=2), help="How many source files to read; default: all.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of everything random.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
def demo(out: Path, seconds: float, files: int | None, seed: int, device: str) -> None:
    """Train a model of the Python source on this machine, with a sampled softmax and, as long, with an exact one.

    The text is the source of the running Python's standard library. Shows both held-out curves, what the model
    expects after a few beginnings, and keeps the model and a report in a folder.
    """
    from manyclass.lab.demo import run_demo
    from manyclass.report import check_libraries

    check_device(device)
    with as_user_error():
        check_libraries()
    try:
        run_demo(out, seconds=seconds, files=files, seed=seed, device=device)
    except KeyboardInterrupt:
        raise UserError("interrupted; nothing is left to go on from: the same command begins anew") from None
