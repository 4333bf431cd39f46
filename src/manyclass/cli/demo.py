"""The command `manyclass demo`."""

from pathlib import Path

import click

from manyclass.cli.options import as_user_error, check_device
from manyclass.errors import UserError


@click.command()
@click.option(
    "--out", type=click.Path(path_type=Path), default="demo-report", show_default=True, help="Folder of the results."
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True),
    default=75.0,
    show_default=True,
    help="Seconds of each of the two trainings.",
)
@click.option("--files", type=click.IntRange(min=2), help="Number of source files to read; default: all.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of everything random.")
@click.option("--device", default="cpu", show_default=True, help="Device: cpu or cuda.")
def demo(out: Path, seconds: float, files: int | None, seed: int, device: str) -> None:
    """Train a model of Python source code with a sampled softmax, then for the same time with an exact one.

    The text is the source of the running Python's standard library. Shows both held-out curves and predictions after
    a few beginnings, and saves the model and a report in a folder.
    """
    from manyclass.lab.demo import run_demo
    from manyclass.report import check_libraries

    check_device(device)
    with as_user_error():
        check_libraries()
    try:
        run_demo(out, seconds=seconds, files=files, seed=seed, device=device)
    except KeyboardInterrupt:
        raise UserError("interrupted; nothing was saved: run the same command again") from None
