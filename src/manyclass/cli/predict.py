"""The command `manyclass predict`."""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from manyclass.cli.options import as_user_error, check_device, checkpoint_option, kept, path_argument, source_options
from manyclass.data.files import STANDARD_INPUT
from manyclass.errors import UserError

if TYPE_CHECKING:
    from manyclass.tasks import Prediction


_SPACES = str.maketrans("\t\r\n", "   ")


@click.command()
@click.argument("model", type=path_argument())
@click.argument("data", type=path_argument())
@source_options(training=False)
@click.option("--top", type=click.IntRange(min=1), default=5, show_default=True, help="Classes per example.")
@click.option("--index", "indexed", is_flag=True, help="Search a nearest-neighbour index, built once; needs faiss.")
@click.option(
    "--recall", type=click.FloatRange(0, 1, min_open=True), default=0.95, show_default=True, help="Recall of the index."
)
@click.option(
    "--probabilities",
    type=click.Choice(["exact", "estimated", "none"]),
    default="exact",
    show_default=True,
    help="Exact over all classes; estimated (with --index) from draws, with an error; or none.",
)
@click.option("--draws", type=click.IntRange(min=4), default=8, show_default=True, help="Draws per estimate.")
@click.option(
    "--seen/--unseen",
    default=None,
    help="Predict items that a user already has (default: no), or tails known from training (default: yes).",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object per line instead of TAB-separated columns.")
@click.option(
    "--out", type=click.Path(path_type=Path), metavar="FILE", help="File to write to; default: the standard output."
)
@checkpoint_option()
@click.option("--device", default="cpu", show_default=True, help="Device: cpu or cuda.")
def predict(
    model: Path,
    data: Path,
    top: int,
    indexed: bool,
    recall: float,
    probabilities: str,
    draws: int,
    seen: bool | None,
    as_json: bool,
    out: Path | None,
    checkpoint: str | None,
    device: str,
) -> None:
    """Predict the most probable classes of each example in DATA.

    DATA is as for fit; labels may be missing. For text, each line is a beginning; for sequences, all items of a user
    are; for triples, a line is head TAB relation, or has a ? in place of head or tail. If DATA is -, examples come
    from the standard input; lines of text and triples are answered one by one.

    Each line of the output has the example, then class, probability, class, probability, …, best first.
    """
    from manyclass import tasks

    check_device(device)
    if probabilities == "estimated" and not indexed:
        raise UserError("`--probabilities` must be exact or none without `--index`, got estimated")
    opened = tasks.open_model(model, checkpoint=checkpoint, device=device)
    if seen is not None and opened.spec.task.allows_seen is None:
        raise UserError(f"`--{'seen' if seen else 'unseen'}` must be left out for {opened.spec.task.kind}")
    # An index is tuned on the first examples, which are read again for the predictions.
    once = opened.spec.task.by_line and not indexed
    with _input(data, once=once) as path, _output(out) as file:
        source = tasks.Source(path, **kept("source"))
        tasks.check_source(opened.spec.task, source)
        index = None
        if indexed:
            with as_user_error():
                index, built = tasks.open_index(opened, source, model, recall=recall, k=top)
            if built:
                print(index.report, file=sys.stderr)
        predictions = tasks.predict(
            opened, source, number=top, index=index, probabilities=probabilities, allow_seen=seen, draws=draws
        )
        for prediction in predictions:
            print(_json(prediction) if as_json else _columns(prediction), file=file, flush=path == STANDARD_INPUT)


def _columns(prediction: "Prediction") -> str:
    parts = [_cell(prediction.shown)]
    for i, name in enumerate(prediction.names):
        parts.append(_cell(name))
        if prediction.probabilities is not None:
            parts.append(f"{prediction.probabilities[i]:.6g}")
    return "\t".join(parts)


def _cell(text: str) -> str:
    """Replace TABs and line ends, which would break columns and lines; --json keeps them."""
    return text.translate(_SPACES)


def _json(prediction: "Prediction") -> str:
    return json.dumps(
        {
            "example": prediction.shown,
            "classes": prediction.names,
            **({} if prediction.probabilities is None else {"probabilities": prediction.probabilities}),
            **({} if prediction.error is None else {"log_error": prediction.error}),
        },
        ensure_ascii=False,
    )


@contextmanager
def _input(path: Path, *, once: bool) -> Iterator[Path]:
    if path != STANDARD_INPUT or once:
        yield path
        return
    # The standard input is read twice, so it is copied.
    with tempfile.TemporaryDirectory(prefix="manyclass-") as folder:
        held = Path(folder) / "standard input"
        with held.open("wb") as file:
            shutil.copyfileobj(sys.stdin.buffer, file)
        yield held


@contextmanager
def _output(path: Path | None) -> Iterator[TextIO]:
    if path is None:
        yield sys.stdout
        sys.stdout.flush()
        return
    from manyclass.storage import atomic_write

    # The file is replaced at the end by an atomic rename, so an old file stays if an example cannot be read.
    with atomic_write(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        yield file
