"""The command `manyclass evaluate`."""

from pathlib import Path

import click

from manyclass.cli.launch import all_ranks, timeout_option
from manyclass.cli.options import at_option, check_device, checkpoint_option, kept, path_argument, source_options
from manyclass.cli.progress import evaluating
from manyclass.cli.tables import print_measured
from manyclass.data import Share
from manyclass.errors import UserError


@click.command()
@click.argument("model", type=path_argument())
@click.argument("data", type=path_argument())
@source_options(training=False)
@checkpoint_option()
@at_option("measure", "as in the training")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), metavar="FILE", help="Write the numbers to this file too."
)
@click.option("--device", default="cpu", show_default=True, help="Device: cpu or cuda.")
@timeout_option()
def evaluate(
    model: Path,
    data: Path,
    checkpoint: str | None,
    json_file: Path | None,
    device: str,
    timeout: float,
) -> None:
    """Evaluate a MODEL on DATA: exact likelihood and ranks over all classes, also by class frequency.

    For sequences, the last item of each user (or session) with two or more is predicted among all items, including
    those that the user already has, as predict --seen does; of a folder, those of its test file. If DATA is the file
    that the model was trained on, users with fewer than three items are left out: nothing was held back of them. For
    triples, those of a file or of a folder's test are predicted, and ranks leave out
    all other true answers: those in DATA and those that the model was trained on.

    torchrun --nproc-per-node N -m manyclass evaluate … divides the classes and the examples among N processes.
    """
    from manyclass import tasks
    from manyclass.storage import write_json

    check_device(device)
    if json_file is not None and not json_file.absolute().parent.is_dir():
        raise UserError(f"`--json` must be a file in a folder that exists, got {json_file}")
    source = tasks.Source(data, **kept("source"))
    with all_ranks(device, timeout) as ranks:
        opened = ranks.together(lambda: tasks.open_model(model, checkpoint=checkpoint, divisible=ranks.are_several))
        tasks.divide(opened, ranks, device)
        tasks.check_source(opened.spec.task, source)
        share = Share(ranks.rank, ranks.number)
        batches, summary = ranks.together(lambda: opened.spec.task.evaluation_batches(opened.spec, source, share))
        watched = evaluating(batches) if ranks.is_first else batches
        measured = tasks.measure(opened, watched, **kept("measure"), ranks=ranks)
    if not ranks.is_first:
        return
    for line in summary:
        print(line)
    # The numbers are complete only after the file has been read.
    if isinstance(batches, tasks.LabelledChunks) and batches.unknown:
        print(f"{batches.unknown:,} of {batches.rows:,} rows are left out: their labels are missing or unknown")
    print_measured(measured)
    if json_file is not None:
        write_json(json_file, measured.to_json())
