"""The command `manyclass study`."""

import textwrap
from dataclasses import replace
from pathlib import Path

import click

from manyclass.cli.options import check_device
from manyclass.cli.progress import progress
from manyclass.errors import UserError


@click.command()
@click.option(
    "--data",
    type=click.Path(path_type=Path),
    help="A text file, or a folder with train.txt and valid.txt; .gz, .xz and .bz2 too. Default: the source of "
    "Python's standard library.",
)
@click.option("--held-out", type=click.Path(path_type=Path), help="A text file to evaluate on.")
@click.option(
    "--split", type=click.Choice(["spaces", "words"]), default="spaces", show_default=True, help="How to split text."
)
@click.option(
    "--min-count", type=click.IntRange(min=1), default=1, show_default=True, help="Rarer tokens become a class, <unk>."
)
@click.option(
    "--out", type=click.Path(path_type=Path), default="study-report", show_default=True, help="Folder for the report."
)
@click.option("--quick", is_flag=True, help="30,000 tokens, one epoch: a few minutes.")
@click.option("--full", is_flag=True, help="All of the text, 3 epochs, 3 seeds: hours, or minutes on a GPU.")
@click.option("--tokens", type=click.IntRange(min=1), help="Tokens to train on.")
@click.option("--epochs", type=click.IntRange(min=1), help="Epochs of each training.")
@click.option("--seeds", type=click.IntRange(min=1), help="Number of seeds.")
@click.option("--k", type=click.IntRange(min=1), help="Classes drawn per step in trainings; default: one in a hundred.")
@click.option("--design", "designs", multiple=True, help="Design to compare; repeat for more. Default: all.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="The first seed.")
@click.option("--device", default="cpu", show_default=True, help="Device: cpu or cuda.")
@click.option("--jobs", type=click.IntRange(min=1), default=1, show_default=True, help="Trainings to run in parallel.")
@click.option("--report/--no-report", default=True, help="Write the report page.")
@click.option("--redraw", is_flag=True, help="Only write the report page again, from the results in --out.")
def study(
    data: Path | None,
    held_out: Path | None,
    split: str,
    min_count: int,
    out: Path,
    quick: bool,
    full: bool,
    tokens: int | None,
    epochs: int | None,
    seeds: int | None,
    k: int | None,
    designs: tuple[str, ...],
    seed: int,
    device: str,
    jobs: int,
    report: bool,
    redraw: bool,
) -> None:
    """Compare sampling designs on a text: error, time and held-out loss of each, beside exact training.

    By default this takes half an hour on two cores, for the first 300,000 tokens. Finished results are kept: an
    interrupted run continues where it stopped.
    """
    from manyclass.data import read_text, standard_library
    from manyclass.lab import study as room

    if quick and full:
        raise UserError("`--quick` and `--full` must not both be given")
    if data is None and held_out is not None:
        raise UserError(f"`--held-out` must come with `--data`, got {held_out} alone")
    base = room.QUICK if quick else room.FULL if full else room.DEFAULT
    scale = replace(base, tokens=tokens or base.tokens, epochs=epochs or base.epochs, seeds=seeds or base.seeds)
    room.check_designs(designs)
    check_device(device)
    try:
        if redraw:
            done = room.redraw(out)
        else:
            if data is None:
                text = standard_library()
            else:
                text = read_text(data, held_out=held_out, split=split, min_count=min_count)
            with progress() as on_progress:
                done = room.study(
                    text,
                    out,
                    scale=scale,
                    designs=designs or None,
                    k=k,
                    seed=seed,
                    device=device,
                    jobs=jobs,
                    report=report,
                    on_progress=on_progress,
                )
    except ImportError as error:
        raise UserError(str(error)) from error
    except KeyboardInterrupt:
        raise UserError("interrupted; finished results are kept: run the same command to continue") from None
    print("\n".join(textwrap.fill(sentence, 110, subsequent_indent="  ") for sentence in done.summary))
    if done.page is not None:
        print(f"report   {done.page}")
    print(f"results  {done.results}")
