"""Answers, as batch are read."""

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

_AT_ONCE = 256
_TUNED = 512  # examples that an index is tuned on


@dataclass(frozen=True)
class Prediction:
    """The best classes of one example, best first.

    Args:
        shown: what was asked.
        names: of the classes.
        probabilities: of each; None where none were asked for.
        error: of their logarithms: half the width of an interval that holds the exact one in 95 cases of 100; None
            where they are exact.
    """

    shown: str
    names: tuple[str, ...]
    probabilities: tuple[float, ...] | None
    error: float | None


@torch.no_grad()
def open_index(model: Model, source: Source, folder: Path, *, k: int, recall: float) -> tuple[Index, bool]:
    """The index of a model's classes that its folder holds, or one made now, and kept there.

    Args:
        model: whose classes.
        source: of the examples that it is tuned on, the first few.
        folder: of the model.
        k, recall: as of `Index.build`.

    Returns:
        The index, and whether it was made now.

    Raises:
        ImportError: faiss is not installed.
        UserError: there are too few examples to tune it on; it cannot be kept.
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
            pass  # of another model, or damaged: another is made
    rows = []
    with eval_mode(model):
        for batch in model.spec.task.predict_batches(model.spec, source, size=_AT_ONCE, with_seen=False):
            rows.append(model.encoder(moved(batch.inputs, model.device)))
            if sum(map(len, rows)) >= _TUNED:
                break
    if sum(map(len, rows)) < 2:
        raise UserError(f"`data` must hold at least 2 examples to tune an index on, got {source.data}")
    index = Index.build(model.head, torch.cat(rows), k=number, recall=recall)
    state = index.state()
    storage.save(path, {"tensors": dict(state.tensors), "about": dict(state.about)}, content_type="index")
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
    """The most probable classes of each example, one after the other.

    Args:
        model: who answers.
        source: what is asked.
        number: of classes for each, at most as many as there are.
        index: where to look for them; None: among all classes, exactly.
        probabilities: "exact", "estimated" or "none", see `inference.top`.
        allow_seen: whether classes that an example has already may be answers; None: as fits the kind of data.
        draws: of an estimate.
        seed: of those draws.
    """
    generator = torch.Generator(model.device).manual_seed(seed)
    number = min(number, len(model.names))
    task = model.spec.task
    allow_seen = task.allows_seen if allow_seen is None else allow_seen
    with eval_mode(model):
        for batch in task.predict_batches(model.spec, source, size=_AT_ONCE, with_seen=not allow_seen):
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
                # Fewer are left where many are excluded.
                kept = [j for j, c in enumerate(ids[i]) if c >= 0]
                yield Prediction(
                    shown,
                    tuple(model.names[ids[i][j]] for j in kept),
                    None if chances is None else tuple(chances[i][j] for j in kept),
                    None if errors is None else errors[i],
                )
