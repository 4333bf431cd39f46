"""The command `manyclass fit`."""

import functools
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import click

from manyclass.cli.launch import LostProcessError, all_ranks, number_of_processes, this_rank, timeout_option
from manyclass.cli.options import (
    SectionedCommand,
    apply,
    as_user_error,
    at_option,
    check_device,
    kept,
    kept_option,
    source_options,
)
from manyclass.cli.progress import evaluating, reading
from manyclass.cli.tables import print_measured
from manyclass.errors import DiskFullError, UserError
from manyclass.registry import OBJECTIVES, OPTIMIZERS, SAMPLERS


def _parse_k(text: str) -> int | str:
    if text != "auto" and not text.isdecimal():
        raise UserError(f"`--k` must be a whole number or auto, got {text!r}")
    return text if text == "auto" else int(text)


def _parse_widths(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if not part.isdecimal() or int(part) < 1:
            raise UserError(f"`--hidden` must be whole numbers, 1 or more, with commas between, got {text!r}")
    return tuple(map(int, parts))


_setting = functools.partial(kept_option, "settings")
_SAMPLER_HELP = (
    f"How to choose the classes a step scores: {', '.join(SAMPLERS)}; default: the cheapest way whose error of log Z̃ "
    "is small, chosen in training."
)
_K_HELP = "Classes drawn per step; auto: as many as --rmse-log-z needs. Default: auto, or 1024 with --sampler."
_ERROR_HELP = "The error of log Z̃ to keep below, in nats, where k is not a number; default: 0.15."
_OBJECTIVE_HELP = f"Objective to maximise: {', '.join(OBJECTIVES)}."
_HIDDEN_HELP = "Features: widths of the hidden layers, as in 512,128; default: none, a linear model."
_SETTINGS = (
    _setting("--epochs", type=int, help="Passes over the data."),
    _setting("--seconds", type=float, help="Seconds to train, instead of epochs."),
    _setting("--patience", type=int, help="Stop after this many evaluations in a row without a new best."),
    _setting("--batch-size", type=int, help="Examples per step; for text and sequences, pieces."),
    _setting("--optimizer", type=click.Choice([*OPTIMIZERS]), help="Optimiser of the class and input vectors."),
    _setting("--learning-rate", type=float, help="Learning rate of the class and input vectors."),
    _setting("--encoder-learning-rate", type=float, help="Learning rate of all other parameters, trained by Adam."),
    _setting(
        "--decay/--no-decay",
        help="Decay the learning rates linearly to 0; default: for text and sequences.",
    ),
    _setting("--clip", type=float, help="Clip the gradient norm at this value."),
    _setting("--sampler", type=click.Choice([*SAMPLERS]), metavar="NAME", help=_SAMPLER_HELP),
    _setting("--objective", type=click.Choice([*OBJECTIVES]), metavar="NAME", help=_OBJECTIVE_HELP),
    _setting("--k", parse=_parse_k, help=_K_HELP),
    _setting("--rmse-log-z", type=float, help=_ERROR_HELP),
    _setting("--dim", type=int, help="Dimension of the class vectors; not for features."),
    _setting("--hidden hidden_layers", parse=_parse_widths, help=_HIDDEN_HELP),
    _setting("--rank", type=int, help="Features: project them linearly to this many dimensions."),
    _setting("--layers", type=int, help="Text, sequences: layers of the LSTM."),
    _setting("--dropout", type=float, help="Text, sequences: dropout of the LSTM."),
    _setting("--length", type=int, help="Text, sequences: length of the pieces to train on."),
    _setting("--tied/--untied", help="Text, sequences: share the vectors of inputs and classes."),
    _setting("--regulariser", type=float, help="Triples: weight of the N3 regulariser."),
    _setting("--seed", type=int, help="Seed of everything random; default: 0."),
)


_EVALUATED_HELP = "Held-out examples per evaluation, default: 20000; the last evaluation uses all."
_PROBE_HELP = "Steps between probes of the error of log Z̃ in the log; default: at 1 % of the time; 0: none."
_EVALUATE_HELP = "Steps between evaluations; default: an epoch."
_AT_DEFAULT = "10; 5 for rows; 1,3,10 for triples. The best model of sequences is that of the best NDCG at the first"
_SCHEDULE = (
    at_option("settings", _AT_DEFAULT),
    kept_option("schedule", "--evaluate-every", type=click.IntRange(min=1), help=_EVALUATE_HELP),
    kept_option("schedule", "--evaluated", type=click.IntRange(min=1), help=_EVALUATED_HELP),
    kept_option("schedule", "--probe-every", type=click.IntRange(min=0), help=_PROBE_HELP),
)


class _Fit(SectionedCommand):
    sections: ClassVar[dict[str, str]] = {
        "out": "Output",
        "text": "Data",
        "epochs": "Training",
        "sampler": "Sampling",
        "dim": "Model",
        "seed": "Run",
    }


@click.command(cls=_Fit)
@click.argument("data", type=click.Path(path_type=Path), required=False)
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, metavar="MODEL", help="Folder for the model and its logs."
)
@source_options(training=True)
@apply(_SETTINGS)
@apply(_SCHEDULE)
@click.option(
    "--checkpoint-every",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="Seconds between checkpoints.",
)
@click.option("--device", help="Device: cpu or cuda; default: cpu, or with --resume the same as before.")
@click.option("--log", type=click.Choice(["tensorboard"]), help="Write a log beside log.csv.")
@click.option("--report/--no-report", default=True, help="Write report.html.")
@timeout_option()
@click.option("--resume", "resumed", is_flag=True, help="Resume the training in MODEL.")
@click.option("--auto-resume", is_flag=True, help="Resume the training in MODEL if there is one, else begin it.")
@click.option("--from-previous", is_flag=True, help="With --resume: start from the checkpoint before the newest.")
def fit(
    data: Path | None,
    out: Path,
    text: bool,
    sequences: bool,
    triples: bool,
    checkpoint_every: float,
    device: str | None,
    log: str | None,
    report: bool,
    timeout: float,
    resumed: bool,
    auto_resume: bool,
    from_previous: bool,
) -> None:
    """Train a model on DATA and save it in a folder.

    DATA is a file of rows (svmlight, .csv, .tsv, .parquet, .npz, .npy); with --text, text whose next token is
    predicted; with --sequences, lines of user and item in time order; with --triples, lines of head, relation
    and tail separated by TABs. Text files may be .gz, .xz or .bz2.

    Ctrl-C saves; --resume continues, also after a crash: the result is the same as that of an uninterrupted run. The
    folder gets the best and the newest model, log.csv and report.html.

    torchrun --nproc-per-node N -m manyclass fit … trains on N processes, each with a part of the classes and of every
    batch. --resume goes on with any number of processes; all of them must see DATA and MODEL. With --auto-resume,
    torchrun --max-restarts 3 … goes on from the newest checkpoint after a process has failed.
    """
    from manyclass import tasks
    from manyclass.report import check_libraries, write_report
    from manyclass.training import Callback, ProgressLine, TensorBoardLog

    check_device(device)
    if from_previous and not resumed:
        raise UserError("`--from-previous` must come with `--resume`")
    if data is None and not resumed:
        raise UserError("`DATA` must be given: the file to train on")
    for name, value in kept("source").items() if data is None else ():
        raise UserError(f"`--{name.replace('_', '-')}` must come with `DATA`, got {value} alone")
    kinds = [name for name, chosen in (("text", text), ("sequences", sequences), ("triples", triples)) if chosen]
    if len(kinds) > 1:
        raise UserError(f"`--{kinds[0]}` and `--{kinds[1]}` must not both be given")
    given, schedule = kept("settings"), kept("schedule")
    with as_user_error():
        settings = tasks.Settings(**given)
        if report:
            check_libraries()
        callbacks: list[Callback] = [ProgressLine()]
        if log == "tensorboard":
            callbacks.append(TensorBoardLog(out / "tensorboard"))
    source = None if data is None else tasks.Source(data, **kept("source"))
    options = tasks.RunOptions(
        **schedule,
        # A run limited by time shows some progress, even if it does not complete an epoch.
        evaluate_seconds=settings.seconds / 10 if settings.seconds and "evaluate_every" not in schedule else None,
        checkpoint_every=checkpoint_every,
        device=device,
        progress=reading() if this_rank() == 0 else None,
        watched=evaluating if this_rank() == 0 else iter,
        callbacks=callbacks,
    )
    with _explained(out) as again, all_ranks(device, timeout) as ranks:
        options = replace(options, ranks=ranks)
        resumed = resumed or (auto_resume and ranks.of_first((out / "fit.json").exists()) > 0)
        if source is None or resumed:
            fitted = tasks.resume(
                out,
                kind=kinds[0] if kinds else None,
                source=source,
                given=given | schedule,
                checkpoint="previous" if from_previous else "newest",
                options=options,
                on_read=_print_summary,
            )
        else:
            kind = kinds[0] if kinds else "features"
            tasks.check_source(tasks.TASKS[kind], source)
            fitted = tasks.fit(kind, source, settings, out, options=options, on_read=_print_summary)
        if not ranks.is_first:
            raise click.exceptions.Exit(2 if fitted.measured is None else 0)
        if fitted.measured is None:
            step = fitted.history.progress.step
            raise UserError(f"interrupted after step {step:,}; all of it is saved. To go on: {again}")
        page = None
        if report:
            content = tasks.report_of(fitted.model, fitted.history, fitted.measured, fitted.summary)
            page = write_report(content, out).page
    # Outside of that block: an output that cannot be written is no fault of the folder.
    print_measured(fitted.measured)
    if (error := tasks.error_summary(fitted.history, fitted.model.spec.settings)) is not None:
        print(error)
    if page is not None:
        print(f"report  {page}")
    print(f"model   {out}")


def _print_summary(data: Any) -> None:
    for line in data.summary:
        print(line, file=sys.stderr)
    print(file=sys.stderr, flush=True)


@contextmanager
def _explained(out: Path) -> Iterator[str]:
    """Yield the command that resumes the training; turn interrupts and failed writes into errors that name it."""
    program = "manyclass"
    if number_of_processes() > 1:
        program = f"torchrun --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']} -m manyclass"
    again = f"{program} fit --out {shlex.quote(str(out))} --resume"
    try:
        yield again
    except LostProcessError as error:
        raise UserError(f"{error}. To go on from the newest checkpoint: {again}") from error
    except KeyboardInterrupt:
        if not (out / "fit.json").exists():
            raise UserError("interrupted; nothing was trained yet: run the same command again") from None
        kept = "the training up to the newest checkpoint is kept"
        if not (out / "newest.safetensors").exists():
            kept = "no checkpoint was saved yet"
        raise UserError(f"interrupted; {kept}: {again}") from None
    except DiskFullError as error:
        raise UserError(f"{error}. Then go on: {again}") from None
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"cannot write into {out}: {reason}; the training so far is kept. To go on: {again}") from error
