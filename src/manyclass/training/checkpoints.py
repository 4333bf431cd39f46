"""Checkpoints of a training on disk."""

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from manyclass import _check, storage
from manyclass.errors import NotSavedWarning, UserError, notify
from manyclass.training.callback import Callback
from manyclass.training.history import History, Record, cost
from manyclass.training.ranks import ALONE, Ranks

if TYPE_CHECKING:
    from manyclass.training.loop import Training

CheckpointName = Literal["newest", "previous", "best"]

_CONTENT_TYPES = {"newest": "checkpoint", "previous": "checkpoint", "best": "model"}


class Checkpoints(Callback):
    """A callback that saves the training every so often, and the model after each new best evaluation.

    The folder gets three files: `newest.safetensors`, from which a training is resumed; `previous.safetensors`, the
    one before; and `best.safetensors`, the best model so far. Files are replaced by atomic renames, so a killed
    process loses only the time since the newest. During a save there are four files for a moment.

    A save that fails during the training is a warning, and is retried when the next one is due; for the best model,
    after the next evaluation that beats the saved one. At the end it is an error. A training that fails leaves its
    last checkpoint as it is.

    Args:
        folder: folder of the files, made if needed. Files of other trainings in it are overwritten.
        state: returns, for a training, all that is needed to resume it: the state dicts of encoder, head, optimisers,
            schedulers and the training.
        model: returns all that predictions need.
        every: seconds between two checkpoints.
        by: the criterion of the best model: "loss", or the name of a metric, larger is better.
        ranks: the processes that train together: all call `state` and `model`, and the first one saves.

    Raises:
        UserError: the folder cannot be made, or the last checkpoint cannot be saved at the end of the training.
        ValueError: `every` is negative.

    Example:
        >>> import tempfile, torch
        >>> from manyclass import ClassHead
        >>> from manyclass.training import Training
        >>> folder = Path(tempfile.mkdtemp())
        >>> def setting(steps):
        ...     head = ClassHead(8, 500)
        ...     optimizer = torch.optim.Adam(head.parameters())
        ...     def state(training):
        ...         parts = {"head": head, "optimizer": optimizer, "training": training}
        ...         return {name: part.state_dict() for name, part in parts.items()}
        ...     checkpoints = Checkpoints(folder, state, model=head.state_dict)
        ...     batches = [(torch.randn(16, 8), torch.arange(16))]
        ...     return checkpoints, Training(head, batches, optimizer, steps=steps, callbacks=[checkpoints])
        >>> setting(3)[1].run().progress.step
        3
        >>> checkpoints, training = setting(5)
        >>> training.load_state_dict(checkpoints.resume()["training"])
        >>> training.progress.step
        3
    """

    def __init__(
        self,
        folder: Path | str,
        state: "Callable[[Training], Mapping[str, object]]",
        *,
        model: Callable[[], Mapping[str, object]],
        every: float = 60.0,
        by: str = "loss",
        ranks: Ranks = ALONE,
    ) -> None:
        self._ranks = ranks
        self._folder = folder = Path(folder)
        self._state, self._model = state, model
        self._every, self._by = _check.number("every", every, low=0), by
        # Cost of the best model saved; checkpoints hold it, so that a resumed training does not save a worse model.
        self._best_cost = math.inf
        self._unsaved_best: Record | None = None
        self._saved_at = time.monotonic()
        self._warned = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the folder {folder}: {error.strerror}") from None

    def resume(self, checkpoint: Literal["newest", "previous"] = "newest") -> dict[str, Any]:
        """Return the state that `state` gave, to be loaded into the parts of this training.

        Raises:
            UserError: the checkpoint cannot be read, see `load_checkpoint`.
        """
        content, _ = _read(self._folder, checkpoint)
        self._best_cost = content["best_cost"]
        return content["state"]  # type: ignore[no-any-return]

    def on_record(self, training: "Training", record: Record) -> None:
        """Save the model if this evaluation is the best."""
        if record.held_out_loss is not None and cost(record, self._by) < self._best_cost:
            self._unsaved_best = record
            self._try(self._save_best)

    def on_step(self, training: "Training") -> None:
        """Save a checkpoint if one is due."""
        if self._ranks.of_first(time.monotonic() - self._saved_at) >= self._every:
            self._try(lambda: self._save_newest(training))
            # The interval starts after the save: if saving takes long, there must be time left to train.
            self._saved_at = time.monotonic()

    def on_end(self, training: "Training", history: History) -> None:
        """Save the last checkpoint, unless the training failed."""
        if history.stopped == "failed":
            return
        # Without a step since, the model is still the best one, whose save failed or was cut short by Ctrl-C.
        if self._unsaved_best is not None and self._unsaved_best.step == history.progress.step:
            self._save_best()
        self._save_newest(training)

    def _save_best(self) -> None:
        if self._unsaved_best is not None:
            path, content = _path(self._folder, "best"), self._model()
            self._ranks.by_first(lambda: storage.save(path, content, content_type=_CONTENT_TYPES["best"]))
            self._best_cost, self._unsaved_best = cost(self._unsaved_best, self._by), None

    def _save_newest(self, training: "Training") -> None:
        content = {"state": self._state(training), "best_cost": self._best_cost}
        path, previous = _path(self._folder, "newest"), _path(self._folder, "previous")
        self._ranks.by_first(lambda: storage.save(path, content, content_type=_CONTENT_TYPES["newest"], keep=previous))

    def _try(self, save: Callable[[], None]) -> None:
        try:
            save()
        except UserError as error:
            if not self._warned:
                notify(f"{error}. Training goes on and will try again", NotSavedWarning)
            self._warned = True
        else:
            self._warned = False


def load_checkpoint(folder: Path | str, checkpoint: CheckpointName = "newest") -> tuple[dict[str, Any], Path]:
    """Return the content that `Checkpoints` saved, and its file.

    Args:
        folder: folder of the checkpoints.
        checkpoint: "newest" or "previous": the value that `state` returned; "best": the value that `model` returned.

    Raises:
        UserError: the file cannot be read; the message gives the reason and names a file that can be read.
    """
    content, path = _read(Path(folder), checkpoint)
    return content if checkpoint == "best" else content["state"], path


def _read(folder: Path, checkpoint: CheckpointName) -> tuple[dict[str, Any], Path]:
    _check.choice("checkpoint", checkpoint, tuple(_CONTENT_TYPES))
    path = _path(folder, checkpoint)
    try:
        content = storage.load(path, content_type=_CONTENT_TYPES[checkpoint])
        state, best_cost = content.get("state"), content.get("best_cost")
        # No cost is below NaN, so no later model would be saved as the best.
        known = isinstance(state, dict) and isinstance(best_cost, float) and not math.isnan(best_cost)
        if checkpoint != "best" and not known:
            raise UserError(f"cannot read {path}: it is damaged: it has no state of a training")
    except UserError as error:
        raise UserError(f"{error}; {_offer(folder, checkpoint)}") from None
    return content, path


def _offer(folder: Path, refused: CheckpointName) -> str:
    for checkpoint, content_type in _CONTENT_TYPES.items():
        path = _path(folder, checkpoint)
        if checkpoint != refused:
            try:
                storage.check(path, content_type=content_type)
            except UserError:
                continue
            alone = ", though it is the model alone" if checkpoint == "best" else ""
            return f"{path} can be read{alone}: `checkpoint` may be {checkpoint!r}"
    return f"nothing else in {folder} can be read"


def _path(folder: Path, checkpoint: str) -> Path:
    return folder / f"{checkpoint}.safetensors"
