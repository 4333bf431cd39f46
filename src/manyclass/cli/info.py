"""The command `manyclass info`."""

import contextlib
import datetime
from pathlib import Path

import click
from rich.table import Table

from manyclass.cli.options import checkpoint_option, path_argument
from manyclass.cli.tables import console
from manyclass.errors import UserError


@click.command()
@click.argument("model", type=path_argument())
@checkpoint_option()
def info(model: Path, checkpoint: str | None) -> None:
    """Show the data, classes and settings of a MODEL, and the checkpoints in its folder."""
    from manyclass import tasks

    opened = tasks.open_model(model, checkpoint=checkpoint)
    spec = opened.spec
    number = sum(parameter.numel() for parameter in opened.parameters())
    table = Table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    rows = {"kind": spec.task.kind}
    # A model may have been copied without its manifest.
    with contextlib.suppress(UserError):
        rows["data"] = tasks.read_manifest(model)["source"]["data"]
    head = opened.head
    rows |= {
        "classes": f"{len(spec.names):,}, such as " + ", ".join(repr(name) for name in spec.names[:5]),
        "examples": f"{spec.counts.sum():,.0f} trained on",
        "parameters": f"{number:,}; class vectors {head.num_classes:,} × {head.dim}",
        "sampler": repr(head.sampler).splitlines()[0].rstrip("("),
        "objective": type(head.objective).__name__,
        "settings": spec.settings.shown(),
    }
    for name, content in (("best", "model"), ("newest", "checkpoint"), ("previous", "checkpoint"), ("index", "index")):
        path = model / f"{name}.safetensors"
        if path.exists():
            rows[name] = _file(path, content)
    for name, value in rows.items():
        table.add_row(name, value)
    console().print(table, markup=False)


def _file(path: Path, content: str) -> str:
    from manyclass import storage

    stat = path.stat()
    when = datetime.datetime.fromtimestamp(stat.st_mtime).isoformat(" ", "seconds")
    try:
        # The outline alone reads no tensor, and so sees no damage in one.
        storage.check(path, content_type=content)
        about = storage.outline(path, content_type=content)
        match about:
            case {"state": {"training": {"progress": {"step": int() as number}}}} if content == "checkpoint":
                step = f"step {number:,}, "
            case _:
                step = "damaged (it has no state of a training), " if content == "checkpoint" else ""
    except UserError as error:
        step = f"damaged ({error}), "
    return f"{step}{stat.st_size / 2**20:,.1f} MiB, {when}"
