"""manyclass fit"""

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import click

from manyclass.cli.options import SectionedCommand, as_user_error, check_device, path_argument, source_options
from manyclass.cli.progress import reading
from manyclass.cli.tables import print_measured
from manyclass.errors import DiskFullError, UserError
from manyclass.registry import OBJECTIVES, OPTIMIZERS, SAMPLERS

F = TypeVar("F", bound=Callable[..., Any])

_SETTINGS = (
    click.option("--epochs", type=int, help="Passes over the data; rates of text and sequences fall to 0 over them."),
    click.option("--seconds", type=float, help="Train so long, instead of epochs."),
    click.option("--patience", type=int, help="Stop after so many evaluations without a better one."),
    click.option("--batch-size", type=int, help="Examples of a step; of text and sequences, pieces."),
    click.option("--optimizer", type=click.Choice([*OPTIMIZERS]), help="Of the rows of classes and inputs."),
    click.option("--learning-rate", type=float, help="Its learning rate."),
    click.option("--encoder-learning-rate", type=float, help="That of all other parameters, which Adam trains."),
    click.option("--decay/--no-decay", default=None, help="Whether rates fall to 0 over the epochs."),
    click.option("--clip", type=float, help="The greatest length of a gradient."),
    click.option(
        "--sampler", type=click.Choice([*SAMPLERS]), metavar="NAME", help=f"Which classes: {', '.join(SAMPLERS)}."
    ),
    click.option(
        "--objective",
        type=click.Choice([*OBJECTIVES]),
        metavar="NAME",
        help=f"What is maximised: {', '.join(OBJECTIVES)}.",
    ),
    click.option("--k", help="Classes drawn a step, or auto: as many as --rmse-log-z takes."),
    click.option("--rmse-log-z", type=float, help="Of log Z̃, with --k auto; default 0.1."),
    click.option("--dim", type=int, help="Of class vectors, but for features."),
    click.option("--hidden", help="Features: widths of a network's layers, as 512,128. Default: none, a linear model."),
    click.option("--rank", type=int, help="Features: project them to so many dimensions."),
    click.option("--layers", type=int, help="Text, sequences: of the LSTM."),
    click.option("--dropout", type=float, help="Text, sequences: of the LSTM."),
    click.option("--length", type=int, help="Text, sequences: of the pieces that are trained on."),
    click.option("--tied/--untied", default=None, help="Text, sequences: whether inputs and classes share vectors."),
    click.option("--regulariser", type=float, help="Triples: weight of the third power of entries."),
    click.option("--seed", type=int, help="Of everything random; default 0."),
)


def _settings(function: F) -> F:
    for option in reversed(_SETTINGS):
        function = option(function)
    return function


class _Fit(SectionedCommand):
    sections: ClassVar[dict[str, str]] = {
        "out": "Where to",
        "text": "What DATA is",
        "epochs": "Training",
        "sampler": "What a step scores",
        "dim": "Model",
        "seed": "Running it",
    }


@click.command(cls=_Fit)
@click.argument("data", type=path_argument(), required=False)
@click.option("--out", type=click.Path(path_type=Path), required=True, metavar="MODEL", help="Folder for all of it.")
@source_options(training=True)
@_settings
@click.option("--evaluate-every", type=click.IntRange(min=1), help="Steps between evaluations; default: an epoch.")
@click.option(
    "--evaluated",
    type=click.IntRange(min=1),
    help="Held-out examples of an evaluation while it trains, default: 20000; the last is of all.",
)
@click.option(
    "--probe-every",
    type=click.IntRange(min=0),
    help="Steps between probes of the error of log Z̃, default: 200; 0: none.",
)
@click.option(
    "--checkpoint-every",
    type=click.FloatRange(min=0),
    default=60.0,
    show_default=True,
    help="Seconds between checkpoints.",
)
@click.option("--device", help="cpu or cuda; default: cpu, and with --resume where it was.")
@click.option("--log", type=click.Choice(["tensorboard"]), help="Beside log.csv, which is always written.")
@click.option("--report/--no-report", default=True, help="Whether to draw the page.")
@click.option("--resume", "resumed", is_flag=True, help="Go on with the training in MODEL.")
@click.option("--from-previous", is_flag=True, help="With --resume: from the checkpoint before the newest.")
def fit(
    data: Path | None,
    out: Path,
    text: bool,
    sequences: bool,
    triples: bool,
    held_out: Path | None,
    format: str | None,
    label: str | None,
    labels: Path | None,
    split: str | None,
    min_count: int | None,
    evaluate_every: int | None,
    evaluated: int | None,
    probe_every: int | None,
    checkpoint_every: float,
    device: str | None,
    log: str | None,
    report: bool,
    resumed: bool,
    from_previous: bool,
    k: str | None,
    hidden: str | None,
    seed: int | None,
    **others: Any,
) -> None:
    """Train a model of DATA, and keep it in a folder.

    DATA is a file of rows (svmlight, .csv, .tsv, .parquet, .npz, .npy); with --text, text whose next token is
    predicted; with --sequences, lines of user and item in the order of time; with --triples, lines of head, relation
    and tail with TABs between. Text files may be .gz, .xz or .bz2.

    Ctrl-C saves; --resume goes on where it was, also after a crash: the result is the one of a run that was never
    stopped. The folder gets the best and the newest model, log.csv and report.html.
    """
    from manyclass import tasks
    from manyclass.report import check_libraries, write_report
    from manyclass.training import Callback, ProgressLine, TensorBoardLog

    check_device(device)
    if from_previous and not resumed:
        raise UserError("`--from-previous` must come with `--resume`")
    if data is None and not resumed:
        raise UserError("`DATA` must be given: the file to learn from")
    reads = {"held-out": held_out, "format": format, "label": label, "labels": labels, "split": split}
    for name, value in {**reads, "min-count": min_count}.items():
        if data is None and value is not None:
            raise UserError(f"`--{name}` must come with `DATA`, got {value} alone")
    kinds = [name for name, chosen in (("text", text), ("sequences", sequences), ("triples", triples)) if chosen]
    if len(kinds) > 1:
        raise UserError(f"`--{kinds[0]}` and `--{kinds[1]}` must not both be given")
    kind = kinds[0] if kinds else "features"
    with as_user_error():
        settings = tasks.Settings(**others, k=_k(k), hidden_layers=_widths(hidden), seed=0 if seed is None else seed)
        if report:
            check_libraries()
        callbacks: list[Callback] = [ProgressLine()]
        if log == "tensorboard":
            callbacks.append(TensorBoardLog(out / "tensorboard"))
    source = None
    if data is not None:
        source = tasks.Source(data, held_out, format, label, labels, split, min_count)

    def told(task: Any) -> None:
        for line in task.about:
            print(line, file=sys.stderr)
        print(file=sys.stderr, flush=True)

    given_looks = {"evaluate_every": evaluate_every, "evaluated": evaluated, "probe_every": probe_every}
    looks = {name: value for name, value in given_looks.items() if value is not None}
    again = f"manyclass fit --out {shlex.quote(str(out))} --resume"
    try:
        how = tasks.Fit(
            **looks,
            # Who says how long it may take wants to see something of it, however long an epoch is.
            evaluate_seconds=settings.seconds / 10 if settings.seconds and not evaluate_every else None,
            checkpoint_every=checkpoint_every,
            device=device,
            watch=reading(),
            callbacks=callbacks,
        )
        if resumed:
            given = settings.to_json() | ({"seed": None} if seed is None else {})
            done = tasks.resume(
                out,
                kind=kind if kinds else None,
                source=source,
                given={name: value for name, value in given.items() if value is not None} | looks,
                which="previous" if from_previous else "newest",
                how=how,
                told=told,
            )
        else:
            assert source is not None
            tasks.check_source(kind, source)
            done = tasks.fit(kind, source, settings, out, how=how, told=told)
        if done.measured is None:
            step = done.history.progress.step
            raise UserError(f"interrupted after step {step:,}; all of it is saved. To go on: {again}")
        print_measured(done.measured)
        if report:
            written = write_report(tasks.report_of(done.model, done.history, done.measured, done.about), out)
            print(f"report  {written.page}")
    except KeyboardInterrupt:
        if not (out / "fit.json").exists():
            raise UserError("interrupted; nothing was trained yet: the same command begins anew") from None
        kept = "what was trained by the newest checkpoint is kept"
        if not (out / "newest.safetensors").exists():
            kept = "no checkpoint was saved yet"
        raise UserError(f"interrupted; {kept}: {again}") from None
    except DiskFullError as error:
        raise UserError(f"{error}. Then go on: {again}") from None
    except BrokenPipeError:
        raise
    except OSError as error:
        reason = error.strerror or error
        raise UserError(f"cannot write into {out}: {reason}; what was trained is kept. To go on: {again}") from error
    print(f"model   {out}")


def _k(text: str | None) -> int | str | None:
    if text is None or text == "auto":
        return text
    if not text.isdecimal():
        raise UserError(f"`--k` must be a whole number or auto, got {text!r}")
    return int(text)


def _widths(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts:
        if not part.isdecimal() or int(part) < 1:
            raise UserError(f"`--hidden` must be whole numbers, 1 or more, with commas between, got {text!r}")
    return tuple(map(int, parts))
