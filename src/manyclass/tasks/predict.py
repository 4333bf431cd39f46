"""Predictions of a model."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from manyclass import storage
from manyclass.errors import UserError
from manyclass.eval_mode import eval_mode
from manyclass.inference import Index, IndexState, top
from manyclass.tasks.model import Model
from manyclass.tasks.task import Source
from manyclass.training.batch import moved

_BATCH_EXAMPLES = 256
_TUNING_EXAMPLES = 512  # to tune an index on


@dataclass(frozen=True)
class Prediction:
    """The best classes of one example, best first.

    Args:
        shown: the example as text.
        names: names of the classes.
        probabilities: their probabilities; None if they were not wanted.
        error: error of the log-probabilities, half the width of a 95 % confidence interval; None if they are exact.
    """

    shown: str
    names: tuple[str, ...]
    probabilities: tuple[float, ...] | None
    error: float | None


@torch.no_grad()
def open_index(model: Model, source: Source, folder: Path, *, k: int, recall: float) -> tuple[Index, bool]:
    """Load the index of a model's classes from its folder, or build and save it.

    Args:
        model: model whose classes are indexed.
        source: source of the examples to tune the index on; the first few are used.
        folder: folder of the model.
        k: classes per example, as in `Index.build`.
        recall: wanted recall, as in `Index.build`.

    Returns:
        The index, and whether it was built now.

    Raises:
        ImportError: faiss is not installed.
        UserError: there are too few examples to tune the index on, or it cannot be saved.
    """
    path = folder / "index.safetensors"
    number = min(k, len(model.names))
    if path.exists():
        try:
            held = storage.load(path, content_type="index")
            index = Index.from_state(IndexState(held["tensors"], held["about"]), model.head)
            if index.report.k >= number and index.report.wanted >= recall:
                return index, False
        except (UserError, ValueError, KeyError, TypeError, AttributeError):
            pass  # The index is damaged or of another model, so it is built again.
    rows = []
    try:
        with eval_mode(model):
            for batch in model.spec.task.predict_batches(model.spec, source, size=_BATCH_EXAMPLES, seen=False):
                rows.append(model.encoder(moved(batch.inputs, model.device)))
                if sum(map(len, rows)) >= _TUNING_EXAMPLES:
                    break
    except UserError:
        # The examples before the faulty one are still answered; the prediction reports the fault.
        if sum(map(len, rows)) < 2:
            raise
    if sum(map(len, rows)) < 2:
        raise UserError(f"`data` must hold at least 2 examples to tune an index on, got {source.data}")
    index = Index.build(model.head, torch.cat(rows), k=number, recall=recall)
    state = index.state()
    content = {"tensors": dict(state.tensors), "about": dict(state.about)}
    storage.save(path, content, content_type="index", follow_links=False)
    return index, True


@torch.no_grad()
def predict(
    model: Model,
    source: Source,
    *,
    number: int = 5,
    index: Index | None = None,
    probabilities: str = "exact",
    allow_seen: bool | None = None,
    draws: int = 8,
    seed: int = 0,
) -> Iterator[Prediction]:
    """Iterate over the most probable classes of each example.

    Args:
        model: model that predicts.
        source: source of the examples.
        number: classes per example, at most all.
        index: index of the classes to search; None: score all classes exactly.
        probabilities: "exact", "estimated" or "none", see `inference.top`.
        allow_seen: whether to predict classes that an example already has; None: the default of the task.
        draws: draws per estimate.
        seed: seed of the draws.
    """
    generator = torch.Generator(model.device).manual_seed(seed)
    number = min(number, len(model.names))
    task = model.spec.task
    allow_seen = task.allows_seen if allow_seen is None else allow_seen
    with eval_mode(model):
        for batch in task.predict_batches(model.spec, source, size=_BATCH_EXAMPLES, seen=not allow_seen):
            hidden = model.encoder(moved(batch.inputs, model.device))
            exclude = None if allow_seen else moved(batch.seen, model.device)
            found = top(
                model.head,
                hidden,
                number,
                index=index,
                exclude=exclude,
                probabilities=probabilities,
                draws=draws,
                generator=generator,
            )
            ids = found.ids.tolist()
            chances = None if found.log_prob is None else found.log_prob.exp().tolist()
            errors = None if found.error is None else found.error.tolist()
            for i, shown in enumerate(batch.shown):
                # Fewer than `number` classes are left if many are excluded.
                kept = [j for j, c in enumerate(ids[i]) if c >= 0]
                yield Prediction(
                    shown,
                    tuple(model.names[ids[i][j]] for j in kept),
                    None if chances is None else tuple(chances[i][j] for j in kept),
                    None if errors is None else errors[i],
                )
