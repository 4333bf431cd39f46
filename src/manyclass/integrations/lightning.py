"""Draws that repeat in a resumed Lightning training, and modules with sparse gradients under its DDP."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from numpy.random import SeedSequence

from manyclass.parallel import prepare


class SampledTraining(Callback):  # type: ignore[misc]
    """A callback that lets a training resume bit for bit, and prepares its module for DistributedDataParallel.

    Lightning's checkpoints hold no RNG state, so a resumed training would draw other classes than an uninterrupted one.
    This callback seeds torch before each training batch, by a seed that checkpoints hold, the rank, the epoch and the
    number of the batch. Ranks then draw different classes, and dropout repeats too. A sampler that decides by measured
    times, as the default one does in its first steps, may decide differently in another run.

    With `DDPStrategy` it calls `manyclass.parallel.prepare` on the module, which sparse gradients need. A module that
    makes its head in `setup` or `configure_model` calls `prepare` there itself.

    The order of the examples is left to the data loader. A sampler with `set_epoch`, such as torch's
    `DistributedSampler`, shuffles alike in a resumed training. A resume within an epoch needs a loader with
    `state_dict`.

    Example:
        >>> trainer = Trainer(callbacks=[SampledTraining()], logger=False, enable_checkpointing=False)
    """

    def __init__(self) -> None:
        self._seed: int | None = None
        self._loaded: int | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prepare the module for DDP."""
        if stage == "fit" and isinstance(trainer.strategy, DDPStrategy):
            prepare(pl_module.to(trainer.strategy.root_device))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take the seed of the checkpoint, or else torch's of the first rank."""
        seed = torch.initial_seed() if self._loaded is None else self._loaded
        self._seed, self._loaded = trainer.strategy.broadcast(seed), None

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Seed torch for this batch."""
        words = [self._seed, trainer.global_rank, trainer.current_epoch, batch_idx]
        seed = int(SeedSequence(words).generate_state(1, "uint64")[0])
        # torch.manual_seed takes ten times as long, since it seeds devices that are not in use.
        torch.default_generator.manual_seed(seed)
        if (device := pl_module.device).type != "cpu":
            torch.get_device_module(device).manual_seed(seed)

    def state_dict(self) -> dict[str, Any]:
        """Return the seed."""
        return {"seed": self._seed}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Use the seed of a checkpoint in the next training."""
        self._loaded = state_dict["seed"]
