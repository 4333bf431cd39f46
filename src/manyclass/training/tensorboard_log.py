"""A log of records for TensorBoard."""

from pathlib import Path
from typing import TYPE_CHECKING

from manyclass.training.callback import Callback
from manyclass.training.history import History, Record

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from manyclass.training.loop import Training


class TensorBoardLog(Callback):
    """A callback that writes each record as scalars for `tensorboard --logdir`.

    Args:
        folder: folder of the event files, made at the first record.

    Raises:
        ImportError: tensorboard is not installed.
    """

    def __init__(self, folder: Path | str) -> None:
        try:
            import tensorboard  # noqa: F401
        except ImportError as error:
            raise ImportError("a log for TensorBoard needs it: pip install 'manyclass[tensorboard]'") from error
        self._folder = Path(folder)
        self._writer: SummaryWriter | None = None

    def on_record(self, training: "Training", record: Record) -> None:
        """Write the scalars of a record."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            # A training resumed from an older checkpoint repeats steps, so their old events are purged.
            self._writer = SummaryWriter(self._folder, purge_step=record.step)
        values = {
            "loss/training": record.loss,
            "loss/held_out": record.held_out_loss,
            "error/rmse_log_z": record.rmse_log_z,
            **{f"held_out/{name}": value for name, value in record.metrics.items()},
        }
        for name, value in values.items():
            if value is not None:
                self._writer.add_scalar(name, value, record.step)
        self._writer.flush()

    def on_end(self, training: "Training", history: History) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None
