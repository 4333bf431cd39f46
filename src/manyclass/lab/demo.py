"""A sampled and an exact softmax side by side, on text that every machine has."""

import math
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from manyclass.data import Text, standard_library
from manyclass.lab.folder import claim_folder
from manyclass.lab.softmax import ExactSoftmax
from manyclass.report import Curve, Figure, Panel, Report, Section, Table, write_report
from manyclass.tasks import TASKS, Measured, Model, RunOptions, Settings, TrainingData, measure, open_model, train
from manyclass.tasks.text import TextTask
from manyclass.training import HeldOut, ProgressLine, Record, Training

BEGINNINGS = (
    "raise ValueError (",
    "for i in range (",
    "if __name__ ==",
    "import os , sys",
    "def __init__ ( self ,",
    "with open ( path ,",
    "return self .",
)
_POINTS = 15  # evaluations of each training
_EVALUATED = 8000
_SETTINGS = Settings(
    dim=128,
    batch_size=32,
    length=35,
    optimizer="adagrad",
    learning_rate=0.1,
    encoder_learning_rate=0.004,
    dropout=0.15,
    decay=False,
)


@dataclass(frozen=True)
class Side:
    """One of the two trainings: its evaluations, and what came of it."""

    records: Sequence[Record]
    measured: Measured
    steps: int

    @property
    def evaluated(self) -> list[Record]:
        return [record for record in self.records if record.held_out_loss is not None]


def run_demo(out: Path, *, seconds: float, files: int | None, seed: int, device: str) -> Path:
    """Train both ways for as long, keep the sampled model, load it again, ask it, and draw a report.

    Args:
        out: a folder that is new, empty, or of an earlier demo.
        seconds: of each training.
        files: how many source files to read; None: all.
        seed: of everything random.
        device: where to.

    Returns:
        The report's page.

    Raises:
        UserError: the folder cannot be used.
        KeyboardInterrupt: Ctrl-C.
    """
    claim_folder(out, "demo")
    text = standard_library(files=files, seed=seed)
    kind = TASKS["text"]
    assert isinstance(kind, TextTask)
    settings = Settings(**{**_SETTINGS.to_json(), "seconds": seconds, "seed": seed}).over(kind.defaults)
    task = kind.training_data(text, settings, {"split": "spaces"})
    print("\n".join(task.summary))

    print(f"\nSampled: a step scores about a thousand classes. {seconds:g} seconds:", flush=True)
    folder = out / "model"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    options = RunOptions(
        evaluate_seconds=seconds / _POINTS,
        evaluated=_EVALUATED,
        device=device,
        callbacks=[ProgressLine(file=sys.stdout)],
    )
    fitted = train(task, folder, options)
    if fitted.measured is None:
        raise KeyboardInterrupt
    sampled = Side(fitted.history.records, fitted.measured, fitted.history.progress.step)

    print(f"\nExact: a step scores all {text.num_classes:,} classes. {seconds:g} seconds:", flush=True)
    exact = _exactly(task, seconds, device)
    verdict = compare(sampled, exact, seconds)
    print(f"\n{verdict}")

    model = open_model(folder, device=device)
    answers = complete(model, BEGINNINGS)
    print("\nThe saved model, loaded again, expects:")
    for beginning, expected in answers:
        print(f"  {beginning:24} {expected}")
    page = write_report(_report(text, task, sampled, exact, verdict, answers, seconds), out).page
    print(f"\nreport  {page}\nmodel   {folder}")
    return page


def _exactly(task: TrainingData, seconds: float, device: str) -> Side:
    """The same model and batches, with the softmax over all classes as PyTorch computes it."""
    settings = task.spec.settings
    torch.manual_seed(settings.seed)
    model = Model(task.spec).to(device)
    learner = ExactSoftmax(model.head.to_linear())
    table = {id(parameter): parameter for parameter in learner.parameters()}
    others = [parameter for parameter in model.encoder.parameters() if id(parameter) not in table]
    # The table's gradient is dense from the head: those of its inputs must be so too.
    for module in model.encoder.modules():
        if isinstance(module, torch.nn.Embedding):
            module.sparse = False
    history = Training(
        learner,
        task.train,
        [
            torch.optim.Adagrad(list(table.values()), lr=settings.learning_rate or 0.1),
            torch.optim.Adam(others, lr=settings.encoder_learning_rate or 0.001),
        ],
        encoder=model.encoder,
        seconds=seconds,
        held_out=HeldOut(task.held_out(_EVALUATED), seconds=seconds / _POINTS),
        report_every=20,
        clip=settings.clip,
        callbacks=[ProgressLine(file=sys.stdout)],
        seed=settings.seed,
    ).run()
    if history.stopped == "interrupted":
        raise KeyboardInterrupt
    return Side(history.records, measure(model, task.held_out(None)), history.progress.step)


def compare(sampled: Side, exact: Side, seconds: float) -> str:
    """Who has the lower held-out loss at equal times, after the first tenth."""
    ours = [(record.seconds, record.held_out_loss or math.nan) for record in sampled.evaluated]
    worse = []
    compared = 0
    for record in exact.evaluated:
        if record.seconds < seconds / 10:
            continue
        # What the sampled training had by then.
        before = [loss for at, loss in ours if at <= record.seconds * 1.01]
        if before:
            compared += 1
            if before[-1] >= (record.held_out_loss or math.nan):
                worse.append(record.seconds)
    ends = (
        f"At the end perplexity is {sampled.measured.perplexity:.1f} sampled, after {sampled.steps:,} steps, and "
        f"{exact.measured.perplexity:.1f} exact, after {exact.steps:,}."
    )
    if not compared:
        return f"{ends} There was no evaluation of both at equal times after the first tenth."
    if not worse:
        return f"At every equal time after the first tenth the sampled training has the lower perplexity. {ends}"
    at = ", ".join(f"{second:.0f} s" for second in worse)
    return f"The sampled training has the higher perplexity at {at}, of {compared} times compared. {ends}"


@torch.no_grad()
def complete(model: Model, beginnings: Sequence[str]) -> list[tuple[str, str]]:
    """What a model expects after each beginning, with probabilities."""
    model.eval()
    unknown = model.names.ids("<unk>") or 0
    found = []
    for beginning in beginnings:
        ids = [unknown if (i := model.names.ids(token)) is None else i for token in beginning.split()]
        hidden = model.encoder(torch.tensor([ids], device=model.device))[:, -1]
        best = model.head.topk(hidden, min(5, len(model.names)))
        guesses = zip(best.ids[0].tolist(), best.log_prob[0].exp().tolist(), strict=True)
        found.append((beginning, "   ".join(f"{model.names[i]} {p:.0%}" for i, p in guesses)))
    return found


def _report(
    text: Text,
    task: TrainingData,
    sampled: Side,
    exact: Side,
    verdict: str,
    answers: Sequence[tuple[str, str]],
    seconds: float,
) -> Report:
    from manyclass import __version__

    sides = (("sampled", sampled), ("exact", exact))

    def panel(title: str, label: str, at: str) -> Panel:
        curves = [
            Curve(
                name,
                [getattr(record, at) for record in side.evaluated],
                [math.exp(record.held_out_loss or math.nan) for record in side.evaluated],
                points=True,
            )
            for name, side in sides
        ]
        return Panel(title, label, "held-out perplexity", curves, log_x=at == "step")

    probed = [record for record in sampled.records if record.rmse_log_z is not None]
    curves = Figure(
        "curves",
        f"Exact held-out perplexity over all {text.num_classes:,} classes, on {_EVALUATED:,} tokens.",
        [panel("against time", "seconds of training", "seconds"), panel("against steps", "steps", "step")],
    )
    error = Figure(
        "error",
        "How far log Z̃ of a step is from log Z, root mean square over a few examples of its batch.",
        [
            Panel(
                "error of log Z̃ (rms)",
                "steps",
                "nats",
                [Curve("sampled", [r.step for r in probed], [r.rmse_log_z or 0.0 for r in probed], points=True)],
                log_y=True,
            )
        ],
    )
    frequency = Figure(
        "frequency",
        "By how often the class was trained on; a class that never was stands at a half.",
        [
            Panel(
                name,
                "times in training",
                name,
                [
                    Curve(
                        label,
                        [max(0.5, math.sqrt(band.low * band.high)) for band in side.measured.bands],
                        [band.metrics[name] for band in side.measured.bands],
                        points=True,
                    )
                    for label, side in sides
                ],
                log_x=True,
            )
            for name in sampled.measured.metrics
        ],
    )
    return Report(
        "The next token of Python source",
        f"{'; '.join(task.summary)}.",
        [
            Section("Sampled and exact, for as long", [verdict, curves]),
            Section(
                "What the saved model expects",
                [Table(["after", "it expects"], [(a, b.replace("   ", " · ")) for a, b in answers])],
            ),
            Section("Rare and frequent classes", [frequency]),
            *([Section("Error of the approximation", [error])] if probed else []),
        ],
        [
            f"manyclass {__version__}, torch {torch.__version__}; {text.source}; {seconds:g} seconds of training each, "
            f"{torch.get_num_threads()} threads.",
            "An LSTM of 128 units reads the tokens; inputs and classes share their vectors. Evaluations are no part of "
            "the time. Other versions of Python have a little other text.",
        ],
    )
