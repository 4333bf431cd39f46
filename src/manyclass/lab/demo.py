"""The demo: sampled and exact softmax trained for the same time on the source of Python's standard library."""

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
from manyclass.report import Curve, Figure, Panel, Report, ReportTable, Section, write_report
from manyclass.tasks import (
    TASKS,
    Measured,
    Model,
    RunOptions,
    Settings,
    TrainingData,
    error_figure,
    measure,
    open_model,
    train,
)
from manyclass.tasks.text import TextTask
from manyclass.training import HeldOut, ProgressLine, Record, Training

PROMPTS = (
    "raise ValueError (",
    "for i in range (",
    "if __name__ ==",
    "import os , sys",
    "def __init__ ( self ,",
    "with open ( path ,",
    "return self .",
)
EVALUATIONS_PER_TRAINING = 15
EVALUATED_TOKENS = 8000
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
class DemoTraining:
    """Records, final evaluation and number of steps of one of the two trainings."""

    records: Sequence[Record]
    measured: Measured
    steps: int

    @property
    def evaluated(self) -> list[Record]:
        """Records that hold a held-out loss."""
        return [record for record in self.records if record.held_out_loss is not None]


def run_demo(out: Path, *, seconds: float, files: int | None, seed: int, device: str) -> Path:
    """Train both ways for the same time, save the sampled model, reload it, complete prompts and write a report.

    Args:
        out: a folder that is new, empty, or written by an earlier demo.
        seconds: seconds of each training.
        files: number of source files to read; None means all.
        seed: seed of the data split and of both trainings.
        device: torch device to train on.

    Returns:
        Path of the report's page.

    Raises:
        UserError: the folder is not writable or holds files of another program.
        KeyboardInterrupt: the user pressed Ctrl-C.
    """
    claim_folder(out, "demo")
    text = standard_library(files=files, seed=seed)
    task = TASKS["text"]
    assert isinstance(task, TextTask)
    settings = Settings(**{**_SETTINGS.to_json(), "seconds": seconds, "seed": seed}).over(task.defaults)
    data = task.training_data(text, settings, {"split": "spaces"})
    print("\n".join(data.summary))

    print(f"\nSampled training: {seconds:g} seconds; the default decides which classes a step scores.", flush=True)
    folder = out / "model"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    options = RunOptions(
        evaluate_seconds=seconds / EVALUATIONS_PER_TRAINING,
        evaluated=EVALUATED_TOKENS,
        device=device,
        callbacks=[ProgressLine(file=sys.stdout)],
    )
    fitted = train(data, folder, options)
    if fitted.measured is None:
        raise KeyboardInterrupt
    sampled = DemoTraining(fitted.history.records, fitted.measured, fitted.history.progress.step)

    print(f"\nExact training: {seconds:g} seconds, all {text.num_classes:,} classes scored per step.", flush=True)
    exact = _train_exact(data, seconds, device)
    verdict = compare(sampled, exact, seconds)
    print(f"\n{verdict}")

    model = open_model(folder, device=device)
    completions = complete(model, PROMPTS)
    print("\nNext tokens that the saved and reloaded model predicts:")
    for prompt, predicted in completions:
        print(f"  {prompt:24} {predicted}")
    page = write_report(_report(text, data, sampled, exact, verdict, completions, seconds), out).page
    print(f"\nreport  {page}\nmodel   {folder}")
    return page


def _train_exact(data: TrainingData, seconds: float, device: str) -> DemoTraining:
    """Train the same model on the same batches with PyTorch's softmax over all classes."""
    settings = data.spec.settings
    torch.manual_seed(settings.seed)
    model = Model(data.spec).to(device)
    learner = ExactSoftmax(model.head.to_linear())
    table = {id(parameter): parameter for parameter in learner.parameters()}
    others = [parameter for parameter in model.encoder.parameters() if id(parameter) not in table]
    # The exact head's gradient of the shared table is dense, so its gradient as an input embedding must be dense too.
    for module in model.encoder.modules():
        if isinstance(module, torch.nn.Embedding):
            module.sparse = False
    history = Training(
        learner,
        data.train,
        [
            torch.optim.Adagrad(list(table.values()), lr=settings.learning_rate or 0.1),
            torch.optim.Adam(others, lr=settings.encoder_learning_rate or 0.001),
        ],
        encoder=model.encoder,
        seconds=seconds,
        held_out=HeldOut(data.held_out(EVALUATED_TOKENS), seconds=seconds / EVALUATIONS_PER_TRAINING),
        report_every=20,
        clip=settings.clip,
        callbacks=[ProgressLine(file=sys.stdout)],
        seed=settings.seed,
    ).run()
    if history.stopped == "interrupted":
        raise KeyboardInterrupt
    return DemoTraining(history.records, measure(model, data.held_out(None)), history.progress.step)


def compare(sampled: DemoTraining, exact: DemoTraining, seconds: float) -> str:
    """Return a sentence that compares held-out perplexity at equal times, after the first tenth of training."""
    losses = [(record.seconds, record.held_out_loss or math.nan) for record in sampled.evaluated]
    worse = []
    compared = 0
    for record in exact.evaluated:
        if record.seconds < seconds / 10:
            continue
        before = [loss for at, loss in losses if at <= record.seconds * 1.01]
        if before:
            compared += 1
            if before[-1] >= (record.held_out_loss or math.nan):
                worse.append(record.seconds)
    ends = (
        f"Final perplexity is {sampled.measured.perplexity:.1f} for sampled training ({sampled.steps:,} steps) and "
        f"{exact.measured.perplexity:.1f} for exact training ({exact.steps:,} steps)."
    )
    if not compared:
        return f"{ends} The two trainings have no evaluation at equal times after the first tenth."
    if not worse:
        return (
            f"After the first tenth sampled training has the lower perplexity at all {compared} times compared. {ends}"
        )
    at = ", ".join(f"{second:.0f} s" for second in worse)
    return f"Sampled training has the higher perplexity at {at}, of {compared} times compared. {ends}"


@torch.no_grad()
def complete(model: Model, prompts: Sequence[str]) -> list[tuple[str, str]]:
    """Return each prompt with the five most probable next tokens and their probabilities."""
    model.eval()
    unknown = model.names.ids("<unk>") or 0
    found = []
    for prompt in prompts:
        ids = [unknown if (i := model.names.ids(token)) is None else i for token in prompt.split()]
        hidden = model.encoder(torch.tensor([ids], device=model.device))[:, -1]
        best = model.head.topk(hidden, min(5, len(model.names)))
        guesses = zip(best.ids[0].tolist(), best.log_prob[0].exp().tolist(), strict=True)
        found.append((prompt, "   ".join(f"{model.names[i]} {p:.0%}" for i, p in guesses)))
    return found


def _report(
    text: Text,
    data: TrainingData,
    sampled: DemoTraining,
    exact: DemoTraining,
    verdict: str,
    completions: Sequence[tuple[str, str]],
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

    decisions = [record.decision for record in sampled.records if record.decision is not None]
    is_probed = any(record.rmse_log_z is not None for record in sampled.records)
    curves = Figure(
        "curves",
        f"Exact held-out perplexity over all {text.num_classes:,} classes, on {EVALUATED_TOKENS:,} tokens.",
        [panel("Perplexity by time", "seconds of training", "seconds"), panel("Perplexity by step", "step", "step")],
    )
    error = error_figure(sampled.records, _SETTINGS)
    frequency = Figure(
        "frequency",
        "Held-out metrics by the class's number of training examples. Classes without any are drawn at 0.5.",
        [
            Panel(
                name,
                "training examples of the class",
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
        f"{'; '.join(data.summary)}.",
        [
            Section("Sampled and exact training in equal time", [verdict, curves]),
            Section(
                "Predictions of the saved model",
                [ReportTable(["prompt", "likely next tokens"], [(a, b.replace("   ", " · ")) for a, b in completions])],
            ),
            Section("Rare and frequent classes", [frequency]),
            *([Section("Error of the approximation", [error, *decisions])] if is_probed else []),
        ],
        [
            f"manyclass {__version__}, torch {torch.__version__}; {text.source}; {seconds:g} seconds of training each, "
            f"{torch.get_num_threads()} threads.",
            "The encoder is an LSTM of 128 units; input and class vectors are shared. Evaluation time is not counted. "
            "The text differs slightly between Python versions.",
        ],
    )
