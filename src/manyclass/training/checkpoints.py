"""What a training leaves on disk while it runs."""

import math
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from manyclass import _check, storage
from manyclass.errors import NotSavedWarning, UserError
from manyclass.training.callback import Callback
from manyclass.training.history import History, Progress, Record, cost

Which = Literal["newest", "previous", "best"]

_KINDS = {"newest": "checkpoint", "previous": "checkpoint", "best": "model"}


class Checkpoints(Callback):
    """Saves a training now and then, and the model whenever it is the best so far.

    The folder gets three files: `newest.safetensors`, from which a training goes on; `previous.safetensors`, the one
    before; and `best.safetensors`, the best model by then. Each is at every moment a whole file, so a
    process that is killed loses the time since the newest and nothing else. The file before stays until the new one is
    in place, so for a moment there are four.

    A save that fails while the training runs is a warning, and is tried again when the next is due; of the best model,
    when an evaluation is better than the one that was saved. At the end it is an error. A training that fails leaves
    its last checkpoint as it is.

    Args:
        folder: where to; it is made. What other trainings left there is overwritten.
        state: gives all that another training needs to go on: the state_dicts of encoder, head, optimisers, schedulers
            and `Training`.
        model: gives what predictions need.
        every: seconds between two checkpoints.
        by: what the best model is the best by: "loss", or the name of a metric that is to be great.

    Raises:
        UserError: the folder cannot be made. When the training ends: the last checkpoint cannot be saved.
        ValueError: `every` is negative.

    Example:
        >>> import tempfile, torch
        >>> from manyclass import ClassHead
        >>> from manyclass.training import Training
        >>> folder = Path(tempfile.mkdtemp())
        >>> def setting(steps):
        ...     head = ClassHead(8, 500)
        ...     optimizer = torch.optim.Adam(head.parameters())
        ...     parts = {"head": head, "optimizer": optimizer}
        ...     checkpoints = Checkpoints(
        ...         folder,
        ...         lambda: {name: part.state_dict() for name, part in parts.items()},
        ...         model=head.state_dict,
        ...     )
        ...     batches = [(torch.randn(16, 8), torch.arange(16))]
        ...     parts["training"] = Training(head, batches, optimizer, steps=steps, callbacks=[checkpoints])
        ...     return parts, checkpoints
        >>> setting(3)[0]["training"].run().progress.step
        3
        >>> parts, checkpoints = setting(5)
        >>> for name, state in checkpoints.resume().items():
        ...     parts[name].load_state_dict(state)
        <All keys matched successfully>
        >>> parts["training"].progress.step
        3
    """

    def __init__(
        self,
        folder: Path | str,
        state: Callable[[], Mapping[str, object]],
        *,
        model: Callable[[], Mapping[str, object]],
        every: float = 60.0,
        by: str = "loss",
    ) -> None:
        self._folder = folder = Path(folder)
        self._state, self._model = state, model
        self._every, self._by = _check.number("every", every, low=0), by
        # Of the model that was saved last; with the newest checkpoint, lest a worse one follow when it is resumed.
        self._best_cost = math.inf
        self._owed: Record | None = None
        self._saved_at = time.monotonic()
        self._warned = False
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot make the folder {folder}: {error.strerror}") from None

    def resume(self, which: Literal["newest", "previous"] = "newest") -> dict[str, Any]:
        """What `state` gave, to be loaded into the parts of this training.

        Raises:
            UserError: as `load_checkpoint`.
        """
        content, _ = _read(self._folder, which)
        self._best_cost = content["best_cost"]
        state: dict[str, Any] = content["state"]
        return state

    def on_record(self, record: Record) -> None:
        if record.held_out_loss is not None and cost(record, self._by) < self._best_cost:
            self._owed = record
            self._try(self._save_best)

    def on_step(self, progress: Progress) -> None:
        if time.monotonic() - self._saved_at >= self._every:
            self._try(self._save_newest)
            # Not from before: where saving takes long, time must be left to train.
            self._saved_at = time.monotonic()

    def on_end(self, history: History) -> None:
        if history.stopped == "failed":
            return
        # If there was no step since, the model is still the one that could not be saved, or was while Ctrl-C came.
        if self._owed is not None and self._owed.step == history.progress.step:
            self._save_best()
        self._save_newest()

    def _save_best(self) -> None:
        if self._owed is not None:
            storage.save(_path(self._folder, "best"), self._model(), content_type=_KINDS["best"])
            self._best_cost, self._owed = cost(self._owed, self._by), None

    def _save_newest(self) -> None:
        content = {"state": self._state(), "best_cost": self._best_cost}
        previous = _path(self._folder, "previous")
        storage.save(_path(self._folder, "newest"), content, content_type=_KINDS["newest"], keep=previous)

    def _try(self, save: Callable[[], None]) -> None:
        try:
            save()
        except UserError as error:
            if not self._warned:
                warnings.warn(f"{error}. Training goes on and will try again", NotSavedWarning, stacklevel=2)
            self._warned = True
        else:
            self._warned = False


def load_checkpoint(folder: Path | str, which: Which = "newest") -> tuple[dict[str, Any], Path]:
    """What `Checkpoints` saved, and the file it is from.

    Args:
        folder: of the checkpoints.
        which: "newest" or "previous", for what `state` gave; "best", for what `model` gave.

    Raises:
        UserError: the file is refused; the message says why, and which of the others can be read.
    """
    content, path = _read(Path(folder), which)
    return content if which == "best" else content["state"], path


def _read(folder: Path, which: Which) -> tuple[dict[str, Any], Path]:
    _check.choice("which", which, tuple(_KINDS))
    path = _path(folder, which)
    try:
        content = storage.load(path, content_type=_KINDS[which])
        state, best_cost = content.get("state"), content.get("best_cost")
        if which != "best" and not (isinstance(state, dict) and isinstance(best_cost, float)):
            raise UserError(f"cannot read {path}: it is damaged: it has no state of a training")
    except UserError as error:
        raise UserError(f"{error}; {_offer(folder, which)}") from None
    return content, path


def _offer(folder: Path, refused: Which) -> str:
    for which, kind in _KINDS.items():
        path = _path(folder, which)
        if which != refused:
            try:
                storage.check(path, content_type=kind)
            except UserError:
                continue
            alone = ", though it is the model alone" if which == "best" else ""
            return f"{path} can be read{alone}: `which` may be {which!r}"
    return f"nothing else in {folder} can be read"


def _path(folder: Path, which: str) -> Path:
    return folder / f"{which}.safetensors"
