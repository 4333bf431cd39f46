"""manyclass evaluate"""

from pathlib import Path

import click

from manyclass.cli.options import check_device, checkpoint_option, path_argument, source_options
from manyclass.cli.tables import print_measured
from manyclass.errors import UserError


@click.command()
@click.argument("model", type=path_argument())
@click.argument("data", type=path_argument())
@source_options(training=False)
@checkpoint_option()
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write the numbers here too."
)
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
def evaluate(
    model: Path,
    data: Path,
    format: str | None,
    label: str | None,
    labels: Path | None,
    checkpoint: str | None,
    json_file: Path | None,
    device: str,
) -> None:
    """Measure a MODEL on DATA: exact likelihood and ranks over all classes, also by how frequent classes are.

    Of sequences the last item of each user is predicted, among all items, also those that the user has, as by
    predict --seen. Of triples those of a file are, or of a folder's test, with all other true answers left out of the
    ranks: those of DATA and those that the model was made from.
    """
    from manyclass import tasks
    from manyclass.storage import write_json

    check_device(device)
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise UserError(f"`--json` must be a file in a folder that is there, got {json_file}")
    opened = tasks.open_model(model, checkpoint=checkpoint, device=device)
    source = tasks.Source(data, format=format, label=label, labels=labels)
    tasks.check_source(opened.spec.task, source)
    batches, summary = opened.spec.task.evaluation_batches(opened.spec, source)
    measured = tasks.measure(opened, batches)
    for line in summary:
        print(line)
    # How many, is known when the file has been read.
    if isinstance(batches, tasks.LabelledChunks) and batches.unknown:
        print(f"{batches.unknown:,} of {batches.rows:,} rows left out: without a label, or with one that is not known")
    print_measured(measured)
    if json_file is not None:
        write_json(json_file, measured.to_json())
